"""A dataset whose shards and tombstones a test places itself, file by file."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import rr_dataset as rr
from rr_dataset.layout import TOMBSTONE_DIR, ShardName, partition_path, tombstone_name
from rr_dataset.record import Range, Row, RowData, Span
from rr_dataset.shard import build_shard

WRITER = "a" * 16
SPEC = rr.RoutingSpec((3, 4, 7, 9), num_experts=200, top_k=2)


class Stored:
    """A dataset under `root`, filled by hand. Stamps count 1, 2, 3 ... unless given."""

    def __init__(self, root: Path, spec: rr.RoutingSpec = SPEC, **settings: Any) -> None:
        self.root = root
        self.dataset = rr.create_dataset(root, spec, **settings)
        self.spec, self.keys = spec, self.dataset.keys
        self._stamp = 0
        self._seq = 0

    def row(
        self,
        request_id: str,
        tokens: int = 5,
        *,
        start: int = 0,
        layers: tuple[int, ...] | None = None,
        status: str = "complete",
        part: bool = False,
        missing: tuple[Range, ...] = (),
        run: str = "run-1",
        reason: str | None = None,
        vectors: bool = False,
        tags: dict[str, str] | None = None,
        weights: str | Sequence[Span] | None = None,
    ) -> RowData:
        """One put with experts, token ids and logprobs that no other put of this dataset repeats in the same place."""
        self._stamp += 1
        key = self.keys.parse(request_id)
        chosen = () if status == "dropped" else self.spec.moe_layers if layers is None else layers
        row = Row(
            record_id=f"{self._stamp:016x}-{WRITER}",
            request_id=request_id,
            components=key.components,
            choice=key.choice,
            t_submit=self._stamp,
            token_start=start,
            num_tokens=tokens,
            part=part,
            status=status,
            run_id=run,
            layers=chosen,
            reason=reason,
            missing=missing,
            tags=tags or {},
            weight_version=weights if isinstance(weights, str) else None,
            weight_spans=() if weights is None or isinstance(weights, str) else tuple(weights),
        )
        rng = np.random.default_rng(self._stamp)
        shape = (len(chosen), tokens, self.spec.top_k)
        experts = rng.integers(1, self.spec.num_experts, shape).astype(self.spec.dtype)
        for first, last in missing:
            experts[:, first - start : last - start] = 0
        return RowData(
            row,
            experts if chosen else None,
            rng.integers(0, 1000, tokens).astype(np.int32) if vectors else None,
            rng.random(tokens).astype(np.float32) if vectors else None,
        )

    def shard(self, *rows: RowData, inputs: Sequence[Path] = (), level: int = 0, compression: str = "none") -> Path:
        """Publish rows of one partition as one shard; a level above 0 makes it a compacted one."""
        pairs = self.keys.partition(rows[0].row.components)
        stamps = [data.row.t_submit for data in rows]
        span = (level, min(stamps), max(stamps), len(rows))
        self._seq += 1
        name = ShardName(*span, unique=uuid.uuid4().hex) if level else ShardName(*span, writer=WRITER, seq=self._seq)
        names = [path.name for path in inputs]
        path = self.root / partition_path(pairs) / name.text
        return self._publish(path, build_shard(rows, self.dataset.format, inputs=names, compression=compression))

    def put(self, request_id: str, tokens: int = 5, **how: Any) -> RowData:
        """One put in a shard of its own."""
        data = self.row(request_id, tokens, **how)
        self.shard(data)
        return data

    def tombstone(
        self, kind: str, text: Any, *, t_del: int | None = None, run: str | None = None, made: int | None = None
    ) -> Path:
        """A delete mark over all puts so far, or those up to `t_del`; it was made in 1970 unless `made` tells (ms)."""
        made = 1_000_000 + self._stamp if made is None else made
        mark = {"uuid": str(uuid.uuid4()), "kind": kind, "text": text, "run": run, "made": made}
        path = self.root / TOMBSTONE_DIR / tombstone_name(made, uuid.uuid4().hex)
        return self._publish(path, json.dumps([{**mark, "t_del": self._stamp if t_del is None else t_del}]).encode())

    def _publish(self, path: Path, content: bytes | memoryview) -> Path:
        """A visible file is a whole file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = self.root / "_rr" / path.name
        staged.write_bytes(content)
        return staged.rename(path)


def expected(
    rows: Sequence[RowData], spec: rr.RoutingSpec, layers: Sequence[int], positions: Sequence[int]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Experts [layers, positions, top_k] and which are there, token by token: what a read must give. No code of ours."""
    experts = np.zeros((len(layers), len(positions), spec.top_k), spec.dtype)
    present = np.zeros((len(layers), len(positions)), np.bool_)
    ordered = sorted(rows, key=lambda data: (data.row.t_submit, data.row.record_id))
    whole = [i for i, data in enumerate(ordered) if not data.row.part and data.row.layers in (spec.moe_layers, ())]
    for i, layer in enumerate(layers):
        for j, position in enumerate(positions):
            for data in ordered[whole[-1] if whole else 0 :]:
                row = data.row
                inside = row.token_start <= position < row.token_start + row.num_tokens
                gap = any(first <= position < last for first, last in row.missing)
                if inside and not gap and layer in row.layers and data.routed_experts is not None:
                    experts[i, j] = data.routed_experts[row.layers.index(layer), position - row.token_start]
                    present[i, j] = True
                    break
    return experts, present
