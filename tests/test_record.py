from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import payload, ranges_within, routing, rows, specs

from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.record import EVERY_LAYER_ROUTES, RecordHead, RoutingRecord, RoutingSpec, Row, RowData, ranges_of

SPEC = RoutingSpec(moe_layers=(1, 2, 5), num_experts=8, top_k=2)
ROW = Row(
    record_id="1-1",
    request_id="math:1",
    components=("math", "1"),
    choice=None,
    t_submit=1,
    token_start=0,
    num_tokens=2,
    part=True,
    status="complete",
    run_id="run-1",
    layers=(1,),
)


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 100))
def test_ranges_are_the_runs_of_a_mask(mask: list[bool], start: int) -> None:
    found = ranges_of(np.array(mask, np.bool_), start)
    assert {p for begin, stop in found for p in range(begin, stop)} == {start + i for i, on in enumerate(mask) if on}
    assert all(begin < stop for begin, stop in found)
    assert all(stop < after for (_, stop), (after, _) in pairwise(found))
    assert {type(position) for pair in found for position in pair} <= {int}


@given(specs())
def test_a_spec_survives_json_and_pickle(spec: RoutingSpec) -> None:
    assert RoutingSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec


@given(specs())
def test_the_dtype_holds_every_expert(spec: RoutingSpec) -> None:
    assert np.iinfo(spec.dtype).max >= spec.num_experts - 1
    assert spec.bytes_per_token == routing(spec, spec.num_layers, 1).nbytes


def test_the_dtype_is_the_narrowest_unless_given() -> None:
    assert [RoutingSpec((0,), n, 1).dtype for n in (1, 256, 257, 65536)] == ["uint8", "uint8", "uint16", "uint16"]
    assert RoutingSpec((0,), 8, 1, dtype="uint32").dtype == "uint32"


def test_integers_of_numpy_become_plain_ones() -> None:
    spec = RoutingSpec(moe_layers=np.arange(3), num_experts=np.int64(8), top_k=np.uint8(2), dtype=np.dtype("uint16"))  # type: ignore[arg-type]
    assert spec == RoutingSpec((0, 1, 2), 8, 2, "uint16")
    json.dumps(spec.to_dict())


@pytest.mark.parametrize(
    "wrong",
    [
        {"moe_layers": ()},
        {"moe_layers": 4},
        {"moe_layers": None},
        {"moe_layers": "34"},
        {"moe_layers": (-1, 2)},
        {"moe_layers": (2, 1)},
        {"moe_layers": (1, 1)},
        {"moe_layers": (0, 1.5)},
        {"num_experts": 0},
        {"num_experts": 65537},
        {"num_experts": 8.0},
        {"num_experts": True},
        {"top_k": 0},
        {"top_k": 9},
        {"top_k": "2"},
        {"top_k": True},
        {"topk_order": "random"},
        {"dtype": "int32"},
        {"dtype": "uint64"},
        {"dtype": "nonsense"},
        {"dtype": "uint8", "num_experts": 512},
    ],
)
def test_a_wrong_spec_is_refused_with_the_field(wrong: dict[str, Any]) -> None:
    good = {"moe_layers": (0, 1), "num_experts": 8, "top_k": 2}
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        RoutingSpec(**{**good, **wrong})


def test_layers_are_chosen_by_id() -> None:
    assert SPEC.check_layers(None) == (1, 2, 5)
    assert SPEC.check_layers(np.array([1, 5])) == (1, 5)  # type: ignore[arg-type]
    for wrong in ([], [0], [1, 3], [5, 1], [1, 1], 1, "12", ["1"], [1.0]):
        with pytest.raises(InvalidRoutingError):
            SPEC.check_layers(wrong)


