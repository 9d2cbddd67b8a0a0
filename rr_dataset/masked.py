"""Masked arrays, whose masked values numpy would hand over as real ones. Pure; imports no `numpy.ma`."""

from __future__ import annotations

import sys

import numpy as np


def hides_values(array: object) -> bool:
    """Whether it is a masked array with values that are masked."""
    return type(array) is not np.ndarray and "numpy.ma" in sys.modules and bool(np.ma.is_masked(array))
