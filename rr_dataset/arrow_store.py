"""A remote store as a file system of pyarrow: the same client, credentials, retries and errors as everywhere here.

pyarrow has an S3 client of its own; it would need the credentials handed over, could not renew them, and speaks only S3.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.fs as pafs

from rr_dataset.errors import InvalidInputError, ObjectNotFoundError
from rr_dataset.far_source import FarSource
from rr_dataset.layout import parse_shard_name
from rr_dataset.shard import TAIL_BYTES, SourceFile, likely_tail
from rr_dataset.storage import Entry, Storage
from rr_dataset.storage.pending import Requests, interruptible

_THREADS = Path("/proc/self/task")
STILL_S = 0.02  # while no thread was switched to, nothing goes on of what pyarrow had queued
END_S = 5.0  # the longest wait for that, where threads of somebody else never rest


class _Calls:
    """What pyarrow's threads do in Python.

    They read ahead, and one that asks for the interpreter while that ends is killed; pyarrow would wait for it for ever.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._going_on: set[Requests] = set()
        self._begun = self._ends = False

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around each. Raises OSError once the interpreter ends."""
        requests = Requests()
        with self._lock:
            self._begun = True
            if self._ends:
                raise OSError("the interpreter ends")
            self._going_on.add(requests)
        try:
            with interruptible(requests):
                yield
        finally:
            with self._lock:
                self._going_on.discard(requests)

    def end(self) -> None:
        """None from now on, and those that go on are cut short; returns when pyarrow has come to rest."""
        with self._lock:
            self._ends = True
            going_on = list(self._going_on)
        if not self._begun:
            return
        for requests in going_on:
            requests.end()
        until = time.monotonic() + END_S
        seen: dict[str, list[str]] | None = None
        while time.monotonic() < until:
            before, seen = seen, _switches()
            if seen is not None and seen == before and not self._going_on:
                return
            time.sleep(STILL_S)  # others may have the interpreter


def _switches() -> dict[str, list[str]] | None:
    """How often the threads that Python did not start were switched to; None if one is at work, or waits for a core."""
    ours = {
        threading.get_native_id(),  # after a fork, what enumerate() tells of this thread is the parent's
        *(each.native_id for each in threading.enumerate() if not isinstance(each, threading._DummyThread)),  # noqa: SLF001 -- one that Python only saw
    }
    found = {}
    for thread in _THREADS.iterdir():
        if int(thread.name) in ours:
            continue
        with suppress(OSError):  # it has just ended
            lines = (thread / "status").read_text().splitlines()
            if next(line for line in lines if line.startswith("State:")).split()[1] != "S":
                return None
            found[thread.name] = [line for line in lines if "ctxt_switches" in line]
    return found


_calls = _Calls()


@atexit.register
def _end_calls() -> None:
    _calls.end()


def _forget_calls() -> None:
    """A forked child has none of these threads."""
    global _calls  # noqa: PLW0603 -- one a process
    _calls = _Calls()


os.register_at_fork(after_in_child=_forget_calls)


class _File(SourceFile):
    def read(self, size: int = -1) -> bytes:
        with _calls.one():
            return super().read(size)


class StoreHandler(pafs.FileSystemHandler):  # type: ignore[misc]  # pyarrow ships no types
    """Reads the objects of a store, by their address. Pickles, with the options of the store."""

    def __init__(self, storage: Storage, entries: Mapping[str, Entry]) -> None:
        """entries: of listed objects, by path; these are opened without a request."""
        self._storage, self._entries = storage, dict(entries)

    def address(self, path: str) -> str:
        """What pyarrow calls the object at this path."""
        return f"{self._storage.uri}/{path}"

    def open_input_file(self, address: str) -> pa.NativeFile:
        """For reads at any place. The first one raises ObjectNotFoundError where the object has vanished.

        Nothing is kept from one opening to the next: what is deleted is not shown again.
        """
        path = self._path(address)
        with _calls.one():
            source = self._storage.open(path, self._entries.get(path))
        name = parse_shard_name(path.rpartition("/")[2])
        end = TAIL_BYTES if name is None else likely_tail(name.rows, source.size)
        return pa.PythonFile(_File(FarSource(source, end), source.size), mode="r")

    def open_input_stream(self, address: str) -> pa.NativeFile:
        """The same."""
        return self.open_input_file(address)

    def get_file_info(self, addresses: list[str]) -> list[pafs.FileInfo]:
        """Of each, in this order."""
        return [self._info(address) for address in addresses]

    def _info(self, address: str) -> pafs.FileInfo:
        path = self._path(address)
        try:
            size = self._entries[path].size if path in self._entries else self._storage.open(path).size
        except ObjectNotFoundError:
            return pafs.FileInfo(address, pafs.FileType.NotFound)
        return pafs.FileInfo(address, pafs.FileType.File, size=size)

    def _path(self, address: str) -> str:
        path = address.removeprefix(self.address(""))
        if path == address:
            raise InvalidInputError(f"{address!r}: expected an object below {self._storage.uri}")
        return path

    def get_type_name(self) -> str:
        """For pyarrow."""
        return "rr_dataset"

    def normalize_path(self, address: str) -> str:
        """They have one form."""
        return address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreHandler) and self._storage.uri == other._storage.uri

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self._storage.uri}: pyarrow reads here by address, no more")

    get_file_info_selector = create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    delete_file = move = copy_file = open_output_stream = open_append_stream = _refuse
