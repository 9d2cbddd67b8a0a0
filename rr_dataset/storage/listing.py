"""Listings of a bucket, for both clients of S3: an answer is a whole one, or refused.

obstore takes any well-formed answer for a listing, if need be for one without names; botocore needs five times as long.
"""

from __future__ import annotations

import asyncio
import os
import re
import weakref
from contextlib import suppress
from datetime import datetime
from urllib.parse import quote, unquote_plus
from xml.etree import ElementTree as ET

import aiohttp
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.utils import get_environ_proxies

from rr_dataset.storage.aws import Account, BotoErrors
from rr_dataset.storage.client import ANSWER_S, REQUESTS_AT_ONCE, Found, Kind, Listing, RequestFailed
from rr_dataset.storage.once import OnceSession

MAX_BYTES = 16 << 20  # of an answer: a thousand names of 1,024 bytes, each written as three, are 4 MB
CLOSE_S = 1.0  # for the connections of a lister that nobody needs any more
_CODE = re.compile(rb"<Code>(\w{1,64})</Code>")
_FRACTION = re.compile(r"\.\d+")  # of a second; Python 3.10 takes three digits or six


class Lister:
    """Lists one bucket, in fsspec's event loop."""

    def __init__(self, bucket: str, at: Account) -> None:
        self._at = at
        self._url = at.bucket_url(bucket) + ("" if at.path_style else "/")
        self._session: OnceSession | None = None

    async def list(self, prefix: str) -> Listing:
        """See `Client.list`. A request per thousand names."""
        found: list[Found] = []
        prefixes: list[str] = []
        after = ""
        while True:
            status, body = await self._answer(prefix, after)
            if status != 200:
                raise _refused(status, body)
            try:
                page = _Page(body, prefix)
            except (ET.ParseError, ValueError, KeyError, OverflowError):
                raise _refused(status, body) from None
            found += page.found
            prefixes += page.prefixes
            if not page.after:
                return found, prefixes
            if page.after == after:
                raise RequestFailed(Kind.NO_LISTING, "the same page again")
            after = page.after

    async def _answer(self, prefix: str, after: str) -> tuple[int, bytes]:
        """Of one request."""
        query = f"delimiter=%2F&encoding-type=url&list-type=2&prefix={_quoted(prefix)}"  # in the order that is signed
        if after:
            query = f"continuation-token={_quoted(after)}&{query}"
        request = AWSRequest("GET", f"{self._url}?{query}", stream_output=True)
        with BotoErrors():
            if self._at.keys is not None:
                S3SigV4Auth(await self._at.keys.now(), "s3", self._at.region).add_auth(request)
            answer = await (await self._opened()).send(request.prepare())
        return answer.status_code, await _body(answer.raw)

    async def _opened(self) -> OnceSession:
        if self._session is None:
            self._session = OnceSession(
                verify=self._at.verify,
                proxies=get_environ_proxies(self._url),
                timeout=(ANSWER_S, ANSWER_S),
                max_pool_connections=2 * REQUESTS_AT_ONCE,
            )
            weakref.finalize(self, _close, self._session, asyncio.get_running_loop(), os.getpid())
            await self._session.__aenter__()
        return self._session


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    try:
        async for some in answer.content.iter_any():
            body += some
            if len(body) > MAX_BYTES:
                raise RequestFailed(Kind.NO_LISTING, f"more than {MAX_BYTES >> 20} MiB of a page")
    except asyncio.TimeoutError:
        raise RequestFailed(Kind.TIMEOUT, f"nothing for {ANSWER_S:.0f} s") from None
    except aiohttp.ClientError as error:
        raise RequestFailed(Kind.SERVER, type(error).__name__) from None
    finally:
        answer.close()  # after a whole answer the connection is back in its pool already
    return bytes(body)


class _Page:
    """What an answer lists. Raises ParseError, ValueError or KeyError for anything but a whole ListBucketResult."""

    def __init__(self, body: bytes, prefix: str) -> None:
        root = ET.fromstring(body)  # noqa: S314 -- expat stops what expands without end
        space, brace, name = root.tag.rpartition("}")
        self._space = space + brace
        if name != "ListBucketResult":
            raise ValueError(name)
        self._unquoted = unquote_plus if root.findtext(f"{self._space}EncodingType") == "url" else str
        self._names = [f"{self._space}{each}" for each in ("Key", "Size", "LastModified", "ETag")]
        self.found = [self._found(each) for each in root.iterfind(f"{self._space}Contents")]
        below = [self._unquoted(self._text(each, "Prefix")) for each in root.iterfind(f"{self._space}CommonPrefixes")]
        if not all(_is_below(prefix, key) for key in (*[f"{each.key}/" for each in self.found], *below)):
            raise ValueError(prefix)
        self.prefixes = [each.removesuffix("/") for each in below]
        is_last = {"true": False, "false": True}[self._text(root, "IsTruncated")]
        self.after = "" if is_last else self._text(root, "NextContinuationToken")

    def _found(self, element: ET.Element) -> Found:
        key, size, changed, etag = map(element.findtext, self._names)
        if not (key and size and changed) or int(size) < 0:
            raise ValueError(key)
        time_s = datetime.fromisoformat(_FRACTION.sub("", changed).replace("Z", "+00:00")).timestamp()
        return Found(self._unquoted(key), int(size), time_s, etag or "")

    def _text(self, element: ET.Element, name: str) -> str:
        text = element.findtext(f"{self._space}{name}")
        if not text:
            raise ValueError(name)
        return text


def _is_below(prefix: str, name: str) -> bool:
    """Whether it is directly there; it ends with a slash."""
    return name.startswith(prefix) and name.find("/", len(prefix)) == len(name) - 1


def _refused(status: int, body: bytes) -> RequestFailed:
    """Never one that says an object is missing: nobody asked for one."""
    code = _CODE.search(body)
    failed = RequestFailed.of_answer(status, code[1].decode() if code else "")
    if failed.kind is Kind.MISSING or (status < 400 and failed.kind is Kind.REFUSED):
        return RequestFailed(Kind.NO_LISTING, failed.text)
    return failed


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")


def _close(session: OnceSession, loop: asyncio.AbstractEventLoop, pid: int) -> None:
    if os.getpid() != pid or not loop.is_running():  # in a forked child they are the parent's
        return
    closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
    with suppress(RuntimeError):  # no loop runs in this thread
        if asyncio.get_running_loop() is loop:
            return
    with suppress(Exception):
        closing.result(CLOSE_S)
