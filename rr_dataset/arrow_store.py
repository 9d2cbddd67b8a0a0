"""A remote store as a file system of pyarrow: the same client, credentials, retries and errors as everywhere here.

pyarrow has an S3 client of its own; it would need the credentials handed over, could not renew them, and speaks only S3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.fs as pafs

from rr_dataset.errors import InvalidInputError, ObjectNotFoundError
from rr_dataset.far_source import FarSource
from rr_dataset.layout import parse_shard_name
from rr_dataset.shard import TAIL_BYTES, SourceFile, likely_tail
from rr_dataset.storage import Entry, Storage
from rr_dataset.storage.ending import visit


class _File(SourceFile):
    def read(self, size: int = -1) -> bytes:
        with visit():
            return super().read(size)


class StoreHandler(pafs.FileSystemHandler):  # type: ignore[misc]  # pyarrow ships no types
    """Reads the objects of a store, by their address. Pickles, with the options of the store."""

    def __init__(self, storage: Storage, entries: Mapping[str, Entry]) -> None:
        """entries: of listed objects, by path; these are opened without a request."""
        self._storage, self._entries = storage, dict(entries)
        with visit():  # from now on
            pass

    def address(self, path: str) -> str:
        """What pyarrow calls the object at this path."""
        return f"{self._storage.uri}/{path}"

    def open_input_file(self, address: str) -> pa.NativeFile:
        """For reads at any place. The first one raises ObjectNotFoundError where the object has vanished.

        Nothing is kept from one opening to the next: what is deleted is not shown again.
        """
        path = self._path(address)
        with visit():
            source = self._storage.open(path, self._entries.get(path))
        name = parse_shard_name(path.rpartition("/")[2])
        end = TAIL_BYTES if name is None else likely_tail(name.rows, source.size)
        return pa.PythonFile(_File(FarSource(source, end), source.size), mode="r")

    def open_input_stream(self, address: str) -> pa.NativeFile:
        """The same."""
        return self.open_input_file(address)

    def get_file_info(self, addresses: list[str]) -> list[pafs.FileInfo]:
        """Of each, in this order."""
        with visit():
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
