"""Records that are filled in the spool itself: what `put` would have stored is there, and whatever goes wrong stores nothing."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.reserved import ReservedRecord
from rr_dataset.writer import RoutingWriter
from tests.engines import BIG, SPEC, experts, fill, options, stopped, stored_rows
from tests.shared_writer import shared_writer

base, writer, dataset, name = shared_writer(block_timeout_s=0.01)


@pytest.fixture
def key(name: str) -> str:
    return f"{name}:1"


def tlk(seed: int, tokens: int = 20) -> Any:
    return experts(seed, tokens).transpose(1, 0, 2)


def fill_in(reserved: ReservedRecord, source: Any, **late: Any) -> None:
    with reserved as record:
        record.experts[:] = source
        for name, value in late.items():
            setattr(record, name, value)


def test_its_arguments_are_those_of_put() -> None:
    put, reserve = (dict(inspect.signature(each).parameters) for each in (RoutingWriter.put, RoutingWriter.reserve))
    for name in ("routed_experts", "layout"):
        del put[name]
    del reserve["num_tokens"]
    assert list(reserve.values()) == list(put.values())


def test_a_record_filled_in_place_is_the_one_that_put_stores(writer: RoutingWriter, dataset: Any, key: str) -> None:
    said = {"token_ids": np.arange(20), "logprobs": np.linspace(-1, 0, 20), "weight_version": 7, "tags": {"a": "b"}}
    source = tlk(1)
    with writer.reserve(key, 20, status="aborted", token_start=5, part=True, **said) as record:  # type: ignore[arg-type]
        assert record.dropped is None
        assert (record.experts.shape, record.experts.dtype) == ((20, 4, 2), SPEC.dtype)
        assert record.experts.flags.writeable
        assert record.experts.flags.c_contiguous
        record.experts[:] = source
    writer.put(f"{key}:7", source, status="aborted", token_start=5, part=True, **said)  # type: ignore[arg-type]
    assert writer.flush().records == 2
    assert record.receipt.durable()
    ours, theirs = dataset.get_many([key, f"{key}:7"])
    np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts)
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
    for name in ("status", "missing", "weights", "tags", "num_tokens", "layers"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert record.receipt.ref == f"{ours.record_id}:{key}"


def test_no_tokens_one_token_and_some_layers(writer: RoutingWriter, dataset: Any, key: str) -> None:
    for tokens in (0, 1):
        with writer.reserve(f"{key}:{tokens}", tokens) as record:
            record.experts[:] = tlk(2, tokens)
    for layers in ([3], [4, 7, 9]):
        with writer.reserve(f"{key}:2", 20, layers=layers, status="complete") as record:
            record.experts[:] = tlk(3)[:, [SPEC.moe_layers.index(layer) for layer in layers]]
    writer.flush()
    for tokens in (0, 1):
        np.testing.assert_array_equal(dataset.get(f"{key}:{tokens}").routed_experts, experts(2, tokens))
    record = dataset.get(f"{key}:2")
    np.testing.assert_array_equal(record.routed_experts, experts(3))
    assert record.status == "complete"


@pytest.mark.parametrize("late", [True, False])
def test_what_is_known_late_is_said_before_the_end(
    writer: RoutingWriter, dataset: Any, base: Path, key: str, late: bool
) -> None:
    source, gaps = tlk(4), [(0, 2), (7, 9)]
    said: dict[str, Any] = {
        "missing": gaps,
        "status": "preempted",
        "weight_version": [(0, 20, "v")],
        "tags": {"t": "x"},
    }
    with writer.reserve(key, 20, token_ids=list(range(20)), **({} if late else said)) as record:
        record.experts[:] = source
        record.experts[0:2] = 255  # no id, and it does not matter: the row is missing
        if late:
            for name, value in said.items():
                setattr(record, name, value)
    writer.flush()
    read = dataset.get(key)
    expected = experts(4)
    for start, stop in gaps:
        expected[:, start:stop] = 0
    np.testing.assert_array_equal(read.routed_experts, expected)
    np.testing.assert_array_equal(read.token_ids, np.arange(20))
    assert (read.status, read.missing, read.tags) == ("preempted", ((0, 2), (7, 9)), {"t": "x"})
    assert read.weights == ((2, 7, "v"), (9, 20, "v"))
    assert stored_rows(base / "ds")[key] == 1


def test_late_news_that_says_nothing_new_costs_no_room(writer: RoutingWriter, key: str) -> None:
    before = writer.stats().spool_used_bytes
    with writer.reserve(key, 20) as record:
        record.experts[:] = tlk(5)
        reserved = writer.stats().spool_used_bytes - before
        record.missing = [(3, 3)]
    assert writer.stats().spool_used_bytes - before == reserved


@pytest.mark.parametrize("row", [0, 19])
def test_a_wrong_id_stores_nothing(writer: RoutingWriter, dataset: Any, key: str, row: int) -> None:
    accepted = writer.stats().accepted
    record = writer.reserve(key, 20, missing=[(5, 9)])
    wrong = tlk(6)
    wrong[row, 2, 1] = 200
    with pytest.raises(rr.InvalidRoutingError, match=rf"expert id 200 at row {row}, layer index 2, slot 1"):
        fill_in(record, wrong)
    with pytest.raises(rr.WriterError, match="no receipt"):
        _ = record.receipt
    writer.put(f"{key}:1", tlk(7))
    assert writer.flush().records == 1
    assert writer.stats().accepted == accepted + 1
    assert list(dataset.ids(key.partition(":")[0])) == [f"{key}:1"]


def test_wrong_late_news_store_nothing(writer: RoutingWriter, dataset: Any, key: str) -> None:
    with pytest.raises(rr.InvalidRoutingError, match="missing has"):
        fill_in(writer.reserve(key, 20), tlk(6), missing=[(5, 21)])
    with pytest.raises(rr.InvalidRoutingError, match="status='finished'"):
        fill_in(writer.reserve(key, 20), tlk(6), status="finished")
    writer.flush()
    assert list(dataset.ids(key.partition(":")[0])) == []


def test_an_exception_inside_stores_nothing_and_the_slab_goes_on(writer: RoutingWriter, dataset: Any, key: str) -> None:
    with suppress(KeyboardInterrupt), writer.reserve(key, 20) as record:
        record.experts[:] = tlk(6)
        raise KeyboardInterrupt
    writer.put(f"{key}:1", tlk(7)).wait()
    assert list(dataset.ids(key.partition(":")[0])) == [f"{key}:1"]


def test_wrong_arguments_are_refused_before_there_is_room(writer: RoutingWriter, key: str) -> None:
    used = writer.stats().spool_used_bytes
    for arguments, match in [
        ({"num_tokens": -1}, "num_tokens=-1: expected a number of tokens"),
        ({"num_tokens": "3"}, "num_tokens='3'"),
        ({"layers": [5]}, "are not MoE layers"),
        ({"missing": 5}, "missing=5"),
        ({"missing": [(0, 30)]}, r"missing has \(0, 30\)"),
        ({"token_ids": np.arange(3)}, r"token_ids has shape \(3,\)"),
        ({"status": "dropped"}, "status='dropped'"),
    ]:
        with pytest.raises(rr.InvalidRoutingError, match=match):
            writer.reserve(key, **{"num_tokens": 20, **arguments})
    with pytest.raises(rr.InvalidRequestIdError):
        writer.reserve("chatcmpl-a", 20)
    assert writer.stats().spool_used_bytes == used


def test_a_reservation_is_entered_once(writer: RoutingWriter, dataset: Any, key: str) -> None:
    record = writer.reserve(key, 20)
    with record:
        record.experts[:] = tlk(6)
        with pytest.raises(rr.WriterError, match="entered before"):
            record.__enter__()
    with pytest.raises(rr.WriterError, match="entered before"), record:
        raise AssertionError("there is no room")
    writer.flush(5)
    np.testing.assert_array_equal(dataset.get(key).routed_experts, experts(6))


def test_what_is_changed_in_place_is_seen_too(writer: RoutingWriter, dataset: Any, key: str) -> None:
    gaps: Any = [[0, 1]]
    with writer.reserve(key, 20, tags={"a": "b"}, missing=gaps) as record:
        record.experts[:] = tlk(6)
        record.tags["a"] = "c"  # type: ignore[index]
        gaps[0][1] = 30
    writer.flush()
    assert (dataset.get(key).tags, dataset.get(key).missing) == ({"a": "c"}, ((0, 1),))


def test_too_large_says_so_when_it_begins(writer: RoutingWriter, key: str) -> None:
    with pytest.raises(rr.RecordTooLargeError, match="put it in parts"), writer.reserve(key, 1_000_000):
        raise AssertionError("there is no room")


@pytest.mark.parametrize("late", [False, True])
def test_a_full_spool_drops_and_the_caller_need_not_branch(
    writer: RoutingWriter, dataset: Any, key: str, late: bool
) -> None:
    with stopped(writer.stats().worker_pid):
        room = len(fill(writer, f"{key.partition(':')[0]}fill")) - 1
        record = writer.reserve(key, BIG)
        with record:
            assert record.dropped == "spool full"
            record.experts[:] = tlk(8, BIG)
            if late:
                record.missing = [(0, 1)]
        with pytest.raises(rr.RecordDroppedError, match="spool full"):
            record.receipt.wait()
        with pytest.raises(ZeroDivisionError), writer.reserve(f"{key}:5", BIG):
            raise ZeroDivisionError
    report = writer.flush()
    assert (report.records, report.dropped) == (room, {"spool full": 2})
    with pytest.raises(rr.RecordDroppedError, match="spool full"):
        dataset.get(key)
    assert not list(dataset.ids(f"{key}:5"))


def test_a_record_that_finds_no_room_for_its_late_news_is_dropped(
    writer: RoutingWriter, dataset: Any, key: str
) -> None:
    with stopped(writer.stats().worker_pid):
        with writer.reserve(key, BIG) as record:
            record.experts[:] = tlk(8, BIG)
            fill(writer, f"{key.partition(':')[0]}fill")
            record.missing = [(0, 1)]
        assert record.dropped == "spool full"
    assert writer.flush().dropped == {"spool full": 2}
    with pytest.raises(rr.RecordDroppedError):
        dataset.get(key)


def test_raise_raises_when_it_begins(base: Path, tmp_path: Path) -> None:
    with RoutingWriter(base / "ds", options(tmp_path, on_full="raise")) as other, stopped(other.stats().worker_pid):
        with pytest.raises(rr.SpoolFullError):
            fill(other, "raised")
        with pytest.raises(rr.SpoolFullError, match="no room for record 'raised:99'"), other.reserve("raised:99", BIG):
            raise AssertionError("there is no room")


def test_a_closed_writer_refuses(base: Path, tmp_path: Path) -> None:
    other = RoutingWriter(base / "ds", options(tmp_path))
    record = other.reserve("closed:1", 20)
    other.close()
    with pytest.raises(rr.WriterClosedError):
        other.reserve("closed:1", 20)
    with pytest.raises(rr.WriterClosedError), record:
        raise AssertionError("there is no room")


def test_with_spool_sync_the_checksum_is_of_what_was_filled(base: Path, dataset: Any, tmp_path: Path) -> None:
    with RoutingWriter(base / "ds", options(tmp_path, spool_sync=True)) as other:
        for late in (False, True):
            with other.reserve(f"synced:{int(late)}", 20) as record:
                record.experts[:] = tlk(9)
                record.missing = [(0, 1)] if late else ()
    for late in (False, True):
        np.testing.assert_array_equal(dataset.get(f"synced:{int(late)}").routed_experts[:, 1:], experts(9)[:, 1:])
