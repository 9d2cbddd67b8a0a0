"""Checked records go into the spool here, whichever call they came by, and are counted: accepted, durable, dropped."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import SpoolFullError, WriterError
from rr_dataset.intake import Drop, Intake, drop_of
from rr_dataset.layout import row_ref
from rr_dataset.options import WriterOptions
from rr_dataset.receipt import FlushReport, Receipt
from rr_dataset.slab import DROP, PUT, TOKENS_FIRST, Batch, Reservation
from rr_dataset.spool import Spool
from rr_dataset.supervisor import Supervisor

SPOOL_FULL = "spool full"
MAX_REASONS = 64  # counted apart: a caller may put an id into each
OTHER_REASONS = "other reasons"

_log = logging.getLogger("rr_dataset")


class Feed:
    """What `put`, `put_many`, `reserve` and `drop` of one writer share. Thread-safe."""

    def __init__(self, spool: Spool, supervisor: Supervisor, options: WriterOptions, writer_id: str) -> None:
        self._spool, self._supervisor, self._options, self._writer_id = spool, supervisor, options, writer_id
        self._spare = np.empty(0, np.uint8)
        self._wait_s = options.block_timeout_s if options.on_full == "block" else 0
        self._lock = threading.Lock()  # guards what follows
        self.accepted = self.durable = self.durable_bytes = self.dropped_without_row = self.set_aside = 0
        self._reported = (0, 0)
        self._dropped: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._failures: list[str] = []  # of batches that will not become durable, unreported

    def check_process(self) -> None:
        """Raise WriterForkedError in a forked child: the memory of the spool is the parent's too."""
        self._supervisor.check_process()

    # ---- into the spool

    def room(self, intake: Intake) -> Reservation | None:
        """Room for a record; None where the policy is to drop it.

        Raises RecordTooLargeError, WriterClosedError, and SpoolFullError where the policy is to raise.
        """
        reservation = self._spool.reserve(
            PUT,
            TOKENS_FIRST if intake.tokens_first else 0,
            intake.request_id,
            intake.meta,
            tokens=intake.num_tokens,
            payload_bytes=intake.payload_bytes,
            wait_s=self._wait_s,
        )
        if reservation is None and self._options.on_full == "raise":
            raise SpoolFullError(
                f"no room for record {intake.request_id.decode()!r} ({intake.payload_bytes} bytes) in {self._spool.directory}"
                f"{self._supervisor.because()}; raise spool_bytes, or flush before you put more"
            )
        return reservation

    def spare(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory for what found no room: one for all, touched once, since an outage is no time for page faults."""
        spare = self._spare
        if len(spare) < size:
            self._spare = spare = np.zeros(size, np.uint8)
        return spare[:size]

    def commit(self, reservation: Reservation, intake: Intake) -> Receipt:
        """Make a filled record count."""
        batch = self._spool.commit(reservation)
        with self._lock:
            self.accepted += 1
        return Receipt(self._supervisor, batch, self._ref(reservation, intake.request_id))

    def abort(self, reservation: Reservation) -> None:
        """Give the room up."""
        self._spool.abort(reservation)

    def drop_full(self, intake: Intake) -> Receipt:
        """Drop a record that found no room."""
        return self.drop(
            drop_of(intake, SPOOL_FULL),
            f"{self._supervisor.because()}. The next flush counts it and those that follow; raise spool_bytes="
            f'{self._options.spool_bytes}, flush more often, or choose on_full="raise"',
        )

    def drop(self, drop: Drop, advice: str = ". The next flush counts it and those that follow") -> Receipt:
        """Leave a row that says why a record is not there, if there is room for one, and count it."""
        reservation = self._spool.reserve(DROP, 0, drop.request_id, drop.meta, tokens=drop.num_tokens, payload_bytes=0)
        if reservation is not None:
            self._spool.commit(reservation)
        with self._lock:
            known = drop.reason in self._dropped or len(self._dropped) < MAX_REASONS
            reason = drop.reason if known else OTHER_REASONS
            first = not self._unreported[reason]
            self._dropped[reason] += 1
            self._unreported[reason] += 1
            self.dropped_without_row += reservation is None
        if first:
            _log.warning("record %r was dropped: %s%s", drop.request_id.decode(), drop.reason, advice)
        ref = "" if reservation is None else self._ref(reservation, drop.request_id)
        return Receipt(self._supervisor, drop.reason, ref)

    def _ref(self, reservation: Reservation, request_id: bytes) -> str:
        return row_ref(f"{reservation.t_submit:016x}-{self._writer_id}", request_id.decode())

    # ---- what became of it

    def count(self, finished: Sequence[Batch]) -> None:
        """Note batches that are done."""
        with self._lock:
            for batch in finished:
                if batch.failure is not None:
                    self._failures.append(batch.failure)
                    self.set_aside += batch.records
                elif not batch.control:
                    self.durable += batch.records
                    self.durable_bytes += batch.bytes

    def report(self) -> FlushReport:
        """What became durable and was dropped since the last report."""
        with self._lock:
            before, self._reported = self._reported, (self.durable, self.durable_bytes)
            dropped, self._unreported = dict(self._unreported), Counter()
            return FlushReport(self.durable - before[0], self.durable_bytes - before[1], dropped)

    def dropped(self) -> Mapping[str, int]:
        """By reason, since the writer was opened."""
        with self._lock:
            return dict(self._dropped)

    def unreported(self) -> Mapping[str, int]:
        """Drops by reason that no report has told of."""
        with self._lock:
            return dict(self._unreported)

    def raise_failures(self) -> None:
        """Raise WriterError for what was set aside since this was last asked."""
        with self._lock:
            failures, self._failures = self._failures, []
        if failures:
            raise WriterError("; ".join(failures))
