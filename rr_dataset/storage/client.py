"""What a remote store needs of a client: one request a call, in coroutines of fsspec's event loop, and failures by kind."""

from __future__ import annotations

import enum
import errno
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from rr_dataset.errors import ObjectNotFoundError, StorageError

ANSWER_S = 20.0  # connecting, and the first byte of an answer
SLOWEST_BYTES_S = 1_000_000  # a transfer below this rate counts as hung
REQUESTS_AT_ONCE = 32  # of one process; a loopback server gains nothing beyond 16, a distant one waits for each


class Kind(enum.Enum):
    """What went wrong with a request: its errno, and the way out."""

    MISSING = (errno.ENOENT, "no such object")
    NO_UPLOAD = (errno.EIO, "the upload was aborted by someone else")
    CHANGED = (errno.ESTALE, "the object was replaced after it was listed")
    SHORT = (errno.EIO, "the object ends before the bytes that were asked for")
    CONFLICT = (errno.EAGAIN, "another request for the same name was under way")
    NO_BUCKET = (
        errno.ENXIO,
        "there is no such bucket: make it with `aws s3 mb s3://{bucket}`, or check its name and AWS_ENDPOINT_URL",
    )
    WRONG_REGION = (
        errno.ENXIO,
        "the bucket lies in another region: set AWS_DEFAULT_REGION, or region in storage_options",
    )
    DENIED = (
        errno.EACCES,
        "the key may not do this: it needs s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket",
    )
    WRONG_KEY = (errno.EACCES, "the store does not know the access key: check AWS_ACCESS_KEY_ID, AWS_PROFILE, key")
    WRONG_SECRET = (errno.EACCES, "the secret does not fit the access key: check AWS_SECRET_ACCESS_KEY, secret")
    EXPIRED = (errno.EACCES, "the credentials have expired: renew AWS_SESSION_TOKEN, or the login of the profile")
    NO_CREDENTIALS = (
        errno.EACCES,
        "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, key and secret, or anon",
    )
    SKEWED = (errno.EACCES, "the clock of this host and that of the store are too far apart: set this host's clock")
    UNREACHABLE = (errno.ECONNREFUSED, "the endpoint cannot be reached: check AWS_ENDPOINT_URL, and the network")
    TIMEOUT = (errno.ETIMEDOUT, "the store did not answer in time")
    SLOW_DOWN = (errno.EAGAIN, "the store asks for fewer requests a second")
    SERVER = (errno.EIO, "the store failed")
    REFUSED = (errno.EIO, "the store refused the request")
    NO_LISTING = (
        errno.EIO,
        "what answers does not list: check AWS_ENDPOINT_URL, and what is between here and the store",
    )
    ENDS = (errno.ECANCELED, "the interpreter ends")

    @property
    def code(self) -> int:
        """Of the operating system, the nearest there is."""
        return self.value[0]

    @property
    def text(self) -> str:
        """What it is, and what to do."""
        return self.value[1]


