"""A micro-batch as it was pushed: checked, narrow rows per layer, row-major as the model flattens them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.record import RoutingSpec

Mask = npt.NDArray[np.bool_]


class Rows:
    """One layer's rows of a micro-batch.

    ids: uint8, int16 or int32 [rows, top_k], the narrowest that holds an expert id and that every framework knows (paddle
        takes numpy's uint16 for bfloat16 and has no uint32).
    recorded: bool [rows], which rows are replayed. counted: those of them that are no padding. None: all.
    """

    __slots__ = ("counted", "device", "ids", "recorded", "replayed")

    def __init__(self, ids: npt.NDArray[Any], recorded: Mask | None, real: Mask | None) -> None:
        self.ids = ids
        self.recorded = recorded
        self.counted = recorded if real is None else real if recorded is None else recorded & real
        self.replayed = len(ids) if self.counted is None else int(np.count_nonzero(self.counted))
        self.device: Any = None  # what the framework made of it, once


class MicroBatch:
    """A ticket of one push: what `RoutingReplay.recompute` takes. Its memory is freed with the last reference.

    number: counts pushes from 0. rows: tokens in it, padding included. real: without padding.
    """

    def __init__(self, number: int, layers: dict[int, Rows], rows: int, real: int) -> None:
        self.number = number
        self.layers = layers
        self.rows = rows
        self.real = real

    def __repr__(self) -> str:
        return f"MicroBatch({self.number}: {self.rows} rows)"


def micro_batch(
    spec: RoutingSpec,
    number: int,
    wanted: Sequence[int],
    routing: Mapping[int, object] | object,
    recorded: Mapping[int, object] | object | None,
    padding: object | None,
    layers: Sequence[int] | None,
) -> MicroBatch:
    """Check and narrow what was pushed; only the layers in `wanted` are looked at. Raises InvalidRoutingError."""
    by_layer = _by_layer(spec, routing, layers)
    missing = [layer for layer in wanted if layer not in by_layer]
    if missing:
        raise InvalidRoutingError(
            f"layers {missing} of the model have no routing in this micro-batch, which has {sorted(by_layer)}: read all layers "
            "of this rank, or mark rows that were not recorded with recorded="
        )
    counts = {len(by_layer[layer]) for layer in wanted}
    if len(counts) != 1:
        raise InvalidRoutingError(f"layers differ in their number of rows: {sorted(counts)}")
    count = counts.pop()
    real = None if padding is None else ~_mask("padding", padding, count)
    masks = recorded if isinstance(recorded, Mapping) else dict.fromkeys(wanted, recorded)
    rows = {}
    for layer in wanted:
        mask = masks.get(layer)
        chosen, mask = _checked(spec, layer, by_layer[layer], None if mask is None else _mask("recorded", mask, count))
        rows[layer] = Rows(chosen, mask, real)
    return MicroBatch(number, rows, count, count if real is None else int(np.count_nonzero(real)))


def _by_layer(
    spec: RoutingSpec, routing: Mapping[int, object] | object, layers: Sequence[int] | None
) -> dict[int, npt.NDArray[Any]]:
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


def _array(spec: RoutingSpec, layer: int, rows: object) -> npt.NDArray[Any]:
    array = np.asarray(rows)
    if array.dtype.kind not in "iu" or array.ndim < 2 or array.shape[-1] != spec.top_k:
        raise InvalidRoutingError(
            f"layer {layer}: {array.dtype} {list(array.shape)}, expected integers [rows, {spec.top_k}]"
        )
    return array.reshape(-1, spec.top_k)


def _mask(name: str, mask: object, count: int) -> Mask:
    array = np.asarray(mask)
    if array.dtype != np.bool_ or array.size != count:
        raise InvalidInputError(
            f"{name} is {array.dtype} {list(array.shape)}: expected bool, one for each of {count} rows"
        )
    return array.reshape(-1)


def _checked(
    spec: RoutingSpec, layer: int, ids: npt.NDArray[Any], recorded: Mask | None
) -> tuple[npt.NDArray[Any], Mask | None]:
    """Narrow ids, zero where not recorded, and the mask of rows that are recorded."""
    if ids.dtype.kind == "i" and ids.size and ids.min() < 0:  # a marker of rows that are missing
        there: Mask = np.asarray((ids >= 0).all(axis=-1))
        recorded = there if recorded is None else recorded & there
    if recorded is not None:
        if recorded.all():
            recorded = None
        else:
            ids = np.where(recorded[:, None], ids, 0)
    if ids.size and (top := int(ids.max())) >= spec.num_experts:
        row = int(np.argmax((ids >= spec.num_experts).any(axis=-1)))
        raise InvalidRoutingError(f"layer {layer}, row {row}: expert {top} of {spec.num_experts}")
    narrow = ids.astype(_narrowest(spec.num_experts), copy=False)
    ordered = np.sort(narrow, axis=-1)
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1)
    if recorded is not None:
        twice &= recorded
    if twice.any():
        row = int(np.argmax(twice))
        raise InvalidRoutingError(
            f"layer {layer}, row {row}: {ids[row].tolist()} names an expert twice. Rows of a marker (zeros, 255) are not "
            "recorded: mask them with recorded="
        )
    return np.ascontiguousarray(narrow), recorded


def _narrowest(num_experts: int) -> type[np.integer[Any]]:
    return np.uint8 if num_experts <= 1 << 8 else np.int16 if num_experts <= 1 << 15 else np.int32
