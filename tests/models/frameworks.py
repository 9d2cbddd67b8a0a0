"""Frameworks for the tests of this folder, and bf16 for those that cannot multiply it on a CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

QUIET = [
    # Told from within the frameworks, of code that nothing here can change.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def framework(name: str) -> Any:
    """The module, or a skip. Whatever it warns of while it is imported concerns others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, exc_type=ImportError)
