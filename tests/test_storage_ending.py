"""Requests at the end of the interpreter; whole processes end in test_storage_connect and test_s3_processes."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rr_dataset.storage import ending
from rr_dataset.storage.client import Kind, RequestFailed
from tests.engines import DEADLINE_S, until

HOUR_S = 3600.0


async def answer(value: int) -> int:
    return value


def test_a_call_returns_what_it_gives() -> None:
    assert ending._Process().run(answer(3)) == 3


def test_no_call_begins_after_the_end() -> None:
    process = ending._Process()
    process.end()
    with pytest.raises(RequestFailed) as caught:
        process.run(answer(3))
    assert caught.value.kind is Kind.ENDS


def test_the_end_cuts_a_call_short_and_waits_for_what_it_leaves_behind() -> None:
    process = ending._Process()
    began, left = threading.Event(), threading.Event()

    async def hang() -> None:
        began.set()
        try:
            await asyncio.sleep(HOUR_S)
        finally:
            await asyncio.sleep(0.05)
            left.set()

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(process.run, hang())
        assert began.wait(DEADLINE_S)
        process.end()
        assert left.is_set()
    error = call.exception()
    assert isinstance(error, RequestFailed)
    assert error.kind is Kind.ENDS


def test_a_daemon_thread_ends_without_a_word_and_lets_go_of_its_locks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Somebody's function for the exit may want them."""
    process, lock, began = ending._Process(), threading.Lock(), threading.Event()

    async def hang() -> None:
        began.set()
        await asyncio.sleep(HOUR_S)

    def read() -> None:
        with lock:
            process.run(hang())

    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # which tells of anything but SystemExit
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert began.wait(DEADLINE_S)
    process.end()
    assert lock.acquire(timeout=DEADLINE_S)
    thread.join()
    assert capfd.readouterr().err == ""


def test_the_end_waits_for_a_visit_and_none_begins_after_it() -> None:
    process = ending._Process()
    inside, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def visit() -> None:
        with process.visit():
            inside.set()
            leave.wait(DEADLINE_S)

    def end() -> None:
        process.end()
        ended.set()

    with ThreadPoolExecutor(2) as pool:
        pool.submit(visit)
        assert inside.wait(DEADLINE_S)
        pool.submit(end)
        until(lambda: process._ends, "the end has begun")
        assert not ended.wait(5 * ending.STILL_S)
        leave.set()
        assert ended.wait(ending.END_S)
    with pytest.raises(OSError, match="ends"), process.visit():
        pass


def test_the_end_waits_no_longer_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "END_S", 0.1)
    process = ending._Process()
    with process.visit():
        process.end()
