"""The reader's protocol, with files that appear and vanish between its steps."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stored import Stored

import rr_dataset as rr
from rr_dataset import snapshot
from rr_dataset.layout import TOMBSTONE_DIR, parse_shard_name
from rr_dataset.snapshot import IndexCache, Listed, Reader, Shard, Snapshot
from rr_dataset.storage import Entry, Storage, open_storage

A, B = "data_id=a", "data_id=b"


class Hooked:
    """A storage that tells what is asked of it, and lets a test act after each answer."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.calls: list[tuple[str, str]] = []
        self.after: Callable[[str, str], None] = lambda name, path: None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)
        if not callable(method):
            return method

        def call(path: str, *more: Any) -> Any:
            self.calls.append((name, path))
            answer = method(path, *more)
            self.after(name, path)
            return answer

        return call


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds", grace_s=20)


@pytest.fixture
def hooked(stored: Stored) -> Hooked:
    return Hooked(open_storage(stored.root))


@pytest.fixture
def reader(stored: Stored, hooked: Hooked) -> Reader:
    return Reader(hooked, stored.dataset.format)  # type: ignore[arg-type]  # it delegates


def visible(reader: Reader, *partitions: str) -> list[int]:
    """The stamps of the visible rows."""

    def use(taken: Snapshot) -> list[int]:
        return sorted(each.row.t_submit for path in partitions for rows in taken.rows(path).values() for each in rows)

    return reader.read(partitions, use)


def test_a_missing_partition_is_an_empty_one(stored: Stored, reader: Reader) -> None:
    stored.put("a")
    assert visible(reader, A, B) == [1]


def test_shards_are_listed_before_tombstones(stored: Stored, reader: Reader, hooked: Hooked) -> None:
    stored.put("a")
    stored.put("b")
    visible(reader, A, B)
    assert [path for name, path in hooked.calls if name == "list"] == [A, B, TOMBSTONE_DIR]


def test_a_delete_between_the_listings_is_obeyed(stored: Stored, reader: Reader, hooked: Hooked) -> None:
    stored.put("a")

    def delete(name: str, path: str) -> None:
        if path == A:
            stored.tombstone("prefix", "a")

    hooked.after = delete
    assert visible(reader, A) == []


def test_listings_are_never_kept(stored: Stored, reader: Reader) -> None:
    first = stored.shard(stored.row("a"))
    assert visible(reader, A) == [1]
    stored.put("a")
    assert visible(reader, A) == [1, 2]
    first.unlink()
    assert visible(reader, A) == [2]


def test_an_index_is_read_once(stored: Stored, reader: Reader, hooked: Hooked) -> None:
    stored.put("a")
    for _ in range(3):
        visible(reader, A)
    assert [name for name, _ in hooked.calls].count("open") == 1


def test_an_index_is_read_again_when_the_object_changed(stored: Stored, reader: Reader) -> None:
    path = stored.shard(stored.row("a:1"), stored.row("a:2"))
    assert visible(reader, A) == [1, 2]
    other = stored.shard(stored.row("a:3"))
    other.replace(path)
    assert visible(reader, A) == [3]


def test_a_compacted_shard_hides_its_inputs(stored: Stored, reader: Reader) -> None:
    rows = [stored.row("a:1"), stored.row("a:2")]
    inputs = [stored.shard(data) for data in rows]
    stored.shard(rows[1], inputs=inputs, level=1)
    stored.put("a:3")
    assert visible(reader, A) == [2, 3]
    for path in inputs:
        path.unlink()
    assert visible(reader, A) == [2, 3]


def test_a_covered_compacted_shard_still_hides_its_inputs(stored: Stored, reader: Reader) -> None:
    rows = [stored.row("a:1"), stored.row("a:2")]
    inputs = [stored.shard(data) for data in rows]
    stored.shard(rows[0], inputs=inputs, level=1)
    stored.tombstone("prefix", "a", t_del=1)
    assert visible(reader, A) == []


@pytest.mark.parametrize(
    ("kind", "text", "run", "left"),
    [
        ("all", "", None, [4]),
        ("all", "", "run-2", [1, 2, 4]),
        ("prefix", "a:1", None, [2, 3, 4]),
        ("prefix", "b", None, [1, 2, 3, 4]),
        ("ids", ["a:2", "a:1"], None, [3, 4]),
    ],
)
def test_rows_under_a_tombstone_are_hidden(
    stored: Stored, reader: Reader, kind: str, text: Any, run: str | None, left: list[int]
) -> None:
    stored.shard(stored.row("a:1"), stored.row("a:2"))
    stored.put("a:3", run="run-2")
    stored.put("a:1")
    stored.tombstone(kind, text, t_del=3, run=run)
    assert visible(reader, A) == left


def test_a_covered_raw_shard_is_not_opened(stored: Stored, reader: Reader, hooked: Hooked) -> None:
    stored.put("a")
    stored.tombstone("prefix", "a")
    assert visible(reader, A) == []
    assert "open" not in [name for name, _ in hooked.calls]


