"""What a doctor makes of facts: every line's ok, warn and fail."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rr_dataset.doctor import judge
from rr_dataset.doctor.judge import Mount
from rr_dataset.errors import DatasetNotFoundError, FormatError, StorageError
from rr_dataset.options import MIB

GB = 10**9


def room(free: int, total: int, *, inodes: int = 1_000_000, counted: bool = True) -> Any:
    return SimpleNamespace(f_frsize=1, f_bavail=free, f_blocks=total, f_files=counted and 2_000_000, f_favail=inodes)


@pytest.mark.parametrize(
    ("numpy", "pyarrow", "level", "said"),
    [
        ("1.26", "21.0.1rc2", "ok", ""),
        ("1.26.4", "100", "ok", ""),
        ("1.9", "21", "fail", "'numpy>=1.26'"),
        ("2.0", None, "fail", "'pyarrow>=21'"),
    ],
)
def test_versions(numpy: str, pyarrow: str | None, level: str, said: str) -> None:
    needs = ["python>=3.10", "numpy>=1.26", "pyarrow (>=21)", "s3fs>=9999; extra == 's3'"]
    verdict = judge.versions({"python": "3.10.0", "numpy": numpy, "pyarrow": pyarrow}, needs)
    assert verdict[0] == level
    assert said in verdict[2]
    assert f"numpy {numpy}, pyarrow {pyarrow or 'missing'}" in verdict[1]


@pytest.mark.parametrize(
    ("limit", "used", "level"),
    [(1024, 9, "ok"), (resource.RLIM_INFINITY, 9, "ok"), (1023, 9, "warn"), (64, 16, "warn"), (64, 17, "fail")],
)
def test_descriptors(limit: int, used: int, level: str) -> None:
    assert judge.descriptors(limit, used)[0] == level


MOUNTS = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:30 / /data rw - xfs /dev/sdb rw
31 27 0:31 / /data rw shared:7 master:2 - nfs4 server:/x rw,vers=4.2
32 31 0:32 /pods/9/volumes/kubernetes.io~empty-dir/a /data/with\040space rw - ext4 /dev/sdc rw
"""


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/", "/", "ext4"),
        ("/database", "/", "ext4"),
        ("/data", "/data", "nfs4"),
        ("/data/a/b", "/data", "nfs4"),
        ("/data/with space/x", "/data/with space", "ext4"),
        ("/data/with", "/data", "nfs4"),
    ],
)
def test_find_mount(path: str, point: str, kind: str) -> None:
    found = judge.find_mount(MOUNTS.strip(), path)
    assert (found.point, found.kind) == (point, kind)
    assert ("empty-dir" in found.root) == ("space" in point)


def test_without_mounts_the_kind_is_unknown() -> None:
    assert judge.find_mount("", "/data").kind == "unknown"


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        *(("nfs", True), ("lustre", True), ("fuse", True), ("fuse.juicefs", True)),
        *(("ext4", False), ("tmpfs", False), ("fuseblk", False), ("fuse.fuse-overlayfs", False)),
    ],
)
def test_shared_kinds(kind: str, shared: bool) -> None:
    assert Mount("/", kind).shared == shared


