"""Where a dataset lies: one `Storage` for each kind of store, and `open_storage`.

Paths are relative to the dataset's root, with "/" between their parts; "" is the root.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from rr_dataset.errors import InvalidInputError
from rr_dataset.storage.base import Buffer, Entry, OpenSource, Storage
from rr_dataset.storage.local import LocalStorage

__all__ = ["Buffer", "Entry", "OpenSource", "Storage", "open_storage"]

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MEANT = re.compile(r"[^/]*://|s3a?:", re.IGNORECASE)  # an address that is none, never a folder of that name


def open_storage(uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Storage:
    """The store behind `uri`: a path, `file:///path`, `s3://bucket/path`, or a scheme of fsspec (untested but for memory://).

    storage_options: for s3:// those of `connect.S3Options`, for another scheme those of fsspec's file system.

    Touches nothing; a missing root is an empty store. Raises InvalidInputError for an unknown scheme, an empty `uri`, or
    options the store does not know.
    """
    try:
        text = os.fsdecode(uri)
    except TypeError:
        raise InvalidInputError(f"uri={uri!r}: expected the path of a dataset, or a file:// URI") from None
    if re.match(r"file:", text, re.IGNORECASE):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidInputError(
                f"{text!r}: a file URI names an absolute path on this host, as file:///data/routing"
            )
        text = unquote(parts.path)
    if not text or "\0" in text:
        raise InvalidInputError(f"{text!r}: expected the path of a dataset")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise InvalidInputError(f"storage_options: expected a mapping, not {type(storage_options).__name__}")
    if _SCHEME.match(text):
        remote = importlib.import_module("rr_dataset.storage.remote")  # fsspec and asyncio cost a local path 0.1 s
        store: Storage = remote.RemoteStorage(text, storage_options or {})
        return store
    if _MEANT.match(text):
        raise InvalidInputError(
            f"{text!r}: expected a path, file:///path or s3://bucket/path; ./ begins a path that looks so"
        )
    if storage_options:
        raise InvalidInputError(f"storage_options {sorted(storage_options)}: a local path takes none")
    return LocalStorage(text)
