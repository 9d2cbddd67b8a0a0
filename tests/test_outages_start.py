"""What is wrong from the start is said at the start: where, why, the way out, and no secret."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from counting_proxy import CountingProxy, Fault
from s3_medium import S3Medium
from weed import ADMIN, READER, Place, S3Server

import rr_dataset as rr
from tests.engines import SPEC, experts, options, spools

CLIENTS = ("obstore", pytest.param("s3fs", marks=pytest.mark.nightly))
NOBODY = "http://127.0.0.1:1"
WRONG = "a-secret-that-is-wrong"
# (changes of storage_options, bucket, error, what it says); the dataset is there.
WRONGS: dict[str, tuple[dict[str, Any], str | None, type[Exception], str]] = {
    "bucket": ({}, "rr-nobody-made-this", rr.StorageError, "no such bucket.*{endpoint}.*s3://rr-nobody-made-this"),
    "secret": ({"secret": WRONG}, None, rr.StorageError, "AWS_SECRET_ACCESS_KEY.*{endpoint}.*{uri}"),
    "key": ({"key": "rr-nobody"}, None, rr.StorageError, "AWS_ACCESS_KEY_ID.*{endpoint}.*{uri}"),
    "endpoint": ({"endpoint_url": NOBODY}, None, rr.StorageError, "AWS_ENDPOINT_URL.*127.0.0.1:1.*{uri}"),
    "options": ({"access_key": "x"}, None, rr.InvalidInputError, "'access_key'.*s3:// knows key, secret"),
    "half": ({"secret": None}, None, rr.InvalidInputError, "give key and secret, or neither"),
    "address": ({}, "me:my-own-secret@bucket", rr.InvalidInputError, "credentials do not belong into it"),
}


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CountingProxy]:
    with CountingProxy.before(s3_server.port) as proxy:
        yield proxy


@contextmanager
def refused(error: type[Exception], says: str, spool_dir: Path) -> Iterator[None]:
    """It fails so, without a secret in what it says, and leaves no spool."""
    with pytest.raises(error, match=f"(?s){says}") as caught:
        yield
    told = repr(caught.value) + str(caught.value) + str(caught.value.__cause__)
    for secret in (ADMIN[1], READER[1], WRONG, "my-own-secret"):
        assert secret not in told
    assert spools(spool_dir) == []


@pytest.mark.parametrize("what", WRONGS)
def test_what_is_wrong_is_said(s3: Place, tmp_path: Path, what: str) -> None:
    changes, bucket, error, says = WRONGS[what]
    rr.create_dataset(s3.uri, SPEC, storage_options=s3.options)
    uri = s3.uri if bucket is None else f"s3://{bucket}/x"
    given = {**s3.options, **changes}
    says = says.format(endpoint=s3.options["endpoint_url"], uri=s3.uri)
    with refused(error, says, tmp_path):
        rr.create_dataset(uri, SPEC, storage_options=given)
    with refused(error, says, tmp_path):
        rr.open_dataset(uri, storage_options=given)
    if what == "bucket":  # the worker does what create_dataset and open_dataset do
        with refused(error, says, tmp_path):
            rr.RoutingWriter(uri, options(tmp_path, storage_options=given), create=SPEC)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_key_that_may_only_read(s3_server: S3Server, tmp_path: Path, client: str, there: bool) -> None:
    place = s3_server.place()
    reader = {**s3_server.options(READER), "client": client}
    if there:
        rr.create_dataset(place.uri, SPEC, storage_options=place.options)
        assert list(rr.open_dataset(place.uri, storage_options=reader).ids()) == []
    says = f"the key may not do this: it needs .*s3:PutObject.*{place.uri}"
    with refused(rr.StorageError, says, tmp_path):
        rr.RoutingWriter(place.uri, options(tmp_path, storage_options=reader), create=SPEC)
    assert S3Medium(place, client).objects() == ({"_rr/format.json"} if there else set())
    if not there:
        with refused(rr.StorageError, says, tmp_path):
            rr.create_dataset(place.uri, SPEC, storage_options=reader)


def test_no_credentials(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    given = {"endpoint_url": s3.options["endpoint_url"]}
    with refused(rr.StorageError, f"no credentials were found: set AWS_ACCESS_KEY_ID.*{s3.uri}", tmp_path):
        rr.RoutingWriter(s3.uri, options(tmp_path, storage_options=given), create=SPEC)


def test_a_store_that_takes_the_call_and_says_nothing(s3: Place, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        given = {**s3.options, "endpoint_url": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        says = f"The store did not answer within start_timeout_s=8.0: check the address, the endpoint.*{s3.uri}"
        with refused(rr.StorageError, says, tmp_path):
            rr.RoutingWriter(s3.uri, options(tmp_path, start_timeout_s=8.0, storage_options=given), create=SPEC)


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_start_asks_of_the_store(s3_server: S3Server, proxy: CountingProxy, tmp_path: Path, client: str) -> None:
    medium = S3Medium(s3_server.place(), client)
    rr.create_dataset(medium.uri, SPEC, storage_options=medium.options)
    behind = {**medium.options, "endpoint_url": proxy.endpoint}
    with rr.RoutingWriter(medium.uri, options(tmp_path, storage_options=behind)) as writer:
        assert proxy.counts() == {"GET": 1, "PUT": 1, "POST": 1}
        assert medium.objects() == {"_rr/format.json"}
        proxy.add(Fault("status", method="PUT", target="may-write", times=10**6))
        os.kill(writer.stats().worker_pid, 9)  # the next one asks nothing, so that no outage keeps it from starting
        writer.put("p:1", experts(1), "LTK")
        assert writer.flush(60).records == 1
        assert writer.stats().worker_restarts == 1


def test_a_passing_fault_at_the_start_is_not_seen(s3: Place, proxy: CountingProxy, tmp_path: Path) -> None:
    storage = {**s3.options, "endpoint_url": proxy.endpoint}
    faults = [
        proxy.add(Fault("reset_after", method="PUT", target="format")),
        proxy.add(Fault("half", method="GET", target="format", after=1)),
        proxy.add(Fault("status", method="PUT", target="may-write", status=503, code="SlowDown")),
        proxy.add(Fault("reset_after", method="POST")),
    ]
    with rr.RoutingWriter(s3.uri, options(tmp_path, storage_options=storage), create=SPEC):
        assert [fault.hits for fault in faults] == [1, 1, 1, 1]
    assert S3Medium(s3, "obstore").objects() == {"_rr/format.json"}
