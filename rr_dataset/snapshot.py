"""One consistent view of some partitions: steps 1 to 4 of the reader's protocol.

1. List the shards of every partition asked for; a missing directory is an empty partition.
2. List the tombstones after that: the other order could show an older version of a record.
3. Start over if both took longer than half the grace (a listing is no snapshot), or if a shard vanished before it was read.
4. Hide shards that another listed one names as its inputs, and shards and rows under tombstones.

Listings are never kept. Indexes of shards are, but serve only for what **this** call listed.

On a remote store step 2 runs in a thread, and meanwhile the shards are read under the tombstones that were known before. The
fresh ones decide in the end: nothing is returned, and no error raised, before they are there and were compared.
"""

from __future__ import annotations

import resource
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from threading import Lock
from types import TracebackType
from typing import NamedTuple, TypeVar

from rr_dataset.at_once import Budget, Workers
from rr_dataset.errors import (
    CorruptShardError,
    NewerFormatError,
    ObjectNotFoundError,
    ReadConflictError,
    RoutingDatasetWarning,
)
from rr_dataset.layout import DatasetFormat, ShardName, parse_partition, parse_shard_name
from rr_dataset.record import Row
from rr_dataset.shard import TAIL_BYTES, ShardIndex, likely_tail, read_index
from rr_dataset.storage import Entry, OpenSource, Storage
from rr_dataset.storage.pending import Requests, interruptible
from rr_dataset.tombstones import TombstoneCache, TombstoneSet, list_tombstones

MAX_ATTEMPTS = 5  # each finds a later state of the store; losing five races in a row means that something else is wrong
INDEX_CACHE_BYTES = 256 << 20
PARTITIONS_AT_ONCE = 64  # share one listing of tombstones when everything is read
REMOTE_ROUNDS = 8  # of listings side by side share one of tombstones, on a remote store
ROWS_AT_ONCE = 4096  # whose indexes are in memory then; a single partition may have more
OPEN_SHARE = 16  # a call keeps at most this part of the process's descriptors open; threads read at once
MAX_OPEN = 64  # and no more than these: shells allow 1024 a process

SHARD_BYTES = 4096  # of an index without its rows
ROW_BYTES = 1536  # of one row's texts and numbers; its batch's buffer ranges come on top
READ_THREADS = 4
IN_FLIGHT_BYTES = 256 << 20  # of payload on its way from a remote store, of all calls of a reader together

_parse_name = lru_cache(maxsize=1 << 14)(parse_shard_name)

_R = TypeVar("_R")


