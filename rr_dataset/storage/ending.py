"""The end of the interpreter while requests are on their way.

obstore and pyarrow have threads that Python did not start. One of them that asks for the interpreter once that ends is
killed there: under obstore the process aborts, and pyarrow waits for it for ever. So at exit no request begins any more,
those on their way are cut short, and Python goes on with its end when these threads have come to rest.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as TimedOut  # another one in Python 3.10
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
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: weakref.WeakSet[object] = weakref.WeakSet()

    def run(self, call: Coroutine[Any, Any, _T]) -> _T:
        """The result of a call in fsspec's event loop. An interrupt here ends it, and so does `interruptible`."""
        with self._lock:
            ends = self._ends
            if not ends:
                self._loop = get_loop()
                future = asyncio.run_coroutine_threadsafe(self._as_task(call), self._loop)
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
            with suppress(TimedOut):
                asyncio.run_coroutine_threadsafe(self._ended(), get_loop()).result(until - time.monotonic())
        seen: dict[str, list[str]] | None = None
        while time.monotonic() < until:
            before, seen = seen, _switches(self._was_visited)
            if seen == {} or (seen is not None and seen == before and not self._visits):
                return
            time.sleep(STILL_S)  # others may have the interpreter

    def own(self, client: object) -> None:
        """See `own`."""
        with self._lock:
            self._clients.add(client)

    def disown(self) -> None:
        """In a forked child: keep clients and connections of the parent from being closed, or written to, here.

        One that is destroyed in the child would be taken out of the epoll that both share, and the parent hears no answer.
        """
        clients = list(self._clients)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(clients))  # nothing of them is destroyed, not at the end either
        sockets = [each.get_extra_info("socket") for each in getattr(self._loop, "_transports", {}).values()]
        null = os.open(os.devnull, os.O_RDWR)
        for each in (*sockets, getattr(self._loop, "_selector", None)):
            if each is not None and each.fileno() >= 0:
                os.dup2(null, each.fileno(), inheritable=False)
        os.close(null)

    async def _ended(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)


def _leave() -> NoReturn:
    """A daemon thread, for which nobody waits, ends without a word, and lets go of its locks."""
    thread = threading.current_thread()
    if thread.daemon and not _is_foreign(thread):
        raise SystemExit
    raise RequestFailed(Kind.ENDS, "no request begins any more")


def _is_foreign(thread: threading.Thread) -> bool:
    return isinstance(thread, threading._DummyThread)  # noqa: SLF001 -- one that Python only saw


def _switches(of_all: bool) -> dict[str, list[str]] | None:
    """How often obstore's threads were switched to, or all others but this one: Python's, too, give pyarrow's something to do.

    None if one is at work, or waits for a core or for the interpreter: that it asks for every few milliseconds.
    """
    ours, names = threading.get_native_id(), "" if of_all else _OBSTORE
    found = {}
    for thread in _THREADS.iterdir():
        if int(thread.name) == ours:
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


def own(client: object) -> None:
    """This one, and what it holds, is of no use to forked children, and not theirs to close."""
    _process.own(client)


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
    global _process
    parents, _process = _process, _Process()
    parents.disown()


os.register_at_fork(after_in_child=_forget)
