"""S3 through s3fs: its session and event loop, and single requests of the client below it.

Seen on the wire: every PUT and every part carries x-amz-checksum-crc32 of its body, and If-None-Match stands at the PUT or
at the completion of the upload.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from s3fs import S3FileSystem

from rr_dataset.storage.aws import BotoErrors, account
from rr_dataset.storage.client import (
    ANSWER_S,
    PASSING,
    REQUESTS_AT_ONCE,
    SLOWEST_BYTES_S,
    Found,
    Kind,
    Listing,
    Part,
    RequestFailed,
    Upload,
)
from rr_dataset.storage.connect import S3Options
from rr_dataset.storage.listing import Lister
from rr_dataset.storage.once import OnceSession

SINGLE_BYTES = 64 << 20  # what is larger goes up in parts
PART_BYTES = 16 << 20
MAX_PARTS = 10_000  # S3's limit
PARTS_AT_ONCE = 4
PART_TRIES = 3


class _Errors(BotoErrors):
    """Of the HTTP client below botocore too."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, aiohttp.ClientError):
            raise RequestFailed(Kind.SERVER, type(error).__name__) from None
        super().__exit__(kind, error, trace)


class S3fsClient:
    """See `Client`."""

    def __init__(self, bucket: str, options: S3Options) -> None:
        at = account(options)
        self._bucket, self.endpoint = bucket, at.shown_endpoint
        self._lister = Lister(bucket, at)
        keys = at.credentials.get_frozen_credentials() if options.key is not None else None
        self._fs = S3FileSystem(
            anon=options.anon,
            key=keys and keys.access_key,
            secret=keys and keys.secret_key,
            token=keys and keys.token,
            endpoint_url=at.endpoint_url,
            client_kwargs={"region_name": at.region},
            config_kwargs={
                "connect_timeout": ANSWER_S,
                "read_timeout": ANSWER_S,
                "max_pool_connections": 2 * REQUESTS_AT_ONCE,
                "retries": {"total_max_attempts": 1},
                "http_session_cls": OnceSession,
                "s3": {"addressing_style": "path" if at.path_style else "virtual"},
            },
            skip_instance_cache=True,
            use_listings_cache=False,
            **({"profile": options.profile} if options.profile else {}),
        )

    async def put_new(self, key: str, data: Sequence[memoryview], size: int) -> bool:
        """One PUT, or parts side by side."""
        try:
            if size <= SINGLE_BYTES:
                with _Errors():
                    answer = await (await self._s3()).put_object(
                        Bucket=self._bucket, Key=key, Body=b"".join(data), IfNoneMatch="*"
                    )
                _require(answer, "ETag")
            else:
                await self._put_parts(key, data, size)
        except RequestFailed as failed:
            if failed.kind is Kind.CHANGED:
                return False
            raise
        return True

    async def get(self, key: str, start: int | None, stop: int | None, etag: str) -> Part:
        """One GET."""
        wanted: dict[str, str] = {}
        if stop is not None:
            wanted["Range"] = f"bytes=-{stop}" if start is None else f"bytes={start}-{stop - 1}"
        if etag:
            wanted["IfMatch"] = etag
        with _Errors():
            answer = await (await self._s3()).get_object(Bucket=self._bucket, Key=key, **wanted)
            async with answer["Body"] as body:
                data = await body.read()
        _require(answer, "ContentRange" if "Range" in wanted else "ETag")
        offset, size = 0, len(data)
        if found := answer.get("ContentRange"):
            place, _, whole = found.removeprefix("bytes ").partition("/")
            offset, size = int(place.partition("-")[0]), int(whole)
        return Part(data, offset, size, answer.get("ETag", ""))

    async def head(self, key: str) -> Found:
        """One HEAD."""
        with _Errors():
            answer = await (await self._s3()).head_object(Bucket=self._bucket, Key=key)
        _require(answer, "ETag", "LastModified", "ContentLength")
        return Found(key, answer["ContentLength"], answer["LastModified"].timestamp(), answer.get("ETag", ""))

    async def list(self, prefix: str) -> Listing:
        """A request per thousand names."""
        return await self._lister.list(prefix)

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """One POST, whose answer names the keys that failed."""
        names = {"Objects": [{"Key": key} for key in keys], "Quiet": False}
        with _Errors():
            answer = await (await self._s3()).delete_objects(Bucket=self._bucket, Delete=names)
        for each in answer.get("Errors", ()):
            known = RequestFailed.of_answer(0, each.get("Code", ""))
            if known.kind is Kind.DENIED:
                raise known
        done = {each.get("Key") for each in answer.get("Deleted", ())}
        return [key for key in keys if key not in done]

    async def uploads(self, prefix: str) -> Sequence[Upload]:
        """A request per thousand."""
        s3 = await self._s3()
        found: list[Upload] = []
        after: dict[str, str] = {}
        while True:
            with _Errors():
                answer = await s3.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix, **after)
            marks = ("NextKeyMarker", "NextUploadIdMarker") if answer.get("IsTruncated") else ()
            _require(answer, "IsTruncated", *marks)
            found += [
                Upload(each["Key"], each["UploadId"], each["Initiated"].timestamp())
                for each in answer.get("Uploads", ())
            ]
            if not answer["IsTruncated"]:
                return found
            after = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    async def abort(self, upload: Upload) -> None:
        """One DELETE."""
        try:
            with _Errors():
                await (await self._s3()).abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.id)
        except RequestFailed as failed:
            if failed.kind is not Kind.NO_UPLOAD:
                raise

    async def _put_parts(self, key: str, data: Sequence[memoryview], size: int) -> None:
        s3 = await self._s3()
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
        with _Errors():
            upload = (await s3.create_multipart_upload(Bucket=self._bucket, Key=key))["UploadId"]
        names = {"Bucket": self._bucket, "Key": key, "UploadId": upload}
        room = asyncio.Semaphore(PARTS_AT_ONCE)

        async def put(number: int) -> dict[str, Any]:
            async with room:
                body = _cut(data, (number - 1) * part_bytes, part_bytes)
                return await self._put_part(s3, {**names, "PartNumber": number, "Body": body})

        tasks = [asyncio.ensure_future(put(number)) for number in range(1, -(-size // part_bytes) + 1)]
        try:
            parts = {"Parts": await asyncio.gather(*tasks)}
            with _Errors():
                answer = await s3.complete_multipart_upload(**names, MultipartUpload=parts, IfNoneMatch="*")
            _require(answer, "ETag")
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(RequestFailed):  # `uploads` shows it
                await self.abort(Upload(key, upload, 0.0))
            raise

    async def _put_part(self, s3: Any, request: dict[str, Any]) -> dict[str, Any]:
        timeout_s = ANSWER_S + len(request["Body"]) / SLOWEST_BYTES_S
        for left in reversed(range(PART_TRIES)):
            try:
                with _Errors():
                    answer = await asyncio.wait_for(s3.upload_part(**request), timeout_s)
                _require(answer, "ETag")
                return {"PartNumber": request["PartNumber"], "ETag": answer["ETag"]}
            except asyncio.TimeoutError:
                if not left:
                    raise RequestFailed(Kind.TIMEOUT, f"part not taken within {timeout_s:.0f} s") from None
            except RequestFailed as failed:
                if failed.kind not in PASSING or not left:
                    raise
            await asyncio.sleep(random.uniform(0.1, 0.5))  # noqa: S311 - no secret
        raise AssertionError("the last try returns or raises")

    async def _s3(self) -> Any:
        return await self._fs.set_session()


def _require(answer: Mapping[str, Any], *names: str) -> None:
    """What botocore found in an answer; of a page of somebody else, a 200 as well, it finds nothing and is content."""
    if missing := [name for name in names if answer.get(name) is None]:
        raise RequestFailed(Kind.SERVER, f"an answer without {', '.join(missing)}")


def _cut(data: Sequence[memoryview], start: int, length: int) -> bytes:
    """The bytes of the buffers, one after the other, from `start` on."""
    taken = []
    for view in data:
        if start < view.nbytes and length > 0:
            taken.append(view[start : start + length])
            length -= taken[-1].nbytes
        start = max(start - view.nbytes, 0)
    return b"".join(taken)
