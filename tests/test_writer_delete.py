"""A writer's own deletes: in the order of its puts, never waited for, never dropped; and its last turns."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.writer import RoutingWriter
from tests.engines import BIG, SPEC, Engine, experts, options, stopped, stored_rows, until
from tests.shared_writer import shared_writer

base, writer, _, name = shared_writer(run_id="mine")


def ids(base: Path, name: str) -> list[str]:
    return list(rr.open_dataset(base / "ds").ids(name))


def test_puts_and_deletes_are_exact_in_their_order(writer: RoutingWriter, base: Path, name: str) -> None:
    writer.put(f"{name}:1", experts(1), "LTK")
    writer.put(f"{name}:2", experts(2), "LTK")
    writer.delete_prefix(name)
    writer.put(f"{name}:1", experts(3), "LTK")
    writer.put(f"{name}:10", experts(4), "LTK")
    writer.delete_prefix({"data_id": name, "gen_id": np.int64(10)})
    writer.flush()
    assert ids(base, name) == [f"{name}:1"]
    np.testing.assert_array_equal(rr.open_dataset(base / "ds").get(f"{name}:1").routed_experts, experts(3))
    writer.delete_prefix(f"{name}:1")
    writer.flush()
    assert ids(base, name) == []
    assert not (base / f"ds/data_id={name}").exists()


def test_a_delete_is_waited_for_by_flush_and_by_its_receipt(writer: RoutingWriter, base: Path, name: str) -> None:
    writer.put(f"{name}:1", experts(1), "LTK").wait()
    with stopped(writer.stats().worker_pid):
        receipt = writer.delete_prefix(name)
        assert not receipt.durable()
        with pytest.raises(rr.FlushTimeoutError):
            writer.flush(timeout_s=0.01)
        assert ids(base, name) == [f"{name}:1"]
    receipt.wait()
    assert receipt.durable()
    assert receipt.ref == ""
    assert ids(base, name) == []

    async def awaited() -> None:
        await writer.delete_prefix(name)

    asyncio.run(awaited())
    report = writer.flush()
    assert (report.records, dict(report.dropped)) == (1, {})


def test_clear_run_takes_this_run_only(writer: RoutingWriter, base: Path, name: str) -> None:
    with RoutingWriter(base / "ds", options(base / "spools", run_id="theirs")) as other:
        other.put(f"{name}:1", experts(1), "LTK")
    with RoutingWriter(base / "ds", options(base / "spools", run_id="mine")) as rank:
        rank.put(f"{name}:2", experts(2), "LTK")
    writer.put(f"{name}:3", experts(3), "LTK")
    writer.clear_run()
    writer.put(f"{name}:4", experts(4), "LTK")
    writer.flush()
    assert ids(base, name) == [f"{name}:1", f"{name}:4"]


@pytest.mark.parametrize("wrong", ["", "a::1", {"nope": 1}, {}])
def test_a_wrong_prefix_deletes_nothing(writer: RoutingWriter, base: Path, name: str, wrong: Any) -> None:
    with pytest.raises(rr.InvalidRequestIdError):
        writer.delete_prefix(wrong)
    assert writer.stats().spool_used_bytes == 0


@pytest.mark.parametrize("policy", ["block", "drop", "raise"])
def test_a_delete_is_never_dropped_whatever_the_policy(tmp_path: Path, policy: str) -> None:
    how = options(tmp_path, on_full=policy, max_age_s=1000.0, idle_seal_s=1000.0)
    with RoutingWriter(tmp_path / "ds", how, create=SPEC) as writer:
        writer.put("a:1", experts(1), "LTK").wait()
        wide = {"data_id": "x" * 100, "gen_id": 1}
        with stopped(writer.stats().worker_pid):
            accepted = [writer.delete_prefix("a")]
            with pytest.raises(rr.SpoolFullError, match=r"no room for a delete of .*flush"):
                accepted.extend(writer.delete_prefix(wide) for _ in range(20_000))
            writer.put("a:2", experts(2), "LTK")
        assert len(accepted) > 3_000  # a whole slab of them
        writer.flush()
        assert all(receipt.durable() for receipt in accepted)
        assert list(rr.open_dataset(tmp_path / "ds").ids()) == ["a:2"]
        writer.delete_prefix("a")  # there is room again
        writer.flush()
        assert list(rr.open_dataset(tmp_path / "ds").ids()) == []


def test_a_full_slab_takes_the_deletes_before_it_along(tmp_path: Path) -> None:
    with RoutingWriter(tmp_path / "ds", options(tmp_path, max_age_s=1000.0, idle_seal_s=1000.0), create=SPEC) as writer:
        writer.put("a:0", experts(0), "LTK").wait()
        receipt = writer.delete_prefix("a")
        writer.put("b:0", experts(0, BIG), "LTK")
        first = writer.put("b:1", experts(1, BIG), "LTK")
        writer.put("b:2", experts(2, BIG), "LTK")  # closes the slab of the first two, and nothing else is asked for
        with writer._spool.changed:
            assert writer._spool.changed.wait_for(first.durable, 60)
        assert receipt.durable()
        assert set(rr.open_dataset(tmp_path / "ds").ids()) == {"b:0", "b:1"}


def test_a_closed_writer_and_a_forked_child_delete_nothing(tmp_path: Path) -> None:
    writer = RoutingWriter(tmp_path / "ds", options(tmp_path), create=SPEC)
    writer._pid += 1
    with pytest.raises(rr.WriterForkedError):
        writer.delete_prefix("a")
    with pytest.raises(rr.WriterForkedError):
        writer.clear_run()
    writer._pid = os.getpid()
    writer.close()
    with pytest.raises(rr.WriterClosedError):
        writer.clear_run()


def test_deletes_survive_a_kill_of_engine_and_worker(tmp_path: Path) -> None:
    code = """