def test_many_layers_are_said_as_runs() -> None:
    spec = RoutingSpec((*range(3, 61), 70), num_experts=256, top_k=8)
    assert repr(spec) == (
        "RoutingSpec(moe_layers=3-60, 70, num_experts=256, top_k=8, dtype='uint8', topk_order='preserve')"
    )
    with pytest.raises(
        InvalidRoutingError, match=r"layers \[0-2, 99\] are not MoE layers of this dataset, which has 3-60, 70"
    ):
        spec.check_layers([0, 1, 2, 3, 99])
    assert ", layers=3-60, 70, " in repr(replace(ROW, layers=spec.moe_layers))
    record = RoutingRecord("a", ("a",), None, "complete", None, 0, (), (), "run", {}, (), (), layers=spec.moe_layers)
    assert ", layers=3-60, 70, token_ranges=()" in repr(record)
    with pytest.raises(InvalidRoutingError, match=r"layer 61 was not read; this record holds 3-60, 70"):
        record.layer(61)
    with pytest.raises(InvalidRoutingError, match="out is a list: expected a numpy array"):
        record.to_numpy(out=[])  # type: ignore[arg-type]


QWEN3 = {
    "num_hidden_layers": 6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = {"num_hidden_layers": 6, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
ERNIE = {
    "num_hidden_layers": 6,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
}
ERNIE_VL = {**ERNIE, "moe_num_experts": [64, 32], "moe_layer_start_index": [1, 2], "moe_layer_end_index": [29, 4]}

CONFIGS: list[tuple[str, dict[str, Any], tuple[int, ...], int, int]] = [
    ("qwen3", QWEN3, (0, 1, 2, 3, 4, 5), 128, 8),
    ("qwen3, every second", {**QWEN3, "decoder_sparse_step": 2}, (1, 3, 5), 128, 8),
    ("qwen3, dense ones", {**QWEN3, "mlp_only_layers": [0, 4]}, (1, 2, 3, 5), 128, 8),
    ("qwen3, both", {**QWEN3, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5), 128, 8),
    ("qwen3, no list", {**QWEN3, "mlp_only_layers": None}, (0, 1, 2, 3, 4, 5), 128, 8),
    (
        "qwen3 as transformers 5 saves it",
        {**{k: v for k, v in QWEN3.items() if k != "num_experts"}, "num_local_experts": 60},
        (0, 1, 2, 3, 4, 5),
        60,
        8,
    ),
    ("qwen3 in fastdeploy", {**QWEN3, "moe_num_experts": 128, "moe_layer_start_index": 0}, (0, 1, 2, 3, 4, 5), 128, 8),
    ("glm4", DEEPSEEK, (3, 4, 5), 256, 8),
    ("deepseek v3", {**DEEPSEEK, "moe_layer_freq": 1}, (3, 4, 5), 256, 8),
    ("deepseek, every second", {**DEEPSEEK, "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4), 256, 8),
    ("deepseek, a list", {**DEEPSEEK, "moe_layer_freq": [0, 1, 0, 1, 0, 1]}, (3, 5), 256, 8),
    (
        "a list and no dense first layers",
        {**DEEPSEEK, "first_k_dense_replace": None, "moe_layer_freq": [0, 1, 0, 1, 0, 1]},
        (1, 3, 5),
        256,
        8,
    ),
    ("deepseek in fastdeploy", {**DEEPSEEK, "moe_num_experts": 256, "moe_layer_start_index": 0}, (3, 4, 5), 256, 8),
    ("ernie", ERNIE, (1, 2, 3, 4, 5), 64, 6),
    ("ernie, an end", {**ERNIE, "moe_layer_end_index": 3}, (1, 2, 3), 64, 6),
    ("ernie, no end", {**ERNIE, "moe_layer_end_index": None}, (1, 2, 3, 4, 5), 64, 6),
    ("ernie, every second", {**ERNIE, "moe_layer_start_index": 0, "moe_layer_interval": 2}, (1, 3, 5), 64, 6),
    ("ernie in transformers", {**ERNIE, "num_experts": 64, "num_experts_per_tok": 6}, (1, 2, 3, 4, 5), 64, 6),
    ("ernie vl", ERNIE_VL, (1, 2, 3, 4, 5), 64, 6),
    (
        "ernie vl in transformers",
        {
            "text_config": {
                **ERNIE,
                "moe_layer_start_index": None,
                "mlp_layer_types": ["dense"] + ["sparse"] * 4 + ["dense"],
            }
        },
        (1, 2, 3, 4),
        64,
        6,
    ),
    ("multimodal", {"num_hidden_layers": 99, "text_config": QWEN3}, (0, 1, 2, 3, 4, 5), 128, 8),
]


@pytest.mark.parametrize("model_type", sorted(EVERY_LAYER_ROUTES))
def test_models_whose_every_layer_routes_are_known_by_name(model_type: str) -> None:
    config = {"model_type": model_type, "num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2}
    assert RoutingSpec.from_config(config) == RoutingSpec((0, 1, 2), 8, 2)
    assert RoutingSpec.from_config({**config, "first_k_dense_replace": 1}) == RoutingSpec((1, 2), 8, 2)
    assert model_type in str(RoutingSpec.from_config.__doc__)


@pytest.mark.parametrize("config", [None, "config.json", b"{}", Path("config.json"), [], 5])
def test_what_is_no_config_is_refused(config: object) -> None:
    with pytest.raises(InvalidInputError, match="expected a mapping, as json.load"):
        RoutingSpec.from_config(config)


def as_object(config: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**{k: as_object(v) if isinstance(v, dict) else v for k, v in config.items()})


@pytest.mark.parametrize(
    ("config", "layers", "experts", "top_k"), [c[1:] for c in CONFIGS], ids=[c[0] for c in CONFIGS]
)
def test_a_spec_comes_from_a_models_config(
    config: dict[str, Any], layers: tuple[int, ...], experts: int, top_k: int
) -> None:
    expected = RoutingSpec(layers, experts, top_k)
    assert RoutingSpec.from_config(config) == expected
    assert RoutingSpec.from_config(as_object(config)) == expected


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "no num_hidden_layers"),
        ({"num_hidden_layers": 4, "model_type": "llama"}, "nothing in it says which layers route"),
        ({k: v for k, v in QWEN3.items() if k != "num_experts"}, "no n_routed_experts or num_experts"),
        ({k: v for k, v in ERNIE.items() if k != "moe_k"}, "no num_experts_per_tok or moe_k"),
        ({**ERNIE, "moe_num_experts": []}, "no n_routed_experts or num_experts"),
        ({**DEEPSEEK, "first_k_dense_replace": 6}, "none of its 6 layers routes"),
        ({**DEEPSEEK, "moe_layer_freq": [1]}, "a flag for each of 6 layers"),
        ({**DEEPSEEK, "moe_layer_freq": 0}, "moe_layer_freq=0"),
        ({**QWEN3, "decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({**QWEN3, "mlp_layer_types": ["sparse"]}, "dense or sparse for 6 layers"),
        ({**QWEN3, "mlp_layer_types": 5}, "dense or sparse for 6 layers"),
        ({**QWEN3, "mlp_only_layers": 5}, "mlp_only_layers=5, expected a list"),
        ({**QWEN3, "mlp_layer_types": ["hash_moe"] * 6}, "dense or sparse for 6 layers"),
    ],
)
def test_a_config_that_does_not_tell_is_refused_with_the_way_out(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        RoutingSpec.from_config(config)
    text = str(error.value)
    assert says in text
    assert f"model_type={config.get('model_type')!r}" in text
    for field in ("decoder_sparse_step", "first_k_dense_replace", "moe_layer_freq", "moe_layer_start_index", "moe_k"):
        assert field in text
    assert "RoutingSpec(moe_layers=..., num_experts=..., top_k=...)" in text


def test_a_config_field_that_is_no_integer_is_named() -> None:
    with pytest.raises(InvalidInputError, match="num_experts='many'"):
        RoutingSpec.from_config({**QWEN3, "num_experts": "many"})


@given(st.data())
def test_rows_and_payloads_survive_pickle(data: st.DataObject) -> None:
    spec = data.draw(specs(max_layers=4))
    row: Row = data.draw(rows(spec))
    assert pickle.loads(pickle.dumps(row)) == row
    assert row.token_stop == row.token_start + row.num_tokens
    made = payload(spec, row)
    again: RowData = pickle.loads(pickle.dumps(made))
    assert again.row == row
    np.testing.assert_array_equal(again.routed_experts, made.routed_experts)


def record(**changes: Any) -> RoutingRecord:
    head = RoutingRecord(
        request_id="math:1",
        components=("math", "1"),
        choice=None,
        status="complete",
        reason=None,
        num_tokens=9,
        missing=(),
        weights=(),
        run_id="run-1",
        tags={},
        rows=(),
        tiles=(),
        layers=(1, 5),
        token_ranges=((0, 2), (4, 7)),
        routed_experts=routing(SPEC, 2, 5),
    )
    return replace(head, **changes)


def test_a_layer_is_a_view_by_id() -> None:
    one = record()
    assert one.layer(5).base is not None
    np.testing.assert_array_equal(one.layer(5), one.routed_experts[1])
    with pytest.raises(InvalidRoutingError, match=r"layer 2 was not read; this record holds 1, 5"):
        one.layer(2)


def test_both_layouts_are_views_of_one_array() -> None:
    one = record()
    ltk, tlk = one.to_numpy(), one.to_numpy("TLK")
    assert ltk.shape == (2, 5, 2)
    assert tlk.shape == (5, 2, 2)
    assert np.shares_memory(ltk, tlk)
    np.testing.assert_array_equal(tlk[3, 1], ltk[1, 3])


@pytest.mark.parametrize("layout", ["LTK", "TLK"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_a_record_is_copied_into_any_array_that_holds_it(layout: str, dtype: str) -> None:
    one = record()
    shape = one.to_numpy(layout).shape
    wide = np.full((*shape[:-1], 2 * shape[-1]), 77, dtype)
    out = wide[..., ::2]
    assert one.to_numpy(layout, out=out) is out
    np.testing.assert_array_equal(out, one.to_numpy(layout))
    assert (wide[..., 1::2] == 77).all()


def test_a_wrong_target_or_layout_is_refused() -> None:
    one = record()
    with pytest.raises(InvalidRoutingError, match=r"\(5, 2, 2\)"):
        one.to_numpy("LTK", out=np.zeros((5, 2, 2), np.uint8))
    with pytest.raises(InvalidRoutingError, match="int8"):
        one.to_numpy(out=np.zeros((2, 5, 2), np.int8))
    with pytest.raises(InvalidRoutingError, match="TLK, LTK"):
        one.to_numpy("KTL")


@given(st.data())
def test_present_is_what_no_missing_range_covers(data: st.DataObject) -> None:
    tokens = data.draw(ranges_within(0, 20))
    missing = {layer: data.draw(ranges_within(0, 20)) for layer in data.draw(st.sets(st.sampled_from([1, 5])))}
    n = sum(stop - start for start, stop in tokens)
    one = record(token_ranges=tokens, missing_by_layer=missing, routed_experts=np.zeros((2, n, 2), np.uint8))
    positions = [p for start, stop in tokens for p in range(start, stop)]
    expected = [[not any(a <= p < b for a, b in missing.get(layer, ())) for p in positions] for layer in (1, 5)]
    np.testing.assert_array_equal(one.present(), np.array(expected, bool).reshape(2, n))


def test_heads_compare_by_value_and_records_by_identity() -> None:
    fields = {name: getattr(record(), name) for name in RecordHead.__dataclass_fields__}
    assert RecordHead(**fields) == RecordHead(**fields)
    one, other = record(), record()
    assert one == one
    assert one != other
    assert len({one, other}) == 2
    made = [RowData(row, np.zeros((1, 2, 2), np.uint8)) for row in (ROW, ROW)]
    assert made[0] != made[1]
