"""What the entries of a slab mean, checked: puts and drops become rows, deletes become tombstones.

A slab is another process's, perhaps a dead one's. Its checksums tell that it is what was written, not that a writer of
this dataset wrote it: nothing of a slab is published that `put` or a delete would not have taken.
"""

from __future__ import annotations

import reprlib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import CorruptSpoolError, FormatError, InvalidInputError
from rr_dataset.layout import DatasetFormat
from rr_dataset.record import MAX_POSITION, STATUSES, Range, RoutingSpec, Row, RowData, Span
from rr_dataset.slab import DELETE, DROP, PUT, Entry, SlabContents, array_offsets
from rr_dataset.tombstones import Tombstone, TombstoneSet

DELETE_KINDS = ("prefix", "all")  # what a writer can ask for
_DROPPED = STATUSES[-1]


def read_entries(
    slab: SlabContents, path: Path, dataset: DatasetFormat, made_ms: int
) -> tuple[list[RowData], list[Tombstone]]:
    """The rows and the tombstones of a slab, all of them checked. The arrays are views of the slab.

    made_ms: time of making of the tombstones. Raises CorruptSpoolError, which names the entry.
    """
    rows: list[RowData] = []
    tombstones: list[Tombstone] = []
    for number, entry in enumerate(slab.entries):
        try:
            if entry.kind == DELETE:
                tombstones.append(_tombstone(entry, dataset, made_ms))
            else:
                rows.append(_row_data(entry, slab, dataset))
        except (CorruptSpoolError, FormatError, InvalidInputError, UnicodeEncodeError) as error:
            raise CorruptSpoolError(
                f"{path}: entry {number} (request id {_short(entry.request_id)}) is none that a writer of this dataset makes: "
                f"{error}; nothing of this slab is published, look where it comes from"
            ) from error
    return rows, tombstones


def _tombstone(entry: Entry, dataset: DatasetFormat, made_ms: int) -> Tombstone:
    meta = entry.meta
    kind, text, run = meta.get("kind"), meta.get("text"), _text(meta, "run")
    if kind not in DELETE_KINDS:
        raise _wrong("kind", kind, f"one of {', '.join(DELETE_KINDS)}")
    if kind == "all" and text != "":
        raise _wrong("text", text, "an empty one")
    if kind == "prefix" and type(text) not in (str, dict):
        raise _wrong("text", text, "a text or an object")
    if run == "":
        raise _wrong("run", run, "the id of a run")
    tombstone = Tombstone(uuid.uuid4().hex, kind, text or "", run, entry.t_submit, made_ms)
    TombstoneSet(dataset.keys, [tombstone], dataset.last_turn)  # what every reader will do with it
    return tombstone


def _row_data(entry: Entry, slab: SlabContents, dataset: DatasetFormat) -> RowData:
    meta, spec, tokens, put = entry.meta, dataset.spec, entry.num_tokens, entry.kind == PUT
    if entry.kind not in (PUT, DROP):
        raise _wrong("kind", entry.kind, "1 (put), 2 (drop) or 3 (delete)")
    key = dataset.keys.parse(entry.request_id)
    status = meta.get("status")
    if status not in STATUSES or (status == _DROPPED) == put:
        raise _wrong("status", status, f"one of {', '.join(STATUSES[:-1] if put else STATUSES[-1:])}")
    start = _plain(meta, "start", 0)
    if not 0 <= start <= start + tokens <= MAX_POSITION:
        raise CorruptSpoolError(f"it starts at {start} and has {tokens} tokens: positions are 0 to {MAX_POSITION}")
    whole = start, start + tokens
    row = Row(
        record_id=f"{entry.t_submit:016x}-{slab.identity['writer']}",
        request_id=entry.request_id,
        components=key.components,
        choice=key.choice,
        t_submit=entry.t_submit,
        token_start=start,
        num_tokens=tokens,
        part=_plain(meta, "part", False),  # noqa: FBT003 -- the default
        status=status,
        run_id=slab.identity["run_id"],
        layers=_layers(meta, spec) if put else (),
        reason=_text(meta, "reason"),
        missing=_missing(meta, whole),
        weight_version=_text(meta, "weight"),
        weight_spans=_spans(meta, whole),
        producer=slab.identity["producer"],
        tags=_tags(meta),
        has_token_ids=_plain(meta, "token_ids", False) and put,  # noqa: FBT003
        has_logprobs=_plain(meta, "logprobs", False) and put,  # noqa: FBT003
    )
    return _with_arrays(row, entry, spec) if put else RowData(row)


