"""Kills and outages: what was accepted is there once, whoever dies, and nobody else's spool is touched."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset import supervisor as supervisor_module
from tests.engines import SPEC, Engine, alive, experts, options, spools, stopped, stored_rows, until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ds"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "spools"
    folder.mkdir()
    return folder


def check(root: Path, count: int, name: str = "a") -> None:
    """Records 0 to count - 1 are there, each once, and as they were put."""
    ids = [f"{name}:{i}" for i in range(count)]
    assert stored_rows(root) == Counter(ids)
    for i, record in enumerate(rr.open_dataset(root).get_many(ids)):
        np.testing.assert_array_equal(record.routed_experts, experts(i))


# ---- the worker dies


def put_while_killing(writer: rr.RoutingWriter, count: int, kills: list[int]) -> None:
    """`count` puts from two threads; the worker is killed when so many of them were accepted."""

    def work(first: int) -> None:
        for i in range(first, count, 2):
            writer.put(f"a:{i}", experts(i), "LTK")

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for accepted in kills:
        until(lambda accepted=accepted: writer.stats().accepted >= accepted, "puts go on")
        os.kill(writer.stats().worker_pid, signal.SIGKILL)
    for thread in threads:
        thread.join()


def test_the_worker_is_killed_in_the_middle_of_500_puts(root: Path, place: Path) -> None:
    with rr.RoutingWriter(root, options(place, idle_seal_s=0, max_age_s=0), create=SPEC) as writer:
        first = writer.stats().worker_pid
        put_while_killing(writer, 500, [100])
        report = writer.flush()
        assert (report.records, report.dropped) == (500, {})
        stats = writer.stats()
        assert (stats.accepted, stats.durable, stats.dropped) == (500, 500, {})
        assert stats.worker_restarts == 1
        assert stats.worker_pid != first
        assert stats.last_error is None
        check(root, 500)
    assert spools(place) == []
    check(root, 500)


@pytest.mark.nightly
@pytest.mark.parametrize("turn", range(10))
def test_the_worker_is_killed_again_and_again(root: Path, place: Path, turn: int) -> None:
    with rr.RoutingWriter(root, options(place, idle_seal_s=0, max_age_s=0), create=SPEC) as writer:
        for kill in range(5):
            until(lambda: alive(writer.stats().worker_pid), "the worker lives")
            put_while_killing(writer, 400, [37 * (turn + 1) + 400 * kill])
            for receipt in [writer.put(f"b:{kill}", experts(kill), "LTK")]:
                receipt.wait()
        writer.flush()
        assert writer.stats().worker_restarts == 5
    ids = Counter({f"a:{i}": 5 for i in range(400)}) + Counter(f"b:{kill}" for kill in range(5))
    assert stored_rows(root) == ids


def test_a_worker_that_is_killed_before_it_publishes_leaves_all_to_the_next(root: Path, place: Path) -> None:
    with rr.RoutingWriter(root, options(place), create=SPEC) as writer:
        pid = writer.stats().worker_pid
        with stopped(pid):
            receipts = [writer.put(f"a:{i}", experts(i), "LTK") for i in range(20)]
            os.kill(pid, signal.SIGKILL)
        receipts[-1].wait()
        assert all(receipt.durable() for receipt in receipts)
        assert writer.stats().worker_restarts == 1
    check(root, 20)


def test_sigterm_lets_the_worker_finish_and_another_one_follows(root: Path, place: Path) -> None:
    with rr.RoutingWriter(root, options(place), create=SPEC) as writer:
        pid = writer.stats().worker_pid
        receipts = [writer.put("a:0", experts(0), "LTK")]
        receipts[0].wait()  # the worker is at work, so it minds the signal
        with stopped(pid):
            receipts += [writer.put(f"a:{i}", experts(i), "LTK") for i in range(1, 5)]
            writer._spool.close_active()
            os.kill(pid, signal.SIGTERM)
        until(lambda: not alive(pid), "the worker ends")
        until(lambda: stored_rows(root).total() == 5, "what was sealed is published")
        until(lambda: writer.stats().worker_restarts == 1, "the supervisor starts another")
        assert "the worker ended: exit code 0" in (writer.stats().last_error or ""), "it was not killed by it"
        receipts += [writer.put("a:5", experts(5), "LTK")]
        receipts[-1].wait()
        assert all(receipt.durable() for receipt in receipts)
    check(root, 6)
    assert spools(place) == []


# ---- the engine dies

PUTS = """
writer = rr.RoutingWriter(root, options(spool_dir, idle_seal_s=1000, max_age_s=1000), create=SPEC)
for i in range(30):
    writer.put(f"a:{i}", experts(i), "LTK")
