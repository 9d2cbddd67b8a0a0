"""Samples as they become visible: each id once, on one rank, and none lost or repeated over a restart.

    stream = RoutingStream(uri, StreamOptions(rank=dp_rank, num_ranks=dp_size, records=64, timeout_s=600))
    for sample in stream: ...
    DataLoader(stream.for_torch(), batch_size=8, num_workers=1)     # for_paddle() likewise

Which rank an id goes to is decided by a hash of the id (or of its prompt), or, given a list of ids, by its place in the list:
ranks agree without a word, although each sees records at another time.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import xxhash

from rr_dataset.dataset import RoutingDataset, open_dataset
from rr_dataset.errors import (
    DatasetNotFoundError,
    InvalidInputError,
    NotFoundError,
    RecordDroppedError,
    RecordNotFoundError,
    WaitTimeoutError,
)
from rr_dataset.follow import FIRST_PAUSE_S, LAST_PAUSE_S, PollCursor
from rr_dataset.lookup import listed
from rr_dataset.record import RecordHead
from rr_dataset.trainer.idlist import IdList
from rr_dataset.trainer.in_loader import adapted, worker_share
from rr_dataset.trainer.samples import Sample, SampleOptions, read_samples
from rr_dataset.trainer.stream_options import StreamOptions

NO_NUMBER = -1  # of a sample of a stream without a list of ids

_HASH = np.dtype("<u8")
_STATE_VERSION = 2
_DELETED, _DROPPED = "deleted", "dropped: "  # why an id is left out

_log = logging.getLogger("rr_dataset")


class Ready(NamedTuple):
    """An id whose turn comes when those before it were given; one that is lost keeps its place in a group."""

    request_id: str
    num_tokens: int
    lost: str = ""  # why it cannot be given


class RoutingStream:
    """Iterates samples (see `Sample`) of what is or becomes visible. Ordered by when this rank saw it ready, then by id.

    An iteration ends after `records`, once all of `ids` were given, or when nothing new was ready for `timeout_s`; the next
    one goes on where it ended. Never is an id given twice, not even when it is put again. What is deleted before its turn, dropped
    by the writer, or in a group with such an id, is left out, logged as a warning and named in `left_out`; put again after it
    was deleted, it is given (but for one of a group).

    `state_dict` says what was given, exactly, between any two samples: about 8 bytes for each id given and each row stored, and
    the ids that are ready. In memory it is about 100 bytes for each id given, and `buffer_bytes` of records.

    In a worker of a loader an iteration gives the worker's part of the rank's ids. There the loader reads ahead of the
    training loop, and non-persistent workers forget with each epoch what they gave: call `mark` with the ids of every batch that
    was used; the stream in the main process then knows, the next epoch's workers go on behind it, and its `state_dict` is right
    whatever the workers have read. `left_out` and `waiting` are of the process that iterates.

    Default collate functions stack samples of equal length only: pass `collate_fn=list` or one that pads.

    One thread at a time. Pickles with its state. `left_out`: by id why it was not given, about 200 bytes for each.
    """

    def __init__(
        self,
        dataset: RoutingDataset | str | os.PathLike[str],
        options: StreamOptions | None = None,
        samples: SampleOptions | None = None,
        ids: Iterable[str] | None = None,
    ) -> None:
        """ids: give these only, each as soon as it is ready, shared out in turns: ranks get as many, or one (group) more.

        Raises InvalidInputError for an unknown component, `equal` without a list, or a list whose groups do not fit `group_size` or
        `equal`; DatasetNotFoundError for an address without a dataset.
        """
        self.dataset = dataset if isinstance(dataset, RoutingDataset) else open_dataset(dataset)
        self.options = StreamOptions() if options is None else options
        self.samples = SampleOptions() if samples is None else samples
        self.ids = ids if isinstance(ids, IdList) or ids is None else IdList(ids)
        if self.ids is not None and self.options.prefix is not None:
            raise InvalidInputError(f"prefix={self.options.prefix!r} with a list of ids: give one of the two")
        if self.ids is None and self.options.equal:
            raise InvalidInputError("equal without a list of ids: who knows how many there will be?")
        names = self.dataset.keys.components
        if self.options.together not in (None, *names):
            raise InvalidInputError(f"together={self.options.together!r}: expected one of {', '.join(names)}")
        self._together = None if self.options.together is None else names.index(self.options.together) + 1
        if self.ids is not None:
            self._check_list(self.ids)
        self.left_out: dict[str, str] = {}
        self._told: set[int] = set()
        self._given = 0  # by all iterations; each ends at a multiple of `records`
        self._worker = (0, 1)
        self._cursor: PollCursor | None = None
        self._ready: deque[list[Ready]] = deque()  # groups that are complete, or single ids
        self._groups: dict[str, list[Ready]] = {}  # that are not complete
        self._rows: dict[str, int] | None = None  # of this worker's ids in the list

    @property
    def gone(self) -> int:
        """How many ids were left out because they were deleted before their turn."""
        return sum(why == _DELETED for why in self.left_out.values())

    @property
    def dropped(self) -> int:
        """How many the writer had dropped."""
        return sum(why.startswith(_DROPPED) for why in self.left_out.values())

    @property
    def waiting(self) -> list[list[str]]:
        """The ids of each group that waits for more; they are not given before it is complete."""
        return [[each.request_id for each in group if not each.lost] for group in self._groups.values()]

    def __len__(self) -> int:
        raise TypeError(
            "a RoutingStream has no length: give a loader stream.for_torch() or stream.for_paddle(), without sampler or shuffle"
        )

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Sample]:
        """Raises WaitTimeoutError when `records` or the list are not complete after `timeout_s` without a new one,
        RecordDroppedError, DatasetNotFoundError when the dataset was removed, with `equal` RecordNotFoundError for an id that was
        deleted, InvalidInputError for a weight version that is no number, and as `RoutingDataset.get_many`.
        """
        self._begin(worker_share())
        options = self.options
        records = options.records
        goal = None if records is None else (self._given // records + 1) * records
        heard, pause_s = time.monotonic(), FIRST_PAUSE_S
        while goal is None or self._given < goal:
            if self._ready:
                yield from self._next_samples(None if goal is None else goal - self._given)
                heard, pause_s = time.monotonic(), FIRST_PAUSE_S
                continue
            if self._rows is not None and not self._left(self._rows):
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
        by_hash = {_hash(request_id): request_id for request_id in request_ids}
        fresh = by_hash.keys() - self._told
        self._told |= fresh
        for each in by_hash.values():
            self.left_out.pop(each, None)
        self._given += len(fresh)
        left = ([each for each in group if _hash(each.request_id) not in fresh] for group in self._ready)
        self._ready = deque(group for group in left if group)
        for name, group in list(self._groups.items()):
            self._groups[name] = [each for each in group if _hash(each.request_id) not in fresh]
            if not self._groups[name]:
                del self._groups[name]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of a stream of the same dataset, rank and ids needs to go on. Plain values; pickles."""
        return {
            "version": _STATE_VERSION,
            "dataset": self.dataset.format.uuid,
            "share": self._share(),
            "worker": self._worker,
            "told": np.fromiter(self._told, _HASH, len(self._told)).tobytes(),
            "given": self._given if self.options.records is None else self._given % self.options.records,
            "looks": self.options.looks(),
            "left_out": dict(self.left_out),
            "cursor": None if self._cursor is None else self._cursor.to_bytes(),
            "ready": [[tuple(each) for each in group] for group in self._ready],
            "groups": [tuple(each) for group in self._groups.values() for each in group],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where that state was taken. Whatever came, was deleted or compacted since is seen as if nothing had happened.

        Options may be others than those of the state. What was given is never given again; with another prefix, weight version,
        `final_only` or `group_size` all that is there is looked at anew. An iteration that had given some of its `records` gives
        what is left to those of this stream, or begins anew where nothing is.

        Raises InvalidInputError for a state of another dataset, version, rank, `num_ranks`, `together` or list.
        """
        wanted = (_STATE_VERSION, self.dataset.format.uuid, self._share())
        found = (state.get("version"), state.get("dataset"), tuple(state.get("share", ())))
        if found != wanted:
            raise InvalidInputError(
                f"state of (version, dataset, (rank, num_ranks, together, ids)) {found}: this stream is {wanted}; what other "
                "ranks were given is not in it"
            )
        self._told = set(np.frombuffer(state["told"], _HASH).tolist())
        records = self.options.records
        self._given = state["given"] if records is None or state["given"] < records else 0
        self.left_out = dict(state["left_out"])
        self._worker = tuple(state["worker"])
        self._cursor = None if state["cursor"] is None else PollCursor.from_bytes(state["cursor"])
        self._ready = deque([Ready(*each) for each in group] for group in state["ready"])
        self._groups = {}
        for each in state["groups"]:
            self._groups.setdefault(self._group(each[0]), []).append(Ready(*each))
        self._rows = None
        if state["looks"] != self.options.looks():
            self._forget_looks()

    def for_torch(self) -> Any:
        """This stream as a `torch.utils.data.IterableDataset`, which alone torch's DataLoader takes for one."""
        return adapted(import_module("torch.utils.data").IterableDataset, self)

    def for_paddle(self) -> Any:
        """This stream as a `paddle.io.IterableDataset`, which alone paddle's DataLoader takes for one."""
        return adapted(import_module("paddle.io").IterableDataset, self)

    def _share(self) -> tuple[int, int, str | None, str | None]:
        options = self.options
        return options.rank, options.num_ranks, options.together, None if self.ids is None else self.ids.digest

    def _forget_looks(self) -> None:
        """Look at all that is there again: what was told is enough to go on."""
        self._cursor, self._rows = None, None
        self._ready.clear()
        self._groups.clear()

    def _check_list(self, ids: IdList) -> None:
        """Raises InvalidInputError for a list whose groups do not fit `group_size` or `equal`."""
        size, equal = self.options.group_size, self.options.equal and self._together is not None
        if size is None and not equal:
            return
        groups = list(self._groups_of(ids).values())
        odd = [group for group in groups if size is not None and len(group) % size]
        if odd:
            raise InvalidInputError(
                f"group_size={size}: the list has {len(odd[0])} ids that belong with {next(iter(odd[0]))!r}"
            )
        for group in groups[: len(groups) - len(groups) % self.options.num_ranks] if equal else ():
            if len(group) != len(groups[0]):
                raise InvalidInputError(
                    f"equal with groups that are not alike: the list has {len(groups[0])} ids that belong with "
                    f"{next(iter(groups[0]))!r} and {len(group)} with {next(iter(group))!r}"
                )

    def _begin(self, worker: tuple[int, int]) -> None:
        """Start an iteration, in a worker perhaps. Part of another worker is forgotten."""
        options = self.options
        if options.records is not None and worker[1] > 1:
            raise InvalidInputError(
                f"records={options.records} with {worker[1]} workers: none knows how many the others have; use one worker, or "
                "count in the training loop"
            )
        if worker != self._worker:
            self._worker = worker
            self._forget_looks()
        if self.ids is not None and self._rows is None:
            self._rows = self._own_rows(self.ids)

    def _groups_of(self, ids: IdList) -> dict[str, dict[str, int]]:
        """The rows in the list by id, of those that belong together."""
        groups: dict[str, dict[str, int]] = {}
        for row, request_id in enumerate(ids):
            groups.setdefault(self._group(request_id), {})[request_id] = row
        return groups

    def _own_rows(self, ids: IdList) -> dict[str, int]:
        """This worker's ids, and their rows in the list."""
        groups = self._groups_of(ids)
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

    def _left(self, rows: Iterable[str]) -> list[str]:
        """Those that may still come."""
        return [each for each in rows if _hash(each) not in self._told and each not in self.left_out]

    def _look(self) -> None:
        """Queue what has become ready since the last look. Raises RecordDroppedError once everything else is queued."""
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
            Ready(head.request_id, head.num_tokens, f"{_DROPPED}{head.reason}" if head.status == "dropped" else "")
            for head in heads
            if self._is_own(head.request_id)
            and head.request_id not in queued
            and _hash(head.request_id) not in self._told
            and (prefix is None or prefix.matches(head.components, head.choice))
            and self._is_ready(head)
        ]
        for each in sorted(ready):
            self._queue(each)
        self._cursor = cursor
        self._report({each.request_id: each.lost for each in ready if each.lost})

    def _is_ready(self, head: RecordHead) -> bool:
        if head.status == "dropped":
            return True
        lowest = self.options.min_weight_version
        return (head.final or not self.options.final_only) and (lowest is None or _newest_version(head) >= lowest)

    def _queue(self, ready: Ready) -> None:
        group = [ready]
        if self.options.group_size is not None:
            name = self._group(ready.request_id)
            group = self._groups.setdefault(name, [])
            group.append(ready)
            if len(group) < self.options.group_size:
                return
            del self._groups[name]
        kept = self._settled(sorted(group))
        if kept:
            self._ready.append(kept)

    def _settled(self, group: list[Ready]) -> list[Ready]:
        """What is to be given of a group that is complete, or of a single id. The rest is left out."""
        lost = [each for each in group if each.lost]
        if lost and self.options.on_broken == "leave_out":
            why = f"in a group with {lost[0].request_id}, which is {lost[0].lost}"
            group = [each if each.lost else each._replace(lost=why) for each in group]
        for each in group:
            if each.lost and (self.options.group_size is not None or each.lost != _DELETED):
                self._tell(each.request_id)
            if each.lost:
                self.left_out[each.request_id] = each.lost
        return [each for each in group if not each.lost]

    def _next_samples(self, most: int | None) -> Iterator[Sample]:
        """Read as many of those that are ready as the buffer holds, and give them one by one, at most so many."""
        spec = self.dataset.spec
        token_bytes = spec.bytes_per_token // spec.num_layers * len(spec.check_layers(self.samples.layers, at_least=0))
        batch: list[str] = []
        count = size = 0
        for group in self._ready:
            size += sum(each.num_tokens for each in group) * token_bytes
            if batch and (size > self.options.buffer_bytes or (most is not None and len(batch) >= most)):
                break
            batch += [each.request_id for each in group]
            count += 1
        batch = batch[:most]
        numbers = [
            NO_NUMBER if self._rows is None or self.ids is None else self.ids.number(self._rows[each]) for each in batch
        ]
        try:
            samples = read_samples(self.dataset, batch, numbers, self.samples)
        except NotFoundError:
            self._leave_out(count)
            return
        samples.reverse()
        while samples:
            sample = samples.pop()
            if self._ready and self._ready[0][0].request_id == sample["request_id"]:  # else it was marked meanwhile
                self._ready[0].pop(0)
                if not self._ready[0]:
                    self._ready.popleft()
                self._tell(sample["request_id"])
                self._given += 1
                yield sample

    def _leave_out(self, count: int) -> None:
        """Take those that cannot be read from the first groups of the queue. Raises as `_report`."""
        lost = self._lost(each.request_id for group in islice(self._ready, count) for each in group)
        groups = [self._ready.popleft() for _ in range(count)]
        kept = [
            self._settled([each._replace(lost=lost.get(each.request_id, "")) for each in group]) for group in groups
        ]
        self._ready.extendleft(group for group in reversed(kept) if group)
        self._report(lost)

    def _lost(self, request_ids: Iterable[str]) -> dict[str, str]:
        """Which of them are not there any more, and why. Raises DatasetNotFoundError when nothing is."""
        asked = list(request_ids)
        heads = dict(zip(asked, self.dataset.heads(asked, "none"), strict=True))
        if None in heads.values():
            self._check_dataset()
        return {
            request_id: _DELETED if head is None else f"{_DROPPED}{head.reason}"
            for request_id, head in heads.items()
            if head is None or head.status == "dropped"
        }

    def _report(self, lost: Mapping[str, str]) -> None:
        """Log them. Raises RecordDroppedError for those that were dropped, RecordNotFoundError for others with `equal`."""
        if not lost:
            return
        self.left_out.update(lost)
        texts = [f"{request_id} ({why.removeprefix(_DROPPED)})" for request_id, why in lost.items()]
        dropped = [text for text, why in zip(texts, lost.values(), strict=True) if why.startswith(_DROPPED)]
        _log.warning("%s: the stream of rank %d leaves out %s", self.dataset.uri, self.options.rank, listed(texts))
        if dropped and self.options.on_dropped == "raise":
            raise RecordDroppedError(
                f"{self.dataset.uri}: the writer dropped {listed(dropped)}; on_dropped='skip' leaves them out"
            )
        if self.options.equal:
            raise RecordNotFoundError(
                f"{self.dataset.uri}: {listed(texts)}: this rank gives fewer than the others, and `equal` does not allow it"
            )

    def _tell(self, request_id: str) -> None:
        self._told.add(_hash(request_id))
        self.left_out.pop(request_id, None)

    def _check_dataset(self) -> None:
        """Raises DatasetNotFoundError when the dataset was removed, or another one stands in its place."""
        there = copy(self.dataset).format.uuid  # a copy knows nothing, and looks
        if there != self.dataset.format.uuid:
            raise DatasetNotFoundError(f"{self.dataset.uri} is another dataset than it was when this stream began")

    def _give_up(self) -> None:
        """Nothing new for `timeout_s`. Raises WaitTimeoutError where more was promised."""
        options = self.options
        if self._cursor is None or not self._cursor.partitions:
            self._check_dataset()
        lost = self._lost(each.request_id for group in self._groups.values() for each in group if not each.lost)
        for name, group in self._groups.items():
            self._groups[name] = [each._replace(lost=lost.get(each.request_id, each.lost)) for each in group]
        self._report(lost)
        after = f"after {options.timeout_s:g} s without a new one"
        parts = [
            f"{sum(not each.lost for each in group)} of {options.group_size} of {group[0].request_id}"
            for group in self._groups.values()
        ]
        groups = f"; groups that are not complete: {listed(parts)}" if parts else ""
        if self._rows is not None:
            left = self._left(self._rows)
            raise WaitTimeoutError(
                f"{self.dataset.uri}: {len(left)} of {len(self._rows)} ids are not ready {after}: {listed(left)}{groups}"
            )
        if options.records is not None:
            raise WaitTimeoutError(
                f"{self.dataset.uri}: {self._given % options.records} of {options.records} records for rank {options.rank} of "
                f"{options.num_ranks} {after}{groups}"
            )


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
