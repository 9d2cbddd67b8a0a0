"""The spool: a pool of slabs that outlives the process which fills it, and the directory that holds it.

Who does what to a slab:

1. The engine takes a free slab, gives it a sequence number that is never used twice, and marks it active.
2. `reserve` appends an entry's header under the append lock, stamped there, so slab order is clock order. The caller
   fills the payload without the lock, beside other threads; `commit` writes the entry's commit word last.
3. A slab that is full, old or flushed is closed. It is sealed when its last open reservation ends.
4. The worker publishes sealed slabs and marks them published. It never touches a slab in another state, unless the
   engine is dead.
5. The engine takes published slabs back as free.

Whoever holds the flock on `lock` owns the directory; the engine and its worker share one open file description of
it, so it is free only when both are gone.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rr_dataset.clock import HybridClock
from rr_dataset.errors import InvalidInputError, RecordTooLargeError, SpoolUnavailableError, WriterClosedError
from rr_dataset.slab import (
    ASIDE,
    CHECKSUMMED,
    FREE,
    HEADER_BYTES,
    IDENTITY_BYTES,
    PUBLISHED,
    PUT,
    Batch,
    Reservation,
    Slab,
    entry_bytes,
)

CONTROL_BYTES = 1 << 20  # a slab for drop rows and deletes only, about 4,000 of them
CONTROL_SLABS = 2  # come on top of spool_bytes
SHM = Path("/dev/shm")  # noqa: S108 - not a predictable file: each spool is a folder of its own, mode 0700
SHM_SHARE = 8  # all spools of a host together take at most an eighth of it
LOCK_WAIT_S = 5.0  # far longer than anybody holds the lock of a spool that is being made
LOG_NAME = "worker.log"

_OURS = re.compile(rf"lock|{re.escape(LOG_NAME)}|[0-9]{{6,}}\.slab")

_log = logging.getLogger("rr_dataset")


class Spool:
    """The engine's side of one spool directory. Thread-safe.

    `changed` guards all state and is notified when a batch is done or a slab comes free. `on_event` is called (from
    any thread, with `changed` held) when a batch gets its first entry or is sealed.
    """

    def __init__(self, base: Path, writer: str, *, spool_bytes: int, slab_bytes: int, sync: bool) -> None:
        """Make the directory and take its lock. Raises SpoolUnavailableError when that cannot be."""
        self.slab_bytes, self.spool_bytes, self._sync = slab_bytes, spool_bytes, sync
        self.changed = threading.Condition()
        self.on_event: Callable[[], None] = lambda: None
        self._slabs: list[Slab] = []
        self._control: list[Slab] = []
        self._active: dict[bool, Slab] = {}  # by whether it is a control slab
        self._clock = HybridClock()
        self._last_seq = self._last_file = 0
        self._full_since: float | None = None
        self._identity = b""
        self._refusing = self._given_up = False
        self.directory, self.lock_fd = _make_directory(base, writer)

    def allocate(self) -> None:
        """Make all slabs. Raises SpoolUnavailableError when they do not fit."""
        try:
            self._control = [self._create(CONTROL_BYTES) for _ in range(CONTROL_SLABS)]
            for _ in range(self.spool_bytes // self.slab_bytes):
                self._slabs.append(self._create(self.slab_bytes))
        except OSError as error:
            descriptors = error.errno in (errno.EMFILE, errno.ENFILE)  # a map holds one
            way_out = "raise the limit of open files (ulimit -n)" if descriptors else "give spool_dir="
            raise SpoolUnavailableError(
                f"{self.directory}: {error.strerror}; {way_out} or a smaller spool_bytes="
            ) from error

    def identify(self, identity: Mapping[str, Any]) -> None:
        """Write what recovery needs (dataset uuid and URI, writer, run) into every slab, once, before `reserve`.

        Raises InvalidInputError when it is too long for a slab's header.
        """
        self._identity = json.dumps(identity).encode()
        if len(self._identity) > IDENTITY_BYTES:
            sizes = {name: len(json.dumps(value)) for name, value in identity.items()}
            longest = max(sizes, key=lambda name: sizes[name])
            raise InvalidInputError(
                f"the spool has {IDENTITY_BYTES} bytes for what tells whose it is, which takes {len(self._identity)}, "
                f"{sizes[longest]} of them {longest}: shorten that"
            )
        for slab in self._slabs + self._control:
            slab.identify(self._identity)

    # ---- filling

    def reserve(
        self,
        kind: int,
        flags: int,
        request_id: bytes,
        meta: bytes,
        *,
        tokens: int,
        payload_bytes: int,
        wait_s: float = 0,
    ) -> Reservation | None:
        """Room for one entry, or None when the pool is full.

        Waits up to `wait_s` for room, once per outage: while the pool stays full, later calls do not wait again.
        Raises RecordTooLargeError when even the empty pool has no room for it, WriterClosedError after `refuse`.
        """
        need = HEADER_BYTES + entry_bytes(request_id, meta, payload_bytes)
        control = kind != PUT
        limit = CONTROL_BYTES if control else self.spool_bytes
        if need > limit:
            raise RecordTooLargeError(
                f"record {request_id.decode()!r} takes {need} bytes of spool, which holds at most {limit}: "
                "put it in parts (token_start=, part=True) or raise spool_bytes"
            )
        if self._sync:
            flags |= CHECKSUMMED
        with self.changed:
            while self._refusing or (slab := self._room(need, control)) is None:
                if self._refusing:
                    raise WriterClosedError("the writer is closed")
                now = time.monotonic()
                if control:
                    return None
                if self._full_since is None:
                    self._full_since = now
                if not self.changed.wait(max(self._full_since + wait_s - now, 0)):
                    return None
            reservation = slab.reserve(kind, flags, self._clock.tick(), request_id, meta, tokens, payload_bytes)
            if not slab.batch.opened_s:
                slab.batch.opened_s = time.monotonic()
                self.on_event()
            return reservation

    def commit(self, reservation: Reservation) -> Batch:
        """Make the entry count: from here on it survives a kill of this process."""
        slab = reservation.slab
        slab.write_commit(reservation, sync=self._sync)
        with self.changed:  # its release orders payload and commit word before the seal
            slab.batch.records += 1
            slab.batch.bytes += len(reservation.payload)
            self._release(reservation)
            return slab.batch

    def abort(self, reservation: Reservation) -> None:
        """Give the room up; readers step over it. Does nothing to what was committed."""
        with self.changed:
            self._release(reservation)

    def refuse(self) -> None:
        """Have every later `reserve` raise, and those that wait for room; what is reserved is still filled."""
        with self.changed:
            self._refusing = True
            self.changed.notify_all()

    def close_active(self, *, min_age_s: float = 0) -> None:
        """Close the active slabs whose first entry is at least `min_age_s` old."""
        with self.changed:
            for _, slab in sorted(self._active.items(), reverse=True):  # that of deletes first
                if slab.batch.opened_s and time.monotonic() - slab.batch.opened_s >= min_age_s:
                    self._close(slab)

    # ---- after publishing

    def collect(self) -> list[Batch]:
        """Take back what the worker has published or set aside; the batches that are done by it."""
        finished = []
        with self.changed:
            for slab in self._slabs + self._control:
                state = slab.state
                if slab.batch.done or state not in (PUBLISHED, ASIDE):
                    continue
                slab.batch.done = True
                finished.append(slab.batch)
                if state == ASIDE:
                    slab.batch.failure = (
                        f"{slab.path} is older than the dataset's tombstones live and was set aside; once this writer is "
                        "closed `rr-dataset recover --force` publishes it, and may revive deleted ids"
                    )
                elif slab.capacity in (self.slab_bytes, CONTROL_BYTES):
                    slab.state = FREE
                else:  # made for one large record: its room goes back to ordinary slabs
                    self._slabs.remove(slab)
                    slab.close(unlink=True)
            if finished:
                self._full_since = None
                self.changed.notify_all()
        return finished

    def batches(self) -> list[Batch]:
        """Batches that have entries and are not done, oldest first."""
        with self.changed:
            return sorted((slab.batch for slab in self._filled()), key=lambda batch: batch.seq)

    def pending(self) -> int:
        """How many of them are closed, so the worker's to publish."""
        with self.changed:
            return sum(slab.closing for slab in self._filled())

    def oldest_active_s(self) -> float | None:
        """Monotonic time of the first entry that is in no closed slab."""
        with self.changed:
            return min((slab.batch.opened_s for slab in self._filled() if not slab.closing), default=None)

    def holds_data(self) -> bool:
        """Whether something in it is not published: waiting, or set aside."""
        with self.changed:
            return bool(self._filled()) or any(slab.state == ASIDE for slab in self._slabs + self._control)

    def used_bytes(self) -> int:
        """Bytes of entries that are not yet published."""
        with self.changed:
            return sum(slab.cursor - HEADER_BYTES for slab in self._filled())

    def close(self, *, remove: bool) -> int:
        """Unmap everything; `remove` also deletes the directory. The lock is given up last. No more is reserved.

        A slab with open reservations stays mapped, and the lock held, until the last of them ends; how many there are.
        """
        with self.changed:
            self._refusing = self._given_up = True
            self._active = {}
            return self._give_up(remove=remove)

    # ---- with `changed` held

    def _filled(self) -> list[Slab]:
        return [slab for slab in self._slabs + self._control if slab.batch.opened_s and not slab.batch.done]

    def _room(self, need: int, control: bool) -> Slab | None:
        """The active slab if the entry fits, else a fresh one in its place, else None."""
        active = self._active.get(control)
        if active is not None and active.cursor + need - HEADER_BYTES <= active.capacity:
            return active
        fresh = self._take(need, control)
        if active is not None and (fresh is not None or need > self.slab_bytes):
            self._close(active)  # without a fresh one only to make room: smaller entries may still fit
        if fresh is None:
            return None
        self._last_seq += 1
        fresh.activate(self._last_seq, control=control)
        self._active[control] = fresh
        return fresh

    def _take(self, need: int, control: bool) -> Slab | None:
        free = [slab for slab in (self._control if control else self._slabs) if slab.state == FREE]
        if control:
            return free[0] if free else None
        allocated = sum(slab.capacity for slab in self._slabs)
        if need <= self.slab_bytes:
            if free:
                return free[0]
            return self._grow(self.slab_bytes) if allocated + self.slab_bytes <= self.spool_bytes else None
        need = min(-(-need // mmap.PAGESIZE) * mmap.PAGESIZE, self.spool_bytes)
        if allocated - sum(slab.capacity for slab in free) + need > self.spool_bytes:
            return None
        while allocated + need > self.spool_bytes:
            slab = free.pop()
            allocated -= slab.capacity
            self._slabs.remove(slab)
            slab.close(unlink=True)
        return self._grow(need)

    def _grow(self, capacity: int) -> Slab | None:
        try:
            slab = self._create(capacity)
        except OSError:  # the file system is full by now: so is the pool
            return None
        slab.identify(self._identity)
        self._slabs.append(slab)
        return slab

    def _create(self, capacity: int) -> Slab:
        self._last_file += 1
        return Slab(self.directory / f"{self._last_file:06d}.slab", capacity)

    def _close(self, slab: Slab) -> None:
        control = self._active.get(True)
        if control not in (None, slab) and control.batch.opened_s and self._take(0, control=True):
            self._close(control)  # its deletes come first, as long as that leaves room for more
        slab.closing = True
        self._active = {control: active for control, active in self._active.items() if active is not slab}
        self._seal_if_whole(slab)

    def _release(self, reservation: Reservation) -> None:
        if not reservation.open:
            return
        reservation.open = False
        reservation.slab.open -= 1
        self._seal_if_whole(reservation.slab)
        if self._given_up:
            self._give_up(remove=False)

    def _give_up(self, *, remove: bool) -> int:
        for slab in self._slabs + self._control:
            if not slab.open:
                slab.close(unlink=remove)
        self._slabs = [slab for slab in self._slabs if slab.open]
        self._control = [slab for slab in self._control if slab.open]
        if remove:
            remove_directory(self.directory)
        still_open = sum(slab.open for slab in self._slabs + self._control)
        if not still_open:
            _close_lock(self.lock_fd)
        return still_open

    def _seal_if_whole(self, slab: Slab) -> None:
        if slab.closing and not slab.open:
            slab.seal()
            self.on_event()


# ---- directories


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


def _make_directory(base: Path, writer: str) -> tuple[Path, int]:
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
            _close_lock(fd)
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


_locks: set[int] = set()  # a forked child closes them: there they would outlive the writer
_no_fork = threading.RLock()  # held where a descriptor and that set differ


def _open_lock(path: Path) -> int:
    with _no_fork:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _locks.add(fd)
    return fd


def _close_lock(fd: int) -> None:
    with _no_fork:
        _locks.discard(fd)
        os.close(fd)


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


def _forget_locks() -> None:
    for fd in _locks:
        with suppress(OSError):  # whoever forked may have closed all that was open
            os.close(fd)
    _locks.clear()
    _no_fork.release()


os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_forget_locks)
