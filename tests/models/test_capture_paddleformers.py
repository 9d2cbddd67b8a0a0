"""Capture on PaddleFormers' Qwen3-MoE: decoding with a KV cache, against a second hook and against a whole prefill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import QUIET, framework
from paged_engine import VOCABULARY, Array, Keep, check_capture, check_positions

import rr_dataset as rr

paddle = framework("paddle")
qwen3 = framework("paddleformers.transformers.qwen3_moe.modeling")

pytestmark = QUIET


class PaddleQwen3:
    """Dense layers at the beginning and between; its router returns logits, and the block takes the top k inline."""

    def __init__(self) -> None:
        paddle.seed(3)
        config = qwen3.Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=5,
            mlp_only_layers=[0, 2],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=32,
            initializer_range=0.15,
            fuse_rms_norm=False,
            fuse_rope=False,
            _attn_implementation="eager",
            dtype="float32",
        )
        self.model = qwen3.Qwen3MoeForCausalLM(config)
        self.model.eval()
        self.spec = rr.RoutingSpec.from_config(config)
        self.cache_shape = (5, 2, 16)

    def forward(self, tokens: Array, positions: Array, past: Array | None, mask: Array) -> tuple[Array, Array]:
        known = None if past is None else [tuple(paddle.to_tensor(kind) for kind in layer) for layer in past]
        with paddle.no_grad():
            output = self.model(
                paddle.to_tensor(tokens),
                attention_mask=paddle.to_tensor(mask[:, None]),
                position_ids=paddle.to_tensor(positions),
                past_key_values=known,
                use_cache=True,
                return_dict=True,
            )
        new = [[kind[:, -tokens.shape[1] :].numpy() for kind in layer] for layer in output.past_key_values]
        return output.logits.numpy(), np.array(new)

    def tensor(self, array: Array) -> Any:
        return paddle.to_tensor(array)

    @contextmanager
    def routers(self, keep: Keep) -> Iterator[None]:
        def hook(layer: int, logits: Any) -> None:
            scores = paddle.nn.functional.softmax(logits, axis=-1, dtype="float32")
            keep(layer, paddle.topk(scores, self.spec.top_k, axis=-1)[1], scores)

        hooks = [
            self.model.model.layers[layer].mlp.gate.register_forward_post_hook(
                lambda gate, args, logits, layer=layer: hook(layer, logits)
            )
            for layer in self.spec.moe_layers
        ]
        yield
        for each in hooks:
            each.remove()


@pytest.fixture(scope="module")
def runner() -> PaddleQwen3:
    return PaddleQwen3()


@pytest.mark.parametrize(
    ("hooked", "late"), [(True, True), (False, False)], ids=["hooked, one step later", "watched, flushed at once"]
)
def test_records_are_what_the_model_chose(runner: PaddleQwen3, tmp_path: Path, hooked: bool, late: bool) -> None:
    assert (runner.spec.moe_layers, runner.spec.dtype) == ((1, 3, 4), "uint8")
    print(check_capture(runner, tmp_path / "d", hooked=hooked, late=late))


def test_positions_in_debug_mode(runner: PaddleQwen3, tmp_path: Path) -> None:
    check_positions(runner, tmp_path / "d")
