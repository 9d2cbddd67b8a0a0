"""What trainers and their rollout frameworks exchange: verl, slime and miles, prime-rl, NeMo-RL, Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.contracts.arrays import checked_shape, from_memory, from_raw, named_dtype, refusal
from rr_dataset.contracts.rows import (
    COUNTING,
    MINUS_ONE,
    ZERO,
    Decoded,
    Facts,
    Tokens,
    check_rows,
    count,
    each,
    field,
    ids_of,
    listed,
    logprobs_of,
    record,
    shown_spec,
    status_of,
    version_of,
)
from rr_dataset.record import RoutingSpec

_NEMO_MAGIC = "nrlre1"
_NEMO_DTYPES = ("int8", "int16", "int32")
_PRIME_DTYPES = ("uint8", "uint16", "int16", "int32")


def verl(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """A batch: `routed_experts` [B, prompt + response, MoE or all layers, top_k] with `attention_mask` [B, prompt + response].

    Prompts are padded on the left, responses on the right; the mask says which positions are real, and of those the last was
    never fed. A row of zeros is missing. `input_ids` and `rollout_log_probs` [B, response] come along if they are there.
    One sample may lack the batch axis.
    """
    name = "verl"
    batch = from_memory(name, _needed(name, response, "routed_experts"))
    mask = np.asarray(from_memory(f"{name}: attention_mask", _needed(name, response, "attention_mask")), bool)
    ids = None if (given := field(response, "input_ids")) is None else from_memory(f"{name}: input_ids", given)
    logprobs = field(response, "rollout_log_probs")
    if batch.ndim == 3:
        batch, mask = batch[None], mask[None]
        ids = None if ids is None else ids[None]
        logprobs = None if logprobs is None else [logprobs]
    if batch.ndim != 4 or mask.shape != batch.shape[:2] or (ids is not None and ids.shape != mask.shape):
        shapes = f"{list(batch.shape)}, attention_mask {list(mask.shape)}" + (
            f", input_ids {list(ids.shape)}" if ids is not None else ""
        )
        raise refusal(name, "shapes", "[B, S, layers, top_k] with attention_mask and input_ids [B, S]", shapes)
    if logprobs is not None and (
        not hasattr(logprobs, "__len__") or isinstance(logprobs, Mapping) or len(logprobs) != len(batch)
    ):
        raise refusal(
            name, "rollout_log_probs", f"[{len(batch)}, response], a row for each sample", f"shape {np.shape(logprobs)}"
        )
    status = status_of(field(response, "finish_reason"))

    def decode_one(index: int, real: npt.NDArray[np.bool_]) -> Decoded:
        positions = np.flatnonzero(real)
        first, stop = (int(positions[0]), int(positions[-1]) + 1) if positions.size else (0, 0)
        if stop - first != positions.size:
            raise refusal(name, f"attention_mask of sample {index}", "one run of tokens", f"{positions.size} with gaps")
        if stop - first < 2:
            return Decoded(index, None, f"{name}: the sample has {stop - first} tokens, so none was fed")
        tokens = _verl_tokens(name, None if ids is None else ids[index], logprobs, index, first, stop, len(real))
        routing = batch[index, first : stop - 1]
        return record(name, routing, spec, facts, tokens=tokens, fillers=[ZERO], index=index, status=status)

    return each(mask, decode_one)


def _verl_tokens(name: str, ids: Any, logprobs: Any, index: int, first: int, stop: int, padded: int) -> Tokens:
    real = None if ids is None else ids[first:stop]
    none = None if real is None else real[:0]
    if logprobs is None:
        return Tokens(stop - first, 0, real, none)
    own = logprobs_of(name, logprobs[index], None)
    if own is None or len(own) > padded:
        raise refusal(name, "rollout_log_probs", f"at most {padded} for each sample", f"shape {np.shape(logprobs)}")
    prompt = max(padded - len(own) - first, 0)
    head = None if real is None else real[:prompt]
    tail = None if real is None else real[prompt:]
    return Tokens(prompt, stop - first - prompt, head, tail, own[: stop - first - prompt])


def slime(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """A sample: `rollout_routed_experts` [S - 1, all layers, top_k] with `tokens` [S], `response_length`, `status`.

    Of slime, and of miles. Rows that count up modulo the number of experts, and rows of -1, are padding: missing.
    """
    name = "slime"
    payload = field(response, "rollout_routed_experts", "routed_experts")
    status = status_of(field(response, "status"))
    if payload is None:
        yield Decoded(
            0, None, f"{name}: the sample has no routing" + (": it was aborted" if status == "aborted" else "")
        )
        return
    ids = ids_of(name, "tokens", field(response, "tokens"))
    output = count(name, "response_length", field(response, "response_length")) or 0
    tokens = Tokens()
    if ids is not None:
        if output > len(ids):
            raise refusal(name, "response_length", f"at most {len(ids)} tokens", output)
        prompt = len(ids) - output
        logprobs = logprobs_of(name, field(response, "rollout_log_probs"), output)
        tokens = Tokens(prompt, output, ids[:prompt], ids[prompt:], logprobs)
    array = from_memory(name, payload)
    check_rows(name, array, 0, tokens, [1])
    told = listed(name, "weight_versions", field(response, "weight_versions") or ())
    versions = list(dict.fromkeys(str(each) for each in (version_of(name, one) for one in told) if each is not None))
    yield record(
        name,
        array,
        spec,
        facts,
        tokens=tokens,
        fillers=[MINUS_ONE, COUNTING],
        status=status,
        weight_version=versions[0] if len(versions) == 1 else None,
        tags={"weight_versions": ",".join(versions)} if len(versions) > 1 else None,
    )


def prime_rl(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """`routed_experts` {data, shape, start, dtype}: base64 of [S, or S - 1, less start; all layers; top_k].

    response: a step with `tokens` {prompt_ids, completion_ids, completion_logprobs, routed_experts}, those tokens, or a response
    with choices. A row of zeros is missing; the last one stands for a token that was never fed.
    """
    name = "prime-rl"

    def decode_one(place: int, sample: Any) -> Decoded:
        payload = field(sample, "routed_experts")
        if payload is None:
            return Decoded(place, None, f"{name}: the response has no routing")
        if not isinstance(payload, Mapping):
            raise refusal(name, "routed_experts", "data, shape, start and dtype", f"a {type(payload).__name__}")
        prompt_ids = facts.prompt_token_ids
        if prompt_ids is None:
            own = field(sample, "prompt_ids", "prompt_token_ids")
            prompt_ids = field(response, "prompt_token_ids") if own is None else own
        output_ids = field(sample, "completion_ids", "token_ids")
        tokens = _tokens(name, prompt_ids, output_ids, field(sample, "completion_logprobs"))
        start = count(name, "start", payload.get("start") if facts.token_start is None else facts.token_start) or 0
        dtype = named_dtype(name, payload.get("dtype"), _PRIME_DTYPES, "uint8")
        array = from_raw(name, payload.get("data"), dtype, checked_shape(name, payload.get("shape")))
        check_rows(name, array, start, tokens, [0, 1])
        status = status_of(field(sample, "finish_reason"))
        return record(name, array, spec, facts, tokens=tokens, fillers=[ZERO], start=start, index=place, status=status)

    choices = field(response, "choices")
    return each(
        [field(response, "tokens") or response] if choices is None else listed(name, "choices", choices), decode_one
    )


def nemo_rl(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """`routed_experts`: `nrlre1:<dtype>:<S>x<L>x<K>:<base64>`, or nested lists; MoE or all layers. A row of -1 is missing.

    response: an output item with `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`, or the text alone.
    """
    name = "nemo-rl"
    payload = response if isinstance(response, str) else field(response, "routed_experts")
    if payload is None:
        yield Decoded(0, None, f"{name}: the item has no routing")
        return
    item = {} if isinstance(response, str) else response
    prompt_ids = field(item, "prompt_token_ids") if facts.prompt_token_ids is None else facts.prompt_token_ids
    tokens = _tokens(name, prompt_ids, field(item, "generation_token_ids"), field(item, "generation_log_probs"))
    array = _nemo_array(name, payload) if isinstance(payload, str) else from_memory(name, payload)
    check_rows(name, array, 0, tokens, [0])
    yield record(name, array, spec, facts, tokens=tokens, fillers=[MINUS_ONE])


def _nemo_array(name: str, text: str) -> npt.NDArray[Any]:
    magic, *rest = text.split(":", 3)
    if magic != _NEMO_MAGIC or len(rest) != 3:
        raise refusal(name, "envelope", f"{_NEMO_MAGIC}:<dtype>:<S>x<L>x<K>:<base64>", repr(text[:40]))
    dtype, shape, data = rest
    sizes = shape.split("x")
    if len(shape) > 40 or not all(size.isascii() and size.isdecimal() for size in sizes):
        raise refusal(name, "shape", "<S>x<L>x<K>", repr(shape[:40]))
    return from_raw(
        name, data, named_dtype(name, dtype, _NEMO_DTYPES, ""), checked_shape(name, [int(size) for size in sizes])
    )


def megatron(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """A list of [tokens, top_k] for each router in the order of construction: MoE layers alone, tokens of this rank.

    response: the list, or a mapping with it as `routed_experts`. `token_start` says where the rank's tokens begin.
    """
    name = "megatron"
    routers = response if isinstance(response, (list, tuple)) else _needed(name, response, "routed_experts")
    if not isinstance(routers, Sequence) or len(routers) != spec.num_layers:
        came = f"{len(routers)} routers" if isinstance(routers, Sequence) else f"a {type(routers).__name__}"
        raise refusal(name, "routers", f"one for each of {shown_spec(spec)}", came)
    arrays = [from_memory(name, router) for router in routers]
    if any(array.ndim != 2 or array.shape != arrays[0].shape for array in arrays):
        shapes = sorted({str(list(array.shape)) for array in arrays})
        raise refusal(name, "routers", f"one shape, [tokens, {spec.top_k}]", ", ".join(shapes[:4]))
    ids = ids_of(name, "token_ids", field(response, "token_ids") if isinstance(response, Mapping) else None)
    stacked = np.stack(arrays).transpose(1, 0, 2)
    if ids is not None and len(ids) != len(stacked):
        raise refusal(name, "token_ids", f"{len(stacked)}, one for each row", len(ids))
    decoded = record(
        name,
        stacked,
        spec,
        facts,
        tokens=Tokens(),
        fillers=[],
        start=count(name, "token_start", facts.token_start) or 0,
    )
    if decoded.put is not None and ids is not None:
        decoded.put["token_ids"] = ids
    yield decoded


def _tokens(name: str, prompt_ids: Any, output_ids: Any, logprobs: Any) -> Tokens:
    prompt, output = ids_of(name, "prompt ids", prompt_ids), ids_of(name, "output ids", output_ids)
    length = None if output is None else len(output)
    return Tokens(None if prompt is None else len(prompt), length, prompt, output, logprobs_of(name, logprobs, length))


def _needed(name: str, response: Any, key: str) -> Any:
    value = field(response, key)
    if value is None:
        raise refusal(name, key, "it", f"a {type(response).__name__} without it")
    return value