def test_a_shard_that_vanishes_before_it_is_read_starts_it_over(stored: Stored, reader: Reader, hooked: Hooked) -> None:
    old = stored.shard(stored.row("a:1"))

    def compact(name: str, path: str) -> None:
        if path == A and old.exists():
            stored.shard(stored.row("a:1"), inputs=[old], level=1)
            old.unlink()

    hooked.after = compact
    assert visible(reader, A) == [2]
    assert [path for name, path in hooked.calls if name == "list"] == [A, TOMBSTONE_DIR] * 2


def test_shards_that_keep_vanishing_are_a_clear_error(stored: Stored, reader: Reader, hooked: Hooked) -> None:
    def vanish(name: str, path: str) -> None:
        if path == TOMBSTONE_DIR:
            shutil.rmtree(stored.root / A)
            stored.put("a")

    stored.put("a")
    hooked.after = vanish
    with pytest.raises(rr.ReadConflictError, match=r"5 attempts.*a file vanished each time") as caught:
        visible(reader, A)
    assert isinstance(caught.value.__cause__, rr.ObjectNotFoundError)


def test_partitions_known_by_name_survive_a_new_attempt(stored: Stored, reader: Reader, hooked: Hooked) -> None:
    stored.put("a")
    old = [stored.shard(stored.row("b:1")), stored.shard(stored.row("b:2"))]

    def compact(name: str, path: str) -> None:
        if path == TOMBSTONE_DIR and old[0].exists():
            stored.shard(stored.row("b:1"), stored.row("b:2"), inputs=old, level=1)
            for each in old:
                each.unlink()

    hooked.after = compact
    (taken,) = reader.read_each([A, B], lambda taken: taken, names_only=True)
    assert (list(taken.unread), list(taken.shards)) == ([A], [B])


@pytest.mark.parametrize(("slow_turns", "error"), [(1, False), (4, False), (5, True)])
def test_listings_that_take_too_long_are_not_trusted(
    stored: Stored, reader: Reader, hooked: Hooked, monkeypatch: pytest.MonkeyPatch, slow_turns: int, error: bool
) -> None:
    stored.put("a")
    now = [0.0]
    turns = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(name: str, path: str) -> None:
        if name == "list":
            turns.append(path)
            now[0] += 5.1 if len(turns) <= 2 * slow_turns else 4.9  # grace is 20: two listings may take 10

    hooked.after = wait
    if error:
        with pytest.raises(rr.ReadConflictError, match="longer than 10 s each time"):
            visible(reader, A)
    else:
        assert visible(reader, A) == [1]


def test_a_foreign_file_is_warned_of_once(stored: Stored, reader: Reader) -> None:
    stored.put("a")
    for name in ("notes.txt", ".nfs000123", "_SUCCESS", "00-zz.arrow.tmp"):
        (stored.root / A / name).write_bytes(b"")
    with pytest.warns(rr.RoutingDatasetWarning) as caught:
        assert visible(reader, A) == [1]
    said = sorted(str(each.message).removeprefix(reader.storage.uri) for each in caught)
    assert said == [f": {A}/{name} is no shard of this dataset" for name in ("00-zz.arrow.tmp", "notes.txt")]
    assert visible(reader, A) == [1]  # warnings are errors here


def damage_empty(path: Path, stored: Stored) -> None:
    path.write_bytes(b"")


def damage_cut(path: Path, stored: Stored) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def damage_foreign(path: Path, stored: Stored) -> None:
    path.write_bytes(b"ARROW1" + b"x" * 5000)


def damage_other_spec(path: Path, stored: Stored) -> None:
    other = Stored(stored.root.parent / "other", rr.RoutingSpec(range(2), 16, 2))
    shutil.copy(other.shard(other.row("a")), path)


def damage_other_keys(path: Path, stored: Stored) -> None:
    other = Stored(stored.root.parent / "other", keys=rr.KeyScheme.by_step())
    shutil.copy(other.shard(other.row("7:a")), path)


@pytest.mark.parametrize("damage", [damage_empty, damage_cut, damage_foreign, damage_other_spec, damage_other_keys])
def test_a_damaged_shard_among_good_ones_is_stepped_over(
    stored: Stored, reader: Reader, damage: Callable[[Path, Stored], None]
) -> None:
    stored.put("a:1")
    bad = stored.shard(stored.row("a:2"))
    stored.put("a:3")
    damage(bad, stored)
    with pytest.warns(rr.RoutingDatasetWarning, match=f"{A}/{bad.name} is damaged") as caught:
        assert visible(reader, A) == [1, 3]
    assert len(caught) == 1
    assert visible(reader, A) == [1, 3]
    assert reader.read([A], lambda taken: taken.damaged) == {A: [f"{A}/{bad.name}"]}


