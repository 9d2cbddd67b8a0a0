"""The requests that one call has on their way, in whatever threads, so that Ctrl-C in the caller ends them all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, TypeVar

_T = TypeVar("_T")


class Requests:
    """Those of one call. Thread-safe."""

    def __init__(self) -> None:
        self._futures: set[Future[Any]] = set()
        self._over = False
        self._lock = Lock()

    def add(self, future: Future[Any]) -> None:
        """One that begins."""
        with self._lock:
            self._futures.add(future)
            over = self._over
        if over:
            future.cancel()

    def discard(self, future: Future[Any]) -> None:
        """One that is over."""
        with self._lock:
            self._futures.discard(future)

    def end(self) -> None:
        """Cancel them, and those that are still to come."""
        with self._lock:
            self._over = True
            left = list(self._futures)
        for future in left:
            future.cancel()


_pending: ContextVar[Requests | None] = ContextVar("rr_pending", default=None)


@contextmanager
def interruptible(requests: Requests | None = None) -> Iterator[None]:
    """An interrupt in the block ends the requests made in it, also by threads that run in copies of its context.

    Without it they would go on until they time out, and whoever waits for their threads with them. Within another such block
    it ends all of that one's. requests: those of earlier blocks, which go with them.
    """
    outer = _pending.get()
    made = outer or requests or Requests()
    token = _pending.set(made)
    try:
        yield
    except Exception:
        raise
    except BaseException:
        made.end()
        raise
    finally:
        _pending.reset(token)


def result(future: Future[_T]) -> _T:
    """Of a request; raises CancelledError where its call was interrupted. An interrupt here cancels it."""
    pending = _pending.get()
    if pending is not None:
        pending.add(future)
    try:
        return future.result()
    finally:
        future.cancel()  # of one that is done it does nothing
        if pending is not None:
            pending.discard(future)
