"""What the protocols need of a store, held against every store through its own medium, and what is special to one."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rr_dataset.errors import CorruptShardError, InvalidInputError, ObjectNotFoundError, StorageError
from rr_dataset.layout import FORMAT_PATH
from rr_dataset.storage import Storage, open_storage

WRITER = "00112233aabbccdd"
BAD_PATHS = ("/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", ".", "..", "a/", "a\0b")


class LocalMedium:
    """The directory behind a local store, without the product's code."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def put(self, path: str, data: bytes = b"x") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)

    def get(self, path: str) -> bytes | None:
        return (self.root / path).read_bytes() if (self.root / path).exists() else None

    def drop(self, path: str) -> None:
        (self.root / path).unlink()

    def names(self, path: str = "") -> list[str]:
        return sorted(each.name for each in (self.root / path).iterdir())

    def objects(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}


class StorageContract:
    """Any store. A subclass gives `medium`."""

    @pytest.fixture
    def storage(self, medium: LocalMedium) -> Storage:
        return open_storage(medium.uri)

    def test_create_makes_the_whole_object_and_leaves_nothing_else(self, storage: Storage, medium: LocalMedium) -> None:
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
        self, storage: Storage, medium: LocalMedium, data: bytes | list[bytes | memoryview]
    ) -> None:
        storage.create("o", data, staging=WRITER)
        assert medium.get("o") == (b"".join(data) if isinstance(data, list) else bytes(data))

    def test_create_never_replaces(self, storage: Storage, medium: LocalMedium) -> None:
        medium.put("data_id=a/1.arrow", b"first")
        assert storage.create("data_id=a/1.arrow", b"second", staging=WRITER) is False
        assert medium.get("data_id=a/1.arrow") == b"first"
        assert medium.objects() == {"data_id=a/1.arrow"}

    def test_of_creators_at_once_one_wins_whole(self, storage: Storage, medium: LocalMedium) -> None:
        start = threading.Barrier(8)

        def create(number: int) -> bool:
            start.wait()
            return storage.create("data_id=a/1.arrow", bytes([number]) * 100_000, staging=WRITER)

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(create, range(8)))
        assert won.count(True) == 1
        assert medium.get("data_id=a/1.arrow") == bytes([won.index(True)]) * 100_000

    def test_create_survives_a_deleter_in_the_same_directory(self, storage: Storage, medium: LocalMedium) -> None:
        done = threading.Event()

        def delete() -> None:
            while not done.is_set():
                storage.delete(["data_id=a/gen_id=1/1.arrow"])
                storage.remove_empty_dirs("data_id=a/gen_id=1")

        deleter = threading.Thread(target=delete)
        deleter.start()
        try:
            for number in range(200):
                assert storage.create(f"data_id=a/gen_id=1/{number + 2}.arrow", b"x", staging=WRITER)
                storage.delete([f"data_id=a/gen_id=1/{number + 2}.arrow"])
        finally:
            done.set()
            deleter.join()
        assert medium.objects() == set()

    def test_list_gives_the_objects_right_below(self, storage: Storage, medium: LocalMedium) -> None:
        before = time.time()
        medium.put("data_id=a/1.arrow", b"12345")
        medium.put("data_id=a/gen_id=1/2.arrow")
        medium.put("top")
        (entry,) = storage.list("data_id=a")
        assert (entry.name, entry.size) == ("1.arrow", 5)
        assert before - 5 < entry.mtime_s < time.time() + 5
        assert [entry.name for entry in storage.list("")] == ["top"]

    def test_list_dirs_gives_the_directories_right_below(self, storage: Storage, medium: LocalMedium) -> None:
        for path in ("data_id=a/gen_id=1/2.arrow", "data_id=b/1.arrow", "_rr/format.json", "top"):
            medium.put(path)
        assert sorted(storage.list_dirs("")) == ["_rr", "data_id=a", "data_id=b"]
        assert list(storage.list_dirs("data_id=a")) == ["gen_id=1"]

    def test_a_missing_directory_is_empty(self, storage: Storage) -> None:
        assert list(storage.list("nowhere/below")) == []
        assert list(storage.list_dirs("nowhere")) == []

    def test_ranged_reads(self, storage: Storage, medium: LocalMedium) -> None:
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

    def test_many_buffers_a_run(self, storage: Storage, medium: LocalMedium) -> None:
        data = os.urandom(3 * 2500)
        medium.put("o", data)
        whole = bytearray(len(data))
        with storage.open("o") as source:
            source.read_runs([(0, [memoryview(whole)[i : i + 3] for i in range(0, len(data), 3)])])
        assert whole == data

    def test_reads_beyond_the_end_are_errors(self, storage: Storage, medium: LocalMedium) -> None:
        medium.put("o", b"0123456789")
        with storage.open("o") as source:
            for offset, length in ((5, 6), (10, 1), (5000, 3)):
                with pytest.raises(CorruptShardError, match="ends at byte"):
                    source.read(offset, length)
                with pytest.raises(CorruptShardError, match="ends at byte"):
                    source.read_runs([(offset, [memoryview(bytearray(length))])])

    def test_reads_from_many_threads(self, storage: Storage, medium: LocalMedium) -> None:
        data = os.urandom(1 << 20)
        medium.put("o", data)
        with storage.open("o") as source, ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(lambda at: source.read(at, 4096), range(0, 1 << 20, 4096)))
        assert b"".join(parts) == data

    def test_what_is_gone_is_not_found(self, storage: Storage) -> None:
        for read in (storage.open, storage.read_bytes):
            with pytest.raises(ObjectNotFoundError, match=r"data_id=a/1\.arrow"):
                read("data_id=a/1.arrow")

    def test_read_bytes(self, storage: Storage, medium: LocalMedium) -> None:
        medium.put("empty", b"")
        medium.put("o", b"abc" * 1000)
        assert storage.read_bytes("o") == b"abc" * 1000
        assert storage.read_bytes("empty") == b""

    def test_delete_is_idempotent(self, storage: Storage, medium: LocalMedium) -> None:
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

    def test_pickles_and_opens_again(self, storage: Storage, medium: LocalMedium) -> None:
        medium.put("o", b"abc")
        assert pickle.loads(pickle.dumps(storage)).read_bytes("o") == b"abc"
        assert open_storage(storage.uri).read_bytes("o") == b"abc"


