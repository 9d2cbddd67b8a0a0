"""Wire contracts: what the plain recipe of each system sends comes out exact, and what does not fit is refused, not guessed."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire
from hypothesis import assume, given
from hypothesis import strategies as st
from wire import Run, make_run, runs

import rr_dataset as rr
from rr_dataset.contracts import CONTRACTS, Decoded, decode
from rr_dataset.intake import take_in
from rr_dataset.layout import DatasetFormat

SPEC = rr.RoutingSpec((1, 2, 4), num_experts=128, top_k=2)


@pytest.fixture
def run() -> Run:
    return make_run(SPEC, 5, [11, 12, 13], [21, 22, 23, 24], np.random.default_rng(0))


def one(contract: str, response: Any, spec: rr.RoutingSpec, **facts: Any) -> Any:
    (decoded,) = decode(contract, response, spec, thorough=True, **facts)
    assert decoded.put is not None, decoded.reason
    taken(decoded, spec)
    return decoded.put


def taken(decoded: Decoded, spec: rr.RoutingSpec) -> None:
    """`put` accepts it, ids and all."""
    fmt = DatasetFormat("0" * 32, spec, rr.KeyScheme.fastdeploy())
    put: dict[str, Any] = dict(decoded.put or {})
    defaults = {
        "layout": "TLK", "layers": None, "token_ids": None, "logprobs": None, "token_start": 0, "part": False,
        "status": None, "missing": (), "weight_version": None, "tags": None,
    }  # fmt: skip
    intake = take_in(fmt, "a:0:0:0", put.pop("routed_experts"), **{**defaults, **put})
    intake.fill(np.empty(intake.payload_bytes, np.uint8))


def tlk(put: Any) -> Any:
    return put["routed_experts"] if put.get("layout", "TLK") == "TLK" else put["routed_experts"].transpose(1, 0, 2)


def check(put: Any, run: Run, start: int, stop: int, missing: tuple[tuple[int, int], ...] = ()) -> None:
    """Against the model's own choices, position by position."""
    assert len(tlk(put)) == stop - start
    assert (put.get("token_start", 0), put.get("part", False), tuple(put.get("missing", ()))) == (
        start,
        start > 0,
        missing,
    )
    holes = {position for a, b in missing for position in range(a, b)}
    for position in range(start, stop):
        if position not in holes:
            np.testing.assert_array_equal(tlk(put)[position - start], run.moe[position])


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


# --- what does not fit

Change = Any


def meta(**changes: Any) -> Change:
    def change(response: Any) -> None:
        response["meta_info"].update(changes)

    return change


def payload(function: Any) -> Change:
    def change(response: Any) -> None:
        response["meta_info"]["routed_experts"] = function(response["meta_info"]["routed_experts"])

    return change


def rows(array: Any, dtype: str = "int32") -> Change:
    return meta(routed_experts=wire.b64(np.asarray(array).astype(dtype)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (payload(lambda text: text[:-4]), r"size: expected 6 rows of 3 x 2 \(MoE layers\) or 5 x 2 .*came 237 bytes"),
        (payload(lambda text: text[:-1]), "a multiple of 4 characters; came 319: it is cut"),
        (payload(lambda text: "!" + text[1:]), "base64"),
        (payload(lambda text: "!!!!" + text[4:]), "characters that are none"),
        (payload(lambda text: "\xe9\xe9\xe9\xe9" + text[4:]), "base64"),
        (payload(lambda text: "AA==" + text[4:]), "base64"),
        (payload(lambda text: text + "AAAA"), "size"),
        (payload(lambda text: 7), "rows: expected 6"),
        (payload(lambda text: [[[0.5]]]), "dtype: expected integers"),
        (payload(lambda text: [[[float("nan")]]]), "dtype: expected integers"),
        (payload(lambda text: [[[1, 2], [3]]]), "an array of integers"),
        (payload(lambda text: [[["1", "2"]]]), "dtype"),
        (payload(lambda text: [[[True, False]]]), "dtype"),
        (payload(lambda text: [[[1 << 70, 2]]]), "dtype"),
        (meta(prompt_tokens=4), r"size: expected 7 rows"),
        (meta(completion_tokens=5), r"size: expected 7 rows|one for each of 5 output tokens"),
        (meta(prompt_tokens=-1), "prompt_tokens: expected a number"),
        (meta(prompt_tokens="3"), "prompt_tokens: expected a number"),
        (meta(prompt_tokens=1 << 40), "prompt_tokens: expected a number"),
        (meta(prompt_tokens=True), "prompt_tokens: expected a number"),
        (meta(routed_experts_start_len=1), "size: expected 5 rows"),
        (meta(routed_experts_start_len=99), "size"),
        (meta(routed_experts_dtype="uint8"), "size"),
        (meta(routed_experts_dtype="float32"), "dtype: expected int32 or uint16 or uint8; came 'float32'"),
        (meta(routed_experts_dtype=["int32"]), "dtype"),
        (meta(output_token_logprobs=[[0.5, 1]]), "one for each of 4 output tokens"),
        (meta(output_token_logprobs=[0.5]), "triples"),
        (meta(output_token_logprobs=[["a", 1, 2]] * 4), "log-probabilities"),
        (rows(np.ones((6, 5, 2))), r"position 0, layer 1: expected 2 different ids.*came \[1, 1\]"),
    ],
)
def test_sglang_refused(run: Run, change: Change, message: str) -> None:
    response = wire.sglang(run)
    change(response)
    with pytest.raises(rr.InvalidRoutingError, match=message):
        decode("sglang", response, SPEC)


