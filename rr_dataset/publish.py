"""A slab's rows become shards: steps 1 to 4 of the worker's protocol.

1. List tombstones. Rows they cover are not written; a partition without any other loses the slab's own shard, which an
   earlier attempt may have made.
2. Build. Right before every create, look at the clock: a slab older than tombstones live, less a margin, is set aside,
   because the tombstone that covers its rows may be gone.
3. Create if absent, then sync every directory and its ancestors, once for the slab.
4. List tombstones again: shards whose rows are all covered by now are removed.

A shard's name speaks of all rows that the slab holds for the partition, so every attempt writes the same name. Where only
the last turn is kept, turns that a later one in the slab leaves behind are never written: what covers the later one
covers them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

from rr_dataset.at_once import Budget
from rr_dataset.clock import millis, wall_ms
from rr_dataset.layout import MARGIN_S, DatasetFormat, ShardName, partition_path
from rr_dataset.live import Turns
from rr_dataset.record import RowData
from rr_dataset.shard import Scratch, build_shard
from rr_dataset.storage import Storage
from rr_dataset.tombstones import Pairs, TombstoneCache, TombstoneSet, relist_tombstones

PUBLISH_THREADS = 5  # for the pool, on a disk: while one builds, the others wait for their fsync
LARGE_SHARD_BYTES = 16 << 20  # larger ones are built one at a time, so that scratch memory stays small
SHARDS_BYTES = (
    128 << 20
)  # of smaller ones: built and not yet stored at once, and of scratch memory kept for the next ones

_LARGE = Scratch()
_LARGE_LOCK = threading.Lock()
_BUILDING = (
    threading.Lock()
)  # it is bound by the interpreter: two at once only hold up the threads that wait for the store


@dataclass(frozen=True)
class PublishReport:
    """What became of a slab."""

    records: int  # rows that are durable; deleted ones are not counted
    bytes: int  # of their shards
    shards: int
    set_aside: bool  # too old to publish in full: keep the slab


@dataclass(frozen=True)
class _Part:
    """The rows of a slab that belong into one directory, without the turns that later ones of the slab leave behind."""

    pairs: Pairs
    name: ShardName
    rows: Sequence[RowData]

    @property
    def directory(self) -> str:
        return partition_path(self.pairs)

    @property
    def path(self) -> str:
        return f"{self.directory}/{self.name.text}"

    def live(self, tombstones: TombstoneSet) -> Sequence[RowData]:
        return [data for data in self.rows if not tombstones.covers(data.row)] if tombstones else self.rows


def publish_slab(
    storage: Storage,
    fmt: DatasetFormat,
    *,
    writer: str,
    seq: int,
    rows: Sequence[RowData],
    cache: TombstoneCache,
    pool: Executor,
    compression: str = "none",
    check: Callable[[], object] = lambda: None,
    now_ms: Callable[[], int] = wall_ms,
) -> PublishReport:
    """Publish all puts and drops of one sealed slab. Idempotent: a replay makes the same names and counts them as done.

    writer: 16 hex digits of the writer's incarnation. seq: number of the slab, never used twice by it.
    rows: of the slab, in any order. Their arrays are read until this returns or raises, and not after.
    pool: builds and creates shards; `publish_threads(storage)` suit. Not called from one of its own threads.
    check: raises where the dataset is not what it was; called before anything is changed, and once all is created. On a remote
        store that costs no time: it runs beside the listings.

    A slab of n shards costs n creates, two listings and two checks, in three round trips if the threads are enough.
    When it returns, names and contents are durable, unless `set_aside`. Raises StorageError; then call it again.
    """
    parts = _split(rows, fmt, writer, seq)
    if not parts:
        check()
        return PublishReport(0, 0, 0, set_aside=False)
    last_ms = last_publish_ms(fmt, min(part.name.tmin for part in parts))
    tombstones = _list_and_check(storage, cache, check, pool)
    _remove(storage, [part for part in parts if not part.live(tombstones)])

    def create(part: _Part) -> tuple[_Part, int, int] | None:
        """(part, rows, bytes) of the shard; None if it is too late for it."""
        live = part.live(tombstones)
        with _scratch(sum(data.routed_experts.nbytes for data in live if data.routed_experts is not None)) as scratch:
            applied = tombstones.applied(part.pairs, part.name.tmin)
            with _BUILDING:
                shard = build_shard(live, fmt, compression=compression, tombstones_applied=applied, scratch=scratch)
            if now_ms() > last_ms:
                return None
            storage.create(part.path, shard, staging=writer)
            return part, len(live), len(shard)

    futures = [pool.submit(create, part) for part in parts if part.live(tombstones)]
    wait(futures)  # all of them, also when one fails: they read the slab
    created = [result for future in futures if (result := future.result()) is not None]
    storage.sync_dirs(part.directory for part, _, _ in created)
    later = _list_and_check(storage, cache, check, pool)
    _remove(storage, [part for part, _, _ in created if not part.live(later)])
    return PublishReport(
        records=sum(count for _, count, _ in created),
        bytes=sum(size for _, _, size in created),
        shards=len(created),
        set_aside=len(created) < len(futures),
    )


def last_publish_ms(fmt: DatasetFormat, tmin: int) -> int:
    """Until when a slab whose oldest row has this stamp may be published, in Unix milliseconds."""
    return millis(tmin) + int((fmt.tombstone_ttl_s - MARGIN_S) * 1000)


def publish_threads(storage: Storage) -> int:
    """How many threads keep the store busy with creates."""
    return storage.requests_at_once if storage.is_remote else PUBLISH_THREADS


def _list_and_check(
    storage: Storage, cache: TombstoneCache, check: Callable[[], object], pool: Executor
) -> TombstoneSet:
    checked = pool.submit(check).result if storage.is_remote else check
    try:
        return relist_tombstones(storage, cache)
    finally:
        checked()


def _split(rows: Sequence[RowData], fmt: DatasetFormat, writer: str, seq: int) -> list[_Part]:
    groups: dict[Pairs, list[RowData]] = {}
    for data in rows:
        groups.setdefault(fmt.keys.partition(data.row.components), []).append(data)
    parts = []
    for pairs, group in groups.items():
        stamps = [data.row.t_submit for data in group]
        name = ShardName(0, min(stamps), max(stamps), len(group), writer, seq)
        if fmt.last_turn is not None:
            turns = Turns((data.row for data in group), fmt.last_turn)
            group = [data for data in group if not turns.hides(data.row)]  # noqa: PLW2901 -- the name speaks of all
        parts.append(_Part(pairs, name, group))
    return parts


def _remove(storage: Storage, parts: Sequence[_Part]) -> None:
    storage.delete(part.path for part in parts)
    for part in parts:
        storage.remove_empty_dirs(part.directory)


class _Scratches:
    """Memory to build small shards in, bounded in what is in use and in what is kept. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._budget = Budget(limit_bytes)
        self._free: list[tuple[int, Scratch]] = []  # smallest first
        self._lock = threading.Lock()

    @contextmanager
    def taken(self, size: int) -> Iterator[Scratch]:
        """One for a shard of about `size` bytes, for this thread alone."""
        with self._budget.hold(size):
            with self._lock:
                rooms = [room for room, _ in self._free]
                best = min(bisect_left(rooms, size), len(rooms) - 1)
                room, scratch = self._free.pop(best) if rooms else (0, Scratch())
            yield scratch
            with self._lock:
                insort(self._free, (max(room, size), scratch), key=itemgetter(0))
                while sum(room for room, _ in self._free) > self._limit:
                    self._free.pop(0)


_SMALL = _Scratches(SHARDS_BYTES)


@contextmanager
def _scratch(size: int) -> Iterator[Scratch]:
    """Memory to build a shard of about `size` bytes in, kept for later ones."""
    if size > LARGE_SHARD_BYTES:
        with _LARGE_LOCK:
            yield _LARGE
    else:
        with _SMALL.taken(size) as scratch:
            yield scratch
