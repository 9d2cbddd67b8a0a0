"""Records as files for other tools: NumPy, safetensors, Parquet. What is written is records as `get` shows them.

    <out>/data_id=<value>/[gen_id=<value>/]<request id>.npz           also .safetensors: a file for each record
    <out>/data_id=<value>/[gen_id=<value>/]records.parquet            also long.parquet: a file for each partition
    <out>/counts.parquet

The folders are those of the dataset (hive style). Files are written whole or not at all, into a folder that holds none: what
an earlier export left of records that are gone since would be read as if it were of this one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rr_dataset.dataset import RoutingDataset, open_dataset
from rr_dataset.errors import InvalidInputError
from rr_dataset.interchange.folder import MAX_NAME_BYTES, Folder
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import partition_path, quote_value
from rr_dataset.record import RoutingRecord
from rr_dataset.schema import LAYER_COLUMN
from rr_dataset.stats import expert_counts, long_batches, long_schema, read_records
from rr_dataset.verify import Progress

FORMATS = ("npz", "safetensors", "parquet", "long", "counts")
ROW_GROUP_BYTES = 32 << 20  # few enough to skip by their statistics, large enough to read fast

_SPAN = pa.struct([("start", pa.int64()), ("stop", pa.int64())])
_ST_DTYPES = {
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "int32": "I32",
    "int64": "I64",
    "float32": "F32",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class ExportReport:
    """What was written."""

    files: int
    records: int
    bytes: int


def export(
    uri: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str = "parquet",  # noqa: A002 -- what everybody calls it
    prefix: str | Mapping[str, str | int] | None = None,
    layers: Sequence[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    out_options: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Write all records, or those under a prefix, below `out`, a folder or s3://bucket/path that holds no file yet.

    Dropped ones are left out.

    format:
        "npz", "safetensors": arrays of each record: see `record_arrays`; safetensors has the texts in its metadata.
        "parquet": one row per record: id, components, what `RecordHead` says, and a binary column per layer, [tokens, top_k] C
            order; row groups of 32 MiB, with statistics on ids and numbers.
        "long": Parquet of `to_long`. "counts": Parquet of `expert_counts` by layer and weight version, one file.
    layers: only these; None: all.
    progress: called with the bytes of the partitions that are done, and of all.
    storage_options, out_options: for the store of the dataset, and that of `out`.

    In memory are a few records, and one row group of Parquet; what goes to a remote store is a temporary file before. Raises InvalidInputError for an unknown format or an
    `out` with files in it, and as `RoutingDataset.get_many`; OSError where `out` cannot be written.
    """
    if format not in FORMATS:
        raise InvalidInputError(f"format={format!r}: expected one of {', '.join(FORMATS)}")
    dataset, folder = open_dataset(uri, storage_options=storage_options), Folder(out, out_options)
    if format == "counts":
        table = expert_counts(uri, prefix, layers=layers, storage_options=storage_options, progress=progress)
        with folder.created("counts.parquet") as file:
            pq.write_table(table, file, compression="zstd")
        return ExportReport(folder.files, 0, folder.bytes)
    records = read_records(dataset, prefix, layers, progress, gaps=format != "long")
    if format in ("npz", "safetensors"):
        return _per_record(records, dataset.keys, folder, format)
    return _per_partition(records, dataset, folder, format, dataset.spec.check_layers(layers))


def record_arrays(record: RoutingRecord) -> dict[str, Any]:
    """A record as named arrays, as an .npz file has them.

    request_id, status: texts. layers: int32 [layers]. token_ranges: int64 [n, 2]. routed_experts: [layers, tokens, top_k].
    present: bool [layers, tokens], False where the ids are missing and mean nothing. token_ids: int32 [tokens] and
    logprobs: float32 [tokens], where the record has them.
    """
    arrays = {
        "request_id": np.array(record.request_id),
        "status": np.array(record.status),
        "layers": np.array(record.layers, np.int32),
        "token_ranges": np.array(record.token_ranges, np.int64).reshape(-1, 2),
        "routed_experts": record.routed_experts,
        "present": record.present(),
        "token_ids": record.token_ids,
        "logprobs": record.logprobs,
    }
    return {name: array for name, array in arrays.items() if array is not None}


# A file for each record


def _per_record(records: Iterable[RoutingRecord], keys: KeyScheme, folder: Folder, suffix: str) -> ExportReport:
    write: Callable[[BinaryIO, RoutingRecord], None] = _write_npz if suffix == "npz" else _write_safetensors
    for record in records:
        place = partition_path(keys.partition(record.components))
        with folder.created(f"{place}/{_file_name(record.request_id)}.{suffix}") as file:
            write(file, record)
    return ExportReport(folder.files, folder.files, folder.bytes)


