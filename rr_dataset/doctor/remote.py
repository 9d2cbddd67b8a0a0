"""What a doctor measures at a remote store. Objects are made under one name in the dataset's staging, and removed.

A doctor that is killed leaves them to `rr-dataset gc`, as any process leaves its unfinished files.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial

from rr_dataset.doctor import judge
from rr_dataset.doctor.judge import Finding, Verdict
from rr_dataset.doctor.probe import Clocks
from rr_dataset.errors import ObjectNotFoundError, StorageError
from rr_dataset.layout import STAGING_DIR, DatasetFormat
from rr_dataset.options import MIB
from rr_dataset.storage import Storage

SMALL_OBJECTS, SMALL_BYTES, SMALL_S = 16, 4096, 1.0  # until one of number and seconds is reached
LARGE_BYTES = 8 * MIB
PARTS_BYTES = 64 * MIB + 1  # the least that goes up in parts
PARTS_S = 20.0  # not tried where it would take longer
STAMP_S = 1.0  # S3 stamps objects, as the answers to requests, with whole seconds

Check = Callable[[str, Callable[[], Verdict]], Finding]


def findings(
    storage: Storage, found: DatasetFormat | Exception, clocks: Clocks, skew_s: float | None, check: Check
) -> Iterator[Finding]:
    """found: what reading the dataset's format gave. check: makes a finding of what a probe returns or raises."""
    yield check("dataset", lambda: dataset(storage, found))
    if isinstance(found, StorageError) and not isinstance(found, FileNotFoundError):
        return  # nothing else would work, and each would wait for it
    place = _Place(storage)
    try:
        try:
            place.make("first")
        except StorageError as error:
            exists = isinstance(found, DatasetFormat)
            yield Finding("writing", *judge.unwritable_store(*split(error), exists=exists, denied=is_denied(error)))
            return
        yield check("publish", place.publishing)
        yield check("list and read", place.listing)
        yield check("rate", place.rate)
        yield check("parts", place.parts)
        yield check("clock", partial(place.clock, clocks, skew_s))
    finally:
        last = check("writing", place.removal)
    yield last


def dataset(storage: Storage, found: DatasetFormat | Exception) -> Verdict:
    """What is there, or why it cannot be told."""
    if isinstance(found, StorageError) and not isinstance(found, FileNotFoundError):
        return judge.fail(*split(found))
    return judge.store_dataset(found, storage.uri)


def split(error: StorageError) -> tuple[str, str]:
    """What is wrong, and the way out; the store's errors hold no secret."""
    what, _, way_out = str(error.strerror or error).partition(": ")
    return f"{error.filename or ''}: {what}".lstrip(": "), way_out or "check the endpoint and the network, try again"


def is_denied(error: StorageError) -> bool:
    """Whether the store knows the key, and refuses."""
    return error.errno == errno.EACCES


class _Place:
    """Objects of one doctor."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._folder = f"{STAGING_DIR}/doctor-{uuid.uuid4().hex}"
        self._data = os.urandom(SMALL_BYTES)
        self._made_s = (0.0, 0.0)  # before and after the first
        self._rate = 0.0  # bytes a second, of a large one

    def make(self, name: str, data: bytes | memoryview | None = None) -> bool:
        """Create an object; whether this made it."""
        before_s = time.time()
        made = self._storage.create(f"{self._folder}/{name}", self._data if data is None else data, staging="doctor")
        if name == "first":
            self._made_s = before_s, time.time()
        return made

    def publishing(self) -> Verdict:
        """A name that is taken is not given again."""
        again = self._storage.create(f"{self._folder}/first", self._data[::-1], staging="doctor")
        if again or self._storage.read_bytes(f"{self._folder}/first") != self._data:
            return judge.fail(
                "an object that was there was replaced: the store does not know If-None-Match",
                "take a store, or a version of it, that has conditional PUT",
            )
        return judge.ok("an object that is there is never replaced")

    def listing(self) -> Verdict:
        """What is made is listed and read at once, what is deleted is not."""
        way_out = "take a store that is consistent: list-after-write and read-after-write, as S3 is"
        path = f"{self._folder}/second"
        self.make("second")
        names = {entry.name: entry for entry in self._storage.list(self._folder)}
        if "second" not in names:
            return judge.fail("a new object is in no listing", way_out)
        with self._storage.open(path, names["second"]) as source:
            if self._storage.read_bytes(path) != self._data or source.read(1000, 100) != self._data[1000:1100]:
                return judge.fail("a new object has other bytes than were written", way_out)
        self._storage.delete([path])
        try:
            self._storage.read_bytes(path)
        except ObjectNotFoundError:
            if "second" not in {entry.name for entry in self._storage.list(self._folder)}:
                return judge.ok("what is made is listed and read at once, also in part; what is deleted is gone")
        return judge.fail("a deleted object is still there", way_out)

    def rate(self) -> Verdict:
        """Small objects one after the other, and a large one."""
        began_s, number = time.monotonic(), 0
        while number < SMALL_OBJECTS and time.monotonic() < began_s + SMALL_S:
            self.make(f"small-{number}")
            number += 1
        each_s = (time.monotonic() - began_s) / number
        began_s = time.monotonic()
        self.make("large", os.urandom(LARGE_BYTES))
        self._rate = LARGE_BYTES / (time.monotonic() - began_s)
        return judge.store_rate(each_s, self._rate)

    def parts(self) -> Verdict:
        """An upload in parts, and whether unfinished ones can be listed."""
        uploads = self._storage.list(f"{STAGING_DIR}/uploads")
        if PARTS_S * self._rate < PARTS_BYTES:
            return judge.warn(
                "an upload in parts was not tried: it would take too long here", "check from a host nearer to the store"
            )
        self.make("parts", memoryview(os.urandom(MIB) * (PARTS_BYTES // MIB) + b"x"))
        with self._storage.open(f"{self._folder}/parts") as source:
            if source.size != PARTS_BYTES or source.tail(1) != b"x":
                return judge.fail(
                    f"an upload in parts of {PARTS_BYTES:,} bytes is an object of {source.size:,}",
                    "take a store with multipart uploads, as S3 has them",
                )
        return judge.ok(f"uploads in parts work, {len(uploads)} unfinished; gc drops those of dead processes")

    def clock(self, began: Clocks, skew_s: float | None) -> Verdict:
        """The wall clock beside the store's, by which it stamped the first object."""
        stamp_s = next(entry.mtime_s for entry in self._storage.list(self._folder) if entry.name == "first")
        before_s, after_s = self._made_s
        ahead_s = max(stamp_s - after_s, 0) + min(stamp_s + STAMP_S - before_s, 0)
        now = Clocks.now()
        return judge.clock(
            now.wall_s, ahead_s, now.stepped_s(began), skew_s, of="the store, which tells whole seconds,"
        )

    def removal(self) -> Verdict:
        """Deletes all of it."""
        self._storage.delete([f"{self._folder}/{entry.name}" for entry in self._storage.list(self._folder)])
        left = len(self._storage.list(self._folder))
        if left:
            return judge.fail(f"{left} objects are still there after they were deleted", "see what the store says")
        return judge.ok(f"{self._storage.uri} takes objects; all that were made are removed")
