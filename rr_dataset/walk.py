"""The partition directories of a dataset, as far as they may hold what is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rr_dataset.at_once import answers
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

    at_once = storage.requests_at_once if storage.is_remote else 1

    def below(paths: Iterator[str], level: int) -> Iterator[str]:
        value = pattern.pinned[level]
        if value is not None:
            segment = partition_path([(names[level], value)])
            yield from (f"{path}/{segment}" if path else segment for path in paths)
            return
        while batch := list(islice(paths, at_once)):
            for path, segments in zip(batch, answers(storage, storage.list_dirs, batch), strict=True):
                found = sorted(segment for segment in segments if matches(segment, level))
                yield from (f"{path}/{segment}" if path else segment for segment in found)

    def matches(segment: str, level: int) -> bool:
        pairs = parse_partition(segment)
        return pairs is not None and pairs[0][0] == names[level] and pattern.allows(level, pairs[0][1])

    paths = iter([""])
    for level in range(len(names)):
        paths = below(paths, level)
    return paths
