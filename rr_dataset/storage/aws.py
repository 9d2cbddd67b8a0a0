"""Credentials, region and endpoint, from where AWS's own tools take them, and botocore's errors by kind."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.configprovider
import botocore.credentials
import botocore.exceptions
import botocore.session

from rr_dataset.errors import InvalidInputError
from rr_dataset.storage.client import Kind, RequestFailed
from rr_dataset.storage.connect import S3Options

DEFAULT_REGION = "us-east-1"
REFRESH_S = 60.0  # how long credentials that expire are used before botocore is asked again
SHORT_S = 5.0  # the same for those that expire sooner than that
ASK_S = 60.0  # the longest wait for botocore, which may ask another host or start a program
_KINDS: tuple[tuple[type[BaseException], Kind], ...] = (
    (botocore.exceptions.NoCredentialsError, Kind.NO_CREDENTIALS),
    (botocore.exceptions.PartialCredentialsError, Kind.NO_CREDENTIALS),
    (botocore.exceptions.CredentialRetrievalError, Kind.NO_CREDENTIALS),
    (botocore.exceptions.SSOError, Kind.EXPIRED),
    (botocore.exceptions.ConnectionError, Kind.UNREACHABLE),
    (botocore.exceptions.ReadTimeoutError, Kind.TIMEOUT),
    (botocore.exceptions.HTTPClientError, Kind.SERVER),
    (botocore.exceptions.IncompleteReadError, Kind.SERVER),
)


@dataclass(frozen=True, repr=False)
class Account:
    """What signs requests, and where they go."""

    region: str
    endpoint_url: str | None  # None: AWS
    path_style: bool
    credentials: Any  # botocore's, None for anonymous requests
    verify: str | bool  # certificates, if need be by those in this file

    @property
    def shown_endpoint(self) -> str:
        """Without the password that a URL may have."""
        return (self.endpoint_url or "").rpartition("@")[2]

    def bucket_url(self, bucket: str) -> str:
        """Where its requests go."""
        url = (self.endpoint_url or f"https://s3.{self.region}.amazonaws.com").rstrip("/")
        if self.path_style:
            return f"{url}/{bucket}"
        parts = urlsplit(url)
        login, at, host = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{login}{at}{bucket}.{host}").geturl()

    @cached_property
    def keys(self) -> Keys | None:
        """For all that sign with them; None for anonymous requests."""
        return None if self.credentials is None else Keys(self.credentials)


class Keys:
    """The credentials as they are now, in fsspec's event loop.

    botocore is asked in a daemon thread: at the end of the interpreter nobody waits for it, and no thread of obstore is
    inside Python for it.
    """

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials
        self._now: Any = None
        self._until_s = 0.0  # of the monotonic clock
        self._asked: asyncio.Future[Any] | None = None  # by all that wait, one thread
        if type(credentials) is botocore.credentials.Credentials:
            self._now, self._until_s = credentials.get_frozen_credentials(), math.inf

    async def now(self) -> Any:
        """botocore's tuple of them. Raises RequestFailed."""
        if time.monotonic() < self._until_s:
            return self._now
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
            threading.Thread(target=self._ask, args=(self._asked,), name="rr-credentials", daemon=True).start()
        asked = self._asked
        if not (await asyncio.wait([asked], timeout=ASK_S))[0]:
            raise RequestFailed(Kind.TIMEOUT, f"no credentials within {ASK_S:.0f} s")
        if isinstance(asked.result(), RequestFailed):
            raise RequestFailed(*asked.result().args)  # one for each who waits
        return asked.result()

    def _ask(self, asked: asyncio.Future[Any]) -> None:
        found: Any
        kept_s = 0.0
        try:
            with _AskingErrors():
                found = self._credentials.get_frozen_credentials()
                is_short = isinstance(
                    self._credentials, botocore.credentials.RefreshableCredentials
                ) and self._credentials.refresh_needed(REFRESH_S)
            kept_s = SHORT_S if is_short else REFRESH_S
            if name := _broken(found):
                found = RequestFailed(Kind.NO_CREDENTIALS, f"there is a control character in the {name}")
        except RequestFailed as failed:
            found = failed
        with suppress(RuntimeError):  # the loop is closed
            asked.get_loop().call_soon_threadsafe(self._take, asked, found, kept_s)

    def _take(self, asked: asyncio.Future[Any], found: Any, kept_s: float) -> None:
        if not isinstance(found, RequestFailed):
            self._now, self._until_s = found, time.monotonic() + kept_s
        self._asked = None
        asked.set_result(found)


