"""Where a remote store's clients come from: addresses, options, credentials, and processes that fork, spawn and end."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import get_loop
from s3_medium import S3Medium
from weed import READER, REGION, Place, S3Server

from rr_dataset.errors import InvalidInputError, StorageError
from rr_dataset.storage import Storage, open_storage, remote
from rr_dataset.storage.aws import account
from rr_dataset.storage.connect import S3Options

ROOT = Path(__file__).parents[1]
WRITER = "00112233aabbccdd"
CLIENTS = ("obstore", "s3fs")


@pytest.fixture(params=CLIENTS)
def medium(s3: Place, request: pytest.FixtureRequest) -> S3Medium:
    return S3Medium(s3, request.param)


# Addresses, options, credentials


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keys": "x"}, "keys.*knows key, secret"),
        ({"key": "x"}, "key and secret"),
        ({"key": "x", "secret": 5}, "secret.*int"),
        ({"client": "boto3"}, "boto3"),
        ({"addressing_style": "auto"}, "addressing_style"),
    ],
)
def test_options_that_s3_does_not_know(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        open_storage("s3://bucket/x", options)


def test_addresses_of_buckets() -> None:
    for uri in ("s3://bucket/a b/ü", "s3://bucket/a b/ü/", "S3://bucket/a b/ü"):
        assert open_storage(uri).uri == "s3://bucket/a b/ü"
    assert open_storage("s3://bucket").uri == open_storage("s3://bucket/").uri == "s3://bucket"


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:9000", "localhost", "http://", "http:/host", "ftp://h", "http://h:x", "http://h?k=S3CRET"]
)
def test_an_endpoint_that_is_no_address(endpoint: str, client: str) -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": endpoint, "client": client}
    with pytest.raises(InvalidInputError, match="AWS_ENDPOINT_URL") as raised:
        open_storage("s3://bucket/x", options).list("")
    assert "S3CRET" not in str(raised.value)


@pytest.mark.parametrize("client", CLIENTS)
def test_keys_that_are_no_paths_are_stepped_over(s3_server: S3Server, client: str) -> None:
    place = s3_server.place()
    for name in ("1.arrow", "a\nb"):
        place.client.put_object(Bucket=place.bucket, Key=f"{place.prefix}/data_id=p/{name}", Body=b"x")
    storage = open_storage(place.uri, {**place.options, "client": client})
    assert "1.arrow" in {entry.name for entry in storage.list("data_id=p")}


def test_a_call_from_within_the_event_loop_is_refused(medium: S3Medium) -> None:
    storage = open_storage(medium.uri, medium.options)

    async def call() -> None:
        storage.list("")

    with pytest.raises(InvalidInputError, match="use a thread"):
        asyncio.run_coroutine_threadsafe(call(), get_loop()).result(30)


def test_the_whole_bucket_is_a_place_too(s3_server: S3Server) -> None:
    place = s3_server.bucket()
    storage = open_storage(place.uri, place.options)
    storage.create("data_id=a/1.arrow", b"x", staging=WRITER)
    assert storage.list_dirs("") == ["data_id=a"]
    assert storage.list("") == []
    assert [entry.name for entry in storage.list("data_id=a")] == ["1.arrow"]


def test_errors_say_what_to_do_and_no_secret(medium: S3Medium, s3_server: S3Server) -> None:
    own = medium.options
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("s3://rr-nobody-made-this/x", {}, "no such bucket: make it with `aws s3 mb s3://rr-nobody-made-this`"),
        (medium.uri, {"key": "rr-nobody", "secret": own["secret"]}, "AWS_ACCESS_KEY_ID"),
        (medium.uri, {"secret": "SECRET-wrong"}, "AWS_SECRET_ACCESS_KEY"),
        (medium.uri, {"key": READER[0], "secret": READER[1]}, "s3:PutObject"),
        (medium.uri, {"endpoint_url": "http://127.0.0.1:1"}, "AWS_ENDPOINT_URL"),
    ]
    for uri, options, says in cases:
        storage = open_storage(uri, {**own, **options})
        with pytest.raises(StorageError, match=says) as caught:
            storage.create("o", b"x", staging=WRITER)
        said = "".join(traceback.format_exception(caught.value)) + repr(storage) + storage.uri
        for secret in (own["secret"], READER[1], "SECRET-wrong"):
            assert secret not in said


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and all that Python keeps with it, shown or not."""
    if error is not None:
        yield error
        yield from _chain(error.__cause__)
        yield from _chain(error.__context__)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("anon", [True, False])
