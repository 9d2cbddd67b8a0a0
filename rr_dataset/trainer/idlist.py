"""A list of request ids that every rank builds alike, and numbers that name its rows.

A number is an int64 >= 0: the row below, 31 bits of a hash of the row's id above. So a rank whose list is another one notices
it by the number alone, without a word from the others.

    bits 0-31   row
    bits 32-62  XXH3-64 of the id, its lowest 31 bits
    bit 63      0
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from rr_dataset.errors import InvalidInputError
from rr_dataset.lookup import id_list

MAX_ROWS = 1 << 32
_CHECK_MASK = (1 << 31) - 1


class IdList(Sequence[str]):
    """Request ids in a fixed order. Immutable; pickles.

    A million ids take as many bytes as they have letters and 8 MB. They are held as one block and not as objects, so a forked
    worker that reads them copies no memory.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        texts = [_encoded(each) for each in id_list(ids)]
        if len(texts) > MAX_ROWS:
            raise InvalidInputError(f"{len(texts)} ids: a list has at most {MAX_ROWS}")
        self._offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum([len(text) for text in texts], out=self._offsets[1:])
        self._text = np.frombuffer(b"".join(texts), np.uint8)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, row: int) -> str: ...

    @overload
    def __getitem__(self, row: slice) -> list[str]: ...

    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        at = operator.index(row)
        if not -len(self) <= at < len(self):
            raise IndexError(f"row {at} of a list of {len(self)} ids")
        at %= len(self)
        return self._text[self._offsets[at] : self._offsets[at + 1]].tobytes().decode()

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdList) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"IdList({len(self)} ids, digest {self.digest})"

    @property
    def digest(self) -> str:
        """XXH3-64 over the ids and their order, in hex: equal lists have equal digests."""
        return xxhash.xxh3_64_hexdigest(self._text.tobytes() + self._offsets.tobytes())

    def number(self, row: int) -> int:
        """What names this row in a batch."""
        at = range(len(self))[row]
        return at | _check(self[at]) << 32

    def numbers(self, rows: Iterable[int] | None = None) -> npt.NDArray[np.int64]:
        """int64 [rows]: what names each of them, by default of all, for a column of the trainer's own samples."""
        chosen = range(len(self)) if rows is None else rows
        return np.fromiter((self.number(row) for row in chosen), np.int64)

    def rows(self, numbers: npt.ArrayLike) -> list[int]:
        """The rows that the numbers name, whatever the shape of `numbers`.

        numbers: int64, or anything numpy makes such an array of: a list, a torch or a paddle tensor on the CPU.

        Raises InvalidInputError for numbers of another type or beyond the list, and for those of another list.
        """
        return [self._row(number) for number in as_numbers(numbers)]

    def _row(self, number: int) -> int:
        row, check = number & (MAX_ROWS - 1), number >> 32
        if number < 0:
            raise InvalidInputError(f"row number {number}: expected one of IdList.number, which are not negative")
        if row >= len(self):
            raise InvalidInputError(f"row number {number}: it names row {row}, and {self!r} has no such row")
        if check != _check(self[row]):
            raise InvalidInputError(
                f"row number {number}: row {row} of {self!r} is {self[row]!r}, and the number was made for another id: the "
                "rank that made it has another list; build it from the same manifest in the same order on every rank"
            )
        return row


def as_numbers(numbers: npt.ArrayLike) -> list[int]:
    """The numbers one after the other. Raises InvalidInputError for what is not int64."""
    array = np.asarray(numbers)
    if array.size and array.dtype != np.int64:
        raise InvalidInputError(
            f"row numbers of dtype {array.dtype}: expected int64 throughout; a narrower type or a float has lost their check"
        )
    found: list[int] = array.ravel().tolist()
    return found


def _encoded(request_id: Any) -> bytes:
    if not isinstance(request_id, str):
        raise InvalidInputError(f"{request_id!r}: expected a request id as text")
    return request_id.encode()


def _check(request_id: str) -> int:
    return xxhash.xxh3_64_intdigest(request_id.encode()) & _CHECK_MASK
