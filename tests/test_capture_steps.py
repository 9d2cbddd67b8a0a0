"""The capturer of a step and the watcher of block tables, rule by rule."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.capture import BlockWatcher, SlotTable, StepCapturer
from rr_dataset.capture.tensors import framework_of, make_buffer
from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from tests.slot_rows import BLOCK, BLOCKS, rows, slots, write

SPEC = rr.RoutingSpec((3, 4, 7), num_experts=200, top_k=2)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SlotTable]:
    with SlotTable.create("t", BLOCKS, BLOCK, 3, 2, directory=tmp_path) as table:
        yield table


@pytest.fixture
def capturer(table: SlotTable) -> StepCapturer:
    return StepCapturer(table, SPEC, 32)


def record(capturer: StepCapturer, given: Any, **how: Any) -> None:
    for i, layer in enumerate(SPEC.moe_layers):
        capturer.record(layer, given[:, i], **how)


# --- a step


@pytest.fixture(params=["numpy", "torch", "paddle"])
def tensor(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Makes a tensor of each framework."""
    if request.param == "numpy":
        return np.asarray
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says when imported
        module = pytest.importorskip(request.param)
    return module.as_tensor if request.param == "torch" else module.to_tensor


@pytest.mark.parametrize("num_experts", [200, 60_000])
def test_steps_of_each_framework(tmp_path: Path, tensor: Callable[[Any], Any], num_experts: int) -> None:
    spec = rr.RoutingSpec((3, 4, 7), num_experts, 2)
    given = np.random.default_rng(0).integers(0, num_experts, (11, 3, 2))
    blocks = [6, 1, 3]
    with SlotTable.create("t", BLOCKS, BLOCK, 3, 2, spec.dtype, directory=tmp_path) as table:
        capturer = StepCapturer(table, spec, 32, like=tensor(given))
        assert framework_of(capturer._buffer.rows) == framework_of(tensor(given))
        address = pointer(capturer)
        for start, stop in ((0, 5), (5, 10), (10, 11)):
            for i, layer in enumerate(spec.moe_layers):
                capturer.record(layer, tensor(np.ascontiguousarray(given[start:stop, i])))
            capturer.prepare(tensor(slots(blocks, start, stop)))
        capturer.flush()
        assert pointer(capturer) == address, "CUDA graphs need one address"
        assert (table.gather(blocks, 0, 11).rows == given).all()


def test_a_buffer_that_is_made_in_the_forward(capturer: StepCapturer, table: SlotTable) -> None:
    """Engines run it in inference mode, and launch steps outside of it."""
    torch = pytest.importorskip("torch")
    for start in (0, 4):
        with torch.inference_mode():
            record(capturer, torch.as_tensor(rows(start, 4)))
        capturer.prepare(slots([1, 2], start, start + 4))
    capturer.flush()
    assert (table.gather([1, 2], 0, 8).rows == np.concatenate([rows(0, 4), rows(4, 4)])).all()


def pointer(capturer: StepCapturer) -> int:
    tensor = capturer._buffer.rows
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def test_a_flush_that_comes_late_twice_or_never(capturer: StepCapturer, table: SlotTable) -> None:
    given = rows(0, 12)
    for start in range(0, 12, 3):
        record(capturer, given[start : start + 3])
        capturer.prepare(slots([4, 2, 7], start, start + 3))
    assert table.gather([4, 2, 7], 0, 12).missing == ((6, 12),)  # two steps are under way at most
    assert capturer.flush(keep=1) == 1
    assert table.gather([4, 2, 7], 0, 12).missing == ((9, 12),)
    assert (capturer.flush(), capturer.flush()) == (1, 0)
    found = table.gather([4, 2, 7], 0, 12)
    assert found.missing == ()
    assert (found.rows == given).all()


def test_the_owner_of_a_row_is_that_of_the_launch(capturer: StepCapturer, table: SlotTable) -> None:
    record(capturer, rows(0, 3))
    capturer.prepare(slots([4], 0, 3))
    table.recycle([4])
    record(capturer, rows(1, 2))
    capturer.prepare(slots([4], 0, 2))
    capturer.flush()
    found = table.gather([4], 0, 3)
    assert found.missing == ((2, 3),)
    assert (found.rows[:2] == rows(1, 2)).all()
    assert (capturer.written, capturer.late) == (2, 3)


