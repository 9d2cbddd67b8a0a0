"""The errors of rr_dataset, one tree, grouped by what a handler would do.

RoutingDatasetError
├── InvalidInputError (ValueError)            the caller's argument is wrong; nothing was written
│   ├── InvalidRequestIdError                 the id does not follow the dataset's key scheme
│   ├── InvalidRoutingError                   shape, layers, dtype or range do not match the spec
│   ├── AlignmentError                        a record is not of the trainer's tokens; says by how much
│   ├── SpecMismatchError                     the dataset exists with another spec or key scheme
│   └── RecordTooLargeError                   the record does not fit the spool, whatever its state
├── PutManyError                              some items of put_many were not stored; has the receipts of the others
├── NotFoundError (LookupError)
│   ├── DatasetNotFoundError (FileNotFoundError)
│   ├── RecordNotFoundError (KeyError)
│   ├── RecordDroppedError                    the engine gave the record up; says why
│   └── WaitTimeoutError (TimeoutError)       not there, or not final, within the time given
├── FormatError (ValueError)                  bytes at rest that are not what they claim to be
│   ├── NewerFormatError                      written by a later version: upgrade
│   ├── CorruptShardError                     a shard that is cut, foreign or damaged
│   └── CorruptSpoolError                     a slab that is cut, foreign or damaged
├── StorageError (OSError)                    the store failed; trying again later may help
│   ├── ObjectNotFoundError (FileNotFoundError)
│   └── ReadConflictError                     shards kept vanishing under a read
└── WriterError (RuntimeError)                the writer cannot do it in its present state
    ├── WriterClosedError
    ├── WriterForkedError                     used in a forked child; open a writer there
    ├── SpoolFullError                        no room, and the policy says raise
    ├── SpoolUnavailableError                 no directory can hold the spool
    ├── WorkerError                           the worker does not start or does not stay up
    └── FlushTimeoutError (TimeoutError)      not durable yet; its cause is the last storage failure

RoutingDatasetWarning (UserWarning)           something foreign or damaged was stepped over
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

MAX_REASON_BYTES = 1000  # a text for people; thousands of rows fit a control slab only if each is short
NO_REASON = "no reason given"


class RoutingDatasetError(Exception):
    """Anything that rr_dataset raises on purpose."""


class InvalidInputError(RoutingDatasetError, ValueError):
    """The caller's argument is wrong; nothing was written."""


class InvalidRequestIdError(InvalidInputError):
    """The request id does not follow the dataset's key scheme."""


class InvalidRoutingError(InvalidInputError):
    """Shape, layers, dtype or range of a record do not match the spec."""


class AlignmentError(InvalidInputError):
    """The record is not of the trainer's tokens: another number, a shift, or other ids; the message says by how much."""


class SpecMismatchError(InvalidInputError):
    """The dataset exists with another spec, key scheme or setting."""


class RecordTooLargeError(InvalidInputError):
    """The record does not fit the spool, whatever its state."""


class PutManyError(RoutingDatasetError):
    """Some items of `put_many` were not stored, the others were.

    errors: by number of the item, what `put` raised. receipts: one for each item in order, None for those.
    """

    def __init__(
        self, message: str, errors: Mapping[int, RoutingDatasetError] | None = None, receipts: Sequence[Any] = ()
    ) -> None:
        super().__init__(message)
        self.errors, self.receipts = errors or {}, receipts


class NotFoundError(RoutingDatasetError, LookupError):
    """What was asked for is not there."""


class DatasetNotFoundError(NotFoundError, FileNotFoundError):
    """There is no dataset at this address."""


class RecordNotFoundError(NotFoundError, KeyError):
    """No visible record has this id."""

    __str__ = Exception.__str__  # KeyError would print the repr of the message


class RecordDroppedError(NotFoundError):
    """The engine gave the record up; the message says why."""


class WaitTimeoutError(NotFoundError, TimeoutError):
    """Records that were waited for are not there, or not final, within the time given; the message names them."""


class FormatError(RoutingDatasetError, ValueError):
    """Bytes at rest are not what they claim to be."""


class NewerFormatError(FormatError):
    """Written by a later version of rr_dataset."""


class CorruptShardError(FormatError):
    """A shard that is cut, foreign or damaged."""


class CorruptSpoolError(FormatError):
    """A slab that is cut, foreign or damaged."""


class StorageError(RoutingDatasetError, OSError):
    """The store failed; trying again later may help."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """The object is not there, or no longer."""


class ReadConflictError(StorageError):
    """Shards kept vanishing under a read."""


class WriterError(RoutingDatasetError, RuntimeError):
    """The writer cannot do it in its present state."""


class WriterClosedError(WriterError):
    """The writer was closed."""


class WriterForkedError(WriterError):
    """A writer was used in a forked child of the process that opened it."""


class SpoolFullError(WriterError):
    """The spool has no room and the policy is to raise."""


class SpoolUnavailableError(WriterError):
    """No directory can hold the spool."""


class WorkerError(WriterError):
    """The worker process does not start, or does not stay up."""


class FlushTimeoutError(WriterError, TimeoutError):
    """Not durable within the time given; the cause is the last storage failure."""


class RoutingDatasetWarning(UserWarning):
    """Something foreign or damaged lies in a dataset and was stepped over; the rest is readable."""


def reason_of(why: object) -> str:
    """A text for people, of a text or an error, which rows, JSON, logs and terminals take; whatever it is given, it never fails.

    Of an error that is not ours it has the class. Lone surrogates are escaped; beyond MAX_REASON_BYTES it is cut.
    """
    try:
        text = "" if why is None else str(why)
    except Exception:  # noqa: BLE001 - the text of a foreign object, which may do anything
        text = f"a {type(why).__name__} that has no text"
    if isinstance(why, Exception) and not isinstance(why, RoutingDatasetError):
        text = f"{type(why).__name__}: {text}" if text else type(why).__name__
    if not text.strip():
        return NO_REASON
    encoded = text[: MAX_REASON_BYTES + 1].encode(errors="backslashreplace")
    if len(encoded) > MAX_REASON_BYTES:
        encoded = encoded[: MAX_REASON_BYTES - 3] + b"..."
    return encoded.decode(errors="ignore")
