"""`rr-dataset compact`, `gc` and `maintain`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import typer

import rr_dataset as rr
from cli.main import main
from cli.options import parse_part, parse_size
from cli.upkeep import _TARGET
from rr_dataset.compact_plan import TARGET_BYTES
from tests.lifecycle import fill, now_ms, seen, shards
from tests.stored import Stored


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*args: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        assert (ended.value.code or 0) == code, err
        return out + err

    return run


def test_compact_and_gc_say_what_they_did(run: Any, root: Path) -> None:
    _, model = fill(root, now_ms())
    assert "would compact 13 files in 4 tasks" in run("compact", root, "--dry-run")
    assert "compacted 13 files into 3" in run("compact", root, "--compression", "zstd:5", "--jobs", 2)
    told = json.loads(run("gc", root, "--dry-run", "--json"))
    assert told["staged"] == 0
    assert "would remove" in run("gc", root, "--dry-run")
    assert "removed" in run("gc", root)
    assert json.loads(run("compact", root, "--json"))["tasks"] == 0
    assert seen(root) == model


def test_a_plan_is_written_shared_out_and_carried_out(run: Any, root: Path, tmp_path: Path) -> None:
    _, model = fill(root, now_ms())
    plan = tmp_path / "plan.jsonl"
    run("compact", root, "--dry-run", "--plan", plan, "--target-size", "1MB")
    assert len(plan.read_text().splitlines()) == 4
    done = [json.loads(run("compact", root, "--plan", plan, "--shard", f"{i}/2", "--json"))["tasks"] for i in (1, 2)]
    assert sum(done) == 4
    assert json.loads(run("compact", root, "--plan", plan, "--json"))["skipped"] == 4
    assert seen(root) == model
    plan.write_text(plan.read_text() + "{}\n")
    assert "--plan" in run("compact", root, "--plan", plan, code=2)


def test_damage_is_named_with_its_own_exit_code(run: Any, root: Path) -> None:
    stored = Stored(root)
    path = stored.shard(stored.row("p:0:0:0"))
    stored.put("p:1:0:0")
    path.write_bytes(path.read_bytes()[:-9])
    assert path.name in run("compact", root, code=3)


@pytest.mark.parametrize(
    "option",
    [("--shard", "3/2"), ("--shard", "x"), ("--target-size", "0"), ("--target-size", "big"), ("--jobs", "0")],
)
def test_options_are_checked(run: Any, root: Path, option: tuple[str, str]) -> None:
    Stored(root)
    run("compact", root, *option, code=2)


def test_an_unknown_codec(run: Any, root: Path) -> None:
    Stored(root)
    assert "zip" in run("compact", root, "--compression", "zip", code=1)


def test_sizes_and_parts() -> None:
    assert [parse_size(text) for text in ("7", "1kB", "1 KiB", "64MiB", "1g", "2TB")] == [
        7, 1000, 1024, 64 << 20, 10**9, 2 * 10**12,
    ]  # fmt: skip
    assert parse_part("2/3") == (2, 3)
    assert parse_size(_TARGET) == TARGET_BYTES
    with pytest.raises(typer.BadParameter):
        parse_part("0/3")


def test_maintain_once(run: Any, root: Path) -> None:
    stored = Stored(root, ttl_s=100.0)
    stored.put("p:0:0:0")
    assert "deleted 1 records" in run("maintain", root)
    assert shards(root) == []
    assert json.loads(run("maintain", root, "--json"))["compacted"]["tasks"] == 0


def test_maintain_again_and_again(run: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(root)
    stored.put("p:0:0:0")
    passes = rr.maintain(root, 0.0, stop=(stop := threading.Event()))
    first = next(passes)
    stop.set()
    broken = type(first)(problem="the disk is full")
    monkeypatch.setattr(rr, "maintain", lambda *_: iter([first, broken]))
    told = run("maintain", root, "--every", 1)
    assert "compacted 1 files into 1" in told
    assert "cut short: the disk is full" in told


def test_a_terminal_shows_bytes_and_rate(root: Path) -> None:
    stored = Stored(root)
    for i in range(20):
        stored.put(f"p{i}:0:0:0", 2000)
    primary, secondary = pty.openpty()
    code = "import sys; from cli.main import main; main(sys.argv[1:])"
    done = subprocess.Popen(
        [sys.executable, "-c", code, "compact", str(root)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.DEVNULL,
        stderr=secondary,
        env={**os.environ, "COLUMNS": "120", "TERM": "xterm"},
    )
    os.close(secondary)
    shown = b""
    while True:
        try:
            data = os.read(primary, 4096)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        shown += data
    os.close(primary)
    assert done.wait() == 0
    assert b"compact" in shown
    assert b"/s" in shown
