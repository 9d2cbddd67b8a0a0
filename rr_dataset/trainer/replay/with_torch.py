"""Replay for torch: transformers' Qwen3-MoE and routers alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch.utils import checkpoint

from rr_dataset.errors import InvalidInputError
from rr_dataset.trainer.replay.layers import by_layer, claimed

if TYPE_CHECKING:
    from rr_dataset.trainer.replay.replay import RoutingReplay


class _Torch:
    @contextmanager
    def hook(self, replay: RoutingReplay, model: Any, gates: Mapping[int, Any] | None) -> Iterator[list[int]]:
        if gates is None:
            modules = dict(model.named_modules(remove_duplicate=False))
            routers = [name for name, module in modules.items() if _routes(module)]
            gates = by_layer(modules, routers, replay.spec.moe_layers[-1])
        for layer, gate in gates.items():
            if not hasattr(gate, "norm_topk_prob"):
                raise InvalidInputError(
                    f"layer {layer}: {type(gate).__name__} is no router that replay knows. {_KNOWN}"
                )
        with ExitStack() as undo:
            undo.enter_context(claimed(gates))
            undo.enter_context(_segments_remember(replay))
            for layer, gate in gates.items():
                undo.callback(gate.register_forward_hook(_Hook(replay, layer)).remove)
            yield sorted(gates)

    def in_backward(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001  # as torch.utils.checkpoint asks

    def with_gradients(self) -> bool:
        return bool(torch.is_grad_enabled())

    def load(self, array: npt.NDArray[Any], live: Any) -> Any:
        return torch.from_numpy(array).to(live.device, non_blocking=True)

    def merge(self, live: Any, ids: Any, forced: Any | None) -> Any:
        ids = ids.to(live.dtype)
        return ids if forced is None else torch.where(forced[:, None], ids, live)

    def count_equal(self, live: Any, ids: Any, counted: Any | None) -> Any:
        equal = (live.detach()[:, :, None] == ids[:, None, :]).sum(dim=(1, 2))
        return (equal if counted is None else equal * counted).sum()


_KNOWN = (
    "It must return logits [rows, experts], weights [rows, top_k] and ids [rows, top_k], the weights a softmax over the experts, and say "
    "norm_topk_prob; any other calls replay.choose(layer, ids) itself: see attach(model, own=True)"
)


@contextmanager
def _segments_remember(replay: RoutingReplay) -> Iterator[None]:
    """Have every segment of torch.utils.checkpoint keep its micro-batches, in both of its ways to compute it again."""
    reentrant, other = before = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator  # noqa: SLF001

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], *args: Any) -> Any:
            again: Any = None

            def remembering(*inputs: Any) -> Any:
                nonlocal again
                if again is None:
                    _, again = replay.checkpoint_contexts()
                    return function(*inputs)
                with again:
                    return function(*inputs)

            return reentrant.apply(remembering, *args)

    def without(function: Any, preserve_rng_state: Any, context_fn: Any, *args: Any, **kwargs: Any) -> Any:
        return other(function, preserve_rng_state, _beside(replay, context_fn), *args, **kwargs)

    checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator = Reentrant, without  # noqa: SLF001
    try:
        yield
    finally:
        checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator = before  # noqa: SLF001


def _beside(replay: RoutingReplay, context_fn: Any) -> Any:
    """The contexts of replay together with those of the caller, as of selective checkpointing."""
    if context_fn in (checkpoint.noop_context_fn, replay.checkpoint_contexts):
        return replay.checkpoint_contexts
    return lambda: tuple(map(_Both, replay.checkpoint_contexts(), context_fn()))


class _Both:
    """Two contexts as one; entered once a backward."""

    def __init__(self, *contexts: Any) -> None:
        self.contexts = contexts
        self.entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entering:
            for each in self.contexts:
                entering.enter_context(each)
            self.entered = entering.pop_all()

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036  # passed on as they are
        self.entered.__exit__(*error)


class _Hook:
    """After a router that returns logits, weights and ids: the recorded ids and their weights from the same logits."""

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        self.replay = replay
        self.layer = layer
        self.checked = False

    def __call__(self, router: Any, _: Any, output: Any) -> Any:
        if not self.checked:
            self._check(router, output)
            self.checked = True
        logits, weights, live = output
        ids = self.replay.choose(self.layer, live)
        return output if ids is live else (logits, _weights(router, logits, ids, weights.dtype), ids)

    def _check(self, router: Any, output: Any) -> None:
        name = type(router).__name__
        parts = output if isinstance(output, tuple) else (output,)
        shapes = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts]
        rows_and_k = (*shapes[0][:1], self.replay.spec.top_k)
        if len(parts) != 3 or len(shapes[0]) != 2 or shapes[1:] != [rows_and_k] * 2 or parts[2].is_floating_point():
            raise InvalidInputError(f"layer {self.layer}: {name} returned {shapes}. {_KNOWN}")
        logits, weights, live = output
        with torch.no_grad():  # a graph that only the first forward has would be missed when that is computed again
            alike = torch.allclose(_weights(router, logits, live, weights.dtype), weights, rtol=1e-2)
        if not alike:
            raise InvalidInputError(
                f"layer {self.layer}: {name} does not compute its weights as a softmax over the experts, so replay cannot recompute "
                f"them. {_KNOWN}"
            )


def _weights(router: Any, logits: Any, ids: Any, dtype: Any) -> Any:
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(dtype)


def _routes(module: Any) -> bool:
    return type(module).__name__.endswith("TopKRouter") and all(
        hasattr(module, name) for name in ("top_k", "num_experts", "norm_topk_prob")
    )


FRAMEWORK = _Torch()
