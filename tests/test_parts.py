"""Records that come in parts, from several processes and over time: end to end, before and after compaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from tests.engines import SPEC, Engine, experts, options

KEY = "math:17:0:0"


class Writers:
    """Several writers of one dataset, as so many engine processes have them."""

    def __init__(self, place: Path, stack: ExitStack) -> None:
        self.place, self._stack = place, stack

    def new(self) -> rr.RoutingWriter:
        made = rr.RoutingWriter(self.place / "ds", options(self.place), create=SPEC)
        return self._stack.enter_context(made)

    def everywhere(self, key: str = KEY) -> Iterator[tuple[rr.RoutingDataset, Any]]:
        """The record as every way of reading gives it: now, and after compaction."""
        for compacted in (False, True):
            if compacted:
                assert rr.compact(self.place / "ds").tasks >= 1
            dataset = rr.open_dataset(self.place / "ds")
            yield dataset, dataset.get(key)
            (waited,) = dataset.wait_for([key], timeout_s=0)
            assert waited.num_tokens == dataset.get(key).num_tokens


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    with ExitStack() as stack:
        yield Writers(tmp_path, stack)


def test_prefill_and_decode_processes(writers: Writers, tmp_path: Path) -> None:
    rr.create_dataset(tmp_path / "ds", SPEC)
    decode = writers.new()
    code = f"""
with rr.RoutingWriter(root, options(spool_dir)) as writer:
    writer.put({KEY!r}, experts(1, 40)[:, :25], "LTK", part=True, token_ids=list(range(25)))
    writer.flush()
    print("prefilled", flush=True)
    sys.stdin.readline()
