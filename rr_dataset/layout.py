"""The names in a dataset's directory, both ways, and the dataset's description of itself. Nothing here touches a store.

    ROOT/_rr/format.json                                        DatasetFormat
    ROOT/_rr/tombstones/<made ms, 12 hex>-<uuid, 32 hex>.json   tombstone_name
    ROOT/_rr/gc/<made ms, 12 hex>-<uuid, 32 hex>.json           notes of `collect_garbage`
    ROOT/_rr/tmp/<writer>/                                      staging
    ROOT/_rr/quarantine/<path>.<n>                              damaged files that `verify` moved, n from 0
    ROOT/data_id=<value>/[gen_id=<value>/]<shard>               partition_path, ShardName

    00-<tmin, 16 hex>-<tmax, 16 hex>-<rows>-<writer, 16 hex>-<slab sequence>.arrow     raw
    07-<tmin, 16 hex>-<tmax, 16 hex>-<rows>-<uuid, 32 hex>.arrow                       compacted, levels 1 to 99

Everything that parses is canonical: a name that `parse_...` accepts is the only spelling of what it returns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import quote, unquote

from rr_dataset.errors import FormatError, InvalidInputError, NewerFormatError
from rr_dataset.keys import ABSENT, MAX_VALUE_BYTES, KeyScheme
from rr_dataset.record import RoutingSpec, shown_layers

FORMAT_PATH = "_rr/format.json"
TOMBSTONE_DIR = "_rr/tombstones"
GC_DIR = "_rr/gc"  # notes of `collect_garbage` for its next run
STAGING_DIR = "_rr/tmp"
QUARANTINE_DIR = "_rr/quarantine"  # what `verify` took out of the way
FORMAT_VERSION = 1  # 0 was the same while it could still change
KEEPS = ("all", "last_turn")
MARGIN_S = 3600.0  # longer than any single create; a tombstone lives longer than this

_FORMAT_NAME = "rr_dataset"
_LEVEL = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_]*)=(?P<value>[A-Za-z0-9._~%-]+)")
_SPAN = "(?P<tmin>[0-9a-f]{16})-(?P<tmax>[0-9a-f]{16})-(?P<rows>[1-9][0-9]{0,18})"
_RAW = re.compile(rf"(?P<level>00)-{_SPAN}-(?P<writer>[0-9a-f]{{16}})-(?P<seq>0|[1-9][0-9]{{0,18}})\.arrow")
_COMPACTED = re.compile(rf"(?P<level>0[1-9]|[1-9][0-9])-{_SPAN}-(?P<unique>[0-9a-f]{{32}})\.arrow")
_UUID = re.compile("[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TOMBSTONE = re.compile(r"(?P<made>[0-9a-f]{12})-(?P<uuid>[0-9a-f]{32})\.json")
_REF = re.compile("(?P<record_id>[0-9a-f]{16}-[0-9a-f]{16}):(?P<request_id>.+)", re.DOTALL)


def quote_value(value: str) -> str:
    """Percent-encoded outside `A-Za-z0-9-._~`.

    Raises InvalidInputError for text that UTF-8 cannot hold.
    """
    try:
        return quote(value, safe="")
    except UnicodeEncodeError:
        raise InvalidInputError(f"{value!r}: has a lone surrogate; pass well-formed text") from None


def unquote_value(text: str) -> str | None:
    """The value of `quote_value`; None for what it never returns."""
    value = unquote(text)  # bytes that are no UTF-8 become U+FFFD, which quotes otherwise
    return value if quote_value(value) == text else None


def partition_path(pairs: Iterable[tuple[str, str | None]]) -> str:
    """`(("data_id", "a:b"), ("gen_id", None))` -> `data_id=a%3Ab/gen_id=__HIVE_DEFAULT_PARTITION__`.

    Raises InvalidInputError for pairs that no path says: an empty or too long value, the literal of an absent one, no pair.
    """
    segments = []
    for name, value in pairs:
        text = ABSENT if value is None else quote_value(value)
        if value == ABSENT or len(text) > MAX_VALUE_BYTES or _LEVEL.fullmatch(segment := f"{name}={text}") is None:
            raise InvalidInputError(
                f"{name}={value!r} names no directory: values are 1 to {MAX_VALUE_BYTES} encoded bytes"
            )
        segments.append(segment)
    if not segments:
        raise InvalidInputError("a partition path has at least one level")
    return "/".join(segments)


def parse_partition(path: str) -> tuple[tuple[str, str | None], ...] | None:
    """The pairs of `partition_path`; None for a directory that is not ours."""
    pairs: list[tuple[str, str | None]] = []
    for segment in path.split("/"):
        match = _LEVEL.fullmatch(segment)
        value = unquote_value(match["value"]) if match else None
        if match is None or value is None or len(match["value"]) > MAX_VALUE_BYTES:
            return None
        pairs.append((match["name"], None if value == ABSENT else value))
    return tuple(pairs)


@dataclass(frozen=True, order=True)
class ShardName:
    """What the name of a shard says. Raw shards (level 0) have `writer` and `seq`, compacted ones have `unique`.

    tmin, tmax and rows cover all puts and drops that the slab had for the partition, also rows deleted since.
    Names sort by level, then tmin, then tmax, as texts too.
    """

    level: int
    tmin: int  # clock stamp of the oldest row
    tmax: int  # of the newest
    rows: int
    writer: str | None = None  # 16 hex digits: one incarnation of a writer
    seq: int | None = None  # of the slab, never used twice by a writer
    unique: str | None = None  # 32 hex digits

    def __post_init__(self) -> None:
        if _shard_fields(self.text) != vars(self):
            raise InvalidInputError(f"{self.text!r} is no shard name: expected what the head of layout.py describes")

    @property
    def text(self) -> str:
        """The file name."""
        source = f"{self.writer}-{self.seq}" if self.unique is None else self.unique
        return f"{self.level:02d}-{self.tmin:016x}-{self.tmax:016x}-{self.rows}-{source}.arrow"


def parse_shard_name(text: str) -> ShardName | None:
    """The parts of a shard's file name; None for a file that is not ours."""
    values = _shard_fields(text)
    return ShardName(**values) if values else None


