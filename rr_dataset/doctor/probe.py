"""What a doctor measures. Files are made only in folders of its own, named `SCRATCH...` and removed by who made them."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from rr_dataset import spool_place as places
from rr_dataset.doctor import judge
from rr_dataset.doctor.judge import HeldSpool, Mount, Verdict
from rr_dataset.errors import SpoolUnavailableError
from rr_dataset.options import MIB
from rr_dataset.storage.files import publish

SCRATCH = ".rr_dataset-doctor-"
SMALL_FILES, SMALL_BYTES, SMALL_S = 64, 4096, 0.5  # until one of number and seconds is reached
LARGE_BYTES, LARGE_S = 64 * MIB, 1.0  # the same
TICK_NS = 50_000_000  # file systems stamp with the time of the kernel's last tick, some with whole seconds
OTHER_PROCESS = """
import os, sys
os.chdir(sys.argv[1])
if "parent" not in os.listdir("."): sys.exit("a new file of another process is in no listing")
data = open("parent", "rb").read()
with open("part", "xb") as file: file.write(data[::-1])
os.rename("part", "child")
"""


class Clocks(NamedTuple):
    """Wall and monotonic clock at one moment, in seconds."""

    wall_s: float
    monotonic_s: float

    @classmethod
    def now(cls) -> Clocks:
        """Of this moment."""
        return cls(time.time(), time.monotonic())

    def stepped_s(self, since: Clocks) -> float:
        """By how much the wall clock went further than the monotonic one."""
        return (self.wall_s - since.wall_s) - (self.monotonic_s - since.monotonic_s)


# ---- this process and its host


def versions() -> Verdict:
    """Of Python and what rr_dataset requires."""
    about = metadata.metadata("rr-dataset")
    requirements = [f"python{about['Requires-Python']}", *(metadata.requires("rr-dataset") or ())]
    have: dict[str, str | None] = {"python": sys.version.split()[0], "rr_dataset": about["Version"]}
    for name, _ in judge.minimums(requirements[1:]):
        have[name] = None
        with suppress(metadata.PackageNotFoundError):
            have[name] = metadata.version(name)
    return judge.versions(have, requirements)


def descriptors() -> Verdict:
    """Of this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge.descriptors(limit, sum(1 for _ in Path("/proc/self/fd").iterdir()))


