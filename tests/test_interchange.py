"""Exports and copies, read by tools of other makers and by pyarrow alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from damaged import damage, indexed, payload_byte, written
from stored import SPEC, Stored, expected

import rr_dataset as rr
from rr_dataset.interchange import bundle, export
from rr_dataset.record import RowData
from rr_dataset.storage.local import LocalStorage


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "routing")


# --- export


def fill(stored: Stored) -> dict[str, list[RowData]]:
    puts = {
        "a:0:0:0": [stored.put("a:0:0:0", 6, vectors=True, weights="v1", tags={"x": "ü"})],
        "a:1:0:0#2": [stored.put("a:1:0:0#2", 8, missing=((2, 4),))],
        "a:2:0:0": [stored.put("a:2:0:0", 4, layers=(3, 9)), stored.put("a:2:0:0", 5, start=2, part=True)],
        "/b=ö:0:0:0": [stored.put("/b=ö:0:0:0", 3)],
    }
    stored.put("c:0:0:0", status="dropped", reason="spool_full")
    return puts


def wanted(rows: list[RowData], layers: tuple[int, ...] = SPEC.moe_layers) -> tuple[Any, Any]:
    return expected(rows, SPEC, layers, range(max(data.row.token_stop for data in rows)))


def test_npz(stored: Stored, tmp_path: Path) -> None:
    puts = fill(stored)
    report = rr.export(stored.root, tmp_path / "out", "npz")
    paths = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert (report.files, report.records, report.bytes) == (4, 4, sum(path.stat().st_size for path in paths))
    seen = set()
    for path in paths:
        with np.load(path) as arrays:
            request_id = str(arrays["request_id"])
            experts, present = wanted(puts[request_id])
            np.testing.assert_array_equal(arrays["routed_experts"], experts)
            np.testing.assert_array_equal(arrays["present"], present)
            assert ("token_ids" in arrays) == (request_id == "a:0:0:0")
            seen.add(request_id)
    assert seen == set(puts)
    assert (tmp_path / "out" / "data_id=a" / "a%3A1%3A0%3A0%232.npz").exists()


def test_safetensors(stored: Stored, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    puts = fill(stored)
    rr.export(stored.root, tmp_path / "out", "safetensors", prefix="a", layers=[3, 7])
    paths = sorted((tmp_path / "out").rglob("*.safetensors"))
    assert len(paths) == 3
    for path in paths:
        with safetensors.safe_open(path, "numpy") as file:
            texts = file.metadata()
            experts, present = wanted(puts[texts["request_id"]], (3, 7))
            np.testing.assert_array_equal(file.get_tensor("routed_experts"), experts)
            np.testing.assert_array_equal(file.get_tensor("present"), present)
            if texts["request_id"] == "a:0:0:0":
                np.testing.assert_array_equal(file.get_tensor("logprobs"), puts["a:0:0:0"][0].logprobs)
                assert (texts["weights"], texts["tags"]) == ('[[0, 6, "v1"]]', '{"x": "\\u00fc"}')


def test_long_ids_have_short_names(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "routing", keys=rr.KeyScheme.uuid(4))
    ids = ["x" * 500, "x" * 499 + "y", "z"]
    for request_id in ids:
        stored.put(request_id)
    assert rr.export(stored.root, tmp_path / "out", "npz").files == 3
    names = {path.name for path in (tmp_path / "out").rglob("*.npz")}
    assert len(names) == 3
    assert max(map(len, names)) <= 204


def test_parquet(stored: Stored, tmp_path: Path) -> None:
    puts = fill(stored)
    report = rr.export(stored.root, tmp_path / "out")
    assert (report.files, report.records) == (2, 4)
    files = pads.dataset(
        tmp_path / "out", partitioning=pads.partitioning(pa.schema([("data_id", pa.string())]), flavor="hive")
    )
    rows = {row["request_id"]: row for row in files.to_table().to_pylist()}
    assert set(rows) == set(puts)
    for request_id, row in rows.items():
        experts, present = wanted(puts[request_id])
        for i, layer in enumerate(SPEC.moe_layers):
            assert row[f"layer_{layer:03d}"] == experts[i].tobytes()
        gaps = np.ones_like(present)
        for gap in row["missing"]:
            gaps[SPEC.moe_layers.index(gap["layer"]), gap["start"] : gap["stop"]] = False
        np.testing.assert_array_equal(gaps, present)
        assert (row["choice"], row["num_tokens"]) == (2 if "#" in request_id else None, experts.shape[1])
    assert rows["/b=ö:0:0:0"]["data_id"] == "/b=ö"
    assert rows["a:0:0:0"]["weights"] == [{"start": 0, "stop": 6, "version": "v1"}]
    assert rows["a:0:0:0"]["tags"] == [("x", "ü")]
    place = tmp_path / "out"
    found = duckdb.sql(f"SELECT data_id, count(*) FROM '{place}/*/*.parquet' GROUP BY ALL ORDER BY ALL").fetchall()
    assert found == [("/b=ö", 1), ("a", 3)]


def test_parquet_row_groups_and_statistics(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "ROW_GROUP_BYTES", 2500)
    for i in range(10):
        stored.put(f"a:{i}:0:0", 100)
    rr.export(stored.root, tmp_path / "out")
    metadata = pq.read_metadata(tmp_path / "out" / "data_id=a" / "records.parquet")
    assert metadata.num_row_groups == 4
    columns = {
        metadata.row_group(1).column(i).path_in_schema: metadata.row_group(1).column(i)
        for i in range(metadata.num_columns)
    }
    assert (columns["request_id"].statistics.min, columns["request_id"].statistics.max) == ("a:3:0:0", "a:5:0:0")
    assert columns["layer_003"].statistics is None


def test_long_and_counts(stored: Stored, tmp_path: Path) -> None:
    fill(stored)
    report = rr.export(stored.root, tmp_path / "out", "long")
    assert report.records == 4
    found = pa.concat_tables([pq.ParquetFile(path).read() for path in sorted((tmp_path / "out").rglob("long.parquet"))])
    assert found.equals(rr.to_long(stored.root).read_all())
    assert rr.export(stored.root, tmp_path / "counts", "counts", prefix="a").files == 1
    assert pq.read_table(tmp_path / "counts" / "counts.parquet").equals(rr.expert_counts(stored.root, "a"))


def test_an_export_does_not_mix_with_what_is_there(stored: Stored, tmp_path: Path) -> None:
    fill(stored)
    (tmp_path / "out" / "data_id=a").mkdir(parents=True)
    rr.export(stored.root, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for out in (tmp_path / "out", stored.root):
        for kind in ("npz", "counts"):
            with pytest.raises(rr.InvalidInputError, match=f"{out} holds files, .*: name a folder"):
                rr.export(stored.root, out, kind)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_export_that_fails_leaves_no_file(stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(stored)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        with pytest.raises(OSError, match="No space"):
            rr.export(stored.root, tmp_path / "out", "npz")
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    assert rr.export(stored.root, tmp_path / "out", "npz").files == 4
    with pytest.raises(rr.InvalidInputError, match="npz, safetensors, parquet"):
        rr.export(stored.root, tmp_path / "out", "csv")


# --- copy


def rows_at(root: Path) -> dict[str, dict[str, Any]]:
    """Every stored row by record id, all columns, read by pyarrow alone."""
    found: dict[str, dict[str, Any]] = {}
    for path in root.rglob("*.arrow"):
        for row in pa.ipc.open_file(path.read_bytes()).read_all().to_pylist():
            assert row["record_id"] not in found
            found[row["record_id"]] = row
    return found


def test_a_copy_is_a_dataset_of_its_own(stored: Stored, tmp_path: Path) -> None:
    puts = fill(stored)
    stored.put("a:9:0:0")
    newest = stored.put("a:9:0:0")
    stored.put("a:8:0:0")
    stored.tombstone("ids", ["a:8:0:0"])
    report = rr.copy(stored.root, tmp_path / "copy")
    live = [data.row.record_id for rows in puts.values() for data in rows]
    original = rows_at(stored.root)
    made = rows_at(tmp_path / "copy")
    dropped = {key for key, row in original.items() if row["status"] == "dropped"}
    assert set(made) == {*live, newest.row.record_id, *dropped}
    assert made == {key: original[key] for key in made}
    assert (report.records, report.rows, report.existing, report.shards) == (6, 7, 0, 3)
    assert rr.verify(tmp_path / "copy").sound
    source, copied = rr.open_dataset(stored.root).format, rr.open_dataset(tmp_path / "copy").format
    assert source.uuid != copied.uuid
    assert source.mismatch(copied) == ""
    assert not list((tmp_path / "copy" / "_rr" / "tmp").glob("*"))


def test_a_copy_is_idempotent_and_takes_what_is_new(stored: Stored, tmp_path: Path) -> None:
    fill(stored)
    rr.copy(stored.root, tmp_path / "copy", prefix="a")
    before = rows_at(tmp_path / "copy")
    again = rr.copy(stored.root, tmp_path / "copy", prefix="a")
    assert (again.records, again.rows, again.shards, again.existing) == (0, 0, 0, len(before))
    assert rows_at(tmp_path / "copy") == before
    stored.put("a:7:0:0")
    assert rr.copy(stored.root, tmp_path / "copy").records == 3
    assert set(rr.open_dataset(tmp_path / "copy").ids()) == set(rr.open_dataset(stored.root).ids())


def test_a_copy_of_ids(stored: Stored, tmp_path: Path) -> None:
    fill(stored)
    stored.shard(*(stored.row(f"d:{i}:0:0") for i in range(5)), level=1, compression="zstd")
    report = rr.copy(stored.root, tmp_path / "copy", ids=["d:3:0:0", "a:1:0:0#2", "gone:0:0:0"], compression="lz4")
    assert report.records == 2
    assert sorted(rr.open_dataset(tmp_path / "copy").ids()) == ["a:1:0:0#2", "d:3:0:0"]
    assert rr.verify(tmp_path / "copy").sound


def test_two_copies_make_the_same_names(stored: Stored, tmp_path: Path) -> None:
    fill(stored)
    names = []
    for place in ("one", "two"):
        rr.copy(stored.root, tmp_path / place)
        names.append({path.name for path in (tmp_path / place).rglob("*.arrow")})
    assert names[0] == names[1]


def test_unknown_columns_survive(stored: Stored, tmp_path: Path) -> None:
    rows = [stored.row(f"a:{i}:0:0") for i in range(3)]
    extra = pa.record_batch({"mood": pa.array(["good", None, "bad"])})
    builder_rows = bundle_with_extra(stored, rows, extra)
    assert builder_rows == {"good", None, "bad"}
    rr.copy(stored.root, tmp_path / "copy", ids=["a:2:0:0", "a:0:0:0"])
    found = {row["request_id"]: row["mood"] for row in rows_at(tmp_path / "copy").values()}
    assert found == {"a:0:0:0": "good", "a:2:0:0": "bad"}


def bundle_with_extra(stored: Stored, rows: list[RowData], extra: pa.RecordBatch) -> set[str | None]:
    """A shard as a later version may write it."""
    path = stored.shard(*rows)
    reader = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
    batch = reader.get_batch(0).append_column("mood", extra.column("mood"))
    path.write_bytes(written(reader, [batch], reader.metadata[b"rr.index"], batch.schema))
    indexed(path)
    return {row["mood"] for row in rows_at(stored.root).values()}


def test_what_the_destination_deleted_stays_deleted(stored: Stored, tmp_path: Path) -> None:
    fill(stored)
    copy = Stored(tmp_path / "copy")
    copy.tombstone("prefix", {"data_id": "a", "gen_id": 1}, t_del=100)
    report = rr.copy(stored.root, copy.root)
    assert report.existing == 1
    assert "a:1:0:0#2" not in set(rr.open_dataset(copy.root).ids())
    (path,) = copy.root.glob("data_id=a/*.arrow")
    index = pa.ipc.open_file(path.read_bytes()).metadata[b"rr.index"]
    assert b'"tombstones_applied":["' in index


def test_a_large_partition_becomes_several_shards(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(5):
        stored.put(f"a:{i}:0:0", 10)
    monkeypatch.setattr(bundle, "SHARD_BYTES", 2 * 10 * SPEC.bytes_per_token)
    assert rr.copy(stored.root, tmp_path / "copy").shards == 3


def test_damage_is_not_copied(stored: Stored, tmp_path: Path) -> None:
    path = stored.shard(stored.row("a:0:0:0"))
    damage(path, payload_byte)
    with pytest.raises(rr.CorruptShardError, match="checksum"):
        rr.copy(stored.root, tmp_path / "copy")
    damage(path, lambda data: data[:-1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rr.RoutingDatasetWarning)
        with pytest.raises(rr.CorruptShardError, match="verify"):
            rr.copy(stored.root, tmp_path / "copy")


def test_a_shard_that_is_compacted_away_meanwhile(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [stored.row(f"a:{i}:0:0") for i in range(3)]
    inputs = [stored.shard(row) for row in rows]
    merge, done = bundle.merge, list[Path]()

    def late(*args: Any, **how: Any) -> memoryview:
        if not done:
            done.append(stored.shard(*rows, inputs=inputs, level=1))
            for path in inputs:
                path.unlink()
        return merge(*args, **how)

    monkeypatch.setattr(bundle, "merge", late)
    assert rr.copy(stored.root, tmp_path / "copy").records == 3
    monkeypatch.setattr(bundle, "merge", lambda *_, **__: LocalStorage(str(tmp_path)).read_bytes("none"))
    with pytest.raises(rr.ReadConflictError, match="data_id=a"):
        rr.copy(stored.root, tmp_path / "other")


def test_progress_ends_at_all_bytes(stored: Stored, tmp_path: Path) -> None:
    fill(stored)
    size = sum(path.stat().st_size for path in stored.root.rglob("*.arrow"))
    for work in (
        lambda progress: rr.copy(stored.root, tmp_path / "copy", progress=progress),
        lambda progress: rr.export(stored.root, tmp_path / "out", "npz", progress=progress),
        lambda progress: rr.export(stored.root, tmp_path / "counts", "counts", progress=progress),
        lambda progress: rr.layer_loads(stored.root, progress=progress),
    ):
        told: list[tuple[int, int]] = []
        work(lambda done, total, told=told: told.append((done, total)))
        assert len(told) >= 3
        assert told == sorted(told)
        assert told[-1] == (size, size)


def test_copies_that_make_no_sense(stored: Stored, tmp_path: Path) -> None:
    with pytest.raises(rr.InvalidInputError, match="both source and destination"):
        rr.copy(stored.root, stored.root)
    with pytest.raises(rr.InvalidInputError, match="choose one"):
        rr.copy(stored.root, tmp_path / "x", ids=["a"], prefix="a")
    with pytest.raises(rr.InvalidInputError, match="gzip"):
        rr.copy(stored.root, tmp_path / "x", compression="gzip")
    rr.create_dataset(tmp_path / "y", rr.RoutingSpec((2, 3, 4), num_experts=100, top_k=2))
    with pytest.raises(rr.SpecMismatchError, match="num_experts"):
        rr.copy(stored.root, tmp_path / "y")
