"""Ways to damage a stored shard, and what a verification says of it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from stored import SPEC, Stored

import rr_dataset as rr
from rr_dataset.record import RowData


def kinds(report: rr.VerifyReport) -> list[str]:
    return [problem.kind for problem in report.problems]


def only(report: rr.VerifyReport) -> rr.Problem:
    assert len(report.problems) == 1, report.problems
    assert not report.sound
    return report.problems[0]


def rows_of(stored: Stored, prefix: str, count: int = 3, **how: Any) -> list[RowData]:
    return [stored.row(f"{prefix}:{i}:0:0", 4 + i, vectors=i % 2 == 0, **how) for i in range(count)]


def damage(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def payload_byte(data: bytes, at: int = 3) -> bytes:
    """Another expert id in the first row's first layer that is stored as it is."""
    reader = pa.ipc.open_file(pa.py_buffer(data))
    buffer = reader.get_batch(0).column("layer_003").buffers()[2]
    position = buffer.address - pa.py_buffer(data).address + at
    return data[:position] + bytes([(data[position] + 1) % 199]) + data[position + 1 :]


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The same Arrow data with another index, its checksum right: only pyarrow can tell."""
    data = path.read_bytes()
    reader = pa.ipc.open_file(pa.py_buffer(data))
    index = json.loads(reader.metadata[b"rr.index"])
    change(index)
    text = json.dumps(index, separators=(",", ":")).encode()
    path.write_bytes(written(reader, [reader.get_batch(i) for i in range(reader.num_record_batches)], text))


def written(reader: Any, batches: list[pa.RecordBatch], index: bytes, schema: pa.Schema | None = None) -> bytes:
    sink = io.BytesIO()
    metadata = {"rr.index": index.decode(), "rr.index_xxh3": xxhash.xxh3_64_hexdigest(index)}
    options = pa.ipc.IpcWriteOptions(compression=None)
    with pa.ipc.new_file(sink, schema or reader.schema, options=options, metadata=metadata) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def indexed(path: Path) -> None:
    """Let the ranges of an index be those that pyarrow has."""
    data = path.read_bytes()
    reader = pa.ipc.open_file(pa.py_buffer(data))
    base = pa.py_buffer(data).address

    def set_ranges(index: dict[str, Any]) -> None:
        for i, batch in enumerate(index["batches"]):
            batch["ranges"] = ranges(reader.get_batch(i), base)

    rewritten(path, set_ranges)


def ranges(batch: pa.RecordBatch, base: int) -> list[int]:
    found: list[int] = []
    for name in ["token_ids", "logprobs", *(f"layer_{layer:03d}" for layer in SPEC.moe_layers)]:
        buffer = batch.column(name).buffers()[-1]
        found += [buffer.address - base, buffer.size] if buffer is not None and buffer.size else [0, 0]
    return found
