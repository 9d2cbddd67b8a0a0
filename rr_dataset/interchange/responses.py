"""Responses that were written down, one line of JSON each, into a dataset."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rr_dataset.contracts import CONTRACTS, Decoded, decode
from rr_dataset.dataset import open_dataset
from rr_dataset.errors import InvalidInputError, InvalidRoutingError, reason_of
from rr_dataset.interchange.imported import Found, ImportReport, Refused, import_records
from rr_dataset.layout import DatasetFormat
from rr_dataset.options import MAX_META_BYTES
from rr_dataset.record import RoutingSpec
from rr_dataset.verify import Progress

MAX_LINE_BYTES = 1 << 30  # of one response: a longer line is refused without being kept
SHOWN_ID = 200  # characters of an id in the reason of a refusal
ID_FIELDS = ("request_id", "rid", "id", "uid", "meta_info.id")  # where systems put an id of a response


def import_responses(
    uri: str | os.PathLike[str],
    path: str | os.PathLike[str],
    contract: str,
    id_field: str | None = None,
    num_hidden_layers: int | None = None,
    weight_version: str | None = None,
    run_id: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Put every response of a file into the dataset at `uri`, which exists. Durable when it returns.

    path: lines of JSON; empty ones are passed over. contract: a name of `rr_dataset.contracts.CONTRACTS`.
    id_field: where a line has the request id, `a.b` for a field within one; by default the first of ID_FIELDS that is there.
        Several samples of a response are `<id>#<index>`.
    num_hidden_layers: of the model, where dense layers follow its last MoE layer.
    weight_version, run_id: of all records; the first stands before what a response says, `run_id` None: as for a writer.
    progress: called with the bytes that are read, and of the file.

    One slab of records and one line are in memory at a time. A line or a sample is refused, with the line and the reason, where
    it does not fit its contract or has no routing; it keeps no other from being imported. What the dataset has is left alone, so
    that an import can be run again.

    Raises DatasetNotFoundError, InvalidInputError for an unknown contract or a file that is not there, StorageError.
    """
    if contract not in CONTRACTS:
        raise InvalidInputError(f"contract={contract!r}: expected one of {', '.join(CONTRACTS)}")
    file = Path(path)
    if not file.is_file():
        raise InvalidInputError(f"{os.fspath(path)!r} is no file: expected lines of JSON, a response each")
    fmt = open_dataset(uri, storage_options=storage_options).format
    refused: list[Refused] = []
    facts = {"num_hidden_layers": num_hidden_layers, "weight_version": weight_version}
    with file.open("rb") as stream:
        records = _found(stream, file, fmt, contract, id_field, facts, refused, progress)
        return import_records(uri, fmt, records, refused, run_id=run_id, storage_options=storage_options)


def _found(
    stream: BinaryIO,
    file: Path,
    fmt: DatasetFormat,
    contract: str,
    id_field: str | None,
    facts: Mapping[str, Any],
    refused: list[Refused],
    progress: Progress | None,
) -> Iterator[Found]:
    """The records of all lines in order; `refused` gets the others."""
    total = file.stat().st_size
    for number, line in enumerate(_lines(stream), 1):
        for one in _read(line, fmt, contract, id_field, facts):
            if isinstance(one, Found):
                yield one
            else:
                refused.append(Refused(f"{file.name}:{number}", one))
        if progress is not None:
            progress(min(stream.tell(), total), total)


def _read(
    line: bytes | None, fmt: DatasetFormat, contract: str, id_field: str | None, facts: Mapping[str, Any]
) -> Iterator[Found | str]:
    """The records of a line, or why there is none."""
    if line is None:
        yield f"the line is longer than {MAX_LINE_BYTES} bytes"
        return
    if not line.strip():
        return
    try:
        response = json.loads(line)
    except (ValueError, RecursionError) as error:
        yield f"no JSON: {error}"
        return
    try:
        request_id = _id_of(response, id_field)
        samples = decode(contract, response, fmt.spec, thorough=True, keep_errors=True, **facts)
    except Exception as error:  # noqa: BLE001 - whatever a line has, it keeps no other from being imported
        yield reason_of(error)
        return
    for sample in samples:
        several = len(samples) > 1 or sample.index > 0
        own_id = f"{request_id}#{sample.index}" if several else request_id
        try:
            yield _record(own_id, sample, fmt)
        except Exception as error:  # noqa: BLE001 - as above
            yield f"{reason_of(own_id)[:SHOWN_ID]}: {reason_of(error)}"


def _lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file; None for one that is too long to be kept."""
    while line := stream.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
            yield line
            continue
        while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield None


def _id_of(response: Any, id_field: str | None) -> str:
    for name in ID_FIELDS if id_field is None else (id_field,):
        value = response
        for step in name.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return str(value)
    raise InvalidRoutingError(f"the line has no id: looked for {id_field or ', '.join(ID_FIELDS)}")


def _record(request_id: str, sample: Decoded, fmt: DatasetFormat) -> Found:
    if sample.put is None:
        raise InvalidRoutingError(sample.reason or "it has no routing")
    fmt.keys.parse(request_id)
    put = sample.put
    start, missing, version = put.get("token_start", 0), tuple(put.get("missing", ())), put.get("weight_version")
    part = put.get("part", False)
    _check_texts(missing, version, put.get("tags"))
    ids = put.get("token_ids")
    if ids is not None and ids.size and not -(1 << 31) <= ids.min() <= ids.max() < 1 << 31:
        raise InvalidRoutingError(f"token ids from {ids.min()} to {ids.max()}: expected what fits int32")
    routing = put["routed_experts"] if put.get("layout") == "LTK" else put["routed_experts"].transpose(1, 0, 2)
    return Found(
        request_id=request_id,
        experts=_experts(routing, [(a - start, b - start) for a, b in missing], fmt.spec),
        missing=missing,
        token_start=start,
        part=part,
        status=put.get("status") or ("partial" if part else "complete"),
        weight_version=None if version is None else str(version),
        token_ids=None if ids is None else np.asarray(ids, np.int32),
        logprobs=put.get("logprobs"),
        tags=put.get("tags"),
    )


def _check_texts(missing: object, version: object, tags: Mapping[str, str] | None) -> None:
    """Raises InvalidRoutingError for what `RoutingWriter.put` would not take: a text that is not well-formed, or too much."""
    text = json.dumps([missing, None if version is None else str(version), tags], ensure_ascii=False)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRoutingError("weight_version or tags: expected a well-formed text") from error
    if size > MAX_META_BYTES:
        raise InvalidRoutingError(
            f"weight_version, tags and missing take {size} bytes: expected at most {MAX_META_BYTES}"
        )


def _experts(routing: npt.NDArray[Any], gaps: list[tuple[int, int]], spec: RoutingSpec) -> npt.NDArray[Any]:
    """A copy of [layers, tokens, top_k] in the spec's dtype, zero in the gaps.

    Raises InvalidRoutingError for an id that no expert has.
    """
    real = np.ones(routing.shape[1], np.bool_)
    for start, stop in gaps:
        real[start:stop] = False
    kept = routing if real.all() else routing[:, real]
    if kept.size and (int(kept.min()) < 0 or int(kept.max()) >= spec.num_experts):
        raise InvalidRoutingError(f"it has ids from {kept.min()} to {kept.max()}, of {spec.num_experts} experts")
    if kept is routing:
        return routing.astype(spec.dtype)
    experts = np.zeros(routing.shape, spec.dtype)
    experts[:, real] = kept
    return experts
