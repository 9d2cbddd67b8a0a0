"""`rr.compact`: plan the compactions of a dataset, and run them side by side. Their steps: see compactor.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from rr_dataset.at_once import answer_each, threads
from rr_dataset.compact_plan import TARGET_BYTES, Candidate, Task, plan
from rr_dataset.compactor import Compactor, CompactReport, is_mine
from rr_dataset.errors import InvalidInputError
from rr_dataset.lookup import Lookup
from rr_dataset.merge import DamagedInputError
from rr_dataset.options import parse_compression

IN_FLIGHT = 2  # tasks per job that are planned ahead

Progress = Callable[[CompactReport], None]


def compact(
    uri: str | os.PathLike[str],
    prefix: str | Mapping[str, str | int] | None = None,
    compression: str = "zstd:3",
    jobs: int = 1,
    target_bytes: int = TARGET_BYTES,
    dry_run: bool = False,
    shard: tuple[int, int] = (1, 1),
    tasks: Iterable[Task] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> CompactReport:
    """Join and compress the shards of each partition, and leave out what is deleted or replaced. Readers notice nothing.

    prefix: only directories in which it may cover something.
    compression: "zstd:<level>", "zstd", "lz4" or "none". Where one row of a column has more than 256 KB, zstd is used at level
        3 or above.
    jobs: threads. Each holds a batch of payload twice and its output: with the default `target_bytes` up to three times 256
        MiB, or three times a single record that is larger; and the indexes of at most 65,536 rows, or of one larger shard,
        besides a cache of indexes of 256 MB.
    target_bytes: payload of an output before compression, unless one input has more.
    shard: (i, n): only the i-th, from 1, of n parts of the directories, so that n processes or hosts share the work.
    tasks: what `plan_compaction` returned, instead of a new plan; `shard` picks among them.
    progress: called with the sum so far after each task.

    What was replaced is removed by a later call, or by `collect_garbage`, after `grace_s`. Any number may run at once, and
    be killed at any point. With `dry_run` nothing changes: the report tells what there is to do.

    Raises DatasetNotFoundError, InvalidInputError, StorageError. Damaged shards are left as they are and reported.
    """
    if not hasattr(jobs, "__index__") or jobs < 1:
        raise InvalidInputError(f"jobs={jobs}: expected at least 1")
    if tasks is None and dry_run:
        tasks = plan_compaction(uri, prefix, compression, target_bytes, shard, storage_options)
    elif tasks is not None:
        tasks = (task for task in tasks if is_mine(task.partition, shard))
    if dry_run and tasks is not None:
        return sum(map(_planned, tasks), CompactReport())
    compactor = Compactor(Lookup(uri, None, storage_options))
    if tasks is None:
        return compact_with(compactor, prefix, compression, jobs, target_bytes, shard, progress)
    return _run(compactor, tasks, jobs, progress)


def plan_compaction(
    uri: str | os.PathLike[str],
    prefix: str | Mapping[str, str | int] | None = None,
    compression: str = "zstd:3",
    target_bytes: int = TARGET_BYTES,
    shard: tuple[int, int] = (1, 1),
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Task]:
    """What `compact` with the same arguments would do now, directory by directory. Changes nothing; raises as `compact`."""
    compactor = Compactor(Lookup(uri, None, storage_options))
    _check(compression, target_bytes, shard)
    return (
        task
        for path, candidates, _ in _looked_at(compactor, prefix, shard)
        for task in plan(path, candidates, target_bytes=target_bytes, compression=compression)
    )


def compact_with(
    compactor: Compactor,
    prefix: str | Mapping[str, str | int] | None = None,
    compression: str = "zstd:3",
    jobs: int = 1,
    target_bytes: int = TARGET_BYTES,
    shard: tuple[int, int] = (1, 1),
    progress: Progress | None = None,
) -> CompactReport:
    """`compact` with what an earlier call has read still known."""
    _check(compression, target_bytes, shard)
    beside = CompactReport()  # what is done and seen while planning

    def tasks() -> Iterator[Task]:
        nonlocal beside
        for path, candidates, seen in _looked_at(compactor, prefix, shard, remove=True):
            beside += seen
            yield from plan(path, candidates, target_bytes=target_bytes, compression=compression)

    return _run(compactor, tasks(), jobs, progress) + beside


def _looked_at(
    compactor: Compactor,
    prefix: str | Mapping[str, str | int] | None,
    shard: tuple[int, int],
    *,
    remove: bool = False,
) -> Iterator[tuple[str, list[Candidate], CompactReport]]:
    """Each directory, what can be compacted there, and what is damaged; `remove`: and was removed."""

    def look(path: str) -> tuple[str, list[Candidate], CompactReport]:
        view = compactor.view(path)
        removed = compactor.remove_replaced(view) if remove else CompactReport()
        candidates, damaged = compactor.candidates(view)
        return path, candidates, removed + CompactReport(damaged=tuple(damaged.values()))

    return answer_each(compactor.storage, look, compactor.partitions(prefix, shard))


def _run(compactor: Compactor, tasks: Iterable[Task], jobs: int, progress: Progress | None) -> CompactReport:
    report = CompactReport()
    running: set[Future[CompactReport]] = set()
    with threads(jobs, "rr-compact") as start:
        for task in tasks:
            running.add(start(partial(_execute, compactor, task)))
            if len(running) >= IN_FLIGHT * jobs:
                report, running = _collect(report, running, progress)
        while running:
            report, running = _collect(report, running, progress)
    return report


def _collect(
    report: CompactReport, running: set[Future[CompactReport]], progress: Progress | None
) -> tuple[CompactReport, set[Future[CompactReport]]]:
    done, left = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        report += future.result()
        if progress is not None:
            progress(report)
    return report, left


def _execute(compactor: Compactor, task: Task) -> CompactReport:
    """The task, without those of its inputs that turn out to be damaged."""
    damaged: list[str] = []
    while True:
        try:
            return compactor.execute(task) + CompactReport(damaged=tuple(damaged))
        except DamagedInputError as error:
            damaged.append(str(error))
            left = tuple(name for name in task.inputs if f"{task.partition}/{name}" != error.path)
            if not left or len(left) == len(task.inputs):
                return CompactReport(damaged=tuple(damaged))
            task = replace(task, inputs=left)


def _planned(task: Task) -> CompactReport:
    return CompactReport(tasks=1, shards=len(task.inputs), rows=task.rows, bytes_read=task.bytes)


def _check(compression: str, target_bytes: int, shard: tuple[int, int]) -> None:
    parse_compression(compression)
    if not hasattr(target_bytes, "__index__") or target_bytes < 1:
        raise InvalidInputError(f"target_bytes={target_bytes}: expected at least 1")
    if not 1 <= shard[0] <= shard[1]:
        raise InvalidInputError(f"shard={shard}: expected (i, n) with i from 1 to n")
