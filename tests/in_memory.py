"""Shards in memory, the rows they are made of, and a source that counts what is read."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from strategies import payload

from rr_dataset.keys import KeyScheme
from rr_dataset.layout import DatasetFormat
from rr_dataset.record import RoutingSpec, Row, RowData

KEYS = KeyScheme.fastdeploy()
SPEC = RoutingSpec(moe_layers=tuple(range(3, 15)), num_experts=64, top_k=6)
WRITER = "00000000000000ab"


class Memory:
    """A stored object in memory, which counts what is read."""

    def __init__(self, data: bytes | bytearray | memoryview, max_gap_bytes: int = 4096) -> None:
        self.data = bytes(data)
        self.max_gap_bytes = max_gap_bytes
        self.tails = 0
        self.runs: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return len(self.data)

    def tail(self, length: int) -> bytes:
        self.tails += 1
        return self.data[-length:]

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        for offset, buffers in runs:
            at = offset
            for buffer in buffers:
                assert 0 <= at <= at + len(buffer) <= len(self.data), "outside of the file"
                buffer[:] = self.data[at : at + len(buffer)]
                at += len(buffer)
            self.runs.append((offset, at - offset))


def fmt(spec: RoutingSpec = SPEC) -> DatasetFormat:
    return DatasetFormat(uuid=str(uuid.UUID(int=1)), spec=spec, keys=KEYS)


def put(
    request_id: str = "math:1", stamp: int = 1, tokens: int = 5, spec: RoutingSpec = SPEC, **fields: Any
) -> RowData:
    """One whole put with any routing."""
    key = KEYS.parse(request_id)
    defaults: dict[str, Any] = {"layers": spec.moe_layers, "status": "complete", "part": False, "token_start": 0}
    row = Row(
        record_id=f"{stamp:016x}-{WRITER}",
        request_id=request_id,
        components=key.components,
        choice=key.choice,
        t_submit=stamp,
        num_tokens=tokens,
        run_id="run",
        **{**defaults, **fields},
    )
    return payload(spec, row, seed=stamp)
