"""Options as frozen dataclasses: units in the names, the reason beside each default, checked when made."""

from __future__ import annotations

import operator
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, cast

from rr_dataset.errors import InvalidInputError

MIB = 1 << 20
ON_FULL = ("block", "drop", "raise")
FOREVER_S = 1e9  # longer than any wait, and threading takes it, which it does not infinity
RUN_ID_BYTES = 256  # every row and every slab has it
MAX_META_BYTES = 1_000_000  # what describes a put, as JSON: so the row of its drop fits a control slab
COMPRESSIONS = ("none", "lz4", "zstd")


def _default_run_id() -> str:
    """`RR_RUN_ID`, so that every rank of a job shares it, else a fresh uuid."""
    return os.environ.get("RR_RUN_ID") or str(uuid.uuid4())


@dataclass(frozen=True)
class WriterOptions:
    """How a `RoutingWriter` buffers and publishes. Checked when made: InvalidInputError names what is wrong.

    spool_bytes: shared memory, or disk, that may hold what is not yet durable.
    slab_bytes: of its files, which are sealed, published and given up one at a time; at most half of spool_bytes.
    spool_dir: where they lie; None for /dev/shm, or the temporary folder where that has no room.
    max_age_s: after so long a slab is sealed that is not full, so that its records become visible.
    idle_seal_s: the same while the worker has nothing to do.
    on_full: what `put` does when the spool is full: "block" waits for block_timeout_s, once an outage, and then drops the record
        with a drop row; "drop" does so at once; "raise" raises SpoolFullError.
    spool_sync: also survive a crash of the host, for a spool_dir on a disk; `put` waits for that disk.
    compression: of what is published, "none", "lz4" or "zstd"; compaction chooses its own.
    run_id: stored with each row, at most 256 bytes of UTF-8; by default RR_RUN_ID, else a fresh uuid.
    worker_nice: niceness of the worker process, 0 to 19.
    drain_timeout_s: the longest that `close` waits for what is not yet durable.
    start_timeout_s: the longest that opening waits for the worker process.
    storage_options: of the dataset's store, as in `open_dataset`.
    """

    spool_bytes: int = 512 * MIB  # a minute of 30k-token requests at 40 a minute
    slab_bytes: int = 64 * MIB  # several records a slab, eight slabs in turn
    spool_dir: str | None = None  # None: /dev/shm, or the temporary folder where that has no room
    max_age_s: float = 1.0  # a busy worker still makes a record visible within about a second
    idle_seal_s: float = 0.05  # an idle worker waits only for what arrives together
    on_full: str = "block"  # short stalls cost time, not records
    block_timeout_s: float = 0.1  # once per outage: below what a serving loop's watchdog notices
    spool_sync: bool = False  # True: msync and payload checksum in the engine, for a spool that outlives its host
    compression: str = "none"  # raw reads are several times faster; compaction compresses better
    run_id: str = field(default_factory=_default_run_id)
    worker_nice: int = 5  # serving goes first
    drain_timeout_s: float = 20.0  # below the 30 s that orchestrators give before SIGKILL
    start_timeout_s: float = 30.0  # importing pyarrow from a cold network disk
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # may hold secrets

    def __post_init__(self) -> None:
        spool_dir: object = self.spool_dir
        if isinstance(spool_dir, os.PathLike):
            spool_dir = os.fspath(spool_dir)  # paths are welcome
            object.__setattr__(self, "spool_dir", spool_dir)
        _require(spool_dir is None or _is_text(spool_dir), "spool_dir", spool_dir, "a directory, or None")
        for name in ("spool_bytes", "slab_bytes"):
            value = getattr(self, name)
            _require(_is_whole(value) and value >= MIB, name, value, "a whole number, at least 1 MiB")
        _require(self.spool_bytes >= 2 * self.slab_bytes, "spool_bytes", self.spool_bytes, "at least two slabs")
        for name in ("max_age_s", "idle_seal_s", "block_timeout_s", "drain_timeout_s", "start_timeout_s"):
            _require(
                check_seconds(name, getattr(self, name)) < FOREVER_S, name, getattr(self, name), "zero or more seconds"
            )
        _require(self.on_full in ON_FULL, "on_full", self.on_full, f"one of {', '.join(ON_FULL)}")
        _require(isinstance(self.spool_sync, bool), "spool_sync", self.spool_sync, "True or False")
        _require(self.compression in COMPRESSIONS, "compression", self.compression, f"one of {', '.join(COMPRESSIONS)}")
        nice = _is_whole(self.worker_nice) and 0 <= self.worker_nice <= 19
        _require(nice, "worker_nice", self.worker_nice, "0 to 19")
        _require(_is_text(self.run_id), "run_id", self.run_id, "a well-formed text that is not empty")
        size = len(self.run_id.encode())
        expected = f"at most {RUN_ID_BYTES} bytes of UTF-8, not {size}"
        _require(size <= RUN_ID_BYTES, "run_id", f"{self.run_id[:32]}...", expected)
        if not isinstance(self.storage_options, Mapping | None):  # which may hold secrets
            raise InvalidInputError(
                f"storage_options=...: expected a mapping, not a {type(self.storage_options).__name__}"
            )


def check_seconds(name: str, value: object) -> float:
    """A time-out as `threading` takes it, at most FOREVER_S. Raises InvalidInputError for what is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
        return min(float(value), FOREVER_S)
    raise InvalidInputError(f"{name}={value!r}: expected zero or more seconds")


def check_whole(name: str, value: object, at_least: int) -> int:
    """A whole number of whatever type counts as one. Raises InvalidInputError for what is none, or too small."""
    try:
        number = operator.index(cast("SupportsIndex", value))
    except (TypeError, ValueError, RuntimeError):  # of a tensor with several
        number = at_least - 1
    _require(number >= at_least, name, value, f"a whole number, {at_least} or more")
    return number


def parse_compression(text: str) -> tuple[str, int | None]:
    """`zstd:3` -> ("zstd", 3), `lz4` -> ("lz4", None). Raises InvalidInputError."""
    name, colon, level = str(text).partition(":")
    known = name in COMPRESSIONS and (not colon or (name == "zstd" and level.isdecimal() and 1 <= int(level) <= 22))
    _require(
        known, "compression", text, f"one of {', '.join(COMPRESSIONS)}, with zstd a level too, as zstd:3 (1 to 22)"
    )
    return name, int(level) if colon else None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and len(value.encode()) > 0
    except UnicodeEncodeError:
        return False


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidInputError(f"{name}={value!r}: expected {expected}")
