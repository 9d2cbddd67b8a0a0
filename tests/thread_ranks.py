"""Ranks of a distributed trainer as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 60


class Ranks:
    """Threads in place of ranks. Their gather fails instead of hanging when one does not take part."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=TIMEOUT_S)
        self._values: list[Any] = [None] * count

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def all_gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return all_gather

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` gave or raised on each rank. The first runs in the caller's thread, which alone may start workers of paddle."""
        results: list[Any] = [None] * self.count

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:  # noqa: BLE001 -- looked at by the test
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(1, self.count)]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        return results
