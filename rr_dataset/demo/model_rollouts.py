"""The engine's side of the proof: a model trained for a minute on Python's own library, and what it writes in bf16."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F  # noqa: N812  # its usual name
from paddle import nn

from rr_dataset.demo.model import ByteModel, Cache, Shape, as_bfloat16, captured

BATCH, TOKENS = 8, 128
LEARNING_RATE = 3e-3
BALANCE = 0.05


@dataclass(frozen=True)
class Rollout:
    """One sample of one prompt. S tokens, L layers, K experts a token.

    tokens: uint8 [S], the prompt first; every one was fed, the last too. routed_experts: uint8 [L, S, K].
    logp: float32 [S, 256], the engine's log-probabilities of what follows each token.
    """

    request_id: str
    prompt_length: int
    tokens: npt.NDArray[np.uint8]
    routed_experts: npt.NDArray[np.uint8]
    logp: npt.NDArray[np.float32]

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Of the tokens themselves, [S]; NaN for those of the prompt."""
        own = np.full(len(self.tokens), np.nan, np.float32)
        sampled = np.arange(self.prompt_length, len(self.tokens))
        own[sampled] = self.logp[sampled - 1, self.tokens[sampled]]
        return own


def python_sources() -> npt.NDArray[np.uint8]:
    """The bytes of the standard library's top-level modules, by name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def train(shape: Shape, text: npt.NDArray[np.uint8], steps: int, seed: int) -> tuple[ByteModel, list[float]]:
    """A model after some steps of next-byte prediction, and the loss of each step in nats per byte."""
    paddle.seed(seed)
    chance = np.random.default_rng(seed)
    model = ByteModel(shape)
    optimizer = paddle.optimizer.AdamW(
        LEARNING_RATE, parameters=model.parameters(), grad_clip=nn.ClipGradByGlobalNorm(1.0)
    )
    losses = []
    for _ in range(steps):
        starts = chance.integers(0, len(text) - TOKENS - 1, BATCH)
        rows = np.stack([text[start : start + TOKENS + 1] for start in starts]).astype(np.int64)
        logits = model(paddle.to_tensor(rows[:, :-1]))
        loss = F.cross_entropy(logits.reshape([-1, logits.shape[-1]]), paddle.to_tensor(rows[:, 1:].ravel()))
        (loss + BALANCE * model.balance()).backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return model, losses


def engine_of(model: ByteModel) -> ByteModel:
    """A copy of the model as an engine holds it: weights and results in bf16, the router's softmax in fp32."""
    engine = ByteModel(model.shape, as_bfloat16)
    engine.set_state_dict({name: as_bfloat16(value) for name, value in model.state_dict().items()})
    engine.eval()
    return engine


def rollouts(
    engine: ByteModel, prompts: npt.NDArray[np.uint8], samples: int, new_tokens: int, seed: int
) -> list[Rollout]:
    """`samples` continuations of each prompt ([prompts, tokens]), decoded token by token with a KV cache.

    A prompt is computed once; its samples share its cache, and so its routing, as with an engine's prefix cache.
    """
    chance = np.random.default_rng(seed)
    length = prompts.shape[1]
    with paddle.no_grad(), captured(engine) as taken:
        cache: Cache = [None] * engine.shape.layers
        prefill = _log_probabilities(engine(paddle.to_tensor(prompts.astype(np.int64)), cache))
        cache = [tuple(part.repeat_interleave(samples, axis=0) for part in past) for past in cache]
        steps = [prefill.repeat(samples, axis=0)]
        tokens = [prompts.repeat(samples, axis=0)]
        for _ in range(new_tokens):
            tokens.append(_sampled(steps[-1][:, -1], chance))
            steps.append(_log_probabilities(engine(paddle.to_tensor(tokens[-1].astype(np.int64)), cache)))
    ids = np.stack([_by_request(calls, len(prompts), length, samples) for calls in taken], axis=1)
    all_tokens, logp = np.concatenate(tokens, axis=1), np.concatenate(steps, axis=1)
    return [
        Rollout(f"stdlib_{i // samples}_epoch_0:{i % samples}:0:0", length, all_tokens[i], ids[i], logp[i])
        for i in range(len(all_tokens))
    ]


def _by_request(calls: list[npt.NDArray[np.int64]], prompts: int, length: int, samples: int) -> npt.NDArray[np.uint8]:
    """One layer's calls, the prompts' and then one a token, as [requests, tokens, top_k]."""
    prefill = calls[0].reshape(prompts, length, -1).repeat(samples, axis=0)
    return np.concatenate([prefill, np.stack(calls[1:], axis=1)], axis=1).astype(np.uint8)


def _log_probabilities(logits: paddle.Tensor) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = F.log_softmax(logits, axis=-1).numpy()
    return values


def _sampled(logp: npt.NDArray[np.float32], chance: np.random.Generator) -> npt.NDArray[np.uint8]:
    """One token for each row, [rows, 1], at temperature 1."""
    chosen: npt.NDArray[np.uint8] = np.argmax(logp + chance.gumbel(size=logp.shape), axis=-1).astype(np.uint8)
    return chosen[:, None]


def prompts_of(text: npt.NDArray[np.uint8], count: int, length: int, seed: int) -> npt.NDArray[np.uint8]:
    """Beginnings of lines of the text, [count, length]."""
    lines = np.flatnonzero(text[: -length - 1] == ord("\n")) + 1
    starts = np.random.default_rng(seed).choice(lines, count, replace=False)
    return np.stack([text[start : start + length] for start in starts])