torn = writer._spool.reserve(1, 0, b"torn:1", b'{"status": "complete"}', tokens=5, payload_bytes=40)
print(writer.stats().worker_pid, flush=True)
"""


def test_the_engine_is_killed_and_its_worker_publishes_what_was_committed(root: Path, place: Path) -> None:
    engine = Engine(PUTS + "input()", root, place)
    worker = int(engine.line())
    assert stored_rows(root) == {}, "nothing was sealed yet"
    engine.kill()
    until(lambda: not alive(worker), "the worker ends")
    check(root, 30)
    assert spools(place) == []


def kill_both(engine: Engine, worker: int) -> None:
    with stopped(engine.process.pid):
        os.kill(worker, signal.SIGKILL)
        until(lambda: not alive(worker), "the worker is dead")
        os.kill(engine.process.pid, signal.SIGKILL)
    engine.kill()


FORK = """
import ctypes, signal
fork = {fork}
child = fork()
if child == 0:
    while True:
        signal.pause()
print(child, flush=True)
input()
"""


@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
def test_a_forked_child_does_not_hide_that_the_engine_is_dead(root: Path, place: Path, fork: str) -> None:
    engine = Engine(PUTS + FORK.format(fork=fork), root, place)  # fork of C leaves the channel open in the child
    worker, child = int(engine.line()), int(engine.line())
    try:
        engine.process.kill()
        until(lambda: not alive(worker), "the worker ends though the child lives")
        assert alive(child)
        check(root, 30)
        assert spools(place) == []
    finally:
        os.kill(child, signal.SIGKILL)
        engine.kill()


def test_a_forked_child_does_not_hold_the_lock_of_a_dead_spool(root: Path, place: Path) -> None:
    engine = Engine(PUTS + FORK.format(fork="os.fork"), root, place)
    worker, child = int(engine.line()), int(engine.line())
    try:
        kill_both(engine, worker)
        (dead,) = spools(place)
        with rr.RoutingWriter(root, options(place)):
            until(lambda: not dead.exists(), "the dead spool is taken over though the child lives")
        assert alive(child)
        check(root, 30)
    finally:
        os.kill(child, signal.SIGKILL)
        engine.kill()


def test_both_are_killed_and_the_next_writer_takes_the_records_over(root: Path, place: Path) -> None:
    engine = Engine(PUTS + "input()", root, place)
    kill_both(engine, int(engine.line()))
    assert stored_rows(root) == {}
    (dead,) = spools(place)
    with rr.RoutingWriter(root, options(place)) as writer:
        until(lambda: not dead.exists(), "the dead spool is published and removed")
        check(root, 30)
        until(lambda: writer.stats().recovered == 30, "the writer says so")
        assert writer.stats().left == ()
        writer.put("b:1", experts(1), "LTK").wait()
        log = (Path(writer.stats().spool_dir) / "worker.log").read_text()
        assert "recovered 30 records" in log
        assert "1 torn entries dropped" in log
    assert stored_rows(root).total() == 31
    assert spools(place) == []


def test_the_dead_spool_of_another_dataset_is_left_and_named(root: Path, place: Path, tmp_path: Path) -> None:
    engine = Engine(PUTS + "input()", root, place)
    kill_both(engine, int(engine.line()))
    (dead,) = spools(place)
    before = {path.name: path.read_bytes() for path in dead.iterdir()}
    with rr.RoutingWriter(tmp_path / "other", options(place), create=SPEC) as writer:
        writer.put("b:1", experts(1), "LTK").wait()
        log = (Path(writer.stats().spool_dir) / "worker.log").read_text()
        assert f"{dead} is left as it is" in log
        assert str(root) in log
    assert {path.name: path.read_bytes() for path in dead.iterdir()} == before
    assert stored_rows(tmp_path / "other") == {"b:1": 1}


# ---- the engine ends

EXITS = {
    "at the end": (0, ""),
    "by sys.exit": (3, "sys.exit(3)"),
    "by an error": (1, "raise ValueError('engine bug')"),
}


@pytest.mark.parametrize("how", EXITS)
def test_an_engine_that_exits_without_close_loses_nothing(root: Path, place: Path, how: str) -> None:
    code, last = EXITS[how]
    engine = Engine(PUTS.replace("torn = ", "# ") + last, root, place)
    returncode, stderr = engine.end()
    assert returncode == code, stderr
    assert ("engine bug" in stderr) == (how == "by an error")
    check(root, 30)
    assert spools(place) == []


def test_a_forked_child_cannot_use_the_writer_and_leaves_it_alone(root: Path, place: Path) -> None:
    code = """
