"""Decoding a response against what anyone would do by hand: parse it, undo the base64, look at the bytes as an array."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from rr_dataset.contracts import decode

from .bench import LARGE_TOKENS, SMALL_TOKENS, SPEC, Bench, sources
from .measure import Check, at_least, interleave


def _different(tokens: int) -> Any:
    """uint8 [tokens, layers, top_k], the ids of a token all different, as a router's are."""
    (steps,) = sources(1, tokens)
    return (steps[:, :, :1] + np.arange(SPEC.top_k, dtype=np.uint8)) % SPEC.num_experts


def _sglang(tokens: int) -> str:
    meta = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": tokens - 511,
        "completion_tokens": 512,
        "routed_experts_dtype": "uint8",
        "routed_experts": base64.b64encode(_different(tokens).tobytes()).decode(),
    }
    return json.dumps({"output_ids": list(range(512)), "meta_info": meta})


def _vllm(tokens: int) -> str:
    file = io.BytesIO()
    np.save(file, _different(tokens))
    routed = base64.b64encode(file.getvalue()).decode()
    choice = {"index": 0, "finish_reason": "stop", "token_ids": list(range(512)), "routed_experts": routed}
    return json.dumps({"prompt_token_ids": list(range(tokens - 511)), "choices": [choice]})


def _sglang_by_hand(text: str) -> Any:
    return np.frombuffer(base64.b64decode(json.loads(text)["meta_info"]["routed_experts"]), np.uint8)


def _vllm_by_hand(text: str) -> Any:
    return np.frombuffer(base64.b64decode(json.loads(text)["choices"][0]["routed_experts"]), np.uint8, offset=128)


WIRE: dict[str, tuple[Callable[[int], str], Callable[[str], Any]]] = {
    "sglang": (_sglang, _sglang_by_hand),
    "vllm": (_vllm, _vllm_by_hand),
}


def decode_contracts(bench: Bench) -> list[Check]:
    """The records of 12.6 MB and 0.4 MB, as SGLang and the newest vLLM send them."""
    checks = []
    for contract, (make, by_hand) in WIRE.items():
        for size, tokens, rounds in (("12.6 MB", LARGE_TOKENS, (5, 30)), ("0.4 MB", SMALL_TOKENS, (50, 500))):
            text = make(tokens)
            pairs = interleave(
                lambda _, contract=contract, text=text: decode(contract, json.loads(text), SPEC),
                lambda _, by_hand=by_hand, text=text: by_hand(text),
                bench.count(*rounds),
            )
            row = f"decode-{contract}-{'large' if tokens == LARGE_TOKENS else 'small'}"
            against = "json.loads + base64 + np.frombuffer"
            checks.append(at_least(row, f"decode {size} of {contract}", against, pairs, 0.9))
    return checks
