"""Rows as Arrow data: exactly the live ones, from the files that may match, with the bytes that are asked for."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import SPEC, Stored

import rr_dataset as rr
from rr_dataset.errors import CorruptShardError
from rr_dataset.record import RowData
from rr_dataset.schema import shard_schema
from rr_dataset.storage.files import LocalSource
from rr_dataset.storage.local import LocalStorage

F = pc.field


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds")


def ids(batches: Iterable[pa.RecordBatch]) -> list[str]:
    return [request_id for batch in batches for request_id in batch["request_id"].to_pylist()]


def shown(dataset: pads.Dataset, **how: Any) -> list[str]:
    return sorted(dataset.to_table(columns=["request_id"], **how)["request_id"].to_pylist())


def check_row(batch: pa.RecordBatch, number: int, data: RowData) -> None:
    """All of a row, against what was put."""
    row = batch.slice(number, 1).to_pylist()[0]
    assert (row["record_id"], row["num_tokens"], row["status"]) == (
        data.row.record_id,
        data.row.num_tokens,
        data.row.status,
    )
    for i, layer in enumerate(SPEC.moe_layers):
        stored = row[f"layer_{layer:03d}"]
        if data.routed_experts is None:
            assert stored is None
        else:
            assert stored == data.routed_experts[i].tobytes()
    assert row["token_ids"] == (None if data.token_ids is None else data.token_ids.tolist())


# scan


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4"])
def test_scan_gives_whole_rows(stored: Stored, compression: str) -> None:
    rows = [stored.row("a:1", vectors=True), stored.row("a:2"), stored.row("a:3", status="dropped", reason="full")]
    stored.shard(*rows, compression=compression)
    (batch,) = stored.dataset.scan()
    assert batch.schema.equals(shard_schema(stored.spec, stored.keys), check_metadata=True)
    for number, data in enumerate(rows):
        check_row(batch, number, data)


def test_scan_leaves_out_what_is_dead(stored: Stored) -> None:
    stored.put("a:0")
    merged = [stored.row("b:1"), stored.row("b:2")]
    inputs = [stored.shard(row) for row in merged]
    stored.shard(*merged, inputs=inputs, level=1)
    stored.tombstone("ids", ["b:1"])
    stored.tombstone("prefix", "a:0")
    whole = stored.row("a:1")
    stored.shard(whole, stored.row("a:1", 3, part=True, status="partial"), stored.row("a:1", 3, start=3, part=True))
    stored.shard(stored.row("a:2"), stored.row("a:2"), stored.row("a:3"))
    got = list(stored.dataset.scan(columns=["request_id", "record_id"]))
    assert [batch.num_rows for batch in got] == [3, 2, 1]
    assert ids(got) == ["a:1", "a:1", "a:1", "a:2", "a:3", "b:2"]
    assert got[0].schema.names == ["request_id", "record_id"]


def test_scan_of_a_prefix_or_a_run(stored: Stored) -> None:
    stored.shard(stored.row("a:1"), stored.row("a:1#2"), stored.row("a:2"), stored.row("a:1", run="other"))
    stored.put("b:1")
    assert sorted(ids(stored.dataset.scan("a:1"))) == ["a:1", "a:1#2"]
    assert ids(stored.dataset.scan("a:1#2")) == ["a:1#2"]
    assert ids(stored.dataset.scan({"gen_id": 1}, ["request_id"])) == ["a:1", "a:1#2", "b:1"]
    assert ids(stored.dataset.scan("z")) == []
    (batch,) = rr.open_dataset(stored.root, run="other").scan()
    assert batch["t_submit"].to_pylist() == [4]


def test_scan_reads_the_bytes_of_its_columns_only(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 50_000
    path = stored.shard(stored.row("a", tokens))
    list(stored.dataset.ids())  # the index is known
    taken = [0]
    read = LocalSource.read

    def spy(source: LocalSource, offset: int, length: int) -> bytes:
        taken[0] += length
        return read(source, offset, length)

    monkeypatch.setattr(LocalSource, "read", spy)
    layer = tokens * SPEC.top_k
    (batch,) = stored.dataset.scan(columns=["layer_007", "request_id"])
    assert batch.schema.names == ["layer_007", "request_id"]
    assert layer < taken[0] < layer + 20_000 < path.stat().st_size / 3


def test_scan_reads_one_batch_at_a_time(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 2 MB: each is a batch of its own, and only that of the first is read for the first."""
    stored.shard(*[stored.row(f"a:{number}", 250_000) for number in range(3)])
    largest = [0]
    total = [0]
    read = LocalSource.read

    def spy(source: LocalSource, offset: int, length: int) -> bytes:
        total[0] += length
        largest[0] = max(largest[0], length)
        return read(source, offset, length)

    monkeypatch.setattr(LocalSource, "read", spy)
    batches = stored.dataset.scan()
    assert next(batches).num_rows == 1
    assert total[0] < 2_500_000
    assert [batch.num_rows for batch in batches] == [1, 1]
    assert largest[0] < 2_500_000


