"""The worker process: `python -m rr_dataset.worker <channel fd> <engine pid>`, started by the supervisor.

It opens the dataset, says hello with the dataset's format, publishes what earlier writers of it left in dead spools,
then publishes each sealed slab of its own spool, oldest first, and marks it published. A slab that the storage refuses
stays sealed and is tried again with growing pauses. When the engine is gone it publishes what is committed, removes the
spool and ends; on SIGTERM it ends after the slabs that are sealed; SIGINT is the engine's business.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rr_dataset.clock import wall_ms
from rr_dataset.dataset import create_dataset
from rr_dataset.description import read_format
from rr_dataset.errors import (
    CorruptSpoolError,
    DatasetNotFoundError,
    RoutingDatasetError,
    SpecMismatchError,
    StorageError,
)
from rr_dataset.layout import DatasetFormat
from rr_dataset.publish import PUBLISH_THREADS, publish_slab
from rr_dataset.record import RoutingSpec, Row, RowData
from rr_dataset.slab import (
    ACTIVE,
    ASIDE,
    PUBLISHED,
    PUT,
    SEALED,
    Entry,
    SlabContents,
    array_offsets,
    read_slab,
    read_state,
    write_state,
)
from rr_dataset.storage import Storage, open_storage
from rr_dataset.supervisor import Channel
from rr_dataset.tombstones import TombstoneCache

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0  # between attempts while the storage fails
UNPUBLISHED = (SEALED, ACTIVE)  # the active ones are the engine's as long as it lives

_log = logging.getLogger("rr_dataset.worker")


@dataclass(frozen=True)
class Published:
    """What became of one slab."""

    records: int
    bytes: int
    torn: int  # entries that no put had finished, dropped
    set_aside: bool


class Publisher:
    """Publishes the slabs of spool directories into one dataset."""

    def __init__(self, storage: Storage, dataset: DatasetFormat, compression: str) -> None:
        self._storage, self.dataset, self._compression = storage, dataset, compression
        self._tombstones = TombstoneCache(dataset.keys)
        self._pool = ThreadPoolExecutor(PUBLISH_THREADS, thread_name_prefix="publish")

    def publish(self, slab: Path) -> Published:
        """Publish what is committed in a slab, and mark it. Idempotent.

        Raises StorageError, after which it can be called again, or CorruptSpoolError.
        """
        with _mapped(slab) as memory:
            contents = read_slab(memory, slab)
            if contents.identity["dataset"] != self.dataset.uuid:
                raise CorruptSpoolError(f"{slab} belongs to dataset {contents.identity['uri']}")
            report = publish_slab(
                self._storage,
                self.dataset,
                writer=contents.identity["writer"],
                seq=contents.seq,
                rows=[_row_data(entry, contents, self.dataset) for entry in contents.entries],
                cache=self._tombstones,
                compression=self._compression,
                pool=self._pool,
                now_ms=wall_ms,
            )
        write_state(slab, ASIDE if report.set_aside else PUBLISHED)
        return Published(report.records, report.bytes, contents.torn, report.set_aside)


def _row_data(entry: Entry, slab: SlabContents, dataset: DatasetFormat) -> RowData:
    meta, spec = entry.meta, dataset.spec
    key = dataset.keys.parse(entry.request_id)
    layers = tuple(meta.get("layers", spec.moe_layers)) if entry.kind == PUT else ()
    row = Row(
        record_id=f"{entry.t_submit:016x}-{slab.identity['writer']}",
        request_id=entry.request_id,
        components=key.components,
        choice=key.choice,
        t_submit=entry.t_submit,
        token_start=meta.get("start", 0),
        num_tokens=entry.num_tokens,
        part=meta.get("part", False),
        status=meta["status"],
        run_id=slab.identity["run_id"],
        layers=layers,
        reason=meta.get("reason"),
        missing=tuple((start, stop) for start, stop in meta.get("missing", ())),
        weight_version=meta.get("weight"),
        weight_spans=tuple((start, stop, version) for start, stop, version in meta.get("spans", ())),
        producer=slab.identity["producer"],
        tags=meta.get("tags", {}),
        has_token_ids=entry.kind == PUT and meta.get("token_ids", False),
        has_logprobs=entry.kind == PUT and meta.get("logprobs", False),
    )
    if entry.kind != PUT:
        return RowData(row)
    tokens, dtype = entry.num_tokens, np.dtype(spec.dtype)
    size = len(layers) * tokens * spec.top_k * dtype.itemsize
    ids_at, logprobs_at, end = array_offsets(size, tokens, token_ids=row.has_token_ids, logprobs=row.has_logprobs)
    if end > len(entry.payload):
        raise CorruptSpoolError(f"record {entry.request_id!r} needs {end} bytes, its entry has {len(entry.payload)}")
    ids = entry.payload[:size].view(dtype)
    shape = (tokens, len(layers)) if entry.tokens_first else (len(layers), tokens)
    routed_experts = ids.reshape(*shape, spec.top_k)
    return RowData(
        row,
        routed_experts.transpose(1, 0, 2) if entry.tokens_first else routed_experts,
        entry.payload[ids_at:logprobs_at].view(np.int32) if row.has_token_ids else None,
        entry.payload[logprobs_at:end].view(np.float32) if row.has_logprobs else None,
    )


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        yield memoryview(memory)
    finally:
        with suppress(BufferError):  # an array of a record is still referred to: the map goes with it
            memory.close()


def slabs_in(directory: Path, states: Sequence[int]) -> list[Path]:
    """The slabs of a spool that are in one of these states, oldest first.

    Raises CorruptSpoolError when one of its files is no slab of this version.
    """
    found = []
    for path in directory.glob("*.slab"):
        with suppress(FileNotFoundError):  # the engine has just given it up
            seq, state = read_state(path)
            if state in states:
                found.append((seq, path))
    return [path for _, path in sorted(found)]


def adopt(publisher: Publisher, folder: Path) -> None:
    """Publish and remove the dead spools in a folder of spools.

    What belongs to living processes or to other datasets, or cannot be read, is left; the log names it.
    """
    for directory in sorted(folder.glob("[0-9a-f]" * 16)):
        with _lock_of_the_dead(directory) as dead:
            if dead:
                try:
                    _empty(publisher, directory)
                except Exception as error:  # noqa: BLE001 - rubbish of whatever kind does not keep this writer from working
                    _log.warning("dead spool %s is left as it is: %r", directory, error)


def _empty(publisher: Publisher, directory: Path) -> None:
    for slab in slabs_in(directory, UNPUBLISHED):
        done = publisher.publish(slab)
        _log.info("recovered %d records of %s, %d torn entries dropped", done.records, slab, done.torn)
    if not slabs_in(directory, (*UNPUBLISHED, ASIDE)):
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _lock_of_the_dead(directory: Path) -> Iterator[bool]:
    """Whether nobody lives in this spool; if so it is locked meanwhile."""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


class Worker:
    """The loop: wait for news, publish, report."""

    def __init__(self, channel: Channel, engine_pid: int, start: Mapping[str, Any], publisher: Publisher) -> None:
        self._channel, self._publisher = channel, publisher
        self._spool = Path(start["spool"])
        self._drain_timeout_s: float = start["drain_timeout_s"]
        self._engine_gone = self._stop = False
        self._pause_s = 0.0
        self._trouble: Mapping[str, str] | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(wake_r, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._engine = _pidfd(engine_pid)
        if self._engine is not None:
            self._selector.register(self._engine, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the engine is gone, or SIGTERM."""
        while not (self._engine_gone or self._stop):
            self._publish((SEALED,))
            self._wait()
        deadline = time.monotonic() + self._drain_timeout_s
        states = UNPUBLISHED if self._engine_gone else (SEALED,)
        while not self._publish(states) and time.monotonic() < deadline:
            time.sleep(self._pause_s)
        if self._engine_gone and not slabs_in(self._spool, (*UNPUBLISHED, ASIDE)):
            shutil.rmtree(self._spool, ignore_errors=True)

    def _publish(self, states: Sequence[int]) -> bool:
        """Publish what is there; whether all of it went well."""
        failed = False
        for slab in slabs_in(self._spool, states):
            try:
                self._publisher.publish(slab)
            except Exception as error:  # noqa: BLE001 - whatever it is, the records wait in their slab
                trouble = _describe(error)
                if trouble != self._trouble:  # once per kind: the log lies in the spool
                    _log.warning("cannot publish %s", slab, exc_info=error)
                self._trouble = trouble
                self._channel.send("trouble", **trouble)
                failed = True
                if isinstance(error, StorageError):  # the other slabs would fare the same
                    break
            else:
                self._channel.send("published")
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LAST_PAUSE_S) if failed else 0.0
        return not failed

    def _wait(self) -> None:
        """For news; after a failure for the end of the pause, whatever the news."""
        until = time.monotonic() + self._pause_s
        while not (self._engine_gone or self._stop):
            ready = {
                key.fileobj for key, _ in self._selector.select(until - time.monotonic() if self._pause_s else None)
            }
            gone = self._engine in ready if self._engine is not None else False
            if self._channel in ready and self._channel.receive() is None:
                gone = True
            self._engine_gone = gone
            if time.monotonic() >= until:
                return

    def _on_sigterm(self, *_: object) -> None:
        self._stop = True


