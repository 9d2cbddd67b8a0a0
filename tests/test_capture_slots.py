"""The table of routing rows by slot, and its file, rule by rule."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rr_dataset as rr
from rr_dataset.capture import SlotTable, StepCapturer
from rr_dataset.capture.slots import _HEADER, _Shape
from rr_dataset.errors import InvalidInputError, InvalidRoutingError, SpoolUnavailableError
from tests.slot_rows import BLOCK, BLOCKS, rows, slots, write

ROOT = Path(__file__).parents[1]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[SlotTable]:
    with SlotTable.create("t", BLOCKS, BLOCK, 3, 2, directory=tmp_path) as table:
        yield table


# --- the table


def test_rows_come_back_and_the_rest_is_missing(table: SlotTable) -> None:
    given = rows(0, 9)
    write(table, [5, 0, 7], 1, given)
    found = table.gather([5, 0, 7], 0, 12)
    assert found.missing == ((0, 1), (10, 12))
    assert (found.rows[1:10] == given).all()
    assert not found.rows[[0, 10, 11]].any()
    assert found.weights == ()


@given(st.integers(0, 40), st.integers(0, 40), st.lists(st.integers(-1, 7), max_size=8), st.randoms())
def test_any_range_of_any_block_table(start: int, length: int, blocks: list[int], random: Any) -> None:
    """Against a dict of slots."""
    with SlotTable.create(f"any-{os.getpid()}", BLOCKS, BLOCK, 3, 2, prefault=False) as table:
        written = {slot: rows(slot, 1)[0] for slot in range(32) if random.random() < 0.7}
        at = np.array(sorted(written), np.int64)
        table.scatter(at, np.array([written[i] for i in at]).reshape(-1, 3, 2), table.marks(at))
        found = table.gather(blocks, start, start + length)
        assert table.look(blocks, start, start + length).missing == found.missing
        missing = {p for begin, end in found.missing for p in range(begin, end)}
        for position in range(start, start + length):
            block = blocks[position // BLOCK] if position // BLOCK < len(blocks) else -1
            expected = written.get(block * BLOCK + position % BLOCK) if block >= 0 else None
            assert (position in missing) == (expected is None)
            assert (found.rows[position - start] == (0 if expected is None else expected)).all()


def test_a_recycled_block_loses_its_rows_and_those_on_their_way(table: SlotTable) -> None:
    at = slots([2], 0, 4)
    before = table.marks(at)
    assert table.scatter(at, rows(0, 4), before) == 0
    table.recycle([2, 2, 3])  # once or twice, it is another
    assert table.gather([2], 0, 4).missing == ((0, 4),)
    write(table, [2], 0, rows(1, 2))
    assert table.scatter(at, rows(0, 4), before) == 4  # late: the new owner's rows stay
    found = table.gather([2], 0, 4)
    assert found.missing == ((2, 4),)
    assert (found.rows[:2] == rows(1, 2)).all()


def test_a_prefix_hit_finds_the_rows_of_the_first_request(table: SlotTable) -> None:
    first, second = rows(0, 8), rows(1, 3)
    write(table, [1, 2], 0, first)
    table.recycle([5])
    write(table, [1, 5], 4, second)
    found = table.gather([1, 5], 0, 7)
    assert found.missing == ()
    assert (found.rows == np.concatenate([first[:4], second])).all()


def test_generations_wrap_past_the_mark_of_no_row(table: SlotTable) -> None:
    table._generations[:] = np.iinfo(np.uint32).max
    table.recycle([1])
    table.reset()
    assert table._generations.min() == 1
    assert table.gather([0, 1, 2], 0, 12).missing == ((0, 12),)


def test_swapped_out_and_back_row_by_row(table: SlotTable, tmp_path: Path) -> None:
    with SlotTable.create("host", 3, BLOCK, 3, 2, directory=tmp_path) as host:
        table.set_weight_version("w1")
        write(table, [6, 4], 0, rows(0, 6))
        host.recycle([0, 2])
        table.move([6, 4], host, [2, 0])
        assert (host.gather([2, 0], 0, 6).rows == rows(0, 6)).all()
        late = table.marks(slots([6], 0, 4))
        table.recycle([6, 4])
        write(table, [6, 4], 0, rows(1, 8))  # another request has them meanwhile
        table.set_weight_version("w2")
        host.move([2, 0], table, [4, 1])
        found = table.gather([4, 1], 0, 8)
        assert (found.missing, found.weights) == (((6, 8),), ((0, 6, "w1"),))
        assert (found.rows[:6] == rows(0, 6)).all()
        assert (table.gather([6], 0, 4).rows == rows(1, 8)[:4]).all()
        table.scatter(slots([6], 0, 4), rows(3, 4), late)
        table.recycle([4])  # a block that was swapped in is like any other
        assert table.gather([4, 1], 0, 8).missing == ((0, 4), (6, 8))
        with pytest.raises(InvalidInputError, match="2 blocks cannot move to 1"):
            table.move([1, 2], host, [1])
        with (
            SlotTable.create("odd", 3, BLOCK, 3, 1, directory=tmp_path) as odd,
            pytest.raises(InvalidInputError, match="another shape"),
        ):
            table.move([1], odd, [1])


def test_moved_rows_have_no_version_of_another_table(table: SlotTable, tmp_path: Path) -> None:
    with SlotTable.create("host", 3, BLOCK, 3, 2, directory=tmp_path) as host:
        for version in ("w1", "w2"):
            table.set_weight_version(version)
            write(table, [int(version[1])], 0, rows(0, 4))
        host.set_weight_version("w1")
        host.set_weight_version("other")
        table.move([1, 2], host, [1, 2])
        assert host.gather([1, 2], 0, 8).missing == ()
        assert host.gather([1, 2], 0, 8).weights == ((0, 4, "w1"),)


def test_tables_of_another_dtype_take_no_rows(table: SlotTable, tmp_path: Path) -> None:
    with (
        SlotTable.create("wide", 3, BLOCK, 3, 2, "uint16", directory=tmp_path) as wide,
        pytest.raises(InvalidInputError, match="has rows of uint16"),
    ):
        table.move([1], wide, [1])


def test_reset_forgets_everything(table: SlotTable) -> None:
    at = slots([1, 2], 0, 8)
    before = table.marks(at)
    table.scatter(at, rows(0, 8), before)
    table.reset()
    assert table.scatter(at, rows(0, 8), before) == 8
    assert table.gather([1, 2], 0, 8).missing == ((0, 8),)


def test_weight_versions_are_those_of_the_rows(table: SlotTable) -> None:
    for i, version in enumerate(["w1", "w1", "ü" * 63]):
        table.set_weight_version(version)
        write(table, [1, 2], i * 2, rows(i, 2))
    assert table.gather([1, 2], 0, 8).weights == ((0, 4, "w1"), (4, 6, "ü" * 63))
    for i in range(254):
        table.set_weight_version(i)
    assert table.gather([1, 2], 0, 8).weights == ((4, 6, "ü" * 63),)
    table.set_weight_version("last")  # the next one's text goes where theirs is, and another process may look just then
    assert table.gather([1, 2], 0, 8).weights == ()
    for version in ("", "ü" * 64):
        with pytest.raises(InvalidInputError, match="bytes of UTF-8"):
            table.set_weight_version(version)


def test_into_an_array_of_the_caller(table: SlotTable) -> None:
    write(table, [1], 0, rows(0, 4))
    out = np.full((4, 3, 2), 9, np.uint8)
    assert table.gather([1], 0, 4, out=out).rows is out
    assert (out == rows(0, 4)).all()
    for wrong in (out[:3], out.astype(np.int32), np.asfortranarray(out)):
        with pytest.raises(InvalidRoutingError, match="expected uint8 \\(4, 3, 2\\) in C order"):
            table.gather([1], 0, 4, out=wrong)


def test_a_block_that_is_recycled_under_a_gather_is_missing(table: SlotTable, monkeypatch: pytest.MonkeyPatch) -> None:
    write(table, [1, 2], 0, rows(0, 8))
    take = np.take

    def slow(source: Any, *rest: Any, **how: Any) -> Any:
        result = take(source, *rest, **how)
        if source is table._items:
            table.recycle([2])
            write(table, [2], 0, rows(1, 4))
        return result

    monkeypatch.setattr(np, "take", slow)
    found = table.gather([1, 2], 0, 8)
    assert found.missing == ((4, 8),)
    assert (found.rows[:4] == rows(0, 4)).all()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: t.recycle([8]), "blocks 8 to 8: expected 0 to 7"),
        (lambda t: t.recycle([-1, 2]), "blocks -1 to 2"),
        (lambda t: t.marks(np.array([0, 32])), "slots 0 to 32: expected 0 to 31"),
        (lambda t: t.gather([1, 9], 0, 8), "block 9: expected less than 8"),
        (lambda t: t.gather([1], 3, 2), "tokens 3 to 2"),
        (lambda t: t.gather([1], -1, 2), "tokens -1 to 2"),
    ],
)
def test_what_is_outside_is_refused(table: SlotTable, call: Callable[[SlotTable], Any], text: str) -> None:
    with pytest.raises(InvalidRoutingError, match=text):
        call(table)


def test_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    """The file is reserved, and hardly touched."""
    blocks = (1 << 31) // (64 * 48 * 8) + 100
    with SlotTable.create("large", blocks, 64, 48, 8, directory=tmp_path, prefault=False) as table:
        assert table.rows.size > 1 << 31
        given = np.random.default_rng(0).integers(0, 256, (128, 48, 8)).astype(np.uint8)
        chosen = np.array([blocks - 1, 0], np.int32)
        at = (chosen[:, None].astype(np.int64) * 64 + np.arange(64)).ravel()
        capturer = StepCapturer(table, rr.RoutingSpec(range(48), 256, 8), 128)
        for layer in range(48):
            capturer.record(layer, given[:, layer])
        capturer.prepare(at)
        capturer.flush()
        found = table.gather(chosen, 0, 128)
        assert found.missing == ()
        assert (found.rows == given).all()
        assert table.rows.reshape(-1)[-1] == given[63, -1, -1]
        table.recycle(chosen[:1])
        assert table.gather(chosen, 0, 128).missing == ((0, 64),)


# --- its file


CHILD = """
import sys, numpy as np
from rr_dataset.capture import SlotTable
table = SlotTable.attach("shared", directory=sys.argv[1], wait_s=30)
host = SlotTable.attach("shared-host", directory=sys.argv[1], wait_s=30)
at = np.arange(8)
if sys.argv[2] == "worker":
    table.scatter(at, np.arange(8 * 6, dtype=np.uint8).reshape(8, 3, 2), table.marks(at))
