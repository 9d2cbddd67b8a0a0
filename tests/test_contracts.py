"""Wire contracts: what the plain recipe of each system sends comes out exact, and what does not fit is refused, not guessed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import wire
from decoding import check, one, taken
from hypothesis import assume, given
from hypothesis import strategies as st
from wire import SPEC, Run, make_run, runs, small_run

import rr_dataset as rr
from rr_dataset.contracts import decode


@pytest.fixture
def run() -> Run:
    return small_run()


def check_tokens(put: Any, run: Run, start: int, stop: int) -> None:
    assert put["token_ids"].tolist() == (run.prompt + run.output)[start:stop]
    known = [np.nan] * len(run.prompt) + run.logprobs
    np.testing.assert_array_equal(put["logprobs"], np.array(known[start:stop], np.float32))


# --- what each system sends


@given(runs(), st.data())
def test_sglang(run: Run, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(run.prompt)))
    dtypes = ["int32", "uint16"] + ["uint8"] * (run.spec.num_experts <= 256)
    response = json.loads(json.dumps(wire.sglang(run, start, data.draw(st.sampled_from(dtypes)))))
    assume(run.tokens - 1 - start > 0)
    put = one("sglang", response, run.spec, prompt_token_ids=run.prompt)
    check(put, run, start, run.tokens - 1)
    check_tokens(put, run, start, run.tokens - 1)
    assert (put["status"], put["weight_version"]) == ("complete", "step-7")


def test_sglang_rows_of_zeros_are_missing(run: Run) -> None:
    check(one("sglang", wire.sglang(run, holes=(0, 1, 4)), SPEC), run, 0, 6, ((0, 2), (4, 5)))
    check(one("sglang", wire.sglang(run, 1, holes=(1,)), SPEC), run, 1, 6, ((1, 2),))


def test_sglang_forms(run: Run) -> None:
    response = wire.sglang(run, finish="abort")
    put = one("sglang", response["meta_info"], SPEC)
    assert (put["status"], "token_ids" in put) == ("aborted", False)  # the prompt's ids are not in the answer
    np.testing.assert_array_equal(put["logprobs"][3:], np.array(run.logprobs[:-1], np.float32))
    two = decode("sglang", [response, wire.sglang(run)], SPEC)
    assert [each.index for each in two] == [0, 1]
    chat = {"choices": [{"index": 1, "meta_info": response["meta_info"]}]}
    assert decode("sglang", chat, SPEC)[0].index == 1
    response["meta_info"]["routed_experts"] = None
    (nothing,) = decode("sglang", response, SPEC)
    assert nothing.put is None
    assert "aborted" in str(nothing.reason)
    (nothing,) = decode("sglang", wire.sglang(run, holes=tuple(range(6))), SPEC)
    assert nothing.put is None
    assert "no routing was captured" in str(nothing.reason)


@given(runs(), st.data())
def test_vllm(run: Run, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(run.prompt) - 1))
    dtypes = ["int32", "int64", "uint16", ">i4"] + ["uint8"] * (run.spec.num_experts <= 256)
    response = json.loads(json.dumps(wire.vllm(run, start, data.draw(st.sampled_from(dtypes)))))
    put = one("vllm", response, run.spec)
    check(put, run, start, run.tokens - 1)
    check_tokens(put, run, start, run.tokens - 1)


@given(runs(), st.data())
def test_vllm_of_two_parts(run: Run, data: st.DataObject) -> None:
    less, moe_only = data.draw(st.integers(0, 1)), data.draw(st.booleans())
    cached = data.draw(st.integers(0, len(run.prompt) - 1))
    response = json.loads(json.dumps(wire.vllm_split(run, tuple(range(cached)), less, moe_only)))
    put = one("vllm-0.21", response, run.spec)
    check(put, run, 0, run.tokens - less, ((0, cached),) if cached else ())
    assert put["token_ids"].tolist() == (run.prompt + run.output)[: run.tokens - less]


def test_vllm_none(run: Run) -> None:
    response = wire.vllm_split(run)
    response["choices"][0]["routed_experts"] = None
    put = one("vllm-0.21", response, SPEC)
    assert (put["status"], len(put["routed_experts"])) == ("preempted", 3)
    response["choices"][0]["finish_reason"] = "abort"
    assert one("vllm-0.21", response, SPEC)["status"] == "aborted"
    response["prompt_routed_experts"] = None
    for contract in ("vllm-0.21", "vllm"):
        (nothing,) = decode(contract, response, SPEC)
        assert nothing.put is None
        assert "aborted" in str(nothing.reason)
    response = wire.vllm_split(run, less=0)
    response["prompt_routed_experts"] = None
    check(one("vllm-0.21", response, SPEC), run, 3, 7)


@given(runs(), st.data())
def test_fastdeploy(run: Run, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["uint32", "uint16"] + ["uint8"] * (run.spec.num_experts <= 255)))
    less, hole = data.draw(st.integers(0, 1)), data.draw(st.integers(0, run.tokens - 2))
    assume(run.tokens - less > 1)
    row = run.spec.num_layers * run.spec.top_k
    size = (run.tokens - less) * row * np.dtype(dtype).itemsize
    ways = [
        (r, i)
        for r in (run.tokens, run.tokens - 1)
        for i in (1, 2, 4)
        if r * row * i == size and (1 << 8 * i) > run.spec.num_experts
    ]
    response = json.loads(json.dumps(wire.fastdeploy(run, dtype, less, (hole,))))
    if len(ways) > 1:  # two tokens of one byte, or one of two
        with pytest.raises(rr.InvalidRoutingError, match="size"):
            decode("fastdeploy", response, run.spec)
    else:
        put = one("fastdeploy", response, run.spec)
        check(put, run, 0, run.tokens - less, ((hole, hole + 1),))


@given(runs(), st.integers(0, 3))
def test_fastdeploy_store(run: Run, padding: int) -> None:
    experts = run.moe.transpose(1, 0, 2).astype(np.int16)
    padded = np.concatenate([experts, np.full((len(experts), padding, run.spec.top_k), -1, np.int16)], axis=1)
    for form in (padded, list(padded), padded.tolist(), {"routed_experts": padded.tolist()}):
        check(one("fastdeploy-store", form, run.spec), run, 0, run.tokens)


@given(st.integers(0, 2), st.integers(0, 2), st.integers(0, 99))
def test_verl(left: int, right: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [make_run(SPEC, 5, [*range(1, 2 + p)], [*range(50, 51 + r)], rng) for p, r in ((2, 3), (4, 1), (1, 4))]
    batch = wire.verl(rows, left, right)
    decoded = decode("verl", batch, SPEC, thorough=True)
    assert [each.index for each in decoded] == [0, 1, 2]
    for each, run in zip(decoded, rows, strict=True):
        taken(each, SPEC)
        check(each.put, run, 0, run.tokens - 1)
        check_tokens(each.put, run, 0, run.tokens - 1)
    alone = {name: value[0].tolist() for name, value in batch.items()}
    check_tokens(one("verl", alone, SPEC), rows[0], 0, rows[0].tokens - 1)


@given(runs())
def test_slime(run: Run) -> None:
    assume(run.tokens > 2)
    put = one("slime", wire.slime(run), run.spec)
    check(put, run, 0, run.tokens - 1)
    check_tokens(put, run, 0, run.tokens - 1)
    assert put["weight_version"] == "3"
    put = one("miles", wire.slime(run, "-1", "aborted"), run.spec)
    check(put, run, 0, run.tokens - 1, ((run.tokens - 2, run.tokens - 1),))
    assert put["status"] == "aborted"


def test_slime_counting_rows() -> None:
    spec = rr.RoutingSpec(range(6), num_experts=16, top_k=4)
    run = make_run(spec, 6, [1, 2], [3, 4], np.random.default_rng(0))
    check(one("slime", wire.slime(run, "arange"), spec), run, 0, 3, ((2, 3),))
    mixed = {**wire.slime(run), "weight_versions": ["3", "4", "3"]}
    put = one("slime", mixed, spec)
    assert ("weight_version" in put, put["tags"]) == (False, {"weight_versions": "3,4"})
    short = rr.RoutingSpec((0,), num_experts=4, top_k=2)  # here a router may well count up
    run = Run(short, 1, [1], [2, 3], [0.0, 0.0], np.array([[[0, 1]], [[1, 2]], [[2, 3]]]))
    check(one("slime", wire.slime(run), short), run, 0, 2)


@given(runs(), st.data())
def test_prime_rl(run: Run, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, run.tokens - 2))
    put = one("prime-rl", json.loads(json.dumps(wire.prime_rl(run, start))), run.spec)
    check(put, run, start, run.tokens, ((run.tokens - 1, run.tokens),))
    check_tokens(put, run, start, run.tokens)


@given(runs(), st.booleans())
def test_nemo_rl(run: Run, moe_only: bool) -> None:
    response = wire.nemo_rl(run, moe_only)
    for form in (
        response,
        {
            **response,
            "routed_experts": np.where(np.arange(run.tokens)[:, None, None] == run.tokens - 1, -1, run.moe).tolist(),
        },
    ):
        put = one("nemo-rl", form, run.spec)
        check(put, run, 0, run.tokens, ((run.tokens - 1, run.tokens),))
        check_tokens(put, run, 0, run.tokens)
    assert len(one("nemo-rl", response["routed_experts"], run.spec)["routed_experts"]) == run.tokens


@given(runs())
def test_megatron(run: Run) -> None:
    check(one("megatron", wire.megatron(run), run.spec), run, 0, run.tokens)
    told = {"routed_experts": [a.tolist() for a in wire.megatron(run)], "token_ids": run.prompt + run.output}
    put = one("megatron", told, run.spec, token_start=5, weight_version=9)
    assert (put["token_start"], put["part"], put["weight_version"]) == (5, True, 9)
    assert put["token_ids"].tolist() == run.prompt + run.output


def test_tensors(run: Run) -> None:
    torch = pytest.importorskip("torch")
    check(one("megatron", [torch.from_numpy(a) for a in wire.megatron(run)], SPEC), run, 0, run.tokens)
    batch = {name: torch.from_numpy(value) for name, value in wire.verl([run], 1, 1).items()}
    check_tokens(one("verl", batch, SPEC), run, 0, run.tokens - 1)


def test_models_with_dense_layers_at_the_end(run: Run) -> None:
    longer = Run(SPEC, 7, run.prompt, run.output, run.logprobs, np.pad(run.routing, ((0, 0), (0, 2), (0, 0))))
    for contract, made in (("sglang", wire.sglang(longer)), ("vllm", wire.vllm(longer)), ("slime", wire.slime(longer))):
        with pytest.raises(rr.InvalidRoutingError, match="num_hidden_layers"):
            decode(contract, made, SPEC)
        check(one(contract, made, SPEC, num_hidden_layers=7), run, 0, 6)


def test_moe_layers_alone_pass_where_all_are_expected(run: Run) -> None:
    moe = Run(SPEC, 3, run.prompt, run.output, run.logprobs, run.moe)
    for contract, made in (("sglang", wire.sglang(moe)), ("vllm", wire.vllm(moe)), ("slime", wire.slime(moe))):
        check(one(contract, made, SPEC), run, 0, 6)


def test_arrays_are_views_of_what_was_decoded(run: Run) -> None:
    spaced = rr.RoutingSpec((0, 2, 4), 128, 2)
    for spec, layers in ((rr.RoutingSpec((2, 3, 4), 128, 2), 3), (spaced, 3)):
        made = make_run(spec, 5, [1, 2], [3, 4], np.random.default_rng(0))
        array = one("sglang", wire.sglang(made), spec)["routed_experts"]
        assert (array.shape[1], array.flags.owndata, array.flags.writeable) == (layers, False, False)


def test_one_sample_that_does_not_fit_keeps_no_other_from_it(run: Run) -> None:
    bad = wire.sglang(run)
    bad["meta_info"]["routed_experts"] = "AAAA"
    good, wrong = decode("sglang", [wire.sglang(run), bad], SPEC, keep_errors=True)
    check(good.put, run, 0, 6)
    assert wrong.put is None
    assert isinstance(wrong.error, rr.InvalidRoutingError)
    with pytest.raises(rr.InvalidRoutingError, match="size"):
        decode("sglang", [wire.sglang(run), bad], SPEC)


def test_an_unknown_contract_names_the_known_ones() -> None:
    with pytest.raises(rr.InvalidInputError, match=r"'sglan': expected one of .*sglang"):
        decode("sglan", {}, SPEC)
