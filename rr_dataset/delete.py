"""Deleting from outside a writer, and removing what tombstones cover.

1. Stamp the clock: the delete covers every put that was submitted before the call, wherever its row is by now.
2. Create one tombstone file for all that is asked for, durable. From here on readers and workers leave those rows out.
3. Partition by partition: list, unlink by name the shards of which every row is covered (the name alone tells it where whole
   partitions of every run are deleted, else the index does), then remove the directory and its parents while they are
   empty. Never recursively: a newer put may have arrived.
4. Return once no clock can stamp a put that the tombstone covers.
"""

from __future__ import annotations

import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from threading import Lock
from typing import Any, NamedTuple

from rr_dataset.at_once import Workers
from rr_dataset.clock import COUNTER_MAX, millis, pack, wall_ms
from rr_dataset.description import read_format
from rr_dataset.errors import (
    CorruptShardError,
    InvalidInputError,
    ObjectNotFoundError,
    RoutingDatasetWarning,
)
from rr_dataset.layout import DatasetFormat, ShardName, parse_partition, parse_shard_name, partition_path
from rr_dataset.options import FOREVER_S, check_seconds
from rr_dataset.record import Row
from rr_dataset.shard import TAIL_BYTES, ShardIndex, likely_tail, read_index
from rr_dataset.storage import Entry, Storage, open_storage
from rr_dataset.tombstones import (
    Text,
    Tombstone,
    TombstoneCache,
    TombstoneSet,
    read_pattern,
    relist_tombstones,
    write_tombstones,
)
from rr_dataset.walk import partition_paths

DELETE_THREADS = 4  # on a local disk the waits for its metadata overlap
PARTITIONS_AT_ONCE = 64  # handed to the threads together
FILES_AT_ONCE = 4000  # of a remote store are deleted together, across directories

_PAUSE_S = 0.001
_STEP_MS = 100  # a step back of the clock that is waited for whatever the skew


@dataclass(frozen=True)
class Target:
    """What to delete, checked against a key scheme. `Target.of` makes one."""

    marks: tuple[tuple[str, Text], ...]  # kind and text of each tombstone
    run: str | None
    older_than_s: float | None

    @classmethod
    def of(
        cls,
        fmt: DatasetFormat,
        prefixes: Iterable[str | Mapping[str, str | int]] = (),
        ids: Iterable[str] = (),
        glob: str | None = None,
        older_than_s: float | None = None,
        run: str | None = None,
        *,
        everything: bool = False,
    ) -> Target:
        """As the arguments of `delete`. Raises InvalidRequestIdError, or InvalidInputError when nothing is asked for."""
        for name, value in (("prefixes", prefixes), ("ids", ids)):
            if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
                raise InvalidInputError(f"{name}={value!r}: expected several, for example [{value!r}]")
        marks: list[tuple[str, Text]] = [("prefix", fmt.keys.plain_prefix(prefix)) for prefix in prefixes]
        wanted = tuple(dict.fromkeys(ids))
        for request_id in wanted:
            fmt.keys.parse(request_id)
        if wanted:
            marks.append(("ids", wanted))
        if glob is not None:
            read_pattern(fmt.keys, "glob", glob, fmt.last_turn)
            marks.append(("glob", glob))
        if run is not None and (type(run) is not str or not run):
            raise InvalidInputError(f"run={run!r}: expected the id of a run, a text")
        if older_than_s is not None and check_seconds("older_than_s", older_than_s) == FOREVER_S:
            raise InvalidInputError(f"older_than_s={older_than_s!r}: expected zero or more seconds")
        limited = run is not None or older_than_s is not None
        if everything or (limited and not marks):
            marks = [("all", "")]
        if not marks:
            raise InvalidInputError(
                "nothing to delete: give prefixes, ids, a glob, a run or an age, or everything=True for all of it"
            )
        return cls(tuple(marks), run, older_than_s)

    def tombstones(self, now_ms: int, skew_ms: int) -> list[Tombstone]:
        """Tombstones made at `now_ms`: over all that is submitted by then on any clock, or is older than asked for."""
        until_ms = (
            now_ms + skew_ms if self.older_than_s is None else max(now_ms - math.ceil(self.older_than_s * 1000), 0)
        )
        t_del = pack(until_ms, COUNTER_MAX)
        return [Tombstone(uuid.uuid4().hex, kind, text, self.run, t_del, now_ms) for kind, text in self.marks]


