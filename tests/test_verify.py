"""Damage is planted in the files themselves, and must be found, named and, where asked, moved out of the way."""

from __future__ import annotations

import importlib
import os
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damaged import damage, kinds, only, payload_byte, rewritten, rows_of
from stored import SPEC, WRITER, Stored

import rr_dataset as rr
from rr_dataset.errors import CorruptShardError
from rr_dataset.layout import ShardName, partition_path
from rr_dataset.record import RowData
from rr_dataset.shard import build_shard
from rr_dataset.storage.local import LocalStorage

HOUR_MS = 3_600_000


@pytest.fixture(params=["none", "lz4", "zstd"])
def compression(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "routing")


# --- a sound dataset


def test_a_sound_dataset_has_no_finding(stored: Stored, compression: str) -> None:
    rows = rows_of(stored, "a")
    inputs = [stored.shard(row) for row in rows]
    stored.shard(*rows, inputs=inputs, level=1, compression=compression)
    stored.shard(*rows_of(stored, "b", weights="v1", tags={"x": "ü"}), compression=compression)
    stored.put("c:0:0:0", weights=[(0, 2, "v1"), (2, 5, "v2")])
    stored.put("c:1:0:0", status="dropped", reason="spool_full")
    stored.put("c:2:0:0#3")
    stored.put("c:3:0:0", 0)
    stored.put("d:0:0:0", layers=(3, 4))
    stored.put("d:0:0:0", layers=(7, 9))
    (stored.root / "data_id=a" / "_SUCCESS").touch()
    (stored.root / ".trash").mkdir()
    report = rr.verify(stored.root)
    assert report.problems == ()
    assert report.sound
    assert (report.partitions, report.shards, report.rows, report.records) == (4, 11, 15, 11)
    assert report.bytes == sum(path.stat().st_size for path in stored.root.rglob("*.arrow"))


def test_a_dataset_is_sound_after_compaction_and_collection(stored: Stored) -> None:
    for i in range(8):
        stored.put(f"a:{i}:0:0", 50, vectors=i % 2 == 0)
    stored.put("a:3:0:0", 20)
    stored.put("a:4:0:0", 5, start=50, part=True)
    stored.tombstone("ids", ["a:5:0:0"])
    assert rr.compact(stored.root).outputs == 1
    report = rr.verify(stored.root)
    assert (report.problems, report.shards, report.records) == ((), 11, 7)
    rr.collect_garbage(stored.root)
    assert rr.verify(stored.root).problems == ()


def test_an_empty_dataset_is_sound(stored: Stored) -> None:
    assert rr.verify(stored.root).problems == ()


def test_many_batches_are_all_read(stored: Stored, compression: str) -> None:
    rows = [stored.row(f"a:{i}:0:0", 3, vectors=i % 3 == 0, layers=(4, 7) if i % 2 else None) for i in range(40)]
    stored.shard(*rows, compression=compression)
    assert set(kinds(rr.verify(stored.root))) == {"incomplete"}


def test_no_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(rr.DatasetNotFoundError):
        rr.verify(tmp_path)


def test_a_sorted_dataset_is_sound(tmp_path: Path) -> None:
    stored = Stored(tmp_path, replace(SPEC, topk_order="sorted"))
    stored.put("a:0:0:0")
    assert rr.verify(stored.root).problems == ()


def test_progress_ends_at_all_bytes(stored: Stored) -> None:
    for i in range(3):
        stored.put(f"a:{i}:0:0")
    told: list[tuple[int, int]] = []
    report = rr.verify(stored.root, progress=lambda done, total: told.append((done, total)))
    assert [total for _, total in told] == [report.bytes] * 3
    assert told[-1][0] == report.bytes
    assert sorted(told) == told


def test_a_prefix_limits_what_is_read(stored: Stored) -> None:
    stored.put("a:0:0:0")
    damage(stored.shard(stored.row("b:0:0:0")), payload_byte)
    assert rr.verify(stored.root, prefix="a").sound
    assert kinds(rr.verify(stored.root, prefix={"data_id": "b"})) == ["checksum"]


# --- rows that contradict the spec, the key scheme, their place


def put_raw(stored: Stored, data: RowData, where: str | None = None, **name: Any) -> Path:
    """A shard whose row, name or place does not fit."""
    row = data.row
    values = {"level": 0, "tmin": row.t_submit, "tmax": row.t_submit, "rows": 1, "writer": WRITER, "seq": 99, **name}
    directory = where or partition_path(stored.keys.partition(row.components))
    path = stored.root / directory / ShardName(**values).text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(build_shard([data], stored.dataset.format))
    return path


