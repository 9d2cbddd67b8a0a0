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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as pads

from rr_dataset.arrow_view import scan, to_pyarrow
from rr_dataset.at_once import answer_each
from rr_dataset.description import ensure_format
from rr_dataset.errors import CorruptShardError, DatasetNotFoundError, InvalidInputError, ObjectNotFoundError
from rr_dataset.follow import PollCursor, poll, wait_for
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import TOMBSTONE_DIR, DatasetFormat, parse_tombstone_name
from rr_dataset.lookup import Lookup, id_list
from rr_dataset.options import check_seconds
from rr_dataset.packed import Packed, Spans, read_packed, read_spans
from rr_dataset.record import RecordHead, RoutingRecord, RoutingSpec
from rr_dataset.selection import Share, Tokens, tokens_per_id
from rr_dataset.snapshot import Listed, Snapshot
from rr_dataset.stacked import Empty, Stacked, read_stacked
from rr_dataset.storage import open_storage

DEFAULT_SKEW_S = 1.0  # between hosts that keep time by NTP
DEFAULT_TOMBSTONE_TTL_S = 7 * 86400.0
DEFAULT_GRACE_S = 600.0

_POLL_S = 0.1


@dataclass(frozen=True)
class PartitionInfo:
    """One directory, by the names of its files.

    shards, bytes: all that is stored, also files that a compacted one has replaced and that wait for their removal.
    rows: puts and drops, each once however many files have it; also deleted and replaced ones until compaction leaves them
        out. A record put in parts has several.
    """

    path: str
    shards: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset at a glance. The counts are sums of `PartitionInfo`."""

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
    keep: "all", or "last_turn": of each conversation (all components but the turn), sample and run only the highest turn is
        shown and kept, once it is put after the lower ones. Puts that were dropped leave no turn behind.
    ttl_s, max_bytes: what maintenance may delete: records older than `ttl_s` seconds, the oldest beyond `max_bytes`.
    max_clock_skew_s: seconds between the clocks of any two hosts that use it; None is 0 for a local path, else 1.
    tombstone_ttl_s: life of a delete mark in seconds. A spool that a crash left behind longer than that is set aside.
    grace_s: how long replaced files stay for readers that still use them; longer than any listing takes.
    storage_options: as in `open_dataset`.

    Raises SpecMismatchError when it exists with any other setting, InvalidInputError when it exists and not `exist_ok`, when
    `uri` is a folder that holds something else, or for a setting out of range.
    """
    if not isinstance(spec, RoutingSpec):
        raise InvalidInputError(f"spec={spec!r}: expected a RoutingSpec")
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
    storage_options: for the client of the store; of s3:// key, secret, token, profile, anon, region, endpoint_url,
        addressing_style and client. What is not given comes from where AWS's tools look for it. Never stored or logged.

    Raises DatasetNotFoundError when there is none, NewerFormatError for one of a later version of rr_dataset.
    """
    dataset = RoutingDataset(open_storage(uri, storage_options).uri, run, storage_options)
    deadline = time.monotonic() + check_seconds("wait_s", wait_s)
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


class RoutingDataset:
    """A dataset opened for reading. Make one with `open_dataset`.

    Thread-safe. It pickles as its address and run, and works in a forked child: each process makes a client of its own, and a
    child has the indexes that its parent had read.
    Every call reads the present state of the store, one consistent view of each partition: whole records, none twice,
    none deleted before the call.
    """

    def __init__(self, uri: str, run: str | None = None, storage_options: Mapping[str, Any] | None = None) -> None:
        self.uri = uri
        self.run = run
        self._storage_options = storage_options
        self._made: Lookup | None = None

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

        layers: rising layer ids; None: all; none at all are allowed, for a rank that holds no MoE layer.
        tokens: a slice with step 1 (negative ends count from the end), or a list of (start, stop) ranges of absolute
            positions, which follow one another on the token axis; None: all.
        out: [layers, tokens, top_k] of a dtype that holds the ids and of any strides, filled in place and returned as
            `routed_experts`; a C-contiguous one of the spec's dtype costs no copy. After an error it holds anything.

        Tokens that are not there read as zero bytes, and `missing` and `missing_by_layer` tell which. `token_ids` and
        `logprobs` are None unless some row has them; then -1 and NaN stand where one has not.

        Raises RecordNotFoundError, RecordDroppedError with the reason, InvalidRequestIdError, InvalidRoutingError for
        layers or tokens that are out of range or an `out` that does not fit, ReadConflictError, StorageError.
        """
        (record,) = self._client().read([request_id], layers, [tokens], out=out, on_missing="raise")
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

        Each partition is listed once, so ids that share their first components are cheap together. In memory are the records
        of the call, small ones in shared blocks of up to 32 MB (to keep a few of many for long, copy them), besides a cache
        of indexes of 256 MB: ask in groups to go through more than memory holds.
        Raises as `get`; the error names up to ten ids and says how many there are. A dropped id always raises.
        """
        asked = id_list(ids)
        return self._client().read(asked, layers, tokens_per_id(tokens, len(asked)), on_missing=on_missing)

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
        return self._client().heads(id_list(ids), on_missing)

    def resolve(
        self,
        refs: Iterable[str],
        layers: Sequence[int] | None = None,
        tokens: Tokens | Sequence[Tokens] = None,
    ) -> list[RoutingRecord]:
        """The very puts that the refs of receipts name, in that order, also where a later put has replaced them.

        Each is a record of its own: of a part only its own tokens and layers are there, the rest is `missing`. A put that was
        replaced stays until compaction. layers, tokens: as in `get_many`.

        Raises RecordNotFoundError for a put that is deleted, compacted away or not yet published, RecordDroppedError,
        InvalidInputError for a ref that is none, and as `get`.
        """
        asked = id_list(refs, "refs")
        found = self._client().resolve(asked, layers, tokens_per_id(tokens, len(asked)))
        return [record for record in found if record is not None]

    def get_packed(
        self,
        ids: Iterable[str],
        layers: Sequence[int] | None = None,
        tokens: Tokens | Share | Sequence[Tokens | Share] = None,
        out: Mapping[int, Any] | None = None,
        padding: str = "spread",
        pad_to_multiple: int = 1,
        on_missing: Literal["raise", "none"] = "raise",
    ) -> Packed:
        """Records in the order asked, one after the other in one buffer per layer: `(experts, cu_seqlens, mask, masks)`.

        layers: as in `get`.
        tokens: as in `get_many`, or the `Share` of a rank, which speaks of the trainer's tokens: what the record does not have
            of them is a missing row, also past its end.
        out: by layer id a buffer [rows or more, top_k] in host memory, as a numpy array or anything with `__dlpack__` (pinned
            tensors), of an integer dtype that holds the ids. Its first rows are filled, straight from storage where items have
            the spec's size. Layers may share a block, not memory. None: one new block for all. After an error they hold anything.
        padding: what stands in rows that are not real: "spread", distinct ids balanced over all experts, or "minus_one", -1 in
            the narrowest signed dtype that holds the ids. Look at `masks` to leave missing rows to the live router.
        pad_to_multiple: rows of padding follow each sample until its rows are a multiple of this.
        on_missing: "raise", or "none": an id without a record has the missing rows of its `Share`, else no row.

        Token ids are not read or compared: see `align`. Raises as `get_many`, InvalidRoutingError for an `out` that does not fit.
        """
        asked = id_list(ids)
        return read_packed(
            self._client(),
            asked,
            layers,
            tokens_per_id(tokens, len(asked)),
            out=out,
            padding=padding,
            pad_to_multiple=pad_to_multiple,
            on_missing=on_missing,
        )

    def get_stacked(
        self,
        ids: Iterable[str],
        layers: Sequence[int] | None = None,
        tokens: Tokens | Sequence[Tokens] | Callable[[RecordHead], Share] = None,
        empty: Empty = np.empty,
    ) -> Stacked:
        """Records of equal length in the order asked, in one array: `(routed_experts, records)`.

        layers, tokens: as in `get_many`; `tokens` may be a function from the head of a record to the `Share` of it. Rows that the
            record does not have, also past its end, are zero bytes.
        empty: makes the array [ids, layers, rows, top_k] once the lengths are known, from its shape and the spec's dtype, such
            as one in shared memory. It is read into without a copy. After a conflict with a delete it may be called again.

        Raises InvalidRoutingError where the numbers of rows differ, and as `get_many`.
        """
        asked = id_list(ids)
        chosen = tokens if callable(tokens) else tokens_per_id(tokens, len(asked))
        return read_stacked(self._client(), asked, layers, chosen, empty)

    def get_spans(self, spans: Sequence[tuple[str, int, int]], layers: Sequence[int] | None = None) -> Spans:
        """Tokens of the very puts that refs name, in the order given, as one array: `(routed_experts, present)`.

        spans: (ref of a receipt, start, stop), absolute positions within the put. layers: as in `get`.

        Raises InvalidRoutingError for positions that the put does not have, and as `resolve`.
        """
        return read_spans(self._client(), spans, layers)

    def wait_for(
        self, ids: Iterable[str], timeout_s: float = 60.0, weight_version: str | int | None = None
    ) -> list[RecordHead]:
        """Wait until every id has a final status (any but partial), and give their heads in the order asked.

        weight_version: wait also until the newest put of the id is of this version: its `weight_version`, or that of its
            last span.

        A dropped id counts at once, whatever its version: look at `status` and `reason`. A head is as it was when it was
        found ready. Only the directories of ids that are not are listed again, every 5 ms at first, later every 250 ms.

        Raises WaitTimeoutError, which names up to ten ids and what was seen of them, and as `heads`.
        """
        return wait_for(self._client(), id_list(ids), check_seconds("timeout_s", timeout_s), weight_version)

    def poll(self, cursor: PollCursor | None = None) -> tuple[list[RecordHead], PollCursor]:
        """Heads of the records of which some row has not been told yet, and the cursor for the next call.

        cursor: what the last call returned; None: tell everything that is there.

        New is decided by record id, never by time: rows that were late, replayed or moved by compaction are told once. A head
        is the whole record as it is now, so one that grows in parts comes again with each. Dropped ones come too. Heads are
        sorted by partition, then by request id. After an error the old cursor still holds.

        On a local disk it looks only into directories that have changed, so it costs a `stat` for each of the others. An object
        store does not tell: there each call lists all directories, side by side, at one request for each.
        Raises InvalidInputError for a cursor of another dataset or run, ReadConflictError, StorageError.
        """
        return poll(self._client(), cursor)

    def scan(
        self, prefix: str | Mapping[str, str | int] | None = None, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The live rows as Arrow record batches, partition by partition: rows as they are stored, not assembled records.

        prefix: as in `ids`. columns: names in schemas/v1.json, as `["request_id", "layer_003"]`; None: all. Bytes of other
            columns are not read.

        Rows of replaced puts and deleted rows are left out, drop rows are not. In memory are the batch handed out and the one
        being read, three while rows are cut out of one (a raw shard's batch is 1 MiB, or one record that is larger), and
        the index, which is about 6 KB a row, of one partition or of some small ones, besides a cache of indexes of 256 MB.

        Each partition is one consistent view, the whole is not; what is deleted meanwhile may be left out.
        Raises InvalidInputError for an unknown column, CorruptShardError, ReadConflictError, StorageError.
        """
        return scan(self._client(), prefix, columns)

    def to_pyarrow(self, prefix: str | Mapping[str, str | int] | None = None, prune: bool = True) -> pads.Dataset:
        """The live rows as a `pyarrow.dataset.Dataset`, for pyarrow's own filters and for DuckDB; no assembled records.

        prefix: as in `ids`.
        prune: read the index of every shard, so that filters on request id, components, t_submit and weight version open only
            files that may match. False: do so by names alone, on path components and t_submit, wherever a partition has a
            single row that no delete mark reaches; in all others rows may be dead and the indexes are read.

        Rows of replaced puts and deleted rows are filtered out. Where there are none, and all rows of the files match prefix
        and run, the dataset has no filter and pickles. It shows this moment: a file that is deleted or compacted later makes
        its scan fail with FileNotFoundError. pyarrow reads several files ahead: for rows of megabytes pass small `batch_readahead`
        and `fragment_readahead`, or use `scan`.
        """
        return to_pyarrow(self._client(), prefix, prune)

    def ids(self, prefix: str | Mapping[str, str | int] | None = None) -> Iterator[str]:
        """Request ids that have a record or were dropped, partition by partition, sorted within each.

        prefix: only those it covers by component: "math:17" or {"data_id": "math", "gen_id": 17}.

        Each partition is one consistent view, the whole is not. Raises InvalidRequestIdError for a prefix that no id has.
        """
        client = self._client()
        parsed = client.prefix(prefix)

        def use(snapshot: Snapshot) -> list[str]:
            return [
                request_id
                for partition in snapshot.shards
                for request_id, rows in sorted(client.rows(snapshot, partition).items())
                if parsed.matches(rows[0].row.components, rows[0].row.choice)
            ]

        for found in client.reader.read_each(client.partition_paths(parsed), use):
            yield from found

    def partitions(self, prefix: str | Mapping[str, str | int] | None = None) -> Iterator[PartitionInfo]:
        """The directories that hold shards, sorted by path.

        prefix: only those in which it may cover something.
        """
        client = self._client()
        found = client.reader.listings(client.partition_paths(client.prefix(prefix)))

        def info(part: tuple[str, list[Listed]]) -> PartitionInfo:
            path, listed = part
            replaced = _replaced(client, listed)
            rows = sum(item.name.rows for item in listed if item.name.text not in replaced)
            return PartitionInfo(path, len(listed), rows, sum(item.entry.size for item in listed))

        return answer_each(client.storage, info, (part for part in found if part[1]))

    def info(self) -> DatasetInfo:
        """Settings and counts. Costs one listing per partition, and the index of a compacted shard that has others beside it."""
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

    def _client(self) -> Lookup:
        if self._made is None or self._made.pid != os.getpid():
            self._made = Lookup(self.uri, self.run, self._storage_options, self._made)
        return self._made


def _replaced(client: Lookup, listed: Sequence[Listed]) -> frozenset[str]:
    """Names that a listed shard replaces, as far as those can be read that tell of it."""
    least = min(item.name.level for item in listed)
    names: set[str] = set()
    for item in listed:
        if item.name.level > least:
            with suppress(ObjectNotFoundError, CorruptShardError):
                names.update(client.reader.load(item).index.inputs)
    return frozenset(names)
