"""The life of requests: registered, fed step by step, and at the end exactly one record, or a drop row that says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rr_dataset.capture.capturer import StepCapturer
from rr_dataset.capture.faults import Faults
from rr_dataset.capture.slots import Blocks, Seen, SlotTable
from rr_dataset.contracts.rows import status_of
from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.feed import MAX_REASONS, OTHER_REASONS
from rr_dataset.receipt import Receipt
from rr_dataset.record import Range, Span
from rr_dataset.reserved import ReservedRecord
from rr_dataset.writer import RoutingWriter

PREEMPTIONS = "preemptions"  # the tag that counts them
NOTHING_KNOWN = "no routing was captured"
RECYCLED = "its blocks went to others while its rows were copied"
MAX_REASON = 1_000  # characters


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one request.

    blocks: its block table from position 0, before the allocator takes it back.
    num_fed: tokens that went through the model and count: rejected drafts do not, and the last sampled token never did, not
        with EOS and not at the maximum length. By default one less than `token_ids`.
    num_tokens: how many the record has, if more than were fed: the rest is missing. By default `num_fed`.
    token_ids: prompt and answer, at least `num_tokens`. logprobs: likewise.
    finish_reason: as engines name it, such as "stop", "length", "abort" or "preempted". An unknown one is told, and counts as an end.
    weight_version: if not what the table knows of each row.
    """

    request_id: str
    blocks: Blocks
    num_fed: int | None = None
    finish_reason: str = "stop"
    token_ids: Any = None
    num_tokens: int | None = None
    logprobs: Any = None
    weight_version: str | int | Sequence[Span] | None = None
    tags: Mapping[str, str] | None = None


class _RecycledError(Exception):
    """All rows of a request were lost between the look at them and the copy."""


@dataclass(slots=True)
class _Request:
    tags: dict[str, str]
    captured: bool
    saved: int = 0  # positions before it are in parts that were stored
    looked: int = 0  # positions before it are, or were missing
    reached: int = 0  # where the furthest of them ends
    parts: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class CaptureStats:
    """Counts since the start."""

    in_flight: int
    records: int  # those the writer took, or dropped for want of room, which it counts
    parts: int  # of requests that were preempted or saved on the way
    dropped: Mapping[str, int]  # by reason, with a row each
    opted_out: int
    rows: int  # captured
    late_rows: int  # that came when their block had a new owner
    faults: Mapping[str, int] = field(default_factory=dict)  # of callers, by hook