def test_a_row_that_is_half_a_filler(run: Run) -> None:
    run.routing[3, 2] = 0
    with pytest.raises(rr.InvalidRoutingError, match=r"position 3, layer 2: .* or a whole row of 0; came \[0, 0\]"):
        decode("sglang", wire.sglang(run), SPEC)


def test_an_expert_named_twice_in_later_slots() -> None:
    spec = rr.RoutingSpec((0, 1), num_experts=128, top_k=4)
    run = make_run(spec, 2, [1], [2, 3], np.random.default_rng(0))
    run.routing[1, 1, 3] = run.routing[1, 1, 1]
    assert decode("sglang", wire.sglang(run), spec)[0].put is not None
    with pytest.raises(rr.InvalidRoutingError, match="position 1, layer 1: expected 4 different experts"):
        decode("sglang", wire.sglang(run), spec, thorough=True)


def test_a_repeat_is_found_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rr_dataset.contracts.rows._BLOCK", 16)
    spec = rr.RoutingSpec((0, 1), num_experts=128, top_k=4)
    for position in range(7):
        run = make_run(spec, 2, [1] * 4, [2] * 4, np.random.default_rng(0))
        assert decode("sglang", wire.sglang(run), spec, thorough=True)
        run.routing[position, 0, 2] = run.routing[position, 0, 0]
        with pytest.raises(rr.InvalidRoutingError, match=f"position {position}, layer 0"):
            decode("sglang", wire.sglang(run), spec, thorough=True)


def test_a_dtype_too_narrow_for_the_experts() -> None:
    spec = rr.RoutingSpec((0, 1), num_experts=512, top_k=2)
    run = make_run(spec, 2, [1], [2, 3], np.random.default_rng(0))
    for contract, response in (
        ("sglang", wire.sglang(run, dtype="uint8")),
        ("vllm", wire.vllm(run, dtype="uint8")),
        ("nemo-rl", {"routed_experts": f"nrlre1:int8:3x2x2:{wire.b64(run.moe.astype(np.int8))}"}),
    ):
        with pytest.raises(rr.InvalidRoutingError, match="dtype: expected integers that hold 512 experts; came u?int8"):
            decode(contract, response, spec)


def test_layers_that_are_neither_moe_nor_all(run: Run) -> None:
    for layers in (2, 4, 6):
        other = np.tile(run.routing[:-1, 1:2], (1, layers, 1))
        response = wire.vllm(run)
        response["choices"][0]["routed_experts"] = wire.npy(other)
        with pytest.raises(
            rr.InvalidRoutingError, match=rf"\[tokens, 3, 2\].*\[tokens, 5, 2\].*came \[6, {layers}, 2\]"
        ):
            decode("vllm", response, SPEC)


def test_sglang_without_counts() -> None:
    run = make_run(SPEC, 5, [1] * 8, [2] * 8, np.random.default_rng(0))
    response = wire.sglang(run)
    del response["meta_info"]["prompt_tokens"]
    with pytest.raises(rr.InvalidRoutingError, match="which fit both"):  # 15 rows of 5 layers or 25 of 3
        decode("sglang", response, SPEC)
    response["meta_info"]["routed_experts"] = wire.b64(run.routing[:4].astype(np.int32))
    check(one("sglang", response, SPEC), run, 0, 4)


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/rr-evil-npy"),)


