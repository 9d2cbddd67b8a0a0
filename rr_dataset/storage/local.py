"""A directory as a store, on a local or shared file system.

An object is written under `_rr/tmp/<staging>/`, synced, and published with link(2), which never replaces: a visible
name is a whole file, and a crash leaves a stage file at most. File systems without hard links (some FUSE and SMB
mounts) publish with renameat2(RENAME_NOREPLACE); where that is missing too, creating fails with a clear error.
"""

# Text paths and os calls: pathlib would cost more than the calls on the hot path.
# ruff: noqa: PTH100, PTH102, PTH103, PTH104, PTH106, PTH108, PTH112, PTH116, PTH120

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from rr_dataset.errors import InvalidInputError, StorageError
from rr_dataset.layout import FORMAT_PATH, STAGING_DIR
from rr_dataset.storage.base import Buffer, Entries, Entry, Names
from rr_dataset.storage.files import LocalSource, StorageErrors, publish, sync_dir, write_all

_T = TypeVar("_T")

_OWN_DIR = FORMAT_PATH.partition("/")[0]
_TRIES = 3  # at a directory that somebody removes while it is empty; then it comes filled
_MOVES = 1000  # of filled ones: each is lost only to another's file that was there for a moment
_NO_SUCH_PARTS = frozenset(("", ".", ".."))
_NOT_REMOVABLE = frozenset((errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY))  # `.nfs*` leftovers of open files too