def _shard_fields(text: str) -> dict[str, Any] | None:
    match = _RAW.fullmatch(text) or _COMPACTED.fullmatch(text)
    if match is None or match["tmin"] > match["tmax"]:
        return None
    parts = match.groupdict()
    return {
        "level": int(parts["level"]),
        "tmin": int(parts["tmin"], 16),
        "tmax": int(parts["tmax"], 16),
        "rows": int(parts["rows"]),
        "writer": parts.get("writer"),
        "seq": int(parts["seq"]) if "seq" in parts else None,
        "unique": parts.get("unique"),
    }


def tombstone_name(made_ms: int, unique: str) -> str:
    """The file name of tombstones made at this Unix time; `unique` is 32 hex digits. Names sort by time."""
    name = f"{made_ms:012x}-{unique}.json"
    if _TOMBSTONE.fullmatch(name) is None:
        raise InvalidInputError(f"{name!r} is no tombstone name: expected 48 bits of milliseconds and 32 hex digits")
    return name


def parse_tombstone_name(text: str) -> tuple[int, str] | None:
    """(made_ms, unique) of `tombstone_name`; None for a file that is not ours."""
    match = _TOMBSTONE.fullmatch(text)
    return (int(match["made"], 16), match["uuid"]) if match else None


def row_ref(record_id: str, request_id: str) -> str:
    """`<record id>:<request id>`: names one row, and tells the partition it is in."""
    return f"{record_id}:{request_id}"


def parse_ref(text: str) -> tuple[str, str] | None:
    """(record_id, request_id) of `row_ref`; None for a text that is none. The request id is not checked."""
    match = _REF.fullmatch(text)
    return (match["record_id"], match["request_id"]) if match else None


_SHOWN_BYTES = 60  # what a proxy's page or a foreign file is told by


