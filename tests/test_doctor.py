from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rr_dataset as rr
from cli.main import main
from rr_dataset import spool_place as places
from rr_dataset.doctor import judge, nearest_folder, probe
from rr_dataset.doctor.judge import HeldSpool, Mount
from rr_dataset.layout import FORMAT_PATH, STAGING_DIR
from rr_dataset.options import MIB
from rr_dataset.spool import Spool

ROOT = Path(__file__).parents[1]
SPEC = rr.RoutingSpec(moe_layers=(1, 2), num_experts=64, top_k=4)
GB = 10**9
CHECKS = [
    "versions", "descriptors", "shared memory", "spools", "spool place", "spool locks",
    "dataset", "file system", "space", "publish", "sync rate", "list and read", "clock", "writing",
]  # fmt: skip
IN_SCRATCH = ["publish", "sync rate", "list and read", "clock"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A host of its own: shared memory, a temporary folder, and a folder for datasets."""
    host = SimpleNamespace(all=tmp_path, shm=tmp_path / "shm", tmp=tmp_path / "tmp", data=tmp_path / "data")
    for folder in (host.shm, host.tmp, host.data):
        folder.mkdir()
    monkeypatch.setattr(places, "SHM", host.shm)
    monkeypatch.setattr(tempfile, "tempdir", str(host.tmp))
    monkeypatch.setattr(probe, "LARGE_BYTES", MIB)
    monkeypatch.setattr(probe, "SMALL_FILES", 2)
    return host


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Everything under `root`: kind and mode, and what files hold."""
    found = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        found[str(path)] = (mode, path.read_bytes() if stat.S_ISREG(mode) else b"")
    return found


def by_check(findings: tuple[rr.Finding, ...]) -> dict[str, rr.Finding]:
    assert all(bool(finding.way_out) == (finding.level != "ok") for finding in findings)
    return {finding.check: finding for finding in findings}


# --- the whole


def test_a_dataset_in_order(host: SimpleNamespace) -> None:
    rr.create_dataset(host.data / "ds", SPEC)
    before = tree(host.all)
    findings = rr.doctor(host.data / "ds")
    assert [finding.check for finding in findings] == CHECKS
    assert [finding for finding in findings if finding.level == "fail"] == []
    assert tree(host.all) == before
    seen = by_check(findings)
    assert "2 layers, 64 experts, top-4, uint8, ids data_id:gen_id:turn_id:segment_id" in seen["dataset"].seen
    assert f"{host.shm} on " in seen["spool place"].seen


def test_a_dataset_still_to_be_made_is_looked_for_above(host: SimpleNamespace) -> None:
    left = host.tmp / "rr_dataset-7" / "0123456789abcdef"
    left.mkdir(parents=True)
    (left / "lock").touch()
    before = tree(host.all)
    seen = by_check(rr.doctor(f"file://{host.data}/a/b", spool_dir=host.tmp))
    assert list(seen) == CHECKS
    assert (seen["dataset"].level, seen["writing"].level) == ("warn", "ok")
    assert f"none here yet, {host.data} is checked" in seen["dataset"].seen
    assert f"{host.tmp} on " in seen["spool place"].seen
    assert f"1 dead hold 0 MB, such as {left}" in seen["spools"].seen
    assert tree(host.all) == before


def test_a_uri_that_no_store_takes(host: SimpleNamespace) -> None:
    with pytest.raises(rr.InvalidInputError, match="gopher"):
        rr.doctor("gopher://x/y")


def test_the_nearest_folder(tmp_path: Path) -> None:
    root = tmp_path / "a" / "ds"
    assert nearest_folder(root) == tmp_path
    (root / STAGING_DIR).mkdir(parents=True)
    assert nearest_folder(root) == root / STAGING_DIR
    (root / STAGING_DIR).rmdir()
    assert nearest_folder(root) == root / "_rr"


def test_a_file_in_the_place_of_a_dataset(host: SimpleNamespace) -> None:
    (host.data / "ds").write_text("mine")
    seen = by_check(rr.doctor(host.data / "ds"))
    assert list(seen) == CHECKS
    assert seen["dataset"].level == "fail"
    assert (host.data / "ds").read_text() == "mine"


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_that_takes_no_files(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, exists: bool, code: int
) -> None:
    if exists:
        rr.create_dataset(host.data / "ds", SPEC)
    make = tempfile.mkdtemp

    def mkdtemp(suffix: Any, prefix: Any, dir: Any) -> str:  # noqa: A002  # its name
        if Path(dir).is_relative_to(host.data):
            raise OSError(code, os.strerror(code), dir)
        return make(suffix, prefix, dir)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    seen = by_check(rr.doctor(host.data / "ds"))
    assert list(seen) == [check for check in CHECKS if check not in IN_SCRATCH]
    assert os.strerror(code) in seen["writing"].seen
    assert seen["writing"].level == ("warn" if exists and code != errno.ENOSPC else "fail")
    assert ("enough to read" in seen["writing"].way_out) == (seen["writing"].level == "warn")


@pytest.mark.parametrize(
    ("check", "module", "name"),
    [
        ("versions", probe, "versions"),
        ("descriptors", probe, "descriptors"),
        ("shared memory", probe, "shared_memory"),
        ("spools", judge, "spools"),
        ("spool place", probe, "spool_place"),
        ("spool place", places, "choose_base"),
        ("spool locks", probe, "spool_locks"),
        ("dataset", judge, "dataset"),
        ("dataset", sys.modules["rr_dataset.doctor"], "read_format"),
        ("file system", judge, "file_system"),
        ("space", judge, "space"),
        ("publish", probe, "publishing"),
        ("sync rate", probe, "sync_rate"),
        ("list and read", probe, "list_and_read"),
        ("clock", probe, "clock"),
    ],
)
def test_a_check_that_breaks_hides_no_other(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, check: str, module: Any, name: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by\nzero")

    rr.create_dataset(host.data / "ds", SPEC)
    before = tree(host.all)
    monkeypatch.setattr(module, name, broken)
    seen = by_check(rr.doctor(host.data / "ds"))
    assert seen[check].level == "fail"
    assert "ZeroDivisionError: by zero" in seen[check].seen
    assert [finding for finding in seen.values() if finding.level == "fail"] == [seen[check]]
    assert list(seen) == [c for c in CHECKS if c != "spool locks" or name != "choose_base"]
    assert tree(host.all) == before


# --- this process and its host


def test_versions_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    level, seen, _ = probe.versions()
    assert level == "ok"
    assert all(f"{name} " in seen for name in ("python", "rr_dataset", "numpy", "pyarrow", "fsspec", "xxhash"))
    found = probe.metadata.version

    def version(name: str) -> str:
        if name == "fsspec":
            raise probe.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(probe.metadata, "version", version)
    assert (probe.versions()[0], "fsspec missing" in probe.versions()[1]) == ("fail", True)


# --- the spool


def test_no_shared_memory(host: SimpleNamespace) -> None:
    host.shm.rmdir()
    level, seen, way_out = probe.shared_memory(None)
    assert (level, "No such file" in seen, "spool_dir=" in way_out) == ("warn", True, True)


def test_the_living_and_the_dead(host: SimpleNamespace) -> None:
    def held() -> dict[str, HeldSpool]:
        return {one.path.name: one for one in probe.held_spools([host.shm, host.tmp, host.data / "none"])}

    made = Spool(host.shm, "0123456789abcdef", spool_bytes=2 * MIB, slab_bytes=MIB, sync=False)
    made.allocate()
    size = 2 * MIB + places.CONTROL_SLABS * places.CONTROL_BYTES
    try:
        assert held() == {made.directory.name: HeldSpool(made.directory, size, alive=True)}
        assert judge.spools(held().values())[0] == "ok"
    finally:
        made.close(remove=False)
    left = tree(host.all)
    assert held() == {made.directory.name: HeldSpool(made.directory, size, alive=False)}
    level, seen, _ = judge.spools(held().values())
    assert (level, f"1 dead hold 4 MB, such as {made.directory}" in seen) == ("warn", True)
    with (made.directory / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody kept it
    assert tree(host.all) == left
    (made.directory / "lock").unlink()
    assert held()[made.directory.name].alive, "who makes or removes it is at work"


def test_a_pod_is_known_by_its_environment(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "mount_of", lambda path: Mount(str(path), "tmpfs"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert probe.spool_place(host.shm)[0] == "ok"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert probe.spool_place(host.shm)[0] == "warn"


def test_no_place_for_a_spool(host: SimpleNamespace) -> None:
    seen = by_check(rr.doctor(host.data, spool_dir=host.all / "none"))
    assert (seen["spool place"].level, "No such file" in seen["spool place"].seen) == ("fail", True)
    assert "spool locks" not in seen


def test_a_spool_folder_of_somebody_else(host: SimpleNamespace) -> None:
    places.spools_of(host.tmp).mkdir()
    assert "somebody else" not in probe.spool_place(host.tmp)[1]
    places.spools_of(host.shm).symlink_to(host.data)
    assert probe.spool_place(host.shm)[:2] == ("fail", f"{places.spools_of(host.shm)} belongs to somebody else")


def no_locks(_: Any, __: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def stuck_locks(taken: list[int]) -> Any:
    def flock(fd: int, _: int) -> None:
        taken.append(fd)
        if len(taken) > 1:
            raise BlockingIOError

    return flock


@pytest.mark.parametrize(
    ("flock", "said"),
    [(lambda *_: None, "two holders"), (no_locks, "No locks available"), (stuck_locks([]), "does not free")],
)
def test_locks_that_do_not_hold(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, flock: Any, said: str) -> None:
    assert probe.spool_locks(host.tmp)[0] == "ok"
    monkeypatch.setattr(fcntl, "flock", flock)
    level, seen, way_out = probe.spool_locks(host.tmp)
    assert (level, said in seen, "spool_dir=" in way_out) == ("fail", True, True)
    assert tree(host.tmp) == {}


# --- the dataset's folder


@pytest.mark.parametrize(
    ("change", "said"),
    [({"format_version": 99}, "reads up to 1: upgrade"), ({"keep": "some"}, "keep"), ({"format": "x"}, "does not say")],
)
def test_a_format_that_is_not_ours(host: SimpleNamespace, change: dict[str, Any], said: str) -> None:
    rr.create_dataset(host.data, SPEC)
    stored = host.data / FORMAT_PATH
    stored.write_text(json.dumps({**json.loads(stored.read_text()), **change}))
    seen = by_check(rr.doctor(host.data))
    assert (seen["dataset"].level, said in seen["dataset"].seen) == ("fail", True)
    assert seen["writing"].level == "ok"


def test_the_skew_of_the_dataset_is_what_counts(host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "mount_of", lambda _: Mount("/data", "lustre"))
    rr.create_dataset(host.data / "strict", SPEC)
    rr.create_dataset(host.data / "lax", SPEC, max_clock_skew_s=1.0)
    levels = [by_check(rr.doctor(host.data / name))["file system"].level for name in ("strict", "lax", "none")]
    assert levels == ["fail", "ok", "warn"]


def test_publishing_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert probe.publishing(tmp_path)[:2] == (
        "ok",
        "rename and renameat2(2), as there is no link(2), work, a taken name is never replaced",
    )


def replace_and_complain(stage: str, target: str) -> None:
    taken = Path(target).exists()
    Path(stage).replace(target)
    if taken:
        raise FileExistsError


@pytest.mark.parametrize(("publish", "said"), [(os.replace, "given again"), (replace_and_complain, "lost its file")])
def test_a_file_system_that_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publish: Any, said: str) -> None:
    assert probe.publishing(tmp_path)[0] == "ok"
    (tmp_path / "target").unlink()
    monkeypatch.setattr(probe, "publish", publish)
    level, seen, _ = probe.publishing(tmp_path)
    assert (level, said in seen) == ("fail", True)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The size of each file at each fsync, smalls first."""
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file.fileno()).st_size))
    return sizes  # type: ignore[return-value]


def test_what_the_sync_check_writes_is_bounded(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, synced: list[int]
) -> None:
    monkeypatch.setattr(probe, "SMALL_S", 60)
    monkeypatch.setattr(probe, "LARGE_S", 60)
    monkeypatch.setattr(probe, "LARGE_BYTES", 20 * MIB)
    probe.sync_rate(host.data)
    assert synced == [probe.SMALL_BYTES] * probe.SMALL_FILES + [8 * MIB, 16 * MIB, 20 * MIB]
    assert not (host.data / "large").exists()
    synced.clear()
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=1, f_bavail=8 * 12345))
    probe.sync_rate(host.tmp)
    assert synced[-1] == 12345


def test_a_slow_disk_is_not_waited_for(
    host: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, synced: list[int]
) -> None:
    monkeypatch.setattr(probe, "SMALL_S", 0)
    monkeypatch.setattr(probe, "LARGE_S", 0)
    assert probe.sync_rate(host.data)[0] == "warn"
    assert synced == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("import sys; sys.exit('not listed')", "another process: not listed"),
        ("import os; os.kill(os.getpid(), 9)", "killed"),
        ("", "in no listing"),
        ("import sys; open(sys.argv[1] + '/child', 'w').write('other')", "other bytes"),
        (probe.OTHER_PROCESS.replace('"parent" not in', '"nobody" not in'), "a new file of another process"),
    ],
)
def test_files_that_other_processes_do_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, said: str
) -> None:
    monkeypatch.setattr(probe, "OTHER_PROCESS", other)
    level, seen, _ = probe.list_and_read(tmp_path)
    assert (level, said in seen) == ("fail", True)


def test_a_stale_listing_of_either_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listdir = os.listdir
    with monkeypatch.context() as stale:
        stale.setattr(os, "listdir", lambda place: ["parent"] if isinstance(place, int) else listdir(place))
        assert probe.list_and_read(tmp_path)[0] == "fail"
    (tmp_path / "child").unlink()
    with monkeypatch.context() as stale:
        stale.setattr(Path, "iterdir", lambda self: iter([self / "parent"]))
        assert probe.list_and_read(tmp_path)[0] == "fail"
    (tmp_path / "child").unlink()
    assert probe.list_and_read(tmp_path)[0] == "ok"


@pytest.mark.parametrize(
    ("shift_s", "level", "said"), [(0, "ok", " +0.00 s"), (60, "fail", " +5"), (-60, "fail", " -5")]
)
def test_a_file_system_with_another_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift_s: int, level: str, said: str
) -> None:
    now = probe.time.time_ns
    monkeypatch.setattr(probe.time, "time_ns", lambda: now() - shift_s * GB)
    verdict = probe.clock(tmp_path, probe.Clocks.now(), 1.0)
    assert (verdict[0], said in verdict[1]) == (level, True)


def test_a_step_is_what_wall_and_monotonic_differ_by() -> None:
    assert probe.Clocks(110.0, 7.0).stepped_s(probe.Clocks(100.0, 2.0)) == 5.0


# --- its name and its command


def test_the_function_keeps_its_name() -> None:
    code = "import rr_dataset.doctor, rr_dataset as rr; assert rr.doctor.__name__ == 'doctor' and callable(rr.doctor)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_command(host: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    def run(*args: object) -> tuple[int | None, str]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *map(str, args)])
        return ended.value.code or 0, capfd.readouterr().out

    code, text = run(host.data / "ds")
    assert code == 0
    lines = {line[6:21].strip(): line for line in text.splitlines()}
    assert list(lines) == ["check", *CHECKS]
    assert lines["dataset"].startswith("warn  ")
    assert "Way out: check the address" in lines["dataset"]
    code, text = run(host.data / "ds", "--spool-dir", host.all / "none", "--json")
    found = [rr.Finding(**line) for line in json.loads(text)]
    assert (code, [f.check for f in found if f.level == "fail"]) == (3, ["spool place"])


def test_sigterm_leaves_nothing(host: SimpleNamespace) -> None:
    code = (
        "import signal, sys\nfrom cli.main import main\nfrom rr_dataset.doctor import probe\n"
        "probe.list_and_read = lambda _: (print('here', flush=True), signal.pause())\n"
        "main(['doctor', sys.argv[1], '--spool-dir', sys.argv[2]])"
    )
    args = [sys.executable, "-c", code, str(host.data), str(host.tmp)]
    with subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout
        assert command.stdout.readline() == "here\n"
        assert len(list(host.data.iterdir())) == 1
        command.terminate()
        assert command.wait() == 128 + signal.SIGTERM
    assert tree(host.data) == {}