def test_scan_names_a_wrong_column_before_it_reads(stored: Stored) -> None:
    for columns in (["request_id", "layer_3"], [], "request_id", ["choice", "choice"]):
        with pytest.raises(
            rr.InvalidInputError, match="expected a list of different names among record_id, request_id"
        ):
            stored.dataset.scan(columns=columns)
    with pytest.raises(rr.InvalidRequestIdError):
        stored.dataset.scan(prefix="")


def test_a_shard_that_is_replaced_during_a_scan_is_read_from_the_new_one(stored: Stored) -> None:
    rows = [stored.row(f"a:{number}") for number in range(4)]
    paths = [stored.shard(rows[0]), stored.shard(rows[1]), stored.shard(rows[2], rows[3])]
    batches = stored.dataset.scan(columns=["request_id"])
    got = [next(batches)]
    stored.tombstone("ids", ["a:2"])
    stored.shard(rows[0], rows[1], rows[3], inputs=paths, level=1)
    for path in paths:
        path.unlink()
    stored.put("a:9")  # later than the view
    assert ids([*got, *batches]) == ["a:0", "a:1", "a:3"]


def test_a_partition_that_is_deleted_during_a_scan_ends_early(stored: Stored) -> None:
    stored.put("a:1")
    stored.put("a:2")
    stored.put("b")
    batches = stored.dataset.scan(columns=["request_id"])
    next(batches)
    stored.tombstone("prefix", "a")
    shutil.rmtree(stored.root / "data_id=a")
    assert ids(batches) == ["b"]