import threading
writer = rr.RoutingWriter(root, options(spool_dir, idle_seal_s=1000, max_age_s=1000), create=SPEC)
receipt = writer.put("a:0", experts(0), "LTK")
writer.flush()
unsealed = writer.put("a:1", experts(1), "LTK")
held, forked = threading.Event(), threading.Event()
def hold():
    with writer._spool.changed:
        held.set()
        forked.wait()
threading.Thread(target=hold).start()
held.wait()
child = os.fork()
forked.set()
if child == 0:
    for use in (lambda: writer.put("b:1", experts(1), "LTK"), writer.flush, writer.stats, unsealed.wait):
        try:
            use()
        except rr.WriterForkedError as error:
            print(error, flush=True)
    receipt.wait()
    writer.close()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
writer.put("a:2", experts(2), "LTK").wait()
print(writer.stats().worker_restarts, flush=True)
writer.close()
"""
    engine = Engine(code, root, place)
    for _ in range(4):
        assert "belongs to the parent process" in engine.line()
    assert engine.line() == "0"
    assert engine.end() == (0, "")
    check(root, 3)
    assert spools(place) == []


# ---- the storage fails


def test_an_outage_of_the_storage_is_reported_and_survived(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, revive = [], supervisor_module._revive

    def counted(message: Mapping[str, Any]) -> Exception:
        attempts.append(message)
        return revive(message)

    monkeypatch.setattr(supervisor_module, "_revive", counted)
    with rr.RoutingWriter(root, options(place), create=SPEC) as writer:
        (root / "data_id=a").write_text("a file where a directory must be")
        receipts = [writer.put(f"a:{i}", experts(i), "LTK") for i in range(10)]
        with pytest.raises(
            rr.FlushTimeoutError, match=r"10 records are not durable after 0.5 s \(.*Not a directory"
        ) as caught:
            writer.flush(timeout_s=0.5)
        assert isinstance(caught.value.__cause__, rr.StorageError)
        assert not any(receipt.durable() for receipt in receipts)
        with pytest.raises(rr.FlushTimeoutError, match="1 records|10 records"):
            receipts[0].wait(timeout_s=0)
        stats = writer.stats()
        assert "Not a directory" in (stats.last_error or "")
        assert (stats.durable, stats.worker_restarts) == (0, 0)
        assert 1 <= len(attempts) < 10, "they get rarer"
        receipts.append(writer.put("a:10", experts(10), "LTK"))
        (root / "data_id=a").unlink()
        assert writer.flush().records == 11
        assert all(receipt.durable() for receipt in receipts)
        assert writer.stats().last_error is None
    check(root, 11)


def test_closing_during_an_outage_keeps_the_records_for_the_next_writer(root: Path, place: Path) -> None:
    writer = rr.RoutingWriter(root, options(place, drain_timeout_s=0.3), create=SPEC)
    (root / "data_id=a").write_text("")
    receipt = writer.put("a:0", experts(0), "LTK")
    with pytest.raises(rr.FlushTimeoutError, match=rf"Not a directory.*it is kept in {place}") as caught:
        writer.close()
    assert isinstance(caught.value.__cause__, rr.StorageError)
    writer.close()
    with pytest.raises(rr.WriterClosedError, match="before this was durable"):
        receipt.wait()
    (dead,) = spools(place)
    (root / "data_id=a").unlink()
    with rr.RoutingWriter(root, options(place)):
        until(lambda: not dead.exists(), "the records are taken over")
    check(root, 1)


def test_slabs_that_fail_for_reasons_of_their_own_do_not_hold_up_the_others(root: Path, place: Path) -> None:
    with rr.RoutingWriter(root, options(place), create=SPEC) as writer:
        (root / "data_id=bad").write_text("a file where a directory must be")
        bad = []
        for i in range(2):
            bad.append(writer.put(f"bad:{i}", experts(i), "LTK"))
            with pytest.raises(rr.FlushTimeoutError):
                bad[i].wait(timeout_s=0.3)
        receipts = []
        for i in range(20):
            receipts.append(writer.put(f"good:{i}", experts(i), "LTK"))
            receipts[i].wait()
        stats = writer.stats()
        assert (stats.durable, stats.worker_restarts) == (20, 0)
        assert "data_id=bad" in (stats.last_error or ""), "what still waits is not forgotten for what went well"
        with pytest.raises(rr.FlushTimeoutError, match="2 records are not durable") as caught:
            writer.flush(timeout_s=0.1)
        assert "data_id=bad" in str(caught.value.__cause__)
        (root / "data_id=bad").unlink()
        assert writer.flush().records == 22
        assert writer.stats().last_error is None
    assert stored_rows(root) == {**{f"bad:{i}": 1 for i in range(2)}, **{f"good:{i}": 1 for i in range(20)}}
    assert spools(place) == []
