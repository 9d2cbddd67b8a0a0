"""Writers, compactors, a deleter, gc and readers in processes of their own, on one dataset whose grace is short.

Each prompt is written by one writer, which tells the others by files what it is about to do and what has come true; readers
hold every answer against that. `python -m tests.hammer ROLE ROOT SECONDS SEED` is one of the processes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import rr_dataset as rr

SPEC = rr.RoutingSpec((0, 1, 2), num_experts=250, top_k=4)
GRACE_S = 2.0  # longer than any listing here
PROMPTS = 6
SAMPLES = 4
ROLES = ("write-0", "write-1", "compact-0", "compact-1", "delete", "gc", "read-0", "read-1")


def experts(prompt: str, sample: int, version: int) -> np.ndarray:  # type: ignore[type-arg]
    """What version `version` of a record is: its version can be told from the bytes."""
    tokens = 20 + 7 * sample
    ids = np.random.default_rng([sum(prompt.encode()), sample, version]).integers(0, 250, (3, tokens, 4), np.uint8)
    ids[0, 0] = [version >> shift & 127 for shift in (0, 7, 14, 21)]
    return ids


def version_of(ids: np.ndarray) -> int:  # type: ignore[type-arg]
    return sum(int(digit) << shift for digit, shift in zip(ids[0, 0], (0, 7, 14, 21), strict=True))


class Board:
    """What is known of each prompt, one file each, replaced as a whole by its writer or the deleter."""

    def __init__(self, root: Path) -> None:
        self._dir = root.parent / "board"
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


def write(root: Path, until: float, seed: int) -> int:
    """Puts a version of all samples, flushes, tells; now and then deletes its own prompt first."""
    chance, board, version = random.Random(seed), Board(root), 0
    spool = root.parent / f"spool-{seed}"
    spool.mkdir()
    options = rr.WriterOptions(spool_bytes=16 << 20, slab_bytes=4 << 20, spool_dir=str(spool), block_timeout_s=60.0)
    with rr.RoutingWriter(root, options) as writer:
        while time.time() < until:
            prompt = f"w{seed}p{chance.randrange(PROMPTS)}"
            version += 1
            board.tell("begun", prompt, version)
            if chance.random() < 0.2:
                writer.delete_prefix(prompt)
            for sample in range(SAMPLES):
                writer.put(f"{prompt}:{sample}:0:0", experts(prompt, sample, version), layout="LTK")
            writer.flush(timeout_s=120)
            board.tell("done", prompt, version)
    return version


def delete(root: Path, until: float, seed: int) -> int:
    """Deletes prompts of the writers from outside: nothing that was begun before may be seen after."""
    chance, board, count = random.Random(seed), Board(root), 0
    while time.time() < until:
        prompt = f"w{chance.randrange(2)}p{chance.randrange(PROMPTS)}"
        done = board.read("done", prompt)
        board.tell("deleting", prompt, board.read("deleting", prompt) + 2 | 1)  # odd: one is under way
        if chance.random() < 0.5:
            rr.delete(root, prefixes=[prompt])
        else:
            rr.delete(root, ids=[f"{prompt}:{sample}:0:0" for sample in range(SAMPLES)])
        board.tell("gone", prompt, done)
        board.tell("perhaps", prompt, board.read("begun", prompt))  # a put beside it may land on either side
        board.tell("deleting", prompt, board.read("deleting", prompt) + 1)
        count += 1
        time.sleep(0.05)
    return count


def read(root: Path, until: float, seed: int) -> int:
    """What was done before the call and not deleted is there, nothing older, nothing deleted, never half."""
    chance, board, count = random.Random(seed), Board(root), 0
    dataset = rr.open_dataset(root)
    while time.time() < until:
        prompt = f"w{chance.randrange(2)}p{chance.randrange(PROMPTS)}"
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
            ids_read = record.to_numpy()
            version = version_of(ids_read)
            assert np.array_equal(ids_read, experts(prompt, sample, version)), f"{ids[sample]}: other bytes"
            assert len(record.rows) == 1, f"{ids[sample]}: {len(record.rows)} rows"
            assert version <= begun, f"{ids[sample]}: version {version} of the future, {begun}"
            assert version > gone, f"{ids[sample]}: version {version} was deleted, up to {gone}"
            if undisturbed:
                assert version >= done, f"{ids[sample]}: version {version} is older than {done}"
        count += 1
    return count


def compact(root: Path, until: float, seed: int) -> int:
    count = 0
    while time.time() < until:
        report = rr.compact(root, compression="zstd:1", jobs=1 + seed % 2)
        assert report.damaged == (), report.damaged
        count += report.tasks
        time.sleep(0.1)
    return count


def collect(root: Path, until: float, seed: int) -> int:
    count = 0
    while time.time() < until:
        report = rr.collect_garbage(root)
        count += report.covered + report.replaced
        time.sleep(0.2 + 0.1 * seed)
    return count


WORK: dict[str, Callable[[Path, float, int], int]] = {
    "write": write, "compact": compact, "delete": delete, "gc": collect, "read": read,
}  # fmt: skip


def hammer(root: Path, seconds: float) -> dict[str, int]:
    """Run all; what each has done. Raises AssertionError with what a process complains of."""
    rr.create_dataset(root, SPEC, grace_s=GRACE_S)
    until = time.time() + seconds
    running = {}
    for role in ROLES:
        command = [sys.executable, "-W", "error", "-m", "tests.hammer", role, str(root), str(until)]
        running[role] = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    ended = {role: (*process.communicate(), process.returncode) for role, process in running.items()}
    for role, (_, error, code) in ended.items():
        assert code == 0, f"{role}: {error[-4000:]}"
    return {role: json.loads(out) for role, (out, _, _) in ended.items()}


def main() -> None:
    role, root, until = sys.argv[1:]
    name, _, number = role.partition("-")
    sys.stdout.write(json.dumps(WORK[name](Path(root), float(until), int(number or 0))))


if __name__ == "__main__":
    main()
