"""Hosts that give little: small shared memory, full and read-only file systems, no permission, few descriptors."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

from rr_dataset.options import MIB
from tests.engines import Engine, spools, stored_rows

# ---- small file systems, in a mount namespace of the engine's own

UNSHARE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "--mount", "--map-root-user"]


@functools.cache
def may_mount() -> bool:
    try:
        return (
            subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode == 0
        )
    except FileNotFoundError:
        return False


def mounting(**sizes: str) -> list[str]:
    """A prefix that mounts a tmpfs of that size over each folder, for the engine and its children only."""
    if not may_mount():
        pytest.skip("mounting in a namespace of one's own is not permitted here")
    mounts = " && ".join(f"mount -t tmpfs -o size={size} tmpfs {folder}" for folder, size in sizes.items())
    return [*UNSHARE, "sh", "-c", f'{mounts} && exec "$@"', "sh"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ds"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "spools"
    folder.mkdir()
    return folder


USE = """
def use(**more):
    with rr.RoutingWriter(root, rr.WriterOptions(**more), create=SPEC) as writer:
        for i in range(20):
            writer.put(f"a:{i}", experts(i), "LTK")
        writer.flush()
        print(writer.stats().spool_dir, flush=True)
"""


@pytest.mark.parametrize(("size", "spool_mib", "fits"), [("64m", 4, True), ("64m", 8, False), ("1m", 4, False)])
def test_shared_memory_is_used_up_to_an_eighth_and_then_the_temporary_folder(
    root: Path, place: Path, size: str, spool_mib: int, fits: bool
) -> None:
    code = USE + f"use(spool_bytes={spool_mib * MIB}, slab_bytes={MIB}); print(os.listdir('/dev/shm'))"
    prefix = mounting(**{"/dev/shm": size})
    with Engine(code, root, place, prefix=prefix, env={**os.environ, "TMPDIR": str(place)}) as engine:
        used = engine.line()
        assert used.startswith("/dev/shm/" if fits else f"{place}/")
        assert engine.line() == "[]", "nothing is left in shared memory"
        code, said = engine.end()
        assert code == 0
        assert ("the spool goes to" in said) != fits
    assert stored_rows(root).total() == 20
    assert spools(place) == []


FAIL = """
import rr_dataset.supervisor, subprocess
subprocess.Popen = None  # it fails before a worker is started
def fails(**more):
    try:
        rr.RoutingWriter(root, rr.WriterOptions(**more), create=SPEC)
    except rr.SpoolUnavailableError as error:
        print(error, flush=True)
"""


def test_no_room_anywhere_is_a_clear_error_at_once(root: Path, place: Path) -> None:
    prefix = mounting(**{"/dev/shm": "1m", str(place): "1m"})
    code = FAIL + "fails(); fails(spool_dir='/dev/shm'); print(os.listdir('/dev/shm'), os.listdir(spool_dir))"
    with Engine(code, root, place, prefix=prefix, env={**os.environ, "TMPDIR": str(place)}) as engine:
        both, one = engine.line(), engine.line()
        assert f"/dev/shm: room for 131072 bytes; {place}: room for 1048576 bytes" in both
        assert "give spool_dir= or a smaller spool_bytes=" in both
        assert "no room for a spool of 536870912 bytes (/dev/shm: room for 1048576 bytes)" in one
        assert engine.line() == "[] []"
        assert engine.end() == (0, "")
    assert not root.exists()


def test_room_that_somebody_else_takes_meanwhile_is_an_error_and_no_bus_error(root: Path, place: Path) -> None:
    code = """
import rr_dataset.spool_place
rr_dataset.spool_place._problem = lambda *_, **__: None  # there was room when it looked
try:
    rr.RoutingWriter(root, options("/dev/shm"), create=SPEC)
except rr.SpoolUnavailableError as error:
    print(error)
