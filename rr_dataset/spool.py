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
import json
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rr_dataset import own_locks
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
from rr_dataset.spool_place import CONTROL_BYTES, CONTROL_SLABS, make_directory, remove_directory


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
        self.directory, self.lock_fd = make_directory(base, writer)

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
            own_locks.close(self.lock_fd)  # it is free when the worker has closed its own
        return still_open

    def _seal_if_whole(self, slab: Slab) -> None:
        if slab.closing and not slab.open:
            slab.seal()
            self.on_event()
