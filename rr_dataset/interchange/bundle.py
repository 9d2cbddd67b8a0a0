"""A part of a dataset as a dataset of its own."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rr_dataset.description import ensure_format, read_format
from rr_dataset.errors import (
    CorruptShardError,
    DatasetNotFoundError,
    InvalidInputError,
    ObjectNotFoundError,
    ReadConflictError,
    SpecMismatchError,
)
from rr_dataset.layout import STAGING_DIR, DatasetFormat, ShardName, parse_partition
from rr_dataset.lookup import Lookup, id_list
from rr_dataset.merge import Codec, Workspace, grouped, merge
from rr_dataset.options import parse_compression
from rr_dataset.snapshot import MAX_ATTEMPTS, Located, Snapshot
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import TombstoneSet
from rr_dataset.verify import Progress

SHARD_BYTES = 64 << 20  # raw payload of a shard of the copy, or one row that is larger


@dataclass(frozen=True)
class CopyReport:
    """What was copied."""

    records: int
    rows: int
    bytes: int  # of the new files
    shards: int
    existing: int  # rows that were there already, or that the destination has deleted


def copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    ids: Iterable[str] | None = None,
    prefix: str | Mapping[str, str | int] | None = None,
    compression: str = "zstd:3",
    source_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy records, with the puts that make them, into another dataset; it is created if it is not there. Durable on return.

    ids, prefix: which; ids without a record are passed over. Neither: all.
    compression: of the new files, as for `compact`.
    progress: called with the bytes of the partitions that are done, and of all.

    Rows keep their record ids, checksums and columns, also columns that this version does not know. Idempotent: rows that
    are there are not copied again, so it can be run again after an interruption, or later for what is new. Rows that a
    delete mark of the destination covers are left out; one that has expired there is forgotten. Every byte is held against its
    checksum. Deleted and replaced rows of the source are left out. In memory are about 64 MiB of payload, four times over.

    Raises SpecMismatchError for a destination of another spec or key scheme, CorruptShardError for damage in the source, which
    `verify` explains, InvalidInputError, ReadConflictError, StorageError.
    """
    if ids is not None and prefix is not None:
        raise InvalidInputError("both ids and prefix are given: choose one")
    codec = Codec(*parse_compression(compression))
    origin = Lookup(source, None, source_options)
    if open_storage(destination, destination_options).uri == origin.storage.uri:
        raise InvalidInputError(f"{origin.storage.uri} is both source and destination")
    _ensure(os.fspath(destination), origin.format, destination_options)
    run = _Copy(origin, Lookup(destination, None, destination_options), codec)
    chosen = None if ids is None else origin.by_partition(id_list(ids))
    paths = sorted(chosen) if chosen is not None else list(origin.partition_paths(origin.prefix(prefix)))
    sizes = [0 if progress is None else sum(entry.size for entry in origin.storage.list(path)) for path in paths]
    done = 0
    for path, size in zip(paths, sizes, strict=True):
        run.partition(path, None if chosen is None else chosen[path], prefix)
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    run.close()
    return run.report


def _ensure(uri: str, fmt: DatasetFormat, options: Mapping[str, Any] | None) -> None:
    storage = open_storage(uri, options)
    try:
        found = read_format(storage)
    except DatasetNotFoundError:
        found = ensure_format(storage, replace(fmt, uuid=str(uuid.uuid4())))
    differs = found.mismatch(replace(found, spec=fmt.spec, keys=fmt.keys, keep=fmt.keep))
    if differs:
        raise SpecMismatchError(f"{storage.uri} takes no records of this dataset ({differs}): copy to another place")


class _Copy:
    """One call: both ends, and what was done."""

    def __init__(self, source: Lookup, target: Lookup, codec: Codec) -> None:
        self.report = CopyReport(0, 0, 0, 0, 0)
        self._source, self._target, self._codec = source, target, codec
        self._workspace = Workspace()
        self._staging = f"copy-{uuid.uuid4().hex}"

    def partition(self, path: str, ids: set[str] | None, prefix: str | Mapping[str, str | int] | None) -> None:
        """Copy one, anew from its listing while shards vanish under it."""
        problem: ObjectNotFoundError | None = None
        written: list[Located] = []
        for _ in range(MAX_ATTEMPTS):
            rows = self._rows(path, ids, prefix)
            new, tombstones = self._new(path, rows)
            try:
                for group in grouped(new, self._source.format, SHARD_BYTES):
                    self._write(path, group, tombstones)
                    written += group
            except ObjectNotFoundError as error:
                problem = error  # what is copied is there, and will not be chosen again
                continue
            done = self.report
            self.report = replace(
                done,
                records=done.records + len({each.row.request_id for each in written}),
                rows=done.rows + len(written),
                existing=done.existing
                + len({each.row.record_id for each in rows} - {each.row.record_id for each in written}),
            )
            return
        raise ReadConflictError(
            f"{self._source.storage.uri}: {path}: {MAX_ATTEMPTS} attempts to copy it failed, a file vanished each time; try "
            "again when less is deleted or compacted at once"
        ) from problem

    def close(self) -> None:
        """Leave nothing in staging."""
        self._target.storage.remove_empty_dirs(f"{STAGING_DIR}/{self._staging}")

    def _rows(self, path: str, ids: set[str] | None, prefix: str | Mapping[str, str | int] | None) -> list[Located]:
        """The rows that make the records asked for, in the order of a shard."""
        covered = self._source.prefix(prefix)

        def use(snapshot: Snapshot) -> list[Located]:
            if snapshot.damaged[path]:
                raise CorruptShardError(
                    f"{self._source.storage.uri}: {snapshot.damaged[path][0]} is damaged: see `rr-dataset verify`, whose "
                    "--repair moves it out of the way"
                )
            return [
                found.rows[row.record_id]
                for found in self._source.records(snapshot, path, ids).values()
                for row in found.head.rows
                if covered.matches(row.components, row.choice)
            ]

        rows = self._source.reader.read([path], use)
        return sorted(rows, key=lambda each: (each.row.request_id, each.row.t_submit, each.row.record_id))

    def _new(self, path: str, rows: Sequence[Located]) -> tuple[list[Located], TombstoneSet]:
        """Those that the destination neither has nor has deleted, and its tombstones."""

        def use(snapshot: Snapshot) -> tuple[list[Located], TombstoneSet]:
            there = {row.record_id for shard in snapshot.shards[path] for row in shard.index.rows}
            deleted = snapshot.tombstones.covers
            new = [each for each in rows if each.row.record_id not in there and not deleted(each.row)]
            return new, snapshot.tombstones

        return self._target.reader.read([path], use)

    def _write(self, path: str, rows: Sequence[Located], tombstones: TombstoneSet) -> None:
        """One shard, named by its rows alone, so that another copy of them makes the same name."""
        stamps = [each.row.t_submit for each in rows]
        ids = "\n".join(each.row.record_id for each in rows)
        unique = hashlib.blake2b(ids.encode(), digest_size=16).hexdigest()
        name = ShardName(1, min(stamps), max(stamps), len(rows), unique=unique)
        data = merge(
            rows,
            self._source.storage,
            self._source.format,
            self._codec,
            self._workspace,
            inputs=(),
            tombstones_applied=tombstones.applied(parse_partition(path) or (), name.tmin),
        )
        self._target.storage.create(f"{path}/{name.text}", data, staging=self._staging)
        self._target.storage.sync_dirs([path])
        self.report = replace(self.report, bytes=self.report.bytes + len(data), shards=self.report.shards + 1)
