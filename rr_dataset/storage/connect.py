"""From an address and `storage_options` to the client that its process makes when it first needs one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from fsspec.registry import known_implementations

from rr_dataset.errors import InvalidInputError
from rr_dataset.storage.client import Client

S3_SCHEMES = ("s3", "s3a")
OBSTORE, S3FS = "obstore", "s3fs"
_STYLES = ("path", "virtual")
_obstore_pid: list[int] = []  # of the process that first used obstore here


@dataclass(frozen=True)
class S3Options:
    """`storage_options` of s3://, named as s3fs names them. What is None comes from where AWS's tools look for it.

    key, secret, token: credentials; else AWS_ACCESS_KEY_ID ..., then the profile, then those of the host.
    profile: of ~/.aws, instead of AWS_PROFILE.
    anon: do not sign, for public buckets.
    region: instead of AWS_DEFAULT_REGION and the profile's.
    endpoint_url: instead of AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL and the profile's.
    addressing_style: "path" (endpoint/bucket; usual with an own endpoint) or "virtual" (bucket.endpoint).
    client: "obstore" or "s3fs"; None for obstore where it is installed.

    Certificates of AWS_CA_BUNDLE, or ca_bundle of the profile, are trusted by all; s3fs and listings trust no others then.
    """

    key: str | None = None
    secret: str | None = None
    token: str | None = None
    profile: str | None = None
    anon: bool = False
    region: str | None = None
    endpoint_url: str | None = None
    addressing_style: str | None = None
    client: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, bool if each.name == "anon" else str | None):
                raise InvalidInputError(f"storage_options {each.name!r}: expected a text, not a {type(value).__name__}")
        if (self.key is None) != (self.secret is None):
            raise InvalidInputError("storage_options: give key and secret, or neither")
        if self.client not in (None, OBSTORE, S3FS):
            raise InvalidInputError(f"storage_options client={self.client!r}: expected {OBSTORE!r} or {S3FS!r}")
        if self.addressing_style not in (None, *_STYLES):
            raise InvalidInputError(
                f"storage_options addressing_style={self.addressing_style!r}: expected one of {_STYLES}"
            )

    def __repr__(self) -> str:
        return "S3Options(...)"


def connect(scheme: str, bucket: str, options: Mapping[str, Any]) -> Callable[[], Client]:
    """What makes the client, or finds the one that this process has already; raises RequestFailed.

    Raises InvalidInputError at once for a scheme without a client here, and for options that it does not know.
    """
    if scheme in S3_SCHEMES:
        known = [each.name for each in fields(S3Options)]
        if unknown := sorted(set(options) - set(known)):
            raise InvalidInputError(f"storage_options {unknown}: s3:// knows {', '.join(known)}")
        _require(S3FS, "s3")
        s3 = S3Options(**options)
        return lambda: _s3_client(os.getpid(), bucket, s3, _aws_environment())
    if scheme not in known_implementations:
        raise InvalidInputError(f"no storage for {scheme}://; give a path, a file:// URI or s3://bucket/path")
    return lambda: _made("fsspec_client", "FsspecClient", scheme, bucket, options)


def _aws_environment() -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))


@lru_cache(maxsize=16)
def _s3_client(pid: int, bucket: str, options: S3Options, environment: tuple[tuple[str, str], ...]) -> Client:  # noqa: ARG001 -- what the client depends on
    forked = (
        bool(_obstore_pid) and pid not in _obstore_pid
    )  # its threads are not in this process, and it would wait for them
    if options.client != S3FS and not forked and find_spec(OBSTORE):
        _obstore_pid[:] = [pid]
        return _made("obstore_client", "ObstoreClient", bucket, options)
    return _made("s3fs_client", "S3fsClient", bucket, options)


def _made(module: str, name: str, *arguments: object) -> Client:
    """Clients are imported when one is needed: they take half a second, and are extras."""
    client: Client = getattr(importlib.import_module(f"rr_dataset.storage.{module}"), name)(*arguments)
    return client


def _require(package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise InvalidInputError(f"{package} is not installed: pip install 'rr-dataset[{extra}]'")
