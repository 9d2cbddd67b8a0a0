"""Requests from register to their record, through a real writer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.capture import Finished, RoutingCapture, SlotTable, StepCapturer
from rr_dataset.errors import InvalidInputError, InvalidRoutingError, RecordDroppedError
from tests.engines import options

SPEC = rr.RoutingSpec((3, 4, 7, 9), num_experts=200, top_k=2)
BLOCK = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("capture") / "d"


@pytest.fixture(scope="module")
def writer(root: Path) -> Iterator[rr.RoutingWriter]:
    """One for all tests: each has a prompt of its own."""
    with rr.RoutingWriter(root, options(root.parent), create=SPEC) as writer:
        yield writer


@pytest.fixture
def own(tmp_path: Path) -> Iterator[rr.RoutingWriter]:
    """For tests that clear or close it."""
    with rr.RoutingWriter(tmp_path / "own", options(tmp_path), create=SPEC) as writer:
        yield writer


_prompts = itertools.count()


@pytest.fixture
def prompt() -> str:
    return f"p{next(_prompts)}"


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SlotTable]:
    with SlotTable.create("t", 16, BLOCK, SPEC.num_layers, SPEC.top_k, directory=tmp_path) as table:
        yield table


@pytest.fixture
def capturer(table: SlotTable) -> StepCapturer:
    return StepCapturer(table, SPEC, 64)


@pytest.fixture
def capture(writer: rr.RoutingWriter, table: SlotTable, capturer: StepCapturer) -> RoutingCapture:
    return RoutingCapture(writer, table, capturer)


def rows(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SPEC.num_experts, (tokens, SPEC.num_layers, SPEC.top_k))


def feed(capture: RoutingCapture, blocks: list[int], start: int, given: np.ndarray) -> None:
    """One step of one request."""
    for i, layer in enumerate(SPEC.moe_layers):
        capture.record(layer, given[:, i])
    positions = np.arange(start, start + len(given))
    capture.step(np.array(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK, positions)


def stored(writer: rr.RoutingWriter, root: Path, request_id: str) -> rr.RoutingRecord:
    writer.flush()
    return rr.open_dataset(root).get(request_id)


def test_a_request_becomes_one_record(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    given, blocks = rows(0, 10), [5, 1, 9]
    capture.set_weight_version(7)
    capture.register(f"{prompt}:0:0:0", tags={"task": "math"})
    capture.register(f"{prompt}:0:0:0")  # FastDeploy says so for each chunk of its prompt
    feed(capture, blocks, 0, given[:6])
    feed(capture, blocks, 6, given[6:9])
    feed(capture, blocks, 9, given[9:])
    receipt = capture.finish(f"{prompt}:0:0:0", blocks, token_ids=list(range(50, 61)), tags={"n": "1"})
    record = stored(writer, root, f"{prompt}:0:0:0")
    assert (record.to_numpy("TLK") == given).all()
    assert record.token_ids is not None
    assert record.token_ids.tolist() == list(range(50, 60))  # the last one was sampled, and never fed
    assert (record.status, record.missing, record.weights) == ("complete", (), ((0, 10, "7"),))
    assert record.tags == {"task": "math", "n": "1"}
    assert receipt is not None
    assert receipt.ref.endswith(f":{prompt}:0:0:0")
    assert capture.stats().rows == 10
    assert capture.stats().records == 1
    assert rr.verify(root, prompt).problems == ()


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("stop", "complete"),
        ("content_filter", "complete"),
        ("recover_stop", "complete"),
        ("abort", "aborted"),
        ("preempted", "preempted"),
        ({"type": "length"}, "complete"),
    ],
    ids=str,
)
def test_the_status_follows_the_finish_reason(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, reason: str, status: str, prompt: str
) -> None:
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2], 0, rows(0, 3))
    capture.finish(f"{prompt}:0:0:0", [2], 3, reason)
    assert stored(writer, root, f"{prompt}:0:0:0").status == status


def test_weights_that_change_while_a_request_runs(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    capture.register(f"{prompt}:0:0:0")
    capture.set_weight_version("w1")
    feed(capture, [2, 3], 0, rows(0, 3))
    capture.suspend()
    feed(capture, [2, 3], 3, rows(1, 1))  # whatever runs while weights are loaded is not captured
    capture.resume("w2")
    feed(capture, [2, 3], 4, rows(2, 3))
    capture.finish(f"{prompt}:0:0:0", [2, 3], 7)
    record = stored(writer, root, f"{prompt}:0:0:0")
    assert record.weights == ((0, 3, "w1"), (4, 7, "w2"))
    assert record.missing == ((3, 4),)


@pytest.mark.parametrize(
    ("fed", "counted", "missing"),
    [
        pytest.param(5, 5, (), id="one token, or EOS at once: the prompt was fed, the answer never was"),
        pytest.param(4, 4, (), id="EOS right after a block was allocated for it"),
        pytest.param(4, 5, ((4, 5),), id="the same, and EOS is counted"),
        pytest.param(1, 1, (), id="a prompt of one token"),
        pytest.param(8, 9, ((8, 9),), id="maximum length: counted, and there is no block for it"),
    ],
)
def test_ends(
    capture: RoutingCapture,
    table: SlotTable,
    writer: rr.RoutingWriter,
    root: Path,
    prompt: str,
    fed: int,
    counted: int,
    missing: tuple[tuple[int, int], ...],
) -> None:
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2, 3], 0, rows(9, 8))
    capture.finish(f"{prompt}:0:0:0", [2, 3], 8)  # whoever had the blocks before
    table.recycle([2, 3])
    capture.register(f"{prompt}:1:0:0")
    given = rows(0, fed)
    for start in range(0, fed, 3):
        feed(capture, [2, 3], start, given[start : start + 3])
    capture.finish(f"{prompt}:1:0:0", [2, 3], fed, "stop", list(range(counted + 1)), counted)
    record = stored(writer, root, f"{prompt}:1:0:0")
    assert (record.num_tokens, record.missing, record.status) == (counted, missing, "complete")
    assert (record.to_numpy("TLK")[:fed] == given).all()
    assert record.token_ids is not None
    assert record.token_ids.tolist() == list(range(counted))


def test_a_prefix_hit_has_the_rows_and_weights_of_the_request_that_filled_it(
    capture: RoutingCapture, table: SlotTable, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    first, second = rows(0, 8), rows(1, 2)
    capture.set_weight_version("w1")
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2, 3], 0, first)
    capture.finish(f"{prompt}:0:0:0", [2, 3], 8)
    capture.set_weight_version("w2")
    capture.register(f"{prompt}:1:0:0")
    table.recycle([5])
    feed(capture, [2, 5], 4, second)
    capture.finish(f"{prompt}:1:0:0", [2, 5], 6)
    record = stored(writer, root, f"{prompt}:1:0:0")
    assert (record.to_numpy("TLK") == np.concatenate([first[:4], second])).all()
    assert (record.missing, record.weights) == ((), ((0, 4, "w1"), (4, 6, "w2")))


def test_what_was_counted_and_not_fed_is_missing_even_where_a_rejected_draft_lies(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    """At the maximum length the last token is counted. A draft was fed in its place and rejected."""
    capture.register(f"{prompt}:0:0:0")
    given = rows(0, 6)
    feed(capture, [2, 3], 0, given)  # 4 of the prompt, one sampled, one draft
    capture.finish(f"{prompt}:0:0:0", [2, 3], num_fed=5, num_tokens=6, finish_reason="length", token_ids=list(range(6)))
    record = stored(writer, root, f"{prompt}:0:0:0")
    assert record.missing == ((5, 6),)
    assert (record.to_numpy("TLK")[:5] == given[:5]).all()


def test_preempted_with_its_rows_the_first_routes_win(
    capture: RoutingCapture, table: SlotTable, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    first, again = rows(0, 6), rows(1, 8)
    capture.set_weight_version("w1")
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2, 3], 0, first)
    capture.preempt(f"{prompt}:0:0:0", [2, 3], 6, list(range(7)))
    assert stored(writer, root, f"{prompt}:0:0:0").status == "partial"
    table.recycle([2, 3])
    capture.set_weight_version("w2")
    feed(capture, [4, 5], 0, again)
    capture.finish(f"{prompt}:0:0:0", [4, 5], token_ids=list(range(9)))
    record = stored(writer, root, f"{prompt}:0:0:0")
    assert (record.to_numpy("TLK") == np.concatenate([first, again[6:]])).all()
    assert (record.status, record.weights) == ("complete", ((0, 6, "w1"), (6, 8, "w2")))
    assert record.tags == {"preemptions": "1"}
    assert record.token_ids is not None
    assert record.token_ids.tolist() == list(range(8))


def test_preempted_without_them_the_last_routes_count(
    capture: RoutingCapture, table: SlotTable, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    again = rows(1, 8)
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2, 3], 0, rows(0, 6))
    capture.preempt(f"{prompt}:0:0:0")
    table.recycle([2, 3])
    feed(capture, [3, 2], 0, again)
    capture.finish(f"{prompt}:0:0:0", [3, 2], 8)
    record = stored(writer, root, f"{prompt}:0:0:0")
    assert (record.to_numpy("TLK") == again).all()
    assert (record.missing, record.tags) == ((), {"preemptions": "1"})


def test_ended_before_it_was_fed_as_far_again(
    capture: RoutingCapture, table: SlotTable, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    first = rows(0, 6)
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2, 3], 0, first)
    capture.preempt(f"{prompt}:0:0:0", [2, 3], 6, list(range(7)))
    table.recycle([2, 3])
    feed(capture, [4], 0, rows(1, 3))
    capture.abort(f"{prompt}:0:0:0", [4], 3, list(range(7)))
    record = stored(writer, root, f"{prompt}:0:0:0")
    assert (record.status, record.missing, record.num_tokens) == ("aborted", (), 6)
    assert (record.to_numpy("TLK") == first).all()


def test_a_reset_also_ends_what_was_stored_in_part(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2, 3], 0, rows(0, 6))
    capture.preempt(f"{prompt}:0:0:0", [2, 3], 6)
    capture.reset()
    writer.flush()
    (head,) = rr.open_dataset(root).heads([f"{prompt}:0:0:0"])
    assert (head.status, head.reason) == ("dropped", "engine reset")


def test_drop_rows_say_why(capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str) -> None:
    for name in range(6):
        capture.register(f"{prompt}:{name}:0:0")
    feed(capture, [2], 0, rows(0, 3))
    capture.abort(f"{prompt}:0:0:0")
    capture.finish(f"{prompt}:1:0:0", [2], 0)
    capture.finish(f"{prompt}:2:0:0", [2], 3, tags={"n": 1})  # type: ignore[dict-item]
    capture.finish(f"{prompt}:3:0:0", [99], 3)
    capture.finish(f"{prompt}:5:0:0", [7], 3)
    capture.reset()
    writer.flush()
    dataset = rr.open_dataset(root)
    reasons = {}
    for head in dataset.heads(f"{prompt}:{name}:0:0" for name in range(6)):
        assert head.status == "dropped"
        reasons[int(head.components[1] or 0)] = head.reason
    assert reasons == {
        0: "aborted",
        1: "nothing was fed",
        2: "fault of the engine's hook: InvalidRoutingError",
        3: "fault of the engine's hook: InvalidRoutingError",
        4: "engine reset",
        5: "no routing was captured",
    }
    assert capture.stats().faults == {"finish": 2}
    with pytest.raises(RecordDroppedError, match="engine reset"):
        dataset.get(f"{prompt}:4:0:0")


def test_ids_of_no_expert_alone_are_a_drop_row(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2], 0, rows(0, 3) * 0 + 200)
    capture.finish(f"{prompt}:0:0:0", [2], 3)
    writer.flush()
    (head,) = rr.open_dataset(root).heads([f"{prompt}:0:0:0"])
    assert (head.status, head.reason) == ("dropped", "no routing was captured")
    assert capture.stats().faults == {"flush": 1}


def test_a_reset_leaves_nothing_to_those_that_follow(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2], 0, rows(0, 3))
    capture.reset()
    capture.register(f"{prompt}:1:0:0")
    feed(capture, [2], 0, rows(1, 1))
    capture.finish(f"{prompt}:1:0:0", [2], 3)
    assert stored(writer, root, f"{prompt}:1:0:0").missing == ((1, 3),)
    assert capture.stats().in_flight == 0


def test_opted_out_ended_twice_and_foreign(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    capture.register(f"{prompt}:0:0:0", capture=False)
    capture.register("chatcmpl-foreign")
    capture.register(f"{prompt}:1:0:0")
    feed(capture, [2], 0, rows(0, 3))
    assert capture.finish(f"{prompt}:0:0:0", [2], 3) is None
    assert capture.finish("chatcmpl-foreign", [2], 3) is None
    assert capture.finish(f"{prompt}:1:0:0", [2], 3) is not None
    assert capture.finish(f"{prompt}:1:0:0", [2], 3) is None
    assert capture.finish(f"{prompt}:2:0:0", [2], 3) is None
    writer.flush()
    assert list(rr.open_dataset(root).ids(prompt)) == [f"{prompt}:1:0:0"]
    stats = capture.stats()
    assert (stats.opted_out, stats.records, dict(stats.faults)) == (2, 1, {"register": 1, "finish": 2})


def test_strict_raises(writer: rr.RoutingWriter, table: SlotTable, capturer: StepCapturer, prompt: str) -> None:
    capture = RoutingCapture(writer, table, capturer, strict=True)
    with pytest.raises(InvalidInputError):
        capture.register("chatcmpl-foreign")
    capture.register(f"{prompt}:0:0:0")
    with pytest.raises(InvalidRoutingError, match="topk_ids has shape"):
        capture.record(3, np.zeros((2, 3), int))
    with pytest.raises(InvalidRoutingError, match="0 were recorded"):
        capture.step(np.arange(3))
    with pytest.raises(InvalidInputError, match="finish_reason='nonsense'"):
        capture.finish(f"{prompt}:0:0:0", [2], 3, "nonsense")
    with pytest.raises(InvalidInputError, match="not in flight"):
        capture.finish(f"{prompt}:0:0:0", [2], 3)


def test_whatever_a_hook_is_given_serving_goes_on(
    own: rr.RoutingWriter, table: SlotTable, capturer: StepCapturer, prompt: str
) -> None:
    capture = RoutingCapture(own, table, capturer)
    junk: Any = object()
    capture.record(3, junk)
    capture.step(junk)
    capture.flush(junk)
    capture.register(f"{prompt}:0:0:0")
    capture.preempt(f"{prompt}:0:0:0", junk, 3)
    capture.finish(f"{prompt}:0:0:0", junk, junk)
    capture.clear(junk)
    capture.set_weight_version("x" * 128)
    assert set(capture.stats().faults) == {"record", "step", "flush", "save", "finish", "clear", "set_weight_version"}
    own.close()
    capture.register(f"{prompt}:1:0:0")
    capture.finish(f"{prompt}:1:0:0", [2], 3)
    capture.clear_run()
    assert capture.stats().faults["drop"] == 1


def test_many_end_at_once(capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str) -> None:
    ends = []
    for i in range(12):
        capture.register(f"{prompt}:{i}:0:0")
        feed(capture, [i], 0, rows(i, 3))
        ends.append(Finished(f"{prompt}:{i}:0:0", [i], 3))
    receipts = capture.finish_many(ends)
    assert None not in receipts
    writer.flush()
    for i, record in enumerate(rr.open_dataset(root).get_many([f"{prompt}:{i}:0:0" for i in range(12)])):
        assert (record.to_numpy("TLK") == rows(i, 3)).all()


def test_clear(own: rr.RoutingWriter, table: SlotTable, capturer: StepCapturer, tmp_path: Path) -> None:
    capture = RoutingCapture(own, table, capturer)
    for name in ("a:0:0:0", "b:0:0:0"):
        capture.register(name)
        feed(capture, [2], 0, rows(0, 3))
        capture.finish(name, [2], 3)
    capture.clear("a")
    own.flush()
    assert list(rr.open_dataset(tmp_path / "own").ids()) == ["b:0:0:0"]
    capture.clear_run()
    own.flush()
    assert list(rr.open_dataset(tmp_path / "own").ids()) == []


def test_ranks_that_write_nothing(table: SlotTable, prompt: str) -> None:
    capture = RoutingCapture(None, table, StepCapturer(None, SPEC, 64))
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2], 0, rows(0, 3))
    assert capture.finish(f"{prompt}:0:0:0", [2], 3) is None
    capture.abort(f"{prompt}:0:0:0")
    capture.reset()
    assert table.gather([2], 0, 3).missing == ((0, 3),)
    assert capture.stats().faults == {}


# --- nothing that an engine says is raised into it, or loses another's record

ODD: tuple[Any, ...] = (["x"], {}, None, "\ud800", "a\0b", 5, np.zeros(2), object())


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_no_hook_raises_whatever_it_is_given(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str, odd: Any
) -> None:
    good = f"{prompt}:0:0:0"
    capture.register(good)
    feed(capture, [2], 0, rows(0, 3))
    for hook in (capture.register, capture.abort, capture.preempt, capture.clear, capture.set_weight_version):
        hook(odd)
    capture.record(odd, odd, odd, odd)
    capture.step(odd, odd, odd)
    capture.flush(odd)
    capture.finish(odd, odd, odd, odd, odd, odd, odd, odd, odd)
    for at, end in enumerate(
        ({"num_fed": odd}, {"blocks": odd}, {"token_ids": odd}, {"tags": odd}, {"finish_reason": odd})
    ):
        name = f"{prompt}:{at + 1}:0:0"
        capture.register(name, tags=odd)
        capture.save(name, end.get("blocks", ()), end.get("num_fed", 1))
        capture.preempt(name, end.get("blocks", ()), end.get("num_fed", 1), end.get("token_ids"))
        capture.finish_many([Finished(name, **{"blocks": (), "num_fed": 1, **end})])
    capture.finish_many(odd)
    capture.finish_many([odd, Finished(good, [2], 3)])
    assert (stored(writer, root, good).to_numpy("TLK") == rows(0, 3)).all()
    assert capture.stats().in_flight == 0
    assert sum(capture.stats().faults.values()) > 10


def test_one_bad_end_of_a_strict_capture_leaves_the_others_ended(
    writer: rr.RoutingWriter, table: SlotTable, capturer: StepCapturer, root: Path, prompt: str
) -> None:
    capture = RoutingCapture(writer, table, capturer, strict=True)
    for name in range(3):
        capture.register(f"{prompt}:{name}:0:0")
    feed(capture, [2], 0, rows(0, 3))
    with pytest.raises(InvalidRoutingError, match="-1 tokens fed"):
        capture.finish_many([Finished(f"{prompt}:{name}:0:0", [2], 3 if name != 1 else -1) for name in range(3)])
    assert capture.stats().in_flight == 0
    for name in (0, 2):
        assert stored(writer, root, f"{prompt}:{name}:0:0").missing == ()


def test_any_reason_becomes_a_text(capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str) -> None:
    for at, reason in enumerate(("", None, 7, "x\ud800", "y" * 5000)):
        capture.register(f"{prompt}:{at}:0:0")
        capture.abort(f"{prompt}:{at}:0:0", reason=reason)  # type: ignore[arg-type]
    writer.flush()
    heads = rr.open_dataset(root).heads(f"{prompt}:{at}:0:0" for at in range(5))
    assert [(head.reason or "")[:9] for head in heads] == ["aborted", "aborted", "7", "x?", "y" * 9]
    assert sum(capture.stats().dropped.values()) == 5
    for at in range(5, 200):
        capture.register(f"{prompt}:{at}:0:0")
        capture.abort(f"{prompt}:{at}:0:0", reason=f"because of {at}")
    dropped = capture.stats().dropped
    assert (len(dropped), sum(dropped.values())) == (65, 200)


def test_what_lies_beyond_the_blocks_takes_no_memory(
    capture: RoutingCapture, table: SlotTable, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    look = SlotTable.look
    monkeypatch.setattr(SlotTable, "look", lambda *given: looked.append(given[3] - given[2]) or look(*given))
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2], 0, rows(0, 3))
    capture.finish(f"{prompt}:0:0:0", [2], 30_000_000)
    assert looked == [BLOCK]


def test_an_unknown_finish_reason_is_told_and_loses_nothing(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path, prompt: str
) -> None:
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2], 0, rows(0, 3))
    capture.finish(f"{prompt}:0:0:0", [2], 3, "nonsense")
    assert stored(writer, root, f"{prompt}:0:0:0").status == "complete"
    assert capture.stats().faults == {"finish_reason": 1}
