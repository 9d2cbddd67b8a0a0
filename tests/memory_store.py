"""An object store in memory: `Storage` by what its docstrings promise, and nothing more.

There are no directories, no stages and no renames, and a source whose object is gone cannot be read any more.
`RemoteMemory` is the same behind a network: it counts requests and bytes, and each takes a tick of a virtual time.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType

from rr_dataset.errors import CorruptShardError, ObjectNotFoundError
from rr_dataset.storage import Buffer, Entry

DELETE_KEYS = 1000  # with one request


class MemoryStorage:
    """Objects by path."""

    is_remote = False
    requests_at_once = 4

    def __init__(self, uri: str = "memory") -> None:
        self.uri = uri
        self.objects: dict[str, bytes] = {}

    def list(self, path: str) -> list[Entry]:
        """In no order that means anything: the newest first."""
        start = f"{path}/" if path else ""
        names = {key[len(start) :]: data for key, data in self.objects.items() if key.startswith(start)}
        return [Entry(name, len(data), 0.0) for name, data in reversed(names.items()) if "/" not in name]

    def list_dirs(self, path: str) -> list[str]:
        """What stands before a further slash."""
        start = f"{path}/" if path else ""
        rest = (key[len(start) :] for key in self.objects if key.startswith(start))
        return list({name.partition("/")[0]: None for name in rest if "/" in name})

    def list_others(self, path: str) -> list[str]:
        """There is nothing else."""
        return []

    def changed_ns(self, path: str) -> None:
        """It does not tell."""

    def open(self, path: str, entry: Entry | None = None) -> MemorySource:
        """Ranged reads of what has this name now and then."""
        self.read_bytes(path)
        return MemorySource(self, path)

    def read_bytes(self, path: str) -> bytes:
        """The whole object."""
        try:
            return self.objects[path]
        except KeyError:
            raise ObjectNotFoundError(errno.ENOENT, "No such object", path) from None

    def create(self, path: str, data: Buffer | Sequence[Buffer], *, staging: str) -> bool:
        """At once, unless the name is taken."""
        parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
        if path in self.objects:
            return False
        self.objects[path] = b"".join(bytes(part) for part in parts)
        return True

    def sync_dirs(self, paths: Iterable[str]) -> None:
        """What has a name has it for good."""
        list(paths)

    def delete(self, paths: Iterable[str]) -> None:
        """One after the other."""
        for path in paths:
            self.objects.pop(path, None)

    def remove_empty_dirs(self, path: str) -> None:
        """There are none."""


class MemorySource:
    """An object by its name."""

    max_gap_bytes = 64

    def __init__(self, storage: MemoryStorage, path: str) -> None:
        self._storage, self._path = storage, path

    @property
    def size(self) -> int:
        return len(self._storage.read_bytes(self._path))

    def tail(self, length: int) -> bytes:
        return self._storage.read_bytes(self._path)[-length:] if length else b""

    def read(self, offset: int, length: int) -> bytes:
        data = self._storage.read_bytes(self._path)[offset : offset + length]
        if len(data) < length:
            raise CorruptShardError(f"{self._path} ends early")
        return data

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        for start, buffers in runs:
            at = start
            for buffer in buffers:
                buffer.cast("B")[:] = self.read(at, buffer.nbytes)
                at += buffer.nbytes

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> MemorySource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemoteMemory(MemoryStorage):
    """Objects by path, each call for the requests that an object store would get."""

    is_remote = True
    requests_at_once = 32

    def __init__(self, takes_time: Callable[[], None] = lambda: None) -> None:
        """takes_time: called while some requests are on their way together."""
        super().__init__()
        self.takes_time = takes_time
        self.after: Callable[[str, str], None] = lambda call, path: None  # each request is answered
        self.requests: list[tuple[str, str]] = []  # call and path
        self.bytes_read = 0
        self._lock = Lock()

    def load(self, root: Path) -> None:
        """All files below a directory, and nothing else."""
        found = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        with self._lock:
            self.objects = found

    def _asked(self, call: str, path: str, count: int = 1, size: int = 0) -> None:
        with self._lock:
            self.requests += [(call, path)] * count
            self.bytes_read += size
        self.takes_time()

    def list(self, path: str) -> list[Entry]:
        self._asked("list", path)
        with self._lock:
            entries = super().list(path)
        self.after("list", path)
        return entries

    def list_dirs(self, path: str) -> list[str]:
        self._asked("list", path)
        with self._lock:
            return super().list_dirs(path)

    def open(self, path: str, entry: Entry | None = None) -> RemoteMemorySource:
        if entry is None:
            self._asked("head", path)
            entry = Entry(path, len(self.objects[path]), 0.0)
        return RemoteMemorySource(self, path, entry)

    def read_bytes(self, path: str) -> bytes:
        self._asked("get", path)
        try:
            return super().read_bytes(path)
        finally:
            self.after("get", path)

    def create(self, path: str, data: Buffer | Sequence[Buffer], *, staging: str) -> bool:
        self._asked("put", path)
        with self._lock:
            return super().create(path, data, staging=staging)

    def delete(self, paths: Iterable[str]) -> None:
        names = list(paths)
        if names:
            self._asked("delete", names[0], -(-len(names) // DELETE_KEYS))
        with self._lock:
            super().delete(names)


class RemoteMemorySource(MemorySource):
    """A range is a request; ranges that are asked for together are on their way together."""

    max_gap_bytes = 4096

    def __init__(self, storage: RemoteMemory, path: str, entry: Entry) -> None:
        super().__init__(storage, path)
        self._remote, self._entry = storage, entry

    @property
    def size(self) -> int:
        return self._entry.size

    def _got(self, count: int, size: int) -> bytes:
        self._remote._asked("get", self._path, count, size)
        try:
            return MemoryStorage.read_bytes(self._remote, self._path)
        finally:
            self._remote.after("get", self._path)

    def tail(self, length: int) -> bytes:
        return self._got(1, min(length, self.size))[-length:]

    def read(self, offset: int, length: int) -> bytes:
        return self._got(1, length)[offset : offset + length]

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        data = self._got(len(runs), sum(buffer.nbytes for _, buffers in runs for buffer in buffers))
        for start, buffers in runs:
            at = start
            for buffer in buffers:
                buffer.cast("B")[:] = data[at : at + buffer.nbytes]
                at += buffer.nbytes