def npy_of(header: bytes, data: bytes = b"", magic: bytes = b"\x93NUMPY\x01\x00") -> str:
    return base64.b64encode(magic + struct.pack("<H", len(header)) + header + data).decode()


HEADER = b"{'descr': '<i4', 'fortran_order': False, 'shape': (6, 5, 2), }"


@pytest.mark.parametrize(
    "text",
    [
        wire.npy(np.array([Evil()], dtype=object)),
        wire.npy(np.zeros((6, 5, 2))),
        wire.npy(np.zeros((6, 5, 2), bool)),
        wire.npy(np.zeros((6, 5, 2), [("a", "i4")])),
        wire.npy(np.zeros((6, 5, 2), "S4")),
        base64.b64encode(pickle.dumps(Evil())).decode(),
        npy_of(HEADER),
        npy_of(HEADER, bytes(239)),
        npy_of(HEADER, bytes(241)),
        npy_of(HEADER.replace(b"6, 5", b"9999999999, 9999999999"), bytes(240)),
        npy_of(HEADER.replace(b"6", b"-6"), bytes(240)),
        npy_of(HEADER.replace(b"6", b"6" * 3000), bytes(240)),
        npy_of(HEADER.replace(b"6, 5, 2", b"__import__('os').abort()"), bytes(240)),
        npy_of(HEADER.replace(b"<i4", b"|O"), bytes(240)),
        npy_of(b"(" * 3000, bytes(240)),
        npy_of(HEADER, bytes(240), b"\x93NUMPX\x01\x00"),
        base64.b64encode(b"\x93NUMPY\x01\x00\xff\xff" + HEADER).decode(),
        base64.b64encode(b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + HEADER).decode(),
        base64.b64encode(b"\x93NUM").decode(),
        "",
        "====",
        "not base64 at all!!!",
    ],
    ids=range(22),
)
def test_hostile_npy(run: Run, text: str) -> None:
    response = wire.vllm(run)
    response["choices"][0]["routed_experts"] = text
    with pytest.raises(rr.InvalidRoutingError, match="^vllm: "):
        decode("vllm", response, SPEC)
    assert not Path("/tmp/rr-evil-npy").exists()


@given(st.binary(max_size=60), st.integers(0, 127))
def test_npy_of_anything(noise: bytes, at: int) -> None:
    """A damaged header never gets further than a refusal."""
    run = make_run(SPEC, 5, [11, 12, 13], [21, 22, 23, 24], np.random.default_rng(0))
    response = wire.vllm(run)
    good = base64.b64decode(response["choices"][0]["routed_experts"])
    response["choices"][0]["routed_experts"] = base64.b64encode(good[:at] + noise + good[at + len(noise) :]).decode()
    try:
        decode("vllm", response, SPEC)
    except rr.InvalidRoutingError as error:
        assert str(error).startswith("vllm: ")


