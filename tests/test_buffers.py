"""Arrays whose elements share bytes, against numpy's own answer on addresses counted one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rr_dataset.buffers import overlapping, overlaps_itself

SIZE = 48
axes = st.lists(st.tuples(st.integers(0, 4), st.integers(-6, 6)), min_size=1, max_size=3)


def view(shape: list[tuple[int, int]], first: int = SIZE // 2, dtype: str = "u2") -> np.ndarray[Any, Any]:
    """An array of these (count, stride in elements), whose first element stands in the middle of a buffer."""
    buffer = np.zeros(2 * SIZE, dtype)[first:]
    counts, strides = zip(*shape, strict=True)
    return np.lib.stride_tricks.as_strided(buffer, counts, tuple(each * buffer.itemsize for each in strides))


@given(axes)
def test_an_array_that_overlaps_itself_is_never_taken_for_one_that_does_not(shape: list[tuple[int, int]]) -> None:
    places = [
        sum(at * stride for at, (_, stride) in zip(index, shape, strict=True))
        for index in np.ndindex(*[n for n, _ in shape])
    ]
    if len(set(places)) < len(places):
        assert overlaps_itself(view(shape))


@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.sampled_from([1, 2, -1])] * 3))
def test_what_slices_and_transpositions_make_does_not(order: list[int], shape: Any, steps: Any) -> None:
    array = np.zeros((6, 6, 6), "u2")[tuple(slice(None, None, step) for step in steps)]
    assert not overlaps_itself(array[tuple(slice(0, count) for count in shape)].transpose(order))


def test_empty_ones_overlap_nothing() -> None:
    assert not overlaps_itself(np.broadcast_to(np.zeros(1), (0, 5)))
    assert overlapping({1: np.zeros(0), 2: np.zeros(0)}) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 3]), st.integers(1, 4)), min_size=2, max_size=5))
def test_two_that_share_an_element_are_named(cuts: list[tuple[int, int, int]]) -> None:
    buffer = np.zeros(64, "u2")
    arrays = {name: buffer[first : first + step * count : step] for name, (first, step, count) in enumerate(cuts)}
    places = [set(range(first, first + step * count, step)) for first, step, count in cuts]
    sharing = {(a, b) for a in range(len(cuts)) for b in range(len(cuts)) if a != b and places[a] & places[b]}
    found = overlapping(arrays)
    assert found in sharing if sharing else found is None


def test_the_layers_of_one_block_do_not_overlap_in_any_order() -> None:
    block = np.zeros((20, 6, 4), "u1")
    assert overlapping({layer: block[:, layer] for layer in range(6)}) is None
    assert overlapping({layer: block[:, layer][::-1] for layer in range(6)}) is None


@pytest.mark.parametrize("shape", [[(3, 0)], [(3, 1), (2, 2)], [(2, -1), (3, 1)]])
def test_shared_elements_are_seen(shape: list[tuple[int, int]]) -> None:
    assert overlaps_itself(view(shape))
