"""Replay on PaddleFormers' own model code: rollouts in emulated bf16 through writer, dataset and dataloader into the fp32 forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from frameworks import QUIET, framework

import rr_dataset as rr
from rr_dataset.trainer.replay import RoutingReplay
from rr_dataset.trainer.samples import RoutingSamples, SampleOptions, whole_batches

paddle = framework("paddle")
qwen3 = framework("paddleformers.transformers.qwen3_moe.modeling")
glm4 = framework("paddleformers.transformers.glm4_moe.modeling")

pytestmark = QUIET

Array = npt.NDArray[Any]
PROMPT, NEW, SAMPLES = 24, 24, 4
COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 4,
    "initializer_range": 0.15,
    "max_position_embeddings": 256,
    "fuse_rms_norm": False,
    "fuse_rope": False,
    "_attn_implementation": "eager",
    "dtype": "float32",
}


def qwen3_moe(**more: Any) -> Any:
    config = qwen3.Qwen3MoeConfig(num_experts=32, mlp_only_layers=[0], **{"norm_topk_prob": True, **COMMON, **more})
    return qwen3.Qwen3MoeForCausalLM(config)


def glm4_moe(**more: Any) -> Any:
    config = glm4.Glm4MoeConfig(
        n_routed_experts=32, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, **COMMON, **more
    )
    return glm4.Glm4MoeForCausalLM(config)


MAKERS = pytest.mark.parametrize("make", [qwen3_moe, glm4_moe])


def made(make: Callable[..., Any], **more: Any) -> Any:
    paddle.seed(3)
    model = make(**more)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):  # GLM4-MoE draws them from [-1, 1]
            weight.set_value(paddle.randn(weight.shape) * 0.15)
    model.eval()
    return model


def logits_of(model: Any, tokens: Array) -> Any:
    output = model(paddle.to_tensor(tokens.astype(np.int64)), use_cache=False, return_dict=True)
    return output.logits


def rounded(tensor: Any) -> Any:
    return tensor.astype("bfloat16").astype("float32")


def engine_of(model: Any, make: Callable[..., Any]) -> Any:
    engine = made(make)
    engine.set_state_dict({name: rounded(value) for name, value in model.state_dict().items()})
    for name, layer in engine.named_sublayers():
        if name.endswith(("norm", "proj", "layernorm")):
            layer.register_forward_post_hook(lambda layer, args, output: rounded(output))
    return engine


@contextmanager
def captured(model: Any) -> Iterator[dict[int, list[Array]]]:
    """Ids of every router call by layer, as an engine's hook would take them, without any code of replay."""
    taken: dict[int, list[Array]] = {}
    hooks = []

    def keep(layer: int) -> Callable[..., None]:
        def hook(gate: Any, args: Any, output: Any) -> None:
            if isinstance(output, tuple):  # GLM4-MoE: ids and weights
                ids = output[0]
            else:  # Qwen3-MoE: logits
                ids = paddle.topk(paddle.nn.functional.softmax(output, axis=-1), model.config.num_experts_per_tok)[1]
            taken.setdefault(layer, []).append(ids.numpy())

        return hook

    for name, layer in model.named_sublayers():
        if name.endswith("mlp.gate"):
            hooks.append(layer.register_forward_post_hook(keep(int(name.split(".")[-3]))))
    yield taken
    for hook in hooks:
        hook.remove()


