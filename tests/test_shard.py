"""Shards: what pyarrow sees in them is what went in, exact ranges come back, and damage is named."""

from __future__ import annotations

import json
import pickle
import struct
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from strategies import payload, routing, rows, specs

from rr_dataset.errors import CorruptShardError, InvalidInputError, InvalidRoutingError, NewerFormatError
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import DatasetFormat
from rr_dataset.options import COMPRESSIONS
from rr_dataset.record import RoutingSpec, Row, RowData
from rr_dataset.shard import Scratch, TileRead, VectorRead, build, build_shard, copy_tiles, read_index, read_tiles

KEYS = KeyScheme.fastdeploy()
SPEC = RoutingSpec(moe_layers=tuple(range(3, 15)), num_experts=64, top_k=6)
WRITER = "00000000000000ab"


class Memory:
    """A stored object in memory, which counts what is read."""

    def __init__(self, data: bytes | bytearray | memoryview, max_gap_bytes: int = 4096) -> None:
        self.data = bytes(data)
        self.max_gap_bytes = max_gap_bytes
        self.tails = 0
        self.runs: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return len(self.data)

    def tail(self, length: int) -> bytes:
        self.tails += 1
        return self.data[-length:]

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        for offset, buffers in runs:
            at = offset
            for buffer in buffers:
                assert 0 <= at <= at + len(buffer) <= len(self.data), "outside of the file"
                buffer[:] = self.data[at : at + len(buffer)]
                at += len(buffer)
            self.runs.append((offset, at - offset))


def fmt(spec: RoutingSpec = SPEC) -> DatasetFormat:
    return DatasetFormat(uuid=str(uuid.UUID(int=1)), spec=spec, keys=KEYS)


def put(
    request_id: str = "math:1", stamp: int = 1, tokens: int = 5, spec: RoutingSpec = SPEC, **fields: Any
) -> RowData:
    """One whole put with any routing."""
    key = KEYS.parse(request_id)
    defaults: dict[str, Any] = {"layers": spec.moe_layers, "status": "complete", "part": False, "token_start": 0}
    row = Row(
        record_id=f"{stamp:016x}-{WRITER}",
        request_id=request_id,
        components=key.components,
        choice=key.choice,
        t_submit=stamp,
        num_tokens=tokens,
        run_id="run",
        **{**defaults, **fields},
    )
    return payload(spec, row, seed=stamp)


def stored_row(data: RowData) -> Row:
    """The row as the index must tell it."""
    layers = b"" if data.routed_experts is None else np.ascontiguousarray(data.routed_experts).tobytes()
    return replace(data.row, checksum=xxhash.xxh3_64_intdigest(layers))


def open_arrow(data: bytes | memoryview) -> pa.Table:
    table = pa.ipc.open_file(pa.py_buffer(bytes(data))).read_all()
    table.validate(full=True)
    return table


@st.composite
def shards(draw: st.DrawFn, max_layers: int = 92) -> tuple[RoutingSpec, list[RowData]]:
    """A spec and rows of several requests, whole and parts, with and without vectors."""
    spec = draw(specs(max_layers=max_layers))
    made = []
    for stamp in range(1, 1 + draw(st.integers(1, 6))):
        key = KEYS.parse(draw(st.sampled_from(["math:1", "math:10:0:0#2", "a:b:0:0:7", "ünï:3"])))
        row = draw(rows(spec, stamp, request_id=key.request_id, components=key.components))
        made.append(payload(spec, replace(row, choice=key.choice), seed=stamp))
    return spec, draw(st.permutations(made))


any_build = {
    "compression": st.sampled_from(COMPRESSIONS),
    "batch_bytes": st.sampled_from([1, 300, 1 << 20]),
    "max_batch_rows": st.sampled_from([1, 2, 4096]),
}


