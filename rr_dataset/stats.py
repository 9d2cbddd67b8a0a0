"""How often each expert was chosen, and the long form that SQL takes: one row per token, layer and slot.

Both speak of records as `get` shows them: live tokens only, none twice, none that is missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rr_dataset.dataset import RoutingDataset, open_dataset
from rr_dataset.errors import CorruptShardError, InvalidInputError
from rr_dataset.layout import partition_path
from rr_dataset.live import merge_ranges, subtract_ranges
from rr_dataset.record import RecordHead, RoutingRecord, RoutingSpec
from rr_dataset.selection import Held, TokenAxis, Tokens, held_ranges
from rr_dataset.verify import Progress

READ_BYTES = 64 << 20  # of records that are in memory together, or one that is larger
LONG_ROWS = 1 << 17  # of a record batch of the long form

_HEADS_AT_ONCE = 512
_PLAIN_KEYS = ("layer", "weight_version", "run_id", "request_id")


def read_records(
    dataset: RoutingDataset,
    prefix: str | Mapping[str, str | int] | None,
    layers: Sequence[int] | None,
    progress: Progress | None = None,
    *,
    gaps: bool = True,
) -> Iterator[RoutingRecord]:
    """All records under a prefix but the dropped ones, partition by partition, sorted within each; a few in memory.

    gaps: with the tokens that no row has, zero, in their place; else only what some layer has, see `token_ranges`.
    progress: called with the bytes of the partitions that are done, and of all.
    """
    records = _read_records(dataset, prefix, layers, None if gaps else Held.TOKENS)
    return records if progress is None else _followed(records, dataset, prefix, progress)


def _followed(
    records: Iterable[RoutingRecord],
    dataset: RoutingDataset,
    prefix: str | Mapping[str, str | int] | None,
    progress: Progress,
) -> Iterator[RoutingRecord]:
    sizes = {part.path: part.bytes for part in dataset.partitions(prefix)}
    done, total = 0, sum(sizes.values())
    for path, group in groupby(records, lambda record: partition_path(dataset.keys.partition(record.components))):
        yield from group
        done += sizes.get(path, 0)
        progress(min(done, total), total)
    progress(total, total)


def _read_records(
    dataset: RoutingDataset, prefix: str | Mapping[str, str | int] | None, layers: Sequence[int] | None, tokens: Tokens
) -> Iterator[RoutingRecord]:
    spec = dataset.spec
    share = len(spec.check_layers(layers)) / spec.num_layers
    ids = dataset.ids(prefix)
    while some := list(islice(ids, _HEADS_AT_ONCE)):
        heads = [head for head in dataset.heads(some, on_missing="none") if head is not None]
        there = [head for head in heads if head.status != "dropped"]
        for group in _groups(there, spec.bytes_per_token * share, tokens):
            for record in dataset.get_many(group, layers=layers, tokens=tokens, on_missing="none"):
                if record is not None:
                    yield record


def _groups(heads: Sequence[RecordHead], bytes_per_token: float, tokens: Tokens) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0.0
    for head in heads:
        whole = tokens is None or not head.missing
        count = head.num_tokens if whole else sum(stop - start for start, stop in held_ranges(head))
        more = count * bytes_per_token
        if group and size + more > READ_BYTES:
            yield group
            group, size = [], 0.0
        group.append(head.request_id)
        size += more
    if group:
        yield group


# Counts


def expert_counts(
    uri: str | os.PathLike[str],
    prefix: str | Mapping[str, str | int] | None = None,
    by: Sequence[str] = ("layer", "weight_version"),
    layers: Sequence[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> pa.Table:
    """How often each expert was chosen, as a table: the columns of `by`, then `expert` (int32) and `count` (int64).

    prefix: only records that it covers by component. layers: only these; None: all.
    by: what to count apart: "layer" (int32), "weight_version" (text, null where none is known), "run_id" (of the newest put),
        "request_id", and components of the key scheme (text); () counts all together.
    progress: called with the bytes of the partitions that are done, and of all.

    There is a row for every expert, also for those with a count of 0. Rows are sorted by the columns of `by` (null last), then
    by expert. In memory are the counts, and at most 64 MiB of records or one that is larger.
    Raises InvalidInputError for an unknown `by`, CorruptShardError for ids that no expert has, and as `RoutingDataset.get_many`.
    """
    dataset = open_dataset(uri, storage_options=storage_options)
    spec, components = dataset.spec, dataset.keys.components
    listed = isinstance(by, (list, tuple))
    unknown = [name for name in by if name not in _PLAIN_KEYS and name not in components] if listed else []
    if not listed or unknown or len(set(by)) < len(by):
        raise InvalidInputError(f"by={by!r}: expected different names among {', '.join((*_PLAIN_KEYS, *components))}")
    counts: dict[tuple[Any, ...], npt.NDArray[np.int64]] = {}
    for record in read_records(dataset, prefix, layers, progress, gaps=False):
        values: dict[str, Any] = dict(zip(components, record.components, strict=True))
        values |= {"run_id": record.run_id, "request_id": record.request_id}
        for layer, version, ids in _pieces(record, apart="weight_version" in by):
            values |= {"layer": layer, "weight_version": version}
            key = tuple(values[name] for name in by)
            found = np.bincount(ids, minlength=spec.num_experts)
            if len(found) > spec.num_experts:
                raise CorruptShardError(
                    f"{record.request_id!r} has the id {len(found) - 1} in layer {layer}, of {spec.num_experts} experts: "
                    "run verify"
                )
            if key in counts:
                counts[key] += found
            else:
                counts[key] = found
    return _table(counts, by, spec)


def _pieces(record: RoutingRecord, *, apart: bool) -> Iterator[tuple[int, str | None, npt.NDArray[Any]]]:
    """(layer, weight version, ids) of all that is there; with `apart` each version by itself."""
    present = record.present()
    axis = TokenAxis(record.token_ranges)
    told: list[tuple[str | None, int, int]] = []  # and where on the axis; the rest has no version
    if apart:
        told = [
            (version, at, at + b - a)
            for start, stop, version in record.weights
            for at, a, b in axis.overlaps(start, stop)
        ]
    places = merge_ranges((first, last) for _, first, last in told)
    untold = [(None, first, last) for first, last in subtract_ranges([(0, len(axis))], places)]
    for version, first, last in (*untold, *told):
        for i, layer in enumerate(record.layers):
            yield layer, version, record.routed_experts[i, first:last][present[i, first:last]].ravel()


def _table(counts: Mapping[tuple[Any, ...], npt.NDArray[np.int64]], by: Sequence[str], spec: RoutingSpec) -> pa.Table:
    ordered = sorted(counts, key=lambda key: [(value is None, value) for value in key])
    columns: dict[str, pa.Array] = {}
    for at, name in enumerate(by):
        kind = pa.int32() if name == "layer" else pa.string()
        values = pa.array([key[at] for key in ordered], kind)
        columns[name] = values.take(pa.array(np.repeat(np.arange(len(ordered)), spec.num_experts)))
    columns["expert"] = pa.array(np.tile(np.arange(spec.num_experts, dtype=np.int32), len(ordered)))
    flat = np.concatenate([counts[key] for key in ordered]) if ordered else np.empty(0, np.int64)
    columns["count"] = pa.array(flat, pa.int64())
    return pa.table(columns)


@dataclass(frozen=True)
class LayerLoad:
    """How evenly one layer uses its experts."""

    layer: int
    tokens: int
    counts: tuple[int, ...]  # of each expert

    @property
    def max_over_mean(self) -> float:
        """The load of the busiest expert over the mean; 1 is even. 0 without tokens."""
        total = sum(self.counts)
        return max(self.counts) * len(self.counts) / total if total else 0.0

    @property
    def busiest(self) -> int:
        """The expert chosen most, of equals the first."""
        return self.counts.index(max(self.counts))

    @property
    def dead(self) -> tuple[int, ...]:
        """Experts that were never chosen."""
        return tuple(expert for expert, count in enumerate(self.counts) if not count)


def layer_loads(
    uri: str | os.PathLike[str],
    prefix: str | Mapping[str, str | int] | None = None,
    layers: Sequence[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> tuple[LayerLoad, ...]:
    """The load of each layer that some record has, rising; see `expert_counts`."""
    spec = open_dataset(uri, storage_options=storage_options).spec
    table = expert_counts(uri, prefix, ("layer",), layers, storage_options, progress)
    counts = table["count"].to_numpy().reshape(-1, spec.num_experts)
    found = table["layer"].to_numpy()[:: spec.num_experts]
    return tuple(
        LayerLoad(int(layer), int(row.sum()) // spec.top_k, tuple(row.tolist()))
        for layer, row in zip(found, counts, strict=True)
    )


# The long form


def to_long(
    uri: str | os.PathLike[str],
    prefix: str | Mapping[str, str | int] | None = None,
    layers: Sequence[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> pa.RecordBatchReader:
    """One row per token, layer and slot: request_id (text), token, layer, slot (int32), expert (the spec's dtype).

    DuckDB queries it by its variable's name, once: a reader is consumed. It reads while it is consumed, at most 64 MiB of
    records or one that is larger at a time. Sorted by layer, token, slot within a record. slot: position among the top-k.
    Raises as `expert_counts`; what goes wrong later comes from the reader, as pyarrow's error of that kind.
    """
    dataset = open_dataset(uri, storage_options=storage_options)
    spec = dataset.spec
    spec.check_layers(layers)
    if prefix is not None:
        dataset.keys.parse_prefix(prefix)
    schema = long_schema(spec)
    records = read_records(dataset, prefix, layers, gaps=False)
    return pa.RecordBatchReader.from_batches(
        schema, (batch for each in records for batch in long_batches(each, schema))
    )


def long_schema(spec: RoutingSpec) -> pa.Schema:
    """Of `to_long`."""
    numbers = [pa.field(name, pa.int32(), nullable=False) for name in ("token", "layer", "slot")]
    expert = pa.field("expert", pa.from_numpy_dtype(np.dtype(spec.dtype)), nullable=False)
    return pa.schema([pa.field("request_id", pa.string(), nullable=False), *numbers, expert])


def long_batches(record: RoutingRecord, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """One record in the long form."""
    layers, tokens, top_k = record.routed_experts.shape
    present = record.present()
    whole = bool(present.all())
    positions = np.concatenate(
        [np.empty(0, np.int32), *(np.arange(*span, dtype=np.int32) for span in record.token_ranges)]
    )
    step = max(1, LONG_ROWS // max(tokens * top_k, 1))
    for first in range(0, layers, step):
        ids = record.routed_experts[first : first + step]
        for start in range(0, tokens, LONG_ROWS):
            part = ids[:, start : start + LONG_ROWS]
            shape = part.shape
            columns: list[npt.NDArray[Any]] = [
                np.broadcast_to(positions[start : start + shape[1]][None, :, None], shape),
                np.broadcast_to(np.array(record.layers[first : first + step], np.int32)[:, None, None], shape),
                np.broadcast_to(np.arange(top_k, dtype=np.int32)[None, None, :], shape),
                part,
            ]
            if whole:
                flat = [np.ascontiguousarray(column).reshape(-1) for column in columns]
            else:
                mask = np.broadcast_to(present[first : first + step, start : start + LONG_ROWS, None], shape)
                flat = [column[mask] for column in columns]
            if len(flat[0]):
                yield pa.record_batch([pa.repeat(record.request_id, len(flat[0])), *flat], schema=schema)
