"""Replay on transformers' Qwen3-MoE, with its own and torch's checkpointing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from frameworks import QUIET, framework

import rr_dataset as rr
from rr_dataset.trainer.replay import RoutingReplay

torch = framework("torch")
qwen3 = framework("transformers.models.qwen3_moe.modeling_qwen3_moe")
if not hasattr(qwen3, "Qwen3MoeTopKRouter"):
    pytest.skip("transformers before 5 routes within the block", allow_module_level=True)

pytestmark = QUIET

Array = npt.NDArray[Any]


def made(**more: Any) -> Any:
    torch.manual_seed(0)
    config = qwen3.Qwen3MoeConfig(
        **{"norm_topk_prob": True, **more},
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=300,
        num_experts_per_tok=4,
        moe_intermediate_size=16,
        mlp_only_layers=[0],
        use_cache=False,
    )
    model = qwen3.Qwen3MoeForCausalLM(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=1.0 if name.endswith("gate.weight") else 0.2)
    return model


def chosen(seed: int, rows: int) -> Array:
    return np.argsort(np.random.default_rng(seed).random((rows, 3, 300)), axis=-1)[..., :4].astype(np.uint16)


def tokens(seed: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 128, (2, 5)))


def gradients(model: Any) -> dict[str, Any]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if name.endswith("gate.weight")}
    model.zero_grad()
    return found


def spec_of(model: Any) -> rr.RoutingSpec:
    return rr.RoutingSpec.from_config(model.config)


@pytest.mark.parametrize("scaled", [True, False])
def test_recorded_by_the_model_itself_replay_changes_nothing(scaled: bool) -> None:
    model = made(norm_topk_prob=scaled)
    taken: dict[int, Array] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda gate, args, out, i=i: taken.__setitem__(i, out[2].numpy()))
        for i, layer in enumerate(model.model.layers)
        if i
    ]
    with torch.no_grad():
        live = model(tokens(0)).logits
    for hook in hooks:
        hook.remove()
    replay = RoutingReplay(spec_of(model))
    with torch.no_grad(), replay.attach(model):
        replay.push(taken)
        torch.testing.assert_close(model(tokens(0)).logits, live)
        forced = {layer: ids.astype(np.int32) for layer, ids in taken.items()}
        forced[3][2] = -1  # left live
        forced[3][4] = (forced[3][4] + 1) % 300
        replay.push(forced)
        changed = (model(tokens(0)).logits - live).abs().amax(dim=-1).flatten() > 1e-4
    assert changed.nonzero().flatten().tolist() == [4]
    assert replay.metrics().agreement[1] == 1.0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_recomputed_micro_batches_in_flight_get_their_own_rows(order: tuple[int, ...]) -> None:
    model = made()
    replay = RoutingReplay(spec_of(model))
    with replay.attach(model):
        wanted = []
        for i in range(3):
            replay.push(chosen(i, 10))
            model(tokens(i)).logits.square().mean().backward()
            wanted.append(gradients(model))
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": replay.checkpoint_contexts})
        losses = []
        for i in range(3):
            replay.push(chosen(i, 10))
            losses.append(model(tokens(i)).logits.square().mean())
        for i in order:
            losses[i].backward()
            torch.testing.assert_close(gradients(model), wanted[i])
            assert all(float(grad.abs().max()) > 0 for grad in wanted[i].values())


@pytest.mark.parametrize("reentrant", [True, False])
def test_without_a_context_one_in_flight_is_right_and_two_need_a_word(reentrant: bool) -> None:
    model = made()
    replay = RoutingReplay(spec_of(model))
    with replay.attach(model):
        replay.push(chosen(0, 10))
        model(tokens(0)).logits.square().mean().backward()
        wanted = gradients(model)
        replay.check_consumed()
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for _ in range(2):
            replay.push(chosen(0, 10))
            model(tokens(0)).logits.square().mean().backward()
            torch.testing.assert_close(gradients(model), wanted)
        batches = [replay.push(chosen(i, 10)) for i in range(2)]
        losses = [model(tokens(i)).logits.square().mean() for i in range(2)]
        with pytest.raises(rr.InvalidInputError, match="several micro-batches in flight"):
            losses[0].backward()
        replay.check_consumed()
        batches = [replay.push(chosen(i, 10)) for i in range(2)]
        losses = [model(tokens(i)).logits.square().mean() for i in range(2)]
        for i in (1, 0):
            model.zero_grad()
            with replay.recompute(batches[i]):
                losses[i].backward()
        torch.testing.assert_close(gradients(model), wanted)


def test_optimiser_steps_are_finite_and_the_routers_learn() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    replay = RoutingReplay(spec_of(model))
    losses = []
    with replay.attach(model):
        for _ in range(3):
            replay.push(chosen(0, 10))
            loss = model(tokens(0), labels=tokens(0)).loss
            loss.backward()
            assert all(0 < float(p.grad.norm()) < np.inf for n, p in model.named_parameters() if "gate.weight" in n)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_a_router_with_other_weights_is_refused() -> None:
    model = made()
    hook = model.model.layers[2].mlp.gate.register_forward_hook(lambda gate, args, out: (out[0], out[1] * 2, out[2]))
    replay = RoutingReplay(spec_of(model))
    with replay.attach(model):
        replay.push(chosen(0, 10))
        with pytest.raises(rr.InvalidInputError, match="layer 2: Qwen3MoeTopKRouter does not compute its weights"):
            model(tokens(0))
        hook.remove()
        replay.push(chosen(0, 10))
        with pytest.raises(rr.InvalidInputError, match="no forward took"):
            replay.check_consumed()


def test_routers_by_name_and_own_ones_that_call_choose() -> None:
    model = made()
    gates = {i: model.model.layers[i].mlp.gate for i in (2, 3)}
    replay = RoutingReplay(spec_of(model))
    with torch.no_grad(), replay.attach(model, gates):
        replay.push(chosen(0, 10))
        model(tokens(0))
    assert sorted(replay.metrics().agreement) == [2, 3]
    with pytest.raises(rr.InvalidInputError, match="no router was found"), replay.attach(model.model.layers[0]):
        pass
