"""Listings of a bucket: whole ones of any keys, and whatever else answers with 200 is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from counting_proxy import CountingProxy, Fault
from s3_medium import S3Medium
from weed import Place

from rr_dataset.errors import ObjectNotFoundError, StorageError
from rr_dataset.storage import Storage, open_storage, remote

WRITER = "00112233aabbccdd"
CLIENTS = ("obstore", "s3fs")
SPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@pytest.fixture
def storage(medium: S3Medium, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    return open_storage(medium.uri, {**medium.options, "endpoint_url": proxy.endpoint})


def page(inside: str, rest: str = "<IsTruncated>false</IsTruncated>", space: str = SPACE) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult {space}>{rest}{inside}</ListBucketResult>'.encode()


def contents(key: str, changed: str = "2026-01-02T03:04:05.678Z", size: int = 7) -> str:
    return (
        f"<Contents><Key>{key}</Key><LastModified>{changed}</LastModified><ETag>&quot;e&quot;</ETag>"
        f"<Size>{size}</Size></Contents>"
    )


def test_a_listing_of_thousands_comes_in_pages(s3: Place, proxy: CountingProxy) -> None:
    medium = S3Medium(s3, "obstore")
    names = [f"{number:04}.arrow" for number in range(2500)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: medium.put(f"data_id=p/{name}"), names))
    for client in CLIENTS:
        proxy.forget()
        storage = open_storage(s3.uri, {**s3.options, "client": client, "endpoint_url": proxy.endpoint})
        assert sorted(entry.name for entry in storage.list("data_id=p")) == names
        assert proxy.counts() == {"GET": 3}


KEYS = ("a b", "a+b", "a%20b", "100%", "ü€😀", "a\nb", "a\tb", "<&>\"'", "a=b?c#d", "data_id=x:y")


def test_keys_come_as_they_are(storage: Storage, medium: S3Medium) -> None:
    for name in KEYS:
        medium.put(f"d/{name}")
        medium.put(f"{name}/o")
    assert {entry.name for entry in storage.list("d")} == set(KEYS)
    assert set(storage.list_dirs("")) == {*KEYS, "d"}
    for name in KEYS:
        assert [(entry.name, entry.size) for entry in storage.list(name)] == [("o", 1)]


def test_what_a_listing_tells_is_what_the_object_tells(storage: Storage, medium: S3Medium) -> None:
    medium.put("o", b"abc")
    (entry,) = storage.list("")
    head = medium.place.client.head_object(Bucket=medium.place.bucket, Key=medium.key("o"))
    assert entry == ("o", 3, head["LastModified"].timestamp(), head["ETag"])


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html><body>Please log in</body></html>",
        b"<!DOCTYPE html><html><body><br>Please log in</body></html>",
        b'{"keys": []}',
        b"<?xml version='1.0'?>",
        b"<?xml version='1.0'?><ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>",
        b"<?xml version='1.0'?><ListVersionsResult><IsTruncated>false</IsTruncated></ListVersionsResult>",
        b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>m</Message></Error>",
        page("", rest=""),
        page("", rest="<IsTruncated>perhaps</IsTruncated>"),
        page("", rest="<IsTruncated>true</IsTruncated>"),
        page("", rest="<IsTruncated>true</IsTruncated><NextContinuationToken/>"),
        page(contents("PREFIX/1.arrow"))[:-30],
        page(contents("elsewhere/1.arrow")),
        page("<CommonPrefixes><Prefix>elsewhere/</Prefix></CommonPrefixes>"),
        page("<Contents><Key>PREFIX/1.arrow</Key></Contents>"),
        page(contents("PREFIX/1.arrow", changed="yesterday")),
        page(contents("PREFIX/1.arrow", size=-7)),
        page(contents("PREFIX/below/1.arrow")),
        page(contents("PREFIX/below/")),
        page("<CommonPrefixes><Prefix>PREFIX/below</Prefix></CommonPrefixes>"),
        page("<CommonPrefixes><Prefix>PREFIX/below/more/</Prefix></CommonPrefixes>"),
        page("<CommonPrefixes><Prefix>PREFIX/</Prefix></CommonPrefixes>"),
    ],
)
def test_what_is_no_whole_listing_is_refused(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, answer: bytes
) -> None:
    answer = answer.replace(b"PREFIX", medium.key("data_id=p").encode())
    fault = proxy.add(Fault("status", method="GET", times=100, status=200, body=answer or b" "))
    for call in (storage.list, storage.list_dirs):
        with pytest.raises(StorageError, match="does not list: check AWS_ENDPOINT_URL") as caught:
            call("data_id=p")
        assert not isinstance(caught.value, ObjectNotFoundError)
        assert "log in" not in str(caught.value)
    assert fault.hits == 2 * remote.TRIES
    fault.times = fault.hits + 1
    assert storage.list("data_id=p") == []


def test_objects_that_mark_directories_are_no_names(storage: Storage, medium: S3Medium) -> None:
    for path in ("d/", "d/o", "d/e/", "d/e/o"):
        medium.put(path)
    assert [entry.name for entry in storage.list("d")] == ["o"]
    assert storage.list_dirs("d") == ["e"]


def test_a_page_that_comes_again_and_again_is_refused(storage: Storage, medium: S3Medium, proxy: CountingProxy) -> None:
    more = "<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
    answer = page(contents(medium.key("1.arrow")), rest=more)
    fault = proxy.add(Fault("status", method="GET", times=100, status=200, body=answer))
    with pytest.raises(StorageError, match="does not list.*the same page again"):
        storage.list("")
    assert fault.hits == 2 * remote.TRIES


class _Endless(BaseHTTPRequestHandler):
    """Answers with more than anybody asked for, as long as it is read."""

    sent: list[int]  # MiB of each answer

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.sent.append(0)
        with suppress(OSError):
            for _ in range(200):
                self.wfile.write(b" " * (1 << 20))
                self.sent[-1] += 1

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the standard library's name
        """Nothing on stderr."""


@pytest.mark.parametrize("client", CLIENTS)
def test_an_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(_Endless, "sent", [], raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endless) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        storage = open_storage("s3://b/x", {"key": "k", "secret": "s", "endpoint_url": endpoint, "client": client})
        try:
            with pytest.raises(StorageError, match="does not list.*more than 16 MiB"):
                storage.list("")
        finally:
            server.shutdown()
            thread.join()
    assert len(_Endless.sent) == remote.TRIES
    assert max(_Endless.sent) < 100


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [(200, "SlowDown", "fewer requests"), (200, "AccessDenied", "s3:ListBucket"), (404, "NoSuchKey", "does not list")],
)
def test_an_error_in_place_of_a_listing_is_said(
    storage: Storage, proxy: CountingProxy, status: int, code: str, says: str
) -> None:
    proxy.add(Fault("status", method="GET", times=100, status=status, code=code))
    with pytest.raises(StorageError, match=says) as caught:
        storage.list("")
    assert not isinstance(caught.value, ObjectNotFoundError)


@pytest.mark.parametrize("space", [SPACE, ""])
def test_a_store_that_writes_them_another_way(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, space: str
) -> None:
    """Without a namespace, keys as they are, dates of other forms."""
    changed = ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05.6Z", "2026-01-02T03:04:05.678901234Z")
    inside = "".join(contents(medium.key(f"a%20+{number}"), each) for number, each in enumerate(changed))
    proxy.add(Fault("status", method="GET", status=200, body=page(inside, space=space)))
    seconds = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc).timestamp()
    assert storage.list("") == [(f"a%20+{number}", 7, seconds, '"e"') for number in range(3)]


def test_who_asks_is_signed_or_nobody(s3: Place, proxy: CountingProxy) -> None:
    proxy.add(Fault("status", method="GET", times=2, status=200, body=page("")))
    own = {**s3.options, "endpoint_url": proxy.endpoint}
    assert open_storage(s3.uri, {**own, "token": "of a session"}).list("") == []
    anonymous = {**own, "key": None, "secret": None, "anon": True}
    assert open_storage(s3.uri, anonymous).list("") == []
    signed, unsigned = (each.headers for each in proxy.requests())
    assert signed["x-amz-security-token"] == "of a session"
    assert "x-amz-security-token" in signed["authorization"]
    assert "authorization" not in unsigned
