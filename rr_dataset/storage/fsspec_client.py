"""Any other store that fsspec knows, by the methods that all its file systems have. Only memory:// is tested.

Where the file system creates only what is not there, that is used; where it does not, HEAD, then PUT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import fsspec

from rr_dataset.errors import InvalidInputError
from rr_dataset.storage.client import Found, Kind, Listing, Part, RequestFailed, Upload

_T = TypeVar("_T")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")
_ETAGS = ("ETag", "etag", "md5Hash", "generation")


class FsspecClient:
    """See `Client`. Calls run in threads, whatever the file system; it gives no condition for a read."""

    endpoint = ""

    def __init__(self, scheme: str, bucket: str, options: Mapping[str, Any]) -> None:
        self._bucket = bucket
        try:
            self._fs = fsspec.filesystem(scheme, use_listings_cache=False, **options)
        except Exception as error:  # file systems raise anything for options they lack
            raise InvalidInputError(
                f"{scheme}:// (untested) cannot be used with storage_options {sorted(options)}: {type(error).__name__}: {error}"
            ) from error

    async def put_new(self, key: str, data: Sequence[memoryview], size: int) -> bool:  # noqa: ARG002 -- one call, however large
        """Look, then create."""
        path = self._path(key)
        if await self._call(self._fs.exists, path):
            return False
        try:
            await self._call(self._fs.pipe_file, path, b"".join(data), mode="create")
        except FileExistsError:
            return False
        return True

    async def get(self, key: str, start: int | None, stop: int | None, etag: str) -> Part:  # noqa: ARG002 -- no file system takes it
        """Without a look at the etag."""
        size = -1
        if start is None and stop is not None:
            size = (await self.head(key)).size
            start, stop = max(size - stop, 0), size
        data = await self._call(self._fs.cat_file, self._path(key), start, stop)
        return Part(data, start or 0, size if size >= 0 else (start or 0) + len(data), "")

    async def head(self, key: str) -> Found:
        """What the file system tells."""
        return self._found(await self._call(self._fs.info, self._path(key)))

    async def list(self, prefix: str) -> Listing:
        """In one answer."""
        try:
            listed = await self._call(self._fs.ls, self._path(prefix).rstrip("/"), detail=True, refresh=True)
        except RequestFailed as failed:
            if failed.kind is not Kind.MISSING:
                raise
            return [], []
        found = [self._found(each) for each in listed if each["type"] != "directory"]
        return found, [self._key(each["name"]).rstrip("/") for each in listed if each["type"] == "directory"]

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """One after the other; those that are missing are no error."""
        for key in keys:
            try:
                await self._call(self._fs.rm_file, self._path(key))
            except RequestFailed as failed:
                if failed.kind is not Kind.MISSING:
                    raise
        return ()

    async def uploads(self, prefix: str) -> Sequence[Upload]:  # noqa: ARG002 -- no file system tells
        """None that it knows of."""
        return ()

    async def abort(self, upload: Upload) -> None:
        """There is none."""

    async def _call(self, method: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
        try:
            return await asyncio.to_thread(method, *arguments, **options)
        except FileExistsError:
            raise
        except FileNotFoundError:
            raise RequestFailed(Kind.MISSING, "not found") from None
        except PermissionError as error:
            raise RequestFailed(Kind.DENIED, type(error).__name__) from error
        except TimeoutError as error:
            raise RequestFailed(Kind.TIMEOUT, type(error).__name__) from error
        except ConnectionError as error:
            raise RequestFailed(Kind.UNREACHABLE, type(error).__name__) from error
        except Exception as error:  # file systems raise what their clients raise
            raise RequestFailed(Kind.SERVER, type(error).__name__) from error

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{key}"

    def _key(self, path: str) -> str:
        return path.lstrip("/").removeprefix(f"{self._bucket}/")

    def _found(self, info: Mapping[str, Any]) -> Found:
        made = next((info[name] for name in _TIMES if info.get(name) is not None), 0.0)
        if isinstance(made, str):
            made = datetime.fromisoformat(made.replace("Z", "+00:00"))
        etag = next((str(info[name]) for name in _ETAGS if info.get(name) is not None), "")
        seconds = made.timestamp() if isinstance(made, datetime) else float(made)
        return Found(self._key(info["name"]), info["size"], seconds, etag)
