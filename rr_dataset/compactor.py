"""Compaction: the shards of a partition become one, compressed, without what is deleted or replaced.

1. List the shards of the partition.
2. List the tombstones, at time t.
3. Open the inputs after that; they are shards that no other listed one names as its input. One that vanished: start over.
   Leave out rows under tombstones of step 2, and rows that newer ones of the same run in the same inputs replace.
4. Verify the built bytes.
5. Later than t plus a quarter of a tombstone's life: give up.
6. Create the output, under a name that was never used; make that durable.
7. List tombstones: if all rows are covered by now, remove the own output, else never: its inputs may be gone already.
8. Inputs go once their output is older than grace, in a later run or by gc. Without live rows there is no output, and they
   go at once.

Two compactors of the same files make two outputs with the same rows, which count once; a later compaction joins them.
"""

from __future__ import annotations

import math
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rr_dataset.at_once import answers
from rr_dataset.clock import wall_ms
from rr_dataset.compact_plan import Candidate, Task
from rr_dataset.errors import CorruptShardError, ObjectNotFoundError, ReadConflictError
from rr_dataset.layout import MARGIN_S, STAGING_DIR, DatasetFormat, ShardName, parse_partition
from rr_dataset.lookup import Lookup
from rr_dataset.merge import Codec, DamagedInputError, Workspace, keep_rows, merge, row_bytes
from rr_dataset.options import parse_compression
from rr_dataset.snapshot import MAX_ATTEMPTS, Listed, Located, Shard
from rr_dataset.storage import Entry
from rr_dataset.tombstones import TombstoneCache, TombstoneSet, list_tombstones, relist_tombstones

MAX_LEVEL = 99


