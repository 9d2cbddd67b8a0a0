"""From a slab file to the dataset: its committed entries become rows, are published, and the slab is marked."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rr_dataset.clock import wall_ms
from rr_dataset.delete import remove_covered
from rr_dataset.description import read_format
from rr_dataset.entries import read_entries
from rr_dataset.errors import CorruptSpoolError, DatasetNotFoundError, FormatError, StorageError
from rr_dataset.layout import FORMAT_PATH, DatasetFormat
from rr_dataset.publish import publish_slab, publish_threads
from rr_dataset.slab import (
    ACTIVE,
    ASIDE,
    HEADER_BYTES,
    PUBLISHED,
    SEALED,
    SlabContents,
    is_control,
    open_file,
    read_slab,
    read_state,
    write_state,
)
from rr_dataset.storage import Storage
from rr_dataset.tombstones import Tombstone, TombstoneCache, relist_tombstones, write_tombstones

UNPUBLISHED = (SEALED, ACTIVE)  # the active ones are the engine's as long as it lives


@dataclass(frozen=True)
class Published:
    """What became of one slab."""

    records: int
    bytes: int
    torn: int  # entries that no put had finished, dropped
    set_aside: bool


class Publisher:
    """Publishes slab files into one dataset."""

    def __init__(self, storage: Storage, dataset: DatasetFormat, compression: str) -> None:
        self._storage, self.dataset, self._compression = storage, dataset, compression
        self._tombstones = TombstoneCache(dataset.keys, dataset.last_turn)
        self._buried: dict[tuple[str, int], list[Tombstone]] = {}  # by writer and slab, while its publication fails
        self._pool = ThreadPoolExecutor(publish_threads(storage), thread_name_prefix="publish")

    def publish(self, slab: Path, *, force: bool = False) -> Published:
        """Publish what is committed in a slab, and mark it: puts, drops and, before and after them, deletes. Idempotent.

        force: also when it is so old that tombstones which cover its rows may be gone.

        Raises StorageError, after which it can be called again, also when the dataset is not there any more; or
        CorruptSpoolError, and then nothing of the slab is published.
        """
        with open_slab(slab) as contents:
            if contents.identity["dataset"] != self.dataset.uuid:
                raise CorruptSpoolError(f"{slab} belongs to dataset {contents.identity['uri']}")
            rows, tombstones = read_entries(contents, slab, self.dataset, wall_ms())
            tombstones = self._bury(contents, tombstones)
            report = publish_slab(
                self._storage,
                self.dataset,
                writer=contents.identity["writer"],
                seq=contents.seq,
                rows=rows,
                cache=self._tombstones,
                compression=self._compression,
                pool=self._pool,
                check=self._check_dataset,
                now_ms=(lambda: 0) if force else wall_ms,  # at the dawn of time no slab is too old
            )
            if tombstones:
                everything = self._tombstones.held if rows else relist_tombstones(self._storage, self._tombstones)
                remove_covered(self._storage, self.dataset, tombstones, lambda: everything)
                self._check_dataset()
            self._buried.pop((contents.identity["writer"], contents.seq), None)
            torn = contents.torn
        write_state(slab, ASIDE if report.set_aside else PUBLISHED)
        return Published(report.records, report.bytes, torn, report.set_aside)

    def _check_dataset(self) -> None:
        """Whether the dataset is still what lies at its address: before a slab goes there, and after.

        Raises StorageError when a mount has gone, or others have put another dataset into its place.
        """
        cause: Exception | None = None
        try:
            found = read_format(self._storage)
            if found.uuid == self.dataset.uuid:
                return
            there = f"there is dataset {found.uuid}"
        except DatasetNotFoundError as error:
            there, cause = f"there is no {FORMAT_PATH}", error
        except FormatError as error:
            there, cause = f"its {FORMAT_PATH} cannot be read", error
        self._buried.clear()  # where those tombstones lie now, who knows
        raise StorageError(
            errno.ESTALE,
            f"Dataset {self.dataset.uuid} is not here any more, {there}; mount it again or put it back, and what waits in the "
            "spool goes there; if it is gone for good, end the writer and remove its spool",
            self._storage.uri,
        ) from cause

    def _bury(self, slab: SlabContents, tombstones: list[Tombstone]) -> list[Tombstone]:
        """The tombstones of the slab's deletes, durable in one file: before its own puts are, and those published after it.

        They have the very stamps of the deletes, so it does not matter for what lives in the end which slab is published first.
        """
        key = slab.identity["writer"], slab.seq
        if tombstones and key not in self._buried:
            self._check_dataset()
            write_tombstones(self._storage, tombstones, tombstones[0].made)
            self._buried[key] = tombstones
        return self._buried.get(key, [])

    def close(self) -> None:
        """End its threads."""
        self._pool.shutdown()


def slabs_in(directory: Path, states: Sequence[int]) -> list[Path]:
    """The slabs of a spool that are in one of these states, those of drops and deletes first, then oldest first.

    A file that is no slab of this version is in any state: whoever reads it gets the CorruptSpoolError.
    """
    found: list[tuple[bool, int, Path]] = []
    for path in directory.glob("*.slab"):
        with suppress(FileNotFoundError):  # the engine has just given it up
            try:
                seq, state = read_state(path)
                if state in states:
                    found.append((not is_control(path), seq, path))
            except CorruptSpoolError:
                found.append((False, 0, path))
    return [path for _, _, path in sorted(found)]


@contextmanager
def open_slab(path: Path) -> Iterator[SlabContents]:
    """The slab mapped and parsed; its payloads are read meanwhile and not after. Raises CorruptSpoolError."""
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise CorruptSpoolError(f"{path}: cut to {size} bytes")
        memory = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    try:
        yield read_slab(memoryview(memory), path)
    finally:
        with suppress(BufferError):  # an array of a record is still referred to: the map goes with it
            memory.close()
