"""Threads that take turns, and the memory they may fill together."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from memory_store import MemoryStorage, RemoteMemory

from rr_dataset.at_once import Budget, Workers, answers


@pytest.mark.parametrize("waits", [True, False])
def test_items_are_worked_on_side_by_side_if_the_first_waits(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """A clock in which the first takes 10 ms, of which it computes 1 or 9."""
    clocks = {"perf_counter": iter([0.0, 0.010]), "thread_time": iter([0.0, 0.001 if waits else 0.009])}
    for name, clock in clocks.items():
        monkeypatch.setattr(time, name, clock.__next__)
    threads: dict[int, int] = {}
    together = threading.Barrier(3)

    def work(item: int) -> None:
        threads[item] = threading.get_ident()
        if waits and item:
            together.wait(60)

    Workers(3).each_that_waits(work, range(4))
    assert threads[0] == threading.get_ident()
    assert len(set(threads.values())) == (3 if waits else 1)
    assert sorted(threads) == [0, 1, 2, 3]


def test_no_item_is_worked_on() -> None:
    Workers(3).each_that_waits(lambda item: pytest.fail(f"{item}"), [])


@pytest.mark.parametrize("at_once", [None, 1, 3, 100])
def test_each_item_is_worked_on_once(at_once: int | None) -> None:
    done: list[int] = []
    Workers(4).each(done.append, range(1000), at_once)
    assert sorted(done) == list(range(1000))


def test_items_are_worked_on_side_by_side() -> None:
    together = threading.Barrier(3, timeout=60)
    Workers(4).each(lambda _: together.wait() and None, range(3), 3)


def test_the_first_error_stops_the_rest_and_is_raised() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        done.append(item)
        if item == 3:
            raise KeyError(item)

    with pytest.raises(KeyError):
        Workers(1).each(work, range(100))
    assert done == [0, 1, 2, 3]
    with pytest.raises(KeyError):
        Workers(4).each(work, range(100))


def test_a_busy_pool_does_not_hold_up_the_caller() -> None:
    workers = Workers(2)
    inner: list[int] = []
    workers.each(lambda _: workers.each(inner.append, range(50)), range(4))
    assert len(inner) == 200


@pytest.mark.parametrize("storage", [MemoryStorage(), RemoteMemory()])
def test_answers_come_in_the_order_asked(storage: MemoryStorage) -> None:
    assert answers(storage, lambda item: -item, range(100)) == [-item for item in range(100)]


def test_a_remote_store_is_asked_side_by_side() -> None:
    together = threading.Barrier(3, timeout=60)
    assert len(answers(RemoteMemory(), lambda _: together.wait(), range(3))) == 3


def test_a_budget_is_never_exceeded() -> None:
    budget, held, most = Budget(10), [0], [0]
    lock = threading.Lock()

    def work(size: int) -> None:
        with budget.hold(size):
            with lock:
                held[0] += size
                most[0] = max(most[0], held[0])
            with lock:
                held[0] -= size

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [4, 5, 6, 1] * 100))
    assert 6 <= most[0] <= 10


def test_what_is_larger_than_a_budget_goes_alone() -> None:
    budget = Budget(10)
    entered = threading.Event()

    def small() -> None:
        with budget.hold(1):
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with budget.hold(50):
            waits = pool.submit(small)
            assert not entered.wait(0.01)
        waits.result(60)


def test_a_failure_gives_its_bytes_back() -> None:
    budget = Budget(10)
    for _ in range(3):
        with pytest.raises(KeyError), budget.hold(10):
            raise KeyError


def test_an_interrupt_while_a_thread_begins_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its pool does not know of would be waited for at exit, for ever."""
    workers, begin = Workers(2), threading.Thread.start
    begun: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        begun.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            workers.start(threading.get_ident)
    begun[0].join(60)
    assert not begun[0].is_alive()
    assert workers.start(lambda: 3).result(60) == 3


AT_THE_END = """
import atexit
from rr_dataset.at_once import Workers, threads
workers, done = Workers(3), []
workers.each(done.append, range(5))

def read():
    workers.each(done.append, range(5))
    with threads(2, "some") as start:
        failed = [start(lambda: done.append(5)), start(lambda: 1 // 0)][1]
    print(sorted(done), failed.exception())

atexit.register(read)
"""


def test_what_reads_at_the_end_of_the_interpreter_does_it_alone() -> None:
    """It starts no threads any more."""
    run = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == (f"{sorted([*range(5), *range(6)])} integer division or modulo by zero\n", "")
