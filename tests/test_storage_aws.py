"""Credentials that change, that come late and that cannot be used; certificates of a file; processes that end meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import botocore.credentials
import botocore.exceptions
import pytest
from counting_proxy import CountingProxy
from fsspec.asyn import get_loop
from weed import REGION, Place, S3Server

from rr_dataset.errors import InvalidInputError, StorageError
from rr_dataset.storage import aws, open_storage, remote
from rr_dataset.storage.aws import Account, Keys
from rr_dataset.storage.client import Kind, RequestFailed
from tests.engines import DEADLINE_S

ROOT = Path(__file__).parents[1]
WRITER = "00112233aabbccdd"
CLIENTS = ("obstore", "s3fs")
FROZEN = botocore.credentials.ReadOnlyCredentials("k", "s", None)


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


class Asked:
    """Credentials as botocore has them, that change."""

    def __init__(self, answer: Callable[[], Any] = lambda: FROZEN) -> None:
        self._answer = answer
        self.threads: list[threading.Thread] = []

    def get_frozen_credentials(self) -> Any:
        self.threads.append(threading.current_thread())
        return self._answer()


def in_loop(call: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(call, get_loop()).result(DEADLINE_S)


def test_all_who_wait_share_one_request_in_a_daemon_thread() -> None:
    asked = Asked()
    keys = Keys(asked)

    async def many() -> list[Any]:
        return await asyncio.gather(*(keys.now() for _ in range(8)))

    assert in_loop(many()) == [FROZEN] * 8
    assert in_loop(keys.now()) is FROZEN
    (thread,) = asked.threads
    assert thread.daemon
    assert thread is not in_loop(_this_thread())


async def _this_thread() -> threading.Thread:
    return threading.current_thread()


def test_credentials_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "REFRESH_S", 0)
    asked = Asked()
    keys = Keys(asked)
    for _ in range(3):
        in_loop(keys.now())
    assert len(asked.threads) == 3


@pytest.mark.parametrize(("seconds", "times"), [(3600, 1), (30, 3)])
def test_those_that_soon_expire_are_kept_for_less(monkeypatch: pytest.MonkeyPatch, seconds: int, times: int) -> None:
    monkeypatch.setattr(aws, "SHORT_S", 0)
    asked: list[int] = []

    def metadata() -> dict[str, str]:
        asked.append(1)
        expires = datetime.now(timezone.utc) + timedelta(seconds=seconds)
        return {"access_key": "k", "secret_key": "s", "token": "t", "expiry_time": expires.isoformat()}

    keys = Keys(botocore.credentials.DeferredRefreshableCredentials(metadata, "test"))
    for _ in range(3):
        assert in_loop(keys.now()).token == "t"
    assert len(asked) == times


def test_those_that_never_change_are_not_asked_for() -> None:
    keys = Keys(botocore.credentials.Credentials("k", "s"))
    before = threading.active_count()
    assert in_loop(keys.now())[:3] == ("k", "s", None)
    assert threading.active_count() <= before


def _raises(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (_raises(botocore.exceptions.CredentialRetrievalError(provider="p", error_msg="SECRET")), Kind.NO_CREDENTIALS),
        (_raises(FileNotFoundError("SECRET")), Kind.NO_CREDENTIALS),
        (_raises(json.JSONDecodeError("SECRET", "SECRET", 0)), Kind.NO_CREDENTIALS),
        (_raises(RuntimeError("refreshed credentials are still expired")), Kind.EXPIRED),
        (_raises(botocore.exceptions.ConnectTimeoutError(endpoint_url="SECRET")), Kind.UNREACHABLE),
        (lambda: botocore.credentials.ReadOnlyCredentials("k", "SECRET\n", None), Kind.NO_CREDENTIALS),
    ],
)
def test_what_goes_wrong_is_told_by_kind(answer: Callable[[], Any], kind: Kind) -> None:
    asked = Asked(answer)
    keys = Keys(asked)

    async def two() -> list[Any]:
        return await asyncio.gather(keys.now(), keys.now(), return_exceptions=True)

    one, other = in_loop(two())
    for each in (one, other):
        assert isinstance(each, RequestFailed)
        assert each.kind is kind
        assert "SECRET" not in str(each)
    assert one is not other
    assert len(asked.threads) == 1
    with pytest.raises(RequestFailed):
        in_loop(keys.now())  # it was not kept
    assert len(asked.threads) == 2


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "ASK_S", 0.01)
    answered = threading.Event()

    def answer() -> Any:
        answered.wait(DEADLINE_S)
        return FROZEN

    asked = Asked(answer)
    keys = Keys(asked)
    try:
        for _ in range(2):
            with pytest.raises(RequestFailed) as caught:
                in_loop(keys.now())
            assert caught.value.kind is Kind.TIMEOUT
        assert len(asked.threads) == 1  # which may still be answered
    finally:
        answered.set()
    monkeypatch.setattr(aws, "ASK_S", DEADLINE_S)
    assert in_loop(keys.now()) == FROZEN
    assert len(asked.threads) == 1


def test_who_lists_and_who_reads_share_them() -> None:
    at = Account(REGION, None, path_style=True, credentials=Asked(), verify=True)
    assert at.keys is at.keys is not None
    assert Account(REGION, None, path_style=True, credentials=None, verify=True).keys is None


def _profile(place: Place, tmp_path: Path, program: str) -> dict[str, Any]:
    (tmp_path / "config").write_text(f"[profile rr]\ncredential_process={program}\nregion={REGION}\n")
    return {"profile": "rr", "endpoint_url": place.options["endpoint_url"]}


def _answer(place: Place, seconds: int = 30, **other: str) -> str:
    expires = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    told = {"Version": 1, "AccessKeyId": place.options["key"], "SecretAccessKey": place.options["secret"]}
    return json.dumps({**told, "Expiration": expires.isoformat(), **other})


@pytest.mark.parametrize("client", CLIENTS)
def test_keys_that_change_sign_the_next_request(
    s3: Place, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws, "SHORT_S", 0)
    (tmp_path / "answer").write_text(_answer(s3))
    storage = open_storage(s3.uri, {**_profile(s3, tmp_path, f"cat {tmp_path}/answer"), "client": client})
    assert storage.create("o", b"abc", staging=WRITER)
    for call in (lambda: storage.read_bytes("o"), lambda: storage.list("")):
        call()
        (tmp_path / "answer").write_text(_answer(s3, SecretAccessKey="another"))
        with pytest.raises(StorageError, match="the secret does not fit"):
            call()
        (tmp_path / "answer").write_text(_answer(s3))
        call()


@pytest.mark.parametrize("client", CLIENTS)
def test_no_thread_but_one_of_its_own_asks_for_them(
    s3: Place, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of obstore would end the process with an abort, and for one of a pool its end would wait."""
    monkeypatch.setattr(aws, "SHORT_S", 0)
    changing = botocore.credentials.RefreshableCredentials
    asked: list[threading.Thread] = []

    def frozen(self: Any, original: Callable[[Any], Any] = changing.get_frozen_credentials) -> Any:
        asked.append(threading.current_thread())
        return original(self)

    (tmp_path / "answer").write_text(_answer(s3))
    storage = open_storage(s3.uri, {**_profile(s3, tmp_path, f"cat {tmp_path}/answer"), "client": client})
    monkeypatch.setattr(changing, "get_frozen_credentials", frozen)
    assert storage.create("o", b"abc", staging=WRITER)
    assert storage.read_bytes("o") == b"abc"
    assert storage.list("")
    assert asked
    assert all(each.name == "rr-credentials" and each.daemon for each in asked)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("program", ["/no/such/program", "echo HIDDEN"])
