"""Is a dataset sound: every file of it is read and held against everything it claims.

Partition by partition, so that in memory are the indexes of one partition and one record batch. The dataset may be in use
meanwhile: a file that is deleted or compacted away under the check is no problem, its partition is checked again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock
from typing import Any, Literal

import numpy as np

from rr_dataset.at_once import Budget, answer_each
from rr_dataset.clock import wall_ms
from rr_dataset.errors import (
    CorruptShardError,
    FormatError,
    InvalidRequestIdError,
    NewerFormatError,
    ObjectNotFoundError,
    ReadConflictError,
)
from rr_dataset.far_source import FarSource
from rr_dataset.layout import (
    MARGIN_S,
    QUARANTINE_DIR,
    STAGING_DIR,
    TOMBSTONE_DIR,
    DatasetFormat,
    ShardName,
    parse_partition,
    parse_shard_name,
    parse_tombstone_name,
)
from rr_dataset.live import merge_ranges
from rr_dataset.lookup import Lookup
from rr_dataset.record import RoutingRecord, RoutingSpec, Row
from rr_dataset.shard import ShardIndex, Source, check_shard, read_index
from rr_dataset.snapshot import MAX_ATTEMPTS, Shard, Snapshot
from rr_dataset.storage import Entry, Storage
from rr_dataset.tombstones import Pairs, TombstoneCache, TombstoneSet, list_tombstones

Level = Literal["error", "note"]
Progress = Callable[[int, int], None]  # bytes done, bytes in all

NOTES = frozenset(("incomplete",))
IN_SHARDS = frozenset(("shard", "name", "row", "arrow", "payload", "checksum", "experts", "tiling"))
MOVED = IN_SHARDS | {"foreign"}  # what `repair` takes out of the way

_READ_AT_ONCE = 32  # records, of some ten megabytes

WHOLE_BYTES = (
    64 << 20
)  # of a shard in a remote store: read as a whole, as each byte is looked at twice; of a larger one the end
IN_FLIGHT_BYTES = 256 << 20  # of shards that are checked side by side, or one that is larger

_WHOLE = -1  # stands for the whole file, before its rows
_Counts = dict[str, int]
_Fault = tuple[str, int | None, str]  # kind, row number or None for the whole file, text

_OWN_PREFIXES = (".", "_")  # of names that readers of any kind skip


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or worth knowing. Of many alike in one place the first is named, `count` tells how many.

    kind, of a shard (`path`):
        "shard" (cut, foreign, damaged index, another dataset's), "name" (contradicts its rows), "row" (contradicts itself, the
        key scheme or its directory), "arrow" (pyarrow cannot read it or reads something else than the index tells), "payload"
        (the index leads to other bytes than Arrow does), "checksum", "experts" (ids that no expert has, unsorted ones, or ids
        where none should be), "tiling" (buffers that overlap), "double" (a record id in two visible files).
    kind, of other things:
        "positions" (records that are not what a capture with debug=True writes; on request),
        "tombstone" (a damaged or foreign file of delete marks), "foreign" (a file or directory that is none of ours), "staging"
        (left behind by a writer that died), "empty" (a directory), "incomplete" (records with missing tokens or layers, or
        of which more parts are expected: a note).
    """

    kind: str
    path: str  # relative to the dataset
    text: str
    record_id: str | None = None  # of the first bad row
    request_id: str | None = None
    count: int = 1
    moved_to: str | None = None  # by `repair`

    @property
    def level(self) -> Level:
        """What it is: an "error", or a "note" of what is no fault of the store."""
        return "note" if self.kind in NOTES else "error"


@dataclass(frozen=True)
class VerifyReport:
    """What was checked, and what was found."""

    uri: str
    problems: tuple[Problem, ...]
    partitions: int
    shards: int  # also those that wait to be removed
    rows: int
    bytes: int
    records: int  # visible ones, dropped ones too

    @property
    def sound(self) -> bool:
        """Whether there is no error."""
        return all(problem.level == "note" for problem in self.problems)