def changed(data: RowData, **row: Any) -> RowData:
    return replace(data, row=replace(data.row, **row))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"record_id": f"{5:016x}-{WRITER}"}, "t_submit"),
        ({"request_id": "a:2:0:0"}, "components"),
        ({"request_id": "chatcmpl-1"}, "engine's own id"),
        ({"choice": 3}, "sample 3"),
        ({"missing": ((0, 9),)}, "missing"),
        ({"missing": ((3, 4), (1, 2))}, "missing"),
        ({"weight_spans": ((3, 9, "v"),)}, "weight spans"),
        ({"status": "dropped"}, "dropped"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_row_that_contradicts_itself(stored: Stored, row: dict[str, Any], text: str) -> None:
    put_raw(stored, changed(stored.row("a:1:0:0"), **row))
    problems = [problem for problem in rr.verify(stored.root).problems if problem.kind == "row"]
    assert len(problems) == 1
    assert text in problems[0].text
    assert problems[0].record_id is not None


def test_a_row_in_another_directory(stored: Stored) -> None:
    put_raw(stored, stored.row("a:1:0:0"), "data_id=b")
    assert "belongs" in only(rr.verify(stored.root)).text


def test_ids_that_no_expert_has(stored: Stored) -> None:
    data = stored.row("a:1:0:0")
    assert data.routed_experts is not None
    data.routed_experts[2, 1, 0] = SPEC.num_experts
    put_raw(stored, data)
    problem = only(rr.verify(stored.root))
    assert (problem.kind, "layer 7 has the id 200" in problem.text) == ("experts", True)


def test_ids_where_none_should_be(stored: Stored) -> None:
    data = changed(stored.row("a:1:0:0"), missing=((1, 2),))
    put_raw(stored, data)
    assert kinds(rr.verify(stored.root)) == ["experts", "incomplete"]


def test_unsorted_ids_in_a_sorted_dataset(tmp_path: Path) -> None:
    stored = Stored(tmp_path, replace(SPEC, topk_order="sorted"))
    path = stored.shard(stored.row("a:0:0:0"))
    data = path.read_bytes()
    buffer = pa.ipc.open_file(pa.py_buffer(data)).get_batch(0).column("layer_004").buffers()[2]
    at = buffer.address - pa.py_buffer(data).address
    path.write_bytes(data[:at] + bytes([9, 1]) + data[at + 2 :])
    assert set(kinds(rr.verify(stored.root))) == {"checksum", "experts"}


def test_rows_out_of_order(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rr_dataset.shard.build.sorted", lambda rows, key: list(rows), raising=False)
    stored.shard(*reversed(rows_of(stored, "a")))
    problem = only(rr.verify(stored.root))
    assert (problem.kind, problem.count, "before its turn" in problem.text) == ("row", 2, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ({"rows": 2}, "its name tells 2 rows"),
        ({"tmin": 0}, "its name tells"),
        ({"tmax": 77}, "its name tells"),
        ({"writer": "b" * 16}, "another writer"),
    ],
    ids=str,
)
def test_a_name_that_contradicts_its_rows(stored: Stored, name: dict[str, Any], text: str) -> None:
    put_raw(stored, stored.row("a:1:0:0"), **name)
    assert text in only(rr.verify(stored.root)).text


def test_a_name_may_tell_of_rows_that_were_deleted_before(stored: Stored) -> None:
    data = stored.row("a:1:0:0")
    path = put_raw(stored, data, rows=3, tmax=77)
    path.write_bytes(build_shard([data], stored.dataset.format, tombstones_applied=["u"]))
    assert rr.verify(stored.root).problems == ()


def test_a_shard_of_another_dataset(stored: Stored, tmp_path: Path) -> None:
    other = Stored(tmp_path / "other", replace(SPEC, num_experts=100))
    path = other.shard(other.row("a:0:0:0"))
    target = stored.root / path.relative_to(other.root)
    target.parent.mkdir()
    target.write_bytes(path.read_bytes())
    assert "another dataset" in only(rr.verify(stored.root)).text


def test_a_shard_of_a_later_format_is_refused(stored: Stored) -> None:
    path = stored.shard(stored.row("a:0:0:0"))
    rewritten(path, lambda index: index.update(version=99))
    with pytest.raises(rr.NewerFormatError, match="upgrade"):
        rr.verify(stored.root)


# --- files against one another


def test_a_record_in_two_visible_files(stored: Stored) -> None:
    rows = rows_of(stored, "a")
    first = stored.shard(rows[0])
    stored.shard(*rows, level=1)  # a late replay has brought `first` back: nothing names it
    problem = only(rr.verify(stored.root))
    assert (problem.kind, problem.record_id, problem.count) == ("double", rows[0].row.record_id, 1)
    assert f"also in {first.name}" in problem.text


def test_a_double_with_other_content(stored: Stored) -> None:
    data = stored.row("a:0:0:0")
    stored.shard(data)
    stored.shard(changed(data, status="aborted"), level=1)
    assert "with other content" in only(rr.verify(stored.root)).text


def test_inputs_that_wait_to_be_removed_are_no_doubles(stored: Stored) -> None:
    rows = rows_of(stored, "a")
    stored.shard(*rows, inputs=[stored.shard(row) for row in rows], level=1, compression="zstd")
    assert rr.verify(stored.root).problems == ()


def test_incomplete_records_are_notes(stored: Stored) -> None:
    stored.put("a:0:0:0", part=True, status="partial")
    stored.put("a:1:0:0", layers=(3, 4))
    stored.put("a:2:0:0", missing=((1, 2),))
    stored.put("a:3:0:0", part=True, start=10)
    stored.put("b:0:0:0")
    report = rr.verify(stored.root)
    assert report.sound
    assert [(p.kind, p.level, p.path, p.count, p.request_id) for p in report.problems] == [
        ("incomplete", "note", "data_id=a", 2, "a:0:0:0"),
        ("incomplete", "note", "data_id=a", 2, "a:2:0:0"),
    ]


def test_deleted_records_are_not_incomplete(stored: Stored) -> None:
    stored.put("a:0:0:0", part=True, status="partial")
    stored.tombstone("ids", ["a:0:0:0"])
    assert rr.verify(stored.root).problems == ()


# --- around the shards


def test_foreign_things(stored: Stored) -> None:
    stored.put("a:0:0:0")
    for name in ("data_id=a/notes.txt", "data_id=a/part-0.arrow", "readme.md"):
        (stored.root / name).write_text("x")
    for name in ("data_id=a/deeper", "other", "gen_id=1"):
        (stored.root / name).mkdir()
    report = rr.verify(stored.root)
    assert set(kinds(report)) == {"foreign"}
    assert {problem.path for problem in report.problems} == {
        *("data_id=a/notes.txt", "data_id=a/part-0.arrow", "data_id=a/deeper", "readme.md", "other", "gen_id=1"),
    }


def test_an_empty_directory_that_nobody_is_about_to_fill(tmp_path: Path) -> None:
    stored = Stored(tmp_path, keys=rr.KeyScheme.fastdeploy(partition_by=2))
    (stored.root / "data_id=a" / "gen_id=1").mkdir(parents=True)
    assert rr.verify(stored.root).problems == ()  # a worker may have just made it
    later = time.time_ns() // 1_000_000 + HOUR_MS
    problem = only(rr.verify(stored.root, now_ms=lambda: later))
    assert (problem.kind, problem.path) == ("empty", "data_id=a/gen_id=1")


def test_staging_that_a_dead_writer_left(stored: Stored) -> None:
    stage = stored.root / "_rr" / "tmp" / WRITER
    stage.mkdir(parents=True)
    for name in ("one", "two"):
        (stage / name).write_bytes(b"abc")
    assert rr.verify(stored.root).problems == ()  # a writer may be at it
    later = time.time_ns() // 1_000_000 + HOUR_MS + 1000
    problem = only(rr.verify(stored.root, now_ms=lambda: later))
    assert (problem.kind, problem.path, problem.count) == ("staging", f"_rr/tmp/{WRITER}", 2)
    assert "2 unfinished files, 6 bytes" in problem.text


def test_a_damaged_tombstone_file_does_not_hide_the_rest(stored: Stored) -> None:
    stored.put("a:0:0:0")
    path = stored.tombstone("all", "")
    path.write_text("[{")
    (path.parent / "note.txt").touch()
    damage(stored.shard(stored.row("b:0:0:0")), payload_byte)
    report = rr.verify(stored.root, repair=True)
    assert sorted(kinds(report)) == ["checksum", "tombstone", "tombstone"]
    assert path.exists()


# --- repair


def test_repair_moves_and_deletes_nothing(stored: Stored) -> None:
    good = stored.put("a:0:0:0")
    bad = stored.shard(*rows_of(stored, "a", 2))
    damage(bad, payload_byte)
    cut = stored.shard(stored.row("b:0:0:0"))
    damage(cut, lambda data: data[:-3])
    foreign = stored.root / "data_id=a" / "notes.arrow"
    foreign.write_text("x")
    contents = {path.read_bytes() for path in (bad, cut, foreign)}
    report = rr.verify(stored.root, repair=True)
    assert sorted(kinds(report)) == ["checksum", "foreign", "shard"]
    assert not any(path.exists() for path in (bad, cut, foreign))
    moved = [stored.root / problem.moved_to for problem in report.problems if problem.moved_to is not None]
    assert {path.read_bytes() for path in moved} == contents
    assert all(path.is_relative_to(stored.root / "_rr" / "quarantine") for path in moved)
    assert not list((stored.root / "_rr").rglob("*.arrow"))  # other tools would read them
    assert not list((stored.root / "_rr").glob("tmp/*"))
    assert kinds(rr.verify(stored.root)) == []
    assert list(rr.open_dataset(stored.root).ids()) == [good.row.request_id]


def test_the_same_name_goes_to_quarantine_twice(stored: Stored) -> None:
    data = stored.row("a:0:0:0")
    for content in (b"first", b"second"):
        put_raw(stored, data).write_bytes(content)
        rr.verify(stored.root, repair=True)
    found = sorted((stored.root / "_rr" / "quarantine" / "data_id=a").iterdir())
    assert [path.read_bytes() for path in found] == [b"first", b"second"]


def test_repair_brings_inputs_of_a_damaged_output_back(stored: Stored) -> None:
    rows = rows_of(stored, "a")
    output = stored.shard(*rows, inputs=[stored.shard(row) for row in rows], level=1)
    damage(output, payload_byte)
    rr.verify(stored.root, repair=True)
    got = rr.open_dataset(stored.root).get("a:0:0:0").routed_experts
    assert rows[0].routed_experts is not None
    np.testing.assert_array_equal(got, rows[0].routed_experts)


def test_without_repair_nothing_changes(stored: Stored) -> None:
    damage(stored.shard(stored.row("a:0:0:0")), payload_byte)
    before = {path: path.stat().st_mtime_ns for path in stored.root.rglob("*")}
    rr.verify(stored.root)
    assert {path: path.stat().st_mtime_ns for path in stored.root.rglob("*")} == before


# --- while others are at work


def test_a_shard_that_vanishes_is_no_problem(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(stored, "a")
    inputs = [stored.shard(row) for row in rows]
    opened = LocalStorage.open
    compacted: list[Path] = []

    def open_late(storage: LocalStorage, path: str, entry: Any = None) -> Any:
        if path.endswith(inputs[1].name) and not compacted:  # in the middle: its inputs go
            compacted.append(stored.shard(*rows, inputs=inputs, level=1))
            for each in inputs:
                each.unlink()
        return opened(storage, path)

    monkeypatch.setattr(LocalStorage, "open", open_late)
    report = rr.verify(stored.root)
    assert compacted
    assert report.problems == ()
    assert (report.shards, report.rows, report.records) == (1, 3, 3)


def test_shards_that_keep_vanishing(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.put("a:0:0:0")

    def gone(storage: LocalStorage, path: str, entry: Any = None) -> Any:
        raise rr.ObjectNotFoundError(2, "gone", path)

    monkeypatch.setattr(LocalStorage, "open", gone)
    monkeypatch.setattr(LocalStorage, "read_bytes", lambda _, path: (stored.root / path).read_bytes())
    with pytest.raises(rr.ReadConflictError, match="data_id=a"):
        rr.verify(stored.root)


def test_the_function_keeps_its_name_beside_its_module() -> None:
    assert importlib.import_module("rr_dataset.verify").verify is rr.verify


def test_links_and_pipes_are_told(stored: Stored) -> None:
    path = stored.shard(stored.row("a:0:0:0"))
    link, pipe = (path.with_name(path.name.replace("-1.arrow", f"-{i}.arrow")) for i in (2, 3))
    link.symlink_to(path)
    os.mkfifo(pipe)
    (stored.root / "data_id=s").symlink_to(path.parent)
    report = rr.verify(stored.root)
    named = [stored.root / "data_id=s", link, pipe]
    assert [(each.kind, stored.root / each.path) for each in report.problems] == [("foreign", at) for at in named]
    assert report.shards == 1
    assert stored.dataset.get("a:0:0:0").num_tokens == 5


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_whatever_pyarrow_makes_of_a_damaged_byte_is_a_problem_or_harmless(stored: Stored, compression: str) -> None:
    path = stored.shard(*rows_of(stored, "a", tags={"k": "v"}), compression=compression)
    good = path.read_bytes()
    found = set()
    for at in range(3, len(good) - 3000, 47):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        found.update(problem.kind for problem in rr.verify(stored.root).problems)
        with suppress(CorruptShardError), warnings.catch_warnings():
            warnings.simplefilter("ignore", rr.RoutingDatasetWarning)
            list(rr.open_dataset(stored.root).scan())
    assert "arrow" in found


def test_a_column_s_name_that_is_no_text_is_a_problem(stored: Stored) -> None:
    path = stored.shard(stored.row("a:0:0:0"))
    damage(path, lambda data: data[: (at := data.rindex(b"layer_004"))] + b"\xff" + data[at + 1 :])
    problem = only(rr.verify(stored.root))
    assert (problem.kind, "UnicodeDecodeError" in problem.text) == ("arrow", True)
