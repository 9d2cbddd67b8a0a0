from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import rows_of_one_id, specs

from rr_dataset import live
from rr_dataset.live import Turns, assemble, intersect_ranges, merge_ranges, subtract_ranges
from rr_dataset.record import RecordHead, RoutingSpec, Row

SPEC = RoutingSpec(moe_layers=(1, 2, 5), num_experts=8, top_k=2)
WORST_FIRST = ["dropped", "aborted", "preempted", "complete"]


def oracle(rows: list[Row], spec: RoutingSpec) -> dict[str, Any] | None:
    """The rules of live rows read literally, one (layer, position) at a time."""
    by_id: dict[str, Row] = {}
    for row in rows:
        by_id.setdefault(row.record_id, row)
    live: list[Row] = []
    for row in sorted(by_id.values(), key=lambda row: (row.t_submit, row.record_id)):
        carries_all = row.status == "dropped" or set(row.layers) == set(spec.moe_layers)
        if not row.part and carries_all:
            live = []  # a newer whole put: everything before it is dead
        live.append(row)
    if not live:
        return None

    def holds(row: Row, position: int) -> bool:
        inside = row.token_start <= position < row.token_start + row.num_tokens
        return row.status != "dropped" and inside and not any(a <= position < b for a, b in row.missing)

    end = max(row.token_start + row.num_tokens for row in live)
    owner: dict[tuple[int, int], str] = {}
    version: dict[int, str] = {}
    for position in range(end):
        for layer in spec.moe_layers:
            holders = [row for row in live if layer in row.layers and holds(row, position)]
            if holders:
                owner[layer, position] = holders[0].record_id
        first = next((row for row in live if row.layers and holds(row, position)), None)
        if first is not None:
            spanned = [v for a, b, v in first.weight_spans if a <= position < b]
            told = spanned[0] if spanned else first.weight_version
            if told is not None:
                version[position] = told

    last_told = {}
    for layer in spec.moe_layers:
        for row in live:
            furthest = last_told.get(layer)
            tells = row.status == "dropped" or layer in row.layers
            if tells and (
                furthest is None or row.token_start + row.num_tokens >= furthest.token_start + furthest.num_tokens
            ):
                last_told[layer] = row
    statuses = [last_told[layer].status if layer in last_told else "partial" for layer in spec.moe_layers]
    status = "partial" if "partial" in statuses else next(s for s in WORST_FIRST if s in statuses)
    givers = [row for row in live if row.status == status and any(row is told for told in last_told.values())]
    return {
        "status": status,
        "reason": givers[-1].reason if givers else None,
        "num_tokens": end,
        "missing": {p for p in range(end) if any((layer, p) not in owner for layer in spec.moe_layers)},
        "version": version,
        "owner": owner,
        "rows": [row.record_id for row in live],
        "tags": {name: text for row in live for name, text in row.tags.items()},
    }


def positions(ranges: Any) -> set[int]:
    return {p for start, stop, *_ in ranges for p in range(start, stop)}


def owners(head: RecordHead) -> dict[tuple[int, int], str]:
    """Who has what by the tiles, which must be disjoint."""
    owner: dict[tuple[int, int], str] = {}
    for tile in head.tiles:
        for layer in tile.layers:
            for position in range(tile.start, tile.stop):
                assert (layer, position) not in owner, "tiles overlap"
                owner[layer, position] = tile.row.record_id
    return owner


def coarsest_tiles(owner: dict[tuple[int, int], str], spec: RoutingSpec) -> list[tuple[int, int, tuple[int, ...], str]]:
    """Per layer the longest runs of one row, then layers with the same run of the same row together."""
    layers_of = defaultdict(list)
    for layer in spec.moe_layers:
        mine = sorted(p for one, p in owner if one == layer)
        start = 0
        for i, position in enumerate(mine):
            here = owner[layer, position]
            if i and (mine[i - 1] != position - 1 or owner[layer, position - 1] != here):
                start = i
            if i + 1 == len(mine) or mine[i + 1] != position + 1 or owner[layer, position + 1] != here:
                layers_of[mine[start], position + 1, here].append(layer)
    return [(start, stop, tuple(layers), who) for (start, stop, who), layers in layers_of.items()]


