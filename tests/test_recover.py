"""`recover`: dead spools made durable by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from rr_dataset.spool import Spool
from rr_dataset.spool_place import spools_of
from tests.dead_spools import contents, die, old, outcomes, two_dead_spools
from tests.engines import SPEC, experts, stored_rows
from tests.spooled import WRITER, make_spool, put


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    return rr.create_dataset(tmp_path / "ds", SPEC)


@pytest.fixture
def spool(tmp_path: Path, dataset: Any) -> Iterator[Spool]:
    made = make_spool(tmp_path, dataset)
    yield made
    made.close(remove=True)


@pytest.mark.parametrize("how", ["base", "folder of the user", "one spool"])
def test_recover_takes_the_base_the_folder_or_one_spool(tmp_path: Path, dataset: Any, how: str) -> None:
    first, second = two_dead_spools(tmp_path, dataset)
    place = {"base": tmp_path, "folder of the user": spools_of(tmp_path), "one spool": first}[how]
    whole = how != "one spool"
    found = outcomes(rr.recover(place))
    assert found == [(WRITER, "recovered", 1), ("f" * 16, "recovered", 1)][: 1 + whole]
    assert not first.exists()
    assert second.exists() != whole
    assert stored_rows(tmp_path / "ds") == {"a:0": 1}
    assert stored_rows(tmp_path / "other") == ({"a:1": 1} if whole else {})
    (tmp_path / "empty").mkdir()
    assert rr.recover(tmp_path / "empty") == [], "a folder without spools"


def test_a_dataset_is_no_place_of_spools_unless_they_are_there(tmp_path: Path, dataset: Any) -> None:
    with pytest.raises(rr.InvalidInputError, match="ds is a dataset, and SPOOL_DIR is where its writers keep"):
        rr.recover(tmp_path / "ds")
    die(make_spool(tmp_path / "ds", dataset))
    assert outcomes(rr.recover(tmp_path / "ds")) == [(WRITER, "recovered", 0)]
    assert not spools_of(tmp_path / "ds").exists()


def test_links_are_named_and_not_followed(tmp_path: Path, dataset: Any) -> None:
    put(spool := make_spool(tmp_path, dataset), dataset, "a:1", experts(1))
    dead = die(spool)
    before = contents(dead)
    other = tmp_path / "other"
    other.mkdir()
    (spools_of(other)).symlink_to(spools_of(tmp_path))
    for place in (other, spools_of(other)):
        (report,) = rr.recover(place)
        assert (report.path, report.outcome) == (str(spools_of(other)), "left")
        assert report.reason.startswith("is a symbolic link")
    assert contents(dead) == before


def test_recover_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(rr.NotFoundError, match=f"{tmp_path}/nowhere is no folder: give the spool_dir"):
        rr.recover(tmp_path / "nowhere")


def test_a_dry_run_says_the_same_and_changes_nothing(tmp_path: Path, dataset: Any) -> None:
    first, second = two_dead_spools(tmp_path, dataset)
    spool = make_spool(tmp_path, dataset, "e" * 16)
    put(spool, dataset, "b:0", experts(0))
    spool.close_active()
    old(spool)
    put(spool, dataset, "b:1", experts(1))
    third = die(spool)
    before = contents(spools_of(tmp_path))
    said = rr.recover(tmp_path, dry_run=True)
    assert contents(spools_of(tmp_path)) == before
    assert stored_rows(tmp_path / "ds") == {}
    assert said[0].bytes >= experts(0).nbytes
    done = rr.recover(tmp_path)
    assert outcomes(said) == outcomes(done)
    assert [report.reason for report in said] == [report.reason for report in done]
    assert "1 slabs are older than the dataset's tombstones live" in done[1].reason
    assert (first.exists(), second.exists(), third.exists()) == (False, False, True)
    assert outcomes(rr.recover(tmp_path, dry_run=True, force=True)) == [("e" * 16, "recovered", 1)]
    assert third.exists()


def test_what_was_set_aside_is_published_only_by_force(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    old(spool)
    put(spool, dataset, "a:1", experts(1))
    dead = die(spool)
    for _ in range(2):  # sets it aside, finds it aside
        (report,) = rr.recover(tmp_path)
        assert (report.outcome, report.records) == ("left", 0)
        assert "`rr-dataset recover --force` publishes them and may revive deleted ids" in report.reason
    assert stored_rows(tmp_path / "ds") == {}
    assert outcomes(rr.recover(dead, force=True)) == [(WRITER, "recovered", 1)]
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}
    assert not dead.exists()


def test_living_spools_are_named_and_left_also_by_force(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    put(spool, dataset, "a:1", experts(1))
    before = contents(spool.directory)
    for place in (tmp_path, spool.directory):
        (report,) = rr.recover(place, force=True)
        assert (report.outcome, report.records) == ("living", 0)
        assert report.reason.startswith("its engine or its worker lives")
    assert contents(spool.directory) == before


def test_spools_of_other_users_are_named_and_left(
    tmp_path: Path, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(spool := make_spool(tmp_path, dataset), dataset, "a:1", experts(1))
    dead = die(spool)
    before = contents(dead)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    for place in (tmp_path, dead.parent, dead):
        (report,) = rr.recover(place)
        assert report.outcome == "left"
        assert report.reason == f"belongs to user {dead.stat().st_uid}, who must recover it"
    assert contents(dead) == before


def test_a_dataset_that_moved_is_given_by_its_address(tmp_path: Path, dataset: Any) -> None:
    two_dead_spools(tmp_path, dataset)
    other = rr.open_dataset(tmp_path / "other")
    (tmp_path / "ds").rename(tmp_path / "moved")
    reports = rr.recover(tmp_path)
    assert outcomes(reports) == [(WRITER, "left", 0), ("f" * 16, "recovered", 1)]
    assert f"{tmp_path}/ds is no dataset" in reports[0].reason
    (report,) = rr.recover(tmp_path, uri=str(tmp_path / "other"))
    assert (report.outcome, report.uri) == ("left", str(tmp_path / "ds"))
    names = (
        f"another dataset, {dataset.format.uuid} at {tmp_path}/ds; the one given or now there is {other.format.uuid}"
    )
    assert names in report.reason
    assert f"`rr-dataset recover {report.path} --uri` its new place" in report.reason
    assert outcomes(rr.recover(tmp_path, uri=str(tmp_path / "moved"))) == [(WRITER, "recovered", 1)]
    assert stored_rows(tmp_path / "moved") == {"a:0": 1}