def account(options: S3Options) -> Account:
    """Raises RequestFailed where no credentials are found, InvalidInputError for what no request can be made of."""
    with _AskingErrors():
        session = botocore.session.Session(profile=options.profile)
        verify = session.get_config_variable("ca_bundle") or True
        region = options.region or os.environ.get("AWS_REGION") or session.get_config_variable("region")
        endpoint = (
            options.endpoint_url
            or botocore.configprovider.ConfiguredEndpointProvider(
                full_config=session.full_config, scoped_config=session.get_scoped_config(), client_name="s3"
            ).provide()
        )
        if options.anon:
            credentials = None
        elif options.key is not None:
            credentials = botocore.credentials.Credentials(options.key, options.secret, options.token)
        else:
            credentials = session.get_credentials()
            if credentials is None:
                raise botocore.exceptions.NoCredentialsError
    _check_endpoint(endpoint)
    _check_signing(region, credentials)
    _check_certificates(verify)
    if endpoint and credentials is not None:  # a signature stands where its password would
        parts = urlsplit(endpoint)
        endpoint = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    style = options.addressing_style or ("path" if endpoint else "virtual")
    by_path = style == "path" or _is_number(urlsplit(endpoint or "").hostname)
    return Account(region or DEFAULT_REGION, endpoint, by_path, credentials, verify)


def _is_number(host: str | None) -> bool:
    """Whether nothing can stand before the host."""
    try:
        return bool(ipaddress.ip_address(host or ""))
    except ValueError:
        return False


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    shown = endpoint.rpartition("@")[2]
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        sound = False
    if not sound or "?" in endpoint or "#" in endpoint or _has_control(endpoint):
        raise InvalidInputError(
            f"endpoint {shown.partition('?')[0]!r}: expected http://host:port or https://host; it comes from endpoint_url, "
            "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the profile"
        )


def _check_signing(region: str | None, credentials: Any) -> None:
    if _has_control(region):
        raise InvalidInputError(
            "there is a control character, as a line break is one, in the region; it comes from region, AWS_REGION, "
            "AWS_DEFAULT_REGION or the profile"
        )
    if type(credentials) is not botocore.credentials.Credentials:  # those that change are asked for when they are used
        return
    if name := _broken(credentials):
        raise InvalidInputError(
            f"there is a control character, as a line break is one, in the {name}; it comes from storage_options "
            "(key, secret, token), AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or the profile"
        )


def _broken(credentials: Any) -> str:
    """The name of what cannot stand in a header, or nothing."""
    parts = {"access key": "access_key", "secret": "secret_key", "session token": "token"}
    return next((name for name, part in parts.items() if _has_control(getattr(credentials, part))), "")


def _has_control(text: str | None) -> bool:
    return any(ord(each) < 32 or ord(each) == 127 for each in text or "")


def _check_certificates(verify: str | bool) -> None:
    if isinstance(verify, str) and not (Path(verify).is_file() and os.access(verify, os.R_OK)):
        raise InvalidInputError(
            f"certificates {verify!r}: there is no such file to read; it comes from AWS_CA_BUNDLE or ca_bundle of the profile"
        )


class BotoErrors:
    """Raises what botocore raises as RequestFailed, without the texts of requests and answers."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, botocore.exceptions.ClientError):
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            raise RequestFailed.of_answer(status, str(error.response.get("Error", {}).get("Code", ""))) from None
        if isinstance(error, botocore.exceptions.ProfileNotFound):
            raise RequestFailed(Kind.NO_CREDENTIALS, str(error)) from None
        if isinstance(error, botocore.exceptions.BotoCoreError):
            found = next((each for base, each in _KINDS if isinstance(error, base)), Kind.REFUSED)
            raise RequestFailed(found, type(error).__name__) from None


class _AskingErrors(BotoErrors):
    """Of where credentials come from too: a program that is not there or writes no JSON, keys that have expired."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, RuntimeError):
            raise RequestFailed(Kind.EXPIRED, "they were renewed, and have expired all the same") from None
        if isinstance(error, Exception):
            raise RequestFailed(Kind.NO_CREDENTIALS, type(error).__name__) from None
