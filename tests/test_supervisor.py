"""The supervisor: how a worker starts, fails to start, is watched, restarted and given up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rr_dataset as rr
from rr_dataset import supervisor as supervisor_module
from rr_dataset.supervisor import LOG_BYTES, Channel, _revive
from tests.engines import SPEC, alive, experts, options, spools, stored_rows, until

# ---- the channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    a, b = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield a, b
    a.close()
    b.close()


def test_messages_come_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    a, b = ends
    assert b.receive() == []
    a.send("one", value="\ud800 é\0")
    a.send("two")
    assert b.receive() == [{"kind": "one", "value": "\ud800 é\0"}, {"kind": "two"}]
    assert b.receive() == []


def test_what_was_sent_before_the_end_is_received_before_the_end(ends: tuple[Channel, Channel]) -> None:
    a, b = ends
    a.send("last")
    a.close()
    assert b.receive() == [{"kind": "last"}]
    assert b.receive() is None


def test_sending_never_waits_and_never_fails(ends: tuple[Channel, Channel]) -> None:
    a, b = ends
    for _ in range(10_000):  # far more than the socket holds
        a.send("wake", pad="x" * 100)
    received = b.receive()
    assert received
    assert len(received) < 10_000
    b.close()
    a.send("wake")
    a.close()
    a.send("wake")


def test_the_end_is_seen_though_a_copy_of_the_other_side_is_open(ends: tuple[Channel, Channel]) -> None:
    a, b = ends
    copy = os.dup(a.fileno())
    a.send("end")
    a.end()
    a.close()
    assert b.receive() == [{"kind": "end"}]
    assert b.receive() is None
    os.close(copy)
    a.end()  # once more does no harm


# ---- starting


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for spools that must be empty in the end."""
    folder = tmp_path / "spools"
    folder.mkdir()
    return folder


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that is started in place of the worker's python."""
    script = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(script))
    return script


def write_script(script: Path, text: str) -> None:
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (
            "echo no module named pyarrow >&2; exit 3",
            "before it said hello: exit code 3; its log: no module named pyarrow",
        ),
        ("echo going; kill -9 $$", "before it said hello: killed by signal 9; its log: going"),
        ("exit 0", r"exit code 0; its log: \(empty\)"),
    ],
)
def test_a_worker_that_dies_before_hello_is_reported_with_its_log(
    tmp_path: Path, place: Path, python: Path, script: str, error: str
) -> None:
    write_script(python, script)
    before = descriptors()
    with pytest.raises(rr.WorkerError, match=error):
        rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    assert spools(place) == []
    assert descriptors() <= before  # an idle connection of an earlier test may have ended


