"""The turns of a conversation as one sequence, each token with the routing of the turn that generated it.

The request of a turn has all earlier turns in its prompt and computes them again, with other routes here and there. Its own
rows for them are therefore not used, unless no earlier turn has the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rr_dataset.dataset import RoutingDataset
from rr_dataset.errors import AlignmentError, InvalidInputError, ReadConflictError
from rr_dataset.options import check_whole
from rr_dataset.payload import NO_LOGPROB, NO_TOKEN_ID
from rr_dataset.record import RoutingRecord
from rr_dataset.trainer.align import describe_difference


class Trajectory(NamedTuple):
    """A conversation as one sequence of T tokens, those of its last turn.

    routed_experts: [layers, T, top_k] of the spec's dtype; zero bytes where nothing is present.
    present: bool [layers, T]. turns: int32 [T], the number of the turn whose row it is.
    token_ids: int32 [T], -1 where the turn has none; None if no turn has any. logprobs: float32 [T], NaN likewise.
    layers: their ids.
    """

    routed_experts: npt.NDArray[Any]
    present: npt.NDArray[np.bool_]
    turns: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32] | None
    logprobs: npt.NDArray[np.float32] | None
    layers: tuple[int, ...]


def trajectory(
    dataset: RoutingDataset,
    turns: Sequence[str],
    prompt_lengths: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    *,
    refs: bool = False,
) -> Trajectory:
    """Assemble the turns of one conversation, in their order.

    turns: request ids; with `refs`, refs of receipts instead, for the very puts.
    prompt_lengths: tokens of each turn's prompt. A turn that begins before the end of the one before it has generated those
        tokens anew, and its rows win. None: a turn begins where the rows of the one before it end.
    layers: as in `RoutingDataset.get`.

    What stands between two turns (tool output, the next question), and a last token that an engine samples and never feeds,
    has the rows of the later turn, which was the first to compute it. What a turn says is missing of its own stays missing.

    Token ids are compared where turns have them. Raises AlignmentError for a turn that does not contain what came before it,
    InvalidInputError for lengths that cannot be, ReadConflictError where a record changed meanwhile, and as
    `RoutingDataset.get_many`.
    """
    chosen = dataset.spec.check_layers(layers, at_least=0)
    if not turns:
        raise InvalidInputError("turns is empty: expected the request ids of a conversation, in order")
    read = dataset.resolve if refs else dataset.get_many
    whole = read(turns, chosen[:1])  # lengths and token ids, for one layer's bytes
    spans = _spans(whole, prompt_lengths)
    _check_ids(whole, spans)
    records = read(turns, chosen, [[span] for span in spans])
    for before, after in zip(whole, records, strict=True):
        if [row.record_id for row in before.rows] != [row.record_id for row in after.rows]:
            raise ReadConflictError(f"{after.request_id!r} changed while it was read: wait until its status is final")
    numbers = np.repeat(np.arange(len(spans), dtype=np.int32), [stop - start for start, stop in spans])
    return Trajectory(
        np.concatenate([record.routed_experts for record in records], axis=1),
        np.concatenate([record.present() for record in records], axis=1),
        numbers,
        _vector([record.token_ids for record in records], spans, NO_TOKEN_ID, np.int32),
        _vector([record.logprobs for record in records], spans, NO_LOGPROB, np.float32),
        chosen,
    )


def _spans(whole: Sequence[RoutingRecord], prompt_lengths: Sequence[int] | None) -> list[tuple[int, int]]:
    """The positions that are each turn's own; one after the other, from 0 to the end of the last turn."""
    if prompt_lengths is not None and len(prompt_lengths) != len(whole):
        raise InvalidInputError(f"prompt_lengths has {len(prompt_lengths)} numbers for {len(whole)} turns")
    spans: list[tuple[int, int]] = []
    for number, record in enumerate(whole):
        end = spans[-1][1] if spans else 0
        start = end
        if prompt_lengths is not None:
            prompt = check_whole("prompt_lengths", prompt_lengths[number], 0)
            if prompt > record.num_tokens:
                raise InvalidInputError(
                    f"turn {number} ({record.request_id!r}) has {record.num_tokens} rows, its prompt cannot have {prompt} tokens"
                )
            start = min(prompt, end)
        if record.num_tokens < start:
            raise AlignmentError(
                f"turn {number} ({record.request_id!r}) has {record.num_tokens} rows, the turns before it {start}: it does not "
                "contain them. Say prompt_lengths= if the conversation was cut back"
            )
        spans = [(first, min(last, start)) for first, last in spans]
        spans = [(min(first, last), last) for first, last in spans]
        spans.append((start, record.num_tokens))
    return spans


def _check_ids(whole: Sequence[RoutingRecord], spans: Sequence[tuple[int, int]]) -> None:
    """Raises AlignmentError for a turn whose prompt is not what the trajectory has there."""
    known = np.full(spans[-1][1], NO_TOKEN_ID, np.int64)
    for record, (start, stop) in zip(whole, spans, strict=True):
        if record.token_ids is not None:
            known[start:stop] = record.token_ids[start:stop]
    for number, record in enumerate(whole):
        if record.token_ids is None:
            continue
        before, theirs = spans[number][0], record.token_ids.astype(np.int64)
        mine = known[:before]
        both = (mine != NO_TOKEN_ID) & (theirs[:before] != NO_TOKEN_ID)
        different = both & (mine != theirs[:before])
        if different.any():
            raise AlignmentError(
                f"turn {number} ({record.request_id!r}) does not go on from the turns before it: "
                f"{describe_difference(theirs, mine, different, both, 'theirs')}"
            )


def _vector(
    parts: Sequence[npt.NDArray[Any] | None], spans: Sequence[tuple[int, int]], filler: float, dtype: Any
) -> Any:
    if all(part is None for part in parts):
        return None
    return np.concatenate(
        [
            np.full(stop - start, filler, dtype) if part is None else part
            for part, (start, stop) in zip(parts, spans, strict=True)
        ]
    )
