"""The bytes of a compacted shard: batches, levels, and columns of a later version."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import rr_dataset as rr
from rr_dataset import merge as merging
from rr_dataset.merge import Codec
from rr_dataset.shard import Scratch, ShardBuilder, read_index
from rr_dataset.storage import open_storage
from tests.lifecycle import LATER_MS, compact_at, now_ms, seen, shards
from tests.stored import SPEC, Stored


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "dataset")


def output_of(root: Path) -> Path:
    return max(shards(root), key=lambda path: path.name)


def batches_of(path: Path) -> list[int]:
    with pa.ipc.open_file(path) as reader:
        return [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]


def later_shard(stored: Stored, request_id: str, extra: dict[str, Any]) -> None:
    """A shard with columns that this version does not know."""
    batch = pa.record_batch({name: [value] for name, value in extra.items()})
    data = stored.row(request_id)
    builder = ShardBuilder(stored.dataset.format, compression="none", scratch=Scratch(), extra=tuple(batch.schema))
    builder.add([data], batch)
    path = stored.shard(data)
    path.unlink()
    path.write_bytes(builder.finish())


def test_unknown_columns_survive(stored: Stored) -> None:
    later_shard(stored, "p:2:0:0", {"note": "two", "scores": [1.5, None], "deep": {"a": b"x", "b": [1, 2]}})
    later_shard(stored, "p:0:0:0", {"scores": [2.5]})
    stored.put("p:1:0:0")
    before = seen(stored.root)
    rr.compact(stored.root)
    table = pa.ipc.open_file(output_of(stored.root)).read_all()
    assert table["request_id"].to_pylist() == ["p:0:0:0", "p:1:0:0", "p:2:0:0"]
    assert table["note"].to_pylist() == [None, None, "two"]
    assert table["scores"].to_pylist() == [[2.5], None, [1.5, None]]
    assert table["deep"].to_pylist() == [None, None, {"a": b"x", "b": [1, 2]}]
    table.validate(full=True)
    stored.put("p:3:0:0")
    for step in range(1, 4):  # and once more, out of a compressed one
        compact_at(stored.root, now_ms() + step * LATER_MS)
    (path,) = shards(stored.root)
    assert pa.ipc.open_file(path).read_all()["note"].to_pylist() == [None, None, "two", None]
    assert {key: value for key, value in seen(stored.root).items() if key != "p:3:0:0"} == before


def test_unknown_columns_of_two_types_are_not_mixed(stored: Stored) -> None:
    later_shard(stored, "p:0:0:0", {"note": "text"})
    later_shard(stored, "p:1:0:0", {"note": 7})
    report = rr.compact(stored.root)
    assert report.outputs == 1
    assert "note is int64, in another shard string" in report.damaged[0]
    compact_at(stored.root, now_ms() + LATER_MS)
    assert len(seen(stored.root)) == 2


def test_a_type_of_unknown_shape_is_left_alone(stored: Stored) -> None:
    batch = pa.record_batch({"view": pa.array(["x" * 20], pa.string_view())})
    builder = ShardBuilder(stored.dataset.format, compression="none", scratch=Scratch(), extra=tuple(batch.schema))
    with pytest.raises(rr.InvalidInputError, match="number of buffers varies"):
        builder.add([stored.row("p:0:0:0")], batch)


def test_samples_of_a_prompt_share_a_batch_and_large_ones_are_cut(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(5):
        stored.put(f"p:{i}:0:0", 1000)
    rr.compact(stored.root)
    assert batches_of(output_of(stored.root)) == [5]
    monkeypatch.setattr(merging, "BATCH_BYTES", 2 * 1000 * SPEC.bytes_per_token)
    for i in range(5):
        stored.put(f"q:{i}:0:0", 1000)
    rr.compact(stored.root, prefix="q")
    assert batches_of(max(shards(stored.root, "data_id=q"))) == [2, 2, 1]


def test_a_batch_has_at_most_so_many_rows(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "BATCH_ROWS", 3)
    stored.shard(*[stored.row(f"a:{i}:0:0") for i in range(4)])
    stored.shard(*[stored.row(f"a:{i}:0:0") for i in range(4, 7)])
    compact_at(stored.root, LATER_MS)
    assert batches_of(output_of(stored.root)) == [3, 3, 1]


def test_many_prompts_in_a_partition_get_smaller_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MIXED_BATCH_BYTES", 2 * 1000 * SPEC.bytes_per_token)
    stored = Stored(tmp_path / "steps", keys=rr.KeyScheme.by_step())
    for i in range(5):
        stored.put(f"7:prompt_{i}", 1000)
    rr.compact(stored.root)
    assert batches_of(output_of(stored.root)) == [2, 2, 1]
    assert len(seen(stored.root)) == 5


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "zstd:1", "zstd:9"])
def test_every_compression(stored: Stored, compression: str) -> None:
    for i in range(3):
        stored.put(f"p:{i}:0:0", 500, vectors=True, missing=((2, 4),))
    before = seen(stored.root)
    rr.compact(stored.root, compression=compression)
    with open_storage(stored.root).open(str(output_of(stored.root).relative_to(stored.root))) as source:
        assert read_index(source).compression == compression.partition(":")[0]
    assert seen(stored.root) == before


def test_a_level_changes_the_bytes(stored: Stored) -> None:
    experts = np.random.default_rng(0).integers(0, 4, (SPEC.num_layers, 20_000, SPEC.top_k)).astype(SPEC.dtype)
    stored.shard(replace(stored.row("p:0:0:0", 20_000), routed_experts=experts))
    sizes = []
    for level in (1, 12):
        rr.compact(stored.root, compression=f"zstd:{level}")
        output = output_of(stored.root)
        sizes.append(output.stat().st_size)
        output.unlink()
    assert sizes[1] < sizes[0]


def test_long_rows_ask_for_a_window(stored: Stored) -> None:
    fmt = stored.dataset.format
    short, long = (stored.row("p:0:0:0", tokens).row for tokens in ((256 << 10) // 2, (256 << 10) // 2 + 1))
    assert Codec("zstd", 1).for_rows([short], fmt) == Codec("zstd", 1)
    assert Codec("zstd", 1).for_rows([short, long], fmt) == Codec("zstd", 3)
    assert Codec("zstd", None).for_rows([long], fmt) == Codec("zstd", 3)
    assert Codec("zstd", 7).for_rows([long], fmt) == Codec("zstd", 7)
    assert Codec("lz4", None).for_rows([long], fmt) == Codec("lz4", None)


def test_sorted_ids_stay_sorted(tmp_path: Path) -> None:
    spec = rr.RoutingSpec((0, 1), num_experts=64, top_k=8, topk_order="sorted")
    stored = Stored(tmp_path / "sorted", spec)
    data = stored.put("p:0:0:0", 100)
    assert data.routed_experts is not None
    rr.compact(stored.root)
    for path in shards(stored.root):
        if path.name.startswith("00"):
            path.unlink()
    assert np.array_equal(stored.dataset.get("p:0:0:0").to_numpy(), np.sort(data.routed_experts, axis=2))


def test_memory_is_that_of_batches_and_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen megabytes that do not compress, in outputs of four and batches of one."""
    monkeypatch.setattr(merging, "MIXED_BATCH_BYTES", 1 << 20)
    stored = Stored(tmp_path / "steps", keys=rr.KeyScheme.by_step())
    tokens = (1 << 18) // SPEC.bytes_per_token
    for i in range(64):
        stored.put(f"7:prompt_{i}", tokens)
    rr.compact(stored.root, target_bytes=1 << 20, prefix="8")  # what is loaded once
    tracemalloc.start()
    try:
        report = rr.compact(stored.root, target_bytes=4 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert report.outputs >= 4
    assert peak < 9 << 20
    assert len(seen(stored.root)) == 64
