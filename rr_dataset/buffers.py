"""Whether arrays that a caller gives can be filled: two elements in one place would make one value of two. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

_K = TypeVar("_K", bound=Hashable)


def overlaps_itself(array: npt.NDArray[Any]) -> bool:
    """Whether elements share bytes. Also true of strides so odd that no slice or transposition makes them."""
    extent = array.itemsize
    axes = sorted((abs(stride), count) for stride, count in zip(array.strides, array.shape, strict=True) if count > 1)
    for stride, count in axes if array.size else ():
        if stride < extent:
            return True
        extent += stride * (count - 1)
    return False


def overlapping(arrays: Mapping[_K, npt.NDArray[Any]]) -> tuple[_K, _K] | None:
    """Two of the arrays that share bytes, or None."""
    bounds = sorted(
        ((*_bounds(array), name) for name, array in arrays.items() if array.size), key=lambda bound: bound[:2]
    )
    near: list[tuple[int, _K]] = []
    for low, high, name in bounds:
        near = [(end, other) for end, other in near if low < end]
        for _, other in near:
            if np.shares_memory(arrays[name], arrays[other]):
                return other, name
        near.append((high, name))
    return None


def _bounds(array: npt.NDArray[Any]) -> tuple[int, int]:
    """The addresses of its first byte and of the one behind its last."""
    low: int = array.__array_interface__["data"][0]
    ends = [stride * (count - 1) for stride, count in zip(array.strides, array.shape, strict=True)]
    return low + sum(min(end, 0) for end in ends), low + sum(max(end, 0) for end in ends) + array.itemsize