@dataclass(frozen=True)
class Found:
    """A shard in a listing, as far as a delete needs to know it."""

    name: ShardName
    size: int
    rows: Sequence[Row] | None = None  # of its index, where the name is not enough
    replaced: bool = False  # a compacted one has its rows, and counts them
    runs: Sequence[str] = ()  # its runs, where the name is enough and somebody wants to know them


@dataclass(frozen=True)
class PartitionPlan:
    """What a delete does to one directory. All of it is JSON."""

    path: str
    remove: tuple[str, ...]  # names of the files that go
    bytes: int  # of these files
    records: int  # puts and drops deleted: of these files, less those that a compacted one has too, and `hidden`
    hidden: int  # of these, how many lie in files that hold others too; compaction removes them
    runs: Mapping[str, int]  # time of the newest put deleted (Unix ms) by run, as far as it was looked up


@dataclass(frozen=True)
class DeleteReport:
    """What a delete did, or would do."""

    partitions: int = 0  # directories in which something is deleted
    files: int = 0  # removed
    bytes: int = 0  # of these files
    records: int = 0  # puts and drops deleted: of these files, less those that a compacted one has too, and `hidden`
    hidden: int = 0  # of these, how many lie in files that hold others too; compaction removes them

    def with_plan(self, task: PartitionPlan) -> DeleteReport:
        """The sum."""
        return DeleteReport(
            self.partitions + bool(task.remove or task.hidden),
            self.files + len(task.remove),
            self.bytes + task.bytes,
            self.records + task.records,
            self.hidden + task.hidden,
        )


Progress = Callable[[DeleteReport], object]
Earlier = Callable[[], TombstoneSet]


def plan(path: str, shards: Sequence[Found], marks: TombstoneSet, earlier: Earlier) -> PartitionPlan:
    """What `marks` delete in a partition. Pure; to carry it out late is safe, since no file's name is ever used again.

    earlier: the other tombstones, asked for where indexes were read. What they cover is not counted as deleted once more, but
    a file goes when all its rows are covered by the ones or the others.
    """
    pairs = parse_partition(path) or ()
    remove: list[str] = []
    size = records = hidden = 0
    runs: dict[str, int] = {}
    for shard in shards:
        if marks.covers_shard(shard.name, pairs):
            gone, count = True, shard.name.rows
            newest = [(run, shard.name.tmax) for run in shard.runs]
        elif shard.rows is not None:
            others = earlier()
            fresh = [row for row in shard.rows if marks.covers(row) and not others.covers(row)]
            gone, count = all(marks.covers(row) or others.covers(row) for row in shard.rows), len(fresh)
            newest = [(row.run_id, row.t_submit) for row in fresh]
        else:
            continue
        if shard.replaced:
            count = 0
        records += count
        if gone:
            remove.append(shard.name.text)
            size += shard.size
        else:
            hidden += count
        for run, stamp in newest:
            runs[run] = max(runs.get(run, 0), millis(stamp))
    return PartitionPlan(path, tuple(remove), size, records, hidden, runs)


def execute(storage: Storage, task: PartitionPlan) -> None:
    """Unlink by name, then remove the directory and its parents while they are empty. Idempotent; shares no state."""
    storage.delete(f"{task.path}/{name}" for name in task.remove)
    storage.remove_empty_dirs(task.path)


