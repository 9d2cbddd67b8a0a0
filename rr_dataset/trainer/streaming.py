"""Samples as they become visible: each id once, on one rank, and none lost or repeated over a restart.

    stream = RoutingStream(uri, StreamOptions(rank=dp_rank, num_ranks=dp_size, records=64, timeout_s=600))
    for sample in stream: ...
    DataLoader(stream.for_torch(), batch_size=8, num_workers=1)     # for_paddle() likewise

Which rank an id goes to is decided by a hash of the id (or of its prompt), or, given a list of ids, by its place in the list:
ranks agree without a word, although each sees records at another time.
"""

from __future__ import annotations

import operator
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from rr_dataset.dataset import RoutingDataset, open_dataset
from rr_dataset.errors import InvalidInputError, NotFoundError, RecordDroppedError, WaitTimeoutError
from rr_dataset.follow import FIRST_PAUSE_S, LAST_PAUSE_S, PollCursor
from rr_dataset.lookup import listed
from rr_dataset.options import check_seconds
from rr_dataset.record import RecordHead
from rr_dataset.trainer.idlist import IdList
from rr_dataset.trainer.samples import Sample, SampleOptions, read_samples

NO_NUMBER = -1  # of a sample of a stream without a list of ids

_FRAMEWORKS = {"torch": "torch.utils.data", "paddle": "paddle.io"}
_HASH = np.dtype("<u8")
_STATE_VERSION = 1


@dataclass(frozen=True)
class StreamOptions:
    """Which records a stream gives, to whom, and when it ends. The same on every rank, but for `rank`.

    prefix: only ids that it covers by component, as in `RoutingDataset.ids`.
    final_only: wait until a record is final; False: give it as it is when it is first seen, once.
    min_weight_version: only records whose newest weight version, a whole number, is at least this.
    on_dropped: "raise" RecordDroppedError for an id the writer gave up (iterate again to go on behind it), or "skip" it.
    rank, num_ranks: the data-parallel rank, and how many there are.
    together: a component of the key scheme: ids alike up to and including it (the samples of a prompt) go to one rank.
    group_size: give so many ids that belong together one after the other, once all of them are ready.
    equal: with a list of ids, leave out the last ones (or groups) that would not give every rank as many.
    records: an iteration gives this rank so many, waiting for them, and the next one goes on behind them.
    timeout_s: seconds to wait while nothing new becomes ready. 0: give what is there.
    buffer_bytes: of records that are read together; a larger one is read alone.
    """

    prefix: str | Mapping[str, str | int] | None = None
    final_only: bool = True
    min_weight_version: int | None = None
    on_dropped: Literal["raise", "skip"] = "raise"
    rank: int = 0
    num_ranks: int = 1
    together: str | None = None
    group_size: int | None = None
    equal: bool = False
    records: int | None = None
    timeout_s: float = 60.0
    buffer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        if self.on_dropped not in ("raise", "skip"):
            raise InvalidInputError(f"on_dropped={self.on_dropped!r}: expected raise or skip")
        if not 0 <= operator.index(self.rank) < operator.index(self.num_ranks):
            raise InvalidInputError(
                f"rank={self.rank!r} of num_ranks={self.num_ranks!r}: expected 0 <= rank < num_ranks"
            )
        for name in ("group_size", "records", "buffer_bytes"):
            value = getattr(self, name)
            if value is not None and operator.index(value) < 1:
                raise InvalidInputError(f"{name}={value!r}: expected at least 1")
        if self.group_size is not None and self.together is None:
            raise InvalidInputError(
                "group_size without together: name the component that makes a group, such as 'data_id'"
            )


class Ready(NamedTuple):
    """An id whose turn comes when those before it were given."""

    request_id: str
    num_tokens: int


