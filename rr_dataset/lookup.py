"""From ids and prefixes to visible rows and records: what every read of a dataset shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt

from rr_dataset.description import read_format
from rr_dataset.errors import InvalidInputError, RecordDroppedError, RecordNotFoundError
from rr_dataset.keys import Prefix
from rr_dataset.layout import DatasetFormat, parse_ref, partition_path, row_ref
from rr_dataset.live import Turns, assemble
from rr_dataset.payload import Arrays, Draft, fill
from rr_dataset.record import RecordHead, RoutingRecord, Row
from rr_dataset.selection import Tokens
from rr_dataset.snapshot import Located, Reader, Snapshot
from rr_dataset.storage import open_storage
from rr_dataset.walk import partition_paths

_R = TypeVar("_R")

ON_MISSING = ("raise", "none")
NAMED = 10  # ids that an error spells out


class Found(NamedTuple):
    """A record that is there: what it is, and its rows by record id."""

    head: RecordHead
    rows: Mapping[str, Located]


FoundByKey = Mapping[str, Found]


class Lookup:
    """What a process needs to read a dataset. Thread-safe; never shared with a forked child."""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        run: str | None,
        storage_options: Mapping[str, Any] | None,
        parent: Lookup | None = None,
    ) -> None:
        """parent: that of the process which this one was forked from; what it knows is taken over, its client is not."""
        self.pid = os.getpid()
        self.run = run
        self.storage = open_storage(uri, storage_options)
        self.format: DatasetFormat = read_format(self.storage) if parent is None else parent.format
        self.reader: Reader = Reader(
            self.storage, self.format, None if parent is None else parent.reader.indexes.after_fork()
        )

    def prefix(self, prefix: str | Mapping[str, str | int] | None) -> Prefix:
        """The prefix by component; None covers everything."""
        if prefix is None:
            return Prefix((None,) * len(self.format.keys.components))
        return self.format.keys.parse_prefix(prefix)

    def by_partition(self, ids: Iterable[str]) -> dict[str, set[str]]:
        """The ids by the path of their partition."""
        keys = self.format.keys
        wanted: dict[str, set[str]] = {}
        for request_id in ids:
            path = partition_path(keys.partition(keys.parse(request_id).components))
            wanted.setdefault(path, set()).add(request_id)
        return wanted

    def partition_paths(self, prefix: Prefix) -> Iterator[str]:
        """The partition directories that may hold a match, sorted; pinned levels are not listed."""
        return partition_paths(self.storage, self.format.keys, prefix)

    def rows(self, snapshot: Snapshot, partition: str, ids: Iterable[str] | None = None) -> dict[str, list[Located]]:
        """The visible rows of this run and of the turns that are kept, by request id; `ids` None: of all."""
        found = snapshot.rows(partition, ids)
        if self.run is not None:
            found = _only(found, lambda row: row.run_id == self.run)
        if found and self.format.last_turn is not None:
            everything = (row for shard in snapshot.shards[partition] for row in shard.index.rows)
            turns = Turns(everything, self.format.last_turn)
            found = _only(found, lambda row: not turns.hides(row))
        return found

    def records(self, snapshot: Snapshot, partition: str, ids: Iterable[str] | None = None) -> dict[str, Found]:
        """What the visible rows make together, by request id."""
        found = {}
        for request_id, rows in self.rows(snapshot, partition, ids).items():
            head = assemble([located.row for located in rows], self.format.spec)
            if head is not None:
                found[request_id] = Found(head, {located.row.record_id: located for located in rows})
        return found

    def heads(self, asked: Sequence[str], on_missing: str) -> list[RecordHead | None]:
        """Heads in the order asked."""
        wanted = self.by_partition(asked)

        def use(snapshot: Snapshot) -> list[RecordHead | None]:
            found = self._find(snapshot, wanted)
            self._check_missing(dict(zip(asked, asked, strict=True)), found, snapshot, on_missing)
            return [found[request_id].head if request_id in found else None for request_id in asked]

        return self.reader.read(list(wanted), use)

    def read(
        self,
        asked: Sequence[str],
        layers: Sequence[int] | None,
        selections: Sequence[Tokens],
        *,
        on_missing: str,
        out: npt.NDArray[Any] | None = None,
    ) -> list[RoutingRecord | None]:
        """Records in the order asked."""
        return self.use_ids(asked, on_missing, self._to_records(asked, layers, selections, out))

    def resolve(
        self, refs: Sequence[str], layers: Sequence[int] | None, selections: Sequence[Tokens]
    ) -> list[RoutingRecord | None]:
        """The rows named, each as a record of its own, in the order asked."""
        return self.use_refs(refs, self._to_records(refs, layers, selections, None))

    def use_ids(self, asked: Sequence[str], on_missing: str, use: Callable[[FoundByKey, Snapshot], _R]) -> _R:
        """`use` on the records of these ids, none of them dropped; it may run more than once."""
        wanted = self.by_partition(asked)
        keys = dict(zip(asked, asked, strict=True))
        return self._use(keys, list(wanted), lambda taken: self._find(taken, wanted), on_missing, use)

    def use_refs(self, refs: Sequence[str], use: Callable[[FoundByKey, Snapshot], _R]) -> _R:
        """The same on the rows that the refs name, each as a record of its own, by ref."""
        keys = {ref: _parsed(ref)[1] for ref in refs}
        wanted = self.by_partition(keys.values())

        def find(snapshot: Snapshot) -> FoundByKey:
            found = {}
            for partition, ids in wanted.items():
                for request_id, rows in self.rows(snapshot, partition, ids).items():
                    for located in rows:
                        ref = row_ref(located.row.record_id, request_id)
                        head = assemble([located.row], self.format.spec) if ref in keys else None
                        if head is not None:
                            found[ref] = Found(head, {located.row.record_id: located})
            return found

        return self._use(keys, list(wanted), find, "raise", use)

    def _find(self, snapshot: Snapshot, wanted: Mapping[str, set[str]]) -> dict[str, Found]:
        found: dict[str, Found] = {}
        for partition, ids in wanted.items():
            found.update(self.records(snapshot, partition, ids))
        return found

    def _use(
        self,
        keys: Mapping[str, str],
        partitions: Sequence[str],
        find: Callable[[Snapshot], FoundByKey],
        on_missing: str,
        use: Callable[[FoundByKey, Snapshot], _R],
    ) -> _R:
        """keys: the request ids by what `find` finds records by."""

        def checked(snapshot: Snapshot) -> _R:
            found = find(snapshot)
            self._check_missing(keys, found, snapshot, on_missing)
            self._check_dropped(found, len(keys))
            return use(found, snapshot)

        return self.reader.read(partitions, checked, keep_open=True, early=True)

    def _to_records(
        self,
        keys: Sequence[str],
        layers: Sequence[int] | None,
        selections: Sequence[Tokens],
        out: npt.NDArray[Any] | None,
    ) -> Callable[[FoundByKey, Snapshot], list[RoutingRecord | None]]:
        """What makes records of what was found, in the order of the keys."""
        spec = self.format.spec
        chosen = spec.check_layers(layers, at_least=0)

        def use(found: FoundByKey, snapshot: Snapshot) -> list[RoutingRecord | None]:
            arrays = Arrays(len(keys))
            drafts = [
                Draft(found[key].head, found[key].rows, spec, chosen, tokens, arrays, out) if key in found else None
                for key, tokens in zip(keys, selections, strict=True)
            ]
            fill([draft for draft in drafts if draft is not None], snapshot, self.reader)
            return [None if draft is None else draft.record() for draft in drafts]

        return use

    def _check_missing(self, keys: Mapping[str, str], found: FoundByKey, snapshot: Snapshot, on_missing: str) -> None:
        if on_missing not in ON_MISSING:
            raise InvalidInputError(f"on_missing={on_missing!r}: expected one of {', '.join(ON_MISSING)}")
        missing = [key for key in keys if key not in found]
        if on_missing == "none" or not missing:
            return
        of_run = "" if self.run is None else f" of run {self.run!r}"
        damaged = [
            path for place in self.by_partition(keys[key] for key in missing) for path in snapshot.damaged[place]
        ]
        hint = f"; damaged and stepped over, these may have held them: {listed(damaged)}" if damaged else ""
        raise RecordNotFoundError(
            f"{self.storage.uri} has no record{of_run} of {len(missing)} of {len(keys)} ids: {listed(missing)}. "
            f"Not yet flushed, deleted, or never put{hint}"
        )

    def _check_dropped(self, found: FoundByKey, count: int) -> None:
        dropped = [f"{key} ({each.head.reason})" for key, each in found.items() if each.head.status == "dropped"]
        if dropped:
            raise RecordDroppedError(
                f"{self.storage.uri}: the writer dropped {len(dropped)} of {count} ids: {listed(dropped)}"
            )


def _only(found: Mapping[str, list[Located]], keep: Callable[[Row], bool]) -> dict[str, list[Located]]:
    kept = {key: [each for each in rows if keep(each.row)] for key, rows in found.items()}
    return {key: rows for key, rows in kept.items() if rows}


def _is_several(ids: object) -> bool:
    """Whether this is a collection of texts, and not a single one."""
    return isinstance(ids, Iterable) and not isinstance(ids, (str, bytes))


def id_list(ids: Iterable[str], what: str = "request ids") -> list[str]:
    """Several ids; a single one is an error that says so."""
    if not _is_several(ids):
        raise InvalidInputError(f"{ids!r}: expected several {what}, for example [{ids!r}]")
    return list(ids)


def listed(texts: Sequence[str]) -> str:
    """The first texts, and how many more there are."""
    shown = ", ".join(texts[:NAMED])
    return shown if len(texts) <= NAMED else f"{shown} and {len(texts) - NAMED} more"


def _parsed(ref: str) -> tuple[str, str]:
    parsed = parse_ref(str(ref))
    if parsed is None:
        raise InvalidInputError(
            f"ref {ref!r}: expected the `ref` of a Receipt, <16 hex digits>-<16 hex digits>:<request id>"
        )
    return parsed
