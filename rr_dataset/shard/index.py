"""The index of a shard: what its rows are, and in which bytes of the file each payload buffer stands.

It is ASCII JSON in the Arrow footer under `rr.index`, with its XXH3-64 beside it. What a file says is checked before it
is used: a shard that is cut, foreign or damaged is a CorruptShardError, never a wild read.
"""

from __future__ import annotations

import itertools
import json
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from rr_dataset.errors import CorruptShardError, InvalidInputError, NewerFormatError
from rr_dataset.layout import FORMAT_VERSION, read_json
from rr_dataset.options import COMPRESSIONS
from rr_dataset.record import MAX_POSITION, PRODUCERS, STATUSES, RoutingSpec, Row, RowData
from rr_dataset.schema import LAYER_COLUMN, VECTORS
from rr_dataset.shard.arrow import TRAILER_BYTES, footer_length, read_footer

INDEX_KEY = "rr.index"
CHECKSUM_KEY = "rr.index_xxh3"
TAIL_BYTES = 64 << 10  # holds the footer of a shard of a few hundred rows
_ROW_BYTES, _BATCH_BYTES = 256, 2048  # what a row, and a batch of 1 MiB, add to a footer, rather more than less
MAX_COLUMN_BYTES = (1 << 31) - 1  # Arrow's 32-bit offsets

Ints = npt.NDArray[np.int64]

_INT, _BOOL, _TEXT, _LIST, _OBJECT = (frozenset([kind]) for kind in (int, bool, str, list, dict))
_INT_OR_NULL, _TEXT_OR_NULL = _INT | {type(None)}, _TEXT | {type(None)}


class Source(Protocol):
    """An open stored object. A storage implements it."""

    @property
    def size(self) -> int:
        """Bytes of the object; known after `tail`."""

    @property
    def max_gap_bytes(self) -> int:
        """Unwanted bytes between two wanted ranges that are cheaper to read than to skip."""

    def tail(self, length: int) -> bytes:
        """The last `length` bytes, or all if there are fewer."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes. Raises CorruptShardError or StorageError if the object ends before."""

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill each run's buffers, any number of them, from the one contiguous byte range that starts at its offset.

        Raises CorruptShardError or StorageError if the object ends before a range does.
        """


# What a column holds in every row when the index leaves it out.
DEFAULTS: dict[str, Any] = {
    "choice": None,
    "token_start": 0,
    "part": False,
    "reason": None,
    "missing": [],
    "weight_version": None,
    "weight_spans": [],
    "producer": "rollout",
    "tags": {},
}


@dataclass(frozen=True, eq=False)
class PayloadColumns:
    """The payload columns of a spec in file order: token_ids, logprobs, then the layers."""

    spec: RoutingSpec
    names: tuple[str, ...]
    token_bytes: Ints  # of one token in each column
    all_layers: tuple[int, ...]  # the numbers of the layer columns

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, spec: RoutingSpec) -> PayloadColumns:
        """The columns of `spec`."""
        names = (*VECTORS, *(LAYER_COLUMN % layer for layer in spec.moe_layers))
        token_bytes = np.full(len(names), spec.top_k * np.dtype(spec.dtype).itemsize, np.int64)
        token_bytes[: len(VECTORS)] = 4
        return cls(spec, names, token_bytes, tuple(range(len(VECTORS), len(names))))

    def numbers(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The column of each layer."""
        if layers == self.spec.moe_layers:
            return self.all_layers
        return tuple(len(VECTORS) + self.spec.moe_layers.index(layer) for layer in layers)

    def present(self, data: RowData) -> tuple[int, ...]:
        """The columns that are not null in this row, rising."""
        vectors = (i for i, vector in enumerate((data.token_ids, data.logprobs)) if vector is not None)
        return (*vectors, *self.numbers(data.row.layers))


class PresentColumns(NamedTuple):
    """Which payload columns some rows have."""

    mask: npt.NDArray[np.bool_]  # [columns]
    layers: tuple[int, ...]
    token_ids: bool
    logprobs: bool


