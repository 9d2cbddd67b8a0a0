"""Delete marks: the files under `_rr/tombstones/`, and which rows and shards they cover.

A file holds a JSON list of `{"uuid", "kind", "text", "run", "t_del", "made"}`; what `text` is depends on the kind:

    "prefix"   a text that splits like an id ("math_17:2"), or an object ({"data_id": "math:17"}): see KeyScheme.parse_prefix
    "ids"      a list of request ids
    "glob"     a text that splits like an id into shell patterns ("math_*:2"): see KeyScheme.parse_glob
    "all"      "", every record

A tombstone covers what matches it and was submitted at or before `t_del`, in any run or only in `run`. It says what was
asked for and never lists what that met: rows still in some writer's spool are covered as well. Where only the last turn
is kept, one on a turn covers the lower turns too, so that deleting the last turn brings no earlier one back.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rr_dataset.at_once import answers
from rr_dataset.errors import FormatError, InvalidInputError, NewerFormatError, ObjectNotFoundError
from rr_dataset.keys import Glob, KeyScheme, Prefix
from rr_dataset.layout import STAGING_DIR, TOMBSTONE_DIR, ShardName, parse_tombstone_name, read_json, tombstone_name
from rr_dataset.record import Row
from rr_dataset.storage import Storage

KINDS = ("prefix", "ids", "glob", "all")
Text = str | tuple[str, ...] | Mapping[str, str | int]
Pairs = tuple[tuple[str, str | None], ...]
_Path = tuple[str | None, ...]
_K = TypeVar("_K")
_V = TypeVar("_V")
_MAX_LISTINGS = 8
_FIELDS = ("uuid", "kind", "text", "run", "t_del", "made")


@dataclass(frozen=True)
class Tombstone:
    """One delete mark. Its kinds and texts: see the head of this module."""

    uuid: str  # kept when files are folded into one
    kind: str
    text: Text
    run: str | None  # only rows of this run; None: of all
    t_del: int  # clock stamp: rows submitted later live
    made: int  # Unix time in ms

    def reaches(self, row: Row) -> bool:
        """Whether a row that matches the text is old enough, and of the run."""
        return row.t_submit <= self.t_del and (self.run is None or self.run == row.run_id)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """What a tombstone matches by component."""

    tombstone: Tombstone
    components: Prefix | Glob
    last_turn: int | None  # it names this turn and covers those up to it, and `components` does not speak of turns


class TombstoneSet:
    """The tombstones of one listing. Immutable; a look-up costs those that pin what the row has, and all that pin nothing."""

    def __init__(self, keys: KeyScheme, tombstones: Iterable[Tombstone] = (), turn: int | None = None) -> None:
        """turn: `DatasetFormat.last_turn`. Raises FormatError for a text that the key scheme does not allow."""
        self._keys = keys
        self._turn = turn
        self._by_id: dict[str, list[Tombstone]] = {}
        self._by_conversation: dict[tuple[object, ...], list[tuple[Tombstone, int]]] = {}  # the turn is that of an id
        self._ids_under: dict[_Path, list[Tombstone]] = {}
        self._patterns_under: dict[_Path, list[_Pattern]] = {}  # by what is known of the path
        self._patterns_at: dict[_Path, list[_Pattern]] = {}  # by all leading components that are known
        for tombstone in tombstones:
            try:
                self._add(tombstone)
            except InvalidInputError as error:
                raise FormatError(f"tombstone {tombstone.uuid}: {error}") from error

    def extended(self, tombstones: Iterable[Tombstone]) -> TombstoneSet:
        """This set and these, as a new one: much cheaper than to read all the texts again. Raises as the constructor."""
        more = TombstoneSet(self._keys, tombstones, self._turn)
        more._by_id = _joined(self._by_id, more._by_id)
        more._by_conversation = _joined(self._by_conversation, more._by_conversation)
        more._ids_under = _joined(self._ids_under, more._ids_under)
        more._patterns_under = _joined(self._patterns_under, more._patterns_under)
        more._patterns_at = _joined(self._patterns_at, more._patterns_at)
        return more

    def _add(self, tombstone: Tombstone) -> None:
        depth, text = self._keys.partition_by, tombstone.text
        if isinstance(text, tuple):
            parsed = {self._keys.parse(request_id) for request_id in text}
            for key in parsed:
                number = None if self._turn is None else key.components[self._turn]
                if number is None:
                    self._by_id.setdefault(key.request_id, []).append(tombstone)
                else:
                    conversation = self._conversation(key.components, key.choice)
                    self._by_conversation.setdefault(conversation, []).append((tombstone, int(number)))
            for path in {key.components[:depth] for key in parsed}:
                self._ids_under.setdefault(path, []).append(tombstone)
            return
        pattern = _Pattern(tombstone, *read_pattern(self._keys, tombstone.kind, text, self._turn))
        pinned = pattern.components.pinned
        known = pinned[: pinned.index(None)] if None in pinned else pinned
        self._patterns_under.setdefault(known[:depth], []).append(pattern)
        self._patterns_at.setdefault(known, []).append(pattern)

    def _conversation(self, components: tuple[str | None, ...], choice: int | None) -> tuple[object, ...]:
        turn = self._turn or 0
        return choice, components[:turn], components[turn + 1 :]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._ids_under or self._patterns_under)

    def _patterns(self, components: _Path) -> Iterator[_Pattern]:
        """Those that may match whatever has these leading components: what knows more of them is left out."""
        if self._patterns_at:
            for known in range(len(components) + 1):
                yield from self._patterns_at.get(components[:known], ())

    def covers(self, row: Row) -> bool:
        """Whether the row is deleted."""
        if any(tombstone.reaches(row) for tombstone in self._by_id.get(row.request_id, ())):
            return True
        number = None if self._turn is None else row.components[self._turn]
        if number is not None and self._by_conversation:
            named = self._by_conversation.get(self._conversation(row.components, row.choice), ())
            if any(int(number) <= turn and tombstone.reaches(row) for tombstone, turn in named):
                return True
        return any(
            pattern.tombstone.reaches(row)
            and pattern.components.matches(row.components, row.choice)
            and (pattern.last_turn is None or (number is not None and int(number) <= pattern.last_turn))
            for pattern in self._patterns(row.components)
        )

    def covers_shard(self, name: ShardName, partition: Pairs) -> bool:
        """Whether the name alone tells that every row of this shard is deleted: whole partitions, of every run."""
        path = tuple(value for _, value in partition)
        # What pins a deeper component or a sample matches no row without them, so it does not cover the partition.
        bare = path + (None,) * (len(self._keys.components) - len(path))
        return any(
            pattern.tombstone.run is None
            and name.tmax <= pattern.tombstone.t_del
            and pattern.last_turn is None
            and pattern.components.matches(bare, None)
            for pattern in self._patterns(path)
        )

    def applied(self, partition: Pairs, tmin: int) -> tuple[str, ...]:
        """`tombstones_applied` of a shard whose oldest row is `tmin`: sorted uuids of those that reach into it."""
        path = tuple(value for _, value in partition)
        found = {tombstone.uuid for tombstone in self._ids_under.get(path, ()) if tmin <= tombstone.t_del}
        for known in range(len(path) + 1):
            for pattern in self._patterns_under.get(path[:known], ()):
                reaches = all(pattern.components.allows(level, value) for level, value in enumerate(path))
                if tmin <= pattern.tombstone.t_del and reaches:
                    found.add(pattern.tombstone.uuid)
        return tuple(sorted(found))


def _joined(index: Mapping[_K, list[_V]], more: Mapping[_K, list[_V]]) -> dict[_K, list[_V]]:
    return {**index, **{key: index.get(key, []) + found for key, found in more.items()}}


def read_pattern(keys: KeyScheme, kind: str, text: Text, turn: int | None) -> tuple[Prefix | Glob, int | None]:
    """What a tombstone of any kind but "ids" matches by component, and up to which turn, if it names one.

    turn: `DatasetFormat.last_turn`. Raises InvalidInputError.
    """
    pattern: Prefix | Glob
    if kind == "all":
        pattern = Prefix((None,) * len(keys.components))
    elif kind == "glob":
        pattern = keys.parse_glob(text)
    elif isinstance(text, tuple):
        raise InvalidInputError(f"{kind} {text!r}: expected a text or an object")
    else:
        pattern = keys.parse_prefix(text)
    if turn is None or pattern.components[turn] in (None, "*"):
        return pattern, None
    number = pattern.pinned[turn]
    if number is None:
        raise InvalidInputError(f"glob {text!r}: with keep='last_turn' name one {keys.components[turn]}, or take *")
    others = (*pattern.components[:turn], None, *pattern.components[turn + 1 :])
    return replace(pattern, components=others), int(number)


@dataclass
class TombstoneCache:
    """What one process has read of a dataset's tombstones. Files never change, so only new names are read.

    Threads may share it: each call replaces what it holds as a whole.
    """

    keys: KeyScheme
    turn: int | None = None  # `DatasetFormat.last_turn`
    _held: tuple[dict[str, tuple[Tombstone, ...]], TombstoneSet] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._held = {}, TombstoneSet(self.keys, (), self.turn)

    @property
    def files(self) -> Mapping[str, tuple[Tombstone, ...]]:
        """What the files of the last update hold, by name."""
        return self._held[0]

    @property
    def held(self) -> TombstoneSet:
        """What the last update returned; an update to the same files returns this very set."""
        return self._held[1]

    def update(self, storage: Storage, names: Iterable[str]) -> TombstoneSet:
        """The tombstones of these files, and of no others."""
        files, tombstones = self._held
        wanted = frozenset(names)
        if wanted != files.keys():
            only_more = files.keys() < wanted
            known = {each.uuid for file in files.values() for each in file} if only_more else set[str]()
            unseen = [name for name in wanted if name not in files]
            read = dict(zip(unseen, answers(storage, partial(_read, storage), unseen), strict=True))
            files = {name: files[name] if name in files else read[name] for name in wanted}
            by_uuid = {each.uuid: each for file in files.values() for each in file}  # folding makes doubles for a while
            fresh = [each for each in by_uuid.values() if each.uuid not in known]
            tombstones = tombstones.extended(fresh) if only_more else TombstoneSet(self.keys, fresh, self.turn)
        self._held = files, tombstones
        return tombstones


def list_tombstones(storage: Storage, cache: TombstoneCache, besides: str = "") -> TombstoneSet:
    """List anew, read what `cache` lacks.

    besides: name of a file to leave out. Raises ObjectNotFoundError when a file vanishes before it is read: the caller starts over, with its listing of shards
    too. Raises FormatError for a damaged file, NewerFormatError for a kind of a later version.
    """
    names = (entry.name for entry in storage.list(TOMBSTONE_DIR))
    return cache.update(storage, (name for name in names if name != besides and parse_tombstone_name(name)))


def relist_tombstones(storage: Storage, cache: TombstoneCache, besides: str = "") -> TombstoneSet:
    """`list_tombstones` for who has listed no shards: again while files vanish under it (gc folds them).

    The last ObjectNotFoundError goes up.
    """
    for _ in range(_MAX_LISTINGS - 1):
        with suppress(ObjectNotFoundError):
            return list_tombstones(storage, cache, besides)
    return list_tombstones(storage, cache, besides)


def write_tombstones(storage: Storage, tombstones: Sequence[Tombstone], made_ms: int) -> str:
    """One new file that holds all of these, whole and with a durable name, and visible when this returns; its name.

    made_ms: time of making of the file. Raises StorageError; a second attempt makes a second file, which does no harm.
    """
    unique = uuid.uuid4().hex
    name = tombstone_name(made_ms, unique)
    values = [{field: getattr(tombstone, field) for field in _FIELDS} for tombstone in tombstones]
    data = json.dumps(values, separators=(",", ":")).encode("ascii")
    storage.create(f"{TOMBSTONE_DIR}/{name}", data, staging=unique)
    storage.remove_empty_dirs(f"{STAGING_DIR}/{unique}")
    storage.sync_dirs([TOMBSTONE_DIR])
    return name


def _read(storage: Storage, name: str) -> tuple[Tombstone, ...]:
    path = f"{TOMBSTONE_DIR}/{name}"
    values = read_json(storage.read_bytes(path), path)
    try:
        return tuple(map(_tombstone, _checked("it", values, list)))
    except NewerFormatError as error:
        raise NewerFormatError(f"{path}: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{path} holds no list of tombstones: {error!r}") from error


def _tombstone(values: Mapping[str, Any]) -> Tombstone:
    _checked("a tombstone", values, dict)
    kind, text, run = values["kind"], values["text"], values["run"]
    if kind not in KINDS:
        raise NewerFormatError(f"tombstone kind {kind!r}: this rr_dataset knows {', '.join(KINDS)}; upgrade it")
    if kind == "ids":
        text = tuple(_checked("text", text, list))
    elif kind != "prefix":
        _checked("text", text, str)
    stamps = (_checked(name, values[name], int) for name in ("t_del", "made"))
    return Tombstone(_checked("uuid", values["uuid"], str), kind, text, _checked("run", run, str, type(None)), *stamps)


def _checked(name: str, value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"{name} is {value!r:.80}")
    return value