writer = rr.RoutingWriter(root, options(spool_dir, max_age_s=1000.0, idle_seal_s=1000.0), create=SPEC)
writer.put("a:1", experts(1), "LTK").wait()
os.kill(writer.stats().worker_pid, 19)
writer.put("b:1", experts(2), "LTK")
writer.delete_prefix("a")
writer.delete_prefix("b")
writer.put("b:2", experts(3), "LTK")
print(writer.stats().worker_pid, flush=True)
sys.stdin.readline()
"""
    engine = Engine(code, tmp_path / "ds", tmp_path)
    worker = int(engine.line())
    engine.kill()
    os.kill(worker, 9)
    # It holds the lock until the last of its threads is gone.
    (report,) = until(lambda: [each for each in rr.recover(tmp_path) if each.outcome != "living"], "the worker is dead")
    assert (report.outcome, report.records) == ("recovered", 1)
    assert list(rr.open_dataset(tmp_path / "ds").ids()) == ["b:2"]


def test_only_the_last_turn_is_shown_and_stored(tmp_path: Path) -> None:
    dataset = rr.create_dataset(tmp_path / "ds", SPEC, keep="last_turn")
    with RoutingWriter(tmp_path / "ds", options(tmp_path)) as writer:
        for turn in range(3):
            writer.put(f"a:0:{turn}:0", experts(turn), "LTK")
        writer.flush()
        assert list(dataset.ids()) == ["a:0:2:0"]
        assert stored_rows(tmp_path / "ds") == {"a:0:2:0": 1}
        writer.put("a:0:3:0", experts(3), "LTK")
        writer.put("a:0:2:1", experts(4), "LTK")  # of another segment
        writer.put("a:0:0:0#1", experts(5), "LTK")  # of another sample
        writer.flush()
        assert set(dataset.ids()) == {"a:0:3:0", "a:0:2:1", "a:0:0:0#1"}
        assert [head.request_id for head in dataset.heads(["a:0:2:0", "a:0:3:0"], on_missing="none") if head] == [
            "a:0:3:0"
        ]
        with pytest.raises(rr.RecordNotFoundError):
            dataset.get("a:0:2:0")
        assert {head.request_id for head in dataset.poll()[0]} == set(dataset.ids())
        assert set(dataset.to_pyarrow().to_table(columns=["request_id"])["request_id"].to_pylist()) == set(
            dataset.ids()
        )
        writer.delete_prefix("a:0:3:0")
        writer.flush()
        assert set(dataset.ids()) == {"a:0:2:1"}  # of every sample, and the earlier turn does not come back
        rr.delete(tmp_path / "ds", ids=["a:0:7:1"])  # a turn that never was covers the lower ones of its segment
        assert set(dataset.ids()) == set()
    (first, *_) = sorted((tmp_path / "ds/_rr/tombstones").iterdir())
    assert json.loads(first.read_text())[0]["text"] == "a:0:3:0"
