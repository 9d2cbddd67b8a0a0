"""A trainer follows a dataset: every record once, however it got there, and nothing is waited for in vain."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import Stored

import rr_dataset as rr
from rr_dataset import follow
from rr_dataset.layout import TOMBSTONE_DIR
from rr_dataset.record import RecordHead, RowData
from rr_dataset.storage.local import LocalStorage


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds")


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """All directories changed long ago."""
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 60 * 10**9)


class Lists:
    """The directories that are listed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._paths: list[str] = []
        listed = LocalStorage.list

        def spy(storage: LocalStorage, path: str) -> Any:
            self._paths.append(path)
            return listed(storage, path)

        monkeypatch.setattr(LocalStorage, "list", spy)

    def take(self) -> list[str]:
        paths, self._paths = self._paths, []
        return [path for path in paths if path != TOMBSTONE_DIR]


def ids(heads: list[RecordHead]) -> list[str]:
    return [head.request_id for head in heads]


# poll


def test_each_record_is_told_once(stored: Stored) -> None:
    for request_id in ("b", "a:2", "a:1"):
        stored.put(request_id)
    heads, cursor = stored.dataset.poll()
    assert ids(heads) == ["a:1", "a:2", "b"]
    assert stored.dataset.poll(cursor)[0] == []
    stored.put("a:3")
    heads, cursor = stored.dataset.poll(cursor)
    assert ids(heads) == ["a:3"]
    assert stored.dataset.poll(cursor)[0] == []


def test_a_record_that_grows_is_told_again_whole(stored: Stored) -> None:
    stored.put("a", 5, part=True, status="partial")
    (head,), cursor = stored.dataset.poll()
    assert (head.num_tokens, head.final) == (5, False)
    stored.put("a", 5, start=5, part=True)
    (head,), cursor = stored.dataset.poll(cursor)
    assert (head.num_tokens, head.final, len(head.rows)) == (10, True, 2)
    stored.put("a", 3)
    (head,), cursor = stored.dataset.poll(cursor)
    assert head.num_tokens == 3


def test_a_dropped_record_is_told(stored: Stored) -> None:
    stored.put("a", status="dropped", reason="spool full")
    (head,), _ = stored.dataset.poll()
    assert (head.status, head.reason) == ("dropped", "spool full")


def test_a_late_row_is_told_though_it_is_older(stored: Stored) -> None:
    late, newer = stored.row("a:1"), stored.row("a:2")
    stored.shard(newer)
    _, cursor = stored.dataset.poll()
    stored.shard(late)
    assert ids(stored.dataset.poll(cursor)[0]) == ["a:1"]


def test_a_late_row_that_changes_nothing_is_not_told(stored: Stored) -> None:
    late, newer = stored.row("a"), stored.row("a")
    stored.shard(newer)
    _, cursor = stored.dataset.poll()
    stored.shard(late)
    heads, cursor = stored.dataset.poll(cursor)
    assert heads == []
    assert stored.dataset.poll(cursor)[0] == []


def test_compaction_and_a_replay_repeat_nothing(stored: Stored) -> None:
    rows = [stored.row("a:1"), stored.row("a:2"), stored.row("a:2")]
    raw = [stored.shard(row) for row in rows]
    _, cursor = stored.dataset.poll()
    merged = stored.shard(rows[0], rows[2], inputs=raw, level=1)
    heads, cursor = stored.dataset.poll(cursor)
    assert heads == []
    for path in raw:
        path.unlink()
    again = stored.shard(rows[0], rows[2], inputs=[merged], level=2)
    merged.unlink()
    stored.shard(rows[0])
    stored.shard(rows[1])  # dead rows come back with a replay too
    heads, cursor = stored.dataset.poll(cursor)
    assert heads == []
    stored.put("a:3")
    assert ids(stored.dataset.poll(cursor)[0]) == ["a:3"]
    assert again.exists()


