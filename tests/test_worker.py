"""The worker's parts in this process: what it makes of a slab, which dead spools it takes over and which it leaves."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rr_dataset as rr
from rr_dataset import worker as worker_module
from rr_dataset.clock import HybridClock, wall_ms
from rr_dataset.errors import CorruptSpoolError, StorageError
from rr_dataset.intake import take_in
from rr_dataset.record import STATUSES
from rr_dataset.slab import ASIDE, DROP, PUBLISHED, PUT, SEALED, SLAB_VERSION, TOKENS_FIRST, read_state
from rr_dataset.spool import Spool, spools_of
from rr_dataset.storage import open_storage
from rr_dataset.worker import UNPUBLISHED, Publisher, adopt, slabs_in
from tests.engines import SPEC, experts, stored_rows
from tests.strategies import key_schemes, keys_of, ranges_within, routing, specs, texts, weight_spans_within

SLAB = 1 << 18
WRITER = "0123456789abcdef"


def identity(dataset: Any, writer: str) -> dict[str, Any]:
    return {
        "dataset": dataset.format.uuid,
        "uri": dataset.uri,
        "writer": writer,
        "run_id": "run-1",
        "producer": "rollout",
        "host": "h",
        "pid": 1,
    }


def make_spool(base: Path, dataset: Any, writer: str = WRITER) -> Spool:
    spool = Spool(base, writer, spool_bytes=4 * SLAB, slab_bytes=SLAB, sync=False)
    spool.allocate()
    spool.identify(identity(dataset, writer))
    return spool


def put(spool: Spool, dataset: Any, request_id: str, array: Any, layout: str = "LTK", **more: Any) -> int:
    """What `RoutingWriter.put` does, without a worker; the stamp."""
    arguments = {
        "layers": None,
        "token_ids": None,
        "logprobs": None,
        "token_start": 0,
        "part": False,
        "status": None,
        "missing": (),
        "weight_version": None,
        "tags": None,
    }
    intake = take_in(dataset.format, request_id, array, layout=layout, **{**arguments, **more})
    reservation = spool.reserve(
        PUT,
        TOKENS_FIRST if intake.tokens_first else 0,
        intake.request_id,
        intake.meta,
        tokens=intake.num_tokens,
        payload_bytes=intake.payload_bytes,
    )
    assert reservation is not None
    intake.fill(reservation.payload)
    spool.commit(reservation)
    return reservation.t_submit


def publisher_of(dataset: Any) -> Publisher:
    return Publisher(open_storage(dataset.uri), dataset.format, "none")


def sealed(spool: Spool) -> list[Path]:
    spool.close_active()
    return slabs_in(spool.directory, (SEALED,))


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
        patch.setattr(worker_module, "write_state", killed)
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


# ---- dead spools


def die(spool: Spool) -> Path:
    """What a kill of engine and worker leaves."""
    spool.close(remove=False)
    return spool.directory


def contents(directory: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def test_a_dead_spool_is_published_and_removed(tmp_path: Path, dataset: Any, caplog: pytest.LogCaptureFixture) -> None:
    spool = make_spool(tmp_path, dataset)
    for i in range(3):
        put(spool, dataset, f"a:{i}", experts(i))
        spool.close_active()
    put(spool, dataset, "a:3", experts(3))
    assert spool.reserve(PUT, 0, b"torn:1", b"{}", tokens=1, payload_bytes=8) is not None
    dead = die(spool)
    with caplog.at_level(logging.INFO):
        adopt(publisher_of(dataset), spools_of(tmp_path))
    assert not dead.exists()
    assert stored_rows(tmp_path / "ds") == Counter(f"a:{i}" for i in range(4))
    assert "recovered 1 records of" in caplog.text
    assert "1 torn entries dropped" in caplog.text
    adopt(publisher_of(dataset), spools_of(tmp_path))
    adopt(publisher_of(dataset), tmp_path / "nowhere")


def test_a_living_spool_is_not_touched(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    put(spool, dataset, "a:1", experts(1))
    spool.close_active()
    before = contents(spool.directory)
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert contents(spool.directory) == before
    assert stored_rows(tmp_path / "ds") == {}


def test_a_spool_whose_worker_lives_is_not_dead(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    put(spool, dataset, "a:1", experts(1))
    inherited = os.dup(spool.lock_fd)  # as the worker has it: one open file description
    dead = die(spool)
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert dead.exists()
    os.close(inherited)
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert not dead.exists()


def test_two_adopters_publish_once(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    put(spool, dataset, "a:1", experts(1))
    dead = die(spool)
    with (dead / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        adopt(publisher_of(dataset), spools_of(tmp_path))
        assert stored_rows(tmp_path / "ds") == {}
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}


def test_what_is_set_aside_keeps_its_dead_spool(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    spool._clock = HybridClock(lambda: wall_ms() - 8 * 86400 * 1000)
    put(spool, dataset, "a:1", experts(1))
    dead = die(spool)
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert len(slabs_in(dead, (ASIDE,))) == 1
    before = contents(dead)
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert contents(dead) == before


def of_another_dataset(dead: Path) -> None:
    other = rr.create_dataset(dead.parent.parent / "other", SPEC)
    shutil.rmtree(dead)
    spool = make_spool(dead.parent.parent, other)
    put(spool, other, "a:1", experts(1))
    die(spool)


def of_another_version(dead: Path) -> None:
    path = slabs_in(dead, UNPUBLISHED)[0]
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 8, SLAB_VERSION + 1)
    path.write_bytes(content)


def cut(dead: Path) -> None:
    os.truncate(slabs_in(dead, UNPUBLISHED)[0], 5000)


def foreign_file(dead: Path) -> None:
    (dead / "000000.slab").write_bytes(b"a stranger's notes" * 100)


def directory_in_place_of_a_slab(dead: Path) -> None:
    (dead / "000000.slab").mkdir()


def strange_identity(dead: Path) -> None:
    shutil.rmtree(dead)
    spool = Spool(dead.parent.parent, WRITER, spool_bytes=2 * SLAB, slab_bytes=SLAB, sync=False)
    spool.allocate()
    spool.identify({"by": "a stranger"})
    reservation = spool.reserve(PUT, 0, b"a:1", b"{}", tokens=0, payload_bytes=0)
    assert reservation is not None
    spool.commit(reservation)
    die(spool)


def without_a_lock(dead: Path) -> None:
    (dead / "lock").unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        of_another_dataset,
        of_another_version,
        cut,
        foreign_file,
        directory_in_place_of_a_slab,
        strange_identity,
        without_a_lock,
    ],
)
def test_what_cannot_be_taken_over_is_left_named_and_keeps_nobody_from_the_rest(
    tmp_path: Path, dataset: Any, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    spool = make_spool(tmp_path, dataset)
    put(spool, dataset, "bad:1", experts(1))
    bad = die(spool)
    spoil(bad)
    before = contents(bad)
    good = make_spool(tmp_path, dataset, "f" * 16)
    put(good, dataset, "good:1", experts(1))
    die(good)
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert contents(bad) == before
    assert stored_rows(tmp_path / "ds") == {"good:1": 1}
    assert not good.directory.exists()
    if spoil is not without_a_lock:
        assert f"{bad} is left as it is" in caplog.text


def test_a_folder_that_is_no_writers_is_not_looked_into(tmp_path: Path, dataset: Any) -> None:
    folder = spools_of(tmp_path) / "backup"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "notes").write_text("of somebody")
    before = contents(folder.parent)
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert contents(folder.parent) == before


def test_an_outage_leaves_the_dead_spool_for_later(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    put(spool, dataset, "a:1", experts(1))
    dead = die(spool)
    (tmp_path / "ds/data_id=a").write_text("")
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert dead.exists()
    (tmp_path / "ds/data_id=a").unlink()
    adopt(publisher_of(dataset), spools_of(tmp_path))
    assert not dead.exists()
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}


# ---- the process


def test_a_worker_whose_engine_is_gone_before_it_starts_just_ends() -> None:
    script = (
        "import socket, sys; from rr_dataset.worker import main; "
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET); b.close(); main(a.detach(), 1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
