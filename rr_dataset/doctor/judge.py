"""What to make of what a probe saw: pure, one function a check."""

from __future__ import annotations

import errno
import os
import re
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from rr_dataset.errors import DatasetNotFoundError, RoutingDatasetError, StorageError
from rr_dataset.layout import DatasetFormat
from rr_dataset.options import MIB, WriterOptions
from rr_dataset.spool_place import CONTROL_BYTES, CONTROL_SLABS, SHM_SHARE

Level = Literal["ok", "warn", "fail"]
Verdict = tuple[Level, str, str]

HOSTS_SKEW_S = 1.0  # what to allow where no dataset says it: hosts that keep time by NTP
SPOOL_BYTES = WriterOptions.spool_bytes + CONTROL_SLABS * CONTROL_BYTES
MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs"))
LOCAL_FUSE = frozenset(("fuse.fuse-overlayfs", "fuse.mergerfs"))
SHARED = frozenset(
    (
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "virtiofs", "afs", "glusterfs"),
        *("wekafs", "panfs", "orangefs", "pvfs2", "ocfs2", "gfs2", "fuse"),
    )
)


@dataclass(frozen=True)
class Finding:
    """One line of a doctor's report: what was seen, and the way out where it is not "ok"."""

    check: str
    level: Level
    seen: str
    way_out: str = ""


class Mount(NamedTuple):
    """One line of mountinfo: where it is, the kind of file system, and which folder of that it shows."""

    point: str
    kind: str
    root: str = "/"

    @property
    def shared(self) -> bool:
        """Whether other hosts may write there too."""
        return self.kind in SHARED or (self.kind.startswith("fuse.") and self.kind not in LOCAL_FUSE)


class HeldSpool(NamedTuple):
    """A writer's folder: bytes of its slabs, and whether its engine or worker lives."""

    path: Path
    size: int
    alive: bool


def ok(seen: str) -> Verdict:
    """As it should be."""
    return "ok", seen, ""


def warn(seen: str, way_out: str) -> Verdict:
    """It works, with less room, speed or safety than it could."""
    return "warn", seen, way_out


def fail(seen: str, way_out: str) -> Verdict:
    """It does not work, or breaks a promise."""
    return "fail", seen, way_out