class _Reached(NamedTuple):
    """A shard in which some tombstone may cover rows."""

    entry: Entry
    name: ShardName
    whole: bool  # the name tells that all of them are


class _Survey:
    """Looks at the partitions that some tombstones reach, and plans what they delete there."""

    def __init__(
        self,
        storage: Storage,
        fmt: DatasetFormat,
        tombstones: Sequence[Tombstone],
        earlier: Earlier,
        *,
        runs: bool,
        workers: Workers | None = None,
    ) -> None:
        """workers: look at the shards of a directory side by side."""
        self._workers = workers
        self._storage, self._format, self._tombstones, self._earlier = storage, fmt, tombstones, earlier
        self._marks = TombstoneSet(fmt.keys, tombstones, fmt.last_turn)
        self._run_of: dict[str, Sequence[str]] | None = {} if runs else None  # by writer
        self._skew_ms = _skew_ms(fmt)

    def directories(self, depth: int) -> Iterator[str]:
        """The directories at one level of the path that may hold something, each once."""
        keys = self._format.keys
        seen: set[str] = set()
        for tombstone in self._tombstones:
            if isinstance(tombstone.text, tuple):
                pairs = (keys.partition(keys.parse(each).components)[:depth] for each in tombstone.text)
                found: Iterator[str] = map(partition_path, pairs)
            else:
                pattern, _ = read_pattern(keys, tombstone.kind, tombstone.text, None)
                found = partition_paths(self._storage, keys, pattern, depth)
            for path in found:
                if path not in seen:
                    seen.add(path)
                    yield path

    def plan(self, path: str) -> PartitionPlan:
        """One listing, and the indexes that are needed; of files that are damaged nothing but the name counts.

        Where a shard is compacted and others lie beside it, its index tells which of them it replaces: these are counted as files,
        not as records.
        """
        pairs = parse_partition(path) or ()
        listed = [(entry, name) for entry in self._storage.list(path) if (name := parse_shard_name(entry.name))]
        now_ms = wall_ms()
        reached: list[_Reached] = []
        for entry, name in listed:
            if millis(name.tmax) > now_ms + self._skew_ms:
                warnings.warn(
                    f"{self._storage.uri}: {path}/{entry.name} was put by a clock that is ahead of this host's by more than "
                    "max_clock_skew_s, and may outlive this delete: check the clocks, then delete again",
                    RoutingDatasetWarning,
                    stacklevel=2,
                )
            if self._marks.applied(pairs, name.tmin):
                reached.append(_Reached(entry, name, self._marks.covers_shard(name, pairs)))
        replaced = self._replaced(path, listed) if reached else frozenset()
        found = [replace(each, replaced=each.name.text in replaced) for each in self._look(path, reached)]
        return plan(path, found, self._marks, self._earlier)

    def _replaced(self, path: str, listed: Sequence[tuple[Entry, ShardName]]) -> frozenset[str]:
        """Names of shards that a listed one replaces; only the indexes of compacted ones tell."""
        least = min(name.level for _, name in listed)
        indexes = [self._index(path, entry, name) for entry, name in listed if name.level > least]
        return frozenset(each for index in indexes if index is not None for each in index.inputs)

    def _look(self, path: str, reached: Sequence[_Reached]) -> list[Found]:
        if self._workers is None or all(each.whole for each in reached):
            return [self._found(path, *each) for each in reached]
        found: dict[int, Found] = {}

        def look(number: int) -> None:
            if number < 0:
                self._earlier()  # the indexes will be held against these
            else:
                found[number] = self._found(path, *reached[number])

        self._workers.each(look, range(-1, len(reached)))
        return [found[number] for number in range(len(reached))]

    def _found(self, path: str, entry: Entry, name: ShardName, whole: bool) -> Found:
        if not whole:
            return Found(name, entry.size, rows=self._rows(path, entry, name))
        if self._run_of is None:
            return Found(name, entry.size)
        known = self._run_of.get(name.writer or "")
        if known is None:
            known = sorted({row.run_id for row in self._rows(path, entry, name) or ()})
            if name.writer is not None:  # one writer is of one run
                self._run_of[name.writer] = known
        return Found(name, entry.size, runs=known)

    def _rows(self, directory: str, entry: Entry, name: ShardName) -> Sequence[Row] | None:
        index = self._index(directory, entry, name)
        return None if index is None else index.rows

    def _index(self, directory: str, entry: Entry, name: ShardName) -> ShardIndex | None:
        path = f"{directory}/{entry.name}"
        tail = likely_tail(name.rows, entry.size) if self._storage.is_remote else TAIL_BYTES
        try:
            with self._storage.open(path, entry) as source:
                return read_index(source, tail)
        except ObjectNotFoundError:
            return None
        except CorruptShardError as error:
            warnings.warn(
                f"{self._storage.uri}: {path} is damaged and stays: {error}", RoutingDatasetWarning, stacklevel=2
            )
            return None


