"""Tensors of numpy, torch and paddle: a step's buffer of fixed address, and copies to the host that nobody waits for.

A framework is imported when its first tensor comes, and only by the name its type gives.

A step's buffer is one type wider than what is stored, and -1 wherever nothing was written since it was last cleared: so what a
step did not write, and what is no expert, is told from what it chose, without a look at values on the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidRoutingError

Arrival = Callable[[], npt.NDArray[Any]]  # waits for a copy to the host; what arrived

_WIDER = {"uint8": "int16", "uint16": "int32", "uint32": "int64"}  # by the dtype that is stored
_BITS = {"int16": 16, "int32": 32, "int64": 64}
_HOSTS = 2  # steps on their way to the host at once


class StepBuffer(Protocol):
    """The rows of one step, [max_tokens, layers, top_k], at one address for good."""

    rows: Any  # the tensor

    def write(self, start: int, layer: int, ids: Any) -> None:
        """Cast `ids` [tokens, top_k] into one layer of the rows from `start` on; what is no expert stays none. Safe in a CUDA graph."""

    def send(self, tokens: int, turn: int) -> Arrival:
        """Start to copy the first rows to the host, unsigned there. The copy is good until the next but one is sent."""

    def clear(self, tokens: int) -> None:
        """-1 into what was written: the first rows, or all on a device, where a graph writes without being seen."""


def framework_of(value: Any) -> str:
    """Its name: numpy, torch or paddle. Raises InvalidRoutingError for anything else."""
    name = type(value).__module__.partition(".")[0]
    if name not in ("numpy", "torch", "paddle"):
        raise InvalidRoutingError(f"a {type(value).__name__} of {name}: expected a tensor of numpy, torch or paddle")
    return name


def check_ids(what: str, ids: Any, top_k: int) -> None:
    """Raise InvalidRoutingError for anything but whole numbers of shape [tokens, top_k]; no value is read."""
    framework_of(ids)
    if len(ids.shape) != 2 or ids.shape[1] != top_k:
        raise InvalidRoutingError(f"{what} has shape {tuple(ids.shape)}: expected (tokens, {top_k})")
    if not _whole(ids.dtype) or isinstance(ids, np.ma.MaskedArray):
        raise InvalidRoutingError(f"{what} has dtype {ids.dtype}: expected the ids of experts, of an integer dtype")


@cache
def _whole(dtype: Any) -> bool:
    if isinstance(dtype, np.dtype):
        return dtype.kind in "iu"
    return re.fullmatch(r"(torch|paddle)\.u?int(8|16|32|64)", str(dtype)) is not None


def make_buffer(like: Any, shape: tuple[int, int, int], dtype: str, experts: int) -> StepBuffer:
    """A buffer beside `like`: of its framework, on its device. experts: the number that is none, as all beyond it."""
    kinds: dict[str, Callable[[Any, tuple[int, int, int], str, int], StepBuffer]] = {
        "numpy": lambda _, shape, kind, experts: _NumpyBuffer(shape, kind, experts),
        "torch": _TorchBuffer,
        "paddle": _PaddleBuffer,
    }
    return kinds[framework_of(like)](like, shape, _WIDER[dtype], experts)


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
    def __init__(self, shape: tuple[int, int, int], kind: str, experts: int) -> None:
        self.rows = np.full(shape, -1, kind)
        self._hosts = [np.zeros(shape, f"u{kind}") for _ in range(_HOSTS)]
        self._experts = experts

    def write(self, start: int, layer: int, ids: Any) -> None:
        plain = np.asarray(ids)
        rows = self.rows[start : start + len(plain), layer]
        if plain.dtype.itemsize < rows.dtype.itemsize:
            rows[:] = plain
        else:
            low = 0 if plain.dtype.kind == "u" else -1
            np.clip(plain, low, self._experts, out=rows, casting="unsafe")

    def send(self, tokens: int, turn: int) -> Arrival:
        host = self._hosts[turn % _HOSTS][:tokens]
        np.copyto(host, self.rows[:tokens].view(host.dtype))
        return lambda: host

    def clear(self, tokens: int) -> None:
        self.rows[:tokens] = -1


class _TorchBuffer:
    def __init__(self, like: Any, shape: tuple[int, int, int], kind: str, experts: int) -> None:
        self._torch: Any = import_module("torch")
        torch, self._experts = self._torch, experts
        dtype, self._bits = getattr(torch, kind), _BITS[kind]
        self._on_device = not on_host(like)
        with torch.inference_mode(mode=False):  # what is made inside cannot be written outside
            self.rows = torch.full(shape, -1, dtype=dtype, device=like.device)
            self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=self._on_device) for _ in range(_HOSTS)]
            room = {kind: torch.zeros(shape[::2], dtype=kind, device=like.device) for kind in _wide(torch, self._bits)}
        self._clamped = room  # of each dtype that may hold more than the rows do: a graph must not allocate
        self._views: list[npt.NDArray[Any]] = [host.numpy().view(f"u{kind}") for host in self._hosts]
        self._events = [torch.cuda.Event() for _ in range(_HOSTS)] if self._on_device else []

    def write(self, start: int, layer: int, ids: Any) -> None:
        rows = self.rows[start : start + len(ids), layer]
        if not isinstance(ids, self._torch.Tensor) or ids.device != rows.device:
            raise InvalidRoutingError(f"topk_ids is no tensor on {rows.device}, as those before it")
        if self._torch.iinfo(ids.dtype).bits < self._bits:
            rows.copy_(ids, non_blocking=True)
            return
        if str(ids.dtype).startswith("torch.u"):  # few computations take those
            ids = ids.to(self._torch.int64)
        clamped = self._clamped[ids.dtype][start : start + len(ids)]  # its own: goes of one step may run side by side
        rows.copy_(self._torch.clamp(ids, -1, self._experts, out=clamped), non_blocking=True)

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

    def clear(self, tokens: int) -> None:
        (self.rows if self._on_device else self.rows[:tokens]).fill_(-1)


def _wide(torch: Any, bits: int) -> list[Any]:
    return [kind for kind in (torch.int16, torch.int32, torch.int64) if torch.iinfo(kind).bits >= bits]


class _PaddleBuffer:
    def __init__(self, like: Any, shape: tuple[int, int, int], kind: str, experts: int) -> None:
        self._paddle: Any = import_module("paddle")
        self._kind, self._experts = kind, experts
        self.rows = self._paddle.full(shape, -1, dtype=kind).to(like.place)
        self._on_device = not on_host(like)

    def write(self, start: int, layer: int, ids: Any) -> None:
        if not isinstance(ids, self._paddle.Tensor):
            raise InvalidRoutingError(
                f"topk_ids is a {type(ids).__name__}: expected a tensor of paddle, as those before it"
            )
        if ids.dtype in (self._paddle.int32, self._paddle.int64):  # others fit the buffer
            ids = self._paddle.clip(ids, -1, self._experts)
        self.rows[start : start + len(ids), layer] = ids.astype(self._kind)

    def send(self, tokens: int, turn: int) -> Arrival:  # noqa: ARG002 - it has a new host copy each time
        if self._on_device:
            arrived = send(self.rows[:tokens])
            return lambda: np.asarray(arrived().view(f"u{self._kind}"))
        host: npt.NDArray[Any] = np.array(self.rows[:tokens].numpy()).view(f"u{self._kind}")
        return lambda: host

    def clear(self, tokens: int) -> None:
        self.rows[: len(self.rows) if self._on_device else tokens] = -1
