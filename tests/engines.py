"""Engines for tests: small spools, records that differ, processes that are stopped or killed, and what the disk holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import rr_dataset as rr
from rr_dataset.options import MIB

SPEC = rr.RoutingSpec((3, 4, 7, 9), num_experts=200, top_k=2)
BIG = 45_000  # tokens: 360,000 bytes, two to a slab
DEADLINE_S = 60.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` is true; what it was."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not so after {DEADLINE_S:.0f} s: {what}"
        time.sleep(0.002)
    return value


def options(spool_dir: Path, **changes: Any) -> rr.WriterOptions:
    return rr.WriterOptions(**{"spool_bytes": 4 * MIB, "slab_bytes": MIB, "spool_dir": spool_dir, **changes})


def experts(seed: int, tokens: int = 20, spec: rr.RoutingSpec = SPEC) -> npt.NDArray[Any]:
    """[layers, tokens, top_k], another one for each seed."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, spec.num_experts, (spec.num_layers, tokens, spec.top_k)).astype(spec.dtype)


def stored_rows(root: Path) -> Counter[str]:
    """How often each request id stands in the files of a dataset. No code of ours."""
    found: Counter[str] = Counter()
    for path in root.rglob("*.arrow"):
        with pa.ipc.open_file(path) as file:
            for i in range(file.num_record_batches):
                found.update(file.get_batch(i)["request_id"].to_pylist())
    return found


def spools(spool_dir: Path) -> list[Path]:
    """The directories of all spools under a spool_dir."""
    return sorted(spool_dir.glob("rr_dataset-*/*"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does not run meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _state(pid) == "T", "the process is stopped")
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # killed meanwhile
            os.kill(pid, signal.SIGCONT)


def fill(writer: rr.RoutingWriter, name: str = "full", tokens: int = BIG) -> list[Any]:
    """Put until a record is dropped; the receipts, the last one of the drop."""
    receipts = []
    while not (receipts and isinstance(receipts[-1]._outcome, str)):
        receipts.append(writer.put(f"{name}:{len(receipts)}", experts(len(receipts), tokens), "LTK"))
    return receipts


PRELUDE = """
import os, sys
from pathlib import Path
import rr_dataset as rr
from tests.engines import SPEC, experts, options
root, spool_dir = Path(sys.argv[1]), Path(sys.argv[2])
"""


class Engine:
    """Another process that runs `code` with `root` and `spool_dir`; it speaks line by line.

    prefix: a command that runs it. how: more arguments of Popen.
    """

    def __init__(self, code: str, root: Path | str, spool_dir: Path, *, prefix: Sequence[str] = (), **how: Any) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", PRELUDE + code, str(root), str(spool_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            text=True,
            **how,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def line(self) -> str:
        """The next line it prints."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            raise AssertionError(self.process.communicate()[1])
        return text.strip()

    def kill(self) -> None:
        """Kill it; forked children of it may live on and hold the other ends of the pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def end(self) -> tuple[int, str]:
        """Let it go on to its end; exit code and what it wrote to stderr."""
        _, stderr = self.process.communicate("go\n", timeout=DEADLINE_S)
        return self.process.returncode, stderr
