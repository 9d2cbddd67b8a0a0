"""Copies between the two orders of a record's axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK_TOKENS = 512  # of a transposing copy, so that a block of all layers stays in the cache


def copy_tiles(to: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    """Copy [layers, tokens, top_k] between any strides, at memory speed also where one of them is in "TLK" order.

    Numpy alone walks such a pair through a fresh cache line per few bytes. Here the ids of a token move as one number
    where they stand together, and blocks of tokens stay in the cache.
    """
    layers, tokens, top_k = source.shape
    width = top_k * source.itemsize
    if width in _WORDS and to.dtype == source.dtype and to.strides[2] == source.strides[2] == source.itemsize:
        to, source = to.view(_WORDS[width]), source.view(_WORDS[width])
    if layers == 1 or to.strides[1] == source.strides[1]:
        np.copyto(to, source)
        return
    for at in range(0, tokens, _BLOCK_TOKENS):
        np.copyto(to[:, at : at + _BLOCK_TOKENS], source[:, at : at + _BLOCK_TOKENS])