PASSING = frozenset(
    (Kind.CONFLICT, Kind.NO_UPLOAD, Kind.UNREACHABLE, Kind.TIMEOUT, Kind.SLOW_DOWN, Kind.SERVER, Kind.NO_LISTING)
)  # may go by itself
AMBIGUOUS = frozenset((Kind.NO_UPLOAD, Kind.UNREACHABLE, Kind.TIMEOUT, Kind.SERVER))  # a create may have happened
# Codes of S3, and what other stores answer for the same.
_CODES = {
    "NoSuchKey": Kind.MISSING,
    "NoSuchUpload": Kind.NO_UPLOAD,
    "PreconditionFailed": Kind.CHANGED,
    "InvalidRange": Kind.SHORT,
    "ConditionalRequestConflict": Kind.CONFLICT,
    "OperationAborted": Kind.CONFLICT,
    "NoSuchBucket": Kind.NO_BUCKET,
    "PermanentRedirect": Kind.WRONG_REGION,
    "AuthorizationHeaderMalformed": Kind.WRONG_REGION,
    "IllegalLocationConstraintException": Kind.WRONG_REGION,
    "AccessDenied": Kind.DENIED,
    "AllAccessDisabled": Kind.DENIED,
    "InvalidAccessKeyId": Kind.WRONG_KEY,
    "SignatureDoesNotMatch": Kind.WRONG_SECRET,
    "ExpiredToken": Kind.EXPIRED,
    "ExpiredTokenException": Kind.EXPIRED,
    "InvalidToken": Kind.EXPIRED,
    "RequestTimeTooSkewed": Kind.SKEWED,
    "RequestTimeout": Kind.TIMEOUT,
    "SlowDown": Kind.SLOW_DOWN,
    "Throttling": Kind.SLOW_DOWN,
    "ThrottlingException": Kind.SLOW_DOWN,
    "TooManyRequests": Kind.SLOW_DOWN,
}
_STATUSES = {
    301: Kind.WRONG_REGION,
    307: Kind.WRONG_REGION,
    401: Kind.DENIED,
    403: Kind.DENIED,
    404: Kind.MISSING,
    409: Kind.CONFLICT,
    412: Kind.CHANGED,
    416: Kind.SHORT,
    429: Kind.SLOW_DOWN,
}


class RequestFailed(Exception):  # noqa: N818 - the error that callers see is made of it
    """One request did not do what it should. The text holds no secret: no headers, nor bodies."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of_answer(cls, status: int, code: str) -> RequestFailed:
        """By the status of the answer and the code in its body, if there is one."""
        kind = _CODES.get(code) or _STATUSES.get(status) or (Kind.SERVER if status >= 500 else Kind.REFUSED)
        return cls(kind, f"{status} {code}".strip())


def storage_error(failed: RequestFailed, address: str, endpoint: str = "") -> StorageError:
    """What a caller sees of it, and of what it was made of nothing: that may tell addresses with passwords, and headers."""
    failed.__context__ = None
    bucket = urlsplit(address).netloc
    text = f"{failed.kind.text.format(bucket=bucket)} ({failed.text}{endpoint and f'; {endpoint}'})"
    gone = failed.kind in (Kind.MISSING, Kind.CHANGED)
    return (ObjectNotFoundError if gone else StorageError)(failed.kind.code, text, address)


class Found(NamedTuple):
    """An object by its key."""

    key: str
    size: int
    mtime_s: float
    etag: str


class Upload(NamedTuple):
    """An unfinished multipart upload."""

    key: str
    id: str
    begun_s: float


class Part(NamedTuple):
    """Bytes of an object from an offset on, and what the object is."""

    data: bytes | memoryview
    offset: int
    size: int  # of the object
    etag: str


Listing = tuple[Sequence[Found], Sequence[str]]


class Client(Protocol):
    """Single requests, none of them repeated; a multipart upload and the pages of a listing are several.

    Every method raises RequestFailed. Keys are those of the store, within one bucket.
    """

    endpoint: str  # for messages: where requests go, if somebody has said so

    async def put_new(self, key: str, data: Sequence[memoryview], size: int) -> bool:
        """Create the object, whole, unless it is there; False if it is."""

    async def get(self, key: str, start: int | None, stop: int | None, etag: str) -> Part:
        """The bytes [start, stop), or all; with start None the last `stop`. etag: fail unless the object has it."""

    async def head(self, key: str) -> Found:
        """What the object is."""

    async def list(self, prefix: str) -> Listing:
        """Objects directly under the prefix ("" or ending with a slash), and the prefixes below it without their slash."""

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """Delete at most DELETE_KEYS objects; the keys of which it is not sure. Those that are missing are no error."""

    async def uploads(self, prefix: str) -> Sequence[Upload]:
        """Multipart uploads to keys with the prefix that are neither completed nor aborted."""

    async def abort(self, upload: Upload) -> None:
        """Drop what was uploaded; no error if that is done already."""


DELETE_KEYS = 1000  # S3's limit for one request