else:
    table.move([0, 1], host, [2, 1])
    table.reset()
    host.move([2, 1], table, [5, 6])
table.close()
host.close()
"""


def child(directory: Path, role: str) -> None:
    subprocess.run([sys.executable, "-c", CHILD, str(directory), role], check=True, cwd=Path(__file__).parents[1])


def test_three_processes_share_it(tmp_path: Path) -> None:
    with (
        SlotTable.create("shared", BLOCKS, BLOCK, 3, 2, directory=tmp_path) as table,
        SlotTable.create("shared-host", 4, BLOCK, 3, 2, directory=tmp_path),
    ):
        child(tmp_path, "worker")
        assert table.gather([0, 1], 0, 8).missing == ()
        child(tmp_path, "cache manager")
        assert table.gather([0, 1], 0, 8).missing == ((0, 8),)
        assert (table.gather([5, 6], 0, 8).rows.ravel() == np.arange(48)).all()
        assert table.path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_engine_left_is_in_nobodys_way(tmp_path: Path) -> None:
    code = f"""
import os
from rr_dataset.capture import SlotTable
for name in ("same", "other"):
    SlotTable.create(name, 2, 2, 1, 1, directory={str(tmp_path)!r}).rows[:] = 7
os._exit(9)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
    assert done.returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    with SlotTable.create("same", 4, 2, 1, 1, directory=tmp_path) as table:
        assert [path.name for path in tmp_path.iterdir()] == [table.path.name]
        assert not table.rows.any()


