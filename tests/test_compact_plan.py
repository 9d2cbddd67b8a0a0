"""What to compact, by numbers alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rr_dataset as rr
from rr_dataset.compact_plan import DEAD_SHARE, GROWTH, MAX_TASK_ROWS, Candidate, Task, plan
from rr_dataset.layout import ShardName

PATH = "data_id=p"


def raw(stamp: int, payload: int = 10, rows: int = 1) -> Candidate:
    return Candidate(ShardName(0, stamp, stamp, rows, writer="a" * 16, seq=stamp), payload + 5, payload)


def packed(stamp: int, payload: int, *, level: int = 1, dead: int = 0, pins: bool = False) -> Candidate:
    name = ShardName(level, stamp, stamp, 1, unique=UUID(int=stamp).hex)
    return Candidate(name, payload // 4, payload, dead, pins)


def test_raw_shards_are_always_due() -> None:
    (task,) = plan(PATH, [raw(2), raw(1)], target_bytes=1000, compression="zstd:5")
    assert task == Task(PATH, (raw(1).name.text, raw(2).name.text), 30, 2, "zstd:5")
    assert len(plan(PATH, [raw(1)])) == 1


def test_a_compacted_shard_is_left_unless_something_is_to_gain() -> None:
    assert plan(PATH, [packed(1, 100)]) == []
    assert plan(PATH, [packed(1, 100, dead=int(100 * DEAD_SHARE))]) == []
    assert len(plan(PATH, [packed(1, 100, dead=int(100 * DEAD_SHARE) + 1)])) == 1
    assert len(plan(PATH, [packed(1, 100, pins=True)])) == 1


def test_a_large_shard_is_not_written_again_for_a_small_one() -> None:
    (task,) = plan(PATH, [raw(1, 10), packed(2, 10 * GROWTH + 1)])
    assert task.inputs == (raw(1).name.text,)
    (task,) = plan(PATH, [raw(1, 10), packed(2, 10 * GROWTH)])
    assert len(task.inputs) == 2
    assert plan(PATH, [packed(1, 10), packed(2, 100)]) == []
    (task,) = plan(PATH, [packed(1, 10), packed(2, 100), packed(3, 100)])
    assert len(task.inputs) == 3


def test_full_shards_rest() -> None:
    assert plan(PATH, [packed(1, 60), packed(2, 60)], target_bytes=100) == []
    assert len(plan(PATH, [packed(1, 40), packed(2, 40)], target_bytes=100)) == 1


def test_outputs_have_their_size_and_rows() -> None:
    tasks = plan(PATH, [raw(i, 40) for i in range(1, 6)], target_bytes=100)
    assert [len(task.inputs) for task in tasks] == [2, 2, 1]
    assert len(plan(PATH, [raw(1, 500), raw(2, 5)], target_bytes=100)) == 2
    tasks = plan(PATH, [raw(1, 1, MAX_TASK_ROWS), raw(2, 1, 1)])
    assert [task.rows for task in tasks] == [MAX_TASK_ROWS, 1]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200), st.booleans()), max_size=30), st.integers(1, 400))
def test_a_plan_takes_each_shard_once_and_ends(shapes: list[tuple[bool, int, bool]], target: int) -> None:
    """Carrying plans out again and again ends, with no raw shard and none that pins left."""
    found = [
        packed(i, payload, pins=pins) if compacted else raw(i, payload)
        for i, (compacted, payload, pins) in enumerate(shapes, 1)
    ]
    for round_ in range(40):
        tasks = plan(PATH, found, target_bytes=target)
        names = [name for task in tasks for name in task.inputs]
        assert len(names) == len(set(names))
        assert set(names) <= {each.name.text for each in found}
        if not tasks:
            break
        sizes = {each.name.text: each.payload for each in found}
        found = [each for each in found if each.name.text not in names]
        for i, task in enumerate(tasks):
            found.append(packed(1000 * (round_ + 1) + i, sum(sizes[name] for name in task.inputs)))
    assert not plan(PATH, found, target_bytes=target)
    assert not any(each.pins or each.name.level == 0 for each in found)


def test_what_streams_in_is_written_a_few_times_only() -> None:
    """A thousand shards one by one, each compacted at once."""
    found: list[Candidate] = []
    written = 0
    for i in range(1, 1001):
        found.append(raw(i, 10))
        for task in plan(PATH, found, target_bytes=1 << 30):
            taken = [each for each in found if each.name.text in task.inputs]
            found = [each for each in found if each not in taken]
            size = sum(each.payload for each in taken)
            written += size
            found.append(packed(i, size))
    assert written < 15 * 10_000
    assert len(found) < 15


def test_a_task_is_json() -> None:
    (task,) = plan(PATH, [raw(1), raw(2)])
    assert Task(**json.loads(json.dumps(asdict(task)))) == task


@pytest.mark.parametrize(
    "change",
    [{"partition": "_rr"}, {"inputs": ()}, {"inputs": ("../x",)}, {"compression": "zip"}],
)
def test_a_task_that_is_none_is_refused(change: dict[str, object]) -> None:
    (task,) = plan(PATH, [raw(1)])
    with pytest.raises(rr.InvalidInputError):
        Task(**{**asdict(task), **change})
