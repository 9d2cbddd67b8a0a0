"""`rr-dataset delete`, and `create --keep`: what they ask, print and do."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from cli.main import main
from cli.options import parse_duration
from rr_dataset.clock import pack, wall_ms
from tests.stored import Stored


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(*args: object, answer: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    made = Stored(tmp_path / "data")
    made.shard(made.row("a:1:0", run="old"), made.row("a:2:0", run="old"))
    made._stamp = pack(wall_ms() - 5000)
    made.shard(made.row("b:1:0", run="\x1b[31mbusy"), level=1)  # raw ones of one writer are of one run
    made.put("a\x1b:1", run="old")
    return made


def ids(stored: Stored) -> list[str]:
    return sorted(stored.dataset.ids())


ALL = ["a\x1b:1", "a:1:0", "a:2:0", "b:1:0"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (("--prefix", "a", "--prefix", "b:1"), ["a\x1b:1"]),
        (("--glob", "?:1"), ["a\x1b:1", "a:2:0"]),
        (("--run", "old"), ["b:1:0"]),
        (("--older-than", "1h"), ["a\x1b:1", "b:1:0"]),
        (("--older-than", "1", "--prefix", "b"), ["a\x1b:1", "a:1:0", "a:2:0"]),
        (("--all",), []),
    ],
)
def test_delete_does_what_its_dry_run_says(run: Any, stored: Stored, options: tuple[str, ...], left: list[str]) -> None:
    code, out, err = run("delete", stored.root, *options, "--dry-run", "--json")
    said = json.loads(out)
    assert (code, err) == (0, "")
    assert ids(stored) == ALL
    code, out, err = run("delete", stored.root, *options, "--yes", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {name: said[name] for name in ("partitions", "files", "bytes", "records", "hidden")}
    assert ids(stored) == left
    for task in said["plan"]:
        assert not [name for name in task["remove"] if (stored.root / task["path"] / name).exists()]


def test_ids_from_a_file(run: Any, stored: Stored, tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(b"a:1:0\r\n\nnobody:7\na:2:0")
    code, out, _ = run("delete", stored.root, "--ids-file", tmp_path / "ids", "-y")
    assert code == 0
    assert "2 records in 1 directories" in out
    assert ids(stored) == ["a\x1b:1", "b:1:0"]


def test_it_asks_and_names_the_runs_that_may_still_write(run: Any, stored: Stored) -> None:
    code, out, err = run("delete", stored.root, "--all", answer="n\n")
    assert (code, out) == (1, "")
    assert "4 records in 3 directories" in err
    assert "run old, newest put" in err
    busy = next(line for line in err.splitlines() if "busy" in line)
    assert re.search(r"newest put .*, [0-9]+[sm] ago: its writer may still be open, and put more$", busy)
    assert "\x1b" not in err
    assert run("delete", stored.root, "--all")[0] == 1  # nobody answers
    assert ids(stored) == ALL
    code, out, err = run("delete", stored.root, "--all", "--json", answer="y\n")
    assert code == 0
    assert json.loads(out)["records"] == 4
    assert ids(stored) == []


def test_an_old_run_is_not_called_live(run: Any, stored: Stored) -> None:
    _, _, err = run("delete", stored.root, "--prefix", "a:1", answer="n\n")
    assert "may still be open" not in err
    assert "1 of them hidden until compaction" in err


def test_a_dry_run_for_people(run: Any, stored: Stored) -> None:
    code, out, err = run("delete", stored.root, "--all", "--dry-run")
    assert (code, err) == (0, "")
    assert "data_id=a" in out
    assert "would delete 4 records in 3 directories; 3 files" in out
    assert "\x1b" not in out
    code, out, _ = run("delete", stored.root, "--prefix", "nobody", "--dry-run")
    assert (code, out) == (0, "would delete 0 records in 0 directories; 0 files, 0 B\n")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 2),
        (("--older-than", "soon"), 2),
        (("--ids-file", "/nowhere"), 2),
        (("--prefix", "a:x:y"), 1),
        (("--glob", "a#*"), 1),
    ],
)
def test_wrong_usage_deletes_nothing(run: Any, stored: Stored, options: tuple[str, ...], code: int) -> None:
    ended, out, err = run("delete", stored.root, *options, "--yes")
    assert (ended, out) == (code, "")
    assert err
    assert ids(stored) == ALL


def test_no_dataset(run: Any, tmp_path: Path) -> None:
    assert run("delete", tmp_path / "none", "--all", "--yes")[0] == 1


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("7d", 604_800)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_keep_the_last_turn(run: Any, tmp_path: Path) -> None:
    create = ("create", tmp_path / "ds", "--layers", "3", "--experts", 8, "--top-k", 2)
    code, out, _ = run(*create, "--keep", "last_turn")
    assert code == 0
    assert "the last turn only" in out
    assert rr.open_dataset(tmp_path / "ds").format.keep == "last_turn"
    assert run(*create)[0] == 1  # it exists with another setting
    assert run(*create, "--keep", "some")[0] == 2
