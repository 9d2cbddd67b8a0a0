"""Capture on transformers' Qwen3-MoE: decoding with a KV cache, against a second hook and against a whole prefill."""

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

torch = framework("torch")

qwen3 = framework("transformers.models.qwen3_moe.modeling_qwen3_moe")
if not hasattr(qwen3, "Qwen3MoeTopKRouter"):
    pytest.skip("transformers before 5 routes within the block", allow_module_level=True)
DynamicCache = framework("transformers").DynamicCache

pytestmark = QUIET


class TorchQwen3:
    """More experts than a byte counts, every other layer dense."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = qwen3.Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=6,
            decoder_sparse_step=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=300,
            num_experts_per_tok=4,
            moe_intermediate_size=16,
        )
        self.model = qwen3.Qwen3MoeForCausalLM(config).eval()
        for name, weight in self.model.named_parameters():
            torch.nn.init.normal_(weight, std=1.0 if name.endswith("gate.weight") else 0.2)
        self.spec = rr.RoutingSpec.from_config(config)
        self.cache_shape = (6, 2, 8)

    def forward(self, tokens: Array, positions: Array, past: Array | None, mask: Array) -> tuple[Array, Array]:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(() if past is None else torch.from_numpy(past)):
            cache.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
        looks = torch.from_numpy(np.where(mask, 0, -1e9).astype(np.float32))[:, None]
        with torch.inference_mode():
            output = self.model(
                torch.from_numpy(tokens),
                attention_mask=looks,
                position_ids=torch.from_numpy(positions),
                cache=cache,
                use_cache=True,
            )
        new = [
            [kind[:, :, -tokens.shape[1] :].transpose(1, 2) for kind in (each.keys, each.values)]
            for each in cache.layers
        ]
        return output.logits.numpy(), np.array([[kind.numpy() for kind in layer] for layer in new])

    def tensor(self, array: Array) -> Any:
        return torch.from_numpy(array)

    @contextmanager
    def routers(self, keep: Keep) -> Iterator[None]:
        hooks = [
            self.model.model.layers[layer].mlp.gate.register_forward_hook(
                lambda gate, args, out, layer=layer: keep(layer, out[2], out[0].softmax(-1))
            )
            for layer in self.spec.moe_layers
        ]
        yield
        for hook in hooks:
            hook.remove()


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchQwen3]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower by more
    yield TorchQwen3()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("hooked", "late"), [(True, True), (False, False)], ids=["hooked, one step later", "watched, flushed at once"]
)
def test_records_are_what_the_model_chose(runner: TorchQwen3, tmp_path: Path, hooked: bool, late: bool) -> None:
    assert (runner.spec.moe_layers, runner.spec.dtype) == ((1, 3, 5), "uint16")
    print(check_capture(runner, tmp_path / "d", hooked=hooked, late=late))


def test_positions_in_debug_mode(runner: TorchQwen3, tmp_path: Path) -> None:
    check_positions(runner, tmp_path / "d")