def check(rows: list[Row], spec: RoutingSpec) -> None:
    head, expected = assemble(rows, spec), oracle(rows, spec)
    if expected is None:
        assert head is None
        return
    assert head is not None
    assert (head.status, head.reason, head.num_tokens) == (
        expected["status"],
        expected["reason"],
        expected["num_tokens"],
    )
    assert positions(head.missing) == expected["missing"]
    assert {p: v for a, b, v in head.weights for p in range(a, b)} == expected["version"]
    assert owners(head) == expected["owner"]
    assert [row.record_id for row in head.rows] == expected["rows"]
    assert head.tags == expected["tags"]
    assert head.record_id == expected["rows"][-1]
    assert head.final == (expected["status"] != "partial")
    # And in the one form that is promised.
    tiles = [(tile.start, tile.stop, tile.layers, tile.row.record_id) for tile in head.tiles]
    assert tiles == sorted(tiles, key=lambda tile: (tile[0], tile[2][0]))
    assert sorted(tiles) == sorted(coarsest_tiles(expected["owner"], spec))
    assert all(a[1] < b[0] for a, b in pairwise(head.missing))
    for a, b in pairwise(head.weights):
        assert a[1] < b[0] or (a[1] == b[0] and a[2] != b[2])


@given(st.data())
def test_any_rows_of_one_id_make_the_record_that_the_rules_say(data: st.DataObject) -> None:
    spec = data.draw(specs(max_layers=5))
    check(data.draw(rows_of_one_id(spec)), spec)


@given(st.data())
def test_of_any_spec(data: st.DataObject) -> None:
    spec = data.draw(specs())
    check(data.draw(rows_of_one_id(spec, max_rows=4, max_tokens=5)), spec)


@given(st.data())
def test_the_order_in_which_rows_arrive_changes_nothing(data: st.DataObject) -> None:
    rows = data.draw(rows_of_one_id(SPEC))
    assert assemble(rows, SPEC) == assemble(data.draw(st.permutations(rows)), SPEC)


def put(t: int, start: int, stop: int, **changes: Any) -> Row:
    row = Row(
        record_id=f"{t:016x}-{1:016x}",
        request_id="math:1",
        components=("math", "1"),
        choice=None,
        t_submit=t,
        token_start=start,
        num_tokens=stop - start,
        part=False,
        status="complete",
        run_id=f"run-{t}",
        layers=SPEC.moe_layers,
    )
    return replace(row, **changes)


def part(t: int, start: int, stop: int, **changes: Any) -> Row:
    return put(t, start, stop, **{"part": True, "status": "partial", **changes})


def drop(t: int, start: int, stop: int, **changes: Any) -> Row:
    return put(t, start, stop, **{"status": "dropped", "reason": "spool full", "layers": (), **changes})


def shown(*rows: Row) -> tuple[str, int, tuple[Any, ...], list[tuple[int, int, int, tuple[int, ...]]]]:
    """Status, length, missing, and (t of the row, start, stop, layers) of each tile."""
    check(list(rows), SPEC)
    head = assemble(rows, SPEC)
    assert head is not None
    tiles = [(tile.row.t_submit, tile.start, tile.stop, tile.layers) for tile in head.tiles]
    return head.status, head.num_tokens, head.missing, tiles


ALL = SPEC.moe_layers


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"part": True},
        {"status": "dropped"},
        {"status": "aborted", "reason": "cancelled"},
        {"layers": (1, 5)},
        {"token_start": 2},
        {"num_tokens": 0},
        {"missing": ((3, 4),)},
        {"weight_version": "v1"},
        {"weight_version": "v1", "weight_spans": ((2, 5, "v2"),)},
    ],
)
def test_the_short_way_for_a_single_row_leads_to_the_same_record(changes: dict[str, Any]) -> None:
    row = put(1, 0, 9, **changes)
    check([row], SPEC)
    assert assemble([row], SPEC) == assemble([row, row], SPEC)


def test_no_rows_make_no_record() -> None:
    assert assemble([], SPEC) is None


def test_a_whole_put_is_the_record() -> None:
    head = assemble([put(1, 0, 9, weight_version="v1", tags={"a": "b"}, reason="eos")], SPEC)
    assert head is not None
    assert (head.status, head.final, head.reason, head.run_id, head.tags) == (
        "complete",
        True,
        "eos",
        "run-1",
        {"a": "b"},
    )
    assert (head.missing, head.weights) == ((), ((0, 9, "v1"),))


