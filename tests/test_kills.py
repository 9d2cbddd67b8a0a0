"""Engines with four threads that are killed, with their workers or without, at random and at each step.

The model is what an engine told a pipe before its death: what it was about to put, what was accepted, what was flushed.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import rr_dataset as rr
from rr_dataset.spool import Spool
from tests.engines import SPEC, Engine, alive, experts, options, spools, until
from tests.spooled import make_spool, put

THREADS, PUTS = 4, 500
FAULTS = Path(__file__).parent / "faults"

CODE = f"""
import threading
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
writer = rr.RoutingWriter(root, options(spool_dir, idle_seal_s=0.001, block_timeout_s=1000), create=SPEC)
say("worker", writer.stats().worker_pid)
def work(thread):
    for i in range({PUTS}):
        say("begin", thread, i)
        writer.put(f"t{{thread}}:{{i // 2}}", experts(1000 * thread + i, 20 + i % 400), "LTK", tags={{"n": f"{{thread}}.{{i}}"}})
        say("done", thread, i)
        if i % 125 == 124:
            writer.flush()
            say("flushed", thread, i)
threads = [threading.Thread(target=work, args=(thread,)) for thread in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
writer.close()
say("closed")
"""

Put = tuple[int, int]  # thread, number
Look = Callable[[], list[tuple[int, Put]]]  # (stamp, put) of every row in the files


@dataclass
class Model:
    """What the engine said."""

    begun: set[Put] = field(default_factory=set)
    accepted: set[Put] = field(default_factory=set)
    flushed: set[Put] = field(default_factory=set)
    workers: list[int] = field(default_factory=list)
    closed: bool = False

    def hear(self, line: str) -> None:
        word, *numbers = line.split()
        if word == "closed":
            self.closed = True
        elif word == "worker":
            self.workers.append(int(numbers[0]))
        elif word == "flushed":
            thread, last = map(int, numbers)
            self.flushed |= {(thread, i) for i in range(last + 1)}
        else:
            thread, i = map(int, numbers)
            (self.begun if word == "begin" else self.accepted).add((thread, i))


def stored(root: Path) -> list[tuple[int, Put]]:
    """No code of ours."""
    found = []
    for path in root.rglob("*.arrow"):
        with pa.ipc.open_file(path) as file:
            for i in range(file.num_record_batches):
                batch = file.get_batch(i)
                for stamp, tags in zip(batch["t_submit"].to_pylist(), batch["tags"].to_pylist(), strict=True):
                    thread, number = dict(tags)["n"].split(".")
                    found.append((stamp, (int(thread), int(number))))
    return sorted(found)


def check(root: Path | str, model: Model, look: Look) -> None:
    rows = look()
    times = Counter(each for _, each in rows)
    assert {each: times[each] for each in model.accepted} == dict.fromkeys(model.accepted, 1)
    extra = set(times) - model.accepted
    assert extra <= model.begun - model.accepted, "nothing else, but what was just being put"
    assert all(times[each] == 1 for each in extra)
    assert len({thread for thread, _ in extra}) == len(extra), "one a thread"
    for thread in range(THREADS):
        numbers = [i for _, (of, i) in rows if of == thread]
        assert numbers == list(range(len(numbers))), "each thread's puts in their order, without a gap"
    newest = {f"t{thread}:{i // 2}": (thread, i) for _, (thread, i) in rows}
    if newest:
        for (thread, i), record in zip(newest.values(), rr.open_dataset(root).get_many(list(newest)), strict=True):
            np.testing.assert_array_equal(record.routed_experts, experts(1000 * thread + i, 20 + i % 400))


def snapshot(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A spool_dir with the spools of a living and of a dead writer of other datasets in it, which stay as they are."""
    folder = tmp_path / "spools"
    folder.mkdir()
    made: list[Spool] = []
    for i in (0, 1):
        other = rr.create_dataset(tmp_path / f"other{i}", SPEC)
        made.append(make_spool(folder, other, f"{i:016x}"))
        put(made[i], other, "x:1", experts(1))
    made[1].close(remove=False)
    before = [snapshot(spool.directory) for spool in made]
    yield folder
    assert [snapshot(spool.directory) for spool in made] == before
    assert spools(folder) == [spool.directory for spool in made]
    made[0].close(remove=True)


def lives(directory: Path) -> bool:
    """Whether somebody holds its lock."""
    try:
        with (directory / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:  # it has just been removed
        return False
    except BlockingIOError:
        return True
    return False


def finish(
    engine: Engine,
    model: Model,
    root: Path | str,
    place: Path,
    *,
    both: bool,
    by_writer: bool,
    look: Look | None = None,
) -> None:
    """After the kill: what had been flushed is there, and then all that was accepted, each once."""
    look = look or (lambda: stored(Path(root)))
    engine.process.wait()
    until(lambda: not any(lives(spool) for spool in spools(place)[2:]), "the worker has ended")
    until(lambda: not any(map(alive, model.workers)), "it is gone")
    assert model.flushed <= {each for _, each in look()}
    if model.closed:
        assert len(model.accepted) == THREADS * PUTS
    if not both:
        assert len(spools(place)) == 2, "who was left has removed the spool"
    elif by_writer:
        with rr.RoutingWriter(root, options(place), create=SPEC):
            until(lambda: len(spools(place)) == 3, "the next writer has taken everything over")
    else:
        rr.recover(place, uri=str(root))
    check(root, model, look)


def listen(engine: Engine, model: Model, lines: int | None = None) -> None:
    """Hear so many lines, or all that there are until its end."""
    assert engine.process.stdout is not None
    while lines is None or lines > 0:
        line = engine.process.stdout.readline()
        if not line.endswith("\n"):
            return
        model.hear(line)
        lines = None if lines is None else lines - 1


def kill(engine: Engine, model: Model, who: str) -> None:
    if who != "engine":
        os.kill(model.workers[-1], signal.SIGKILL)
    if who != "worker":
        engine.process.kill()


def round_of(seed: int, root: Path, place: Path) -> None:
    """One kill at random."""
    rng = random.Random(seed)
    who = ("both", "engine", "worker")[seed % 3]
    model = Model()
    with Engine(CODE, root, place) as engine:
        listen(engine, model, rng.randrange(1, 2 * THREADS * PUTS))
        kill(engine, model, who)
        listen(engine, model)
        finish(engine, model, root, place, both=who == "both", by_writer=bool(rng.randrange(2)))


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_random(tmp_path: Path, place: Path, seed: int) -> None:
    round_of(seed, tmp_path / "ds", place)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6, 120))
