"""Delete marks: which rows and shards they cover, and how their files are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import Stored

from rr_dataset.errors import FormatError, NewerFormatError, ObjectNotFoundError
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import ShardName, parse_partition
from rr_dataset.record import Row
from rr_dataset.storage import Storage, open_storage
from rr_dataset.tombstones import Tombstone, TombstoneCache, TombstoneSet, list_tombstones, write_tombstones

KEYS = KeyScheme.fastdeploy()


def tombstone(kind: str, text: Any, t_del: int = 100, run: str | None = None, number: int = 1) -> Tombstone:
    return Tombstone(f"{number:032x}", kind, text, run, t_del, 5)


def row(request_id: str, t_submit: int = 50, run: str = "r", keys: KeyScheme = KEYS) -> Row:
    key = keys.parse(request_id)
    return Row(
        f"{t_submit:016x}-w",
        request_id,
        key.components,
        key.choice,
        t_submit,
        0,
        1,
        part=False,
        status="complete",
        run_id=run,
    )


def shard(tmin: int, tmax: int) -> ShardName:
    return ShardName(0, tmin, tmax, 1, "0" * 16, 7)


def put(root: Path, name: str, *tombstones: Tombstone) -> Path:
    """The file as FORMAT.md describes it."""
    path = root / "_rr" / "tombstones" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps([{f: getattr(t, f) for f in ("uuid", "kind", "text", "run", "t_del", "made")} for t in tombstones])
    )
    return path


def name(number: int) -> str:
    return f"{number:012x}-{number:032x}.json"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    (tmp_path / "_rr").mkdir()
    return open_storage(tmp_path)


@pytest.mark.parametrize(
    ("kind", "text", "covered", "left"),
    [
        ("prefix", "a:1", ["a:1", "a:1:7", "a:1:7:0", "a:1#3"], ["a:10", "a", "b:1"]),
        ("prefix", "a", ["a", "a:1:2:3"], ["a:a:1:2:3", "b"]),
        ("prefix", "a:1#3", ["a:1#3", "a:1:0#3"], ["a:1", "a:1#4"]),
        ("prefix", {"data_id": "a:b"}, ["a:b:1:2:3"], ["a:1", "a:b:c:1:2:3"]),
        ("prefix", {"gen_id": 2}, ["a:2", "b:2:1"], ["a:1", "a"]),
        ("ids", ("a:1", "c:5#2"), ["a:1", "c:5#2"], ["a:1:0", "a:1#0", "c:5"]),
        ("all", "", ["a", "b:1:2:3#4"], []),
        ("glob", "m*_1", ["math_1", "m_1:2:3", "math_1#2"], ["math_10", "xm_1", "math"]),
        ("glob", "a:*", ["a:1", "a:10:0"], ["a", "b:1", "ab:1"]),
        ("glob", "[ab]:?", ["a:1", "b:2:3"], ["a:10", "c:1", "a"]),
        ("glob", "[!a]*:1#3", ["b:1#3", "cd:1:0#3"], ["b:1", "a:1#3", "b:1#4"]),
        ("glob", "*", ["a", "a:1", "b#1"], []),
    ],
)
def test_covers_rows(kind: str, text: Any, covered: list[str], left: list[str]) -> None:
    marks = TombstoneSet(KEYS, [tombstone(kind, text)])
    assert [request_id for request_id in covered + left if marks.covers(row(request_id))] == covered


@pytest.mark.parametrize(("kind", "text"), [("prefix", "a"), ("ids", ("a",)), ("all", "")])
def test_the_clock_and_the_run_limit_it(kind: str, text: Any) -> None:
    marks = TombstoneSet(KEYS, [tombstone(kind, text)])
    assert marks.covers(row("a", 100))
    assert not marks.covers(row("a", 101))
    marks = TombstoneSet(KEYS, [tombstone(kind, text, run="r")])
    assert marks.covers(row("a", 100, run="r"))
    assert not marks.covers(row("a", 100, run="s"))


def test_buckets() -> None:
    keys = KeyScheme.uuid(4)
    for mark in (tombstone("prefix", "x"), tombstone("ids", ("x",)), tombstone("prefix", {"id": "x"})):
        marks = TombstoneSet(keys, [mark])
        assert marks.covers(row("x", keys=keys))
        assert not marks.covers(row("y", keys=keys))
        assert marks.applied(keys.partition(keys.parse("x").components), 0) == (mark.uuid,)


IDS = st.sampled_from(["a", "a:1", "a:1:2", "a:2", "a:1#1", "b:1", "b:1:2:3", "b#1", "c:1:0:0"])
TEXTS = st.one_of(
    st.tuples(st.just("prefix"), IDS),
    st.tuples(st.just("prefix"), st.sampled_from([{"gen_id": 1}, {"data_id": "b"}, {"choice": 1}, {"turn_id": 2}])),
    st.tuples(st.just("ids"), st.lists(IDS, min_size=1, max_size=3).map(tuple)),
    st.tuples(st.just("all"), st.just("")),
    st.tuples(st.just("glob"), st.sampled_from(["?", "*:1", "[bc]", "a:*:*"])),
)
GLOBS = {
    "?": lambda have: True,
    "*:1": lambda have: have["gen_id"] == "1",
    "[bc]": lambda have: have["data_id"] in ("b", "c"),
    "a:*:*": lambda have: have["data_id"] == "a" and None not in (have["gen_id"], have["turn_id"]),
}
MARKS = st.lists(st.tuples(TEXTS, st.integers(0, 9), st.sampled_from([None, "r", "s"])), max_size=6)
ROWS = st.lists(st.tuples(IDS, st.integers(0, 9), st.sampled_from(["r", "s"])), min_size=1, max_size=6)


def is_covered(each: Row, mark: Tombstone) -> bool:
    """The definition, without an index."""
    if each.t_submit > mark.t_del or mark.run not in (None, each.run_id):
        return False
    if mark.kind == "ids":
        return each.request_id in mark.text
    if mark.kind == "all":
        return True
    have = {**dict(zip(KEYS.components, each.components, strict=True)), "choice": each.choice}
    if mark.kind == "glob":
        return GLOBS[mark.text](have)
    pins = mark.text
    if isinstance(pins, str):
        base, _, choice = pins.partition("#")
        pins = {**dict(zip(KEYS.components, base.split(":"), strict=False)), **({"choice": choice} if choice else {})}
    return all(str(have[name]) == str(value) for name, value in pins.items())


@given(MARKS, ROWS, st.sampled_from([1, 2]), st.integers(0, 6))
def test_against_the_definition(marks: list, rows: list, depth: int, first: int) -> None:
    keys = KeyScheme.fastdeploy(depth)
    made = [tombstone(*text, t_del, run, number) for number, (text, t_del, run) in enumerate(marks)]
    before = TombstoneSet(keys, made[:first])
    found = before.extended(made[first:])
    assert bool(found) == bool(made)
    partitions: dict[Any, list[Row]] = {}
    for request_id, t_submit, run in rows:
        each = row(request_id, t_submit, run, keys)
        covering = [mark for mark in made if is_covered(each, mark)]
        pairs = keys.partition(each.components)
        assert found.covers(each) == bool(covering)
        assert before.covers(each) == any(mark in made[:first] for mark in covering)
        assert {mark.uuid for mark in covering} <= set(found.applied(pairs, each.t_submit))
        partitions.setdefault(pairs, []).append(each)
    for pairs, members in partitions.items():
        stamps = [each.t_submit for each in members]
        if found.covers_shard(shard(min(stamps), max(stamps)), pairs):
            assert all(found.covers(each) for each in members)
        reaching = set(found.applied(pairs, min(stamps)))
        assert all(mark.t_del >= min(stamps) for mark in made if mark.uuid in reaching)


@pytest.mark.parametrize(
    ("kind", "text", "run", "partition", "whole"),
    [
        ("prefix", "a", None, "data_id=a", True),
        ("prefix", {"data_id": "a"}, None, "data_id=a", True),
        ("all", "", None, "data_id=a", True),
        ("prefix", "a", None, "data_id=b", False),
        ("prefix", "a", "r", "data_id=a", False),
        ("prefix", "a:1", None, "data_id=a", False),
        ("prefix", "a#1", None, "data_id=a", False),
        ("ids", ("a",), None, "data_id=a", False),
        ("prefix", "a", None, "data_id=a/gen_id=1", True),
        ("prefix", "a", None, "data_id=a/gen_id=__HIVE_DEFAULT_PARTITION__", True),
        ("prefix", "a:1", None, "data_id=a/gen_id=1", True),
        ("prefix", "a:1", None, "data_id=a/gen_id=10", False),
        ("prefix", {"gen_id": 1}, None, "data_id=b/gen_id=1", True),
        ("prefix", "a:1:0", None, "data_id=a/gen_id=1", False),
        ("glob", "[ab]*", None, "data_id=ax", True),
        ("glob", "[ab]*", None, "data_id=c", False),
        ("glob", "a:*", None, "data_id=a", False),
        ("glob", "*:1?", None, "data_id=a/gen_id=10", True),
        ("glob", "*:1?", None, "data_id=a/gen_id=1", False),
        ("glob", "*:*", None, "data_id=a/gen_id=__HIVE_DEFAULT_PARTITION__", False),
    ],
)
def test_covers_shards_by_name(kind: str, text: Any, run: str | None, partition: str, whole: bool) -> None:
    pairs = parse_partition(partition)
    assert pairs is not None
    marks = TombstoneSet(KeyScheme.fastdeploy(len(pairs)), [tombstone(kind, text, 100, run)])
    assert marks.covers_shard(shard(1, 100), pairs) is whole
    assert not marks.covers_shard(shard(1, 101), pairs)


@pytest.mark.parametrize(
    ("kind", "text", "partition", "reaches"),
    [
        ("prefix", "a:1:0", "data_id=a", True),
        ("prefix", "a:1:0", "data_id=b", False),
        ("ids", ("a:1", "c"), "data_id=c", True),
        ("ids", ("a:1", "c"), "data_id=b", False),
        ("all", "", "data_id=b", True),
        ("prefix", {"turn_id": 1}, "data_id=b", True),
        ("prefix", "a", "data_id=a/gen_id=3", True),
        ("prefix", "a:1", "data_id=a/gen_id=3", False),
        ("prefix", {"gen_id": 1}, "data_id=a/gen_id=3", False),
        ("glob", "a*:7", "data_id=ab", True),
        ("glob", "a*:7", "data_id=b", False),
        ("glob", "a*:7", "data_id=a/gen_id=8", False),
    ],
)
def test_applied_names_those_that_reach_in(kind: str, text: Any, partition: str, reaches: bool) -> None:
    pairs = parse_partition(partition)
    assert pairs is not None
    mark = tombstone(kind, text, 100, "r")
    marks = TombstoneSet(KeyScheme.fastdeploy(len(pairs)), [mark])
    assert marks.applied(pairs, 100) == ((mark.uuid,) if reaches else ())
    assert marks.applied(pairs, 101) == ()


TURN = KEYS.components.index("turn_id")


@pytest.mark.parametrize(
    ("kind", "text", "covered", "left"),
    [
        ("ids", ("a:1:2:0", "b:0"), ["a:1:0:0", "a:1:2:0", "b:0"], ["a:1:3:0", "a:1:1:1", "a:2:1:0", "a:1:1:0#1", "a:1", "b:0:1"]),
        ("prefix", "a:1:2", ["a:1:0", "a:1:2:7", "a:1:1:0#3"], ["a:1:3", "a:1", "a", "a:2:1", "b:1:1"]),
        ("prefix", {"turn_id": 1}, ["a:1:0", "b:7:1:2"], ["a:1:2", "a:1"]),
        ("prefix", "a:1:2#3", ["a:1:0#3", "a:1:2#3"], ["a:1:0", "a:1:3#3"]),
        ("prefix", "a:1", ["a:1:0", "a:1:9", "a:1"], ["a:2:0"]),
        ("glob", "?:*:1", ["a:1:0", "b:2:1:5"], ["a:1:2", "a:1", "ab:1:0"]),
        ("glob", "a:*:*", ["a:1:0", "a:1:9"], ["a:1", "b:1:0"]),
        ("all", "", ["a:1:3", "a"], []),
    ],
)  # fmt: skip
def test_where_only_the_last_turn_is_kept_a_mark_covers_the_lower_ones(
    kind: str, text: Any, covered: list[str], left: list[str]
) -> None:
    marks = TombstoneSet(KEYS, (), TURN).extended([tombstone(kind, text)])
    assert [i for i in covered + left if marks.covers(row(i))] == covered
    assert not any(marks.covers(row(i, 101)) for i in covered)
    of_run = TombstoneSet(KEYS, [tombstone(kind, text, run="r")], TURN)
    assert [i for i in covered + left if of_run.covers(row(i, run="r"))] == covered
    assert not any(of_run.covers(row(i, run="s")) for i in covered)


def test_a_turn_never_covers_a_whole_shard_by_its_name() -> None:
    pairs = (("data_id", "a"),)
    assert not TombstoneSet(KEYS, [tombstone("prefix", {"turn_id": 9})], TURN).covers_shard(shard(1, 2), pairs)
    assert TombstoneSet(KEYS, [tombstone("prefix", "a")], TURN).covers_shard(shard(1, 2), pairs)
    assert TombstoneSet(KEYS, [tombstone("ids", ("a:1:2",))], TURN).applied(pairs, 1) == (f"{1:032x}",)


def test_some_turns_by_pattern_are_no_last_turn(storage: Storage, tmp_path: Path) -> None:
    put(tmp_path, name(1), tombstone("glob", "a:1:[12]"))
    assert list_tombstones(storage, TombstoneCache(KEYS)).covers(row("a:1:2"))
    with pytest.raises(FormatError, match=r"name one turn_id, or take \*"):
        list_tombstones(storage, TombstoneCache(KEYS, TURN))


def test_one_uuid_is_one_tombstone_and_applied_is_sorted() -> None:
    marks = TombstoneSet(KEYS, [tombstone("all", "", number=n) for n in (3, 1, 2, 3)])
    assert marks.applied((("data_id", "a"),), 0) == tuple(f"{n:032x}" for n in (1, 2, 3))


def test_none_without_a_directory(storage: Storage) -> None:
    marks = list_tombstones(storage, TombstoneCache(KEYS))
    assert not marks
    assert not marks.covers(row("a"))
    assert not marks.covers_shard(shard(1, 2), (("data_id", "a"),))


def test_lists_anew_and_reads_each_file_once(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TombstoneCache(KEYS)
    read: list[str] = []
    real = type(storage).read_bytes
    monkeypatch.setattr(type(storage), "read_bytes", lambda self, path: (read.append(path), real(self, path))[1])
    put(tmp_path, name(1), tombstone("prefix", "a"), tombstone("ids", ["b:1"], number=2))
    put(tmp_path, "notes.json", tombstone("all", ""))
    first = list_tombstones(storage, cache)
    assert first.covers(row("a:1"))
    assert first.covers(row("b:1"))
    assert not first.covers(row("b:2"))
    assert list_tombstones(storage, cache) is first
    gone = put(tmp_path, name(2), tombstone("prefix", {"data_id": "b"}, number=3))
    assert list_tombstones(storage, cache).covers(row("b:2"))
    assert not first.covers(row("b:2"))
    gone.unlink()
    assert not list_tombstones(storage, cache).covers(row("b:2"))
    assert read == [f"_rr/tombstones/{name(1)}", f"_rr/tombstones/{name(2)}"]


def test_a_file_that_vanishes_before_it_is_read_is_an_error(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [put(tmp_path, name(n), tombstone("prefix", "a", number=n)) for n in (1, 2)]
    cache = TombstoneCache(KEYS)
    real = type(storage).list
    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "list", lambda self, path: (real(self, path), paths[1].unlink())[0])
        with pytest.raises(ObjectNotFoundError, match=name(2)):
            list_tombstones(storage, cache)
    assert list_tombstones(storage, cache).covers(row("a"))


@pytest.mark.parametrize(
    "change",
    [
        {"uuid": 3},
        {"t_del": "100"},
        {"t_del": True},
        {"made": None},
        {"run": 3},
        {"text": ["a"]},
        {"text": ""},
        {"text": {}},
        {"text": {"nope": 1}},
        {"text": "chatcmpl-1"},
        {"kind": "ids"},
        {"kind": "ids", "text": [3]},
        {"kind": "ids", "text": [[]]},
        {"kind": "all", "text": None},
        {"kind": "glob", "text": ["a"]},
        {"kind": "glob", "text": "a::1"},
    ],
)
def test_damage_is_named(storage: Storage, tmp_path: Path, change: dict[str, Any]) -> None:
    path = put(tmp_path, name(1), tombstone("prefix", "a"))
    path.write_text(json.dumps([{**json.loads(path.read_text())[0], **change}]))
    with pytest.raises(FormatError, match="tombstone"):
        list_tombstones(storage, TombstoneCache(KEYS))


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"3", b'{"uuid": 1}', b"[{}]", b"\xff"])
def test_what_is_no_list_of_tombstones_is_named(storage: Storage, tmp_path: Path, data: bytes) -> None:
    put(tmp_path, name(1)).write_bytes(data)
    with pytest.raises(FormatError, match=name(1)):
        list_tombstones(storage, TombstoneCache(KEYS))


def test_a_kind_of_a_later_version(storage: Storage, tmp_path: Path) -> None:
    put(tmp_path, name(1), tombstone("moon", "a"))
    with pytest.raises(NewerFormatError, match=r"_rr/tombstones/.*moon.*upgrade"):
        list_tombstones(storage, TombstoneCache(KEYS))


TEXT_OF_A_KIND = [
    ("prefix", "ä:1"),
    ("prefix", {"data_id": "math:17", "gen_id": 3}),
    ("ids", ("a:1", "b\n")),
    ("all", ""),
]


def test_written_tombstones_are_read_again(storage: Storage, tmp_path: Path) -> None:
    marks = [tombstone(kind, text, number=i, run="r" if i else None) for i, (kind, text) in enumerate(TEXT_OF_A_KIND)]
    written = write_tombstones(storage, marks, 77)
    (path,) = (tmp_path / "_rr/tombstones").iterdir()
    assert path.name == written
    assert written.startswith(f"{77:012x}-")
    assert path.read_bytes().isascii()
    values = json.loads(path.read_text())
    assert values == [json.loads(json.dumps(vars(mark))) for mark in marks]
    assert not (tmp_path / "_rr/tmp").exists()
    found = list_tombstones(storage, TombstoneCache(KEYS))
    assert [found.covers(row(i, run="r")) for i in ("ä:1", "b\n", "c")] == [True, True, True]
    assert [found.covers(row(i, run="s")) for i in ("ä:1", "b\n", "c")] == [True, False, False]


def test_a_second_attempt_makes_a_second_file(storage: Storage, tmp_path: Path) -> None:
    names = {write_tombstones(storage, [tombstone("all", "")], 77) for _ in range(3)}
    assert {path.name for path in (tmp_path / "_rr/tombstones").iterdir()} == names
    assert len(names) == 3


def test_the_name_is_durable_before_it_returns(storage: Storage) -> None:
    calls: list[str] = []

    class Spy:
        def __getattr__(self, call: str) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                calls.append(call)
                return getattr(storage, call)(*args, **kwargs)

            return run

    write_tombstones(Spy(), [tombstone("all", "")], 77)  # type: ignore[arg-type]  # stands in for a storage
    assert calls == ["create", "remove_empty_dirs", "sync_dirs"]


@pytest.mark.parametrize("text", ["[" * 100_000, '[{"uuid":' + "[" * 100_000, "{}", '"x"', "5", "[5]", "[[]]", "null"])
def test_what_is_no_list_of_objects_is_a_format_error(tmp_path: Path, text: str) -> None:
    stored = Stored(tmp_path / "ds")
    stored.put("a:0:0:0")
    path = stored.tombstone("all", "")
    path.write_text(text)
    with pytest.raises(FormatError, match=path.name):
        list(stored.dataset.ids())
