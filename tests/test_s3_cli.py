"""The operator's commands over S3, with nothing but the environment for credentials."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import rr_dataset as rr
from cli.main import main

if TYPE_CHECKING:
    from weed import Place


def test_commands_of_an_operator(
    s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    uri = s3.uri

    def run(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*args])
        out, err = capfd.readouterr()
        assert (ended.value.code or 0, err) == (0, ""), args
        return out

    run("create", uri, "--layers", "3-8", "--experts", "64", "--top-k", "4")
    with rr.RoutingWriter(uri, rr.WriterOptions(spool_bytes=8 << 20, slab_bytes=1 << 20)) as writer:
        for number in range(4):
            writer.put(f"p{number % 2}:{number}:0:0", np.zeros((5, 6, 4), np.uint8))
        writer.flush(60)
    assert "4 puts" in run("info", uri)
    assert run("ls", uri, "--prefix", "p1").split() == ["p1:1:0:0", "p1:3:0:0"]
    run("get", uri, "p1:1:0:0", "--npz", str(tmp_path / "record.npz"))
    run("stats", uri)
    assert "sound" in run("verify", uri)
    for command in ("compact", "gc", "maintain"):
        run(command, uri)
    run("copy", uri, f"{uri}-copy", "--prefix", "p1")
    run("export", uri, str(tmp_path / "out"))
    run("export", uri, f"{uri}-out", "--counts")
    run("recover", str(tmp_path), "--uri", uri)
    run("delete", uri, "--prefix", "p0", "--yes")
    assert run("ls", uri).split() == ["p1:1:0:0", "p1:3:0:0"]
    run("doctor", uri, "--spool-dir", str(tmp_path))
