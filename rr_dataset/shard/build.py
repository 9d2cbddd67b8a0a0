"""The bytes of a shard file from rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import DatasetFormat
from rr_dataset.options import COMPRESSIONS
from rr_dataset.record import RoutingSpec, Row, RowData, shown_layers
from rr_dataset.schema import VECTORS, scalar_schema, shard_schema
from rr_dataset.shard.arrow import ALIGNMENT, COMPRESSED_PREFIX_BYTES, BatchLayout, Block, FileTemplate, padded
from rr_dataset.shard.index import CHECKSUM_KEY, INDEX_KEY, MAX_COLUMN_BYTES, PayloadColumns, encode_index
from rr_dataset.shard.order import sort_ids
from rr_dataset.shard.tiling import copy_tiles

MAX_BATCH_BYTES = 256 << 20  # of which a column is a part, so the offsets of several rows fit as well
_VECTOR_ITEM_BYTES = 4
_SMALL_BYTES = 64  # not worth compressing
_BATCH_ROOM_BYTES = 64 << 10  # of a batch beside its payload, unless it has hundreds of rows
_HOT_BYTES = 64 << 10  # of a layer that is hashed right after its copy, while the cache has it

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class Scratch:
    """Memory that `build_shard` writes into and reuses, so that large shards cause no page faults after the first.

    It grows to the largest shard built and keeps that. One build at a time: its next use overwrites the last result.
    """

    def __init__(self) -> None:
        self._out = np.empty(0, np.uint8)
        self._raw = np.empty(0, np.uint8)

    def out(self, size: int, keep: int = 0) -> Bytes:
        """At least `size` bytes for the file, of which the first `keep` stay what they are."""
        if size > self._out.size:
            grown = np.empty(size + size // 8, np.uint8)
            grown[:keep] = self._out[:keep]
            self._out = grown
        return self._out

    def raw(self, size: int) -> Bytes:
        """At least `size` bytes for a body before its compression."""
        if size > self._raw.size:
            self._raw = np.empty(size + size // 8, np.uint8)
        return self._raw


def build_shard(
    rows: Sequence[RowData],
    fmt: DatasetFormat,
    *,
    compression: str = "none",
    inputs: Sequence[str] = (),
    tombstones_applied: Sequence[str] = (),
    batch_bytes: int = 1 << 20,
    max_batch_rows: int = 4096,
    scratch: Scratch | None = None,
) -> memoryview:
    """The bytes of a shard file: rows sorted by (request_id, t_submit, record_id), with their checksums.

    rows: at least one. Row.checksum, has_token_ids and has_logprobs are not read but taken from the payload.
    inputs: names of the shards this one replaces. tombstones_applied: uuids of the tombstones its rows were held against.
    batch_bytes: raw payload of a record batch, unless one row is larger.
    scratch: memory to build in; the view returned is then valid until its next use. Threads use one each.

    Raises InvalidRoutingError for a payload that does not match its row or the spec, InvalidInputError for no rows or an
    unknown compression.
    """
    if not rows:
        raise InvalidInputError("a shard needs at least one row")
    builder = ShardBuilder(fmt, compression=compression, scratch=Scratch() if scratch is None else scratch)
    ordered = sorted(rows, key=lambda data: (data.row.request_id, data.row.t_submit, data.row.record_id))
    groups = list(_split(ordered, min(batch_bytes, MAX_BATCH_BYTES), max_batch_rows))
    builder.reserve(sum(map(_payload_bytes, ordered)), len(groups))
    for group in groups:
        builder.add(group)
    return builder.finish(inputs, tombstones_applied)


class ShardBuilder:
    """Makes a shard's bytes batch by batch, so that only one batch's payload need be in memory. Not thread-safe.

    level: of zstd. extra: columns that this version does not know; they stand behind its own.

    Raises InvalidInputError for an unknown compression.
    """

    def __init__(
        self,
        fmt: DatasetFormat,
        *,
        compression: str,
        scratch: Scratch,
        level: int | None = None,
        extra: Sequence[pa.Field] = (),
    ) -> None:
        if compression not in COMPRESSIONS:
            raise InvalidInputError(f"compression={compression!r}: expected one of {', '.join(COMPRESSIONS)}")
        self._format = fmt
        self._compression = compression
        self._codec = None if compression == "none" else _codec(compression, level)
        self._scratch = scratch
        self._template = _Template.of(fmt.spec, fmt.keys, compression, tuple(extra))
        self._rows: list[Row] = []
        self._checksums: list[int] = []
        self._present: list[tuple[int, ...]] = []
        self._batches: list[tuple[int, Ints]] = []
        self._blocks: list[Block] = []
        self._at = len(self._template.file.head)
        scratch.out(self._at)[: self._at] = np.frombuffer(self._template.file.head, np.uint8)

    def reserve(self, payload_bytes: int, batches: int) -> None:
        """Take memory for all that will be added, so that it need not grow; what stays unused costs nothing."""
        self._scratch.out(self._at + payload_bytes + batches * _BATCH_ROOM_BYTES, self._at)

    def add(self, rows: Sequence[RowData], extra: pa.RecordBatch | None = None) -> None:
        """Append a record batch. rows: in the order of the file. extra: the extra columns, parallel to `rows`.

        Raises InvalidRoutingError for a payload that does not match its row or the spec.
        """
        for data in rows:
            _check(data, self._format.spec)
        file = self._template.file
        batch = _Batch(tuple(rows), self._template, extra)
        body_at = self._at + file.message_length
        out = self._scratch.out(body_at + batch.max_stored_length, self._at)
        stored = batch.write(out, body_at, self._codec, self._scratch)
        out[self._at : body_at] = np.frombuffer(
            file.message(len(batch.rows), batch.nodes, batch.buffers, stored), np.uint8
        )
        self._blocks.append(Block(self._at, file.message_length, stored))
        self._rows += [data.row for data in rows]
        self._checksums += batch.checksums
        self._present += batch.present
        self._batches.append((len(rows), batch.ranges(body_at)))
        self._at = body_at + stored

    def finish(self, inputs: Sequence[str] = (), tombstones_applied: Sequence[str] = ()) -> memoryview:
        """The file, valid until the next use of the scratch memory. At least one batch has been added."""
        index = encode_index(
            self._template.payload,
            self._format.keys.components,
            self._compression,
            self._rows,
            self._checksums,
            self._present,
            self._batches,
            inputs,
            tombstones_applied,
        )
        checksum = xxhash.xxh3_64_hexdigest(index).encode()
        tail = self._template.file.tail(self._blocks, {INDEX_KEY: index, CHECKSUM_KEY: checksum})
        end = self._at + len(tail)
        out = self._scratch.out(end, self._at)
        out[self._at : end] = np.frombuffer(tail, np.uint8)
        return out.data[:end]


@dataclass(frozen=True)
class _Template:
    """What the shards of one dataset and compression share.

    nodes, offsets, data: of each payload column its field node, its offsets buffer (validity is the one before) and its
    data buffer, counted from the first that is not a scalar column's.
    """

    file: FileTemplate
    payload: PayloadColumns
    components: tuple[str, ...]
    scalars: pa.DataType  # the scalar columns as one struct
    scalar_nodes: int
    scalar_buffers: int
    nodes: Ints
    offsets: Ints
    data: Ints
    offset_units: Ints  # [columns, 1]: what a token adds to the offsets
    payload_nodes: int
    payload_buffers: int

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, spec: RoutingSpec, keys: KeyScheme, compression: str, extra: tuple[pa.Field, ...]) -> _Template:
        """Made once per process."""
        schema, payload = scalar_schema(keys), PayloadColumns.of(spec)
        nulls = pa.record_batch([pa.nulls(1, field.type) for field in schema], schema=schema)
        layout = BatchLayout.of(memoryview(nulls.serialize()))
        vectors, layers = np.arange(len(VECTORS)), np.arange(spec.num_layers)
        first_node, first_buffer = 2 * len(VECTORS), 4 * len(VECTORS)  # a list has two nodes, and two buffers in each
        return cls(
            FileTemplate.of(reduce(pa.Schema.append, extra, shard_schema(spec, keys)), compression),
            payload,
            keys.components,
            pa.struct(list(schema)),
            layout.num_nodes,
            layout.num_buffers,
            nodes=np.concatenate([2 * vectors, first_node + layers]),
            offsets=np.concatenate([4 * vectors + 1, first_buffer + 3 * layers + 1]),
            data=np.concatenate([4 * vectors + 3, first_buffer + 3 * layers + 2]),
            offset_units=np.where(np.arange(len(payload.names)) < len(VECTORS), 1, payload.token_bytes)[:, np.newaxis],
            payload_nodes=first_node + spec.num_layers,
            payload_buffers=first_buffer + 3 * spec.num_layers,
        )


def _codec(compression: str, level: int | None) -> pa.Codec:
    return pa.Codec(compression, level) if compression == "zstd" and level is not None else pa.Codec(compression)


def _split(ordered: Sequence[RowData], batch_bytes: int, max_rows: int) -> Iterator[tuple[RowData, ...]]:
    """Neighbours that share a record batch."""
    group: list[RowData] = []
    size = 0
    for data in ordered:
        length = _payload_bytes(data)
        if group and (size + length > batch_bytes or len(group) >= max_rows):
            yield tuple(group)
            group, size = [], 0
        group.append(data)
        size += length
    yield tuple(group)


def _payload_bytes(data: RowData) -> int:
    return sum(array.nbytes for array in (data.routed_experts, data.token_ids, data.logprobs) if array is not None)


def _check(data: RowData, spec: RoutingSpec) -> None:
    row = data.row
    layers = row.layers if row.layers == spec.moe_layers or not row.layers else spec.check_layers(row.layers)
    experts = data.routed_experts
    if experts is None:
        if layers:
            raise InvalidRoutingError(
                f"row {row.record_id} claims layers {shown_layers(layers)} and has no routed_experts"
            )
    elif not layers:
        raise InvalidRoutingError(f"row {row.record_id} has routed_experts of {experts.shape} and claims no layers")
    elif experts.shape != (len(layers), row.num_tokens, spec.top_k) or experts.dtype != spec.dtype:
        raise InvalidRoutingError(
            f"row {row.record_id} has routed_experts of {experts.shape} {experts.dtype}, "
            f"expected {(len(layers), row.num_tokens, spec.top_k)} {spec.dtype}"
        )
    token_bytes = max(_VECTOR_ITEM_BYTES, spec.top_k * np.dtype(spec.dtype).itemsize)
    if not 0 <= row.num_tokens * token_bytes <= MAX_COLUMN_BYTES:
        raise InvalidRoutingError(
            f"row {row.record_id} has {row.num_tokens} tokens: a column holds at most 2 GiB of one"
        )
    for name, vector, dtype in (("token_ids", data.token_ids, np.int32), ("logprobs", data.logprobs, np.float32)):
        if vector is not None and (vector.shape != (row.num_tokens,) or vector.dtype != dtype):
            raise InvalidRoutingError(
                f"row {row.record_id} has {name} of {vector.shape} {vector.dtype}, "
                f"expected {(row.num_tokens,)} {np.dtype(dtype)}"
            )


class _Batch:
    """One record batch: where its buffers stand, then their bytes."""

    def __init__(self, rows: tuple[RowData, ...], template: _Template, extra: pa.RecordBatch | None) -> None:
        self.rows = rows
        self.present = [template.payload.present(data) for data in rows]
        self.checksums: list[int] = []
        self.nodes = np.zeros((template.file.layout.num_nodes, 2), np.int64)
        self.buffers = np.zeros((template.file.layout.num_buffers, 2), np.int64)
        self._template = template
        self._scalars = _serialize_scalars(rows, template)
        self._extra = None if extra is None else memoryview(extra.serialize())
        has = np.zeros((len(template.payload.names), len(rows)), np.bool_)
        for i, columns in enumerate(self.present):
            has[columns, i] = True
        self._has = has
        tokens = np.fromiter((data.row.num_tokens for data in rows), np.int64, len(rows))
        self._tokens = np.zeros((len(has), len(rows) + 1), np.int64)  # where each row begins in each column
        np.cumsum(has * tokens, axis=1, out=self._tokens[:, 1:])
        self._plan()

    def _plan(self) -> None:
        """Fill `nodes` and `buffers`: the scalar columns as pyarrow laid them out, then the payload, then extra columns."""
        template, count = self._template, len(self.rows)
        scalars = BatchLayout.of(self._scalars)
        self._scalar_body = self._scalars[scalars.body_at :]
        nodes_end = template.scalar_nodes + template.payload_nodes
        buffers_end = template.scalar_buffers + template.payload_buffers
        nodes, buffers = (
            self.nodes[template.scalar_nodes : nodes_end],
            self.buffers[template.scalar_buffers : buffers_end],
        )
        for table, part in ((self.nodes, scalars.nodes), (self.buffers, scalars.buffers)):
            numbers = np.frombuffer(self._scalars[part], np.int64).reshape(-1, 2)
            table[: len(numbers)] = numbers
        nulls = count - np.count_nonzero(self._has, axis=1)
        totals = self._tokens[:, -1]
        nodes[template.nodes, 0] = count
        nodes[template.nodes, 1] = nulls
        nodes[template.nodes[: len(VECTORS)] + 1, 0] = totals[: len(VECTORS)]  # their items
        buffers[template.offsets - 1, 1] = np.where(nulls > 0, (count + 7) // 8, 0)
        buffers[template.offsets, 1] = 4 * (count + 1)
        buffers[template.data, 1] = totals * template.payload.token_bytes
        ends = len(self._scalar_body) + np.cumsum(padded(buffers[:, 1]))
        buffers[0, 0] = len(self._scalar_body)
        buffers[1:, 0] = ends[:-1]
        self._offsets, self._data = buffers[template.offsets], buffers[template.data]
        self._validity = buffers[template.offsets - 1]
        self._length = int(ends[-1])
        self._extra_at = self._length
        if self._extra is not None:
            self._place_extra(BatchLayout.of(self._extra), nodes_end, buffers_end)

    def _place_extra(self, layout: BatchLayout, nodes_at: int, buffers_at: int) -> None:
        """The extra columns as pyarrow laid them out, behind all others."""
        extra = self._extra
        if extra is None or layout.num_buffers != len(self.buffers) - buffers_at:
            raise InvalidInputError("extra columns: a type whose number of buffers varies cannot be kept; cast it")
        self.nodes[nodes_at:] = np.frombuffer(extra[layout.nodes], np.int64).reshape(-1, 2)
        self.buffers[buffers_at:] = np.frombuffer(extra[layout.buffers], np.int64).reshape(-1, 2)
        self.buffers[buffers_at:, 0] += self._length
        self._extra = extra[layout.body_at :]
        self._length += len(self._extra)

    @property
    def max_stored_length(self) -> int:
        """Bytes of the body at most, whatever the compression."""
        return self._length + 2 * COMPRESSED_PREFIX_BYTES * len(self.buffers)

    def ranges(self, body_at: int) -> Ints:
        """[columns, 2]: offset in the file and stored length of each payload column's data buffer."""
        return self.buffers[self._template.scalar_buffers :][self._template.data] + (body_at, 0)

    def write(self, out: Bytes, at: int, codec: pa.Codec | None, scratch: Scratch) -> int:
        """Write the body at `at` and set `checksums`; the number of bytes."""
        if codec is None:
            self._fill(out[at : at + self._length])
            return self._length
        body = scratch.raw(self._length)[: self._length]
        self._fill(body)
        return self._compress(body, out[at:], codec)

    def _fill(self, body: Bytes) -> None:
        body[: len(self._scalar_body)] = np.frombuffer(self._scalar_body, np.uint8)
        if self._extra is not None:
            body[self._extra_at :] = np.frombuffer(self._extra, np.uint8)
        for offset, length in self.buffers[self.buffers[:, 1] % ALIGNMENT > 0].tolist():
            body[offset + length : offset + padded(length)] = 0  # recycled memory
        units = self._template.offset_units
        for at, offsets in zip(self._offsets[:, 0].tolist(), (self._tokens * units).astype(np.int32), strict=True):
            body[at : at + offsets.nbytes] = offsets.view(np.uint8)
        for at, length, has in zip(*self._validity.T.tolist(), self._has, strict=True):
            if length:
                body[at : at + length] = np.packbits(has, bitorder="little")
        token_bytes = self._template.payload.token_bytes
        for i, data in enumerate(self.rows):
            starts = self._data[:, 0] + self._tokens[:, i] * token_bytes
            for vector, start in zip((data.token_ids, data.logprobs), starts.tolist(), strict=False):
                if vector is not None:
                    body[start : start + vector.nbytes].view(vector.dtype)[:] = vector
            layers = [column for column in self.present[i] if column >= len(VECTORS)]
            self.checksums.append(
                _store_layers(body, starts[layers], data, ordered=self._template.payload.spec.topk_order == "sorted")
            )
        at, length = self.buffers[self._template.scalar_buffers - 1].tolist()  # checksum is the last scalar column
        body[at : at + length].view(np.uint64)[:] = self.checksums

    def _compress(self, body: Bytes, out: Bytes, codec: pa.Codec) -> int:
        """Each buffer by itself, after its raw length; `buffers` then tells where they went."""
        to = 0
        for i, (at, length) in enumerate(self.buffers.tolist()):
            raw = body.data[at : at + length]
            packed = codec.compress(raw) if length > _SMALL_BYTES else raw
            stored, prefix = (packed, length) if len(packed) < length else (raw, -1)
            end = to + (COMPRESSED_PREFIX_BYTES + len(stored) if length else 0)
            self.buffers[i] = to, end - to
            if length:
                out[to : to + COMPRESSED_PREFIX_BYTES].view(np.int64)[0] = prefix
                out[to + COMPRESSED_PREFIX_BYTES : end] = np.frombuffer(stored, np.uint8)
                out[end : padded(end)] = 0
            to = padded(end)
        return to