def _pidfd(engine_pid: int) -> int | None:
    """A descriptor that is readable when the engine is dead: a forked child of it may keep the channel open."""
    try:
        return os.pidfd_open(engine_pid)
    except (OSError, AttributeError):  # Linux before 5.3, or dead already: the channel must do
        return None


def _describe(error: BaseException) -> dict[str, str]:
    return {"error": type(error).__name__, "text": str(error)}


def _open(start: Mapping[str, Any]) -> Publisher:
    options = start["storage_options"]
    storage = open_storage(start["uri"], options)
    if start["format"] is not None:  # a restart: an outage must not keep it from starting
        return Publisher(storage, DatasetFormat.from_json(start["format"].encode()), start["compression"])
    spec = None if start["create"] is None else RoutingSpec.from_dict(start["create"])
    try:
        dataset = read_format(storage)
    except DatasetNotFoundError:
        if spec is None:
            raise
        create_dataset(start["uri"], spec, storage_options=options)
        dataset = read_format(storage)
    if spec is not None and spec != dataset.spec:
        raise SpecMismatchError(
            f"{start['uri']} exists with {dataset.spec}, not with create={spec}: leave create out, or use another place"
        )
    return Publisher(storage, dataset, start["compression"])


def main(channel_fd: int, engine_pid: int) -> None:
    """Run the worker of the engine behind the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    channel = Channel(socket.socket(fileno=channel_fd))
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.select()
    messages = channel.receive()
    if not messages:
        return
    start = messages[0]
    os.nice(start["nice"])
    try:
        publisher = _open(start)
    except RoutingDatasetError as error:
        _log.error("cannot open the dataset: %s", error)
        channel.send("trouble", **_describe(error))
        sys.exit(1)
    channel.send("hello", format=publisher.dataset.to_json().decode())
    adopt(publisher, Path(start["spool"]).parent)
    Worker(channel, engine_pid, start, publisher).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
