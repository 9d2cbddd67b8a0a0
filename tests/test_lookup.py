"""Refs of receipts lead to the very rows they name, and groups of partitions stay small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stored import Stored

import rr_dataset as rr
from rr_dataset.layout import row_ref
from rr_dataset.record import RowData


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds")


def ref(data: RowData) -> str:
    return row_ref(data.row.record_id, data.row.request_id)


def test_resolve_gives_the_rows_named_in_order(stored: Stored) -> None:
    rows = [stored.put("a:1#2", 9), stored.put("a:1#2", 3), stored.put("b", 4)]
    order = [2, 0, 1, 0]
    got = stored.dataset.resolve([ref(rows[i]) for i in order], layers=[4, 9], tokens=slice(1, 3))
    for record, i in zip(got, order, strict=True):
        experts = rows[i].routed_experts
        assert experts is not None
        np.testing.assert_array_equal(record.routed_experts, experts[[1, 3], 1:3])
        assert (record.record_id, record.num_tokens) == (rows[i].row.record_id, rows[i].row.num_tokens)
    assert stored.dataset.resolve([]) == []


def test_a_part_is_resolved_alone(stored: Stored) -> None:
    stored.put("a", 4, part=True, status="partial")
    later = stored.put("a", 4, start=2, layers=(4, 7), part=True)
    (record,) = stored.dataset.resolve([ref(later)])
    assert (record.num_tokens, record.status, len(record.rows)) == (
        6,
        "partial",
        1,
    )  # as it does not tell of all layers
    assert record.missing_by_layer == {3: ((0, 6),), 4: ((0, 2),), 7: ((0, 2),), 9: ((0, 6),)}
    np.testing.assert_array_equal(record.routed_experts[1:3, 2:], later.routed_experts)


def test_a_compacted_row_keeps_its_ref(stored: Stored) -> None:
    rows = [stored.row("a:1"), stored.row("a:2")]
    paths = [stored.shard(row) for row in rows]
    stored.shard(*rows, inputs=paths, level=1, compression="zstd")
    paths[0].unlink()
    (record,) = stored.dataset.resolve([ref(rows[0])])
    np.testing.assert_array_equal(record.routed_experts, rows[0].routed_experts)


def test_a_deleted_or_unknown_row_is_named(stored: Stored) -> None:
    gone, kept, other = stored.put("a:1"), stored.put("a:2"), stored.put("a:2", run="other")
    stored.tombstone("ids", ["a:1"])
    wrong_id = row_ref(kept.row.record_id, "a:9")
    with pytest.raises(rr.RecordNotFoundError, match=rf"2 of 3 ids: {ref(gone)}, {wrong_id}\."):
        stored.dataset.resolve([ref(gone), ref(kept), wrong_id])
    with pytest.raises(rr.RecordNotFoundError, match="of run 'run-1' of 1 of 1"):
        rr.open_dataset(stored.root, run="run-1").resolve([ref(other)])


def test_a_dropped_row_says_why(stored: Stored) -> None:
    data = stored.put("a", status="dropped", reason="spool full")
    stored.put("a")
    with pytest.raises(rr.RecordDroppedError, match=r"a \(spool full\)"):
        stored.dataset.resolve([ref(data)])


@pytest.mark.parametrize(
    "text", ["", "a:1", "0" * 16 + "-" + "a" * 16, "0" * 16 + "-" + "A" * 16 + ":a", "x:" + "0" * 33]
)
def test_what_is_no_ref_is_named(stored: Stored, text: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=f"ref '{text}': expected the `ref` of a Receipt"):
        stored.dataset.resolve([text])
    with pytest.raises(rr.InvalidInputError, match="expected several refs"):
        stored.dataset.resolve(text)


def test_a_ref_to_an_impossible_id_says_so(stored: Stored) -> None:
    with pytest.raises(rr.InvalidRequestIdError, match="chatcmpl-1"):
        stored.dataset.resolve([row_ref("0" * 16 + "-" + "a" * 16, "chatcmpl-1")])


def test_an_id_that_looks_like_a_ref_is_an_id(stored: Stored) -> None:
    name = row_ref("0" * 16 + "-" + "a" * 16, "1")
    stored.put(name)
    assert stored.dataset.get(name).num_tokens == 5
    with pytest.raises(rr.RecordNotFoundError, match="no record of 1 of 1"):
        stored.dataset.get(name + ":2")
