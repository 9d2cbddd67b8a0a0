"""How engines end in the field: groups, trees, daemons, terminals, event loops, forked children. Nothing is lost or left."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rr_dataset as rr
from tests.engines import PRELUDE, SPEC, Engine, alive, options, spools, stored_rows, until
from tests.test_crash import check

OPEN = """
import signal
writer = rr.RoutingWriter(root, options(spool_dir, idle_seal_s=1000, max_age_s=1000), create=SPEC)
"""
PUTS = """
for i in range(30):
    writer.put(f"a:{i}", experts(i), "LTK")
print(writer.stats().worker_pid, flush=True)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ds"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "spools"
    folder.mkdir()
    return folder


def drained(root: Path, place: Path, worker: int) -> None:
    """The worker ends by itself when it has published all and removed the spool."""
    until(lambda: not alive(worker), "the worker ends")
    check(root, 30)
    assert spools(place) == []


# ---- signals to many


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_process_group(root: Path, place: Path, sent: signal.Signals) -> None:
    with Engine(OPEN + PUTS + "signal.pause()", root, place, start_new_session=True) as engine:
        worker = int(engine.line())
        os.killpg(engine.process.pid, sent)
        engine.process.wait()
        drained(root, place, worker)


@pytest.mark.parametrize("first", ["engine", "worker"])
@pytest.mark.parametrize("engine_minds", [True, False])
def test_sigterm_to_the_whole_tree(root: Path, place: Path, first: str, engine_minds: bool) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" if engine_minds else ""
    with Engine(OPEN + handler + PUTS + "while True: signal.pause()", root, place) as engine:
        worker = int(engine.line())
        pids = [engine.process.pid, worker]
        for pid in pids if first == "engine" else reversed(pids):
            os.kill(pid, signal.SIGTERM)
        engine.process.wait()
        until(lambda: not spools(place), "one or the other worker removes the spool")
        drained(root, place, worker)


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


def test_direct_children_are_killed_and_then_the_engine(root: Path, place: Path) -> None:
    with Engine(OPEN + PUTS + "signal.pause()", root, place) as engine:
        worker = int(engine.line())
        children = children_of(engine.process.pid)
        assert children == [worker], "the worker is the engine's only child"
        for pid in [*children, engine.process.pid]:
            os.kill(pid, signal.SIGKILL)
        engine.process.wait()
    until(lambda: not alive(worker), "the worker is dead")
    with rr.RoutingWriter(root, options(place), create=SPEC):
        until(lambda: len(spools(place)) == 1, "the next writer takes over what was left, if anything")
    check(root, 30)
    assert spools(place) == []


# ---- multiprocessing

DAEMON = """
import multiprocessing, time
def work():
{work}
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    child.start()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) if {wait} else input()
"""


@pytest.mark.parametrize("ends", ["terminated", "returns", "raises"])
def test_a_daemonic_child_of_multiprocessing(root: Path, place: Path, ends: str) -> None:
    last = {"terminated": "while True: signal.pause()", "returns": "return", "raises": "raise SystemExit(1)"}[ends]
    work = "\n".join(f"    {line}" for line in (OPEN + PUTS + last).splitlines())
    with Engine(DAEMON.format(work=work, wait=ends != "terminated"), root, place) as engine:
        worker = int(engine.line())
        assert engine.end()[0] == 0
        drained(root, place, worker)


# ---- Ctrl-C


def test_ctrl_c_in_a_terminal(root: Path, place: Path) -> None:
    control = (
        "os.close(os.open(os.ttyname(0), os.O_RDWR))\n"  # a session's leader that opens a terminal is controlled by it
    )
    code = "with writer:\n" + "\n".join(f"    {line}" for line in (PUTS + "signal.pause()").splitlines())
    ours, theirs = pty.openpty()
    engine = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + control + OPEN + code, str(root), str(place)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=Path(__file__).parent.parent,
        start_new_session=True,
    )
    os.close(theirs)
    lines = reading(ours)
    worker = int(next(lines))
    os.write(ours, b"\x03")
    said = " ".join(lines)
    os.close(ours)
    assert engine.wait() in {-signal.SIGINT, 1}
    assert "KeyboardInterrupt" in said
    assert "rr_dataset" not in said.replace(str(Path(__file__).parents[1]), ""), "no trouble of ours"
    drained(root, place, worker)


def reading(fd: int) -> Iterator[str]:
    """Lines from the master of a terminal until its other end is closed."""
    try:
        with os.fdopen(os.dup(fd), "r", errors="replace") as file:
            yield from file
    except OSError:  # EIO: nobody holds the other end
        return


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_under_an_event_loop(root: Path, place: Path, sent: signal.Signals) -> None:
    code = """
import asyncio
async def serve():
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with writer:
        await asyncio.gather(*[one(i) for i in range(10)])
        for i in range(10, 30):
            writer.put(f"a:{i}", experts(i), "LTK")
        print(writer.stats().worker_pid, flush=True)
        await asyncio.Event().wait()
async def one(i):
    await writer.put(f"a:{i}", experts(i), "LTK")
asyncio.run(serve())
"""
    with Engine(OPEN + code, root, place) as engine:
        worker = int(engine.line())
        engine.process.send_signal(sent)
        engine.process.wait()
        drained(root, place, worker)


# ---- forked children that hold copies of everything

C_FORK = """
import ctypes
child = ctypes.PyDLL(None).fork()  # no hook of Python runs, so the child holds channel and lock
if child == 0:
    while True:
        signal.pause()
print(child, flush=True)
"""


def test_closing_does_not_wait_for_a_child_that_holds_the_channel(root: Path, place: Path) -> None:
    opened = OPEN.replace("idle_seal_s=1000", "drain_timeout_s=1000, idle_seal_s=1000")
    with Engine(opened + PUTS + C_FORK + "writer.close()", root, place) as engine:
        worker, child = int(engine.line()), int(engine.line())
        try:
            assert engine.process.wait(timeout=60) == 0
            assert alive(child)
            drained(root, place, worker)
        finally:
            os.kill(child, signal.SIGKILL)


def test_without_pidfd_the_parents_id_tells(root: Path, place: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os; del os.pidfd_open")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Engine(OPEN + PUTS + C_FORK + "input()", root, place, env={**os.environ, "PYTHONPATH": path}) as engine:
        worker, child = int(engine.line()), int(engine.line())
        try:
            assert "no pidfd" in (spools(place)[0] / "worker.log").read_text()
            engine.process.kill()
            engine.process.wait()
            drained(root, place, worker)
            assert alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_engine_that_execs_another_program_is_gone(root: Path, place: Path) -> None:
    """The pid lives on, the writer does not."""
    with Engine(OPEN + PUTS + "os.execvp('sleep', ['sleep', '1000'])", root, place) as engine:
        worker = int(engine.line())
        until(lambda: not alive(worker), "the worker ends")
        assert alive(engine.process.pid)
    with rr.RoutingWriter(root, options(place)):
        until(lambda: len(spools(place)) == 1, "the next writer takes over")
    assert stored_rows(root).total() == 30
    check(root, 30)