def test_killed_at_random_again(tmp_path: Path, place: Path, seed: int) -> None:
    round_of(seed, tmp_path / "ds", place)


# ---- at each step

ENGINE_STEPS = [
    "rr_dataset.slab:Slab.identify",
    "rr_dataset.slab:Slab.activate",
    "rr_dataset.slab:Slab.reserve",
    "rr_dataset.slab:Slab.write_commit",
    "rr_dataset.slab:Slab.seal",
    "rr_dataset.spool:Spool.collect",
]
WORKER_STEPS = [
    "rr_dataset.supervisor:Channel.send",
    "rr_dataset.storage.local:LocalStorage.create",
    "os:link",
    "os:fsync",
    "rr_dataset.storage.local:LocalStorage.sync_dirs",
    "rr_dataset.slab:write_state",
]
STEPS = [("engine", step) for step in ENGINE_STEPS] + [("worker", step) for step in WORKER_STEPS]


def with_fault(role: str, step: str, when: str, nth: int, mark: Path, *, both: bool = False) -> dict[str, str]:
    """The environment of an engine that, or whose worker, is killed there."""
    fault = {"role": role, "step": step, "when": when, "nth": nth, "both": both, "mark": str(mark)}
    path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "RR_FAULT": json.dumps(fault)}


def at_step(
    tmp_path: Path, place: Path, role: str, step: str, when: str, nth: int, *, both: bool, by_writer: bool
) -> None:
    root, mark, model = tmp_path / "ds", tmp_path / "fired", Model()
    rr.create_dataset(root, SPEC)
    with Engine(CODE, root, place, env=with_fault(role, step, when, nth, mark, both=both)) as engine:
        listen(engine, model)
        assert mark.exists(), "it came to that step"
        assert model.closed == (role == "worker" and not both)
        finish(engine, model, root, place, both=both, by_writer=by_writer)


@pytest.mark.parametrize(("role", "step"), STEPS)
def test_killed_at_a_step(tmp_path: Path, place: Path, role: str, step: str) -> None:
    rng = random.Random(step)
    when, nth = rng.choice(["before", "after"]), rng.randrange(1, 5)
    at_step(tmp_path, place, role, step, when, nth, both=bool(rng.randrange(2)), by_writer=False)


NIGHTLY = [(role, step, when, both) for role, step in STEPS for when in ("before", "after") for both in (False, True)]


@pytest.mark.nightly
@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize(("role", "step", "when", "both"), NIGHTLY)
def test_killed_before_and_after_each_step(
    tmp_path: Path, place: Path, role: str, step: str, when: str, both: bool, turn: int
) -> None:
    nth = random.Random(f"{step}{when}{both}{turn}").randrange(1, 5)
    at_step(tmp_path, place, role, step, when, nth, both=both, by_writer=turn == 0)


@pytest.mark.parametrize("nth", [1, 4, 8])  # the first slab, another one, the lock
@pytest.mark.parametrize("role", ["engine", "worker"])
def test_killed_while_the_spool_is_removed(tmp_path: Path, place: Path, role: str, nth: int) -> None:
    """By the engine after it closed, or by the worker after the engine's death."""
    root, mark, model = tmp_path / "ds", tmp_path / "fired", Model()
    rr.create_dataset(root, SPEC)
    with Engine(CODE, root, place, env=with_fault(role, "pathlib:Path.unlink", "before", nth, mark)) as engine:
        if role == "worker":
            listen(engine, model, 1000)
            engine.process.kill()
        listen(engine, model)
        until(mark.exists, "the spool is being removed")
        assert not model.closed
        finish(engine, model, root, place, both=True, by_writer=False)
