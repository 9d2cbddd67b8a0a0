"""The remote store: what each call asks of the server, what it makes of faults, and where clients come from."""

from __future__ import annotations

import os
from typing import Any

import pytest
from counting_proxy import CountingProxy, Fault
from s3_medium import S3Medium

from rr_dataset.errors import CorruptShardError, InvalidInputError, ObjectNotFoundError, StorageError
from rr_dataset.layout import STAGING_DIR
from rr_dataset.storage import Entry, Storage, listing, obstore_client, open_storage, remote, s3fs_client

WRITER = "00112233aabbccdd"


@pytest.fixture
def storage(medium: S3Medium, proxy: CountingProxy) -> Storage:
    return open_storage(medium.uri, {**medium.options, "endpoint_url": proxy.endpoint})


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    size = 5 << 20
    for module in (s3fs_client, obstore_client):
        monkeypatch.setattr(module, "SINGLE_BYTES", size)
    monkeypatch.setattr(s3fs_client, "PART_BYTES", size)
    return size


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (remote, s3fs_client, obstore_client, listing):
        monkeypatch.setattr(module, "ANSWER_S", 0.8)


def used(storage: Storage, medium: S3Medium) -> None:
    """With its first request s3fs makes a session, which takes half a second on a busy core."""
    medium.put("used")
    assert storage.read_bytes("used") == b"x"


# What a call costs


def test_requests_of_each_call(storage: Storage, medium: S3Medium, proxy: CountingProxy) -> None:
    def asks(**expected: int) -> None:
        assert proxy.counts() == expected
        proxy.forget()

    storage.create("a/1", b"x" * 100_000, staging=WRITER)
    asks(PUT=1)
    storage.create("a/1", b"y", staging=WRITER)
    asks(PUT=1, HEAD=1)
    (entry,) = storage.list("a")
    asks(GET=1)
    storage.list_dirs("")
    asks(GET=1)
    source = storage.open("a/1", entry)
    storage.sync_dirs(["a"])
    storage.remove_empty_dirs("a")
    storage.list_others("a")
    storage.changed_ns("a")
    asks()
    source.tail(65536)
    asks(GET=1)
    source.read_runs([(at, [memoryview(bytearray(100))]) for at in (0, 20_000, 90_000)])
    asks(GET=3)
    storage.open("a/1")
    asks(HEAD=1)
    storage.read_bytes("a/1")
    asks(GET=1)
    storage.delete(["a/1", "a/2"])
    asks(POST=1)


def test_only_the_bytes_asked_for_cross_the_wire(storage: Storage, medium: S3Medium, proxy: CountingProxy) -> None:
    data = os.urandom(3 << 20)
    medium.put("o", data)
    source = storage.open("o", storage.list("")[0])
    proxy.forget()
    wanted = [(at, bytearray(50_000)) for at in range(0, len(data) - 50_000, 500_000)]
    source.read_runs([(at, [memoryview(buffer)]) for at, buffer in wanted])
    assert all(buffer == data[at : at + len(buffer)] for at, buffer in wanted)
    assert sum(each.received for each in proxy.requests()) == sum(len(buffer) for _, buffer in wanted)


