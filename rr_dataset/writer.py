"""`RoutingWriter`: the engine's hook. It copies a record into the spool and returns."""

from __future__ import annotations

import atexit
import inspect
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rr_dataset.errors import (
    InvalidInputError,
    PutManyError,
    RoutingDatasetError,
    SpoolFullError,
    WriterClosedError,
    WriterError,
    WriterForkedError,
    reason_of,
)
from rr_dataset.feed import Feed
from rr_dataset.intake import Intake, Room, take_drop, take_in
from rr_dataset.items import Ended, as_ours, shown_id, to_the_end
from rr_dataset.layout import DatasetFormat
from rr_dataset.options import WriterOptions, check_seconds
from rr_dataset.receipt import FlushReport, Receipt, WriterStats
from rr_dataset.record import Range, RoutingSpec, Span
from rr_dataset.reserved import ReservedRecord
from rr_dataset.slab import DELETE
from rr_dataset.spool import Spool
from rr_dataset.spool_place import choose_base
from rr_dataset.supervisor import Supervisor

LAST_WORK_S = 1.0  # for a worker whose time to drain is over: it is killed then, and the spool keeps what is left
SHOWN_ERRORS = 3  # in the message of a PutManyError; the error has all
LATENCIES = 4096  # puts that the percentiles of stats() look back on

_log = logging.getLogger("rr_dataset")