def read_json(data: bytes, where: str) -> Any:
    """What a stored JSON text says. Raises FormatError that names `where` for what is none, or is nested without end."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is no JSON, it begins with {data[:_SHOWN_BYTES]!r}: {error}") from error


@dataclass(frozen=True)
class DatasetFormat:
    """What every process of a dataset must share: `_rr/format.json`."""

    uuid: str
    spec: RoutingSpec
    keys: KeyScheme
    keep: str = "all"  # or "last_turn": only the highest turn of a conversation
    max_clock_skew_s: float = 1.0  # between any two hosts
    tombstone_ttl_s: float = 7 * 86400.0  # a slab older than this, less MARGIN_S, is set aside
    grace_s: float = 600.0  # longer than a reader's two listings
    ttl_s: float | None = None  # records older than this may be deleted
    max_bytes: int | None = None  # the oldest records may be deleted beyond this size
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("max_clock_skew_s", "tombstone_ttl_s", "grace_s"):
            object.__setattr__(self, name, _seconds(name, getattr(self, name)))
        if self.ttl_s is not None:
            object.__setattr__(self, "ttl_s", _seconds("ttl_s", self.ttl_s))
        _require(isinstance(self.keys, KeyScheme), "keys", self.keys, "a KeyScheme, such as KeyScheme.fastdeploy()")
        _require(_is_uuid(self.uuid), "uuid", self.uuid, "a UUID")
        _require(self.keep in KEEPS, "keep", self.keep, f"one of {', '.join(KEEPS)}")
        turns = self.keep == "all" or self.keys.turn is not None
        _require(turns, "keep", self.keep, "all, as the key scheme has no turn")
        _require(self.tombstone_ttl_s > MARGIN_S, "tombstone_ttl_s", self.tombstone_ttl_s, f"more than {MARGIN_S:.0f}")
        _require(self.grace_s > 0, "grace_s", self.grace_s, "more than 0")
        _require(self.ttl_s is None or self.ttl_s > 0, "ttl_s", self.ttl_s, "more than 0, or None")
        size = self.max_bytes
        _require(size is None or (type(size) is int and size > 0), "max_bytes", size, "a whole number over 0, or None")

    @property
    def last_turn(self) -> int | None:
        """The position among the components of the one of which only the highest is kept; None if all are."""
        turn = self.keys.turn if self.keep == "last_turn" else None
        return None if turn is None else self.keys.components.index(turn)

    def to_json(self) -> bytes:
        """ASCII, one order, ready to be stored."""
        values = {"format": _FORMAT_NAME, **self._to_dict()}
        return json.dumps(values, indent=2, allow_nan=False).encode("ascii") + b"\n"

    @classmethod
    def from_json(cls, data: bytes) -> DatasetFormat:
        """The format of `to_json`.

        Raises NewerFormatError for a later format version, FormatError for anything else that is not one.
        """
        values = read_json(data, FORMAT_PATH)
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT_NAME:
            raise FormatError(f'{FORMAT_PATH} does not say "format": "{_FORMAT_NAME}"')
        version = values.get("format_version")
        if type(version) is not int or version < 0:
            raise FormatError(f"{FORMAT_PATH} has format_version {version!r}: expected a whole number")
        if version > FORMAT_VERSION:
            raise NewerFormatError(
                f"the dataset has format version {version}, this rr_dataset reads up to {FORMAT_VERSION}: upgrade it"
            )
        try:
            spec, keys = RoutingSpec.from_dict(values["spec"]), KeyScheme.from_dict(values["keys"])
            stored = cls(**{**values, "spec": spec, "keys": keys})
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise FormatError(f"{FORMAT_PATH} does not describe a dataset: {error!r}") from error
        if stored._to_dict() != values:  # a default or a conversion would stand in for what the file must say
            raise FormatError(f"{FORMAT_PATH} does not say everything: it reads as {stored!r}")
        return stored

    def mismatch(self, other: DatasetFormat) -> str:
        """What `other` has otherwise, by name, as a text for an error; empty if nothing. The uuid does not count."""
        mine, theirs = _flat(self._to_dict()), _flat(other._to_dict())
        return "; ".join(
            f"{name} is {_shown(name, mine[name])}, not {_shown(name, theirs[name])}"
            for name in mine
            if name != "uuid" and mine[name] != theirs[name]
        )

    def _to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        nested = {"spec": self.spec.to_dict(), "keys": self.keys.to_dict()}
        return {"format_version": values.pop("format_version"), **values, **nested}


def _shown(name: str, value: Any) -> str:
    return shown_layers(value) if name == "spec.moe_layers" else repr(value)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat = {f"{group}.{name}": value for group in ("spec", "keys") for name, value in values[group].items()}
    return {**flat, **{name: value for name, value in values.items() if name not in ("spec", "keys")}}


def _is_uuid(text: object) -> bool:
    return isinstance(text, str) and _UUID.fullmatch(text) is not None


def _seconds(name: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    raise InvalidInputError(f"{name}={value!r}: expected zero or more seconds")


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidInputError(f"{name}={value!r}: expected {expected}")
