"""Datasets are created once, opened anywhere, and read by id."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import SPEC, Stored

import rr_dataset as rr
from rr_dataset.layout import FORMAT_PATH, DatasetFormat

ROOT = Path(__file__).parents[1]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds")


# Creating and opening


def test_create_stores_what_was_asked_for(tmp_path: Path) -> None:
    made = rr.create_dataset(
        tmp_path / "ds", SPEC, rr.KeyScheme.uuid(16), ttl_s=60, max_bytes=10, tombstone_ttl_s=9000, grace_s=5
    )
    found = rr.open_dataset(tmp_path / "ds").format
    assert found == made.format
    assert (found.spec, found.keys, found.keep) == (SPEC, rr.KeyScheme.uuid(16), "all")
    assert (found.ttl_s, found.max_bytes, found.tombstone_ttl_s, found.grace_s) == (60, 10, 9000, 5)
    assert sorted(path.name for path in (tmp_path / "ds").rglob("*")) == ["_rr", "format.json"]


def test_defaults(tmp_path: Path) -> None:
    found = rr.create_dataset(str(tmp_path), SPEC).format
    assert found.keys == rr.KeyScheme.fastdeploy()
    assert (found.max_clock_skew_s, found.tombstone_ttl_s, found.grace_s) == (0, 7 * 86400, 600)


def test_creating_again_opens_the_same(stored: Stored) -> None:
    assert rr.create_dataset(stored.root, SPEC).format == stored.dataset.format
    with pytest.raises(rr.InvalidInputError, match="is a dataset already"):
        rr.create_dataset(stored.root, SPEC, exist_ok=False)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"spec": rr.RoutingSpec((3, 4, 7, 9), 200, 4)}, "spec.top_k is 2, not 4"),
        ({"keys": rr.KeyScheme.by_step()}, "keys"),
        ({"grace_s": 7}, "grace_s is 600.0, not 7.0"),
    ],
)
def test_creating_with_other_settings_is_an_error(stored: Stored, other: dict[str, Any], says: str) -> None:
    with pytest.raises(rr.SpecMismatchError, match=says):
        rr.create_dataset(**{"uri": stored.root, "spec": SPEC, **other})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keep": "last"}, "one of all, last_turn"),
        ({"keep": "last_turn", "keys": rr.KeyScheme.by_step()}, "has no turn"),
        ({"spec": "qwen"}, "a RoutingSpec"),
        ({"grace_s": 0}, "grace_s"),
    ],
)
def test_wrong_settings_write_nothing(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=says):
        rr.create_dataset(**{"uri": tmp_path / "ds", "spec": SPEC, **wrong})
    assert not (tmp_path / "ds").exists()


def test_of_many_creators_one_wins_and_all_agree(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def create(_: int) -> str:
        start.wait()
        return rr.create_dataset(tmp_path / "ds", SPEC).format.uuid

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(create, range(8)))) == 1


def test_of_creators_that_disagree_the_losers_are_told(tmp_path: Path) -> None:
    start = threading.Barrier(8)

    def create(top_k: int) -> int | None:
        start.wait()
        try:
            return rr.create_dataset(tmp_path / "ds", rr.RoutingSpec((1,), 8, top_k)).spec.top_k
        except rr.SpecMismatchError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [won for won in pool.map(create, range(1, 9)) if won is not None]
    assert winners == [rr.open_dataset(tmp_path / "ds").spec.top_k]


def test_what_is_no_dataset_says_the_way_out(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(rr.DatasetNotFoundError, match=r"no _rr/format.json.*create_dataset\(\).*wait_s"):
            rr.open_dataset(path)
    with pytest.raises(rr.DatasetNotFoundError):
        rr.open_dataset(tmp_path, wait_s=0.01)


def test_opening_waits_for_the_creator(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(rr.open_dataset, tmp_path / "ds", wait_s=60)
        rr.create_dataset(tmp_path / "ds", SPEC)
        assert opened.result().spec == SPEC


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format_version": 99}, rr.NewerFormatError),
        ({"format": "other"}, rr.FormatError),
        ({"spec": 3}, rr.FormatError),
    ],
)
def test_a_format_that_is_not_ours_is_named(stored: Stored, change: dict[str, Any], error: type[Exception]) -> None:
    path = stored.root / FORMAT_PATH
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(error, match=str(stored.root)):
        rr.open_dataset(stored.root)


# Reading by id


def test_get_gives_the_whole_record(stored: Stored) -> None:
    data = stored.put("math:3:1:0#2", 7, tags={"task": "sum"})
    got = stored.dataset.get("math:3:1:0#2")
    np.testing.assert_array_equal(got.routed_experts, data.routed_experts)
    assert (got.layers, got.num_tokens, got.token_ranges) == (SPEC.moe_layers, 7, ((0, 7),))
    assert (got.components, got.choice, got.status, got.tags) == (
        ("math", "3", "1", "0"),
        2,
        "complete",
        {"task": "sum"},
    )
    assert got.missing == ()
    np.testing.assert_array_equal(got.to_numpy("TLK")[:, 1], got.layer(4))


def test_get_of_some_layers_and_tokens(stored: Stored) -> None:
    data = stored.put("r", 9)
    assert data.routed_experts is not None
    got = stored.dataset.get("r", layers=[4, 9], tokens=slice(-3, None))
    np.testing.assert_array_equal(got.routed_experts, data.routed_experts[[1, 3], 6:])
    got = stored.dataset.get("r", layers=[7], tokens=[(5, 7), (0, 2)])
    np.testing.assert_array_equal(got.routed_experts, data.routed_experts[[2]][:, [5, 6, 0, 1]])
    assert got.token_ranges == ((5, 7), (0, 2))
    assert stored.dataset.get("r", tokens=slice(0, 0)).routed_experts.shape == (4, 0, 2)


def test_the_newest_whole_put_counts(stored: Stored) -> None:
    stored.put("r", 9)
    newest = stored.put("r", 3)
    np.testing.assert_array_equal(stored.dataset.get("r").routed_experts, newest.routed_experts)


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"layers": [5]}, rr.InvalidRoutingError, r"layers \[5\] are not MoE layers"),
        ({"layers": [4, 3]}, rr.InvalidRoutingError, "rising"),
        ({"tokens": slice(0, 6)}, rr.InvalidRoutingError, "0 to 6 are not in 'r', which has 5 tokens"),
        ({"request_id": "chatcmpl-1"}, rr.InvalidRequestIdError, "engine"),
        ({"request_id": "s"}, rr.RecordNotFoundError, "no record of 1 of 1 ids: s"),
    ],
)
def test_what_is_not_there_is_a_clear_error(
    stored: Stored, how: dict[str, Any], error: type[Exception], says: str
) -> None:
    stored.put("r", 5)
    with pytest.raises(error, match=says):
        stored.dataset.get(**{"request_id": "r", **how})


@given(st.lists(st.sampled_from([f"{data}:{gen}" for data in "abc" for gen in range(3)]), max_size=12))
def test_many_come_in_the_order_asked(ids: list[str]) -> None:
    got = many_dataset().dataset.get_many(ids)
    assert [record.request_id for record in got] == ids
    for record in got:
        np.testing.assert_array_equal(record.routed_experts, many_dataset().rows[record.request_id])
    writable = [record.routed_experts for record in got]
    for number, array in enumerate(writable):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(writable))


class Many:
    """Nine records in three partitions, some of a partition in one shard."""

    def __init__(self, root: Path) -> None:
        self.stored = Stored(root)
        self.dataset = self.stored.dataset
        rows = [self.stored.row(f"{data}:{gen}", 4 + gen) for data in "abc" for gen in range(3)]
        self.rows = {each.row.request_id: each.routed_experts for each in rows}
        self.stored.shard(rows[0], rows[1])
        for each in rows[2:]:
            self.stored.shard(each)


_MANY: list[Many] = []


def many_dataset() -> Many:
    return _MANY[0]


@pytest.fixture(autouse=True, scope="module")
def _many(tmp_path_factory: pytest.TempPathFactory) -> Any:
    _MANY.append(Many(tmp_path_factory.mktemp("many")))
    yield
    _MANY.clear()


def test_tokens_per_id() -> None:
    many = many_dataset()
    got = many.dataset.get_many(["c:2", "a:0", "b:1"], layers=[9], tokens=[slice(1, 3), None, [(0, 1), (4, 5)]])
    np.testing.assert_array_equal(got[0].layer(9), many.rows["c:2"][3, 1:3])
    np.testing.assert_array_equal(got[1].layer(9), many.rows["a:0"][3])
    np.testing.assert_array_equal(got[2].layer(9), many.rows["b:1"][3, [0, 4]])
    with pytest.raises(rr.InvalidRoutingError, match="2 selections for 1 ids"):
        many.dataset.get_many(["a:0"], tokens=[None, None])


def test_missing_ids_are_named_and_counted() -> None:
    ids = [f"a:{number}" for number in range(1, 15)]
    with pytest.raises(
        rr.RecordNotFoundError, match=r"no record of 12 of 14 ids: a:3, a:4, .*a:12 and 2 more"
    ) as caught:
        many_dataset().dataset.get_many(ids)
    assert "a:13" not in str(caught.value)
    with pytest.raises(KeyError):
        many_dataset().dataset.heads(ids)
    got = many_dataset().dataset.get_many(ids[:3], on_missing="none")
    assert [record and record.request_id for record in got] == ["a:1", "a:2", None]
    heads = many_dataset().dataset.heads(ids[:3], on_missing="none")
    assert [head and head.num_tokens for head in heads] == [5, 6, None]


def test_wrong_arguments_of_get_many() -> None:
    with pytest.raises(rr.InvalidInputError, match="several request ids"):
        many_dataset().dataset.get_many("a:0")
    with pytest.raises(rr.InvalidInputError, match="on_missing='skip'"):
        many_dataset().dataset.get_many(["a:0"], on_missing="skip")  # type: ignore[call-overload]  # what is tested


def test_dropped_ids_say_why(stored: Stored) -> None:
    stored.put("r")
    stored.put("r", status="dropped", reason="spool full")
    stored.put("s")
    for on_missing in ("raise", "none"):
        with pytest.raises(rr.RecordDroppedError, match=r"dropped 1 of 2 ids: r \(spool full\)"):
            stored.dataset.get_many(["s", "r"], on_missing=on_missing)
    (head,) = stored.dataset.heads(["r"])
    assert (head.status, head.reason, head.final) == ("dropped", "spool full", True)
    assert list(stored.dataset.ids()) == ["r", "s"]


def test_a_damaged_shard_is_suspected_of_a_missing_record(stored: Stored) -> None:
    stored.put("a:1")
    stored.put("b:1")
    bad = stored.shard(stored.row("a:2"))
    bad.write_bytes(bad.read_bytes()[:100])
    with pytest.warns(rr.RoutingDatasetWarning, match=bad.name):
        assert stored.dataset.get("a:1").num_tokens == 5
    with pytest.raises(rr.RecordNotFoundError, match=f"damaged and stepped over.*data_id=a/{bad.name}"):
        stored.dataset.get("a:2")
    with pytest.raises(rr.RecordNotFoundError) as caught:
        stored.dataset.get("b:2")
    assert "stepped over" not in str(caught.value)


def test_heads_tell_the_record_without_its_payload(stored: Stored) -> None:
    stored.put("r", 5, part=True, status="partial")
    stored.put("r", 5, start=3, part=True, status="complete", tags={"a": "b"})
    (head,) = stored.dataset.heads(["r"])
    assert (head.num_tokens, head.status, head.tags, len(head.rows)) == (8, "complete", {"a": "b"}, 2)
    assert type(head) is rr.RecordHead


def test_run_limits_every_read(stored: Stored) -> None:
    old = stored.put("a", 3, run="old")
    stored.put("a", 9, run="new")
    stored.put("b", run="new")
    ds = rr.open_dataset(stored.root, run="old")
    np.testing.assert_array_equal(ds.get("a").routed_experts, old.routed_experts)
    assert list(ds.ids()) == ["a"]
    with pytest.raises(rr.RecordNotFoundError, match="no record of run 'old'"):
        ds.get("b")
    assert stored.dataset.get("a").num_tokens == 9


# Listing


@pytest.mark.parametrize(
    ("prefix", "ids"),
    [
        (None, ["a", "a:1", "a:1#2", "a:10", "b:1"]),
        ("a", ["a", "a:1", "a:1#2", "a:10"]),
        ("a:1", ["a:1", "a:1#2"]),
        ("a:1#2", ["a:1#2"]),
        ({"gen_id": 1}, ["a:1", "a:1#2", "b:1"]),
        ({"data_id": "c"}, []),
    ],
)
@pytest.mark.parametrize("partition_by", [1, 2])
def test_ids_under_a_prefix(tmp_path: Path, prefix: Any, ids: list[str], partition_by: int) -> None:
    stored = Stored(tmp_path / "ds", keys=rr.KeyScheme.fastdeploy(partition_by))
    for request_id in ("b:1", "a:10", "a:1#2", "a", "a:1"):
        stored.put(request_id)
    (stored.root / "lost+found").mkdir()
    (stored.root / "gen_id=3").mkdir()
    assert sorted(stored.dataset.ids(prefix)) == ids
    if partition_by == 1:
        assert list(stored.dataset.ids(prefix)) == ids


def test_a_pinned_prefix_lists_one_directory(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.put("a:1")
    stored.put("b:1")
    storage = stored.dataset._client().storage
    monkeypatch.setattr(type(storage), "list_dirs", lambda *_: pytest.fail("lists the root"))
    assert list(stored.dataset.ids("a:1")) == ["a:1"]


def test_ids_over_many_partitions(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rr_dataset.snapshot.PARTITIONS_AT_ONCE", 3)
    names = [f"p{number}" for number in range(10)]
    for name in names:
        stored.put(name)
    stored.tombstone("prefix", "p4")
    assert list(stored.dataset.ids()) == [name for name in names if name != "p4"]


def test_info_counts_files(stored: Stored) -> None:
    files = [stored.shard(stored.row("a:1"), stored.row("a:2")), stored.shard(stored.row("b"))]
    stored.tombstone("prefix", "z")
    (stored.root / "data_id=empty").mkdir()
    info = stored.dataset.info()
    assert (info.partitions, info.shards, info.rows, info.tombstone_files) == (2, 2, 3, 1)
    assert info.bytes == sum(path.stat().st_size for path in files)
    assert (info.uri, info.format) == (stored.dataset.uri, stored.dataset.format)
    parts = list(stored.dataset.partitions("a:1"))
    assert [(part.path, part.shards, part.rows) for part in parts] == [("data_id=a", 1, 2)]


def test_info_counts_a_row_once_however_many_files_have_it(stored: Stored) -> None:
    rows = [stored.row(f"a:{number}") for number in range(4)]
    inputs = [stored.shard(*rows[:2]), stored.shard(*rows[2:])]
    merged = stored.shard(*rows, inputs=inputs, level=1)
    stored.put("a:9")
    stored.put("b")
    parts = [(part.path, part.shards, part.rows) for part in stored.dataset.partitions()]
    assert parts == [("data_id=a", 4, 5), ("data_id=b", 1, 1)]
    assert stored.dataset.info().rows == 6
    merged.write_bytes(merged.read_bytes()[:-9])
    assert rr.open_dataset(stored.root).info().rows == 10, "what the files' names tell, where no more is known"


# Processes


def test_it_pickles_as_its_address(stored: Stored) -> None:
    data = stored.put("r")
    ds = rr.open_dataset(stored.root, run="run-1")
    ds.get("r")
    text = pickle.dumps(ds)
    assert len(text) < 500
    copy = pickle.loads(text)
    assert (copy.uri, copy.run) == (ds.uri, "run-1")
    np.testing.assert_array_equal(copy.get("r").routed_experts, data.routed_experts)


def test_it_pickles_into_another_working_directory(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    stored.put("r")
    monkeypatch.chdir(stored.root.parent)
    text = pickle.dumps(rr.open_dataset("ds"))
    monkeypatch.chdir("/")
    assert pickle.loads(text).get("r").num_tokens == 5


def test_a_forked_child_makes_its_own_client(stored: Stored) -> None:
    stored.put("r")
    code = f"""
