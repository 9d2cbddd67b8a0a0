"""The file of a slot table: its name, and the lock that all who have it share, so that it is swept once nobody does."""

from __future__ import annotations

import fcntl
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from rr_dataset import own_locks
from rr_dataset.errors import InvalidInputError

NEW = ".new"  # ends the name of a table that is being made
_MAKING_S = 60.0  # far longer than that takes
_SWEEP_S = 1.0  # far longer than anybody looks whether a table is dead
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


def make(path: Path) -> int:
    """A new file, locked against all others until `share`."""
    with own_locks.NO_FORK:
        fd = own_locks.keep(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def share(fd: int) -> None:
    """Let others attach."""
    fcntl.flock(fd, fcntl.LOCK_SH)


def give_up(fd: int, path: Path) -> None:
    """Close the file, and remove it if nobody else has it."""
    with own_locks.NO_FORK:
        with suppress(OSError):  # others have it
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                path.unlink(missing_ok=True)
        own_locks.close(fd)


def open_shared(path: Path, deadline: float) -> int:
    """The file with a shared lock. Raises InvalidInputError when there is none by then."""
    patience = time.monotonic() + _SWEEP_S
    while True:
        why = "it is being removed"
        try:
            fd = _try_shared(path)
            if os.fstat(fd).st_nlink:
                return fd
            own_locks.close(fd)
        except BlockingIOError:  # of who makes it, sweeps it, or closes it last
            deadline = max(deadline, patience)
        except OSError as error:
            why = str(error.strerror)
        if time.monotonic() >= deadline:
            raise InvalidInputError(f"{path}: {why}; the engine makes it with this name")
        time.sleep(0.01)


def _try_shared(path: Path) -> int:
    with own_locks.NO_FORK:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return own_locks.keep(fd)


def path_of(name: str, directory: str | os.PathLike[str]) -> Path:
    """Where the table of this name lies. Raises InvalidInputError for a name that is none."""
    if type(name) is not str or not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"name={name!r}: expected letters, digits, '.', '_' and '-', such as \"engine-8000.dp0\""
        )
    return Path(directory) / f"rr_slots-{os.getuid()}-{name}"


def sweep(path: Path) -> None:
    """Remove tables of processes that are gone; whoever still has one mapped keeps it."""
    for found in path.parent.glob(f"rr_slots-{os.getuid()}-*"):
        with own_locks.NO_FORK, suppress(OSError):  # gone meanwhile, in use, or no file
            fd = os.open(found, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                there, mine = found.stat(), os.fstat(fd)
                begun = found.name.endswith(NEW) and time.time() - there.st_mtime < _MAKING_S
                if there.st_ino == mine.st_ino and not begun:  # else another has swept it and made a new one
                    found.unlink()
            finally:
                os.close(fd)
