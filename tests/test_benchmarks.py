"""The benchmark's own arithmetic: who takes turns, which way a target points, what is said of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.bench import Bench
from tests.benchmarks.facts import facts
from tests.benchmarks.measure import Pairs, at_least, at_most, interleave, shown

PAIRS = Pairs(ours=[2.0, 4.0, 9.0], theirs=[1.0, 2.0, 3.0])


def test_both_sides_take_turns_after_a_round_that_is_not_counted() -> None:
    calls: list[str] = []
    pairs = interleave(
        lambda i: calls.append(f"ours {i}"),
        lambda i: calls.append(f"theirs {i}"),
        2,
        before=lambda: calls.append("before"),
    )
    assert calls[::2] == ["before"] * 6
    assert calls[1::2] == ["theirs -1", "ours -1", "ours 0", "theirs 0", "theirs 1", "ours 1"]
    assert len(pairs.ours) == len(pairs.theirs) == 2


def test_a_result_is_gone_before_the_next_call() -> None:
    alive: list[object] = []

    class Result:
        def __init__(self) -> None:
            assert not alive
            alive.append(id(self))

        def __del__(self) -> None:
            alive.clear()

    interleave(lambda _: Result(), lambda _: Result(), 3)


@pytest.mark.parametrize(("target", "ok"), [(2.0, True), (1.9, False)])
def test_at_most_divides_our_median_by_theirs(target: float, ok: bool) -> None:
    check = at_most("row", "what", "against", PAIRS, target)
    assert (check.value, check.low, check.high, check.ok) == (2.0, 2.0, 3.0, ok)


@pytest.mark.parametrize(("target", "ok"), [(0.5, True), (0.6, False)])
def test_at_least_divides_their_median_by_ours(target: float, ok: bool) -> None:
    check = at_least("row", "what", "against", PAIRS, target)
    assert (check.value, check.low, check.high, check.ok) == (0.5, 1 / 3, 0.5, ok)


@pytest.mark.parametrize(("seconds", "unit", "text"), [(0.00123, "ms", "1.23 ms"), (1.5, "ms", "1,500 ms")])
def test_times_are_shown_with_three_digits(seconds: float, unit: str, text: str) -> None:
    assert shown(seconds, unit) == text


def test_a_folder_goes_also_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with Bench(tmp_path, quick=True).folder() as folder:
            (folder / "file").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())


def test_the_machine_is_described(tmp_path: Path) -> None:
    described = facts(tmp_path)
    assert {"date", "cpu", "cores", "kernel", "file system", "spool", "numpy", "pyarrow"} <= described.keys()
    assert all(described.values())
