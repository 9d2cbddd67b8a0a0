"""Arrays that `paddle.save` wrote, read without paddle.

Such a file is a pickle, and unpickling runs what the file says. Here nothing of it runs: every name that it may use stands
for a passive object of ours, any other name is refused, and the array is then made from the bytes that were collected.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import FormatError

_CODES = frozenset(("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8"))
_ORDERS = frozenset(("<", "|", "="))  # big-endian hosts have no paddle


class _Dtype:
    """Stands for numpy.dtype."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code
        self.order: object = None

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]


class _Array:
    """Stands for what numpy's `_reconstruct` makes, before its state is set."""

    def __init__(self, *_: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> npt.NDArray[Any]:
        """The array itself, read-only. Raises ValueError or TypeError for a state that is none."""
        _, shape, dtype, fortran, data = self.state
        known = isinstance(dtype, _Dtype) and dtype.code in _CODES and dtype.order in _ORDERS
        if not known or not isinstance(data, bytes) or not isinstance(shape, tuple):
            raise ValueError("it holds no integers")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"its shape is {shape!r:.80}")
        if len(data) != math.prod(shape) * np.dtype(dtype.code).itemsize:
            raise ValueError(f"it has {len(data)} bytes for {shape} {dtype.code}")
        made: npt.NDArray[Any] = np.ndarray(shape, dtype.code, data, order="F" if fortran else "C")
        return made


def _ndarray() -> None:
    """Stands for numpy.ndarray, which the file only names."""


def _pair(items: object) -> object:
    """Stands for `tuple`: paddle saves a tensor as a pair of its name and its array."""
    return items


_KNOWN = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Dtype,
    ("builtins", "tuple"): _pair,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no saved array does")
        return _KNOWN[module, name]

    def persistent_load(self, _: Any) -> Any:
        raise pickle.UnpicklingError("it names an object outside the file")


def read_pdtensor(data: bytes) -> npt.NDArray[Any]:
    """The integers of one tensor or numpy array that `paddle.save` wrote, read-only.

    16-bit ones are as they were given to paddle, which takes them for bfloat16.
    Raises FormatError for anything else, and runs none of it.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str):
            found = found[1]
        if not isinstance(found, _Array):
            raise ValueError(f"it holds a {type(found).__name__}")  # noqa: TRY004, TRY301 -- the same as other damage
        return found.array()
    except Exception as error:  # a pickle's bytes can lead to any error of its own
        raise FormatError(f"no array that paddle.save wrote: {error}") from error
