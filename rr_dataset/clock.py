"""Hybrid logical clock: 48 bits of Unix milliseconds over a 16-bit counter, in one unsigned 64-bit integer.

    t = (ms << 16) | counter

Values compare as numbers. Within one clock they rise strictly, also when the wall clock steps back or stands still
for more than 65,536 stamps (then the millisecond part runs ahead of the wall clock).
"""

from __future__ import annotations

import time
from collections.abc import Callable

COUNTER_BITS = 16
COUNTER_MAX = (1 << COUNTER_BITS) - 1


def wall_ms() -> int:
    """Unix time in whole milliseconds."""
    return time.time_ns() // 1_000_000


def pack(ms: int, counter: int = 0) -> int:
    """The stamp of `counter` within the millisecond `ms`."""
    return ms << COUNTER_BITS | counter


def millis(stamp: int) -> int:
    """The millisecond part of a stamp."""
    return stamp >> COUNTER_BITS


class HybridClock:
    """Strictly rising stamps of one writer. Not thread-safe: the spool stamps under its append lock."""

    def __init__(self, now_ms: Callable[[], int] = wall_ms) -> None:
        self._now_ms = now_ms
        self._last = 0

    def tick(self) -> int:
        """The next stamp, greater than every earlier one."""
        self._last = max(self._last + 1, pack(self._now_ms()))
        return self._last
