"""`RoutingWriter`: the engine's hook. It copies a record into the spool and returns."""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rr_dataset.errors import (
    InvalidInputError,
    RoutingDatasetError,
    SpoolFullError,
    WriterClosedError,
    WriterError,
    WriterForkedError,
)
from rr_dataset.intake import Intake, drop_meta, take_in
from rr_dataset.layout import DatasetFormat, row_ref
from rr_dataset.options import WriterOptions, check_seconds
from rr_dataset.receipt import FlushReport, Receipt, WriterStats
from rr_dataset.record import Range, RoutingSpec, Span
from rr_dataset.slab import DELETE, DROP, PUT, TOKENS_FIRST, Batch
from rr_dataset.spool import Spool
from rr_dataset.spool_place import choose_base
from rr_dataset.supervisor import Supervisor

LAST_WORK_S = 1.0  # for a worker whose time to drain is over: it is killed then, and the spool keeps what is left
LATENCIES = 4096  # puts that the percentiles of stats() look back on

_log = logging.getLogger("rr_dataset")


class RoutingWriter:
    """Writes records of one process into a dataset. Thread-safe; a context manager that closes.

    `put` copies the record into shared memory and returns; a worker process publishes it. What `put` accepted
    survives a kill of this process, of the worker, or of both, as long as the spool's mount does.
    """

    def __init__(
        self, uri: str | os.PathLike[str], options: WriterOptions | None = None, create: RoutingSpec | None = None
    ) -> None:
        """Open the dataset at `uri` through a worker process; with `create`, make it first if there is none.

        Raises DatasetNotFoundError, SpecMismatchError (there is a dataset with another spec than `create`),
        InvalidInputError (also when `create` finds a folder that holds something else), SpoolUnavailableError, or WorkerError.
        """
        self.options = WriterOptions() if options is None else options
        if not isinstance(self.options, WriterOptions):
            raise InvalidInputError(f"options={options!r}: expected WriterOptions")
        if create is not None and not isinstance(create, RoutingSpec):
            raise InvalidInputError(f"create={create!r}: expected a RoutingSpec")
        try:
            address = os.fsdecode(uri)
        except TypeError:
            raise InvalidInputError(f"uri={uri!r}: expected the path of a dataset, or a file:// URI") from None
        self._pid = os.getpid()
        self._closed = False
        self._closing = threading.RLock()  # held until closed
        self._lock = threading.Lock()  # guards the counters below
        self._accepted = self._durable = self._durable_bytes = self._dropped_without_row = self._set_aside = 0
        self._reported = (0, 0)
        self._dropped: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self._failures: list[str] = []  # of batches that will not become durable, unreported
        self._latencies: deque[float] = deque(maxlen=LATENCIES)

        self.writer_id = secrets.token_hex(8)
        base = choose_base(self.options.spool_dir, self.options.spool_bytes)
        self._spool = Spool(
            base,
            self.writer_id,
            spool_bytes=self.options.spool_bytes,
            slab_bytes=self.options.slab_bytes,
            sync=self.options.spool_sync,
        )
        try:
            self._supervisor = self._start_worker(address, create)
        except BaseException:
            self._spool.close(remove=True)
            raise
        _open_writers.add(self)

    def _start_worker(self, uri: str, create: RoutingSpec | None) -> Supervisor:
        start = {
            "uri": uri if "://" in uri else str(Path(uri).absolute()),
            "storage_options": dict(self.options.storage_options),
            "create": None if create is None else create.to_dict(),
            "writer": self.writer_id,
            "compression": self.options.compression,
            "nice": self.options.worker_nice,
            "drain_timeout_s": self.options.drain_timeout_s,
        }
        supervisor = Supervisor(self._spool, self.options, start)
        try:
            self._spool.allocate()  # while the worker starts
            supervisor.on_done = self._count
            hello = supervisor.greet()
            self.dataset = DatasetFormat.from_json(hello["format"].encode())
            self._spool.identify(
                {
                    "dataset": self.dataset.uuid,
                    "uri": start["uri"],
                    "writer": self.writer_id,
                    "run_id": self.options.run_id,
                    "producer": "rollout",
                    "host": socket.gethostname(),
                    "pid": self._pid,
                }
            )
            self._spool.on_event = supervisor.wake
        except BaseException:
            supervisor.stop(timeout_s=1)
            raise
        return supervisor

    # ---- the hot path

    def put(
        self,
        request_id: str,
        routed_experts: Any,
        layout: str = "TLK",
        layers: Sequence[int] | None = None,
        token_ids: Any = None,
        logprobs: Any = None,
        token_start: int = 0,
        part: bool = False,
        status: str | None = None,
        missing: Sequence[Range] = (),
        weight_version: str | int | Sequence[Span] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Receipt:
        """Copy one record into the spool.

        routed_experts: [tokens, layers, top_k] ("TLK") or [layers, tokens, top_k] ("LTK") of any integer dtype and
            strides, a numpy array or a tensor; logical expert ids, 0 to num_experts - 1.
        layout: "TLK" is the default here, "LTK" that of `RoutingRecord.to_numpy`. A wrong one is found by the shape, but not
            where tokens and layers are as many: then it is stored transposed, so say what you have.
        layers: the layer ids of the layer axis, if not all of the spec; the record is then a part.
        token_ids, logprobs: one for each token of `routed_experts` (int32; float32, NaN where there is none).
        token_start: position of the first token; all positions are below 2**31. part: whether earlier puts of this id stay; a whole put
            replaces them.
        status: complete, partial, preempted or aborted; complete for a whole put and partial for a part by default.
            Everything but partial says that no more parts follow.
        missing: (start, stop) positions whose routing is unknown; what stands there is not read.
        weight_version: of the policy, or (start, stop, version) spans. tags: short texts. With `missing` they take at most
            1,000,000 bytes as JSON.

        Raises InvalidRequestIdError, InvalidRoutingError or RecordTooLargeError (then nothing is written),
        WriterClosedError, WriterForkedError, and SpoolFullError under on_full="raise". Never waits for the storage
        and never raises for it: with a full spool the record is dropped after `block_timeout_s`. The receipt says so, a row,
        the next FlushReport, and for the first since the last report a warning of the logger "rr_dataset".
        """
        began = time.perf_counter()
        self._check_usable()
        intake = take_in(
            self.dataset,
            request_id,
            routed_experts,
            layout=layout,
            layers=layers,
            token_ids=token_ids,
            logprobs=logprobs,
            token_start=token_start,
            part=part,
            status=status,
            missing=missing,
            weight_version=weight_version,
            tags=tags,
        )
        reservation = self._spool.reserve(
            PUT,
            TOKENS_FIRST if intake.tokens_first else 0,
            intake.request_id,
            intake.meta,
            tokens=intake.num_tokens,
            payload_bytes=intake.payload_bytes,
            wait_s=self.options.block_timeout_s if self.options.on_full == "block" else 0,
        )
        if reservation is None:
            return self._drop(intake)
        try:
            intake.fill(reservation.payload)
            batch = self._spool.commit(reservation)
        except BaseException:
            self._spool.abort(reservation)
            raise
        with self._lock:
            self._accepted += 1
        self._latencies.append(time.perf_counter() - began)
        return Receipt(self._supervisor, batch, self._ref(reservation.t_submit, intake))

    def _drop(self, intake: Intake) -> Receipt:
        if self.options.on_full == "raise":
            raise SpoolFullError(
                f"no room for record {intake.request_id.decode()!r} ({intake.payload_bytes} bytes) in {self._spool.directory}"
                f"{self._supervisor.because()}; raise spool_bytes, or flush before you put more"
            )
        reason = "spool full"
        reservation = self._spool.reserve(
            DROP, 0, intake.request_id, drop_meta(intake, reason), tokens=intake.num_tokens, payload_bytes=0
        )
        if reservation is not None:
            self._spool.commit(reservation)
        with self._lock:
            first = not self._unreported[reason]
            self._dropped[reason] += 1
            self._unreported[reason] += 1
            self._dropped_without_row += reservation is None
        if first:
            _log.warning(
                "record %r was dropped: %s%s. The next flush counts it and those that follow; raise spool_bytes=%d, flush "
                'more often, or choose on_full="raise"',
                *(intake.request_id.decode(), reason, self._supervisor.because(), self.options.spool_bytes),
            )
        ref = "" if reservation is None else self._ref(reservation.t_submit, intake)
        return Receipt(self._supervisor, reason, ref)

    def _ref(self, t_submit: int, intake: Intake) -> str:
        return row_ref(f"{t_submit:016x}-{self.writer_id}", intake.request_id.decode())

    # ---- deletes

    def delete_prefix(self, prefix: str | Mapping[str, str | int]) -> Receipt:
        """Delete what was put under a prefix before this call, and nothing that this writer puts later.

        prefix: by component, "math:17" or {"data_id": "math:17"}: `a:1` leaves `a:10`.

        Returns at once; others see it when it is published, at the latest after `flush`. Puts of other writers die as well,
        ordered by their clocks, within `max_clock_skew_s` either way: `rr_dataset.delete` is exact there, and waits.
        Raises InvalidRequestIdError, WriterClosedError, WriterForkedError, and SpoolFullError, whatever `on_full` says, when
        there is no room: a delete is never dropped.
        """
        self._check_usable()
        self.dataset.keys.parse_prefix(prefix)
        text = prefix if isinstance(prefix, str) else {name: str(value) for name, value in prefix.items()}
        return self._delete("prefix", text, None)

    def clear_run(self) -> Receipt:
        """Delete all that any writer of this run (`run_id`) has put before this call; otherwise as `delete_prefix`."""
        self._check_usable()
        return self._delete("all", "", self.options.run_id)

    def _delete(self, kind: str, text: str | Mapping[str, str], run: str | None) -> Receipt:
        meta = json.dumps({"kind": kind, "text": text, "run": run}).encode()
        reservation = self._spool.reserve(DELETE, 0, b"", meta, tokens=0, payload_bytes=0)
        if reservation is None:
            raise SpoolFullError(
                f"no room for a delete of {text or run!r} in {self._spool.directory}{self._supervisor.because()}; flush "
                "before you delete more, or call rr_dataset.delete with many prefixes at once"
            )
        return Receipt(self._supervisor, self._spool.commit(reservation), "")

    # ---- flush and close

    def flush(self, timeout_s: float = 30.0) -> FlushReport:
        """Wait until everything put before this call is durable; what became durable and was dropped since the last report.

        Raises FlushTimeoutError, whose cause is the last storage failure, WorkerError when no worker is left, or
        WriterError when something was set aside since the last report; nothing is lost by any of them.
        """
        self._check_usable()
        self._supervisor.wait(self._spool.batches(), check_seconds("timeout_s", timeout_s))
        self._raise_failures()
        with self._lock:
            before, self._reported = self._reported, (self._durable, self._durable_bytes)
            dropped, self._unreported = dict(self._unreported), Counter()
            return FlushReport(self._durable - before[0], self._durable_bytes - before[1], dropped)

    def close(self) -> None:
        """Flush within `drain_timeout_s`, end the worker and delete the spool. Closing twice is no error.

        A put of another thread is either durable then or raises WriterClosedError. Drops that no FlushReport has told are a
        warning of the logger "rr_dataset".

        Raises as `flush` does; the spool then stays on disk, with what is not yet durable, and says where. Puts that are
        still being copied end as usual, and keep it locked until then; they are counted in the error.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                try:
                    self._close()
                finally:
                    _open_writers.discard(self)

    def _close(self) -> None:
        self._spool.refuse()
        with self._lock:
            dropped = dict(self._unreported)
        for reason, count in dropped.items():
            _log.warning("%d records were dropped, of which no flush has told: %s", count, reason)
        kept, still_open = True, 0
        deadline = time.monotonic() + self.options.drain_timeout_s
        try:
            try:
                self._supervisor.wait(self._spool.batches(), self.options.drain_timeout_s)
                self._raise_failures()
            finally:
                self._spool.close_active()  # what nobody is still filling is the worker's last work
                self._supervisor.stop(timeout_s=max(deadline - time.monotonic(), LAST_WORK_S))
                self._count(self._spool.collect())
                kept = self._spool.holds_data()
                still_open = self._spool.close(remove=not kept)
        except WriterError as error:
            if kept:
                text = f"{error}; it is kept in {self._spool.directory}"
                if still_open:
                    text += f"; {still_open} puts are still being copied and keep it locked until they end"
                raise type(error)(text) from error.__cause__

    def stats(self) -> WriterStats:
        """Counters and latencies; cheap enough for a scrape every second."""
        self._check_usable()
        latencies = sorted(self._latencies) or [0.0]  # np.quantile would import numpy.ma at its first call
        opened = [batch.opened_s for batch in self._spool.batches()]
        error = self._supervisor.last_error
        used_bytes = self._spool.used_bytes()
        with self._lock:
            return WriterStats(
                accepted=self._accepted,
                durable=self._durable,
                durable_bytes=self._durable_bytes,
                dropped=dict(self._dropped),
                dropped_without_row=self._dropped_without_row,
                set_aside=self._set_aside,
                recovered=self._supervisor.recovered,
                left=tuple(self._supervisor.left),
                spool_dir=str(self._spool.directory),
                spool_bytes=self.options.spool_bytes,
                spool_used_bytes=used_bytes,
                oldest_age_s=time.monotonic() - min(opened) if opened else 0.0,
                put_p50_s=latencies[len(latencies) // 2],
                put_p99_s=latencies[len(latencies) * 99 // 100],
                worker_pid=self._supervisor.worker_pid,
                worker_restarts=self._supervisor.restarts,
                last_error=None if error is None else str(error),
            )

    def __enter__(self) -> RoutingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise_failures(self) -> None:
        with self._lock:
            failures, self._failures = self._failures, []
        if failures:
            raise WriterError("; ".join(failures))

    def _count(self, finished: Sequence[Batch]) -> None:
        with self._lock:
            for batch in finished:
                if batch.failure is not None:
                    self._failures.append(batch.failure)
                    self._set_aside += batch.records
                elif not batch.control:
                    self._durable += batch.records
                    self._durable_bytes += batch.bytes

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise WriterForkedError("this writer belongs to the parent process; open one after the fork")
        if self._closed:
            raise WriterClosedError("the writer is closed")


_open_writers: set[RoutingWriter] = set()


def _close_all() -> None:  # in a forked child each close does nothing
    for writer in list(_open_writers):
        try:
            writer.close()
        except RoutingDatasetError as error:
            _log.error("at exit: %s", error)


atexit.register(_close_all)