def test_deleted_rows_are_forgotten_and_a_new_put_is_told(stored: Stored) -> None:
    for request_id in ("a:1", "a:2", "b"):
        stored.put(request_id)
    _, cursor = stored.dataset.poll()
    assert repr(cursor).startswith("PollCursor(3 rows in 2 partitions")
    stored.tombstone("prefix", "b")
    stored.tombstone("ids", ["a:1"])
    shutil.rmtree(stored.root / "data_id=b")
    heads, cursor = stored.dataset.poll(cursor)
    assert (heads, repr(cursor).split(" of")[0]) == ([], "PollCursor(1 rows in 1 partitions")
    stored.put("b")
    assert ids(stored.dataset.poll(cursor)[0]) == ["b"]


def test_a_put_that_counts_again_is_not_told_again(stored: Stored) -> None:
    stored.put("a", run="one")
    stored.put("a", run="two")
    _, cursor = stored.dataset.poll()
    stored.tombstone("prefix", "a", run="two")
    stored.put("a:1")
    heads, cursor = stored.dataset.poll(cursor)
    assert ids(heads) == ["a:1"]
    assert stored.dataset.heads(["a"])[0].run_id == "one"


def test_a_run_sees_its_own_rows(stored: Stored) -> None:
    stored.put("a", run="one")
    stored.put("b", run="two")
    one = rr.open_dataset(stored.root, run="one")
    heads, cursor = one.poll()
    assert ids(heads) == ["a"]
    with pytest.raises(rr.InvalidInputError, match="run 'one'.*run None; start it with None"):
        stored.dataset.poll(cursor)


def test_a_cursor_of_another_dataset_or_type_is_refused(stored: Stored, tmp_path: Path) -> None:
    cursor = Stored(tmp_path / "other").dataset.poll()[1]
    with pytest.raises(rr.InvalidInputError, match="start it with None"):
        stored.dataset.poll(cursor)
    with pytest.raises(rr.InvalidInputError, match="expected None or the PollCursor"):
        stored.dataset.poll(b"x")  # type: ignore[arg-type]  # what is tested


