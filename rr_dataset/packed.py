"""Records of many ids, or rows of many puts, read side by side into one buffer per layer."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rr_dataset.buffers import overlapping, overlaps_itself
from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.lookup import Found, FoundByKey, Lookup
from rr_dataset.options import check_whole
from rr_dataset.padding import RowKind, fill_rows, padded_dtype
from rr_dataset.payload import MAX_GAP_BYTES, fill, tiles_of
from rr_dataset.record import Range, RoutingSpec
from rr_dataset.selection import Share, TokenAxis, Tokens, held_ranges, token_ranges
from rr_dataset.shard import TileRead
from rr_dataset.snapshot import Located, Shard, Snapshot

MAX_ROWS = (1 << 31) - 1  # cu_seqlens is int32, as attention kernels take it


class Packed(NamedTuple):
    """Samples one after the other, as `RoutingDataset.get_packed` reads them.

    experts: by layer id [rows, top_k], C-contiguous unless given otherwise.
    cu_seqlens: int32 [samples + 1]; sample i has the rows `cu_seqlens[i]` to `cu_seqlens[i + 1]`, its padding last.
    mask: uint8 [rows] of `RowKind`; MISSING where any of these layers has no ids of the token.
    masks: the same by layer. Where no layer lacks what another has, they are `mask` itself.
    """

    experts: dict[int, npt.NDArray[Any]]
    cu_seqlens: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    masks: dict[int, npt.NDArray[np.uint8]]


class Spans(NamedTuple):
    """Spans of puts one after the other, as `RoutingDataset.get_spans` reads them.

    routed_experts: [layers, tokens, top_k] of the spec's dtype; zero bytes where nothing is present.
    present: bool [layers, tokens].
    """

    routed_experts: npt.NDArray[Any]
    present: npt.NDArray[np.bool_]


def read_packed(
    lookup: Lookup,
    ids: Sequence[str],
    layers: Sequence[int] | None,
    selections: Sequence[Tokens | Share],
    *,
    out: Mapping[int, Any] | None,
    padding: str,
    pad_to_multiple: int,
    on_missing: str,
) -> Packed:
    """See `RoutingDataset.get_packed`."""
    spec = lookup.format.spec
    chosen = spec.check_layers(layers, at_least=0)
    dtype = padded_dtype(spec.dtype, spec.num_experts, padding)
    check_whole("pad_to_multiple", pad_to_multiple, 1)

    def use(found: FoundByKey, snapshot: Snapshot) -> Packed:
        samples = []
        at = 0
        for key, selection in zip(ids, selections, strict=True):
            sample = _sample(found.get(key), key, selection, at, pad_to_multiple)
            samples.append(sample)
            at += sample.num_rows
        _check_size(samples, at, len(chosen) * spec.top_k * dtype.itemsize)
        buffers = _made(spec, chosen, at, dtype) if out is None else _given(spec, chosen, at, dtype, out)
        mask, masks = _read(samples, buffers, at, snapshot, lookup)
        for layer in chosen:
            if layer == chosen[0] or masks[layer] is not mask:
                unreal = masks[layer] != RowKind.REAL
            fill_rows(buffers.experts[layer], unreal, spec.num_experts, padding)
        cu_seqlens = np.array([0, *accumulate(sample.num_rows for sample in samples)], np.int32)
        return Packed(buffers.experts, cu_seqlens, mask, masks)

    return lookup.use_ids(ids, on_missing, use)


def read_spans(lookup: Lookup, spans: Sequence[tuple[str, int, int]], layers: Sequence[int] | None) -> Spans:
    """See `RoutingDataset.get_spans`."""
    spec = lookup.format.spec
    chosen = spec.check_layers(layers, at_least=0)
    try:
        asked = [(str(ref), operator.index(start), operator.index(stop)) for ref, start, stop in spans]
    except (TypeError, ValueError):
        raise InvalidInputError(f"spans={spans!r}: expected a list of (ref, start, stop)") from None

    def use(found: FoundByKey, snapshot: Snapshot) -> Spans:
        samples = []
        at = 0
        for ref, start, stop in asked:
            (located,) = found[ref].rows.values()
            first, last = located.row.token_start, located.row.token_stop
            if not first <= start <= stop <= last:
                raise InvalidRoutingError(
                    f"tokens {start} to {stop} are not in the put {ref!r}, which has {first} to {last}"
                )
            samples.append(_Sample(found[ref], ((start, stop),) if start < stop else (), stop - start, at))
            at += stop - start
        block = np.empty((len(chosen), at, spec.top_k), spec.dtype)
        _, masks = _read(samples, _Buffers(spec, dict(zip(chosen, block, strict=True)), block), at, snapshot, lookup)
        present = np.array([masks[layer] == RowKind.REAL for layer in chosen], np.bool_).reshape(len(chosen), at)
        block[~present] = 0
        return Spans(block, present)

    return lookup.use_refs([ref for ref, _, _ in asked], use)


class _Sample(NamedTuple):
    """One sample among the rows: its tokens begin at row `at`, its padding follows them."""

    found: Found | None
    ranges: tuple[Range, ...]
    num_rows: int
    at: int


def _sample(found: Found | None, request_id: str, selection: Tokens | Share, at: int, multiple: int) -> _Sample:
    if isinstance(selection, Share):
        ranges, rows = selection.ranges, selection.num_rows
    else:
        ranges = () if found is None else token_ranges(selection, found.head.num_tokens, request_id)
        rows = sum(stop - start for start, stop in ranges)
    return _Sample(found, tuple(span for span in ranges if span[0] < span[1]), -(-rows // multiple) * multiple, at)


class _Buffers:
    """Where the rows of each layer go, and where they are read: there, unless items have another size or lie apart.

    raw: by layer [rows, top_k] of the spec's dtype, to be read into. block: the same [layers, rows, top_k], if it is one array.
    """

    def __init__(self, spec: RoutingSpec, experts: dict[int, npt.NDArray[Any]], block: npt.NDArray[Any] | None) -> None:
        """block: what `experts` are views of, if they are."""
        self.experts = experts
        self.layers = tuple(experts)
        stored = np.dtype(spec.dtype)
        alike = (array.itemsize == stored.itemsize and array.dtype.isnative for array in experts.values())
        if all(alike) and all(array.flags.c_contiguous for array in experts.values()):
            # Every id fits both dtypes, and then its bytes are the same in both.
            self.block = None if block is None else block.view(stored)
            self.raw = [array.view(stored) for array in experts.values()]
        else:
            self.block = np.empty((len(experts), *next(iter(experts.values())).shape), stored)
            self.raw = list(self.block)

    def settle(self) -> None:
        """Copy what was read to where it goes, once everything was read."""
        for array, raw in zip(self.experts.values(), self.raw, strict=True):
            if not np.may_share_memory(array, raw):
                np.copyto(array, raw, casting="unsafe")  # checked: it holds every id


def _made(spec: RoutingSpec, layers: tuple[int, ...], rows: int, dtype: np.dtype[Any]) -> _Buffers:
    block = np.empty((len(layers), rows, spec.top_k), dtype)
    return _Buffers(spec, dict(zip(layers, block, strict=True)), block)


def _given(
    spec: RoutingSpec, layers: tuple[int, ...], rows: int, dtype: np.dtype[Any], out: Mapping[int, Any]
) -> _Buffers:
    lacking = [layer for layer in layers if layer not in out]
    if lacking:
        raise InvalidRoutingError(f"out has no buffer for layers {lacking}: expected one for each of {list(layers)}")
    buffers = {layer: _rows_of(out[layer], layer, rows, spec, dtype) for layer in layers}
    shared = overlapping(buffers)
    if shared is not None:
        raise InvalidRoutingError(
            f"out[{shared[0]}] and out[{shared[1]}] share memory: each layer needs a buffer of its own, or the ids of one would "
            "stand for the other"
        )
    return _Buffers(spec, buffers, None)


def _rows_of(given: Any, layer: int, rows: int, spec: RoutingSpec, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The first rows of a buffer as a numpy view. Raises InvalidRoutingError for one that does not hold them."""
    try:
        array = given if isinstance(given, np.ndarray) else np.from_dlpack(given)
    except (TypeError, AttributeError, BufferError, RuntimeError) as error:
        raise InvalidRoutingError(
            f"out[{layer}] is a {type(given).__name__}: expected a numpy array or a tensor in host memory ({error})"
        ) from error
    shape = f"[{rows} or more, {spec.top_k}]"
    if array.ndim != 2 or array.shape[1] != spec.top_k or len(array) < rows:
        raise InvalidRoutingError(f"out[{layer}] is {array.shape}: expected {shape}")
    kinds = "i" if dtype.kind == "i" else "iu"
    if array.dtype.kind not in kinds or np.iinfo(array.dtype).max < spec.num_experts - 1:
        raise InvalidRoutingError(f"out[{layer}] is {array.dtype}: expected {dtype}, or another that holds its values")
    if not array.flags.writeable:
        raise InvalidRoutingError(f"out[{layer}] is read-only: pass a buffer that can be written")
    taken = array[:rows]
    if overlaps_itself(taken):
        raise InvalidRoutingError(
            f"out[{layer}] has strides {array.strides}: rows or ids that share memory hold one value only"
        )
    return taken


