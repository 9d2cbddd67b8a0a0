"""A remote store as a file system of pyarrow: the same client, credentials, retries and errors as everywhere here.

pyarrow has an S3 client of its own; it would need the credentials handed over, could not renew them, and speaks only S3.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from threading import Condition
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs

from rr_dataset.errors import InvalidInputError, ObjectNotFoundError
from rr_dataset.far_source import FarSource
from rr_dataset.layout import parse_shard_name
from rr_dataset.shard import TAIL_BYTES, SourceFile, likely_tail
from rr_dataset.storage import Entry, Storage

QUIET_S = 0.05  # without a call, what pyarrow had queued is done


class _Calls:
    """What pyarrow's threads do in Python. They read ahead, and would crash or wait for ever in an interpreter that ends."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._going_on = self._begun = 0
        self._ends = False

    def __enter__(self) -> None:
        with self._changed:
            self._begun += 1
            if self._ends:
                raise OSError("the interpreter ends")
            self._going_on += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._going_on -= 1
            self._changed.notify_all()

    def end(self) -> None:
        """No more from now on; returns when those that go on have ended, and what was queued has failed."""
        with self._changed:
            self._ends = True
            if not self._begun:
                return
        begun = -1
        while self._going_on or begun != self._begun:
            begun = self._begun
            _let_others_end()
            with self._changed:
                self._changed.wait(QUIET_S)


def _let_others_end() -> None:
    """Go through pyarrow's queues, behind all that is in them."""
    pa.set_io_thread_count(1)
    pa.set_cpu_count(1)
    schema = pa.schema([("a", pa.int8())])
    with pa.BufferOutputStream() as file:
        with pa.ipc.new_file(file, schema) as writer:
            writer.write_batch(pa.record_batch([pa.array([1], pa.int8())], schema))
        data = file.getvalue()
    pads.IpcFileFormat().make_fragment(data).to_table()


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
        with _calls:
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
        with _calls:
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
