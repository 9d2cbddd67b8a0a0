"""Forked children of an engine: whatever they call, what the parent is writing stays the parent's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rr_dataset as rr
from tests.engines import SPEC, Engine, experts, options

INSIDE = """
import asyncio, signal
writer = rr.RoutingWriter(root, options(spool_dir, idle_seal_s=1000, max_age_s=1000), create=SPEC)
rows = experts(1).transpose(1, 0, 2)
def child_leaves(end):
    pid = os.fork()
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
    elif end == "an error":
        raise ZeroDivisionError
    return pid == 0
try:
    with writer.reserve("a:0", 20) as record:
        record.experts[:10] = rows[:10]
        child = child_leaves({end!r})
        if not child:
            if {killed}:
                os.kill(os.getpid(), signal.SIGKILL)
            record.experts[10:] = rows[10:]
except (rr.WriterForkedError, ZeroDivisionError) as error:
    print(type(error).__name__, flush=True)
    os._exit(0)
record.receipt.wait()
writer.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize("end", ["as usual", "an error"])
@pytest.mark.parametrize("killed", [True, False])
def test_a_child_that_leaves_a_reservation_stores_nothing(tmp_path: Path, end: str, killed: bool) -> None:
    (tmp_path / "spools").mkdir()
    with Engine(INSIDE.format(end=end, killed=killed), tmp_path / "ds", tmp_path / "spools") as engine:
        assert engine.line() == ("WriterForkedError" if end == "as usual" else "ZeroDivisionError")
        if killed:
            engine.process.wait()
        else:
            assert engine.line() == "closed"
    with rr.RoutingWriter(tmp_path / "ds", options(tmp_path / "spools"), create=SPEC) as writer:
        writer.put("b:0", experts(2), "LTK")
    dataset = rr.open_dataset(tmp_path / "ds")
    assert set(dataset.ids()) == {"b:0"} | (set() if killed else {"a:0"})
    if not killed:
        np.testing.assert_array_equal(dataset.get("a:0").routed_experts, experts(1))


EVERYTHING = """
import asyncio, inspect
writer = rr.RoutingWriter(root, options(spool_dir, idle_seal_s=1000, max_age_s=1000), create=SPEC)
known = writer.put("a:0", experts(0), "LTK")
writer.flush()
waiting, dropped, room = writer.put("a:1", experts(1), "LTK"), writer.drop("a:2", "lost"), writer.reserve("a:3", 20)
async def awaited():
    await waiting
arguments = {
    "put": ("b:1", experts(1)), "put_many": ([("b:1", experts(1))],), "reserve": ("b:1", 20), "drop": ("b:1", "lost"),
    "delete_prefix": ("a",), "clear_run": (), "flush": (), "stats": (),
}
public = [name for name, what in inspect.getmembers(rr.RoutingWriter, inspect.isfunction) if name[0] != "_"]
assert sorted([*arguments, "close"]) == public, public
uses = [lambda name=name, given=given: getattr(writer, name)(*given) for name, given in arguments.items()]
uses += [room.__enter__, waiting.wait, waiting.durable, lambda: asyncio.run(awaited())]
child = os.fork()
if child == 0:
    for use in uses:
        try:
            use()
        except rr.WriterForkedError as error:
            print(error, flush=True)
        else:
            print("nothing", use, flush=True)
    assert known.durable()
    known.wait()
    assert not dropped.durable()
    print(len(uses), waiting, flush=True)
    writer.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
with room:
    room.experts[:] = experts(3).transpose(1, 0, 2)
waiting.wait()
writer.close()
"""


def test_everything_that_a_child_calls_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spools").mkdir()
    with Engine(EVERYTHING, tmp_path / "ds", tmp_path / "spools") as engine:
        for _ in range(12):
            assert engine.line() == "this writer belongs to the parent process; open one after the fork"
        assert engine.line().startswith("12 Receipt(")
        assert engine.process.wait() == 0, engine.process.communicate()[1]
    dataset = rr.open_dataset(tmp_path / "ds")
    assert set(dataset.ids()) == {"a:0", "a:1", "a:2", "a:3"}