@given(drawn=shards(), settings=st.fixed_dictionaries(any_build))
def test_pyarrow_reads_every_value(drawn: tuple[RoutingSpec, list[RowData]], settings: dict[str, Any]) -> None:
    spec, data = drawn
    table = open_arrow(build_shard(data, fmt(spec), **settings))
    wanted = sorted(data, key=lambda each: (each.row.request_id, each.row.t_submit, each.row.record_id))
    for number, each in enumerate(wanted):
        seen = {name: table[name][number].as_py() for name in table.column_names}
        row = stored_row(each)
        assert tuple(seen[name] for name in KEYS.components) == row.components
        for name in ("record_id", "request_id", "choice", "t_submit", "token_start", "num_tokens", "part", "status"):
            assert seen[name] == getattr(row, name)
        for name in ("reason", "weight_version", "run_id", "producer", "checksum"):
            assert seen[name] == getattr(row, name)
        assert tuple((each["start"], each["stop"]) for each in seen["missing"]) == row.missing
        assert tuple(tuple(each.values()) for each in seen["weight_spans"]) == row.weight_spans
        assert dict(seen["tags"]) == row.tags
        for name, vector in (("token_ids", each.token_ids), ("logprobs", each.logprobs)):
            assert seen[name] == (None if vector is None else vector.tolist())
        for layer in spec.moe_layers:
            cell = seen[f"layer_{layer:03d}"]
            if layer in row.layers:
                assert each.routed_experts is not None
                assert cell == each.routed_experts[row.layers.index(layer)].tobytes()
            else:
                assert cell is None


@given(drawn=shards(max_layers=12), settings=st.fixed_dictionaries(any_build), data=st.data())
def test_exact_ranges_come_back(
    drawn: tuple[RoutingSpec, list[RowData]], settings: dict[str, Any], data: st.DataObject
) -> None:
    spec, put_rows = drawn
    source = Memory(build_shard(put_rows, fmt(spec), **settings), data.draw(st.sampled_from([0, 8, 4096])))
    index = read_index(source)
    by_id = {each.row.record_id: each for each in put_rows}
    assert index.spec == spec
    assert index.components == KEYS.components
    assert sorted(index.rows, key=lambda row: row.t_submit) == sorted(
        map(stored_row, put_rows), key=lambda r: r.t_submit
    )
    tiles, vectors, checks = [], [], []
    for number, row in enumerate(index.rows):
        each = by_id[row.record_id]
        start = data.draw(st.integers(row.token_start, row.token_stop))
        stop = data.draw(st.integers(start, row.token_stop))
        inner = slice(start - row.token_start, stop - row.token_start)
        if each.routed_experts is not None:
            layers = tuple(sorted(data.draw(st.sets(st.sampled_from(row.layers), min_size=1))))
            order = data.draw(st.permutations(range(3)))
            shape = (len(layers), stop - start, spec.top_k)
            out = np.empty([shape[i] for i in order], spec.dtype).transpose(np.argsort(order))
            tiles.append(TileRead(number, layers, start, stop, out))
            checks.append((out, each.routed_experts[[row.layers.index(layer) for layer in layers], inner]))
        for name, vector in (("token_ids", each.token_ids), ("logprobs", each.logprobs)):
            if vector is not None:
                vectors.append(VectorRead(number, name, start, stop, np.empty(stop - start, vector.dtype)))
                checks.append((vectors[-1].out, vector[inner]))
    read_tiles(source, index, tiles, vectors)
    for out, expected in checks:
        np.testing.assert_array_equal(out, expected)