@lru_cache(maxsize=256)
def _present_columns(payload: PayloadColumns, bounds: tuple[int, ...]) -> PresentColumns:
    """Those of ranges (start, stop, start, stop ...). Raises ValueError for what are no rising ranges of columns."""
    columns = len(payload.names)
    if len(bounds) % 2 or any(a >= b for a, b in itertools.pairwise((-1, *bounds, columns + 1))):
        raise ValueError(f"present_sets has {bounds!r:.80}, expected rising bounds within {columns} columns")
    mask = np.zeros(columns, np.bool_)
    for start, stop in zip(bounds[::2], bounds[1::2], strict=True):
        mask[start:stop] = True
    token_ids, logprobs, *layers = mask.tolist()
    return PresentColumns(mask, tuple(itertools.compress(payload.spec.moe_layers, layers)), token_ids, logprobs)


@lru_cache(maxsize=256)
def _bounds(columns: tuple[int, ...]) -> list[int]:
    """Rising column numbers as start, stop, start, stop ..."""
    starts = [column for column in columns if column - 1 not in columns]
    stops = [column + 1 for column in columns if column + 1 not in columns]
    return [bound for pair in zip(starts, stops, strict=True) for bound in pair]


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """What a reader knows of a shard before it reads payload. Immutable, picklable, valid as long as the file is."""

    num_columns: int  # of the Arrow schema, also those that this version does not know
    payload: PayloadColumns
    components: tuple[str, ...]  # names, parallel to Row.components
    compression: str
    rows: tuple[Row, ...]  # in file order
    inputs: tuple[str, ...]  # names of the shards that this one replaces
    tombstones_applied: tuple[str, ...]  # uuids
    _first_rows: tuple[int, ...]  # of each batch
    _buffers: tuple[Ints, ...]  # see `buffers`
    _tokens: Ints  # [rows + 1], running sum of num_tokens
    _sets: npt.NDArray[np.intp]  # [rows], which of `_masks` says what the row has
    _masks: npt.NDArray[np.bool_]  # [sets, columns]

    @property
    def spec(self) -> RoutingSpec:
        """What the payload looks like."""
        return self.payload.spec

    def batch_of(self, row: int) -> int:
        """The number of the record batch of a row."""
        return bisect_right(self._first_rows, row) - 1

    def batch_rows(self, batch: int) -> range:
        """The numbers of the rows of a record batch."""
        return range(self._first_rows[batch], (*self._first_rows, len(self.rows))[batch + 1])

    def buffers(self, batch: int) -> Ints:
        """[columns, 3]: offset in the file, stored and raw length of the data buffer of each payload column."""
        return self._buffers[batch]

    def starts(self, batch: int, row: int) -> Ints:
        """[columns]: bytes in the raw data buffers of the rows of the batch before `row`."""
        return self.payload_bytes(self._first_rows[batch], row)

    def payload_bytes(self, first: int, stop: int) -> Ints:
        """[columns]: payload bytes of the rows from `first` to `stop`."""
        token_bytes = self.payload.token_bytes
        if len(self._masks) == 1:
            sizes: Ints = (self._tokens[stop] - self._tokens[first]) * self._masks[0] * token_bytes
            return sizes
        tokens = np.zeros(len(self._masks), np.int64)
        np.add.at(tokens, self._sets[first:stop], np.diff(self._tokens[first : stop + 1]))
        return tokens @ self._masks.astype(np.int64) * token_bytes


