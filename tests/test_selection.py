"""Layers and tokens as they are asked for, against sets of positions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rr_dataset import selection
from rr_dataset.errors import InvalidRoutingError
from rr_dataset.live import assemble
from rr_dataset.record import Range, RoutingSpec, Row

SPEC = RoutingSpec((3, 4, 7, 9), num_experts=8, top_k=2)


def part(stamp: int, start: int, stop: int, layers: tuple[int, ...], missing: tuple[Range, ...] = ()) -> Row:
    return Row(
        record_id=f"{stamp:016x}-{'a' * 16}",
        request_id="r",
        components=("r",),
        choice=None,
        t_submit=stamp,
        token_start=start,
        num_tokens=stop - start,
        part=True,
        status="partial",
        run_id="run",
        layers=layers,
        missing=missing,
    )


@st.composite
def ranges_within(draw: st.DrawFn, length: int) -> list[Range]:
    pairs = st.tuples(st.integers(0, length), st.integers(0, length))
    return [(min(pair), max(pair)) for pair in draw(st.lists(pairs, max_size=5))]


@given(st.integers(0, 20), st.none() | st.integers(-20, 20), st.none() | st.integers(-20, 20))
def test_a_slice_is_python_s_unless_out_of_range(length: int, start: int | None, stop: int | None) -> None:
    asked = slice(start, stop)
    inside = all(end is None or -length <= end <= length for end in (start, stop))
    if not inside:
        with pytest.raises(InvalidRoutingError, match=f"has {length} tokens"):
            selection.token_ranges(asked, length, "r")
        return
    got = selection.token_ranges(asked, length, "r")
    assert [p for a, b in got for p in range(a, b)] == list(range(length))[asked]


@given(st.data(), st.integers(0, 20))
def test_ranges_keep_their_order_and_lose_the_empty(data: st.DataObject, length: int) -> None:
    asked = data.draw(ranges_within(length))
    assert selection.token_ranges(asked, length, "r") == tuple(pair for pair in asked if pair[0] < pair[1])


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (slice(0, 10, 2), "step of 1"),
        (slice(0.5, 3), "whole numbers"),
        ([(0, 11)], "0 to 11 are not in 'r', which has 10 tokens"),
        ([(-1, 4)], "-1 to 4"),
        ([(5, 4)], "5 to 4"),
        ((2, 5), "list of"),
        (7, "list of"),
        ("all", "list of"),
    ],
)
def test_other_tokens_are_refused(tokens: Any, says: str) -> None:
    with pytest.raises(InvalidRoutingError, match=says):
        selection.token_ranges(tokens, 10, "r")


@pytest.mark.parametrize("tokens", [None, slice(1, 2), [(0, 1), (4, 5)], []])
def test_one_selection_serves_all_ids(tokens: Any) -> None:
    assert list(selection.tokens_per_id(tokens, 3)) == [tokens] * 3


def test_one_selection_per_id() -> None:
    each = [None, slice(1, 2), [(0, 1), (2, 3)]]
    assert selection.tokens_per_id(each, 3) == each
    assert selection.tokens_per_id([[], [(0, 1)]], 2) == [[], [(0, 1)]]
    with pytest.raises(InvalidRoutingError, match="3 selections for 2 ids"):
        selection.tokens_per_id(each, 2)
    with pytest.raises(InvalidRoutingError, match="one of these per id"):
        selection.tokens_per_id("all", 3)  # type: ignore[arg-type]  # what is tested


@given(st.data())
def test_missing_is_what_no_tile_has(data: st.DataObject) -> None:
    rows, held = [], {layer: set[int]() for layer in SPEC.moe_layers}
    length = 0
    for stamp in range(1, data.draw(st.integers(1, 4)) + 1):
        start = data.draw(st.integers(0, 10))
        stop = data.draw(st.integers(start + 1, 16))
        layers = tuple(sorted(data.draw(st.sets(st.sampled_from(SPEC.moe_layers), min_size=1))))
        hole = data.draw(st.integers(start, stop - 1))
        rows.append(part(stamp, start, stop, layers, ((hole, hole + 1),)))
        for layer in layers:
            held[layer] |= set(range(start, stop)) - {hole}
        length = max(length, stop)
    head = assemble(rows, SPEC)
    assert head is not None
    layers = tuple(sorted(data.draw(st.sets(st.sampled_from(SPEC.moe_layers), min_size=1))))
    ranges = data.draw(ranges_within(length))
    asked = {p for a, b in ranges for p in range(a, b)}
    expected = {layer: sorted(asked - held[layer]) for layer in layers if asked - held[layer]}
    got = selection.missing_by_layer(head, layers, ranges)
    assert {layer: [p for a, b in gaps for p in range(a, b)] for layer, gaps in got.items()} == expected


@given(st.data(), st.integers(0, 20))
def test_overlaps_place_each_piece_on_the_token_axis(data: st.DataObject, length: int) -> None:
    ranges = data.draw(ranges_within(length))
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    axis = [p for a, b in ranges for p in range(a, b)]
    got = {at + p - a: p for at, a, b in selection.TokenAxis(ranges).overlaps(start, stop) for p in range(a, b)}
    assert got == {i: p for i, p in enumerate(axis) if start <= p < stop}


def test_stretches() -> None:
    assert selection.stretches((3, 4, 7), (3, 4, 7)) == [(0, 3)]
    assert selection.stretches((3, 4, 7, 9), (9, 3, 4)) == [(0, 2), (3, 4)]
    assert selection.stretches((3, 4), (7,)) == []


def test_held_ranges_are_what_some_layer_has() -> None:
    rows = [part(1, 2, 5, (3, 4), missing=((3, 4),)), part(2, 3, 6, (7,)), part(3, 90, 92, (9,))]
    head = assemble(rows, SPEC)
    assert head is not None
    assert selection.held_ranges(head) == ((2, 6), (90, 92))
    assert selection.tokens_per_id(selection.Held.TOKENS, 2) == [selection.Held.TOKENS] * 2
