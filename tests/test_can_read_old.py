"""What earlier versions wrote is read to the last value. The files under golden/ are never rewritten."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.shard import TileRead, VectorRead, read_index, read_tiles
from rr_dataset.storage import open_storage

GOLDEN = Path(__file__).parent / "golden"
DATASETS = sorted(path.with_suffix("") for path in GOLDEN.glob("format-*/*.json"))


def values_of(root: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(root.with_suffix(".json").read_text())
    return rows


@pytest.fixture(params=DATASETS, ids=lambda root: f"{root.parent.name}-{root.name}")
def golden(request: pytest.FixtureRequest) -> Path:
    root: Path = request.param
    return root


def test_there_is_one_of_every_format() -> None:
    assert {root.parent.name for root in DATASETS} == {"format-0", "format-1"}
    assert {root.name.rpartition("-")[2] for root in DATASETS} == {"none", "lz4", "zstd"}


def test_every_row_and_value(golden: Path) -> None:
    wanted = {values["record_id"]: values for values in values_of(golden)}
    storage = open_storage(golden)
    for path in sorted(golden.rglob("*.arrow")):
        with storage.open(os.fspath(path.relative_to(golden))) as source:
            index = read_index(source)
            for number, row in enumerate(index.rows):
                values = wanted.pop(row.record_id)
                experts = np.empty((len(row.layers), row.num_tokens, index.spec.top_k), index.spec.dtype)
                vectors = [
                    VectorRead(number, name, row.token_start, row.token_stop, np.empty(row.num_tokens, dtype))
                    for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32))
                    if values[name] is not None
                ]
                tile = TileRead(number, row.layers, row.token_start, row.token_stop, experts)
                read_tiles(source, index, [tile], vectors)
                seen = {f"layer_{layer:03d}": experts[at] for at, layer in enumerate(row.layers)}
                seen |= {vector.column: vector.out for vector in vectors}
                for name, value in values.items():
                    if name.startswith(("layer_", "token_ids", "logprobs")):
                        assert (seen[name].tobytes().hex() if name in seen else None) == value, name
                    elif name in index.components:
                        assert row.components[index.components.index(name)] == value
                    else:
                        assert json.loads(json.dumps(getattr(row, name))) == value, name
    assert not wanted, "every row was found"


def test_every_record(golden: Path) -> None:
    dataset = rr.open_dataset(golden)
    values = {row["request_id"]: row for row in values_of(golden)}
    assert sorted(dataset.ids()) == sorted(values)
    for request_id, row in values.items():
        if row["status"] == "dropped":
            with pytest.raises(rr.RecordDroppedError, match=row["reason"]):
                dataset.get(request_id)
            continue
        record = dataset.get(request_id)
        assert (record.status, record.tags) == (row["status"], row["tags"])
        for layer in record.layers:
            ids = row[f"layer_{layer:03d}"]
            if ids is not None:
                present = record.present()[record.layers.index(layer)]
                held = [token for token in range(row["num_tokens"]) if present[token + row["token_start"]]]
                want = np.frombuffer(bytes.fromhex(ids), dataset.spec.dtype).reshape(-1, dataset.spec.top_k)
                np.testing.assert_array_equal(record.layer(layer)[present], want[held])