class RoutingWriter:
    """Writes records of one process into a dataset. Thread-safe; a context manager that closes, and that logs what `close`
    raises where its block has raised already.

    `put` copies the record into shared memory and returns; a worker process publishes it. What `put` accepted
    survives a kill of this process, of the worker, or of both, as long as the spool's mount does.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        options: WriterOptions | None = None,
        create: RoutingSpec | None = None,
        keep: str = "all",
    ) -> None:
        """Open the dataset at `uri` through a worker process; with `create`, make it first if there is none.

        keep: that of `create_dataset`, of a dataset which is made.

        Raises DatasetNotFoundError, SpecMismatchError (there is a dataset with another spec than `create`),
        InvalidInputError (also when `create` finds a folder that holds something else), SpoolUnavailableError, WorkerError,
        or StorageError: the store cannot be reached, or the key may not write there.
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
            self._supervisor = self._start_worker(address, create, keep)
        except BaseException:
            self._spool.close(remove=True)
            raise
        _open_writers.add(self)

    def _start_worker(self, uri: str, create: RoutingSpec | None, keep: str) -> Supervisor:
        start = {
            "uri": uri if "://" in uri else str(Path(uri).absolute()),
            "storage_options": dict(self.options.storage_options or {}),
            "create": None if create is None else create.to_dict(),
            "keep": keep,
            "writer": self.writer_id,
            "compression": self.options.compression,
            "nice": self.options.worker_nice,
            "drain_timeout_s": self.options.drain_timeout_s,
        }
        supervisor = Supervisor(self._spool, self.options, start)
        try:
            self._spool.allocate()  # while the worker starts
            self._feed = Feed(self._spool, supervisor, self.options, self.writer_id)
            supervisor.on_done = self._feed.count
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
        reservation = self._feed.room(intake)
        if reservation is None:
            return self._feed.drop_full(intake)
        try:
            intake.fill(reservation.payload)
            receipt = self._feed.commit(reservation, intake)
        except BaseException:
            self._feed.abort(reservation)
            raise
        self._latencies.append(time.perf_counter() - began)
        return receipt

    def put_many(self, items: Iterable[Mapping[str, Any] | Sequence[Any]]) -> list[Receipt]:
        """Put several records; their receipts in order. One that is refused keeps no other from being stored.

        items: the arguments of `put`, each as a mapping by name or a sequence in their order.

        Raises PutManyError, after all others are stored, for items that `put` would have raised for; it names them, and has
        the receipts of the others. Where `items` itself raises, what came before is stored, and that counts as one more item.
        Raises InvalidInputError for what is no iterable, WriterClosedError or WriterForkedError before anything is stored.
        """
        self._check_usable()
        receipts: list[Receipt | None] = []
        errors: dict[int, RoutingDatasetError] = {}
        named: list[str] = []
        for number, item in enumerate(to_the_end(items)):
            try:
                receipts.append(self._put_item(item))
            except Exception as error:  # noqa: BLE001 - whatever an item is, the others are stored
                errors[number] = as_ours(error)
                named.append(f"item {number} ({shown_id(item)}): {reason_of(error)}")
                receipts.append(None)
        if errors:
            text = "; ".join(named[:SHOWN_ERRORS]) + ("; ..." if len(named) > SHOWN_ERRORS else "")
            raise PutManyError(
                f"{len(errors)} of {len(receipts)} records were not stored, the others were: {text}", errors, receipts
            ) from next(iter(errors.values())).__cause__
        return [receipt for receipt in receipts if receipt is not None]

    def _put_item(self, item: Any) -> Receipt:
        if isinstance(item, Ended):
            raise InvalidInputError(f"the items ended with {reason_of(item.error)}") from item.error
        if isinstance(item, Mapping):
            if set(REQUIRED) <= item.keys() <= PUT_ARGUMENTS.keys():
                return self.put(**item)
            given = f"the names {', '.join(map(str, item))}"
        elif isinstance(item, (tuple, list)):
            if len(REQUIRED) <= len(item) <= len(PUT_ARGUMENTS):
                return self.put(*item)
            given = f"{len(item)} values"
        else:
            given = f"a {type(item).__name__}"
        raise InvalidInputError(f"an item is {given}: expected the arguments of put, {', '.join(PUT_ARGUMENTS)}")

    def reserve(
        self,
        request_id: str,
        num_tokens: int,
        layers: Sequence[int] | None = None,
        token_ids: Any = None,
        logprobs: Any = None,
        token_start: int = 0,
        part: bool = False,
        status: str | None = None,
        missing: Sequence[Range] = (),
        weight_version: str | int | Sequence[Span] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> ReservedRecord:
        """Room for one record in the spool, to be filled in place: `put` without the copy.

            with writer.reserve(request_id, num_tokens) as record:
                record.missing = gather(slots, out=record.experts)
            record.receipt.wait()

        The `with` yields an object whose `experts` is a writable array [num_tokens, layers, top_k] of the stored dtype in
        shared memory. Write every row that is not missing; do not keep the array, others fill that memory later. `status`,
        `missing`, `weight_version` and `tags` of the object may be set until the end: then the record is copied once within
        the spool, so give `reserve` what is known. When the `with` ends, the ids are checked and the record is stored as
        `put` would have. An exception inside it stores nothing and goes on. Be quick: what was put around it is not published
        meanwhile. It is for one `with`, and for this process: a child that is forked inside leaves `experts` alone, and its end of
        the `with` stores nothing and raises WriterForkedError.

        The arguments are those of `put`. Raises InvalidRequestIdError, InvalidRoutingError, WriterClosedError or WriterForkedError;
        the `with` raises RecordTooLargeError, and SpoolFullError under on_full="raise", when it begins, and InvalidRoutingError for
        an id out of range when it ends. With a full spool it waits and drops as `put` does: `dropped` of the object then says so,
        `experts` is memory that nobody reads, and the receipt is that of a drop.
        """
        self._check_usable()

        def described(**late: Any) -> Intake:
            return take_in(
                self.dataset,
                request_id,
                Room(num_tokens),
                layout="TLK",
                layers=layers,
                token_ids=token_ids,
                logprobs=logprobs,
                token_start=token_start,
                part=part,
                **late,
            )

        return ReservedRecord(
            self._feed, described, status=status, missing=missing, weight_version=weight_version, tags=tags
        )

    def drop(
        self,
        request_id: str,
        reason: str | Exception | None,
        num_tokens: int = 0,
        token_start: int = 0,
        part: bool = False,
        weight_version: str | int | None = None,
    ) -> Receipt:
        """Leave a row that says why a record will never be there: `wait_for` on its id then returns at once, and tells.

        reason: a text for people, or an error. Nothing is refused: beyond 1,000 bytes it is cut, lone surrogates are escaped, and
            nothing at all reads "no reason given". `stats` and FlushReport count by it, so keep ids out of it.
        num_tokens: how many tokens the record had, as far as is known. part: whether earlier puts of this id stay; the drop of a
            whole put replaces them, as the put would have.

        The receipt is that of a dropped put: `wait` raises RecordDroppedError at once; `flush` makes the row durable. When the room
        for such rows is full, it is counted without one. Raises InvalidRequestIdError, InvalidRoutingError, WriterClosedError or
        WriterForkedError.
        """
        self._check_usable()
        return self._feed.drop(
            take_drop(
                self.dataset,
                request_id,
                reason,
                num_tokens=num_tokens,
                token_start=token_start,
                part=part,
                weight_version=weight_version,
            )
        )

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
        return self._delete("prefix", self.dataset.keys.plain_prefix(prefix), None)

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
        self._feed.raise_failures()
        return self._feed.report()

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
        for reason, count in self._feed.unreported().items():
            _log.warning("%d records were dropped, of which no flush has told: %s", count, reason)
        kept, still_open = True, 0
        deadline = time.monotonic() + self.options.drain_timeout_s
        try:
            try:
                self._supervisor.wait(self._spool.batches(), self.options.drain_timeout_s)
                self._feed.raise_failures()
            finally:
                self._spool.close_active()  # what nobody is still filling is the worker's last work
                self._supervisor.stop(timeout_s=max(deadline - time.monotonic(), LAST_WORK_S))
                self._feed.count(self._spool.collect())
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
        feed = self._feed
        failing_slabs, failing_s, next_attempt_s = self._supervisor.failing()
        return WriterStats(
            accepted=feed.accepted,
            durable=feed.durable,
            durable_bytes=feed.durable_bytes,
            dropped=feed.dropped(),
            dropped_without_row=feed.dropped_without_row,
            set_aside=feed.set_aside,
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
            failing_slabs=failing_slabs,
            failing_s=failing_s,
            next_attempt_s=next_attempt_s,
            retries=self._supervisor.retries,
        )

    def __enter__(self) -> RoutingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RoutingDatasetError as failed:
            if error is None:
                raise
            _log.error("while leaving after %s: %s", type(error).__name__, failed)  # not in the place of, say, a Ctrl-C

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise WriterForkedError("this writer belongs to the parent process; open one after the fork")
        if self._closed:
            raise WriterClosedError("the writer is closed")


PUT_ARGUMENTS = dict.fromkeys(list(inspect.signature(RoutingWriter.put).parameters)[1:])  # in order
REQUIRED = tuple(PUT_ARGUMENTS)[:2]


_open_writers: set[RoutingWriter] = set()


def _close_all() -> None:  # in a forked child each close does nothing
    for writer in list(_open_writers):
        try:
            writer.close()
        except RoutingDatasetError as error:
            _log.error("at exit: %s", error)


atexit.register(_close_all)