def verify(
    uri: str | os.PathLike[str],
    prefix: str | Mapping[str, str | int] | None = None,
    repair: bool = False,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
    now_ms: Callable[[], int] = wall_ms,
    positions: bool = False,
) -> VerifyReport:
    """Read everything and report what is wrong: see `Problem` for what is looked for. Changes nothing unless `repair`.

    prefix: check only the partitions in which it may cover something, and nothing beside them.
    repair: move damaged shards and foreign files out of the partitions, whole, to `_rr/quarantine/`, where no reader looks; nothing
        is deleted. What a damaged shard still had of good rows is then out of sight too. A damaged tombstone file stays, as
        what it hides would come back.
    progress: called with the bytes checked so far and in all.
    now_ms: the clock, in Unix milliseconds.
    positions: also hold each live record against what a capture with `debug=True` writes, `RoutingSpec.position_ids`: whoever
        integrates a capture runs the engine so, and sees whether each row reached its token and layer.

    Raises DatasetNotFoundError, FormatError where the dataset's own description is damaged, NewerFormatError for what a later
    version wrote, ReadConflictError while files keep vanishing, StorageError.
    """
    lookup = Lookup(uri, None, storage_options)
    run = _Run(lookup, now_ms, progress, positions)
    paths = lookup.partition_paths(lookup.prefix(prefix))
    if progress is not None:
        paths = run.measure(paths)
    problems = [] if prefix is not None else [*run.around()]
    problems += run.tombstone_files()
    for found in answer_each(lookup.storage, run.partition, paths):
        problems += _moved(lookup.storage, found) if repair else found
    return run.report(problems)


def _counts() -> _Counts:
    return {"partitions": 0, "shards": 0, "rows": 0, "bytes": 0, "records": 0}


