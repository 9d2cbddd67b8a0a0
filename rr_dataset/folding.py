"""The life and death of tombstones: which have done their work, and few files instead of many.

A tombstone is dropped once it has outlived its life and no shard with rows that it could cover lacks it in its
`tombstones_applied`. That must show in two listings, grace apart: one listing is no snapshot, and a reader may have begun
before it. The first is noted in `_rr/gc/`, so that the second may be another run's, on another host.

Files older than `FOLD_AFTER_S` are folded into one, under the same uuids, without those that are dropped or that another one
includes. The old files go when the new one is older than grace: a listing that misses an old one then shows the new one.
A file goes only for files with later names, so of two that hold the same one stays, whoever else is folding.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rr_dataset.compactor import grace_ms, named_ms
from rr_dataset.errors import FormatError, ObjectNotFoundError
from rr_dataset.layout import (
    GC_DIR,
    STAGING_DIR,
    TOMBSTONE_DIR,
    DatasetFormat,
    parse_tombstone_name,
    read_json,
    tombstone_name,
)
from rr_dataset.storage import Storage
from rr_dataset.tombstones import Tombstone, TombstoneCache, relist_tombstones, write_tombstones

FOLD_AFTER_S = 600.0  # deletes of one moment come together in one file

Files = Mapping[str, tuple[Tombstone, ...]]  # by name


class Folded(NamedTuple):
    """What became of the tombstones."""

    dropped: int  # that are in no file any more
    files_removed: int
    folded: int  # tombstones in the new file


@dataclass(frozen=True)
class Fold:
    """One run: made before the shards are listed, finished when it is known which tombstones they need."""

    proven: frozenset[str]  # uuids that an earlier listing, more than grace ago, showed to be needed by no shard
    noted: Mapping[str, frozenset[str]]  # uuids by the name of the note
    _storage: Storage
    _format: DatasetFormat
    _cache: TombstoneCache
    _now_ms: Callable[[], int]

    @classmethod
    def begin(cls, storage: Storage, fmt: DatasetFormat, cache: TombstoneCache, now_ms: Callable[[], int]) -> Fold:
        """Lists the tombstones into `cache`, and reads the notes."""
        relist_tombstones(storage, cache)
        began_ms = now_ms()
        noted, proven = {}, set[str]()
        for entry in storage.list(GC_DIR):
            made = _made_ms(entry.name)
            if made is not None:
                noted[entry.name] = _read_note(storage, entry.name)
                if began_ms - made > grace_ms(fmt):
                    proven |= noted[entry.name]
        return cls(frozenset(proven), noted, storage, fmt, cache, now_ms)

    def finish(self, clean: frozenset[str], *, dry_run: bool) -> Folded:
        """clean: expired tombstones that no shard needs, by a listing that began after `begin`."""
        storage, fmt, now_ms = self._storage, self._format, self._now_ms()
        droppable = clean & self.proven
        ages_ms = {entry.name: now_ms - named_ms(entry) for entry in storage.list(TOMBSTONE_DIR)}
        relist_tombstones(storage, self._cache)
        files = self._cache.files
        settled = {name for name in files if ages_ms.get(name, 0) > grace_ms(fmt)}
        removable = removable_files(files, droppable, settled)
        left = {name: file for name, file in files.items() if name not in removable}
        old_ms = now_ms - (FOLD_AFTER_S + fmt.max_clock_skew_s) * 1000
        old = {name: file for name, file in left.items() if (_made_ms(name) or now_ms) < old_ms}
        folded = fold(old, droppable)
        before = sum(map(len, old.values()))
        waiting = removable_files(left, droppable, left)
        if waiting or (len(old) < 2 and len(folded) == before):
            folded = []
        kept = {each.uuid for file in left.values() for each in file}
        if not dry_run:
            if folded:
                write_tombstones(storage, folded, now_ms)
            storage.delete(f"{TOMBSTONE_DIR}/{name}" for name in sorted(removable))
            self._note(clean, kept, now_ms)
        gone = {each.uuid for name in removable for each in files[name]} - kept
        return Folded(len(gone), len(removable), len(folded))

    def _note(self, clean: frozenset[str], kept: Collection[str], now_ms: int) -> None:
        """Leave a note of what this listing showed, for those that no note names, and remove notes of what is gone."""
        done = [name for name, uuids in self.noted.items() if uuids.isdisjoint(kept)]
        self._storage.delete(f"{GC_DIR}/{name}" for name in done)
        fresh = sorted(clean & frozenset(kept) - frozenset().union(*self.noted.values()))
        if fresh:
            unique = uuid.uuid4().hex
            path = f"{GC_DIR}/{tombstone_name(now_ms, unique)}"
            self._storage.create(path, json.dumps(fresh).encode(), staging=unique)
            self._storage.remove_empty_dirs(f"{STAGING_DIR}/{unique}")


def removable_files(files: Files, droppable: Collection[str], keepers: Collection[str]) -> frozenset[str]:
    """Names of the files that are needed no more: each of their tombstones is droppable, or stands in a keeper with a later name.

    There it stands itself, or one that includes it.
    """
    latest: dict[str, str] = {}
    by_target: dict[str, list[tuple[Tombstone, str]]] = {}
    for name in sorted(keepers):
        for each in files[name]:
            latest[each.uuid] = name
            by_target.setdefault(_target(each), []).append((each, name))

    def stands_later(tombstone: Tombstone, name: str) -> bool:
        if latest.get(tombstone.uuid, "") > name:
            return True
        return any(other > name and _includes(each, tombstone) for each, other in by_target.get(_target(tombstone), ()))

    return frozenset(
        name for name, file in files.items() if all(t.uuid in droppable or stands_later(t, name) for t in file)
    )


def fold(files: Files, droppable: Collection[str]) -> list[Tombstone]:
    """What one file must hold to stand for all of these."""
    by_target: dict[str, list[Tombstone]] = {}
    for each in {each.uuid: each for file in files.values() for each in file}.values():
        if each.uuid not in droppable:
            by_target.setdefault(_target(each), []).append(each)
    kept: list[Tombstone] = []
    for group in by_target.values():
        widest: list[Tombstone] = []
        for each in sorted(group, key=lambda t: (t.t_del, t.made, t.uuid), reverse=True):
            if not any(_includes(other, each) for other in widest):
                widest.append(each)
        kept += widest
    return sorted(kept, key=lambda t: (t.made, t.uuid))


def _includes(wider: Tombstone, tombstone: Tombstone) -> bool:
    """Of two with one target: whether all that the second covers, as long as it lives, the first covers too."""
    if wider.uuid == tombstone.uuid or wider.t_del < tombstone.t_del or wider.made < tombstone.made:
        return False
    same = (wider.t_del, wider.made) == (tombstone.t_del, tombstone.made)
    return not same or wider.uuid > tombstone.uuid


def _target(tombstone: Tombstone) -> str:
    """What it matches, as a text."""
    text = tombstone.text if isinstance(tombstone.text, str) else json.dumps(tombstone.text, sort_keys=True)
    return json.dumps([tombstone.kind, type(tombstone.text).__name__, text, tombstone.run])


def _made_ms(name: str) -> int | None:
    parsed = parse_tombstone_name(name)
    return parsed[0] if parsed else None


def _read_note(storage: Storage, name: str) -> frozenset[str]:
    path = f"{GC_DIR}/{name}"
    try:
        return frozenset(read_json(storage.read_bytes(path), path))
    except (ObjectNotFoundError, FormatError, TypeError):  # gone, or no note of ours: it proves nothing
        return frozenset()
