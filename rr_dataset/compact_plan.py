"""What to compact: from shards in numbers to tasks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rr_dataset.errors import InvalidInputError
from rr_dataset.layout import ShardName, parse_partition, parse_shard_name
from rr_dataset.options import parse_compression

TARGET_BYTES = 256 << 20  # of an output's payload, before compression: what a job holds in memory, a few times
MAX_TASK_ROWS = 1 << 16  # whose indexes are in memory, 6 KB each
GROWTH = 2  # a compacted shard joins what has at least half its size: so each byte is written log(size) times
DEAD_SHARE = 0.1  # of a shard's payload, that deletes have hidden: worth writing the rest again


@dataclass(frozen=True)
class Candidate:
    """A shard that could be compacted, in numbers."""

    name: ShardName
    bytes: int  # of the file
    payload: int  # bytes of its rows, before compression
    dead: int = 0  # of these, bytes of deleted rows
    pins: bool = False  # it keeps a tombstone from being dropped that has outlived its life


@dataclass(frozen=True)
class Task:
    """One compaction: some shards of a partition into one. JSON as a dict: `asdict(task)`, `Task(**values)`."""

    partition: str
    inputs: tuple[str, ...]  # file names
    bytes: int  # of these files
    rows: int  # as their names say
    compression: str = "zstd:3"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", tuple(self.inputs))  # a list, out of JSON
        parse_compression(self.compression)
        names = all(parse_shard_name(name) for name in self.inputs)
        if parse_partition(self.partition) is None or not self.inputs or not names:
            raise InvalidInputError(f"{self!r}: expected a partition and the names of some of its shards")


def plan(
    path: str,
    candidates: Iterable[Candidate],
    *,
    target_bytes: int = TARGET_BYTES,
    compression: str = "zstd:3",
) -> list[Task]:
    """What to compact in a partition, by numbers alone. Pure.

    Taken are raw shards, those with many deleted rows, those that keep tombstones alive, and of the others so many small ones
    that none is much larger than what joins it. They go into outputs of at most `target_bytes` of payload, oldest first,
    or of one shard that has more.
    """
    due: list[Candidate] = []
    ripe: list[Candidate] = []
    for each in candidates:
        if each.name.level == 0 or each.pins or each.dead > each.payload * DEAD_SHARE:
            due.append(each)
        elif each.payload < target_bytes // 2:
            ripe.append(each)
    ripe.sort(key=lambda each: each.payload)
    joined, size = 0, sum(each.payload for each in due)
    for i, each in enumerate(ripe):
        if size and each.payload <= GROWTH * size:
            joined = i + 1
        size += each.payload
    tasks = []
    for group in _bins(sorted([*due, *ripe[:joined]], key=lambda each: each.name), target_bytes):
        if len(group) > 1 or group[0] in due:
            names = tuple(each.name.text for each in group)
            size, rows = sum(each.bytes for each in group), sum(each.name.rows for each in group)
            tasks.append(Task(path, names, size, rows, compression))
    return tasks


def _bins(ordered: Sequence[Candidate], target_bytes: int) -> Iterator[list[Candidate]]:
    group: list[Candidate] = []
    size = rows = 0
    for each in ordered:
        if group and (size + each.payload > target_bytes or rows + each.name.rows > MAX_TASK_ROWS):
            yield group
            group, size, rows = [], 0, 0
        group.append(each)
        size += each.payload
        rows += each.name.rows
    if group:
        yield group
