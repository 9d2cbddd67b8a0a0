"""Time that passes only when all threads wait: so many round trips follow one another in a call, whatever the machine does meanwhile.

A request takes one tick. The clock goes on once every thread that it knows of waits, for an answer or for another thread; so
it must know all threads and all that they wait for: `patch` puts pools and locks that tell it into the modules under test.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from importlib import import_module
from threading import Condition, Event, Thread
from types import TracebackType
from typing import Any

import pytest

PATIENCE_S = 60.0  # real time: longer means that threads wait for what the clock does not know


class VirtualTime:
    """Counts ticks. The thread that makes it is the one that calls what is measured."""

    def __init__(self) -> None:
        self.ticks = 0
        self.most_at_once = 0
        self.changed = Condition()
        self._running = 1
        self._asking = 0

    def request(self) -> None:
        """Return one tick later."""
        with self.changed:
            self._asking += 1
            until = self.ticks + 1
            self.stopped()
            assert self.changed.wait_for(lambda: self.ticks >= until, PATIENCE_S), (
                "some thread waits for something else"
            )

    def started(self, threads: int = 1) -> None:
        """So many more threads run. The caller holds `changed`."""
        self._running += threads

    def stopped(self) -> None:
        """A thread has ended, or waits. The caller holds `changed`."""
        self._running -= 1
        if not self._running and self._asking:
            self.ticks += 1
            self.most_at_once = max(self.most_at_once, self._asking)
            self._running, self._asking = self._asking, 0
            self.changed.notify_all()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the threads of the product known."""

        def pool(threads: int, *_: Any, **__: Any) -> Pool:
            return Pool(self, threads)

        for module in ("at_once", "delete", "publisher"):
            monkeypatch.setattr(import_module(f"rr_dataset.{module}"), "ThreadPoolExecutor", pool)
        monkeypatch.setattr("rr_dataset.publish.wait", lambda futures: [future.exception() for future in futures])
        monkeypatch.setattr(import_module("rr_dataset.delete"), "Lock", lambda: KnownLock(self))


class _Future(Future[Any]):
    """A future whose waiters are known."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__()
        self._time = time
        self._awaiting = 0

    def _await(self) -> None:
        with self._time.changed:
            if not self.done():
                self._awaiting += 1
                self._time.stopped()

    def result(self, timeout: float | None = None) -> Any:
        self._await()
        return super().result(PATIENCE_S)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._await()
        return super().exception(PATIENCE_S)

    def run(self, work: Callable[[], Any]) -> None:
        """Take the result of `work`."""
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 -- it is the result
            error = raised
        with self._time.changed:
            self._time.started(self._awaiting)
            if error is None:
                self.set_result(result)
            else:
                self.set_exception(error)


class Pool(Executor):
    """A thread pool of which the clock knows."""

    def __init__(self, time: VirtualTime, threads: int) -> None:
        self._time, self._idle = time, threads
        self._queue: deque[tuple[_Future, Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = _Future(self._time)
        with self._time.changed:
            self._queue.append((future, lambda: fn(*args, **kwargs)))
            if self._idle:
                self._idle -= 1
                self._time.started()
                task = self._next()
                Thread(target=self._drain, args=(task,), daemon=True).start()
        return future

    def _next(self) -> tuple[_Future, Callable[[], Any]] | None:
        while self._queue:
            task = self._queue.popleft()
            if task[0].set_running_or_notify_cancel():
                return task
        return None

    def _drain(self, task: tuple[_Future, Callable[[], Any]] | None) -> None:
        while task is not None:
            task[0].run(task[1])
            with self._time.changed:
                task = self._next()
        with self._time.changed:
            self._idle += 1
            self._time.stopped()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Its threads end by themselves."""


class KnownLock:
    """A lock of which the clock knows."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._held = False
        self._waiters: deque[Event] = deque()

    def __enter__(self) -> None:
        with self._time.changed:
            if not self._held:
                self._held = True
                return
            mine = Event()
            self._waiters.append(mine)
            self._time.stopped()
        assert mine.wait(PATIENCE_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._time.changed:
            if self._waiters:  # it is handed over
                self._time.started()
                self._waiters.popleft().set()
            else:
                self._held = False
