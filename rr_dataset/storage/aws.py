"""Credentials, region and endpoint, from where AWS's own tools take them, and botocore's errors by kind."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
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

    def frozen(self) -> dict[str, Any]:
        """For obstore: credentials as they are now."""
        now = self.credentials.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(timezone.utc) + timedelta(seconds=REFRESH_S),
        }


def account(options: S3Options) -> Account:
    """Raises RequestFailed where no credentials are found, InvalidInputError for an endpoint that is no address."""
    with BotoErrors():
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
    if not sound or "?" in endpoint or "#" in endpoint:
        raise InvalidInputError(
            f"endpoint {shown.partition('?')[0]!r}: expected http://host:port or https://host; it comes from endpoint_url, "
            "AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or the profile"
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