"""
    with Engine(code, tmp_path / "ds", tmp_path) as prefill:
        assert prefill.line() == "prefilled"
        dataset = rr.open_dataset(tmp_path / "ds")
        assert (dataset.get(KEY).status, dataset.get(KEY).num_tokens) == ("partial", 25)
        with pytest.raises(rr.WaitTimeoutError, match=KEY):
            dataset.wait_for([KEY], timeout_s=0)
        # D feeds the last prompt token again: those who sampled the token were first
        source = experts(1, 40)[:, 24:].copy()
        source[:, 0] = experts(9, 1)[:, 0]
        decode.put(KEY, source, "LTK", part=True, token_start=24, token_ids=list(range(24, 40)), status="complete")
        decode.flush()
        assert prefill.end() == (0, "")
    for _, record in writers.everywhere():
        np.testing.assert_array_equal(record.routed_experts, experts(1, 40))
        np.testing.assert_array_equal(record.token_ids, np.arange(40))
        assert (record.status, record.missing) == ("complete", ())


def test_chunks_while_a_long_generation_runs(writers: Writers) -> None:
    writer = writers.new()
    source, seen = experts(2, 100), []
    dataset = None
    for start in range(0, 100, 20):
        with writer.reserve(
            KEY, 20, token_start=start, part=True, status="complete" if start == 80 else None
        ) as record:
            record.experts[:] = source[:, start : start + 20].transpose(1, 0, 2)
        writer.flush()
        dataset = dataset or rr.open_dataset(writers.place / "ds")
        found = dataset.get(KEY)
        seen.append((found.num_tokens, found.status))
        np.testing.assert_array_equal(found.routed_experts, source[:, : start + 20])
    assert seen == [(20, "partial"), (40, "partial"), (60, "partial"), (80, "partial"), (100, "complete")]
    for dataset, record in writers.everywhere():
        np.testing.assert_array_equal(record.routed_experts, source)
        np.testing.assert_array_equal(dataset.get(KEY, tokens=slice(15, 85)).routed_experts, source[:, 15:85])


def test_a_rollout_resumed_under_new_weights_keeps_the_first_routes(writers: Writers) -> None:
    first, second = experts(3, 30), experts(4, 50)
    before, after = writers.new(), writers.new()
    before.put(KEY, first, "LTK", part=True, weight_version=7, missing=[(10, 12)], logprobs=np.zeros(30))
    before.flush()
    after.put(  # the whole sequence again, with what new weights make of it
        KEY, second, "LTK", part=True, status="complete", weight_version=8, logprobs=np.ones(50)
    )
    after.flush()
    expected = second.copy()
    expected[:, :10], expected[:, 12:30] = first[:, :10], first[:, 12:]
    for _, record in writers.everywhere():
        np.testing.assert_array_equal(record.routed_experts, expected)
        assert record.weights == ((0, 10, "7"), (10, 12, "8"), (12, 30, "7"), (30, 50, "8"))
        assert record.status == "complete"
        np.testing.assert_array_equal(record.logprobs[12:30], np.zeros(18))
        np.testing.assert_array_equal(record.logprobs[30:], np.ones(20))


def test_a_resumed_rollout_that_starts_over_supersedes(writers: Writers) -> None:
    before, after = writers.new(), writers.new()
    before.put(KEY, experts(3, 30), "LTK", part=True, weight_version=7)
    before.flush()
    after.put(KEY, experts(4, 20), "LTK", weight_version=8)
    after.flush()
    for _, record in writers.everywhere():
        np.testing.assert_array_equal(record.routed_experts, experts(4, 20))
        assert record.weights == ((0, 20, "8"),)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pipeline_stages(writers: Writers, order: Sequence[int]) -> None:
    stages = [([3, 4], slice(0, 2)), ([7, 9], slice(2, 4))]
    source, dataset = experts(5, 30), None
    made = [writers.new(), writers.new()]
    for number, stage in enumerate(order):
        layers, rows = stages[stage]
        writer = made[stage]
        # each stage in chunks of its own
        writer.put(KEY, source[rows, :18], "LTK", layers=layers)
        writer.put(KEY, source[rows, 18:], "LTK", layers=layers, token_start=18, status="complete")
        writer.flush()
        dataset = dataset or rr.open_dataset(writers.place / "ds")
        record = dataset.get(KEY)
        assert record.status == ("partial" if number == 0 else "complete")
        np.testing.assert_array_equal(dataset.get(KEY, layers=layers).routed_experts, source[rows])
        if number == 0:
            other = stages[order[1]][0]
            assert dataset.get(KEY, layers=other).missing == ((0, 30),)
    for found, record in writers.everywhere():
        np.testing.assert_array_equal(record.routed_experts, source)
        np.testing.assert_array_equal(found.get(KEY, layers=[4, 7]).routed_experts, source[1:3])
        assert record.missing == ()


def test_a_stage_that_gives_up_says_so(writers: Writers) -> None:
    one, two = writers.new(), writers.new()
    one.put(KEY, experts(6, 30)[:2], "LTK", layers=[3, 4], status="complete")
    one.flush()
    two.drop(KEY, "stage 2 lost it", num_tokens=30, part=True)
    two.flush()
    for compacted in (False, True):
        if compacted:
            rr.compact(writers.place / "ds")
        dataset = rr.open_dataset(writers.place / "ds")
        with pytest.raises(rr.RecordDroppedError, match="stage 2 lost it"):
            dataset.get(KEY)
        (head,) = dataset.wait_for([KEY], timeout_s=0)
        assert (head.status, head.reason) == ("dropped", "stage 2 lost it")


def test_parts_of_two_ids_and_samples_do_not_mix(writers: Writers) -> None:
    one, two = writers.new(), writers.new()
    keys = [KEY, f"{KEY}#1", "math:17:1:0"]
    for start in (0, 10):
        for i, key in enumerate(keys):
            writer = one if (i + start) % 20 else two
            status = "complete" if start else None
            writer.put(key, experts(i, 20)[:, start : start + 10], "LTK", token_start=start, part=True, status=status)
    one.flush()
    two.flush()
    for i, key in enumerate(keys):
        np.testing.assert_array_equal(rr.open_dataset(writers.place / "ds").get(key).routed_experts, experts(i, 20))
