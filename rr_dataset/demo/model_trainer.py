"""The trainer's side of the proof: batches from the dataset, forwards with and without replay, a few optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F  # noqa: N812  # its usual name

from rr_dataset.demo.model import ByteModel, captured
from rr_dataset.demo.model_rollouts import Rollout
from rr_dataset.errors import RoutingDatasetError
from rr_dataset.trainer.replay import RoutingReplay
from rr_dataset.trainer.samples import RoutingSamples, Sample, SampleOptions, whole_batches

MICRO_BATCH = 16
POLICY_BATCHES = 2
LEARNING_RATE = 1e-4

Change = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]  # of a micro-batch's routing [batch, tokens, layers, top_k]


@dataclass(frozen=True)
class Divergence:
    """KL(engine || trainer) in nats, over the distributions that the engine sampled from."""

    mean: float
    largest: float
    per_token: list[float]

    @classmethod
    def of(cls, parts: list[npt.NDArray[np.float64]]) -> Divergence:
        """Of the tokens of all micro-batches; they are sorted."""
        kl = np.sort(np.concatenate(parts))
        return cls(float(kl.mean()), float(kl[-1]), kl.tolist())


@dataclass(frozen=True)
class PolicySteps:
    """A few optimiser steps: losses, gradient norms of all routers, and how far the ratios of probability (trainer to engine) of
    the sampled tokens are from 1 in the first step, where both have the same weights: on average and at most.
    """

    losses: list[float]
    router_gradients: list[float]
    ratio_error: float
    ratio_largest: float

    @property
    def sound(self) -> bool:
        """All finite, and the routers learn."""
        return all(map(math.isfinite, self.losses)) and all(0 < norm < math.inf for norm in self.router_gradients)


class Trainer:
    """Reads the rollouts' routing from the dataset through a dataloader; the rest (tokens, rewards) is what any trainer has."""

    def __init__(self, uri: str, rollouts: list[Rollout]) -> None:
        self._rollouts = rollouts
        chunks = [
            list(range(len(rollouts))[start : start + MICRO_BATCH]) for start in range(0, len(rollouts), MICRO_BATCH)
        ]
        samples = RoutingSamples(
            uri, [rollout.request_id for rollout in rollouts], SampleOptions(layout="TLK", vectors=True)
        )
        self._chunks = chunks
        self._loader = paddle.io.DataLoader(samples, **whole_batches(chunks, _side_by_side))

    def _batches(self, count: int | None = None) -> Iterator[tuple[list[Rollout], npt.NDArray[Any], npt.NDArray[Any]]]:
        """Rollouts, token ids [B, T] and routing [B, T, L, K] of the first micro-batches, whose ids must be the trainer's own."""
        for chunk, (token_ids, routing) in zip(self._chunks[:count], self._loader, strict=False):
            rollouts = [self._rollouts[i] for i in chunk]
            tokens = np.stack([rollout.tokens for rollout in rollouts]).astype(np.int64)
            if not np.array_equal(token_ids.numpy(), tokens):
                raise RoutingDatasetError("the records' token ids are not those of the rollouts")
            yield rollouts, tokens, routing.numpy()

    def live(self, model: ByteModel) -> tuple[Divergence, float]:
        """With live routing; and the share of tokens for which it differs from what was recorded in at least one layer."""
        per_token, flipped = [], []
        with paddle.no_grad():
            for rollouts, tokens, routing in self._batches():
                with captured(model) as taken:
                    per_token.append(_kl(rollouts, model(paddle.to_tensor(tokens))))
                live = np.stack([calls[0] for calls in taken], axis=1).reshape(routing.shape)
                flipped.append((np.sort(live, axis=-1) != np.sort(routing, axis=-1)).any(axis=(2, 3)))
        return Divergence.of(per_token), float(np.concatenate(flipped).mean())

    def replayed(
        self, model: ByteModel, replay: RoutingReplay, change: Change | None = None, count: int | None = None
    ) -> Divergence:
        """With what was recorded, or a change of it, on all micro-batches or the first `count`."""
        per_token = []
        with paddle.no_grad(), replay.attach(model):
            for rollouts, tokens, routing in self._batches(count):
                replay.push(change(routing) if change else routing)
                per_token.append(_kl(rollouts, model(paddle.to_tensor(tokens))))
        return Divergence.of(per_token)

    def policy_steps(self, model: ByteModel, steps: int, replay: RoutingReplay | None) -> PolicySteps:
        """Steps of policy gradient from a copy of the model. The reward is the share of lower-case letters, per prompt group."""
        policy = ByteModel(model.shape)
        policy.set_state_dict(model.state_dict())
        optimizer = paddle.optimizer.AdamW(LEARNING_RATE, parameters=policy.parameters())
        losses, gradients, errors = [], [], []
        advantages = _advantages(self._rollouts)
        chunks = self._chunks[:POLICY_BATCHES]
        with replay.attach(policy) if replay else nullcontext():
            for step in range(steps):
                total = 0.0
                for chunk, (rollouts, tokens, routing) in zip(chunks, self._batches(POLICY_BATCHES), strict=True):
                    if replay:
                        replay.push(routing)
                    ratios = _ratios(policy, rollouts, tokens)
                    if not step:
                        errors.append((ratios - 1).abs().numpy())
                    gain = paddle.to_tensor(advantages[chunk])[:, None]
                    loss = -(ratios * gain).mean() / len(chunks)
                    loss.backward()
                    total += float(loss)
                if replay:
                    replay.check_consumed()
                norms = [float(layer.gate.weight.grad.norm()) for layer in policy.layers]
                optimizer.step()
                optimizer.clear_grad()
                losses.append(total)
                gradients.append(float(np.linalg.norm(norms)) if min(norms) > 0 else 0.0)
        error = np.concatenate(errors)
        return PolicySteps(losses, gradients, float(error.mean()), float(error.max()))


