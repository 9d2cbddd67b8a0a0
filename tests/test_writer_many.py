"""Many puts in one call, of which a bad one loses no other, and records that are given up with a reason."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.errors import MAX_REASON_BYTES, NO_REASON
from rr_dataset.feed import MAX_REASONS, OTHER_REASONS
from rr_dataset.writer import RoutingWriter
from tests.engines import BIG, experts, options, stopped
from tests.shared_writer import shared_writer


class Mute:
    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __str__


class NoKeys(dict[str, Any]):
    def keys(self) -> Any:
        raise ZeroDivisionError

    def get(self, *_: Any) -> Any:
        raise ZeroDivisionError


class NoNumbers:
    def numpy(self) -> Any:
        raise ZeroDivisionError


base, writer, dataset, name = shared_writer(block_timeout_s=0.01)


# ---- put_many


def test_all_are_stored_and_receipts_come_in_order(writer: RoutingWriter, dataset: Any, name: str) -> None:
    items: list[Any] = [
        {"request_id": f"{name}:0", "routed_experts": experts(0), "layout": "LTK", "tags": {"t": "x"}},
        (f"{name}:1", experts(1), "LTK"),
        [f"{name}:2", experts(2).transpose(1, 0, 2)],
    ]
    receipts = writer.put_many(items)
    assert writer.flush().records == 3
    assert [receipt.ref.partition(":")[2] for receipt in receipts] == [f"{name}:{i}" for i in range(3)]
    for i, record in enumerate(dataset.get_many([f"{name}:{i}" for i in range(3)])):
        np.testing.assert_array_equal(record.routed_experts, experts(i))
    assert dataset.get(f"{name}:0").tags == {"t": "x"}
    assert writer.put_many([]) == []
    assert len(writer.put_many((f"{name}:{i}", experts(i), "LTK") for i in range(3, 6))) == 3


def test_bad_items_are_named_and_lose_no_other(writer: RoutingWriter, dataset: Any, name: str) -> None:
    wrong = experts(1).copy()
    wrong[0, 0, 0] = 200
    items: list[Any] = [
        (f"{name}:0", experts(0), "LTK"),
        (f"{name}:1", wrong, "LTK"),
        {"request_id": f"{name}:2", "routed_experts": experts(2), "layuot": "LTK"},
        {"request_id": f"{name}:3"},
        f"{name}:4",
        (f"{name}:5",),
        ("chatcmpl-x", experts(5), "LTK"),
        (f"{name}:7", experts(7), "LTK"),
    ]
    with pytest.raises(rr.PutManyError) as caught:
        writer.put_many(items)
    error = caught.value
    assert sorted(error.errors) == [1, 2, 3, 4, 5, 6]
    assert str(error).startswith(f"6 of 8 records were not stored, the others were: item 1 ('{name}:1'): expert id 200")
    assert f"item 2 ('{name}:2'): an item is the names request_id, routed_experts, layuot: expected" in str(error)
    assert "; ..." in str(error)
    assert "an item is a str" in str(error.errors[4])
    assert isinstance(error.errors[1], rr.InvalidRoutingError)
    assert isinstance(error.errors[6], rr.InvalidRequestIdError)
    assert [receipt is not None for receipt in error.receipts] == [True, *[False] * 6, True]
    assert str(pickle.loads(pickle.dumps(rr.PutManyError(str(error), error.errors, [])))) == str(error)
    assert writer.flush().records == 2
    assert sorted(dataset.ids(name)) == [f"{name}:0", f"{name}:7"]


def masked(seed: int) -> Any:
    rows = np.ma.masked_array(experts(seed), mask=np.zeros((4, 20, 2), bool))
    rows[1] = np.ma.masked
    return rows


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("routed_experts", value) for value in (NoNumbers(), masked(1))),
        *(("token_ids", value) for value in ([1, [2], 3], NoNumbers(), np.ma.masked_less(np.arange(20), 3))),
        *(("logprobs", value) for value in ([[1], 2, 3], ["a"] * 20, np.ma.masked_less(np.arange(20.0), 3))),
        *(("weight_version", value) for value in (10**5000, [(0, 1, Mute())], Mute(), np.zeros((2, 3)))),
        *((name, np.zeros(2)) for name in ("status", "part", "layout", "tags", "token_start", "layers", "missing")),
        *((name, (1 / 0 for _ in range(1))) for name in ("missing", "layers", "weight_version")),
        *((name, Mute()) for name in ("status", "layout", "tags", "token_start", "layers", "missing")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_whatever_a_value_raises_is_a_fault_of_its_argument(
    writer: RoutingWriter, dataset: Any, name: str, argument: str, value: Any
) -> None:
    good = {"routed_experts": experts(1), "layout": "LTK"}
    items = [{"request_id": f"{name}:{i}", **good, **({argument: value} if i == 1 else {})} for i in range(3)]
    with pytest.raises(rr.PutManyError, match="1 of 3 records were not stored") as caught:
        writer.put_many(items)
    error = caught.value.errors[1]
    assert isinstance(error, rr.InvalidRoutingError)
    assert argument in str(error) or argument == "layout"
    assert writer.flush().records == 2
    assert sorted(dataset.ids(name)) == [f"{name}:0", f"{name}:2"]


def test_a_masked_array_that_masks_nothing_is_an_array(writer: RoutingWriter, dataset: Any, name: str) -> None:
    writer.put(f"{name}:0", np.ma.masked_array(experts(1)), "LTK")
    writer.flush()
    np.testing.assert_array_equal(dataset.get(f"{name}:0").routed_experts, experts(1))


def test_tensors_that_do_not_hand_over_their_values(writer: RoutingWriter, name: str) -> None:
    torch = pytest.importorskip("torch")
    shape = (20, 4, 2)
    for value in (
        torch.empty(shape, dtype=torch.int64, device="meta"),
        torch.zeros(shape, dtype=torch.int64).to_sparse(),
    ):
        with pytest.raises(rr.InvalidRoutingError, match="routed_experts cannot be read: "):
            writer.put(f"{name}:0", value)


@pytest.mark.parametrize("item", [NoKeys(a=1), {("a",): 1}, [Mute()], [Mute(), Mute()], {"request_id": Mute()}, Mute()])
def test_items_that_cannot_be_read(writer: RoutingWriter, dataset: Any, name: str, item: Any) -> None:
    with pytest.raises(rr.PutManyError, match="1 of 2 records were not stored") as caught:
        writer.put_many([item, (f"{name}:1", experts(1), "LTK")])
    assert isinstance(caught.value.errors[0], rr.InvalidInputError)
    writer.flush()
    assert list(dataset.ids(name)) == [f"{name}:1"]


def test_items_that_end_with_an_error_keep_the_receipts_of_what_came_before(writer: RoutingWriter, name: str) -> None:
    def items() -> Iterator[Any]:
        yield (f"{name}:0", experts(1), "LTK")
        raise KeyError("x")

    with pytest.raises(rr.PutManyError, match="item 1 .*: the items ended with KeyError: 'x'") as caught:
        writer.put_many(items())
    assert isinstance(caught.value.__cause__, KeyError)
    first, second = caught.value.receipts
    assert second is None
    first.wait()
    with pytest.raises(rr.InvalidInputError, match="items is a int"):
        writer.put_many(5)  # type: ignore[arg-type]


def test_a_full_spool_drops_by_item(writer: RoutingWriter, dataset: Any, name: str) -> None:
    with stopped(writer.stats().worker_pid):
        receipts = writer.put_many((f"{name}:{i}", experts(i, BIG), "LTK") for i in range(16))
    dropped = writer.flush().dropped["spool full"]
    assert 0 < dropped < 16
    assert [receipt.durable() for receipt in receipts] == [True] * (16 - dropped) + [False] * dropped
    assert len(list(dataset.ids(name))) == 16


def test_under_raise_the_ones_that_fit_are_stored(base: Path, tmp_path: Path, dataset: Any, name: str) -> None:
    with RoutingWriter(base / "ds", options(tmp_path, on_full="raise")) as other, stopped(other.stats().worker_pid):
        sizes = [BIG] * 16 + [1]
        with pytest.raises(rr.PutManyError, match="no room for record") as caught:
            other.put_many((f"{name}:{i}", experts(i, size), "LTK") for i, size in enumerate(sizes))
        assert {type(error) for error in caught.value.errors.values()} == {rr.SpoolFullError}
        stored = [i for i in range(17) if i not in caught.value.errors]
        assert 16 in stored
    assert sorted(dataset.ids(name)) == sorted(f"{name}:{i}" for i in stored)


# ---- drop


def test_a_dropped_record_says_why_to_everybody(
    writer: RoutingWriter, dataset: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"{name}:1#2"
    receipts = [writer.drop(key, "aborted by the client", num_tokens=20, weight_version=3) for _ in range(2)]
    (logged,) = caplog.records
    assert (logged.name, logged.levelno) == ("rr_dataset", logging.WARNING)
    assert logged.getMessage().startswith(f"record '{key}' was dropped: aborted by the client. ")
    with pytest.raises(rr.RecordDroppedError, match="aborted by the client"):
        receipts[0].wait()
    assert repr(receipts[0]) == f"Receipt({receipts[0].ref!r}, dropped: aborted by the client)"
    assert writer.stats().dropped["aborted by the client"] == 2
    report = writer.flush()
    assert (report.records, report.dropped) == (0, {"aborted by the client": 2})
    assert writer.flush().dropped == {}
    (head,) = dataset.wait_for([key], timeout_s=0)
    assert (head.status, head.reason, head.num_tokens) == ("dropped", "aborted by the client", 20)
    assert receipts[1].ref == f"{head.record_id}:{key}"
    with pytest.raises(rr.RecordDroppedError, match="aborted by the client"):
        dataset.get(key)


def test_a_dropped_part_hides_no_other_and_a_dropped_whole_supersedes(
    writer: RoutingWriter, dataset: Any, name: str
) -> None:
    for kind in ("part", "whole"):
        writer.put(f"{name}{kind}:1", experts(1), "LTK", part=kind == "part")
        writer.drop(f"{name}{kind}:1", "lost", num_tokens=5, token_start=3, part=kind == "part")
    writer.flush()
    np.testing.assert_array_equal(dataset.get(f"{name}part:1").routed_experts[:, :20], experts(1))
    with pytest.raises(rr.RecordDroppedError, match="lost"):
        dataset.get(f"{name}whole:1")


def test_a_put_after_a_drop_is_there(writer: RoutingWriter, dataset: Any, name: str) -> None:
    writer.drop(f"{name}:1", "lost")
    writer.put(f"{name}:1", experts(1), "LTK")
    writer.flush()
    np.testing.assert_array_equal(dataset.get(f"{name}:1").routed_experts, experts(1))


def test_reasons_are_bounded(base: Path, tmp_path: Path, dataset: Any, name: str) -> None:
    with RoutingWriter(base / "ds", options(tmp_path)) as other:
        for i in range(MAX_REASONS + 3):
            other.drop(f"{name}:{i}", f"because of {i}")
        counted = other.flush().dropped
        assert len(counted) == MAX_REASONS + 1
        assert counted[OTHER_REASONS] == 3
        other.drop(f"{name}:999", "ü" * 5000)
    (head,) = dataset.heads([f"{name}:999"])
    assert len(head.reason.encode()) <= 1000
    assert head.reason.endswith("ü...")
    (head,) = dataset.heads([f"{name}:{MAX_REASONS + 2}"])
    assert head.reason == f"because of {MAX_REASONS + 2}", "the row keeps its own"


def test_wrong_drops_are_refused(writer: RoutingWriter, name: str) -> None:
    with pytest.raises(rr.InvalidRequestIdError):
        writer.drop("chatcmpl-x", "lost")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"num_tokens": -1}, "num_tokens=-1"),
        ({"token_start": 1 << 31}, "token_start="),
        ({"weight_version": 10**5000}, "weight_version cannot be read: ValueError"),
        ({"part": np.ones(2)}, "part cannot be read"),
    ]
    for more, match in wrong:
        with pytest.raises(rr.InvalidRoutingError, match=match):
            writer.drop(f"{name}:1", "x", **more)
    assert writer.flush().dropped == {}


@pytest.mark.parametrize(
    ("reason", "stored"),
    [
        ("", NO_REASON),
        (" \n", NO_REASON),
        (None, NO_REASON),
        (7, "7"),
        ("x\ud800y", "x\\ud800y"),
        (AssertionError(), "AssertionError"),
        (KeyError("x"), "KeyError: 'x'"),
        (rr.InvalidRoutingError("no"), "no"),
        (Mute(), "a Mute that has no text"),
        ("\ud800" * 5000, None),
    ],
)
def test_every_reason_leaves_a_row(writer: RoutingWriter, dataset: Any, name: str, reason: Any, stored: Any) -> None:
    writer.drop(f"{name}:1", reason)
    (counted,) = writer.flush().dropped
    (head,) = dataset.heads([f"{name}:1"])
    assert head.status == "dropped"
    assert head.reason == counted
    assert stored is None or head.reason == stored
    assert len(head.reason.encode()) <= MAX_REASON_BYTES


def test_drops_beyond_the_room_for_rows_are_counted_without(base: Path, tmp_path: Path, name: str) -> None:
    with RoutingWriter(base / "ds", options(tmp_path, on_full="raise")) as other:
        with stopped(other.stats().worker_pid):
            receipts = [other.drop(f"{name}:{i}", "x" * 1000) for i in range(2200)]
        without = other.stats().dropped_without_row
        assert 0 < without == sum(not receipt.ref for receipt in receipts)
        assert other.flush().dropped == {"x" * 1000: 2200}
