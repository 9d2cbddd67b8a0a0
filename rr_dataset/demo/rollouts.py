"""The rollouts of the demo: real routing, and the order in which an engine would finish it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.record import RoutingSpec

SPEC = RoutingSpec(moe_layers=tuple(range(8)), num_experts=64, top_k=8)
DATA = Path(__file__).with_name("routing.npz")


@dataclass(frozen=True)
class Rollout:
    """One finished request. The arrays are views of the whole file.

    routed_experts: uint8 [8 layers, tokens, 8], not contiguous. token_ids: uint16 [tokens].
    logprobs: float32 [tokens], NaN for the tokens of the prompt.
    """

    prompt: int
    sample: int
    turn: int
    prompt_length: int
    routed_experts: npt.NDArray[np.uint8]
    token_ids: npt.NDArray[np.uint16]
    logprobs: npt.NDArray[np.float32]

    def request_id(self, epoch: int) -> str:
        """The rollout's id in one epoch of training."""
        return f"code_{self.prompt}_epoch_{epoch}:{self.sample}:{self.turn}:0"


def load_rollouts() -> list[Rollout]:
    """All 200 rollouts, by prompt, sample and turn."""
    with np.load(DATA) as file:
        arrays: dict[str, npt.NDArray[Any]] = dict(file)
    rollouts, sampled = [], 0
    for (prompt, sample, turn, prompt_length), start, stop in zip(
        arrays["meta"].tolist(), arrays["offsets"][:-1].tolist(), arrays["offsets"][1:].tolist(), strict=True
    ):
        logprobs = np.full(stop - start, np.nan, np.float32)
        count = stop - start - prompt_length
        logprobs[prompt_length:] = arrays["logprobs"][sampled : sampled + count]
        sampled += count
        rollouts.append(
            Rollout(
                prompt=prompt,
                sample=sample,
                turn=turn,
                prompt_length=prompt_length,
                routed_experts=arrays["routing"][:, start:stop],
                token_ids=arrays["tokens"][start:stop],
                logprobs=logprobs,
            )
        )
    return rollouts


def as_they_finish(rollouts: Sequence[Rollout], seed: int, in_flight: int = 4) -> Iterator[Rollout]:
    """The rollouts in an order of finishing: the samples of `in_flight` prompts at a time race each other.

    A turn of a conversation finishes after the turn before it. The same seed gives the same order.
    """
    chance = random.Random(seed)  # noqa: S311  # an order to look at, not a secret
    prompts: dict[int, dict[int, list[Rollout]]] = {}
    for rollout in rollouts:
        prompts.setdefault(rollout.prompt, {}).setdefault(rollout.sample, []).append(rollout)
    waiting = [[sorted(turns, key=lambda r: r.turn) for turns in samples.values()] for samples in prompts.values()]
    running = waiting[:in_flight]
    del waiting[:in_flight]
    while running:
        samples = chance.choice(running)
        turns = chance.choice(samples)
        yield turns.pop(0)
        if not turns:
            samples.remove(turns)
        if not samples:
            running.remove(samples)
            running += waiting[:1]
            del waiting[:1]