import os, warnings
import rr_dataset as rr
warnings.simplefilter("ignore")
ds = rr.open_dataset({str(stored.root)!r})
ds.get_many(["r"] * 50)
mine = ds._client()
pid = os.fork()
if pid == 0:
    ok = ds._client() is not mine and len(ds.get_many(["r"] * 50)) == 50
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert ds._client() is mine
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_threads_share_a_dataset() -> None:
    many = many_dataset()
    ds = rr.open_dataset(many.dataset.uri)

    def read(_: int) -> bool:
        got = ds.get_many(list(many.rows))
        return all((record.routed_experts == many.rows[record.request_id]).all() for record in got)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(40)))


def test_repr_names_the_place(stored: Stored) -> None:
    assert repr(stored.dataset) == f"RoutingDataset({str(stored.root)!r})"
    assert "run='x'" in repr(rr.open_dataset(stored.root, run="x"))


def test_a_reader_during_deletes_sees_whole_records_and_no_deleted_one(stored: Stored) -> None:
    """One thread puts and deletes by the protocol, tombstone first; another reads."""
    deleted = [0]

    def churn() -> None:
        for number in range(1, 41):
            path = stored.shard(stored.row("r", number), stored.row(f"r:{number}"))
            stored.tombstone("prefix", "r")
            deleted[0] = number
            path.unlink()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(churn)
        while not done.done():
            before = deleted[0]
            (record,) = stored.dataset.get_many(["r"], on_missing="none")
            if record is not None:
                assert record.num_tokens > before
                assert (record.routed_experts.shape, record.missing) == ((4, record.num_tokens, 2), ())
        done.result()


def test_the_format_is_read_once(stored: Stored) -> None:
    ds = rr.open_dataset(stored.root)
    stored.put("r")
    (stored.root / FORMAT_PATH).unlink()
    assert ds.get("r").num_tokens == 5
    assert isinstance(ds.format, DatasetFormat)
