"""Records of others, found one by one, into a dataset: a slab of them in memory at a time, and none twice."""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.clock import HybridClock
from rr_dataset.dataset import open_dataset
from rr_dataset.errors import reason_of
from rr_dataset.layout import STAGING_DIR, DatasetFormat
from rr_dataset.options import WriterOptions
from rr_dataset.publish import publish_slab, publish_threads
from rr_dataset.record import Range, Row, RowData
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import TombstoneCache

SLAB_BYTES = 64 << 20  # of records that are in memory together


@dataclass(frozen=True)
class Refused:
    """A record that was not imported."""

    path: str  # its folder, a file that belongs to none, or a file and its line
    reason: str  # at most MAX_REASON_BYTES, well-formed

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", reason_of(self.reason))


@dataclass(frozen=True)
class ImportReport:
    """What became of a folder or a file."""

    imported: int
    tokens: int
    existing: int  # records that the dataset had already: left as they are
    refused: tuple[Refused, ...]


@dataclass(frozen=True, eq=False)
class Found:
    """One record of another system, checked. experts: [layers, tokens, top_k] of the spec's dtype, any strides."""

    request_id: str
    experts: npt.NDArray[Any]
    missing: tuple[Range, ...] = ()
    token_start: int = 0
    part: bool = False
    status: str = "complete"
    weight_version: str | None = None
    token_ids: npt.NDArray[np.int32] | None = None
    logprobs: npt.NDArray[np.float32] | None = None
    tags: Mapping[str, str] | None = None

    @property
    def token_stop(self) -> int:
        """One past the last token."""
        return self.token_start + int(self.experts.shape[1])


def import_records(
    uri: str | os.PathLike[str],
    fmt: DatasetFormat,
    records: Iterable[Found],
    refused: list[Refused],
    *,
    run_id: str | None,
    storage_options: Mapping[str, Any] | None,
) -> ImportReport:
    """Publish what is not there yet. Durable when it returns. `refused` may grow while `records` are drawn.

    A whole record is there if its id has any live row, a part if one live row covers its tokens: so an import that was
    interrupted can be run again.
    """
    options = WriterOptions() if run_id is None else WriterOptions(run_id=run_id)
    dataset = open_dataset(uri, storage_options=storage_options)
    storage, cache = open_storage(uri, storage_options), TombstoneCache(fmt.keys, fmt.last_turn)
    writer, clock = secrets.token_hex(8), HybridClock()
    imported = tokens = existing = 0
    with ThreadPoolExecutor(publish_threads(storage), "rr-import") as pool:
        for seq, found in enumerate(_slabs(records)):
            ids = list(dict.fromkeys(each.request_id for each in found))
            covered: dict[str, list[Range]] = defaultdict(list)
            for request_id, head in zip(ids, dataset.heads(ids, on_missing="none"), strict=True):
                covered[request_id] += [(row.token_start, row.token_stop) for row in head.rows] if head else []
            rows = []
            for each in found:
                known = covered[each.request_id]
                if any(not each.part or (a <= each.token_start and each.token_stop <= b) for a, b in known):
                    existing += 1
                    continue
                known.append((each.token_start, each.token_stop))
                rows.append(_row(each, fmt, clock.tick(), writer, options.run_id))
            publish_slab(storage, fmt, writer=writer, seq=seq, rows=rows, cache=cache, pool=pool)
            imported += len(rows)
            tokens += sum(data.row.num_tokens for data in rows)
    storage.remove_empty_dirs(f"{STAGING_DIR}/{writer}")
    return ImportReport(imported, tokens, existing, tuple(refused))


def _slabs(records: Iterable[Found]) -> Iterator[list[Found]]:
    """As many as may be in memory together."""
    group: list[Found] = []
    size = 0
    for record in records:
        if group and size + record.experts.nbytes > SLAB_BYTES:
            yield group
            group, size = [], 0
        group.append(record)
        size += record.experts.nbytes
    if group:
        yield group


def _row(record: Found, fmt: DatasetFormat, stamp: int, writer: str, run_id: str) -> RowData:
    key = fmt.keys.parse(record.request_id)
    row = Row(
        record_id=f"{stamp:016x}-{writer}",
        request_id=record.request_id,
        components=key.components,
        choice=key.choice,
        t_submit=stamp,
        token_start=record.token_start,
        num_tokens=record.experts.shape[1],
        part=record.part,
        status=record.status,
        run_id=run_id,
        layers=fmt.spec.moe_layers,
        missing=record.missing,
        weight_version=record.weight_version,
        tags=record.tags or {},
        has_token_ids=record.token_ids is not None,
        has_logprobs=record.logprobs is not None,
    )
    return RowData(row, record.experts, record.token_ids, record.logprobs)
