"""Intake: any array comes out as its ids, in whatever form it was given; anything else is refused before it is stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rr_dataset import intake as intake_module
from rr_dataset.errors import InvalidRequestIdError, InvalidRoutingError
from rr_dataset.intake import MAX_META_BYTES, Intake, drop_of, take_in, to_array
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import DatasetFormat
from rr_dataset.record import Range, RoutingSpec
from rr_dataset.slab import array_offsets
from tests.strategies import ranges_within, routing, specs

SPEC = RoutingSpec((3, 4, 7), num_experts=200, top_k=2)
DEFAULTS: dict[str, Any] = {
    "layout": "TLK",
    "layers": None,
    "token_ids": None,
    "logprobs": None,
    "token_start": 0,
    "part": False,
    "status": None,
    "missing": (),
    "weight_version": None,
    "tags": None,
}


def dataset(spec: RoutingSpec) -> DatasetFormat:
    return DatasetFormat(
        uuid="00000000-0000-0000-0000-000000000000",
        spec=spec,
        keys=KeyScheme.fastdeploy(),
        keep="all",
        max_clock_skew_s=0.0,
        tombstone_ttl_s=7 * 86400.0,
        grace_s=600.0,
        ttl_s=None,
        max_bytes=None,
    )


def take(routed_experts: Any, spec: RoutingSpec = SPEC, request_id: str = "math:1", **arguments: Any) -> Intake:
    return take_in(dataset(spec), request_id, routed_experts, **{**DEFAULTS, **arguments})


def stored(intake: Intake) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
    """Routing [layers, tokens, top_k], token ids and log-probabilities, read from the payload as the worker does."""
    payload = np.full(intake.payload_bytes, 0xEE, np.uint8)
    intake.fill(payload)
    tokens, layers, top_k = intake.routing.shape
    size = tokens * layers * top_k * np.dtype(intake.spec.dtype).itemsize
    meta = json.loads(intake.meta)
    ids_at, logprobs_at, end = array_offsets(size, tokens, token_ids="token_ids" in meta, logprobs="logprobs" in meta)
    assert end == len(payload)
    flat = payload[:size].view(intake.spec.dtype)
    ids = (
        flat.reshape(tokens, layers, top_k).transpose(1, 0, 2)
        if intake.tokens_first
        else flat.reshape(layers, tokens, top_k)
    )
    return (
        ids,
        payload[ids_at:logprobs_at].view(np.int32) if "token_ids" in meta else None,
        payload[logprobs_at:end].view(np.float32) if "logprobs" in meta else None,
    )


def ltk(tokens: int = 5, spec: RoutingSpec = SPEC) -> npt.NDArray[Any]:
    return routing(spec, spec.num_layers, tokens)


INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u2", ">u4"]
STRIDES = ["C", "F", "reversed", "stepped", "inner", "broadcast", "read-only"]


def arranged(array: npt.NDArray[Any], how: str) -> npt.NDArray[Any]:
    """The same values in other memory."""
    if how == "F":
        return np.asfortranarray(array)
    if how == "reversed":
        return np.ascontiguousarray(array[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    if how == "stepped":
        wide = np.full([2 * n for n in array.shape], -1 if array.dtype.kind == "i" else 255).astype(array.dtype)
        wide[::2, ::2, ::2] = array
        return wide[::2, ::2, ::2]
    if how == "inner":
        return np.ascontiguousarray(array.transpose(2, 1, 0)).transpose(2, 1, 0)
    if how == "broadcast" and len(array):
        return np.broadcast_to(array[:1], array.shape)
    copy = array.copy()
    copy.flags.writeable = how != "read-only"
    return copy


# ---- what is accepted


@given(specs(max_layers=8), st.integers(0, 40), st.sampled_from(INTEGERS), st.sampled_from(STRIDES), st.booleans())
@example(RoutingSpec((0,), 2, 1), 0, "u1", "C", True)
@example(RoutingSpec((0,), 2, 1), 1, "i8", "C", False)
def test_every_integer_dtype_and_stride_and_both_layouts(
    spec: RoutingSpec, tokens: int, dtype: str, strides: str, tokens_first: bool
) -> None:
    if np.iinfo(dtype).max < spec.num_experts - 1:
        spec = RoutingSpec(spec.moe_layers, min(spec.num_experts, 100), min(spec.top_k, 2), spec.dtype)
    source = ltk(tokens, spec).astype(dtype)
    given_array = arranged(source.transpose(1, 0, 2) if tokens_first else source, strides)
    expected = given_array.transpose(1, 0, 2) if tokens_first else given_array
    before = given_array.copy()
    ids, _, _ = stored(take(given_array, spec, layout="TLK" if tokens_first else "LTK"))
    assert ids.dtype == spec.dtype
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(given_array, before)


@pytest.mark.parametrize("block_bytes", [1, 100, 1000])
@pytest.mark.parametrize("how", ["C", "inner", "reversed"])
@pytest.mark.parametrize("layout", ["TLK", "LTK"])
def test_casting_in_blocks_leaves_no_seam(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int, how: str, layout: str
) -> None:
    monkeypatch.setattr(intake_module, "BLOCK_BYTES", block_bytes)
    source = ltk(37).astype(np.int32)
    array = arranged(source.transpose(1, 0, 2) if layout == "TLK" else source, how)
    np.testing.assert_array_equal(stored(take(array, layout=layout))[0], source)


def test_the_order_in_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ltk()
    assert not take(source, layout="LTK").tokens_first
    assert take(np.ascontiguousarray(source.transpose(1, 0, 2))).tokens_first
    assert not take(source.transpose(1, 0, 2)).tokens_first


class Tensor:
    """What an engine's tensor offers, and no more than a test allows."""

    def __init__(self, array: npt.NDArray[Any], dtype: str = "int64") -> None:
        self.array, self.dtype = array, dtype
        self.calls: list[str] = []


