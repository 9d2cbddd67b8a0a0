"""A small Mixture-of-Experts language model over bytes, in plain paddle: enough to train and to decode with on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F  # noqa: N812  # its usual name
from paddle import nn

from rr_dataset.record import RoutingSpec

Ids = npt.NDArray[Any]
Rounding = Callable[[Any], Any]
Cache = list[Any]  # per layer the keys and values so far, [batch, tokens, heads, size]
BYTES = 256


@dataclass(frozen=True)
class Shape:
    """The model's sizes; every layer routes."""

    layers: int = 4
    hidden: int = 64
    heads: int = 2
    experts: int = 32
    top_k: int = 4
    expert_hidden: int = 64

    @property
    def spec(self) -> RoutingSpec:
        """What its routing looks like."""
        return RoutingSpec(moe_layers=tuple(range(self.layers)), num_experts=self.experts, top_k=self.top_k)


def exact(x: Any) -> Any:
    """The trainer's precision: fp32 as it is."""
    return x


def as_bfloat16(x: Any) -> Any:
    """The engine's precision, emulated: paddle multiplies no bf16 matrices on a CPU, so results are rounded one by one."""
    return x.astype("bfloat16").astype("float32")


class Router(nn.Layer):  # type: ignore[misc]  # paddle is not looked into
    """Softmax over the experts, the top_k best, their weights scaled to a sum of one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.weight = self.create_parameter([shape.hidden, shape.experts])
        self.balance: Any = None  # the load balancing loss of the last forward

    def get_topk_indices(self, scores: Any) -> Any:
        """The ids [rows, top_k]: the one place where experts are chosen, so the one to capture and to replay."""
        return paddle.topk(scores, self.top_k, axis=-1)[1]

    def forward(self, hidden: Any) -> tuple[Any, Any]:
        """Ids and weights, each [rows, top_k]; the weights come from the live scores of whatever was chosen."""
        scores = F.softmax(hidden @ self.weight, axis=-1)
        ids = self.get_topk_indices(scores)
        experts = scores.shape[-1]
        share = np.bincount(ids.numpy().ravel(), minlength=experts) / ids.size
        self.balance = experts * (scores.mean(axis=0) * paddle.to_tensor(share, dtype="float32")).sum()
        weights = paddle.take_along_axis(scores, ids, axis=-1, broadcast=False)
        return ids, weights / weights.sum(axis=-1, keepdim=True)


class Experts(nn.Layer):  # type: ignore[misc]
    """All experts of a layer in three batched products over tiles: a tile is a few rows of one expert."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.experts = shape.experts
        wide, narrow = (nn.initializer.Normal(std=size**-0.5) for size in (shape.hidden, shape.expert_hidden))
        self.gate = self.create_parameter([shape.experts, shape.hidden, shape.expert_hidden], default_initializer=wide)
        self.up = self.create_parameter([shape.experts, shape.hidden, shape.expert_hidden], default_initializer=wide)
        self.down = self.create_parameter(
            [shape.experts, shape.expert_hidden, shape.hidden], default_initializer=narrow
        )

    def forward(self, hidden: Any, ids: Any, weights: Any, rounded: Rounding) -> Any:
        """[rows, hidden], and ids and weights [rows, top_k], to [rows, hidden]."""
        rows, top_k = ids.shape
        row_of, expert_of, place_of = map(paddle.to_tensor, _tiles(ids.numpy(), self.experts))
        padded = paddle.concat([hidden, paddle.zeros([1, hidden.shape[1]])])
        x = padded.index_select(row_of.flatten()).reshape([*row_of.shape, hidden.shape[1]])
        gate, up, down = (weight.index_select(expert_of) for weight in (self.gate, self.up, self.down))
        inner = rounded(F.silu(rounded(x @ gate)) * rounded(x @ up))
        y = rounded(inner @ down).reshape([-1, hidden.shape[1]])
        chosen = y.index_select(place_of).reshape([rows, top_k, -1])
        return (chosen * weights.unsqueeze(-1)).sum(axis=1)