def encode_index(
    payload: PayloadColumns,
    components: tuple[str, ...],
    compression: str,
    rows: Sequence[Row],
    checksums: Sequence[int],
    present: Sequence[tuple[int, ...]],
    batches: Sequence[tuple[int, Ints]],
    inputs: Sequence[str],
    tombstones_applied: Sequence[str],
) -> bytes:
    """The value of `rr.index`. present: columns of each row. batches: number of rows, and ranges [columns, 2]."""
    sets = dict.fromkeys(present)
    numbers = {present_set: i for i, present_set in enumerate(sets)}
    columns: dict[str, list[Any]] = {
        "record_id": [row.record_id for row in rows],
        "request_id": [row.request_id for row in rows],
        "choice": [row.choice for row in rows],
        "t_submit": [row.t_submit for row in rows],
        "token_start": [row.token_start for row in rows],
        "num_tokens": [row.num_tokens for row in rows],
        "part": [row.part for row in rows],
        "status": [row.status for row in rows],
        "reason": [row.reason for row in rows],
        "missing": [list(row.missing) for row in rows],
        "weight_version": [row.weight_version for row in rows],
        "weight_spans": [list(row.weight_spans) for row in rows],
        "run_id": [row.run_id for row in rows],
        "producer": [row.producer for row in rows],
        "tags": [dict(row.tags) for row in rows],
        "checksum": list(checksums),
    }
    index = {
        "version": FORMAT_VERSION,
        "spec": payload.spec.to_dict(),
        "compression": compression,
        "inputs": list(inputs),
        "tombstones_applied": list(tombstones_applied),
        "num_rows": len(rows),
        "components": {name: [row.components[i] for row in rows] for i, name in enumerate(components)},
        **{name: column for name, column in columns.items() if not _is_default(name, column)},
        "present_sets": [_bounds(present_set) for present_set in sets],
        "present": [numbers[present_set] for present_set in present],
        "batches": [{"num_rows": count, "ranges": ranges.ravel().tolist()} for count, ranges in batches],
    }
    return json.dumps(index, separators=(",", ":")).encode("ascii")


def _is_default(name: str, column: list[Any]) -> bool:
    return name in DEFAULTS and column.count(DEFAULTS[name]) == len(column)


def likely_tail(rows: int, size: int) -> int:
    """Bytes at the end of a shard of so many rows and bytes that very likely hold its footer."""
    return max(TAIL_BYTES, rows * _ROW_BYTES + (size >> 20) * _BATCH_BYTES)


def read_index(source: Source, tail_bytes: int = TAIL_BYTES) -> ShardIndex:
    """The index of a stored shard, from one read of its last `tail_bytes` (two where the footer is larger).

    Raises CorruptShardError for what is no whole shard and says why, NewerFormatError for one of a later format.
    """
    tail = source.tail(tail_bytes)
    size = source.size
    try:
        length = footer_length(tail)
        if length + TRAILER_BYTES > size:
            _corrupt(f"its trailer claims a footer of {length} bytes, the file has {size}")
        if length + TRAILER_BYTES > len(tail):
            tail = source.tail(length + TRAILER_BYTES)
        num_columns, num_batches, metadata = read_footer(tail[len(tail) - TRAILER_BYTES - length : -TRAILER_BYTES])
        text, checksum = metadata.get(INDEX_KEY.encode()), metadata.get(CHECKSUM_KEY.encode())
        if text is None or checksum is None:
            _corrupt(f"its footer has no {INDEX_KEY} and {CHECKSUM_KEY}: it was not written by rr_dataset")
        if xxhash.xxh3_64_hexdigest(text).encode() != checksum:
            _corrupt(f"its {INDEX_KEY} does not have the checksum in {CHECKSUM_KEY}: it is damaged")
        return _decode(read_json(text, INDEX_KEY), num_columns, num_batches, size - TRAILER_BYTES - length)
    except (ValueError, RecursionError) as error:
        if isinstance(error, (CorruptShardError, NewerFormatError)):
            raise
        raise CorruptShardError(f"the shard is cut, foreign or damaged: {error}") from error


def _corrupt(text: str) -> NoReturn:
    raise CorruptShardError(f"the shard is cut, foreign or damaged: {text}")