class TestLocal(StorageContract):
    """os calls on a directory."""

    @pytest.fixture
    def medium(self, tmp_path: Path) -> LocalMedium:
        return LocalMedium(tmp_path)

    def test_content_is_synced_before_the_name_shows(self, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = _record(monkeypatch)
        storage.create("data_id=a/1.arrow", b"x", staging=WRITER)
        assert [name for name, _ in calls] == ["fsync", "link"]
        assert calls[0][1] == calls[1][1]
        assert f"/_rr/tmp/{WRITER}/" in calls[0][1]

    def test_sync_dirs_syncs_each_ancestor_once(
        self, storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for gen in range(8):
            medium.put(f"data_id=a/gen_id={gen}/1.arrow")
        calls = _record(monkeypatch)
        storage.sync_dirs([f"data_id=a/gen_id={gen}" for gen in range(8)] * 2)
        wanted = [
            medium.root,
            medium.root / "data_id=a",
            *(medium.root / f"data_id=a/gen_id={gen}" for gen in range(8)),
        ]
        assert sorted(calls) == sorted(("fsync", str(path)) for path in wanted)

    @pytest.mark.parametrize("at", ["fsync", "link", "unlink"])
    def test_a_killed_create_leaves_a_stage_file_at_most(self, medium: LocalMedium, at: str) -> None:
        code = f"""
import os, signal
from rr_dataset.storage import open_storage
os.{at} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
open_storage({medium.uri!r}).create("data_id=a/1.arrow", b"whole", staging={WRITER!r})
"""
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
        staged = {path for path in medium.objects() if path.startswith(f"_rr/tmp/{WRITER}/")}
        visible = medium.objects() - staged
        assert len(staged) == 1
        assert visible == ({"data_id=a/1.arrow"} if at == "unlink" else set())
        assert all(medium.get(path) == b"whole" for path in visible)
        assert open_storage(medium.uri).create("data_id=a/1.arrow", b"whole", staging=WRITER) is (not visible)

    @pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
    def test_without_hard_links_it_renames(
        self, storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        monkeypatch.setattr(os, "link", _failing(code))
        assert storage.create("data_id=a/1.arrow", b"one", staging=WRITER) is True
        assert storage.create("data_id=a/1.arrow", b"two", staging=WRITER) is False
        assert medium.get("data_id=a/1.arrow") == b"one"
        assert medium.objects() == {"data_id=a/1.arrow"}

    @pytest.mark.parametrize("code", [errno.EINVAL, None])
    def test_without_either_it_says_so(
        self, storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, code: int | None
    ) -> None:
        class Library:
            def __init__(self, *args: object, **kwargs: object) -> None:
                if code is not None:
                    self.renameat2 = lambda *names: ctypes.set_errno(code) * 0 - 1

        monkeypatch.setattr(os, "link", _failing(errno.EPERM))
        monkeypatch.setattr(ctypes, "CDLL", Library)
        with pytest.raises(StorageError, match="neither hard links nor renameat2") as caught:
            storage.create("data_id=a/1.arrow", b"one", staging=WRITER)
        assert caught.value.errno == errno.EOPNOTSUPP
        assert medium.objects() == set()

    def test_only_the_format_makes_the_root(self, tmp_path: Path) -> None:
        root = tmp_path / "deep" / "root"
        storage = open_storage(root)
        with pytest.raises(ObjectNotFoundError, match="still mounted"):
            storage.create("data_id=a/1.arrow", b"x", staging=WRITER)
        assert not root.parent.exists()
        assert storage.create(FORMAT_PATH, b"{}", staging=WRITER) is True
        assert storage.create("data_id=a/1.arrow", b"x", staging=WRITER) is True
        assert LocalMedium(root).objects() == {FORMAT_PATH, "data_id=a/1.arrow"}

    def test_a_new_root_has_durable_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = _record(monkeypatch)
        open_storage(tmp_path / "deep" / "root").create(FORMAT_PATH, b"{}", staging=WRITER)
        assert [path for call, path in calls[:2] if call == "fsync"] == [str(tmp_path), str(tmp_path / "deep")]

    @pytest.mark.parametrize(
        ("code", "way_out"),
        [
            (errno.ENOSPC, "free space"),
            (errno.EDQUOT, "quota"),
            (errno.EACCES, "owner and mode"),
            (errno.EROFS, "remount"),
            (errno.EIO, "error"),
        ],
    )
    @pytest.mark.parametrize("call", ["open", "writev", "fsync", "mkdir", "link"])
    def test_a_failing_create_names_path_and_way_out(
        self, storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, call: str, code: int, way_out: str
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, _failing(code))
            with pytest.raises(StorageError, match=way_out) as caught:
                storage.create("data_id=a/1.arrow", b"x", staging=WRITER)
        assert caught.value.errno == code
        assert str(medium.root) in str(caught.value)
        assert isinstance(caught.value.__cause__, OSError)
        assert medium.objects() == set()
        assert pickle.loads(pickle.dumps(caught.value)).errno == code

    def test_out_of_descriptors(self, storage: Storage, medium: LocalMedium) -> None:
        medium.put("o")
        with _limit(resource.RLIMIT_NOFILE, 0), pytest.raises(StorageError, match="ulimit -n"):
            storage.open("o")

    def test_a_file_that_cannot_grow_is_not_published(self, storage: Storage, medium: LocalMedium) -> None:
        with _limit(resource.RLIMIT_FSIZE, 5000), pytest.raises(StorageError, match="File too large"):
            storage.create("data_id=a/1.arrow", [b"x" * 4096] * 3, staging=WRITER)
        assert medium.objects() == set()

    @pytest.mark.parametrize("call", ["scandir", "unlink", "rmdir"])
    def test_other_failing_calls(
        self, storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        medium.put("d/o")
        monkeypatch.setattr(os, call, _failing(errno.EACCES))
        for attempt in {
            "scandir": (lambda: storage.list("d"), lambda: storage.list_dirs("d")),
            "unlink": (lambda: storage.delete(["d/o"]),),
            "rmdir": (lambda: storage.remove_empty_dirs("d"),),
        }[call]:
            with pytest.raises(StorageError, match="owner and mode"):
                attempt()

    def test_a_stale_handle_is_a_vanished_object(
        self, storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        medium.put("o", b"abc")
        with storage.open("o") as source:
            monkeypatch.setattr(os, "pread", _failing(errno.ESTALE))
            with pytest.raises(ObjectNotFoundError):
                source.read(0, 1)

    def test_an_open_file_outlives_its_name(self, storage: Storage, medium: LocalMedium) -> None:
        medium.put("o", b"abc")
        with storage.open("o") as source:
            medium.drop("o")
            assert source.tail(10) == b"abc"
        source.close()

    def test_removes_empty_directories_upwards(self, storage: Storage, medium: LocalMedium) -> None:
        (medium.root / "data_id=a/gen_id=1").mkdir(parents=True)
        (medium.root / "data_id=b/gen_id=1").mkdir(parents=True)
        medium.put("data_id=b/gen_id=2/1.arrow")
        medium.put("data_id=c/.nfs000000000001", b"")
        storage.remove_empty_dirs("data_id=a/gen_id=1/gone")
        storage.remove_empty_dirs("data_id=b/gen_id=1")
        storage.remove_empty_dirs("data_id=c")
        assert medium.names() == ["data_id=b", "data_id=c"]
        assert medium.names("data_id=b") == ["gen_id=2"]
        medium.drop("data_id=b/gen_id=2/1.arrow")
        medium.drop("data_id=c/.nfs000000000001")
        storage.remove_empty_dirs("data_id=b/gen_id=2")
        storage.remove_empty_dirs("data_id=c")
        assert medium.names() == []

    @pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY])
    def test_a_directory_in_use_stays(
        self, storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        (medium.root / "d/e").mkdir(parents=True)
        monkeypatch.setattr(os, "rmdir", _failing(code))
        storage.remove_empty_dirs("d/e")

    def test_a_directory_that_cannot_be_synced_is_passed(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", _failing(errno.EINVAL))
            storage.sync_dirs([""])
        monkeypatch.setattr(os, "fsync", _failing(errno.EIO))
        with pytest.raises(StorageError):
            storage.sync_dirs([""])

    def test_links_and_other_files_are_no_objects(self, storage: Storage, medium: LocalMedium) -> None:
        medium.put("elsewhere/o")
        (medium.root / "d").mkdir()
        (medium.root / "d/link").symlink_to(medium.root / "elsewhere/o")
        (medium.root / "d/dir").symlink_to(medium.root / "elsewhere")
        os.mkfifo(medium.root / "d/pipe")
        assert list(storage.list("d")) == []
        assert list(storage.list_dirs("d")) == []

    @given(
        st.binary(min_size=1, max_size=300),
        st.lists(st.tuples(st.integers(0, 299), st.lists(st.integers(0, 40), max_size=6)), max_size=4),
        st.integers(1, 50),
    )
    def test_short_reads_go_on(
        self, tmp_path_factory: pytest.TempPathFactory, data: bytes, runs: list, cut: int
    ) -> None:
        root = tmp_path_factory.mktemp("short")
        (root / "o").write_bytes(data)
        runs = [(at, lengths) for at, lengths in runs if at + sum(lengths) <= len(data)]
        real = os.preadv

        def short(fd: int, buffers: list[memoryview], offset: int) -> int:
            given = []
            left = cut
            for buffer in buffers:
                given.append(buffer[:left])
                left -= len(given[-1])
            return real(fd, given, offset)

        with pytest.MonkeyPatch.context() as patch, open_storage(root).open("o") as source:
            patch.setattr(os, "preadv", short)
            asked = [(at, [bytearray(length) for length in lengths]) for at, lengths in runs]
            source.read_runs([(at, [memoryview(buffer) for buffer in buffers]) for at, buffers in asked])
        for at, buffers in asked:
            assert b"".join(buffers) == data[at : at + sum(map(len, buffers))]

    def test_short_writes_go_on(self, storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.writev
        monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [next(b for b in buffers if b.nbytes)[:7]]))
        storage.create("o", [b"0123456789", b"", b"abcdefghijklmnopqrstuvwxyz"], staging=WRITER)
        assert medium.get("o") == b"0123456789abcdefghijklmnopqrstuvwxyz"


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for uri in ("a b", "./x/../a b", tmp_path / "a b", f"file://{tmp_path}/a%20b", f"FILE://localhost{tmp_path}/a%20b"):
        assert open_storage(uri).uri == str(tmp_path / "a b")
    assert LocalMedium(tmp_path).names() == []


@pytest.mark.parametrize(
    ("uri", "said"),
    [("s3://bucket/x", "s3://"), ("gs://b", "gs://"), ("", "''"), ("file://host/x", "host"), ("a\0b", "a")],
)
def test_other_addresses_are_refused(uri: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        open_storage(uri)


def test_unknown_storage_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="endpoint_url"):
        open_storage(tmp_path, {"endpoint_url": "http://localhost"})


def _failing(code: int):
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code), args[0] if args and isinstance(args[0], str) else None)

    return call


def _record(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, path) of each fsync and link from now on."""
    calls: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(("fsync", str(Path(f"/proc/self/fd/{fd}").readlink()))), fsync(fd))[1]
    )
    monkeypatch.setattr(os, "link", lambda old, new: (link(old, new), calls.append(("link", old)))[0])
    return calls


@contextmanager
def _limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))