@pytest.mark.usefixtures("later")
def test_directories_that_have_not_changed_are_not_listed(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    for request_id in ("a", "b", "c"):
        stored.put(request_id)
    _, cursor = stored.dataset.poll()
    lists = Lists(monkeypatch)
    heads, cursor = stored.dataset.poll(cursor)
    assert (heads, lists.take()) == ([], [])
    stored.put("b:1")
    heads, cursor = stored.dataset.poll(cursor)
    assert (ids(heads), lists.take()) == (["b:1"], ["data_id=b"])
    heads, _ = rr.open_dataset(stored.root).poll(pickle.loads(pickle.dumps(cursor)))
    assert (heads, lists.take()) == ([], [])


def test_a_directory_that_may_still_change_within_the_tick_is_listed(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.put("a")
    changed_ns = (stored.root / "data_id=a").stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: changed_ns + follow.SETTLED_NS)
    _, cursor = stored.dataset.poll()
    lists = Lists(monkeypatch)
    stored.dataset.poll(cursor)
    assert lists.take() == ["data_id=a"]


def test_a_directory_tells_when_its_names_changed(stored: Stored) -> None:
    """Also where a copying tool sets its modification time back."""
    first, second = stored.shard(stored.row("a")), stored.shard(stored.row("a"))
    storage, directory = stored.dataset._client().storage, first.parent
    assert storage.changed_ns("data_id=b") is None

    def changes_after(action: Callable[[], Any]) -> bool:
        """Within a tick of the clock: so again until it shows."""
        before = storage.changed_ns("data_id=a")
        for _ in range(1000):
            action()
            os.utime(directory, ns=(1, 1))
            if storage.changed_ns("data_id=a") != before:
                return True
        return False

    assert changes_after(lambda: stored.put("a"))
    assert changes_after(lambda: second.unlink(missing_ok=True))
    unchanged = storage.changed_ns("data_id=a")
    first.read_bytes()
    stored.put("b")
    assert storage.changed_ns("data_id=a") == unchanged


@pytest.mark.usefixtures("later")
def test_with_a_skew_every_directory_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(tmp_path / "ds", max_clock_skew_s=1)
    stored.put("a")
    _, cursor = stored.dataset.poll()
    lists = Lists(monkeypatch)
    stored.dataset.poll(cursor)
    assert lists.take() == ["data_id=a"]


@pytest.mark.usefixtures("later")
def test_a_put_during_the_listing_is_told_by_the_next_poll(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears after its directory was listed, and before the next one is."""
    stored.put("a:1")
    stored.put("b:1")
    listed = LocalStorage.list

    def spy(storage: LocalStorage, path: str) -> Any:
        answer = listed(storage, path)
        if path == "data_id=a":
            stored.put("a:2")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "list", spy)
        heads, cursor = stored.dataset.poll()
    assert ids(heads) == ["a:1", "b:1"]
    assert ids(stored.dataset.poll(cursor)[0]) == ["a:2"]


def test_a_cursor_is_small_and_has_a_form_in_bytes(stored: Stored) -> None:
    stored.shard(*[stored.row(f"a:{number}") for number in range(1000)])
    _, cursor = stored.dataset.poll()
    data = cursor.to_bytes()
    assert 8000 < len(data) < 8300
    assert len(pickle.dumps(cursor)) < 8400
    for copy in (rr.PollCursor.from_bytes(data), pickle.loads(pickle.dumps(cursor))):
        assert (copy.to_bytes(), repr(copy)) == (data, repr(cursor))
        assert stored.dataset.poll(copy)[0] == []


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"x" + data[1:]])
def test_other_bytes_are_no_cursor(stored: Stored, damage: Callable[[bytes], bytes]) -> None:
    stored.put("a")
    data = stored.dataset.poll()[1].to_bytes()
    with pytest.raises(rr.InvalidInputError, match="not what PollCursor.to_bytes"):
        rr.PollCursor.from_bytes(damage(data))


_ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "late", "compact", "delete", "poll"]), st.integers(0, 3)), max_size=25
)


@given(_ACTIONS)
def test_whatever_happens_nothing_is_lost_or_repeated(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    """Against a model that only knows which whole put of an id is the newest, and which one was told."""
    stored = Stored(tmp_path_factory.mktemp("model") / "ds")
    cursor = None
    there: dict[str, dict[str, Path]] = {}  # by id: its record ids and the files they are in
    told: set[str] = set()
    held: list[RowData] = []
    data: dict[str, RowData] = {}
    for action, number in [*actions, ("poll", 0)]:
        name = f"{'ab'[number % 2]}:{number}"
        if action == "put":
            row = stored.row(name)
            held.append(row)
        if action in ("put", "late") and held:
            row = held.pop(0 if action == "late" else -1)
            there.setdefault(row.row.request_id, {})[row.row.record_id] = stored.shard(row)
            data[row.row.record_id] = row
            if number == 3:
                held.append(stored.row(name))  # written later
        elif action == "compact" and there.get(name):
            mine = {key: paths for key, paths in there.items() if key[0] == name[0]}
            files = {path for paths in mine.values() for path in paths.values()}
            newest = {key: max(paths) for key, paths in mine.items()}
            path = stored.shard(*[data[each] for each in newest.values()], inputs=list(files), level=1)
            for key, record_id in newest.items():
                there[key] = {record_id: path}
        elif action == "delete":
            stored.tombstone("ids", [name])
            there.pop(name, None)
            held = [row for row in held if row.row.request_id != name]
        elif action == "poll":
            heads, cursor = stored.dataset.poll(cursor)
            expected = {max(paths) for paths in there.values()} - told
            assert {head.record_id for head in heads} == expected
            assert len(heads) == len(expected)
            told |= {record_id for paths in there.values() for record_id in paths}


# wait_for


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], Any]]]:
    """What happens in each pause, on a clock that moves only in them."""
    now = [0.0]
    script: list[Callable[[], Any]] = []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if script:
            script.pop(0)()

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    yield script
    assert script == []


def nothing() -> None:
    pass


def test_waiting_for_what_is_there_does_not_wait(stored: Stored, pauses: list[Callable[[], Any]]) -> None:
    stored.put("a", 3)
    stored.put("b", status="aborted", reason="stopped")
    heads = stored.dataset.wait_for(["b", "a", "b"], timeout_s=0)
    assert [(head.request_id, head.status) for head in heads] == [("b", "aborted"), ("a", "complete"), ("b", "aborted")]
    assert stored.dataset.wait_for([], timeout_s=0) == []
    with pytest.raises(rr.InvalidInputError, match="several request ids"):
        stored.dataset.wait_for("a")


def test_it_waits_until_the_last_part(stored: Stored, pauses: list[Callable[[], Any]]) -> None:
    stored.put("a", 4, part=True, status="partial")
    pauses += [
        nothing,
        lambda: stored.put("a", 4, start=4, part=True, status="partial"),
        lambda: stored.put("b"),
        lambda: stored.put("a", 4, start=8, part=True),
    ]
    heads = stored.dataset.wait_for(["a", "b"])
    assert [(head.request_id, head.num_tokens) for head in heads] == [("a", 12), ("b", 5)]


def test_a_drop_counts_at_once(stored: Stored, pauses: list[Callable[[], Any]]) -> None:
    stored.put("a", status="dropped", reason="spool full")
    (head,) = stored.dataset.wait_for(["a"], timeout_s=0, weight_version=4)
    assert (head.status, head.reason) == ("dropped", "spool full")


def test_it_waits_for_a_weight_version(stored: Stored, pauses: list[Callable[[], Any]]) -> None:
    stored.put("a", weights="6")
    pauses += [
        lambda: stored.put("a", 6, weights="7", part=True, status="partial"),
        lambda: stored.put("a", 4, weights=[(0, 3, "7"), (3, 4, "8")]),
        lambda: stored.put("a", 2, weights="7"),
    ]
    (head,) = stored.dataset.wait_for(["a"], weight_version=7)
    assert head.num_tokens == 2
    assert stored.dataset.wait_for(["a"], timeout_s=0, weight_version="7")
    stored.put("a", 4, weights=[(0, 3, "7"), (3, 4, "8")])
    assert stored.dataset.wait_for(["a"], timeout_s=0, weight_version=8)


def test_a_time_out_names_what_is_missing_and_what_was_seen(stored: Stored, pauses: list[Callable[[], Any]]) -> None:
    stored.put("a:1")
    stored.put("a:2", 7, part=True, status="partial")
    with pytest.raises(
        rr.WaitTimeoutError,
        match=r"2 of 3 ids are not final after 0.1 s: a:2 \(partial up to token 7\), a:3 \(absent\)",
    ) as caught:
        stored.dataset.wait_for(["a:1", "a:2", "a:3"], timeout_s=0.1)
    assert isinstance(caught.value, (TimeoutError, LookupError))
    with pytest.raises(rr.WaitTimeoutError, match=r"weight version '3'.*a:1 \(complete, weight version None\)"):
        stored.dataset.wait_for(["a:1"], timeout_s=0, weight_version=3)
    with pytest.raises(rr.WaitTimeoutError, match=r"not final after 0 s: b:0 .*b:9 \(absent\) and 2 more"):
        stored.dataset.wait_for([f"b:{number}" for number in range(12)], timeout_s=0)


def test_it_looks_less_and_less_often_and_only_where_something_is_missing(
    stored: Stored, pauses: list[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.put("a")
    lists = Lists(monkeypatch)
    slept = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    with pytest.raises(rr.WaitTimeoutError):
        stored.dataset.wait_for(["a", "b"], timeout_s=1.0)
    assert slept[:7] == [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25]
    assert max(slept) == 0.25
    assert sum(slept) == pytest.approx(1.0)
    paths = lists.take()
    assert paths.count("data_id=a") == 1
    assert paths.count("data_id=b") == len(slept) + 1


def test_waiting_beside_a_writer(stored: Stored) -> None:
    """No fake clock: a thread puts while the caller waits."""
    writer = threading.Thread(target=lambda: [stored.put(f"a:{number}") for number in range(20)])
    writer.start()
    assert len(stored.dataset.wait_for([f"a:{number}" for number in range(20)])) == 20
    writer.join()