@pytest.mark.parametrize("is_up", [True, False])
def test_what_an_error_came_of_tells_no_secret(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, client: str, anon: bool, is_up: bool
) -> None:
    """As a reporter of crashes would walk it."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    place = s3_server.place()
    signed = {"anon": True} if anon else {"key": place.options["key"], "secret": "SECRET-wrong"}
    endpoint = f"http://me:PASSWORD@127.0.0.1:{s3_server.port if is_up else 1}"
    storage = open_storage(place.uri, {**signed, "client": client, "endpoint_url": endpoint})
    for call in (
        lambda: storage.create("o", b"x", staging=WRITER),
        lambda: storage.list("d"),
        lambda: storage.read_bytes("o"),
        lambda: storage.delete(["o"]),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        chain = list(_chain(caught.value))
        assert len(chain) > 1
        said = "".join(traceback.format_exception(caught.value)) + "".join(f"{each!r}{each}" for each in chain)
        for secret in ("PASSWORD", "SECRET-wrong", place.options["secret"]):
            assert secret not in said


@pytest.mark.parametrize("client", CLIENTS)
def test_a_proxy_that_is_down_is_in_the_way(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    options = {"key": "k", "secret": "s", "client": client, "endpoint_url": "http://store.invalid"}
    storage = open_storage("s3://bucket/a", options)
    for call in (lambda: storage.list(""), lambda: storage.read_bytes("o")):
        with pytest.raises(StorageError, match="the endpoint cannot be reached"):
            call()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("style", ["path", "virtual"])
def test_a_password_in_the_endpoint_hinders_nobody(s3: Place, client: str, style: str) -> None:
    """Nor does an address before which no bucket can stand."""
    address = s3.options["endpoint_url"].replace("http://", "http://me:PASSWORD@")
    storage = open_storage(s3.uri, {**s3.options, "client": client, "endpoint_url": address, "addressing_style": style})
    assert storage.create("o", b"abc", staging=WRITER)
    assert [entry.name for entry in storage.list("")] == ["o"]
    assert storage.read_bytes("o") == b"abc"


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "https://b.s3.eu-west-3.amazonaws.com"),
        ({"addressing_style": "path"}, "https://s3.eu-west-3.amazonaws.com/b"),
        ({"endpoint_url": "http://store:9000/"}, "http://store:9000/b"),
        ({"endpoint_url": "https://store/at", "addressing_style": "virtual"}, "https://b.store/at"),
        ({"endpoint_url": "http://[::1]:9000", "addressing_style": "virtual"}, "http://[::1]:9000/b"),
        ({"endpoint_url": "https://me:x@store"}, "https://store/b"),
        (
            {
                "endpoint_url": "https://me:x@store",
                "addressing_style": "virtual",
                "anon": True,
                "key": None,
                "secret": None,
            },
            "https://me:x@b.store",
        ),
    ],
)
def test_where_the_requests_of_a_bucket_go(options: dict[str, Any], url: str) -> None:
    at = account(S3Options(**{"key": "k", "secret": "s", "region": "eu-west-3", **options}))
    assert at.bucket_url("b") == url


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("way", ["environment", "service", "profile", "process"])
def test_credentials_from_where_others_look(
    s3: Place, client: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    key, secret, endpoint = s3.options["key"], s3.options["secret"], s3.options["endpoint_url"]
    options: dict[str, Any] = {"client": client}
    if way in ("environment", "service"):
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
    if way == "service":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    if way == "profile":
        text = f"[profile rr]\naws_access_key_id={key}\naws_secret_access_key={secret}\nendpoint_url={endpoint}\nregion={REGION}\n"
        (tmp_path / "config").write_text(text)
        monkeypatch.setenv("AWS_PROFILE", "rr")
    if way == "process":
        answer = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "Expiration": "2099-01-01T00:00:00Z"}
        (tmp_path / "answer").write_text(json.dumps(answer))
        (tmp_path / "config").write_text(
            f"[profile other]\ncredential_process=cat {tmp_path}/answer\nregion={REGION}\n"
        )
        options |= {"profile": "other", "endpoint_url": endpoint}
    storage = open_storage(s3.uri, options)
    assert storage.create("o", b"abc", staging=WRITER)
    assert storage.read_bytes("o") == b"abc"


@pytest.mark.parametrize("client", CLIENTS)
def test_no_credentials_at_all(client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StorageError, match="no credentials were found"):
        open_storage("s3://bucket/x", {"client": client}).list("")


# Processes


def _reads(storage: Storage) -> None:
    assert storage.read_bytes("o") == b"abc"


def test_a_spawned_process_has_clients_of_its_own(medium: S3Medium) -> None:
    storage = open_storage(medium.uri, medium.options)
    storage.create("o", b"abc", staging=WRITER)
    process = multiprocessing.get_context("spawn").Process(target=_reads, args=(pickle.loads(pickle.dumps(storage)),))
    process.start()
    process.join(60)
    assert process.exitcode == 0


FORKS = """
import os, sys, json
from rr_dataset.storage import open_storage
uri, options = json.loads(sys.argv[1])
storage = open_storage(uri, options)
storage.create("o", b"abc", staging="w")
source = storage.open("o")
child = os.fork()
assert source.tail(2) == b"bc" and storage.read_bytes("o") == b"abc"
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    assert storage.list("")[0].size == 3
    os._exit(0)
print("done")
"""
ENDS = """
import sys, json, threading
from rr_dataset.storage import open_storage
uri, options = json.loads(sys.argv[1])
storage = open_storage(uri, options)
storage.create("o", b"abc", staging="w")
for _ in range(8):
    threading.Thread(target=lambda: [storage.read_bytes("o") for _ in range(1000)], daemon=True).start()
print(storage.read_bytes("o"))
"""


def _run(program: str, medium: S3Medium) -> subprocess.Popen[str]:
    arguments = json.dumps([medium.uri, medium.options])
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_forked_child_reads(medium: S3Medium) -> None:
    with _run(FORKS, medium) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "done\n", "")


@pytest.mark.parametrize("starts", [3, pytest.param(50, marks=pytest.mark.nightly)])
def test_processes_end(medium: S3Medium, starts: int) -> None:
    for _ in range(starts):
        with _run(ENDS, medium) as process:
            out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "b'abc'\n", "")