def _serialize_scalars(rows: Sequence[RowData], template: _Template) -> memoryview:
    """An Arrow batch message of the scalar columns, with its body; checksums are zero."""
    values = [
        {
            **dict(zip(template.components, row.components, strict=True)),
            "record_id": row.record_id,
            "request_id": row.request_id,
            "choice": row.choice,
            "t_submit": row.t_submit,
            "token_start": row.token_start,
            "num_tokens": row.num_tokens,
            "part": row.part,
            "status": row.status,
            "reason": row.reason,
            "missing": [{"start": start, "stop": stop} for start, stop in row.missing],
            "weight_version": row.weight_version,
            "weight_spans": [{"start": a, "stop": b, "version": version} for a, b, version in row.weight_spans],
            "run_id": row.run_id,
            "producer": row.producer,
            "tags": list(row.tags.items()),
            "checksum": 0,
        }
        for row in (data.row for data in rows)
    ]
    return memoryview(pa.RecordBatch.from_struct_array(pa.array(values, template.scalars)).serialize())


def _store_layers(body: Bytes, starts: Ints, data: RowData, *, ordered: bool) -> int:
    """Copy the layers of a row to their places; their checksum."""
    digest = xxhash.xxh3_64()
    source = data.routed_experts
    if source is None or not source.size:
        return digest.intdigest()
    _, tokens, top_k = source.shape
    steps = np.diff(starts)
    hot = source.nbytes >= _HOT_BYTES * len(starts) and source.strides[1:] == (top_k * source.itemsize, source.itemsize)
    even = not len(steps) or int(steps.min()) == int(steps.max())
    group = len(starts) if even and not hot else 1  # layers that one copy takes
    step = int(steps[0]) if len(steps) else 0
    for at in range(0, len(starts), group):
        strides = (step, top_k * source.itemsize, source.itemsize)
        place = np.ndarray((group, tokens, top_k), source.dtype, body, int(starts[at]), strides)
        copy_tiles(place, source[at : at + group])
        if ordered:
            sort_ids(place)
        for layer in place:
            digest.update(layer)
    return digest.intdigest()