class _Packing:
    """What fills the buffers, and from which shards."""

    def __init__(self, samples: Sequence[_Sample], buffers: _Buffers) -> None:
        self._buffers = buffers
        self.pieces: list[tuple[Located, int, int, int, int, int]] = [
            (located, first, end, sample.at + at, start, stop)
            for sample in samples
            if sample.found is not None
            for located, first, end, at, start, stop in tiles_of(
                sample.found.head, sample.found.rows, buffers.layers, TokenAxis(sample.ranges)
            )
        ]

    def reads(self) -> Iterator[tuple[Shard, TileRead]]:
        """One read of each run of tokens and layers that a row has."""
        layers, block, raw = self._buffers.layers, self._buffers.block, self._buffers.raw
        for located, first, end, at, start, stop in self.pieces:
            rows = slice(at, at + stop - start)
            out = tuple(array[rows] for array in raw[first:end]) if block is None else block[first:end, rows]
            yield located.shard, TileRead(located.number, layers[first:end], start, stop, out)


def _read(
    samples: Sequence[_Sample], buffers: _Buffers, rows: int, snapshot: Snapshot, lookup: Lookup
) -> tuple[npt.NDArray[np.uint8], dict[int, npt.NDArray[np.uint8]]]:
    """Fill the buffers with what there is; the masks of all layers together and of each."""
    packing = _Packing(samples, buffers)
    fill([packing], snapshot, lookup.reader)
    buffers.settle()
    layers = buffers.layers
    mask = np.full(rows, RowKind.PADDING, np.uint8)
    for sample in samples:
        tokens = sum(stop - start for start, stop in sample.ranges)
        mask[sample.at : sample.at + tokens] = RowKind.MISSING if layers else RowKind.REAL
    alike = all((first, end) == (0, len(layers)) for _, first, end, *_ in packing.pieces)
    each = mask[np.newaxis] if alike else np.repeat(mask[np.newaxis], len(layers), axis=0)
    for _, first, end, at, start, stop in packing.pieces:
        each[0 if alike else slice(first, end), at : at + stop - start] = RowKind.REAL
    if not alike:
        mask = each.min(axis=0)
    return mask, {layer: mask if alike else each[number] for number, layer in enumerate(layers)}


def _check_size(samples: Sequence[_Sample], rows: int, row_bytes: int) -> None:
    """Raises InvalidRoutingError for more rows than can be addressed, or for a buffer that would hold little but gaps."""
    if rows > MAX_ROWS:
        raise InvalidRoutingError(f"{len(samples)} samples have {rows} rows together: read at most {MAX_ROWS} at once")
    if rows * row_bytes <= MAX_GAP_BYTES:
        return
    held = 0
    for sample in samples:
        axis = TokenAxis(sample.ranges)
        if sample.found is not None:
            spans = held_ranges(sample.found.head)
            held += sum(b - a for start, stop in spans for _, a, b in axis.overlaps(start, stop))
    if (rows - held) * row_bytes > MAX_GAP_BYTES:
        raise InvalidRoutingError(
            f"{len(samples)} samples have {rows} rows together, {rows * row_bytes} bytes, and ids for {held} of them only: ask "
            "for some with tokens= or layers="
        )
