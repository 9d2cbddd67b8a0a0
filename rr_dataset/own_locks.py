"""Descriptors with a lock that is of this process alone: a forked child closes them, there they would outlive its parent."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

NO_FORK = threading.RLock()  # hold it from opening a descriptor until it is kept

_kept: set[int] = set()


def keep(fd: int) -> int:
    """From now on a forked child has no copy of it."""
    _kept.add(fd)
    return fd


def close(fd: int) -> None:
    """Close one that was kept."""
    with NO_FORK:
        _kept.discard(fd)
        os.close(fd)


def _forget() -> None:
    for fd in _kept:
        with suppress(OSError):  # whoever forked may have closed all that was open
            os.close(fd)
    _kept.clear()
    NO_FORK.release()


os.register_at_fork(before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=_forget)
