"""Following a dataset that grows: what is new since a cursor, and waiting for ids."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from rr_dataset.errors import InvalidInputError, WaitTimeoutError
from rr_dataset.lookup import Lookup, listed
from rr_dataset.record import RecordHead
from rr_dataset.snapshot import Snapshot

FIRST_PAUSE_S = 0.005
LAST_PAUSE_S = 0.25
SETTLED_NS = 2_000_000_000  # longer than the tick of any file system's clock

_MAGIC = b"rrpoll0\n"
_HEADER_BYTES = 4  # length of the header, little-endian
_CHECK_BYTES = 8
_HASH = np.dtype("<u8")


class Seen(NamedTuple):
    """What was told of a partition."""

    changed_ns: int  # of its directory when it was listed; 0: list it again in any case
    told: bytes  # XXH3-64 of the record id of each visible row


@dataclass(frozen=True, eq=False)
class PollCursor:
    """What `RoutingDataset.poll` has told so far. Opaque, immutable, for that dataset and run only.

    About 8 bytes for each row that is stored, and a directory's name for each partition; what was deleted is forgotten. It
    pickles, and `to_bytes` is a form for a checkpoint.
    """

    dataset: str  # uuid
    run: str | None
    partitions: Mapping[str, Seen]

    def to_bytes(self) -> bytes:
        """All of it, for `from_bytes` of this or a later version."""
        header = {
            "dataset": self.dataset,
            "run": self.run,
            "partitions": list(self.partitions),
            "changed_ns": [seen.changed_ns for seen in self.partitions.values()],
            "bytes": [len(seen.told) for seen in self.partitions.values()],
        }
        packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 1)
        told = (seen.told for seen in self.partitions.values())
        body = b"".join((_MAGIC, len(packed).to_bytes(_HEADER_BYTES, "little"), packed, *told))
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> PollCursor:
        """The cursor of `to_bytes`. Raises InvalidInputError for other bytes."""
        body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
        if not body.startswith(_MAGIC) or xxhash.xxh3_64_digest(body) != check:
            raise InvalidInputError(f"cursor of {len(data)} bytes: these are not what PollCursor.to_bytes() returned")
        start = len(_MAGIC) + _HEADER_BYTES
        at = start + int.from_bytes(body[len(_MAGIC) : start], "little")
        header = json.loads(zlib.decompress(body[start:at]))
        partitions = {}
        for path, changed_ns, length in zip(header["partitions"], header["changed_ns"], header["bytes"], strict=True):
            partitions[path] = Seen(changed_ns, body[at : at + length])
            at += length
        return cls(header["dataset"], header["run"], partitions)

    def __reduce__(self) -> tuple[Any, ...]:
        return PollCursor.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        rows = sum(len(seen.told) for seen in self.partitions.values()) // _HASH.itemsize
        return f"PollCursor({rows} rows in {len(self.partitions)} partitions of dataset {self.dataset})"


def poll(lookup: Lookup, cursor: PollCursor | None) -> tuple[list[RecordHead], PollCursor]:
    """See `RoutingDataset.poll`."""
    dataset = lookup.format.uuid
    if cursor is None:
        cursor = PollCursor(dataset, lookup.run, {})
    elif not isinstance(cursor, PollCursor):
        raise InvalidInputError(f"cursor={cursor!r:.80}: expected None or the PollCursor of the last call")
    elif (cursor.dataset, cursor.run) != (dataset, lookup.run):
        raise InvalidInputError(
            f"{cursor!r}, run {cursor.run!r}: this is dataset {dataset}, run {lookup.run!r}; start it with None"
        )
    before = cursor.partitions
    after: dict[str, Seen] = {}
    changed_ns: dict[str, int] = {}

    def changed() -> Iterator[str]:
        for path in lookup.partition_paths(lookup.prefix(None)):
            found = _changed_ns(lookup, path)
            if found and path in before and before[path].changed_ns == found:
                after[path] = before[path]
            else:
                changed_ns[path] = found
                yield path

    def use(snapshot: Snapshot) -> list[tuple[str, bytes, list[RecordHead]]]:
        return [
            (path, *_news(lookup, snapshot, path, before.get(path)))
            for path in snapshot.shards
            if snapshot.shards[path]
        ]

    heads = []
    for news in lookup.reader.read_each(changed(), use):
        for path, told, new in news:
            after[path] = Seen(changed_ns[path], told)
            heads += new
    return heads, PollCursor(dataset, lookup.run, after)


def wait_for(
    lookup: Lookup, asked: Sequence[str], timeout_s: float, weight_version: str | int | None
) -> list[RecordHead]:
    """See `RoutingDataset.wait_for`."""
    version = None if weight_version is None else str(weight_version)
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    ready: dict[str, RecordHead] = {}
    missing = list(dict.fromkeys(asked))
    while True:
        seen = dict(zip(missing, lookup.heads(missing, "none"), strict=True))
        ready.update((key, head) for key, head in seen.items() if head is not None and _is_ready(head, version))
        missing = [key for key in missing if key not in ready]
        if not missing:
            return [ready[key] for key in asked]
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            states = [f"{key} ({_state(seen[key])})" for key in missing]
            wanted = "final" if version is None else f"final with weight version {version!r}"
            raise WaitTimeoutError(
                f"{lookup.storage.uri}: {len(missing)} of {len(set(asked))} ids are not {wanted} after {timeout_s:g} s: "
                f"{listed(states)}. Not put or not flushed yet, or deleted"
            )
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LAST_PAUSE_S)


def _changed_ns(lookup: Lookup, path: str) -> int:
    """The directory's time of change if a later change is sure to have another one, else 0.

    Only where the clock of the store is ours: a dataset of a shared file system has a skew.
    """
    if lookup.format.max_clock_skew_s:
        return 0
    now_ns = time.time_ns()
    changed_ns = lookup.storage.changed_ns(path)
    return changed_ns if changed_ns is not None and now_ns - changed_ns > SETTLED_NS else 0


def _news(lookup: Lookup, snapshot: Snapshot, path: str, seen: Seen | None) -> tuple[bytes, list[RecordHead]]:
    """Hashes of all visible rows, and the heads that a row not told of has a part in."""
    known = frozenset() if seen is None else frozenset(np.frombuffer(seen.told, _HASH).tolist())
    hashes: set[int] = set()
    heads = []
    for _, found in sorted(lookup.records(snapshot, path).items()):
        hashes.update(map(_hash, found.rows))
        if not known.issuperset(_hash(row.record_id) for row in found.head.rows):
            heads.append(found.head)
    return np.array(sorted(hashes), _HASH).tobytes(), heads


def _hash(record_id: str) -> int:
    return xxhash.xxh3_64_intdigest(record_id.encode())


def _is_ready(head: RecordHead, version: str | None) -> bool:
    return head.status == "dropped" or (head.final and version in (None, _newest_version(head)))


def _newest_version(head: RecordHead) -> str | None:
    """Of the newest put: the version it names, else that of its last span."""
    row = head.rows[-1]
    if row.weight_version is None and row.weight_spans:
        return max(row.weight_spans)[2]
    return row.weight_version


def _state(head: RecordHead | None) -> str:
    if head is None:
        return "absent"
    if head.final:
        return f"{head.status}, weight version {_newest_version(head)!r}"
    return f"partial up to token {head.num_tokens}"
