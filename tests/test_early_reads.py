"""Reading ahead of the tombstones on a remote store: faster, and never another answer."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_store import RemoteMemory
from stored import Stored

import rr_dataset as rr
from rr_dataset.errors import ReadConflictError, RecordNotFoundError
from rr_dataset.layout import TOMBSTONE_DIR
from rr_dataset.lookup import Lookup

A = "data_id=a"


class Remote:
    """A dataset whose files are mirrored into a remote store, and a reader that stays."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.stored = Stored(root, **settings)
        self.store = RemoteMemory()
        self.mirror()
        self.dataset = rr.RoutingDataset("memory")
        self.dataset._made = Lookup(root, None, None)
        self.dataset._made.storage = self.store  # type: ignore[assignment]
        self.dataset._made.reader = type(self.dataset._made.reader)(self.store, self.stored.dataset.format)  # type: ignore[arg-type]

    def mirror(self) -> None:
        self.store.load(self.stored.root)


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "ds")


def delete(remote: Remote, *, unlink: bool) -> None:
    remote.stored.tombstone("prefix", "a")
    if unlink:
        for path in (remote.stored.root / A).glob("*"):
            path.unlink()
    remote.mirror()


ANSWERS: dict[str, Callable[[rr.RoutingDataset, list[str]], Any]] = {
    "get_many": lambda ds, ids: [
        None if record is None else (record.rows, record.routed_experts.tobytes())
        for record in ds.get_many(ids, on_missing="none")
    ],
    "heads": lambda ds, ids: ds.heads(ids, on_missing="none"),
    "ids": lambda ds, ids: list(ds.ids()),
    "poll": lambda ds, ids: [head.rows for head in ds.poll()[0]],
}


