"""Which rows, layers and tokens are live. Pure: the worker, the reader, the compaction and `verify` share it.

Of one request id:

1. Rows are ordered by `(t_submit, record_id)`; rows with one `record_id` are one row.
2. Everything before the newest whole put is dead. A put with `part`, or with only some of the layers, is a part.
3. Per layer and token, the first live row that has the token wins. A row has the tokens of its range less its
   `missing`, in its `layers`; a dropped row has none.
4. Per layer, the status is that of the live row that ends furthest, of equals the latest; a dropped row counts for every
   layer. The record is partial while any layer is (also one that no row has told of), else it is the worst of them.

With `keep="last_turn"` a row is also hidden by a later one of a higher turn of its conversation: see `Turns`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter

from rr_dataset.record import STATUSES, Range, RecordHead, RoutingSpec, Row, Span, Tile

_ORDER = attrgetter("t_submit", "record_id")
_START, _STOP = itemgetter(0), itemgetter(1)


def merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same positions as sorted, disjoint ranges that do not touch, none empty."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def subtract_ranges(ranges: Sequence[Range], holes: Sequence[Range]) -> tuple[Range, ...]:
    """The positions of `ranges` outside `holes`; both sorted and disjoint, as `merge_ranges` returns them."""
    left: list[Range] = []
    first = 0
    for start, stop in ranges:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at, reached = first, start
        while reached < stop and at < len(holes) and holes[at][0] < stop:
            if reached < holes[at][0]:
                left.append((reached, holes[at][0]))
            reached = holes[at][1]
            at += 1
        if reached < stop:
            left.append((reached, stop))
    return tuple(left)


def intersect_ranges(ranges: Sequence[Range], others: Sequence[Range]) -> tuple[Range, ...]:
    """The positions in both; both sorted and disjoint, as `merge_ranges` returns them."""
    return subtract_ranges(ranges, subtract_ranges(ranges, others))


def claim(covered: list[Range], ranges: Iterable[Range]) -> list[Range]:
    """The positions of `ranges` that `covered` lacks, which are added to it. Costs little more than the neighbours do.

    covered: as `merge_ranges` returns it, and stays so.
    """
    gained: list[Range] = []
    for start, stop in ranges:
        if start >= stop:
            continue
        first = bisect_left(covered, start, key=_STOP)
        end = bisect_right(covered, stop, key=_START)
        near = covered[first:end]  # also those that only touch
        gained += subtract_ranges(((start, stop),), near)
        if near:
            start, stop = min(start, near[0][0]), max(stop, near[-1][1])  # noqa: PLW2901 -- as it will be kept
        covered[first:end] = [(start, stop)]
    return gained


def _within(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """The positions of `ranges`, sorted and disjoint, from `start` to `stop`."""
    near = ranges[bisect_right(ranges, start, key=_STOP) : bisect_left(ranges, stop, key=_START)]
    return tuple((max(a, start), min(b, stop)) for a, b in near)


class Turns:
    """What rows of one partition hide with `keep="last_turn"`: rows of lower turns that were submitted before them.

    Only within one conversation (all components but the turn), one sample and one run. Rows without a turn neither hide nor
    are hidden; drop rows hide none. A delete mark on a hiding row covers all that it hides, so deleted ones may be among them.
    """

    def __init__(self, rows: Iterable[Row], turn: int) -> None:
        """turn: the position of the turn among the components."""
        self._turn = turn
        self._rows: dict[tuple[object, ...], list[tuple[int, int, str]]] = {}
        for row in rows:
            number = row.components[turn]
            if number is not None and row.status != "dropped":
                self._rows.setdefault(self._conversation(row), []).append((int(number), *_ORDER(row)))

    def hides(self, row: Row) -> bool:
        """Whether the row is of a turn that was left behind."""
        number = row.components[self._turn]
        if number is None:
            return False
        turn, order = int(number), _ORDER(row)
        later = self._rows.get(self._conversation(row), ())
        return any(other > turn and (stamp, record_id) > order for other, stamp, record_id in later)

    def _conversation(self, row: Row) -> tuple[object, ...]:
        return row.run_id, row.choice, row.components[: self._turn], row.components[self._turn + 1 :]


def superseded(rows: Iterable[Row], spec: RoutingSpec, turn: int | None) -> frozenset[str]:
    """Record ids of the rows that may be forgotten, since others among these, of the same run, replace or hide them for good.

    rows: none twice, of any request ids of one partition, none under a delete mark. turn: `DatasetFormat.last_turn`.
    """
    given = tuple(rows)
    dead: set[str] = set()
    newest: dict[tuple[str, str], tuple[int, str]] = {}
    for row in given:
        # A drop row hides no lower turns, so what it replaces must stay where that hid some.
        if _is_whole(row, spec) and not (turn is not None and row.status == "dropped"):
            key = (row.request_id, row.run_id)
            newest[key] = max(newest.get(key, (0, "")), _ORDER(row))
    for row in given:
        if _ORDER(row) < newest.get((row.request_id, row.run_id), (0, "")):
            dead.add(row.record_id)
    if turn is not None:
        turns = Turns(given, turn)
        dead.update(row.record_id for row in given if turns.hides(row))
    return frozenset(dead)


class _Group:
    """Layers that the same rows have told of so far, so that they share coverage and status."""

    __slots__ = ("covered", "last", "layers")

    def __init__(self, layers: tuple[int, ...], covered: Iterable[Range] = (), last: Row | None = None) -> None:
        self.layers = layers
        self.covered = list(covered)
        self.last = last


def assemble(rows: Iterable[Row], spec: RoutingSpec) -> RecordHead | None:
    """The record that the rows of one request id make together, or None without rows.

    rows: in any order, duplicates allowed (of rows with one `record_id` the first given stands in the tiles).

    Tiles are ordered by (start, first layer). A tile is one run of tokens of one row; its layers are all those in which
    exactly this run is the row's. `weights` tells, per token, the version of the oldest row that has it in any layer.
    """
    given = tuple(rows)
    if len(given) == 1 and _is_plain(given[0], spec):
        return _assemble_plain(given[0])
    live = _live_rows(given, spec)
    if not live:
        return None
    groups, owned = _cover(live, spec)
    num_tokens = max(row.token_stop for row in live)
    status, reason = _status(groups)
    whole = ((0, num_tokens),)
    newest = live[-1]
    tags: dict[str, str] = {}
    for row in live:
        tags.update(row.tags)
    return RecordHead(
        request_id=newest.request_id,
        components=newest.components,
        choice=newest.choice,
        status=status,
        reason=reason,
        num_tokens=num_tokens,
        missing=merge_ranges(hole for group in groups for hole in subtract_ranges(whole, group.covered)),
        weights=_weights(live),
        run_id=newest.run_id,
        tags=tags,
        rows=live,
        tiles=_tiles(owned),
    )


def _is_plain(row: Row, spec: RoutingSpec) -> bool:
    return (
        row.layers == spec.moe_layers
        and row.status != "dropped"
        and row.token_start == 0
        and row.num_tokens > 0
        and not row.missing
        and not row.weight_spans
    )


def _assemble_plain(row: Row) -> RecordHead:
    """What `assemble` returns for a single row with all layers and tokens, several times cheaper: most records are one."""
    stop = row.num_tokens
    version = row.weight_version
    return RecordHead(
        row.request_id,
        row.components,
        row.choice,
        row.status,
        row.reason,
        stop,
        (),
        () if version is None else ((0, stop, version),),
        row.run_id,
        row.tags,
        (row,),
        (Tile(row, row.layers, 0, stop),),
    )


def _is_whole(row: Row, spec: RoutingSpec) -> bool:
    return not row.part and (row.status == "dropped" or row.layers == spec.moe_layers)


def _live_rows(rows: tuple[Row, ...], spec: RoutingSpec) -> tuple[Row, ...]:
    by_id: dict[str, Row] = {}
    for row in rows:
        by_id.setdefault(row.record_id, row)
    ordered = sorted(by_id.values(), key=_ORDER)
    first = max((i for i, row in enumerate(ordered) if _is_whole(row, spec)), default=0)
    return tuple(ordered[first:])


def _held(row: Row) -> tuple[Range, ...]:
    """The positions that the row has, in each of its layers."""
    if row.status == "dropped":
        return ()
    span = ((row.token_start, row.token_stop),)
    return subtract_ranges(span, merge_ranges(row.missing)) if row.missing else span


def _cover(live: Sequence[Row], spec: RoutingSpec) -> tuple[list[_Group], list[tuple[Row, Range, tuple[int, ...]]]]:
    """The groups of layers at the end, and which (row, run of tokens) won in which layers."""
    groups = [_Group(spec.moe_layers)]
    owned: list[tuple[Row, Range, tuple[int, ...]]] = []
    for row in live:
        held = _held(row)
        touched = groups if row.status == "dropped" else _split(groups, row.layers)
        for group in touched:
            if group.last is None or row.token_stop >= group.last.token_stop:
                group.last = row
            owned.extend((row, run, group.layers) for run in claim(group.covered, held))
    return groups, owned


def _split(groups: list[_Group], layers: tuple[int, ...]) -> list[_Group]:
    """The groups within `layers`; those that reach beyond are cut in two, in place."""
    chosen = frozenset(layers)
    inside: list[_Group] = []
    for group in tuple(groups):
        outer = tuple(layer for layer in group.layers if layer not in chosen)
        if len(outer) == len(group.layers):
            continue
        if outer:
            groups.append(_Group(outer, group.covered, group.last))
            group.layers = tuple(layer for layer in group.layers if layer in chosen)
        inside.append(group)
    return inside


def _status(groups: Sequence[_Group]) -> tuple[str, str | None]:
    """Status of the record, and the reason of the newest row that gave it."""
    told = [group.last for group in groups if group.last is not None]
    statuses = {row.status for row in told}
    partial = "partial" in statuses or len(told) < len(groups)
    status = "partial" if partial else max(statuses, key=STATUSES.index)
    givers = [row for row in told if row.status == status]
    return status, max(givers, key=_ORDER).reason if givers else None


def _weights(live: Sequence[Row]) -> tuple[Span, ...]:
    covered: list[Range] = []
    spans: list[Span] = []
    for row in live:
        left = claim(covered, _held(row))
        told: list[Range] = []
        for start, stop, version in row.weight_spans:
            for first, last in claim(told, [(start, stop)]):
                spans.extend((a, b, version) for a, b in _within(left, first, last))
        if row.weight_version is not None:
            spans.extend((start, stop, row.weight_version) for start, stop in subtract_ranges(left, told))
    joined: list[Span] = []
    for start, stop, version in sorted(spans):
        if joined and joined[-1][1:] == (start, version):
            joined[-1] = (joined[-1][0], stop, version)
        else:
            joined.append((start, stop, version))
    return tuple(joined)


def _tiles(owned: Iterable[tuple[Row, Range, tuple[int, ...]]]) -> tuple[Tile, ...]:
    """One tile per (row, run), over the layers of every group in which the row won exactly this run."""
    runs: dict[tuple[str, Range], tuple[Row, list[int]]] = {}
    for row, run, layers in owned:
        runs.setdefault((row.record_id, run), (row, []))[1].extend(layers)
    tiles = [Tile(row, tuple(sorted(layers)), start, stop) for (_, (start, stop)), (row, layers) in runs.items()]
    return tuple(sorted(tiles, key=lambda tile: (tile.start, tile.layers[0])))
