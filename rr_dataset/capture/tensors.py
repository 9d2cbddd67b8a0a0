"""Tensors of numpy, torch and paddle: a step's buffer of fixed address, and copies to the host that nobody waits for.

A framework is imported when its first tensor comes, and only by the name its type gives.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidRoutingError

Arrival = Callable[[], npt.NDArray[Any]]  # waits for a copy to the host; what arrived

# Paddle takes numpy's uint16 for bfloat16 and has no uint32; torch computes little on either. Casts wrap, so bits are kept.
_ON_DEVICE = {"uint8": "uint8", "uint16": "int16", "uint32": "int32"}
_HOSTS = 2  # steps on their way to the host at once


class StepBuffer(Protocol):
    """The rows of one step, [max_tokens, layers, top_k], at one address for good."""

    rows: Any  # the tensor

    def write(self, start: int, layer: int, ids: Any) -> None:
        """Cast `ids` [tokens, top_k] into one layer of the rows from `start` on. Safe in a CUDA graph."""

    def send(self, tokens: int, turn: int) -> Arrival:
        """Start to copy the first rows to the host. The copy is good until the next but one is sent."""


def framework_of(value: Any) -> str:
    """Its name: numpy, torch or paddle. Raises InvalidRoutingError for anything else."""
    name = type(value).__module__.partition(".")[0]
    if name not in ("numpy", "torch", "paddle"):
        raise InvalidRoutingError(f"a {type(value).__name__} of {name}: expected a tensor of numpy, torch or paddle")
    return name


def make_buffer(like: Any, shape: tuple[int, int, int], dtype: str) -> StepBuffer:
    """A buffer beside `like`: of its framework, on its device."""
    kinds: dict[str, Callable[[Any, tuple[int, int, int], str], StepBuffer]] = {
        "numpy": lambda _, shape, dtype: _NumpyBuffer(shape, dtype),
        "torch": _TorchBuffer,
        "paddle": _PaddleBuffer,
    }
    return kinds[framework_of(like)](like, shape, dtype)


def on_host(value: Any) -> bool:
    """Whether reading `value` waits for no device."""
    if not hasattr(value, "__dlpack__") or isinstance(value, np.ndarray):
        return True
    return str(value.device if framework_of(value) == "torch" else value.place) in ("cpu", "Place(cpu)")


def host_array(value: Any) -> npt.NDArray[np.int64]:
    """Whole numbers that are on the host, as a flat array of int64 of their own."""
    plain = value if isinstance(value, (np.ndarray, list, tuple, range)) else value.numpy()
    array = np.array(plain).reshape(-1)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidRoutingError(f"slots or positions of dtype {array.dtype}: expected whole numbers")
    return array.astype(np.int64, copy=False)


def send(value: Any) -> Arrival:
    """Start to copy a device tensor to the host, through pinned memory that its framework keeps for reuse."""
    module: Any = import_module(framework_of(value))
    if framework_of(value) == "torch":
        host = module.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        event = module.cuda.Event()
    else:
        host = value._copy_to(module.CUDAPinnedPlace(), False)  # noqa: FBT003, SLF001 - the only way there that does not wait
        event = module.device.Event()
    event.record()

    def arrived() -> npt.NDArray[Any]:
        event.synchronize()
        return np.asarray(host.numpy())

    return arrived


class _NumpyBuffer:
    def __init__(self, shape: tuple[int, int, int], dtype: str) -> None:
        self.rows = np.zeros(shape, dtype)
        self._hosts = [np.zeros(shape, dtype) for _ in range(_HOSTS)]

    def write(self, start: int, layer: int, ids: Any) -> None:
        np.copyto(self.rows[start : start + len(ids), layer], ids, casting="unsafe")

    def send(self, tokens: int, turn: int) -> Arrival:
        host = self._hosts[turn % _HOSTS][:tokens]
        np.copyto(host, self.rows[:tokens])
        return lambda: host


class _TorchBuffer:
    def __init__(self, like: Any, shape: tuple[int, int, int], dtype: str) -> None:
        torch: Any = import_module("torch")
        kind = getattr(torch, _ON_DEVICE[dtype])
        self._on_device = not on_host(like)
        with torch.inference_mode(mode=False):  # what is made inside cannot be written outside
            self.rows = torch.zeros(shape, dtype=kind, device=like.device)
            self._hosts = [torch.zeros(shape, dtype=kind, pin_memory=self._on_device) for _ in range(_HOSTS)]
        self._views: list[npt.NDArray[Any]] = [host.numpy().view(dtype) for host in self._hosts]
        self._events = [torch.cuda.Event() for _ in range(_HOSTS)] if self._on_device else []

    def write(self, start: int, layer: int, ids: Any) -> None:
        self.rows[start : start + len(ids), layer].copy_(ids, non_blocking=True)

    def send(self, tokens: int, turn: int) -> Arrival:
        index = turn % _HOSTS
        self._hosts[index][:tokens].copy_(self.rows[:tokens], non_blocking=True)
        if self._on_device:
            self._events[index].record()

        def arrived() -> npt.NDArray[Any]:
            if self._on_device:
                self._events[index].synchronize()
            return self._views[index][:tokens]

        return arrived


class _PaddleBuffer:
    def __init__(self, like: Any, shape: tuple[int, int, int], dtype: str) -> None:
        paddle: Any = import_module("paddle")
        self._kind, self._stored = _ON_DEVICE[dtype], dtype
        self.rows = paddle.zeros(shape, dtype=self._kind).to(like.place)
        self._on_device = not on_host(like)

    def write(self, start: int, layer: int, ids: Any) -> None:
        self.rows[start : start + len(ids), layer] = ids.astype(self._kind)

    def send(self, tokens: int, turn: int) -> Arrival:  # noqa: ARG002 - it has a new host copy each time
        if self._on_device:
            arrived = send(self.rows[:tokens])
            return lambda: np.asarray(arrived().view(self._stored))
        host: npt.NDArray[Any] = self.rows[:tokens].numpy().view(self._stored)
        return lambda: host
