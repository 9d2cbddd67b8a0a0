"""Replay on transformers' Qwen3-MoE, with its own and torch's checkpointing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from frameworks import QUIET, framework

import rr_dataset as rr
from rr_dataset.trainer.replay import RoutingReplay

torch = framework("torch")
checkpoint = framework("torch.utils.checkpoint")
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


def wanted_of(model: Any, batches: int) -> list[dict[str, Any]]:
    """Gradients of each micro-batch, without any checkpointing."""
    wanted = []
    replay = RoutingReplay(spec_of(model))
    with replay.attach(model):
        for i in range(batches):
            replay.push(chosen(i, 10))
            model(tokens(i)).logits.square().mean().backward()
            wanted.append(gradients(model))
    return wanted


WAYS = pytest.mark.parametrize("way", ["reentrant", "hooks", "context"])


def checkpointed(model: Any, replay: RoutingReplay, way: str) -> None:
    model.train()
    more = {"context_fn": replay.checkpoint_contexts} if way == "context" else {}
    model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant", **more})


@WAYS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_recomputed_micro_batches_in_flight_get_their_own_rows(order: tuple[int, ...], way: str) -> None:
    model = made()
    wanted = wanted_of(model, 3)
    replay = RoutingReplay(spec_of(model))
    checkpointed(model, replay, way)
    with replay.attach(model):  # no forward before: the first backward after an attach is right as well
        losses = []
        for i in range(3):
            replay.push(chosen(i, 10))
            losses.append(model(tokens(i)).logits.square().mean())
        for i in order:
            losses[i].backward()
            torch.testing.assert_close(gradients(model), wanted[i])
            assert all(float(grad.abs().max()) > 0 for grad in wanted[i].values())


@WAYS
def test_a_second_loss_of_a_micro_batch_gets_its_own_rows_after_the_next_forward(way: str) -> None:
    model = made()
    wanted = wanted_of(model, 1)[0]
    replay = RoutingReplay(spec_of(model))
    checkpointed(model, replay, way)
    with replay.attach(model):
        replay.push(chosen(0, 10))
        squares = model(tokens(0)).logits.square()
        first, second = squares[..., :3].sum() / squares.numel(), squares[..., 3:].sum() / squares.numel()
        first.backward(retain_graph=True)
        replay.push(chosen(1, 10))
        model(tokens(1))
        second.backward()
        torch.testing.assert_close(gradients(model), wanted)


def test_a_context_of_the_callers_goes_beside_replays() -> None:
    model = made()
    wanted = wanted_of(model, 2)
    replay = RoutingReplay(spec_of(model))
    entered: list[str] = []

    @contextmanager
    def noted(what: str) -> Iterator[None]:
        entered.append(what)
        yield

    model.train()
    more = {"context_fn": lambda: (noted("forward"), noted("again"))}
    model.gradient_checkpointing_enable({"use_reentrant": False, **more})
    with replay.attach(model):
        losses = []
        for i in range(2):
            replay.push(chosen(i, 10))
            losses.append(model(tokens(i)).logits.square().mean())
        for i in range(2):
            losses[i].backward()
            torch.testing.assert_close(gradients(model), wanted[i])
    assert (entered.count("forward"), entered.count("again")) == (8, 8)


def test_checkpointing_that_is_not_announced_needs_a_word() -> None:
    model = made()
    wanted = wanted_of(model, 1)[0]
    before = checkpoint.CheckpointFunction
    replay = RoutingReplay(spec_of(model))
    checkpointed(model, replay, "reentrant")
    with replay.attach(model):
        checkpoint.CheckpointFunction, ours = before, checkpoint.CheckpointFunction  # somebody else's
        for say in (False, True):
            batch = replay.push(chosen(0, 10))
            loss = model(tokens(0)).logits.square().mean()
            if say:
                with replay.recompute(batch):
                    loss.backward()
            else:
                with pytest.raises(rr.InvalidInputError, match="nothing says for which micro-batch"):
                    loss.backward()
                model.zero_grad()
        checkpoint.CheckpointFunction = ours
    torch.testing.assert_close(gradients(model), wanted)
    assert checkpoint.CheckpointFunction is before


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
    model.model.layers[2].mlp.gate.register_forward_hook(lambda gate, args, out: (out[0], out[1] * 2, out[2]))
    replay = RoutingReplay(spec_of(model))
    with replay.attach(model):
        replay.push(chosen(0, 10))
        with pytest.raises(rr.InvalidInputError, match="layer 2: Qwen3MoeTopKRouter does not compute its weights"):
            model(tokens(0))
        replay.abandon()


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


def test_one_router_has_one_layer_and_one_replay() -> None:
    model = made()
    spec = spec_of(model)
    gate = model.model.layers[1].mlp.gate
    with (
        pytest.raises(rr.InvalidInputError, match="have one router"),
        RoutingReplay(spec).attach(model, {1: gate, 2: gate}),
    ):
        pass
    with RoutingReplay(spec).attach(model):
        other = RoutingReplay(spec).attach(model)
        with pytest.raises(rr.InvalidInputError, match="hooked already"), other:
            pass
    model.model.layers[2].mlp.gate = gate
    with pytest.raises(rr.InvalidInputError, match="have one router"), RoutingReplay(spec).attach(model):
        pass


def test_a_layer_behind_the_spec_is_said() -> None:
    model = made()
    replay = RoutingReplay(rr.RoutingSpec((1, 2), 300, 4))
    with pytest.warns(rr.RoutingDatasetWarning, match=r"model\.layers\.3\.mlp\.gate"), replay.attach(model):
        pass


class Other(torch.nn.Linear):  # type: ignore[misc]
    norm_topk_prob = True


def test_a_gate_that_returns_something_else_is_named_with_the_way_out() -> None:
    replay = RoutingReplay(rr.RoutingSpec((0,), 8, 2))
    for gate in (torch.nn.Linear(4, 8), Other(4, 8)):
        with pytest.raises(rr.InvalidInputError, match="layer 0: (Linear|Other) .*logits.*own=True"):
            called(replay, gate)


def called(replay: RoutingReplay, gate: Any) -> None:
    with replay.attach(gate, {0: gate}):
        replay.push(np.tile([0, 1], (3, 1, 1)))
        gate(torch.zeros(3, 4))


def test_the_own_block_of_the_docstring_is_replayed_and_its_gate_learns() -> None:
    text = (RoutingReplay.__doc__ or "").partition("class Moe")
    block = textwrap.dedent("        class Moe" + text[2].partition("        with replay.attach")[0])
    names: dict[str, Any] = {"torch": torch}
    exec(block, names)  # what is printed is what is run
    spec = rr.RoutingSpec((0, 1), 8, 2)
    replay = RoutingReplay(spec)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(names["Moe"](layer, 4, 8, 2, replay) for layer in range(2)))
    x = torch.randn(5, 4)
    live = model(x)
    ids = np.argsort(np.random.default_rng(0).random((5, 2, 8)))[..., :2]
    used = []
    for expert in (expert for block in model for expert in block.experts):
        expert.register_forward_hook(lambda expert, args, out: used.append(len(args[0])))
    with replay.attach(model, own=True):
        replay.push(ids)
        model(x).square().sum().backward()
    assert used == [int((ids[:, layer] == e).sum()) for layer in range(2) for e in range(8)]
    assert replay.metrics().coverage == 1
    assert all(float(block.gate.weight.grad.abs().sum()) > 0 for block in model)
    torch.testing.assert_close(model(x), live)