def test_a_long_run_is_read_in_pieces(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", 1000)
    medium.put("o", data := os.urandom(7000))
    buffers = [bytearray(size) for size in (10, 0, 2500, 1, 1489)]
    storage.open("o").read_runs([(500, [memoryview(buffer) for buffer in buffers])])
    assert b"".join(buffers) == data[500:4500]
    assert proxy.counts() == {"HEAD": 1, "GET": 4}


def test_a_listing_is_never_kept(storage: Storage, medium: S3Medium, proxy: CountingProxy) -> None:
    for number in range(3):
        storage.create(f"data_id={number}/1.arrow", b"", staging=WRITER)
        assert len(storage.list_dirs("")) == number + 1
    medium.drop("data_id=0/1.arrow")
    assert storage.list("data_id=0") == []
    assert proxy.counts() == {"PUT": 3, "GET": 4}


def test_markers_of_others_are_no_objects(storage: Storage, medium: S3Medium) -> None:
    for key in ("", "a/", "a/b/", "a/c_$folder$"):
        medium.put(key, b"")
    medium.put("a/o")
    assert [entry.name for entry in storage.list("a")] == ["o"]
    assert storage.list("a/b") == []
    assert storage.list("") == []
    assert storage.list_dirs("") == ["a"]


# Faults


@pytest.mark.parametrize(
    "fault",
    [
        Fault("reset_before"),
        Fault("reset_after"),
        Fault("half"),
        Fault("status", status=500),
        Fault("status", status=503, code="SlowDown"),
        Fault("status", status=409, code="ConditionalRequestConflict"),
        Fault("status", status=502, body=b"<html>"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.status}",
)
def test_a_fault_that_passes_is_not_seen(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, fault: Fault
) -> None:
    medium.put("a/1", b"0123456789")
    (entry,) = storage.list("a")
    buffer = bytearray(4)

    def runs() -> bytes:
        storage.open("a/1", entry).read_runs([(2, [memoryview(buffer)])])
        return bytes(buffer)

    for method, call, expected in (
        ("GET", lambda: storage.list("a"), [entry]),
        ("GET", lambda: storage.list_dirs(""), ["a"]),
        ("GET", lambda: storage.open("a/1", entry).tail(3), b"789"),
        ("GET", runs, b"2345"),
        ("GET", lambda: storage.read_bytes("a/1"), b"0123456789"),
        ("HEAD", lambda: storage.open("a/1").size, 10),
        ("PUT", lambda: storage.create("b/1", b"abc", staging=WRITER) in (True, False), True),
        ("POST", lambda: storage.delete(["a/1"]), None),
    ):
        fault.method, fault.hits = method, 0
        proxy.add(fault)
        assert call() == expected
        assert fault.hits == 1
        proxy.heal()
    assert medium.get("b/1") == b"abc"
    assert medium.objects() == {"b/1"}


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (500, "InternalError", "failed"),
        (503, "SlowDown", "fewer requests"),
        (409, "ConditionalRequestConflict", "another request"),
        (403, "AccessDenied", "s3:PutObject"),
        (403, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "ExpiredToken", "AWS_SESSION_TOKEN"),
        (404, "NoSuchBucket", "bucket"),
        (400, "InvalidRequest", "refused"),
    ],
)
def test_a_fault_that_stays_is_said(
    storage: Storage,
    medium: S3Medium,
    proxy: CountingProxy,
    status: int,
    code: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    medium.put("a/1", b"0123456789")
    (entry,) = storage.list("a")
    proxy.add(Fault("status", status=status, code=code, times=10_000))
    for call in (
        lambda: storage.create("a/2", b"abc", staging=WRITER),
        lambda: storage.list("a"),
        lambda: storage.open("a/1", entry).tail(3),
        lambda: storage.read_bytes("a/1"),
        lambda: storage.delete(["a/1"]),
    ):
        proxy.forget()
        with pytest.raises(StorageError, match=says) as caught:
            call()
        assert not isinstance(caught.value, ObjectNotFoundError)
        assert caught.value.filename.startswith(medium.uri)
        assert str(status) in str(caught.value)
        assert caught.value.__cause__ is not None
        assert len(proxy.requests()) <= 4 * remote.TRIES


def test_a_create_that_hangs_is_looked_for_then_said(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, in_a_hurry: None
) -> None:
    used(storage, medium)
    proxy.add(Fault("delay", method="PUT", delay_s=2.5, times=1))
    with pytest.raises(StorageError, match="in time"):
        storage.create("o", b"abc", staging=WRITER)
    assert proxy.counts()["HEAD"] == 1
    assert storage.create("o", b"abc", staging=WRITER) in (True, False)
    assert medium.get("o") == b"abc"


def test_a_create_whose_answer_comes_too_late_is_found(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, in_a_hurry: None
) -> None:
    used(storage, medium)
    proxy.add(Fault("late", method="PUT", delay_s=2.5, times=1))
    assert storage.create("o", b"abc", staging=WRITER) is True
    assert proxy.counts() == {"GET": 1, "PUT": 1, "HEAD": 1}


def test_a_server_that_never_answers_ends_in_time(storage: Storage, proxy: CountingProxy, in_a_hurry: None) -> None:
    proxy.add(Fault("delay", delay_s=4, times=1000))
    for call in (
        lambda: storage.create("o", b"abc", staging=WRITER),
        lambda: storage.open("o"),
        lambda: storage.list(""),
    ):
        with pytest.raises(StorageError, match="in time") as caught:
            call()
        assert isinstance(caught.value, OSError)


def test_a_create_that_lost_its_answer_has_made_it(storage: Storage, medium: S3Medium, proxy: CountingProxy) -> None:
    fault = proxy.add(Fault("status", method="PUT", status=500, after=0))
    medium.put("o", b"other")
    assert storage.create("o", b"abc", staging=WRITER) is False
    assert fault.hits == 1
    assert medium.get("o") == b"other"


@pytest.mark.parametrize(
    "said", [{"status": 412, "code": "PreconditionFailed"}, {"status": 200, "code": "", "body": b"<html>Log in</html>"}]
)
@pytest.mark.parametrize("times", [2, 1000])
def test_a_page_of_somebody_else_is_never_taken_for_a_create(
    storage: Storage,
    medium: S3Medium,
    proxy: CountingProxy,
    monkeypatch: pytest.MonkeyPatch,
    said: dict[str, Any],
    times: int,
) -> None:
    """Neither for one that was made nor for a name that is taken."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    used(storage, medium)
    proxy.add(Fault("status", method="PUT|HEAD" if said["status"] == 200 else "PUT", times=times, **said))
    if times == 2:
        assert storage.create("o", b"abc", staging=WRITER)
    else:
        with pytest.raises(StorageError):
            storage.create("o", b"abc", staging=WRITER)
    assert (medium.get("o") == b"abc") == (times == 2)


def test_what_was_replaced_or_deleted_is_not_read(storage: Storage, medium: S3Medium) -> None:
    medium.put("o", b"0123456789")
    source = storage.open("o")
    medium.put("o", b"9876543210")
    with pytest.raises(ObjectNotFoundError, match="replaced"):
        source.tail(3)
    medium.drop("o")
    with pytest.raises(ObjectNotFoundError, match="no such object"):
        source.read(0, 3)


def test_an_object_shorter_than_its_listing_is_cut(storage: Storage, medium: S3Medium) -> None:
    medium.put("o", b"0123456789")
    source = storage.open("o", Entry("o", 100, 0.0))
    for offset, length in ((5, 10), (50, 10)):
        with pytest.raises((CorruptShardError, StorageError), match="ends"):
            source.read(offset, length)


# Deleting


def test_thousands_are_deleted_in_thousands(storage: Storage, medium: S3Medium, proxy: CountingProxy) -> None:
    for number in (0, 999, 1000, 2499):
        medium.put(f"a/{number}")
    storage.delete(f"a/{number}" for number in range(2500))
    assert proxy.counts() == {"POST": 3}
    assert medium.objects() == set()


def test_what_one_key_failed_of_is_tried_again_then_named(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.001)
    for number in range(3):
        medium.put(f"a/{number}")
    key = medium.key("a/1")
    answer = (
        f"<DeleteResult><Error><Key>{key}</Key><Code>InternalError</Code><Message>m</Message></Error></DeleteResult>"
    )
    fault = proxy.add(Fault("status", method="POST", status=200, body=answer.encode()))
    storage.delete(["a/0", "a/1"])
    assert fault.hits == 1
    if medium.options["client"] == "obstore":  # which tells of the first failure only
        assert medium.objects() == {"a/2"}
    medium.put("a/1")
    proxy.add(Fault("status", method="POST", status=200, body=answer.encode(), times=100))
    with pytest.raises(StorageError, match="still there: .*a/1"):
        storage.delete(["a/1"])


# Large objects


def test_a_large_object_goes_up_in_parts(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, small_parts: int
) -> None:
    data = os.urandom(2 * small_parts + 17)
    views = [data[:10], memoryview(data)[10 : small_parts + 5], data[small_parts + 5 :]]
    assert storage.create("o", views, staging=WRITER) is True
    assert proxy.counts() == {"POST": 2, "PUT": 3}
    assert medium.get("o") == data
    assert storage.create("o", [b"x", *views], staging=WRITER) is False
    assert medium.get("o") == data
    assert medium.uploads() == []


@pytest.mark.parametrize(
    ("fault", "made"),
    [
        (Fault("status", method="PUT", status=500), True),
        (Fault("status", method="PUT", status=403, code="AccessDenied"), False),
        (Fault("status", method="POST", target="uploadId", times=100), False),
        (Fault("reset_after", method="POST", target="uploadId"), True),
    ],
    ids=["part", "part denied", "complete", "complete lost"],
)
def test_an_upload_that_fails_leaves_nothing(
    storage: Storage, medium: S3Medium, proxy: CountingProxy, small_parts: int, fault: Fault, made: bool
) -> None:
    fault.hits = 0
    proxy.add(fault)
    data = os.urandom(small_parts + 1)
    if made:
        storage.create("o", data, staging=WRITER)
        assert medium.get("o") == data
    else:
        with pytest.raises(StorageError):
            storage.create("o", data, staging=WRITER)
        assert medium.objects() == set()
    assert fault.hits
    assert medium.uploads() == []


def test_uploads_of_the_dead_are_shown_to_the_collector(storage: Storage, medium: S3Medium) -> None:
    client, place = medium.place.client, medium.place
    for key in (medium.key("data_id=a%3Ab/x+y.arrow"), "elsewhere"):
        client.create_multipart_upload(Bucket=place.bucket, Key=key)
    assert storage.list_dirs(STAGING_DIR) == ["uploads"]
    (entry,) = storage.list(f"{STAGING_DIR}/uploads")
    assert "/" not in entry.name
    assert entry.mtime_s > 1.7e9
    for _ in range(2):
        storage.delete([f"{STAGING_DIR}/uploads/{entry.name}"])
    assert medium.uploads() == []
    assert storage.list(f"{STAGING_DIR}/uploads") == []


# Other stores of fsspec


def test_a_file_system_of_fsspec() -> None:
    storage = open_storage("memory://bucket/data")
    assert storage.create("a/1", [b"01234", b"56789"], staging=WRITER)
    assert not storage.create("a/1", b"x", staging=WRITER)
    assert [(entry.name, entry.size) for entry in storage.list("a")] == [("1", 10)]
    assert storage.list_dirs("") == ["a"]
    assert storage.list("b") == []
    assert storage.open("a/1").tail(3) == b"789"
    assert storage.open("a/1", storage.list("a")[0]).read(2, 3) == b"234"
    storage.delete(["a/1", "a/2"])
    assert storage.list("a") == []
    with pytest.raises(ObjectNotFoundError):
        storage.read_bytes("a/1")
    with pytest.raises(InvalidInputError, match="no storage for nothing://"):
        open_storage("nothing://b/x")
