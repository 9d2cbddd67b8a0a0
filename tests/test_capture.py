"""Capture against a naive oracle: random schedules of a simulated engine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rr_dataset.capture.capturer import StepCapturer
from rr_dataset.capture.slots import SlotTable
from tests.routing_engine import Engine, FakeWriter, check


def drive(seed: int, steps: int, **how: object) -> int:
    """One engine's life; how many rows were compared."""
    writer = FakeWriter()
    engine = Engine(seed, writer, **how)
    try:
        engine.run(steps)
        ends = Counter(dict.fromkeys([*engine.expected, *engine.dropped], 1))
        assert writer.ends == ends, "one record or one drop row each"
        assert not engine.opted_out & writer.ends.keys()
        return check(engine, {name: writer.known(name) for name in engine.expected})
    finally:
        engine.close()


@given(st.integers(0, 1 << 32), st.integers(1, 150), st.booleans(), st.booleans())
def test_every_record_is_the_oracles_or_says_what_is_missing(
    seed: int, steps: int, hooked: bool, overlap: bool
) -> None:
    drive(seed, steps, hooked=hooked, overlap=overlap)


def test_the_schedules_do_all_there_is() -> None:
    assert sum(drive(seed, 150, overlap=seed % 2 == 0) for seed in range(4)) > 400


class NoGenerations(SlotTable):
    def recycle(self, blocks: object) -> None:
        pass


class MarksAtFlush(StepCapturer):
    def _write(self, step: object) -> None:
        marks = type(step).marks.__get__(step)
        object.__setattr__(step, "marks", step.table.marks)
        assert marks
        super()._write(step)


class ForgetsWhatItSkips(SlotTable):
    def erase(self, slots: object, marks: object) -> None:
        pass


@pytest.mark.parametrize(
    "broken",
    [{"table": NoGenerations}, {"capturer": MarksAtFlush}, {"table": ForgetsWhatItSkips}],
    ids=["no generations", "marked at flush", "suspended steps leave drafts"],
)
def test_broken_rules_are_seen(broken: dict[str, object]) -> None:
    def drive_many() -> None:
        for seed in range(60):
            drive(seed, 200, overlap=seed % 2 == 0, **broken)

    with pytest.raises(AssertionError, match=" at | misses "):
        drive_many()
