"""A record is of the trainer's tokens, or the error says by how much it is not."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import Stored

import rr_dataset as rr
from rr_dataset.demo.rollouts import SPEC, load_rollouts
from rr_dataset.record import RoutingRecord
from rr_dataset.trainer.align import MAX_SHIFT, Alignment, align

EOS = 2


def record_of(token_ids: Any, rows: int | None = None, ranges: Any = None) -> RoutingRecord:
    """A record with these ids; `rows` where it has none."""
    count = len(token_ids) if rows is None else rows
    spans = ((0, count),) if ranges is None else ranges
    return RoutingRecord(
        request_id="a:1",
        components=("a", "1", None, None),
        choice=None,
        status="complete",
        reason=None,
        num_tokens=count,
        missing=(),
        weights=(),
        run_id="run",
        tags={},
        rows=(),
        tiles=(),
        token_ranges=spans,
        token_ids=None
        if token_ids is None
        else np.concatenate([np.asarray(token_ids, np.int32)[start:stop] for start, stop in spans]),
    )


IDS = np.random.default_rng(0).integers(3, 1000, 200)


@pytest.mark.parametrize(
    ("coverage", "recorded", "trainer", "options"),
    [
        ("S", IDS, IDS, {}),
        ("S-1", IDS[:-1], IDS, {}),
        ("eos", IDS, IDS, {"eos_ids": [EOS]}),
        ("eos", IDS, [*IDS, EOS], {"eos_ids": [EOS, 7]}),
        ("S", IDS[:-9], IDS, {"trailing": 9}),
        ("S-1", IDS[:-10], IDS, {"trailing": 9}),
        ("eos", IDS, [*IDS, EOS, 4, 5], {"eos_ids": [EOS], "trailing": 2}),
        ("ids", IDS[:50], IDS, {}),
        ("ids", IDS, IDS[:50], {}),
        ("S-1", [], [], {}),
    ],
)
def test_what_covers_is_accepted(coverage: str, recorded: Any, trainer: Any, options: dict[str, Any]) -> None:
    both = min(len(recorded), len(trainer))
    wanted = Alignment(len(trainer), both, both)
    assert align(record_of(recorded), trainer, coverage, **options) == wanted
    if coverage in ("S", "S-1"):
        assert align(record_of(recorded), len(trainer), coverage, **options) == wanted._replace(compared=0)
        assert align(record_of(None, len(recorded)), trainer, coverage, **options).compared == 0


@pytest.mark.parametrize(
    ("coverage", "rows", "says"),
    [
        (
            "S",
            199,
            "has 199 rows and should have 200, 1 too few: coverage='S' of 200 tokens.*with coverage='S-1' it would fit",
        ),
        ("S-1", 200, "has 200 rows and should have 199, 1 too many.*with coverage='S' it would fit"),
        ("S", 190, "should have 200, 10 too few.*the last 10 added after the engine had stopped, say trailing="),
        ("S", 203, "has 203 rows and should have 200, 3 too many"),
    ],
)
def test_another_number_says_by_how_much(coverage: str, rows: int, says: str) -> None:
    with pytest.raises(rr.AlignmentError, match=says):
        align(record_of(None, rows), 200, coverage)


def test_an_eos_that_was_fed_is_named() -> None:
    with pytest.raises(rr.AlignmentError, match="has 200 rows and should have 199, 1 too many: coverage='eos'"):
        align(record_of(None, 200), [*IDS[:-1], EOS], "eos", eos_ids=[EOS])


@given(st.integers(-MAX_SHIFT, MAX_SHIFT).filter(bool), st.integers(0, 60), st.integers(0, 99))
def test_a_shift_is_found_wherever_it_begins(shift: int, first: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 30000, 1200)
    extra = rng.integers(30000, 60000, abs(shift))
    recorded = (
        np.concatenate([ids[:first], extra, ids[first:]]) if shift > 0 else np.delete(ids, slice(first, first - shift))
    )
    where = "the recorded ids are" if first == 0 else f"from position {first} on, the recorded ids are"
    number = f"{abs(shift)} token{'' if abs(shift) == 1 else 's'} {'more' if shift > 0 else 'fewer'} before them"
    with pytest.raises(rr.AlignmentError) as error:
        align(record_of(recorded), ids, "ids")
    told = str(error.value)
    assert f"{where} yours shifted by {shift:+d}" in told
    assert number in told
    assert f"position {first}: recorded {recorded[first]}, yours {ids[first]}" in told


def test_ids_that_differ_name_the_first() -> None:
    wrong = IDS.copy()
    wrong[[17, 40]] = 1
    with pytest.raises(
        rr.AlignmentError,
        match=rf"'a:1': the recorded ids are not yours: first difference at position 17: recorded 1, yours {IDS[17]}; 2 of 200 differ",
    ):
        align(record_of(wrong), IDS)
    last = IDS.copy()
    last[-1] = 1
    with pytest.raises(rr.AlignmentError, match="position 199: recorded 1"):
        align(record_of(last), IDS)


def test_a_part_of_a_record_is_compared_where_it_is() -> None:
    ranges = ((150, 200), (10, 30))
    part = record_of(IDS, ranges=ranges)
    assert align(part, IDS).compared == 70
    moved = np.roll(IDS, 1)
    with pytest.raises(rr.AlignmentError, match=r"from position 10 on, the recorded ids are yours shifted by \+1"):
        align(record_of(moved, ranges=ranges), IDS)
    unknown = IDS.copy()
    unknown[:50] = -1
    assert align(record_of(unknown), IDS).compared == 150


@pytest.mark.parametrize(
    ("tokens", "options", "says"),
    [
        (200, {"coverage": "all"}, "coverage='all': expected one of S, S-1, eos, ids"),
        (200, {"coverage": "eos", "eos_ids": [2]}, "needs the trainer's token ids"),
        (IDS, {"coverage": "eos"}, "eos_ids="),
        (200, {"coverage": "ids"}, "compared with a number"),
        (200, {"trailing": 201}, "trailing=201: expected 0 to the 200"),
        (IDS.reshape(2, 100), {}, r"int64 \[2, 100\]: expected token ids, integers \[S\]"),
        (IDS.astype(float), {}, "float64"),
    ],
)
def test_arguments_that_do_not_go_together_are_named(tokens: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=says) as error:
        align(record_of(IDS), tokens, **options)
    assert type(error.value) is rr.InvalidInputError
    with pytest.raises(rr.InvalidInputError, match="the record has none"):
        align(record_of(None, 200), IDS, "ids")


def test_real_records_align_and_their_shift_is_told(tmp_path: Path) -> None:
    rollout = load_rollouts()[0]
    stored = Stored(tmp_path / "ds", SPEC)
    count = len(rollout.token_ids)
    data = stored.row("code_0:0", count)
    stored.shard(replace(data, row=replace(data.row, has_token_ids=True), token_ids=rollout.token_ids.astype(np.int32)))
    record = stored.dataset.get("code_0:0", layers=[2])
    assert align(record, rollout.token_ids) == (count, count, count)
    assert align(record, [*rollout.token_ids, 3], "S-1") == (count + 1, count, count)
    with pytest.raises(rr.AlignmentError, match=r"yours shifted by \+1, the record has 1 token more"):
        align(record, rollout.token_ids[1:], "ids")
    with pytest.raises(rr.AlignmentError, match="yours shifted by -3, the record has 3 tokens fewer"):
        align(record, [9, 9, 9, *rollout.token_ids], "ids")
    (head,) = stored.dataset.heads(["code_0:0"])
    assert align(head, count).compared == 0


@pytest.mark.parametrize("name", ["numpy", "torch", "paddle"])
def test_ids_and_numbers_may_be_arrays_and_tensors(name: str) -> None:
    """A tensor of one id is no number: it would be taken for the length of the sample."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        framework = pytest.importorskip(name)
    make = {
        "numpy": np.array,
        "torch": getattr(framework, "tensor", None),
        "paddle": getattr(framework, "to_tensor", None),
    }[name]
    ids = IDS.tolist()
    assert align(record_of(IDS), make(ids)).compared == 200
    assert align(record_of(IDS), make(200)) == Alignment(200, 200, 0)
    with pytest.raises(rr.AlignmentError, match="shifted by"):
        align(record_of(IDS), make([*ids[1:], 3]))
    with pytest.raises(rr.AlignmentError, match="of 1 tokens"):
        align(record_of(None, 30), make([30]))
    for wrong in (make([[1, 2]]), make([1.5]), make(1.5)):
        with pytest.raises(rr.InvalidInputError, match="expected token ids"):
            align(record_of(IDS), wrong)


@pytest.mark.parametrize("wrong", [None, "abc", 2.0, [[1], [1, 2]], ["a"], object()])
def test_what_is_neither_ids_nor_a_number_is_refused(wrong: Any) -> None:
    with pytest.raises(rr.InvalidInputError, match="expected token ids, integers"):
        align(record_of(IDS), wrong)


def test_ids_that_would_not_be_compared_are_refused(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "d")
    row = stored.put("a:1", 5, vectors=True)
    stored.put("b:1", 5)
    heads = stored.dataset.heads(["a:1", "b:1"])
    assert row.token_ids is not None
    with pytest.raises(rr.InvalidInputError, match="'a:1': token ids were recorded, and a head does not carry them"):
        align(heads[0], row.token_ids)
    assert align(stored.dataset.get("a:1"), row.token_ids).compared == 5
    assert align(heads[0], 5).compared == align(heads[1], row.token_ids).compared == 0
