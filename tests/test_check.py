"""What is wrong within one shard: bytes that changed, and files whose index and Arrow data do not agree."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from damaged import damage, indexed, kinds, only, payload_byte, rewritten, rows_of, written
from stored import SPEC, Stored

import rr_dataset as rr


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "routing")


# --- damaged bytes


def test_a_changed_payload_byte_names_the_row(stored: Stored) -> None:
    rows = rows_of(stored, "a")
    path = stored.shard(*rows)
    tokens = rows[0].row.num_tokens * SPEC.top_k  # of the first row; the byte is in the second
    damage(path, lambda data: payload_byte(data, tokens + 1))
    problem = only(rr.verify(stored.root))
    assert (problem.kind, problem.path) == ("checksum", str(path.relative_to(stored.root)))
    assert (problem.record_id, problem.request_id) == (rows[1].row.record_id, "a:1:0:0")
    assert problem.text.startswith("row 1: ")


@pytest.mark.parametrize(
    "how",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"\0" * len(data),
        lambda data: b"no Arrow file",
        lambda data: data.replace(b'"num_rows"', b'"num_r0ws"'),
    ],
    ids=["empty", "one byte short", "cut", "zeros", "foreign", "index"],
)
def test_a_file_that_is_no_whole_shard(stored: Stored, how: Callable[[bytes], bytes]) -> None:
    stored.put("a:1:0:0")
    path = stored.shard(stored.row("a:0:0:0"))
    damage(path, how)
    problem = only(rr.verify(stored.root))
    assert (problem.kind, problem.path) == ("shard", str(path.relative_to(stored.root)))


def test_damaged_compressed_bytes(stored: Stored) -> None:
    path = stored.shard(*[stored.row(f"a:{i}:0:0", 500) for i in range(3)], compression="zstd")
    data = path.read_bytes()
    at = data.rindex(struct.pack("<I", 0xFD2FB528))  # the magic of the last zstd frame
    path.write_bytes(data[: at + 40] + bytes(8) + data[at + 48 :])
    report = rr.verify(stored.root)
    assert not report.sound
    assert set(kinds(report)) <= {"arrow", "payload", "checksum", "experts"}


def test_every_damaged_byte_of_a_small_shard_is_found_or_harmless(stored: Stored) -> None:
    """Flip bytes all over a file: wherever a reader's answer changes, verify says so."""
    path = stored.shard(*rows_of(stored, "a"))
    whole = path.read_bytes()
    before = {i: read(stored, i) for i in range(3)}
    silent = 0
    for at in np.random.default_rng(0).integers(8, len(whole), 60).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        if rr.verify(stored.root).sound:
            silent += 1
            assert {i: read(stored, i) for i in range(3)} == before, at
    assert silent < 40  # padding, and texts that nothing reads


def read(stored: Stored, number: int) -> tuple[bytes, bytes, bytes]:
    record = rr.open_dataset(stored.root).get(f"a:{number}:0:0")
    vectors = [b"" if v is None else v.tobytes() for v in (record.token_ids, record.logprobs)]
    return record.routed_experts.tobytes(), *vectors


# --- the index against Arrow: files that whoever wrote them got wrong


def test_the_tool_itself_changes_nothing(stored: Stored) -> None:
    path = stored.shard(*rows_of(stored, "a"))
    indexed(path)
    assert rr.verify(stored.root).problems == ()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("num_tokens", None),
        ("status", "aborted"),
        ("run_id", "other"),
        ("weight_version", "v9"),
        ("tags", {"a": "b"}),
        ("producer", "trainer"),
        ("reason", "why"),
        ("choice", 7),
        ("part", True),
        ("weight_spans", [[0, 1, "v"]]),
    ],
)
def test_a_row_that_index_and_arrow_tell_otherwise(stored: Stored, column: str, value: Any) -> None:
    path = stored.shard(*(stored.row(f"a:{i}:0:0", 4 + i) for i in range(3)))
    if column == "num_tokens":  # another split of the same bytes
        rewritten(path, lambda index: index[column].__setitem__(slice(0, 2), [5, 4]))
    else:
        rewritten(path, lambda index: index.update({column: [None, value, None]}) or fill(index, column, 3))
    indexed(path)
    problems = [problem for problem in rr.verify(stored.root).problems if problem.kind == "arrow"]
    assert len(problems) == 1
    assert problems[0].request_id == ("a:0:0:0" if column == "num_tokens" else "a:1:0:0")


def fill(index: dict[str, Any], column: str, count: int) -> None:
    defaults = {"status": "complete", "run_id": "run-1", "producer": "rollout", "tags": {}, "part": False}
    default = [] if column == "weight_spans" else defaults.get(column)
    index[column] = [default if value is None else value for value in index[column]]
    assert len(index[column]) == count


def test_an_index_that_leads_to_other_bytes(stored: Stored) -> None:
    path = stored.shard(*rows_of(stored, "a"))
    indexed(path)

    def swap(index: dict[str, Any]) -> None:
        flat = index["batches"][0]["ranges"]
        flat[4:6], flat[6:8] = flat[6:8], flat[4:6]  # layers 3 and 4

    rewritten(path, swap)
    report = rr.verify(stored.root)
    assert set(kinds(report)) == {"payload", "checksum"}
    assert report.problems[0].request_id == "a:0:0:0"


def test_overlapping_ranges(stored: Stored) -> None:
    row = stored.row("a:0:0:0", 6)
    assert row.routed_experts is not None
    row.routed_experts[1] = row.routed_experts[0]
    path = stored.shard(row)
    indexed(path)

    def same(index: dict[str, Any]) -> None:
        flat = index["batches"][0]["ranges"]
        flat[6:8] = flat[4:6]

    rewritten(path, same)
    assert only(rr.verify(stored.root)).kind == "tiling"


def test_arrow_columns_of_another_type(stored: Stored) -> None:
    path = stored.shard(stored.row("a:0:0:0"))
    reader = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
    batch = reader.get_batch(0)
    at = batch.schema.get_field_index("run_id")
    batch = batch.set_column(at, "run_id", batch.column("run_id").cast(pa.large_string()))
    index = reader.metadata[b"rr.index"]
    path.write_bytes(written(reader, [batch], index, batch.schema))
    indexed(path)
    problem = only(rr.verify(stored.root))
    assert problem.kind == "arrow"
    assert "run_id" in problem.text


def test_unknown_columns_are_no_problem(stored: Stored) -> None:
    path = stored.shard(*rows_of(stored, "a"))
    reader = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
    batch = reader.get_batch(0).append_column("mood", pa.array(["good", None, "bad"]))
    path.write_bytes(written(reader, [batch], reader.metadata[b"rr.index"], batch.schema))
    indexed(path)
    assert rr.verify(stored.root).problems == ()


def test_a_missing_column(stored: Stored) -> None:
    path = stored.shard(stored.row("a:0:0:0"))
    reader = pa.ipc.open_file(pa.py_buffer(path.read_bytes()))
    names = [name for name in reader.schema.names if name != "tags"]
    batch = reader.get_batch(0).select(names)
    path.write_bytes(written(reader, [batch], reader.metadata[b"rr.index"], batch.schema))
    indexed(path)
    assert "0 columns tags" in only(rr.verify(stored.root)).text