def _kl(rollouts: list[Rollout], logits: Any) -> npt.NDArray[np.float64]:
    """KL(engine || trainer) of each sampled token of a micro-batch."""
    logp = F.log_softmax(logits, axis=-1).numpy().astype(np.float64)
    per_token = []
    for rollout, ours in zip(rollouts, logp, strict=True):
        sampled = slice(rollout.prompt_length - 1, -1)
        theirs = rollout.logp[sampled].astype(np.float64)
        per_token.append((np.exp(theirs) * (theirs - ours[sampled])).sum(axis=-1))
    return np.concatenate(per_token)


def _ratios(policy: ByteModel, rollouts: list[Rollout], tokens: npt.NDArray[np.int64]) -> Any:
    """Probability of each sampled token, trainer to engine, [B, new tokens]; all prompts have one length."""
    start = rollouts[0].prompt_length
    logp = F.log_softmax(policy(paddle.to_tensor(tokens))[:, start - 1 : -1], axis=-1)
    own = paddle.take_along_axis(logp, paddle.to_tensor(tokens[:, start:, None]), axis=-1, broadcast=False)
    theirs = np.stack([rollout.logprobs[start:] for rollout in rollouts])
    return paddle.exp(own.squeeze(-1) - paddle.to_tensor(theirs))


def _advantages(rollouts: list[Rollout]) -> npt.NDArray[np.float32]:
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        answer = rollout.tokens[rollout.prompt_length :]
        group = rollout.request_id.partition(":")[0]
        rewards.setdefault(group, []).append(float(((answer >= ord("a")) & (answer <= ord("z"))).mean()))
    scaled = [(np.array(group) - np.mean(group)) / (np.std(group) + 1e-3) for group in rewards.values()]
    return np.concatenate(scaled).astype(np.float32)


def _side_by_side(samples: list[Sample]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Samples of one length: token ids [B, T] and routing [B, T, L, K]."""
    if not all(sample["present"].all() for sample in samples):
        raise RoutingDatasetError("records have tokens without routing")
    return (
        np.stack([sample["token_ids"] for sample in samples]),
        np.stack([sample["routed_experts"] for sample in samples]),
    )
