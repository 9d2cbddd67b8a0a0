"""`rr-dataset recover` as an operator and as a script see it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from cli.main import main
from rr_dataset.clock import HybridClock, wall_ms
from tests.engines import SPEC, experts, stored_rows
from tests.spooled import make_spool, put


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    return rr.create_dataset(tmp_path / "ds", SPEC)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*args: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["recover", *map(str, args)])
        return (ended.value.code or 0, *capfd.readouterr())

    return run


def dead_spool(base: Path, dataset: Any, *, days_old: int = 0) -> Path:
    spool = make_spool(base, dataset)
    spool._clock = HybridClock(lambda: wall_ms() - days_old * 86_400_000)
    put(spool, dataset, "a:1", experts(1))
    spool.close(remove=False)
    return spool.directory


def test_what_is_recovered_is_said_and_is_there(tmp_path: Path, dataset: Any, run: Any) -> None:
    dead = dead_spool(tmp_path, dataset)
    code, out, err = run(tmp_path, "--dry-run")
    assert (code, err, dead.exists()) == (0, "", True)
    assert str(dead) in out
    code, out, err = run(tmp_path, "--json")
    assert (code, err) == (0, "")
    (report,) = json.loads(out)
    assert (report["path"], report["outcome"], report["records"]) == (str(dead), "recovered", 1)
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}
    assert run(tmp_path) == (0, f"no spool in {tmp_path}\n", "")


def test_what_stays_makes_exit_code_3(tmp_path: Path, dataset: Any, run: Any) -> None:
    dead = dead_spool(tmp_path, dataset, days_old=8)
    code, out, _ = run(tmp_path)
    assert code == 3
    assert "recover --force" in out
    assert run(tmp_path, "--json")[0] == 3
    assert run(dead, "--force")[0] == 0
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}


def test_a_living_spool_is_no_problem(tmp_path: Path, dataset: Any, run: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    code, out, _ = run(tmp_path)
    assert code == 0
    assert "its engine or its worker lives" in out
    spool.close(remove=True)


def test_wrong_places_are_one_red_line(tmp_path: Path, run: Any) -> None:
    code, out, err = run(tmp_path / "nowhere")
    assert (code, out) == (1, "")
    assert "give the spool_dir of the writers" in err
    assert run()[0] == 2


def test_the_path_of_a_dataset_is_taken_for_what_it_is(tmp_path: Path, dataset: Any, run: Any) -> None:
    code, out, err = run(tmp_path / "ds")
    assert (code, out) == (1, "")
    assert "ds is a dataset, and SPOOL_DIR is where its writers keep records that are not yet in it" in " ".join(
        err.split()
    )


def test_a_foreign_file_is_named_and_kept(tmp_path: Path, dataset: Any, run: Any) -> None:
    dead = dead_spool(tmp_path, dataset)
    (dead / "notes.txt").write_text("precious")
    for option in ("--dry-run", "--json"):
        code, out, _ = run(tmp_path, option)
        assert code == 3
        assert "notes.txt" in out
    assert (dead / "notes.txt").read_text() == "precious"
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}


def test_a_dataset_made_anew_is_another_one(tmp_path: Path, dataset: Any, run: Any) -> None:
    dead_spool(tmp_path, dataset)
    shutil.rmtree(tmp_path / "ds")
    anew = rr.create_dataset(tmp_path / "ds", SPEC)
    code, out, _ = run(tmp_path, "--json")
    (report,) = json.loads(out)
    assert (code, report["dataset"]) == (3, dataset.format.uuid)
    assert anew.format.uuid in report["reason"]
    assert "if it is gone for good, delete this folder" in report["reason"]


def test_the_dataset_can_be_given(tmp_path: Path, dataset: Any, run: Any) -> None:
    dead_spool(tmp_path, dataset)
    (tmp_path / "ds").rename(tmp_path / "moved")
    assert run(tmp_path)[0] == 3
    assert run(tmp_path, "--uri", tmp_path / "moved")[0] == 0
    assert stored_rows(tmp_path / "moved") == {"a:1": 1}
