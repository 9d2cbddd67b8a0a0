"""Turns of a conversation as one sequence, against a token-by-token assembler, on real conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored import Stored

import rr_dataset as rr
from rr_dataset.demo.rollouts import SPEC, Rollout, load_rollouts
from rr_dataset.layout import row_ref
from rr_dataset.record import RowData
from rr_dataset.trainer.trajectory import trajectory


def conversations() -> list[list[Rollout]]:
    found: dict[tuple[int, int], list[Rollout]] = {}
    for rollout in load_rollouts():
        found.setdefault((rollout.prompt, rollout.sample), []).append(rollout)
    return [[as_computed_again(turn) for turn in turns] for turns in found.values() if len(turns) == 3]


def as_computed_again(turn: Rollout) -> Rollout:
    """A prompt that was generated before takes other routes when it is computed again; the demo's, made in fp32, does not."""
    experts = turn.routed_experts.copy()
    experts[:, : turn.prompt_length] = (experts[:, : turn.prompt_length] + turn.turn) % SPEC.num_experts
    return replace(turn, routed_experts=experts)


def put(stored: Stored, request_id: str, rollout: Rollout, rows: int, ids: bool = True, **how: Any) -> RowData:
    """The first `rows` tokens of a rollout, in a shard of its own."""
    data = stored.row(request_id, rows, **how)
    row = replace(data.row, has_token_ids=ids, has_logprobs=ids)
    stored.shard(
        made := replace(
            data,
            row=row,
            routed_experts=np.ascontiguousarray(rollout.routed_experts[:, :rows]),
            token_ids=rollout.token_ids[:rows].astype(np.int32) if ids else None,
            logprobs=rollout.logprobs[:rows] if ids else None,
        )
    )
    return made


def naive(turns: Sequence[Rollout], rows: Sequence[int], prompts: Sequence[int] | None) -> tuple[np.ndarray, list[int]]:
    """Token by token: the last turn that generated it and has a row; else the first turn that has a row."""
    experts, owners = [], []
    for position in range(rows[-1]):
        have = [number for number, count in enumerate(rows) if position < count]
        owner = have[0]
        if prompts is not None:
            owner = max([number for number in have if prompts[number] <= position], default=owner)
        owners.append(owner)
        experts.append(turns[owner].routed_experts[:, position])
    return np.stack(experts, axis=1), owners


@pytest.mark.parametrize("unfed", [0, 1])
@pytest.mark.parametrize("with_prompts", [False, True])
def test_real_conversations_keep_the_routing_that_generated(tmp_path: Path, unfed: int, with_prompts: bool) -> None:
    stored = Stored(tmp_path / "ds", SPEC)
    for number, turns in enumerate(conversations()[:6]):
        rows = [len(turn.token_ids) - unfed for turn in turns]
        ids = [f"code_{number}:0:{turn}" for turn in range(3)]
        for request_id, turn, count in zip(ids, turns, rows, strict=True):
            put(stored, request_id, turn, count)
        prompts = [turn.prompt_length for turn in turns]
        got = trajectory(stored.dataset, ids, prompts if with_prompts else None)
        experts, owners = naive(turns, rows, prompts if with_prompts else None)
        np.testing.assert_array_equal(got.routed_experts, experts)
        assert got.turns.tolist() == owners
        assert set(owners) == {0, 1, 2}
        assert got.present.all()
        assert got.token_ids is not None
        np.testing.assert_array_equal(got.token_ids, turns[-1].token_ids[: rows[-1]])
        assert got.logprobs is not None
        wanted = [turns[owner].logprobs[position] for position, owner in enumerate(owners)]
        np.testing.assert_array_equal(got.logprobs, np.float32(wanted))
        part = trajectory(stored.dataset, ids, layers=[2, 5])
        np.testing.assert_array_equal(part.routed_experts, naive(turns, rows, None)[0][[2, 5]])
        assert part.layers == (2, 5)


def made_up(stored: Stored, request_id: str, count: int, **how: Any) -> RowData:
    data = stored.row(request_id, count, **how)
    ids = np.arange(100, 100 + count, dtype=np.int32)
    data = replace(data, row=replace(data.row, has_token_ids=True), token_ids=ids)
    stored.shard(data)
    return data


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds")