@given(
    spec=specs(max_layers=6, max_experts=300),
    tokens=st.integers(0, 40),
    order=st.permutations(range(3)),
    flip=st.booleans(),
)
def test_any_strides_are_stored_alike(spec: RoutingSpec, tokens: int, order: list[int], flip: bool) -> None:
    each = put(tokens=tokens, spec=spec)
    plain = each.routed_experts
    assert plain is not None
    strided = np.ascontiguousarray(plain.transpose(order)).transpose(np.argsort(order))
    if flip:
        strided = np.ascontiguousarray(strided[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    assert build_shard([replace(each, routed_experts=strided)], fmt(spec)) == build_shard([each], fmt(spec))


@pytest.mark.parametrize("layout", ["LTK", "TLK"])
@pytest.mark.parametrize(("top_k", "dtype"), [(8, "uint8"), (8, "uint16"), (6, "uint8"), (2, "uint16"), (1, "uint8")])
def test_copies_larger_than_a_block(top_k: int, dtype: str, layout: str) -> None:
    source = np.random.default_rng(0).integers(0, 200, (7, 3001, top_k)).astype(dtype)
    out = np.zeros((7, 3001, top_k) if layout == "LTK" else (3001, 7, top_k), dtype)
    to = out if layout == "LTK" else out.transpose(1, 0, 2)
    copy_tiles(to, source)
    np.testing.assert_array_equal(to, source)
    back = np.zeros_like(source)
    copy_tiles(back, to)
    np.testing.assert_array_equal(back, source)


@pytest.mark.parametrize("tokens", [5, 20_000])
def test_sorted_specs_store_ascending_sets(tokens: int) -> None:
    spec = replace(SPEC, topk_order="sorted", num_experts=300, dtype="")
    each = put(tokens=tokens, spec=spec)
    assert each.routed_experts is not None
    mixed = each.routed_experts[..., ::-1]
    stored = build_shard([replace(each, routed_experts=mixed)], fmt(spec))
    assert stored == build_shard([each], fmt(spec))
    assert (np.diff(mixed.astype(int), axis=-1) <= 0).all(), "the caller's array is left as it is"


def test_rows_are_sorted_and_recycled_memory_leaves_no_trace() -> None:
    few = [put("math:1", 3, 7), put("a:1", 5, 3), put("math:1", 2, 9, layers=(4, 9), part=True, has_token_ids=True)]
    for compression in COMPRESSIONS:
        fresh = bytes(build_shard(few, fmt(), compression=compression))
        scratch = Scratch()
        build_shard([put(stamp=n, tokens=700) for n in range(5)], fmt(), compression=compression, scratch=scratch)
        assert build_shard(few, fmt(), compression=compression, scratch=scratch) == fresh
    assert [row.t_submit for row in read_index(Memory(fresh)).rows] == [5, 2, 3]


def test_inputs_and_tombstones_come_back() -> None:
    shard = build_shard([put()], fmt(), inputs=["a.arrow", "b.arrow"], tombstones_applied=["x"])
    index = read_index(Memory(shard))
    assert (index.inputs, index.tombstones_applied) == (("a.arrow", "b.arrow"), ("x",))


def test_a_batch_holds_what_was_asked_for() -> None:
    shard = build_shard([put(stamp=n, tokens=10) for n in range(9)], fmt(), batch_bytes=4 * 10 * SPEC.bytes_per_token)
    batches = pa.ipc.open_file(pa.py_buffer(bytes(shard)))
    assert [batches.get_batch(i).num_rows for i in range(batches.num_record_batches)] == [4, 4, 1]


def test_one_read_of_the_tail_two_for_a_large_footer() -> None:
    small, large = (Memory(build_shard([put(f"m:{n}", n, 0) for n in range(count)], fmt())) for count in (1, 2000))
    assert len(read_index(small).rows) == 1
    assert len(read_index(large).rows) == 2000
    assert (small.tails, large.tails) == (1, 2)


def test_an_index_outlives_its_process() -> None:
    each = [put("a:1", 1, 30), put("b:2", 2, 40, layers=(4, 9), part=True)]
    source = Memory(build_shard(each, fmt()))
    index = pickle.loads(pickle.dumps(read_index(source)))
    out = np.empty((2, 40, SPEC.top_k), SPEC.dtype)
    read_tiles(source, index, [TileRead(1, (4, 9), 0, 40, out)])
    np.testing.assert_array_equal(out, each[1].routed_experts)


def read_layers(source: Memory, layers: tuple[int, ...], start: int, stop: int) -> npt.NDArray[Any]:
    out = np.empty((len(layers), stop - start, SPEC.top_k), SPEC.dtype)
    read_tiles(source, read_index(source), [TileRead(0, layers, start, stop, out)])
    return out


def test_neighbouring_layers_are_one_request() -> None:
    source = Memory(build_shard([put(tokens=1000)], fmt()))
    read_layers(source, SPEC.moe_layers, 0, 1000)
    assert len(source.runs) == 1
    assert source.runs[0][1] <= 1000 * SPEC.bytes_per_token + 16 * SPEC.num_layers


def test_far_layers_are_requests_of_exactly_their_bytes() -> None:
    source = Memory(build_shard([put(tokens=1000)], fmt()))
    read_layers(source, (3, 4, 9), 200, 300)
    assert [length for _, length in source.runs] == [600, 600, 600]
    source.runs.clear()
    read_layers(source, (3, 4, 9), 0, 1000)
    assert len(source.runs) == 2


def test_a_compressed_buffer_is_read_once_for_all_its_rows() -> None:
    spec = replace(SPEC, moe_layers=(0,))
    each = [put("a:1", n, 500, spec=spec) for n in range(4)]
    source = Memory(build_shard(each, fmt(spec), compression="zstd"))
    outs = [np.empty((1, 500, spec.top_k), spec.dtype) for _ in each]
    read_tiles(source, read_index(source), [TileRead(n, (0,), 0, 500, out) for n, out in enumerate(outs)])
    assert len(source.runs) == 1
    for out, data in zip(outs, each, strict=True):
        np.testing.assert_array_equal(out, data.routed_experts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: replace(d, routed_experts=None), "claims layers"),
        (lambda d: replace(d, row=replace(d.row, layers=())), "claims no layers"),
        (lambda d: replace(d, row=replace(d.row, layers=(3, 99))), "not MoE layers"),
        (lambda d: replace(d, routed_experts=d.routed_experts[:-1]), "expected .12, 5, 6. uint8"),
        (lambda d: replace(d, routed_experts=d.routed_experts[:, :4]), "expected .12, 5, 6. uint8"),
        (lambda d: replace(d, routed_experts=d.routed_experts.astype(np.int32)), "int32, expected"),
        (lambda d: replace(d, token_ids=np.zeros(4, np.int32)), "token_ids of"),
        (lambda d: replace(d, logprobs=np.zeros(5, np.float64)), "logprobs of"),
    ],
)
def test_a_payload_that_does_not_match_is_refused(change: Callable[[RowData], RowData], message: str) -> None:
    with pytest.raises(InvalidRoutingError, match=message):
        build_shard([put(stamp=1), change(put(stamp=2))], fmt())


