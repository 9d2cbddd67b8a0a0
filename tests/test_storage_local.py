"""What is special to a directory on a local disk: its durability, its errors, its names."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_medium import LocalMedium

from rr_dataset.errors import ObjectNotFoundError, StorageError
from rr_dataset.layout import FORMAT_PATH
from rr_dataset.storage import Storage, open_storage
from rr_dataset.storage.local import LocalStorage

WRITER = "00112233aabbccdd"


@pytest.fixture
def medium(tmp_path: Path) -> LocalMedium:
    return LocalMedium.of_a_dataset(tmp_path)


@pytest.fixture
def storage(medium: LocalMedium) -> Storage:
    return open_storage(medium.uri)


def test_content_is_synced_before_the_name_shows(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record(monkeypatch)
    storage.create("data_id=a/1.arrow", b"x", staging=WRITER)
    assert [name for name, _ in calls] == ["fsync", "link"]
    assert calls[0][1] == calls[1][1]
    assert f"/_rr/tmp/{WRITER}/" in calls[0][1]


def test_sync_dirs_syncs_each_ancestor_once(
    storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch
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
def test_a_killed_create_leaves_a_stage_file_at_most(medium: LocalMedium, at: str) -> None:
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
    storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", _failing(code))
    assert storage.create("data_id=a/1.arrow", b"one", staging=WRITER) is True
    assert storage.create("data_id=a/1.arrow", b"two", staging=WRITER) is False
    assert medium.get("data_id=a/1.arrow") == b"one"
    assert medium.objects() == {"data_id=a/1.arrow"}


@pytest.mark.parametrize("code", [errno.EINVAL, None])
def test_without_either_it_says_so(
    storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, code: int | None
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


def test_only_the_format_makes_the_root(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    storage = open_storage(root)
    with pytest.raises(ObjectNotFoundError, match="still mounted"):
        storage.create("data_id=a/1.arrow", b"x", staging=WRITER)
    assert not root.parent.exists()
    assert storage.create(FORMAT_PATH, b"{}", staging=WRITER) is True
    assert storage.create("data_id=a/1.arrow", b"x", staging=WRITER) is True
    assert LocalMedium(root).objects() == {FORMAT_PATH, "data_id=a/1.arrow"}


@pytest.mark.parametrize("mount_point", [True, False])
def test_nothing_is_made_where_a_dataset_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount_point: bool
) -> None:
    """Not by a create that begins after it, and not by one that has staged before."""
    root = tmp_path / "ds"
    storage = open_storage(root)
    storage.create(FORMAT_PATH, b"{}", staging=WRITER)
    real = os.open

    def open_and_unmount(path: str, *args: int) -> int:
        fd = real(path, *args)
        root.rename(tmp_path / "unmounted")
        if mount_point:
            root.mkdir()
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_and_unmount)
        with pytest.raises(ObjectNotFoundError, match="still mounted"):
            storage.create("data_id=a/1.arrow", b"x", staging=WRITER)
    for path in ("data_id=a/1.arrow", "_rr/tombstones/1.json"):
        with pytest.raises(ObjectNotFoundError, match="still mounted"):
            storage.create(path, b"x", staging=WRITER)
    assert list(root.rglob("*")) == []
    assert root.exists() == mount_point


def test_a_new_root_has_durable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, call: str, code: int, way_out: str
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


def test_out_of_descriptors(storage: Storage, medium: LocalMedium) -> None:
    medium.put("o")
    with _limit(resource.RLIMIT_NOFILE, 0), pytest.raises(StorageError, match="ulimit -n"):
        storage.open("o")


def test_a_file_that_cannot_grow_is_not_published(storage: Storage, medium: LocalMedium) -> None:
    with _limit(resource.RLIMIT_FSIZE, 5000), pytest.raises(StorageError, match="File too large"):
        storage.create("data_id=a/1.arrow", [b"x" * 4096] * 3, staging=WRITER)
    assert medium.objects() == set()


@pytest.mark.parametrize("call", ["scandir", "unlink", "rmdir"])
def test_other_failing_calls(storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
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
    storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium.put("o", b"abc")
    with storage.open("o") as source:
        monkeypatch.setattr(os, "pread", _failing(errno.ESTALE))
        with pytest.raises(ObjectNotFoundError):
            source.read(0, 1)


def test_an_open_file_outlives_its_name(storage: Storage, medium: LocalMedium) -> None:
    medium.put("o", b"abc")
    with storage.open("o") as source:
        medium.drop("o")
        assert source.tail(10) == b"abc"
    source.close()


def test_removes_empty_directories_upwards(storage: Storage, medium: LocalMedium) -> None:
    (medium.root / "data_id=a/gen_id=1").mkdir(parents=True)
    (medium.root / "data_id=b/gen_id=1").mkdir(parents=True)
    medium.put("data_id=b/gen_id=2/1.arrow")
    medium.put("data_id=c/.nfs000000000001", b"")
    storage.remove_empty_dirs("data_id=a/gen_id=1/gone")
    storage.remove_empty_dirs("data_id=b/gen_id=1")
    storage.remove_empty_dirs("data_id=c")
    assert medium.names() == ["_rr", "data_id=b", "data_id=c"]
    assert medium.names("data_id=b") == ["gen_id=2"]
    medium.drop("data_id=b/gen_id=2/1.arrow")
    medium.drop("data_id=c/.nfs000000000001")
    storage.remove_empty_dirs("data_id=b/gen_id=2")
    storage.remove_empty_dirs("data_id=c")
    assert medium.names() == ["_rr"]


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY])
def test_a_directory_in_use_stays(
    storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (medium.root / "d/e").mkdir(parents=True)
    monkeypatch.setattr(os, "rmdir", _failing(code))
    storage.remove_empty_dirs("d/e")


def test_a_directory_that_cannot_be_synced_is_passed(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _failing(errno.EINVAL))
        storage.sync_dirs([""])
    monkeypatch.setattr(os, "fsync", _failing(errno.EIO))
    with pytest.raises(StorageError):
        storage.sync_dirs([""])


def test_links_and_other_files_are_no_objects(storage: Storage, medium: LocalMedium) -> None:
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
def test_short_reads_go_on(tmp_path_factory: pytest.TempPathFactory, data: bytes, runs: list, cut: int) -> None:
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


def test_short_writes_go_on(storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, buffers: real(fd, [next(b for b in buffers if b.nbytes)[:7]]))
    storage.create("o", [b"0123456789", b"", b"abcdefghijklmnopqrstuvwxyz"], staging=WRITER)
    assert medium.get("o") == b"0123456789abcdefghijklmnopqrstuvwxyz"


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


def test_a_link_or_a_pipe_is_listed_apart_and_not_opened(tmp_path: Path) -> None:
    (tmp_path / "d" / "dir").mkdir(parents=True)
    (tmp_path / "d" / "file").write_bytes(b"x")
    (tmp_path / "d" / "link").symlink_to(tmp_path / "d" / "file")
    os.mkfifo(tmp_path / "d" / "pipe")
    storage = LocalStorage(str(tmp_path))
    assert sorted(storage.list_others("d")) == ["link", "pipe"]
    assert [entry.name for entry in storage.list("d")] == ["file"]
    assert storage.list_others("none") == []
    before = len([*Path("/proc/self/fd").iterdir()])
    for name in ("link", "pipe"):
        with pytest.raises(StorageError, match=f"it is .*d/{name}"):
            storage.open(f"d/{name}")
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("path", ["data_id=a/1.arrow", "data_id=a/gen_id=1/1.arrow"])
@pytest.mark.parametrize("other", [None, "data_id=a/2.arrow", "data_id=a/gen_id=1/2.arrow"])
def test_a_directory_that_never_stays_empty_comes_filled(
    storage: Storage, medium: LocalMedium, monkeypatch: pytest.MonkeyPatch, path: str, other: str | None
) -> None:
    if other is not None:
        medium.put(other)
    mkdir = os.mkdir

    def lost(target: str, *args: object) -> None:  # a deleter is always a step ahead
        mkdir(target)
        if "data_id" in target and "_rr" not in target:
            Path(target).rmdir()

    monkeypatch.setattr(os, "mkdir", lost)
    assert storage.create(path, b"x", staging=WRITER) is True
    assert storage.create(path, b"y", staging=WRITER) is False
    assert medium.get(path) == b"x"
    assert medium.objects() == {path} | ({other} if other else set())
    assert medium.names(f"_rr/tmp/{WRITER}") == []