def test_a_worker_that_cannot_be_launched(
    tmp_path: Path, place: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    with pytest.raises(rr.WorkerError, match=r"cannot be started: .*No such file"):
        rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(rr.WorkerError, match="an embedded Python must set it"):
        rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    assert spools(place) == []
    assert descriptors() <= before  # an idle connection of an earlier test may have ended


def test_a_worker_that_never_says_hello_is_given_up_and_killed(tmp_path: Path, place: Path, python: Path) -> None:
    write_script(python, f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    with pytest.raises(rr.WorkerError, match=r"did not open .*ds within start_timeout_s=0.3: still running"):
        rr.RoutingWriter(tmp_path / "ds", options(place, start_timeout_s=0.3), create=SPEC)
    assert not alive(int((tmp_path / "pid").read_text()))
    assert spools(place) == []


def test_the_worker_is_apart_from_the_engine(tmp_path: Path, place: Path) -> None:
    with rr.RoutingWriter(tmp_path / "ds", options(place, worker_nice=7), create=SPEC) as writer:
        pid = writer.stats().worker_pid
        assert os.getsid(pid) == pid
        assert os.getpriority(os.PRIO_PROCESS, pid) == 7 + os.getpriority(os.PRIO_PROCESS, 0)
        environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert "PYTHONSAFEPATH=1" in environment
        assert next(v for v in environment if v.startswith("PYTHONPATH=")).split("=", 1)[1].split(":") == [
            entry or str(Path.cwd()) for entry in sys.path
        ]
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the engine, which then closes the writer
        writer.put("a:1", experts(1), "LTK").wait()
        assert writer.stats().worker_pid == pid
    assert not alive(pid)
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}
    assert spools(place) == []


# ---- the worker's end


def test_without_any_worker_everything_says_so_and_the_records_stay(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_RESTARTS", 2)
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.001)
    root = tmp_path / "ds"
    writer = rr.RoutingWriter(root, options(place), create=SPEC)
    script = tmp_path / "python"
    write_script(script, "echo broken upgrade >&2; exit 1")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        os.kill(writer.stats().worker_pid, signal.SIGKILL)
        until(lambda: writer._supervisor.gone, "the supervisor gives up")
    receipt = writer.put("a:1", experts(1), "LTK")
    assert "broken upgrade" in (writer.stats().last_error or "")
    assert writer.stats().worker_restarts == 2
    for ask in (writer.flush, receipt.wait, lambda: asyncio.run(wait_for(receipt))):
        with pytest.raises(rr.WorkerError, match="the worker ended: exit code 1; its log:(?s:.*)broken upgrade"):
            ask()
    assert not receipt.durable()
    with pytest.raises(rr.WorkerError, match=rf"broken upgrade(?s:.*)it is kept in {place}"):
        writer.close()
    assert len(spools(place)) == 1
    with rr.RoutingWriter(root, options(place)):
        until(lambda: not spools(place)[1:], "the next writer has taken the records over")
    assert stored_rows(root) == {"a:1": 1}
    assert spools(place) == []


def test_a_worker_that_lived_long_enough_is_not_the_last_of_a_row(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "MAX_RESTARTS", 1)
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(supervisor_module, "HEALTHY_S", 0.0)
    with rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC) as writer:
        for kills in range(1, 4):
            os.kill(writer.stats().worker_pid, signal.SIGKILL)
            until(lambda kills=kills: writer.stats().worker_restarts == kills, "another one is to be started")
            until(lambda: alive(writer.stats().worker_pid), "it is")
        writer.put("a:1", experts(1), "LTK").wait()


def test_the_workers_log_is_bounded(tmp_path: Path, place: Path) -> None:
    root = tmp_path / "ds"
    with rr.RoutingWriter(root, options(place), create=SPEC) as writer:
        log = Path(writer.stats().spool_dir) / "worker.log"

        def grow() -> None:
            with log.open("ab") as file:
                file.write(b"x" * (LOG_BYTES + 1))

        grow()
        os.kill(writer.stats().worker_pid, signal.SIGKILL)
        until(lambda: log.stat().st_size < LOG_BYTES, "the next worker begins it anew")
        writer.put("a:0", experts(0), "LTK").wait()
        grow()
        (root / "data_id=b").write_text("")
        receipt = writer.put("b:0", experts(0), "LTK")
        until(lambda: b"cannot publish" in log.read_bytes(), "the worker tells of a failure")
        assert log.stat().st_size < LOG_BYTES
        (root / "data_id=b").unlink()
        receipt.wait()


async def wait_for(receipt: rr.Receipt) -> None:
    await receipt


def test_a_failure_of_its_own_is_reported_not_swallowed(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = rr.RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(writer._supervisor, "_due_s", lambda: 1 / 0)
        receipt = writer.put("a:1", experts(1), "LTK")
        with pytest.raises(rr.WorkerError, match="the supervisor failed: ZeroDivisionError"):
            receipt.wait()
    writer.close()
    assert receipt.durable(), "the worker needs no supervisor for its last work"
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}
    assert spools(place) == []


# ---- errors over the channel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("StorageError", rr.StorageError),
        ("DatasetNotFoundError", rr.DatasetNotFoundError),
        ("KeyError", rr.WorkerError),
        ("RoutingDatasetWarning", rr.WorkerError),
        ("annotations", rr.WorkerError),
    ],
)
def test_the_workers_errors_come_back_as_their_own_class_where_it_is_ours(name: str, kind: type[Exception]) -> None:
    error = _revive(json.loads(json.dumps({"kind": "trouble", "error": name, "text": "disk full"})))
    assert type(error) is kind
    assert "disk full" in str(error)