@dataclass(frozen=True)
class CompactReport:
    """What compaction did, or, with `dry_run`, would take up."""

    tasks: int = 0  # done
    shards: int = 0  # that they replaced or emptied
    outputs: int = 0
    rows: int = 0  # in the outputs
    rows_dropped: int = 0  # deleted, replaced or double
    bytes_read: int = 0
    bytes_written: int = 0
    shards_removed: int = 0  # replaced by an output that is older than grace
    bytes_removed: int = 0
    skipped: int = 0  # tasks that others did meanwhile, or that took too long
    damaged: tuple[str, ...] = ()  # what is wrong with shards that were left as they are

    def __add__(self, other: CompactReport) -> CompactReport:
        mine, theirs = vars(self), vars(other)
        return CompactReport(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class View:
    """A partition as maintenance sees it: steps 1 and 2, and the indexes of compacted shards."""

    path: str
    listed: dict[str, Listed]  # by name
    compacted: dict[str, Shard]  # of these, by name
    tombstones: TombstoneSet
    listed_ms: int  # before the tombstones were listed
    damaged: dict[str, str]  # what is wrong with a shard, by name

    @property
    def hidden(self) -> frozenset[str]:
        """Names that a listed shard replaces."""
        return frozenset(name for shard in self.compacted.values() for name in shard.index.inputs)

    @property
    def visible(self) -> list[Listed]:
        """The shards that no other one replaces."""
        hidden = self.hidden
        return [item for name, item in self.listed.items() if name not in hidden]

    def replaced(self, before_ms: int) -> list[Listed]:
        """Shards whose output was there before then, lowest level first, so that none outlives what hides its own inputs."""
        old = [shard for shard in self.compacted.values() if named_ms(shard.entry) < before_ms]
        names = {name for shard in old for name in shard.index.inputs} & self.listed.keys()
        return sorted((self.listed[name] for name in names), key=lambda item: item.name)


class Compactor:
    """Plans and carries out compactions of one dataset in one process. Thread-safe."""

    def __init__(self, lookup: Lookup, now_ms: Callable[[], int] = wall_ms) -> None:
        self._lookup = lookup
        self.storage, self._format = lookup.storage, lookup.format
        self._now_ms = now_ms
        self._tombstones = TombstoneCache(self._format.keys, self._format.last_turn)
        self._spaces = threading.local()

    def partitions(self, prefix: str | Mapping[str, str | int] | None, shard: tuple[int, int]) -> Iterator[str]:
        """The i-th of n parts of the directories under a prefix."""
        return (path for path in self._lookup.partition_paths(self._lookup.prefix(prefix)) if is_mine(path, shard))

    def view(self, path: str) -> View:
        """Raises ReadConflictError when files kept vanishing."""
        reader = self._lookup.reader
        problem: ObjectNotFoundError | None = None
        for _ in range(MAX_ATTEMPTS):
            try:
                listed = {item.name.text: item for item in reader.listing([path])[path]}
                listed_ms = self._now_ms()
                tombstones = list_tombstones(self.storage, self._tombstones)
                compacted, damaged = {}, {}
                for name, item in listed.items():
                    if item.name.level and len(listed) > 1:  # alone it hides nothing
                        try:
                            compacted[name] = reader.load(item)
                        except CorruptShardError as error:
                            damaged[name] = str(error)
                return View(path, listed, compacted, tombstones, listed_ms, damaged)
            except ObjectNotFoundError as error:
                problem = error
        raise ReadConflictError(f"{self.storage.uri}: {path}: files kept vanishing; try again later") from problem

    def candidates(self, view: View) -> tuple[list[Candidate], dict[str, str]]:
        """The visible shards in numbers, and what is wrong with others, by name."""
        fmt, pairs = self._format, parse_partition(view.path) or ()
        expired = expired_tombstones(self._tombstones, fmt, self._now_ms())
        damaged = dict(view.damaged)
        found = []
        for item in view.visible:
            name = item.name.text
            if name in damaged:
                continue
            shard = view.compacted.get(name)
            reaching = set(view.tombstones.applied(pairs, item.name.tmin))
            try:
                if reaching and shard is None:
                    shard = self._lookup.reader.load(item)
            except CorruptShardError as error:
                damaged[name] = str(error)
                continue
            except ObjectNotFoundError:
                continue
            if shard is None:
                found.append(Candidate(item.name, item.entry.size, item.entry.size))
                continue
            sizes = [(row, row_bytes(row, fmt)) for row in shard.index.rows]
            found.append(
                Candidate(
                    item.name,
                    item.entry.size,
                    max(1, sum(size for _, size in sizes)),
                    sum(max(1, size) for row, size in sizes if view.tombstones.covers(row)) if reaching else 0,
                    bool((reaching & expired) - set(shard.index.tombstones_applied)),
                )
            )
        return found, damaged

    def remove_replaced(self, view: View) -> CompactReport:
        """Step 8, for outputs of earlier runs."""
        gone = view.replaced(self._now_ms() - grace_ms(self._format))
        if gone:
            self.storage.sync_dirs([view.path])  # the outputs' names must not be lost after their inputs
            self.storage.delete(item.path for item in gone)
        return CompactReport(shards_removed=len(gone), bytes_removed=sum(item.entry.size for item in gone))

    def execute(self, task: Task) -> CompactReport:
        """Carry a task out. Idempotent, and safe beside any other process: a task that is done already is skipped.

        Raises DamagedInputError for an input whose bytes are wrong, StorageError.
        """
        view = self.view(task.partition)
        if not (view.listed.keys() >= set(task.inputs)) or view.hidden & set(task.inputs):
            return CompactReport(skipped=1)
        try:
            return self._replace(task, view)
        except ObjectNotFoundError:
            return CompactReport(skipped=1)

    def _replace(self, task: Task, view: View) -> CompactReport:
        storage, fmt, pairs = self.storage, self._format, parse_partition(task.partition) or ()
        items = [view.listed[name] for name in task.inputs]
        shards = answers(storage, self._load, items)
        located = [Located(row, shard, i) for shard in shards for i, row in enumerate(shard.index.rows)]
        kept = keep_rows(located, view.tombstones, fmt)
        report = CompactReport(
            tasks=1,
            shards=len(items),
            rows=len(kept),
            rows_dropped=len(located) - len(kept),
            bytes_read=sum(item.entry.size for item in items),
        )
        if not kept:
            storage.delete(item.path for item in items)
            storage.remove_empty_dirs(task.partition)
            return report
        stamps = [each.row.t_submit for each in kept]
        level = min(MAX_LEVEL, 1 + max(item.name.level for item in items))
        name = ShardName(level, min(stamps), max(stamps), len(kept), unique=uuid.uuid4().hex)
        built = merge(
            kept,
            storage,
            fmt,
            Codec(*parse_compression(task.compression)),
            self._workspace(),
            inputs=task.inputs,
            tombstones_applied=view.tombstones.applied(pairs, name.tmin),
        )
        if self._now_ms() > view.listed_ms + fmt.tombstone_ttl_s * 1000 / 4:
            return CompactReport(skipped=1)
        path, staging = f"{task.partition}/{name.text}", f"compact-{name.unique}"
        storage.create(path, built, staging=staging)
        storage.remove_empty_dirs(f"{STAGING_DIR}/{staging}")
        storage.sync_dirs([task.partition])
        later = relist_tombstones(storage, self._tombstones)
        if all(later.covers(each.row) for each in kept):
            storage.delete([path])
            storage.remove_empty_dirs(task.partition)
        return replace(report, outputs=1, bytes_written=len(built))

    def _load(self, item: Listed) -> Shard:
        try:
            return self._lookup.reader.load(item)
        except CorruptShardError as error:
            raise DamagedInputError(item.path, str(error)) from error

    def _workspace(self) -> Workspace:
        if not hasattr(self._spaces, "space"):
            self._spaces.space = Workspace()
        space: Workspace = self._spaces.space
        return space


def named_ms(entry: Entry) -> float:
    """The latest moment at which an object can have got its name, by the clock of the store.

    S3 stamps with whole seconds, and what came in parts, as the dash in its etag tells, with the begin of the upload.
    """
    late_s = 0.0 if not entry.etag else MARGIN_S if "-" in entry.etag else 1.0
    return (entry.mtime_s + late_s) * 1000


def grace_ms(fmt: DatasetFormat) -> int:
    """How old an output must be before its inputs may go: its age is told by the clock of the store."""
    return math.ceil((fmt.grace_s + fmt.max_clock_skew_s) * 1000)


def expired_tombstones(cache: TombstoneCache, fmt: DatasetFormat, now_ms: int) -> frozenset[str]:
    """Uuids of the tombstones last listed that nobody needs any more, once no shard lacks them."""
    life_ms = (fmt.tombstone_ttl_s + fmt.max_clock_skew_s) * 1000
    return frozenset(each.uuid for file in cache.files.values() for each in file if now_ms > each.made + life_ms)


def is_mine(path: str, shard: tuple[int, int]) -> bool:
    """Whether a directory is in the i-th, from 1, of n parts."""
    return zlib.crc32(path.encode()) % shard[1] == shard[0] - 1