class RoutingStream:
    """Iterates samples (see `Sample`) of what is or becomes visible. Ordered by when this rank saw it ready, then by id.

    An iteration ends after `records`, once all of `ids` were given, or when nothing new was ready for `timeout_s`; the next
    one goes on where it ended. Never is an id given twice, not even when it is put again. What is deleted before its turn is left
    out and counted in `gone`; so is what the writer dropped, in `dropped`.

    `state_dict` says what was given, exactly, between any two samples: about 8 bytes for each id given and each row stored, and
    the ids that are ready. In memory it is about 100 bytes for each id given, and `buffer_bytes` of records.

    In a worker of a loader an iteration gives the worker's part of the rank's ids. There the loader reads ahead of the
    training loop, and non-persistent workers forget with each epoch what they gave: call `mark` with the ids of every batch that was used; the
    stream in the main process then knows, and its `state_dict` is right whatever the workers have read.

    One thread at a time. Pickles with its state.
    """

    def __init__(
        self,
        dataset: RoutingDataset | str | os.PathLike[str],
        options: StreamOptions | None = None,
        samples: SampleOptions | None = None,
        ids: Iterable[str] | None = None,
    ) -> None:
        """ids: give these only, each as soon as it is ready, shared out in turns: ranks get as many, or one (group) more.

        Raises InvalidInputError for an unknown component, DatasetNotFoundError for an address without a dataset.
        """
        self.dataset = dataset if isinstance(dataset, RoutingDataset) else open_dataset(dataset)
        self.options = StreamOptions() if options is None else options
        self.samples = SampleOptions() if samples is None else samples
        self.ids = ids if isinstance(ids, IdList) or ids is None else IdList(ids)
        if self.ids is not None and self.options.prefix is not None:
            raise InvalidInputError(f"prefix={self.options.prefix!r} with a list of ids: give one of the two")
        self.gone = 0
        self.dropped = 0
        names = self.dataset.keys.components
        if self.options.together not in (None, *names):
            raise InvalidInputError(f"together={self.options.together!r}: expected one of {', '.join(names)}")
        self._together = None if self.options.together is None else names.index(self.options.together) + 1
        self._told: set[int] = set()
        self._given = 0  # in this iteration
        self._worker = (0, 1)
        self._cursor: PollCursor | None = None
        self._ready: deque[Ready] = deque()
        self._groups: dict[str, list[Ready]] = {}  # that are not complete
        self._rows: dict[str, int] | None = None  # of this worker's ids in the list

    def __iter__(self) -> Iterator[Sample]:
        """Raises WaitTimeoutError when `records` or the list are not complete after `timeout_s` without a new one,
        RecordDroppedError, InvalidInputError for a weight version that is no number, and as `RoutingDataset.get_many`.
        """
        self._begin(worker_share())
        options = self.options
        heard, pause_s = time.monotonic(), FIRST_PAUSE_S
        while options.records is None or self._given < options.records:
            if self._ready:
                yield from self._next_samples()
                heard, pause_s = time.monotonic(), FIRST_PAUSE_S
                continue
            if self._rows is not None and all(_hash(each) in self._told for each in self._rows):
                return
            self._look()
            if self._ready:
                continue
            left_s = heard + options.timeout_s - time.monotonic()
            if left_s <= 0:
                self._give_up()
                return
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def mark(self, request_ids: Iterable[str]) -> None:
        """Take these as given, if they are not yet: for batches that came through a loader with workers."""
        fresh = {_hash(request_id) for request_id in request_ids} - self._told
        self._told |= fresh
        self._given += len(fresh)
        self._ready = deque(each for each in self._ready if _hash(each.request_id) not in fresh)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of a stream with the same dataset, options and ids needs to go on. Plain values; pickles."""
        return {
            "version": _STATE_VERSION,
            "dataset": self.dataset.format.uuid,
            "share": self._share(),
            "worker": self._worker,
            "told": np.fromiter(self._told, _HASH, len(self._told)).tobytes(),
            "given": self._given,
            "cursor": None if self._cursor is None else self._cursor.to_bytes(),
            "ready": [tuple(each) for each in self._ready],
            "groups": [tuple(each) for group in self._groups.values() for each in group],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where that state was taken. Whatever came, was deleted or compacted since is seen as if nothing had happened.

        Raises InvalidInputError for a state of another dataset, rank or version.
        """
        wanted = (_STATE_VERSION, self.dataset.format.uuid, self._share())
        found = (state.get("version"), state.get("dataset"), tuple(state.get("share", ())))
        if found != wanted:
            raise InvalidInputError(
                f"state of (version, dataset, (rank, num_ranks, together, ids)) {found}: this stream is {wanted}; what other "
                "ranks were given is not in it"
            )
        self._told = set(np.frombuffer(state["told"], _HASH).tolist())
        self._given = state["given"]
        self._worker = tuple(state["worker"])
        self._cursor = None if state["cursor"] is None else PollCursor.from_bytes(state["cursor"])
        self._ready = deque(Ready(*each) for each in state["ready"])
        self._groups = {}
        for each in state["groups"]:
            self._groups.setdefault(self._group(each[0]), []).append(Ready(*each))
        self._rows = None

    def for_torch(self) -> Any:
        """This stream as a `torch.utils.data.IterableDataset`, which alone torch's DataLoader takes for one."""
        return _adapted(import_module("torch.utils.data").IterableDataset, self)

    def for_paddle(self) -> Any:
        """This stream as a `paddle.io.IterableDataset`, which alone paddle's DataLoader takes for one."""
        return _adapted(import_module("paddle.io").IterableDataset, self)

    def _share(self) -> tuple[int, int, str | None, str | None]:
        options = self.options
        return options.rank, options.num_ranks, options.together, None if self.ids is None else self.ids.digest

    def _begin(self, worker: tuple[int, int]) -> None:
        """Start an iteration, in a worker perhaps. Part of another worker is forgotten: what was told is enough to go on."""
        options = self.options
        if options.records is not None and worker[1] > 1:
            raise InvalidInputError(
                f"records={options.records} with {worker[1]} workers: none knows how many the others have; use one worker, or "
                "count in the training loop"
            )
        if worker != self._worker:
            self._worker, self._cursor, self._rows = worker, None, None
            self._ready.clear()
            self._groups.clear()
        if self.ids is not None and self._rows is None:
            self._rows = self._own_rows(self.ids)
        if options.records is not None and self._given >= options.records:
            self._given -= options.records
        elif options.records is None:
            self._given = 0

    def _own_rows(self, ids: IdList) -> dict[str, int]:
        """This worker's ids, and their rows in the list."""
        groups: dict[str, dict[str, int]] = {}
        for row, request_id in enumerate(ids):
            groups.setdefault(self._group(request_id), {})[request_id] = row
        options, (worker, workers) = self.options, self._worker
        end = len(groups) - len(groups) % options.num_ranks if options.equal else len(groups)
        own: dict[str, int] = {}
        for turn, group in enumerate(list(groups.values())[options.rank : end : options.num_ranks]):
            if turn % workers == worker:
                own.update(group)
        return own

    def _group(self, request_id: str) -> str:
        """What ids that belong together have in common."""
        if self._together is None:
            return request_id
        return "\0".join(each or "" for each in self.dataset.keys.parse(request_id).components[: self._together])

    def _is_own(self, request_id: str) -> bool:
        if self._rows is not None:
            return request_id in self._rows
        options, (worker, workers) = self.options, self._worker
        place, rank = divmod(_hash(self._group(request_id)), options.num_ranks)
        return rank == options.rank and place % workers == worker

    def _look(self) -> None:
        """Queue what has become ready since the last look."""
        queued = {each.request_id for group in self._groups.values() for each in group}
        cursor = self._cursor
        if self._rows is None:
            heads, cursor = self.dataset.poll(cursor)
        else:
            left = [each for each in self._rows if _hash(each) not in self._told and each not in queued]
            heads = [head for head in self.dataset.heads(left, "none") if head is not None]
        keys = self.dataset.keys
        prefix = None if self.options.prefix is None else keys.parse_prefix(self.options.prefix)
        ready = [
            head
            for head in heads
            if self._is_own(head.request_id)
            and head.request_id not in queued
            and _hash(head.request_id) not in self._told
            and (prefix is None or prefix.matches(head.components, head.choice))
            and self._is_ready(head)
        ]
        for head in sorted(ready, key=lambda head: head.request_id):
            self._queue(Ready(head.request_id, head.num_tokens), dropped=head.status == "dropped")
        self._cursor = cursor

    def _is_ready(self, head: RecordHead) -> bool:
        if head.status == "dropped":
            return True
        lowest = self.options.min_weight_version
        return (head.final or not self.options.final_only) and (lowest is None or _newest_version(head) >= lowest)

    def _queue(self, ready: Ready, *, dropped: bool) -> None:
        if self.options.group_size is None or dropped:
            self._ready.append(ready)
            return
        name = self._group(ready.request_id)
        group = self._groups.setdefault(name, [])
        group.append(ready)
        if len(group) == self.options.group_size:
            self._ready.extend(sorted(self._groups.pop(name)))

    def _next_samples(self) -> Iterator[Sample]:
        """Read as many of those that are ready as the buffer holds, and give them one by one."""
        options = self.options
        spec = self.dataset.spec
        token_bytes = spec.bytes_per_token // spec.num_layers * len(spec.check_layers(self.samples.layers))
        most = len(self._ready) if options.records is None else min(len(self._ready), options.records - self._given)
        batch: list[str] = []
        size = 0
        for ready in list(self._ready)[:most]:
            size += ready.num_tokens * token_bytes
            if batch and size > options.buffer_bytes:
                break
            batch.append(ready.request_id)
        numbers = [
            NO_NUMBER if self._rows is None or self.ids is None else self.ids.number(self._rows[each]) for each in batch
        ]
        try:
            samples = read_samples(self.dataset, batch, numbers, self.samples)
        except NotFoundError:
            self._leave_out(batch)
            return
        samples.reverse()
        while samples:
            self._tell(self._ready.popleft().request_id)
            self._given += 1
            yield samples.pop()

    def _leave_out(self, batch: Sequence[str]) -> None:
        """Take those that cannot be read from the queue. Raises RecordDroppedError for the first that was dropped."""
        gone, dropped = set(), {}
        for request_id, head in zip(batch, self.dataset.heads(batch, "none"), strict=True):
            if head is None:
                gone.add(request_id)
            elif head.status == "dropped":
                dropped[request_id] = head.reason
                self._tell(request_id)
        self._ready = deque(
            each for each in self._ready if each.request_id not in gone and each.request_id not in dropped
        )
        self.gone += len(gone)
        self.dropped += len(dropped)
        if dropped and self.options.on_dropped == "raise":
            texts = [f"{request_id} ({reason})" for request_id, reason in dropped.items()]
            raise RecordDroppedError(
                f"{self.dataset.uri}: the writer dropped {listed(texts)}; on_dropped='skip' leaves them out"
            )

    def _tell(self, request_id: str) -> None:
        self._told.add(_hash(request_id))

    def _give_up(self) -> None:
        """Nothing new for `timeout_s`. Raises WaitTimeoutError where more was promised."""
        options = self.options
        after = f"after {options.timeout_s:g} s without a new one"
        parts = [f"{len(group)} of {options.group_size} of {group[0].request_id}" for group in self._groups.values()]
        groups = f"; groups that are not complete: {listed(parts)}" if parts else ""
        if self._rows is not None:
            left = [each for each in self._rows if _hash(each) not in self._told]
            raise WaitTimeoutError(
                f"{self.dataset.uri}: {len(left)} of {len(self._rows)} ids are not ready {after}: {listed(left)}{groups}"
            )
        if options.records is not None:
            raise WaitTimeoutError(
                f"{self.dataset.uri}: {self._given} of {options.records} records for rank {options.rank} of "
                f"{options.num_ranks} {after}{groups}"
            )


def worker_share() -> tuple[int, int]:
    """(number of this worker, how many there are) in a worker of a torch or paddle loader, else (0, 1). Imports neither."""
    for name in _FRAMEWORKS.values():
        module = sys.modules.get(name)
        info = None if module is None else module.get_worker_info()
        if info is not None:
            return info.id, info.num_workers
    return 0, 1


def _adapted(base: type[Any], stream: RoutingStream) -> Any:
    class Adapted(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Sample]:
            return iter(stream)

        def __reduce__(self) -> tuple[Any, ...]:
            return _adapted, (base, stream)

        def state_dict(self) -> dict[str, Any]:
            return stream.state_dict()

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            stream.load_state_dict(state)

    return Adapted()


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _newest_version(head: RecordHead) -> float:
    """The highest weight version as a number; below any where the record names none."""
    try:
        return max((int(version) for _, _, version in head.weights), default=float("-inf"))
    except ValueError:
        versions = sorted({version for _, _, version in head.weights})
        raise InvalidInputError(
            f"min_weight_version: {head.request_id!r} has weight versions {listed(versions)}, expected whole numbers"
        ) from None