def test_a_whole_put_without_tokens_is_a_complete_record() -> None:
    assert shown(put(1, 0, 0)) == ("complete", 0, (), [])


def test_the_newest_whole_put_hides_all_before_it() -> None:
    assert shown(put(1, 0, 9), part(2, 9, 12), put(3, 0, 4)) == ("complete", 4, (), [(3, 0, 4, ALL)])


def test_a_whole_put_hides_nothing_that_came_after() -> None:
    assert shown(part(2, 4, 6), put(1, 0, 4)) == ("partial", 6, (), [(1, 0, 4, ALL), (2, 4, 6, ALL)])


def test_equal_stamps_are_ordered_by_record_id() -> None:
    first, second = put(1, 0, 3), put(1, 0, 5, record_id=f"{1:016x}-{2:016x}")
    assert shown(second, first)[1] == 5


def test_where_parts_overlap_the_first_submitted_wins() -> None:
    assert shown(part(1, 0, 6), part(2, 4, 9)) == ("partial", 9, (), [(1, 0, 6, ALL), (2, 6, 9, ALL)])


def test_a_later_part_that_begins_earlier_does_not_take_tokens() -> None:
    assert shown(part(1, 4, 6), part(2, 0, 9))[3] == [(2, 0, 4, ALL), (1, 4, 6, ALL), (2, 6, 9, ALL)]


def test_a_later_part_fills_what_an_earlier_says_is_missing() -> None:
    rows = [put(1, 0, 9, missing=((2, 4), (6, 7))), part(2, 3, 8)]
    assert shown(*rows)[2:] == (
        ((2, 3),),
        [(1, 0, 2, ALL), (2, 3, 4, ALL), (1, 4, 6, ALL), (2, 6, 7, ALL), (1, 7, 9, ALL)],
    )


def test_tokens_before_the_first_part_are_missing() -> None:
    assert shown(part(1, 3, 5))[1:3] == (5, ((0, 3),))


def test_a_record_is_final_when_its_last_part_says_so() -> None:
    parts = [part(1, 0, 4), part(2, 4, 8)]
    assert shown(*parts)[0] == "partial"
    assert shown(*parts, part(3, 8, 9, status="complete"))[0] == "complete"
    assert shown(*parts, part(3, 8, 8, status="aborted"))[0] == "aborted"  # without a token of its own


def test_the_part_that_ends_furthest_gives_the_status() -> None:
    assert shown(part(1, 4, 8, status="complete"), part(2, 0, 4))[0] == "complete"
    assert shown(put(1, 0, 9), part(2, 3, 9))[0] == "partial"


def test_layers_from_pipeline_stages_make_one_record() -> None:
    stage_0 = part(1, 0, 4, layers=(1, 2), status="complete")
    stage_1 = part(2, 0, 4, layers=(5,), status="complete")
    assert shown(stage_0) == ("partial", 4, ((0, 4),), [(1, 0, 4, (1, 2))])
    assert shown(stage_0, stage_1) == ("complete", 4, (), [(1, 0, 4, (1, 2)), (2, 0, 4, (5,))])


def test_a_put_of_some_layers_is_a_part_whatever_it_says() -> None:
    assert shown(put(1, 0, 4), put(2, 0, 6, layers=(1,)))[2:] == (((4, 6),), [(1, 0, 4, ALL), (2, 4, 6, (1,))])