class RoutingCapture:
    """The hooks an engine calls, on top of a table, a capturer and a writer. Not thread-safe.

    What is wrong in a call never raises into serving, unless `strict`: it is logged and counted, and where it concerns a
    registered request, that one ends as a drop row.
    """

    def __init__(
        self,
        writer: RoutingWriter | None,
        table: SlotTable,
        capturer: StepCapturer | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """Capture into `writer`'s dataset.

        writer: None in processes that write no records (ranks but the first).
        capturer: None where another process captures into `table`.
        """
        self._writer, self._table, self._capturer = writer, table, capturer
        self._layers = None if capturer is None or capturer.layers == capturer.spec.moe_layers else capturer.layers
        if writer is not None:
            spec = writer.dataset.spec
            layers = spec.num_layers if self._layers is None else len(self._layers)
            shape, expected = (table.rows.shape[1:], table.dtype.name), ((layers, spec.top_k), spec.dtype)
            if shape != expected:
                raise InvalidInputError(f"{table.path} has rows {shape}, the dataset {expected}")
        self._requests: dict[str, _Request] = {}
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self.faults = Faults(strict=strict)

    # ---- steps

    def record(self, layer: int, topk_ids: Any, num_tokens: int | None = None, start: int = 0) -> None:
        """As `StepCapturer.record`."""
        if self._capturer is not None:
            self.faults.attempt("record", self._capturer.record, layer, topk_ids, num_tokens, start)

    def step(self, slots: Any, positions: Any = None, num_tokens: int | None = None) -> None:
        """As `StepCapturer.prepare`."""
        if self._capturer is not None:
            self.faults.attempt("step", self._capturer.prepare, slots, positions, num_tokens)

    def flush(self, keep: int = 0) -> None:
        """As `StepCapturer.flush`. An engine without a schedule that overlaps steps needs none: `finish` does it."""
        if self._capturer is not None:
            self.faults.attempt("flush", self._capturer.flush, keep)

    # ---- requests

    def register(self, request_id: str, *, capture: bool = True, tags: Mapping[str, str] | None = None) -> None:
        """A request begins; again while it runs changes nothing. capture: False leaves neither record nor drop row of it.

        An id that does not follow the dataset's key scheme is told once, here, and not captured.
        """
        self.faults.attempt("register", self._register, request_id, capture, tags)

    def finish(
        self,
        request_id: str,
        blocks: Blocks,
        num_fed: int | None = None,
        finish_reason: str = "stop",
        token_ids: Any = None,
        num_tokens: int | None = None,
        logprobs: Any = None,
        weight_version: str | int | Sequence[Span] | None = None,
        tags: Mapping[str, str] | None = None,
        steps_ahead: int = 0,
    ) -> Receipt | None:
        """One request ends, as `Finished` describes it; otherwise as `finish_many`."""
        end = Finished(
            request_id, blocks, num_fed, finish_reason, token_ids, num_tokens, logprobs, weight_version, tags
        )
        return self.finish_many([end], steps_ahead)[0]

    def finish_many(self, ended: Sequence[Finished], steps_ahead: int = 0) -> list[Receipt | None]:
        """Requests end: each is gathered straight into the spool. Call it before their blocks are given to others.

        steps_ahead: how many steps have been launched after the one that ended them, in an overlapped schedule: those are
            not waited for.

        Receipts in order; None for a request that was not captured, or not registered.
        """
        with self.faults.held():
            self.flush(steps_ahead)
            ends: list[Finished] = self.faults.attempt("finish", list, ended) or []
            return [self.faults.attempt("finish", self._end, end) for end in ends]

    def abort(
        self, request_id: str, blocks: Blocks = (), num_fed: int = 0, token_ids: Any = None, reason: str = "aborted"
    ) -> Receipt | None:
        """A request is given up. What was fed so far becomes a record of status "aborted"; without any, a drop row with the reason."""
        return self.faults.attempt("abort", self._abort, request_id, blocks, num_fed, token_ids, reason)

    def preempt(self, request_id: str, blocks: Blocks = (), num_fed: int = 0, token_ids: Any = None) -> None:
        """A request loses its blocks and will be fed again.

        With blocks and `num_fed`, what the model chose so far is stored now, as a part: that is what sampled the tokens, and
        it wins over what feeding them again will choose. Without, the record has what was chosen last.
        """
        self.faults.attempt("preempt", self._preempt, request_id, blocks, num_fed, token_ids)

    def save(self, request_id: str, blocks: Blocks, num_fed: int, token_ids: Any = None) -> Receipt | None:
        """Store what a request has been fed beyond the last save, as a part; readers see it as partial until it ends.

        What was missing then is looked for again where it ends or is preempted, not by the next save, which would store all
        that follows once more.
        """
        return self.faults.attempt("save", self._save, request_id, blocks, num_fed, token_ids)

    # ---- all at once

    def clear(self, prefix: str | Mapping[str, str | int]) -> Receipt | None:
        """Delete what was stored under a prefix; as `RoutingWriter.delete_prefix`. Requests in flight are stored later, and stay."""
        return None if self._writer is None else self.faults.attempt("clear", self._writer.delete_prefix, prefix)

    def clear_run(self) -> Receipt | None:
        """Delete all that this run has stored; as `RoutingWriter.clear_run`."""
        return None if self._writer is None else self.faults.attempt("clear_run", self._writer.clear_run)

    def reset(self, reason: str = "engine reset") -> None:
        """The engine forgets its requests and its KV cache: those in flight leave a drop row each, and no row of the table counts."""
        with self.faults.held():
            if self._capturer is not None:
                self._capturer.discard()
            self.faults.attempt("reset", self._table.reset)
            self.close(reason)

    def suspend(self) -> None:
        """Capture nothing until `resume`: what is fed meanwhile is missing."""
        with self.faults.held():
            self.flush()
            if self._capturer is not None:
                self._capturer.suspended = True

    def resume(self, weight_version: str | int | None = None) -> None:
        """Capture again, rows of a new weight version if one is given. Does nothing where nothing was suspended."""
        if self._capturer is not None:
            self._capturer.skip()
            self._capturer.suspended = False
        if weight_version is not None:
            self.set_weight_version(weight_version)

    def set_weight_version(self, version: str | int) -> None:
        """What makes the rows of steps launched from now on; records tell it per range, also of rows found by a prefix hit."""
        self.faults.attempt("set_weight_version", self._table.set_weight_version, version)

    def close(self, reason: str = "engine stopped") -> None:
        """Requests in flight leave a drop row each. Table and writer stay open: they are the caller's."""
        requests, self._requests = self._requests, {}
        with self.faults.held():
            for request_id, request in requests.items():
                self._drop(request_id, request, reason)

    def stats(self) -> CaptureStats:
        """The counts."""
        rows, late = (0, 0) if self._capturer is None else (self._capturer.written, self._capturer.late)
        return CaptureStats(
            in_flight=len(self._requests),
            records=self._counts["records"],
            parts=self._counts["parts"],
            dropped=dict(self._dropped),
            opted_out=self._counts["opted_out"],
            rows=rows,
            late_rows=late,
            faults=dict(self.faults.counts),
        )

    # ---- inside

    def _register(self, request_id: str, capture: bool, tags: Mapping[str, str] | None) -> None:
        if self._writer is None or request_id in self._requests:
            return
        own: dict[str, str] = self.faults.attempt("register", dict, tags or {}) or {}
        request = self._requests[request_id] = _Request(own, captured=False)
        parsed = self.faults.attempt("register", self._writer.dataset.keys.parse, request_id) if capture else None
        request.captured = parsed is not None

    def _end(self, end: Finished) -> Receipt | None:
        if self._writer is None:
            return None
        request = self._requests.pop(end.request_id, None)
        if request is None:
            raise InvalidInputError(
                f"request {end.request_id!r} ended, which is not in flight: register it first, end it once"
            )
        if not request.captured:
            self._counts["opted_out"] += 1
            return None
        try:
            return self._store(end, request, self._status(end), request.saved)
        except Exception as error:  # noqa: BLE001 - whatever a hook was given, the engine goes on
            receipt = self._drop(end.request_id, request, f"fault of the engine's hook: {type(error).__name__}")
            self.faults.tell("finish", error)
            return receipt

    def _abort(self, request_id: str, blocks: Blocks, num_fed: int, token_ids: Any, reason: Any) -> Receipt | None:
        if num_fed:
            return self.finish(request_id, blocks, num_fed, "aborted", token_ids)
        request = self._requests.pop(request_id, None)
        return self._drop(request_id, request, reason) if request is not None else None

    def _preempt(self, request_id: str, blocks: Blocks, num_fed: int, token_ids: Any) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.preemptions += 1
        request.tags[PREEMPTIONS] = str(request.preemptions)
        if num_fed:
            self.faults.attempt("save", self._save, request_id, blocks, num_fed, token_ids, request.saved)

    def _save(
        self, request_id: str, blocks: Blocks, num_fed: int, token_ids: Any, start: int | None = None
    ) -> Receipt | None:
        request = self._requests.get(request_id)
        if self._writer is None or request is None or not request.captured:
            return None
        start = request.looked if start is None else start
        if num_fed <= start:
            return None
        self.flush()
        return self._store(Finished(request_id, blocks, num_fed, token_ids=token_ids), request, "partial", start)

    def _status(self, end: Finished) -> str:
        """FastDeploy calls some ends as no contract does."""
        reason = end.finish_reason
        if reason in ("preempt", "preempted"):
            return "preempted"
        status = "complete" if reason == "recover_stop" else status_of(reason)
        if status is None:
            self.faults.tell(
                "finish_reason", InvalidInputError(f"request {end.request_id!r}: unknown finish_reason={reason!r}")
            )
        return "complete" if status is None else status

    def _store(self, end: Finished, request: _Request, status: str, start: int) -> Receipt | None:
        """Gather the positions from `start` on into the spool."""
        assert self._writer is not None  # noqa: S101 - the callers have looked
        fed = end.num_fed
        if fed is None:
            if end.token_ids is None:
                raise InvalidRoutingError(f"request {end.request_id!r}: num_fed or token_ids must say how much was fed")
            fed = max(len(end.token_ids) - 1, 0)
        total = fed if end.num_tokens is None else end.num_tokens
        if not 0 <= fed <= total:
            raise InvalidRoutingError(f"request {end.request_id!r}: {fed} tokens fed of {total}")
        token_ids, logprobs = end.token_ids, end.logprobs
        if total < request.reached:  # it was preempted, and ended before it was fed as far again
            total, token_ids, logprobs = request.reached, None, None  # which the parts before have
        if not total:
            return self._drop(end.request_id, request, "nothing was fed")
        start = min(start, total)
        present = max(min(fed, len(end.blocks) * self._table.block_size), start)  # beyond its blocks nothing is known
        unfed = ((present, total),) if present < total else ()
        seen = self._table.look(end.blocks, start, present)
        if not request.parts and not seen.marks.any():
            return self._without_rows(end, request, status, NOTHING_KNOWN)
        version = end.weight_version
        if version is None and seen.weights:
            covered = present - start - sum(stop - begin for begin, stop in seen.missing)
            begin, stop, text = seen.weights[0]
            version = text if len(seen.weights) == 1 and stop - begin == covered else seen.weights
        try:
            with self._writer.reserve(
                end.request_id,
                total - start,
                layers=self._layers,
                token_ids=_cut(token_ids, start, total),
                logprobs=_cut(logprobs, start, total),
                token_start=start,
                part=request.parts > 0,
                status=status,
                missing=seen.missing + unfed,
                weight_version=version,
                tags={**request.tags, **(end.tags or {})},
            ) as record:
                missing = self._copy(seen, record, unfed, first=not request.parts)
        except _RecycledError:  # so the writer has stored nothing
            return self._without_rows(end, request, status, RECYCLED)
        self._counts["parts" if status == "partial" else "records"] += 1
        request.parts += 1
        request.reached = total
        if start <= request.saved:
            request.saved = missing[0][0] if missing else present
        request.looked = max(request.looked, present)
        return record.receipt

    def _copy(self, seen: Seen, record: ReservedRecord, unfed: tuple[Range, ...], *, first: bool) -> tuple[Range, ...]:
        """The rows that were seen; which of them are missing. Raises _RecycledError where a first part has none of them left."""
        fed = seen.stop - seen.start
        missing = self._table.fill(seen, record.experts[:fed])
        record.experts[fed:] = 0
        if missing != seen.missing:  # a block was recycled meanwhile
            if first and missing == ((seen.start, seen.stop),):
                raise _RecycledError
            record.missing = missing + unfed
        return missing

    def _without_rows(self, end: Finished, request: _Request, status: str, reason: str) -> Receipt | None:
        """What goes on may still have rows; an end without any is a drop row."""
        return None if status == "partial" else self._drop(end.request_id, request, reason)

    def _drop(self, request_id: str, request: _Request, reason: Any) -> Receipt | None:
        if self._writer is None or not request.captured:
            return None
        text = _reason(reason)
        drop = partial(self._writer.drop, request_id, text, token_start=request.reached, part=request.parts > 0)
        receipt = self.faults.attempt("drop", drop)  # where its parts end: of equal ends the latest tells
        if receipt is not None:
            known = text in self._dropped or len(self._dropped) < MAX_REASONS
            self._dropped[text if known else OTHER_REASONS] += 1
        return receipt


def _reason(reason: Any) -> str:
    """A text for a drop row, whatever an engine has said."""
    text = "" if reason is None else str(getattr(reason, "value", reason))[:MAX_REASON]
    return text.encode(errors="replace").decode() or "aborted"


def _cut(values: Any, start: int, stop: int) -> Any:
    """One for each token of a part, of those for all tokens."""
    if values is None:
        return None
    return np.asarray(values)[start:stop] if isinstance(values, (list, tuple)) else values[start:stop]
