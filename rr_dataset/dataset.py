"""Create, open and read a dataset.

ds = open_dataset(uri)
record = ds.get("math_17:2:0:0", layers=[3, 4], tokens=slice(0, 1000))
for record in ds.get_many(batch_of_ids):
    ...
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, overload

import numpy.typing as npt

from rr_dataset.description import ensure_format, read_format
from rr_dataset.errors import (
    DatasetNotFoundError,
    InvalidInputError,
    RecordDroppedError,
    RecordNotFoundError,
)
from rr_dataset.keys import KeyScheme, Prefix
from rr_dataset.layout import (
    TOMBSTONE_DIR,
    DatasetFormat,
    parse_partition,
    parse_tombstone_name,
    partition_path,
)
from rr_dataset.live import assemble
from rr_dataset.payload import Arrays, Draft, fill
from rr_dataset.record import RecordHead, RoutingRecord, RoutingSpec
from rr_dataset.selection import Tokens, tokens_per_id
from rr_dataset.snapshot import Located, Reader, Snapshot
from rr_dataset.storage import open_storage

DEFAULT_SKEW_S = 1.0  # between hosts that keep time by NTP
DEFAULT_TOMBSTONE_TTL_S = 7 * 86400.0
DEFAULT_GRACE_S = 600.0
ON_MISSING = ("raise", "none")

_NAMED = 10  # ids that an error spells out
_PARTITIONS_AT_ONCE = 64  # share one listing of tombstones when everything is read
_POLL_S = 0.1


@dataclass(frozen=True)
class PartitionInfo:
    """One directory, by the names of its files: also those that are deleted or replaced and not yet removed."""

    path: str
    shards: int
    rows: int  # puts and drops; a record put in parts has several
    bytes: int


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset at a glance, from listings alone. The counts are sums of `PartitionInfo`."""

    uri: str
    format: DatasetFormat
    partitions: int
    shards: int
    rows: int
    bytes: int
    tombstone_files: int


def create_dataset(
    uri: str | os.PathLike[str],
    spec: RoutingSpec,
    keys: KeyScheme | None = None,
    keep: str = "all",
    ttl_s: float | None = None,
    max_bytes: int | None = None,
    exist_ok: bool = True,
    max_clock_skew_s: float | None = None,
    tombstone_ttl_s: float = DEFAULT_TOMBSTONE_TTL_S,
    grace_s: float = DEFAULT_GRACE_S,
    storage_options: Mapping[str, Any] | None = None,
) -> RoutingDataset:
    """Create the dataset at `uri` unless it is there, and open it. Atomic and durable; of two creators one wins.

    keys: how request ids split; None is `KeyScheme.fastdeploy()`.
    keep: "all" for now.
    ttl_s, max_bytes: what maintenance may delete: records older than `ttl_s` seconds, the oldest beyond `max_bytes`.
    max_clock_skew_s: seconds between the clocks of any two hosts that use it; None is 0 for a local path, else 1.
    tombstone_ttl_s: life of a delete mark in seconds. A spool that a crash left behind longer than that is set aside.
    grace_s: how long replaced files stay for readers that still use them; longer than any listing takes.
    storage_options: for the client of the store.

    Raises SpecMismatchError when it exists with any other setting, InvalidInputError when it exists and not `exist_ok`,
    or for a setting out of range.
    """
    if not isinstance(spec, RoutingSpec):
        raise InvalidInputError(f"spec={spec!r}: expected a RoutingSpec")
    if keep != "all":
        raise InvalidInputError(f"keep={keep!r}: expected 'all'; 'last_turn' comes with a later version")
    storage = open_storage(uri, storage_options)
    if max_clock_skew_s is None:
        max_clock_skew_s = DEFAULT_SKEW_S if "://" in storage.uri and not storage.uri.startswith("file:") else 0.0
    wanted = DatasetFormat(
        uuid=str(uuid.uuid4()),
        spec=spec,
        keys=KeyScheme.fastdeploy() if keys is None else keys,
        keep=keep,
        max_clock_skew_s=max_clock_skew_s,
        tombstone_ttl_s=tombstone_ttl_s,
        grace_s=grace_s,
        ttl_s=ttl_s,
        max_bytes=max_bytes,
    )
    ensure_format(storage, wanted, exist_ok=exist_ok)
    return RoutingDataset(storage.uri, storage_options=storage_options)