class NumpyTensor(Tensor):
    def numpy(self) -> npt.NDArray[Any]:
        return self.array


class DlpackTensor(Tensor):
    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class DeviceTensor(Tensor):
    """On a device and part of a graph until it is detached and copied."""

    def detach(self) -> DeviceTensor:
        self.calls.append("detach")
        return self

    def cpu(self) -> NumpyTensor:
        assert self.calls == ["detach"]
        return NumpyTensor(self.array, self.dtype)

    def numpy(self) -> None:
        raise TypeError("can't convert a device tensor to numpy")


@pytest.mark.parametrize("kind", [NumpyTensor, DlpackTensor, DeviceTensor])
def test_tensors_by_protocol(kind: type[Tensor]) -> None:
    source = ltk().astype(np.int64)
    ids, token_ids, logprobs = stored(
        take(
            kind(source),
            layout="LTK",
            token_ids=kind(np.arange(5)),
            logprobs=kind(np.linspace(-1, 0, 5), "float32"),
        )
    )
    np.testing.assert_array_equal(ids, source)
    np.testing.assert_array_equal(token_ids, np.arange(5))
    np.testing.assert_array_equal(logprobs, np.linspace(-1, 0, 5).astype(np.float32))


@pytest.mark.parametrize("library", ["torch", "paddle"])
def test_tensors_of_the_libraries_themselves(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    module = import_module(library)
    source = ltk().astype(np.int64)
    tensor = module.tensor(source) if library == "torch" else module.to_tensor(source)
    np.testing.assert_array_equal(stored(take(tensor, layout="LTK"))[0], source)
    for name in ("bfloat16", "float32"):
        floats = tensor.to(getattr(module, name)) if library == "torch" else tensor.astype(name)
        with pytest.raises(InvalidRoutingError, match=name):
            take(floats, layout="LTK")


# ---- ids


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("layout", ["TLK", "LTK"])
def test_an_id_out_of_range_is_named_with_its_place(dtype: str, layout: str) -> None:
    num_experts = 100
    spec = RoutingSpec((3, 4, 7), num_experts=num_experts, top_k=2)
    for bad in (-1, num_experts, np.iinfo(dtype).max, np.iinfo(dtype).min):
        if bad in range(num_experts) or not np.iinfo(dtype).min <= bad <= np.iinfo(dtype).max:
            continue
        source = ltk(6, spec).astype(dtype)
        source[2, 4, 1] = bad
        array = source.transpose(1, 0, 2) if layout == "TLK" else source
        text = (
            rf"expert id {bad} at row 4, layer index 2, slot 1: expected 0 to {num_experts - 1}; tell rows .* missing="
        )
        with pytest.raises(InvalidRoutingError, match=text):
            stored(take(array, spec, layout=layout))


@pytest.mark.parametrize(
    ("dtype", "num_experts"), [("i1", 200), ("i1", 256), ("i2", 40_000), ("i1", 128), (">i2", 60_000)]
)
def test_a_negative_id_is_refused_also_where_no_positive_one_could_be_too_large(dtype: str, num_experts: int) -> None:
    spec = RoutingSpec((3, 4, 7), num_experts=num_experts, top_k=2)
    source = np.zeros((3, 5, 2), dtype)
    stored(take(source, spec, layout="LTK"))
    source[1, 3, 0] = -1
    with pytest.raises(InvalidRoutingError, match="expert id -1 at row 3, layer index 1, slot 0"):
        stored(take(source, spec, layout="LTK"))


@pytest.mark.parametrize("block_bytes", [1, 100])
@pytest.mark.parametrize("layout", ["TLK", "LTK"])
def test_the_place_is_right_in_any_block(monkeypatch: pytest.MonkeyPatch, block_bytes: int, layout: str) -> None:
    monkeypatch.setattr(intake_module, "BLOCK_BYTES", block_bytes)
    source = ltk(37).astype(np.int32)
    source[1, 30, 1] = 77_777
    array = np.ascontiguousarray(source.transpose(1, 0, 2)) if layout == "TLK" else source
    with pytest.raises(InvalidRoutingError, match="expert id 77777 at row 30, layer index 1, slot 1"):
        stored(take(array, layout=layout))


def test_an_id_past_the_experts_is_refused_in_the_stored_dtype_too() -> None:
    source = ltk()
    assert source.dtype == SPEC.dtype
    source[0, 0, 0] = 200
    with pytest.raises(InvalidRoutingError, match="expert id 200 at row 0"):
        stored(take(source, layout="LTK"))


def test_all_ids_of_a_full_dtype_are_fine() -> None:
    spec = RoutingSpec((0,), num_experts=256, top_k=2)
    array = np.array([[[0, 255]]], np.uint8)
    np.testing.assert_array_equal(stored(take(array, spec))[0], array)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64, np.bool_, object, "U3", "M8[s]"])
