"""The worker process by itself; what it does for a writer is tested with the writer, the supervisor and the crashes."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from rr_dataset import worker as module
from tests.engines import SPEC, experts, stored_rows


def test_a_worker_whose_engine_is_gone_before_it_starts_just_ends() -> None:
    script = (
        "import socket, sys; from rr_dataset.worker import main; "
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); b.close(); main(a.detach(), 1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("instead", ["nothing", "mount point", "dataset"])
def test_nothing_is_durable_while_the_dataset_is_not_there(tmp_path: Path, instead: str) -> None:
    root = tmp_path / "ds"
    options = rr.WriterOptions(spool_dir=str(tmp_path), spool_bytes=8 << 20, slab_bytes=1 << 20)
    with rr.RoutingWriter(root, options, create=SPEC) as writer:
        writer.put("a:1", experts(1), layout="LTK")
        assert writer.flush().records == 1
        root.rename(tmp_path / "away")
        if instead == "mount point":
            root.mkdir()
        elif instead == "dataset":
            rr.create_dataset(root, SPEC)
        writer.put("a:2", experts(2), layout="LTK")
        with pytest.raises(rr.FlushTimeoutError) as caught:
            writer.flush(timeout_s=1)
        assert "is not here any more" in str(caught.value.__cause__)
        assert not list(root.rglob("*.arrow"))
        if root.exists():
            root.rename(tmp_path / "other")
        (tmp_path / "away").rename(root)
        assert writer.flush().records == 1
    assert stored_rows(root) == {"a:1": 1, "a:2": 1}


def test_pauses_grow_to_a_limit_and_no_two_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    class Told:
        def send(self, kind: str, **fields: Any) -> None:
            sent.append({"kind": kind, **fields})

    monkeypatch.setattr(module, "_bound_log", lambda: None)
    worker = object.__new__(module.Worker)
    worker._channel = Told()  # type: ignore[assignment]
    retry = None
    pauses = []
    for _ in range(200):
        retry = worker._failed(tmp_path / "x.slab", retry, rr.StorageError(13, "no", "s3://b/x"))
        pauses.append(retry.pause_s)
    assert pauses[0] == module.FIRST_PAUSE_S
    assert all(later == min(2 * earlier, module.LAST_PAUSE_S) for earlier, later in pairwise(pauses))
    shares = [message["wait_s"] / pause_s for message, pause_s in zip(sent, pauses, strict=True)]
    assert min(shares) >= 0.5
    assert max(shares) <= 1.5
    assert max(shares) - min(shares) > 0.5
    assert len(set(shares)) == len(shares)
    assert sent[0]["os_error"] == [13, "no", "s3://b/x"]
