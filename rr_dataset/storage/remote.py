"""An object store as a store, through fsspec: `s3://bucket/path`, and what else fsspec knows.

An object is created by one PUT, or one multipart upload that is completed, with If-None-Match. An answer that says
neither yes nor no (a time-out, a reset, a 500) is settled by looking. Requests run in fsspec's event loop, a limited
number at once; a client belongs to one process and is made anew after a fork.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from fsspec.asyn import get_loop

from rr_dataset.errors import CorruptShardError, InvalidInputError, StorageError
from rr_dataset.layout import MARGIN_S, STAGING_DIR
from rr_dataset.storage.base import Buffer, Entries, Entry, Names
from rr_dataset.storage.client import (
    AMBIGUOUS,
    ANSWER_S,
    DELETE_KEYS,
    PASSING,
    REQUESTS_AT_ONCE,
    SLOWEST_BYTES_S,
    Client,
    Found,
    Kind,
    Listing,
    Part,
    RequestFailed,
    Upload,
    storage_error,
)
from rr_dataset.storage.connect import connect
from rr_dataset.storage.ending import own, run

_T = TypeVar("_T")

TRIES = 3  # of one request; who publishes or reads tries again above
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 1.0  # before the second, twice as long before each further one, give or take a half
_CREATE_TRIES = {
    Kind.CONFLICT: 8,  # creators of one name get in each other's way for a moment
    Kind.TIMEOUT: 1,  # sending all of it again would only make the caller wait longer for the news
}
CREATE_S = MARGIN_S / 2  # no create may take as long as the margin
LOOK_BYTES = 16 << 20  # a name that is taken is found before so much is sent
# A longer range is read as several side by side. On loopback shorter ones cost CPU and gain nothing, and one record of
# 12.6 MB is one request.
PIECE_BYTES = 16 << 20
# The layers of small records lie closer together and come in one request; a layer of a large one that nobody asked for
# is left out. At 50 to 100 MB/s a connection reads so much in 3 to 5 ms, less than a round trip to a store in the region.
MAX_GAP_BYTES = 256 << 10
_NO_SUCH_PARTS = frozenset(("", ".", ".."))
_UPLOADS_DIR = f"{STAGING_DIR}/uploads"  # unfinished multipart uploads, shown there to who collects garbage
_FOLDER_MARK = "_$folder$"  # of Hadoop


class RemoteStorage:
    """A prefix of an object store as a store: see `Storage` for what its methods promise."""

    is_remote = True
    requests_at_once = REQUESTS_AT_ONCE

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        """uri: `scheme://bucket/path`. options: of the store's client; see `connect`."""
        scheme, _, rest = uri.partition("://")
        bucket, _, path = rest.partition("/")
        if "@" in bucket:
            raise InvalidInputError(
                f"{scheme}://...@{bucket.rpartition('@')[2]}: an address is stored and shown, so credentials do not belong "
                "into it: give them in storage_options, or in the environment"
            )
        path = path.rstrip("/")
        if not bucket or (path and not _NO_SUCH_PARTS.isdisjoint(path.split("/"))) or "\0" in rest:
            raise InvalidInputError(f"{uri!r}: expected {scheme}://bucket/path")
        self._scheme, self._bucket = scheme.lower(), bucket
        self._base = f"{path}/" if path else ""
        self._options = dict(options)
        self._connect = connect(self._scheme, bucket, self._options)
        self._connection: tuple[int, Client, asyncio.Semaphore] | None = None

    @property
    def uri(self) -> str:
        """Without the options."""
        return f"{self._scheme}://{self._bucket}/{self._base}".rstrip("/")

    def __repr__(self) -> str:
        return f"RemoteStorage({self.uri!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStorage, (self.uri, self._options)

    def list(self, path: str) -> Entries:
        """As the store has it now: one request per thousand names."""
        if path == _UPLOADS_DIR:
            return self._uploads()
        found, _ = self._listed(path)
        return [Entry(each.key.rpartition("/")[2], each.size, each.mtime_s, each.etag) for each in found]

    def list_dirs(self, path: str) -> Names:
        """What stands between the prefix and the next slash."""
        _, prefixes = self._listed(path)
        names = [prefix.rpartition("/")[2] for prefix in prefixes]
        return [*names, _UPLOADS_DIR.rpartition("/")[2]] if path == STAGING_DIR else names

    def list_others(self, path: str) -> Names:
        """There is nothing else."""
        self._key(path, root=True)
        return []

    def changed_ns(self, path: str) -> None:
        """It does not tell."""
        self._key(path, root=True)

    def open(self, path: str, entry: Entry | None = None) -> RemoteSource:
        """Open for ranged reads; asks the store only without an entry."""
        key = self._key(path)
        if entry is None:
            found = self._run(path, self._tried(lambda client: client.head(key)))
            entry = Entry(path, found.size, found.mtime_s, found.etag)
        return RemoteSource(self, path, entry)

    def read_bytes(self, path: str) -> bytes:
        """The whole object, in one request."""
        key = self._key(path)
        return bytes(self._run(path, self._tried(lambda client: client.get(key, None, None, ""), patience=4)).data)

    def create(self, path: str, data: Buffer | Sequence[Buffer], *, staging: str) -> bool:
        """One PUT or one multipart upload; there are no stages."""
        key = self._key(path)
        self._key(staging)
        buffers = [data] if isinstance(data, (bytes, bytearray, memoryview)) else data
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        return self._run(path, self._create(key, views))

    def sync_dirs(self, paths: Iterable[str]) -> None:
        """What has a name has it for good."""
        for path in paths:
            self._key(path, root=True)

    def delete(self, paths: Iterable[str]) -> None:
        """A request per thousand objects. What was not clearly deleted is tried again, then looked at."""
        paths = list(paths)
        if uploads := {path for path in paths if path.startswith(f"{_UPLOADS_DIR}/")}:
            self._abort(sorted(uploads))
        keys = [self._key(path) for path in paths if path not in uploads]
        batches = [keys[at : at + DELETE_KEYS] for at in range(0, len(keys), DELETE_KEYS)]
        left = [key for some in self._run("", self._gathered(self._delete(batch) for batch in batches)) for key in some]
        if left:
            some = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
            raise StorageError(errno.EIO, f"{len(left)} of {len(keys)} objects are still there: {some}", self.uri)

    def remove_empty_dirs(self, path: str) -> None:
        """There are none."""
        self._key(path, root=True)

    def read_pieces(
        self, path: str, pieces: Sequence[tuple[int, int]], etag: str, take: Callable[[int, Part], None]
    ) -> None:
        """Read ranges (start, stop) side by side; `take(number, part)` as each arrives."""
        key = self._key(path)

        async def one(number: int, start: int, stop: int) -> None:
            take(number, await self._tried(lambda client: client.get(key, start, stop, etag), stop - start))

        self._run(path, self._gathered(one(number, *piece) for number, piece in enumerate(pieces)))

    def _uploads(self) -> Entries:
        uploads = self._run(_UPLOADS_DIR, self._tried(lambda client: client.uploads(self._base)))
        return [Entry(_upload_name(each.key.removeprefix(self._base), each.id), 0, each.begun_s) for each in uploads]

    def _abort(self, paths: Sequence[str]) -> None:
        uploads = []
        for path in paths:
            key, _, upload = path.rpartition("/")[2].partition("+")
            uploads.append(Upload(self._key(unquote(key)), unquote(upload), 0.0))

        async def abort(upload: Upload) -> None:
            await self._tried(lambda client: client.abort(upload))

        self._run(_UPLOADS_DIR, self._gathered(abort(upload) for upload in uploads))

    def _listed(self, path: str) -> Listing:
        prefix = self._key(path, root=True)
        prefix = f"{prefix}/" if prefix else ""
        found, prefixes = self._run(path, self._tried(lambda client: client.list(prefix), patience=30))
        marks = ("", _FOLDER_MARK)
        ours = [each for each in found if each.key != prefix[:-1] and not each.key.endswith(("/", _FOLDER_MARK))]
        return ours, [each for each in prefixes if each.rpartition("/")[2] not in marks]

    async def _create(self, key: str, data: Sequence[memoryview]) -> bool:
        try:
            return await asyncio.wait_for(self._made(key, data), CREATE_S)
        except asyncio.TimeoutError:
            raise RequestFailed(Kind.TIMEOUT, f"no answer within {CREATE_S:.0f} s") from None

    async def _made(self, key: str, data: Sequence[memoryview]) -> bool:
        size = sum([view.nbytes for view in data])
        if size > LOOK_BYTES and await self._look(key) is not None:
            return False
        unclear = False  # whether a try before may have done it
        for attempt in range(max(_CREATE_TRIES.values())):
            try:
                made = await self._once(
                    lambda client: client.put_new(key, data, size), ANSWER_S + size / SLOWEST_BYTES_S
                )
            except RequestFailed as failed:
                if failed.kind in AMBIGUOUS:
                    unclear = True
                    with suppress(RequestFailed):  # what went wrong first says more
                        return (await self._once(lambda client: client.head(key), ANSWER_S)).size == size
                if failed.kind not in PASSING or attempt + 1 >= _CREATE_TRIES.get(failed.kind, TRIES):
                    raise
                await _pause(attempt)
            else:
                if made:
                    return True
                if found := await self._look(key):  # else it was somebody's page, or has just been deleted
                    return unclear and found.size == size
                await _pause(attempt)
        raise RequestFailed(Kind.CONFLICT, "the store says that the name is taken, and has nothing there")

    async def _look(self, key: str) -> Found | None:
        try:
            return await self._tried(lambda client: client.head(key))
        except RequestFailed as failed:
            if failed.kind is Kind.MISSING:
                return None
            raise

    async def _delete(self, keys: Sequence[str]) -> Sequence[str]:
        """The keys that are still there."""
        for attempt in range(TRIES):
            keys = await self._tried(lambda client, keys=keys: client.delete(keys))  # type: ignore[misc]
            if not keys:
                return keys
            await _pause(attempt)
        found = await self._gathered(self._look(key) for key in keys)
        return [each.key for each in found if each is not None]

    async def _tried(self, call: Callable[[Client], Awaitable[_T]], size: int = 0, patience: float = 1) -> _T:
        """A request that may be repeated; `patience` times the usual time for each."""
        timeout_s = patience * (ANSWER_S + size / SLOWEST_BYTES_S)
        for attempt in range(TRIES - 1):
            try:
                return await self._once(call, timeout_s)
            except RequestFailed as failed:
                if failed.kind not in PASSING or (failed.kind is Kind.TIMEOUT and attempt):
                    raise
                await _pause(attempt)
        return await self._once(call, timeout_s)

    async def _once(self, call: Callable[[Client], Awaitable[_T]], timeout_s: float) -> _T:
        client, room = self._client()
        try:
            async with room:
                return await asyncio.wait_for(call(client), timeout_s)
        except asyncio.TimeoutError:
            raise RequestFailed(Kind.TIMEOUT, f"no answer within {timeout_s:.0f} s") from None

    async def _gathered(self, calls: Iterable[Coroutine[Any, Any, _T]]) -> Sequence[_T]:
        """The results of all; the first failure ends the others."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _client(self) -> tuple[Client, asyncio.Semaphore]:
        """This process's, and the room that its requests share."""
        connection = self._connection
        if connection is None or connection[0] != os.getpid():
            self._connection = connection = (os.getpid(), self._connect(), asyncio.Semaphore(REQUESTS_AT_ONCE))
            own(connection[1])
        return connection[1:]

    def _run(self, path: str, call: Coroutine[Any, Any, _T]) -> _T:
        try:
            with _closed_on_error(call):
                _check_loop()
                self._client()  # in this thread: it may have to ask for credentials
            return run(call)
        except RequestFailed as failed:
            raise storage_error(failed, self._address(path), self._endpoint()) from failed

    def _endpoint(self) -> str:
        return self._connection[1].endpoint if self._connection else ""

    def _address(self, path: str) -> str:
        return f"{self.uri}/{path}" if path else self.uri

    def _key(self, path: str, *, root: bool = False) -> str:
        if root and not path:
            return self._base[:-1]
        if "\0" in path or not _NO_SUCH_PARTS.isdisjoint(path.split("/")):
            raise InvalidInputError(
                f"path {path!r}: expected names with one / between them, relative to the dataset's root"
            )
        return self._base + path


