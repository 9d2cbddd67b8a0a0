"""Rows of a batch that stand for no recorded token: how they are marked, and what stands in them. Pure.

"spread" does not hurt who ignores the mask: padded rows that all name one expert would overload the rank that holds it, and
an expert named twice in a row breaks exchanges that count on distinct ones.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidInputError

PADDINGS = ("spread", "minus_one")


class RowKind(IntEnum):
    """What a row of a batch is; in masks as uint8. PADDING is 0, so a mask is also a mask of tokens."""

    PADDING = 0  # no token: the batch needs the row for its shape
    MISSING = 1  # a token of which this layer has no recorded ids
    REAL = 2  # ids as recorded


def padded_dtype(dtype: npt.DTypeLike, num_experts: int, padding: str) -> np.dtype[Any]:
    """The dtype of a batch: that of the record, with "minus_one" the narrowest signed one that holds all ids.

    Raises InvalidInputError for another padding.
    """
    if padding not in PADDINGS:
        raise InvalidInputError(f"padding={padding!r}: expected one of {', '.join(PADDINGS)}")
    return np.dtype(dtype) if padding == "spread" else np.min_scalar_type(-num_experts)


def spread_rows(count: int, num_experts: int, top_k: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """[count, top_k] of ids that are distinct within a row and balanced over all experts: their counts differ by at most one.

    The ids of a row lie far apart, so that even one row is spread over the ranks that hold blocks of experts.
    """
    apart = num_experts // top_k
    circle = np.concatenate([np.arange(first, num_experts, apart) for first in range(apart)]).astype(dtype)
    return circle[np.arange(count * top_k) % num_experts].reshape(count, top_k)


def fill_rows(out: npt.NDArray[Any], unreal: npt.NDArray[np.bool_], num_experts: int, padding: str) -> None:
    """Put the filler into the rows of `out` [..., top_k] that `unreal` [...] marks."""
    count = int(np.count_nonzero(unreal))
    if count and padding == "minus_one":
        out[unreal] = -1
    elif count:
        out[unreal] = spread_rows(count, num_experts, out.shape[-1], out.dtype)
