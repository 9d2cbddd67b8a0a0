"""A record that its caller fills in place: `RoutingWriter.reserve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import WriterError, WriterForkedError
from rr_dataset.feed import SPOOL_FULL, Feed
from rr_dataset.intake import Intake, unreadable
from rr_dataset.receipt import Receipt
from rr_dataset.record import Range, Span
from rr_dataset.slab import Reservation


class ReservedRecord:
    """Room for one record in the spool: a context manager, for one thread and one `with`; see `RoutingWriter.reserve`.

    experts: [tokens, layers, top_k] of the stored dtype, C order, not zeroed; only inside the `with`.
    dropped: why nothing will be stored, or None; `experts` is then memory that nobody reads.
    status, missing, weight_version, tags: as given to `reserve`; what is known late is set before the `with` ends.
    """

    __slots__ = (
        *("_describe", "_entered", "_feed", "_given", "_intake", "_receipt", "_reservation"),
        *("dropped", "experts", "missing", "status", "tags", "weight_version"),
    )

    def __init__(
        self,
        feed: Feed,
        describe: Callable[..., Intake],  # of status, missing, weight_version and tags
        *,
        status: str | None,
        missing: Iterable[Range],
        weight_version: str | int | Iterable[Span] | None,
        tags: Mapping[str, str] | None,
    ) -> None:
        """Raises InvalidRequestIdError or InvalidRoutingError."""
        self.status, self.tags = status, tags
        self.missing = _kept("missing", missing)
        self.weight_version = _kept("weight_version", weight_version)
        self.dropped: str | None = None
        self._feed, self._describe = feed, describe
        self._given = self._said()
        self._intake = describe(**self._given)
        self._entered = False
        self._reservation: Reservation | None = None
        self._receipt: Receipt | None = None
        self.experts: npt.NDArray[Any]

    @property
    def receipt(self) -> Receipt:
        """After the `with`: as that of `put`. Raises WriterError before, and when nothing was stored."""
        if self._receipt is None:
            raise WriterError("there is no receipt: the record is not stored before its `with` ends without an error")
        return self._receipt

    def __enter__(self) -> ReservedRecord:
        """Raises RecordTooLargeError, WriterClosedError, WriterForkedError, SpoolFullError under on_full="raise", and WriterError
        where it was entered before.
        """
        self._feed.check_process()
        if self._entered:
            raise WriterError("this reservation was entered before: it is for one `with`; call reserve again")
        self._reservation = self._feed.room(self._intake)
        self._entered = True
        if self._reservation is None:
            self.dropped = SPOOL_FULL
            self.experts = self._intake.experts_in(self._feed.spare(self._intake.payload_bytes))
        else:
            self.experts = self._intake.experts_in(self._reservation.payload)
            self._intake.fill_tokens(self._reservation.payload)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises InvalidRoutingError for an id out of range, and WriterForkedError in a child that was forked inside the `with`,
        where the record stays the parent's; nothing is stored then.
        """
        del self.experts
        try:
            self._feed.check_process()
        except WriterForkedError:
            if kind is None:
                raise
            return
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            if kind is None:
                self._receipt = self._feed.drop_full(self._intake)
            return
        try:
            if kind is None:
                self._receipt = self._store(reservation)
        finally:
            self._feed.abort(reservation)  # unless it is committed

    def _store(self, reservation: Reservation) -> Receipt:
        intake, said = self._intake, self._said()
        if self.tags is not None or any(said[name] is not value for name, value in self._given.items()):
            intake = self._describe(**said)
        intake.check(reservation.payload)
        if intake.meta == self._intake.meta:
            return self._feed.commit(reservation, intake)
        moved = self._feed.room(intake)  # what describes an entry lies before it and is never written twice
        if moved is None:
            self.dropped = SPOOL_FULL
            return self._feed.drop_full(intake)
        np.copyto(moved.payload, reservation.payload)
        return self._feed.commit(moved, intake)

    def _said(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "missing": self.missing,
            "weight_version": self.weight_version,
            "tags": self.tags,
        }


def _kept(name: str, value: Any) -> Any:
    """Several things as tuples: a list that is changed later would not be seen to be another."""
    try:
        if isinstance(value, str) or not isinstance(value, Iterable):
            return value
        return tuple(
            tuple(each) if isinstance(each, Iterable) and not isinstance(each, str) else each for each in value
        )
    except Exception as error:
        raise unreadable(name, error) from error
