"""Reading ahead in a thread, with a bound on the bytes that wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Thread
from typing import Generic, TypeVar

_A = TypeVar("_A")
_T = TypeVar("_T")


class Prefetch(Generic[_A, _T]):
    """`make` of each of `asked` in their order, made by one thread ahead of who iterates.

    At most `limit_bytes` of results wait, besides one more that was made last. The thread starts with the iteration and has
    ended when the iteration has, also one that was broken off. What `make` raises comes where its result would have come,
    and ends it.
    """

    def __init__(
        self, make: Callable[[_A], _T], asked: Iterable[_A], size: Callable[[_T], int], limit_bytes: int
    ) -> None:
        self._make, self._asked, self._size, self._limit = make, asked, size, limit_bytes
        self._changed = Condition()
        self._ready: deque[tuple[int, _T]] = deque()
        self._bytes = 0  # of what is ready
        self._over = False
        self._stopped = False
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[_T]:
        thread = Thread(target=self._run, name="rr_dataset-prefetch", daemon=True)
        thread.start()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._ready or self._over)
                    if not self._ready:
                        break
                    size, result = self._ready.popleft()
                    self._bytes -= size
                    self._changed.notify_all()
                yield result
                del result
            if self._error is not None:
                raise self._error
        finally:
            with self._changed:
                self._stopped = True
                self._ready.clear()
                self._changed.notify_all()
            thread.join()

    def _run(self) -> None:
        try:
            for each in self._asked:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._bytes < self._limit or not self._ready)
                    if self._stopped:
                        return
                result = self._make(each)
                with self._changed:
                    size = self._size(result)
                    self._ready.append((size, result))
                    self._bytes += size
                    self._changed.notify_all()
                del result
        except BaseException as error:  # noqa: BLE001 -- raised again by who iterates
            self._error = error
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
