"""Packed reads, against a token-by-token oracle: buffers, masks, padding, and how many bytes are read for them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import SPEC, Stored, expected

import rr_dataset as rr
from rr_dataset.layout import row_ref
from rr_dataset.padding import RowKind
from rr_dataset.record import RowData
from rr_dataset.selection import Share
from rr_dataset.storage.files import LocalSource


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds")


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of every payload read, in order."""
    counted: list[int] = []
    real = LocalSource.read_runs

    def read_runs(self: LocalSource, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        counted.extend(buffer.nbytes for _, buffers in runs for buffer in buffers)
        real(self, runs)

    monkeypatch.setattr(LocalSource, "read_runs", read_runs)
    return counted


def ref(data: RowData) -> str:
    return row_ref(data.row.record_id, data.row.request_id)


def oracle(
    rows: Sequence[RowData], layers: Sequence[int], samples: Sequence[tuple[str, Sequence[int], int]]
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Experts and masks by layer, of (request id, positions, padding) one after the other."""
    experts: dict[int, list[np.ndarray]] = {layer: [] for layer in layers}
    masks: dict[int, list[np.ndarray]] = {layer: [] for layer in layers}
    for request_id, positions, padding in samples:
        ids, present = expected([data for data in rows if data.row.request_id == request_id], SPEC, layers, positions)
        for number, layer in enumerate(layers):
            experts[layer] += [ids[number], np.zeros((padding, SPEC.top_k), SPEC.dtype)]
            kinds = np.where(present[number], RowKind.REAL, RowKind.MISSING)
            masks[layer] += [kinds, np.full(padding, RowKind.PADDING)]
    return (
        {layer: np.concatenate([np.zeros((0, SPEC.top_k), SPEC.dtype), *parts]) for layer, parts in experts.items()},
        {layer: np.concatenate([np.zeros(0), *parts]) for layer, parts in masks.items()},
    )


@given(st.data())
def test_any_records_pack_as_the_oracle_says(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored = Stored(Path(folder))
        rows = []
        for name in data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), label="puts"):
            start, tokens = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 6))
            hole = data.draw(st.none() | st.integers(start, start + tokens - 1) if tokens else st.none())
            how: dict[str, Any] = {"start": start, "missing": () if hole is None else ((hole, hole + 1),)}
            if data.draw(st.booleans()):
                how["layers"] = tuple(sorted(data.draw(st.sets(st.sampled_from(SPEC.moe_layers), min_size=1))))
            rows.append(stored.row(name, tokens, part=data.draw(st.booleans()), **how))
            stored.shard(rows[-1], compression=data.draw(st.sampled_from(["none", "zstd"])))
        known = sorted({row.row.request_id for row in rows})
        ids = data.draw(st.lists(st.sampled_from(known), max_size=4), label="ids")
        layers = tuple(sorted(data.draw(st.sets(st.sampled_from(SPEC.moe_layers), min_size=1))))
        multiple = data.draw(st.integers(1, 4))
        selections: list[Any] = []
        samples = []
        for name, head in zip(ids, stored.dataset.heads(ids), strict=True):
            is_share = data.draw(st.booleans())
            ends = st.integers(0, head.num_tokens + 3 * is_share)
            ranges = data.draw(st.lists(st.tuples(ends, ends).map(lambda p: (min(p), max(p))), max_size=3))
            extra = data.draw(st.integers(0, 3)) if is_share else 0
            selections.append(Share(tuple(ranges), extra) if is_share else ranges)
            positions = [position for start, stop in ranges for position in range(start, stop)]
            samples.append((name, positions, extra + -(len(positions) + extra) % multiple))
        padding = data.draw(st.sampled_from(["spread", "minus_one"]))
        total = sum(len(positions) + more for _, positions, more in samples)
        dtype = data.draw(st.sampled_from([None, "int16", "int64", *(["uint8", "uint16"] * (padding == "spread"))]))
        width = data.draw(st.integers(2, 3), label="columns of the buffers, of which two are given")
        out = None if dtype is None else {layer: np.full((total + 3, width), 99, dtype)[:, :2] for layer in layers}

        packed = stored.dataset.get_packed(
            ids, layers, selections, out=out, padding=padding, pad_to_multiple=multiple, on_missing="raise"
        )

        experts, masks = oracle(rows, layers, samples)
        assert list(packed.experts) == list(packed.masks) == list(layers)
        for layer in layers:
            got, mask = packed.experts[layer], packed.masks[layer]
            np.testing.assert_array_equal(mask, masks[layer])
            real = mask == RowKind.REAL
            np.testing.assert_array_equal(got[real], experts[layer][real])
            unreal = got[~real]
            assert (unreal == -1).all() if padding == "minus_one" else (unreal[:, 0] != unreal[:, 1]).all()
            assert got.dtype == (dtype or ("uint8" if padding == "spread" else "int16"))
            if out is not None:
                assert np.shares_memory(got, out[layer]) or not total
                assert (out[layer][total:] == 99).all()
        np.testing.assert_array_equal(packed.mask, np.min([masks[layer] for layer in layers], axis=0))
        sizes = [len(positions) + more for _, positions, more in samples]
        np.testing.assert_array_equal(packed.cu_seqlens, np.cumsum([0, *sizes]))
        assert packed.cu_seqlens.dtype == np.int32


def test_a_quarter_of_the_layers_reads_a_quarter_of_the_bytes(tmp_path: Path, read_bytes: list[int]) -> None:
    spec = rr.RoutingSpec(range(48), num_experts=128, top_k=8)
    stored = Stored(tmp_path / "ds", spec)
    rows = [stored.put(f"a:{i}", 3000 + i, vectors=True) for i in range(4)]
    ids = [data.row.request_id for data in rows]
    stored.dataset.get_many(ids)
    whole = sum(read_bytes)
    tokens = sum(data.row.num_tokens for data in rows)
    assert whole >= tokens * spec.bytes_per_token
    read_bytes.clear()
    packed = stored.dataset.get_packed(ids, layers=range(12, 24))
    assert tokens * 12 * 8 <= sum(read_bytes) <= 0.3 * whole
    np.testing.assert_array_equal(packed.experts[13], np.concatenate([data.routed_experts[13] for data in rows]))
    read_bytes.clear()
    stored.dataset.get_packed(ids, layers=range(12, 24), tokens=Share(((0, 500), (2500, 3000)), padding=4))
    assert len(ids) * 1000 * 12 * 8 <= sum(read_bytes) <= 0.1 * whole


@pytest.mark.parametrize("given", [False, True])
def test_rows_are_read_into_the_buffers_themselves(
    stored: Stored, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [stored.put("a:1", 5), stored.put("a:2", 7)]
    addresses: list[int] = []
    real = LocalSource.read_runs

    def read_runs(self: LocalSource, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        addresses.extend(np.frombuffer(buffer, np.uint8).ctypes.data for _, buffers in runs for buffer in buffers)
        real(self, runs)

    monkeypatch.setattr(LocalSource, "read_runs", read_runs)
    out = {layer: np.empty((12, 2), np.uint8) for layer in SPEC.moe_layers} if given else None
    experts = stored.dataset.get_packed(["a:1", "a:2"], out=out).experts
    wanted = {experts[layer][at:].ctypes.data for layer in SPEC.moe_layers for at in (0, 5)}
    assert wanted <= set(addresses)
    assert all(array.flags.c_contiguous for array in experts.values())
    for number, layer in enumerate(SPEC.moe_layers):
        np.testing.assert_array_equal(experts[layer], np.concatenate([data.routed_experts[number] for data in rows]))


def test_a_rank_without_moe_layers_takes_part_in_every_read(stored: Stored) -> None:
    row = stored.put("a:1", 5, vectors=True)
    data = stored.dataset
    view = rr.RankView(SPEC, rr.pipeline_chunks(12, 0, 4))
    assert view.layers == ()
    for record in (
        data.get("a:1", view.layers),
        *data.get_many(["a:1"], view.layers),
        *data.resolve([ref(row)], view.layers),
        *data.get_stacked(["a:1"], view.layers).records,
    ):
        assert record.routed_experts.shape == (0, 5, 2)
        assert record.token_ids is not None
        assert record.token_ids.tolist() == row.token_ids.tolist()
    spans = data.get_spans([(ref(row), 1, 4)], view.layers)
    assert (spans.routed_experts.shape, spans.present.shape) == ((0, 3, 2), (0, 3))
    assert rr.collate(data.get_many(["a:1"], view.layers), SPEC).routed_experts.shape == (1, 5, 0, 2)
    assert rr.trajectory(data, ["a:1"], layers=view.layers).routed_experts.shape == (0, 5, 2)
    with pytest.raises(rr.InvalidRoutingError, match="at least 1"):
        SPEC.check_layers([])


def test_buffers_that_share_memory_are_refused(stored: Stored) -> None:
    """The ids of one layer would stand under the mask of another."""
    stored.put("a:1", 5)
    get = stored.dataset.get_packed
    block = np.zeros((8, 2), np.uint8)
    for other in (block, block[3:], block[::-1]):
        with pytest.raises(rr.InvalidRoutingError, match=r"out\[4\] and out\[9\] share memory"):
            get(["a:1"], [4, 9], out={4: block, 9: other})
    with pytest.raises(rr.InvalidRoutingError, match=r"out\[4\] has strides \(0, 1\)"):
        get(["a:1"], [4], out={4: np.lib.stride_tricks.as_strided(block, (8, 2), (0, 1))})
    twice = np.lib.stride_tricks.as_strided(block, (4, 5, 2), (0, 2, 1))
    record = stored.dataset.get("a:1")
    for shared in (lambda: stored.dataset.get("a:1", out=twice), lambda: record.to_numpy(out=twice)):
        with pytest.raises(rr.InvalidRoutingError, match=r"out has strides \(0, 2, 1\)"):
            shared()
    with pytest.raises(rr.InvalidRoutingError, match="no element in the place of another"):
        stored.dataset.get_stacked(["a:1"] * 2, empty=lambda shape, _: np.broadcast_to(np.zeros(1, np.uint8), shape))
    one = np.zeros((5, 4, 2), np.uint8)  # the layers of each row side by side
    get(["a:1"], out={layer: one[:, number] for number, layer in enumerate(SPEC.moe_layers)})
    np.testing.assert_array_equal(one.transpose(1, 0, 2), stored.dataset.get("a:1").routed_experts)


@pytest.mark.parametrize("order", ["<", ">"])
def test_buffers_of_either_byte_order_have_the_numbers(order: str, tmp_path: Path) -> None:
    wide = Stored(tmp_path / "wide", rr.RoutingSpec((3, 4), num_experts=60_000, top_k=2))
    row = wide.put("a:1", 5)
    for dtype in (f"{order}u2", f"{order}i4", f"{order}u4"):
        out = {layer: np.zeros((5, 2), dtype) for layer in (3, 4)}
        wide.dataset.get_packed(["a:1"], out=out)
        np.testing.assert_array_equal(np.stack(list(out.values())), row.routed_experts)
        if dtype[1] == "u":
            whole = np.zeros((2, 5, 2), dtype)
            np.testing.assert_array_equal(wide.dataset.get("a:1", out=whole).routed_experts, row.routed_experts)
            stacked = wide.dataset.get_stacked(["a:1"], empty=lambda shape, _, dtype=dtype: np.empty(shape, dtype))
            np.testing.assert_array_equal(stacked.routed_experts[0], row.routed_experts)


def test_an_id_without_a_record_has_the_missing_rows_of_its_share(stored: Stored) -> None:
    stored.put("a:1", 3)
    share = Share(((0, 4),), 1)
    packed = stored.dataset.get_packed(["a:9", "a:1"], [4], share, on_missing="none")
    missing, real, padding = RowKind.MISSING, RowKind.REAL, RowKind.PADDING
    assert packed.mask.tolist() == [*[missing] * 4, padding, *[real] * 3, missing, padding]
    assert stored.dataset.get_packed(["a:9"], on_missing="none").cu_seqlens.tolist() == [0, 0]
    with pytest.raises(rr.RecordNotFoundError, match="a:9"):
        stored.dataset.get_packed(["a:9", "a:1"])
    stored.put("a:1", status="dropped", reason="spool full")
    with pytest.raises(rr.RecordDroppedError, match="spool full"):
        stored.dataset.get_packed(["a:1"])


def test_a_rank_without_moe_layers_has_lengths_and_no_buffers(stored: Stored) -> None:
    stored.put("a:1", 3)
    packed = stored.dataset.get_packed(["a:1", "a:1"], layers=(), pad_to_multiple=2)
    assert (packed.experts, packed.masks, packed.cu_seqlens.tolist()) == ({}, {}, [0, 4, 8])
    assert packed.mask.tolist() == [2, 2, 2, 0] * 2
    assert stored.dataset.get_packed([]).cu_seqlens.tolist() == [0]


def test_tensors_of_torch_are_filled_in_place(stored: Stored) -> None:
    torch = pytest.importorskip("torch")
    row = stored.put("a:1", 3)
    out = {layer: torch.zeros((4, 2), dtype=torch.int32) for layer in SPEC.moe_layers}
    stored.dataset.get_packed(["a:1"], out=out)
    np.testing.assert_array_equal(out[4][:3].numpy(), row.routed_experts[1])


def test_tensors_of_paddle_are_filled_in_place(stored: Stored) -> None:
    paddle = pytest.importorskip("paddle")
    row = stored.put("a:1", 3)
    out = {layer: paddle.zeros([4, 2], dtype="uint8").cpu() for layer in SPEC.moe_layers}
    stored.dataset.get_packed(["a:1"], out=out)
    np.testing.assert_array_equal(out[4].numpy()[:3], row.routed_experts[1])


def read_only() -> np.ndarray:
    array = np.zeros((5, 2), np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("buffer", "says"),
    [
        (np.zeros((4, 2), np.uint8), r"is \(4, 2\): expected \[5 or more, 2\]"),
        (np.zeros((5, 3), np.uint8), r"is \(5, 3\): expected \[5 or more, 2\]"),
        (np.zeros(10, np.uint8), r"is \(10,\): expected"),
        (np.zeros((5, 2), np.int8), "is int8: expected uint8"),
        (np.zeros((5, 2), np.float32), "is float32: expected uint8"),
        (read_only(), "is read-only"),
        ([[0, 0]] * 5, "is a list: expected a numpy array"),
    ],
)
def test_a_buffer_that_does_not_fit_is_named(stored: Stored, buffer: Any, says: str) -> None:
    stored.put("a:1", 5)
    with pytest.raises(rr.InvalidRoutingError, match=rf"out\[4\] {says}"):
        stored.dataset.get_packed(["a:1"], [4], out={4: buffer})


def test_wrong_arguments_are_named(stored: Stored) -> None:
    stored.put("a:1", 5)
    get_packed = stored.dataset.get_packed
    with pytest.raises(rr.InvalidRoutingError, match=r"no buffer for layers \[9\]"):
        get_packed(["a:1"], [4, 9], out={4: np.zeros((5, 2), np.uint8)})
    with pytest.raises(rr.InvalidRoutingError, match=r"is uint8: expected int16"):
        get_packed(["a:1"], [4], out={4: np.zeros((5, 2), np.uint8)}, padding="minus_one")
    with pytest.raises(rr.InvalidInputError, match="padding='zero': expected one of spread, minus_one"):
        get_packed(["a:1"], padding="zero")
    with pytest.raises(rr.InvalidInputError, match="pad_to_multiple=0"):
        get_packed(["a:1"], pad_to_multiple=0)
    with pytest.raises(rr.InvalidRoutingError, match="tokens 0 to 6 are not in 'a:1', which has 5"):
        get_packed(["a:1"], tokens=[(0, 6)])
    with pytest.raises(rr.InvalidRoutingError, match="2 selections for 1 ids"):
        get_packed(["a:1"], tokens=[Share(((0, 1),)), Share(((0, 1),))])


def test_a_row_far_away_takes_no_memory(stored: Stored) -> None:
    stored.put("a:1", 5, start=(1 << 31) - 6, part=True)
    with pytest.raises(rr.InvalidRoutingError, match="ids for 5 of them only"):
        stored.dataset.get_packed(["a:1"])
    with pytest.raises(rr.InvalidRoutingError, match="read at most 2147483647 at once"):
        stored.dataset.get_packed(["a:1", "a:1"])
    assert stored.dataset.get_packed(["a:1"], tokens=slice(-7, None)).mask.tolist() == [1, 1, 2, 2, 2, 2, 2]


def test_spans_are_of_the_very_puts(stored: Stored) -> None:
    first = stored.put("a:1", 9, missing=((2, 3),))
    later = stored.put("a:1", 6)  # replaces it for `get`
    part = stored.put("b", 4, start=3, layers=(4, 7), part=True)
    spans = [(ref(later), 1, 4), (ref(first), 0, 4), (ref(part), 3, 5), (ref(first), 8, 9)]
    got = stored.dataset.get_spans(spans, layers=[4, 9])
    assert got.routed_experts.shape == (2, 10, 2)
    zero = np.zeros((2, 2), np.uint8)
    for number, row in ((0, 1), (1, 3)):
        of_part = part.routed_experts[0][:2] if number == 0 else zero
        parts = [later.routed_experts[row, 1:4], first.routed_experts[row, :4], of_part, first.routed_experts[row, 8:9]]
        np.testing.assert_array_equal(got.routed_experts[number], np.concatenate(parts))
    there = [1, 1, 1, 1, 1, 0, 1, 1, 1, 1]
    assert got.present.astype(int).tolist() == [there, [*there[:7], 0, 0, 1]]
    assert stored.dataset.get_spans([]).routed_experts.shape == (4, 0, 2)


@pytest.mark.parametrize(
    ("span", "says"), [((2, 5), "tokens 2 to 5 are not in the put"), ((4, 8), "3 to 7"), ((5, 4), "tokens 5 to 4")]
)
def test_a_span_outside_its_put_is_named(stored: Stored, span: tuple[int, int], says: str) -> None:
    data = stored.put("b", 4, start=3, part=True)
    with pytest.raises(rr.InvalidRoutingError, match=says):
        stored.dataset.get_spans([(ref(data), *span)])


def test_spans_that_are_none_are_named(stored: Stored) -> None:
    with pytest.raises(rr.InvalidInputError, match=r"expected a list of \(ref, start, stop\)"):
        stored.dataset.get_spans([("a", 1)])  # type: ignore[list-item]
    with pytest.raises(rr.InvalidInputError, match="ref 'a': expected the `ref` of a Receipt"):
        stored.dataset.get_spans([("a", 1, 2)])
