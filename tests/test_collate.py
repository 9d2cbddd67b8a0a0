"""Batches against a naive loop; fillers that hurt nobody; tensors that share memory where they can."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import SPEC, Stored, expected

import rr_dataset as rr
from rr_dataset.padding import RowKind, padded_dtype, spread_rows
from rr_dataset.trainer.collate import collate, to_paddle, to_torch
from rr_dataset.trainer.samples import RoutingSamples, SampleOptions


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds")


@given(st.data())
def test_a_batch_is_what_a_loop_makes(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored = Stored(Path(folder))
        rows: dict[str, Any] = {}
        for number in range(data.draw(st.integers(0, 4))):
            tokens = data.draw(st.integers(1, 6))
            hole = data.draw(st.none() | st.integers(0, tokens - 1))
            how: dict[str, Any] = {"missing": () if hole is None else ((hole, hole + 1),)}
            if data.draw(st.booleans()):
                how["layers"] = tuple(sorted(data.draw(st.sets(st.sampled_from(SPEC.moe_layers), min_size=1))))
            rows[f"a:{number}"] = stored.put(f"a:{number}", tokens, **how)
        layers = tuple(sorted(data.draw(st.sets(st.sampled_from(SPEC.moe_layers), min_size=1))))
        ids = [*rows, "a:99"] if data.draw(st.booleans()) else list(rows)
        records = stored.dataset.get_many(ids, layers, on_missing="none")
        read = [0 if record is None else record.num_tokens for record in records]
        counts = [count + data.draw(st.integers(0, 2)) for count in read]
        padding = data.draw(st.sampled_from(["spread", "minus_one"]))
        order = data.draw(st.sampled_from(["BTLK", "BLTK"]))
        multiple = data.draw(st.integers(1, 5))

        batch = collate(records, SPEC, num_tokens=counts, padding=padding, order=order, pad_to_multiple=multiple)

        length = -(-max(counts, default=0) // multiple) * multiple
        if not rows:
            layers = SPEC.moe_layers
        assert batch.layers == layers
        in_order = batch.routed_experts if order == "BTLK" else batch.routed_experts.transpose(0, 2, 1, 3)
        assert in_order.shape == (len(ids), length, len(layers), 2)
        assert batch.routed_experts.flags.c_contiguous
        assert batch.routed_experts.dtype == ("uint8" if padding == "spread" else "int16")
        masks = batch.mask[:, :, None].repeat(len(layers), 2) if batch.masks is None else batch.masks
        for number, request_id in enumerate(ids):
            known = [rows[request_id]] if request_id in rows else []
            experts, present = expected(known, SPEC, layers, range(length))
            for row in range(length):
                kinds = [RowKind.REAL if there else RowKind.MISSING for there in present[:, row]]
                if row >= counts[number]:
                    kinds = [RowKind.PADDING] * len(layers)
                assert masks[number, row].tolist() == kinds
                assert batch.mask[number, row] == min(kinds)
                for at, kind in enumerate(kinds):
                    got = in_order[number, row, at]
                    if kind == RowKind.REAL:
                        np.testing.assert_array_equal(got, experts[at, row])
                    else:
                        assert (got == -1).all() if padding == "minus_one" else got[0] != got[1]
        if batch.masks is not None:
            assert (batch.masks != batch.mask[:, :, None]).any()


@given(st.integers(1, 300), st.data())
def test_fillers_are_distinct_and_balanced(num_experts: int, data: st.DataObject) -> None:
    top_k, count = data.draw(st.integers(1, num_experts)), data.draw(st.integers(0, 40))
    rows = spread_rows(count, num_experts, top_k, "uint16")
    assert all(len(set(row)) == top_k for row in rows.tolist())
    load = np.bincount(rows.ravel(), minlength=num_experts)
    assert len(load) == num_experts
    assert load.max() - load.min() <= 1


def test_even_one_padded_row_is_spread_over_the_ranks_of_experts() -> None:
    (row,) = spread_rows(1, 256, 8, "uint8").tolist()
    assert sorted(expert // 32 for expert in row) == list(range(8))


@pytest.mark.parametrize(
    ("stored_dtype", "num_experts", "wanted"),
    [("uint8", 128, "int8"), ("uint8", 256, "int16"), ("uint16", 512, "int16"), ("uint16", 40000, "int32")],
)
def test_minus_one_takes_the_narrowest_signed_dtype(stored_dtype: str, num_experts: int, wanted: str) -> None:
    assert padded_dtype(stored_dtype, num_experts, "minus_one") == wanted
    assert padded_dtype(stored_dtype, num_experts, "spread") == stored_dtype


def test_padding_spreads_over_the_whole_batch(stored: Stored) -> None:
    records = [stored.dataset.get(stored.put(f"a:{i}", 2).row.request_id) for i in range(3)]
    batch = collate(records, SPEC, length=52)
    for layer in range(4):
        load = np.bincount(batch.routed_experts[:, 2:, layer].ravel(), minlength=200)
        assert load.max() - load.min() <= 1


def test_wrong_arguments_are_named(stored: Stored) -> None:
    stored.put("a:1", 5)
    record, narrow = stored.dataset.get("a:1"), stored.dataset.get("a:1", layers=[3, 4])
    for arguments, says in (
        ({"length": 4}, r"sample 0 \('a:1'\) has 5 tokens, more than length=4"),
        ({"num_tokens": [4]}, r"sample 0 \('a:1'\) has 4 tokens, and 5 were read"),
        ({"num_tokens": [5, 5]}, "2 numbers for 1 records"),
        ({"order": "TBLK"}, "order='TBLK'"),
        ({"padding": "zero"}, "padding='zero'"),
        ({"pad_to_multiple": 0}, "pad_to_multiple=0"),
    ):
        with pytest.raises(rr.InvalidInputError, match=says):
            collate([record], SPEC, **arguments)  # type: ignore[arg-type]
    with pytest.raises(rr.InvalidRoutingError, match=r"sample 1 \('a:1'\) has layers 3-4, those before it 3-4, 7, 9"):
        collate([record, narrow], SPEC)
    with pytest.raises(rr.InvalidInputError, match="sample 1 has no record: say num_tokens="):
        collate([record, None], SPEC)


@pytest.mark.parametrize("framework", ["torch", "paddle"])
@pytest.mark.parametrize(
    ("dtype", "wanted", "shared"),
    [
        ("uint8", "uint8", True),
        ("int16", "int16", True),
        ("int32", "int32", True),
        ("int64", "int64", True),
        ("uint16", "int32", False),
        ("uint32", "int64", False),
    ],
)
def test_tensors_hold_the_numbers(framework: str, dtype: str, wanted: str, shared: bool) -> None:
    pytest.importorskip(framework)
    make = to_torch if framework == "torch" else to_paddle
    top = np.iinfo(dtype).max
    array = np.array([[0, 1], [2, top]], dtype)
    tensor = make(array)
    assert str(tensor.dtype).rpartition(".")[2] == wanted
    assert tensor.tolist() == [[0, 1], [2, top]]
    array[0, 0] = 7
    assert (int(tensor[0, 0]) == 7) == shared
    frozen = np.array([1, 2], dtype)
    frozen.flags.writeable = False
    assert make(frozen).tolist() == [1, 2]
    assert make(array.T).tolist() == array.T.tolist()
    assert make(array[:0]).tolist() == []
    assert make(np.array([3], "uint8"), "int64").tolist() == [3]
    with pytest.raises(rr.InvalidInputError, match="dtype='uint16': tensors of it are of little use; take int32"):
        make(array, "uint16")
    with pytest.raises(rr.InvalidInputError, match="dtype='int8' does not hold every"):
        make(array, "int8")


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_what_holds_arrays_becomes_the_same_with_tensors(name: str, stored: Stored) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        framework = pytest.importorskip(name)
    convert = to_torch if name == "torch" else to_paddle
    tensor = framework.Tensor
    rows = [stored.put("a:1", 5, vectors=True), stored.put("a:2", 3, layers=(3, 4), vectors=True)]
    batch = collate(stored.dataset.get_many(["a:1", "a:2"]), SPEC)
    made = convert(batch, "int64")
    assert isinstance(made, type(batch))
    assert all(isinstance(each, tensor) for each in (made.routed_experts, made.mask, made.masks))
    np.testing.assert_array_equal(made.routed_experts.numpy(), batch.routed_experts)
    assert made.routed_experts.dtype == framework.int64
    assert made.mask.dtype == framework.uint8
    assert made.layers == SPEC.moe_layers
    packed = convert(stored.dataset.get_packed(["a:1", "a:2"]), "int32")
    np.testing.assert_array_equal(packed.experts[3][:5].numpy(), rows[0].routed_experts[0])
    assert packed.experts[3].dtype == framework.int32
    assert packed.cu_seqlens.tolist() == [0, 5, 8]
    assert packed.masks[9].dtype == framework.uint8
    sample = convert(RoutingSamples(stored.dataset, ["a:1"], SampleOptions(vectors=True))[0])
    assert sample["request_id"] == "a:1"
    assert all(isinstance(sample[key], tensor) for key in ("routed_experts", "present", "token_ids", "logprobs"))
    for wrong in ([batch], "text", None, 3):
        with pytest.raises(rr.InvalidInputError, match="expected a numpy array, or a Batch"):
            convert(wrong)
