"""The folders of FastDeploy's `RoutingStoreLocal` into a dataset.

    <store>/<rollout id>/layer_<i>.pdtensor           [tokens, top_k], one file per MoE layer, i from 0
    <store>/<rollout id>/<rollout id>.pdtensor        [MoE layers, tokens, top_k], with `use_fused_put`

The token axis is padded to the model's longest with rows of -1, in unsigned types the greatest number. An id with `/` has
made folders within folders. What is not certain is refused, record by record, and never guessed.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.clock import HybridClock
from rr_dataset.dataset import open_dataset
from rr_dataset.errors import FormatError, InvalidInputError, InvalidRequestIdError
from rr_dataset.interchange.pdtensor import read_pdtensor
from rr_dataset.layout import STAGING_DIR, DatasetFormat
from rr_dataset.options import WriterOptions
from rr_dataset.publish import PUBLISH_THREADS, publish_slab
from rr_dataset.record import Range, RoutingSpec, Row, RowData
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import TombstoneCache
from rr_dataset.verify import Progress

SLAB_BYTES = 64 << 20  # of records that are in memory together
SUFFIX = ".pdtensor"

_LAYER_FILE = re.compile(r"layer_(0|[1-9][0-9]*)\.pdtensor")
_BFLOAT16_MINUS_ONE = 0xBF80  # what paddle makes of -1 in its 16-bit type


@dataclass(frozen=True)
class Refused:
    """A record that was not imported."""

    path: str  # its folder, or a file that belongs to none
    reason: str


@dataclass(frozen=True)
class ImportReport:
    """What became of a folder."""

    imported: int
    tokens: int
    existing: int  # ids that the dataset had a record of: left as it is
    refused: tuple[Refused, ...]


class _RefusalError(Exception):
    """Why one record is not imported."""


def import_fastdeploy(
    uri: str | os.PathLike[str],
    store: str | os.PathLike[str],
    weight_version: str | None = None,
    run_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Put every record of a `RoutingStoreLocal` folder into the dataset at `uri`, which exists. Durable when it returns.

    store: its `local_store_dir`. Layer i of it is the i-th of the spec's `moe_layers`.
    weight_version, run_id: of all records; `run_id` None: as for a writer.
    progress: called with the bytes of the files that are read, and of all.

    Each record's real length is found again: trailing rows of padding are cut off, such rows in between are `missing`. A
    record is refused, with the reason, where that is not certain: layers of different lengths or with different gaps, layers
    that are absent, ids that no expert has, or a single id per token that may be padding or an expert. An id that has a record
    is left alone, so an import that was interrupted can be run again. Files are not trusted: nothing in them runs.

    Raises DatasetNotFoundError, InvalidInputError for a folder that is not there, StorageError.
    """
    root = Path(store)
    if not root.is_dir():
        raise InvalidInputError(f"{os.fspath(store)!r} is no folder: expected the local_store_dir of FastDeploy")
    options = WriterOptions() if run_id is None else WriterOptions(run_id=run_id)
    dataset = open_dataset(uri, storage_options=storage_options)
    fmt, storage, cache = (
        dataset.format,
        open_storage(uri, storage_options),
        TombstoneCache(dataset.keys, dataset.format.last_turn),
    )
    writer, clock, refused = secrets.token_hex(8), HybridClock(), list[Refused]()
    imported = tokens = existing = 0
    with ThreadPoolExecutor(PUBLISH_THREADS, "rr-import") as pool:
        for seq, found in enumerate(_slabs(_recovered(root, fmt, refused, progress))):
            heads = dataset.heads([each.request_id for each in found], on_missing="none")
            new = [each for each, head in zip(found, heads, strict=True) if head is None]
            rows = [_row(each, fmt, clock.tick(), writer, options.run_id, weight_version) for each in new]
            publish_slab(storage, fmt, writer=writer, seq=seq, rows=rows, cache=cache, pool=pool)
            imported += len(new)
            tokens += sum(data.row.num_tokens for data in rows)
            existing += len(found) - len(new)
    storage.remove_empty_dirs(f"{STAGING_DIR}/{writer}")
    return ImportReport(imported, tokens, existing, tuple(refused))


@dataclass(frozen=True, eq=False)
class _Recovered:
    """A record of its real length. experts: [layers, tokens, top_k] of the spec's dtype."""

    request_id: str
    experts: npt.NDArray[Any]
    missing: tuple[Range, ...]


def _slabs(records: Iterable[_Recovered]) -> Iterator[list[_Recovered]]:
    """As many as may be in memory together."""
    group: list[_Recovered] = []
    size = 0
    for record in records:
        if group and size + record.experts.nbytes > SLAB_BYTES:
            yield group
            group, size = [], 0
        group.append(record)
        size += record.experts.nbytes
    if group:
        yield group


def _row(
    record: _Recovered, fmt: DatasetFormat, stamp: int, writer: str, run_id: str, weight_version: str | None
) -> RowData:
    key = fmt.keys.parse(record.request_id)
    row = Row(
        record_id=f"{stamp:016x}-{writer}",
        request_id=record.request_id,
        components=key.components,
        choice=key.choice,
        t_submit=stamp,
        token_start=0,
        num_tokens=record.experts.shape[1],
        part=False,
        status="complete",
        run_id=run_id,
        layers=fmt.spec.moe_layers,
        missing=record.missing,
        weight_version=weight_version,
    )
    return RowData(row, record.experts)


