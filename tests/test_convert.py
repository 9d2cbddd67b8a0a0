"""Routing in the forms of other trainers, each against a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.trainer.convert import to_megatron, to_slime, to_verl

SPEC = rr.RoutingSpec(moe_layers=(1, 2, 4), num_experts=300, top_k=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("convert") / "d"
    chance = np.random.default_rng(0)
    with rr.RoutingWriter(path, create=SPEC) as writer:
        for name, tokens in (("a", 5), ("b", 7)):
            writer.put(f"{name}:0:0:0", np.argsort(chance.random((tokens, 3, 300)), axis=-1)[..., :2])
        writer.put("hole:0:0:0", np.argsort(chance.random((4, 3, 300)), axis=-1)[..., :2], missing=[(1, 3)])
    return path


@pytest.fixture(scope="module")
def records(path: Path) -> list[rr.RoutingRecord]:
    return rr.open_dataset(path).get_many(["a:0:0:0", "b:0:0:0", "hole:0:0:0"])


def test_megatron_gets_int64_in_the_order_of_its_routers(records: Any) -> None:
    rows = {layer: records[0].layer(layer) for layer in SPEC.moe_layers}
    for order, wanted in ((None, (1, 2, 4)), ([1, 4, 2], (1, 4, 2)), ([4], (4,))):
        made = to_megatron(rows, order)
        assert [array.dtype for array in made] == [np.int64] * len(wanted)
        assert [array.tolist() for array in made] == [rows[layer].tolist() for layer in wanted]
    with pytest.raises(InvalidInputError, match=r"layers=\[1, 3\]"):
        to_megatron(rows, [1, 3])
    with pytest.raises(InvalidRoutingError, match="differ in shape"):
        to_megatron({1: rows[1], 2: rows[2][:-1]})


@pytest.mark.parametrize("num_layers", [None, 6])
def test_verl_pads_prompts_left_and_responses_right(records: Any, num_layers: int | None) -> None:
    prompts = [2, 6]
    made = to_verl(records[:2], SPEC, prompt_tokens=prompts, prompt_width=6, response_width=4, num_layers=num_layers)
    assert (made.dtype, made.shape) == (np.int16, (2, 10, num_layers or 3, 2))
    wanted = np.zeros_like(made)
    for i, (record, prompt) in enumerate(zip(records, prompts, strict=False)):
        for token in range(record.num_tokens):
            for at, layer in enumerate(SPEC.moe_layers):
                wanted[i, 6 - prompt + token, layer if num_layers else at] = record.layer(layer)[token]
    assert np.array_equal(made, wanted)
    for prompts, width in (([2, 7], 6), ([0, 0], 6), ([2, 9], 9)):
        with pytest.raises(InvalidRoutingError, match="do not fit"):
            to_verl(records[:2], SPEC, prompt_tokens=prompts, prompt_width=width, response_width=0)


def test_slime_gets_one_row_less_than_tokens_and_every_layer(records: Any) -> None:
    for num_tokens in (5, 6):
        made = to_slime(records[0], SPEC, num_tokens=num_tokens, num_layers=6)
        assert (made.dtype, made.shape) == (np.int32, (num_tokens - 1, 6, 2))
        for layer in SPEC.moe_layers:
            assert made[:, layer].tolist() == records[0].layer(layer)[: num_tokens - 1].tolist()
        assert not made[:, [0, 3, 5]].any()
    with pytest.raises(InvalidRoutingError, match="5 rows for 8 tokens"):
        to_slime(records[0], SPEC, num_tokens=8, num_layers=6)
    with pytest.raises(InvalidInputError, match="num_layers=4: the records have layer 4"):
        to_slime(records[0], SPEC, num_tokens=5, num_layers=4)


def test_missing_rows_are_refused_or_spread(records: Any) -> None:
    hole = records[2]
    with pytest.raises(InvalidRoutingError, match="6 rows are missing, the first at token 1, layer 1"):
        to_slime(hole, SPEC, num_tokens=4, num_layers=6)
    made = to_slime(hole, SPEC, num_tokens=5, num_layers=6, missing="spread")
    assert made[[0, 3], 4].tolist() == hole.layer(4)[[0, 3]].tolist()
    filled = made[1:3, list(SPEC.moe_layers)].reshape(6, 2)
    assert len(np.unique(filled)) == filled.size
    with pytest.raises(InvalidRoutingError, match="missing"):
        to_verl([hole], SPEC, prompt_tokens=[1], prompt_width=1, response_width=4)


@pytest.mark.parametrize("tokens", [slice(2, None), [(0, 1), (3, 5)], [(3, 5), (0, 3)]])
def test_rows_that_do_not_begin_at_token_0_are_refused(path: Path, tokens: Any) -> None:
    part = rr.open_dataset(path).get("a:0:0:0", tokens=tokens)
    with pytest.raises(InvalidRoutingError, match="'a:0:0:0' was read with tokens"):
        to_verl([part], SPEC, prompt_tokens=[1], prompt_width=4, response_width=9)
    with pytest.raises(InvalidRoutingError, match="'a:0:0:0' was read with tokens"):
        to_slime(part, SPEC, num_tokens=part.token_ranges[0][1] + 1, num_layers=6)
    assert to_slime(
        rr.open_dataset(path).get("a:0:0:0", tokens=[(0, 2), (2, 4)]), SPEC, num_tokens=5, num_layers=6
    ).any()


def test_ids_that_a_form_cannot_hold_are_refused(path: Path, records: Any) -> None:
    for experts in (32768, 40000):
        spec = rr.RoutingSpec(moe_layers=(1, 2, 4), num_experts=experts, top_k=2)
        if experts == 32768:
            assert to_verl(records[:1], spec, prompt_tokens=[2], prompt_width=6, response_width=4).any()
        else:
            with pytest.raises(InvalidRoutingError, match="40000 experts: verl's int16"):
                to_verl(records[:1], spec, prompt_tokens=[2], prompt_width=6, response_width=4)
    padded = rr.open_dataset(path).get_packed(["a:0:0:0"], pad_to_multiple=8, padding="minus_one").experts
    with pytest.raises(InvalidRoutingError, match=r"layer 1, row 5: \[-1, -1\] has a negative id"):
        to_megatron(padded)
    for wrong in (padded[1].astype(float), padded[1][None]):
        with pytest.raises(InvalidRoutingError, match=r"layer 1: .*expected integers \[rows, top_k\]"):
            to_megatron({1: wrong})


def test_a_spec_of_another_dataset_and_an_unknown_word_are_refused(records: Any) -> None:
    for spec in (rr.RoutingSpec((1, 2, 4), 300, 1), rr.RoutingSpec((1, 2), 300, 2)):
        with pytest.raises(InvalidRoutingError, match="another dataset|not MoE layers"):
            to_slime(records[0], spec, num_tokens=5, num_layers=6)
    with pytest.raises(InvalidInputError, match="missing='Refuse'"):
        to_slime(records[2], SPEC, num_tokens=4, num_layers=6, missing="Refuse")  # type: ignore[arg-type]
