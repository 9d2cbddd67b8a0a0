"""The rows of a dataset as Arrow data: `scan` reads them, `to_pyarrow` describes them to pyarrow and DuckDB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import reduce
from itertools import chain, islice
from operator import and_
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.fs as pafs

from rr_dataset.arrow_store import StoreHandler
from rr_dataset.errors import InvalidInputError, ObjectNotFoundError, ReadConflictError
from rr_dataset.far_source import FarSource
from rr_dataset.keys import Prefix
from rr_dataset.layout import parse_partition
from rr_dataset.lookup import Lookup
from rr_dataset.record import Row
from rr_dataset.schema import shard_schema
from rr_dataset.shard import Source, arrow_file, likely_tail
from rr_dataset.snapshot import MAX_ATTEMPTS, Listed, Located, Shard, Snapshot
from rr_dataset.storage import Entry

Expression = Any  # pc.Expression; pyarrow ships no types
Rows = dict[str, Located]  # by record id
_Ends = dict[str, FarSource]  # by path


class _Described(NamedTuple):
    """A file as pyarrow is told of it."""

    path: str
    entry: Entry
    guarantee: Expression  # holds for all its rows
    hidden: list[str]  # record ids of rows that are not shown
    mixed: bool  # whether some rows may be of another prefix or run


_RANGED = ("request_id", "t_submit", "weight_version")  # columns with a guarantee, beside the components
_TYPES = {"t_submit": pa.uint64()}  # of these; the others are texts


def scan(
    lookup: Lookup, prefix: str | Mapping[str, str | int] | None, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    """See `RoutingDataset.scan`."""
    schema = shard_schema(lookup.format.spec, lookup.format.keys)
    names = schema.names if columns is None else _checked(columns, schema)
    options = pa.ipc.IpcReadOptions(use_threads=False)
    if len(names) < len(schema):  # else a batch is one read
        options.included_fields = sorted(map(schema.get_field_index, names))
    parsed = lookup.prefix(prefix)

    def use(snapshot: Snapshot) -> list[tuple[str, Rows]]:
        return [(path, _live(lookup, snapshot, path, parsed)) for path in snapshot.shards]

    def batches() -> Iterator[pa.RecordBatch]:
        for partitions in lookup.reader.read_each(lookup.partition_paths(parsed), use):
            for path, rows, ends in _with_ends(lookup, partitions):
                yield from _scan_partition(lookup, path, rows, ends, names, options)

    return batches()


def to_pyarrow(lookup: Lookup, prefix: str | Mapping[str, str | int] | None, prune: bool) -> pads.Dataset:
    """See `RoutingDataset.to_pyarrow`."""
    schema = shard_schema(lookup.format.spec, lookup.format.keys)
    parsed = lookup.prefix(prefix)

    def use(snapshot: Snapshot) -> list[_Described]:
        unread: list[_Described] = [
            _Described(item.path, item.entry, _named(path, item), [], not _is_whole(lookup, parsed))
            for path, items in snapshot.unread.items()
            for item in items
        ]
        return [*unread, *(each for path in snapshot.shards for each in _fragments(lookup, snapshot, path, parsed))]

    files = list(
        chain.from_iterable(lookup.reader.read_each(lookup.partition_paths(parsed), use, names_only=not prune))
    )
    filesystem = pafs.LocalFileSystem()
    if lookup.storage.is_remote:
        filesystem = pafs.PyFileSystem(StoreHandler(lookup.storage, {file.path: file.entry for file in files}))
    file_format = pads.IpcFileFormat()
    fragments = [
        file_format.make_fragment(f"{lookup.storage.uri}/{file.path}", filesystem, partition_expression=file.guarantee)
        for file in files
    ]
    dead = [record_id for file in files for record_id in file.hidden]
    dataset = pads.FileSystemDataset(fragments, schema, file_format, filesystem)
    if dead:
        dataset = dataset.filter(~pc.field("record_id").isin(pa.array(dead)))
    if any(file.mixed for file in files):
        dataset = dataset.filter(_selection(lookup, parsed))
    return dataset


def _live(lookup: Lookup, snapshot: Snapshot, partition: str, prefix: Prefix) -> Rows:
    """The rows that make the present records under the prefix."""
    return {
        row.record_id: found.rows[row.record_id]
        for found in lookup.records(snapshot, partition).values()
        for row in found.head.rows
        if prefix.matches(row.components, row.choice)
    }


def _checked(columns: Sequence[str], schema: pa.Schema) -> list[str]:
    names = list(columns) if hasattr(columns, "__iter__") and not isinstance(columns, str) else []
    unknown = [name for name in names if name not in schema.names]
    if unknown or not names or len(set(names)) < len(names):
        raise InvalidInputError(
            f"columns={columns!r}: expected a list of different names among {', '.join(schema.names)}"
        )
    return names


# Scanning


def _with_ends(lookup: Lookup, partitions: Sequence[tuple[str, Rows]]) -> Iterator[tuple[str, Rows, _Ends]]:
    """On a remote store with the ends of the shards, fetched side by side: all there is of small ones."""
    if not lookup.storage.is_remote:
        yield from ((path, rows, {}) for path, rows in partitions)
        return
    left = iter(partitions)
    while some := list(islice(left, lookup.storage.requests_at_once)):
        shards = {each.shard.path: each.shard for _, rows in some for each in rows.values()}
        ends = {path: _held(lookup, shard) for path, shard in shards.items()}
        lookup.reader.workers.each(_fetch, list(ends.values()))
        yield from ((path, rows, ends) for path, rows in some)


def _held(lookup: Lookup, shard: Shard) -> FarSource:
    source = lookup.storage.open(shard.path, shard.entry)
    return FarSource(source, likely_tail(len(shard.index.rows), shard.entry.size))


def _fetch(end: FarSource) -> None:
    with suppress(ObjectNotFoundError):  # who reads it looks where its rows are now
        end.fetch_end()


def _scan_partition(
    lookup: Lookup, partition: str, rows: Rows, ends: _Ends, names: list[str], options: pa.ipc.IpcReadOptions
) -> Iterator[pa.RecordBatch]:
    """All the rows, wherever they are by then: a row whose shard vanished is in the one that replaced it, or deleted."""
    attempts = 0
    pending = _by_shard(rows)
    while pending:
        shard, numbers = pending[-1]
        try:
            for count, batch in _read_shard(lookup, shard, ends.pop(shard.path, None), numbers, names, options):
                numbers = numbers[count:]
                pending[-1] = (shard, numbers)
                attempts = 0
                yield batch
            pending.pop()
        except ObjectNotFoundError as error:
            attempts += 1
            if attempts == MAX_ATTEMPTS:
                raise ReadConflictError(
                    f"{lookup.storage.uri}: {partition}: {attempts} shards in a row vanished before they were read; try "
                    "again when less is deleted at once"
                ) from error
            left = {shard.index.rows[number].record_id for shard, numbers in pending for number in numbers}
            pending = _by_shard(_relocated(lookup, partition, left))


def _by_shard(rows: Rows) -> list[tuple[Shard, list[int]]]:
    """The numbers of the rows in each shard, rising; the first shard comes last."""
    shards: dict[str, tuple[Shard, list[int]]] = {}
    for located in rows.values():
        shards.setdefault(located.shard.path, (located.shard, []))[1].append(located.number)
    return [(shard, sorted(numbers)) for _, (shard, numbers) in sorted(shards.items(), reverse=True)]


def _relocated(lookup: Lookup, partition: str, record_ids: set[str]) -> Rows:
    def use(snapshot: Snapshot) -> Rows:
        return {
            each.row.record_id: each
            for located in lookup.rows(snapshot, partition).values()
            for each in located
            if each.row.record_id in record_ids
        }

    return lookup.reader.read([partition], use)


def _read_shard(
    lookup: Lookup,
    shard: Shard,
    end: Source | None,
    wanted: list[int],
    names: list[str],
    options: pa.ipc.IpcReadOptions,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of these numbers, a record batch at a time: how many, and their content."""
    with ExitStack() as opened:
        if end is None:
            end = opened.enter_context(lookup.storage.open(shard.path, shard.entry))
        where = f"{lookup.storage.uri}: {shard.path}: "
        reader = opened.enter_context(arrow_file(end, shard.entry.size, options, where))
        at = 0
        while at < len(wanted):
            number = shard.index.batch_of(wanted[at])
            held = shard.index.batch_rows(number)
            chosen = [row for row in wanted[at : at + len(held)] if row in held]
            at += len(chosen)
            batch = reader.get_batch(number).select(names)
            if len(chosen) < len(held):
                batch = batch.take(pa.array([row - held.start for row in chosen]))
            yield len(chosen), batch


