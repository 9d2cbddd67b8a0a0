"""`rr.collect_garbage`: take away what nobody needs any more. Any number may run at once, and be killed at any point.

Per partition:

1. Shards of which every row is under tombstones: by the name alone where whole partitions of every run are deleted, else by
   the index. Then the directory, while it is empty.
2. Shards that another one replaced, once that is older than grace.

Of the whole dataset:

3. Unfinished files that a process left behind: no create takes longer than `MARGIN_S`, so an older one is nobody's.
4. Tombstones that have done their work, and files of them: see folding.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rr_dataset.at_once import answer_each
from rr_dataset.clock import wall_ms
from rr_dataset.compactor import Compactor, View, expired_tombstones, grace_ms
from rr_dataset.errors import CorruptShardError, ObjectNotFoundError
from rr_dataset.folding import Fold
from rr_dataset.layout import MARGIN_S, STAGING_DIR, parse_partition
from rr_dataset.lookup import Lookup
from rr_dataset.snapshot import Listed
from rr_dataset.tombstones import TombstoneCache


@dataclass(frozen=True)
class GarbageReport:
    """What was removed, or, with `dry_run`, would be."""

    covered: int = 0  # shards whose rows are all deleted
    replaced: int = 0  # shards that a compacted one stands for
    bytes: int = 0  # of both
    staged: int = 0  # unfinished files
    staged_bytes: int = 0
    tombstones_dropped: int = 0
    tombstone_files_removed: int = 0
    tombstones_folded: int = 0  # into a new file

    def __add__(self, other: GarbageReport) -> GarbageReport:
        return GarbageReport(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def collect_garbage(
    uri: str | os.PathLike[str], dry_run: bool = False, storage_options: Mapping[str, Any] | None = None
) -> GarbageReport:
    """Remove deleted and replaced shards, unfinished files of dead processes, and tombstones that have done their work.

    Replaced shards go once what replaced them is older than `grace_s`; a tombstone after `tombstone_ttl_s`, at the earliest in
    the second run after that, `grace_s` later. `_rr/quarantine/` is left alone.

    Safe beside readers, writers, deletes, compaction and itself. Raises DatasetNotFoundError, StorageError.
    """
    lookup = Lookup(uri, None, storage_options)
    return Collector(Compactor(lookup), lookup).collect(dry_run=dry_run)


class Collector:
    """Collects the garbage of one dataset."""

    def __init__(self, compactor: Compactor, lookup: Lookup, now_ms: Callable[[], int] = wall_ms) -> None:
        self._compactor, self._lookup, self._now_ms = compactor, lookup, now_ms
        self._storage, self._format = lookup.storage, lookup.format
        self._tombstones = TombstoneCache(self._format.keys, self._format.last_turn)

    def collect(self, *, dry_run: bool = False) -> GarbageReport:
        """See `collect_garbage`."""
        fold = Fold.begin(self._storage, self._format, self._tombstones, self._now_ms)
        expired = expired_tombstones(self._tombstones, self._format, self._now_ms())
        pinned: set[str] = set()  # tombstones that some shard still needs
        report = GarbageReport()

        def one(path: str) -> tuple[GarbageReport, set[str]]:
            return self._partition(self._compactor.view(path), expired, dry_run=dry_run)

        for done, needed in answer_each(self._storage, one, self._lookup.partition_paths(self._lookup.prefix(None))):
            report += done
            pinned |= needed
        report += self._staging(dry_run=dry_run)
        folded = fold.finish(expired - pinned, dry_run=dry_run)
        return replace(
            report,
            tombstones_dropped=folded.dropped,
            tombstone_files_removed=folded.files_removed,
            tombstones_folded=folded.folded,
        )

    def _partition(self, view: View, expired: frozenset[str], *, dry_run: bool) -> tuple[GarbageReport, set[str]]:
        """Steps 1 and 2, and the expired tombstones that some shard there still needs."""
        pinned: set[str] = set()
        pairs = parse_partition(view.path) or ()
        covered: list[Listed] = []
        for item in view.listed.values():
            reaching = set(view.tombstones.applied(pairs, item.name.tmin))
            if not reaching:
                continue
            if view.tombstones.covers_shard(item.name, pairs):
                covered.append(item)
                pinned |= reaching & expired
                continue
            try:
                index = self._lookup.reader.load(item).index
            except (CorruptShardError, ObjectNotFoundError):
                pinned |= reaching & expired
                continue
            pinned |= (reaching & expired) - set(index.tombstones_applied)
            if all(map(view.tombstones.covers, index.rows)):
                covered.append(item)
        gone = {item.path for item in covered}
        replaced = [item for item in view.replaced(self._now_ms() - grace_ms(self._format)) if item.path not in gone]
        if not dry_run:
            if replaced:
                self._storage.sync_dirs([view.path])  # the outputs' names must not be lost after their inputs
            self._storage.delete(item.path for item in (*replaced, *covered))
            if len(covered) + len(replaced) == len(view.listed):
                self._storage.remove_empty_dirs(view.path)
        size = sum(item.entry.size for item in (*covered, *replaced))
        return GarbageReport(covered=len(covered), replaced=len(replaced), bytes=size), pinned

    def _staging(self, *, dry_run: bool) -> GarbageReport:
        """Step 3. A live create whose file goes all the same fails, and is tried again."""
        old_s = self._now_ms() / 1000 - MARGIN_S - self._format.max_clock_skew_s
        count = size = 0
        for path in self._below(STAGING_DIR):
            changed_ns = self._storage.changed_ns(path)
            entries = self._storage.list(path)
            old = [entry for entry in entries if entry.mtime_s < old_s]
            count, size = count + len(old), size + sum(entry.size for entry in old)
            if not dry_run:
                self._storage.delete(f"{path}/{entry.name}" for entry in old)
                if len(old) == len(entries) and (changed_ns is None or changed_ns < old_s * 1e9):
                    self._storage.remove_empty_dirs(path)
        return GarbageReport(staged=count, staged_bytes=size)

    def _below(self, path: str) -> Iterator[str]:
        """All directories below, the deepest first."""
        for name in self._storage.list_dirs(path):
            yield from self._below(f"{path}/{name}")
            yield f"{path}/{name}"
