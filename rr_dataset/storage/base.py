"""What the protocols need from a store: `Storage`, and what it hands out.

A store must give atomic creation of whole objects, read-after-write and list-after-write; it need not have directories.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from rr_dataset.shard import Source

Buffer = bytes | bytearray | memoryview


class Entry(NamedTuple):
    """One stored object: its last path element, its bytes, and when it got its name or was last changed (Unix time)."""

    name: str
    size: int
    mtime_s: float
    etag: str = ""  # changes with the content; "" where the store has none


Entries = list[Entry]  # within `Storage`, `list` is a method
Names = list[str]


class OpenSource(Source, AbstractContextManager["OpenSource"], Protocol):
    """An object opened for ranged reads, from any thread. It stays readable after its name is deleted (local disk)."""

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""


class Storage(Protocol):
    """One dataset's store. Every method is safe to call from several threads, and objects pickle.

    Every method raises StorageError when the store fails (with the path, its cause chained) and InvalidInputError for
    a path that leaves the root.
    """

    @property
    def uri(self) -> str:
        """What `open_storage` takes to open this store again, from any working directory."""

    @property
    def is_remote(self) -> bool:
        """Whether each request crosses a network: a caller saves round trips there, if need be by one request more."""

    @property
    def requests_at_once(self) -> int:
        """How many requests side by side still make a caller faster, each from a thread of its own."""

    def list(self, path: str) -> Entries:
        """The objects directly under `path`, in no order; a missing directory is an empty one.

        Not a snapshot: an object made or deleted meanwhile may or may not be in it.
        """

    def list_dirs(self, path: str) -> Names:
        """The names of the directories directly under `path`, in no order."""

    def list_others(self, path: str) -> Names:
        """The names directly under `path` of what is neither, such as links and pipes; a store may have no such thing."""

    def changed_ns(self, path: str) -> int | None:
        """When a name in the directory was last made or removed, by the clock of the store (Unix time in ns).

        None where the store does not tell, or there is no such directory. Changes within one tick of that clock look alike.
        """

    def open(self, path: str, entry: Entry | None = None) -> OpenSource:
        """Open for ranged reads. Raises ObjectNotFoundError.

        entry: of the object in a listing; a remote store then asks nothing now, and the first read raises what is wrong.
        """

    def read_bytes(self, path: str) -> bytes:
        """The whole object. Raises ObjectNotFoundError."""

    def create(self, path: str, data: Buffer | Sequence[Buffer], *, staging: str) -> bool:
        """Create the object, whole and with durable content, unless its name exists; True if this call made it.

        False: the name was there, and counts as done. The object is never replaced. `data`: C-contiguous buffers, one
        after the other. `staging` names the caller's own folder for unfinished files. The **name** is durable only
        after `sync_dirs`.
        """

    def sync_dirs(self, paths: Iterable[str]) -> None:
        """Make names durable: of each directory and every ancestor up to the root, each once; missing ones are passed."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""

    def remove_empty_dirs(self, path: str) -> None:
        """Remove the directory `path` and then its ancestors, up to one that is not empty; never the root."""
