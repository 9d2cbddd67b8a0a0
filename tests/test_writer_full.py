"""A full spool: puts wait once, then are dropped with a row, and everybody is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.intake import MAX_META_BYTES
from rr_dataset.writer import Receipt, RoutingWriter
from tests.engines import BIG, SPEC, experts, fill, options, stopped, stored_rows
from tests.shared_writer import shared_writer

base, writer, dataset, name = shared_writer(block_timeout_s=0.01)


class Waits:
    """The time-outs that puts really waited for room."""

    def __init__(self, writer: RoutingWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[float] = []
        wait = writer._spool.changed.wait

        def counted(timeout: float | None = None) -> bool:
            if timeout is None or timeout > 0:
                self.seen.append(-1.0 if timeout is None else timeout)
            return wait(timeout)

        monkeypatch.setattr(writer._spool.changed, "wait", counted)


def test_drops_are_logged_once_per_report_and_at_close(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RoutingWriter(tmp_path / "ds", options(tmp_path, block_timeout_s=0), create=SPEC) as writer:
        for outage in ("y", "z"):
            caplog.clear()
            with stopped(writer.stats().worker_pid):
                dropped = len(fill(writer, f"logged{outage}")) - 1
                writer.put(f"logged{outage}:{dropped + 1}", experts(0, BIG), "LTK")
            (logged,) = caplog.records
            assert (logged.name, logged.levelname) == ("rr_dataset", "WARNING")
            assert f"record 'logged{outage}:{dropped}' was dropped: spool full" in logged.getMessage()
            assert f"raise spool_bytes={4 << 20}" in logged.getMessage()
            if outage == "y":
                assert writer.flush().dropped == {"spool full": 2}
        caplog.clear()
    assert caplog.messages == ["2 records were dropped, of which no flush has told: spool full"]
    with RoutingWriter(tmp_path / "ds", options(tmp_path)) as writer:
        caplog.clear()
        writer.put("logged:0", experts(0), "LTK")
    assert caplog.messages == []


def test_a_full_spool_drops_with_a_row_and_waits_once_per_outage(
    writer: RoutingWriter, dataset: Any, base: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = writer.stats()
    for outage in ("x", "y"):
        with stopped(before.worker_pid), monkeypatch.context() as patch:
            waits = Waits(writer, patch)
            receipts = fill(writer, name + outage)
            assert len(receipts) > 6
            receipts += [writer.put(f"{name}{outage}:{len(receipts) + i}", experts(0, BIG), "LTK") for i in range(4)]
            assert waits.seen == [pytest.approx(0.01, abs=0.01)]
            with pytest.raises(rr.RecordDroppedError, match="spool full"):
                receipts[-1].wait()
        report = writer.flush()
        assert report.dropped == {"spool full": 5}
        assert report.records == len(receipts) - 5
        assert writer.flush().dropped == {}
        assert [receipt.durable() for receipt in receipts] == [True] * (len(receipts) - 5) + [False] * 5
        for i, receipt in enumerate(receipts):
            key = f"{name}{outage}:{i}"
            if i < len(receipts) - 5:
                np.testing.assert_array_equal(dataset.get(key).routed_experts, experts(i, BIG))
                continue
            with pytest.raises(rr.RecordDroppedError, match=rf"{key} \(spool full\)"):
                dataset.get(key)
            (head,) = dataset.heads([key])
            assert (head.status, head.reason) == ("dropped", "spool full")
            assert receipt.ref == f"{head.record_id}:{key}"
            assert stored_rows(base / "ds")[key] == 1
    after = writer.stats()
    assert after.dropped["spool full"] - before.dropped.get("spool full", 0) == 10
    assert after.dropped_without_row == before.dropped_without_row
    assert after.last_error is None


def test_an_awaited_drop_raises_too(writer: RoutingWriter, name: str) -> None:
    async def ask(receipt: Receipt) -> None:
        await receipt

    with stopped(writer.stats().worker_pid):
        dropped = fill(writer, name)[-1]
        with pytest.raises(rr.RecordDroppedError, match=f"{dropped.ref} was dropped: spool full"):
            asyncio.run(ask(dropped))
    writer.flush()


def test_a_dropped_part_hides_no_other_and_a_dropped_whole_put_supersedes(
    writer: RoutingWriter, dataset: Any, name: str
) -> None:
    first = experts(1, BIG + 1)
    for key in ("part", "whole"):
        writer.put(f"{name}{key}:1", first, "LTK", part=key == "part")
    writer.flush()
    with stopped(writer.stats().worker_pid):
        fill(writer, name)
        for key in ("part", "whole"):
            writer.put(f"{name}{key}:1", experts(2, BIG), "LTK", part=key == "part")
    writer.flush()
    np.testing.assert_array_equal(dataset.get(f"{name}part:1").routed_experts, first)
    with pytest.raises(rr.RecordDroppedError):
        dataset.get(f"{name}whole:1")


def test_drops_beyond_the_room_for_rows_are_counted_apart(writer: RoutingWriter, base: Path, name: str) -> None:
    before = writer.stats()
    with stopped(before.worker_pid):
        fill(writer, name)
        pad = "x" * 400_000
        receipts = [writer.put(f"{name}:{1000 + i}", experts(0, BIG), "LTK", weight_version=pad) for i in range(6)]
    assert [bool(receipt.ref) for receipt in receipts] == [True] * 4 + [False] * 2
    assert writer.flush().dropped == {"spool full": 7}
    stats = writer.stats()
    assert stats.dropped["spool full"] - before.dropped.get("spool full", 0) == 7
    assert stats.dropped_without_row - before.dropped_without_row == 2
    rows = stored_rows(base / "ds")
    assert [rows[f"{name}:{1000 + i}"] for i in range(6)] == [1] * 4 + [0] * 2


@pytest.mark.parametrize("said", ["tags", "weight_version"])
def test_the_most_that_a_put_may_say_is_dropped_like_any_other(
    writer: RoutingWriter, dataset: Any, name: str, said: str
) -> None:
    most = "x" * (MAX_META_BYTES - 100)
    with stopped(writer.stats().worker_pid):
        fill(writer, name)
        receipt = writer.put(f"{name}:1000", experts(0, BIG), "LTK", **{said: {"t": most} if said == "tags" else most})
    assert receipt.ref
    writer.flush()
    (head,) = dataset.heads([f"{name}:1000"])
    assert (head.status, head.tags) == ("dropped", {})


@pytest.mark.parametrize("on_full", ["drop", "raise"])
def test_the_other_policies_never_wait(
    base: Path, tmp_path: Path, dataset: Any, name: str, on_full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RoutingWriter(base / "ds", options(tmp_path, on_full=on_full, block_timeout_s=1000)) as other:
        waits = Waits(other, monkeypatch)
        with stopped(other.stats().worker_pid):
            if on_full == "drop":
                fill(other, name)
            else:
                with pytest.raises(rr.SpoolFullError, match=r"no room for record .*360000 bytes.*raise spool_bytes"):
                    fill(other, name)
            assert waits.seen == []
            accepted = other.stats().accepted
        assert other.flush().dropped == ({"spool full": 1} if on_full == "drop" else {})
    assert len(list(dataset.ids(name))) == accepted + (on_full == "drop")
