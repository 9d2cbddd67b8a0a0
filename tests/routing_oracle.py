"""What a reader must see, worked out from puts and deletes token by token. It shares no code with the product.

A put is there once the object of its slab's partition is; a delete once its file of delete marks is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

LAYERS = (1, 4)
TOP_K = 2
WORST_LAST = ("complete", "partial", "preempted", "aborted", "dropped")
NAMES = ("data_id", "gen_id", "turn_id", "segment_id")
TURN = 2

Parts = tuple[str | None, ...]
Matches = Callable[[Parts, str | None], bool]  # of components and sample


def split(request_id: str) -> tuple[Parts, str | None]:
    base, _, choice = request_id.partition("#")
    parts: list[str | None] = [*base.split(":")]
    return (*parts, *[None] * (4 - len(parts))), choice or None


def directory(request_id: str, depth: int) -> str:
    parts, _ = split(request_id)
    values = [part or "__HIVE_DEFAULT_PARTITION__" for part in parts[:depth]]
    return "/".join(f"{name}={value}" for name, value in zip(NAMES, values, strict=False))


@dataclass(frozen=True)
class Put:
    stamp: int
    record_id: str
    request_id: str
    run: str
    start: int
    tokens: int
    part: bool
    status: str
    layers: tuple[int, ...]
    missing: tuple[int, ...]  # positions
    value: int  # of every expert id
    put_at: int  # number of the event


class Unit(NamedTuple):
    """What becomes visible at once: the puts of one slab in one directory."""

    writer: str
    seq: int
    directory: str


@dataclass(frozen=True)
class Delete:
    what: str
    matches: Matches
    run: str | None
    t_del: int
    whole: frozenset[str] = frozenset()  # directories of which it deletes everything; "*": all
    after: int = -1  # puts with an earlier number are covered if they match ...
    until: int = 1 << 62  # ... and those with a later one are not

    def covers(self, put: Put) -> bool:
        return (
            put.stamp <= self.t_del
            and (self.run is None or self.run == put.run)
            and self.matches(*split(put.request_id))
        )


class Seen(NamedTuple):
    """A record as a reader tells it."""

    status: str
    tokens: int
    rows: tuple[str, ...]
    experts: tuple[tuple[int | None, ...], ...]  # [layer][token]; None: not there


@dataclass
class State:
    """What is visible at one moment."""

    units: dict[Unit, list[Put]] = field(default_factory=dict)
    deletes: dict[int, list[Delete]] = field(default_factory=dict)  # by file

    def copy(self) -> State:
        return State(dict(self.units), dict(self.deletes))

    def within(self, where: str) -> State:
        return State({unit: puts for unit, puts in self.units.items() if unit.directory == where}, self.deletes)


def records(state: State, *, run: str | None, last_turn: bool) -> dict[str, Seen]:
    deletes = [each for file in state.deletes.values() for each in file]
    everything = [put for puts in state.units.values() for put in puts]
    alive = [put for put in everything if not any(each.covers(put) for each in deletes)]
    if run is not None:
        alive = [put for put in alive if put.run == run]
    if last_turn:
        alive = [put for put in alive if not any(hides(other, put) for other in everything)]
    by_id: dict[str, list[Put]] = {}
    for put in sorted(alive, key=lambda put: (put.stamp, put.record_id)):
        by_id.setdefault(put.request_id, []).append(put)
    return {request_id: assemble(puts) for request_id, puts in by_id.items()}


def hides(other: Put, put: Put) -> bool:
    """With keep="last_turn"."""
    (mine, choice), (theirs, their_choice) = split(put.request_id), split(other.request_id)
    if mine[TURN] is None or theirs[TURN] is None or other.status == "dropped":
        return False
    same = (choice, put.run, mine[:TURN], mine[3]) == (their_choice, other.run, theirs[:TURN], theirs[3])
    return same and int(theirs[TURN]) > int(mine[TURN]) and (other.stamp, other.record_id) > (put.stamp, put.record_id)


def assemble(puts: list[Put]) -> Seen:
    whole = [i for i, put in enumerate(puts) if not put.part and (put.status == "dropped" or put.layers == LAYERS)]
    live = puts[whole[-1] if whole else 0 :]
    end = max(put.start + put.tokens for put in live)
    experts: list[list[int | None]] = [[None] * end for _ in LAYERS]
    statuses = []
    for i, layer in enumerate(LAYERS):
        furthest, status = -1, "partial"
        for put in live:
            if put.status != "dropped" and layer not in put.layers:
                continue
            if put.start + put.tokens >= furthest:
                furthest, status = put.start + put.tokens, put.status
            for token in range(put.start, put.start + put.tokens):
                if put.status != "dropped" and token not in put.missing and experts[i][token] is None:
                    experts[i][token] = put.value
        statuses.append(status)
    status = "partial" if "partial" in statuses else max(statuses, key=WORST_LAST.index)
    return Seen(status, end, tuple(put.record_id for put in live), tuple(map(tuple, experts)))


def between(before: State, after: State, call: str) -> Iterator[State]:
    """What one look at one directory may see while it goes from the one to the other, at this call of the look.

    Shards are listed first, then delete marks. A torn listing has any part of what came meanwhile; of the shards that went
    their contents stand elsewhere.
    """
    yield from (before, State(before.units, after.deletes), after)
    if call.startswith("torn _rr/tombstones"):
        for deletes in parts(before.deletes, after.deletes):
            yield State(before.units, deletes)
    elif call.startswith("torn"):
        for units in parts(before.units, after.units):
            yield State(units, after.deletes)


def parts(before: dict, after: dict) -> Iterator[dict]:
    new = [key for key in after if key not in before]
    for coins in product((False, True), repeat=len(new)):
        chosen = [key for key, coin in zip(new, coins, strict=True) if coin]
        yield {**before, **{key: after[key] for key in chosen}}


def marks_in(content: bytes) -> list[tuple[int, int]]:
    """(t_del, made) of each mark of a file, as written."""
    return [(each["t_del"], each["made"]) for each in json.loads(content)]


def shard_name(puts: Iterable[Put], writer: str, seq: int) -> str:
    """Of all puts that the slab holds for the directory, whatever became of them."""
    stamps = [put.stamp for put in puts]
    return f"00-{min(stamps):016x}-{max(stamps):016x}-{len(stamps)}-{writer}-{seq}.arrow"
