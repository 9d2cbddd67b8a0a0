"""The items of `put_many`: drawn to the end, whatever they do, and named in errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rr_dataset.errors import InvalidInputError, RoutingDatasetError, reason_of


@dataclass(frozen=True)
class Ended:
    """In the place of an item that an iterable did not give."""

    error: Exception


def to_the_end(items: Any) -> Iterator[Any]:
    """All that there is; of an iterable that raises, what came before and an Ended.

    Raises InvalidInputError for what is no iterable.
    """
    try:
        each = iter(items)
    except Exception as error:
        raise InvalidInputError(f"items is a {type(items).__name__}: expected several items") from error
    while True:
        try:
            item = next(each)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - what was drawn before has its receipts
            yield Ended(error)
            return
        yield item


def as_ours(error: Exception) -> RoutingDatasetError:
    """Ours, of anything that an item raised."""
    if isinstance(error, RoutingDatasetError):
        return error
    ours = InvalidInputError(f"an item cannot be read: {reason_of(error)}")
    ours.__cause__ = error
    return ours


def shown_id(item: Any) -> str:
    """What an item says is its request id, cut; it may say anything."""
    try:
        named = (
            item.get("request_id")
            if isinstance(item, Mapping)
            else item[0]
            if isinstance(item, (tuple, list))
            else None
        )
        return reason_of(repr(named))
    except Exception:  # noqa: BLE001 - it is only named
        return "?"
