"""What a slab becomes in the dataset, and which slabs of a spool are taken."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rr_dataset as rr
from rr_dataset import publisher as publisher_module
from rr_dataset.clock import HybridClock, wall_ms
from rr_dataset.errors import CorruptSpoolError, StorageError
from rr_dataset.publisher import UNPUBLISHED, slabs_in
from rr_dataset.record import STATUSES
from rr_dataset.slab import ASIDE, DROP, PUBLISHED, PUT, SEALED, read_state
from rr_dataset.spool import Spool
from tests.engines import SPEC, experts, stored_rows
from tests.spooled import WRITER, delete, make_spool, publisher_of, put, sealed
from tests.strategies import key_schemes, keys_of, ranges_within, routing, specs, texts, weight_spans_within

# ---- from arrays to a dataset and back


@given(specs(), key_schemes, st.data())
def test_any_record_of_any_spec_and_id_crosses_unchanged(
    tmp_path_factory: pytest.TempPathFactory, spec: rr.RoutingSpec, scheme: rr.KeyScheme, data: st.DataObject
) -> None:
    base = tmp_path_factory.mktemp("cross")
    dataset = rr.create_dataset(base / "ds", spec, keys=scheme)
    spool = make_spool(base, dataset)
    key = data.draw(keys_of(scheme))
    tokens = data.draw(st.sampled_from([0, 1, 2, 7, 40]))
    layout = data.draw(st.sampled_from(["TLK", "LTK"]))
    layers = spec.moe_layers
    if data.draw(st.booleans()):
        layers = tuple(sorted(data.draw(st.sets(st.sampled_from(spec.moe_layers), min_size=1))))
    start = data.draw(st.sampled_from([0, 0, 5]))
    more = {
        "layers": layers,
        "token_start": start,
        "part": start > 0,
        "status": data.draw(st.sampled_from(STATUSES[:-1])),
        "missing": data.draw(ranges_within(start, start + tokens)),
        "weight_version": data.draw(st.just("v1") | weight_spans_within(start, start + tokens)),
        "tags": data.draw(st.dictionaries(texts, texts, max_size=2)),
        "token_ids": data.draw(st.sampled_from([None, np.arange(tokens)])),
        "logprobs": data.draw(st.sampled_from([None, np.linspace(-1, 0, tokens)])),
    }
    source = routing(spec, len(layers), tokens)
    array = source.transpose(1, 0, 2) if layout == "TLK" else source
    order = data.draw(st.sampled_from(["C", "F", "K"]))
    dtype = data.draw(st.sampled_from([spec.dtype, "int64", ">i4"]))
    stamp = put(spool, dataset, key.request_id, np.array(array, dtype, order=order), layout, **more)
    for path in sealed(spool):
        assert publisher_of(dataset).publish(path).records == 1
    spool.collect()
    assert spool.batches() == []
    spool.close(remove=True)

    record = dataset.get(key.request_id, layers=layers)
    positions = slice(start, start + tokens)
    expected = source.copy()
    for first, last in more["missing"]:
        expected[:, first - start : last - start] = 0
    np.testing.assert_array_equal(record.routed_experts[:, positions], expected)
    gaps = [(0, start)] * (start > 0) + list(more["missing"])
    present = np.ones((len(layers), start + tokens), bool)
    for first, last in gaps:
        present[:, first:last] = False
    np.testing.assert_array_equal(record.present(), present)
    (row,) = record.rows
    assert (row.request_id, row.components, row.choice) == (key.request_id, key.components, key.choice)
    assert (row.t_submit, row.record_id) == (stamp, f"{stamp:016x}-{WRITER}")
    assert (row.token_start, row.num_tokens, row.layers, row.status) == (start, tokens, layers, more["status"])
    assert row.part == (start > 0 or layers != spec.moe_layers)
    assert (row.run_id, row.producer, dict(row.tags)) == ("run-1", "rollout", more["tags"])
    version = more["weight_version"]
    assert (row.weight_version, row.weight_spans) == (("v1", ()) if version == "v1" else (None, version))
    for name, dtype_of in (("token_ids", np.int32), ("logprobs", np.float32)):
        value = getattr(record, name)
        if more[name] is None:
            assert value is None
        elif tokens:
            np.testing.assert_array_equal(value[positions], more[name].astype(dtype_of))


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    return rr.create_dataset(tmp_path / "ds", SPEC)


@pytest.fixture
def spool(tmp_path: Path, dataset: Any) -> Iterator[Spool]:
    made = make_spool(tmp_path, dataset)
    yield made
    made.close(remove=True)


def test_a_slab_of_many_partitions_puts_and_drops(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    for i in range(20):
        put(spool, dataset, f"d{i % 4}:{i}", experts(i))
    lost = spool.reserve(PUT, 0, b"lost:1", b'{"status":"complete"}', tokens=1, payload_bytes=8)
    assert lost is not None
    spool.abort(lost)
    (path,) = sealed(spool)
    done = publisher_of(dataset).publish(path)
    assert (done.records, done.torn, done.set_aside) == (20, 1, False)
    assert read_state(path)[1] == PUBLISHED
    assert sorted(path.parent.name for path in (tmp_path / "ds").rglob("*.arrow")) == [
        f"data_id=d{i}" for i in range(4)
    ]
    assert stored_rows(tmp_path / "ds") == {f"d{i % 4}:{i}": 1 for i in range(20)}
    for i in range(20):
        np.testing.assert_array_equal(dataset.get(f"d{i % 4}:{i}").routed_experts, experts(i))


def test_a_drop_becomes_a_row_with_its_reason(dataset: Any, spool: Spool) -> None:
    meta = json.dumps({"status": "dropped", "reason": "spool full", "part": True, "token_ids": True, "layers": [3]})
    reservation = spool.reserve(DROP, 0, b"a:1", meta.encode(), tokens=9, payload_bytes=0)
    assert reservation is not None
    spool.commit(reservation)
    for path in sealed(spool):
        publisher_of(dataset).publish(path)
    (head,) = dataset.heads(["a:1"])
    (row,) = head.rows
    assert (row.status, row.reason, row.num_tokens, row.layers) == ("dropped", "spool full", 9, ())
    with pytest.raises(rr.RecordDroppedError, match="spool full"):
        dataset.get("a:1")


def test_a_slab_that_was_published_but_not_marked_is_published_again_to_the_same_names(
    tmp_path: Path, dataset: Any, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(6):
        put(spool, dataset, f"d{i % 2}:{i}", experts(i))
    (path,) = sealed(spool)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publisher_module, "write_state", killed)
        with pytest.raises(KeyboardInterrupt):
            publisher_of(dataset).publish(path)
    before = sorted((tmp_path / "ds").rglob("*.arrow"))
    assert len(before) == 2
    assert read_state(path)[1] == SEALED
    assert publisher_of(dataset).publish(path).records == 6
    assert sorted((tmp_path / "ds").rglob("*.arrow")) == before
    assert stored_rows(tmp_path / "ds") == {f"d{i % 2}:{i}": 1 for i in range(6)}


def test_a_slab_that_the_storage_refuses_stays_sealed(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    put(spool, dataset, "a:1", experts(1))
    put(spool, dataset, "b:1", experts(2))
    (path,) = sealed(spool)
    (tmp_path / "ds/data_id=b").write_text("")
    with pytest.raises(StorageError, match="data_id=b"):
        publisher_of(dataset).publish(path)
    assert read_state(path)[1] == SEALED
    (tmp_path / "ds/data_id=b").unlink()
    assert publisher_of(dataset).publish(path).records == 2
    assert stored_rows(tmp_path / "ds") == {"a:1": 1, "b:1": 1}


def test_a_slab_older_than_tombstones_live_is_set_aside(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    spool._clock = HybridClock(lambda: wall_ms() - 8 * 86400 * 1000)
    put(spool, dataset, "a:1", experts(1))
    (path,) = sealed(spool)
    assert publisher_of(dataset).publish(path).set_aside
    assert read_state(path)[1] == ASIDE
    assert stored_rows(tmp_path / "ds") == {}


def test_a_slab_of_another_dataset_is_refused(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    put(spool, dataset, "a:1", experts(1))
    (path,) = sealed(spool)
    other = rr.create_dataset(tmp_path / "other", SPEC)
    with pytest.raises(CorruptSpoolError, match=rf"{path} belongs to dataset {dataset.uri}"):
        publisher_of(other).publish(path)
    assert read_state(path)[1] == SEALED
    assert stored_rows(tmp_path / "other") == {}


def test_an_entry_too_short_for_its_record_is_refused(dataset: Any, spool: Spool) -> None:
    reservation = spool.reserve(PUT, 0, b"a:1", b'{"status":"complete"}', tokens=100, payload_bytes=64)
    assert reservation is not None
    spool.commit(reservation)
    (path,) = sealed(spool)
    with pytest.raises(CorruptSpoolError, match="record 'a:1' needs 800 bytes, its entry has 64"):
        publisher_of(dataset).publish(path)


def test_slabs_are_taken_oldest_first_and_by_their_state(dataset: Any, spool: Spool) -> None:
    for i in range(3):
        put(spool, dataset, f"a:{i}", experts(i))
        spool.close_active()
    put(spool, dataset, "a:3", experts(3))
    found = [read_state(path) for path in slabs_in(spool.directory, UNPUBLISHED)]
    assert [seq for seq, _ in found] == [1, 2, 3, 4]
    assert [read_state(path)[0] for path in slabs_in(spool.directory, (SEALED,))] == [1, 2, 3]


def test_slabs_of_deletes_are_taken_first(dataset: Any, spool: Spool) -> None:
    put(spool, dataset, "a:0", experts(0))
    delete(spool, "prefix", "a")
    put(spool, dataset, "a:1", experts(1))
    assert [read_state(path)[0] for path in sealed(spool)] == [2, 1]


# ---- the dataset is not there any more


def gone(root: Path) -> None:
    root.rename(root.with_name("away"))


def bare(root: Path) -> None:
    """As under a mount that has gone."""
    gone(root)
    root.mkdir()


def made_anew(root: Path) -> None:
    gone(root)
    rr.create_dataset(root, SPEC)


def damaged(root: Path) -> None:
    gone(root)
    (root / "_rr").mkdir(parents=True)
    (root / "_rr/format.json").write_text("{")


SAID = {gone: "there is no _rr/format.json", bare: "there is no _rr/format.json", made_anew: "there is dataset ",
        damaged: "cannot be read"}  # fmt: skip


def in_it(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.name != "format.json" and path.name != "_rr"]


@pytest.mark.parametrize("vanish", [gone, bare, made_anew, damaged])
@pytest.mark.parametrize("what", ["put", "delete"])
def test_a_slab_waits_until_its_own_dataset_is_back(
    tmp_path: Path, dataset: Any, spool: Spool, vanish: Any, what: str
) -> None:
    root = tmp_path / "ds"
    if what == "put":
        put(spool, dataset, "a:1", experts(1))
    else:
        delete(spool, "prefix", "a")
    (path,) = sealed(spool)
    vanish(root)
    publisher = publisher_of(dataset)
    for _ in range(2):
        with pytest.raises(StorageError, match=f"Dataset {dataset.format.uuid} is not here any more, .*{SAID[vanish]}"):
            publisher.publish(path)
    assert read_state(path)[1] == SEALED
    assert in_it(root) == []
    if root.exists():
        root.rename(tmp_path / "other")
    (tmp_path / "away").rename(root)
    publisher.publish(path)
    assert read_state(path)[1] == PUBLISHED
    assert (stored_rows(root), len(marks(root))) == (({"a:1": 1}, 0) if what == "put" else ({}, 1))


@pytest.mark.parametrize("vanish", [gone, bare, made_anew])
@pytest.mark.parametrize("after", ["relist_tombstones", "publish_slab", "write_tombstones", "remove_covered"])
def test_a_dataset_that_vanishes_meanwhile_is_seen_before_the_slab_is_marked(
    tmp_path: Path, dataset: Any, spool: Spool, monkeypatch: pytest.MonkeyPatch, vanish: Any, after: str
) -> None:
    root = tmp_path / "ds"
    if after != "relist_tombstones":  # with rows the listing that follows them is enough
        drop = spool.reserve(DROP, 0, b"b:1", b'{"status":"dropped"}', tokens=9, payload_bytes=0)
        assert drop is not None
        spool.commit(drop)
    delete(spool, "prefix", "a")
    (path,) = sealed(spool)
    real = getattr(publisher_module, after)

    def then_vanish(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        vanish(root)
        return result

    publisher = publisher_of(dataset)
    with monkeypatch.context() as patch:
        patch.setattr(publisher_module, after, then_vanish)
        with pytest.raises(StorageError, match="is not here any more|still mounted"):
            publisher.publish(path)
    assert read_state(path)[1] == SEALED
    if root.exists():
        root.rename(tmp_path / "other")
    rr.create_dataset(root, SPEC)  # from a copy without what the first attempt left
    (root / "_rr/format.json").write_bytes((tmp_path / "away/_rr/format.json").read_bytes())
    publisher.publish(path)
    assert (stored_rows(root), len(marks(root))) == ({} if after == "relist_tombstones" else {"b:1": 1}, 1)


# ---- what is no slab


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_does_not_hold_up_the_slabs(dataset: Any, spool: Spool, kind: str) -> None:
    put(spool, dataset, "a:1", experts(1))
    (path,) = sealed(spool)
    odd = spool.directory / "odd.slab"
    {"link": lambda: odd.symlink_to(path), "pipe": lambda: os.mkfifo(odd), "folder": odd.mkdir}[kind]()
    assert slabs_in(spool.directory, (SEALED,)) == [odd, path]
    with pytest.raises(CorruptSpoolError, match="odd.slab: no slab, it is a link, a folder or a pipe"):
        publisher_of(dataset).publish(odd)
    assert read_state(path)[1] == SEALED
    odd.rmdir() if kind == "folder" else odd.unlink()


# ---- deletes


def marks(root: Path) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_text()) for path in sorted((root / "_rr/tombstones").glob("*"))]


def shown(dataset: Any) -> dict[str, int]:
    return {head.request_id: head.rows[-1].t_submit for head in dataset.heads(list(dataset.ids()))}


def test_the_deletes_of_a_slab_are_one_file_with_their_very_stamps(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    stamps = [
        delete(spool, "prefix", "a:1"),
        delete(spool, "all", "", "run-1"),
        delete(spool, "prefix", {"gen_id": "2"}),
    ]
    (path,) = sealed(spool)
    assert publisher_of(dataset).publish(path).records == 0
    assert read_state(path)[1] == PUBLISHED
    (found,) = marks(tmp_path / "ds")
    assert [(mark["kind"], mark["text"], mark["run"], mark["t_del"]) for mark in found] == [
        ("prefix", "a:1", None, stamps[0]), ("all", "", "run-1", stamps[1]), ("prefix", {"gen_id": "2"}, None, stamps[2])
    ]  # fmt: skip
    assert all(stamps[0] >> 16 <= mark["made"] <= wall_ms() for mark in found)


def test_earlier_puts_die_and_later_ones_live_whichever_slab_comes_first(tmp_path: Path) -> None:
    for order in (1, -1):
        base = tmp_path / str(order)
        base.mkdir()
        dataset = rr.create_dataset(base / "ds", SPEC)
        spool = make_spool(base, dataset)
        put(spool, dataset, "a:1", experts(1))
        put(spool, dataset, "b:1", experts(2))
        delete(spool, "prefix", "a")
        alive = {"a:1": put(spool, dataset, "a:1", experts(3)), "a:2": put(spool, dataset, "a:2", experts(4))}
        delete(spool, "prefix", "b:1")
        slabs = sealed(spool)
        assert len(slabs) == 2
        for _ in range(2):  # and once more, as after a kill
            for path in slabs[::order]:
                publisher_of(dataset).publish(path)
        assert shown(dataset) == alive
        assert not (base / "ds/data_id=b").exists()
        np.testing.assert_array_equal(dataset.get("a:1").routed_experts, experts(3))
        spool.close(remove=True)


def test_a_delete_removes_what_others_have_published(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    other = make_spool(tmp_path, dataset, "f" * 16)
    put(other, dataset, "a:1", experts(1))
    put(other, dataset, "b:1", experts(2))
    for path in sealed(other):
        publisher_of(dataset).publish(path)
    other.close(remove=True)
    delete(spool, "prefix", "a")
    for path in sealed(spool):
        publisher_of(dataset).publish(path)
    assert [path.name for path in (tmp_path / "ds").glob("data_id=*")] == ["data_id=b"]


def test_a_storage_that_fails_behind_the_tombstone_gets_no_second_one(
    tmp_path: Path, dataset: Any, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError(5, "Input/output error")

    delete(spool, "prefix", "a")
    (path,) = sealed(spool)
    publisher = publisher_of(dataset)
    with monkeypatch.context() as patch:
        patch.setattr(publisher_module, "remove_covered", fail)
        for _ in range(3):
            with pytest.raises(StorageError):
                publisher.publish(path)
    assert read_state(path)[1] == SEALED
    publisher.publish(path)
    assert read_state(path)[1] == PUBLISHED
    assert len(marks(tmp_path / "ds")) == 1


def test_deletes_of_a_slab_whose_drops_are_too_old_count(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    spool._clock = HybridClock(lambda: wall_ms() - 8 * 86400 * 1000)
    drop = spool.reserve(DROP, 0, b"a:1", b'{"status":"dropped"}', tokens=9, payload_bytes=0)
    assert drop is not None
    spool.commit(drop)
    delete(spool, "prefix", "b")
    (path,) = sealed(spool)
    assert publisher_of(dataset).publish(path).set_aside
    assert len(marks(tmp_path / "ds")) == 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(["a:1:0", "a:1:1", "a:2:0", "b:1:0", "b:2:1"])),
        st.tuples(st.just("prefix"), st.sampled_from(["a", "a:1", "b:1:0", "b"])),
        st.tuples(st.just("clear"), st.just("")),
        st.tuples(st.just("seal"), st.just("")),
    ),
    max_size=12,
)


@given(steps=STEPS, data=st.data(), last=st.booleans())
def test_any_order_of_puts_deletes_slabs_and_replays_ends_as_the_model(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str]], data: st.DataObject, last: bool
) -> None:
    base = tmp_path_factory.mktemp("order")
    dataset = rr.create_dataset(base / "ds", SPEC, keep="last_turn" if last else "all")
    spool = make_spool(base, dataset)
    puts: list[tuple[str, int]] = []
    gone: list[tuple[list[str], int]] = []
    for number, (kind, what) in enumerate(steps):
        if kind == "put" and spool._take(0, control=False) is not None:
            puts.append((what, put(spool, dataset, what, experts(number))))
        elif kind == "prefix" and spool._take(0, control=True) is not None:
            gone.append((what.split(":"), delete(spool, "prefix", what)))
        elif kind == "clear" and spool._take(0, control=True) is not None:
            gone.append(([], delete(spool, "all", "", "run-1")))
        elif kind == "seal":
            spool.close_active()
    slabs = sealed(spool)
    publisher = publisher_of(dataset)
    for path in data.draw(st.permutations([*slabs, *slabs])):
        publisher.publish(path)
    publisher.close()
    alive: dict[str, int] = {}
    for what, stamp in puts:
        parts = what.split(":")

        def dies(prefix: list[str], until: int, parts: list[str] = parts, stamp: int = stamp) -> bool:
            if stamp > until:
                return False
            if last and len(prefix) == 3:  # it names a turn, and covers those up to it
                return prefix[:2] == parts[:2] and int(parts[2]) <= int(prefix[2])
            return parts[: len(prefix)] == prefix

        left_behind = last and any(
            later > stamp and other.split(":")[:2] == parts[:2] and int(other.split(":")[2]) > int(parts[2])
            for other, later in puts
        )
        if not left_behind and not any(dies(*each) for each in gone):
            alive[what] = max(stamp, alive.get(what, 0))
    assert shown(dataset) == alive
    spool.close(remove=True)
