"""What the protocols need of a store, held against every store through its own medium; and the addresses of stores."""

from __future__ import annotations

import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from local_medium import LocalMedium
from s3_medium import S3Medium
from weed import Place

from rr_dataset.errors import CorruptShardError, InvalidInputError, ObjectNotFoundError
from rr_dataset.storage import Storage, open_storage

Medium = LocalMedium | S3Medium
WRITER = "00112233aabbccdd"
BAD_PATHS = ("/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", ".", "..", "a/", "a\0b")


class StorageContract:
    """Any store. A subclass gives `medium`."""

    @pytest.fixture
    def storage(self, medium: Medium) -> Storage:
        return open_storage(medium.uri, medium.options)

    def test_create_makes_the_whole_object_and_leaves_nothing_else(self, storage: Storage, medium: Medium) -> None:
        assert storage.create("data_id=a/1.arrow", b"one", staging=WRITER) is True
        assert medium.get("data_id=a/1.arrow") == b"one"
        assert medium.objects() == {"data_id=a/1.arrow"}

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            bytearray(b"abc"),
            memoryview(b"abcdef")[::1],
            [b"ab", memoryview(b"cd"), bytearray(b"")],
            [],
            [b"x"] * 3000,
        ],
    )
    def test_create_takes_buffers(
        self, storage: Storage, medium: Medium, data: bytes | list[bytes | memoryview]
    ) -> None:
        storage.create("o", data, staging=WRITER)
        assert medium.get("o") == (b"".join(data) if isinstance(data, list) else bytes(data))

    def test_create_never_replaces(self, storage: Storage, medium: Medium) -> None:
        medium.put("data_id=a/1.arrow", b"first")
        assert storage.create("data_id=a/1.arrow", b"second", staging=WRITER) is False
        assert medium.get("data_id=a/1.arrow") == b"first"
        assert medium.objects() == {"data_id=a/1.arrow"}

    def test_of_creators_at_once_one_wins_whole(self, storage: Storage, medium: Medium) -> None:
        start = threading.Barrier(8)

        def create(number: int) -> bool:
            start.wait()
            return storage.create("data_id=a/1.arrow", bytes([number]) * 100_000, staging=WRITER)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert won.count(True) == 1
        assert medium.get("data_id=a/1.arrow") == bytes([won.index(True)]) * 100_000

    def test_create_survives_a_deleter_in_the_same_directory(self, storage: Storage, medium: Medium) -> None:
        done = threading.Event()

        def delete() -> None:
            while not done.is_set():
                storage.delete(["data_id=a/gen_id=1/1.arrow"])
                storage.remove_empty_dirs("data_id=a/gen_id=1")

        deleter = threading.Thread(target=delete)
        deleter.start()
        try:
            for number in range(medium.rounds):
                assert storage.create(f"data_id=a/gen_id=1/{number + 2}.arrow", b"x", staging=WRITER)
                storage.delete([f"data_id=a/gen_id=1/{number + 2}.arrow"])
        finally:
            done.set()
            deleter.join()
        assert medium.objects() == set()

    def test_list_gives_the_objects_right_below(self, storage: Storage, medium: Medium) -> None:
        before = time.time()
        medium.put("data_id=a/1.arrow", b"12345")
        medium.put("data_id=a/gen_id=1/2.arrow")
        medium.put("top")
        (entry,) = storage.list("data_id=a")
        assert (entry.name, entry.size) == ("1.arrow", 5)
        assert before - 5 < entry.mtime_s < time.time() + 5
        assert [entry.name for entry in storage.list("")] == ["top"]

    def test_list_dirs_gives_the_directories_right_below(self, storage: Storage, medium: Medium) -> None:
        for path in ("data_id=a/gen_id=1/2.arrow", "data_id=b/1.arrow", "_rr/format.json", "top"):
            medium.put(path)
        assert sorted(storage.list_dirs("")) == ["_rr", "data_id=a", "data_id=b"]
        assert list(storage.list_dirs("data_id=a")) == ["gen_id=1"]

    def test_a_missing_directory_is_empty(self, storage: Storage) -> None:
        assert list(storage.list("nowhere/below")) == []
        assert list(storage.list_dirs("nowhere")) == []

    def test_ranged_reads(self, storage: Storage, medium: Medium) -> None:
        data = bytes(range(256)) * 4
        medium.put("o", data)
        with storage.open("o") as source:
            assert source.tail(16) == data[-16:]
            assert source.size == 1024
            assert source.tail(5000) == data
            assert source.read(10, 20) == data[10:30]
            assert source.read(1024, 0) == b""
            first, gap, second = bytearray(3), bytearray(7), bytearray(300)
            source.read_runs([(5, [memoryview(first), memoryview(gap)]), (700, [memoryview(second)])])
            assert (bytes(first), bytes(gap), bytes(second)) == (data[5:8], data[8:15], data[700:1000])
            assert source.max_gap_bytes > 0

    def test_many_buffers_a_run(self, storage: Storage, medium: Medium) -> None:
        data = os.urandom(3 * 2500)
        medium.put("o", data)
        whole = bytearray(len(data))
        with storage.open("o") as source:
            source.read_runs([(0, [memoryview(whole)[i : i + 3] for i in range(0, len(data), 3)])])
        assert whole == data

    def test_reads_beyond_the_end_are_errors(self, storage: Storage, medium: Medium) -> None:
        medium.put("o", b"0123456789")
        with storage.open("o") as source:
            for offset, length in ((5, 6), (10, 1), (5000, 3)):
                with pytest.raises(CorruptShardError, match="ends at byte"):
                    source.read(offset, length)
                with pytest.raises(CorruptShardError, match="ends at byte"):
                    source.read_runs([(offset, [memoryview(bytearray(length))])])

    def test_reads_from_many_threads(self, storage: Storage, medium: Medium) -> None:
        data = os.urandom(1 << 20)
        medium.put("o", data)
        with storage.open("o") as source, ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(lambda at: source.read(at, 4096), range(0, 1 << 20, 4096)))
        assert b"".join(parts) == data

    def test_what_is_gone_is_not_found(self, storage: Storage) -> None:
        for read in (storage.open, storage.read_bytes):
            with pytest.raises(ObjectNotFoundError, match=r"data_id=a/1\.arrow"):
                read("data_id=a/1.arrow")

    def test_read_bytes(self, storage: Storage, medium: Medium) -> None:
        medium.put("empty", b"")
        medium.put("o", b"abc" * 1000)
        assert storage.read_bytes("o") == b"abc" * 1000
        assert storage.read_bytes("empty") == b""

    def test_delete_is_idempotent(self, storage: Storage, medium: Medium) -> None:
        for path in ("data_id=a/1.arrow", "data_id=a/2.arrow", "data_id=a/3.arrow"):
            medium.put(path)
        for _ in range(2):
            storage.delete(["data_id=a/1.arrow", "data_id=a/3.arrow", "data_id=b/1.arrow"])
        assert medium.objects() == {"data_id=a/2.arrow"}

    def test_sync_dirs_of_anything(self, storage: Storage) -> None:
        storage.create("data_id=a/gen_id=1/1.arrow", b"x", staging=WRITER)
        storage.sync_dirs(["data_id=a/gen_id=1", "data_id=gone", ""])

    @pytest.mark.parametrize("path", BAD_PATHS)
    def test_paths_stay_under_the_root(self, storage: Storage, path: str) -> None:
        calls = (
            lambda: storage.list(path),
            lambda: storage.list_dirs(path),
            lambda: storage.open(path),
            lambda: storage.read_bytes(path),
            lambda: storage.create(path, b"", staging=WRITER),
            lambda: storage.create("o", b"", staging=path),
            lambda: storage.sync_dirs([path]),
            lambda: storage.delete([path]),
            lambda: storage.remove_empty_dirs(path),
        )
        for call in calls:
            with pytest.raises(InvalidInputError, match="relative to the dataset's root"):
                call()

    def test_the_root_is_no_object(self, storage: Storage) -> None:
        for call in (
            lambda: storage.open(""),
            lambda: storage.create("", b"", staging=WRITER),
            lambda: storage.delete([""]),
        ):
            with pytest.raises(InvalidInputError):
                call()

    def test_pickles_and_opens_again(self, storage: Storage, medium: Medium) -> None:
        medium.put("o", b"abc")
        assert pickle.loads(pickle.dumps(storage)).read_bytes("o") == b"abc"
        assert open_storage(storage.uri, medium.options).read_bytes("o") == b"abc"


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
class TestS3(StorageContract):
    """Both clients on a real server."""

    @pytest.fixture
    def medium(self, s3: Place, client: str) -> S3Medium:
        return S3Medium(s3, client)


class TestLocal(StorageContract):
    """os calls on a directory."""

    @pytest.fixture
    def medium(self, tmp_path: Path) -> LocalMedium:
        return LocalMedium.of_a_dataset(tmp_path)


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in ("a b", "./x/../a b", tmp_path / "a b", f"file://{tmp_path}/a%20b", f"FILE://localhost{tmp_path}/a%20b"):
        assert open_storage(uri).uri == str(tmp_path / "a b")
    assert LocalMedium(tmp_path).names() == []


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s4://bucket/x", "s4://"),
        ("s3:///x", "s3://bucket"),
        ("s3://b/a//b", "s3://bucket"),
        ("", "''"),
        ("file://host/x", "host"),
        ("a\0b", "a"),
        ("simplecache::s3://b/c", "s3://bucket"),
        ("arrow_hdfs://x/y", "s3://bucket"),
        ("s3:/bucket/x", "s3://bucket"),
        ("://x", "s3://bucket"),
    ],
)
def test_other_addresses_are_refused(uri: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        open_storage(uri)


def test_unknown_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="endpoint_url"):
        open_storage(tmp_path, {"endpoint_url": "http://localhost"})
