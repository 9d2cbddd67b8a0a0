"""The proof on a real model: how far a trainer's forward is from the engine's, without and with replayed routing.

Everything between the two takes the way of a real run: writer, worker, dataset, dataloader, replay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from rr_dataset.dataset import create_dataset
from rr_dataset.demo.model import Shape
from rr_dataset.demo.model_rollouts import Rollout, engine_of, prompts_of, python_sources, rollouts, train
from rr_dataset.demo.model_trainer import Divergence, PolicySteps, Trainer
from rr_dataset.keys import KeyScheme
from rr_dataset.record import RoutingSpec
from rr_dataset.trainer.replay import RoutingReplay
from rr_dataset.writer import RoutingWriter


@dataclass(frozen=True)
class Size:
    """How much is done; the defaults take about a minute on two cores."""

    shape: Shape = field(default_factory=Shape)
    train_steps: int = 80
    prompts: int = 16
    samples: int = 4
    prompt_tokens: int = 64
    new_tokens: int = 128
    policy_steps: int = 3


@dataclass(frozen=True)
class ProofReport:
    """What came out. shifted and transposed replay wrong rows on purpose: one token late, and flattened the wrong way."""

    train_s: float
    loss_first: float
    loss_last: float
    rollout_s: float
    compare_s: float
    requests: int
    tokens: int
    payload_bytes: int
    coverage: float
    agreement: dict[int, float]
    tokens_flipped: float
    live: Divergence
    replayed: Divergence
    shifted: Divergence
    transposed: Divergence
    live_steps: PolicySteps
    replayed_steps: PolicySteps

    @property
    def sound(self) -> bool:
        """Replay brings the trainer nearer, wrong rows are far off, and both ways train."""
        nearer = self.replayed.mean < self.live.mean
        seen = min(self.shifted.mean, self.transposed.mean) > 10 * self.live.mean
        return nearer and seen and self.coverage == 1 and self.live_steps.sound and self.replayed_steps.sound


def prove(uri: str, size: Size | None = None, seed: int = 0) -> ProofReport:
    """Train, roll out, store in a dataset at `uri` (made if there is none), read, replay, compare.

    The same seed gives the same rollouts on one machine; they replace those of an earlier run.
    """
    size = size or Size()
    text = python_sources()
    start = time.perf_counter()
    model, losses = train(size.shape, text, size.train_steps, seed)
    trained = time.perf_counter()
    prompts = prompts_of(text, size.prompts, size.prompt_tokens, seed)
    done = rollouts(engine_of(model), prompts, size.samples, size.new_tokens, seed)
    rolled_out = time.perf_counter()
    spec = size.shape.spec
    store(uri, spec, done)
    trainer = Trainer(uri, done)
    replay, canary = RoutingReplay(spec), RoutingReplay(spec, agreement=False)
    live, tokens_flipped = trainer.live(model)
    replayed = trainer.replayed(model, replay)
    metrics = replay.metrics()
    shifted = trainer.replayed(model, canary, lambda ids: np.roll(ids, 1, axis=1), 1)
    transposed = trainer.replayed(model, canary, lambda ids: ids.swapaxes(0, 1).reshape(ids.shape), 1)
    live_steps = trainer.policy_steps(model, size.policy_steps, None)
    replayed_steps = trainer.policy_steps(model, size.policy_steps, RoutingReplay(spec))
    return ProofReport(
        train_s=trained - start,
        loss_first=losses[0],
        loss_last=losses[-1],
        rollout_s=rolled_out - trained,
        compare_s=time.perf_counter() - rolled_out,
        requests=len(done),
        tokens=sum(len(rollout.tokens) for rollout in done),
        payload_bytes=sum(rollout.routed_experts.nbytes for rollout in done),
        coverage=metrics.coverage,
        agreement=metrics.agreement,
        tokens_flipped=tokens_flipped,
        live=live,
        replayed=replayed,
        shifted=shifted,
        transposed=transposed,
        live_steps=live_steps,
        replayed_steps=replayed_steps,
    )


def store(uri: str, spec: RoutingSpec, done: list[Rollout]) -> None:
    """What an engine's hook does: one put a request, and a flush."""
    create_dataset(uri, spec, keys=KeyScheme.fastdeploy(), exist_ok=True)
    with RoutingWriter(uri) as writer:
        for rollout in done:
            writer.put(
                rollout.request_id,
                rollout.routed_experts,
                layout="LTK",
                token_ids=rollout.tokens,
                logprobs=rollout.logprobs,
                weight_version="trained",
            )
        writer.flush(timeout_s=60)
