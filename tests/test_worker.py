"""The worker process by itself; what it does for a writer is tested with the writer, the supervisor and the crashes."""

from __future__ import annotations

import subprocess
import sys


def test_a_worker_whose_engine_is_gone_before_it_starts_just_ends() -> None:
    script = (
        "import socket, sys; from rr_dataset.worker import main; "
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); b.close(); main(a.detach(), 1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
