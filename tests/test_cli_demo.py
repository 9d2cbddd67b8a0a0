"""`rr-dataset demo`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engines import until

import rr_dataset as rr
from cli import output
from cli.main import main
from rr_dataset.demo.replay import Replay

SCRIPT = str(Path(sys.executable).with_name("rr-dataset"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*args: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        return (ended.value.code or 0, *capfd.readouterr())

    return run


@pytest.mark.parametrize("entered", [True, False])
def test_demo_says_what_both_sides_did_and_leaves_a_dataset_to_look_at(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entered: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(SCRIPT).parent}:/usr/bin:/bin" if entered else "/usr/bin:/bin")
    code, out, err = run("demo", "it's here", "--rate", 0)
    assert (code, err) == (0, "")
    assert re.search(r"put +200 records, 98,089 tokens, 6.3 MB\n", out)
    assert re.search(r"put latency +median \d+ us, p99 \d+ us\n", out)
    assert re.search(r"put to visible +median \d+ ms, p99 \d+ ms\n", out)
    assert re.search(r"read a batch +32 records, 2 layers, 4,096 tokens: 65.5 kB in .*/s\n", out)
    assert re.search(r"read everything +200 records, 8 layers, 98,089 tokens: 6.3 MB in .*/s\n", out)
    assert re.search(r"compared +all as the engine had them\n", out)
    following = re.findall(r"^  (\S*rr-dataset) (.*)$", out, re.MULTILINE)
    assert [(program == "rr-dataset", line.split()[0]) for program, line in following] == [
        (entered, "info"),
        (entered, "ls"),
        (entered, "get"),
    ]
    for command in following:
        assert subprocess.run(["sh", "-c", " ".join(command)], capture_output=True, text=True, check=True).stdout


def test_demo_tells_programs_what_both_sides_did(run: Any, tmp_path: Path) -> None:
    told = json.loads(run("demo", tmp_path / "a", "--rate", 0, "--json")[1])
    assert told["engine"]["records"] == told["trainer"]["everything"]["records"] == 200
    assert len(list(rr.open_dataset(tmp_path / "a").ids())) == 200


def test_ctrl_c_ends_a_demo_without_a_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [SCRIPT, "demo", tmp_path / "a", "--rate", "10"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as demo:  # fmt: skip
        until((tmp_path / "a" / "_rr" / "format.json").exists, "a dataset")
        until(lambda: any(rr.open_dataset(tmp_path / "a").ids()), "both sides at work")
        assert children(demo.pid) == ["rr_dataset.demo.engine", "rr_dataset.demo.trainer"]
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does
        _, err = demo.communicate()
    assert demo.returncode not in (0, output.EXIT_FOUND_PROBLEMS)
    assert "Traceback" not in err
    assert children(demo.pid) == []


def children(pid: int) -> list[str]:
    """The modules that the children of a process run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            words = stat.with_name("cmdline").read_text().split("\0")
            if parent == pid and "-m" in words:
                found.append(words[words.index("-m") + 1])
    return sorted(found)


def test_a_demo_that_differs_found_problems(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Replay.trainer

    def differing(self: Replay) -> Any:
        report = trainer(self)
        object.__setattr__(report.batch, "different", 3)
        return report

    monkeypatch.setattr(Replay, "trainer", differing)
    code, out, _ = run("demo", tmp_path / "a", "--rate", 0)
    assert code == 3
    assert "3 RECORDS DIFFER FROM THE SOURCE" in out