# Describing


def _fragments(lookup: Lookup, snapshot: Snapshot, partition: str, prefix: Prefix) -> Iterator[_Described]:
    """The files with a live row."""
    left = set(_live(lookup, snapshot, partition, prefix))
    # A late replay brings rows back beside the shard that replaced them; it has no live row of its own.
    for shard in sorted(snapshot.shards[partition], key=lambda shard: shard.name.level, reverse=True):
        held = {row.record_id for row in shard.index.rows}
        if left.isdisjoint(held):
            continue
        mine = [row for row in shard.index.rows if _belongs(lookup, prefix, row)]
        hidden = [row.record_id for row in mine if row.record_id not in left]
        left -= held
        yield _Described(shard.path, shard.entry, _guarantee(lookup, shard), hidden, len(mine) < len(shard.index.rows))


def _belongs(lookup: Lookup, prefix: Prefix, row: Row) -> bool:
    return lookup.run in (None, row.run_id) and prefix.matches(row.components, row.choice)


def _is_whole(lookup: Lookup, prefix: Prefix) -> bool:
    """Whether every row of a partition under the prefix belongs to it."""
    deeper = prefix.components[lookup.format.keys.partition_by :]
    return lookup.run is None and prefix.choice is None and not any(deeper)


def _selection(lookup: Lookup, prefix: Prefix) -> Expression:
    """What `_belongs` says, for Arrow."""
    pinned = zip(lookup.format.keys.components, prefix.components, strict=True)
    terms = [pc.field(name) == value for name, value in pinned if value is not None]
    if prefix.choice is not None:
        terms.append(pc.field("choice") == prefix.choice)
    if lookup.run is not None:
        terms.append(pc.field("run_id") == lookup.run)
    return reduce(and_, terms)


def _guarantee(lookup: Lookup, shard: Shard) -> Expression:
    """What holds for every row of a shard, by its index."""
    rows = shard.index.rows
    columns = {name: [getattr(row, name) for row in rows] for name in _RANGED}
    for at, name in enumerate(lookup.format.keys.components):
        columns[name] = [row.components[at] for row in rows]
    return reduce(and_, [_range(name, values) for name, values in columns.items()])


def _named(partition: str, item: Listed) -> Expression:
    """The same by its name and directory alone."""
    levels = [_range(name, [value]) for name, value in parse_partition(partition) or ()]
    return reduce(and_, levels, _range("t_submit", [item.name.tmin, item.name.tmax]))


def _range(name: str, values: Sequence[Any]) -> Expression:
    """The least and the greatest, or null where some are."""
    known = [value for value in values if value is not None]
    column = pc.field(name)
    if not known:
        return column.is_null()
    # With a bare Python value pyarrow would look for pandas, in vain and every time.
    least, most = (pa.scalar(end, _TYPES.get(name, pa.string())) for end in (min(known), max(known)))
    inside = column == least if least == most else (column >= least) & (column <= most)
    return inside | column.is_null() if len(known) < len(values) else inside
