"""The bytes of an Arrow IPC file around its payload: batch messages and the footer.

pyarrow writes one small file per schema; what follows is copied from it with other numbers in it. So a one-row shard
costs a few patched integers instead of a call per column, and the payload is copied once, to its final place.

Layouts are Arrow's Message.fbs and File.fbs. Slots are counted from 0 in the order of the fields there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from flatbuffers.number_types import UOffsetTFlags
from flatbuffers.table import Table

MAGIC = b"ARROW1"
TRAILER_BYTES = 10  # int32 length of the footer, then the magic
ALIGNMENT = 8
COMPRESSED_PREFIX_BYTES = 8  # before a compressed buffer: int64 raw length, or -1 for stored as it is
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_PREFIX_BYTES = 8  # continuation marker and int32 length before a message

_MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 2, 3  # Message: version, header_type, header, bodyLength
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS = 0, 1, 2  # RecordBatch: length, nodes, buffers, compression
_FOOTER_BATCHES, _FOOTER_METADATA = 3, 4  # Footer: version, schema, dictionaries, recordBatches, custom_metadata
_KEY, _VALUE = 0, 1  # KeyValue: key, value
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("pad", "<i4"), ("body", "<i8")])

Ints = npt.NDArray[np.int64]


_IntOrInts = TypeVar("_IntOrInts", int, Ints)


def padded(length: _IntOrInts) -> _IntOrInts:
    """`length` rounded up to the alignment of buffers."""
    return length + -length % ALIGNMENT


class Block(NamedTuple):
    """Where a record batch stands in the file."""

    offset: int
    metadata_length: int
    body_length: int


@dataclass(frozen=True)
class BatchLayout:
    """Where the numbers of a record batch message stand in its bytes."""

    length_at: int
    body_length_at: int
    nodes: slice
    buffers: slice
    body_at: int

    @classmethod
    def of(cls, message: bytes | memoryview) -> BatchLayout:
        """Read from a message with its 8-byte prefix, of a batch that is not empty."""
        root = _root(message, _PREFIX_BYTES)
        batch = Table(message, root.Indirect(root.Pos + _slot(root, _MESSAGE_HEADER)))
        nodes, buffers = (_vector(batch, slot, 16) for slot in (_BATCH_NODES, _BATCH_BUFFERS))
        return cls(
            length_at=batch.Pos + _slot(batch, _BATCH_LENGTH),
            body_length_at=root.Pos + _slot(root, _MESSAGE_BODY_LENGTH),
            nodes=nodes,
            buffers=buffers,
            body_at=_PREFIX_BYTES + struct.unpack_from("<i", message, 4)[0],
        )

    @property
    def num_nodes(self) -> int:
        """Field nodes of a batch."""
        return _length(self.nodes) // 16

    @property
    def num_buffers(self) -> int:
        """Buffers of a batch."""
        return _length(self.buffers) // 16


@dataclass(frozen=True)
class FileTemplate:
    """What all files of one schema and compression share."""

    head: bytes  # up to the first batch
    layout: BatchLayout  # of every batch
    _message: bytes
    _footer: bytes
    _batches_at: int
    _metadata_at: int

    @classmethod
    def of(cls, schema: pa.Schema, compression: str) -> FileTemplate:
        """Let pyarrow write a file with one row of nulls, and take it apart."""
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=None if compression == "none" else compression)
        with pa.ipc.new_file(sink, schema, options=options, metadata={"rr": ""}) as writer:
            writer.write_batch(pa.record_batch([pa.nulls(1, field.type) for field in schema], schema=schema))
        file = sink.getvalue().to_pybytes()
        footer = file[-TRAILER_BYTES - footer_length(file) : -TRAILER_BYTES]
        table = _root(footer, 0)
        block = np.frombuffer(footer[_vector(table, _FOOTER_BATCHES, _BLOCK.itemsize)], _BLOCK)[0]
        start, length = int(block["offset"]), int(block["metadata"])
        message = file[start : start + length]
        ats = [table.Pos + _slot(table, slot) for slot in (_FOOTER_BATCHES, _FOOTER_METADATA)]
        return cls(file[:start], BatchLayout.of(message), message, footer, *ats)

    @property
    def message_length(self) -> int:
        """Bytes of every batch message, with its prefix."""
        return len(self._message)

    def message(self, rows: int, nodes: Ints, buffers: Ints, body_length: int) -> bytes:
        """The message of a batch: nodes [n, 2] are (length, null count), buffers [m, 2] are (offset in body, length)."""
        out = bytearray(self._message)
        struct.pack_into("<q", out, self.layout.length_at, rows)
        struct.pack_into("<q", out, self.layout.body_length_at, body_length)
        out[self.layout.nodes] = nodes.astype("<i8", copy=False).tobytes()
        out[self.layout.buffers] = buffers.astype("<i8", copy=False).tobytes()
        return bytes(out)

    def tail(self, blocks: Sequence[Block], metadata: Mapping[str, bytes]) -> bytes:
        """All that follows the last batch. Values of `metadata` must be ASCII."""
        out = bytearray(self._footer)
        _pad(out, 8, 4)  # so that the structs after the vector's length are aligned to 8
        _point(out, self._batches_at)
        out += struct.pack("<I", len(blocks))
        out += np.array([(offset, length, 0, body) for offset, length, body in blocks], _BLOCK).tobytes()
        _pad(out, 4)
        _point(out, self._metadata_at)
        out += struct.pack("<I", len(metadata))
        entries = len(out)
        out += bytes(4 * len(metadata))
        for i, (key, value) in enumerate(metadata.items()):
            out += struct.pack("<4H", 8, 12, 4, 8)  # vtable: its size, the table's size, where key and value stand
            _point(out, entries + 4 * i)
            table = len(out)
            out += struct.pack("<iII", 8, 0, 0)  # the vtable stands 8 bytes before
            for slot, text in ((4, key.encode()), (8, value)):
                _point(out, table + slot)
                out += struct.pack("<I", len(text)) + text + b"\0"
                _pad(out, 4)
        _pad(out, 8)
        return _END_OF_STREAM + bytes(out) + struct.pack("<i", len(out)) + MAGIC


def footer_length(tail: bytes) -> int:
    """What the trailer says. Raises ValueError without one."""
    if len(tail) < TRAILER_BYTES or tail[-len(MAGIC) :] != MAGIC:
        raise ValueError("it does not end like an Arrow file")
    length: int = struct.unpack_from("<i", tail, len(tail) - TRAILER_BYTES)[0]
    if length <= 0:
        raise ValueError(f"its trailer claims a footer of {length} bytes")
    return length


def read_footer(footer: bytes) -> tuple[int, dict[bytes, bytes]]:
    """The number of record batches and the custom metadata of a footer.

    Raises ValueError for bytes that are no footer.
    """
    try:
        table = _root(footer, 0)
        batches = _vector(table, _FOOTER_BATCHES, _BLOCK.itemsize)
        entries = _vector(table, _FOOTER_METADATA, 4)
        metadata = {}
        for at in range(entries.start, entries.stop, 4):
            entry = Table(footer, table.Indirect(at))
            key, value = (entry.String(entry.Pos + _slot(entry, slot)) for slot in (_KEY, _VALUE))
            metadata[key] = value
    except (struct.error, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"its footer is no Arrow footer ({error})") from error
    return _length(batches) // _BLOCK.itemsize, metadata


def _root(buffer: Any, start: int) -> Table:
    return Table(buffer, start + Table(buffer, start).Get(UOffsetTFlags, start))


def _slot(table: Table, slot: int) -> int:
    """Position of a field from the start of its table."""
    offset: int = table.Offset(4 + 2 * slot)
    if not offset:
        raise ValueError(f"its flatbuffer lacks field {slot}")
    return offset


def _vector(table: Table, slot: int, itemsize: int) -> slice:
    """Where the items of a vector stand."""
    offset = _slot(table, slot)
    start, count = table.Vector(offset), table.VectorLen(offset)
    stop = start + count * itemsize
    if stop > len(table.Bytes):
        raise ValueError(f"its flatbuffer claims {count} items in field {slot}")
    return slice(start, stop)


def _length(of: slice) -> int:
    return int(of.stop) - int(of.start)


def _pad(out: bytearray, alignment: int, remainder: int = 0) -> None:
    out += bytes((remainder - len(out)) % alignment)


def _point(out: bytearray, at: int) -> None:
    """Let the offset at `at` point to the end of `out`."""
    struct.pack_into("<I", out, at, len(out) - at)
