"""Interleaved timing, and a comparison as one row of the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SHOWN = {"s": (1.0, "s"), "ms": (1e3, "ms"), "us": (1e6, "us")}

Call = Callable[[int], Any]


@dataclass(frozen=True)
class Pairs:
    """Seconds of two calls that took turns."""

    ours: list[float]
    theirs: list[float]

    @property
    def ours_s(self) -> float:
        return float(np.median(self.ours))

    @property
    def theirs_s(self) -> float:
        return float(np.median(self.theirs))


def interleave(ours: Call, theirs: Call, rounds: int, before: Callable[[], object] = lambda: None) -> Pairs:
    """Time `ours(i)` and `theirs(i)` in turns: A B B A A B, so that neither always finds warm what the other has touched.

    One round ahead is not counted. `before` runs before every call; neither it nor the freeing of results is timed.
    """
    pairs = Pairs([], [])
    for i in range(-1, rounds):
        turns: tuple[tuple[Call, list[float]], ...] = ((ours, pairs.ours), (theirs, pairs.theirs))
        for call, seconds in turns if i % 2 == 0 else turns[::-1]:
            before()
            began = time.perf_counter()
            result = call(i)
            took = time.perf_counter() - began
            del result
            if i >= 0:
                seconds.append(took)
    return pairs


@dataclass(frozen=True)
class Check:
    """One line of the table: a number, the range of it over the pairs, and the target it is held to."""

    row: str
    what: str
    against: str
    ours: str
    theirs: str
    value: float
    unit: str
    bound: str  # "<=" or ">="
    target: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    samples: dict[str, Sequence[float]] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        return self.value <= self.target if self.bound == "<=" else self.value >= self.target


def shown(seconds: float, unit: str) -> str:
    scale, name = SHOWN[unit]
    return f"{seconds * scale:,.3g} {name}" if seconds * scale < 100 else f"{seconds * scale:,.0f} {name}"


def at_most(
    row: str, what: str, against: str, pairs: Pairs, target: float, *, unit: str = "ms", note: str = ""
) -> Check:
    """Ours takes at most `target` times as long as theirs."""
    return _compare(row, what, against, pairs, "<=", target, unit, note)


def at_least(
    row: str, what: str, against: str, pairs: Pairs, target: float, *, unit: str = "ms", note: str = ""
) -> Check:
    """Ours is at least `target` times as fast as theirs."""
    return _compare(row, what, against, pairs, ">=", target, unit, note)


def _compare(row: str, what: str, against: str, pairs: Pairs, bound: str, target: float, unit: str, note: str) -> Check:
    above, below = (pairs.ours, pairs.theirs) if bound == "<=" else (pairs.theirs, pairs.ours)
    each = np.array(above) / np.array(below)
    return Check(
        row,
        what,
        against,
        shown(pairs.ours_s, unit),
        shown(pairs.theirs_s, unit),
        float(np.median(above) / np.median(below)),
        "x",
        bound,
        target,
        float(each.min()),
        float(each.max()),
        note,
        {"ours_s": pairs.ours, "theirs_s": pairs.theirs},
    )
