"""Where exported files go: a local folder, or a prefix of a remote store. Each appears under its name when it is whole."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rr_dataset.errors import InvalidInputError
from rr_dataset.storage import Storage, open_storage

MAX_NAME_BYTES = 200  # of a file's name, of the 255 that file systems take


class Folder:
    """Takes files by their path within it, and counts them."""

    def __init__(self, out: str | os.PathLike[str], options: Mapping[str, Any] | None) -> None:
        """Raises InvalidInputError where it holds a file, or for an address that no store takes."""
        self._storage = open_storage(out, options)
        self.files = self.bytes = 0
        held = _in_store(self._storage) if self._storage.is_remote else _in_folder(Path(self._storage.uri))
        if held is not None:
            raise InvalidInputError(
                f"{self._storage.uri} holds files, such as {held!r}, which would mix with the new ones: name a folder "
                "that is empty or not there yet, or remove this one first"
            )

    @contextmanager
    def created(self, path: str) -> Iterator[BinaryIO]:
        """A file to write; without one if the block raises."""
        with self._uploaded(path) if self._storage.is_remote else self._renamed(path) as file:
            yield file
            file.flush()
            self.bytes += os.fstat(file.fileno()).st_size
        self.files += 1

    @contextmanager
    def _renamed(self, path: str) -> Iterator[BinaryIO]:
        target = Path(self._storage.uri, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name[:MAX_NAME_BYTES]}.{os.getpid()}")
        try:
            with staged.open("wb") as file:
                yield file
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)

    @contextmanager
    def _uploaded(self, path: str) -> Iterator[BinaryIO]:
        """By way of a file on this host: the store takes whole objects, and memory may not hold one."""
        with tempfile.TemporaryFile() as file:
            yield file
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data, memoryview(data) as view:
                made = self._storage.create(path, view, staging="export")
            if not made:
                raise InvalidInputError(f"{self._storage.uri}/{path} was there already: another export goes there too")


def _in_folder(folder: Path) -> str | None:
    """The path of some file. Empty folders do no harm: a failed export may leave some."""
    held = next((path for path in folder.rglob("*") if not path.is_dir()), None)
    return None if held is None else str(held.relative_to(folder))


def _in_store(storage: Storage) -> str | None:
    names = [entry.name for entry in storage.list("")] or storage.list_dirs("")
    return min(names, default=None)
