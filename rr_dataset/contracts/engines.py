"""What inference engines hand out: FastDeploy, vLLM in two generations, SGLang."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.contracts.arrays import (
    base64_bytes,
    from_memory,
    from_npy,
    from_raw,
    is_text,
    named_dtype,
    refusal,
)
from rr_dataset.contracts.rows import (
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
    layer_counts,
    listed,
    logprobs_of,
    moe_only,
    record,
    status_of,
)
from rr_dataset.record import RoutingSpec

_SGLANG_DTYPES = ("int32", "uint16", "uint8")
_UNSIGNED = ("uint8", "uint16", "uint32")
_MOST_SHARED = 16  # shared experts that FastDeploy's dtype may have to hold besides the routed ones


def sglang(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """`meta_info.routed_experts`: base64 of [S - 1 - start, all layers, top_k], int32 or `routed_experts_dtype`.

    response: what `/generate` answers, one or a list of them; a chat completion whose choices have `meta_info`; or a `meta_info`.
    A row of zeros is missing. Nothing at all, of a request that was aborted before it ran, is nothing to put.
    """
    return each(sglang_samples(response), lambda place, sample: _sglang_sample(place, sample, spec, facts))


def sglang_samples(response: Any) -> Sequence[Any]:
    """The samples of a response of SGLang: its `choices`, or itself, one or a list.

    Raises InvalidRoutingError.
    """
    if isinstance(response, (list, tuple)):
        return response
    choices = field(response, "choices")
    return [response] if choices is None else listed("sglang", "choices", choices)


def sglang_start(sample: Any) -> Any:
    """The position of the first row of a sample of SGLang, as it tells it; None if it does not."""
    return field(field(sample, "meta_info") or sample, "routed_experts_start_len")


def _sglang_sample(place: int, sample: Any, spec: RoutingSpec, facts: Facts) -> Decoded:
    name = "sglang"
    meta = field(sample, "meta_info") or sample
    index = _index(name, sample, place)
    status, payload = status_of(field(meta, "finish_reason")), field(meta, "routed_experts")
    if payload is None:
        return _nothing(name, index, status)
    start = _start(name, facts, sglang_start(sample))
    tokens = _sglang_tokens(sample, meta, facts)
    dtype = named_dtype(name, field(meta, "routed_experts_dtype"), _SGLANG_DTYPES, "int32")
    if is_text(payload):
        rows = None if tokens.total is None else tokens.total - 1 - start
        size = base64_bytes(name, payload)
        array = from_raw(name, payload, dtype, _flat_shape(name, size, dtype.itemsize, rows, spec, facts))
    else:
        array = from_memory(name, payload)
    check_rows(name, array, start, tokens, [1])
    version = field(meta, "weight_version")
    return record(
        name,
        array,
        spec,
        facts,
        tokens=tokens,
        fillers=[ZERO],
        start=start,
        index=index,
        status=status,
        weight_version=version,
    )


def _sglang_tokens(sample: Any, meta: Any, facts: Facts) -> Tokens:
    name = "sglang"
    output = count(name, "completion_tokens", field(meta, "completion_tokens"))
    ids, logprobs = _columns(name, field(meta, "output_token_logprobs"), output)
    told = ids_of(name, "output_ids", field(sample, "output_ids"))
    prompt_ids = _prompt_ids(name, facts, sample, "prompt_token_ids", "input_ids")
    return Tokens(
        count(name, "prompt_tokens", field(meta, "prompt_tokens")),
        output,
        prompt_ids,
        ids if told is None else told,
        logprobs,
    )


def _columns(
    name: str, triples: Any, length: int | None
) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.float32] | None]:
    """Token ids and log-probabilities of SGLang's (log-probability, token id, text) triples."""
    if triples is None or len(triples) == 0:
        return None, None
    try:
        logprobs, ids, *_ = zip(*triples, strict=True)
        if hasattr(triples, "tolist"):  # an array of numbers has one dtype, so its token ids may be floats
            ids = tuple(int(number) if float(number).is_integer() else number for number in ids)
    except (TypeError, ValueError) as error:
        raise refusal(name, "output_token_logprobs", "triples with a log-probability and a token id", error) from error
    return ids_of(name, "output_token_logprobs", ids), logprobs_of(name, logprobs, length)