class _Run:
    """One verification, and its counts."""

    def __init__(self, lookup: Lookup, now_ms: Callable[[], int], progress: Progress | None, positions: bool) -> None:
        self._positions = positions
        self._lookup = lookup
        self._storage = lookup.storage
        self._format = lookup.format
        self._now_s = now_ms() / 1000
        self._progress = progress
        self._total = 0
        self._cache = TombstoneCache(lookup.format.keys, lookup.format.last_turn)
        self._tombstones_readable = True
        self._counts = _counts()
        self._counting = Lock()
        self._budget = Budget(IN_FLIGHT_BYTES)

    def measure(self, paths: Iterable[str]) -> Iterator[str]:
        """The same paths, once it is known how much there is to read."""
        known = list(paths)
        listed = answer_each(self._storage, self._storage.list, known)
        self._total = sum(entry.size for entries in listed for entry in entries)
        return iter(known)

    def report(self, problems: Iterable[Problem]) -> VerifyReport:
        """All of it."""
        return VerifyReport(self._storage.uri, tuple(problems), **self._counts)

    # Beside the partitions

    def around(self) -> Iterator[Problem]:
        """Foreign things outside the partitions, empty ones of these, and what dead writers left in staging."""
        names = self._format.keys.components[: self._format.keys.partition_by]
        yield from self._level("", names, self._storage.list_dirs(""))
        for writer in sorted(self._storage.list_dirs(STAGING_DIR)):
            path = f"{STAGING_DIR}/{writer}"
            limit_s = MARGIN_S + self._format.max_clock_skew_s
            old = [entry for entry in self._storage.list(path) if self._now_s - entry.mtime_s > limit_s]
            if old:
                size = sum(entry.size for entry in old)
                text = f"{len(old)} unfinished files, {size} bytes, older than {MARGIN_S:.0f} s; gc removes them"
                yield Problem("staging", path, text, count=len(old))

    def _level(self, path: str, names: tuple[str, ...], directories: Sequence[str]) -> Iterator[Problem]:
        """A directory above the partitions, and those in it; one of the partitions when no level is left."""
        directories = sorted(directories)
        if not names:
            if not directories and self._is_old(path) and not self._storage.list(path):
                yield Problem("empty", path, "a directory without a file; gc removes it")
            for name in directories:
                yield Problem("foreign", f"{path}/{name}", "a directory within a partition; readers pass it over")
            yield from self._special(path)
            return
        for entry in self._storage.list(path):
            if not entry.name.startswith(_OWN_PREFIXES):
                yield Problem("foreign", _join(path, entry.name), "a file outside the partitions; readers pass it over")
        yield from self._special(path)
        below = []
        for name in directories:
            pairs = parse_partition(name)
            if pairs is not None and pairs[0][0] == names[0]:
                below.append(_join(path, name))
            elif not name.startswith(_OWN_PREFIXES):
                yield Problem("foreign", _join(path, name), f"a directory that is no {names[0]}=<value>")
        for place, held in zip(below, answer_each(self._storage, self._storage.list_dirs, below), strict=True):
            yield from self._level(place, names[1:], held)

    def _special(self, path: str) -> Iterator[Problem]:
        for name in sorted(self._storage.list_others(path)):
            if not name.startswith(_OWN_PREFIXES):
                text = "a link, a pipe or the like; readers of a directory pass it over"
                yield Problem("foreign", _join(path, name), text)

    def _is_old(self, path: str) -> bool:
        """Whether a directory has been as it is for so long that nobody is about to fill or remove it."""
        changed = self._storage.changed_ns(path)
        return changed is not None and self._now_s - changed / 1e9 > self._format.grace_s

    def tombstone_files(self) -> Iterator[Problem]:
        """Files of delete marks that cannot be read: no reader opens the dataset then."""
        for entry in sorted(self._storage.list(TOMBSTONE_DIR)):
            path = f"{TOMBSTONE_DIR}/{entry.name}"
            if parse_tombstone_name(entry.name) is None:
                yield Problem("tombstone", path, "no file of delete marks, by its name; readers pass it over")
                continue
            try:
                TombstoneCache(self._format.keys, self._format.last_turn).update(self._storage, [entry.name])
            except ObjectNotFoundError:
                continue  # folded or expired meanwhile
            except NewerFormatError:
                raise
            except FormatError as error:
                self._tombstones_readable = False
                yield Problem("tombstone", path, f"{error}; restore it, or nothing of this dataset can be read")

    # Within them

    def partition(self, path: str) -> list[Problem]:
        """What is wrong in one directory, in one consistent view of it."""
        for _ in range(MAX_ATTEMPTS):
            counts = _counts()
            with suppress(ObjectNotFoundError):
                problems = list(self._partition(path, counts))
                with self._counting:
                    for name, count in counts.items():
                        self._counts[name] += count
                return problems
        raise ReadConflictError(
            f"{self._storage.uri}: {path}: {MAX_ATTEMPTS} attempts to check it failed, a file vanished each time; try again "
            "when less is deleted or compacted at once"
        )

    def _partition(self, path: str, counts: _Counts) -> Iterator[Problem]:
        entries = sorted(self._storage.list(path))
        tombstones = self._tombstones()
        pairs = parse_partition(path) or ()
        shards: list[Shard] = []
        damaged = []
        for entry in entries:
            name = parse_shard_name(entry.name)
            if name is not None:
                shard, problems = self._shard(f"{path}/{entry.name}", entry, name, pairs, counts)
                yield from problems
                if shard is not None:
                    shards.append(shard)
                if problems:
                    damaged.append(f"{path}/{entry.name}")
            elif not entry.name.startswith(_OWN_PREFIXES):
                yield Problem("foreign", f"{path}/{entry.name}", "a file that is no shard of this dataset")
        hidden = {name for shard in shards for name in shard.index.inputs}
        visible = [shard for shard in shards if shard.entry.name not in hidden]
        yield from _doubles(visible)
        with Snapshot({path: visible}, tombstones, {path: damaged}) as snapshot:
            heads = [found.head for found in self._lookup.records(snapshot, path).values()]
        counts["partitions"] += bool(entries)
        counts["records"] += len(heads)
        partial = [head for head in heads if head.status == "partial"]
        gaps = [head for head in heads if head.missing and head.status not in ("partial", "dropped")]
        for found, text in ((partial, "are partial: more parts are expected"), (gaps, "are final and miss tokens")):
            if found:
                first = min(found, key=lambda head: head.request_id)
                yield Problem(
                    "incomplete", path, f"{len(found)} records {text}", first.record_id, first.request_id, len(found)
                )
        if self._positions and not damaged:
            yield from self._misplaced(path, sorted(head.request_id for head in heads if head.status != "dropped"))

    def _misplaced(self, path: str, ids: Sequence[str]) -> Iterator[Problem]:
        """The first record that is not `position_ids`, and how many there are."""
        found: list[tuple[RoutingRecord, str]] = []
        for at in range(0, len(ids), _READ_AT_ONCE):
            group = ids[at : at + _READ_AT_ONCE]
            for record in self._lookup.read(group, None, [None] * len(group), on_missing="none"):
                text = None if record is None else _misplacement(record, self._format.spec)
                if record is not None and text is not None:
                    found.append((record if not found else found[0][0], text))
        if found:
            record, text = found[0]
            yield Problem("positions", path, text, record.record_id, record.request_id, len(found))

    def _tombstones(self) -> TombstoneSet:
        if not self._tombstones_readable:
            return TombstoneSet(self._format.keys)
        return list_tombstones(self._storage, self._cache)

    def _shard(
        self, path: str, entry: Entry, name: ShardName, pairs: Pairs, counts: _Counts
    ) -> tuple[Shard | None, list[Problem]]:
        """The shard if its index can be read, and what is wrong with it."""
        with self._budget.hold(entry.size), self._storage.open(path, entry) as opened:
            source: Source = FarSource(opened, WHOLE_BYTES) if self._storage.is_remote else opened
            try:
                index = read_index(source)
            except CorruptShardError as error:
                return None, [Problem("shard", path, str(error))]
            except NewerFormatError as error:
                raise NewerFormatError(f"{self._storage.uri}: {path}: {error}") from error
            finally:
                counts["shards"] += 1
                counts["bytes"] += entry.size
            if index.spec != self._format.spec or index.components != self._format.keys.components:
                return None, [Problem("shard", path, "it has the spec or the key scheme of another dataset")]
            problems = _first_of_each(
                path,
                index,
                (("name", None, text) for text in _name_faults(name, index, self._format)),
                (("row", row, text) for row, text in _row_faults(name, index, pairs, self._format)),
                check_shard(source, index, self._format.keys),
            )
        counts["rows"] += len(index.rows)
        if self._progress is not None:
            done = self._counts["bytes"] + counts["bytes"]
            self._progress(done, max(self._total, done))
        numbers: dict[str, list[int]] = {}
        for number, row in enumerate(index.rows):
            numbers.setdefault(row.request_id, []).append(number)
        return Shard(path, entry, name, index, numbers), problems


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _first_of_each(path: str, index: ShardIndex, *faults: Iterable[_Fault]) -> list[Problem]:
    """One problem for each kind: the first row, and how many faults there are."""
    first: dict[str, tuple[int, str, int]] = {}
    for kind, number, text in chain.from_iterable(faults):
        known = first.get(kind, (len(index.rows), "", 0))
        first[kind] = (*min(known[:2], (_WHOLE if number is None else number, text)), known[2] + 1)
    problems = []
    for kind, (at, text, count) in first.items():
        if at == _WHOLE:
            problems.append(Problem(kind, path, text, count=count))
        else:
            row = index.rows[at]
            problems.append(Problem(kind, path, f"row {at}: {text}", row.record_id, row.request_id, count))
    return problems


