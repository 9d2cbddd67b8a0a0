"""Rows of three layers with top-2 in a small slot table."""

from __future__ import annotations

import numpy as np

from rr_dataset.capture import SlotTable

BLOCK = 4
BLOCKS = 8


def rows(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (tokens, 3, 2)).astype(np.uint8)


def slots(blocks: list[int], start: int, stop: int) -> np.ndarray:
    """Where positions of a request with these blocks lie."""
    positions = np.arange(start, stop)
    return np.array(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK


def write(table: SlotTable, blocks: list[int], start: int, given: np.ndarray) -> None:
    at = slots(blocks, start, start + len(given))
    table.scatter(at, given, table.marks(at))
