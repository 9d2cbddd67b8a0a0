"""The bytes of an Arrow IPC file around its payload: batch messages and the footer.

pyarrow writes one small file per schema; what follows is copied from it with other numbers in it. So a one-row shard
costs a few patched integers instead of a call per column, and the payload is copied once, to its final place.

Layouts are Arrow's Message.fbs and File.fbs. Slots are counted from 0 in the order of the fields there.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

MAGIC = b"ARROW1"
TRAILER_BYTES = 10  # int32 length of the footer, then the magic
ALIGNMENT = 8
COMPRESSED_PREFIX_BYTES = 8  # before a compressed buffer: int64 raw length, or -1 for stored as it is
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_PREFIX_BYTES = 8  # continuation marker and int32 length before a message

_MESSAGE_HEADER, _MESSAGE_BODY_LENGTH = 2, 3  # Message: version, header_type, header, bodyLength
_BATCH_LENGTH, _BATCH_NODES, _BATCH_BUFFERS = 0, 1, 2  # RecordBatch: length, nodes, buffers, compression
# Footer: version, schema, dictionaries, recordBatches, custom_metadata
_FOOTER_SCHEMA, _FOOTER_BATCHES, _FOOTER_METADATA = 1, 3, 4
_SCHEMA_FIELDS = 1  # Schema: endianness, fields
_KEY, _VALUE = 0, 1  # KeyValue: key, value
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("pad", "<i4"), ("body", "<i8")])

_U16, _I32, _U32 = (struct.Struct(code).unpack_from for code in ("<H", "<i", "<I"))

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
        root = _follow(message, _PREFIX_BYTES)
        batch = _follow(message, _field(message, root, _MESSAGE_HEADER))
        nodes, buffers = (_vector(message, batch, slot, 16) for slot in (_BATCH_NODES, _BATCH_BUFFERS))
        return cls(
            length_at=_field(message, batch, _BATCH_LENGTH),
            body_length_at=_field(message, root, _MESSAGE_BODY_LENGTH),
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
        table = _follow(footer, 0)
        block = np.frombuffer(footer[_vector(footer, table, _FOOTER_BATCHES, _BLOCK.itemsize)], _BLOCK)[0]
        start, length = int(block["offset"]), int(block["metadata"])
        message = file[start : start + length]
        ats = [_field(footer, table, slot) for slot in (_FOOTER_BATCHES, _FOOTER_METADATA)]
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


def read_footer(footer: bytes) -> tuple[int, int, dict[bytes, bytes]]:
    """The number of columns, the number of record batches and the custom metadata of a footer.

    Raises ValueError for bytes that are no footer.
    """
    try:
        table = _follow(footer, 0)
        columns = _vector(footer, _follow(footer, _field(footer, table, _FOOTER_SCHEMA)), _SCHEMA_FIELDS, 4)
        batches = _vector(footer, table, _FOOTER_BATCHES, _BLOCK.itemsize)
        entries = _vector(footer, table, _FOOTER_METADATA, 4)
        metadata = {}
        for at in range(entries.start, entries.stop, 4):
            entry = _follow(footer, at)
            metadata[footer[_vector(footer, entry, _KEY, 1)]] = footer[_vector(footer, entry, _VALUE, 1)]
    except struct.error as error:
        raise ValueError(f"its footer is no Arrow footer ({error})") from error
    return _length(columns) // 4, _length(batches) // _BLOCK.itemsize, metadata


def _follow(buffer: bytes | memoryview, at: int) -> int:
    """Where the offset at `at` points: to a table, a vector or a text behind it."""
    offset: int = _U32(buffer, at)[0]
    return at + offset


def _field(buffer: bytes | memoryview, table: int, slot: int) -> int:
    """Where a field of a table stands: by the table of offsets before it, which ends where the later fields are absent."""
    offsets = table - _I32(buffer, table)[0]
    at = 4 + 2 * slot
    offset: int = _U16(buffer, offsets + at)[0] if offsets >= 0 and at < _U16(buffer, offsets)[0] else 0
    if not offset:
        raise ValueError(f"its flatbuffer lacks field {slot}")
    return table + offset


def _vector(buffer: bytes | memoryview, table: int, slot: int, itemsize: int) -> slice:
    """Where the items of a vector, or the bytes of a text, stand."""
    at = _follow(buffer, _field(buffer, table, slot))
    count = _U32(buffer, at)[0]
    stop = at + 4 + count * itemsize
    if stop > len(buffer):
        raise ValueError(f"its flatbuffer claims {count} items in field {slot}")
    return slice(at + 4, stop)


def _length(of: slice) -> int:
    return int(of.stop) - int(of.start)


def _pad(out: bytearray, alignment: int, remainder: int = 0) -> None:
    out += bytes((remainder - len(out)) % alignment)


def _point(out: bytearray, at: int) -> None:
    """Let the offset at `at` point to the end of `out`."""
    struct.pack_into("<I", out, at, len(out) - at)