def test_what_is_no_integer_is_refused(dtype: Any) -> None:
    with pytest.raises(InvalidRoutingError, match="routed_experts has dtype .*: expected integers"):
        take(np.zeros((5, 3, 2), np.int64).astype(dtype))


@pytest.mark.parametrize("dtype", ["paddle.bfloat16", "torch.float8_e4m3fn", "bfloat16"])
def test_brain_floats_that_pose_as_integers_are_refused_by_name(dtype: str) -> None:
    tensor = NumpyTensor(np.zeros((5, 3, 2), np.uint16), dtype)
    with pytest.raises(InvalidRoutingError, match=f"routed_experts has dtype {dtype}: expected integers"):
        take(tensor)
    with pytest.raises(InvalidRoutingError, match=f"token_ids has dtype {dtype}"):
        take(np.zeros((5, 3, 2), np.uint8), token_ids=NumpyTensor(np.zeros(5, np.uint16), dtype))
    with pytest.raises(InvalidRoutingError, match=f"logprobs has dtype {dtype}.*float32"):
        take(np.zeros((5, 3, 2), np.uint8), logprobs=NumpyTensor(np.zeros(5, np.uint16), dtype))


@pytest.mark.parametrize("value", [None, [[[1, 2]]], "abc", 7, object()])
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(
        InvalidRoutingError, match=f"routed_experts is a {type(value).__name__}: expected a numpy array"
    ):
        to_array("routed_experts", value)


# ---- shapes


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 3), (5, 4, 2), (3, 5, 2, 1), (), (0,)])
@pytest.mark.parametrize("layout", ["TLK", "LTK"])
def test_a_wrong_shape_says_what_was_expected(shape: tuple[int, ...], layout: str) -> None:
    expected = r"\(tokens, 3, 2\) in TLK" if layout == "TLK" else r"\(3, tokens, 2\) in LTK"
    with pytest.raises(InvalidRoutingError, match=rf"routed_experts has shape .*: expected {expected}"):
        take(np.zeros(shape, np.uint8), layout=layout)


def test_the_other_layout_is_hinted_at() -> None:
    with pytest.raises(InvalidRoutingError, match='it looks like layout="LTK"'):
        take(ltk())
    with pytest.raises(InvalidRoutingError, match='it looks like layout="TLK"'):
        take(ltk().transpose(1, 0, 2), layout="LTK")
    with pytest.raises(InvalidRoutingError, match="layout='KLT': expected one of TLK, LTK"):
        take(ltk(), layout="KLT")


