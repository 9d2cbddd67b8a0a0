"""What the decoders share: which layers and tokens an array covers, which rows are fillers, what a record is made of."""

from __future__ import annotations

from array import array as packed
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count as counted
from itertools import pairwise
from typing import Any, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from rr_dataset.contracts.arrays import from_memory, minus_one, refusal
from rr_dataset.errors import InvalidRoutingError, reason_of
from rr_dataset.masked import hides_values
from rr_dataset.record import MAX_POSITION, Range, RoutingSpec, ranges_of, shown_layers

T = TypeVar("T")

MINUS_ONE, ZERO, COUNTING = "-1", "0", "arange"  # what stands in a row without routing
NO_VERSION = "default"  # the weight version of SGLang and of vLLM until somebody sets one

_COMPLETE = frozenset(
    ("stop", "length", "tool_calls", "function_call", "content_filter", "repetition", "completed", "truncated")
)
_ABORTED = frozenset(("abort", "aborted", "cancelled", "error", "failed"))
_BLOCK = 1 << 18  # ids that are compared together: they and their copies stay in the second-level cache
_SURE_BITS = 40  # a counting row is a filler only where a router would make it less often than once in 2**40


class PutArguments(TypedDict, total=False):
    """Keyword arguments of `RoutingWriter.put`, all but the request id."""

    routed_experts: npt.NDArray[Any]
    layout: str
    layers: Sequence[int] | None
    token_ids: npt.NDArray[Any] | None
    logprobs: npt.NDArray[np.float32] | None
    token_start: int
    part: bool
    status: str | None
    missing: Sequence[Range]
    weight_version: str | int | None
    tags: Mapping[str, str] | None


@dataclass(frozen=True, eq=False)
class Decoded:
    """One record of a response.

    index: its place among the samples of the response: the number of a choice, or a row of a batch.
    put: what `RoutingWriter.put` takes; None if there is nothing to put, then `reason` says why. error: what does not fit, where
    that is why.
    """

    index: int
    put: PutArguments | None
    reason: str | None = None
    error: InvalidRoutingError | None = None


@dataclass(frozen=True, eq=False)
class Facts:
    """What the caller knows and a response may not say; see `decode`."""

    num_hidden_layers: int | None = None
    token_start: int | None = None
    prompt_token_ids: Any = None
    weight_version: str | int | None = None
    thorough: bool = False


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one sample, as far as the response tells them.

    prompt_ids, output_ids: int [prompt], [output]. logprobs: float32 [output].
    """

    prompt: int | None = None
    output: int | None = None
    prompt_ids: npt.NDArray[Any] | None = None
    output_ids: npt.NDArray[Any] | None = None
    logprobs: npt.NDArray[np.float32] | None = None

    @property
    def total(self) -> int | None:
        """Prompt and output together."""
        return None if self.prompt is None or self.output is None else self.prompt + self.output

    def of_rows(self, start: int, rows: int) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.float32] | None]:
        """Token ids and log-probabilities (NaN in the prompt) of `rows` positions from `start`; None where not all are known."""
        ids = logprobs = None
        stop = start + rows
        if self.prompt_ids is not None and self.output_ids is not None:
            ids = np.concatenate([self.prompt_ids, self.output_ids])[start:stop]
        if self.logprobs is not None and self.prompt is not None:
            logprobs = np.full(max(rows, 0), np.nan, np.float32)
            known = self.logprobs[max(start - self.prompt, 0) : max(stop - self.prompt, 0)]
            at = max(self.prompt - start, 0)
            logprobs[at : at + len(known)] = known
        return (ids if ids is not None and len(ids) == rows else None), logprobs


def each(samples: Iterable[T], decode_one: Callable[[int, T], Decoded]) -> Iterator[Decoded]:
    """The samples decoded one by one; one that does not fit, whatever it raises, keeps no other from it."""
    for place, sample in enumerate(samples):
        try:
            yield decode_one(place, sample)
        except Exception as error:  # noqa: BLE001 - a sample is whatever an engine or a file makes of it
            ours = as_refusal("the sample", error)
            yield Decoded(_told_index(sample, place), None, str(ours), ours)


def as_refusal(what: str, error: Exception) -> InvalidRoutingError:
    """Ours, of anything that was raised where a response was looked at."""
    if isinstance(error, InvalidRoutingError):
        return error
    ours = InvalidRoutingError(f"{what} cannot be read: {reason_of(error)}")
    ours.__cause__ = error
    return ours


def _told_index(sample: Any, place: int) -> int:
    with suppress(Exception):  # it does not fit in other ways, too
        told = count("", "index", field(sample, "index"))
        return place if told is None else told
    return place


def apart(contract: str, decoded: Sequence[Decoded]) -> list[Decoded]:
    """Each with an index of its own: of several that have one, the first that fits keeps it, and the others become errors with
    an index that nothing has, since a record under the same id would take the place of the first.
    """
    owners: dict[int, int] = {}
    for place in sorted(range(len(decoded)), key=lambda place: decoded[place].error is not None):
        owners.setdefault(decoded[place].index, place)
    if len(owners) == len(decoded):
        return list(decoded)
    found = []
    for place, one in enumerate(decoded):
        if owners[one.index] != place:
            index = next(number for number in counted(place) if number not in owners)
            owners[index] = place
            error = one.error or refusal(contract, "index", "another one for each sample", f"{one.index} twice")
            one = replace(one, index=index, put=None, reason=str(error), error=error)  # noqa: PLW2901 - the same sample
        found.append(one)
    return found


def listed(contract: str, name: str, value: Any) -> Sequence[Any]:
    """Several of something.

    Raises InvalidRoutingError.
    """
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        raise refusal(contract, name, "a list", f"a {type(value).__name__}")
    return value


def field(response: Any, *names: str) -> Any:
    """The first of these that a mapping or an object has and that is not None."""
    by_key = isinstance(response, (dict, Mapping))  # the first is seen at once, without asking the abstract class
    for name in names:
        value = response.get(name) if by_key else getattr(response, name, None)
        if value is not None:
            return value
    return None


def count(contract: str, name: str, value: Any) -> int | None:
    """A number of tokens, or a position.

    Raises InvalidRoutingError.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value <= MAX_POSITION:
        raise refusal(contract, name, "a number from 0 to 2**31 - 1", repr(value)[:80])
    return int(value)