class RemoteSource:
    """An object opened for ranged reads, from any thread. Reading fails once the object is deleted or replaced."""

    max_gap_bytes = MAX_GAP_BYTES

    def __init__(self, storage: RemoteStorage, path: str, entry: Entry) -> None:
        self._storage, self._path, self._etag = storage, path, entry.etag
        self.size = entry.size

    def tail(self, length: int) -> bytes:
        """The last `length` bytes; all of them, if there are fewer."""
        length = min(length, self.size)
        return self.read(self.size - length, length)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes. Raises CorruptShardError where the object ends before."""
        whole: list[bytes] = [b""]

        def take(_: int, part: Part) -> None:
            whole[0] = bytes(part.data)

        if 0 < length <= PIECE_BYTES:
            self._get([(offset, offset + length)], take)
            return whole[0]
        data = bytearray(length)
        self.read_runs([(offset, [memoryview(data)])])
        return bytes(data)

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill buffers (writable, contiguous) from the object, the runs side by side, long ones in pieces.

        Raises CorruptShardError where the object ends before, and ObjectNotFoundError where it was replaced.
        """
        pieces: list[tuple[int, int]] = []
        targets: list[list[memoryview]] = []
        for start, buffers in runs:
            for at, views in _cut(start, buffers):
                pieces.append((at, at + sum([view.nbytes for view in views])))
                targets.append(views)

        def take(number: int, part: Part) -> None:
            data, at = memoryview(part.data), 0
            for view in targets[number]:
                view[:] = data[at : at + view.nbytes]
                at += view.nbytes

        self._get(pieces, take)

    def _get(self, pieces: Sequence[tuple[int, int]], take: Callable[[int, Part], None]) -> None:
        for start, stop in pieces:
            if stop > self.size:
                self._short(start, stop - max(start, self.size))

        def checked(number: int, part: Part) -> None:
            start, stop = pieces[number]
            if part.offset != start or len(part.data) != stop - start:
                self._short(start + len(part.data), stop - start - len(part.data))
            take(number, part)

        self._storage.read_pieces(self._path, pieces, self._etag, checked)

    def _short(self, ends: int, missing: int) -> None:
        raise CorruptShardError(
            f"{self._path!r} ends at byte {min(ends, self.size)}, {missing} bytes short of what was asked for"
        )

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> RemoteSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _upload_name(path: str, upload: str) -> str:
    return f"{quote(path, safe='')}+{quote(upload, safe='')}"


def _cut(start: int, buffers: Sequence[memoryview]) -> list[tuple[int, list[memoryview]]]:
    """A run as pieces of at most PIECE_BYTES, each the offset and its views."""
    pieces: list[tuple[int, list[memoryview]]] = []
    room = 0
    at = start
    for buffer in buffers:
        view = buffer.cast("B")
        while view.nbytes:
            if not room:
                pieces.append((at, []))
                room = PIECE_BYTES
            taken = view[:room]
            pieces[-1][1].append(taken)
            room -= taken.nbytes
            at += taken.nbytes
            view = view[taken.nbytes :]
    return pieces


def _check_loop() -> None:
    with suppress(RuntimeError):  # no loop runs in this thread
        if asyncio.get_running_loop() is get_loop():
            raise InvalidInputError("called from within fsspec's event loop, which would wait for itself: use a thread")


@contextmanager
def _closed_on_error(call: Coroutine[Any, Any, object]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        call.close()
        raise


async def _pause(attempt: int) -> None:
    await asyncio.sleep(min(FIRST_PAUSE_S * 2**attempt, LAST_PAUSE_S) * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