def _file_name(request_id: str) -> str:
    """The encoded id; of one that is too long its start and a hash."""
    name = quote_value(request_id)
    if len(name) <= MAX_NAME_BYTES:
        return name
    return f"{name[: MAX_NAME_BYTES - 34]}--{hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()}"


def _write_npz(file: BinaryIO, record: RoutingRecord) -> None:
    np.savez(file, **record_arrays(record))


def _write_safetensors(file: BinaryIO, record: RoutingRecord) -> None:
    """The 8-byte length of a JSON header, the header, and the arrays one after the other."""
    arrays = {name: np.ascontiguousarray(a) for name, a in record_arrays(record).items() if a.dtype.kind != "U"}
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)  # so that each is aligned
    header: dict[str, Any] = {"__metadata__": _texts(record)}
    at = 0
    for name, array in ordered:
        dtype = _ST_DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, array in ordered:
        file.write(array.data.cast("B") if array.size else b"")


def _texts(record: RoutingRecord) -> dict[str, str]:
    return {
        "request_id": record.request_id,
        "status": record.status,
        "run_id": record.run_id,
        "weights": json.dumps(record.weights),
        "tags": json.dumps(dict(record.tags)),
    }


# Parquet


def _per_partition(
    records: Iterable[RoutingRecord], dataset: RoutingDataset, folder: Folder, kind: str, layers: tuple[int, ...]
) -> ExportReport:
    keys, spec = dataset.keys, dataset.spec
    schema = long_schema(spec) if kind == "long" else _record_schema(keys, layers)
    name = "long.parquet" if kind == "long" else "records.parquet"
    statistics = [
        field.name for field in schema if not pa.types.is_binary(field.type) and not pa.types.is_nested(field.type)
    ]
    count = 0
    for partition, group in groupby(records, lambda record: partition_path(keys.partition(record.components))):
        with (
            folder.created(f"{partition}/{name}") as file,
            pq.ParquetWriter(
                file, schema, compression="zstd", use_dictionary=["request_id"], write_statistics=statistics
            ) as writer,
        ):
            pending: list[pa.RecordBatch] = []
            held = 0
            for record in group:
                batches = long_batches(record, schema) if kind == "long" else [_row(record, schema, keys)]
                for batch in batches:
                    pending.append(batch)
                    held += batch.nbytes
                    if held >= ROW_GROUP_BYTES:
                        _flush(writer, pending, schema)
                        held = 0
                count += 1
            if pending:
                _flush(writer, pending, schema)
    return ExportReport(folder.files, count, folder.bytes)


def _flush(writer: pq.ParquetWriter, pending: list[pa.RecordBatch], schema: pa.Schema) -> None:
    table = pa.Table.from_batches(pending, schema)
    writer.write_table(table, row_group_size=max(len(table), 1))
    pending.clear()


def _record_schema(keys: KeyScheme, layers: Sequence[int]) -> pa.Schema:
    # The components of the path stand in the path: readers add them, and take offence at a column of the same name.
    deeper = [pa.field(name, pa.string()) for name in keys.components[keys.partition_by :]]
    spans = pa.list_(pa.struct([*_SPAN, ("version", pa.string())]))
    return pa.schema(
        [
            pa.field("request_id", pa.string(), nullable=False),
            *deeper,
            ("choice", pa.int32()),
            ("record_id", pa.string()),
            ("t_submit", pa.uint64()),
            ("status", pa.string()),
            ("reason", pa.string()),
            ("num_tokens", pa.int64()),
            ("missing", pa.list_(pa.struct([("layer", pa.int32()), *_SPAN]))),
            ("weights", spans),
            ("run_id", pa.string()),
            ("tags", pa.map_(pa.string(), pa.string())),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            *((LAYER_COLUMN % layer, pa.binary()) for layer in layers),
        ]
    )


def _row(record: RoutingRecord, schema: pa.Schema, keys: KeyScheme) -> pa.RecordBatch:
    values: dict[str, Any] = {
        "request_id": record.request_id,
        **dict(zip(keys.components, record.components, strict=True)),
        "choice": record.choice,
        "record_id": record.record_id,
        "t_submit": record.rows[-1].t_submit,
        "status": record.status,
        "reason": record.reason,
        "num_tokens": record.num_tokens,
        "missing": [
            {"layer": layer, "start": start, "stop": stop}
            for layer, spans in record.missing_by_layer.items()
            for start, stop in spans
        ],
        "weights": [{"start": start, "stop": stop, "version": version} for start, stop, version in record.weights],
        "run_id": record.run_id,
        "tags": list(record.tags.items()),
        "token_ids": record.token_ids,
        "logprobs": record.logprobs,
        **{LAYER_COLUMN % layer: record.layer(layer).tobytes() for layer in record.layers},
    }
    return pa.record_batch([pa.array([values[field.name]], field.type) for field in schema], schema=schema)