print([name for name in os.listdir("/dev/shm") if name != "ballast"])
"""
    with Engine(code, root, place, prefix=mounting(**{"/dev/shm": "3m"})) as engine:
        assert "No space left on device; give spool_dir= or a smaller spool_bytes=" in engine.line()
        assert engine.line() == "[]"
        assert engine.end() == (0, "")


FILL = """
def fill(folder):
    with open(folder / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
"""


def test_shared_memory_that_others_fill_costs_large_records_at_most(root: Path, place: Path) -> None:
    code = (
        FILL
        + """
with rr.RoutingWriter(root, options("/dev/shm", on_full="raise"), create=SPEC) as writer:
    fill(Path("/dev/shm"))
    for i in range(10):
        writer.put(f"a:{i}", experts(i, 200_000 if i % 2 else 20), "LTK").wait()  # 1.6 MB: more than a slab
    print(writer.flush().records)
print([name for name in os.listdir("/dev/shm") if name != "ballast"])
"""
    )
    with Engine(code, root, place, prefix=mounting(**{"/dev/shm": "8m"})) as engine:
        assert engine.line() == "10"
        assert engine.line() == "[]"
        assert engine.end() == (0, "")
    assert stored_rows(root) == {f"a:{i}": 1 for i in range(10)}


STORED = """
import json
from tests.engines import stored_rows
def tell(*values):
    print(json.dumps(values), flush=True)
def flush_fails():
    try:
        writer.flush(timeout_s=0.3)
    except rr.FlushTimeoutError as error:
        return type(error.__cause__).__name__, str(error)
"""


def test_a_full_disk_that_later_has_room(root: Path, place: Path) -> None:
    root.mkdir()
    code = (
        STORED
        + FILL
        + """
with rr.RoutingWriter(root, options(spool_dir), create=SPEC) as writer:
    writer.put("a:0", experts(0), "LTK").wait()
    fill(root)
    receipts = [writer.put(f"{'abc'[i % 3]}:{i}", experts(i, 5000), "LTK") for i in range(1, 40)]
    tell(*flush_fails())
    tell(writer.stats().accepted, writer.stats().durable, writer.stats().worker_restarts)
    (root / "ballast").unlink()
    tell(writer.flush().records, all(receipt.durable() for receipt in receipts), writer.stats().last_error)
    tell(stored_rows(root))
    tell([path.name for path in (root / "_rr/tmp").rglob("*") if path.is_file()])
"""
    )
    with Engine(code, root, place, prefix=mounting(**{str(root): "8m"})) as engine:
        cause, text = json.loads(engine.line())
        assert cause == "StorageError"
        assert "free space there, or delete prefixes" in text
        accepted, durable, restarts = json.loads(engine.line())
        assert (accepted, restarts) == (40, 0)
        assert 1 <= durable < 40
        assert json.loads(engine.line()) == [39 + 1, True, None]
        assert json.loads(engine.line()) == [{"a:0": 1, **{f"{'abc'[i % 3]}:{i}": 1 for i in range(1, 40)}}]
        assert json.loads(engine.line()) == [[]], "no stage file stays behind"
        assert engine.end() == (0, "")
    assert spools(place) == []


def test_a_read_only_mount(root: Path, place: Path, tmp_path: Path) -> None:
    root.mkdir()
    code = (
        STORED
        + """
import subprocess
def remount(how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(root)], check=True)
remount("ro")
try:
    rr.RoutingWriter(root, options(spool_dir), create=SPEC)
except rr.StorageError as error:
    tell(str(error))
try:
    rr.RoutingWriter(root, options(root), create=SPEC)
except rr.SpoolUnavailableError as error:
    tell(str(error))
remount("rw")
with rr.RoutingWriter(root, options(spool_dir), create=SPEC) as writer:
    remount("ro")
    receipt = writer.put("a:1", experts(1), "LTK")
    tell(*flush_fails())
    remount("rw")
    receipt.wait()
    tell(stored_rows(root))
"""
    )
    with Engine(code, root, place, prefix=mounting(**{str(root): "8m"})) as engine:
        assert "Read-only file system; remount it for writing" in engine.line()
        assert f"{root}: not writable" in engine.line()
        cause, text = json.loads(engine.line())
        assert cause == "StorageError"
        assert "Read-only file system; remount it for writing" in text
        assert json.loads(engine.line()) == [{"a:1": 1}]
        assert engine.end() == (0, "")
    assert spools(place) == []


# ---- permissions: root has to give up its powers first

PLAIN = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if os.getuid() == 0 else []


@functools.cache
def is_plain() -> bool:
    try:
        return subprocess.run([*PLAIN, "test", "-w", "/proc/1/oom_adj"], capture_output=True).returncode in {0, 1}
    except FileNotFoundError:
        return False


def test_without_permission(root: Path, place: Path) -> None:
    if not is_plain():
        pytest.skip("root cannot give up its powers here")
    code = (
        STORED
        + """