def _with_arrays(row: Row, entry: Entry, spec: RoutingSpec) -> RowData:
    layers, tokens, dtype = len(row.layers), row.num_tokens, np.dtype(spec.dtype)
    size = layers * tokens * spec.top_k * dtype.itemsize
    ids_at, logprobs_at, end = array_offsets(size, tokens, token_ids=row.has_token_ids, logprobs=row.has_logprobs)
    if end > len(entry.payload):
        raise CorruptSpoolError(f"record {row.request_id!r} needs {end} bytes, its entry has {len(entry.payload)}")
    ids = entry.payload[:size].view(dtype)
    _check_experts(ids, spec)
    shape = (tokens, layers) if entry.tokens_first else (layers, tokens)
    routed_experts = ids.reshape(*shape, spec.top_k)
    return RowData(
        row,
        routed_experts.transpose(1, 0, 2) if entry.tokens_first else routed_experts,
        entry.payload[ids_at:logprobs_at].view(np.int32) if row.has_token_ids else None,
        entry.payload[logprobs_at:end].view(np.float32) if row.has_logprobs else None,
    )


def _check_experts(ids: npt.NDArray[Any], spec: RoutingSpec) -> None:
    if ids.size and np.iinfo(ids.dtype).max >= spec.num_experts and (largest := int(ids.max())) >= spec.num_experts:
        raise CorruptSpoolError(f"it holds expert id {largest}: expected 0 to {spec.num_experts - 1}")


def _layers(meta: Any, spec: RoutingSpec) -> tuple[int, ...]:
    if "layers" not in meta:
        return spec.moe_layers
    return spec.check_layers([_integer("layers", layer) for layer in _plain(meta, "layers", [])])


def _missing(meta: Any, whole: Range) -> tuple[Range, ...]:
    """Rising, and apart: what touches is joined before it is written."""
    found: list[Range] = []
    last = whole[0] - 1
    for start, stop in _tuples(meta, "missing", 2):
        if not last < _integer("missing", start) < _integer("missing", stop) <= whole[1]:
            raise _wrong("missing", meta["missing"], f"rising ranges within {whole}")
        found.append((start, stop))
        last = stop
    return tuple(found)


def _spans(meta: Any, whole: Range) -> tuple[Span, ...]:
    found: list[Span] = []
    for start, stop, version in _tuples(meta, "spans", 3):
        if not whole[0] <= _integer("spans", start) <= _integer("spans", stop) <= whole[1]:
            raise _wrong("spans", meta["spans"], f"ranges within {whole}")
        found.append((start, stop, _checked_text("spans", version)))
    return tuple(found)


def _tags(meta: Any) -> dict[str, str]:
    tags: dict[str, str] = _plain(meta, "tags", {})
    return {_checked_text("tags", key): _checked_text("tags", value) for key, value in tags.items()}


def _tuples(meta: Any, name: str, length: int) -> Sequence[Sequence[Any]]:
    values: list[Any] = _plain(meta, name, [])
    for value in values:
        if type(value) is not list or len(value) != length:
            raise _wrong(name, value, f"a list of {length}")
    return values


def _plain(meta: Any, name: str, default: Any) -> Any:
    """A value of the very type of its default."""
    value = meta.get(name, default)
    if type(value) is not type(default):
        raise _wrong(name, value, f"a JSON {type(default).__name__}")
    return value


def _integer(name: str, value: Any) -> int:
    if type(value) is not int:
        raise _wrong(name, value, "an integer")
    return value


def _text(meta: Any, name: str) -> str | None:
    value = meta.get(name)
    return None if value is None else _checked_text(name, value)


def _checked_text(name: str, value: Any) -> str:
    if type(value) is not str:
        raise _wrong(name, value, "a text")
    value.encode()  # no lone surrogates
    return value


def _wrong(name: str, value: Any, expected: str) -> CorruptSpoolError:
    return CorruptSpoolError(f"{name}={_short(value)}, expected {expected}")


def _short(value: Any) -> str:
    return reprlib.repr(value)
