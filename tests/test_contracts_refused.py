"""What does not fit a wire contract, or lies, is refused with what was expected and what came."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire
from decoding import check, one
from hypothesis import given
from hypothesis import strategies as st
from wire import SPEC, Run, make_run, small_run

import rr_dataset as rr
from rr_dataset.contracts import CONTRACTS, decode


@pytest.fixture
def run() -> Run:
    return small_run()


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
    run = small_run()
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


def test_a_sample_that_does_not_fit_keeps_the_index_that_it_tells(run: Run) -> None:
    response = wire.vllm(run)
    choice = response["choices"][0]
    response["choices"] = [{**choice, "index": 1, "routed_experts": "AAAA"}, choice, {**choice, "index": "x"}]
    decoded = decode("vllm", response, SPEC, keep_errors=True)
    assert [(one.index, one.error is None) for one in decoded] == [(1, False), (0, True), (2, False)]


@given(st.sampled_from(sorted(CONTRACTS)), st.data())
def test_any_json_is_decoded_or_refused(contract: str, data: st.DataObject) -> None:
    """Whatever is put in the place of one value of a good response, nothing but a refusal comes of it."""
    run = small_run()
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


@pytest.mark.parametrize("contract", CONTRACTS)
def test_what_a_caller_knows_is_used_or_refused(contract: str) -> None:
    """Rows from position 5 that are put down at 0 would train, and train wrongly."""
    run = make_run(SPEC, 5, [1, 2], [3, 4, 5, 6], np.random.default_rng(0))
    responses: dict[str, Any] = {
        "fastdeploy": wire.fastdeploy(run, "uint8"),
        "fastdeploy-store": run.moe.transpose(1, 0, 2),
        "vllm-0.21": wire.vllm_split(run),
        "vllm": wire.vllm(run),
        "sglang": wire.sglang(run),
        "verl": wire.verl([run], 0, 0),
        "slime": wire.slime(run),
        "miles": wire.slime(run),
        "prime-rl": wire.prime_rl(run),
        "nemo-rl": wire.nemo_rl(run),
        "megatron": wire.megatron(run),
    }
    response = responses[contract]
    assert decode(contract, response, SPEC, token_start=0)[0].put is not None
    try:
        (decoded,) = decode(contract, response, SPEC, token_start=1)
    except rr.InvalidInputError as error:
        assert re.search("begins with the first token|expected .* rows|rows: expected", str(error))
    else:
        assert decoded.put is not None
        assert decoded.put["token_start"] == 1
    try:
        (decoded,) = decode(contract, response, SPEC, prompt_token_ids=[8, 9])
    except rr.InvalidInputError as error:
        assert "whose token ids are in the response" in str(error)
    else:
        assert decoded.put is not None
        assert decoded.put["token_ids"][:2].tolist() == [8, 9]


@pytest.mark.parametrize("ids", [[2, 7], [9, 1, 2, 7], []], ids=str)
def test_prompt_ids_of_another_number_are_not_put_beside_the_wrong_rows(ids: list[int]) -> None:
    """Such as those without the token that the engine puts before them: a trainer with the same ids would find nothing wrong."""
    run = make_run(SPEC, 5, [1, 2, 7], [3, 4, 5, 6], np.random.default_rng(0))
    with pytest.raises(rr.InvalidRoutingError, match=f"one for each of 3 prompt tokens; came {len(ids)}"):
        decode("sglang", wire.sglang(run), SPEC, prompt_token_ids=ids)
