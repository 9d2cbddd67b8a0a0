"""Deleting from outside a writer: what goes at once, what is hidden, in which order, and what survives."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rr_dataset as rr
from rr_dataset.clock import pack
from rr_dataset.delete import DeleteReport, PartitionPlan, execute, plan_delete
from rr_dataset.storage import local, open_storage
from tests.stored import SPEC, Stored

module = importlib.import_module("rr_dataset.delete")
NOW_MS = 1_800_000_000_000


def directories(root: Path) -> list[str]:
    """All directories but those under `_rr`."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*=*") if path.is_dir())


def tombstones(root: Path) -> list[list[dict[str, Any]]]:
    """The files of delete marks, oldest first. No code of ours."""
    return [json.loads(path.read_text()) for path in sorted((root / "_rr/tombstones").glob("*"))]


class Clock:
    """A wall clock of its own, which sleeping moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = NOW_MS
        self.slept: list[float] = []
        monkeypatch.setattr(module, "wall_ms", lambda: self.ms)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.ms / 1000, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.ms += max(1, round(seconds * 1000))


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """Two directories with two files of two rows each, one with a single row."""
    made = Stored(tmp_path / "data")
    for name in ("a", "a:x:0:0:0"):
        assert made.keys.parse(name).components[0] in ("a", "a:x")
    made.shard(made.row("a:1:0"), made.row("a:1:1"))
    made.shard(made.row("a:1:2"), made.row("a:10:0"))
    made.shard(made.row("b:1:0", run="run-2"), made.row("b:1:1"))
    made.shard(made.row("b:2:0", run="run-2"), made.row("b:2:1", run="run-2"))
    made.put("ab:1:0")
    return made


ALL = {"a:1:0", "a:1:1", "a:1:2", "a:10:0", "b:1:0", "b:1:1", "b:2:0", "b:2:1", "ab:1:0"}


@pytest.mark.parametrize(
    ("what", "gone", "files", "hidden", "left"),
    [
        ({"prefixes": ["a"]}, {"a:1:0", "a:1:1", "a:1:2", "a:10:0"}, 2, 0, ["data_id=ab", "data_id=b"]),
        ({"prefixes": ["a:1"]}, {"a:1:0", "a:1:1", "a:1:2"}, 1, 1, ["data_id=a", "data_id=ab", "data_id=b"]),
        ({"prefixes": [{"gen_id": 1}]}, {"a:1:0", "a:1:1", "a:1:2", "b:1:0", "b:1:1", "ab:1:0"}, 3, 1,
         ["data_id=a", "data_id=b"]),
        ({"prefixes": ["a", {"data_id": "ab"}, "zz", "a"]}, {"a:1:0", "a:1:1", "a:1:2", "a:10:0", "ab:1:0"}, 3, 0,
         ["data_id=b"]),
        ({"ids": ["a:1:0", "a:1:2", "nobody", "b:2:0", "b:2:1"]}, {"a:1:0", "a:1:2", "b:2:0", "b:2:1"}, 1, 2,
         ["data_id=a", "data_id=ab", "data_id=b"]),
        ({"glob": "a*"}, {"a:1:0", "a:1:1", "a:1:2", "a:10:0", "ab:1:0"}, 3, 0, ["data_id=b"]),
        ({"glob": "?:1:*"}, {"a:1:0", "a:1:1", "a:1:2", "b:1:0", "b:1:1"}, 2, 1,
         ["data_id=a", "data_id=ab", "data_id=b"]),
        ({"run": "run-2"}, {"b:1:0", "b:2:0", "b:2:1"}, 1, 1, ["data_id=a", "data_id=ab", "data_id=b"]),
        ({"run": "run-2", "prefixes": ["b:1"]}, {"b:1:0"}, 0, 1, ["data_id=a", "data_id=ab", "data_id=b"]),
        ({"everything": True}, ALL, 5, 0, []),
        ({"older_than_s": 60}, ALL, 5, 0, []),  # their stamps are of 1970
    ],
)  # fmt: skip
def test_what_goes(
    stored: Stored, what: dict[str, Any], gone: set[str], files: int, hidden: int, left: list[str]
) -> None:
    root = stored.root
    sizes = {path: path.stat().st_size for path in root.glob("*/*.arrow")}
    planned = list(plan_delete(root, **what))
    assert set(stored.dataset.ids()) == ALL  # a plan changes nothing
    assert not (root / "_rr/tombstones").exists()
    report = rr.delete(root, **what)
    assert set(rr.open_dataset(root).ids()) == set(stored.dataset.ids()) == ALL - gone
    assert directories(root) == left
    removed = sum(size for path, size in sizes.items() if not path.exists())
    assert report == DeleteReport(report.partitions, files, removed, len(gone), hidden)
    assert len(tombstones(root)) == 1
    assert json.loads(json.dumps([asdict(each) for each in planned])) == [
        {**asdict(each), "remove": list(each.remove)} for each in planned
    ]
    total = DeleteReport()
    for each in planned:
        total = total.with_plan(each)
    assert total == report


@pytest.mark.parametrize(
    "what", [{"prefixes": ["a:1"]}, {"ids": ["a:1:0", "b:1:0"]}, {"everything": True}, {"run": "run-2"}]
)
def test_a_second_delete_finds_nothing(stored: Stored, what: dict[str, Any]) -> None:
    rr.delete(stored.root, **what)
    ids, folders = set(stored.dataset.ids()), directories(stored.root)
    assert rr.delete(stored.root, **what) == DeleteReport()
    assert list(plan_delete(stored.root, **what)) == []
    assert (set(stored.dataset.ids()), directories(stored.root)) == (ids, folders)
    assert len(tombstones(stored.root)) == 2


def test_two_deletes_together_cover_a_file(stored: Stored) -> None:
    assert rr.delete(stored.root, ids=["a:1:0"]) == DeleteReport(1, 0, 0, 1, 1)
    report = rr.delete(stored.root, ids=["a:1:1"])
    assert (report.files, report.records, report.hidden) == (1, 1, 0)


def test_after_everything_only_our_own_folder_remains(stored: Stored) -> None:
    rr.delete_prefix(stored.root, "a")
    rr.delete(stored.root, everything=True)
    assert [path.name for path in stored.root.iterdir()] == ["_rr"]
    stored.put("a:1:0")  # stamped in 1970, so before the delete
    assert list(stored.dataset.ids()) == []


def test_delete_prefix_and_a_mapping_of_numbers(stored: Stored) -> None:
    assert rr.delete_prefix(stored.root, {"data_id": "a", "gen_id": 10}).records == 1
    assert tombstones(stored.root)[0][0]["text"] == {"data_id": "a", "gen_id": "10"}


def test_an_unknown_prefix_is_no_error_and_reaches_a_late_put(stored: Stored) -> None:
    assert rr.delete_prefix(stored.root, "late") == DeleteReport()
    stored.put("late:1")
    assert "late:1" not in set(stored.dataset.ids())
    assert rr.delete_prefix(stored.root, "late").files == 1


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ({}, rr.InvalidInputError, "nothing to delete.*everything=True"),
        ({"prefixes": [], "ids": iter([])}, rr.InvalidInputError, "nothing to delete"),
        ({"prefixes": "a"}, rr.InvalidInputError, r"expected several, for example \['a'\]"),
        ({"prefixes": {"gen_id": 1}}, rr.InvalidInputError, "expected several"),
        ({"ids": "a:1"}, rr.InvalidInputError, "expected several"),
        ({"prefixes": ["a", ""]}, rr.InvalidRequestIdError, "empty"),
        ({"prefixes": [{"nope": 1}]}, rr.InvalidRequestIdError, "nope"),
        ({"ids": ["a:x:y"]}, rr.InvalidRequestIdError, "gen_id"),
        ({"glob": "a::1"}, rr.InvalidRequestIdError, "gen_id"),
        ({"glob": "a#*"}, rr.InvalidRequestIdError, "every sample"),
        ({"run": ""}, rr.InvalidInputError, "run"),
        ({"older_than_s": -1}, rr.InvalidInputError, "older_than_s"),
        ({"older_than_s": float("nan")}, rr.InvalidInputError, "older_than_s"),
    ],
)
def test_wrong_arguments_delete_nothing(
    stored: Stored, what: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        rr.delete(stored.root, **what)
    assert not (stored.root / "_rr/tombstones").exists()
    assert set(stored.dataset.ids()) == ALL


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(rr.DatasetNotFoundError):
        rr.delete(tmp_path / "none", everything=True)
    assert not (tmp_path / "none").exists()


# The clock


def test_one_file_and_one_wait_however_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rr.create_dataset(tmp_path, SPEC, max_clock_skew_s=2.0)
    rr.delete(tmp_path, prefixes=["a", "b:1"], ids=["c:1", "d:1"], glob="e*:1", run="r")
    (marks,) = tombstones(tmp_path)
    assert [(mark["kind"], mark["text"]) for mark in marks] == [
        ("prefix", "a"), ("prefix", "b:1"), ("ids", ["c:1", "d:1"]), ("glob", "e*:1")
    ]  # fmt: skip
    assert {(mark["t_del"], mark["run"], mark["made"]) for mark in marks} == {
        ((NOW_MS + 2000) << 16 | 0xFFFF, "r", NOW_MS)
    }
    assert len({mark["uuid"] for mark in marks}) == 4
    assert NOW_MS + 4000 < clock.ms <= NOW_MS + 4002
    assert len(clock.slept) <= 2


def test_without_skew_it_waits_for_the_next_millisecond(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rr.delete(stored.root, everything=True)
    assert clock.ms == NOW_MS + 1


def test_an_age_is_counted_from_this_clock_and_needs_no_wait(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for age_ms in (59_999, 60_000, 60_001):
        stored._stamp = pack(NOW_MS - age_ms, 0xFFFE)
        stored.put(f"aged:{age_ms}")
    rr.delete(stored.root, older_than_s=60)
    assert list(stored.dataset.ids()) == ["aged:59999"]
    assert clock.slept == []


@pytest.mark.parametrize("ahead_ms", [0, 1])
def test_a_put_from_the_future_is_reported(stored: Stored, monkeypatch: pytest.MonkeyPatch, ahead_ms: int) -> None:
    Clock(monkeypatch)
    stored._stamp = pack(NOW_MS + ahead_ms) - 1
    stored.put("a:7")
    if ahead_ms:
        with pytest.warns(rr.RoutingDatasetWarning, match="ahead of this host's"):
            rr.delete(stored.root, prefixes=["a"])
    else:
        rr.delete(stored.root, prefixes=["a"])
    assert ("a:7" in set(stored.dataset.ids())) == bool(ahead_ms)


# The order of the steps


class Spy:
    """Stands before the calls of the local storage: tells them, and does something before some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **before: Callable[[Any], object]) -> None:
        self.calls: list[str] = []

        def wrap(name: str) -> None:
            real = getattr(local.LocalStorage, name)

            def run(storage: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
                first = list(first) if name in ("delete", "sync_dirs") else first
                self.calls.append(f"{name} {first}")
                if name in before:
                    before[name](first)
                return real(storage, first, *args, **kwargs)

            monkeypatch.setattr(local.LocalStorage, name, run)

        for name in ("list", "list_dirs", "create", "sync_dirs", "delete", "remove_empty_dirs"):
            wrap(name)


def test_the_mark_is_durable_before_anything_is_listed_or_removed(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    rr.delete_prefix(stored.root, "a")
    shards = sorted(call for call in spy.calls if call.startswith("delete"))
    assert spy.calls[0].startswith("create _rr/tombstones/")
    assert spy.calls[2] == "sync_dirs ['_rr/tombstones']"
    assert spy.calls[3:] == ["list data_id=a", *shards, "remove_empty_dirs data_id=a"]
    assert len(shards) == 1


def test_other_marks_are_read_once_and_only_where_indexes_are(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    rr.delete(stored.root, ids=["a:1"])
    spy = Spy(monkeypatch)
    rr.delete(stored.root, prefixes=["a"])
    assert "list _rr/tombstones" not in spy.calls
    rr.delete(stored.root, glob="*:2")
    assert spy.calls.count("list _rr/tombstones") == 1


def test_a_newer_put_that_arrives_meanwhile_stays(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(_: object) -> None:
        monkeypatch.undo()
        stored._stamp = pack(NOW_MS * 2)
        stored.put("a:1:0")

    Spy(monkeypatch, remove_empty_dirs=lambda path: put(path) if path == "data_id=a" else None)
    rr.delete_prefix(stored.root, "a")
    assert set(stored.dataset.ids("a")) == {"a:1:0"}


def test_what_another_removes_meanwhile_is_no_error(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def wipe(path: str) -> None:
        if path == "data_id=a":
            for each in (stored.root / path).iterdir():
                each.unlink()

    real = module.read_index

    def read_index(*args: Any) -> Any:
        index = real(*args)
        wipe("data_id=a")
        return index

    monkeypatch.setattr(module, "read_index", read_index)
    rr.delete(stored.root, ids=["a:1:0", "a:1:1"])
    assert not (stored.root / "data_id=a").exists()


def test_foreign_files_stay(stored: Stored) -> None:
    note = stored.root / "data_id=a" / "notes.txt"
    note.write_text("mine")
    (stored.root / "data_id=a" / "sub").mkdir()
    rr.delete(stored.root, everything=True)
    assert sorted(path.name for path in note.parent.iterdir()) == ["notes.txt", "sub"]
    assert directories(stored.root) == ["data_id=a"]


def test_a_damaged_file_goes_by_its_name_or_is_named(stored: Stored) -> None:
    path = stored.shard(stored.row("c:1"), stored.row("c:2"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(rr.RoutingDatasetWarning, match="damaged and stays"):
        assert rr.delete(stored.root, ids=["c:1"]) == DeleteReport()
    assert path.exists()
    assert rr.delete_prefix(stored.root, "c").files == 1


def test_readers_keep_what_they_hold_open(stored: Stored) -> None:
    with open_storage(stored.root).open(
        next(stored.root.glob("data_id=ab/*")).relative_to(stored.root).as_posix()
    ) as it:
        size = it.size or len(it.tail(10))
        rr.delete(stored.root, everything=True)
        assert len(it.tail(10)) == 10
        assert size
    assert directories(stored.root) == []


def test_two_path_levels(tmp_path: Path) -> None:
    stored = Stored(tmp_path, keys=rr.KeyScheme.fastdeploy(partition_by=2))
    for name in ("a:1:0", "a:1:1", "a:10:0", "a", "b:1:0"):
        stored.put(name)
    assert rr.delete_prefix(tmp_path, "a:1").partitions == 1
    assert directories(tmp_path) == [
        "data_id=a", "data_id=a/gen_id=10", "data_id=a/gen_id=__HIVE_DEFAULT_PARTITION__", "data_id=b", "data_id=b/gen_id=1"
    ]  # fmt: skip
    assert rr.delete(tmp_path, glob="a:*").files == 1
    assert set(stored.dataset.ids()) == {"a", "b:1:0"}
    (tmp_path / "data_id=c/gen_id=1").mkdir(parents=True)  # as a deleter that died leaves them
    (tmp_path / "data_id=d").mkdir()
    rr.delete(tmp_path, everything=True)
    assert directories(tmp_path) == []


def test_a_plan_can_be_executed_late_and_twice(stored: Stored) -> None:
    (task,) = plan_delete(stored.root, prefixes=["a"])
    assert task.runs == {"run-1": 0}
    stored._stamp = pack(NOW_MS * 2)
    stored.put("a:9")
    for _ in range(2):
        execute(open_storage(stored.root), PartitionPlan(**json.loads(json.dumps(asdict(task)))))
    assert list(stored.dataset.ids("a")) == ["a:9"]


def test_the_plan_names_runs(tmp_path: Path) -> None:
    stored = Stored(tmp_path)
    stored._stamp = pack(5)
    stored.shard(stored.row("a:1", run="x"), stored.row("a:2", run="y"), level=1)
    stored._stamp = pack(9)
    stored.shard(stored.row("a:3", run="x"), level=1)
    (task,) = plan_delete(tmp_path, everything=True)
    assert task.runs == {"x": 9, "y": 5}
    (task,) = plan_delete(tmp_path, ids=["a:2"])
    assert task.runs == {"y": 5}


# Against a model that shares no code

COMPONENTS = st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 2), st.sampled_from([None, 1]))
PUTS = st.lists(st.tuples(COMPONENTS, st.sampled_from(["r", "s"]), st.integers(0, 2)), min_size=1, max_size=8)
WHAT = st.sampled_from([
    ("a", lambda d, g, t: d == "a", False), ("b:1", lambda d, g, t: (d, g) == ("b", 1), False),
    ("a:0:1", lambda d, g, t: (d, g, t) == ("a", 0, 1), True), ("*:1", lambda d, g, t: g == 1, False),
    ("?:0:2", lambda d, g, t: (g, t) == (0, 2), True), ("", lambda d, g, t: True, False),
])  # fmt: skip
DELETES = st.lists(st.tuples(WHAT, st.sampled_from([None, "r"]), st.integers(0, 9)), max_size=3)


@given(puts=PUTS, deletes=DELETES, last=st.booleans())
def test_a_reader_shows_what_the_model_says(
    tmp_path_factory: pytest.TempPathFactory, puts: list[Any], deletes: list[Any], last: bool
) -> None:
    root = tmp_path_factory.mktemp("model")
    stored = Stored(root, keep="last_turn" if last else "all")
    rows = [
        (f"{d}:{g}:{t}" + ("" if c is None else f"#{c}"), (d, g, t, c), run, group) for (d, g, t, c), run, group in puts
    ]
    for group in range(3):
        for name in "ab":
            batch = [stored.row(i, run=run) for i, (d, *_), run, its in rows if its == group and d == name]
            if batch:
                stored.shard(*batch)
    stamped = []  # (stamp, id, components, run): the order in which they were made above
    for group in range(3):
        for name in "ab":
            stamped += [(i, parts, run) for i, parts, run, its in rows if its == group and parts[0] == name]
    order = dict(enumerate(stamped, 1))
    for (text, _, _), run, until in deletes:
        kind = "all" if not text else "glob" if "*" in text or "?" in text else "prefix"
        stored.tombstone(kind, text, t_del=until, run=run)
    alive = {}
    for stamp, (i, (d, g, t, c), run) in order.items():
        dead = any(
            stamp <= until and only in (None, run) and (
                rule(d, g, t) or (last and names_turn and any(rule(d, g, higher) for higher in range(t, 4)))
            )
            for (_, rule, names_turn), only, until in deletes
        )  # fmt: skip
        left = last and any(
            other > stamp and (d, g, c, run) == (d2, g2, c2, run2) and t2 > t
            for other, (_, (d2, g2, t2, c2), run2) in order.items()
        )
        if not dead and not left:
            alive[i] = stamp
    heads = {head.request_id: head for head in stored.dataset.heads(list(stored.dataset.ids()))}
    assert set(heads) == set(alive)
    assert {i: head.rows[-1].t_submit for i, head in heads.items()} == alive


def test_a_clock_that_steps_back_does_not_prolong_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skew_s = 2.0
    stored = Stored(tmp_path / "ds", max_clock_skew_s=skew_s)
    stored.put("a:1:0")
    clock, passed = Clock(monkeypatch), [50.0]

    def sleep(seconds: float) -> None:
        clock.slept.append(seconds)
        passed[0] += seconds
        clock.ms += round(seconds * 1000)

    def step_back(report: DeleteReport) -> None:
        clock.ms = NOW_MS - 3_600_000

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: passed[0], sleep=sleep))
    rr.delete(stored.root, prefixes=["a"], progress=step_back)
    assert skew_s <= sum(clock.slept) <= 2 * skew_s + 0.2


@pytest.mark.parametrize(
    ("what", "files", "records", "hidden"),
    [({"prefixes": ["a"]}, 4, 5, 0), ({"prefixes": ["a:1"]}, 0, 1, 1), ({"ids": ["a:1", "a:2"]}, 1, 2, 2)],
)
def test_a_record_that_was_compacted_counts_once(
    tmp_path: Path, what: dict[str, Any], files: int, records: int, hidden: int
) -> None:
    stored = Stored(tmp_path / "data")
    rows = [stored.row(f"a:{number}") for number in range(1, 5)]
    inputs = [stored.shard(*rows[:2]), stored.shard(*rows[2:])]
    stored.shard(*rows, inputs=inputs, level=1)
    stored.put("a:9")
    (planned,) = plan_delete(stored.root, **what)
    report = rr.delete(stored.root, **what)
    assert (len(planned.remove), planned.records, planned.hidden) == (files, records, hidden)
    assert (report.files, report.records, report.hidden) == (files, records, hidden)
    assert report.bytes == planned.bytes