def rolled_out(engine: Any) -> tuple[Array, Array, Array]:
    """Tokens [B, T], routing [B, L, T, K] and log-probabilities [B, T, vocabulary], decoded with a KV cache."""
    chance = np.random.default_rng(0)
    tokens = chance.integers(0, 128, (2, PROMPT)).repeat(SAMPLES, axis=0)
    steps: list[Array] = []
    past = None
    with paddle.no_grad(), captured(engine) as taken:
        fed = tokens
        for step in range(NEW + 1):
            start = 0 if step == 0 else PROMPT + step - 1
            positions = paddle.arange(start, start + fed.shape[1]).unsqueeze(0).expand([len(fed), -1])
            output = engine(
                paddle.to_tensor(fed), position_ids=positions, past_key_values=past, use_cache=True, return_dict=True
            )
            past = output.past_key_values
            steps.append(paddle.nn.functional.log_softmax(output.logits, axis=-1).numpy())
            if step < NEW:
                fed = np.argmax(steps[-1][:, -1:] + chance.gumbel(size=steps[-1][:, -1:].shape), axis=-1)
                tokens = np.concatenate([tokens, fed], axis=1)
    layers = [
        np.concatenate([call.reshape(len(tokens), -1, call.shape[-1]) for call in taken[layer]], axis=1)
        for layer in sorted(taken)
    ]
    return tokens, np.stack(layers, axis=1), np.concatenate(steps, axis=1)


def divergence(model: Any, tokens: Array, theirs: Array, replay: RoutingReplay | None, routing: Array | None) -> float:
    """Mean KL(engine || trainer) over the sampled tokens."""
    with paddle.no_grad(), replay.attach(model) if replay else nullcontext():
        if replay:
            replay.push(routing)
        ours = paddle.nn.functional.log_softmax(logits_of(model, tokens), axis=-1).numpy()
    sampled = slice(PROMPT - 1, -1)
    kl = np.exp(theirs) * (theirs.astype(np.float64) - ours)
    return float(kl.sum(axis=-1)[:, sampled].mean())


@MAKERS
def test_replay_brings_the_trainer_to_the_engine_and_wrong_rows_take_it_far_off(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    model = made(make)
    spec = rr.RoutingSpec.from_config(model.config)
    tokens, routing, theirs = rolled_out(engine_of(model, make))
    ids = [f"p{i // SAMPLES}:{i % SAMPLES}:0:0" for i in range(len(tokens))]
    with rr.RoutingWriter(tmp_path / "d", create=spec) as writer:
        for request_id, rows, row in zip(ids, routing, tokens, strict=True):
            writer.put(request_id, rows, layout="LTK", token_ids=row)
        writer.flush(timeout_s=60)
    samples = RoutingSamples(tmp_path / "d", ids, SampleOptions(layout="TLK"))
    stacked = whole_batches([list(range(len(ids)))], lambda read: np.stack([each["routed_experts"] for each in read]))
    (batch,) = (each.numpy() for each in paddle.io.DataLoader(samples, **stacked))
    assert np.array_equal(batch, routing.transpose(0, 2, 1, 3))

    replay = RoutingReplay(spec)
    live = divergence(model, tokens, theirs, None, None)
    replayed = divergence(model, tokens, theirs, replay, batch)
    metrics = replay.metrics()
    shifted = divergence(model, tokens, theirs, replay, np.roll(batch, 1, axis=1))
    transposed = divergence(model, tokens, theirs, replay, batch.swapaxes(0, 1).reshape(batch.shape))
    print(
        f"{make.__name__}: live {live:.2e}, replayed {replayed:.2e}, shifted {shifted:.2e}, transposed {transposed:.2e}"
    )
    print(f"agreement {metrics.agreement}")
    assert replayed < live
    assert min(shifted, transposed) > 10 * live
    assert metrics.coverage == 1
    assert all(0.8 < share < 1 for share in metrics.agreement.values())
    assert min(replay.metrics().agreement.values()) < min(metrics.agreement.values()) - 0.1


@MAKERS
def test_recorded_by_the_model_itself_replay_changes_nothing(make: Callable[..., Any]) -> None:
    model = made(make)
    tokens = np.random.default_rng(0).integers(0, 128, (3, 7))
    with paddle.no_grad(), captured(model) as taken:
        live = logits_of(model, tokens).numpy()
    replay = RoutingReplay(rr.RoutingSpec.from_config(model.config))
    with paddle.no_grad(), replay.attach(model):
        replay.push({layer: calls[0] for layer, calls in taken.items()})
        assert np.array_equal(logits_of(model, tokens).numpy(), live)
    assert set(replay.metrics().agreement.values()) == {1.0}
    assert np.array_equal(logits_of(model, tokens).numpy(), live), "detached"


def chosen(model: Any, seed: int, rows: int) -> dict[int, Array]:
    chance = np.random.default_rng(seed)
    spec = rr.RoutingSpec.from_config(model.config)
    return {
        layer: np.argsort(chance.random((rows, spec.num_experts)))[:, : spec.top_k].astype(np.uint8)
        for layer in spec.moe_layers
    }


def gradients(model: Any) -> dict[str, Array]:
    found = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if name.endswith("gate.weight")}
    model.clear_gradients()
    return found


