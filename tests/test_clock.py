"""The hybrid clock: how stamps are made of milliseconds and a counter, and that they only rise."""

from __future__ import annotations

import time
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rr_dataset.clock import COUNTER_BITS, COUNTER_MAX, HybridClock, millis, pack, wall_ms

MAX_MS = (1 << 48) - 1
milliseconds = st.integers(0, MAX_MS)
counters = st.integers(0, COUNTER_MAX)


def test_a_stamp_is_48_bits_of_milliseconds_over_16_of_a_counter() -> None:
    assert (COUNTER_BITS, COUNTER_MAX) == (16, 0xFFFF)
    assert pack(0x123456789ABC, 0xDEF0) == 0x123456789ABCDEF0
    assert pack(5) == 5 << 16
    assert pack(MAX_MS, COUNTER_MAX) == (1 << 64) - 1


@given(milliseconds, counters)
def test_the_milliseconds_come_back(ms: int, counter: int) -> None:
    assert millis(pack(ms, counter)) == ms
    assert pack(ms, counter) - pack(ms) == counter


@given(milliseconds, counters, milliseconds, counters)
def test_stamps_compare_by_time_then_counter(ms: int, counter: int, other_ms: int, other: int) -> None:
    assert (pack(ms, counter) < pack(other_ms, other)) == ((ms, counter) < (other_ms, other))


@given(st.lists(st.integers(0, 1 << 40) | st.integers(1000, 1003), min_size=1, max_size=50))
def test_stamps_rise_whatever_the_wall_clock_does(wall: list[int]) -> None:
    clock = HybridClock(iter(wall).__next__)
    stamps = [clock.tick() for _ in wall]
    assert all(earlier < later for earlier, later in pairwise(stamps))
    assert all(millis(stamp) >= ms for stamp, ms in zip(stamps, wall, strict=True))
    assert all(millis(stamp) <= max(wall[: i + 1]) for i, stamp in enumerate(stamps))  # 50 fit one counter


def test_a_new_millisecond_starts_the_counter_again() -> None:
    clock = HybridClock(iter([7, 7, 9, 8, 10]).__next__)
    assert [clock.tick() for _ in range(5)] == [pack(7), pack(7, 1), pack(9), pack(9, 1), pack(10)]


def test_a_full_counter_runs_into_the_next_millisecond() -> None:
    clock = HybridClock(lambda: 7)
    stamps = [clock.tick() for _ in range(COUNTER_MAX + 2)]
    assert stamps[-2:] == [pack(7, COUNTER_MAX), pack(8)]
    assert len(set(stamps)) == len(stamps)


def test_the_wall_clock_is_unix_time_in_milliseconds() -> None:
    before = time.time()
    now = wall_ms()
    assert int(before * 1000) - 1 <= now <= time.time() * 1000 + 1
    assert millis(HybridClock().tick()) >= now