class LocalStorage:
    """A directory as a store: see `Storage` for what its methods promise."""

    is_remote = False
    requests_at_once = 4  # a disk flushes several at once

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)

    @property
    def uri(self) -> str:
        """The absolute path of the root."""
        return self._root

    def list(self, path: str) -> Entries:
        """Regular files only; one that vanishes meanwhile is left out."""
        entries = []
        with StorageErrors(path):
            for entry in self._scan(path):
                try:
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        named_s = max(status.st_mtime, status.st_ctime)  # the name came after the bytes and their fsync
                        entries.append(Entry(entry.name, status.st_size, named_s))
                except FileNotFoundError:
                    pass
        return entries

    def list_dirs(self, path: str) -> Names:
        """Directories only, no links to them."""
        return [entry.name for entry in self._scan(path) if entry.is_dir(follow_symlinks=False)]

    def list_others(self, path: str) -> Names:
        """Links, pipes, sockets and devices."""
        return [
            entry.name
            for entry in self._scan(path)
            if not entry.is_file(follow_symlinks=False) and not entry.is_dir(follow_symlinks=False)
        ]

    def changed_ns(self, path: str) -> int | None:
        """The change time of the directory, which no copying tool sets back, as they do its modification time."""
        absolute = self._absolute(path, root=True)
        with StorageErrors(absolute):
            try:
                return os.stat(absolute).st_ctime_ns
            except FileNotFoundError:
                return None

    def open(self, path: str, entry: Entry | None = None) -> LocalSource:  # noqa: ARG002 -- what is opened here is looked at
        """Open for ranged reads. Raises ObjectNotFoundError."""
        return LocalSource(self._absolute(path))

    def read_bytes(self, path: str) -> bytes:
        """The whole object. Raises ObjectNotFoundError."""
        with self.open(path) as source:
            return source.read(0, source.size)

    def create(self, path: str, data: Buffer | Sequence[Buffer], *, staging: str) -> bool:
        """Stage, sync, link; missing directories are made. Only the format makes the root and its `_rr`.

        So a worker never founds a second tree where a mount has gone: without `_rr` it gets ObjectNotFoundError.
        """
        target = self._absolute(path)
        stage_dir = f"{STAGING_DIR}/{staging}"
        stage = f"{self._absolute(stage_dir)}/{os.urandom(8).hex()}"
        buffers = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
        with StorageErrors(target):
            if path == FORMAT_PATH:
                self._found()
            try:
                fd = self._making(
                    stage_dir, lambda: os.open(stage, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                )
                try:
                    write_all(fd, buffers)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                try:
                    self._making(path.rpartition("/")[0], lambda: publish(stage, target))
                except FileNotFoundError:
                    self._move_in(stage, path)
            except FileExistsError:
                return False
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(stage)
        return True

    def sync_dirs(self, paths: Iterable[str]) -> None:
        """fsync of each directory and its ancestors up to the root, a few at once."""
        directories = {self._root}
        for path in paths:
            absolute = self._absolute(path, root=True)
            while absolute not in directories:
                directories.add(absolute)
                absolute = os.path.dirname(absolute)
        if len(directories) <= self.requests_at_once:
            for directory in directories:
                sync_dir(directory)
            return
        with ThreadPoolExecutor(self.requests_at_once) as pool:
            for _ in pool.map(sync_dir, directories):
                pass

    def delete(self, paths: Iterable[str]) -> None:
        """unlink; missing files are no error."""
        for path in paths:
            absolute = self._absolute(path)
            with StorageErrors(absolute), suppress(FileNotFoundError):
                os.unlink(absolute)

    def remove_empty_dirs(self, path: str) -> None:
        """rmdir upwards. A directory that another process just filled, or that holds `.nfs*` leftovers, stays."""
        absolute = self._absolute(path, root=True)
        while absolute != self._root:
            with StorageErrors(absolute):
                try:
                    os.rmdir(absolute)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    if error.errno in _NOT_REMOVABLE:
                        return
                    raise
            absolute = os.path.dirname(absolute)

    def _absolute(self, path: str, *, root: bool = False) -> str:
        if root and not path:
            return self._root
        if "\0" in path or not _NO_SUCH_PARTS.isdisjoint(path.split("/")):
            raise InvalidInputError(
                f"path {path!r}: expected names with one / between them, relative to the dataset's root"
            )
        return f"{self._root}/{path}"

    def _scan(self, path: str) -> Sequence[os.DirEntry[str]]:
        absolute = self._absolute(path, root=True)
        with StorageErrors(absolute):
            try:
                with os.scandir(absolute) as entries:
                    return list(entries)
            except FileNotFoundError:
                return []

    def _making(self, directory: str, action: Callable[[], _T]) -> _T:
        """What `action` returns; where its directory is missing, make that and try again, a few times."""
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                return action()
            self._check_own_dir()
            with suppress(FileNotFoundError):  # a deleter removed an ancestor in between
                self._make_dirs(directory)
        return action()

    def _check_own_dir(self) -> None:
        if not os.path.isdir(f"{self._root}/{_OWN_DIR}"):
            text = f"The dataset is gone, there is no {_OWN_DIR} (is it still mounted?)"
            raise FileNotFoundError(errno.ENOENT, text, self._root)

    def _move_in(self, stage: str, path: str) -> None:
        """Give a staged file its name in a directory that deleters keep removing: together with that directory.

        A directory that holds the file already is renamed to the missing or empty one, so nobody finds it empty. Raises
        FileExistsError if the name is taken.
        """
        *parents, name = path.split("/")
        for move in range(_MOVES):
            self._check_own_dir()
            depth = move % (len(parents) + 1)
            inner = f"{stage}.d/{'/'.join(parents[depth + 1 :])}".rstrip("/")
            try:
                if depth == len(parents):  # each level holds something: then they stay for a moment
                    publish(stage, f"{self._root}/{path}")
                    return
                os.makedirs(inner)
                os.rename(stage, f"{inner}/{name}")
                os.rename(f"{stage}.d", f"{self._root}/{'/'.join(parents[: depth + 1])}")
                return  # noqa: TRY300 -- what is left is the way back
            except OSError as error:
                if depth == len(parents) and not isinstance(error, FileNotFoundError):
                    raise
                if error.errno not in (*_NOT_REMOVABLE, errno.ENOENT):
                    raise
            finally:
                with suppress(FileNotFoundError):
                    os.rename(f"{inner}/{name}", stage)
                with suppress(FileNotFoundError):
                    os.removedirs(inner)
        raise StorageError(errno.EBUSY, f"Others removed its directory {_MOVES} times while it was made", path)

    def _make_dirs(self, directory: str) -> None:
        """mkdir -p under the root; never of `_rr`, which whoever founds the dataset has made."""
        path = self._root
        for part in filter(None, directory.split("/")):
            path = f"{path}/{part}"
            if path != f"{self._root}/{_OWN_DIR}":
                with suppress(FileExistsError):
                    os.mkdir(path)

    def _found(self) -> None:
        """mkdir -p of the root, with durable names, and of its `_rr`."""
        missing = []
        path = self._root
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            with suppress(FileExistsError):
                os.mkdir(path)
            sync_dir(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(f"{self._root}/{_OWN_DIR}")
