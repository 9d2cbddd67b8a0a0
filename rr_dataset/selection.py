"""Which layers and tokens of a record are asked for, and what is missing of them. Pure.

`tokens` is None (all), a slice with step 1 (negative ends count from the end, as in Python), or a list of (start, stop)
ranges of absolute positions in any order. Unlike in Python, nothing is clipped: beyond the record is an error.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import SupportsIndex, TypeGuard, overload

from rr_dataset.errors import InvalidRoutingError
from rr_dataset.live import intersect_ranges, merge_ranges, subtract_ranges
from rr_dataset.record import Range, RecordHead


class Held(Enum):
    """A selection of all that some layer has, and nothing between: for records whose gaps do not fit into memory."""

    TOKENS = "held"


Tokens = slice | Sequence[Range] | None | Held


@dataclass(frozen=True)
class Share:
    """The part of one sample that a rank computes: the tokens of `ranges`, then `padding` rows.

    ranges: (start, stop) of absolute positions, in the order of the rank's rows. They speak of the trainer's tokens: what the
        record does not have of them, also past its end, is missing and no error.
    """

    ranges: tuple[Range, ...]
    padding: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens, without padding."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def num_rows(self) -> int:
        """How many rows, with padding."""
        return self.num_tokens + self.padding

    def recorded(self, num_tokens: int) -> list[Range]:
        """What a record of so many tokens has of it: the first rows. Raises InvalidRoutingError if others were between them."""
        found = [(start, min(stop, num_tokens)) for start, stop in self.ranges if start < min(stop, num_tokens)]
        if tuple(found[:-1]) != self.ranges[: max(len(found) - 1, 0)]:
            raise InvalidRoutingError(
                f"ranges {list(self.ranges)}: those past the {num_tokens} recorded tokens must come last"
            )
        return found


_START, _STOP = operator.itemgetter(0), operator.itemgetter(1)
_EXPECTED = "expected None, a slice, or a list of (start, stop) ranges"


def token_ranges(tokens: Tokens, num_tokens: int, request_id: str) -> tuple[Range, ...]:
    """`tokens` as ranges within 0 to `num_tokens`, in the order asked, none empty.

    Raises InvalidRoutingError for what is out of range, a step, or another type.
    """
    if tokens is None:
        return ((0, num_tokens),) if num_tokens else ()
    if isinstance(tokens, slice):
        if tokens.step not in (None, 1):
            raise InvalidRoutingError(f"tokens={tokens!r}: expected a step of 1; slice the array that was read instead")
        first = _position(tokens.start, 0, num_tokens, tokens)
        last = _position(tokens.stop, num_tokens, num_tokens, tokens)
        asked: tuple[Range, ...] = ((first, last),) if first <= last or last < 0 else ((first, first),)
    elif not isinstance(tokens, Held) and is_ranges(tokens):
        asked = tuple((operator.index(start), operator.index(stop)) for start, stop in tokens)
    else:
        raise InvalidRoutingError(f"tokens={tokens!r}: {_EXPECTED}")
    for start, stop in asked:
        if not 0 <= start <= stop <= num_tokens:
            raise InvalidRoutingError(
                f"tokens {start} to {stop} are not in {request_id!r}, which has {num_tokens} tokens (0 to {num_tokens})"
            )
    return tuple(span for span in asked if span[0] < span[1])


def held_ranges(head: RecordHead) -> tuple[Range, ...]:
    """The positions that some layer has, sorted and disjoint."""
    return merge_ranges((tile.start, tile.stop) for tile in head.tiles)


@overload
def tokens_per_id(tokens: Tokens | Sequence[Tokens], count: int) -> Sequence[Tokens]: ...


@overload
def tokens_per_id(tokens: Tokens | Share | Sequence[Tokens | Share], count: int) -> Sequence[Tokens | Share]: ...


def tokens_per_id(
    tokens: Tokens | Share | Sequence[Tokens] | Sequence[Tokens | Share], count: int
) -> Sequence[Tokens] | Sequence[Tokens | Share]:
    """One selection for each of `count` ids: the same for all, or one per id.

    A list of (start, stop) pairs is one selection for all. Raises InvalidRoutingError for another number of selections.
    """
    if tokens is None or isinstance(tokens, (slice, Held, Share)) or is_ranges(tokens):
        return [tokens] * count
    if not isinstance(tokens, (list, tuple)):
        raise InvalidRoutingError(f"tokens={tokens!r}: {_EXPECTED}, or a list with one of these per id")
    if len(tokens) != count:
        raise InvalidRoutingError(f"tokens has {len(tokens)} selections for {count} ids: {_EXPECTED}, or one per id")
    return tokens


def is_ranges(tokens: object) -> TypeGuard[Sequence[Range]]:
    """Whether this is a list of (start, stop) pairs; an empty list is."""
    return isinstance(tokens, (list, tuple)) and all(
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(end, (int, SupportsIndex)) for end in pair)
        for pair in tokens
    )


def missing_by_layer(head: RecordHead, layers: Sequence[int], ranges: Sequence[Range]) -> dict[int, tuple[Range, ...]]:
    """For each layer that lacks some of the tokens asked for: the positions, sorted and disjoint."""
    if not head.missing:
        return {}
    asked = merge_ranges(ranges)
    if not intersect_ranges(asked, head.missing):
        return {}
    held: dict[int, list[Range]] = {layer: [] for layer in layers}
    for tile in head.tiles:
        for layer in tile.layers:
            if layer in held:
                held[layer].append((tile.start, tile.stop))
    gaps = {layer: subtract_ranges(asked, merge_ranges(spans)) for layer, spans in held.items()}
    return {layer: missing for layer, missing in gaps.items() if missing}


class TokenAxis:
    """The token axis of an array: the positions of `ranges`, none empty, one range after the other."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = ranges
        self._offsets = (0, *accumulate(stop - start for start, stop in ranges))
        self._rising = all(before[1] <= after[0] for before, after in pairwise(ranges))

    def __len__(self) -> int:
        return self._offsets[-1]

    def overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(place on the axis, start, stop) of each piece of the ranges within the positions start to stop."""
        found = []
        first = bisect_right(self._ranges, start, key=_STOP) if self._rising else 0
        end = bisect_left(self._ranges, stop, key=_START) if self._rising else len(self._ranges)
        for number in range(first, end):
            low, high = self._ranges[number]
            a, b = max(low, start), min(high, stop)
            if a < b:
                found.append((self._offsets[number] + a - low, a, b))
        return found


def stretches(layers: Sequence[int], chosen: Sequence[int]) -> list[tuple[int, int]]:
    """The runs (first, end) of positions in `layers` whose ids are in `chosen`."""
    if layers == chosen:
        return [(0, len(layers))]
    wanted = frozenset(chosen)
    runs: list[tuple[int, int]] = []
    for at, layer in enumerate(layers):
        if layer in wanted:
            if runs and runs[-1][1] == at:
                runs[-1] = (runs[-1][0], at + 1)
            else:
                runs.append((at, at + 1))
    return runs


def _position(end: SupportsIndex | None, default: int, num_tokens: int, tokens: slice) -> int:
    if end is None:
        return default
    try:
        position = operator.index(end)
    except TypeError:
        raise InvalidRoutingError(f"tokens={tokens!r}: expected whole numbers") from None
    return position + num_tokens if position < 0 else position