def test_shards_that_keep_vanishing_during_a_scan_are_a_clear_error(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.put("a")
    list(stored.dataset.ids())

    def gone(_: LocalStorage, path: str, entry: Any = None) -> Any:
        raise rr.ObjectNotFoundError(path)

    monkeypatch.setattr(LocalStorage, "open", gone)
    with pytest.raises(rr.ReadConflictError, match="data_id=a: 5 shards in a row vanished"):
        list(stored.dataset.scan())


@pytest.mark.parametrize("error", [rr.StorageError(5, "I/O error"), rr.CorruptShardError("ends early"), MemoryError()])
def test_a_failing_read_raises_what_the_store_raised(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    stored.put("a")
    list(stored.dataset.ids())

    def fail(*_: Any) -> bytes:
        raise error

    monkeypatch.setattr(LocalSource, "read", fail)
    with pytest.raises(type(error)) as caught:
        list(stored.dataset.scan())
    assert caught.value is error


def test_damage_that_the_index_does_not_show_names_the_file(stored: Stored) -> None:
    path = stored.shard(stored.row("a", 2000), compression="zstd")
    data = bytearray(path.read_bytes())
    at = data.index(b"\x28\xb5\x2f\xfd")  # zstd's magic
    data[at : at + 4] = bytes(4)
    path.write_bytes(data)
    with pytest.raises(rr.CorruptShardError, match=path.name):
        list(stored.dataset.scan())


# to_pyarrow


@pytest.fixture
def several(stored: Stored) -> Stored:
    """Four files, each with another gen_id, turn, time and weight version."""
    for number in range(4):
        request_ids = [f"p{number // 2}:{number}:{number}:{segment}" for segment in range(2)]
        stored.shard(*[stored.row(request_id, weights=f"v{number}") for request_id in request_ids])
    return stored


def leave_only(several: Stored, numbers: Iterable[int]) -> None:
    """Remove all files but those: what opens another one fails."""
    for number, path in enumerate(sorted(several.root.rglob("*.arrow"), key=lambda path: path.name)):
        if number not in numbers:
            path.unlink()


FILTERS = [
    (F("request_id") == "p0:1:1:0", [1], 1),
    (F("request_id").isin(["p0:1:1:0", "p1:3:3:1", "x"]), [1, 3], 2),
    (F("request_id") > "p1:2:2:1", [3], 2),
    (F("data_id") == "p1", [2, 3], 4),
    (F("turn_id") == "2", [2], 2),
    (F("turn_id") == "9", [], 0),
    (F("t_submit") > 6, [3], 2),
    ((F("t_submit") >= 3) & (F("t_submit") < 5), [1], 2),
    (F("weight_version") == "v2", [2], 2),
    ((F("turn_id") == "1") & (F("segment_id") == "1"), [1], 1),
    (F("choice").is_valid(), [0, 1, 2, 3], 0),
]


@pytest.mark.parametrize(("condition", "files", "rows"), FILTERS, ids=[str(each[0])[:40] for each in FILTERS])
def test_a_filter_opens_only_matching_files(several: Stored, condition: Any, files: list[int], rows: int) -> None:
    dataset = several.dataset.to_pyarrow()
    assert len(list(dataset.get_fragments(condition))) == len(files)
    leave_only(several, files)
    assert dataset.to_table(filter=condition).num_rows == rows
    if len(files) < 4:
        with pytest.raises(FileNotFoundError):
            dataset.to_table()


def test_a_file_with_nulls_is_opened_for_them(stored: Stored) -> None:
    stored.shard(stored.row("a:1"), stored.row("a:1:2", weights="v1"))
    stored.shard(stored.row("b:1:2", weights="v2"))
    dataset = stored.dataset.to_pyarrow()
    assert shown(dataset, filter=F("turn_id").is_null()) == ["a:1"]
    assert shown(dataset, filter=F("turn_id") == "2") == ["a:1:2", "b:1:2"]
    assert shown(dataset, filter=F("weight_version").is_null()) == ["a:1"]
    assert [len(list(dataset.get_fragments(F("turn_id") == turn))) for turn in "123"] == [0, 2, 0]


def test_without_reading_indexes_names_prune(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        stored.put(f"p{number}:1")
    stored.shard(stored.row("q:1"), stored.row("q:2"), stored.row("q:1"))
    opened = []
    open_ = LocalStorage.open
    monkeypatch.setattr(LocalStorage, "open", lambda self, path, *_: opened.append(path) or open_(self, path))
    dataset = stored.dataset.to_pyarrow(prune=False)
    assert [path.split("/")[0] for path in opened] == ["data_id=q"]
    assert shown(dataset) == ["p0:1", "p1:1", "p2:1", "p3:1", "q:1", "q:2"]
    leave_only(stored, [2])
    assert shown(dataset, filter=F("t_submit") == 3) == ["p2:1"]
    assert shown(dataset, filter=F("data_id") == "p2") == ["p2:1"]


@pytest.mark.parametrize("prune", [True, False])
def test_only_live_rows_are_shown(stored: Stored, prune: bool) -> None:
    old = [stored.row("a:1"), stored.row("a:1"), stored.row("a:2")]
    inputs = [stored.shard(row) for row in old]
    stored.shard(*old[1:], inputs=inputs, level=1)  # which hides them
    stored.put("a:2")
    stored.put("b:1")
    stored.put("c:1")
    stored.shard(stored.row("c:2"), stored.row("c:3"))
    stored.tombstone("ids", ["b:1", "c:3"])
    dataset = stored.dataset.to_pyarrow(prune=prune)
    assert sorted(dataset.to_table()["t_submit"].to_pylist()) == [2, 4, 6, 7]
    assert shown(dataset, filter=F("request_id") == "a:2") == ["a:2"]


def test_a_late_replay_beside_its_compaction_is_shown_once(stored: Stored) -> None:
    rows = [stored.row("a:1"), stored.row("a:2"), stored.row("a:1")]
    raw = stored.shard(*rows[:2])
    first = stored.shard(rows[0], rows[1], inputs=[raw], level=1)
    stored.shard(rows[1], rows[2], inputs=[first], level=2)
    raw_again = raw.exists()
    first.unlink()
    assert raw_again
    dataset = stored.dataset.to_pyarrow()
    assert sorted(dataset.to_table()["t_submit"].to_pylist()) == [2, 3]
    assert sorted(ids(stored.dataset.scan())) == ["a:1", "a:2"]


@pytest.mark.parametrize("prune", [True, False])
def test_a_prefix_or_a_run_limits_the_rows(stored: Stored, prune: bool) -> None:
    stored.shard(stored.row("a:1"), stored.row("a:1#2"), stored.row("a:2"), stored.row("a:1", run="other"))
    stored.put("b:1")
    stored.put("c:2")
    ds = stored.dataset
    assert shown(ds.to_pyarrow("a:1", prune)) == ["a:1", "a:1#2"]
    assert shown(ds.to_pyarrow("a:1#2", prune)) == ["a:1#2"]
    assert shown(ds.to_pyarrow({"gen_id": 1}, prune)) == ["a:1", "a:1#2", "b:1"]
    other = rr.open_dataset(stored.root, run="other").to_pyarrow(prune=prune)
    assert other.to_table()["t_submit"].to_pylist() == [4]


def test_without_dead_rows_it_pickles(several: Stored) -> None:
    dataset = pickle.loads(pickle.dumps(several.dataset.to_pyarrow("p0")))
    assert isinstance(dataset, pads.FileSystemDataset)
    assert len(dataset.files) == 2
    assert shown(dataset, filter=F("turn_id") == "1") == ["p0:1:1:0", "p0:1:1:1"]
    assert dataset.schema.equals(shard_schema(several.spec, several.keys))


def test_an_empty_dataset_has_its_columns(stored: Stored) -> None:
    assert stored.dataset.to_pyarrow().to_table().schema.names == shard_schema(stored.spec, stored.keys).names
    assert list(stored.dataset.scan()) == []


def test_duckdb_queries_it(several: Stored) -> None:
    duckdb = pytest.importorskip("duckdb")
    several.put("p0:1:1:0", 7)
    routing = several.dataset.to_pyarrow()
    query = "select num_tokens, octet_length(layer_004) from routing where data_id = 'p0' and turn_id = '1' order by 1"
    assert duckdb.sql(query).fetchall() == [(5, 10), (7, 14)]
    assert duckdb.sql("select count(*) from routing").fetchall() == [(8,)]
    assert routing is not None


_PUTS = st.lists(
    st.tuples(st.sampled_from(["a:1", "a:2", "a:3:1", "b:1", "b:1#2"]), st.booleans(), st.sampled_from(["one", "two"])),
    max_size=12,
)


@given(_PUTS, st.lists(st.integers(0, 11), max_size=3), st.sampled_from([None, "a", "a:3", "b:1#2"]))
def test_both_show_the_rows_of_the_heads(
    tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[str, bool, str]], cuts: list[int], prefix: str | None
) -> None:
    """However rows lie in files, the rows are those that `heads` makes its records from."""
    stored = Stored(tmp_path_factory.mktemp("view") / "ds")
    rows = [stored.row(request_id, part=part, run=run) for request_id, part, run in puts]
    stored.tombstone("ids", ["a:2"], t_del=3)
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), len(rows)], strict=True):
        for data_id in "ab":
            chosen = [row for row in rows[first:last] if row.row.request_id.startswith(data_id)]
            if chosen:
                stored.shard(*chosen)
    for run in (None, "one"):
        ds = rr.open_dataset(stored.root, run=run)
        expected = sorted(row.t_submit for head in ds.heads(ds.ids(prefix)) for row in head.rows)
        scanned = [t for batch in ds.scan(prefix, ["t_submit"]) for t in batch["t_submit"].to_pylist()]
        assert sorted(scanned) == expected
        for prune in (True, False):
            assert sorted(ds.to_pyarrow(prefix, prune).to_table()["t_submit"].to_pylist()) == expected


def test_layers_read_through_arrow_are_those_of_get(several: Stored) -> None:
    table = several.dataset.to_pyarrow().to_table(columns=["request_id", "layer_009"])
    for row in table.to_pylist():
        experts = several.dataset.get(row["request_id"], layers=[9]).routed_experts[0]
        np.testing.assert_array_equal(np.frombuffer(row["layer_009"], SPEC.dtype).reshape(-1, SPEC.top_k), experts)


@pytest.mark.parametrize(
    "error",
    [
        pa.ArrowNotImplementedError("x"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"),
        OverflowError("x"),
        RecursionError("x"),
    ],
)
def test_whatever_pyarrow_raises_of_a_shard_names_it(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def open_file(*args: object, **named: object) -> None:
        raise error

    path = stored.shard(stored.row("a:0:0:0"))
    monkeypatch.setattr(pa.ipc, "open_file", open_file)
    with pytest.raises(CorruptShardError, match=f"{path.name}: pyarrow cannot read it: {type(error).__name__}"):
        list(stored.dataset.scan())
