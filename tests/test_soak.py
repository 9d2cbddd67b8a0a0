"""Minutes at full speed, with a worker or an engine killed every few seconds: nothing is lost, nothing grows.

RR_SOAK_S sets how long (600 seconds). Records that were checked are taken away, so that the disk does not fill.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

import rr_dataset as rr
from tests.engines import Engine, alive, options, spools, stored_rows, until

pytestmark = pytest.mark.nightly

SOAK_S = float(os.environ.get("RR_SOAK_S", "600"))
ENGINES = 3  # one after the other; each takes over what the one before left when it was killed
KILL_EVERY_S = 3.0
ROUND = 400  # records of 0.36 MB before they are checked
GROWTH_BYTES = 32 << 20  # of an engine's private memory, between the second quarter of its life and the last

CODE = f"""
writer = rr.RoutingWriter(root, options(spool_dir, block_timeout_s=1000), create=SPEC)
record = experts(0, 45_000)
for turn in range(1_000_000):
    for i in range({ROUND}):
        writer.put(f"r{{os.getpid()}}.{{turn}}:{{i}}", record, "LTK")
    writer.flush(timeout_s=120)
    print(f"r{{os.getpid()}}.{{turn}}", writer.stats().worker_pid, flush=True)
    sys.stdin.readline()
"""


def private_bytes(pid: int) -> int:
    """Memory that the process shares with nobody."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


class Killer(threading.Thread):
    """Kills the worker every few seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.worker = self.kills = 0

    def run(self) -> None:
        while not self.stopped.wait(2 * KILL_EVERY_S * random.random()):
            if self.worker and alive(self.worker):
                os.kill(self.worker, signal.SIGKILL)
                self.kills += 1


def numbers_of(root: Path, name: str) -> list[int]:
    """The numbers of a round's records that are stored, each as often as it is."""
    folder = root / f"data_id={name}"
    return sorted(int(key.partition(":")[2]) for key in stored_rows(folder).elements())


def drive(engine: Engine, root: Path, killer: Killer) -> list[tuple[int, int]]:
    """Rounds for its share of the time; (private bytes, open files) of the engine after each."""
    sizes = []
    end_s = time.monotonic() + SOAK_S / ENGINES
    pid = engine.process.pid
    while time.monotonic() < end_s:
        name, worker = engine.line().split()
        killer.worker = int(worker)
        assert numbers_of(root, name) == list(range(ROUND))
        shutil.rmtree(root / f"data_id={name}")
        sizes.append((private_bytes(pid), len(list(Path(f"/proc/{pid}/fd").iterdir()))))
        assert engine.process.stdin is not None
        engine.process.stdin.write("go\n")
        engine.process.stdin.flush()
    return sizes


def test_soak(tmp_path: Path) -> None:
    root, place = tmp_path / "ds", tmp_path / "spools"
    place.mkdir()
    killer = Killer()
    killer.start()
    try:
        for number in range(ENGINES):
            with Engine(CODE, root, place) as engine:
                sizes = drive(engine, root, killer)
                worker, killer.worker = killer.worker, 0
                (spool,) = spools(place)
                if number % 2 and alive(worker):
                    os.kill(worker, signal.SIGKILL)
                engine.process.kill()  # in the middle of a round
            quarter = len(sizes) // 4
            early, late = sizes[quarter : 2 * quarter] or sizes, sizes[-quarter:] or sizes
            assert max(late)[0] - max(early)[0] < GROWTH_BYTES
            assert max(files for _, files in late) <= max(files for _, files in early)
            with rr.RoutingWriter(root, options(place)):
                until(lambda spool=spool: not spool.exists(), "the engine's worker or the next writer made all durable")
            for folder in root.glob("data_id=*"):
                numbers = numbers_of(root, folder.name.removeprefix("data_id="))
                assert numbers == list(range(len(numbers))), "what was accepted of the last round, in order, each once"
                shutil.rmtree(folder)
            assert spools(place) == []
    finally:
        killer.stopped.set()
        killer.join()
    assert killer.kills > 0