@pytest.mark.parametrize(
    ("kind", "total", "free", "held", "level", "said"),
    [
        ("tmpfs", 8 * GB, 8 * GB, 0, "ok", "may take 1.0 GB"),
        ("tmpfs", 8 * GB, GB // 4, 0, "warn", "539 MB more do not fit"),
        ("tmpfs", 8 * GB, 8 * GB, GB // 2, "warn", "hold 500 MB"),
        ("tmpfs", 64 * MIB, 64 * MIB, 0, "warn", "--shm-size"),
        ("ext4", 99 * GB, 99 * GB, 0, "warn", "no memory"),
    ],
)
def test_shared_memory(kind: str, total: int, free: int, held: int, level: str, said: str) -> None:
    verdict = judge.shared_memory(Mount("/dev/shm", kind), room(free, total), held, wanted=True)
    assert verdict[0] == level
    assert said in " ".join(verdict)
    assert judge.shared_memory(Mount("/dev/shm", kind), room(free, total), held, wanted=False)[0] == "ok"


def test_the_size_that_is_said_is_enough() -> None:
    held = GB
    total = judge.SHM_SHARE * (judge.SPOOL_BYTES + held)
    mount = Mount("/dev/shm", "tmpfs")
    assert judge.shared_memory(mount, room(total, total), held, wanted=True)[0] == "ok"
    assert judge.shown(total) in judge.shared_memory(mount, room(total, total - 8), held, wanted=True)[2]


@pytest.mark.parametrize(
    ("mount", "pod", "level", "said"),
    [
        (Mount("/dev/shm", "tmpfs"), False, "ok", "dies with the host"),
        (Mount("/dev/shm", "tmpfs"), True, "warn", "dies with its pod"),
        (Mount("/", "overlay"), True, "warn", "dies with its container"),
        (Mount("/scratch", "ext4", "/x/kubernetes.io~empty-dir/y"), True, "warn", "dies with its pod"),
        (Mount("/scratch", "ext4"), True, "ok", "outlives the host"),
        (Mount("/home", "nfs4"), False, "fail", "hosts share"),
    ],
)
def test_what_a_spool_survives(mount: Mount, pod: bool, level: str, said: str) -> None:
    verdict = judge.spool_place(Path(mount.point), mount, pod=pod)
    assert (verdict[0], said in verdict[1]) == (level, True)


def test_errors_of_the_format() -> None:
    assert judge.dataset(DatasetNotFoundError("x"), Path("/d"))[0] == "warn"
    assert judge.dataset(FormatError("x"), Path("/d"))[:2] == ("fail", "x")
    assert judge.dataset(StorageError("x"), Path("/d")) == ("fail", "x", "check owner, mode and mount of its folders")


@pytest.mark.parametrize(
    ("kind", "skew_s", "level", "said"),
    [
        ("ext4", 0.0, "ok", ""),
        ("ext4", None, "ok", ""),
        ("nfs4", 0.0, "fail", "`rr-dataset create --max-clock-skew 1`"),
        ("nfs4", None, "warn", "max_clock_skew_s=1.0"),
        ("nfs4", 0.5, "ok", "hosts share"),
        ("fuse.juicefs", 0.0, "fail", "max_clock_skew_s is 0"),
        ("tmpfs", 0.0, "warn", "dies with its host"),
        ("overlay", 0.0, "warn", "dies with its container"),
    ],
)
def test_file_systems(kind: str, skew_s: float | None, level: str, said: str) -> None:
    verdict = judge.file_system(Path("/data/ds"), Mount("/data", kind), skew_s)
    assert (verdict[0], said in " ".join(verdict)) == (level, True)


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        (room(90 * GB, 100 * GB), "ok"),
        (room(90 * GB, 100 * GB, inodes=0, counted=False), "ok"),
        (room(4 * GB, 100 * GB), "warn"),
        (room(GB, 2 * GB), "warn"),
        (room(90 * GB, 100 * GB, inodes=99_999), "warn"),
        (room(64 * MIB - 1, 100 * GB), "fail"),
        (room(90 * GB, 100 * GB, inodes=999), "fail"),
    ],
)
def test_space(facts: Any, level: str) -> None:
    verdict = judge.space(Path("/d"), facts)
    assert (verdict[0], "create --max-bytes" in verdict[2]) == (level, level == "warn")


@pytest.mark.parametrize(("files", "size", "level"), [(20, 50 * MIB, "ok"), (19, GB, "warn"), (9e3, 49 * MIB, "warn")])
def test_sync_rates(files: float, size: float, level: str) -> None:
    assert judge.sync_rate(files, size)[0] == level


@pytest.mark.parametrize(
    ("wall_s", "ahead_s", "stepped_s", "skew_s", "level"),
    [
        (1.8e9, 0.0, 0.0, 0.0, "ok"),
        (1.8e9, -0.9, 0.0, 1.0, "ok"),
        (1.8e9, 0.9, 0.0, None, "ok"),
        (1.8e9, 0.9, 0.0, 0.0, "fail"),
        (1.8e9, -1.1, 0.0, 1.0, "fail"),
        (1.8e9, 0.0, -0.2, 0.0, "warn"),
        (1e6, 0.0, 0.0, 0.0, "fail"),
    ],
)
def test_clocks(wall_s: float, ahead_s: float, stepped_s: float, skew_s: float | None, level: str) -> None:
    assert judge.clock(wall_s, ahead_s, stepped_s, skew_s)[0] == level
