"""Routing in the form that other trainers replay. Plain numpy; nothing of theirs is imported.

| trainer | form | rows | layers |
|---|---|---|---|
| Megatron-LM `RouterReplay.set_replay_data` | a list of [rows, top_k] int64, one a router in construction order | this rank's | its MoE layers |
| verl `routed_experts` | [batch, prompt + response, layers, top_k] int16 | left-padded prompt, right-padded response | MoE or all |
| slime `rollout_routed_experts` | per sample [S - 1, layers, top_k] int32 | all but the last token | all, dense ones too |

None of them has a mark for a row that was not recorded: verl's batches hold zeros there, slime's padding `arange % experts`, and
both replay it. So rows that are missing are refused here, unless `missing="spread"` accepts ids that are spread over the experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.padding import spread_rows
from rr_dataset.record import RoutingRecord, RoutingSpec, shown_layers

Missing = Literal["refuse", "spread"]


def to_megatron(
    rows: Mapping[int, npt.NDArray[Any]], layers: Sequence[int] | None = None
) -> list[npt.NDArray[np.int64]]:
    """What Megatron-LM's `RouterReplay.set_replay_data` takes (as torch tensors), one micro-batch of one rank.

    rows: {layer id: [rows, top_k]} of this rank's tokens, as `get_packed` reads them.
    layers: 0-based ids in the order in which the rank's routers were constructed, virtual stages one after the other; rising
        by default. (Megatron's own layer_number starts at 1.)

    Megatron-LM gathers scores with the array, so it must be int64; its list for backwards is first-in-first-out, so micro-batches
    are set in the order of their forwards. Raises InvalidInputError for a layer without rows; InvalidRoutingError for rows of
    different counts, for what are no ids, and for the -1 of padding="minus_one", which nothing can gather.
    """
    order = sorted(rows) if layers is None else list(layers)
    lacking = [layer for layer in order if layer not in rows]
    if lacking or len(set(order)) != len(order):
        raise InvalidInputError(f"layers={order}: expected different ids of {sorted(rows)}")
    shapes = {rows[layer].shape for layer in order}
    if len(shapes) > 1:
        raise InvalidRoutingError(f"the layers differ in shape: {sorted(shapes)}")
    for layer in order:
        ids = rows[layer]
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise InvalidRoutingError(f"layer {layer}: {ids.dtype} {list(ids.shape)}, expected integers [rows, top_k]")
        unreal = (ids < 0).any(axis=1)
        if unreal.any():
            raise InvalidRoutingError(
                f"layer {layer}, row {int(np.argmax(unreal))}: {ids[np.argmax(unreal)].tolist()} has a negative id, and Megatron-LM has no "
                'mark for a row without one: read with padding="spread", or train without these tokens'
            )
    return [np.ascontiguousarray(rows[layer], np.int64) for layer in order]


def to_verl(
    records: Sequence[RoutingRecord],
    spec: RoutingSpec,
    *,
    prompt_tokens: Sequence[int],
    prompt_width: int,
    response_width: int,
    num_layers: int | None = None,
    missing: Missing = "refuse",
) -> npt.NDArray[np.int16]:
    """verl's `routed_experts`: [batch, prompt_width + response_width, layers, top_k]; zeros where there is no token.

    prompt_tokens: of each record. A prompt ends at column prompt_width, its response begins there. A record may lack the last
    token's row; verl does not use it.
    num_layers: with it the layer axis has all layers of the model and zeros in dense ones; without it, those of the records.

    Raises InvalidRoutingError where tokens do not fit, where a record was not read from its first token on, where rows are
    missing and `missing` is "refuse", and for more experts than int16 can name.
    """
    if spec.num_experts - 1 > np.iinfo(np.int16).max:
        raise InvalidRoutingError(f"{spec.num_experts} experts: verl's int16 names 32768 at most")
    layers = _layers(records, spec)
    wide = len(layers) if num_layers is None else num_layers
    out = np.zeros((len(records), prompt_width + response_width, wide, spec.top_k), np.int16)
    for at, (record, prompt) in enumerate(zip(records, prompt_tokens, strict=True)):
        rows = _rows(record, spec, missing)
        start, stop = prompt_width - prompt, prompt_width - prompt + len(rows)
        if start < 0 or stop > out.shape[1] or not 0 <= prompt <= len(rows) + 1:
            raise InvalidRoutingError(
                f"{record.request_id!r}: {len(rows)} tokens, {prompt} of them of the prompt, do not fit {prompt_width} + {response_width}"
            )
        out[at, start:stop] = _widened(rows, layers, num_layers)
    return out


def to_slime(
    record: RoutingRecord, spec: RoutingSpec, *, num_tokens: int, num_layers: int, missing: Missing = "refuse"
) -> npt.NDArray[np.int32]:
    """slime's `rollout_routed_experts` of one sample: [num_tokens - 1, num_layers, top_k]; zeros in dense layers.

    num_tokens: of the sample, prompt and response. slime indexes the layer axis with the model's 0-based layer id and asserts that
    there is one row less than tokens.

    Raises InvalidRoutingError if the record has fewer rows or was not read from its first token on, or rows are missing and
    `missing` is "refuse".
    """
    rows = _rows(record, spec, missing)
    if len(rows) not in (num_tokens - 1, num_tokens):
        raise InvalidRoutingError(
            f"{record.request_id!r}: {len(rows)} rows for {num_tokens} tokens; expected one each, or none for the last"
        )
    return _widened(rows[: num_tokens - 1], record.layers, num_layers).astype(np.int32)


def _layers(records: Sequence[RoutingRecord], spec: RoutingSpec) -> tuple[int, ...]:
    found = {record.layers for record in records}
    if len(found) > 1:
        raise InvalidRoutingError(f"records have different layers: {' and '.join(map(shown_layers, sorted(found)))}")
    return found.pop() if found else spec.moe_layers


def _rows(record: RoutingRecord, spec: RoutingSpec, missing: Missing) -> npt.NDArray[Any]:
    """[tokens, layers, top_k] of a record, row t of token t."""
    if missing not in get_args(Missing):
        raise InvalidInputError(f"missing={missing!r}: expected one of {', '.join(get_args(Missing))}")
    expected = 0
    for start, stop in record.token_ranges:
        if start != expected:
            raise InvalidRoutingError(
                f"{record.request_id!r} was read with tokens {list(record.token_ranges)}: rows are put down from token 0 on, so read "
                "them from there without a gap"
            )
        expected = stop
    spec.check_layers(record.layers)
    if record.routed_experts.shape[-1] != spec.top_k:
        raise InvalidRoutingError(
            f"{record.request_id!r} has {record.routed_experts.shape[-1]} ids a token, the spec {spec.top_k}: it is of another dataset"
        )
    rows: npt.NDArray[Any] = record.to_numpy("TLK")
    absent = ~record.present().T
    if absent.any():
        if missing == "refuse":
            token, layer = (int(each) for each in np.argwhere(absent)[0])
            raise InvalidRoutingError(
                f"{record.request_id!r}: {int(absent.sum())} rows are missing, the first at token {token}, layer {record.layers[layer]}; "
                'train without it, or say missing="spread"'
            )
        rows = rows.copy()
        rows[absent] = spread_rows(int(absent.sum()), spec.num_experts, spec.top_k, rows.dtype)
    return rows


def _widened(rows: npt.NDArray[Any], layers: Sequence[int], num_layers: int | None) -> npt.NDArray[Any]:
    """The rows with all layers of the model on the layer axis; as they are if num_layers is None."""
    if num_layers is None:
        return rows
    if layers[-1] >= num_layers:
        raise InvalidInputError(f"num_layers={num_layers}: the records have layer {layers[-1]}")
    out = np.zeros((len(rows), num_layers, rows.shape[2]), rows.dtype)
    out[:, list(layers)] = rows
    return out
