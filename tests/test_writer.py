"""The writer end to end: puts cross into a dataset and are read back, counted, dropped by the rules and waited for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset import writer as writer_module
from rr_dataset.clock import HybridClock, wall_ms
from rr_dataset.options import MIB
from rr_dataset.spool_place import SHM, choose_base, spools_of
from rr_dataset.writer import Receipt, RoutingWriter
from tests.engines import BIG, SPEC, experts, options, spools, stopped, stored_rows, until
from tests.shared_writer import shared_writer

base, writer, dataset, name = shared_writer(block_timeout_s=0.01)


# ---- round trips


@pytest.mark.parametrize("layout", ["TLK", "LTK"])
@pytest.mark.parametrize("dtype", ["uint8", "int64", ">i4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_put_flush_get(writer: RoutingWriter, dataset: Any, name: str, layout: str, dtype: str, order: str) -> None:
    source = experts(1)
    array = np.array(source if layout == "LTK" else source.transpose(1, 0, 2), dtype, order=order)
    receipt = writer.put(f"{name}:1", array, layout)
    array[:] = 0  # the record was copied
    report = writer.flush()
    assert (report.records, report.bytes, report.dropped) == (1, source.nbytes, {})
    assert receipt.durable()
    record = dataset.get(f"{name}:1")
    np.testing.assert_array_equal(record.routed_experts, source)
    assert record.routed_experts.dtype == SPEC.dtype
    assert f"{record.record_id}:{name}:1" == receipt.ref
    assert (record.status, record.run_id, record.missing) == ("complete", writer.options.run_id, ())


def test_all_that_a_put_says_comes_back(writer: RoutingWriter, dataset: Any, name: str) -> None:
    source = experts(2).astype(np.int32)
    source[:, 3:6] = -1
    tokens, logprobs = np.arange(20), np.linspace(-2, 0, 20)
    logprobs[0] = np.nan
    writer.put(
        f"{name}:1:0:2#3",
        source,
        "LTK",
        token_ids=tokens,
        logprobs=logprobs,
        status="aborted",
        missing=[(3, 6)],
        weight_version=[(0, 12, "v1"), (12, 20, "v2")],
        tags={"reward": "0.5", "ü": "\0"},
    )
    writer.flush()
    record = dataset.get(f"{name}:1:0:2#3")
    expected = source.copy()
    expected[:, 3:6] = 0
    np.testing.assert_array_equal(record.routed_experts, expected)
    np.testing.assert_array_equal(record.token_ids, tokens)
    np.testing.assert_array_equal(record.logprobs, logprobs.astype(np.float32))
    assert (record.status, record.choice, record.components) == ("aborted", 3, (name, "1", "0", "2"))
    assert record.missing == ((3, 6),)
    assert record.weights == ((0, 3, "v1"), (6, 12, "v1"), (12, 20, "v2"))
    assert record.tags == {"reward": "0.5", "ü": "\0"}


def test_parts_along_tokens_and_layers(writer: RoutingWriter, dataset: Any, name: str) -> None:
    source = experts(3, 30)
    key = f"{name}:1"
    writer.put(key, source[:, :10], "LTK", part=True)
    writer.put(key, source[:2, 10:20], "LTK", layers=[3, 4], token_start=10)
    writer.flush()
    assert dataset.get(key).status == "partial"
    writer.put(key, source[2:, 10:20], "LTK", layers=[7, 9], token_start=10)
    writer.put(key, source[:, 15:], "LTK", token_start=15, part=True, status="complete", weight_version=2)
    writer.flush()
    record = dataset.get(key)
    np.testing.assert_array_equal(record.routed_experts, source)
    assert (record.status, record.missing, len(record.rows)) == ("complete", (), 4)
    writer.put(key, source[:, :5], "LTK")
    writer.flush()
    assert dataset.get(key).num_tokens == 5, "a whole put replaces what was before it"


def test_no_tokens_and_a_record_larger_than_a_slab(writer: RoutingWriter, dataset: Any, name: str) -> None:
    large = experts(4, 300_000)
    assert large.nbytes > 2 * MIB
    writer.put(f"{name}:1", experts(0, 0), "LTK")
    writer.put(f"{name}:2", large, "LTK").wait()
    writer.put(f"{name}:3", experts(1), "LTK")
    writer.flush()
    assert dataset.get(f"{name}:1").routed_experts.shape == (4, 0, 2)
    np.testing.assert_array_equal(dataset.get(f"{name}:2").routed_experts, large)
    with pytest.raises(rr.RecordTooLargeError, match="put it in parts"):
        writer.put(f"{name}:4", experts(0, 600_000), "LTK")


def test_more_than_the_pool_holds_goes_through_it(writer: RoutingWriter, dataset: Any, base: Path, name: str) -> None:
    sent = 0
    while sent < 8 * writer.options.spool_bytes:
        receipt = writer.put(f"{name}:{sent}", experts(sent, BIG), "LTK")
        if isinstance(receipt._outcome, str):
            writer.flush()
        else:
            sent += SPEC.bytes_per_token * BIG
    writer.flush()
    for at in range(0, sent, SPEC.bytes_per_token * BIG):
        np.testing.assert_array_equal(dataset.get(f"{name}:{at}").routed_experts, experts(at, BIG))
    slabs = sum(path.stat().st_size for path in Path(writer.stats().spool_dir).glob("*.slab"))
    assert slabs <= writer.options.spool_bytes + 2 * MIB


def test_four_threads_put_and_every_record_is_there_once(
    writer: RoutingWriter, dataset: Any, base: Path, name: str
) -> None:
    before = writer.stats()
    receipts: list[Receipt] = []
    gate = threading.Barrier(4)

    def work(thread: int) -> None:
        gate.wait()
        for i in range(100):
            seed = 100 * thread + i
            receipts.append(writer.put(f"{name}{thread}:{i}", experts(seed, seed % 50), "LTK"))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.flush().records == 400
    assert all(receipt.durable() for receipt in receipts)
    assert len({receipt.ref for receipt in receipts}) == 400
    ids = [f"{name}{thread}:{i}" for thread in range(4) for i in range(100)]
    rows = stored_rows(base / "ds")
    assert {key: rows[key] for key in ids} == dict.fromkeys(ids, 1)
    for seed, record in enumerate(dataset.get_many(ids)):
        np.testing.assert_array_equal(record.routed_experts, experts(seed, seed % 50))
    after = writer.stats()
    assert (after.accepted - before.accepted, after.durable - before.durable) == (400, 400)


# ---- receipts, flush, stats


def test_data_becomes_durable_without_a_flush(writer: RoutingWriter, name: str) -> None:
    receipt = writer.put(f"{name}:1", experts(1), "LTK")
    until(receipt.durable, "an idle worker takes it after idle_seal_s")
    receipt.wait(0)


def test_receipts_wait_and_can_be_awaited(writer: RoutingWriter, name: str) -> None:
    with stopped(writer.stats().worker_pid):
        receipt = writer.put(f"{name}:1", experts(1), "LTK")
        assert not receipt.durable()
        with pytest.raises(rr.FlushTimeoutError, match=r"1 records are not durable after 0.01 s"):
            receipt.wait(0.01)
        with pytest.raises(rr.FlushTimeoutError):
            writer.flush(0.01)
    receipt.wait()
    assert receipt.durable()

    async def put_all() -> list[bool]:
        some = [writer.put(f"{name}:{i}", experts(i), "LTK") for i in range(5)]
        await asyncio.gather(*map(ask, some))
        await some[0]  # once more, when it is long done
        return [each.durable() for each in some]

    async def ask(each: Receipt) -> None:
        await each

    assert asyncio.run(put_all()) == [True] * 5


def test_an_await_that_is_given_up_harms_nobody(writer: RoutingWriter, name: str) -> None:
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(ask()), 0.01)

    async def ask() -> None:
        await receipt

    with stopped(writer.stats().worker_pid):
        receipt = writer.put(f"{name}:1", experts(1), "LTK")
        asyncio.run(give_up())
    receipt.wait()
    assert writer.flush().records == 1


def test_a_flush_reports_what_became_durable_since_the_last(writer: RoutingWriter, name: str) -> None:
    sizes = [i * SPEC.bytes_per_token for i in range(5)]
    for i in range(5):
        writer.put(f"{name}:{i}", experts(i, i), "LTK").wait()
    report = writer.flush()
    assert (report.records, report.bytes, report.dropped) == (5, sum(sizes), {})
    assert (writer.flush().records, writer.flush().bytes) == (0, 0)


def test_who_waited_for_a_record_finds_it_counted(
    writer: RoutingWriter, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, locked = writer._supervisor.on_done, []

    def counted(batches: Any) -> None:
        locked.append(writer._spool.changed._is_owned())  # so nobody who waits can see the batch done before
        count(batches)

    monkeypatch.setattr(writer._supervisor, "on_done", counted)
    writer.put(f"{name}:1", experts(1), "LTK")
    assert writer.flush().records == 1
    assert locked == [True]


def test_stats_tell_what_is_where(writer: RoutingWriter, name: str) -> None:
    before = writer.stats()
    assert (before.spool_used_bytes, before.oldest_age_s) == (0, 0.0)
    with stopped(before.worker_pid):
        writer.put(f"{name}:1", experts(1, 1000), "LTK")
        stats = writer.stats()
        assert (stats.accepted, stats.durable) == (before.accepted + 1, before.durable)
        assert 8000 <= stats.spool_used_bytes <= 8000 + 512
        assert stats.oldest_age_s > 0
    writer.flush()
    stats = writer.stats()
    assert (stats.durable, stats.durable_bytes) == (before.durable + 1, before.durable_bytes + 8000)
    assert stats.spool_bytes == 4 * MIB
    assert 0 < stats.put_p50_s <= stats.put_p99_s
    assert stats.worker_restarts == 0
    assert stats.last_error is None
    assert stats.spool_dir.endswith(writer.writer_id)


def test_a_refused_put_leaves_nothing(writer: RoutingWriter, dataset: Any, base: Path, name: str) -> None:
    before = writer.stats()
    bad = experts(1).astype(np.int32)
    bad[1, 2, 0] = 200
    with pytest.raises(rr.InvalidRoutingError, match="expert id 200 at row 2, layer index 1, slot 0"):
        writer.put(f"{name}:1", bad, "LTK")
    with pytest.raises(rr.InvalidRoutingError, match='layout="LTK"'):
        writer.put(f"{name}:2", experts(1))
    with pytest.raises(rr.InvalidRequestIdError):
        writer.put(f"chatcmpl-{name}-0f0f0f0f-0000-0000-0000-000000000000", experts(1), "LTK")
    assert writer.flush().records == 0
    assert writer.stats().accepted == before.accepted
    assert list(dataset.ids(name)) == []


# ---- opening


def test_create_makes_a_dataset_once(base: Path, tmp_path: Path) -> None:
    root, place = tmp_path / "new" / "ds", tmp_path / "spools"
    place.mkdir()
    with RoutingWriter(str(root), options(place), create=SPEC) as first:
        first.put("a:1", experts(1), "LTK")
        with RoutingWriter(root.as_uri(), options(place), create=SPEC) as second:
            second.put("a:2", experts(2), "LTK")
            assert second.dataset == first.dataset
            assert second.writer_id != first.writer_id
    assert stored_rows(root) == Counter(["a:1", "a:2"])
    other = rr.RoutingSpec((3, 4), num_experts=200, top_k=2)
    with pytest.raises(rr.SpecMismatchError, match="leave create out"):
        RoutingWriter(root, options(place), create=other)
    assert spools(place) == []
    assert stored_rows(root).total() == 2


def test_the_key_scheme_of_an_existing_dataset_is_kept(tmp_path: Path) -> None:
    rr.create_dataset(tmp_path / "ds", SPEC, keys=rr.KeyScheme.by_step())
    (tmp_path / "spools").mkdir()
    with RoutingWriter(tmp_path / "ds", options(tmp_path / "spools"), create=SPEC) as writer:
        writer.put("120:math:17", experts(1), "LTK")
        with pytest.raises(rr.InvalidRequestIdError):
            writer.put("math:17", experts(1), "LTK")
    assert [path.parent.name for path in (tmp_path / "ds").rglob("*.arrow")] == ["step=120"]


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a newer format"])
def test_what_is_no_dataset_fails_at_the_start(tmp_path: Path, there: str) -> None:
    root, place = tmp_path / "ds", tmp_path / "spools"
    place.mkdir()
    if there == "an empty folder":
        root.mkdir()
    if there == "a newer format":
        text = rr.create_dataset(root, SPEC).format.to_json().decode()
        (root / "_rr/format.json").write_text(text.replace('"format_version": 1', '"format_version": 99'))
        assert "99" in (root / "_rr/format.json").read_text()
    error = rr.NewerFormatError if there == "a newer format" else rr.DatasetNotFoundError
    with pytest.raises(error, match=str(root)):
        RoutingWriter(root, options(place))
    assert spools(place) == []
    assert there != "nothing" or not root.exists()


def test_no_place_for_the_spool_fails_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(rr.SpoolUnavailableError, match="give spool_dir="):
        RoutingWriter(tmp_path / "ds", options(tmp_path / "nowhere"), create=SPEC)
    assert list(tmp_path.iterdir()) == []


# ---- closing


def test_a_closed_writer_says_so_and_its_receipts_still_answer(
    base: Path, tmp_path: Path, writer: RoutingWriter
) -> None:
    with RoutingWriter(base / "ds", options(tmp_path)) as other:
        receipt = other.put("closed:1", experts(1), "LTK")
    assert spools(tmp_path) == []
    for use in (lambda: other.put("closed:2", experts(1), "LTK"), other.flush, other.stats):
        with pytest.raises(rr.WriterClosedError, match="the writer is closed"):
            use()
    other.close()
    assert receipt.durable()
    receipt.wait()

    async def ask() -> None:
        await receipt

    asyncio.run(ask())
    assert other not in writer_module._open_writers


def test_closing_leaves_no_descriptor_no_process_and_no_thread(
    base: Path, tmp_path: Path, writer: RoutingWriter
) -> None:
    def open_now() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    before = open_now()
    other = RoutingWriter(base / "ds", options(tmp_path))
    other.put("closed:3", experts(1), "LTK")
    pid = other.stats().worker_pid
    other.close()
    assert open_now() == before
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_an_error_in_the_with_block_still_closes(base: Path, tmp_path: Path, writer: RoutingWriter) -> None:
    def fail() -> None:
        with RoutingWriter(base / "ds", options(tmp_path)) as other:
            other.put("closed:4", experts(1), "LTK")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert stored_rows(base / "ds")["closed:4"] == 1
    assert spools(tmp_path) == []


def test_shared_memory_is_clean_after_close(base: Path, writer: RoutingWriter) -> None:
    place = spools_of(choose_base(None, 4 * MIB))
    with RoutingWriter(base / "ds", options(None)) as other:
        directory = Path(other.stats().spool_dir)
        assert directory == place / other.writer_id
        assert directory.exists()
        other.put("shm:1", experts(1), "LTK")
    assert not directory.exists()
    assert stored_rows(base / "ds")["shm:1"] == 1
    if place.parent == SHM:
        assert not [path for path in SHM.rglob("*") if other.writer_id in str(path)]


def test_a_folder_of_spools_is_as_it_was_after_the_last_close(
    base: Path, tmp_path: Path, writer: RoutingWriter
) -> None:
    with RoutingWriter(base / "ds", options(tmp_path)):
        with RoutingWriter(base / "ds", options(tmp_path)):
            pass
        assert len(spools(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []


def test_records_older_than_tombstones_live_stay_in_the_spool_and_are_reported(tmp_path: Path) -> None:
    place = tmp_path / "spools"
    place.mkdir()
    other = RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    other._spool._clock = HybridClock(lambda: wall_ms() - 8 * 86400 * 1000)
    old = other.put("old:1", experts(1), "LTK")
    with pytest.raises(rr.WriterError, match="older than the dataset's tombstones live and was set aside"):
        old.wait()
    with pytest.raises(rr.WriterError, match="set aside"):
        other.flush()
    assert other.flush().records == 0, "reported once"
    assert not old.durable()
    assert (other.stats().set_aside, other.stats().durable) == (1, 0)
    other._spool._clock = HybridClock()
    other.put("new:1", experts(1), "LTK").wait()
    other.close()
    assert stored_rows(tmp_path / "ds") == {"new:1": 1}
    (kept,) = spools(place)
    assert any(b"old:1" in path.read_bytes() for path in kept.glob("*.slab"))
    with RoutingWriter(tmp_path / "ds", options(place)) as third:
        until(lambda: third.stats().left == (str(kept),), "the next writer names what it leaves")
    assert [report.records for report in rr.recover(place, force=True)] == [1]
    assert stored_rows(tmp_path / "ds") == {"new:1": 1, "old:1": 1}
    assert spools(place) == []


def test_closing_reports_what_was_set_aside(tmp_path: Path) -> None:
    place = tmp_path / "spools"
    place.mkdir()
    other = RoutingWriter(tmp_path / "ds", options(place), create=SPEC)
    other._spool._clock = HybridClock(lambda: wall_ms() - 8 * 86400 * 1000)
    other.put("old:1", experts(1), "LTK")
    with pytest.raises(rr.WriterError, match=rf"set aside; .*`rr-dataset recover --force`.*; it is kept in {place}"):
        other.close()
    assert len(spools(place)) == 1