def broken(error: Exception) -> Verdict:
    """A check raised what it does not expect."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return fail(f"the check broke: {text}", "if that is not of this host, report it as a fault of rr_dataset")


def versions(have: Mapping[str, str | None], requirements: Iterable[str]) -> Verdict:
    """have: name to version, None if missing. requirements: those of the installed rr_dataset."""
    seen = ", ".join(f"{name} {version or 'missing'}" for name, version in have.items())
    short = [f"'{name}>={least}'" for name, least in minimums(requirements) if _number(have.get(name)) < _number(least)]
    return fail(seen, f"needed are {' '.join(short)}: pip install them") if short else ok(seen)


def minimums(requirements: Iterable[str]) -> Iterator[tuple[str, str]]:
    """`numpy>=1.26` -> ("numpy", "1.26"); extras and other forms are passed over."""
    for requirement in requirements:
        if match := re.fullmatch(r"([\w.-]+) ?\(?>=([\d.]+)\)?", requirement):
            yield match[1], match[2]


def _number(version: str | None) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version or "")))


def descriptors(limit: int, used: int) -> Verdict:
    """limit: RLIMIT_NOFILE of a process."""
    if limit == resource.RLIM_INFINITY:
        return ok(f"{used} files open, no limit")
    seen, way_out = f"{used} of at most {limit} files open", "raise the limit: ulimit -n 4096"
    return ok(seen) if limit >= 1024 else warn(seen, way_out) if limit >= used + 48 else fail(seen, way_out)


def shared_memory(mount: Mount, room: os.statvfs_result, held: int, *, wanted: bool) -> Verdict:
    """held: bytes of all spools there. wanted: whether a spool is to go there."""
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    share = total // SHM_SHARE
    seen = f"{mount.kind} of {shown(total)}, {shown(free)} free; spools may take {shown(share)}, hold {shown(held)}"
    if not wanted:
        return ok(f"{seen}; not asked for")
    if mount.kind not in MEMORY:
        return warn(f"{seen}; no memory", "mount a tmpfs on /dev/shm, or give spool_dir=")
    if min(free, share - held) < SPOOL_BYTES:
        more = f"make it {shown(SHM_SHARE * (SPOOL_BYTES + held))} (docker --shm-size, an emptyDir of medium Memory)"
        return warn(f"{seen}; {shown(SPOOL_BYTES)} more do not fit", f"{more}, free what fills it, or give spool_dir=")
    return ok(seen)


def spools(held: Iterable[HeldSpool]) -> Verdict:
    """What living writers hold, and what dead ones left."""
    found = list(held)
    dead = [spool for spool in found if not spool.alive]
    living = f"{len(found) - len(dead)} living hold {shown(sum(spool.size for spool in found if spool.alive))}"
    if not dead:
        return ok(f"{living}, none is dead")
    seen = f"{living}, {len(dead)} dead hold {shown(sum(spool.size for spool in dead))}, such as {dead[0].path}"
    return warn(seen, "the next writer of the same dataset publishes what is in them, or `rr-dataset recover` does")


def spool_place(base: Path, mount: Mount, *, pod: bool) -> Verdict:
    """What unpublished records survive there besides the death of engine and worker. pod: this is a container."""
    seen = f"{base} on {mount.kind}"
    if mount.shared:
        return fail(f"{seen}, which hosts share", "give spool_dir= on a file system of this host alone")
    memory = mount.kind in MEMORY
    if pod and (memory or mount.kind == "overlay" or "empty-dir" in mount.root):
        end = "container" if mount.kind == "overlay" else "pod"
        return warn(
            f"{seen}, dies with its {end}", "if unpublished records must not, give spool_dir= on a lasting disk"
        )
    return ok(f"{seen}, {'dies with the host' if memory else 'outlives the host as far as it was synced'}")


def dataset(found: DatasetFormat | Exception, place: Path | str) -> Verdict:
    """found: what reading its format gave. place: what is checked for it if there is none."""
    if isinstance(found, DatasetNotFoundError):
        return warn(f"none here yet, {place} is checked for it", "check the address, or create it")
    if isinstance(found, StorageError):
        return fail(str(found), "check owner, mode and mount of its folders")
    if isinstance(found, RoutingDatasetError):
        return fail(str(found), "read it with the version that wrote it, or repair or restore _rr/format.json")
    if isinstance(found, Exception):
        raise found
    spec, ids = found.spec, ":".join(found.keys.components)
    shape = f"{len(spec.moe_layers)} layers, {spec.num_experts} experts, top-{spec.top_k}, {spec.dtype}"
    return ok(f"format {found.format_version}, {shape}, ids {ids}, clocks within {found.max_clock_skew_s:g} s")


def store_dataset(found: DatasetFormat | Exception, uri: str) -> Verdict:
    """The same in a store, which several hosts reach."""
    if isinstance(found, DatasetFormat) and not found.max_clock_skew_s:
        return warn(
            f"format {found.format_version}, but the clocks of its hosts may not differ: max_clock_skew_s is 0, and a delete "
            "may miss puts of a host whose clock is ahead",
            f"use it from one host, or make another with max_clock_skew_s={HOSTS_SKEW_S} "
            f"(`rr-dataset create --max-clock-skew {HOSTS_SKEW_S:g}`)",
        )
    return dataset(found, uri)


def find_mount(mountinfo: str, path: str) -> Mount:
    """The mount that holds `path` (absolute, resolved): the deepest, of those on one point the last."""
    found = Mount("", "unknown")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), f) for f in left.split(" ")[3:5])
        if len(point) >= len(found.point) and f"{path}/".startswith(f"{point.rstrip('/')}/"):
            found = Mount(point, right.split(" ")[0], root)
    return found


def file_system(folder: Path, mount: Mount, skew_s: float | None) -> Verdict:
    """skew_s: `max_clock_skew_s` of the dataset, None if there is none yet."""
    seen = f"{folder} on {mount.kind}, mounted at {mount.point}"
    if mount.shared:
        seen += ", which hosts share"
        how = f"max_clock_skew_s={HOSTS_SKEW_S} (`rr-dataset create --max-clock-skew {HOSTS_SKEW_S:g}`)"
        if skew_s is None:
            return warn(seen, f"create it with {how}")
        if not skew_s:
            return fail(f"{seen}, but their clocks may not differ: max_clock_skew_s is 0", f"make another with {how}")
        return ok(f"{seen}: they list new files when their caches let them")
    if mount.kind in MEMORY or mount.kind == "overlay":
        end = "host" if mount.kind in MEMORY else "container"
        return warn(f"{seen}, dies with its {end}", "put the dataset on a lasting disk")
    return ok(seen)


def space(folder: Path, room: os.statvfs_result) -> Verdict:
    """Bytes and inodes that are left to this user."""
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    inodes = room.f_favail if room.f_files else None  # some file systems count none
    count = "no limit of" if inodes is None else f"{inodes:,}"
    seen = f"{folder} has {shown(free)} of {shown(total)} free, {count} inodes"
    if free < WriterOptions.slab_bytes or (inodes is not None and inodes < 1000):
        return fail(seen, "free space there, or delete prefixes")
    if free < max(total // 20, 2 * WriterOptions.spool_bytes) or (inodes is not None and inodes < 100_000):
        limits = "one made with max_bytes= or ttl_s= (`rr-dataset create --max-bytes --ttl`) is kept small by maintain"
        return warn(seen, f"free space there, or delete prefixes; a record may be a file of its own; {limits}")
    return ok(seen)


def unwritable(folder: Path, error: OSError, *, exists: bool) -> Verdict:
    """Why our files could not be made there, or not removed. exists: there is a dataset, so it may be read."""
    seen = f"{folder}: {error.strerror or error}"
    if exists and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return warn(
            f"{seen}; nothing that writes is checked", "enough to read; a writer needs another owner, mode or mount"
        )
    return fail(seen, "check owner, mode, mount and space of this folder")


def unwritable_store(what: str, way_out: str, *, exists: bool, denied: bool) -> Verdict:
    """Why no object could be made. exists: there is a dataset, so it may be read. denied: by the key's rights."""
    if exists and denied:
        return warn(f"{what}; nothing that writes is checked", f"enough to read; to write, {way_out}")
    return fail(what, way_out)