def test_a_column_beyond_arrows_offsets_is_refused() -> None:
    spec = RoutingSpec(moe_layers=(0,), num_experts=8, top_k=8)
    tokens = 1 << 28
    data = replace(put(tokens=1, spec=spec), routed_experts=np.broadcast_to(np.zeros(8, np.uint8), (1, tokens, 8)))
    with pytest.raises(InvalidRoutingError, match="2 GiB"):
        build_shard([replace(data, row=replace(data.row, num_tokens=tokens))], fmt(spec))


@pytest.mark.parametrize(("data", "settings"), [([], {}), ([put()], {"compression": "gzip"})])
def test_other_arguments_are_checked(data: list[RowData], settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        build_shard(data, fmt(), **settings)


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (TileRead(0, (3,), 0, 6, np.empty((1, 6, 6), np.uint8)), "has 0 to 5"),
        (TileRead(0, (3,), 4, 2, np.empty((1, 0, 6), np.uint8)), "has 0 to 5"),
        (TileRead(0, (2,), 0, 5, np.empty((1, 5, 6), np.uint8)), r"layers \[2\]"),
        (TileRead(0, (3, 4), 0, 5, np.empty((1, 5, 6), np.uint8)), "expected .2, 5, 6."),
        (TileRead(0, (3,), 0, 5, np.empty((1, 5, 6), np.uint16)), "expected .1, 5, 6. uint8"),
        (VectorRead(0, "token_ids", 0, 5, np.empty(5, np.int32)), "has no token_ids"),
    ],
)
def test_reads_of_what_is_not_there_are_refused(tile: Any, message: str) -> None:
    source = Memory(build_shard([put()], fmt()))
    tiles, vectors = ([tile], []) if isinstance(tile, TileRead) else ([], [tile])
    with pytest.raises(InvalidRoutingError, match=message):
        read_tiles(source, read_index(source), tiles, vectors)


# --- Damage


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