def remove_covered(
    storage: Storage,
    fmt: DatasetFormat,
    tombstones: Sequence[Tombstone],
    earlier: Earlier,
    progress: Progress | None = None,
) -> DeleteReport:
    """Step 3, for tombstones that are durable. Idempotent; others may do the same meanwhile.

    earlier: the other tombstones, as for `plan`.
    """
    workers = Workers(storage.requests_at_once) if storage.is_remote else None
    survey = _Survey(storage, fmt, tombstones, earlier, runs=False, workers=workers)
    directories = survey.directories(fmt.keys.partition_by)
    report = DeleteReport()
    for task in (
        _in_place(storage, survey, directories)
        if workers is None
        else _in_batches(storage, survey, directories, workers)
    ):
        report = report.with_plan(task)
        if progress is not None:
            progress(report)
    if workers is not None:
        workers.close()
        return report  # such a store keeps no empty directories
    for depth in range(fmt.keys.partition_by - 1, 0, -1):  # emptied by who died before the parents' turn
        for path in survey.directories(depth):
            storage.remove_empty_dirs(path)
    return report


def _in_place(storage: Storage, survey: _Survey, paths: Iterator[str]) -> Iterator[PartitionPlan]:
    """Directory by directory."""

    def one(path: str) -> PartitionPlan:
        task = survey.plan(path)
        execute(storage, task)
        return task

    with ThreadPoolExecutor(DELETE_THREADS, "rr-delete") as pool:
        while batch := list(islice(paths, PARTITIONS_AT_ONCE)):
            yield from pool.map(one, batch)


def _in_batches(storage: Storage, survey: _Survey, paths: Iterator[str], workers: Workers) -> Iterator[PartitionPlan]:
    """For a store that deletes many objects with one request: directories are listed side by side, until their files are enough."""
    waiting: list[PartitionPlan] = []

    def done() -> list[PartitionPlan]:
        storage.delete(f"{task.path}/{name}" for task in waiting for name in task.remove)
        done, waiting[:] = waiting[:], []
        return done

    while batch := list(islice(paths, storage.requests_at_once)):
        planned: dict[str, PartitionPlan] = {}
        workers.each(lambda path: planned.update({path: survey.plan(path)}), batch)  # noqa: B023 -- it ends with the round
        waiting += [planned[path] for path in batch]
        if sum(len(task.remove) for task in waiting) >= FILES_AT_ONCE:
            yield from done()
    yield from done()


