"""Is a shard what it says: its index against what pyarrow reads, every payload byte, every checksum.

Nothing here trusts the other side: the index tells one story, Arrow's metadata and columns another, and the two must
agree. What the rows mean (their ids, their directory, the file's name) is for `verify` to judge.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rr_dataset.errors import CorruptShardError, FormatError
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import read_json
from rr_dataset.record import RoutingSpec, Row
from rr_dataset.schema import LAYER_COLUMN, VECTORS, scalar_schema, shard_schema
from rr_dataset.selection import stretches
from rr_dataset.shard.index import ShardIndex, Source
from rr_dataset.shard.read import TileRead, VectorRead, read_tiles
from rr_dataset.shard.stream import arrow_file

_VECTOR_DTYPES = {"token_ids": np.dtype(np.int32), "logprobs": np.dtype(np.float32)}

Bytes = npt.NDArray[np.uint8]


class Fault(NamedTuple):
    """One thing that is wrong in a shard.

    kind: "arrow" (pyarrow cannot read it, or reads other rows than the index tells), "payload" (the index leads to other
    bytes than pyarrow reads), "checksum", "experts" (ids out of range, unsorted, or where none are), "tiling" (buffers that
    overlap).
    """

    kind: str
    row: int | None  # in ShardIndex.rows; None: the file as a whole
    text: str


def check_shard(source: Source, index: ShardIndex, keys: KeyScheme) -> Iterator[Fault]:
    """What is wrong with the content of a stored shard, in the order of its rows.

    In memory is one record batch, twice. Raises what the source raises.
    """
    yield from _tiling(index)
    try:
        with arrow_file(source, source.size, pa.ipc.IpcReadOptions(use_threads=False)) as reader:
            yield from _schema(reader.schema, index, keys)
            at = 0
            while at < len(index.rows):
                number = index.batch_of(at)
                rows = index.batch_rows(number)
                at = rows.stop
                batch = reader.get_batch(number)
                batch.validate(full=True)
                if batch.num_rows != len(rows):
                    yield Fault(
                        "arrow", rows.start, f"pyarrow reads {batch.num_rows} rows, the index tells {len(rows)}"
                    )
                    continue
                yield from _scalars(batch, index, rows, keys)
                yield from _Payload(source, index, rows).faults(batch)
    except CorruptShardError as error:
        yield Fault("arrow", None, str(error))


def _tiling(index: ShardIndex) -> Iterator[Fault]:
    """No byte belongs to two buffers, and batches follow one another."""
    end, at = 0, 0
    while at < len(index.rows):
        number = index.batch_of(at)
        at = index.batch_rows(number).stop
        buffers = index.buffers(number)
        placed = sorted((int(start), int(stored), i) for i, (start, stored, _) in enumerate(buffers) if stored)
        for start, stored, column in placed:
            if start < end:
                name = index.payload.names[column]
                yield Fault(
                    "tiling",
                    index.batch_rows(number).start,
                    f"{name} of batch {number} begins at byte {start}, within what ends at {end}",
                )
            end = max(end, start + stored)


def _schema(schema: pa.Schema, index: ShardIndex, keys: KeyScheme) -> Iterator[Fault]:
    expected = _expected(index.spec, keys)
    if schema.equals(expected, check_metadata=True):
        return
    for field in expected:
        count = schema.names.count(field.name)
        if count != 1:
            yield Fault("arrow", None, f"it has {count} columns {field.name}")
        elif not schema.field(field.name).equals(field):
            yield Fault("arrow", None, f"column {schema.field(field.name)}, expected {field}")
    known = [name for name in schema.names if name in expected.names]
    if known != expected.names and sorted(known) == sorted(expected.names):
        yield Fault("arrow", None, f"its columns stand in another order: {', '.join(known[:8])} ...")
    found = schema.metadata or {}
    for key, value in expected.metadata.items():
        if _json(found.get(key)) != _json(value):
            yield Fault("arrow", None, f"schema metadata {key.decode()} is {found.get(key)!r:.200}, expected {value!r}")


@lru_cache(maxsize=4)
def _expected(spec: RoutingSpec, keys: KeyScheme) -> pa.Schema:
    return shard_schema(spec, keys)


def _json(text: bytes | None) -> Any:
    try:
        return None if text is None else read_json(text, "it")
    except FormatError:
        return None


def _scalars(batch: pa.RecordBatch, index: ShardIndex, rows: range, keys: KeyScheme) -> Iterator[Fault]:
    """Every scalar column as pyarrow reads it, against the index."""
    told = [_values(index.rows[number], keys) for number in rows]
    for name in scalar_schema(keys).names:
        if batch.schema.names.count(name) != 1:
            continue  # `_schema` has said so
        for number, value, row in zip(rows, batch.column(name).to_pylist(), told, strict=True):
            found = dict(value) if name == "tags" and value is not None else value
            if found != row[name]:
                yield Fault("arrow", number, f"{name} is {found!r:.80} in Arrow, {row[name]!r:.80} in the index")


def _values(row: Row, keys: KeyScheme) -> dict[str, Any]:
    """A row of the index as Arrow has it."""
    values = {name: getattr(row, name) for name in _PLAIN}
    values["missing"] = [{"start": start, "stop": stop} for start, stop in row.missing]
    values["weight_spans"] = [{"start": a, "stop": b, "version": version} for a, b, version in row.weight_spans]
    values["tags"] = dict(row.tags)
    return {**values, **dict(zip(keys.components, row.components, strict=True))}


_PLAIN = (
    *("record_id", "request_id", "choice", "t_submit", "token_start", "num_tokens", "part", "status", "reason"),
    *("weight_version", "run_id", "producer", "checksum"),
)


class _Payload:
    """The payload of one record batch as the index leads to it, column by column, the rows one after the other."""

    def __init__(self, source: Source, index: ShardIndex, rows: range) -> None:
        self._source = source
        self._index = index
        self._rows = rows
        spec = index.spec
        chosen = [index.rows[number] for number in rows]
        self._ends = [0, *itertools.accumulate(row.num_tokens for row in chosen)]
        self._tokens = np.diff(self._ends)
        tokens = self._ends[-1]
        self._experts = np.zeros((spec.num_layers, tokens, spec.top_k), spec.dtype)
        self._vectors = {name: np.zeros(tokens, dtype) for name, dtype in _VECTOR_DTYPES.items()}
        self._places = {LAYER_COLUMN % layer: place for place, layer in enumerate(spec.moe_layers)}
        held = [frozenset(row.layers) for row in chosen]
        self._has = {LAYER_COLUMN % layer: [layer in each for each in held] for layer in spec.moe_layers}
        for name in VECTORS:
            self._has[name] = [bool(getattr(row, f"has_{name}")) for row in chosen]

    def faults(self, batch: pa.RecordBatch) -> Iterator[Fault]:
        """Against pyarrow's columns, the checksums and the spec."""
        try:
            self._read()
        except CorruptShardError as error:
            yield Fault("payload", self._rows.start, str(error))
            return
        for name, has in self._has.items():
            if batch.schema.names.count(name) == 1:
                yield from self._column(batch.column(name), name, has)
        yield from self._checksums()
        yield from self._ids()

    def _read(self) -> None:
        tiles, vectors = [], []
        layers = self._index.spec.moe_layers
        for i, number in enumerate(self._rows):
            row, (first, stop) = self._index.rows[number], self._ends[i : i + 2]
            span = (row.token_start, row.token_stop)
            for start, end in stretches(layers, row.layers):
                tiles.append(TileRead(number, layers[start:end], *span, self._experts[start:end, first:stop]))
            for name, vector in self._vectors.items():
                if getattr(row, f"has_{name}"):
                    vectors.append(VectorRead(number, name, *span, vector[first:stop]))
        read_tiles(self._source, self._index, tiles, vectors)

    def _column(self, column: pa.Array, name: str, has: list[bool]) -> Iterator[Fault]:
        """Which rows have it, how long they are, and their bytes."""
        there = column.is_valid().to_pylist()
        if there != has:
            at = _first_difference(there, has)
            text = f"{name} is {'there' if there[at] else 'null'} in Arrow, not so in the index"
            yield Fault("arrow", self._rows[at], text)
            return
        lengths, found = _content(column)
        per_token = 1 if name in VECTORS else self._experts.shape[2] * self._experts.itemsize
        tokens = self._tokens * has
        needed = (tokens * per_token).tolist()
        if lengths != needed:
            at = _first_difference(lengths, needed)
            text = f"{name} has {lengths[at]} items in Arrow, its tokens need {needed[at]}"
            yield Fault("arrow", self._rows[at], text)
            return
        mine = self._bytes(name, np.array(has))
        if not np.array_equal(mine, found):
            wrong = int(np.argmax(mine != found)) // (mine.size // int(tokens.sum()))
            at = int(np.searchsorted(np.cumsum(tokens), wrong, side="right"))
            yield Fault("payload", self._rows[at], f"{name}: the index leads to other bytes than Arrow's own metadata")

    def _bytes(self, name: str, has: npt.NDArray[np.bool_]) -> Bytes:
        """What the index leads to, of the rows that have the column."""
        whole = self._vectors[name] if name in VECTORS else self._experts[self._places[name]]
        kept = whole if has.all() else whole[np.repeat(has, self._tokens)]
        return kept.reshape(-1).view(np.uint8)

    def _checksums(self) -> Iterator[Fault]:
        for number, (first, stop), layers in self._each():
            digest = xxhash.xxh3_64()
            for layer in layers:
                digest.update(self._experts[layer, first:stop].data)
            told = self._index.rows[number].checksum
            if digest.intdigest() != told:
                yield Fault(
                    "checksum", number, f"its layers have the checksum {digest.intdigest():016x}, not {told:016x}"
                )

    def _ids(self) -> Iterator[Fault]:
        spec, experts = self._index.spec, self._experts
        suspect = int(experts.max(initial=0)) >= spec.num_experts or (
            spec.topk_order == "sorted" and bool((experts[..., 1:] < experts[..., :-1]).any())
        )
        for number, (first, stop), layers in self._each():
            row = self._index.rows[number]
            if not suspect and not row.missing:
                continue
            for layer in layers:
                ids = self._experts[layer, first:stop]
                where = f"layer {spec.moe_layers[layer]}"
                most = int(ids.max(initial=0))
                if most >= spec.num_experts:
                    yield Fault("experts", number, f"{where} has the id {most}, of {spec.num_experts} experts")
                    break
                if spec.topk_order == "sorted" and (ids[:, 1:] < ids[:, :-1]).any():
                    yield Fault("experts", number, f"{where} is not sorted, as the spec says")
                    break
                gaps = [(max(a - row.token_start, 0), max(b - row.token_start, 0)) for a, b in row.missing]
                if any(ids[a:b].any() for a, b in gaps):
                    yield Fault("experts", number, f"{where} has ids where the row says that they are missing")
                    break

    def _each(self) -> Iterator[tuple[int, tuple[int, int], list[int]]]:
        """Number, tokens in the batch, and numbers of the layers of each row."""
        layers = self._index.spec.moe_layers
        for i, number in enumerate(self._rows):
            held = frozenset(self._index.rows[number].layers)
            chosen = [at for at, layer in enumerate(layers) if layer in held]
            yield number, (self._ends[i], self._ends[i + 1]), chosen


def _content(column: pa.Array) -> tuple[list[int], Bytes]:
    """Items of each row, and the bytes of all of them."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]
    data, itemsize = (column.buffers()[3], 4) if pa.types.is_list(column.type) else (column.buffers()[2], 1)
    if data is None:
        return np.diff(offsets).tolist(), np.empty(0, np.uint8)
    first, stop = int(offsets[0]) * itemsize, int(offsets[-1]) * itemsize
    return np.diff(offsets).tolist(), np.frombuffer(data, np.uint8)[first:stop]


def _first_difference(a: list[Any], b: list[Any]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