@pytest.mark.parametrize("unlink", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("moment", ["before the call", "between the listings"])
def test_a_delete_is_obeyed(remote: Remote, name: str, moment: str, unlink: bool) -> None:
    remote.stored.put("a:1")
    remote.stored.put("b:1")
    remote.mirror()
    assert "a:1" in remote.dataset.ids()  # it knows the shard, and that there are no tombstones
    armed = [True]

    def after(call: str, path: str) -> None:
        if moment == "between the listings" and path == A and armed:
            armed.clear()
            delete(remote, unlink=unlink)

    remote.store.after = after
    if moment == "before the call":
        delete(remote, unlink=unlink)
    ANSWERS[name](remote.dataset, ["a:1", "b:1"])
    assert ANSWERS[name](remote.dataset, ["a:1", "b:1"]) == ANSWERS[name](remote.stored.dataset, ["a:1", "b:1"])
    assert list(remote.dataset.ids()) == ["b:1"]


@pytest.mark.parametrize("unlink", [False, True])
def test_get_after_a_delete_finds_nothing(remote: Remote, unlink: bool) -> None:
    remote.stored.put("a:1")
    remote.mirror()
    remote.dataset.get("a:1")
    armed = [True]

    def after(call: str, path: str) -> None:
        if path == A and armed:
            armed.clear()
            delete(remote, unlink=unlink)

    remote.store.after = after
    with pytest.raises(RecordNotFoundError):
        remote.dataset.get("a:1")


def test_a_newer_part_is_read_where_a_tombstone_takes_the_older(remote: Remote) -> None:
    remote.stored.put("a:1", 8)
    remote.stored.tombstone("ids", ["a:1"])
    newer = remote.stored.put("a:1", 3)
    remote.mirror()
    out = np.zeros((4, 3, 2), np.uint8)
    got = remote.dataset.get("a:1", out=out)
    assert got.routed_experts is out
    np.testing.assert_array_equal(out, newer.routed_experts)


def test_nothing_is_returned_before_the_fresh_tombstones_are_there(remote: Remote) -> None:
    remote.stored.put("a:1")
    remote.mirror()
    payload_read, go_on = threading.Event(), threading.Event()
    remote.dataset.heads(["a:1"])

    def after(call: str, path: str) -> None:
        if path == TOMBSTONE_DIR:
            assert go_on.wait(60)
        elif call == "get":
            payload_read.set()

    remote.store.after = after
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(remote.dataset.get, "a:1")
        assert payload_read.wait(60)
        assert not found.done()
        go_on.set()
        assert found.result(60).request_id == "a:1"


@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("warm", [False, True])
def test_a_compaction_at_any_step_shows_the_record(remote: Remote, step: int, warm: bool) -> None:
    rows = [remote.stored.row("a:1", 4, start=start, part=True) for start in (0, 4)]
    inputs = [remote.stored.shard(row) for row in rows]
    remote.stored.tombstone("prefix", "other")
    remote.mirror()
    if warm:
        remote.dataset.get("a:1")
    left = [step]
    lock = threading.Lock()

    def after(call: str, path: str) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        remote.stored.shard(*rows, inputs=inputs, level=1)
        for each in inputs:
            each.unlink()
        remote.mirror()

    remote.store.after = after
    got = remote.dataset.get("a:1")
    np.testing.assert_array_equal(got.routed_experts, np.concatenate([row.routed_experts for row in rows], axis=1))


@pytest.mark.parametrize("step", range(1, 7))
def test_tombstones_folded_at_any_step_still_hide(remote: Remote, step: int) -> None:
    remote.stored.put("a:1")
    marks = [remote.stored.tombstone("prefix", prefix) for prefix in ("a", "other")]
    remote.stored.put("b:1")
    remote.mirror()
    left = [step]
    lock = threading.Lock()

    def after(call: str, path: str) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        texts = [mark.read_text().strip()[1:-1] for mark in marks]
        folded = marks[0].with_name(marks[0].name.replace(marks[0].name[:2], "0f", 1))
        folded.write_text(f"[{','.join(texts)}]")
        for mark in marks:
            mark.unlink()
        remote.mirror()

    remote.store.after = after
    assert remote.dataset.heads(["a:1"], on_missing="none") == [None]
    assert remote.dataset.heads(["a:1"], on_missing="none") == [None]


def test_a_folded_file_with_the_same_marks_costs_no_second_payload(remote: Remote) -> None:
    remote.stored.put("a:1", 400)
    mark = remote.stored.tombstone("prefix", "other")
    remote.mirror()
    remote.dataset.get("a:1")
    mark.rename(mark.with_name(f"{mark.name.partition('-')[0]}-{'f' * 32}.json"))
    remote.mirror()
    before = len(remote.store.requests)
    remote.dataset.get("a:1")
    assert len(remote.store.requests) - before == 4


def test_a_listing_that_takes_too_long_is_not_trusted(tmp_path: Path) -> None:
    remote = Remote(tmp_path / "ds", grace_s=1e-9)
    remote.stored.put("a:1")
    remote.mirror()
    with pytest.raises(ReadConflictError, match="listing took longer than 5e-10 s"):
        remote.dataset.get("a:1")


def test_a_damaged_shard_is_told_and_only_if_it_is_not_deleted(remote: Remote) -> None:
    remote.stored.put("a:1")
    path = remote.stored.shard(remote.stored.row("a:2"))
    path.write_bytes(b"x" * 100)
    remote.mirror()
    with pytest.warns(rr.RoutingDatasetWarning, match="damaged"), pytest.raises(RecordNotFoundError, match=path.name):
        remote.dataset.get("a:2")
    assert remote.dataset.get("a:1").request_id == "a:1"
    remote.stored.tombstone("prefix", "a")
    remote.mirror()
    with pytest.raises(RecordNotFoundError) as raised:
        remote.dataset.get("a:2")
    assert path.name not in str(raised.value)


ACTIONS = st.sampled_from(["put", "part", "delete", "unlink", "compact", "ids", "fold"])


@given(st.lists(st.tuples(ACTIONS, st.sampled_from(["a:1", "a:2", "b:1"])), min_size=1, max_size=8))
def test_a_reader_that_stays_answers_as_a_new_one_on_a_disk(steps: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        remote = Remote(Path(folder) / "ds")
        stored = remote.stored
        asked = ["a:1", "a:2", "b:1"]
        for action, request_id in steps:
            prefix = request_id[0]
            shards = sorted((stored.root / f"data_id={prefix}").glob("*.arrow"))
            if action == "put":
                stored.put(request_id)
            elif action == "part":
                stored.put(request_id, 3, start=3, part=True)
            elif action == "ids":
                stored.tombstone("ids", [request_id])
            elif action in ("delete", "unlink"):
                stored.tombstone("prefix", prefix)
                if action == "unlink":
                    for path in shards:
                        path.unlink()
            elif action == "compact" and shards:
                rr.compact(stored.root, compression="none")
            elif action == "fold":
                marks = sorted((stored.root / TOMBSTONE_DIR).glob("*.json"))
                texts = [text for mark in marks if (text := mark.read_text().strip()[1:-1])]
                if texts:
                    stored.tombstone("ids", [request_id], t_del=0)
                    newest = max((stored.root / TOMBSTONE_DIR).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
                    newest.write_text(f"[{','.join(texts)}]")
                    for mark in marks:
                        mark.unlink()
            remote.mirror()
            for answer in ANSWERS.values():
                assert answer(remote.dataset, asked) == answer(rr.open_dataset(stored.root), asked)
