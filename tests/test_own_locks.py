"""Descriptors that a forked child does not have."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rr_dataset import own_locks

FORKS = """
import os, sys, threading
from rr_dataset import own_locks
ours, given_up, other = (os.open(sys.argv[1], os.O_RDWR) for _ in range(3))
with own_locks.NO_FORK:
    assert own_locks.keep(ours) == ours
    own_locks.keep(given_up)
own_locks.close(given_up)
again = os.open(sys.argv[1], os.O_RDWR)
assert again == given_up, "its number is another file's now"
child = os.fork()
there = []
for fd in (ours, again, other):
    try:
        os.fstat(fd)
    except OSError:
        there.append(False)
    else:
        there.append(True)
free = []
thread = threading.Thread(target=lambda: free.append(own_locks.NO_FORK.acquire(timeout=20)))
thread.start()
thread.join()
code = int(free != [True] or there != ([True, True, True] if child else [False, True, True]))
if not child:
    os._exit(code)
sys.exit(code or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_has_those_that_are_kept_no_more(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path / "lock")], check=True, cwd=Path(__file__).parents[1], timeout=60
    )


def test_one_that_is_closed_gives_its_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with own_locks.NO_FORK:
        fd = own_locks.keep(os.open(path, os.O_RDWR | os.O_CREAT))
    fcntl.flock(fd, fcntl.LOCK_EX)
    with path.open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        own_locks.close(fd)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
