"""The end of the interpreter while requests are on their way.

obstore and pyarrow have threads that Python did not start. One of them that asks for the interpreter once that ends is
killed there: under obstore the process aborts, and pyarrow waits for it for ever. So at exit no request begins any more,
those on their way are cut short, and Python goes on with its end when these threads have come to rest.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fsspec.asyn import get_loop

from rr_dataset.storage.client import Kind, RequestFailed
from rr_dataset.storage.pending import result

_T = TypeVar("_T")

_THREADS = Path("/proc/self/task")
_OBSTORE = "tokio-"  # how the names of its threads begin
STILL_S = 0.02  # while no thread was switched to, nothing goes on of what had been queued
END_S = 5.0  # the longest wait for that, where threads of somebody else never rest


class _Process:
    """What this process has on its way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()  # of the event loop, which alone changes it
        self._visits = 0
        self._was_visited = self._ends = False

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """The result of a call in fsspec's event loop. An interrupt here ends it, and so does `interruptible`."""
        with self._lock:
            ends = self._ends
            if not ends:
                future = asyncio.run_coroutine_threadsafe(self._as_task(call), get_loop())
                self._futures.add(future)
        if ends:
            call.close()
            _leave()
        try:
            return result(future)
        except CancelledError:
            if self._ends:
                _leave()
            raise
        finally:
            with self._lock:
                self._futures.discard(future)

    async def _as_task(self, call: Coroutine[Any, Any, _T]) -> _T:
        task: Any = asyncio.current_task()
        self._tasks.add(task)
        try:
            return await call
        finally:
            self._tasks.discard(task)

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Around what a thread of pyarrow does in Python. Raises OSError once the interpreter ends."""
        with self._lock:
            self._was_visited = True
            if self._ends:
                raise OSError("the interpreter ends")
            self._visits += 1
        try:
            yield
        finally:
            with self._lock:
                self._visits -= 1

    def end(self) -> None:
        """No call and no visit from now on; returns when all is at rest, or after END_S."""
        until = time.monotonic() + END_S
        with self._lock:
            self._ends = True
            futures = list(self._futures)
        for future in futures:
            future.cancel()
        if futures:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._ended(), get_loop()).result(END_S)
        names = "" if self._was_visited else _OBSTORE
        seen: dict[str, list[str]] | None = None
        while time.monotonic() < until:
            before, seen = seen, _switches(names)
            if seen == {} or (seen is not None and seen == before and not self._visits):
                return
            time.sleep(STILL_S)  # others may have the interpreter

    async def _ended(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)


def _leave() -> NoReturn:
    """Nobody waits for a daemon thread: as the interpreter itself does with one, stop it without a word."""
    thread = threading.current_thread()
    if thread.daemon and not _is_foreign(thread):
        threading.Event().wait()
    raise RequestFailed(Kind.ENDS, "no request begins any more")


def _is_foreign(thread: threading.Thread) -> bool:
    return isinstance(thread, threading._DummyThread)  # noqa: SLF001 -- one that Python only saw


def _switches(names: str) -> dict[str, list[str]] | None:
    """How often the threads that Python did not start, of these names, were switched to.

    None if one is at work, or waits for a core or for the interpreter: that it asks for every few milliseconds.
    """
    ours = {
        threading.get_native_id(),  # after a fork, what enumerate() tells of this thread is the parent's
        *(each.native_id for each in threading.enumerate() if not _is_foreign(each)),
    }
    found = {}
    for thread in _THREADS.iterdir():
        if int(thread.name) in ours:
            continue
        with suppress(OSError):  # it has just ended
            lines = (thread / "status").read_text().splitlines()
            said = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if said["Name"].startswith(names):
                if said["State"][0] != "S":
                    return None
                found[thread.name] = [said["voluntary_ctxt_switches"], said["nonvoluntary_ctxt_switches"]]
    return found


_process = _Process()


def run(call: Coroutine[Any, Any, _T]) -> _T:
    """See `_Process.run`."""
    return _process.run(call)


@contextmanager
def visit() -> Iterator[None]:
    """See `_Process.visit`."""
    with _process.visit():
        yield


# Finalizers, that of s3fs which closes its connections among them, run after what is registered from here on.
weakref.finalize(_process, int)


@atexit.register
def _end() -> None:
    _process.end()


def _forget() -> None:
    """A forked child has none of these threads."""
    global _process  # noqa: PLW0603 -- one a process
    _process = _Process()


os.register_at_fork(after_in_child=_forget)
