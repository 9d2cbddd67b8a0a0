"""Deleters and workers killed before each call of the operating system that changes or lists something.

Children are forked and patched, one for each call, and die of SIGKILL; then fresh readers look, here, and the work is
done again. What must live is told by a model that shares no code with the product.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from rr_dataset.publisher import UNPUBLISHED, slabs_in
from tests.engines import experts
from tests.spooled import delete, make_spool, publisher_of, put, quick_folder
from tests.stored import Stored

CALLS = ("link", "unlink", "rmdir", "mkdir", "fsync", "scandir", "pwrite")
OLD = ("a:1:0", "a:1:1", "a:2:0", "b:1:0", "b:2:0", "c:1:0")
# (kind, what) in the order in which one writer does it: its later puts live
OPERATIONS = (
    ("put", "a:1:0"), ("put", "a:2:0"), ("put", "b:1:0"), ("delete", "a"), ("put", "a:1:0"), ("put", "d:1:0"),
    ("delete", "b:1"), ("put", "b:3:0"), ("put", "a:4:0"),
)  # fmt: skip


def prepare_delete(root: Path) -> None:
    stored = Stored(root / "ds")
    stored.shard(*(stored.row(i) for i in OLD[:2]))
    for i in OLD[2:]:
        stored.put(i)


def act_delete(root: Path) -> None:
    rr.delete(root / "ds", prefixes=["a", "b:1"], ids=["c:1:0", "b:2:7"])


def prepare_slabs(root: Path) -> None:
    stored = Stored(root / "ds")
    for i in OLD:
        stored.put(i)
    spool = make_spool(root, stored.dataset)
    stamps = []
    for number, (kind, what) in enumerate(OPERATIONS):
        if number == 5:
            spool.close_active()
        stamps.append(
            put(spool, stored.dataset, what, experts(number)) if kind == "put" else delete(spool, "prefix", what)
        )
    spool.close_active()
    spool.close(remove=False)
    (root / "stamps").write_text(" ".join(map(str, stamps)))


def act_slabs(root: Path, *, late_deletes: bool = False) -> None:
    publisher = publisher_of(rr.open_dataset(root / "ds"))
    (directory,) = root.glob("rr_dataset-*/*")
    slabs = slabs_in(directory, UNPUBLISHED)
    for slab in reversed(slabs) if late_deletes else slabs:
        publisher.publish(slab)
    publisher.close()


def act_late_deletes(root: Path) -> None:
    act_slabs(root, late_deletes=True)


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "delete": (prepare_delete, act_delete),
    "slabs": (prepare_slabs, act_slabs),
    "late deletes": (prepare_slabs, act_late_deletes),
}


def die_at(number: int) -> None:
    """Kill this process right before it makes the call with this number."""
    left = number
    lock = threading.Lock()

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            with lock:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                    signal.pause()
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def drive(base: Path, scenario: str) -> None:
    """Prepare and act in `base/0`, `base/1` ..., killed one call later each time, until one gets through."""
    prepare, act = SCENARIOS[scenario]
    for number in range(1000):
        root = base / str(number)
        root.mkdir()
        prepare(root)
        pid = os.fork()
        if not pid:
            die_at(number)
            act(root)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            print(number)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL, status


def killed(base: Path, scenario: str) -> int:
    """How many calls there were to be killed at."""
    code = "import sys; from pathlib import Path; from tests.test_delete_kills import drive; drive(Path(sys.argv[1]), sys.argv[2])"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, str(base), scenario]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def shown(root: Path) -> dict[str, int]:
    """Id and stamp of what a fresh reader shows."""
    dataset = rr.open_dataset(root / "ds")
    return {head.request_id: head.rows[-1].t_submit for head in dataset.heads(list(dataset.ids()))}


def directories(root: Path) -> set[str]:
    return {path.name for path in (root / "ds").glob("*=*")}


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


def test_a_killed_deleter_has_deleted_all_or_nothing(base: Path) -> None:
    calls = killed(base, "delete")
    assert calls > 20
    outcomes = []
    for number in range(calls + 1):
        root = base / str(number)
        found = set(shown(root))
        assert found in (set(OLD), {"b:2:0"}), number
        outcomes.append(len(found))
        act_delete(root)
        assert set(shown(root)) == {"b:2:0"}
        assert directories(root) == {"data_id=b"}
        rr.delete(root / "ds", everything=True)
        assert [path.name for path in (root / "ds").iterdir()] == ["_rr"]
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[0] == len(OLD)


def model(stamps: list[int], operations: int) -> dict[str, int]:
    """What lives after the first `operations` of the writer, oldest first; what was there before has stamps of 1970."""
    alive = dict.fromkeys(OLD, 0)
    for (kind, what), stamp in zip(OPERATIONS[:operations], stamps, strict=False):
        if kind == "put":
            alive[what] = stamp
        else:
            alive = {i: t for i, t in alive.items() if i.split(":")[: what.count(":") + 1] != what.split(":")}
    return alive


def plain(found: dict[str, int]) -> dict[str, int]:
    return {i: t if t > 1000 else 0 for i, t in found.items()}


@pytest.mark.parametrize("scenario", ["slabs", "late deletes"])
def test_a_killed_worker_leaves_what_a_replay_completes(base: Path, scenario: str) -> None:
    calls = killed(base, scenario)
    assert calls > 30
    for number in range(calls + 1):
        root = base / str(number)
        stamps = [int(text) for text in (root / "stamps").read_text().split()]
        found = plain(shown(root))
        if scenario == "slabs":  # what was put after a delete is never seen without the delete
            later_than_the_last = set(found.values()) & set(stamps[7:])
            dead = {i for i in found if found[i] < stamps[3] and i.startswith("a:")}
            dead |= {i for i in found if found[i] < stamps[6] and i.startswith("b:1")}
            assert not (later_than_the_last and dead), number
        act_slabs(root)
        assert plain(shown(root)) == model(stamps, len(OPERATIONS)), number
        act_slabs(root)
        assert plain(shown(root)) == model(stamps, len(OPERATIONS))
        files = [path.name for path in (root / "ds").glob("data_id=a/*")]
        assert all(int(name.split("-")[2], 16) > stamps[3] for name in files), number
