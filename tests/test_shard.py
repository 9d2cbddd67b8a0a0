"""Shards: what pyarrow sees in them is what went in, and exact ranges come back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from in_memory import KEYS, SPEC, Memory, fmt, put
from strategies import payload, rows, specs

from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.options import COMPRESSIONS
from rr_dataset.record import RoutingSpec, Row, RowData
from rr_dataset.shard import Scratch, TileRead, VectorRead, build_shard, copy_tiles, read_index, read_tiles


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
        (TileRead(0, (3, 4), 0, 5, (np.empty((5, 6), np.uint8),)), "1 arrays for 2 layers"),
        (TileRead(0, (3,), 0, 5, (np.empty((4, 6), np.uint8),)), "expected .5, 6. uint8"),
        (VectorRead(0, "token_ids", 0, 5, np.empty(5, np.int32)), "has no token_ids"),
    ],
)
def test_reads_of_what_is_not_there_are_refused(tile: Any, message: str) -> None:
    source = Memory(build_shard([put()], fmt()))
    tiles, vectors = ([tile], []) if isinstance(tile, TileRead) else ([], [tile])
    with pytest.raises(InvalidRoutingError, match=message):
        read_tiles(source, read_index(source), tiles, vectors)
