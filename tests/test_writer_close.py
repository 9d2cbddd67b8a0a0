"""Closing while others put: a put is durable when `close` returns, or refused, or kept where the error says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset import writer as writer_module
from rr_dataset.intake import Intake
from rr_dataset.slab import Batch
from tests.engines import SPEC, experts, options, spools, stopped, stored_rows, until

DEADLINE_S = 60.0


class Gate:
    """Puts stop at a step, each until it is let go."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self) -> None:
        self.reached.release()
        assert self.open.wait(DEADLINE_S)


class Slow:
    """A tensor whose values come late: a put that has not yet reserved."""

    def __init__(self, gate: Gate) -> None:
        self.dtype, self._gate = np.dtype(np.uint8), gate

    def numpy(self) -> Any:
        self._gate()
        return experts(1)


class Putting:
    """A thread that puts one record."""

    def __init__(self, writer: rr.RoutingWriter, request_id: str, array: Any) -> None:
        self.outcome: Any = None

        def work() -> None:
            try:
                self.outcome = writer.put(request_id, array, "LTK")
            except Exception as error:  # noqa: BLE001 - the test looks at it
                self.outcome = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def end(self) -> Any:
        self.thread.join(DEADLINE_S)
        return self.outcome


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "spools"
    folder.mkdir()
    return folder


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Puts of "slow" ids stop between their reservation and their commit."""
    gate, fill = Gate(), Intake.fill

    def slow_fill(intake: Intake, payload: Any) -> None:
        fill(intake, payload)
        if intake.request_id.startswith(b"slow"):
            gate()

    monkeypatch.setattr(Intake, "fill", slow_fill)
    return gate


def in_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_put_that_has_no_room_yet_is_refused_not_dropped(
    tmp_path: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    writer = rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    writer.put("a:1", experts(1), "LTK")
    late = Putting(writer, "a:2", Slow(gate))
    gate.reached.acquire()
    writer.close()
    gate.open.set()
    assert isinstance(late.end(), rr.WriterClosedError)
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}
    assert spools(place) == []
    assert caplog.messages == []


def test_a_put_that_has_room_is_waited_for(tmp_path: Path, place: Path, filling: Gate) -> None:
    writer = rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    slow = Putting(writer, "slow:1", experts(1))
    filling.reached.acquire()
    closing = in_thread(writer.close)
    until(lambda: writer._spool._refusing, "the writer closes")
    filling.open.set()
    closing.join(DEADLINE_S)
    assert slow.end().durable()
    assert stored_rows(tmp_path / "ds") == {"slow:1": 1}
    assert spools(place) == []


@pytest.mark.parametrize("turn", range(5))
def test_whatever_was_accepted_is_durable_when_close_returns(tmp_path: Path, place: Path, turn: int) -> None:
    writer = rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    accepted: list[rr.Receipt] = []

    def work(thread: int) -> None:
        for i in range(100_000):
            try:
                accepted.append(writer.put(f"a{thread}:{i}", experts(turn), "LTK"))
            except rr.WriterClosedError:
                return

    threads = [in_thread(lambda thread=thread: work(thread)) for thread in range(4)]
    until(lambda: len(accepted) > 20 * turn, "they put")
    writer.close()
    for thread in threads:
        thread.join(DEADLINE_S)
    kept = [receipt for receipt in accepted if isinstance(receipt._outcome, Batch)]
    assert all(receipt.durable() for receipt in kept)
    assert spools(place) == []
    rows = stored_rows(tmp_path / "ds")
    assert [rows[receipt.ref.partition(":")[2]] for receipt in accepted] == [1] * len(accepted)


def test_puts_that_outlast_the_drain_are_counted_and_recovered(tmp_path: Path, place: Path, filling: Gate) -> None:
    root = tmp_path / "ds"
    writer = rr.RoutingWriter(root, options(place, drain_timeout_s=0.05), create=SPEC)
    slow = [Putting(writer, f"slow:{i}", experts(i)) for i in range(2)]
    for _ in slow:
        filling.reached.acquire()
    with pytest.raises(
        rr.FlushTimeoutError, match=rf"kept in {place}.*; 2 puts are still being copied and keep it locked"
    ):
        writer.close()
    assert [report.outcome for report in rr.recover(place)] == ["living"]
    filling.open.set()
    for each in slow:
        receipt = each.end()
        with pytest.raises(rr.WriterClosedError, match="closed before this was durable"):
            receipt.wait(0)
    assert [(report.outcome, report.records) for report in rr.recover(place)] == [("recovered", 2)]
    assert stored_rows(root) == {"slow:0": 1, "slow:1": 1}
    np.testing.assert_array_equal(rr.open_dataset(root).get("slow:1").routed_experts, experts(1))
    assert spools(place) == []


def test_a_second_close_returns_when_the_first_is_done(tmp_path: Path, place: Path, filling: Gate) -> None:
    writer = rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    slow = Putting(writer, "slow:1", experts(1))
    filling.reached.acquire()
    closing = in_thread(writer.close)
    until(lambda: writer._spool._refusing, "the first closes")
    at_exit = in_thread(writer_module._close_all)
    filling.open.set()
    at_exit.join(DEADLINE_S)
    assert stored_rows(tmp_path / "ds") == {"slow:1": 1}
    assert spools(place) == []
    closing.join(DEADLINE_S)
    assert slow.end().durable()


def test_awaits_that_are_cancelled_leave_nothing_behind(tmp_path: Path, place: Path) -> None:
    async def ask() -> None:
        await receipt

    async def give_up() -> None:
        for _ in range(20):
            task = asyncio.ensure_future(ask())
            await asyncio.sleep(0)
            assert len(receipt._outcome.waiters) == 2
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def both() -> None:
        patient = asyncio.ensure_future(ask())
        await asyncio.sleep(0)
        await give_up()
        assert len(receipt._outcome.waiters) == 1
        go_on.set()
        await asyncio.wait_for(patient, DEADLINE_S)

    with rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC) as writer:
        go_on, held = threading.Event(), threading.Event()

        def hold() -> None:
            with stopped(writer.stats().worker_pid):
                held.set()
                go_on.wait(DEADLINE_S)

        holder = in_thread(hold)
        held.wait(DEADLINE_S)
        receipt = writer.put("a:1", experts(1), "LTK")
        asyncio.run(both())
        holder.join(DEADLINE_S)
        assert receipt.durable()
        assert receipt._outcome.waiters == []  # type: ignore[union-attr]
