"""Sorting networks: every size that is used, every input of zeros and ones, any strides."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rr_dataset.shard.order import network, sort_ids


@pytest.mark.parametrize("size", range(1, 17))
def test_a_network_sorts_whatever_it_is_given(size: int) -> None:
    """What sorts every sequence of zeros and ones sorts every sequence (the zero-one principle)."""
    cases = np.array(list(itertools.product((0, 1), repeat=size)), np.uint8)
    for low, high in network(size):
        assert low < high < size
        cases[:, [low, high]] = np.sort(cases[:, [low, high]], axis=1)
    assert (np.diff(cases.astype(np.int8), axis=1) >= 0).all()


@given(
    st.integers(1, 4),
    st.sampled_from([0, 1, 7, 16_384, 16_390]),
    st.integers(1, 20),
    st.sampled_from([np.uint8, np.uint16, np.uint32]),
    st.integers(0, 1000),
)
def test_ids_are_sorted_in_place(layers: int, tokens: int, top_k: int, dtype: type, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, (layers, tokens, top_k), dtype, endpoint=True)
    expected = np.sort(ids, axis=2)
    sort_ids(ids)
    assert np.array_equal(ids, expected)


def test_layers_that_lie_apart_and_what_stands_between_them() -> None:
    memory = np.arange(3 * 100, dtype=np.uint8)[::-1].copy()
    ids = np.ndarray((3, 12, 8), np.uint8, memory, 0, (100, 8, 1))
    expected = np.sort(ids, axis=2)
    between = memory.reshape(3, 100)[:, 96:].copy()
    sort_ids(ids)
    assert np.array_equal(ids, expected)
    assert np.array_equal(memory.reshape(3, 100)[:, 96:], between)
