"""From a slab file to the dataset: its committed entries become rows, are published, and the slab is marked."""

from __future__ import annotations

import mmap
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rr_dataset.clock import wall_ms
from rr_dataset.delete import remove_covered
from rr_dataset.errors import CorruptSpoolError
from rr_dataset.layout import DatasetFormat
from rr_dataset.publish import PUBLISH_THREADS, publish_slab
from rr_dataset.record import Row, RowData
from rr_dataset.slab import (
    ACTIVE,
    ASIDE,
    DELETE,
    PUBLISHED,
    PUT,
    SEALED,
    Entry,
    SlabContents,
    array_offsets,
    is_control,
    read_slab,
    read_state,
    write_state,
)
from rr_dataset.storage import Storage
from rr_dataset.tombstones import Tombstone, TombstoneCache, relist_tombstones, write_tombstones

UNPUBLISHED = (SEALED, ACTIVE)  # the active ones are the engine's as long as it lives


@dataclass(frozen=True)
class Published:
    """What became of one slab."""

    records: int
    bytes: int
    torn: int  # entries that no put had finished, dropped
    set_aside: bool


class Publisher:
    """Publishes slab files into one dataset."""

    def __init__(self, storage: Storage, dataset: DatasetFormat, compression: str) -> None:
        self._storage, self.dataset, self._compression = storage, dataset, compression
        self._tombstones = TombstoneCache(dataset.keys, dataset.last_turn)
        self._buried: dict[tuple[str, int], list[Tombstone]] = {}  # by writer and slab, while its publication fails
        self._pool = ThreadPoolExecutor(PUBLISH_THREADS, thread_name_prefix="publish")

    def publish(self, slab: Path, *, force: bool = False) -> Published:
        """Publish what is committed in a slab, and mark it: puts, drops and, before and after them, deletes. Idempotent.

        force: also when it is so old that tombstones which cover its rows may be gone.

        Raises StorageError, after which it can be called again, or CorruptSpoolError.
        """
        with open_slab(slab) as contents:
            if contents.identity["dataset"] != self.dataset.uuid:
                raise CorruptSpoolError(f"{slab} belongs to dataset {contents.identity['uri']}")
            tombstones = self._bury(contents)
            report = publish_slab(
                self._storage,
                self.dataset,
                writer=contents.identity["writer"],
                seq=contents.seq,
                rows=[_row_data(entry, contents, self.dataset) for entry in contents.entries if entry.kind != DELETE],
                cache=self._tombstones,
                compression=self._compression,
                pool=self._pool,
                now_ms=(lambda: 0) if force else wall_ms,  # at the dawn of time no slab is too old
            )
            if tombstones:
                everything = relist_tombstones(self._storage, self._tombstones)
                remove_covered(self._storage, self.dataset, tombstones, lambda: everything)
                del self._buried[contents.identity["writer"], contents.seq]
            torn = contents.torn
        write_state(slab, ASIDE if report.set_aside else PUBLISHED)
        return Published(report.records, report.bytes, torn, report.set_aside)

    def _bury(self, slab: SlabContents) -> list[Tombstone]:
        """The tombstones of the slab's deletes, durable in one file: before its own puts are, and those published after it.

        They have the very stamps of the deletes, so it does not matter for what lives in the end which slab is published first.
        """
        key = slab.identity["writer"], slab.seq
        deletes = [entry for entry in slab.entries if entry.kind == DELETE]
        if deletes and key not in self._buried:
            made = wall_ms()
            tombstones = [
                Tombstone(uuid.uuid4().hex, each.meta["kind"], each.meta["text"], each.meta["run"], each.t_submit, made)
                for each in deletes
            ]
            write_tombstones(self._storage, tombstones, made)
            self._buried[key] = tombstones
        return self._buried.get(key, [])

    def close(self) -> None:
        """End its threads."""
        self._pool.shutdown()


def slabs_in(directory: Path, states: Sequence[int]) -> list[Path]:
    """The slabs of a spool that are in one of these states, those of drops and deletes first, then oldest first.

    A file that is no slab of this version is in any state: whoever reads it gets the CorruptSpoolError.
    """
    found: list[tuple[bool, int, Path]] = []
    for path in directory.glob("*.slab"):
        with suppress(FileNotFoundError):  # the engine has just given it up
            try:
                seq, state = read_state(path)
            except (CorruptSpoolError, IsADirectoryError):
                found.append((False, 0, path))
            else:
                if state in states:
                    found.append((not is_control(path), seq, path))
    return [path for _, _, path in sorted(found)]


@contextmanager
def open_slab(path: Path) -> Iterator[SlabContents]:
    """The slab mapped and parsed; its payloads are read meanwhile and not after."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        yield read_slab(memoryview(memory), path)
    finally:
        with suppress(BufferError):  # an array of a record is still referred to: the map goes with it
            memory.close()


def _row_data(entry: Entry, slab: SlabContents, dataset: DatasetFormat) -> RowData:
    meta, spec = entry.meta, dataset.spec
    key = dataset.keys.parse(entry.request_id)
    layers = tuple(meta.get("layers", spec.moe_layers)) if entry.kind == PUT else ()
    row = Row(
        record_id=f"{entry.t_submit:016x}-{slab.identity['writer']}",
        request_id=entry.request_id,
        components=key.components,
        choice=key.choice,
        t_submit=entry.t_submit,
        token_start=meta.get("start", 0),
        num_tokens=entry.num_tokens,
        part=meta.get("part", False),
        status=meta["status"],
        run_id=slab.identity["run_id"],
        layers=layers,
        reason=meta.get("reason"),
        missing=tuple((start, stop) for start, stop in meta.get("missing", ())),
        weight_version=meta.get("weight"),
        weight_spans=tuple((start, stop, version) for start, stop, version in meta.get("spans", ())),
        producer=slab.identity["producer"],
        tags=meta.get("tags", {}),
        has_token_ids=entry.kind == PUT and meta.get("token_ids", False),
        has_logprobs=entry.kind == PUT and meta.get("logprobs", False),
    )
    if entry.kind != PUT:
        return RowData(row)
    tokens, dtype = entry.num_tokens, np.dtype(spec.dtype)
    size = len(layers) * tokens * spec.top_k * dtype.itemsize
    ids_at, logprobs_at, end = array_offsets(size, tokens, token_ids=row.has_token_ids, logprobs=row.has_logprobs)
    if end > len(entry.payload):
        raise CorruptSpoolError(f"record {entry.request_id!r} needs {end} bytes, its entry has {len(entry.payload)}")
    ids = entry.payload[:size].view(dtype)
    shape = (tokens, len(layers)) if entry.tokens_first else (len(layers), tokens)
    routed_experts = ids.reshape(*shape, spec.top_k)
    return RowData(
        row,
        routed_experts.transpose(1, 0, 2) if entry.tokens_first else routed_experts,
        entry.payload[ids_at:logprobs_at].view(np.int32) if row.has_token_ids else None,
        entry.payload[logprobs_at:end].view(np.float32) if row.has_logprobs else None,
    )