def ids_of(contract: str, name: str, value: Any) -> npt.NDArray[Any] | None:
    """Token ids: one dimension of integers.

    Raises InvalidRoutingError.
    """
    if value is None:
        return None
    if type(value) is list:
        with suppress(TypeError, OverflowError):  # a list of anything else is looked at below
            value = np.asarray(packed("q", value))  # several times as fast as numpy alone
    array = from_memory(f"{contract}: {name}", value)
    if array.ndim != 1:
        raise refusal(contract, name, "a list of token ids", f"shape {array.shape}")
    return array


def logprobs_of(contract: str, values: Any, length: int | None) -> npt.NDArray[np.float32] | None:
    """Log-probabilities of the output, NaN for None, one for each of its tokens.

    Raises InvalidRoutingError.
    """
    if values is None:
        return None
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
        hidden = hides_values(values)
        with np.errstate(over="ignore"):  # beyond float32 is infinite
            array = np.asarray(values if hasattr(values, "__array__") else list(values), np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise refusal(contract, "log-probabilities", "a list of numbers", error) from error
    if hidden:
        raise refusal(contract, "log-probabilities", "numbers, NaN where there is none", "a masked array")
    if array.ndim != 1 or (length is not None and len(array) != length):
        raise refusal(contract, "log-probabilities", f"one for each of {length} output tokens", f"shape {array.shape}")
    return array


def status_of(finish_reason: Any) -> str | None:
    """The status of a put: complete, aborted, partial, or None where nothing is said."""
    if isinstance(finish_reason, Mapping):  # SGLang: {"type": "stop", ...}
        finish_reason = finish_reason.get("type")
    text = getattr(finish_reason, "value", finish_reason)  # an enum of slime
    if not isinstance(text, str):
        return None
    if text in _ABORTED:
        return "aborted"
    if text in _COMPLETE:
        return "complete"
    return "partial" if text == "pending" else None


def version_of(contract: str, told: Any) -> str | int | None:
    """The weight version that a response tells; None for NO_VERSION, which says that nobody told the engine.

    Raises InvalidRoutingError.
    """
    if told is None or isinstance(told, (int, np.integer)):
        return None if told is None else int(told)
    if not isinstance(told, (str, float)):
        raise refusal(contract, "weight_version", "a text or a number", repr(told)[:80])
    return None if told == NO_VERSION else str(told)


def layer_counts(spec: RoutingSpec, facts: Facts) -> dict[int, str]:
    """The lengths that a layer axis may have, with what each means."""
    hidden = spec.moe_layers[-1] + 1 if facts.num_hidden_layers is None else facts.num_hidden_layers
    return {spec.num_layers: "MoE layers", hidden: "layers of the model"}


def moe_only(contract: str, array: npt.NDArray[Any], spec: RoutingSpec, facts: Facts) -> npt.NDArray[Any]:
    """[tokens, layers, top_k] of MoE layers alone: a view where their ids are evenly spaced.

    Raises InvalidRoutingError where the number of layers is neither that of the MoE layers nor that of all.
    """
    counts = layer_counts(spec, facts)
    if array.shape == (0,):  # an empty list
        array = array.reshape(0, spec.num_layers, spec.top_k)
    if array.ndim != 3 or array.shape[1] not in counts or array.shape[2] != spec.top_k:
        expected = " or ".join(f"[tokens, {number}, {spec.top_k}] ({what})" for number, what in counts.items())
        hint = "" if facts.num_hidden_layers is not None else "; num_hidden_layers= says how many the model has"
        raise refusal(contract, "shape", expected, f"{list(array.shape)}{hint}")
    if array.dtype.kind not in "iu" or np.iinfo(array.dtype).max < spec.num_experts - 1:
        raise refusal(contract, "dtype", f"integers that hold {spec.num_experts} experts", array.dtype)
    if array.shape[1] == spec.num_layers:
        return array
    steps = {b - a for a, b in pairwise(spec.moe_layers)}
    if len(steps) <= 1:
        return array[:, spec.moe_layers[0] : spec.moe_layers[-1] + 1 : steps.pop() if steps else 1]
    return array[:, spec.moe_layers]


def record(
    contract: str,
    array: npt.NDArray[Any],
    spec: RoutingSpec,
    facts: Facts,
    *,
    tokens: Tokens,
    fillers: Iterable[str],
    start: int = 0,
    index: int = 0,
    status: str | None = None,
    weight_version: Any = None,
    tags: Mapping[str, str] | None = None,
) -> Decoded:
    """The record of [tokens, layers, top_k] from position `start`, with its fillers as `missing`.

    Raises InvalidRoutingError for a shape or dtype that does not fit, a row that is neither routing nor a filler, or prompt ids
    of another number, which would be beside the rows of other tokens.
    """
    if tokens.prompt_ids is not None and tokens.prompt is not None and len(tokens.prompt_ids) != tokens.prompt:
        raise refusal(
            contract, "prompt_token_ids", f"one for each of {tokens.prompt} prompt tokens", len(tokens.prompt_ids)
        )
    routing = moe_only(contract, array, spec, facts)
    empty = _fillers(contract, routing, frozenset(fillers), spec, start)
    if len(routing) and empty is not None and empty.all():
        return Decoded(index, None, f"{contract}: no routing was captured: each of {len(routing)} rows is a filler")
    if facts.thorough:
        _check_repeats(contract, routing, empty, spec, start)
    put = PutArguments(routed_experts=routing)
    ids, logprobs = tokens.of_rows(start, len(routing))
    if ids is not None:
        put["token_ids"] = ids
    if logprobs is not None:
        put["logprobs"] = logprobs
    if start:
        put["token_start"], put["part"] = start, True
    if status is not None:
        put["status"] = status
    if empty is not None:
        put["missing"] = ranges_of(empty, start)
    told = version_of(contract, weight_version) if facts.weight_version is None else facts.weight_version
    if told is not None:
        put["weight_version"] = told
    if tags:
        put["tags"] = tags
    return Decoded(index, put)


def _fillers(
    contract: str, routing: npt.NDArray[Any], kinds: frozenset[str], spec: RoutingSpec, start: int
) -> npt.NDArray[np.bool_] | None:
    """bool [tokens], True where a row is a filler; None if none is.

    A router never names one expert twice, so a layer whose first two ids are alike holds none: then its row has to be a filler.
    With top_k 1 a row of zeros is taken for routing.
    """
    counting = COUNTING in kinds and (spec.num_layers * spec.top_k - 1) * np.log2(spec.num_experts) >= _SURE_BITS
    if spec.top_k > 1:
        wrong = routing[:, :, 0] == routing[:, :, 1]
    else:
        wrong = (routing[:, :, 0] < 0) | (routing[:, :, 0] >= spec.num_experts)
    if not counting and not wrong.any():  # much quicker than by row
        return None
    empty = np.zeros(len(routing), np.bool_)
    suspect = np.flatnonzero(wrong.any(axis=1))
    rows = routing[suspect]
    for marker in _markers(kinds, routing.dtype, spec):
        empty[suspect] |= (rows == marker).all(axis=(1, 2))
    left = suspect[~empty[suspect]]
    if left.size:
        layer = int(wrong[left[0]].argmax())
        filler = f", or a whole row of {' or '.join(sorted(kinds))}" if kinds else ""
        raise refusal(
            contract,
            f"position {start + left[0]}, layer {spec.moe_layers[layer]}",
            f"{spec.top_k} different ids from 0 to {spec.num_experts - 1}{filler}",
            routing[left[0], layer].tolist(),
        )
    if counting:
        _find_counting(routing, spec.num_experts, empty)
    return empty if empty.any() else None


def _markers(kinds: frozenset[str], dtype: np.dtype[Any], spec: RoutingSpec) -> list[int]:
    """The numbers that fill a row without routing; never one that may be a true row."""
    markers = [0] if ZERO in kinds and spec.top_k > 1 else []
    if MINUS_ONE in kinds:
        marker = minus_one(dtype)
        markers += [marker] if not 0 <= marker < spec.num_experts or spec.top_k > 1 else []
    return markers


def _find_counting(routing: npt.NDArray[Any], num_experts: int, empty: npt.NDArray[np.bool_]) -> None:
    """Mark rows whose ids, read through all layers, go up by one, modulo the number of experts."""
    step = (routing[:, 0, 1:].astype(np.int64) - routing[:, 0, :-1]) % num_experts
    suspect = np.flatnonzero((step == 1).all(axis=1))
    flat = routing[suspect].reshape(len(suspect), routing.shape[1] * routing.shape[2]).astype(np.int64)
    empty[suspect] |= (np.diff(flat, axis=1) % num_experts == 1).all(axis=1)


def _check_repeats(
    contract: str, routing: npt.NDArray[Any], empty: npt.NDArray[np.bool_] | None, spec: RoutingSpec, start: int
) -> None:
    """Raises InvalidRoutingError if a token names one expert twice in a layer. Empty rows are passed over."""
    width = spec.num_layers * spec.top_k
    step = max(1, _BLOCK // width)
    slots = np.arange(step * width) % spec.top_k
    for first in range(0, len(routing), step):
        flat = np.ascontiguousarray(routing[first : first + step]).reshape(-1)
        found = np.zeros(flat.size, np.bool_)
        for apart in range(1, spec.top_k):
            found[:-apart] |= (flat[apart:] == flat[:-apart]) & (slots[: flat.size - apart] < spec.top_k - apart)
        rows = found.reshape(-1, spec.num_layers, spec.top_k)
        if empty is not None:
            rows[empty[first : first + step]] = False
        if rows.any():
            token, layer, _ = (int(i) for i in np.argwhere(rows)[0])
            raise refusal(
                contract,
                f"position {start + first + token}, layer {spec.moe_layers[layer]}",
                f"{spec.top_k} different experts",
                routing[first + token, layer].tolist(),
            )


def check_rows(contract: str, array: npt.NDArray[Any], start: int, tokens: Tokens, fewer: Sequence[int]) -> None:
    """Raises InvalidRoutingError unless the rows are those of the tokens from `start`, less one of `fewer` at the end.

    Says nothing where the number of tokens is not known.
    """
    rows = len(array) if array.ndim else 0
    if tokens.total is None or any(rows == tokens.total - less - start for less in fewer):
        return
    all_tokens = f"{tokens.prompt} prompt + {tokens.output} output tokens"
    ways = " or ".join(str(tokens.total - less - start) for less in fewer)
    covers = " or ".join("all of them" if not less else "all but the last" for less in fewer)
    begin = f" from position {start}" if start else ""
    raise refusal(contract, "rows", f"{ways} ({all_tokens}{begin}, {covers})", rows)


def shown_spec(spec: RoutingSpec) -> str:
    """For an error: the layers that a dataset has."""
    return f"{spec.num_layers} MoE layers ({shown_layers(spec.moe_layers)})"