def test_a_program_that_gives_no_credentials(s3: Place, client: str, program: str, tmp_path: Path) -> None:
    storage = open_storage(s3.uri, {**_profile(s3, tmp_path, program), "client": client})
    with pytest.raises(StorageError, match="no credentials were found") as caught:
        storage.list("")
    assert "HIDDEN" not in str(caught.value)


# What no request can be made of


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": "SECRET\n"}, "in the access key; it comes from .*AWS_ACCESS_KEY_ID"),
        ({"secret": "SECRET\r\n"}, "in the secret; it comes from .*AWS_SECRET_ACCESS_KEY"),
        ({"token": "SEC\x00RET"}, "in the session token; it comes from .*AWS_SESSION_TOKEN"),
        ({"region": "SECRET\x7f"}, "in the region; it comes from .*AWS_DEFAULT_REGION"),
        ({"endpoint_url": "http://127.0.0.1:1/\n"}, "AWS_ENDPOINT_URL"),
    ],
)
def test_a_line_break_is_told_by_where_it_stands(options: dict[str, str], says: str, client: str) -> None:
    sound = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1", "client": client}
    with pytest.raises(InvalidInputError, match=says) as caught:
        open_storage("s3://bucket/x", {**sound, **options}).read_bytes("o")
    assert "SEC" not in str(caught.value).replace("AWS_SECRET", "")


