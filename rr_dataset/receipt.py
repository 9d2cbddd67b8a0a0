"""What a writer tells: the receipt of one put, the report of a flush, the counters of its life."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rr_dataset.errors import RecordDroppedError, WriterError
from rr_dataset.options import check_seconds
from rr_dataset.slab import Batch
from rr_dataset.supervisor import Supervisor


@dataclass(frozen=True)
class FlushReport:
    """What became durable since the last report, and what was dropped since then, by reason."""

    records: int
    bytes: int
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class WriterStats:
    """A writer at one moment. Counts are since it was opened.

    A store that takes requests and does not answer counts as failing once they time out; until then `oldest_age_s` tells it.
    """

    accepted: int  # puts that are in the spool or durable
    durable: int
    durable_bytes: int
    dropped: Mapping[str, int]  # by reason
    dropped_without_row: int  # of these, how many left no row either: the control slabs were full
    set_aside: int  # records too old to publish, kept in spool_dir: `rr-dataset recover --force` does
    recovered: int  # records of earlier writers' dead spools that this one's worker made durable, in the background
    left: tuple[str, ...]  # dead spools of this dataset it could not make durable in full; worker.log says why
    spool_dir: str
    spool_bytes: int
    spool_used_bytes: int
    oldest_age_s: float  # of what is not yet durable
    put_p50_s: float  # over the last LATENCIES puts
    put_p99_s: float
    worker_pid: int
    worker_restarts: int
    last_error: str | None  # of the worker, until its next publication, or of slabs that still wait
    failing_slabs: int  # that wait in the spool after an attempt to publish them failed
    failing_s: float  # since the first attempt at one of these failed
    next_attempt_s: float | None  # until one of these is tried again; 0 while it is, None if there is none
    retries: int  # attempts that failed and were, or will be, made again


class Receipt:
    """Says what became of one put or delete. `ref` is a short text that names the put: `<record id>:<request id>`."""

    __slots__ = ("_outcome", "_supervisor", "ref")

    def __init__(self, supervisor: Supervisor, outcome: Batch | str, ref: str) -> None:
        self.ref = ref  # for RoutingDataset.resolve: names this very put; "" of a delete, and if no row was left
        self._supervisor = supervisor
        self._outcome = outcome  # the batch it is in, or why it was dropped

    def __repr__(self) -> str:
        outcome = self._outcome
        if isinstance(outcome, str):
            state = f"dropped: {outcome}"
        elif outcome.failure is not None:
            state = f"set aside: {outcome.failure}"
        else:
            state = "durable" if outcome.done else "not yet durable"
        return f"Receipt({self.ref!r}, {state})"

    def durable(self) -> bool:
        """Whether the record is published; for ever False if it was dropped.

        Raises WriterForkedError in a forked child, which does not learn of it, unless it was before the fork.
        """
        return not isinstance(self._outcome, str) and self._batch().done and self._batch().failure is None

    def wait(self, timeout_s: float = 30.0) -> None:
        """Wait until the record is published.

        Raises FlushTimeoutError, RecordDroppedError with the reason, WorkerError when no worker is left, WriterForkedError, or
        WriterError when the record lies in the spool for longer than tombstones live and was set aside there.
        """
        batch = self._batch()
        self._supervisor.wait([batch], check_seconds("timeout_s", timeout_s))
        if batch.failure is not None:
            raise WriterError(batch.failure)

    def __await__(self) -> Generator[Any, None, None]:
        """As `wait`, without a time-out."""
        batch = self._batch()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        resolve = partial(_resolve, loop, future)
        self._supervisor.call_when_done(batch, resolve)
        try:
            yield from future.__await__()
        finally:
            self._supervisor.call_no_more(batch, resolve)
        self.wait(0)

    def _batch(self) -> Batch:
        if isinstance(self._outcome, str):
            raise RecordDroppedError(f"record {self.ref} was dropped: {self._outcome}")
        if not self._outcome.done:
            self._supervisor.check_process()
        return self._outcome


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def set_result() -> None:
        if not future.done():
            future.set_result(None)

    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(set_result)