def _tiles(ids: Ids, experts: int) -> tuple[Ids, Ids, Ids]:
    """[tiles, size] rows (the one behind the last where a tile is not full), each tile's expert, each choice's place in them."""
    flat = ids.ravel()
    size = max(4, flat.size // (4 * experts))
    order = np.argsort(flat, kind="stable")
    counts = np.bincount(flat, minlength=experts)
    tiles = -(-counts // size)
    first = (np.cumsum(tiles) - tiles) * size - (np.cumsum(counts) - counts)
    places = np.arange(flat.size) + first[flat[order]]
    row_of = np.full(int(tiles.sum()) * size, len(ids))
    row_of[places] = order // ids.shape[1]
    place_of = np.empty(flat.size, np.int64)
    place_of[order] = places
    return row_of.reshape(-1, size), np.repeat(np.arange(experts), tiles), place_of


class Norm(nn.Layer):  # type: ignore[misc]
    """Root mean square normalisation."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([hidden], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x: Any) -> Any:
        """Of the last axis."""
        return x * paddle.rsqrt(x.square().mean(axis=-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Layer):  # type: ignore[misc]
    """Causal attention with rotary positions and a cache."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.size = shape.hidden // shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias_attr=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias_attr=False)

    def forward(self, x: Any, past: Any, rounded: Rounding) -> tuple[Any, Any]:
        """[batch, tokens, hidden] behind the keys and values of `past`; gives those of both."""
        batch, tokens, hidden = x.shape
        q, k, v = rounded(self.qkv(x)).reshape([batch, tokens, 3, self.heads, self.size]).unbind(axis=2)
        start = 0 if past is None else past[0].shape[1]
        angles = _angles(start, tokens, self.size)
        q, k = rounded(_rotated(q, angles)), rounded(_rotated(k, angles))
        if past is not None:
            k, v = paddle.concat([past[0], k], axis=1), paddle.concat([past[1], v], axis=1)
        scores = q.transpose([0, 2, 1, 3]) @ k.transpose([0, 2, 3, 1]) / self.size**0.5
        later = np.triu(np.full((tokens, start + tokens), -1e9, np.float32), k=start + 1)
        shares = rounded(F.softmax(scores + paddle.to_tensor(later), axis=-1))
        mixed = rounded(shares @ v.transpose([0, 2, 1, 3])).transpose([0, 2, 1, 3]).reshape([batch, tokens, hidden])
        return rounded(self.out(mixed)), (k, v)


def _angles(start: int, tokens: int, size: int) -> tuple[Any, Any]:
    pace = 10_000.0 ** (-np.arange(0, size, 2) / size)
    turned = (np.arange(start, start + tokens)[:, None] * pace)[:, None, :].astype(np.float32)
    return paddle.to_tensor(np.cos(turned)), paddle.to_tensor(np.sin(turned))


def _rotated(x: Any, angles: tuple[Any, Any]) -> Any:
    (cos, sin), (a, b) = angles, x.chunk(2, axis=-1)
    return paddle.concat([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Layer(nn.Layer):  # type: ignore[misc]
    """One decoder layer; `gate` is its router."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norms = nn.LayerList([Norm(shape.hidden), Norm(shape.hidden)])
        self.attention = Attention(shape)
        self.gate = Router(shape)
        self.experts = Experts(shape)

    def forward(self, x: Any, past: Any, rounded: Rounding) -> tuple[Any, Any]:
        """As `Attention`."""
        mixed, past = self.attention(rounded(self.norms[0](x)), past, rounded)
        x = rounded(x + mixed)
        flat = rounded(self.norms[1](x)).reshape([-1, x.shape[-1]])
        ids, weights = self.gate(flat)
        return rounded(x + self.experts(flat, ids, weights, rounded).reshape(x.shape)), past


class ByteModel(nn.Layer):  # type: ignore[misc]
    """The language model. `rounded` is applied to every result of a layer: `exact` or `as_bfloat16`."""

    def __init__(self, shape: Shape, rounded: Rounding = exact) -> None:
        super().__init__()
        self.shape = shape
        self.rounded = rounded
        self.embedding = nn.Embedding(BYTES, shape.hidden)
        self.layers = nn.LayerList([Layer(shape) for _ in range(shape.layers)])
        self.norm = Norm(shape.hidden)
        self.head = nn.Linear(shape.hidden, BYTES, bias_attr=False)

    def forward(self, tokens: Any, cache: Cache | None = None) -> Any:
        """Logits [batch, tokens, 256] of int64 [batch, tokens]; a cache is read and replaced, layer by layer."""
        x = self.rounded(self.embedding(tokens))
        for i, layer in enumerate(self.layers):
            x, past = layer(x, cache[i] if cache else None, self.rounded)
            if cache is not None:
                cache[i : i + 1] = [past]
        return self.head(self.rounded(self.norm(x)))

    def balance(self) -> Any:
        """Load balancing loss of the last forward: 1 where all experts are chosen equally often."""
        return sum(layer.gate.balance for layer in self.layers) / len(self.layers)


@contextmanager
def captured(model: ByteModel) -> Iterator[list[list[Ids]]]:
    """Per layer the ids [rows, top_k] of every forward in this context, in order of the calls."""
    taken: list[list[Ids]] = [[] for _ in model.layers]

    def keeping(layer: int, choose: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def kept(scores: Any) -> Any:
            ids = choose(scores)
            taken[layer].append(ids.numpy())
            return ids

        return kept

    for i, layer in enumerate(model.layers):
        layer.gate.get_topk_indices = keeping(i, layer.gate.get_topk_indices)
    try:
        yield taken
    finally:
        for layer in model.layers:
            del layer.gate.get_topk_indices
