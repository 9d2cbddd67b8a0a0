"""Replay for torch: transformers' Qwen3-MoE and routers alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from rr_dataset.errors import InvalidInputError
from rr_dataset.trainer.replay.layers import by_layer

if TYPE_CHECKING:
    from rr_dataset.trainer.replay.replay import RoutingReplay


class _Torch:
    @contextmanager
    def hook(self, replay: RoutingReplay, model: Any, gates: Mapping[int, Any] | None) -> Iterator[list[int]]:
        modules = dict(model.named_modules())
        routers = [name for name, module in modules.items() if _routes(module)]
        found = dict(gates) if gates is not None else by_layer(modules, routers, replay.spec.moe_layers[-1])
        with ExitStack() as undo:
            for layer, gate in found.items():
                undo.callback(gate.register_forward_hook(_Hook(replay, layer)).remove)
            yield sorted(found)

    def in_backward(self) -> bool:
        return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001  # as torch.utils.checkpoint asks

    def load(self, array: npt.NDArray[Any], live: Any) -> Any:
        return torch.from_numpy(array).to(live.device, non_blocking=True)

    def merge(self, live: Any, ids: Any, forced: Any | None) -> Any:
        ids = ids.to(live.dtype)
        return ids if forced is None else torch.where(forced[:, None], ids, live)

    def count_equal(self, live: Any, ids: Any, counted: Any | None) -> Any:
        equal = (live.detach()[:, :, None] == ids[:, None, :]).sum(dim=(1, 2))
        return (equal if counted is None else equal * counted).sum()


class _Hook:
    """After a router that returns logits, weights and ids: the recorded ids and their weights from the same logits."""

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        self.replay = replay
        self.layer = layer
        self.checked = False

    def __call__(self, router: Any, _: Any, output: Any) -> Any:
        logits, weights, live = output
        if not self.checked:
            if not torch.allclose(_weights(router, logits, live, weights.dtype), weights, rtol=1e-2):
                raise InvalidInputError(
                    f"layer {self.layer}: {type(router).__name__} does not compute its weights as a softmax over the experts, "
                    "so replay cannot recompute them; call replay.choose() inside of it"
                )
            self.checked = True
        ids = self.replay.choose(self.layer, live)
        return logits, _weights(router, logits, ids, weights.dtype), ids


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