class _Reader:
    """The fields of a parsed index, checked as they are taken."""

    def __init__(self, index: Any) -> None:
        if not isinstance(index, dict):
            _corrupt(f"its {INDEX_KEY} is no JSON object")
        self._index = index
        self.rows = self.integer(index, "num_rows", 1, MAX_COLUMN_BYTES)

    def integer(self, table: dict[str, Any], name: str, least: int, most: int) -> int:
        value = table.get(name)
        if type(value) is not int or not least <= value <= most:
            _corrupt(f"{name} is {value!r:.80}, expected {least} to {most}")
        return value

    def value(self, name: str, kind: type) -> Any:
        value = self._index.get(name)
        if type(value) is not kind:
            _corrupt(f"{name} is {value!r:.80}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.value(name, list)
        if not all(type(value) is str for value in values):
            _corrupt(f"{name} has {values!r:.80}, expected texts")
        return tuple(values)

    def column(self, name: str, types: frozenset[type], values: Any = None) -> list[Any]:
        """One value per row."""
        if values is None:
            values = self._index.get(name)
            if values is None and name in DEFAULTS:
                return [DEFAULTS[name]] * self.rows
        if type(values) is not list or len(values) != self.rows:
            _corrupt(f"{name} is no list of {self.rows} values, one per row")
        if not types.issuperset(map(type, values)):
            _corrupt(f"{name} has {values!r:.80}, expected {' or '.join(sorted(kind.__name__ for kind in types))}")
        return values

    def integers(self, name: str, most: int) -> list[int]:
        column = self.column(name, _INT)
        if min(column) < 0 or max(column) > most:
            _corrupt(f"{name} has {column!r:.80}, expected 0 to {most}")
        return column

    def one_of(self, name: str, allowed: Sequence[str]) -> list[str]:
        column = self.column(name, _TEXT)
        if not set(column).issubset(allowed):
            _corrupt(f"{name} has {column!r:.80}, expected {', '.join(allowed)}")
        return column

    def spans(self, name: str, types: tuple[type, ...]) -> list[tuple[Any, ...]]:
        """Per row a list of (start, stop, ...)."""
        column = self.column(name, _LIST)
        if not any(column):
            return [()] * self.rows
        for spans in column:
            for span in spans:
                if type(span) is not list or tuple(map(type, span)) != types or not 0 <= span[0] < span[1] < 1 << 63:
                    _corrupt(f"{name} has {span!r:.80}")
        return [tuple(map(tuple, spans)) for spans in column]


@lru_cache(maxsize=16)
def _spec(layers: tuple[int, ...], num_experts: int, top_k: int, dtype: str, topk_order: str) -> RoutingSpec:
    return RoutingSpec(layers, num_experts, top_k, dtype, topk_order)


def _decode_spec(data: dict[str, Any]) -> RoutingSpec:
    try:
        layers, *rest = (data[name] for name in ("moe_layers", "num_experts", "top_k", "dtype", "topk_order"))
        return _spec(tuple(layers), *rest)
    except (KeyError, TypeError, ValueError, InvalidInputError) as error:
        _corrupt(f"spec is {data!r:.200} ({error!r})")


def _decode(index: Any, num_columns: int, num_batches: int, footer_at: int) -> ShardIndex:
    read = _Reader(index)
    version = read.value("version", int)
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"the shard has format {version}, this rr_dataset reads up to {FORMAT_VERSION}: upgrade it"
        )
    payload = PayloadColumns.of(_decode_spec(read.value("spec", dict)))
    compression = read.value("compression", str)
    if compression not in COMPRESSIONS:
        _corrupt(f"compression is {compression!r:.80}, expected one of {', '.join(COMPRESSIONS)}")
    sets = _decode_sets(read, payload)
    present = read.integers("present", len(sets) - 1)
    num_tokens = read.integers("num_tokens", MAX_COLUMN_BYTES)
    first_rows, buffers = _decode_batches(read, len(payload.names), num_batches, footer_at)
    result = ShardIndex(
        num_columns=num_columns,
        payload=payload,
        components=tuple(read.value("components", dict)),
        compression=compression,
        rows=_decode_rows(read, num_tokens, [sets[i] for i in present]),
        inputs=read.texts("inputs"),
        tombstones_applied=read.texts("tombstones_applied"),
        _first_rows=first_rows,
        _buffers=buffers,
        _tokens=np.array([*itertools.accumulate(num_tokens, initial=0)], np.int64),
        _sets=np.array(present, np.intp),
        _masks=np.array([each.mask for each in sets]),
    )
    for first, stop, batch in zip(first_rows, (*first_rows[1:], read.rows), buffers, strict=True):
        batch[:, 2] = result.payload_bytes(first, stop)
        stored, raw = batch[:, 1], batch[:, 2]
        wrong = stored != raw if compression == "none" else ((stored == 0) != (raw == 0)) | (raw > MAX_COLUMN_BYTES)
        if wrong.any():
            at = int(wrong.argmax())
            _corrupt(
                f"{payload.names[at]} has {stored[at]} bytes where its rows need {raw[at]} (compression {compression})"
            )
    return result


