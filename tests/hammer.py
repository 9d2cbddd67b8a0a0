"""Writers, compactors, a deleter, gc and readers in processes of their own, on one dataset whose grace is short.

Each prompt is written by one writer, which tells the others by files what it is about to do and what has come true; readers
hold every answer against that. They go on until each has done something often enough, so a slow machine takes longer and no less
is tried. `python -m tests.hammer ROLE URI BOARD` is one of the processes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import rr_dataset as rr

SPEC = rr.RoutingSpec((0, 1, 2), num_experts=250, top_k=4)
PROMPTS = 6  # of each writer
SAMPLES = 4
ROLES = ("write-0", "write-1", "compact-0", "compact-1", "delete", "gc", "read-0", "read-1")
CAP_S = 240.0  # what has not come by then hangs


def experts(prompt: str, sample: int, version: int) -> np.ndarray:  # type: ignore[type-arg]
    """What version `version` of a record is: its version can be told from the bytes."""
    tokens = 20 + 7 * sample
    ids = np.random.default_rng([sum(prompt.encode()), sample, version]).integers(0, 250, (3, tokens, 4), np.uint8)
    ids[0, 0] = [version >> shift & 127 for shift in (0, 7, 14, 21)]
    return ids


def version_of(ids: np.ndarray) -> int:  # type: ignore[type-arg]
    return sum(int(digit) << shift for digit, shift in zip(ids[0, 0], (0, 7, 14, 21), strict=True))


class Board:
    """What is known of each prompt, one file each, replaced as a whole by its writer or the deleter; and how much each role did."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self._dir.mkdir(exist_ok=True)

    def tell(self, kind: str, prompt: str, value: int) -> None:
        path = self._dir / f"{kind}-{prompt}"
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        staged.write_text(str(value))
        staged.rename(path)

    def read(self, kind: str, prompt: str) -> int:
        try:
            return int((self._dir / f"{kind}-{prompt}").read_text())
        except FileNotFoundError:
            return -1

    def goes_on(self, role: str, done: int) -> bool:
        """Say how much was done; whether to do more."""
        self.tell("count", role, done)
        return self.read("stop", "all") < 0

    def prompt(self, chance: random.Random) -> str:
        """Any of any writer."""
        writers = self.read("writers", "all")
        return f"w{chance.randrange(writers)}p{chance.randrange(PROMPTS)}"


def write(uri: str, board: Board, role: str, seed: int) -> None:
    """Puts a version of all samples, flushes, tells; now and then deletes its own prompt first."""
    chance, version = random.Random(seed), 0
    options = rr.WriterOptions(
        spool_bytes=16 << 20, slab_bytes=4 << 20, spool_dir=os.environ["RR_HAMMER_SPOOLS"], block_timeout_s=CAP_S,
        start_timeout_s=CAP_S, drain_timeout_s=CAP_S,
    )  # fmt: skip
    with rr.RoutingWriter(uri, options) as writer:
        while board.goes_on(role, version):
            prompt = f"w{seed}p{chance.randrange(PROMPTS)}"
            version += 1
            board.tell("begun", prompt, version)
            if chance.random() < 0.2:
                writer.delete_prefix(prompt)
            for sample in range(SAMPLES):
                writer.put(f"{prompt}:{sample}:0:0", experts(prompt, sample, version), layout="LTK")
            writer.flush(timeout_s=CAP_S)
            board.tell("done", prompt, version)


def delete(uri: str, board: Board, role: str, seed: int) -> None:
    """Deletes prompts of the writers from outside: nothing that was begun before may be seen after."""
    chance, count = random.Random(seed), 0
    while board.goes_on(role, count):
        prompt = board.prompt(chance)
        done = board.read("done", prompt)
        board.tell("deleting", prompt, board.read("deleting", prompt) + 2 | 1)  # odd: one is under way
        if chance.random() < 0.5:
            rr.delete(uri, prefixes=[prompt])
        else:
            rr.delete(uri, ids=[f"{prompt}:{sample}:0:0" for sample in range(SAMPLES)])
        board.tell("gone", prompt, done)
        board.tell("perhaps", prompt, board.read("begun", prompt))  # a put beside it may land on either side
        board.tell("deleting", prompt, board.read("deleting", prompt) + 1)
        count += 1
        time.sleep(0.05)


