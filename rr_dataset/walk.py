"""The partition directories of a dataset, as far as they may hold what is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from rr_dataset.keys import Glob, KeyScheme, Prefix
from rr_dataset.layout import parse_partition, partition_path
from rr_dataset.storage import Storage


def partition_paths(
    storage: Storage, keys: KeyScheme, pattern: Prefix | Glob, depth: int | None = None
) -> Iterator[str]:
    """The directories that may hold a match, sorted; a level with one value is not listed, so it may not be there.

    depth: stop at this level of the path instead of the last.
    """
    names = keys.components[: keys.partition_by if depth is None else depth]

    def walk(path: str, level: int) -> Iterator[str]:
        if level == len(names):
            yield path
            return
        value = pattern.pinned[level]
        if value is None:
            segments = sorted(segment for segment in storage.list_dirs(path) if matches(segment, level))
        else:
            segments = [partition_path([(names[level], value)])]
        for segment in segments:
            yield from walk(f"{path}/{segment}" if path else segment, level + 1)

    def matches(segment: str, level: int) -> bool:
        pairs = parse_partition(segment)
        return pairs is not None and pairs[0][0] == names[level] and pattern.allows(level, pairs[0][1])

    return walk("", 0)
