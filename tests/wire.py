"""Responses as other systems make them, by the plain recipe of each, from [tokens, all layers, top_k] of a model.

Nothing here is of rr_dataset: a response is what the system's own few lines would send.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from rr_dataset.record import RoutingSpec

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Run:
    """One finished request of a model: what its routers chose for every token, the last one too."""

    spec: RoutingSpec
    hidden: int
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    routing: Array  # [S, hidden layers, top_k] int64, dense layers zero

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def moe(self) -> Array:
        """[S, MoE layers, top_k]."""
        return np.stack([self.routing[:, layer] for layer in self.spec.moe_layers], axis=1)


SPEC = RoutingSpec((1, 2, 4), num_experts=128, top_k=2)


def small_run() -> Run:
    """Three tokens of a prompt and four of an answer, of a model of five layers."""
    return make_run(SPEC, 5, [11, 12, 13], [21, 22, 23, 24], np.random.default_rng(0))


@st.composite
def runs(draw: st.DrawFn, max_tokens: int = 8) -> Run:
    hidden = draw(st.integers(1, 6))
    moe = draw(st.sets(st.integers(0, hidden - 1), min_size=1))
    experts = draw(st.sampled_from([4, 8, 128, 255, 256, 300]))
    spec = RoutingSpec(tuple(sorted(moe)), experts, draw(st.integers(2, 4)))
    prompt = draw(st.lists(st.integers(0, 1 << 17), min_size=1, max_size=max_tokens))
    output = draw(st.lists(st.integers(0, 1 << 17), min_size=1, max_size=max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    return make_run(spec, max(moe) + 1, prompt, output, rng)


def make_run(spec: RoutingSpec, hidden: int, prompt: list[int], output: list[int], rng: np.random.Generator) -> Run:
    routing = np.zeros((len(prompt) + len(output), hidden, spec.top_k), np.int64)
    for token in range(len(routing)):
        for layer in spec.moe_layers:
            routing[token, layer] = rng.permutation(spec.num_experts)[: spec.top_k]
    return Run(spec, hidden, prompt, output, [-float(i) / 8 for i in range(len(output))], routing)


def b64(array: Array) -> str:
    return base64.b64encode(array.tobytes()).decode()


def npy(array: Array) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def sglang(run: Run, start: int = 0, dtype: str = "int32", holes: tuple[int, ...] = (), finish: str = "stop") -> Any:
    sent = run.routing[:-1].copy()
    sent[list(holes)] = 0
    meta = {
        "id": "d5b2",
        "finish_reason": {"type": finish, "matched": 2},
        "prompt_tokens": len(run.prompt),
        "completion_tokens": len(run.output),
        "weight_version": "step-7",
        "output_token_logprobs": [[p, i, None] for p, i in zip(run.logprobs, run.output, strict=True)],
        "routed_experts": b64(sent[start:].astype(dtype).reshape(-1)),
    }
    if start:
        meta["routed_experts_start_len"] = start
    if dtype != "int32":
        meta["routed_experts_dtype"] = dtype
    return {"text": "x", "output_ids": run.output, "meta_info": meta}


def vllm(run: Run, start: int = 0, dtype: str = "int32", finish: str = "stop") -> Any:
    choice = {
        "index": 0,
        "finish_reason": finish,
        "token_ids": run.output,
        "logprobs": {"content": [{"token": "t", "logprob": p} for p in run.logprobs]},
        "routed_experts": npy(run.routing[start:-1].astype(dtype)),
    }
    return {
        "request_id": "r",
        "prompt_token_ids": run.prompt,
        "choices": [choice],
        "routed_experts_prompt_start": start,
    }


def vllm_split(run: Run, holes: tuple[int, ...] = (), less: int = 1, moe_only: bool = False) -> Any:
    sent = (run.moe if moe_only else run.routing).astype(np.int16)
    sent[list(holes)] = -1
    cut = len(run.prompt)
    return {
        "id": "cmpl-1",
        "prompt_token_ids": run.prompt,
        "prompt_routed_experts": sent[:cut].tolist(),
        "choices": [
            {
                "index": 0,
                "token_ids": run.output,
                "finish_reason": "length",
                "routed_experts": sent[cut : run.tokens - less].tolist(),
            }
        ],
    }


def fastdeploy(run: Run, dtype: str, less: int = 0, holes: tuple[int, ...] = ()) -> Any:
    sent = run.moe[: run.tokens - less]
    sent[list(holes)] = -1
    return {
        "prompt_token_ids": run.prompt,
        "outputs": {"token_ids": run.output, "routed_experts": b64(sent.astype(dtype))},
        "finish_reason": "stop",
    }


def verl(rows: list[Run], left: int, right: int) -> Any:
    prompt, response = max(len(r.prompt) for r in rows) + left, max(len(r.output) for r in rows) + right
    shape = (len(rows), prompt + response)
    batch = {
        "routed_experts": np.zeros((*shape, rows[0].hidden, rows[0].spec.top_k), np.int16),
        "attention_mask": np.zeros(shape, np.int64),
        "input_ids": np.zeros(shape, np.int64),
        "rollout_log_probs": np.zeros((len(rows), response), np.float32),
    }
    for i, run in enumerate(rows):
        at = prompt - len(run.prompt)
        batch["routed_experts"][i, at : at + run.tokens - 1] = run.routing[:-1]
        batch["attention_mask"][i, at : at + run.tokens] = 1
        batch["input_ids"][i, at : at + run.tokens] = run.prompt + run.output
        batch["rollout_log_probs"][i, : len(run.output)] = run.logprobs
    return batch


def slime(run: Run, padding: str = "", status: str = "completed") -> Any:
    sent = run.routing[:-1].astype(np.int32)
    if padding == "-1":
        sent[-1] = -1
    elif padding == "arange":
        sent[-1] = (np.arange(sent[-1].size) % run.spec.num_experts).reshape(sent[-1].shape)
    return {
        "tokens": run.prompt + run.output,
        "response_length": len(run.output),
        "rollout_log_probs": run.logprobs,
        "rollout_routed_experts": sent,
        "status": status,
        "weight_versions": ["3"],
    }


def prime_rl(run: Run, start: int = 0) -> Any:
    sent = run.routing.copy()
    sent[-1] = 0
    dtype = np.uint8 if run.spec.num_experts <= 256 else np.uint16
    array = sent[start:].astype(dtype)
    tokens = {
        "prompt_ids": run.prompt,
        "completion_ids": run.output,
        "completion_logprobs": run.logprobs,
        "routed_experts": {"data": b64(array), "shape": list(array.shape), "start": start, "dtype": array.dtype.name},
    }
    return {"tokens": tokens}


def nemo_rl(run: Run, moe_only: bool = True) -> Any:
    sent = (run.moe if moe_only else run.routing).astype(np.int16)
    sent[-1] = -1
    return {
        "prompt_token_ids": run.prompt,
        "generation_token_ids": run.output,
        "generation_log_probs": run.logprobs,
        "routed_experts": f"nrlre1:int16:{'x'.join(map(str, sent.shape))}:{b64(sent)}",
    }


def megatron(run: Run) -> Any:
    return [run.moe[:, i].astype(np.int64) for i in range(run.spec.num_layers)]