def read(uri: str, board: Board, role: str, seed: int) -> None:
    """What was done before the call and not deleted is there, nothing older, nothing deleted, never half."""
    chance, count = random.Random(seed), 0
    dataset = rr.open_dataset(uri)
    while board.goes_on(role, count):
        prompt = board.prompt(chance)
        ids = [f"{prompt}:{sample}:0:0" for sample in range(SAMPLES)]
        deleting, gone, done = (board.read(kind, prompt) for kind in ("deleting", "gone", "done"))
        records = dataset.get_many(ids, on_missing="none")
        begun, perhaps = board.read("begun", prompt), board.read("perhaps", prompt)
        deleting_after = board.read("deleting", prompt)
        undisturbed = deleting == deleting_after and (deleting < 0 or deleting % 2 == 0)
        for sample, record in enumerate(records):
            if record is None:
                there = undisturbed and begun == done > perhaps
                assert not there, f"{ids[sample]}: version {done} is not there"
                continue
            count += 1
            ids_read = record.to_numpy()
            version = version_of(ids_read)
            assert np.array_equal(ids_read, experts(prompt, sample, version)), f"{ids[sample]}: other bytes"
            assert len(record.rows) == 1, f"{ids[sample]}: {len(record.rows)} rows"
            assert version <= begun, f"{ids[sample]}: version {version} of the future, {begun}"
            assert version > gone, f"{ids[sample]}: version {version} was deleted, up to {gone}"
            if undisturbed:
                assert version >= done, f"{ids[sample]}: version {version} is older than {done}"


def compact(uri: str, board: Board, role: str, seed: int) -> None:
    count = 0
    while board.goes_on(role, count):
        report = rr.compact(uri, compression="zstd:1", jobs=1 + seed % 2)
        assert report.damaged == (), report.damaged
        count += report.tasks
        time.sleep(0.1)


def collect(uri: str, board: Board, role: str, seed: int) -> None:
    count = 0
    while board.goes_on(role, count):
        report = rr.collect_garbage(uri)
        count += report.covered + report.replaced
        time.sleep(0.2 + 0.1 * seed)


WORK: dict[str, Callable[[str, Board, str, int], None]] = {
    "write": write, "compact": compact, "delete": delete, "gc": collect, "read": read,
}  # fmt: skip


def hammer(
    uri: str,
    base: Path,
    *,
    least: int,
    seconds: float = 0.0,
    roles: Sequence[str] = ROLES,
    environment: dict[str, str] | None = None,
) -> Board:
    """Run all on a dataset until each has done something `least` times, and so many seconds are over.

    base: a folder for the board and the spools. Raises AssertionError with what a process complains of.
    """
    board, spools = Board(base / "board"), base / "spools"
    spools.mkdir()
    board.tell("writers", "all", sum(role.startswith("write") for role in roles))
    began = time.monotonic()
    running = {}
    for role in roles:
        running[role] = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tests.hammer", role, uri, str(base / "board")],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **(environment or {}), "RR_HAMMER_SPOOLS": str(spools)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def done() -> dict[str, int]:
        return {role: board.read("count", role) for role in roles}

    while all(process.poll() is None for process in running.values()):
        waited = time.monotonic() - began
        if waited > seconds and (min(done().values()) >= least or waited > seconds + CAP_S):
            break
        time.sleep(0.05)
    board.tell("stop", "all", 1)
    ended = {role: (process.communicate()[1], process.returncode) for role, process in running.items()}
    for role, (error, code) in ended.items():
        assert code == 0, f"{role}: {error[-4000:]}"
    assert min(done().values()) >= least, f"after {CAP_S:g} s: {json.dumps(done())}"
    return board


def main() -> None:
    role, uri, board = sys.argv[1:]
    name, _, number = role.partition("-")
    WORK[name](uri, Board(Path(board)), role, int(number or 0))


if __name__ == "__main__":
    main()
