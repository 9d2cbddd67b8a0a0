"""Tombstones: folded without losing one, dropped only when two listings showed that nothing needs them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rr_dataset as rr
from rr_dataset.folding import fold, removable_files
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import GC_DIR, TOMBSTONE_DIR, tombstone_name
from rr_dataset.record import Row
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import Tombstone, TombstoneCache, TombstoneSet, list_tombstones
from tests.lifecycle import GRACE_MS, LATER_MS, collect_at, compact_at, now_ms, seen
from tests.stored import Stored

MINUTE_MS = 60_000
TTL_MS = 7 * 86_400_000
KEYS = KeyScheme.fastdeploy()

tombstones = st.builds(
    Tombstone,
    uuid=st.sampled_from([f"{i:032x}" for i in range(8)]),
    kind=st.just("prefix"),
    text=st.sampled_from(["a", "b"]),
    run=st.sampled_from([None, "r"]),
    t_del=st.integers(0, 4),
    made=st.integers(0, 3),
)


def row(data_id: str, stamp: int, run: str) -> Row:
    return Row(
        f"{stamp:016x}-{'0' * 16}",
        f"{data_id}:0:0:0",
        (data_id, "0", "0", "0"),
        None,
        stamp,
        0,
        1,
        False,
        "complete",
        run,
    )


ROWS = [row(data_id, stamp, run) for data_id in "ab" for stamp in range(5) for run in ("r", "s")]


def covered(marks: list[Tombstone]) -> set[str]:
    found = TombstoneSet(KEYS, marks)
    return {f"{each.record_id}{each.request_id}{each.run_id}" for each in ROWS if found.covers(each)}


def files_of(marks: list[list[Tombstone]]) -> dict[str, tuple[Tombstone, ...]]:
    """Files by rising names; a uuid says one thing."""
    by_uuid = {each.uuid: each for file in marks for each in file}
    return {f"{i:02}": tuple(by_uuid[each.uuid] for each in file) for i, file in enumerate(marks)}


@given(st.lists(st.lists(tombstones, min_size=1, max_size=4), max_size=5))
def test_a_fold_covers_what_its_files_covered(marks: list[list[Tombstone]]) -> None:
    files = files_of(marks)
    everything = [each for file in files.values() for each in file]
    folded = fold(files, ())
    assert covered(folded) == covered(everything)
    assert len({each.uuid for each in folded}) == len(folded)
    for each in everything:  # and it lives as long
        wider = [t for t in folded if (t.kind, t.text, t.run) == (each.kind, each.text, each.run)]
        assert any(t.t_del >= each.t_del and t.made >= each.made for t in wider)
    after = {**files, "99": tuple(folded)}
    assert removable_files(after, (), after) >= files.keys() or not files
    assert fold(after, ()) == folded


@given(st.lists(st.lists(tombstones, min_size=1, max_size=4), max_size=6), st.data())
def test_removing_files_uncovers_nothing(marks: list[list[Tombstone]], data: st.DataObject) -> None:
    """Also when two runs, one with an old listing, each remove what they may."""
    files = files_of(marks)
    keepers = data.draw(st.sets(st.sampled_from(sorted(files)))) if files else set()
    gone = removable_files(files, (), keepers)
    older = {name: file for name, file in files.items() if data.draw(st.booleans())}
    gone |= removable_files(older, (), keepers & older.keys())
    left = [each for name, file in files.items() if name not in gone for each in file]
    assert covered(left) == covered([each for file in files.values() for each in file])


def test_what_is_droppable_holds_no_file() -> None:
    one, two = (Tombstone(letter * 32, "prefix", letter, None, 9, 9) for letter in "ab")
    files = {"0": (one,), "1": (one, two)}
    assert removable_files(files, {one.uuid}, ()) == {"0"}
    assert removable_files(files, (), {"1"}) == {"0"}
    assert fold(files, {one.uuid}) == [two]
    assert removable_files({"1": (two,), "2": (replace(two, uuid="c" * 32, t_del=10),)}, (), {"1", "2"}) == {"1"}


# --- in a dataset


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "dataset")


def marks_of(stored: Stored) -> list[list[str]]:
    return [
        sorted(json.dumps(each["text"]) for each in json.loads(path.read_text()))
        for path in sorted((stored.root / TOMBSTONE_DIR).iterdir())
    ]


def test_old_files_become_one_and_go_after_grace(stored: Stored) -> None:
    now = now_ms()
    stored.put("p:0:0:0")
    for i in range(3):
        stored.tombstone("prefix", f"gone_{i}", made=now + i)
    stored.tombstone("prefix", "p", t_del=0, made=now + 11 * MINUTE_MS)
    assert collect_at(stored.root, now + 9 * MINUTE_MS).tombstones_folded == 0
    assert collect_at(stored.root, now + 12 * MINUTE_MS, dry_run=True).tombstones_folded == 3
    assert len(marks_of(stored)) == 4
    assert collect_at(stored.root, now + 12 * MINUTE_MS).tombstones_folded == 3
    assert marks_of(stored)[-1] == ['"gone_0"', '"gone_1"', '"gone_2"']
    assert len(marks_of(stored)) == 5
    assert len(seen(stored.root)) == 1
    again = collect_at(stored.root, now + LATER_MS)
    assert (again.tombstone_files_removed, again.tombstones_folded, again.tombstones_dropped) == (3, 0, 0)
    assert len(marks_of(stored)) == 2


def test_a_second_run_at_once_makes_no_second_fold(stored: Stored) -> None:
    now = now_ms()
    for i in range(2):
        stored.tombstone("prefix", f"gone_{i}", made=now + i)
    at = now + GRACE_MS - 1000  # their own age by the clock of the store is not asked for
    assert collect_at(stored.root, at).tombstones_folded == 0
    assert collect_at(stored.root, now + 11 * MINUTE_MS).tombstones_folded == 2
    fresh = max((stored.root / TOMBSTONE_DIR).iterdir())
    assert fresh.name.startswith(f"{now + 11 * MINUTE_MS:012x}")
    assert len(marks_of(stored)) == 3


def test_doubles_count_once(stored: Stored) -> None:
    path = stored.tombstone("prefix", "p")
    twin = path.with_name(path.name.replace("-", "-")[:13] + "f" * 32 + ".json")
    twin.write_bytes(path.read_bytes())
    cache = TombstoneCache(stored.keys)
    marks = list_tombstones(open_storage(stored.root), cache)
    assert len(cache.files) == 2
    assert len(marks.applied((("data_id", "p"),), 0)) == 1


def test_a_tombstone_is_dropped_by_two_listings_grace_apart(stored: Stored) -> None:
    now = now_ms()
    stored.put("p:0:0:0")
    stored.tombstone("ids", ["p:0:0:0"], made=now)
    late = now + TTL_MS + MINUTE_MS
    compact_at(stored.root, now)
    collect_at(stored.root, late - 2 * MINUTE_MS)  # everything is deleted; the tombstone lives on
    assert len(marks_of(stored)) == 1
    assert not list((stored.root / "_rr").glob("gc/*"))
    assert collect_at(stored.root, late).tombstones_dropped == 0
    assert len(list((stored.root / GC_DIR).iterdir())) == 1
    assert collect_at(stored.root, late + GRACE_MS - 1).tombstones_dropped == 0
    assert collect_at(stored.root, late + GRACE_MS + 1, dry_run=True).tombstones_dropped == 1
    assert collect_at(stored.root, late + GRACE_MS + 1).tombstones_dropped == 1
    assert marks_of(stored) == []
    collect_at(stored.root, late + LATER_MS)
    assert not list((stored.root / GC_DIR).iterdir())


def test_a_shard_that_lacks_it_keeps_a_tombstone(stored: Stored) -> None:
    now = now_ms()
    shard = stored.shard(stored.row("p:0:0:0"), stored.row("p:1:0:0"))
    stored.tombstone("ids", ["p:0:0:0"], made=now)
    late = now + TTL_MS + MINUTE_MS
    for step in range(3):
        assert collect_at(stored.root, late + step * LATER_MS).tombstones_dropped == 0
    assert set(seen(stored.root)) == {"p:1:0:0"}
    compact_at(stored.root, late + 3 * LATER_MS)  # it is written anew for that alone
    for step in range(4, 8):
        collect_at(stored.root, late + step * LATER_MS)
    assert marks_of(stored) == []
    assert not shard.exists()
    assert set(seen(stored.root)) == {"p:1:0:0"}


def test_damage_keeps_a_tombstone(stored: Stored) -> None:
    now = now_ms()
    shard = stored.shard(stored.row("p:0:0:0"), stored.row("p:1:0:0"))
    stored.tombstone("ids", ["p:0:0:0"], made=now)
    shard.write_bytes(shard.read_bytes()[:-9])
    for step in range(3):
        assert collect_at(stored.root, now + TTL_MS + step * LATER_MS + 1).tombstones_dropped == 0


def test_one_of_many_is_dropped_out_of_its_file(stored: Stored) -> None:
    now = now_ms()
    stored.shard(stored.row("p:0:0:0"), stored.row("p:1:0:0"))
    stored.tombstone("ids", ["p:0:0:0"], made=now)
    stored.tombstone("prefix", "q", made=now)
    dropped = 0
    for step in range(6):
        dropped += collect_at(stored.root, now + TTL_MS + step * LATER_MS + 1).tombstones_dropped
    assert marks_of(stored) == [['["p:0:0:0"]']]
    assert dropped == 1


def test_a_note_that_is_none_proves_nothing(stored: Stored) -> None:
    now = now_ms()
    stored.tombstone("prefix", "p", made=now)
    note = stored.root / GC_DIR / f"{now:012x}-{'0' * 32}.json"
    note.parent.mkdir()
    note.write_bytes(b"[[")
    assert collect_at(stored.root, now + TTL_MS + LATER_MS).tombstones_dropped == 0
    assert not note.exists()


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "5", "[5]", '[["a"]]', '"abc"', "\xff"])
def test_a_note_that_is_none_proves_nothing_and_goes(tmp_path: Path, text: str) -> None:
    stored = Stored(tmp_path / "ds")
    note = stored.root / GC_DIR / tombstone_name(1, "0" * 32)
    note.parent.mkdir(parents=True)
    note.write_text(text, encoding="latin-1")
    assert rr.collect_garbage(stored.root) == rr.GarbageReport()
    assert not note.exists()