def _name_faults(name: ShardName, index: ShardIndex, fmt: DatasetFormat) -> Iterator[str]:
    """A name speaks of all rows that were taken together, also of those that were deleted or superseded before it was written."""
    stamps = [row.t_submit for row in index.rows]
    told, held = (name.rows, name.tmin, name.tmax), (len(stamps), min(stamps), max(stamps))
    all_there = name.level == 0 and not index.tombstones_applied and fmt.keep == "all"
    if told != held if all_there else held[0] > told[0] or held[1] < told[1] or held[2] > told[2]:
        yield "its name tells {} rows of {:016x} to {:016x}, it has {} of {:016x} to {:016x}".format(*told, *held)
    if name.level == 0 and index.inputs:
        yield f"a raw shard that claims to replace {index.inputs[0]}"
    if name.text in index.inputs:
        yield "it claims to replace itself"


def _row_faults(name: ShardName, index: ShardIndex, pairs: Pairs, fmt: DatasetFormat) -> Iterator[tuple[int, str]]:
    before: tuple[bytes, int, str] | None = None
    for number, row in enumerate(index.rows):
        yield from ((number, text) for text in _faults_of_row(row, pairs, fmt))
        if name.writer is not None and row.record_id[17:] != name.writer:
            yield number, f"its record id is of another writer than the file, {name.writer}"
        key = (row.request_id.encode(), row.t_submit, row.record_id)
        if before is not None and key < before:
            yield number, "it stands before its turn: rows are sorted by request id, t_submit and record id"
        before = key