def test_some_layers_only_make_it_a_part() -> None:
    source = ltk()[1:]
    intake = take(source, layout="LTK", layers=[4, 7])
    assert json.loads(intake.meta) == {"status": "partial", "part": True, "layers": [4, 7]}
    np.testing.assert_array_equal(stored(intake)[0], source)
    assert json.loads(take(ltk(), layout="LTK", layers=[3, 4, 7]).meta) == {"status": "complete"}
    with pytest.raises(InvalidRoutingError, match=r"expected \(tokens, 1, 2\)"):
        take(ltk(), layers=[4])
    for layers in ([5], [4, 4], [7, 4], []):
        with pytest.raises(InvalidRoutingError, match="layers"):
            take(source, layout="LTK", layers=layers)


# ---- missing


@given(st.data(), st.sampled_from(["i4", "u1", "i8"]), st.booleans(), st.integers(0, 1000))
def test_missing_rows_are_zero_whatever_stands_there(
    data: st.DataObject, dtype: str, tokens_first: bool, start: int
) -> None:
    tokens = 20
    missing = data.draw(ranges_within(start, start + tokens))
    source = ltk(tokens).astype(dtype)
    expected = source.copy()
    for first, last in missing:
        source[:, first - start : last - start] = 255 if dtype == "u1" else -1
        expected[:, first - start : last - start] = 0
    array = np.ascontiguousarray(source.transpose(1, 0, 2)) if tokens_first else source
    intake = take(array, layout="TLK" if tokens_first else "LTK", missing=missing, token_start=start, part=True)
    np.testing.assert_array_equal(stored(intake)[0], expected)
    assert json.loads(intake.meta).get("missing", []) == [list(gap) for gap in missing]


def test_missing_ranges_are_sorted_and_joined() -> None:
    array = np.full((10, 3, 2), -1, np.int32)
    array[0] = 5
    intake = take(array, missing=iter([(6, 10), (3, 3), (1, 3), (2, 6), (np.int64(9), np.int64(10))]))
    assert json.loads(intake.meta)["missing"] == [[1, 10]]
    assert intake.present == ((0, 1),)


@pytest.mark.parametrize(
    "bad", [[(-1, 2)], [(0, 6)], [(3, 2)], [(0, 1), (4, 6)], [(0.5, 2)], [("0", "2")], [3], [(1, 2, 3)], 5]
)
def test_missing_ranges_outside_the_record_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidRoutingError, match="missing"):
        take(ltk(), layout="LTK", missing=bad)


def test_an_unmarked_gap_is_an_error_that_names_the_way_out() -> None:
    array = np.full((5, 3, 2), -1, np.int32)
    with pytest.raises(InvalidRoutingError, match=r"expert id -1 at row 2.*missing="):
        stored(take(array, missing=[(0, 2), (3, 5)]))


# ---- the rest of the arguments


def test_positions_and_parts() -> None:
    assert json.loads(take(ltk(), layout="LTK", token_start=np.int64(40), part=True).meta) == {
        "status": "partial",
        "start": 40,
        "part": True,
    }
    assert json.loads(take(ltk(), layout="LTK", part=True, status="complete").meta)["status"] == "complete"
    assert json.loads(take(ltk(), layout="LTK", token_start=(1 << 31) - 6).meta)["start"] == (1 << 31) - 6
    for bad in (-1, 1.0, "3", None, 1 << 63, (1 << 31) - 5):
        with pytest.raises(InvalidRoutingError, match="token_start="):
            take(ltk(), layout="LTK", token_start=bad)


@pytest.mark.parametrize("status", ["dropped", "done", "", 3])
def test_an_unknown_status_is_refused(status: Any) -> None:
    if status == "":
        assert json.loads(take(ltk(), layout="LTK", status=status).meta)["status"] == "complete"
        return
    with pytest.raises(InvalidRoutingError, match="status=.*expected one of complete, partial, preempted, aborted"):
        take(ltk(), layout="LTK", status=status)


@pytest.mark.parametrize("version", ["v1", 17, np.int64(17)])
def test_one_weight_version_is_kept_as_text(version: Any) -> None:
    assert json.loads(take(ltk(), layout="LTK", weight_version=version).meta)["weight"] == str(version)