def test_slots_on_a_device_have_the_generations_of_the_launch_too(
    capturer: StepCapturer, table: SlotTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device in name only: what it sends arrives at the flush."""
    monkeypatch.setattr("rr_dataset.capture.capturer.on_host", lambda value: False)
    monkeypatch.setattr("rr_dataset.capture.capturer.send", lambda value: lambda: value)
    table.set_weight_version("w1")
    record(capturer, rows(0, 8))
    capturer.prepare(slots([4, 5], 0, 8))
    table.recycle([4])
    table.set_weight_version("w2")
    capturer.flush()
    found = table.gather([4, 5], 0, 8)
    assert (found.missing, found.weights) == (((0, 4),), ((4, 8, "w1"),))


def test_a_rejected_draft_is_overwritten(capturer: StepCapturer, table: SlotTable) -> None:
    given = rows(0, 5)
    record(capturer, given[:4])
    capturer.prepare(slots([1, 2], 0, 4))  # 2 of the prompt, the token sampled, a draft that is rejected
    record(capturer, given[4:])
    capturer.prepare(slots([1, 2], 3, 4))
    capturer.flush()
    assert (table.gather([1, 2], 0, 4).rows == given[[0, 1, 2, 4]]).all()


def test_padded_rows_are_not_captured(capturer: StepCapturer, table: SlotTable) -> None:
    given = rows(0, 6)
    record(capturer, given)
    capturer.prepare(np.array([-1, 5, 6, -1, 9, 0]), num_tokens=5)
    capturer.flush()
    assert table.gather([0, 1, 2], 0, 12).missing == ((0, 5), (7, 9), (10, 12))
    assert (table.rows[[5, 6, 9]] == given[[1, 2, 4]]).all()


def test_dummy_profile_and_pooling_runs_are_not_captured(capturer: StepCapturer, table: SlotTable) -> None:
    record(capturer, rows(1, 32))  # a profile run, no step
    capturer.skip()
    capturer.prepare(np.array([], np.int64))
    record(capturer, rows(0, 2))
    capturer.prepare(slots([1], 0, 2))
    record(capturer, rows(1, 32))  # between two steps
    capturer.skip()
    record(capturer, rows(2, 2))
    capturer.prepare(slots([1], 2, 4))
    capturer.flush()
    assert (table.gather([1], 0, 4).rows == np.concatenate([rows(0, 2), rows(2, 2)])).all()
    assert table.gather([0], 0, 4).missing == ((0, 4),)
    assert capturer.written == 4


def test_a_replayed_graph_records_without_being_seen(capturer: StepCapturer, table: SlotTable) -> None:
    record(capturer, rows(0, 8))  # while the graph is captured
    capturer.skip()
    capturer._buffer.rows[:8] = rows(1, 8)  # what the replay does
    capturer.prepare(slots([1, 2], 0, 8))
    capturer.flush()
    assert (table.gather([1, 2], 0, 8).rows == rows(1, 8)).all()


def test_tensor_parallel_ranks_but_the_first_do_nothing(table: SlotTable) -> None:
    rank_1 = StepCapturer(None, SPEC, 32)
    record(rank_1, rows(0, 4))
    rank_1.prepare(slots([1], 0, 4))
    assert rank_1.flush() == 0
    rank_1.discard()


def test_gathered_ids_of_all_expert_ranks_are_cut(capturer: StepCapturer, table: SlotTable) -> None:
    """TP x EP: 7 tokens over 4 ranks are gathered as 8."""
    given = rows(0, 8)
    record(capturer, given, num_tokens=7)
    capturer.prepare(slots([1, 2], 0, 7))
    record(capturer, rows(1, 40)[:, :, :])  # more than a step may have: what lies beyond is nobody's
    capturer.prepare(slots([3, 4], 0, 7))
    capturer.flush()
    assert (table.gather([1, 2], 0, 7).rows == given[:7]).all()
    assert (table.gather([3, 4], 0, 7).rows == rows(1, 40)[:7]).all()


def test_a_layer_in_several_goes(capturer: StepCapturer, table: SlotTable) -> None:
    given = rows(0, 6)
    record(capturer, given[:4])
    record(capturer, given[4:], start=4)
    capturer.prepare(slots([1, 2], 0, 6))
    capturer.flush()
    assert (table.gather([1, 2], 0, 6).rows == given).all()


def test_goes_that_run_side_by_side_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of two halves of a batch, on two streams."""
    torch = pytest.importorskip("torch")
    buffer = make_buffer(torch.zeros(1), (8, 1, 2), "uint8", 200)
    clamp, used = torch.clamp, []

    def seen(*args: Any, out: Any) -> Any:
        used.append((out.data_ptr(), out.data_ptr() + out.nbytes))
        return clamp(*args, out=out)

    monkeypatch.setattr(torch, "clamp", seen)
    buffer.write(0, 0, torch.ones(4, 2, dtype=torch.int64))
    buffer.write(4, 0, torch.ones(4, 2, dtype=torch.int64))
    (first, last), (begin, _) = used
    assert first < last <= begin


def test_data_parallel_ranks_have_tables_of_their_own(tmp_path: Path) -> None:
    tables = [SlotTable.create(f"engine.dp{rank}", BLOCKS, BLOCK, 3, 2, directory=tmp_path) for rank in range(2)]
    for rank, table in enumerate(tables):
        write(table, [1], 0, rows(rank, 4))
    for rank, table in enumerate(tables):
        assert (table.gather([1], 0, 4).rows == rows(rank, 4)).all()
        table.close()


def test_ids_that_were_not_gathered_do_not_let_old_rows_pass(capturer: StepCapturer, table: SlotTable) -> None:
    """A rank's own 2 tokens of 4: rows 2 and 3 are those of the step before."""
    record(capturer, rows(0, 4))
    capturer.prepare(slots([1], 0, 4))
    record(capturer, rows(1, 2))
    with pytest.raises(InvalidRoutingError, match="a step of 4 tokens, of which 2 were recorded in every layer$"):
        capturer.prepare(slots([1], 0, 4))
    capturer.flush()
    found = table.gather([1], 0, 4)
    assert found.missing == ((2, 4),)
    assert (found.rows[:2] == rows(1, 2)).all()


def test_a_layer_that_was_not_recorded_does_not_let_old_rows_pass(capturer: StepCapturer, table: SlotTable) -> None:
    record(capturer, rows(0, 4))
    capturer.prepare(slots([1], 0, 4))
    for layer in (3, 4, 61):  # 61 is a draft model's
        capturer.record(layer, rows(1, 4)[:, 0])
    with pytest.raises(
        InvalidRoutingError, match="of which 0 were recorded in every layer; layers 7 had none: check indexed="
    ):
        capturer.prepare(slots([2], 0, 4))
    capturer.flush()
    assert table.gather([1, 2], 0, 8).missing == ((4, 8),)


def test_layers_by_their_number_and_of_a_pipeline_stage(tmp_path: Path) -> None:
    given = rows(0, 4)
    with SlotTable.create("stage", BLOCKS, BLOCK, 2, 2, directory=tmp_path) as table:
        stage = StepCapturer(table, SPEC, 32, layers=(4, 7), indexed="moe")
        for number in range(3):
            stage.record(number, given[:, number])
        stage.prepare(slots([1], 0, 4))
        stage.flush()
        assert (table.gather([1], 0, 4).rows == given[:, 1:]).all()


def test_debug_needs_positions(table: SlotTable) -> None:
    capturer = StepCapturer(table, SPEC, 32, debug=True)
    record(capturer, rows(0, 2))
    with pytest.raises(InvalidInputError, match="needs positions="):
        capturer.prepare(slots([1], 0, 2))
    record(capturer, rows(0, 2))
    capturer.prepare(slots([1], 2, 4), np.array([198, 2]))
    capturer.flush()
    expected = [[[1, 2], [2, 3], [5, 6]], [[5, 6], [6, 7], [9, 10]]]
    assert table.gather([1], 2, 4).rows.tolist() == expected


@pytest.mark.parametrize(
    "how", [{"layers": [5]}, {"indexed": "all"}, {"max_tokens": 0}, {"spec": rr.RoutingSpec(range(3), 60_000, 2)}]
)
def test_bad_capturers_are_refused(table: SlotTable, how: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        StepCapturer(table, **{"spec": SPEC, "max_tokens": 32, **how})


def test_bad_steps_are_refused(capturer: StepCapturer) -> None:
    with pytest.raises(InvalidRoutingError, match=r"layer 3: topk_ids has shape \(4, 3\): expected \(tokens, 2\)"):
        capturer.record(3, np.zeros((4, 3), int))
    with pytest.raises(InvalidRoutingError, match="a list of builtins: expected a tensor"):
        framework_of([1])
    record(capturer, rows(0, 2))
    with pytest.raises(InvalidRoutingError, match="expected whole numbers"):
        capturer.prepare(np.array([0.5, 1]))
    record(capturer, rows(0, 2))
    with pytest.raises(InvalidRoutingError, match="slots 0 to 99"):
        capturer.prepare([0, 99])


# --- the watcher


def test_the_watcher_recycles_what_a_request_feeds_first(table: SlotTable) -> None:
    watcher = BlockWatcher(table, max_requests=3, max_blocks=4)
    write(table, [1, 2], 0, rows(0, 8))  # cached: the prefix of what follows
    write(table, [5, 6], 0, rows(1, 8))  # of somebody gone
    blocks = np.full((3, 4), -1)
    blocks[2, :4] = [1, 5, 6, 2]

    def feed(start: int, stop: int) -> None:
        at = np.arange(start, stop)
        got = watcher.slots(blocks, np.full(len(at), 2), at)
        assert (got == slots([1, 5, 6, 2], start, stop)).all()
        table.scatter(got, rows(2, 16)[start:stop], table.marks(got))

    feed(4, 7)
    feed(7, 8)
    assert (table.gather([1, 5], 0, 8).rows == np.concatenate([rows(0, 8)[:4], rows(2, 16)[4:8]])).all()
    assert table.gather([6], 0, 4).missing == (), "not fed, so not touched"
    feed(8, 10)
    assert table.gather([6], 0, 4).missing == ((2, 4),)
    watcher.forget(2)  # the next request of this row is given the same block
    feed(4, 5)
    assert table.gather([5], 0, 4).missing == ((1, 4),)
    padded = watcher.slots(blocks, np.array([2, 0, 1]), np.array([4, -1, 3]))
    assert padded.tolist() == [20, -1, -1]
    with pytest.raises(InvalidRoutingError, match=r"rows 3 to 3, up to column 1, of a block table of \(3, 4\)"):
        watcher.slots(blocks, np.array([3]), np.array([4]))


# --- rows that are not of this step


@pytest.mark.parametrize("first", [False, True], ids=["seen before", "only a dummy run before"])
@pytest.mark.parametrize("fault", ["nothing", "every record", "suspended"])
def test_a_step_that_recorded_nothing_has_no_rows_of_another(
    capturer: StepCapturer, table: SlotTable, tensor: Callable[[Any], Any], fault: str, first: bool
) -> None:
    record(capturer, tensor(rows(0, 8)))
    capturer.skip() if first else capturer.prepare(slots([1, 2], 0, 8))
    if fault == "every record":
        for layer in SPEC.moe_layers:
            with pytest.raises(InvalidRoutingError, match="topk_ids has shape"):
                capturer.record(layer, tensor(rows(1, 4)[:, 0, :1]))
    elif fault == "suspended":
        capturer.suspended = True
        record(capturer, tensor(rows(1, 4)))
        capturer.suspended = False
    capturer.prepare(slots([3], 0, 4))
    with pytest.raises(InvalidRoutingError, match="4 rows of a step are missing: not every layer wrote them"):
        capturer.flush()
    assert table.gather([3], 0, 4).missing == ((0, 4),)


@pytest.mark.parametrize(
    "refused",
    [[4, 5, 99], np.array([4.0, 5.0]), [4, 5, 1 << 40], ["4", "5"]],
    ids=["out of range", "floats", "far out of range", "texts"],
)
def test_a_refused_step_leaves_no_older_rows(capturer: StepCapturer, table: SlotTable, refused: Any) -> None:
    """A draft was rejected, so these slots are fed again."""
    record(capturer, rows(0, 8))
    capturer.prepare(slots([0, 1], 0, 8))
    record(capturer, rows(1, len(refused)))
    with pytest.raises(InvalidRoutingError):
        capturer.prepare(refused)
    capturer.flush()
    assert table.gather([0, 1], 0, 8).missing == ((4, 6),)


def test_a_refused_step_forgets_only_the_slots_that_count(capturer: StepCapturer, table: SlotTable) -> None:
    """What lies behind `num_tokens` in an engine's buffer is another step's."""
    record(capturer, rows(0, 8))
    capturer.prepare(slots([0, 1], 0, 8))
    record(capturer, rows(1, 2))
    with pytest.raises(InvalidRoutingError):
        capturer.prepare([5, 99, 1, 2], num_tokens=2)
    capturer.flush()
    assert table.gather([0, 1], 0, 8).missing == ((5, 6),)


def test_slots_of_a_device_out_of_range_leave_no_older_rows(
    capturer: StepCapturer, table: SlotTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(capturer, rows(0, 8))
    capturer.prepare(slots([0, 1], 0, 8))
    monkeypatch.setattr("rr_dataset.capture.capturer.on_host", lambda value: False)
    monkeypatch.setattr("rr_dataset.capture.capturer.send", lambda value: lambda: value)
    record(capturer, rows(1, 3))
    capturer.prepare(np.array([4, 99, 5]))
    record(capturer, rows(2, 1))
    capturer.prepare(np.array([8]))
    with pytest.raises(InvalidRoutingError, match="1 slots of a step over 31"):
        capturer.flush()
    assert table.gather([0, 1, 2], 0, 9).missing == ((4, 6),), "the step after it is written"


def test_positions_that_do_not_fit_leave_no_older_rows(table: SlotTable) -> None:
    capturer = StepCapturer(table, SPEC, 32, debug=True)
    record(capturer, rows(0, 4))
    capturer.prepare(slots([0], 0, 4), np.arange(4))
    for positions in (None, np.arange(1)):
        record(capturer, rows(0, 2))
        with pytest.raises(InvalidInputError, match="one for each token"):
            capturer.prepare(slots([0], 2, 4), positions)
        capturer.flush()
        assert table.gather([0], 0, 4).missing == ((2, 4),)


@pytest.mark.parametrize("goes", [((4, 8),), ((0, 3), (4, 8)), ((4, 8), (0, 4)), ((0, 4), (2, 8))], ids=str)
def test_goes_are_of_the_rows_they_name(
    capturer: StepCapturer, table: SlotTable, goes: tuple[tuple[int, int], ...]
) -> None:
    given, there = rows(0, 8), set()
    record(capturer, rows(1, 8))
    capturer.prepare(slots([1, 2], 0, 8))
    for start, stop in goes:
        record(capturer, given[start:stop], start=start)
        there |= set(range(start, stop))
    with contextlib.suppress(InvalidRoutingError):
        capturer.prepare(slots([1, 2], 0, 8))
    with contextlib.suppress(InvalidRoutingError):
        capturer.flush()
    found = table.gather([1, 2], 0, 8)
    known = [p for p in range(8) if not any(a <= p < b for a, b in found.missing)]
    assert set(known) == there
    assert (found.rows[known] == given[known]).all()


def test_a_go_before_the_first_row_is_refused(capturer: StepCapturer) -> None:
    with pytest.raises(InvalidRoutingError, match="start=-1"):
        capturer.record(3, rows(0, 2)[:, 0], start=-1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "complex64", "U3", "O", "datetime64[s]"])
def test_what_is_no_whole_number_is_no_expert(capturer: StepCapturer, dtype: str) -> None:
    with pytest.raises(InvalidRoutingError, match="layer 3: topk_ids has dtype"):
        capturer.record(3, rows(0, 2)[:, 0].astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "bfloat16"])
@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_what_is_no_whole_number_of_a_framework_is_no_expert(
    capturer: StepCapturer, framework: str, dtype: str
) -> None:
    module = pytest.importorskip(framework)
    with pytest.raises(InvalidRoutingError, match=f"layer 3: topk_ids has dtype {framework}.{dtype}"):
        capturer.record(3, module.ones([2, 2], dtype=getattr(module, dtype)))
    with pytest.raises(InvalidRoutingError, match="topk_ids has dtype"):
        capturer.record(3, np.ma.masked_array(rows(0, 2)[:, 0], mask=True))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4"])
@pytest.mark.parametrize("num_experts", [200, 256, 60_000])
def test_ids_of_no_expert_are_missing_and_never_wrap(
    tmp_path: Path, tensor: Callable[[Any], Any], dtype: str, num_experts: int
) -> None:
    """Each of them alone in a row, and beside it a row with the greatest expert's id that fits."""
    spec, kind = rr.RoutingSpec((3, 4, 7), num_experts, 2), np.iinfo(dtype)
    wrong = [-1, num_experts, 255 + 1, 65_536, 65_541, 70_000, 1 << 31, 1 << 32, (1 << 32) + 5, kind.min, kind.max]
    wrong = sorted({one for one in wrong if kind.min <= one <= kind.max and not 0 <= one < num_experts})
    given = np.full((2 * len(wrong) + 1, 3, 2), min(num_experts - 1, kind.max), dtype)
    given[:, :, 0] = 0
    given[1::2, 1, 1] = wrong
    try:
        ids = [tensor(np.ascontiguousarray(given[:, i])) for i in range(3)]
    except (TypeError, ValueError):
        pytest.skip("the framework has no such dtype")
    if "float" in str(ids[0].dtype) or "complex" in str(ids[0].dtype):
        pytest.skip("the framework has no such dtype")
    with SlotTable.create("t", BLOCKS, BLOCK, 3, 2, spec.dtype, directory=tmp_path) as table:
        capturer = StepCapturer(table, spec, 32)
        for layer, each in zip(spec.moe_layers, ids, strict=True):
            capturer.record(layer, each)
        capturer.prepare(np.arange(len(given)))
        with pytest.raises(InvalidRoutingError, match=f"{len(wrong)} rows") if wrong else contextlib.nullcontext():
            capturer.flush()
        found = table.gather(range(BLOCKS), 0, len(given))
        assert found.missing == tuple((i, i + 1) for i in range(1, len(given), 2))
        assert (found.rows[::2] == given[::2]).all()