def test_layers_of_one_row_with_one_run_are_one_tile() -> None:
    rows = [part(1, 0, 4, layers=(2,)), part(2, 0, 2, layers=(5,)), part(3, 0, 6)]
    assert shown(*rows)[3] == [
        (3, 0, 6, (1,)),
        (1, 0, 4, (2,)),
        (2, 0, 2, (5,)),
        (3, 2, 6, (5,)),
        (3, 4, 6, (2,)),
    ]
    again = [part(1, 0, 4, layers=(2,)), part(2, 0, 4, layers=(5,)), part(3, 0, 6)]
    assert shown(*again)[3][-1] == (3, 4, 6, (2, 5))


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("complete", "aborted", "preempted"), "aborted"),
        (("complete", "complete", "preempted"), "preempted"),
        (("partial", "aborted", "complete"), "partial"),
        (("complete", "complete", "complete"), "complete"),
    ],
)
def test_the_record_is_as_good_as_its_worst_layer(statuses: tuple[str, ...], expected: str) -> None:
    rows = [part(i, 0, 4, layers=(ALL[i],), status=s, reason=f"{s} {i}") for i, s in enumerate(statuses)]
    assert shown(*rows)[0] == expected
    head = assemble(rows, SPEC)
    assert head is not None
    assert head.reason == f"{expected} {max(i for i, s in enumerate(statuses) if s == expected)}"


def test_a_dropped_whole_put_hides_the_older_record() -> None:
    assert shown(put(1, 0, 9), drop(2, 0, 5)) == ("dropped", 5, ((0, 5),), [])
    head = assemble([drop(2, 0, 5)], SPEC)
    assert head is not None
    assert (head.reason, head.final) == ("spool full", True)


def test_a_dropped_part_covers_nothing_and_is_told() -> None:
    rows = [part(1, 0, 4), drop(2, 4, 8, part=True)]
    assert shown(*rows) == ("dropped", 8, ((4, 8),), [(1, 0, 4, ALL)])
    assert shown(*rows, part(3, 8, 9, status="complete"))[:3] == ("complete", 9, ((4, 8),))
    assert shown(*rows, part(3, 4, 9))[2:] == ((), [(1, 0, 4, ALL), (3, 4, 9, ALL)])


def test_a_dropped_part_counts_for_layers_that_no_row_carries() -> None:
    assert shown(part(1, 0, 4, layers=(1,), status="complete"), drop(2, 0, 4, part=True))[0] == "dropped"


def test_a_row_given_twice_is_one_row() -> None:
    first = part(1, 0, 4)
    head = assemble([first, part(2, 4, 6), replace(first)], SPEC)
    assert head is not None
    assert len(head.rows) == 2
    assert head.tiles[0].row is first


def test_weights_are_those_of_the_row_that_has_the_token_first() -> None:
    rows = [
        part(1, 0, 4, weight_version="v1", missing=((1, 2),)),
        part(2, 0, 8, weight_version="v3", weight_spans=((4, 6, "v2"),)),
    ]
    head = assemble(rows, SPEC)
    assert head is not None
    assert head.weights == ((0, 1, "v1"), (1, 2, "v3"), (2, 4, "v1"), (4, 6, "v2"), (6, 8, "v3"))


def test_weights_that_no_row_tells_are_left_out_and_equal_ones_are_joined() -> None:
    head = assemble([part(1, 0, 2, weight_version="v1"), part(2, 2, 4, weight_version="v1"), part(3, 4, 6)], SPEC)
    assert head is not None
    assert head.weights == ((0, 4, "v1"),)


def test_the_newest_row_gives_run_and_tags() -> None:
    head = assemble([part(1, 0, 2, tags={"a": "old", "b": "old"}), part(2, 2, 4, tags={"b": "new"})], SPEC)
    assert head is not None
    assert (head.run_id, head.tags) == ("run-2", {"a": "old", "b": "new"})


anything = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)))


