"""What all rows share: sizes, places that go away again, records, and a worker that is kept busy."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import rr_dataset as rr
from rr_dataset.spool_place import SHM

SPEC = rr.RoutingSpec(tuple(range(48)), num_experts=128, top_k=8)  # 384 bytes a token
LARGE_TOKENS = 32_768  # 12.6 MB
SMALL_TOKENS = 1_024  # 0.4 MB
MIB = 1 << 20

Array = npt.NDArray[Any]


class Unavailable(Exception):  # noqa: N818 - nothing is wrong
    """Why a row cannot be measured here."""


@dataclass(frozen=True)
class Bench:
    """How much to measure, and where."""

    directory: Path
    quick: bool

    def count(self, quick: int, full: int) -> int:
        return quick if self.quick else full

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder, gone afterwards."""
        path = Path(tempfile.mkdtemp(prefix="rr-bench-", dir=self.directory))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    @contextmanager
    def writer(self) -> Iterator[tuple[rr.RoutingWriter, Path]]:
        """A writer into a dataset that is gone afterwards. It waits for room instead of dropping.

        Its spool is in shared memory, also where spools that others have left there would send it to a disk.
        """
        with self.folder() as folder:
            root = folder / "dataset"
            options = rr.WriterOptions(spool_dir=str(SHM), block_timeout_s=120, drain_timeout_s=120)
            with rr.RoutingWriter(root, options, create=SPEC) as writer:
                yield writer, root


def sources(count: int, tokens: int, layout: str = "TLK", dtype: str = SPEC.dtype) -> list[Array]:
    """Routing of `count` records, all different, as an engine would hand it over."""
    rng = np.random.default_rng(tokens)
    shape = (tokens, SPEC.num_layers, SPEC.top_k) if layout == "TLK" else (SPEC.num_layers, tokens, SPEC.top_k)
    return [rng.integers(0, SPEC.num_experts, shape, np.uint8).astype(dtype) for _ in range(count)]


class Ids:
    """Request ids that no put of this run has had; each its own prompt, so its own directory."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def new(self) -> str:
        return f"prompt_{next(self._numbers)}:0:0:0"


class Load:
    """Puts that keep a writer's worker publishing, and its spool from filling up."""

    def __init__(self, writer: rr.RoutingWriter, records: Sequence[Array], ids: Ids) -> None:
        self._writer, self._records, self._ids = writer, itertools.cycle(records), ids
        self._bytes = records[0].nbytes
        self._unseen = 0

    def keep_up(self) -> None:
        """Return once the worker has two to five slabs to do. Looks after every fourth of a slab: looking takes time."""
        slab_bytes = self._writer.options.slab_bytes
        self._unseen -= self._bytes
        if self._unseen > 0:
            return
        used = self._used()
        while used < 2 * slab_bytes:
            self._writer.put(self._ids.new(), next(self._records))
            used = self._used()
        while used > 5 * slab_bytes:
            time.sleep(0.001)
            used = self._used()
        self._unseen = slab_bytes // 4

    def _used(self) -> int:
        return self._writer.stats().spool_used_bytes


def write_file(path: Path, data: Array) -> None:
    """A plain file, synced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = data.data.cast("B")
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
