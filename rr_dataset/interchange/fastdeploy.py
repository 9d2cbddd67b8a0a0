"""The folders of FastDeploy's `RoutingStoreLocal` into a dataset.

    <store>/<rollout id>/layer_<i>.pdtensor           [tokens, top_k], one file per MoE layer, i from 0
    <store>/<rollout id>/<rollout id>.pdtensor        [MoE layers, tokens, top_k], with `use_fused_put`

The token axis is padded to the model's longest with rows of -1, in unsigned types the greatest number. An id with `/` has
made folders within folders. What is not certain is refused, record by record, and never guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.contracts import unpadded
from rr_dataset.dataset import open_dataset
from rr_dataset.errors import FormatError, InvalidInputError, InvalidRequestIdError, InvalidRoutingError
from rr_dataset.interchange.imported import Found, ImportReport, Refused, import_records
from rr_dataset.interchange.pdtensor import read_pdtensor
from rr_dataset.layout import DatasetFormat
from rr_dataset.verify import Progress

SUFFIX = ".pdtensor"

_LAYER_FILE = re.compile(r"layer_(0|[1-9][0-9]*)\.pdtensor")


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
    fmt = open_dataset(uri, storage_options=storage_options).format
    refused: list[Refused] = []
    records = _recovered(root, fmt, weight_version, refused, progress)
    return import_records(uri, fmt, records, refused, run_id=run_id, storage_options=storage_options)


def _recovered(
    root: Path, fmt: DatasetFormat, weight_version: str | None, refused: list[Refused], progress: Progress | None
) -> Iterator[Found]:
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
                yield _record(folder, where, sorted(known), fmt, weight_version)
            except (InvalidRoutingError, FormatError, InvalidRequestIdError, OSError) as error:
                refused.append(Refused(where, str(error)))
            if progress is not None:
                done += sum((folder / name).stat().st_size for name in known)
                progress(min(done, total), total)


def _record(folder: Path, where: str, names: Sequence[str], fmt: DatasetFormat, weight_version: str | None) -> Found:
    layers = {int(match[1]): name for name in names if (match := _LAYER_FILE.fullmatch(name))}
    fused = [name for name in names if name not in layers.values()]
    if layers and not fused:
        absent = sorted(set(range(max(fmt.spec.num_layers, *(number + 1 for number in layers)))) - set(layers))
        if absent:
            raise InvalidRoutingError(f"layer_{absent[0]}{SUFFIX} is absent, one of {len(absent)}")
        request_id = where
        arrays = [_read(folder / layers[number], 2) for number in sorted(layers)]
        if len({(array.shape, array.dtype) for array in arrays}) > 1:
            raise InvalidRoutingError("its layers have different shapes or dtypes")
        array = np.stack(arrays)
    elif len(fused) == 1 and not layers:
        request_id = _id_of_fused(where, fused[0])
        array = _read(folder / fused[0], 3)
    else:
        raise InvalidRoutingError(f"it has more than one record: {', '.join(names[:4])}")
    fmt.keys.parse(request_id)
    return Found(request_id, *unpadded(array, fmt.spec), weight_version=weight_version)


def _id_of_fused(where: str, name: str) -> str:
    """Of <id>/<id>.pdtensor, also where the id has `/` in it."""
    request_id = where[: (len(f"{where}/{name}") - len(SUFFIX) - 1) // 2]
    if f"{request_id}/{request_id}{SUFFIX}" != f"{where}/{name}":
        raise InvalidRoutingError(f"{name} is neither layer_<i>{SUFFIX} nor named as its folder")
    return request_id


def _read(path: Path, dimensions: int) -> npt.NDArray[Any]:
    try:
        array = read_pdtensor(path.read_bytes())
    except FormatError as error:
        raise FormatError(f"{path.name}: {error}") from error
    if array.ndim != dimensions:
        raise InvalidRoutingError(f"{path.name} has the shape {array.shape}, expected {dimensions} dimensions")
    return array
