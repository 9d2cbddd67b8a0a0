"""Exact ranges of a stored shard into arrays, without an Arrow library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rr_dataset.errors import CorruptShardError, InvalidRoutingError
from rr_dataset.record import shown_layers
from rr_dataset.schema import VECTORS
from rr_dataset.shard.arrow import COMPRESSED_PREFIX_BYTES
from rr_dataset.shard.index import ShardIndex, Source
from rr_dataset.shard.tiling import copy_tiles

_CACHE_LINE_BYTES = 64
_PACKED_BYTES = 32 << 20  # of compressed buffers that are read together, and in memory before they are decoded
_VECTOR_DTYPES = (np.int32, np.float32)


class TileRead(NamedTuple):
    """Tokens [start, stop), absolute and within the row, of `layers` that the row has, to be read into `out`.

    out: [len(layers), stop - start, top_k] of the spec's dtype, writable, any strides; fastest where the tokens of a layer
    are contiguous. Or a tuple with as many arrays [stop - start, top_k], all C-contiguous.
    """

    row: int  # in ShardIndex.rows
    layers: tuple[int, ...]
    start: int
    stop: int
    out: npt.NDArray[Any] | tuple[npt.NDArray[Any], ...]

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return sum(part.nbytes for part in self.out) if isinstance(self.out, tuple) else self.out.nbytes


class VectorRead(NamedTuple):
    """The same of "token_ids" (int32) or "logprobs" (float32). out: [stop - start], contiguous, writable."""

    row: int
    column: str
    start: int
    stop: int
    out: npt.NDArray[Any]


def read_tiles(
    source: Source, index: ShardIndex, tiles: Sequence[TileRead], vectors: Sequence[VectorRead] = ()
) -> None:
    """Read exact ranges of a stored shard into arrays, with one request per stretch of neighbouring bytes.

    A compressed buffer is read and decoded as a whole, once per call, some 32 MiB of them at a time. Payload checksums are not compared.

    Raises InvalidRoutingError for a range that the row does not have or an `out` of another shape, CorruptShardError for a
    buffer that does not decode, and what `source.read_runs` raises.
    """
    pieces: list[_Piece] = []
    copies: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
    for tile in tiles:
        shape = (len(tile.layers), tile.stop - tile.start, index.spec.top_k)
        _check_read(index, tile, tile.layers, shape, index.spec.dtype)
        if not tile.nbytes:
            continue
        if isinstance(tile.out, tuple):
            parts = [part.data.cast("B") for part in tile.out]
            pieces += _locate(index, tile, index.payload.numbers(tile.layers), parts)
            continue
        dense = tile.out.strides[1:] == (shape[2] * tile.out.itemsize, tile.out.itemsize)
        target = tile.out if dense else _apart(shape, tile.out.dtype)
        if not dense:
            copies.append((tile.out, target))
        pieces += _locate(index, tile, index.payload.numbers(tile.layers), _bytes_of_layers(target))
    for vector in vectors:
        column = VECTORS.index(vector.column)
        _check_read(index, vector, (), (vector.stop - vector.start,), _VECTOR_DTYPES[column])
        if vector.out.size:
            pieces += _locate(index, vector, (column,), [vector.out.data.cast("B")])
    if index.compression == "none":
        _read(source, [(piece.at + piece.start, piece.target) for piece in pieces])
    else:
        _decode(source, pieces, pa.Codec(index.compression))
    for out, target in copies:
        copy_tiles(out, target)


class _Piece(NamedTuple):
    """Bytes of a row in the raw form of a buffer, and where they go."""

    at: int  # of the buffer in the file
    stored: int
    raw: int
    start: int  # in the raw buffer
    target: memoryview


def _check_read(
    index: ShardIndex,
    read: TileRead | VectorRead,
    layers: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
) -> None:
    row = index.rows[read.row]
    if not row.token_start <= read.start <= read.stop <= row.token_stop:
        raise InvalidRoutingError(
            f"tokens {read.start} to {read.stop}: row {row.record_id} has {row.token_start} to {row.token_stop}"
        )
    if layers != row.layers and not set(layers) <= set(row.layers):
        raise InvalidRoutingError(
            f"layers [{shown_layers(layers)}]: row {row.record_id} has {shown_layers(row.layers)}"
        )
    if isinstance(read, VectorRead) and not getattr(row, f"has_{read.column}"):
        raise InvalidRoutingError(f"row {row.record_id} has no {read.column}")
    outs, each = (read.out, shape[1:]) if isinstance(read.out, tuple) else ((read.out,), shape)
    if isinstance(read.out, tuple) and len(outs) != shape[0]:
        raise InvalidRoutingError(f"out has {len(outs)} arrays for {shape[0]} layers")
    for out in outs:
        if out.shape != each or out.dtype != dtype:
            raise InvalidRoutingError(f"out is {out.shape} {out.dtype}, expected {each} {np.dtype(dtype)}")


def _apart(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Memory whose layers are no power of two apart, for a transposing copy: else all of them fall on the same cache lines."""
    layers, tokens, top_k = shape
    items = tokens * top_k
    spaced = np.empty((layers, items + _CACHE_LINE_BYTES // dtype.itemsize), dtype)
    return spaced[:, :items].reshape(shape)


def _bytes_of_layers(target: npt.NDArray[Any]) -> list[memoryview]:
    if not target.flags.c_contiguous:
        return [layer.data.cast("B") for layer in target]
    flat = target.data.cast("B")
    step = len(flat) // len(target)
    return [flat[at : at + step] for at in range(0, len(flat), step)]


def _locate(
    index: ShardIndex, read: TileRead | VectorRead, columns: tuple[int, ...], targets: list[memoryview]
) -> Iterator[_Piece]:
    chosen = list(columns)
    batch = index.batch_of(read.row)
    skipped = (read.start - index.rows[read.row].token_start) * index.payload.token_bytes
    starts = (index.starts(batch, read.row) + skipped)[chosen].tolist()
    at, stored, raw = index.buffers(batch)[chosen].T.tolist()
    return map(_Piece, at, stored, raw, starts, targets)


def _read(source: Source, wanted: list[tuple[int, memoryview]]) -> None:
    """Read ranges into their targets; small gaps between them are read as well, and thrown away.

    What is wanted twice is read twice, in a run each.
    """
    wanted.sort(key=itemgetter(0))
    max_gap = source.max_gap_bytes
    trash = memoryview(bytearray(max_gap))
    runs: list[tuple[int, list[memoryview]]] = []
    buffers: list[memoryview] = []
    end = -1 - max_gap
    others: list[tuple[int, list[memoryview]]] = []  # ends of earlier runs that a target here may still continue
    for at, target in wanted:
        gap = at - end
        if not 0 <= gap <= max_gap:
            others = [other for other in [*others, (end, buffers)] if at - other[0] <= max_gap]
            found = next((i for i, (stop, _) in enumerate(others) if stop <= at), None)
            if found is None:
                end, buffers = at, []
                runs.append((at, buffers))
            else:
                end, buffers = others.pop(found)
            gap = at - end
        if gap:
            buffers.append(trash[:gap])
        buffers.append(target)
        end = at + len(target)
    if runs:
        source.read_runs(runs)


def _decode(source: Source, pieces: Sequence[_Piece], codec: pa.Codec) -> None:
    """The same for compressed buffers: each is read whole and decoded once, a few at a time."""
    by_buffer: dict[int, list[_Piece]] = {}
    for piece in pieces:
        by_buffer.setdefault(piece.at, []).append(piece)
    waiting: dict[int, memoryview] = {}
    size = 0
    for at in sorted(by_buffer):
        waiting[at] = memoryview(bytearray(by_buffer[at][0].stored))
        size += len(waiting[at])
        if size >= _PACKED_BYTES:
            _unpack(source, waiting, by_buffer, codec)
            size = 0
    _unpack(source, waiting, by_buffer, codec)


def _unpack(
    source: Source, waiting: dict[int, memoryview], by_buffer: dict[int, list[_Piece]], codec: pa.Codec
) -> None:
    """Fill and empty `waiting`."""
    _read(source, list(waiting.items()))
    for at in list(waiting):
        raw = _decompress(waiting.pop(at), by_buffer[at][0].raw, at, codec)
        for part in by_buffer[at]:
            part.target[:] = raw[part.start : part.start + len(part.target)]


def _decompress(stored: memoryview, raw_length: int, at: int, codec: pa.Codec) -> memoryview:
    where = f"the shard is damaged: the {codec.name} buffer at byte {at}"
    length = int.from_bytes(stored[:COMPRESSED_PREFIX_BYTES], "little", signed=True)
    packed = stored[COMPRESSED_PREFIX_BYTES:]
    if length == -1 and len(packed) == raw_length:
        return packed
    if length != raw_length:
        raise CorruptShardError(f"{where} says {length} bytes, its rows need {raw_length}")
    try:
        if codec.name == "lz4":  # a frame that ends early would leave the rest of `decompress`'s memory as it was
            raw = pa.CompressedInputStream(pa.BufferReader(packed), "lz4").read_buffer(raw_length)
        else:
            raw = codec.decompress(packed, raw_length)
    except (OSError, ValueError) as error:
        raise CorruptShardError(f"{where} does not decode: {error}") from error
    if raw.size != raw_length:
        raise CorruptShardError(f"{where} does not decode: it holds {raw.size} bytes, not {raw_length}")
    return memoryview(raw).cast("B")