def _decode_sets(read: _Reader, payload: PayloadColumns) -> list[PresentColumns]:
    sets = read.value("present_sets", list)
    if not 1 <= len(sets) <= read.rows:
        _corrupt(f"present_sets has {len(sets)} entries for {read.rows} rows")
    for bounds in sets:
        if type(bounds) is not list or not _INT.issuperset(map(type, bounds)):
            _corrupt(f"present_sets has {bounds!r:.80}")
    return [_present_columns(payload, tuple(bounds)) for bounds in sets]


def _decode_batches(
    read: _Reader, columns: int, num_batches: int, footer_at: int
) -> tuple[tuple[int, ...], tuple[Ints, ...]]:
    batches = read.value("batches", list)
    if len(batches) != num_batches:
        _corrupt(f"its index has {len(batches)} batches, its footer {num_batches}")
    first_rows, buffers, rows = [], [], 0
    for batch in batches:
        if type(batch) is not dict or type(batch.get("ranges")) is not list:
            _corrupt(f"batches has {batch!r:.80}")
        flat = batch["ranges"]
        if len(flat) != 2 * columns or set(map(type, flat)) != {int} or min(flat) < 0 or max(flat) > footer_at:
            _corrupt(f"ranges is {flat!r:.80}, expected {columns} offsets and lengths within {footer_at} bytes")
        numbers = np.zeros((columns, 3), np.int64)
        numbers[:, :2] = np.array(flat, np.int64).reshape(columns, 2)
        end = int((numbers[:, 0] + numbers[:, 1]).max())
        if end > footer_at:
            _corrupt(f"a payload buffer ends at byte {end}, the footer begins at {footer_at}")
        first_rows.append(rows)
        buffers.append(numbers)
        rows += read.integer(batch, "num_rows", 1, read.rows)
    if rows != read.rows:
        _corrupt(f"its batches have {rows} rows, num_rows is {read.rows}")
    return tuple(first_rows), tuple(buffers)


def _decode_rows(read: _Reader, num_tokens: list[int], present: list[PresentColumns]) -> tuple[Row, ...]:
    components = [read.column(name, _TEXT_OR_NULL, column) for name, column in read.value("components", dict).items()]
    if not components:
        _corrupt("components is empty")
    tags = list(map(dict, read.column("tags", _OBJECT)))
    if not all(type(text) is str for row in tags for text in row.values()):
        _corrupt(f"tags has {tags!r:.80}, expected texts")
    starts = read.integers("token_start", MAX_POSITION)
    if max(map(operator.add, starts, num_tokens)) > MAX_POSITION:
        _corrupt(f"token_start is {starts!r:.80}, expected rows that end at {MAX_POSITION} or before")
    return tuple(
        map(
            Row,
            read.column("record_id", _TEXT),
            read.column("request_id", _TEXT),
            zip(*components, strict=True),
            read.column("choice", _INT_OR_NULL),
            read.integers("t_submit", (1 << 64) - 1),
            starts,
            num_tokens,
            read.column("part", _BOOL),
            read.one_of("status", STATUSES),
            read.column("run_id", _TEXT),
            [each.layers for each in present],
            read.column("reason", _TEXT_OR_NULL),
            read.spans("missing", (int, int)),
            read.column("weight_version", _TEXT_OR_NULL),
            read.spans("weight_spans", (int, int, str)),
            read.one_of("producer", PRODUCERS),
            tags,
            [each.token_ids for each in present],
            [each.logprobs for each in present],
            read.integers("checksum", (1 << 64) - 1),
        )
    )
