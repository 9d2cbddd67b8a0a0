"""Records to a batch of one shape, and arrays to tensors. Padding is made here, at read time; records have none."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.options import check_whole
from rr_dataset.padding import RowKind, fill_rows, padded_dtype
from rr_dataset.record import RoutingRecord, RoutingSpec, shown_layers
from rr_dataset.shard.tiling import copy_tiles

ORDERS = ("BTLK", "BLTK")
# Paddle reads numpy's uint16 as bfloat16 and has no uint32; torch has both and hardly an operator for them.
_INSTEAD = {"uint16": "int32", "uint32": "int64"}
_OF_EXPERTS = ("routed_experts", "experts")  # names of expert ids, in batches and samples


class Batch(NamedTuple):
    """Records side by side. B samples, T rows, L layers, K ids.

    routed_experts: [B, T, L, K], or [B, L, T, K] with order "BLTK"; C-contiguous.
    mask: uint8 [B, T] of `RowKind`; MISSING where any of the layers has no ids of the token.
    masks: the same by layer, uint8 [B, T, L]; None where layers do not differ.
    layers: their ids.
    """

    routed_experts: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8]
    masks: npt.NDArray[np.uint8] | None
    layers: tuple[int, ...]


def collate(
    records: Sequence[RoutingRecord | None],
    spec: RoutingSpec,
    *,
    num_tokens: Sequence[int] | None = None,
    length: int | None = None,
    pad_to_multiple: int = 1,
    padding: str = "spread",
    order: str = "BTLK",
) -> Batch:
    """A batch of records that were read with the same layers. Row t of a sample is the t-th token that was read.

    records: of `get_many`; None for an id without a record.
    num_tokens: how many tokens each sample has in the batch, at least those that were read; the rest are missing rows at its
        end. None: those that were read. Needed where a record is None. `align` gives it.
    length: T; None: that of the longest, up to a multiple of `pad_to_multiple`.
    padding: what stands in rows that are not real, padded and missing ones alike: "spread", distinct ids balanced over all
        experts, in the dtype of the records; or "minus_one", -1 in the narrowest signed dtype that holds the ids.
    order: "BTLK", or "BLTK".

    Raises InvalidRoutingError for records of different layers or a sample longer than `length`.
    """
    if order not in ORDERS:
        raise InvalidInputError(f"order={order!r}: expected one of {', '.join(ORDERS)}")
    check_whole("pad_to_multiple", pad_to_multiple, 1)
    dtype = padded_dtype(spec.dtype, spec.num_experts, padding)
    layers = _layers_of(records, spec)
    counts = _counts(records, num_tokens)
    longest = max(counts, default=0)
    rows = -(-longest // pad_to_multiple) * pad_to_multiple if length is None else check_whole("length", length, 0)
    if longest > rows:
        at = int(np.argmax(counts))
        raise InvalidRoutingError(f"sample {at} ({_name(records[at])}) has {longest} tokens, more than length={length}")
    if order == "BTLK":
        experts = np.empty((len(records), rows, len(layers), spec.top_k), dtype)
        by_layer = experts.transpose(0, 2, 1, 3)
    else:
        experts = by_layer = np.empty((len(records), len(layers), rows, spec.top_k), dtype)
    mask = np.full((len(records), rows), RowKind.PADDING, np.uint8)
    present = []
    for number, (record, count) in enumerate(zip(records, counts, strict=True)):
        mask[number, :count] = RowKind.MISSING
        if record is None:
            continue
        read = record.routed_experts.shape[1]
        copy_tiles(by_layer[number, :, :read], record.routed_experts)
        mask[number, :read] = RowKind.REAL
        if record.missing_by_layer:
            present.append((number, record.present()))
    masks = None
    if present:
        masks = np.repeat(mask[:, :, np.newaxis], len(layers), axis=2)
        for number, there in present:
            masks[number, : there.shape[1]][~there.T] = RowKind.MISSING
        mask = masks.min(axis=2)
        if (masks == mask[:, :, np.newaxis]).all():
            masks = None
    for at in range(len(layers)):
        unreal = (mask if masks is None else masks[:, :, at]) != RowKind.REAL
        fill_rows(by_layer[:, at], unreal, spec.num_experts, padding)
    return Batch(experts, mask, masks, layers)


def to_torch(value: Any, dtype: str | None = None) -> Any:
    """A torch tensor of the same memory where torch can use its dtype, else of a wider copy: uint16 as int32, uint32 as int64.

    value: an array; or what holds some, a `Batch`, a `Packed` or a `Sample`: the same with tensors in their place.
    dtype: another integer dtype that holds every value, such as "int64" for indexing; of a value that holds arrays it is that of
        the expert ids. An array that is read-only or not C-contiguous is copied.

    Raises InvalidInputError for a dtype that is too narrow, or a value that has no arrays.
    """
    return _converted(value, dtype, importlib.import_module("torch").from_numpy)


def to_paddle(value: Any, dtype: str | None = None) -> Any:
    """A paddle tensor in host memory, as `to_torch`. (`paddle.to_tensor` copies, and takes numpy's uint16 for bfloat16.)"""
    return _converted(value, dtype, importlib.import_module("paddle").from_dlpack)


def _converted(value: Any, dtype: str | None, tensor: Callable[[npt.NDArray[Any]], Any]) -> Any:
    if isinstance(value, np.ndarray):
        return tensor(_usable(value, dtype))
    named = isinstance(value, tuple) and hasattr(value, "_asdict")
    if not named and not isinstance(value, Mapping):
        raise InvalidInputError(
            f"value is a {type(value).__name__}: expected a numpy array, or a Batch, Packed or Sample of arrays"
        )
    fields = value._asdict() if named else value
    made = {
        name: _converted(each, dtype if name in _OF_EXPERTS or not isinstance(name, str) else None, tensor)
        if isinstance(each, (np.ndarray, Mapping))
        else each
        for name, each in fields.items()
    }
    return type(value)(**made) if named else made


def _usable(array: npt.NDArray[Any], dtype: str | None) -> npt.NDArray[Any]:
    wanted = np.dtype(_INSTEAD.get(array.dtype.name, array.dtype) if dtype is None else dtype)
    if wanted.name in _INSTEAD:
        raise InvalidInputError(f"dtype={dtype!r}: tensors of it are of little use; take {_INSTEAD[wanted.name]}")
    if not np.can_cast(array.dtype, wanted, "safe"):
        raise InvalidInputError(f"dtype={dtype!r} does not hold every {array.dtype}: pass a wider one")
    usable = np.ascontiguousarray(array, wanted)
    return usable if usable.flags.writeable else usable.copy()


def _layers_of(records: Sequence[RoutingRecord | None], spec: RoutingSpec) -> tuple[int, ...]:
    layers: tuple[int, ...] | None = None
    for number, record in enumerate(records):
        if record is None:
            continue
        if layers is not None and record.layers != layers:
            raise InvalidRoutingError(
                f"sample {number} ({record.request_id!r}) has layers {shown_layers(record.layers)}, those before it "
                f"{shown_layers(layers)}: read them alike"
            )
        layers = record.layers
    return spec.moe_layers if layers is None else layers


def _counts(records: Sequence[RoutingRecord | None], num_tokens: Sequence[int] | None) -> list[int]:
    """Tokens of each sample in the batch."""
    if num_tokens is not None and len(num_tokens) != len(records):
        raise InvalidInputError(f"num_tokens has {len(num_tokens)} numbers for {len(records)} records")
    counts = []
    for number, record in enumerate(records):
        read = 0 if record is None else record.routed_experts.shape[1]
        if num_tokens is None and record is None:
            raise InvalidInputError(f"sample {number} has no record: say num_tokens=, how many rows it needs")
        count = read if num_tokens is None else check_whole("num_tokens", num_tokens[number], 0)
        if count < read:
            raise InvalidRoutingError(
                f"sample {number} ({_name(record)}) has {count} tokens, and {read} were read of its record: see `align`"
            )
        counts.append(count)
    return counts


def _name(record: RoutingRecord | None) -> str:
    return "no record" if record is None else repr(record.request_id)
