"""Replay for paddle: PaddleFormers' Qwen3-MoE and GLM4-MoE, and gates that ask `get_topk_indices` for their experts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import paddle
from paddle.distributed.fleet.recompute.recompute import custom_state_manager

from rr_dataset.errors import InvalidInputError
from rr_dataset.trainer.replay.layers import by_layer, claimed

if TYPE_CHECKING:
    from rr_dataset.trainer.replay.replay import RoutingReplay


class _Paddle:
    @contextmanager
    def hook(self, replay: RoutingReplay, model: Any, gates: Mapping[int, Any] | None) -> Iterator[list[int]]:
        if gates is None:
            modules = dict(model.named_sublayers(include_self=True))
            routers = [name for name, module in modules.items() if _asks_for_ids(module) or _routes_inline(module)]
            gates = by_layer(modules, routers, replay.spec.moe_layers[-1])
        for layer, router in gates.items():
            if not _asks_for_ids(router) and not _routes_inline(router):
                raise InvalidInputError(
                    f"layer {layer}: {type(router).__name__} is no router that replay knows: neither a gate with get_topk_indices() nor "
                    "a sparse MoE block as Qwen3-MoE's. Any other calls replay.choose(layer, ids) itself: see attach(model, own=True)"
                )
        with ExitStack() as undo:
            undo.enter_context(claimed({layer: getattr(router, "gate", router) for layer, router in gates.items()}))
            undo.enter_context(_segments_remember(replay))
            for layer, router in gates.items():
                undo.enter_context((_asked if _asks_for_ids(router) else _inline)(replay, layer, router))
            yield sorted(gates)

    def in_backward(self) -> bool:
        # Paddle has no word for it, but its recomputations have a frame. One that keeps a state is told by that, before.
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
        while frame is not None:
            code = frame.f_code
            if code.co_name in ("backward", "unpack") and "/fleet/recompute/" in code.co_filename:
                return True
            frame = frame.f_back
        return False

    def with_gradients(self) -> bool:
        return bool(paddle.is_grad_enabled())

    def load(self, array: npt.NDArray[Any], live: Any) -> Any:
        return paddle.to_tensor(array, place=live.place)

    def merge(self, live: Any, ids: Any, forced: Any | None) -> Any:
        ids = ids.astype(live.dtype)
        return ids if forced is None else paddle.where(forced.unsqueeze(-1), ids, live)

    def count_equal(self, live: Any, ids: Any, counted: Any | None) -> Any:
        with paddle.no_grad():
            equal = (live.unsqueeze(2) == ids.astype(live.dtype).unsqueeze(1)).astype("int64").sum(axis=[1, 2])
            return (equal if counted is None else equal * counted.astype("int64")).sum()


@contextmanager
def _segments_remember(replay: RoutingReplay) -> Iterator[None]:
    """Have every recomputed segment keep its micro-batches, beside the state of whoever used paddle's custom state before."""
    manager = custom_state_manager
    get, put = before = manager.custom_get_state_func, manager.custom_set_state_func

    def get_both() -> Any:
        return replay.enter_segment(), get() if get else None

    def put_both(state: Any) -> None:
        replay.restore_segment(state[0])
        if put:
            put(state[1])

    manager.custom_get_state_func, manager.custom_set_state_func = get_both, put_both
    try:
        yield
    finally:
        manager.custom_get_state_func, manager.custom_set_state_func = before


@contextmanager
def _asked(replay: RoutingReplay, layer: int, gate: Any) -> Iterator[None]:
    """A gate that gathers its weights by what `get_topk_indices` gives (GLM4-MoE, DeepSeek)."""
    live = gate.get_topk_indices
    instead = vars(gate).get("get_topk_indices")  # somebody else's, on this gate alone
    gate.get_topk_indices = lambda *args, **kwargs: replay.choose(layer, live(*args, **kwargs))
    try:
        yield
    finally:
        if instead is None:
            del gate.get_topk_indices
        else:
            gate.get_topk_indices = instead


@contextmanager
def _inline(replay: RoutingReplay, layer: int, block: Any) -> Iterator[None]:
    """A block that takes `paddle.topk` of its scores right after its gate (Qwen3-MoE): the next topk is the router's."""

    def gate_was_called(*_: Any) -> None:
        _next_topk.router = (replay, layer)

    def block_was_called(*_: Any) -> None:
        if _next_topk.router is not None:
            _next_topk.router = None
            raise InvalidInputError(
                f"layer {layer}: {type(block).__name__} chose its experts without paddle.topk, so nothing was replayed; "
                "this version of PaddleFormers is not known"
            )

    with ExitStack() as undo:
        undo.enter_context(_topk_seen(sys.modules[type(block).__module__]))
        undo.callback(block.gate.register_forward_post_hook(gate_was_called).remove)
        undo.callback(block.register_forward_post_hook(block_was_called).remove)
        undo.callback(setattr, _next_topk, "router", None)  # of a forward that ended between gate and topk
        yield


class _NextTopk(threading.local):
    router: tuple[RoutingReplay, int] | None = None


_next_topk = _NextTopk()


class _Seen(ModuleType):
    """What a modeling module takes for `paddle`: the same, but for the topk of a router."""

    users = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(paddle, name)

    @staticmethod
    def topk(scores: Any, k: int, *args: Any, **kwargs: Any) -> Any:
        values, live = paddle.topk(scores, k, *args, **kwargs)
        router, _next_topk.router = _next_topk.router, None
        if router is None:
            return values, live
        replay, layer = router
        ids = replay.choose(layer, live)
        return paddle.take_along_axis(scores, ids, axis=-1, broadcast=False), ids


@contextmanager
def _topk_seen(modeling: Any) -> Iterator[None]:
    """Several layers, models and replays share one stand-in per modeling module."""
    if not isinstance(modeling.paddle, _Seen):
        modeling.paddle = _Seen("paddle")
    modeling.paddle.users += 1
    try:
        yield
    finally:
        modeling.paddle.users -= 1
        if not modeling.paddle.users:
            modeling.paddle = paddle


def _asks_for_ids(module: Any) -> bool:
    return callable(getattr(type(module), "get_topk_indices", None))


def _routes_inline(module: Any) -> bool:
    modeling = sys.modules.get(type(module).__module__)
    return (
        type(module).__name__.endswith("SparseMoeBlock")
        and all(hasattr(module, name) for name in ("gate", "experts", "top_k"))
        and not _asks_for_ids(module.gate)
        and hasattr(modeling, "paddle")
    )


FRAMEWORK = _Paddle()