def open_dataset(
    uri: str | os.PathLike[str],
    run: str | None = None,
    wait_s: float = 0.0,
    storage_options: Mapping[str, Any] | None = None,
) -> RoutingDataset:
    """The dataset at `uri`.

    run: read only what the writers of this run id put; None: of all.
    wait_s: how many seconds to wait for the dataset to be created.

    Raises DatasetNotFoundError when there is none, NewerFormatError for one of a later version of rr_dataset.
    """
    dataset = RoutingDataset(open_storage(uri, storage_options).uri, run, storage_options)
    deadline = time.monotonic() + wait_s
    while True:
        try:
            dataset.format  # noqa: B018 -- reads the description, the proof that it is a dataset
        except DatasetNotFoundError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(_POLL_S, left))
        else:
            return dataset


class _Found(NamedTuple):
    """A record that is there: what it is, and its rows by record id."""

    head: RecordHead
    rows: Mapping[str, Located]


class _Client:
    """What a process needs to read a dataset; never shared with a forked child."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None) -> None:
        self.pid = os.getpid()
        self.storage = open_storage(uri, storage_options)
        self.format = read_format(self.storage)
        self.reader = Reader(self.storage, self.format)


class RoutingDataset:
    """A dataset opened for reading. Make one with `open_dataset`.

    Thread-safe. It pickles as its address and run, and works in a forked child: each process makes a client of its own.
    Every call reads the present state of the store, one consistent view of each partition: whole records, none twice,
    none deleted before the call.
    """

    def __init__(self, uri: str, run: str | None = None, storage_options: Mapping[str, Any] | None = None) -> None:
        self.uri = uri
        self.run = run
        self._storage_options = storage_options
        self._made: _Client | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RoutingDataset, (self.uri, self.run, self._storage_options)

    def __repr__(self) -> str:
        return (
            f"RoutingDataset({self.uri!r})" if self.run is None else f"RoutingDataset({self.uri!r}, run={self.run!r})"
        )

    @property
    def format(self) -> DatasetFormat:
        """What all processes of this dataset share."""
        return self._client().format

    @property
    def spec(self) -> RoutingSpec:
        """Layers, experts and dtype of every record."""
        return self.format.spec

    @property
    def keys(self) -> KeyScheme:
        """How request ids split into components."""
        return self.format.keys

    def get(
        self,
        request_id: str,
        layers: Sequence[int] | None = None,
        tokens: Tokens = None,
        out: npt.NDArray[Any] | None = None,
    ) -> RoutingRecord:
        """One record, with the layers and tokens asked for.

        layers: rising layer ids; None: all.
        tokens: a slice with step 1 (negative ends count from the end), or a list of (start, stop) ranges of absolute
            positions, which follow one another on the token axis; None: all.
        out: [layers, tokens, top_k] of a dtype that holds the ids and of any strides, filled in place and returned as
            `routed_experts`; a C-contiguous one of the spec's dtype costs no copy. After an error it holds anything.

        Tokens that are not there read as zero bytes, and `missing` and `missing_by_layer` tell which. `token_ids` and
        `logprobs` are None unless some row has them; then -1 and NaN stand where one has not.

        Raises RecordNotFoundError, RecordDroppedError with the reason, InvalidRequestIdError, InvalidRoutingError for
        layers or tokens that are out of range or an `out` that does not fit, ReadConflictError, StorageError.
        """
        (record,) = self._read([request_id], layers, [tokens], out=out, on_missing="raise")
        assert record is not None  # noqa: S101 -- a missing one has raised
        return record

    @overload
    def get_many(
        self,
        ids: Iterable[str],
        layers: Sequence[int] | None = None,
        tokens: Tokens | Sequence[Tokens] = None,
        on_missing: Literal["raise"] = "raise",
    ) -> list[RoutingRecord]: ...

    @overload
    def get_many(
        self,
        ids: Iterable[str],
        layers: Sequence[int] | None = None,
        tokens: Tokens | Sequence[Tokens] = None,
        *,
        on_missing: Literal["none"],
    ) -> list[RoutingRecord | None]: ...

    def get_many(
        self,
        ids: Iterable[str],
        layers: Sequence[int] | None = None,
        tokens: Tokens | Sequence[Tokens] = None,
        on_missing: Literal["raise", "none"] = "raise",
    ) -> list[RoutingRecord] | list[RoutingRecord | None]:
        """Records in the order asked; an id may stand there more than once.

        layers, tokens: as in `get`; `tokens` for all ids alike, or a list with one selection (None, a slice or a list of
            ranges) per id.
        on_missing: "raise", or "none": None for an id without a record.

        Each partition is listed once, so ids that share their first components are cheap together. Small records share
        blocks of memory: to keep a few of many for long, copy them.
        Raises as `get`; the error names up to ten ids and says how many there are. A dropped id always raises.
        """
        asked = _ids(ids)
        return self._read(asked, layers, tokens_per_id(tokens, len(asked)), on_missing=on_missing)

    @overload
    def heads(self, ids: Iterable[str], on_missing: Literal["raise"] = "raise") -> list[RecordHead]: ...

    @overload
    def heads(self, ids: Iterable[str], on_missing: Literal["none"]) -> list[RecordHead | None]: ...

    def heads(
        self, ids: Iterable[str], on_missing: Literal["raise", "none"] = "raise"
    ) -> list[RecordHead] | list[RecordHead | None]:
        """What the records are, without their payload, in the order asked; dropped ones too.

        on_missing: "raise", or "none": None for an id without a record.

        Raises RecordNotFoundError, InvalidRequestIdError, ReadConflictError, StorageError.
        """
        asked = _ids(ids)
        wanted = self._by_partition(asked)

        def use(snapshot: Snapshot) -> list[RecordHead | None]:
            found = self._assemble(snapshot, wanted)
            self._check_missing(asked, found, snapshot, on_missing)
            return [found[request_id].head if request_id in found else None for request_id in asked]

        return self._client().reader.read(list(wanted), use)

    def ids(self, prefix: str | Mapping[str, str | int] | None = None) -> Iterator[str]:
        """Request ids that have a record or were dropped, partition by partition, sorted within each.

        prefix: only those it covers by component: "math:17" or {"data_id": "math", "gen_id": 17}.

        Each partition is one consistent view, the whole is not. Raises InvalidRequestIdError for a prefix that no id has.
        """
        parsed = self._prefix(prefix)

        def use(snapshot: Snapshot) -> list[str]:
            return [
                request_id
                for partition in snapshot.shards
                for request_id, rows in sorted(self._rows(snapshot, partition, None).items())
                if parsed.matches(rows[0].row.components, rows[0].row.choice)
            ]

        paths = self._partition_paths(parsed)
        while batch := list(islice(paths, _PARTITIONS_AT_ONCE)):
            yield from self._client().reader.read(batch, use)

    def partitions(self, prefix: str | Mapping[str, str | int] | None = None) -> Iterator[PartitionInfo]:
        """The directories that hold shards, sorted by path.

        prefix: only those in which it may cover something.
        """
        reader = self._client().reader
        for path in self._partition_paths(self._prefix(prefix)):
            listed = reader.listing([path])[path]
            if listed:
                yield PartitionInfo(
                    path, len(listed), sum(item.name.rows for item in listed), sum(item.entry.size for item in listed)
                )

    def info(self) -> DatasetInfo:
        """Settings and counts. Reads no shard; costs one listing per partition."""
        client = self._client()
        parts = list(self.partitions())
        names = [entry.name for entry in client.storage.list(TOMBSTONE_DIR)]
        return DatasetInfo(
            uri=self.uri,
            format=client.format,
            partitions=len(parts),
            shards=sum(part.shards for part in parts),
            rows=sum(part.rows for part in parts),
            bytes=sum(part.bytes for part in parts),
            tombstone_files=sum(parse_tombstone_name(name) is not None for name in names),
        )

    def _client(self) -> _Client:
        if self._made is None or self._made.pid != os.getpid():
            self._made = _Client(self.uri, self._storage_options)
        return self._made

    def _read(
        self,
        asked: list[str],
        layers: Sequence[int] | None,
        selections: Sequence[Tokens],
        *,
        on_missing: str,
        out: npt.NDArray[Any] | None = None,
    ) -> list[RoutingRecord | None]:
        client = self._client()
        spec = client.format.spec
        chosen = spec.check_layers(layers)
        wanted = self._by_partition(asked)

        def use(snapshot: Snapshot) -> list[RoutingRecord | None]:
            found = self._assemble(snapshot, wanted)
            self._check_missing(asked, found, snapshot, on_missing)
            self._check_dropped(found, len(asked))
            arrays = Arrays(len(asked))
            drafts = [
                Draft(found[request_id].head, found[request_id].rows, spec, chosen, tokens, arrays, out)
                if request_id in found
                else None
                for request_id, tokens in zip(asked, selections, strict=True)
            ]
            fill([draft for draft in drafts if draft is not None], snapshot, client.reader)
            return [None if draft is None else draft.record() for draft in drafts]

        return client.reader.read(list(wanted), use, keep_open=True)

    def _by_partition(self, asked: Iterable[str]) -> dict[str, set[str]]:
        keys = self.keys
        wanted: dict[str, set[str]] = {}
        for request_id in asked:
            path = partition_path(keys.partition(keys.parse(request_id).components))
            wanted.setdefault(path, set()).add(request_id)
        return wanted

    def _rows(self, snapshot: Snapshot, partition: str, ids: Iterable[str] | None) -> dict[str, list[Located]]:
        """The visible rows of this run by request id."""
        found = snapshot.rows(partition, ids)
        if self.run is None:
            return found
        mine = {key: [each for each in rows if each.row.run_id == self.run] for key, rows in found.items()}
        return {key: rows for key, rows in mine.items() if rows}

    def _assemble(self, snapshot: Snapshot, wanted: Mapping[str, set[str]]) -> dict[str, _Found]:
        spec = self.spec
        found = {}
        for partition, ids in wanted.items():
            for request_id, rows in self._rows(snapshot, partition, ids).items():
                head = assemble([located.row for located in rows], spec)
                if head is not None:
                    found[request_id] = _Found(head, {located.row.record_id: located for located in rows})
        return found

    def _check_missing(
        self, asked: Sequence[str], found: Mapping[str, _Found], snapshot: Snapshot, on_missing: str
    ) -> None:
        if on_missing not in ON_MISSING:
            raise InvalidInputError(f"on_missing={on_missing!r}: expected one of {', '.join(ON_MISSING)}")
        if on_missing == "none" or len(found) == len(asked):
            return
        missing = [request_id for request_id in dict.fromkeys(asked) if request_id not in found]
        if not missing:
            return
        of_run = "" if self.run is None else f" of run {self.run!r}"
        wanted = self._by_partition(missing)
        damaged = [path for partition in wanted for path in snapshot.damaged[partition]]
        hint = f"; damaged and stepped over, these may have held them: {_listed(damaged)}" if damaged else ""
        raise RecordNotFoundError(
            f"{self.uri} has no record{of_run} of {len(missing)} of {len(asked)} ids: {_listed(missing)}. Not yet flushed, "
            f"deleted, or never put{hint}"
        )

    def _check_dropped(self, found: Mapping[str, _Found], count: int) -> None:
        dropped = [f"{key} ({each.head.reason})" for key, each in found.items() if each.head.status == "dropped"]
        if dropped:
            raise RecordDroppedError(
                f"{self.uri}: the writer dropped {len(dropped)} of {count} ids: {_listed(dropped)}"
            )

    def _prefix(self, prefix: str | Mapping[str, str | int] | None) -> Prefix:
        if prefix is None:
            return Prefix((None,) * len(self.keys.components))
        return self.keys.parse_prefix(prefix)

    def _partition_paths(self, prefix: Prefix) -> Iterator[str]:
        """The partition directories that may hold a match, sorted; pinned levels are not listed."""
        storage, names = self._client().storage, self.keys.components[: self.keys.partition_by]

        def walk(path: str, level: int) -> Iterator[str]:
            if level == len(names):
                yield path
                return
            value = prefix.components[level]
            if value is None:
                segments = sorted(segment for segment in storage.list_dirs(path) if _is_level(segment, names[level]))
            else:
                segments = [partition_path([(names[level], value)])]
            for segment in segments:
                yield from walk(f"{path}/{segment}" if path else segment, level + 1)

        return walk("", 0)


def _is_level(segment: str, name: str) -> bool:
    pairs = parse_partition(segment)
    return pairs is not None and pairs[0][0] == name


def _ids(ids: Iterable[str]) -> list[str]:
    if isinstance(ids, (str, bytes)):
        raise InvalidInputError(f"ids={ids!r}: expected several request ids, for example [{ids!r}]")
    return list(ids)


def _listed(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:_NAMED])
    return shown if len(texts) <= _NAMED else f"{shown} and {len(texts) - _NAMED} more"
