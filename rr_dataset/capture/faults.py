"""Faults of callers in hooks: told once, counted for good, and raised only on request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rr_dataset.errors import reason_of

T = TypeVar("T")

_log = logging.getLogger("rr_dataset")


class Faults:
    """Keeps what goes wrong in a hook away from serving, unless `strict`."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()  # by hook
        self.last: dict[str, str] = {}  # by hook: what went wrong the last time
        self._held: list[Exception] | None = None

    def __repr__(self) -> str:
        told = "; ".join(f"{hook}: {count}, the last: {self.last[hook]}" for hook, count in self.counts.items())
        return f"Faults({told or 'none'})"

    def tell(self, hook: str, error: Exception) -> None:
        """Count it, log the first of each hook; raise it if strict."""
        self.last[hook] = reason_of(error)
        self.counts[hook] += 1
        if self.strict and self._held is None:
            raise error
        if self._held is not None:
            self._held.append(error)
        if self.counts[hook] == 1:
            _log.error("routing capture: %s: %s; serving goes on, `faults` has the rest", hook, error, exc_info=error)

    def attempt(self, hook: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T | None:
        """What the call returns; None if it raised, which is told instead, once all else in it is done."""
        with self.held():
            try:
                return call(*arguments, **named)
            except Exception as error:  # noqa: BLE001 - whatever a hook was given, the engine goes on
                self.tell(hook, error)
                return None

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is told inside is raised at its end, the first of it, if strict: so one fault keeps nothing else from being done."""
        if self._held is not None:
            yield
            return
        self._held = []
        try:
            yield
        finally:
            errors, self._held = self._held, None
        if self.strict and errors:
            raise errors[0]