class Listed(NamedTuple):
    """A shard in a listing."""

    path: str
    entry: Entry
    name: ShardName


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard whose index is known, with the numbers of the rows of each request id."""

    path: str
    entry: Entry
    name: ShardName
    index: ShardIndex
    numbers: Mapping[str, Sequence[int]]

    @property
    def footprint(self) -> int:
        """About how many bytes of memory the index takes, rather more than less."""
        columns = len(self.index.spec.moe_layers) + 2
        return SHARD_BYTES + len(self.index.rows) * (ROW_BYTES + 16 * columns)


class Located(NamedTuple):
    """A row and where its payload is."""

    row: Row
    shard: Shard
    number: int


@dataclass
class Snapshot:
    """What is visible in some partitions. Close it: it may hold shards open."""

    shards: dict[str, list[Shard]]  # by partition
    tombstones: TombstoneSet
    damaged: dict[str, list[str]]  # paths of shards stepped over, by partition
    unread: dict[str, list[Listed]] = field(default_factory=dict)  # by partition; only with `names_only`
    sources: dict[str, OpenSource] = field(default_factory=dict)  # open shards by path
    skipped: list[Listed] = field(default_factory=list)  # not read: their names tell that all rows are deleted

    def rows(self, partition: str, request_ids: Iterable[str] | None = None) -> dict[str, list[Located]]:
        """The visible rows of the ids asked for (None: all) by request id; an id without any is left out."""
        wanted = None if request_ids is None else frozenset(request_ids)
        found: dict[str, list[Located]] = {}
        for shard in self.shards[partition]:
            for request_id in shard.numbers if wanted is None else wanted & shard.numbers.keys():
                for number in shard.numbers[request_id]:
                    row = shard.index.rows[number]
                    if not (self.tombstones and self.tombstones.covers(row)):
                        found.setdefault(request_id, []).append(Located(row, shard, number))
        return found

    def open(self, shard: Shard, storage: Storage) -> OpenSource:
        """The shard, opened if it is not yet. Raises ObjectNotFoundError if it has vanished."""
        source = self.sources.pop(shard.path, None)
        return storage.open(shard.path, shard.entry) if source is None else source

    def stands_under(self, tombstones: TombstoneSet) -> bool:
        """Whether all shards that these leave were read, and could be."""
        return not any(self.damaged.values()) and all(
            tombstones.covers_shard(item.name, parse_partition(item.path.rpartition("/")[0]) or ())
            for item in self.skipped
        )

    def is_alike_under(self, tombstones: TombstoneSet) -> bool:
        """Whether these hide the same of the rows that were read."""
        return all(
            tombstones.covers(row) == self.tombstones.covers(row)
            for shards in self.shards.values()
            for shard in shards
            for row in shard.index.rows
        )

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for source in self.sources.values():
            source.close()


@dataclass
class _View:
    """Steps 1 and 2 for some partitions; step 2 may still be going on."""

    listed: dict[str, list[Listed]]
    tombstones: TombstoneSet  # those known before, while step 2 is going on
    fresh: Future[TombstoneSet] | None = None

    def settle(self) -> TombstoneSet:
        """The tombstones of step 2. Raises what it raised."""
        if self.fresh is not None:
            self.tombstones, self.fresh = self.fresh.result(), None
        return self.tombstones


class _TooSlowError(Exception):
    """The listings took longer than they may."""


class IndexCache:
    """Indexes of shards by path, bounded in bytes; the longest unused go first. Thread-safe."""

    def __init__(self, limit_bytes: int = INDEX_CACHE_BYTES) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._shards: OrderedDict[str, Shard] = OrderedDict()
        self._lock = Lock()

    def after_fork(self) -> IndexCache:
        """A cache with the same indexes, for a child: some thread of the parent may hold the lock of this one for ever."""
        copy = IndexCache(self._limit)
        for shard in list(self._shards.values()):
            copy.add(shard)
        return copy

    def get(self, path: str, entry: Entry) -> Shard | None:
        """The shard if it is known and still the object that was listed."""
        with self._lock:
            shard = self._shards.get(path)
            if shard is None or shard.entry != entry:
                return None
            self._shards.move_to_end(path)
            return shard

    def add(self, shard: Shard) -> None:
        """Keep a shard; one larger than the whole cache is not kept."""
        with self._lock:
            old = self._shards.pop(shard.path, None)
            if old is not None:
                self._bytes -= old.footprint
            self._shards[shard.path] = shard
            self._bytes += shard.footprint
            while self._bytes > self._limit:
                _, oldest = self._shards.popitem(last=False)
                self._bytes -= oldest.footprint


class Reader:
    """Takes snapshots of one dataset in one process. Thread-safe."""

    def __init__(self, storage: Storage, fmt: DatasetFormat, indexes: IndexCache | None = None) -> None:
        """indexes: those already known."""
        self.storage = storage
        self.indexes = IndexCache() if indexes is None else indexes
        self.workers = Workers(storage.requests_at_once if storage.is_remote else READ_THREADS)
        self._listers = Workers(
            storage.requests_at_once
        )  # their own: a call's listing never waits for another's payload
        self.in_flight = Budget(IN_FLIGHT_BYTES)
        self._format = fmt
        self._limit_s = fmt.grace_s / 2
        self._tombstones = TombstoneCache(fmt.keys, fmt.last_turn)
        self._warned: set[str] = set()
        self._max_open = _max_open()

    def read(
        self,
        partitions: Sequence[str],
        use: Callable[[Snapshot], _R],
        *,
        keep_open: bool = False,
        names_only: bool = False,
        early: bool = False,
    ) -> _R:
        """`use` on a snapshot of the partitions, again from the start while shards vanish under it.

        keep_open: leave shards open whose index had to be read, for `Snapshot.open`.
        names_only: no index of a partition whose names tell that every row is visible and live: it has one row, and no
            tombstone reaches it. It is in `Snapshot.unread` then.
        early: `use` asks of the tombstones only what `Snapshot.rows` does, and itself makes requests: a remote store is then asked
            for these before the fresh tombstones are there. The result counts if they hide no other rows.

        Raises ReadConflictError after some attempts. `use` may run more than once and must not change what it is given.
        """
        problem: ObjectNotFoundError | None = None
        for _ in range(MAX_ATTEMPTS):
            try:
                with interruptible():
                    view = self._view(partitions)
                    return self._use(view, view.listed, use, keep_open=keep_open, names_only=names_only, early=early)
            except _TooSlowError:
                pass
            except ObjectNotFoundError as error:
                problem = error
        reason = "a file vanished each time" if problem else f"listing took longer than {self._limit_s:g} s each time"
        raise ReadConflictError(
            f"{self.storage.uri}: {MAX_ATTEMPTS} attempts to read failed, {reason}; try again when less is deleted at once"
        ) from problem

    def read_each(
        self, partitions: Iterable[str], use: Callable[[Snapshot], _R], *, names_only: bool = False
    ) -> Iterator[_R]:
        """`use` on snapshots of a few partitions after the other, so that never the rows of all are in memory.

        A snapshot has one partition, or several with together at most ROWS_AT_ONCE rows. Otherwise as `read`.
        """
        left = iter(partitions)
        while batch := list(islice(left, self._batch)):
            requests = Requests()
            try:
                with interruptible(requests):
                    view = self._view(batch)
            except (ObjectNotFoundError, _TooSlowError):
                yield self.read(batch, use, names_only=names_only)
                continue
            for group in _groups(view.listed):
                try:
                    with interruptible(requests):
                        result = self._use(view, group, use, names_only=names_only)
                except (ObjectNotFoundError, _TooSlowError):
                    result = self.read(list(group), use, names_only=names_only)
                yield result

    @property
    def _batch(self) -> int:
        """How many partitions are listed together."""
        return REMOTE_ROUNDS * self.storage.requests_at_once if self.storage.is_remote else PARTITIONS_AT_ONCE

    def _view(self, partitions: Sequence[str]) -> _View:
        """Step 1, and step 2, which on a remote store has only begun. Raises _TooSlowError."""
        started = time.monotonic()
        listed = self.listing(partitions)
        known = self._tombstones.held

        def fresh() -> TombstoneSet:
            tombstones = list_tombstones(self.storage, self._tombstones)
            if time.monotonic() - started > self._limit_s:
                raise _TooSlowError
            return tombstones

        if self.storage.is_remote:
            return _View(listed, known, self._listers.start(fresh))
        return _View(listed, fresh())

    def _use(
        self,
        view: _View,
        listed: dict[str, list[Listed]],
        use: Callable[[Snapshot], _R],
        *,
        keep_open: bool = False,
        names_only: bool = False,
        early: bool = False,
    ) -> _R:
        if view.fresh is not None and not names_only:
            return self._use_early(view, listed, use, early=early)
        with Snapshot({}, view.settle(), {}) as snapshot:
            if names_only:
                listed = self._set_aside(listed, snapshot)
            self._load(listed, snapshot, keep_open=keep_open)
            return use(snapshot)

    def _use_early(
        self, view: _View, listed: dict[str, list[Listed]], use: Callable[[Snapshot], _R], *, early: bool
    ) -> _R:
        """The same while the tombstones are being listed: with those known before, and again where the fresh ones differ."""
        known = view.tombstones
        snapshot = Snapshot({}, known, {})
        loaded = False
        results: list[_R] = []
        failed: Exception | None = None
        try:
            self._load(listed, snapshot, keep_open=False)
            loaded = True
            if early:
                results.append(use(snapshot))
        except Exception as error:  # noqa: BLE001 -- the fresh tombstones decide whether it is one
            failed = error
        fresh = view.settle()
        stands = loaded and snapshot.stands_under(fresh)
        if fresh is known or (early and stands and snapshot.is_alike_under(fresh)):
            if failed is not None:
                raise failed
            if early:
                return results[0]
        elif not stands:
            return self._use(view, listed, use)
        snapshot.tombstones = fresh
        return use(snapshot)

    def listings(self, partitions: Iterable[str]) -> Iterator[tuple[str, list[Listed]]]:
        """Each partition and its shards, as `listing`, however many there are."""
        left = iter(partitions)
        while batch := list(islice(left, self._batch)):
            yield from self.listing(batch).items()

    def listing(self, partitions: Sequence[str]) -> dict[str, list[Listed]]:
        """The shards in each partition: path, entry, name. Files that are none are warned of once, and left out."""
        entries: dict[str, list[Entry]] = {}

        def one(partition: str) -> None:
            entries[partition] = self.storage.list(partition)

        self.workers.each(one, partitions, None if self.storage.is_remote else 1)
        listed = {}
        for partition in partitions:
            shards = []
            for entry in entries[partition]:
                path = f"{partition}/{entry.name}"
                name = _parse_name(entry.name)
                if name is not None:
                    shards.append(Listed(path, entry, name))
                elif entry.name[0] not in "._":
                    self._warn(path, "is no shard of this dataset")
            listed[partition] = shards
        return listed

    def _set_aside(self, listed: dict[str, list[Listed]], snapshot: Snapshot) -> dict[str, list[Listed]]:
        """What is left when partitions that need no index have gone to `snapshot.unread`."""
        for partition, shards in listed.items():
            alone = sum(item.name.rows for item in shards) == 1
            if alone and not snapshot.tombstones.applied(parse_partition(partition) or (), shards[0].name.tmin):
                snapshot.unread[partition] = shards
        return {partition: shards for partition, shards in listed.items() if partition not in snapshot.unread}

    def _load(self, listed: dict[str, list[Listed]], snapshot: Snapshot, *, keep_open: bool) -> None:
        """Fill the snapshot with what is visible of the listed shards, reading the indexes that are not known."""
        tombstones = snapshot.tombstones
        loaded: dict[str, Shard | CorruptShardError] = {}
        unknown: list[Listed] = []
        for partition, shards in listed.items():
            pairs = parse_partition(partition) or ()
            for item in shards:
                # Rows are held against tombstones later, so this only saves a read. A compacted shard hides its inputs even
                # when all its rows are deleted.
                if tombstones and item.name.level == 0 and tombstones.covers_shard(item.name, pairs):
                    snapshot.skipped.append(item)
                    continue
                known = self.indexes.get(item.path, item.entry)
                if known is None:
                    unknown.append(item)
                else:
                    loaded[item.path] = known

        def read(item: Listed) -> None:
            source = self.storage.open(item.path, item.entry)
            if keep_open and len(snapshot.sources) < self._max_open:
                snapshot.sources[item.path] = source
                loaded[item.path] = self._load_one(item, source)
            else:
                with source:
                    loaded[item.path] = self._load_one(item, source)

        (self.workers.each if self.storage.is_remote else self.workers.each_that_waits)(read, unknown)
        for partition, shards in listed.items():
            self._fill(partition, [(item.path, loaded[item.path]) for item in shards if item.path in loaded], snapshot)

    def load(self, item: Listed) -> Shard:
        """The shard with its index. Raises ObjectNotFoundError if it has vanished, CorruptShardError with its path."""
        known = self.indexes.get(item.path, item.entry)
        if known is None:
            with self.storage.open(item.path, item.entry) as source:
                loaded = self._load_one(item, source)
            if isinstance(loaded, CorruptShardError):
                raise CorruptShardError(f"{self.storage.uri}: {item.path}: {loaded}") from loaded
            known = loaded
        return known

    def _load_one(self, item: Listed, source: OpenSource) -> Shard | CorruptShardError:
        """The shard, or what is wrong with it."""
        try:
            index = read_index(
                source, likely_tail(item.name.rows, item.entry.size) if self.storage.is_remote else TAIL_BYTES
            )
        except CorruptShardError as error:
            return error
        except NewerFormatError as error:
            raise NewerFormatError(f"{self.storage.uri}: {item.path}: {error}") from error
        if index.spec != self._format.spec or index.components != self._format.keys.components:
            return CorruptShardError("it has the spec or the key scheme of another dataset")
        numbers: dict[str, list[int]] = {}
        for number, row in enumerate(index.rows):
            numbers.setdefault(row.request_id, []).append(number)
        shard = Shard(*item, index, numbers)
        self.indexes.add(shard)
        return shard

    def _fill(self, partition: str, loaded: list[tuple[str, Shard | CorruptShardError]], snapshot: Snapshot) -> None:
        visible, damaged, hidden = [], [], set[str]()
        for path, shard in loaded:
            if isinstance(shard, CorruptShardError):
                damaged.append(path)
                self._warn(path, f"is damaged and was stepped over: {shard}")
                continue
            hidden.update(shard.index.inputs)
            visible.append(shard)
        snapshot.shards[partition] = [shard for shard in visible if shard.entry.name not in hidden]
        snapshot.damaged[partition] = damaged

    def _warn(self, path: str, problem: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(f"{self.storage.uri}: {path} {problem}", RoutingDatasetWarning, stacklevel=2)


def _groups(listed: dict[str, list[Listed]]) -> Iterator[dict[str, list[Listed]]]:
    """The partitions in groups of at most ROWS_AT_ONCE rows by their names, or of one partition that has more."""
    group: dict[str, list[Listed]] = {}
    rows = 0
    for partition, shards in listed.items():
        more = sum(item.name.rows for item in shards)
        if group and rows + more > ROWS_AT_ONCE:
            yield group
            group, rows = {}, 0
        group[partition] = shards
        rows += more
    yield group


def _max_open() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN if limit == resource.RLIM_INFINITY else min(MAX_OPEN, limit // OPEN_SHARE)
