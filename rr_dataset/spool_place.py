"""Where a spool lies: which file system has room for it, the writer's directory, and the lock that says who owns it."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from rr_dataset import own_locks
from rr_dataset.errors import SpoolUnavailableError

CONTROL_BYTES = 1 << 20  # a slab for drop rows and deletes only, about 4,000 of them
CONTROL_SLABS = 2  # come on top of spool_bytes
SHM = Path("/dev/shm")  # noqa: S108 - not a predictable file: each spool is a folder of its own, mode 0700
SHM_SHARE = 8  # all spools of a host together take at most an eighth of it
LOCK_WAIT_S = 5.0  # far longer than anybody holds the lock of a spool that is being made
LOG_NAME = "worker.log"

_OURS = re.compile(rf"lock|{re.escape(LOG_NAME)}|[0-9]{{6,}}\.slab")

_log = logging.getLogger("rr_dataset")


def choose_base(spool_dir: str | None, spool_bytes: int) -> Path:
    """The directory that will hold the spool: `spool_dir`, else /dev/shm if it has room, else the temporary folder.

    Raises SpoolUnavailableError, naming what was tried, when none has room for `spool_bytes`.
    """
    need = spool_bytes + CONTROL_SLABS * CONTROL_BYTES
    tried: list[str] = []
    for base in [Path(spool_dir)] if spool_dir else [SHM, None]:
        try:
            place = Path(tempfile.gettempdir()) if base is None else base
        except FileNotFoundError as error:  # it looks for one that can be written
            tried.append(str(error.strerror))
            continue
        problem = _problem(place, need, shared=not spool_dir and place == SHM)
        if problem is None:
            if tried:
                _log.warning("the spool goes to %s, where puts may be slower: %s", place, "; ".join(tried))
            return place
        tried.append(f"{place}: {problem}")
    raise SpoolUnavailableError(
        f"no room for a spool of {spool_bytes} bytes ({'; '.join(tried)}); give spool_dir= or a smaller spool_bytes="
    )


def spools_of(base: Path) -> Path:
    """The folder of this user's spools under `base`."""
    return base / f"rr_dataset-{os.getuid()}"


def _problem(base: Path, need: int, *, shared: bool) -> str | None:
    try:
        stat = os.statvfs(base)
    except OSError as error:
        return error.strerror
    if not os.access(base, os.W_OK | os.X_OK):
        return "not writable"
    free = stat.f_bavail * stat.f_frsize
    if shared:
        free = min(free, stat.f_blocks * stat.f_frsize // SHM_SHARE - _taken(base))
    return None if free >= need else f"room for {max(free, 0)} bytes"


def _taken(base: Path) -> int:
    """Bytes of all slabs under `base` that this user can see; writers come and go meanwhile."""
    taken = 0
    for slab in base.glob("rr_dataset-*/*/*.slab"):
        with suppress(FileNotFoundError):
            taken += slab.stat().st_size
    return taken


def make_directory(base: Path, writer: str) -> tuple[Path, int]:
    """The writer's directory and the descriptor of its lock, held before the directory gets its name."""
    folder = spools_of(base)
    new = folder / f".{writer}"
    fd, made = -1, False
    try:
        while not made:
            folder.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # the last writer that closed has just removed the folder
                if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                    raise SpoolUnavailableError(f"{folder} belongs to somebody else; give spool_dir= of your own")
                new.mkdir(mode=0o700)
                made = True
        fd = _open_lock(new / "lock")
        _take_lock(fd)
        new.rename(folder / writer)
    except OSError as error:
        if made:
            remove_directory(new)
        if fd >= 0:
            own_locks.close(fd)
        raise SpoolUnavailableError(f"{folder}: {error.strerror}; give spool_dir= of your own") from error
    return folder / writer, fd


def sort_out(directory: Path) -> tuple[list[str], list[str]]:
    """The names in a spool's directory: the files a writer makes, its lock last, and whatever else lies there."""
    ours, foreign = list[str](), list[str]()
    with os.scandir(directory) as found:
        for entry in found:
            known = _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            (ours if known else foreign).append(entry.name)
    return sorted(ours, key=lambda name: (name == "lock", name)), sorted(foreign)


def remove_directory(directory: Path) -> None:
    """Delete a spool, its lock last: cut short anywhere, it is still one that a later writer can remove.

    Only what a writer makes is deleted: the directory and its lock stay when something else lies there. The folder of
    the user goes with his last spool. What cannot be deleted stays.
    """
    with suppress(OSError):
        ours, foreign = sort_out(directory)
        if foreign:
            _log.warning("%s stays: no writer made what else lies there: %s", directory, ", ".join(foreign))
            ours = [name for name in ours if name != "lock"]
        for name in ours:
            (directory / name).unlink(missing_ok=True)
        if foreign:
            return
        directory.rmdir()
        if directory.parent == spools_of(directory.parent.parent):
            directory.parent.rmdir()


# ---- locks


def _open_lock(path: Path) -> int:
    with own_locks.NO_FORK:
        return own_locks.keep(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _take_lock(fd: int) -> None:
    """Take the lock of a new spool, which nobody else holds but for the instant in which he looks whether it is dead."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.001)
        else:
            return
