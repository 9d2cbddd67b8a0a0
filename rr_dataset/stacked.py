"""Records of equal length, read straight into one array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from rr_dataset.buffers import overlaps_itself
from rr_dataset.errors import InvalidRoutingError
from rr_dataset.lookup import FoundByKey, Lookup
from rr_dataset.payload import Arrays, Draft, fill
from rr_dataset.record import RecordHead, RoutingRecord
from rr_dataset.selection import Share, Tokens, token_ranges
from rr_dataset.snapshot import Snapshot

Empty = Callable[[tuple[int, ...], str], npt.NDArray[Any]]


class Stacked(NamedTuple):
    """Records side by side.

    routed_experts: [ids, layers, rows, top_k], as `empty` made it. records: theirs are views of it, of the first rows where a
        `Share` asked for more than the record has.
    """

    routed_experts: npt.NDArray[Any]
    records: list[RoutingRecord]


def read_stacked(
    lookup: Lookup,
    ids: Sequence[str],
    layers: Sequence[int] | None,
    tokens: Sequence[Tokens] | Callable[[RecordHead], Share],
    empty: Empty,
) -> Stacked:
    """See `RoutingDataset.get_stacked`."""
    spec = lookup.format.spec
    chosen = spec.check_layers(layers, at_least=0)

    def use(found: FoundByKey, snapshot: Snapshot) -> Stacked:
        heads = [found[key].head for key in ids]
        if callable(tokens):
            shares = [tokens(head) for head in heads]
        else:
            shares = [
                Share(token_ranges(each, head.num_tokens, head.request_id))
                for each, head in zip(tokens, heads, strict=True)
            ]
        counts = [share.num_rows for share in shares]
        for key, count in zip(ids, counts, strict=True):
            if count != counts[0]:
                raise InvalidRoutingError(
                    f"{key!r} has {count} rows and {ids[0]!r} has {counts[0]}: read records of several lengths with get_packed, "
                    "or get_many and collate"
                )
        shape = (len(ids), len(chosen), counts[0] if counts else 0, spec.top_k)
        block = empty(shape, spec.dtype)
        if block.shape != shape or overlaps_itself(block):
            raise InvalidRoutingError(
                f"empty made {block.shape} with strides {block.strides}: expected {shape}, no element in the place of another"
            )
        arrays = Arrays(0)
        drafts = []
        for key, head, share, out in zip(ids, heads, shares, block, strict=True):
            ranges = share.recorded(head.num_tokens)
            read = sum(stop - start for start, stop in ranges)
            out[:, read:] = 0
            drafts.append(Draft(head, found[key].rows, spec, chosen, ranges, arrays, out[:, :read]))
        fill(drafts, snapshot, lookup.reader)
        return Stacked(block, [draft.record() for draft in drafts])

    return lookup.use_ids(ids, "raise", use)
