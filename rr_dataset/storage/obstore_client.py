"""S3 through obstore, whose requests run outside Python. It is of no use in a forked child: see `connect`.

Seen on the wire: every PUT carries x-amz-content-sha256, signed, so S3 refuses a body that changed on the way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from rr_dataset.storage.aws import account
from rr_dataset.storage.client import (
    ANSWER_S,
    REQUESTS_AT_ONCE,
    Client,
    Found,
    Kind,
    Listing,
    Part,
    RequestFailed,
    Upload,
)
from rr_dataset.storage.connect import S3Options
from rr_dataset.storage.listing import Lister
from rr_dataset.storage.s3fs_client import SINGLE_BYTES, S3fsClient

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)")
_SAID = {
    "operation timed out": Kind.TIMEOUT,
    "TimedOut": Kind.TIMEOUT,
    "error sending request": Kind.UNREACHABLE,
    "Received redirect without LOCATION": Kind.WRONG_REGION,
}


class _Errors:
    """Raises what obstore raises as RequestFailed, without the texts of requests and answers."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, BaseError | FileNotFoundError | ValueError):
            return
        text = str(error)
        status, code = _STATUS.search(text), _CODE.search(text)
        if status or code:
            raise RequestFailed.of_answer(
                int(status[1]) if status else 0, (code[1] or code[2]) if code else ""
            ) from None
        if isinstance(error, FileNotFoundError):
            raise RequestFailed(Kind.MISSING, "not found") from None
        for said, meant in _SAID.items():
            if said in text:
                raise RequestFailed(meant, said) from None
        raise RequestFailed(Kind.SERVER, type(error).__name__) from None


class ObstoreClient:
    """See `Client`. Multipart uploads go through s3fs: obstore completes them only without a condition."""

    def __init__(self, bucket: str, options: S3Options) -> None:
        at = account(options)
        self.endpoint = at.shown_endpoint
        self._bucket, self._at = bucket, at
        self._stores: tuple[S3Store, S3Store] | None = None
        self._signing: Any = None  # with which these were made
        self._lister = Lister(bucket, at)
        self._make_s3fs: Callable[[], Client] = lambda: S3fsClient(bucket, options)
        self._s3fs: Client | None = None

    async def put_new(self, key: str, data: Sequence[memoryview], size: int) -> bool:
        """One PUT, or parts side by side."""
        if size > SINGLE_BYTES:
            return await self._parts().put_new(key, data, size)
        store, _ = await self._current()
        try:
            with _Errors():
                await obstore.put_async(store, key, b"".join(data), mode="create", use_multipart=False)
        except RequestFailed as failed:
            if failed.kind is Kind.CHANGED:
                return False
            raise
        return True

    async def get(self, key: str, start: int | None, stop: int | None, etag: str) -> Part:
        """One GET."""
        wanted: Any = {}
        if stop is not None:
            wanted["range"] = {"suffix": stop} if start is None else (start, stop)
        if etag:
            wanted["if_match"] = etag
        store, _ = await self._current()
        with _Errors():
            try:
                answer = await asyncio.wait_for(obstore.get_async(store, key, options=wanted), ANSWER_S)
            except asyncio.TimeoutError:
                raise RequestFailed(Kind.TIMEOUT, f"no answer within {ANSWER_S:.0f} s") from None
            data = await answer.bytes_async()
        meta = answer.meta
        return Part(memoryview(data), answer.range[0], meta["size"], meta["e_tag"] or "")

    async def head(self, key: str) -> Found:
        """One HEAD."""
        _, brief = await self._current()
        with _Errors():
            return _found(await obstore.head_async(brief, key))

    async def list(self, prefix: str) -> Listing:
        """Not through obstore, which takes any well-formed answer for a listing without names."""
        return await self._lister.list(prefix)

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """One POST; obstore tells only the first key that failed, so then none is sure."""
        _, brief = await self._current()
        try:
            with _Errors():
                await obstore.delete_async(brief, list(keys))
        except RequestFailed as failed:
            if failed.kind in (Kind.SERVER, Kind.REFUSED):
                return keys
            raise
        return ()

    async def uploads(self, prefix: str) -> Sequence[Upload]:
        """Through s3fs."""
        return await self._parts().uploads(prefix)

    async def abort(self, upload: Upload) -> None:
        """Through s3fs."""
        await self._parts().abort(upload)

    async def _current(self) -> tuple[S3Store, S3Store]:
        """For bodies of any length, whose time the caller counts, and for brief answers. Made anew when the keys change.

        obstore asks a provider of its own again and again, in its threads. This one it asks once, for what is held already.
        """
        signing = None if self._at.keys is None else await self._at.keys.now()
        if self._stores is None or signing != self._signing:
            with _Errors():
                self._stores = (
                    self._store(signing, timedelta(hours=1)),
                    self._store(signing, timedelta(seconds=ANSWER_S)),
                )
            self._signing = signing
        return self._stores

    def _store(self, signing: Any, timeout: timedelta) -> S3Store:
        at = self._at
        options: dict[str, Any] = {"skip_signature": True}
        if signing is not None:
            keys = {
                "access_key_id": signing.access_key,
                "secret_access_key": signing.secret_key,
                "token": signing.token,
                "expires_at": None,
            }
            options = {"credential_provider": lambda: keys}
        if at.endpoint_url:
            # of a bucket before the host it takes the whole address
            options["endpoint"] = at.endpoint_url if at.path_style else at.bucket_url(self._bucket)
            options["aws_endpoint_url_s3"] = options["endpoint"]
        client_options: dict[str, Any] = {
            "allow_http": True,
            "connect_timeout": timedelta(seconds=ANSWER_S),
            "timeout": timeout,
            "pool_max_idle_per_host": str(REQUESTS_AT_ONCE),
        }
        if isinstance(at.verify, str):
            client_options["root_certificate"] = Path(at.verify).read_bytes()
        return S3Store(
            self._bucket,
            region=at.region,
            virtual_hosted_style_request=not at.path_style,
            client_options=client_options,  # type: ignore[arg-type] # a TypedDict
            retry_config={"max_retries": 0},
            **options,
        )

    def _parts(self) -> Client:
        self._s3fs = self._s3fs or self._make_s3fs()
        return self._s3fs


def _found(meta: Any) -> Found:
    if not meta["e_tag"]:  # a page of somebody else, as it may have a length
        raise RequestFailed(Kind.SERVER, "an answer without ETag")
    return Found(meta["path"], meta["size"], meta["last_modified"].timestamp(), meta["e_tag"] or "")
