"""An object store in memory: `Storage` by what its docstrings promise, and nothing more.

There are no directories, no stages and no renames, and a source whose object is gone cannot be read any more.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from types import TracebackType

from rr_dataset.errors import CorruptShardError, ObjectNotFoundError
from rr_dataset.storage import Buffer, Entry


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