def store_rate(small_s: float, bytes_per_s: float) -> Verdict:
    """Seconds of a small object, and bytes of a large one, of one connection each."""
    seen = f"a small object in {small_s * 1000:,.0f} ms, a large one at {shown(bytes_per_s)}/s"
    if small_s > 0.5 or bytes_per_s < 10 * MIB:
        return warn(seen, "take a store in this region, or a larger spool_bytes= to bridge bursts")
    return ok(seen)


def sync_rate(files_per_s: float, bytes_per_s: float) -> Verdict:
    """Small files synced one by one, and bytes of a large one: what publishing can reach."""
    seen = f"{files_per_s:,.0f} small files/s, {shown(bytes_per_s)}/s"
    if files_per_s < 20 or bytes_per_s < 50 * MIB:
        return warn(seen, "take a faster disk, or a larger spool_bytes= to bridge bursts")
    return ok(seen)


def clock(
    wall_s: float, ahead_s: float, stepped_s: float, skew_s: float | None, of: str = "the file system"
) -> Verdict:
    """wall_s: Unix time. ahead_s: of the clock of what stores. stepped_s: of the wall clock, while the checks ran."""
    allowed_s = HOSTS_SKEW_S if skew_s is None else skew_s
    seen = f"{time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime(wall_s))}, that of {of} {ahead_s:+.2f} s"
    way_out = "keep time by NTP or chrony on every host"
    if wall_s < 1.7e9 or abs(ahead_s) > allowed_s:
        return fail(f"{seen}; allowed are {allowed_s:g} s", way_out)
    if abs(stepped_s) > 0.1:
        return warn(f"{seen}; it stepped by {stepped_s:+.2f} s while the checks ran", way_out)
    return ok(seen)


def shown(size: float) -> str:
    """Bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