with rr.RoutingWriter(root, options(spool_dir), create=SPEC) as writer:
    writer.put("a:0", experts(0), "LTK").wait()
    (root / "data_id=a").chmod(0o500)
    receipts = [writer.put(f"{'ab'[i % 2]}:{i}", experts(i), "LTK") for i in range(1, 5)]
    tell(*flush_fails())
    (root / "data_id=a").chmod(0o700)
    tell(writer.flush().records, all(receipt.durable() for receipt in receipts))
spool_dir.chmod(0o500)
for place in (spool_dir, spool_dir / "nowhere"):
    try:
        rr.RoutingWriter(root, options(place))
    except rr.SpoolUnavailableError as error:
        tell(str(error))
spool_dir.chmod(0o700)
(root / "_rr/format.json").chmod(0)
try:
    rr.RoutingWriter(root, options(spool_dir))
except rr.StorageError as error:
    tell(str(error))
"""
    )
    with Engine(code, root, place, prefix=PLAIN) as engine:
        cause, text = json.loads(engine.line())
        assert cause == "StorageError"
        assert "Permission denied; check the owner and mode of its directory" in text
        assert json.loads(engine.line()) == [5, True]
        assert f"{place}: not writable" in engine.line()
        assert f"{place}/nowhere: No such file or directory" in engine.line()
        assert "Permission denied" in engine.line()
        assert engine.end() == (0, "")
    assert stored_rows(root).total() == 5
    assert spools(place) == []


# ---- descriptors


def descriptors(limit: int) -> list[str]:
    return ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"]


def test_64_descriptors_are_enough_for_engine_and_worker(root: Path, place: Path) -> None:
    code = (
        STORED
        + """
import signal
with rr.RoutingWriter(root, options(spool_dir), create=SPEC) as writer:
    for i in range(300):
        writer.put(f"d{i % 100}:{i}", experts(i), "LTK")
        if i == 150:
            os.kill(writer.stats().worker_pid, signal.SIGKILL)
    tell(writer.flush().records, writer.stats().worker_restarts)
"""
    )
    with Engine(code, root, place, prefix=descriptors(64)) as engine:
        assert json.loads(engine.line()) == [300, 1]
        assert engine.end() == (0, "")
    assert stored_rows(root) == {f"d{i % 100}:{i}": 1 for i in range(300)}
    assert spools(place) == []


def test_more_slabs_than_descriptors_says_how_to_get_more(root: Path, place: Path) -> None:
    code = """
try:
    rr.RoutingWriter(root, options(spool_dir, spool_bytes=100 << 20), create=SPEC)
except rr.SpoolUnavailableError as error:
    print(error)
"""
    with Engine(code, root, place, prefix=descriptors(64)) as engine:
        assert (
            "Too many open files; raise the limit of open files (ulimit -n) or a smaller spool_bytes=" in engine.line()
        )
        assert engine.end() == (0, "")
    assert spools(place) == []


def test_an_engine_without_descriptors_gets_its_worker_once_it_has_some(root: Path, place: Path) -> None:
    code = (
        STORED
        + """
import signal
from tests.engines import until
writer, record = rr.RoutingWriter(root, options(spool_dir), create=SPEC), experts(1)
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
pid = writer.stats().worker_pid
os.kill(pid, signal.SIGKILL)
receipt = writer.put("a:1", record, "LTK")
until(lambda: "cannot be started" in (writer.stats().last_error or ""), "a start fails")
for fd in taken:
    os.close(fd)
receipt.wait()
tell(writer.stats().last_error, writer.stats().worker_pid != pid)
writer.close()
"""
    )
    with Engine(code, root, place, prefix=descriptors(64)) as engine:
        assert json.loads(engine.line()) == [None, True]
        assert engine.end() == (0, "")
    assert stored_rows(root) == {"a:1": 1}
    assert spools(place) == []
