"""Work side by side: the threads of one dataset in one process, and what bounds the memory they fill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from itertools import islice
from threading import Condition
from typing import Any, TypeVar

from rr_dataset.storage import Storage
from rr_dataset.storage.pending import interruptible

_T = TypeVar("_T")
_R = TypeVar("_R")


def answers(storage: Storage, ask: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """What `ask` returns for each item, in their order; on a remote store side by side, for one request each."""
    if not storage.is_remote or len(items) < 2:
        return [ask(item) for item in items]
    with threads(min(len(items), storage.requests_at_once), "rr-ask") as start:
        return [future.result() for future in [start(partial(ask, item)) for item in items]]


def answer_each(storage: Storage, ask: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
    """`answers`, however many items there are: some at a time on a remote store, else one."""
    left = iter(items)
    while some := list(islice(left, storage.requests_at_once if storage.is_remote else 1)):
        yield from answers(storage, ask, some)


@contextmanager
def threads(number: int, name: str) -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    """What starts a call in one of some threads, which end with the block.

    An error in the block leaves out the calls that have not begun, an interrupt also ends the requests of those that have.
    """
    with ThreadPoolExecutor(number, name) as pool:
        try:
            with interruptible():
                yield partial(_started, pool)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _started(pool: ThreadPoolExecutor, work: Callable[[], _R]) -> Future[_R]:
    """`work` in a thread of the pool, or in this one where the interpreter ends, which starts no threads any more."""
    try:
        return pool.submit(copy_context().run, work)
    except RuntimeError:
        done: Future[_R] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 -- raised by result()
            done.set_exception(error)
        return done


class Workers:
    """The reading threads of one dataset in one process, started when first needed."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "rr-read")

    def start(self, work: Callable[[], _R]) -> Future[_R]:
        """`work` in a thread of its own."""
        try:
            return _started(self._pool, work)
        except Exception:
            raise
        except BaseException:  # Ctrl-C: a thread may have begun that the pool does not know of, and would never end
            self._pool.shutdown(wait=False)
            self._pool = ThreadPoolExecutor(self._threads, "rr-read")
            raise

    def each(self, work: Callable[[_T], None], items: Sequence[_T], at_once: int | None = None) -> None:
        """`work` on every item: the caller and at most `at_once - 1` threads take them in turns.

        The first error stops the rest, and is raised once all have stopped. An interrupt of the caller is raised at once, and
        ends the requests of the others. `work` may call this too.
        """
        with interruptible():
            self._each(work, items, at_once)

    def _each(self, work: Callable[[_T], None], items: Sequence[_T], at_once: int | None) -> None:
        queue = iter(items)
        failed: list[BaseException] = []

        def drain() -> None:
            for item in queue:
                if failed:
                    return
                try:
                    work(item)
                except BaseException as error:  # noqa: BLE001 -- raised in the caller
                    failed.append(error)

        helpers = min(at_once or self._threads, self._threads, len(items)) - 1
        futures = [self.start(drain) for _ in range(helpers)]
        drain()
        for error in failed:
            if not isinstance(error, Exception):  # Ctrl-C: whoever hangs is not waited for
                raise error
        for future in futures:
            if not future.cancel():
                future.result()
        if failed:
            raise failed[0]

    def each_that_waits(self, work: Callable[[_T], None], items: Sequence[_T]) -> None:
        """`work` on every item: the first in the caller, the others side by side if the first waited longer than it computed.

        Threads do not share the interpreter: with files in the page cache, reading indexes in four took twice as long as in one.
        """
        started_s, busy_s = time.perf_counter(), time.thread_time()
        for item in items[:1]:
            work(item)
        busy_s = time.thread_time() - busy_s
        waited_s = time.perf_counter() - started_s - busy_s
        self.each(work, items[1:], None if waited_s > busy_s else 1)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


class Budget:
    """Bytes that threads may hold together. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._changed = Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait until `size` more fit, or nothing is held at all: what is larger than the limit goes alone."""
        with self._changed:
            while self._held and self._held + size > self._limit:
                self._changed.wait()
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()
