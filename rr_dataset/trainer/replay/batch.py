"""A micro-batch as it was pushed: checked, narrow rows per layer, row-major as the model flattens them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.padding import RowKind
from rr_dataset.record import RoutingSpec

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


class Rows:
    """One layer's rows of a micro-batch.

    ids: uint8, int16 or int32 [rows, top_k], the narrowest that holds an expert id and that every framework knows (paddle
        takes numpy's uint16 for bfloat16 and has no uint32).
    forced: bool [rows], which rows are replayed. counted: those of them that are no padding. None: all.
    real: rows that are no padding. replayed: how many are counted.
    """

    __slots__ = ("counted", "device", "forced", "ids", "real", "replayed")

    def __init__(self, ids: Array, kinds: npt.NDArray[np.uint8], forced: Mask) -> None:
        counted = forced & (kinds == RowKind.REAL)
        self.ids = ids
        self.forced = None if forced.all() else forced
        self.counted = None if counted.all() else counted
        self.real = int(np.count_nonzero(kinds != RowKind.PADDING))
        self.replayed = int(np.count_nonzero(counted))
        self.device: Any = None  # what the framework made of the arrays, once


class MicroBatch:
    """A ticket of one push: what `RoutingReplay.recompute` takes. Its memory is freed with the last reference.

    number: counts pushes from 0. layers: the rows of each layer that is hooked.
    """

    def __init__(self, number: int, layers: dict[int, Rows]) -> None:
        self.number = number
        self.layers = layers

    def __repr__(self) -> str:
        return f"MicroBatch({self.number})"


def micro_batch(
    spec: RoutingSpec,
    number: int,
    wanted: Sequence[int],
    routing: Mapping[int, object] | object,
    mask: Mapping[int, object] | object | None,
    layers: Sequence[int] | None,
) -> MicroBatch:
    """Check and narrow what was pushed; only the layers in `wanted` are looked at. Raises InvalidRoutingError."""
    by_layer = _by_layer(spec, routing, layers)
    lacking = [layer for layer in wanted if layer not in by_layer]
    if lacking:
        raise InvalidRoutingError(
            f"layers {lacking} of the model have no routing in this micro-batch, which has {sorted(by_layer)}: read all layers of "
            "this rank, and mask rows that were not recorded"
        )
    if isinstance(mask, Mapping) and (lacking := [layer for layer in wanted if layer not in mask]):
        raise InvalidInputError(
            f"mask has no rows for layers {lacking} of the model: give one for each layer, or one for all"
        )
    counts = {len(by_layer[layer]) for layer in wanted}
    if len(counts) != 1:
        raise InvalidRoutingError(f"layers differ in their number of rows: {sorted(counts)}")
    count = counts.pop()
    order = tuple(by_layer)
    rows = {layer: _rows(spec, layer, by_layer[layer], _kinds(mask, layer, order, count)) for layer in wanted}
    return MicroBatch(number, rows)


def _by_layer(
    spec: RoutingSpec, routing: Mapping[int, object] | object, layers: Sequence[int] | None
) -> dict[int, Array]:
    if isinstance(routing, Mapping):
        return {spec.check_layers([layer])[0]: _array(spec, layer, rows) for layer, rows in routing.items()}
    array = np.asarray(routing)
    chosen = spec.check_layers(layers)
    if array.ndim not in (3, 4) or array.shape[-2:] != (len(chosen), spec.top_k):
        raise InvalidRoutingError(
            f"routing is {list(array.shape)}: expected [batch, tokens, {len(chosen)}, {spec.top_k}] or [rows, {len(chosen)}, "
            f"{spec.top_k}] for layers {list(chosen)}; say layers= if it has others"
        )
    flat = array.reshape(-1, len(chosen), spec.top_k)
    return {layer: _array(spec, layer, flat[:, i]) for i, layer in enumerate(chosen)}


def _array(spec: RoutingSpec, layer: int, rows: object) -> Array:
    array = np.asarray(rows)
    if array.dtype.kind not in "iu" or array.ndim < 2 or array.shape[-1] != spec.top_k:
        raise InvalidRoutingError(
            f"layer {layer}: {array.dtype} {list(array.shape)}, expected integers [rows, {spec.top_k}]"
        )
    return array.reshape(-1, spec.top_k)


def _kinds(
    mask: Mapping[int, object] | object | None, layer: int, order: Sequence[int], count: int
) -> npt.NDArray[np.uint8]:
    """What each row of a layer is."""
    if isinstance(mask, Mapping):
        mask = mask[layer]
    if mask is None:
        return np.full(count, RowKind.REAL, np.uint8)
    array = np.asarray(mask)
    if array.dtype not in (np.bool_, np.uint8) or array.size not in (count, count * len(order)):
        raise InvalidInputError(
            f"mask is {array.dtype} {list(array.shape)}: expected bool or uint8 kinds of rows, one for each of {count} rows, or for "
            f"each row and {len(order)} layers"
        )
    if array.dtype == np.uint8 and (array > max(RowKind)).any():
        raise InvalidInputError(
            f"mask has the value {int(array.max())}: kinds of rows are {', '.join(f'{kind.value} {kind.name}' for kind in RowKind)}"
        )
    kinds = array.reshape(count, -1)
    kinds = kinds[:, order.index(layer) if kinds.shape[1] > 1 else 0]
    return np.where(kinds, RowKind.REAL, RowKind.MISSING).astype(np.uint8) if kinds.dtype == np.bool_ else kinds


def _rows(spec: RoutingSpec, layer: int, ids: Array, kinds: npt.NDArray[np.uint8]) -> Rows:
    inside: Mask = np.asarray((ids < spec.num_experts).all(axis=-1))
    if ids.dtype.kind == "i":  # a negative id marks a row that is missing
        there = (ids >= 0).all(axis=-1)
        kinds = np.where(there | (kinds == RowKind.PADDING), kinds, RowKind.MISSING).astype(np.uint8)
        inside &= there
    narrow = np.ascontiguousarray(np.where(inside[:, None], ids, 0), _narrowest(spec.num_experts))
    ordered = np.sort(narrow, axis=-1)
    usable: Mask = inside & (ordered[:, 1:] != ordered[:, :-1]).all(axis=-1)
    wrong = ~usable & (kinds == RowKind.REAL)
    if wrong.any():
        row = int(np.argmax(wrong))
        what = "names an expert twice" if inside[row] else f"names an expert beyond the {spec.num_experts} there are"
        raise InvalidRoutingError(
            f"layer {layer}, row {row}: {ids[row].tolist()} {what}. A row that only holds a marker (zeros, 255) was not recorded: "
            "mask it"
        )
    return Rows(narrow, kinds, usable & (kinds != RowKind.MISSING))


def _narrowest(num_experts: int) -> type[np.integer[Any]]:
    return np.uint8 if num_experts <= 1 << 8 else np.int16 if num_experts <= 1 << 15 else np.int32