def test_each_token_has_the_rows_of_its_turn(stored: Stored) -> None:
    rows = [made_up(stored, f"a:0:{turn}", count) for turn, count in enumerate((4, 9, 12))]
    ids = [data.row.request_id for data in rows]
    for prompts, ends in ((None, (4, 9)), ([2, 6, 10], (4, 9)), ([2, 3, 9], (3, 9)), ([2, 3, 1], (1, 1))):
        got = trajectory(stored.dataset, ids, prompts)
        bounds = [0, *ends, 12]
        wanted = [data.routed_experts[:, bounds[i] : bounds[i + 1]] for i, data in enumerate(rows)]
        np.testing.assert_array_equal(got.routed_experts, np.concatenate(wanted, axis=1))
        assert got.turns.tolist() == np.repeat([0, 1, 2], np.diff(bounds)).tolist()


def test_refs_name_the_very_puts(stored: Stored) -> None:
    first = made_up(stored, "a:0:0", 4)
    made_up(stored, "a:0:0", 6)
    second = made_up(stored, "a:0:1", 9)
    refs = [row_ref(data.row.record_id, data.row.request_id) for data in (first, second)]
    got = trajectory(stored.dataset, refs, refs=True)
    np.testing.assert_array_equal(got.routed_experts[:, :4], first.routed_experts)
    np.testing.assert_array_equal(got.routed_experts[:, 4:], second.routed_experts[:, 4:])


def test_what_a_turn_lacks_of_its_own_stays_missing(stored: Stored) -> None:
    made_up(stored, "a:0:0", 4, missing=((1, 2),))
    stored.put("a:0:1", 6, layers=(4, 7, 9))
    got = trajectory(stored.dataset, ["a:0:0", "a:0:1"])
    assert got.present.astype(int).tolist() == [[1, 0, 1, 1, 0, 0]] + [[1, 0, 1, 1, 1, 1]] * 3
    assert (got.routed_experts[~got.present] == 0).all()
    assert got.token_ids is not None
    assert got.token_ids.tolist() == [100, 101, 102, 103, -1, -1]
    assert got.logprobs is None


def test_a_turn_that_does_not_contain_the_one_before_is_named(stored: Stored) -> None:
    made_up(stored, "a:0:0", 20)
    made_up(stored, "a:0:1", 10)
    data = stored.row("a:0:2", 30)
    shifted = np.concatenate([[7], np.arange(100, 129)]).astype(np.int32)
    stored.shard(replace(data, row=replace(data.row, has_token_ids=True), token_ids=shifted))
    with pytest.raises(rr.AlignmentError, match=r"turn 1 \('a:0:1'\) has 10 rows, the turns before it 20"):
        trajectory(stored.dataset, ["a:0:0", "a:0:1"])
    with pytest.raises(rr.AlignmentError, match=r"turn 1 \('a:0:2'\) does not go on .* theirs shifted by \+1"):
        trajectory(stored.dataset, ["a:0:0", "a:0:2"])


def test_a_record_that_changes_meanwhile_is_an_error(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(stored, "a:0:0", 4)
    real = rr.RoutingDataset.get_many
    calls: list[int] = []

    def get_many(self: rr.RoutingDataset, *given: Any) -> Any:
        found = real(self, *given)
        if not calls:
            made_up(stored, "a:0:0", 4)
        calls.append(1)
        return found

    monkeypatch.setattr(rr.RoutingDataset, "get_many", get_many)
    with pytest.raises(rr.ReadConflictError, match="'a:0:0' changed while it was read"):
        trajectory(stored.dataset, ["a:0:0"])


def test_lengths_that_cannot_be_are_named(stored: Stored) -> None:
    made_up(stored, "a:0:0", 4)
    for turns, prompts, says in (
        ([], None, "turns is empty"),
        (["a:0:0"], [1, 2], "2 numbers for 1 turns"),
        (["a:0:0"], [5], r"turn 0 \('a:0:0'\) has 4 rows, its prompt cannot have 5 tokens"),
    ):
        with pytest.raises(rr.InvalidInputError, match=says):
            trajectory(stored.dataset, turns, prompts)
