"""Whether a record is of the trainer's tokens. Routing that is shifted by one token trains, and trains wrongly.

Engines differ in how many rows a request of S tokens has: `COVERAGES` names them. Token ids decide where both sides have
them: put them with `RoutingWriter.put(token_ids=...)`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import AlignmentError, InvalidInputError
from rr_dataset.options import check_whole
from rr_dataset.payload import NO_TOKEN_ID
from rr_dataset.record import RecordHead, RoutingRecord

COVERAGES = {
    "S": "every token has a row",
    "S-1": "all but the last, which was sampled and never fed (vLLM, SGLang, slime)",
    "eos": "all, but for an end-of-sequence token at the end (FastDeploy)",
    "ids": "as many as there are; the recorded token ids decide",
}
MAX_SHIFT = 1024  # tokens, of which an error looks for a shift
_SURE = 8  # ids that must agree before a shift is named
_EXPECTED = "expected token ids, integers [S] in host memory, or their number"

Ids = npt.NDArray[np.int64]


class Alignment(NamedTuple):
    """What `align` found. Of the trainer's `num_tokens` tokens the first `recorded` have a row, the others are missing.

    compared: how many token ids both sides had; 0 says that only numbers were compared: none were recorded, or none given.
    """

    num_tokens: int
    recorded: int
    compared: int


def align(
    record: RecordHead,
    tokens: SupportsIndex | Sequence[int] | npt.NDArray[Any],
    coverage: str = "S",
    *,
    eos_ids: Sequence[int] = (),
    trailing: int = 0,
) -> Alignment:
    """Check that row p of the record is of the trainer's token p, for all rows that were read.

    record: whole, or a part of its tokens. A head carries no token ids: give their number with one.
    tokens: the trainer's token ids of the whole sample, integers [S], a list, an array or a tensor in host memory; or only their
        number S, an integer or an array or tensor without dimensions.
    coverage: which tokens have a row, one of `COVERAGES`. "eos" needs `eos_ids` and the trainer's ids; "ids" needs ids on both
        sides, and takes records that end before or after the trainer's tokens do.
    trailing: so many tokens at the end were added after the engine had stopped, such as the output of a tool; they have no
        row, and coverage speaks of those before them.

    Nothing is moved or guessed: tokens without a row are missing, for `collate(num_tokens=[alignment.num_tokens])`.
    Raises AlignmentError when numbers or ids differ, with the shift or the first difference. InvalidInputError for arguments
    that do not go together, such as token ids with a head whose record has some.
    """
    if coverage not in COVERAGES:
        raise InvalidInputError(f"coverage={coverage!r}: expected one of {', '.join(COVERAGES)}")
    ids = _ids(tokens)
    count = _number(tokens) if ids is None else len(ids)
    if check_whole("trailing", trailing, 0) > count:
        raise InvalidInputError(f"trailing={trailing}: expected 0 to the {count} tokens of the sample")
    generated = count - trailing
    if ids is not None and not isinstance(record, RoutingRecord) and any(row.has_token_ids for row in record.rows):
        raise InvalidInputError(
            f"{record.request_id!r}: token ids were recorded, and a head does not carry them, so yours would not be compared: pass "
            "the record (`get`), or only the number of tokens"
        )
    compared = 0 if ids is None else compare_ids(record, ids)
    if coverage == "ids":
        if not compared and min(record.num_tokens, count):
            raise InvalidInputError(
                f"{record.request_id!r}: coverage='ids' needs token ids on both sides; the record "
                f"{'has none' if ids is not None else 'was compared with a number'}"
            )
        return Alignment(count, min(record.num_tokens, count), compared)
    expected = _rows(coverage, generated, ids, eos_ids)
    if record.num_tokens != expected:
        raise AlignmentError(_wrong_number(record, coverage, generated, expected))
    return Alignment(count, expected, compared)


def compare_ids(record: RecordHead, ids: Ids) -> int:
    """How many recorded token ids were compared with the trainer's `ids` [S]; those at positions past either end are not.

    Raises AlignmentError when one differs.
    """
    if not isinstance(record, RoutingRecord) or record.token_ids is None:
        return 0
    recorded = np.full(max((stop for _, stop in record.token_ranges), default=0), NO_TOKEN_ID, np.int64)
    at = 0
    for start, stop in record.token_ranges:
        recorded[start:stop] = record.token_ids[at : at + stop - start]
        at += stop - start
    both = min(len(recorded), len(ids))
    known = recorded[:both] != NO_TOKEN_ID
    different = known & (recorded[:both] != ids[:both])
    if different.any():
        raise AlignmentError(f"{record.request_id!r}: {describe_difference(recorded, ids, different, known)}")
    return int(np.count_nonzero(known))


def describe_difference(
    recorded: Ids, ids: Ids, different: npt.NDArray[np.bool_], known: npt.NDArray[np.bool_], whose: str = "yours"
) -> str:
    """The shift that explains it, or the first difference. recorded, ids: may differ in length. whose: the `ids` are."""
    first = int(np.argmax(different))
    shift = _shift(recorded, ids, first)
    told = f"position {first}: recorded {recorded[first]}, {whose} {ids[first]}"
    if shift:
        since = "" if first == 0 else f"from position {first} on, "
        tokens = "token" if abs(shift) == 1 else "tokens"
        more = "more" if shift > 0 else "fewer"
        return (
            f"{since}the recorded ids are {whose} shifted by {shift:+d}, the record has {abs(shift)} {tokens} {more} before "
            f"them ({told})"
        )
    count, of = np.count_nonzero(different), np.count_nonzero(known)
    return f"the recorded ids are not {whose}: first difference at {told}; {count} of {of} differ"


def _shift(recorded: Ids, ids: Ids, first: int) -> int:
    """By how much the ids from `first` on are moved in the record: `recorded[p + shift] == ids[p]`; 0 if by nothing."""
    for distance in range(1, MAX_SHIFT + 1):
        for shift in (distance, -distance):
            start = max(first, first - shift)
            theirs, mine = recorded[start + shift :], ids[start:]
            both = min(len(theirs), len(mine))
            known = theirs[:both] != NO_TOKEN_ID
            sure = int(np.count_nonzero(known)) >= min(_SURE, len(ids) - first - 1) > 0
            if sure and bool((~known | (theirs[:both] == mine[:both])).all()):
                return shift
    return 0


def _ids(tokens: Any) -> Ids | None:
    """The token ids, or None for a number. Tensors of any shape can be taken for numbers, so dimensions decide."""
    if getattr(tokens, "ndim", 0 if isinstance(tokens, SupportsIndex) else None) == 0:
        return None
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"tokens is a {type(tokens).__name__} that numpy cannot read: {_EXPECTED} ({error})"
        ) from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidInputError(f"tokens is {ids.dtype} {list(ids.shape)}: {_EXPECTED}")
    return ids.astype(np.int64, copy=False)


def _number(tokens: Any) -> int:
    try:
        return operator.index(tokens.item() if hasattr(tokens, "ndim") else tokens)
    except (TypeError, RuntimeError):
        raise InvalidInputError(f"tokens={tokens!r}: {_EXPECTED}") from None


def _rows(coverage: str, generated: int, ids: Ids | None, eos_ids: Sequence[int]) -> int:
    if coverage == "eos":
        if ids is None or not eos_ids:
            raise InvalidInputError(
                "coverage='eos' needs the trainer's token ids and eos_ids=, the ids that end a sequence"
            )
        return generated - int(generated > 0 and int(ids[generated - 1]) in set(eos_ids))
    return max(generated - (coverage == "S-1"), 0)


def _wrong_number(record: RecordHead, coverage: str, generated: int, expected: int) -> str:
    rows = record.num_tokens
    more = rows - expected
    hint = ""
    if rows == generated - 1:
        hint = "; with coverage='S-1' it would fit"
    elif rows == generated:
        hint = "; with coverage='S' it would fit"
    elif rows < generated:
        hint = f"; were the last {generated - rows} added after the engine had stopped, say trailing="
    return (
        f"{record.request_id!r} has {rows} rows and should have {expected}, {abs(more)} too {'many' if more > 0 else 'few'}: "
        f"coverage={coverage!r} of {generated} tokens, {COVERAGES[coverage]}{hint}"
    )