def _faults_of_row(row: Row, pairs: Pairs, fmt: DatasetFormat) -> Iterator[str]:
    if row.record_id[:17] != f"{row.t_submit:016x}-" or len(row.record_id) != 33:
        yield f"its t_submit is {row.t_submit:016x}"
    try:
        key = fmt.keys.parse(row.request_id)
    except InvalidRequestIdError as error:
        yield str(error)
        return
    if (key.components, key.choice) != (row.components, row.choice):
        yield f"its components are {row.components} and sample {row.choice}, its request id says {key.components}, {key.choice}"
    elif fmt.keys.partition(row.components) != pairs:
        yield f"it belongs into the directory of {fmt.keys.partition(row.components)}"
    if row.missing != merge_ranges(row.missing) or not _within(row, row.missing):
        yield f"missing {row.missing[:4]}: expected rising ranges within {row.token_start} to {row.token_stop}"
    spans = [(start, stop) for start, stop, _ in row.weight_spans]
    if not _within(row, spans):
        yield f"weight spans {spans[:4]}: expected ranges within {row.token_start} to {row.token_stop}"
    if (row.status == "dropped") != (not row.layers):
        yield f"its status is {row.status} and it has {len(row.layers)} layers"


def _within(row: Row, spans: Iterable[tuple[int, int]]) -> bool:
    return all(row.token_start <= start < stop <= row.token_stop for start, stop in spans)


def _doubles(visible: Iterable[Shard]) -> Iterator[Problem]:
    """Rows that two visible files have: readers take them for one, other tools do not."""
    seen: dict[str, tuple[Shard, int]] = {}
    for shard in visible:
        found: list[tuple[int, str]] = []
        for number, row in enumerate(shard.index.rows):
            other, at = seen.setdefault(row.record_id, (shard, number))
            if (other, at) != (shard, number):
                same = other.index.rows[at] == row
                found.append((number, f"{'also' if same else 'with other content'} in {other.entry.name}"))
        if found:
            number, text = found[0]
            row = shard.index.rows[number]
            text = f"row {number}: {text}; compaction makes one of them"
            yield Problem("double", shard.path, text, row.record_id, row.request_id, len(found))


def _misplacement(record: RoutingRecord, spec: RoutingSpec) -> str | None:
    """Where a record differs from `position_ids` first, by token."""
    at = np.concatenate([np.arange(start, stop) for start, stop in record.token_ranges] or [np.arange(0)])
    expected = spec.position_ids(at, record.layers)
    if spec.topk_order == "sorted":
        expected.sort(axis=2)
    wrong = (record.to_numpy("TLK") != expected).any(axis=2) & record.present().T
    if not wrong.any():
        return None
    token, layer = (int(i) for i in np.argwhere(wrong)[0])
    return (
        f"token {at[token]}, layer {record.layers[layer]}: {record.routed_experts[layer, token].tolist()}, a capture with debug=True "
        f"writes {expected[token, layer].tolist()}; {int(wrong.any(axis=1).sum())} of {len(at)} tokens differ"
    )


def _moved(storage: Storage, problems: Sequence[Problem]) -> Iterator[Problem]:
    """The problems, with the files of those kinds that go there in quarantine."""
    targets = {path: _quarantine(storage, path) for path in {each.path for each in problems if each.kind in MOVED}}
    for problem in problems:
        yield replace(problem, moved_to=targets.get(problem.path))


def _quarantine(storage: Storage, path: str) -> str | None:
    """Move a file there; None if it is gone. The copy is durable before the name goes."""
    try:
        data = storage.read_bytes(path)
    except ObjectNotFoundError:
        return None
    staging = f"quarantine-{uuid.uuid4().hex}"
    number = 0
    try:
        # Nothing below `_rr/` ends in .arrow: other tools would read it.
        while not storage.create(target := f"{QUARANTINE_DIR}/{path}.{number}", data, staging=staging):
            number += 1
    finally:
        storage.remove_empty_dirs(f"{STAGING_DIR}/{staging}")
    storage.sync_dirs([target.rpartition("/")[0]])
    storage.delete([path])
    return target