def vllm(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """Newest: of each choice [S - 1 - start, all layers, top_k], base64 of a .npy, or an array within the engine.

    response: an answer of `/inference/v1/generate`, or a RequestOutput. The start is the request's
    `routed_experts_prompt_start`; where the response does not repeat it, it is `token_start`. None is nothing to put: the
    request was preempted or aborted, or the engine does not return routing.
    """
    name = "vllm"
    start = _start(name, facts, field(response, "routed_experts_prompt_start"))
    version = field(response, "weight_version")

    def decode_one(place: int, choice: Any) -> Decoded:
        index, status = _index(name, choice, place), status_of(field(choice, "finish_reason"))
        payload = field(choice, "routed_experts")
        if payload is None:
            return _nothing(name, index, status)
        tokens = _vllm_tokens(name, response, choice, facts)
        array = from_npy(name, payload) if is_text(payload) else from_memory(name, payload)
        check_rows(name, array, start, tokens, [1])
        return record(
            name,
            array,
            spec,
            facts,
            tokens=tokens,
            fillers=[],
            start=start,
            index=index,
            status=status,
            weight_version=version,
        )

    return each(_choices(name, response), decode_one)


def vllm_split(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """0.21: `prompt_routed_experts` [prompt, layers, top_k], and of each choice [output, or output - 1, layers, top_k].

    Nested lists, or arrays within the engine. A row of -1 (cached prefix) is missing. Where a choice has None, the request
    was preempted: its prompt is put alone, with that status.
    """
    name = "vllm-0.21"
    given = field(response, "prompt_routed_experts")
    prompt = None if given is None else from_memory(name, given)
    version = field(response, "weight_version")

    def decode_one(place: int, choice: Any) -> Decoded:
        index, status = _index(name, choice, place), status_of(field(choice, "finish_reason"))
        payload = field(choice, "routed_experts")
        tokens = _vllm_tokens(name, response, choice, facts)
        start, parts = 0, []
        if prompt is not None:
            check_rows(f"{name} prompt", prompt, 0, replace(tokens, output=0), [0])
            parts.append(moe_only(name, prompt, spec, facts))
        elif payload is not None:
            if tokens.prompt is None:
                raise refusal(name, "prompt_routed_experts", "the prompt, or its length", "neither")
            start = tokens.prompt
        if payload is not None:
            output = from_memory(name, payload)
            check_rows(f"{name} output", output, 0, replace(tokens, prompt=0), [0, 1])
            parts.append(moe_only(name, output, spec, facts))
        elif status != "aborted":
            status = "preempted"
        if not parts:
            return _nothing(name, index, status)
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        fillers = [MINUS_ONE]
        return record(
            name,
            array,
            spec,
            facts,
            tokens=tokens,
            fillers=fillers,
            start=start,
            index=index,
            status=status,
            weight_version=version,
        )

    return each(_choices(name, response), decode_one)


def _choices(name: str, response: Any) -> Sequence[Any]:
    choices = field(response, "choices", "outputs")
    if choices is None:
        raise refusal(name, "choices", "a response with choices or outputs", f"a {type(response).__name__} without")
    return listed(name, "choices", choices)


def _vllm_tokens(name: str, response: Any, choice: Any, facts: Facts) -> Tokens:
    prompt_ids, usage = _prompt_ids(name, facts, response, "prompt_token_ids"), field(response, "usage")
    prompt = len(prompt_ids) if prompt_ids is not None else count(name, "prompt_tokens", field(usage, "prompt_tokens"))
    ids = ids_of(name, "token_ids", field(choice, "token_ids"))
    if ids is not None:
        output: int | None = len(ids)
    else:
        of_all = count(name, "completion_tokens", field(usage, "completion_tokens"))
        output = of_all if len(_choices(name, response)) == 1 else None
    return Tokens(prompt, output, prompt_ids, ids, _vllm_logprobs(name, field(choice, "logprobs"), ids, output))


def _vllm_logprobs(name: str, given: Any, ids: Any, length: int | None) -> npt.NDArray[np.float32] | None:
    """Of the sampled tokens: from a response's `content`, or from the mapping by token id that the engine has for each."""
    if given is None:
        return None
    try:
        if isinstance(given, Mapping):
            content = given.get("content")
            return None if content is None else logprobs_of(name, map(operator.itemgetter("logprob"), content), length)
        if ids is None:
            return None
        entries = map(operator.getitem, given, ids.tolist())
        return logprobs_of(name, map(operator.attrgetter("logprob"), entries), length)
    except (TypeError, LookupError, AttributeError) as error:
        raise refusal(name, "logprobs", "one of each sampled token", repr(error)) from error


def fastdeploy(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """`routed_experts`, or `routing_indices`: base64 of [S, or S - 1 if the last is EOS; MoE layers; top_k].

    The dtype is the narrowest that holds all experts, shared ones too, and one more; the response does not say it, so the
    number of tokens does. A row of -1, in unsigned types the greatest number, is missing.
    """
    name = "fastdeploy"
    samples = field(response, "choices", "outputs")
    samples = [response] if samples is None else samples if isinstance(samples, (list, tuple)) else [samples]

    def decode_one(place: int, sample: Any) -> Decoded:
        index, status = _index(name, sample, place), status_of(field(sample, "finish_reason"))
        payload = field(sample, "routed_experts", "routing_indices")
        if payload is None:
            return _nothing(name, index, status)
        prompt_ids = _prompt_ids(name, facts, response, "prompt_token_ids")
        ids = ids_of(name, "token_ids", field(sample, "completion_token_ids", "token_ids"))
        prompt, output = (None if known is None else len(known) for known in (prompt_ids, ids))
        tokens = Tokens(prompt, output, prompt_ids, ids)
        array = _fastdeploy_array(name, payload, tokens, spec) if is_text(payload) else from_memory(name, payload)
        check_rows(name, array, 0, tokens, [0, 1])
        return record(name, array, spec, facts, tokens=tokens, fillers=[MINUS_ONE], index=index, status=status)

    return each(samples, decode_one)


def _fastdeploy_array(name: str, payload: Any, tokens: Tokens, spec: RoutingSpec) -> npt.NDArray[Any]:
    size, row = base64_bytes(name, payload), spec.num_layers * spec.top_k
    wide_enough = [np.dtype(kind) for kind in _UNSIGNED if np.iinfo(kind).max >= spec.num_experts]
    if tokens.total is None:
        narrowest, widest = (np.min_scalar_type(spec.num_experts + extra) for extra in (0, _MOST_SHARED))
        if narrowest != widest:
            raise refusal(
                name, "dtype", "token ids, whose number tells it", f"neither {narrowest} nor {widest} is certain"
            )
        wide_enough = [dtype for dtype in wide_enough if dtype == narrowest]
        fits = [(size // (row * dtype.itemsize), dtype) for dtype in wide_enough if size % (row * dtype.itemsize) == 0]
    else:
        fits = [
            (rows, dtype)
            for rows in (tokens.total, tokens.total - 1)
            for dtype in wide_enough
            if rows * row * dtype.itemsize == size
        ]
    if len(fits) != 1:
        expected = f"whole rows of {spec.num_layers} x {spec.top_k} ids of {' or '.join(map(str, wide_enough))}"
        if tokens.total is not None:
            expected += f" for {tokens.total} tokens, or one less"
        raise refusal(name, "size", expected, f"{size} bytes")
    rows, dtype = fits[0]
    return from_raw(name, payload, dtype, (rows, spec.num_layers, spec.top_k))


def _flat_shape(
    name: str, size: int, itemsize: int, rows: int | None, spec: RoutingSpec, facts: Facts
) -> tuple[int, int, int]:
    """The shape of `size` bytes; `rows` None if the response does not tell it."""
    counts = layer_counts(spec, facts)
    row = spec.top_k * itemsize
    if rows is None:
        fits = [layers for layers in counts if size % (layers * row) == 0]
    else:
        fits = [layers for layers in counts if rows * layers * row == size]
    if len(fits) == 1 or (fits and not size):
        return (size // (fits[0] * row) if rows is None else rows), fits[0], spec.top_k
    ways = " or ".join(f"{layers} x {spec.top_k} ({what})" for layers, what in counts.items())
    expected = f"{'whole' if rows is None else rows} rows of {ways} ids of {itemsize} bytes"
    if fits:
        raise refusal(name, "size", f"{expected}, and token counts to tell which", f"{size} bytes, which fit both")
    came = f"{size} bytes"
    if rows and not size % (rows * row):
        came += f", {size // (rows * row)} layers; num_hidden_layers= says how many the model has"
    raise refusal(name, "size", expected, came)


def _index(name: str, sample: Any, place: int) -> int:
    told = count(name, "index", field(sample, "index"))
    return place if told is None else told


def _prompt_ids(name: str, facts: Facts, response: Any, *fields: str) -> npt.NDArray[Any] | None:
    told = field(response, *fields) if facts.prompt_token_ids is None else facts.prompt_token_ids
    return ids_of(name, "prompt_token_ids", told)


def _start(name: str, facts: Facts, told: Any) -> int:
    return count(name, "token_start", facts.token_start if facts.token_start is not None else told) or 0


def _nothing(name: str, index: int, status: str | None) -> Decoded:
    why = "aborted before any token was computed" if status == "aborted" else "preempted, or routing was not asked for"
    return Decoded(index, None, f"{name}: the response has no routing: {why}")
