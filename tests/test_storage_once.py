"""A request is sent once: what is to be done about a lost answer is decided above."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import botocore
import pytest
from counting_proxy import CountingProxy, Fault
from s3_medium import S3Medium
from weed import Place, S3Server

from rr_dataset.errors import StorageError
from rr_dataset.storage import Storage, open_storage, remote
from rr_dataset.storage.once import OnceSession

WRITER = "00112233aabbccdd"


@pytest.fixture(params=["obstore", "s3fs"])
def medium(s3: Place, request: pytest.FixtureRequest) -> S3Medium:
    return S3Medium(s3, request.param)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CountingProxy]:
    with CountingProxy.before(s3_server.port) as proxy:
        yield proxy


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
