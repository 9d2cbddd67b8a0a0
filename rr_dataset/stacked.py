"""Records of equal length, read straight into one array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from rr_dataset.errors import InvalidRoutingError
from rr_dataset.lookup import FoundByKey, Lookup
from rr_dataset.payload import Arrays, Draft, fill
from rr_dataset.record import RoutingRecord
from rr_dataset.selection import Tokens, token_ranges
from rr_dataset.snapshot import Snapshot

Empty = Callable[[tuple[int, ...], str], npt.NDArray[Any]]


class Stacked(NamedTuple):
    """Records side by side.

    routed_experts: [ids, layers, tokens, top_k], as `empty` made it. records: theirs are views of it.
    """

    routed_experts: npt.NDArray[Any]
    records: list[RoutingRecord]


def read_stacked(
    lookup: Lookup,
    ids: Sequence[str],
    layers: Sequence[int] | None,
    tokens: Sequence[Tokens] | Callable[[int], Tokens],
    empty: Empty,
) -> Stacked:
    """See `RoutingDataset.get_stacked`."""
    spec = lookup.format.spec
    chosen = spec.check_layers(layers)

    def use(found: FoundByKey, snapshot: Snapshot) -> Stacked:
        heads = [found[key].head for key in ids]
        asked = [tokens(head.num_tokens) for head in heads] if callable(tokens) else tokens
        counts = [
            sum(stop - start for start, stop in token_ranges(each, head.num_tokens, head.request_id))
            for each, head in zip(asked, heads, strict=True)
        ]
        for key, count in zip(ids, counts, strict=True):
            if count != counts[0]:
                raise InvalidRoutingError(
                    f"{key!r} has {count} tokens and {ids[0]!r} has {counts[0]}: read records of several lengths with get_packed, "
                    "or get_many and collate"
                )
        shape = (len(ids), len(chosen), counts[0] if counts else 0, spec.top_k)
        block = empty(shape, spec.dtype)
        arrays = Arrays(0)
        drafts = [
            Draft(found[key].head, found[key].rows, spec, chosen, each, arrays, out)
            for key, each, out in zip(ids, asked, block, strict=True)
        ]
        fill(drafts, snapshot, lookup.reader)
        return Stacked(block, [draft.record() for draft in drafts])

    return lookup.use_ids(ids, "raise", use)
