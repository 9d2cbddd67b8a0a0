"""Faults of callers in hooks: told once, counted for good, and raised only on request."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_log = logging.getLogger("rr_dataset")


class Faults:
    """Keeps what goes wrong in a hook away from serving, unless `strict`."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()  # by hook

    def tell(self, hook: str, error: Exception) -> None:
        """Count it, log the first of each hook; raise it if strict."""
        self.counts[hook] += 1
        if self.strict:
            raise error
        if self.counts[hook] == 1:
            _log.error("routing capture: %s: %s; serving goes on, `faults` counts the rest", hook, error, exc_info=error)

    def attempt(self, hook: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """What the call returns; None if it raised, which is told instead."""
        try:
            return call(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a hook was given, the engine goes on
            self.tell(hook, error)
            return None
