"""`rr.maintain`: retention, garbage collection and compaction, once or again and again. Several at once are safe.

Retention deletes what is older than the dataset's `ttl_s`, and the oldest records beyond its `max_bytes`. Both are one
tombstone over everything up to a moment. The moment moves in steps of a 256th, so that a dataset which is always full
does not gather a tombstone a minute.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rr_dataset.at_once import answer_each
from rr_dataset.clock import COUNTER_MAX, millis, pack, wall_ms
from rr_dataset.compact import Progress, compact_with
from rr_dataset.compact_plan import TARGET_BYTES
from rr_dataset.compactor import Compactor, CompactReport
from rr_dataset.delete import DeleteReport, remove_covered
from rr_dataset.errors import StorageError
from rr_dataset.garbage import Collector, GarbageReport
from rr_dataset.layout import DatasetFormat
from rr_dataset.lookup import Lookup
from rr_dataset.snapshot import Listed
from rr_dataset.tombstones import Tombstone, TombstoneCache, relist_tombstones, write_tombstones

STEPS = 256  # of ttl_s and max_bytes: how much later or more retention may delete


@dataclass(frozen=True)
class MaintainReport:
    """What one pass did."""

    deleted: DeleteReport = field(default_factory=DeleteReport)
    garbage: GarbageReport = field(default_factory=GarbageReport)
    compacted: CompactReport = field(default_factory=CompactReport)
    problem: str = ""  # why it was cut short


def maintain(
    uri: str | os.PathLike[str],
    every_s: float | None = None,
    compression: str = "zstd:3",
    jobs: int = 1,
    target_bytes: int = TARGET_BYTES,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Iterator[MaintainReport]:
    """Delete what is too old or too much, collect garbage, compact: one report a pass. It runs as it is iterated over.

    every_s: seconds from the start of one pass to the start of the next, for ever; None: one pass.
    compression, jobs, target_bytes, progress: as for `compact`.
    stop: ends it after the present pass once it is set.

    How old and how much: `ttl_s` and `max_bytes` of the dataset; files that wait for their removal do not count. Any number
    may run at once, on any hosts, and be killed at any point. With `every_s` a pass that the storage refuses is reported, and
    the next one tries again; else it raises StorageError. Raises DatasetNotFoundError, InvalidInputError.
    """
    lookup = Lookup(uri, None, storage_options)
    compactor = Compactor(lookup)
    steward = Steward(lookup, compactor)
    collector = Collector(compactor, lookup)
    stop = threading.Event() if stop is None else stop
    while True:
        started_s = time.monotonic()
        report = MaintainReport()
        try:
            report = MaintainReport(steward.retain(), collector.collect())
            compacted = compact_with(compactor, None, compression, jobs, target_bytes, progress=progress)
            report = MaintainReport(report.deleted, report.garbage, compacted)
        except StorageError as error:
            if every_s is None:
                raise
            report = MaintainReport(report.deleted, report.garbage, problem=str(error))
        yield report
        if every_s is None or stop.wait(max(0.0, started_s + every_s - time.monotonic())):
            return


class Steward:
    """Keeps one dataset within its limits."""

    def __init__(self, lookup: Lookup, compactor: Compactor, now_ms: Callable[[], int] = wall_ms) -> None:
        self._storage, self._format, self._compactor, self._now_ms = lookup.storage, lookup.format, compactor, now_ms
        self._tombstones = TombstoneCache(lookup.format.keys, lookup.format.last_turn)

    def retain(self) -> DeleteReport:
        """Delete what the limits do not allow: by a tombstone over everything up to a moment, unless there is one."""
        fmt = self._format
        if fmt.ttl_s is None and fmt.max_bytes is None:
            return DeleteReport()
        earlier = relist_tombstones(self._storage, self._tombstones)
        marks = [each for file in self._tombstones.files.values() for each in file]
        done = max((each.t_del for each in marks if each.kind == "all" and each.run is None), default=-1)
        views = answer_each(self._storage, self._compactor.view, self._compactor.partitions(None, (1, 1)))
        shards = [item for view in views for item in view.visible if item.name.tmax > done]
        now_ms = self._now_ms()
        until = cut(shards, fmt, now_ms)
        if until is None or until <= done:
            return DeleteReport()
        tombstone = Tombstone(uuid.uuid4().hex, "all", "", None, until, now_ms)
        write_tombstones(self._storage, [tombstone], now_ms)
        return remove_covered(self._storage, fmt, [tombstone], lambda: earlier)


def cut(shards: Sequence[Listed], fmt: DatasetFormat, now_ms: int) -> int | None:
    """The clock stamp up to which everything is to go; None: nothing is. Pure."""
    until: int | None = None
    if fmt.ttl_s is not None:
        step = max(1, int(fmt.ttl_s * 1000 / STEPS))
        oldest = (now_ms - int(fmt.ttl_s * 1000)) // step * step
        if any(millis(item.name.tmin) <= oldest for item in shards):
            until = pack(oldest, COUNTER_MAX)
    if fmt.max_bytes is not None and sum(item.entry.size for item in shards) > fmt.max_bytes:
        room = fmt.max_bytes - fmt.max_bytes // STEPS
        for item in sorted(shards, key=lambda item: item.name.tmax, reverse=True):
            room -= item.entry.size
            if room < 0:
                return max(until or 0, item.name.tmax)
    return until