def test_shards_stay_open_until_the_snapshot_is_used_up(stored: Stored, reader: Reader) -> None:
    reader._max_open = 2
    for number in range(5):
        stored.put(f"a:{number}")
    sources = reader.read([A], lambda taken: list(taken.sources.values()), keep_open=True)
    assert len(sources) == 2
    for source in sources:
        with pytest.raises(rr.StorageError):
            source.tail(1)  # closed
    assert reader.read([A], lambda taken: taken.sources, keep_open=True) == {}  # known by now


@pytest.mark.parametrize(
    ("limit", "at_most"), [(128, 8), (1024, 64), (1 << 20, 64), (resource.RLIM_INFINITY, 64), (8, 0)]
)
def test_the_limit_of_descriptors_is_shared_with_other_threads(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, limit: int, at_most: int
) -> None:
    for number in range(70):
        stored.put(f"a:{number}")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    reader = Reader(open_storage(stored.root), stored.dataset.format)
    # threads may each add the one they are at
    assert at_most <= reader.read([A], lambda taken: len(taken.sources), keep_open=True) <= at_most + 3 * bool(at_most)


def test_large_partitions_are_taken_alone_and_small_ones_together(
    stored: Stored, reader: Reader, hooked: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "ROWS_AT_ONCE", 8)
    for name in "abcdef":
        stored.shard(*[stored.row(f"{name}:{number}") for number in range(2 if name < "d" else 9)])

    def use(taken: Snapshot) -> str:
        return "".join(path[-1] for path in taken.shards)

    paths = [f"data_id={name}" for name in "abcdefg"]
    assert list(reader.read_each(paths, use)) == ["abc", "d", "e", "f", "g"]
    assert [path for name, path in hooked.calls if name == "list"] == [*paths, TOMBSTONE_DIR]
    monkeypatch.setattr(snapshot, "PARTITIONS_AT_ONCE", 2)
    assert list(reader.read_each(paths, use)) == ["ab", "c", "d", "e", "f", "g"]


def test_a_group_whose_shard_vanished_is_read_anew(stored: Stored, reader: Reader) -> None:
    stored.put("a")
    old = stored.shard(stored.row("b"))
    stored.put("c")

    def use(taken: Snapshot) -> list[int]:
        return [shard.name.tmin for shards in taken.shards.values() for shard in shards]

    groups = reader.read_each([A, B, "data_id=c"], use)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "ROWS_AT_ONCE", 1)
        assert next(groups) == [1]
        stored.shard(stored.row("b"), inputs=[old], level=1)
        old.unlink()
        assert list(groups) == [[4], [3]]


def test_names_tell_of_a_single_row_that_nothing_hides(stored: Stored, reader: Reader, hooked: Hooked) -> None:
    for request_id in ("a", "b:1", "b:2", "c", "d"):
        stored.put(request_id)
    stored.tombstone("ids", ["c"], t_del=1)
    stored.tombstone("prefix", "d:1")
    everywhere = [A, B, "data_id=c", "data_id=d", "data_id=e"]
    unread, shards = reader.read(everywhere, lambda taken: (taken.unread, taken.shards), names_only=True)
    assert {path: len(items) for path, items in unread.items()} == {A: 1, "data_id=c": 1}
    assert {path: len(items) for path, items in shards.items()} == {B: 2, "data_id=d": 1, "data_id=e": 0}
    assert [path.split("/")[0] for name, path in hooked.calls if name == "open"] == [B, B, "data_id=d"]


def shard(path: Path) -> Shard:
    name = parse_shard_name(path.name)
    assert name is not None
    storage = open_storage(path.parent)
    (entry,) = [each for each in storage.list("") if each.name == path.name]
    with storage.open(path.name) as source:
        return Shard(path.name, entry, name, snapshot.read_index(source), {})


def test_the_index_cache_is_bounded_and_forgets_the_longest_unused(stored: Stored) -> None:
    first, second, third = (shard(stored.shard(stored.row(f"a:{number}"))) for number in range(3))
    cache = IndexCache(limit_bytes=first.footprint * 2)
    cache.add(first)
    cache.add(second)
    assert cache.get(first.path, first.entry) is first
    cache.add(third)
    assert cache.get(second.path, second.entry) is None
    assert cache.get(first.path, first.entry) is first
    assert cache.get(third.path, third.entry) is third
    cache.add(third)  # counted once
    assert cache.get(first.path, first.entry) is first
    assert cache.get(first.path, Entry(first.path, 1, 0.0)) is None
    IndexCache(limit_bytes=1).add(first)


def test_listed_carries_the_name(stored: Stored, reader: Reader) -> None:
    path = stored.shard(stored.row("a"))
    (listed,) = reader.listing([A])[A]
    assert listed == Listed(f"{A}/{path.name}", listed.entry, parse_shard_name(path.name))
    assert listed.entry.size == path.stat().st_size