def mount_of(path: Path) -> Mount:
    """Where the file system of `path` is mounted, and of what kind it is."""
    return judge.find_mount(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"), os.path.realpath(path))


# ---- the spool


def held_spools(bases: Iterable[Path]) -> Iterator[HeldSpool]:
    """All that this user can see. A shared lock, held for an instant, tells the dead from the living."""
    for base in bases:
        for directory in base.glob("rr_dataset-*/*"):
            size, alive = 0, True  # without a lock it is being made or removed
            with suppress(OSError):
                size = sum(slab.stat().st_size for slab in directory.glob("*.slab"))
                fd = os.open(directory / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    alive = not _locked(fd, fcntl.LOCK_SH)
                finally:
                    os.close(fd)
            if directory.is_dir():
                yield HeldSpool(directory, size, alive)


def _locked(fd: int, kind: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    return False


def shared_memory(spool_dir: str | None) -> Verdict:
    """Room and kind of /dev/shm."""
    try:
        room = os.statvfs(places.SHM)
    except OSError as error:
        return judge.warn(f"{places.SHM}: {error.strerror}", "mount a tmpfs there, or give spool_dir=")
    held = sum(one.size for one in held_spools([places.SHM]))
    return judge.shared_memory(mount_of(places.SHM), room, held, wanted=spool_dir is None)


def spool_place(base: Path | Exception) -> Verdict:
    """base: what `choose_base` gave."""
    if isinstance(base, SpoolUnavailableError):
        return judge.fail(str(base), "make room, or give another spool_dir= or a smaller spool_bytes=")
    if isinstance(base, Exception):
        raise base
    own = places.spools_of(base)
    if own.is_symlink() or (own.exists() and own.stat().st_uid != os.getuid()):
        return judge.fail(f"{own} belongs to somebody else", "give spool_dir= of your own")
    pod = "KUBERNETES_SERVICE_HOST" in os.environ or mount_of(Path("/")).kind == "overlay"
    return judge.spool_place(base, mount_of(base), pod=pod)


def spool_locks(base: Path) -> Verdict:
    """Whether a lock keeps others out, and is free once its holder is gone."""
    way_out = "give spool_dir= on a file system that keeps flock(2) locks"
    with (
        tempfile.TemporaryDirectory(prefix=SCRATCH, dir=base) as scratch,
        (Path(scratch) / "lock").open("w") as first,
        (Path(scratch) / "lock").open("w") as second,
    ):
        try:
            if not _locked(first.fileno(), fcntl.LOCK_EX) or _locked(second.fileno(), fcntl.LOCK_EX):
                return judge.fail(f"{base} gives one lock to two holders, or to none", way_out)
            first.close()
            if not _locked(second.fileno(), fcntl.LOCK_EX):
                return judge.fail(f"{base} does not free the lock of a holder that is gone", way_out)
        except OSError as error:
            return judge.fail(f"{base}: {error.strerror}", way_out)
    return judge.ok(f"{base} keeps locks, and frees them with their holder")


# ---- the dataset's folder


def publishing(scratch: Path) -> Verdict:
    """rename(2), and giving a name without replacing."""
    stage, first, target = scratch / "stage", scratch / "first", scratch / "target"
    stage.write_bytes(b"first")
    stage.rename(first)
    stage.write_bytes(b"second")
    publish(str(first), str(target))
    with suppress(FileExistsError):
        publish(str(stage), str(target))
        return judge.fail("a name that was taken was given again", "put the dataset on another file system")
    if target.read_bytes() != b"first":
        return judge.fail("a name that was taken lost its file", "put the dataset on another file system")
    way = "link(2)" if first.exists() else "renameat2(2), as there is no link(2),"
    return judge.ok(f"rename and {way} work, a taken name is never replaced")


def sync_rate(scratch: Path) -> Verdict:
    """Small files one by one, then a large one in parts; both stop early on a slow disk."""
    room = os.statvfs(scratch)
    wanted = min(LARGE_BYTES, room.f_bavail * room.f_frsize // 8)
    data = memoryview(os.urandom(8 * MIB))
    files = written = 0
    began = time.monotonic()
    while files < SMALL_FILES and time.monotonic() < began + SMALL_S:
        with (scratch / f"small-{files}").open("xb", buffering=0) as small:
            small.write(data[:SMALL_BYTES])
            os.fsync(small)
        files += 1
    files_per_s = files / (time.monotonic() - began)
    with (scratch / "large").open("xb", buffering=0) as large:
        (scratch / "large").unlink()  # not even a kill leaves it behind
        began = time.monotonic()
        while written < wanted and time.monotonic() < began + LARGE_S:
            written += large.write(data[: wanted - written])
            os.fsync(large)
        return judge.sync_rate(files_per_s, written / (time.monotonic() - began))


def list_and_read(scratch: Path) -> Verdict:
    """Between two processes, both ways, also through a descriptor that was open before."""
    data, way_out = os.urandom(SMALL_BYTES), "put the dataset on a file system that shows at once what was made"
    folder = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        (scratch / "parent").write_bytes(data)
        other = [sys.executable, "-I", "-S", "-c", OTHER_PROCESS, str(scratch)]
        done = subprocess.run(other, capture_output=True, text=True, timeout=5, check=False)
        if done.returncode:
            return judge.fail(f"another process: {(done.stderr.splitlines() or ['killed'])[-1]}", way_out)
        if "child" not in os.listdir(folder) or scratch / "child" not in scratch.iterdir():  # noqa: PTH208 - a descriptor
            return judge.fail("a new file of another process is in no listing", way_out)
        if (scratch / "child").read_bytes() != data[::-1]:
            return judge.fail("another process reads other bytes than were written", way_out)
    finally:
        os.close(folder)
    return judge.ok("what one process of this host makes, another lists and reads at once")


def clock(scratch: Path, began: Clocks, skew_s: float | None) -> Verdict:
    """The wall clock beside the stamps of the file system, and beside the monotonic clock since `began`."""
    before = time.time_ns()
    with (scratch / "clock").open("xb", buffering=0) as file:
        file.write(b"now")
        os.fsync(file)
        stamp, after = os.fstat(file.fileno()).st_mtime_ns, time.time_ns()
    near = TICK_NS if stamp % 1_000_000_000 else 2_000_000_000
    ahead_ns = max(stamp - after - near, 0) + min(stamp - before + near, 0)
    now = Clocks.now()
    return judge.clock(now.wall_s, ahead_ns / 1e9, now.stepped_s(began), skew_s)