def delete(
    uri: str | os.PathLike[str],
    prefixes: Iterable[str | Mapping[str, str | int]] = (),
    ids: Iterable[str] = (),
    glob: str | None = None,
    older_than_s: float | None = None,
    run: str | None = None,
    everything: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> DeleteReport:
    """Delete the records that any of `prefixes`, `ids` and `glob` matches, put before this call by whomever.

    prefixes: by component, "math:17" or {"data_id": "math:17"}: `a:1` leaves `a:10`.
    ids: request ids.
    glob: shell patterns by component, "math_*:2": see `KeyScheme.parse_glob`.
    older_than_s, run: only what was put at least so many seconds ago, only what writers of this run put; without prefixes,
        ids and glob: all of that.
    everything: all records, whatever else is given but age and run.
    progress: called with the sum so far after each directory.

    It covers puts that are still in a writer's spool, and none submitted after it returned, on hosts whose clocks are within
    `max_clock_skew_s`, for which it waits twice (so 2 s on an object store, unless the dataset was made with another), once
    however much is asked for; it never waits longer, so if this host's clock
    is set back by more than that meanwhile, puts after its return may be covered too, until the clock has caught up. A put
    beside it may land on either side.

    What is deleted is hidden from readers at once; whole directories and files whose rows are all deleted are removed before
    it returns, the rest by compaction. Deleting what is not there is no error, and a second delete does no harm; after an
    error some is deleted: do it again.

    Raises DatasetNotFoundError, InvalidRequestIdError, InvalidInputError when nothing is asked for, StorageError.
    """
    storage = open_storage(uri, storage_options)
    fmt = read_format(storage)
    target = Target.of(fmt, prefixes, ids, glob, older_than_s, run, everything=everything)
    now_ms, began_s, skew_ms = wall_ms(), time.monotonic(), _skew_ms(fmt)
    tombstones = target.tombstones(now_ms, skew_ms)
    name = write_tombstones(storage, tombstones, now_ms)
    report = remove_covered(storage, fmt, tombstones, _others(storage, fmt, name), progress)
    last_ms = max(millis(tombstone.t_del) for tombstone in tombstones) + skew_ms
    until_s = began_s + (last_ms - now_ms + _STEP_MS) / 1000
    while (left_ms := last_ms - wall_ms()) >= 0 and (left_s := until_s - time.monotonic()) > 0:
        time.sleep(max(min(left_ms / 1000, left_s), _PAUSE_S))
    return report


def delete_prefix(
    uri: str | os.PathLike[str],
    prefix: str | Mapping[str, str | int],
    storage_options: Mapping[str, Any] | None = None,
) -> DeleteReport:
    """`delete` of one prefix."""
    return delete(uri, prefixes=[prefix], storage_options=storage_options)


def plan_delete(
    uri: str | os.PathLike[str],
    prefixes: Iterable[str | Mapping[str, str | int]] = (),
    ids: Iterable[str] = (),
    glob: str | None = None,
    older_than_s: float | None = None,
    run: str | None = None,
    everything: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[PartitionPlan]:
    """What `delete` with the same arguments would do now, directory by directory. Changes nothing; raises as `delete`.

    The runs come with it: for whole directories those of one file of each writer.
    """
    storage = open_storage(uri, storage_options)
    fmt = read_format(storage)
    target = Target.of(fmt, prefixes, ids, glob, older_than_s, run, everything=everything)
    tombstones = target.tombstones(wall_ms(), _skew_ms(fmt))
    survey = _Survey(storage, fmt, tombstones, _others(storage, fmt), runs=True)
    plans = map(survey.plan, survey.directories(fmt.keys.partition_by))
    return (task for task in plans if task.remove or task.hidden)


def _others(storage: Storage, fmt: DatasetFormat, besides: str = "") -> Earlier:
    """The tombstones of all files but this one, read once and only if asked for: whole directories need none of them."""
    lock = Lock()

    @cache
    def read() -> TombstoneSet:
        return relist_tombstones(storage, TombstoneCache(fmt.keys, fmt.last_turn), besides)

    def once() -> TombstoneSet:
        with lock:
            return read()

    return once


def _skew_ms(fmt: DatasetFormat) -> int:
    return math.ceil(fmt.max_clock_skew_s * 1000)
