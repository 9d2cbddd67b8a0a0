"""A request is sent once: what is to be done about a lost answer is decided above."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import botocore
import pytest
from counting_proxy import CountingProxy, Fault
from s3_medium import S3Medium

from rr_dataset.errors import StorageError
from rr_dataset.storage import Storage, open_storage, remote
from rr_dataset.storage.once import OnceSession

WRITER = "00112233aabbccdd"


@pytest.fixture
def storage(medium: S3Medium, proxy: CountingProxy) -> Storage:
    return open_storage(medium.uri, {**medium.options, "endpoint_url": proxy.endpoint})


def test_a_create_whose_answer_was_lost_is_found(storage: Storage, medium: S3Medium, proxy: CountingProxy) -> None:
    """On a connection that was kept, where aiohttp would send it again, and hear that the name is taken."""
    storage.create("a", b"abc", staging=WRITER)
    proxy.forget()
    fault = proxy.add(Fault("reset_after", method="PUT"))
    assert storage.create("b", b"abc", staging=WRITER) is True
    assert fault.hits == 1
    assert proxy.counts() == {"PUT": 1, "HEAD": 1}
    assert medium.get("b") == b"abc"


@pytest.mark.parametrize("kind", ["reset_before", "reset_after"])
def test_each_try_is_one_request(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    medium.put("a")
    for call in (lambda: storage.list(""), lambda: storage.read_bytes("a"), lambda: storage.open("a")):
        proxy.heal()
        call()
        proxy.forget()
        proxy.add(Fault(kind, times=100))  # type: ignore[arg-type]
        with pytest.raises(StorageError):
            call()
        assert len(proxy.requests()) == remote.TRIES


class _Elsewhere(BaseHTTPRequestHandler):
    """Sends everybody to another host, and notes who comes there."""

    status: int
    asked: list[str]  # the paths of all requests

    def answer(self) -> None:
        self.asked.append(self.path)
        self.send_response(self.status)
        self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/elsewhere")  # type: ignore[misc,str-bytes-safe]
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_PUT = do_HEAD = answer  # noqa: N815 -- names of the standard library

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the standard library's name
        """Nothing on stderr."""


@pytest.mark.parametrize(("status", "says"), [(301, "another region"), (307, "another region"), (302, "302")])
@pytest.mark.parametrize(
    ("client", "call"),
    [
        ("obstore", lambda storage: storage.list("d")),  # it gives its callers no way to keep it from following a GET
        ("s3fs", lambda storage: storage.list("d")),
        ("s3fs", lambda storage: storage.read_bytes("o")),
        ("s3fs", lambda storage: storage.create("o", b"x", staging=WRITER)),
    ],
)
def test_nobody_goes_where_another_host_is_named(
    monkeypatch: pytest.MonkeyPatch, status: int, says: str, client: str, call: Callable[[Storage], object]
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(_Elsewhere, "status", status, raising=False)
    monkeypatch.setattr(_Elsewhere, "asked", [], raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        options = {"endpoint_url": f"http://127.0.0.1:{server.server_address[1]}", "client": client}
        try:
            with pytest.raises(StorageError, match=says):
                call(open_storage("s3://b/x", {"key": "k", "secret": "s", "token": "TOKEN", **options}))
        finally:
            server.shutdown()
            thread.join()
    assert _Elsewhere.asked
    assert "/elsewhere" not in _Elsewhere.asked


def test_certificates_of_the_host_are_trusted_unless_a_file_names_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a store in the house, which obstore trusts."""
    own = tmp_path / "own.pem"
    text = (Path(botocore.__file__).parent / "cacert.pem").read_text()
    begin, end = text.index("-----BEGIN"), text.index("-----END")
    own.write_text(text[begin : text.index("\n", end) + 1])
    monkeypatch.setenv("SSL_CERT_FILE", str(own))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    for verify, trusted in ((True, 1), (str(own), 0)):
        context = OnceSession(verify=verify)._get_ssl_context()  # to which aiobotocore adds what it brings, or the file
        assert len(context.get_ca_certs()) == trusted