@given(anything)
@example([(5, 9), (0, 5)])
def test_merged_ranges_are_sorted_disjoint_and_apart(ranges: list[tuple[int, int]]) -> None:
    merged = merge_ranges(ranges)
    assert positions(merged) == positions(ranges)
    assert all(start < stop for start, stop in merged)
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(anything, anything)
def test_ranges_subtract_and_intersect_as_sets_do(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    a, b = merge_ranges(left), merge_ranges(right)
    for result, expected in (
        (subtract_ranges(a, b), positions(a) - positions(b)),
        (intersect_ranges(a, b), positions(a) & positions(b)),
    ):
        assert result == merge_ranges(result)
        assert positions(result) == expected


# Turns

TURN_ROWS = st.lists(
    st.tuples(
        st.sampled_from([None, 0, 1, 2, 10]),  # turn
        st.sampled_from(["a", "b"]),  # the component before it
        st.sampled_from([None, "0"]),  # the one after it
        st.sampled_from([None, 1]),  # sample
        st.sampled_from(["r", "s"]),  # run
        st.integers(1, 4),  # stamp
        st.sampled_from(["complete", "partial", "dropped"]),
    ),
    max_size=8,
)


@given(TURN_ROWS)
@example([(9, "a", None, None, "r", 1, "complete"), (10, "a", None, None, "r", 2, "complete")])  # numbers, no texts
@example([(0, "a", None, None, "r", 2, "complete"), (1, "a", None, None, "r", 1, "complete")])  # put out of order
@example([(0, "a", None, None, "r", 1, "complete"), (1, "a", None, None, "r", 1, "complete")])  # in one moment
def test_a_turn_hides_lower_ones_put_before_it(drawn: list[tuple[Any, ...]]) -> None:
    rows = [
        Row(
            f"{stamp:016x}-{number:016x}",
            f"{before}:{turn}:{after}#{choice}",
            (before, None if turn is None else str(turn), after),
            choice,
            stamp,
            0,
            3,
            part=False,
            status=status,
            run_id=run,
        )
        for number, (turn, before, after, choice, run, stamp, status) in enumerate(drawn)
    ]
    turns = Turns(rows, 1)
    for number, (turn, before, after, choice, run, stamp, _) in enumerate(drawn):
        hidden = any(
            (before, after, choice, run) == (before2, after2, choice2, run2)
            and None not in (turn, turn2)
            and turn2 > turn
            and (stamp2, number2) > (stamp, number)
            and status2 != "dropped"
            for number2, (turn2, before2, after2, choice2, run2, stamp2, status2) in enumerate(drawn)
        )
        assert turns.hides(rows[number]) == hidden


@given(st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4), max_size=8))
def test_claim_is_what_a_set_gains(rounds: list[list[tuple[int, int]]]) -> None:
    covered: list[tuple[int, int]] = []
    seen: set[int] = set()
    for ranges in rounds:
        gained = live.claim(covered, ranges)
        asked = [p for start, stop in ranges for p in range(start, stop)]
        assert [p for start, stop in gained for p in range(start, stop)] == list(dict.fromkeys(_unseen(asked, seen)))
        seen.update(asked)
        assert tuple(covered) == merge_ranges((p, p + 1) for p in seen)


def _row(stamp: int, start: int, tokens: int, **how: Any) -> Row:
    return Row(
        record_id=f"{stamp:016x}-{'a' * 16}",
        request_id="r",
        components=("r",),
        choice=None,
        t_submit=stamp,
        token_start=start,
        num_tokens=tokens,
        part=True,
        status="complete",
        run_id="run",
        layers=SPEC.moe_layers,
        **how,
    )


def _unseen(positions: list[int], seen: set[int]) -> list[int]:
    return [p for p in positions if p not in seen]


def test_many_parts_and_gaps_are_not_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is counted, not timed: ranges that are looked at, of 1,500 parts and spans that come in the worst order."""
    count, looked = 1500, [0]
    subtract, merge = live.subtract_ranges, live.merge_ranges

    def subtract_counted(ranges: Any, holes: Any) -> Any:
        looked[0] += len(ranges) + len(holes)
        return subtract(ranges, holes)

    def merge_counted(ranges: Any) -> Any:
        given = list(ranges)
        looked[0] += len(given)
        return merge(given)

    monkeypatch.setattr(live, "subtract_ranges", subtract_counted)
    monkeypatch.setattr(live, "merge_ranges", merge_counted)
    order = [*range(0, count, 2), *range(1, count, 2)]
    parts = [_row(stamp, 3 * i, 3, weight_version=str(i)) for stamp, i in enumerate(order, start=1)]
    head = assemble(parts, SPEC)
    assert head is not None
    assert (head.num_tokens, head.missing, len(head.tiles), len(head.weights)) == (3 * count, (), count, count)
    spans = tuple((i, i + 1, str(i)) for i in range(2 * count))
    gaps = tuple((2 * i, 2 * i + 1) for i in range(count))
    head = assemble([_row(1, 0, 2 * count, missing=gaps, weight_spans=spans)], SPEC)
    assert head is not None
    assert (head.missing, len(head.weights)) == (gaps, count)
    assert looked[0] < 60 * count