def test_weight_spans() -> None:
    spans = [(np.int64(3), np.int64(5), 8), (0, 3, "7")]
    assert json.loads(take(ltk(), layout="LTK", weight_version=spans).meta)["spans"] == [[0, 3, "7"], [3, 5, "8"]]
    for bad in ([(0, 6, "7")], [(0, 3)], [(0.5, 3, "7")], 1.5, [(0, 3, "\ud800")], "\ud800"):
        with pytest.raises(InvalidRoutingError, match="weight_version"):
            take(ltk(), layout="LTK", weight_version=bad)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tags", {"t": "x" * MAX_META_BYTES}),
        ("missing", [(2 * i, 2 * i + 1) for i in range(75_000)]),
        ("weight_version", [(i, i + 1, f"step {i}") for i in range(50_000)]),
        ("weight_version", "x" * MAX_META_BYTES),
    ],
)
def test_what_says_too_much_of_a_put_is_refused_by_name(name: str, value: Any) -> None:
    array = np.zeros((150_000, 3, 2), np.uint8)
    with pytest.raises(InvalidRoutingError, match=rf"^{name} takes \d+ bytes as JSON: expected at most 1000000"):
        take(array, **{"weight_version": "7", "tags": {"t": "x"}, name: value})


def test_a_put_may_say_that_much() -> None:
    empty = len(take(ltk(), layout="LTK", tags={"t": ""}).meta)
    assert len(take(ltk(), layout="LTK", tags={"t": "x" * (MAX_META_BYTES - empty)}).meta) == MAX_META_BYTES
    with pytest.raises(InvalidRoutingError, match="tags takes"):
        take(ltk(), layout="LTK", tags={"t": "x" * (MAX_META_BYTES - empty + 1)})


def test_a_drop_says_what_it_was_to_be_and_nothing_of_its_tokens() -> None:
    put = {"token_start": 40, "part": True, "missing": [(40, 41)], "layers": [3, 7], "tags": {"t": "x"}}
    expected = {"start": 40, "part": True, "status": "dropped", "reason": "full"}
    array = ltk()[:2]
    spans = take(array, layout="LTK", weight_version=[(40, 42, "7")], token_ids=[1] * 5, **put)
    assert json.loads(drop_of(spans, "full").meta) == expected
    assert json.loads(drop_of(take(array, layout="LTK", weight_version=7, **put), "full").meta) == {
        **expected,
        "weight": "7",
    }


def test_tags_are_texts() -> None:
    assert json.loads(take(ltk(), layout="LTK", tags={"a": "ü\0"}).meta)["tags"] == {"a": "ü\0"}
    for bad in ({"a": 1}, {1: "a"}, {"a": None}, {"a": "\ud800"}, {"\udfff": "a"}):
        with pytest.raises(InvalidRoutingError, match="tags has"):
            take(ltk(), layout="LTK", tags=bad)


@pytest.mark.parametrize("values", [[1, 2, 3, 4, 5], (1, 2, 3, 4, 5), range(1, 6)])
def test_token_ids_and_logprobs(values: Sequence[int]) -> None:
    sequence = values if isinstance(values, (list, tuple)) else np.array(values, ">i8")
    _, token_ids, logprobs = stored(
        take(ltk(), layout="LTK", token_ids=sequence, logprobs=[0.5, float("nan"), -1, 0, 1])
    )
    np.testing.assert_array_equal(token_ids, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(logprobs, np.array([0.5, np.nan, -1, 0, 1], np.float32))
    _, token_ids, logprobs = stored(take(ltk(), layout="LTK", logprobs=np.arange(10.0)[::2]))
    assert token_ids is None
    np.testing.assert_array_equal(logprobs, [0, 2, 4, 6, 8])


@pytest.mark.parametrize(
    "bad", [[1, 2, 3], np.zeros((5, 1), int), np.zeros(5), [1 << 31] * 5, [-(1 << 31) - 1] * 5, "abcde"]
)
def test_token_ids_that_do_not_fit_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidRoutingError, match="token_ids"):
        take(ltk(), layout="LTK", token_ids=bad)


def test_the_request_id_is_checked_first() -> None:
    with pytest.raises(InvalidRequestIdError):
        take("no array either", request_id="")


def test_no_tokens_at_all() -> None:
    ids, token_ids, _ = stored(take(np.empty((0, 3, 2), np.int64), token_ids=[]))
    assert ids.shape == (3, 0, 2)
    assert token_ids is not None
    assert len(token_ids) == 0


def _gaps(missing: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in missing)


@given(ranges_within(0, 20))
def test_present_and_missing_share_the_tokens(missing: tuple[Range, ...]) -> None:
    intake = take(ltk(20), layout="LTK", missing=missing)
    assert _gaps(intake.present) + _gaps(missing) == 20