def test_a_live_table_is_not_replaced(table: SlotTable, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is the table of a running process"):
        SlotTable.create("t", BLOCKS, BLOCK, 3, 2, directory=tmp_path)
    with SlotTable.create("u", BLOCKS, BLOCK, 3, 2, directory=tmp_path):
        assert table.path.exists()


def test_a_forked_child_leaves_it(table: SlotTable) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
        process = multiprocessing.get_context("fork").Process(target=table.close)
        process.start()
        process.join()
    assert process.exitcode == 0
    assert table.path.exists()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"name": "../x"}, "name='../x'"),
        ({"name": ""}, "name=''"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"layers": 2.0}, "layers=2.0"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_bad_tables_are_refused(tmp_path: Path, how: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {"name": "x", "num_blocks": 1, "block_size": 1, "layers": 1, "top_k": 1}
    with pytest.raises(InvalidInputError, match=text):
        SlotTable.create(**{**good, **how}, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_room_says_how_much_it_takes(tmp_path: Path) -> None:
    with pytest.raises(SpoolUnavailableError, match="bytes for the routing of"):
        SlotTable.create("huge", 1 << 40, 64, 48, 8, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_table_is_not_attached(tmp_path: Path, table: SlotTable) -> None:
    with pytest.raises(InvalidInputError, match="No such file"):
        SlotTable.attach("none", directory=tmp_path)
    table.path.with_name(table.path.name.replace("-t", "-cut")).write_bytes(table.path.read_bytes()[:5000])
    with pytest.raises(InvalidInputError, match="no table of version 0"):
        SlotTable.attach("cut", directory=tmp_path)


CREATE = """
import os, signal, sys, time
from rr_dataset.capture import SlotTable
table = SlotTable.create("t", 8, 4, 3, 2, directory=sys.argv[1])
child = os.fork() if sys.argv[2:] else None
if not child:
    print(os.getpid(), flush=True)  # by a child, once it runs
time.sleep(60)
"""


def created(directory: Path, *how: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CREATE, str(directory), *how], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_table_stays_that_of_its_name_while_any_of_its_processes_lives(tmp_path: Path) -> None:
    """A worker that made it is killed and starts again under an engine that has attached."""
    worker, _ = created(tmp_path)
    with worker:
        engine = SlotTable.attach("t", directory=tmp_path)
        worker.kill()
    write(engine, [1], 0, rows(0, 4))
    with pytest.raises(InvalidInputError, match="the table of a running process"):
        SlotTable.create("t", 8, BLOCK, 3, 2, directory=tmp_path)
    again = SlotTable.attach("t", directory=tmp_path)
    write(again, [2], 0, rows(1, 4))
    assert (engine.gather([1, 2], 0, 8).rows == np.concatenate([rows(0, 4), rows(1, 4)])).all()
    engine.close()
    assert again.path.exists()
    again.close()
    assert not again.path.exists(), "the last one removes it"


def test_the_forked_child_of_a_killed_engine_does_not_keep_its_table(tmp_path: Path) -> None:
    engine, child = created(tmp_path, "fork")
    try:
        with engine:
            engine.kill()
        SlotTable.create("t", 8, BLOCK, 3, 2, directory=tmp_path).close()
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize(
    "header",
    [
        {"item_bytes": 0}, {"item_bytes": 3}, {"item_bytes": 16}, {"block_size": 0}, {"layers": 0}, {"blocks": 0}, {"top_k": 0},
        {"blocks": 2**63}, {"magic": b"foreign!"}, {"version": 9},
    ],
    ids=str,
)  # fmt: skip
def test_a_foreign_header_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    said = {
        "magic": b"rr-slots", "version": 0, "item_bytes": 1, "blocks": 3, "block_size": 4, "layers": 2, "top_k": 2, **header,
    }  # fmt: skip
    shape = _Shape(said["blocks"], said["block_size"], said["layers"], said["top_k"], said["item_bytes"])
    path = tmp_path / f"rr_slots-{os.getuid()}-t"
    with path.open("wb") as file:
        file.write(_HEADER.pack(*said.values()))
        file.truncate(min(shape.offsets()[-1], 1 << 20))
    with pytest.raises(InvalidInputError, match="is no table of version 0"):
        SlotTable.attach("t", directory=tmp_path)


def test_what_is_no_file_is_no_table(tmp_path: Path) -> None:
    for kind in ("fifo", "folder", "link"):
        path = tmp_path / f"rr_slots-{os.getuid()}-{kind}"
        {"fifo": os.mkfifo, "folder": os.mkdir, "link": lambda at: at.symlink_to("/etc/hostname")}[kind](path)
        with pytest.raises(InvalidInputError, match=str(path)):
            SlotTable.attach(kind, directory=tmp_path)


def test_where_no_table_can_be(tmp_path: Path) -> None:
    for directory, blocks in ((tmp_path / "none", 2), (tmp_path, 10**14)):
        with pytest.raises(SpoolUnavailableError, match="give directory= with more room"):
            SlotTable.create("t", blocks, 10**6, 100, 100, directory=directory)
    for name in (5, None, b"t"):
        with pytest.raises(InvalidInputError, match="name="):
            SlotTable.create(name, 2, BLOCK, 3, 2, directory=tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "blocks", [[7.0, 1.0], ["1"], [[1, 2], [3, 4]], 1, None, [True], [[1], [2, 3]], np.array([1.5])], ids=str
)
def test_blocks_are_one_row_of_whole_numbers(table: SlotTable, blocks: Any) -> None:
    for call in (table.recycle, lambda given: table.gather(given, 0, 4), lambda given: table.move(given, table, [0])):
        with pytest.raises(InvalidRoutingError, match="blocks"):
            call(blocks)


def test_rows_are_as_many_as_their_slots(table: SlotTable) -> None:
    with pytest.raises(InvalidRoutingError, match="1 rows for 2 slots"):
        table.scatter(np.array([0, 1]), rows(0, 1), table.marks(np.array([0, 1])))