def _recovered(
    root: Path, fmt: DatasetFormat, refused: list[Refused], progress: Progress | None
) -> Iterator[_Recovered]:
    """The records of all folders, in the order of their paths; `refused` gets the others."""
    total = 0 if progress is None else sum(path.stat().st_size for path in root.rglob(f"*{SUFFIX}"))
    done = 0
    for place, folders, names in os.walk(root):
        folders.sort()
        folder = Path(place)
        where = folder.relative_to(root).as_posix()
        known = [name for name in names if name.endswith(SUFFIX)]
        refused.extend(Refused(f"{where}/{name}", f"no {SUFFIX} file") for name in sorted(set(names).difference(known)))
        if known:
            try:
                yield _record(folder, where, sorted(known), fmt)
            except (_RefusalError, FormatError, InvalidRequestIdError, OSError) as error:
                refused.append(Refused(where, str(error)))
            if progress is not None:
                done += sum((folder / name).stat().st_size for name in known)
                progress(min(done, total), total)


def _record(folder: Path, where: str, names: Sequence[str], fmt: DatasetFormat) -> _Recovered:
    layers = {int(match[1]): name for name in names if (match := _LAYER_FILE.fullmatch(name))}
    fused = [name for name in names if name not in layers.values()]
    if layers and not fused:
        absent = sorted(set(range(max(fmt.spec.num_layers, *(number + 1 for number in layers)))) - set(layers))
        if absent:
            raise _RefusalError(f"layer_{absent[0]}{SUFFIX} is absent, one of {len(absent)}")
        request_id = where
        arrays = [_read(folder / layers[number], 2) for number in sorted(layers)]
        if len({(array.shape, array.dtype) for array in arrays}) > 1:
            raise _RefusalError("its layers have different shapes or dtypes")
        array = np.stack(arrays)
    elif len(fused) == 1 and not layers:
        request_id = _id_of_fused(where, fused[0])
        array = _read(folder / fused[0], 3)
    else:
        raise _RefusalError(f"it has more than one record: {', '.join(names[:4])}")
    fmt.keys.parse(request_id)
    return _Recovered(request_id, *_unpadded(array, fmt.spec))


def _id_of_fused(where: str, name: str) -> str:
    """Of <id>/<id>.pdtensor, also where the id has `/` in it."""
    request_id = where[: (len(f"{where}/{name}") - len(SUFFIX) - 1) // 2]
    if f"{request_id}/{request_id}{SUFFIX}" != f"{where}/{name}":
        raise _RefusalError(f"{name} is neither layer_<i>{SUFFIX} nor named as its folder")
    return request_id


def _read(path: Path, dimensions: int) -> npt.NDArray[Any]:
    try:
        array = read_pdtensor(path.read_bytes())
    except FormatError as error:
        raise FormatError(f"{path.name}: {error}") from error
    if array.ndim != dimensions:
        raise _RefusalError(f"{path.name} has the shape {array.shape}, expected {dimensions} dimensions")
    return array


def _unpadded(array: npt.NDArray[Any], spec: RoutingSpec) -> tuple[npt.NDArray[Any], tuple[Range, ...]]:
    """[layers, padded tokens, top_k] -> the same of its real length and of the spec's dtype, and the gaps in it."""
    if array.shape[2] != spec.top_k:
        raise _RefusalError(f"it has {array.shape[2]} experts a token, the dataset has {spec.top_k}")
    empty = _empty(array, spec)
    more = array.shape[0] - spec.num_layers
    # A model whose last layers are no MoE layers: FastDeploy counts from the first one to the end.
    if more < 0 or not empty[spec.num_layers :].all():
        raise _RefusalError(f"it has {array.shape[0]} layers, the dataset has {spec.num_layers}")
    array, empty = array[: spec.num_layers], empty[: spec.num_layers]
    there = ~empty
    lengths = np.where(there.any(axis=1), there.shape[1] - there[:, ::-1].argmax(axis=1), 0)
    tokens = int(lengths.max(initial=0))
    if tokens == 0:
        raise _RefusalError("it holds no token")
    if lengths.min() < tokens:
        at = int(lengths.argmin())
        raise _RefusalError(f"its length is not certain: {lengths[at]} tokens in layer {at}, {tokens} in others")
    array, empty = array[:, :tokens], empty[:, :tokens]
    if (empty != empty[0]).any():
        raise _RefusalError("its layers have different gaps")
    real = array[:, ~empty[0]]
    if real.min() < 0 or real.max() >= spec.num_experts:
        raise _RefusalError(f"it has ids from {real.min()} to {real.max()}, of {spec.num_experts} experts")
    experts = np.zeros(array.shape, spec.dtype)
    experts[:, ~empty[0]] = real
    edges = np.flatnonzero(np.diff(np.concatenate([[False], empty[0], [False]]).astype(np.int8))).tolist()
    return experts, tuple(zip(edges[::2], edges[1::2], strict=True))


def _empty(array: npt.NDArray[Any], spec: RoutingSpec) -> npt.NDArray[np.bool_]:
    """bool [layers, tokens]: where every id is the marker. No token has one expert twice, so several alike are no routing."""
    markers = [int(np.array(-1).astype(array.dtype))]
    if array.dtype.itemsize == 2:
        markers.append(int(np.array(_BFLOAT16_MINUS_ONE).astype(array.dtype)))
    found: npt.NDArray[np.bool_] = np.zeros(array.shape[:2], np.bool_)
    for marker in markers:
        alike = (array == marker).all(axis=2)
        if spec.top_k == 1 and 0 <= marker < spec.num_experts and alike.any():
            raise _RefusalError(f"its length is not certain: {marker} may be an expert or padding")
        found |= alike
    return found