@pytest.mark.parametrize(
    ("contract", "response", "message"),
    [
        ("vllm", {}, "choices: expected a response with choices or outputs"),
        ("vllm", None, "choices"),
        ("vllm", {"choices": [{"routed_experts": "AAAA", "token_ids": [1.5]}]}, "dtype: expected integers"),
        ("vllm", {"choices": [{"routed_experts": [], "token_ids": [1]}], "prompt_token_ids": [1]}, "rows: expected 1"),
        ("vllm-0.21", {"choices": [{"routed_experts": [[[1, 2]] * 3]}]}, "the prompt, or its length"),
        ("vllm-0.21", {"choices": [{"token_ids": [1]}], "prompt_routed_experts": [[[1, 2]] * 3] * 2, "prompt_token_ids": [1]}, "prompt: rows: expected 1"),
        ("fastdeploy", {"routed_experts": "AAAA"}, "whole rows of 3 x 2 ids of uint8"),
        ("fastdeploy-store", np.zeros((3, 4)), "integers"),
        ("fastdeploy-store", np.zeros((3, 4), int), "expected .layers, tokens, top_k"),
        ("fastdeploy-store", [np.zeros((3, 2), int), np.zeros((4, 2), int)], "layers of one shape"),
        ("fastdeploy-store", np.full((3, 4, 2), -1), "it holds no token"),
        ("verl", {"routed_experts": [[[[1, 2]]]]}, "attention_mask: expected it"),
        ("verl", {"routed_experts": np.zeros((2, 4, 3, 2), int), "attention_mask": np.ones((2, 3), int)}, "shapes"),
        ("verl", {"routed_experts": np.zeros((1, 4, 3, 2), int), "attention_mask": [[1, 0, 1, 1]]}, "with gaps"),
        ("slime", {"rollout_routed_experts": [], "tokens": [1, 2, 3]}, "rows: expected 2"),
        ("slime", {"rollout_routed_experts": [], "tokens": [1], "response_length": 2}, "response_length"),
        ("prime-rl", {"routed_experts": "AAAA"}, "data, shape, start and dtype"),
        ("prime-rl", {"routed_experts": {"data": "AAAA", "shape": [1 << 30] * 3}}, "size: expected"),
        ("prime-rl", {"routed_experts": {"data": "AAAA", "shape": [1, -1, 2]}}, "shape"),
        ("prime-rl", {"routed_experts": {"data": "AAAA", "shape": "123"}}, "shape"),
        ("prime-rl", {"routed_experts": {"data": "AAAA", "shape": [1, 1, 1], "dtype": "object"}}, "dtype"),
        ("prime-rl", {"routed_experts": {"data": "AAAA", "shape": [1, 1, 3], "start": -1}}, "start"),
        ("nemo-rl", {"routed_experts": "nrlre2:int16:1x3x2:AAAA"}, "envelope"),
        ("nemo-rl", {"routed_experts": "nrlre1:int16:1x3x2"}, "envelope"),
        ("nemo-rl", {"routed_experts": "nrlre1:object:1x3x2:AAAA"}, "dtype"),
        ("nemo-rl", {"routed_experts": "nrlre1:int16:1x3:AAAA"}, "shape"),
        ("nemo-rl", {"routed_experts": "nrlre1:int16:-1x3x2:AAAA"}, "shape"),
        ("nemo-rl", {"routed_experts": f"nrlre1:int16:{'9' * 5000}x3x2:AAAA"}, "shape"),
        ("nemo-rl", {"routed_experts": "nrlre1:int16:999999999x999999x99:AAAA"}, "size"),
        ("megatron", [np.zeros((2, 2), int)] * 2, r"one for each of 3 MoE layers \(1-2, 4\); came 2 routers"),
        ("megatron", [np.zeros((2, 2), int)] * 2 + [np.zeros((3, 2), int)], "one shape"),
        ("megatron", {}, "routed_experts: expected it"),
        ("megatron", 7, "routed_experts: expected it"),
    ],
)  # fmt: skip
def test_refused(contract: str, response: Any, message: str) -> None:
    with pytest.raises(rr.InvalidRoutingError, match=message):
        decode(contract, response, SPEC)


@given(st.sampled_from(sorted(CONTRACTS)), st.data())
def test_any_json_is_decoded_or_refused(contract: str, data: st.DataObject) -> None:
    """Whatever is put in the place of one value of a good response, nothing but a refusal comes of it."""
    run = make_run(SPEC, 5, [11, 12, 13], [21, 22, 23, 24], np.random.default_rng(0))
    made = {
        "sglang": lambda: wire.sglang(run), "vllm": lambda: wire.vllm(run), "vllm-0.21": lambda: wire.vllm_split(run),
        "fastdeploy": lambda: wire.fastdeploy(run, "uint8"), "prime-rl": lambda: wire.prime_rl(run), "nemo-rl": lambda: wire.nemo_rl(run),
        "slime": lambda: wire.slime(run), "miles": lambda: wire.slime(run), "verl": lambda: wire.verl([run], 0, 0),
        "megatron": lambda: {"routed_experts": wire.megatron(run)}, "fastdeploy-store": lambda: {"routed_experts": run.moe},
    }[contract]()  # fmt: skip
    response = json.loads(json.dumps(made, default=lambda value: value.tolist()))
    places = list(paths(response))
    parent, key = data.draw(st.sampled_from(places))
    target = response
    for step in parent:
        target = target[step]
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    target[key] = data.draw(
        scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=3), scalars, max_size=2)
    )
    before = copy.deepcopy(response)
    with suppress(rr.InvalidRoutingError):
        decode(contract, response, SPEC, thorough=True)
    assert repr(response) == repr(before)


def paths(value: Any, parent: tuple[Any, ...] = ()) -> Any:
    """Of every value within, where it is; of a list the first only."""
    keys = list(value) if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
    for key in keys:
        yield parent, key
        yield from paths(value[key], (*parent, key))
