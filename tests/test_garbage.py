"""Garbage collection: what goes, what stays, and when."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rr_dataset as rr
from rr_dataset.garbage import GarbageReport
from rr_dataset.layout import MARGIN_S
from tests.lifecycle import GRACE_MS, LATER_MS, collect_at, compact_at, fill, now_ms, seen, shards
from tests.stored import Stored


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


def test_everything_at_once_and_nothing_seen_of_it(root: Path) -> None:
    _, model = fill(root, now_ms())
    for step in range(6):
        compact_at(root, now_ms() + step * LATER_MS)
        collect_at(root, now_ms() + step * LATER_MS)
        assert seen(root) == model
    assert [len(shards(root, f"data_id={name}")) for name in "pqrs"] == [1, 0, 1, 1]
    assert not (root / "data_id=q").exists()
    assert not (root / "_rr/tmp/dead").exists()
    assert (root / "_rr/quarantine/kept").read_bytes() == b"evidence"
    assert len(list((root / "_rr/tombstones").iterdir())) == 1


def test_a_dry_run_tells_and_does_nothing(root: Path) -> None:
    fill(root, now_ms())
    compact_at(root, now_ms())
    before = sorted(root.rglob("*"))
    told = collect_at(root, now_ms() + LATER_MS, dry_run=True)
    assert sorted(root.rglob("*")) == before
    done = collect_at(root, now_ms() + LATER_MS)
    assert told == done
    assert (done.staged, done.staged_bytes) == (0, 0)
    assert done.replaced > 0
    assert done.bytes > 0


def test_covered_shards_by_name_and_by_index(root: Path) -> None:
    stored = Stored(root)
    stored.put("p:0:0:0")
    stored.put("q:0:0:0")
    stored.put("q:1:0:0", run="other")
    kept = stored.shard(stored.row("q:2:0:0"), stored.row("q:0:0:0"))
    stored.tombstone("prefix", "p")
    stored.tombstone("prefix", "q:0")
    stored.tombstone("all", "", run="other")
    report = rr.collect_garbage(root)
    assert report.covered == 3
    assert shards(root) == [kept]
    assert [path.name for path in root.glob("data_id=*")] == ["data_id=q"]
    assert rr.collect_garbage(root) == GarbageReport()


def test_an_empty_directory_goes(root: Path) -> None:
    Stored(root)
    (root / "data_id=p").mkdir()
    (root / "data_id=q").mkdir()
    (root / "data_id=q/notes.txt").write_text("not ours")
    with pytest.warns(rr.RoutingDatasetWarning, match="no shard"):
        rr.collect_garbage(root)
    assert [path.name for path in root.glob("data_id=*")] == ["data_id=q"]


def test_inputs_go_after_grace_the_lowest_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(root)
    first = stored.shard(stored.row("p:0:0:0"))
    row = stored.row("p:1:0:0")
    second = stored.shard(row, inputs=[first], level=1)
    stored.shard(row, inputs=[second], level=2)
    assert collect_at(root, now_ms() + GRACE_MS - 5000).replaced == 0
    removed: list[str] = []
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path, **how: removed.append(Path(path).name[:2]) or unlink(path, **how))
    assert collect_at(root, now_ms() + GRACE_MS + 5000).replaced == 2
    assert removed == ["00", "01"]
    assert len(shards(root)) == 1


def test_skew_makes_grace_longer(root: Path) -> None:
    stored = Stored(root, max_clock_skew_s=60.0)
    stored.put("p:0:0:0")
    rr.compact(root)
    assert collect_at(root, now_ms() + GRACE_MS + 55_000).replaced == 0
    assert collect_at(root, now_ms() + GRACE_MS + 65_000).replaced == 1


def test_staging_goes_when_no_create_can_still_run(root: Path) -> None:
    Stored(root)
    for writer in ("dead/9f.d/gen_id=1", "idle"):
        (root / "_rr/tmp" / writer).mkdir(parents=True)
    (root / "_rr/tmp/dead/9f.d/gen_id=1/half").write_bytes(b"12345")
    early, late = now_ms() + int((MARGIN_S - 10) * 1000), now_ms() + int((MARGIN_S + 10) * 1000)
    assert collect_at(root, early).staged == 0
    assert len(list((root / "_rr/tmp").iterdir())) == 2
    assert (report := collect_at(root, late)).staged == 1
    assert report.staged_bytes == 5
    assert not (root / "_rr/tmp").exists()


def test_a_young_file_keeps_its_folder(root: Path) -> None:
    Stored(root)
    (root / "_rr/tmp/writer").mkdir(parents=True)
    (root / "_rr/tmp/writer/half").write_bytes(b"1")
    collect_at(root, now_ms())
    assert (root / "_rr/tmp/writer/half").exists()
