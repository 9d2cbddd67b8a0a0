"""A capture as a whole: a simulated engine into a dataset, blocks that go while rows are copied, and the self-check of integrators
with debug=True.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_capture_manager import BLOCK, SPEC, feed, rows

import rr_dataset as rr
from cli.main import main
from rr_dataset.capture import Finished, RoutingCapture, SlotTable, StepCapturer
from rr_dataset.capture.manager import RECYCLED
from rr_dataset.errors import InvalidInputError, RecordDroppedError
from tests.engines import options
from tests.routing_engine import SPEC as SIM_SPEC
from tests.routing_engine import Engine, check


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "d"


@pytest.fixture
def writer(root: Path) -> Iterator[rr.RoutingWriter]:
    with rr.RoutingWriter(root, options(root.parent), create=SPEC) as writer:
        yield writer


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SlotTable]:
    with SlotTable.create("t", 16, BLOCK, SPEC.num_layers, SPEC.top_k, directory=tmp_path) as table:
        yield table


def test_a_table_of_another_shape_is_refused(writer: rr.RoutingWriter, tmp_path: Path) -> None:
    with (
        SlotTable.create("other", 4, 4, 3, 2, directory=tmp_path) as other,
        pytest.raises(InvalidInputError, match="has rows"),
    ):
        RoutingCapture(writer, other)


def test_finish_takes_what_finished_has() -> None:
    finish, finished = (list(inspect.signature(each).parameters.values()) for each in (RoutingCapture.finish, Finished))
    assert finish[1:-1] == finished
    assert finish[-1].name == "steps_ahead"


@pytest.mark.parametrize("seed", range(3))
def test_a_simulated_engine_into_a_dataset(seed: int, tmp_path: Path) -> None:
    with rr.RoutingWriter(tmp_path / "d", options(tmp_path), create=SIM_SPEC) as writer:
        engine = Engine(seed, writer, overlap=seed % 2 == 0)
        engine.run(150)
        engine.close()
        writer.flush()
        dataset = rr.open_dataset(tmp_path / "d")
        assert set(dataset.ids()) == set(engine.expected) | engine.dropped
        known = {}
        for record in dataset.get_many(engine.expected):
            versions = {p: version for start, stop, version in record.weights for p in range(start, stop)}
            gone = {p for start, stop in record.missing for p in range(start, stop)}
            routing = record.to_numpy("TLK")
            found = {
                p: (tuple(routing[p].ravel().tolist()), versions.get(p, ""))
                for p in range(record.num_tokens)
                if p not in gone
            }
            known[record.request_id] = (found, record.num_tokens, record.status)
        assert check(engine, known) > 50


def self_check(root: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(root), *more])
    return int(ended.value.code or 0)


def test_debug_writes_positions_and_verify_finds_them(
    writer: rr.RoutingWriter, table: SlotTable, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = "p"
    capture = RoutingCapture(writer, table, StepCapturer(table, SPEC, 64, debug=True))
    capture.register(f"{prompt}:0:0:0")
    feed(capture, [2, 7, 1], 0, rows(0, 5))
    feed(capture, [2, 7, 1], 5, rows(1, 4))
    capture.finish(f"{prompt}:0:0:0", [2, 7, 1], 9)
    writer.flush()
    assert rr.verify(root, prompt, positions=True).problems == ()
    assert self_check(root, "--prefix", prompt, "--positions") == 0

    capture.register(f"{prompt}:1:0:0")
    feed(capture, [3, 4], 0, rows(0, 3))
    feed(capture, [3, 4], 4, rows(1, 2))  # an engine whose positions are off by one
    capture.finish(f"{prompt}:1:0:0", [3, 4], 6)
    capture.register(f"{prompt}:2:0:0")
    feed(capture, [5, 6], 1, rows(0, 5))
    capture.finish(f"{prompt}:2:0:0", [6, 5], 6)
    capture.abort(f"{prompt}:3:0:0")
    writer.flush()
    assert rr.verify(root, prompt).sound
    (problem,) = (each for each in rr.verify(root, prompt, positions=True).problems if each.level == "error")
    assert (problem.kind, problem.request_id, problem.count) == ("positions", f"{prompt}:2:0:0", 1)
    assert problem.text == ("token 0, layer 3: [7, 8], a capture with debug=True writes [3, 4]; 3 of 6 tokens differ")
    capfd.readouterr()
    assert self_check(root, "--prefix", prompt, "--positions") == 3
    assert "positions" in capfd.readouterr().out


# --- blocks that are recycled after the capture has looked at them


@pytest.fixture
def capture(writer: rr.RoutingWriter, table: SlotTable) -> RoutingCapture:
    return RoutingCapture(writer, table, StepCapturer(table, SPEC, 64), strict=True)


def recycle_under_the_copy(table: SlotTable, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    fill = table.fill

    def late(*given: Any) -> Any:
        monkeypatch.undo()
        table.recycle(blocks)
        return fill(*given)

    monkeypatch.setattr(table, "fill", late)


def test_some_blocks_that_go_while_rows_are_copied_are_missing(
    capture: RoutingCapture, table: SlotTable, writer: rr.RoutingWriter, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.register("p:0:0:0")
    feed(capture, [2, 3], 0, rows(0, 6))
    recycle_under_the_copy(table, [3], monkeypatch)
    capture.finish("p:0:0:0", [2, 3], 6)
    writer.flush()
    record = rr.open_dataset(root).get("p:0:0:0")
    assert (record.status, record.missing) == ("complete", ((4, 6),))
    assert (record.to_numpy("TLK")[:4] == rows(0, 6)[:4]).all()


@pytest.mark.parametrize("counted", [6, 7])
def test_a_request_whose_blocks_all_go_while_rows_are_copied_is_a_drop_row(
    capture: RoutingCapture,
    table: SlotTable,
    writer: rr.RoutingWriter,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    counted: int,
) -> None:
    capture.register("p:0:0:0")
    feed(capture, [2, 3], 0, rows(0, 6))
    recycle_under_the_copy(table, [2, 3], monkeypatch)
    receipt = capture.finish("p:0:0:0", [2, 3], 6, num_tokens=counted)
    writer.flush()
    (head,) = rr.open_dataset(root).heads(["p:0:0:0"])
    assert (head.status, head.reason) == ("dropped", RECYCLED)
    stats = capture.stats()
    assert (stats.records, stats.dropped, stats.faults) == (0, {RECYCLED: 1}, {})
    assert receipt is not None
    with pytest.raises(RecordDroppedError, match=RECYCLED):
        receipt.wait()


def test_a_first_part_whose_blocks_all_go_while_rows_are_copied_leaves_nothing(
    capture: RoutingCapture, table: SlotTable, writer: rr.RoutingWriter, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.register("p:0:0:0")
    feed(capture, [2], 0, rows(0, 3))
    recycle_under_the_copy(table, [2], monkeypatch)
    assert capture.save("p:0:0:0", [2], 3) is None
    feed(capture, [4], 0, rows(1, 4))  # it is fed again
    capture.finish("p:0:0:0", [4], 4)
    writer.flush()
    record = rr.open_dataset(root).get("p:0:0:0")
    assert (record.status, record.missing, record.num_tokens) == ("complete", (), 4)
    assert (record.to_numpy("TLK") == rows(1, 4)).all()
    assert capture.stats().parts == 0


def test_a_later_part_whose_blocks_all_go_while_rows_are_copied_ends_the_record(
    capture: RoutingCapture, table: SlotTable, writer: rr.RoutingWriter, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture.register("p:0:0:0")
    feed(capture, [2, 3], 0, rows(0, 6))
    capture.save("p:0:0:0", [2, 3], 4)
    recycle_under_the_copy(table, [2, 3], monkeypatch)
    capture.finish("p:0:0:0", [2, 3], 6)
    writer.flush()
    record = rr.open_dataset(root).get("p:0:0:0")
    assert (record.status, record.missing, record.num_tokens) == ("complete", ((4, 6),), 6)
    assert (record.to_numpy("TLK")[:4] == rows(0, 6)[:4]).all()


def test_saves_store_each_row_once_though_the_first_are_missing(
    capture: RoutingCapture, writer: rr.RoutingWriter, root: Path
) -> None:
    given, blocks = rows(0, 12), [2, 3, 4]
    capture.register("p:0:0:0")
    feed(capture, blocks, 2, given[2:4])  # the first two came with a cache that nobody captured
    capture.save("p:0:0:0", blocks, 4)
    for fed in range(5, 12):
        feed(capture, blocks, fed - 1, given[fed - 1 : fed])
        capture.save("p:0:0:0", blocks, fed)
    writer.flush()
    (head,) = rr.open_dataset(root).heads(["p:0:0:0"])
    assert (head.status, head.missing) == ("partial", ((0, 2),))
    assert [(row.token_start, row.token_stop) for row in head.rows] == [(0, 4), *((at, at + 1) for at in range(4, 11))]
    feed(capture, blocks, 0, given[:2])
    feed(capture, blocks, 11, given[11:])
    capture.finish("p:0:0:0", blocks, 12)
    writer.flush()
    record = rr.open_dataset(root).get("p:0:0:0")
    assert (record.status, record.missing) == ("complete", ())
    assert (record.to_numpy("TLK") == given).all()