def test_it_is_told_of_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s\n", "AWS_DEFAULT_REGION": REGION}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match="in the secret"):
        open_storage("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:1"}).read_bytes("o")


# Certificates


@pytest.fixture
def tls(s3_server: S3Server, tmp_path: Path) -> Iterator[CountingProxy]:
    """The server behind a certificate that only `tmp_path/ca.pem` has signed."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for line in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        "req -newkey rsa:2048 -nodes -keyout own.key -out own.csr -subj /CN=own",
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out own.pem -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *line.split()], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "own.key")
    with CountingProxy.before(s3_server.port) as proxy:
        proxy.socket = context.wrap_socket(proxy.socket, server_side=True)
        yield proxy


@pytest.mark.parametrize("client", CLIENTS)
def test_certificates_of_a_file_are_trusted(
    s3: Place, tls: CountingProxy, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    endpoint = tls.endpoint.replace("http:", "https:")
    options = {**s3.options, "endpoint_url": endpoint, "client": client}
    with pytest.raises(StorageError, match="cannot be reached"):
        open_storage(s3.uri, options).list("")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    storage = open_storage(s3.uri, options)
    if client == "obstore":  # botocore sends in chunks then, which the proxy does not know
        assert storage.create("o", b"abc", staging=WRITER)
    else:
        s3.client.put_object(Bucket=s3.bucket, Key=f"{s3.prefix}/o", Body=b"abc")
    assert storage.read_bytes("o") == b"abc"
    assert storage.open("o").size == 3
    assert [entry.name for entry in storage.list("")] == ["o"]
    storage.delete(["o"])


def test_a_file_of_certificates_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none", tmp_path):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(path))
        with pytest.raises(InvalidInputError, match="AWS_CA_BUNDLE"):
            open_storage("s3://bucket/x", {"key": "k", "secret": "s"}).list("")


# Processes that end while credentials are on their way


ENDS = """
import json, os, sys, threading, time
from rr_dataset.storage import open_storage
uri, options, way, begun = json.loads(sys.argv[1])
storage = open_storage(uri, options)
call = {"read": lambda: storage.read_bytes("o"), "list": lambda: storage.list("")}[way]
def calls():
    while True:
        call()
for _ in range(4):
    threading.Thread(target=calls, daemon=True).start()
while not os.path.exists(begun):
    time.sleep(0.01)
print("ends")
"""
PROGRAM = """
[ -e {here}/asked ] && echo $$ >> {here}/begun && {wait}
touch {here}/asked
cat {here}/answer
"""
SLOW, HANGS = "sleep 0.2", "exec sleep 600"  # about as long as the interpreter takes to end, and for good


@pytest.mark.parametrize("way", ["read", "list"])
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(("wait", "starts"), [(SLOW, 3), (HANGS, 1), pytest.param(SLOW, 20, marks=pytest.mark.nightly)])
def test_processes_end_meanwhile(s3: Place, tmp_path: Path, client: str, way: str, wait: str, starts: int) -> None:
    open_storage(s3.uri, s3.options).create("o", b"abc", staging=WRITER)
    for start in range(starts):
        here = tmp_path / str(start)
        here.mkdir()
        (here / "answer").write_text(_answer(s3))
        (here / "program").write_text(PROGRAM.format(here=here, wait=wait))
        options = {**_profile(s3, tmp_path, f"sh {here}/program"), "client": client}
        arguments = json.dumps([s3.uri, options, way, str(here / "begun")])
        command = [sys.executable, "-W", "error", "-c", ENDS, arguments]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        finally:
            _kill_all(here / "begun")
        assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def _kill_all(pids: Path) -> None:
    for pid in pids.read_text().split() if pids.exists() else ():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
