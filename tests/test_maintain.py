"""Retention and the loop around it."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from rr_dataset.clock import COUNTER_MAX, pack
from rr_dataset.compactor import Compactor
from rr_dataset.layout import DatasetFormat, ShardName
from rr_dataset.lookup import Lookup
from rr_dataset.maintain import STEPS, MaintainReport, Steward, cut
from rr_dataset.snapshot import Listed
from rr_dataset.storage import Entry
from tests.lifecycle import now_ms, seen, shards
from tests.stored import SPEC, Stored

DAY_MS = 86_400_000


def listed(tmin_ms: int, tmax_ms: int, size: int = 100) -> Listed:
    name = ShardName(0, pack(tmin_ms), pack(tmax_ms), 1, writer="a" * 16, seq=tmax_ms)
    return Listed(name.text, Entry(name.text, size, 0.0), name)


def format_of(**settings: Any) -> DatasetFormat:
    return DatasetFormat("0" * 32, SPEC, rr.KeyScheme.fastdeploy(), **settings)


def steward_of(root: Path, ms: int) -> Steward:
    lookup = Lookup(str(root), None, None)
    return Steward(lookup, Compactor(lookup, lambda: ms), lambda: ms)


def test_age_moves_in_steps() -> None:
    fmt = format_of(ttl_s=256.0)
    shards = [listed(1_000_000, 2_000_000)]
    assert cut(shards, fmt, 1_000_000 + 255_999) is None
    assert cut(shards, fmt, 1_000_000 + 256_000) == pack(1_000_000, COUNTER_MAX)
    assert cut(shards, fmt, 1_000_000 + 256_999) == pack(1_000_000, COUNTER_MAX)
    assert cut(shards, fmt, 1_000_000 + 257_000) == pack(1_001_000, COUNTER_MAX)
    assert cut([], fmt, 10**12) is None


def test_size_takes_the_oldest_files() -> None:
    fmt = format_of(max_bytes=STEPS * 10)
    full = [listed(t, t, STEPS) for t in range(10)]
    assert cut(full, fmt, 100) is None
    assert cut([*full, listed(10, 10, 1)], fmt, 100) == pack(0)  # nine and the small one fit 255 / 256
    assert cut([listed(0, 7, STEPS * 11)], fmt, 100) == pack(7)
    assert cut([listed(5, 5, STEPS * 11)], format_of(max_bytes=STEPS * 10, ttl_s=0.01), 100) == pack(90, COUNTER_MAX)


def test_old_records_are_deleted_by_one_tombstone(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "d", ttl_s=100.0)
    for _ in range(3):
        stored.put("p:0:0:0")  # in 1970
    assert steward_of(stored.root, 50_000).retain().records == 0
    report = steward_of(stored.root, now_ms()).retain()
    assert (report.files, report.records) == (3, 3)
    assert shards(stored.root) == []
    (path,) = (stored.root / "_rr/tombstones").iterdir()
    (mark,) = json.loads(path.read_text())
    assert (mark["kind"], mark["run"]) == ("all", None)
    assert steward_of(stored.root, now_ms()).retain().records == 0
    assert len(list((stored.root / "_rr/tombstones").iterdir())) == 1


def test_a_file_that_is_old_in_part_does_not_ask_for_a_tombstone_again(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "d", ttl_s=100.0)
    old, new = stored.row("p:0:0:0"), stored.row("p:1:0:0")
    stored._stamp = pack(now_ms())
    young = stored.row("p:2:0:0")
    stored.shard(old, new, young)
    now = now_ms()
    assert steward_of(stored.root, now).retain().hidden == 2
    assert set(seen(stored.root)) == {"p:2:0:0"}
    assert steward_of(stored.root, now).retain().hidden == 0
    assert len(list((stored.root / "_rr/tombstones").iterdir())) == 1


def test_files_that_wait_for_removal_do_not_count(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "d", max_bytes=100_000)
    for i in range(8):
        stored.put(f"p:{i}:0:0", 500)
    size = sum(path.stat().st_size for path in shards(stored.root))
    assert 60_000 < size < 100_000
    rr.compact(stored.root, compression="none")
    assert sum(path.stat().st_size for path in shards(stored.root)) > 100_000
    assert steward_of(stored.root, now_ms()).retain().records == 0
    for i in range(8, 16):
        stored.put(f"p:{i}:0:0", 500)
    assert steward_of(stored.root, now_ms()).retain().records > 0
    assert 0 < len(seen(stored.root)) < 16
    assert steward_of(stored.root, now_ms()).retain().records == 0


def test_no_limits_no_deletes(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "d")
    stored.put("p:0:0:0")
    assert steward_of(stored.root, now_ms()).retain().records == 0
    assert len(seen(stored.root)) == 1


def test_one_pass(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "d")
    stored.put("p:0:0:0")
    (report,) = rr.maintain(stored.root)
    assert report.compacted.outputs == 1
    assert report.problem == ""


def test_pass_after_pass_also_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path / "d")
    stop = threading.Event()
    passes = rr.maintain(stored.root, every_s=0.0, stop=stop)
    assert next(passes) == MaintainReport()

    def refuse(*_: object, **__: object) -> None:
        raise rr.StorageError("no")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["rr_dataset.maintain"], "compact_with", refuse)
        assert next(passes).problem == "no"
        with pytest.raises(rr.StorageError):
            list(rr.maintain(stored.root))
    stored.put("p:0:0:0")
    assert next(passes).compacted.outputs == 1
    stop.set()
    assert list(passes) == []


def test_several_at_once(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "d")
    for i in range(12):
        stored.put(f"p{i % 3}:{i}:0:0")
    before = seen(stored.root)
    threads = [threading.Thread(target=lambda: list(rr.maintain(stored.root))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen(stored.root) == before
