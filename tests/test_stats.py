"""Counts and the long form, against plain loops over what was put."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from stored import SPEC, Stored, expected

import rr_dataset as rr
from rr_dataset import stats
from rr_dataset.record import RowData

Long = tuple[str, int, int, int, int]  # request id, token, layer, slot, expert


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "routing")


@pytest.fixture
def puts(stored: Stored) -> dict[str, list[RowData]]:
    """Two partitions, with everything that makes rows and records differ."""
    found = {
        "a:0:0:0": [stored.put("a:0:0:0", 3), stored.put("a:0:0:0", 6, weights="v1")],  # replaced
        "a:1:0:0": [stored.put("a:1:0:0", 8, missing=((2, 4),), weights=[(0, 3, "v1"), (3, 6, "v2")])],
        "a:2:0:0": [stored.put("a:2:0:0", 4, layers=(3, 9)), stored.put("a:2:0:0", 5, start=2, part=True)],
        "b:0:0:0": [stored.put("b:0:0:0", 5, run="run-2")],
        "b:3:0:0": [stored.put("b:3:0:0", 0)],
    }
    stored.put("b:1:0:0", status="dropped", reason="spool_full")
    stored.put("b:2:0:0", 4)
    stored.tombstone("ids", ["b:2:0:0"])
    return found


def long_form(puts: dict[str, list[RowData]], layers: tuple[int, ...] = SPEC.moe_layers) -> Iterator[Long]:
    for request_id, rows in puts.items():
        tokens = max(data.row.token_stop for data in rows)
        experts, present = expected(rows, SPEC, layers, range(tokens))
        for i, layer in enumerate(layers):
            for token in range(tokens):
                for slot in range(SPEC.top_k):
                    if present[i, token]:
                        yield request_id, token, layer, slot, int(experts[i, token, slot])


def version(puts: dict[str, list[RowData]], request_id: str, token: int) -> str | None:
    row = puts[request_id][-1].row
    spans = [text for start, stop, text in row.weight_spans if start <= token < stop]
    return spans[0] if spans else row.weight_version


# --- the long form


def test_long_form(stored: Stored, puts: dict[str, list[RowData]]) -> None:
    reader = rr.to_long(stored.root)
    assert reader.schema.names == ["request_id", "token", "layer", "slot", "expert"]
    assert reader.schema.field("expert").type == pa.uint8()
    table = reader.read_all()
    assert [tuple(row.values()) for row in table.to_pylist()] == list(long_form(puts))


def test_long_form_of_a_prefix_and_some_layers(stored: Stored, puts: dict[str, list[RowData]]) -> None:
    table = rr.to_long(stored.root, prefix={"data_id": "a"}, layers=[4, 9]).read_all()
    wanted = [row for row in long_form(puts, (4, 9)) if row[0].startswith("a:")]
    assert [tuple(row.values()) for row in table.to_pylist()] == wanted


def test_long_form_comes_in_small_batches(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    data = stored.put("a:0:0:0", 50, missing=((3, 9), (40, 41)))
    monkeypatch.setattr(stats, "LONG_ROWS", 7)
    batches = list(rr.to_long(stored.root))
    assert max(batch.num_rows for batch in batches) <= 7 * SPEC.top_k
    rows = [tuple(row.values()) for row in pa.Table.from_batches(batches).to_pylist()]
    assert sorted(rows) == sorted(long_form({"a:0:0:0": [data]}))


def test_records_are_read_a_few_at_a_time(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(6):
        stored.put(f"a:{i}:0:0", 10)
    groups: list[int] = []
    get_many = rr.RoutingDataset.get_many

    def counted(dataset: rr.RoutingDataset, ids: list[str], **how: Any) -> Any:
        groups.append(len(ids))
        return get_many(dataset, ids, **how)

    monkeypatch.setattr(rr.RoutingDataset, "get_many", counted)
    monkeypatch.setattr(stats, "READ_BYTES", 2 * 10 * SPEC.bytes_per_token)
    reader = rr.to_long(stored.root)
    next(reader)
    assert groups == [2]  # it reads while it is consumed
    reader.read_all()
    assert groups == [2, 2, 2]
    groups.clear()
    rr.to_long(stored.root, layers=[3]).read_all()  # a quarter of the bytes
    assert groups == [6]


def test_duckdb_takes_the_long_form(stored: Stored, puts: dict[str, list[RowData]]) -> None:
    long = rr.to_long(stored.root)  # noqa: F841 -- the query names it
    found = duckdb.sql("SELECT request_id, layer, count(*), sum(expert) FROM long GROUP BY ALL ORDER BY ALL").fetchall()
    wanted: dict[tuple[str, int], list[int]] = {}
    for request_id, _, layer, _, expert in long_form(puts):
        wanted.setdefault((request_id, layer), []).append(expert)
    assert found == [(*key, len(ids), sum(ids)) for key, ids in sorted(wanted.items())]


def test_wrong_arguments_are_told_at_once(stored: Stored) -> None:
    with pytest.raises(rr.InvalidRoutingError, match="99"):
        rr.to_long(stored.root, layers=[99])
    with pytest.raises(rr.InvalidRequestIdError):
        rr.to_long(stored.root, prefix="a:x")


# --- counts


@pytest.mark.parametrize(
    "by",
    [("layer", "weight_version"), (), ("layer",), ("weight_version",), ("run_id", "data_id"), ("request_id", "gen_id")],
    ids=str,
)
def test_counts(stored: Stored, puts: dict[str, list[RowData]], by: tuple[str, ...]) -> None:
    table = rr.expert_counts(stored.root, by=by)
    assert table.column_names == [*by, "expert", "count"]
    wanted: Counter[Any] = Counter()
    for request_id, token, layer, _, expert in long_form(puts):
        values = {
            "layer": layer,
            "weight_version": version(puts, request_id, token),
            "run_id": puts[request_id][-1].row.run_id,
            "request_id": request_id,
            "data_id": request_id[0],
            "gen_id": request_id[2],
        }
        wanted[(*(values[name] for name in by), expert)] += 1
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert {row[:-1]: row[-1] for row in rows if row[-1]} == wanted
    keys = list(dict.fromkeys(row[:-2] for row in rows))
    assert [row[:-1] for row in rows] == [(*key, expert) for key in keys for expert in range(SPEC.num_experts)]
    assert keys == sorted(keys, key=lambda key: [(value is None, value) for value in key])


def test_counts_of_nothing(stored: Stored) -> None:
    table = rr.expert_counts(stored.root)
    assert (table.column_names, len(table)) == (["layer", "weight_version", "expert", "count"], 0)
    assert rr.layer_loads(stored.root) == ()


@pytest.mark.parametrize("by", ["layer", ("layer", "layer"), ("tags",)], ids=str)
def test_unknown_groups_are_refused(stored: Stored, by: Any) -> None:
    with pytest.raises(rr.InvalidInputError, match="expected different names among layer"):
        rr.expert_counts(stored.root, by=by)


def test_damaged_ids_are_an_error(tmp_path: Path) -> None:
    stored = Stored(tmp_path, replace(SPEC, num_experts=100))
    data = stored.row("a:0:0:0")
    assert data.routed_experts is not None
    data.routed_experts[0, 0, 0] = 100
    stored.shard(data)
    with pytest.raises(rr.CorruptShardError, match="'a:0:0:0' has the id 100 in layer 3"):
        rr.expert_counts(stored.root)


def test_loads(tmp_path: Path) -> None:
    stored = Stored(tmp_path, rr.RoutingSpec((1, 2), num_experts=4, top_k=2))
    data = stored.row("a:0:0:0", 3)
    assert data.routed_experts is not None
    data.routed_experts[:] = np.array([[[0, 1], [0, 1], [0, 3]], [[0, 1], [2, 3], [1, 2]]])
    stored.shard(data)
    first, second = rr.layer_loads(stored.root)
    assert (first.layer, first.tokens, first.counts) == (1, 3, (3, 2, 0, 1))
    assert (first.busiest, first.dead, first.max_over_mean) == (0, (2,), 2.0)
    assert (second.layer, second.busiest, second.dead, second.max_over_mean) == (2, 1, (), 4 / 3)
    assert rr.layer_loads(stored.root, layers=[2]) == (second,)
    assert rr.LayerLoad(0, 0, (0, 0)).max_over_mean == 0


def test_a_row_far_away_is_counted_without_what_lies_before_it(stored: Stored) -> None:
    far = (1 << 31) - 10
    stored.put("a:0:0:0", 3, part=True, weights="v1")
    stored.put("a:0:0:0", 4, start=far, part=True, missing=((far + 1, far + 2),), weights="v2")
    stored.put("a:1:0:0", 2)
    table = rr.to_long(stored.root).read_all().to_pylist()
    tokens = {(row["request_id"], row["token"]) for row in table}
    near = {("a:0:0:0", token) for token in (0, 1, 2, far, far + 2, far + 3)}
    assert tokens == near | {("a:1:0:0", 0), ("a:1:0:0", 1)}
    counts = rr.expert_counts(stored.root, by=["weight_version"]).to_pylist()
    per_token = len(SPEC.moe_layers) * SPEC.top_k
    sums = Counter[str | None]()
    for row in counts:
        sums[row["weight_version"]] += row["count"]
    assert sums == {"v1": 3 * per_token, "v2": 3 * per_token, None: 2 * per_token}