@MAKERS
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["first in first out", "last in first out"])
def test_recomputed_micro_batches_in_flight_get_their_own_rows(
    make: Callable[..., Any], order: tuple[int, ...]
) -> None:
    tokens = [np.random.default_rng(i).integers(0, 128, (2, 5)) for i in range(3)]
    plain = made(make)
    replay = RoutingReplay(rr.RoutingSpec.from_config(plain.config))
    wanted = []
    with replay.attach(plain):
        for i in range(3):
            replay.push(chosen(plain, i, 10))
            logits_of(plain, tokens[i]).square().mean().backward()
            wanted.append(gradients(plain))
    model = made(make, recompute=True, recompute_granularity="full")
    model.set_state_dict(plain.state_dict())
    with replay.attach(model):
        losses = []
        for i in range(3):
            replay.push(chosen(model, i, 10))
            losses.append(logits_of(model, tokens[i]).square().mean())
        for i in order:
            losses[i].backward()
            got = gradients(model)
            assert all(np.abs(value).max() > 0 for value in got.values())
            for name, value in wanted[i].items():
                np.testing.assert_allclose(got[name], value, rtol=1e-3, atol=1e-6 * np.abs(value).max() + 1e-9)


@MAKERS
@pytest.mark.parametrize("replayed", [False, True])
def test_optimiser_steps_are_finite_and_the_routers_learn(make: Callable[..., Any], replayed: bool) -> None:
    model = made(make)
    model.train()
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    tokens = np.random.default_rng(0).integers(0, 128, (2, 9))
    replay = RoutingReplay(rr.RoutingSpec.from_config(model.config))
    losses = []
    with replay.attach(model) if replayed else nullcontext():
        for _ in range(3):
            if replayed:
                replay.push(chosen(model, 0, 16))
            logits = logits_of(model, tokens[:, :-1])
            loss = paddle.nn.functional.cross_entropy(
                logits.reshape([-1, 128]), paddle.to_tensor(tokens[:, 1:].ravel())
            )
            loss.backward()
            norms = [float(p.grad.norm()) for name, p in model.named_parameters() if name.endswith("gate.weight")]
            assert all(0 < norm < np.inf for norm in norms)
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


def test_a_qwen3_that_keeps_unscaled_weights_keeps_them_and_missing_rows_stay_live() -> None:
    model = made(qwen3_moe, norm_topk_prob=False)
    tokens = np.random.default_rng(0).integers(0, 128, (2, 6))
    with paddle.no_grad(), captured(model) as taken:
        live = logits_of(model, tokens).numpy()
    forced = {layer: calls[0].astype(np.int16) for layer, calls in taken.items()}
    replay = RoutingReplay(rr.RoutingSpec.from_config(model.config))
    last = max(forced)
    forced[last][3] = -1
    forced[last][7] = (forced[last][7] + 1) % 32
    with paddle.no_grad(), replay.attach(model):
        replay.push(forced)
        changed = np.abs(logits_of(model, tokens).numpy() - live).max(axis=-1).ravel() > 1e-5  # by rounding 2e-7
    assert changed.nonzero()[0].tolist() == [7]
    assert replay.metrics().replayed == replay.metrics().rows - 1
