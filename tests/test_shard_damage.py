"""Damaged, foreign and contradictory shards: the error names what is wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_memory import SPEC, Memory, fmt, put
from stored import Stored
from strategies import routing

from rr_dataset.errors import CorruptShardError, NewerFormatError
from rr_dataset.shard import TileRead, VectorRead, build, build_shard, read_index, read_tiles


def foreign() -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"x": [1]})
    with pa.ipc.new_file(sink, table.schema, metadata={"rr": "no"}) as writer:
        writer.write(table)
    return sink.getvalue().to_pybytes()


SHARD = bytes(build_shard([put("a:1", 1, 300), put("b:2", 2, 40, has_token_ids=True)], fmt()))
PACKED = bytes(build_shard([put("a:1", 1, 300), put("b:2", 2, 40, has_token_ids=True)], fmt(), compression="zstd"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "end like an Arrow file"),
        (b"ARROW1", "end like an Arrow file"),
        (SHARD[:-1], "end like an Arrow file"),
        (SHARD[: len(SHARD) // 2], "end like an Arrow file"),
        (b"PAR1" + bytes(100) + b"PAR1", "end like an Arrow file"),
        (bytes(100) + b"ARROW1", "footer of 0 bytes"),
        (b"\xff" * 100 + b"ARROW1", "footer of -1 bytes"),
        (SHARD[-200:], "the file has 200"),
        (bytes(200) + struct.pack("<i", 200) + b"ARROW1", "flatbuffer|footer"),
        (foreign(), "not written by rr_dataset"),
    ],
)
def test_what_is_no_shard_is_named(data: bytes, message: str) -> None:
    with pytest.raises(CorruptShardError, match=message):
        read_index(Memory(data))


def read_everything(source: Memory) -> None:
    index = read_index(source)
    for number, row in enumerate(index.rows):
        out = np.empty((len(row.layers), row.num_tokens, index.spec.top_k), index.spec.dtype)
        vectors = []
        if row.has_token_ids:
            ids = np.empty(row.num_tokens, np.int32)
            vectors = [VectorRead(number, "token_ids", row.token_start, row.token_stop, ids)]
        read_tiles(source, index, [TileRead(number, row.layers, row.token_start, row.token_stop, out)], vectors)


@given(
    data=st.sampled_from([SHARD, PACKED]),
    near_end=st.booleans(),
    place=st.floats(0, 1, exclude_max=True),
    change=st.sampled_from(["flip", "cut", "zero", "drop"]),
    bit=st.integers(0, 7),
    length=st.integers(1, 64),
)
def test_damage_anywhere_is_corrupt_or_harmless(
    data: bytes, near_end: bool, place: float, change: str, bit: int, length: int
) -> None:
    first = len(data) - 9000 if near_end else 0
    at = first + int(place * (len(data) - first))
    damaged = bytearray(data)
    if change == "flip":
        damaged[at] ^= 1 << bit
    elif change == "cut":
        del damaged[at:]
    elif change == "zero":
        damaged[at : at + length] = bytes(len(damaged[at : at + length]))
    else:
        del damaged[at : at + length]
    try:
        read_everything(Memory(damaged))
    except CorruptShardError:
        return
    assert read_index(Memory(damaged)).rows == read_index(Memory(data)).rows, "no error, so what was written"


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_buffer_of_another_length_is_corrupt(compression: str) -> None:
    data = bytearray(build_shard([put(tokens=300)], fmt(), compression=compression))
    at = int(read_index(Memory(data)).buffers(0)[-1, 0])
    data[at : at + 8] = struct.pack("<q", 7)
    with pytest.raises(CorruptShardError, match="says 7 bytes, its rows need 1800"):
        read_everything(Memory(data))
    data[at : at + 16] = struct.pack("<qq", 1800, 0)
    with pytest.raises(CorruptShardError, match="does not decode"):
        read_everything(Memory(data))


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_frame_that_holds_less_is_corrupt(monkeypatch: pytest.MonkeyPatch, compression: str) -> None:
    codec = pa.Codec(compression)

    class Short:
        @staticmethod
        def compress(raw: memoryview) -> bytes:
            short: bytes = codec.compress(raw[:-9], asbytes=True)
            return short

    with monkeypatch.context() as patch:
        patch.setattr(build.pa, "Codec", lambda name: Short)
        same = replace(put(tokens=300), routed_experts=np.zeros((12, 300, 6), np.uint8))
        data = bytes(build_shard([same], fmt(), compression=compression))
    with pytest.raises(CorruptShardError, match="does not decode"):
        read_everything(Memory(data))


def edited(monkeypatch: pytest.MonkeyPatch, edit: Callable[[dict[str, Any]], Any]) -> Memory:
    """A shard of two rows whose index was changed before its checksum was made, as a faulty writer would."""
    encode = build.encode_index

    def encode_edited(*args: Any) -> bytes:
        index = json.loads(encode(*args))
        changed = edit(index)
        return json.dumps(changed if isinstance(changed, list) else index).encode()

    monkeypatch.setattr(build, "encode_index", encode_edited)
    return Memory(build_shard([put("a:1", 1, 300, tags={"a": "b"}), put("b:2", 2, 40)], fmt()))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: [], "no JSON object"),
        (lambda index: index.pop("version"), "version is None"),
        (lambda index: index.update(num_rows=3), "one per row"),
        (lambda index: index.update(num_rows=0), "expected 1 to"),
        (lambda index: index["record_id"].pop(), "record_id is no list"),
        (lambda index: index.update(request_id=["a", 1]), "request_id has"),
        (lambda index: index.update(part=[0, 1]), "part has"),
        (lambda index: index.update(status=["complete", "fine"]), "status has"),
        (lambda index: index.update(t_submit=[1, 1 << 64]), "t_submit has"),
        (lambda index: index.update(num_tokens=[300, -1]), "num_tokens has"),
        (lambda index: index.update(num_tokens=[301, 40]), "bytes where its rows need"),
        (lambda index: index.update(num_tokens=[300.0, 40]), "num_tokens has"),
        (lambda index: index.update(missing=[[], [[3, 1]]]), "missing has"),
        (lambda index: index.update(missing=[[], 5]), "missing has"),
        (lambda index: index.update(weight_spans=[[], [[1, 3]]]), "weight_spans has"),
        (lambda index: index.update(tags=[{}, {"a": 1}]), "tags has"),
        (lambda index: index.update(checksum=["", ""]), "checksum has"),
        (lambda index: index.update(components={}), "components is empty"),
        (lambda index: index["components"].update(data_id=["a"]), "data_id is no list"),
        (lambda index: index.update(inputs=[1]), "inputs has"),
        (lambda index: index.update(compression="gzip"), "compression is"),
        (lambda index: index.update(spec={}), "spec is"),
        (lambda index: index["spec"].update(dtype="float32"), "spec is"),
        (lambda index: index["spec"].update(top_k=7), "bytes where its rows need"),
        (lambda index: index["spec"].update(moe_layers=[3]), "within 3 columns"),
        (lambda index: index.update(present=[0, 1]), "present has"),
        (lambda index: index.update(present_sets=[[2, 99]]), "rising bounds within 14"),
        (lambda index: index.update(present_sets=[[-1, 3]]), "rising bounds"),
        (lambda index: index.update(present_sets=[[2]]), "rising bounds"),
        (lambda index: index.update(present_sets=[[2, 2]]), "rising bounds"),
        (lambda index: index.update(present_sets=[["2", 3]]), "present_sets has"),
        (lambda index: index.update(present_sets=[]), "present_sets has 0"),
        (lambda index: index.update(batches=[]), "its footer 1"),
        (lambda index: index.update(batches=[7]), "batches has"),
        (lambda index: index["batches"][0].update(num_rows=1), "its batches have 1 rows"),
        (lambda index: index["batches"][0]["ranges"].pop(), "ranges is"),
        (lambda index: index["batches"][0]["ranges"].__setitem__(-2, 10**9), "ranges is"),
        (lambda index: index["batches"][0]["ranges"].__setitem__(-2, 10**30), "ranges is"),
        (lambda index: index["batches"][0]["ranges"].__setitem__(-2, 1.5), "ranges is"),
        (lambda index: index["batches"][0]["ranges"].__setitem__(-1, 2140), "a payload buffer ends at byte"),
        (lambda index: index["batches"][0]["ranges"].__setitem__(-1, 5), "layer_014 has 5 bytes"),
    ],
)
def test_an_index_that_contradicts_itself_is_corrupt(
    monkeypatch: pytest.MonkeyPatch, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    with pytest.raises(CorruptShardError, match=message):
        read_index(edited(monkeypatch, edit))


def test_a_later_format_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NewerFormatError, match="format 9"):
        read_index(edited(monkeypatch, lambda index: index.update(version=9)))


def test_a_nested_bomb_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "encode_index", lambda *args: b"[" * 100_000)
    with pytest.raises(CorruptShardError):
        read_index(Memory(build_shard([put()], fmt())))


def test_an_index_may_leave_out_defaults_and_say_them(monkeypatch: pytest.MonkeyPatch) -> None:
    source = edited(monkeypatch, lambda index: index.update(producer=["rollout"] * 2, choice=[None, None]))
    index = read_index(source)
    assert b'"reason"' not in source.data
    assert [(row.producer, row.choice, row.reason, row.missing) for row in index.rows] == [
        ("rollout", None, None, ())
    ] * 2
    assert routing(SPEC, 1, 1).dtype == index.spec.dtype


@pytest.mark.parametrize(("start", "tokens"), [(1 << 31, 0), ((1 << 31) - 3, 4)])
def test_a_row_beyond_the_last_position_is_corrupt(start: int, tokens: int, tmp_path: Path) -> None:
    stored = Stored(tmp_path / "ds")
    shard = stored.shard(stored.row("a:0:0:0", tokens, start=start, part=True))
    with pytest.raises(CorruptShardError, match="token_start"):
        read_index(Memory(shard.read_bytes()))
