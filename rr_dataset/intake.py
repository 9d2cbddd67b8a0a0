"""From the arguments of `put` to bytes in the spool: everything is checked here, and the ids are copied once.

The checks of shape, layers, ranges and texts come before room is reserved. The range of the ids is checked on the
way, block by block where they are also cast, so that each block is read from memory once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidInputError, InvalidRoutingError, reason_of
from rr_dataset.layout import DatasetFormat
from rr_dataset.masked import hides_values
from rr_dataset.options import MAX_META_BYTES
from rr_dataset.record import (
    LAYOUTS,
    MAX_POSITION,
    STATUSES,
    Range,
    RoutingSpec,
    Span,
)
from rr_dataset.slab import array_offsets

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
_NOTHING = np.empty((0, 0, 0), np.uint8)
_encode = json.JSONEncoder(separators=(",", ":")).encode
BLOCK_BYTES = 1 << 19  # of the source, when casting: a block and its copy stay in the second-level cache


@dataclass(slots=True)
class Room:
    """In the place of routing: so many tokens, which the caller fills in where they are stored, tokens first."""

    num_tokens: int


@dataclass(slots=True)  # not frozen: that would cost a microsecond a put
class Intake:
    """One record, checked and ready for the spool.

    routing: [tokens, layers, top_k], a view of the caller's memory; of a Room nothing.
    tokens_first: whether that is also the order in memory, which the spool keeps; the worker transposes.
    """

    request_id: bytes
    meta: bytes
    spec: RoutingSpec
    shape: tuple[int, int, int]  # tokens, layers, top_k
    routing: npt.NDArray[Any]
    tokens_first: bool
    present: tuple[Range, ...]  # token rows of `routing` that mean something
    token_ids: npt.NDArray[np.int32] | None
    logprobs: npt.NDArray[np.float32] | None
    offsets: tuple[int, int, int]  # of token_ids and logprobs in the payload, and its length

    @property
    def num_tokens(self) -> int:
        """Length of the token axis."""
        return self.shape[0]

    @property
    def payload_bytes(self) -> int:
        """What `fill` needs."""
        return self.offsets[2]

    def fill(self, payload: npt.NDArray[np.uint8]) -> None:
        """Copy ids, token ids and log-probabilities into `payload`.

        Raises InvalidRoutingError when an id is out of range; `payload` is then rubbish.
        """
        target = self.experts_in(payload)
        if self.present != ((0, self.shape[0]),):
            target.fill(0)
        for start, stop in self.present:
            _copy(target[start:stop], self.routing[start:stop], self.spec.num_experts, start)
        self.fill_tokens(payload)

    def fill_tokens(self, payload: npt.NDArray[np.uint8]) -> None:
        """Copy token ids and log-probabilities only."""
        for array, at in ((self.token_ids, self.offsets[0]), (self.logprobs, self.offsets[1])):
            if array is not None:
                payload[at : at + array.nbytes] = array.view(np.uint8)

    def experts_in(self, payload: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """[tokens, layers, top_k] of the stored dtype, a view of `payload`."""
        tokens, layers, top_k = self.shape
        dtype = np.dtype(self.spec.dtype)
        stored: npt.NDArray[Any] = payload[: tokens * layers * top_k * dtype.itemsize].view(dtype)
        view: npt.NDArray[Any] = stored.reshape(*((tokens, layers) if self.tokens_first else (layers, tokens)), top_k)
        return view if self.tokens_first else view.transpose(1, 0, 2)

    def check(self, payload: npt.NDArray[np.uint8]) -> None:
        """Of a Room that was filled: make missing rows zero and check the ids of the others.

        Raises InvalidRoutingError when an id is out of range.
        """
        experts, at = self.experts_in(payload), 0
        for start, stop in self.present:
            experts[at:start] = 0
            _check(experts[start:stop], self.spec.num_experts, start, 0)
            at = stop
        experts[at:] = 0


def take_in(
    dataset: DatasetFormat,
    request_id: str,
    routed_experts: Any,
    *,
    layout: str,
    layers: Sequence[int] | None,
    token_ids: Any,
    logprobs: Any,
    token_start: int,
    part: bool,
    status: str | None,
    missing: Iterable[Range],
    weight_version: str | int | Iterable[Span] | None,
    tags: Mapping[str, str] | None,
) -> Intake:
    """Check the arguments of `RoutingWriter.put`, which describes them.

    Raises InvalidRequestIdError or InvalidRoutingError.
    """
    argument = "request_id"  # that is looked at: whatever its value raises is a fault of the caller's
    try:
        spec = dataset.spec
        dataset.keys.parse(request_id)
        argument = "layers"
        chosen = spec.check_layers(layers)
        argument = "routed_experts"
        if isinstance(routed_experts, Room):
            routing, tokens, tokens_first = _NOTHING, _count("num_tokens", routed_experts.num_tokens), True
        else:
            routing = _routing(routed_experts, layout, len(chosen), spec)
            tokens = len(routing)
            tokens_first = tokens > 1 and len(chosen) > 1 and abs(routing.strides[0]) > abs(routing.strides[1])
        argument = "token_start"
        whole = _whole(token_start, tokens)
        argument = "missing"
        gaps = _ranges("missing", missing, whole)
        some_layers = chosen is not spec.moe_layers and chosen != spec.moe_layers
        argument = "part"
        part = bool(part) or some_layers
        argument = "status"
        meta: dict[str, Any] = {"status": _status(status, part=part)}
        if token_start:
            meta["start"] = whole[0]
        if part:
            meta["part"] = True
        if gaps:
            meta["missing"] = gaps
        if some_layers:
            meta["layers"] = chosen
        argument = "weight_version"
        if isinstance(weight_version, (str, Integral)):
            meta["weight"] = _text("weight_version", str(weight_version))
        elif weight_version is not None:
            meta["spans"] = _spans(weight_version, whole)
        argument = "tags"
        if tags:
            meta["tags"] = _tags(tags)
        argument = "token_ids"
        ids = _per_token("token_ids", token_ids, tokens, _INT32)
        if ids is not None:
            meta["token_ids"] = True
        argument = "logprobs"
        probabilities = _per_token("logprobs", logprobs, tokens, _FLOAT32)
        if probabilities is not None:
            meta["logprobs"] = True
    except InvalidInputError:
        raise
    except Exception as error:
        raise unreadable(argument, error) from error
    shape = (tokens, len(chosen), spec.top_k)
    return Intake(
        request_id=request_id.encode(),
        meta=_meta_bytes(meta),
        spec=spec,
        shape=shape,
        routing=routing,
        tokens_first=tokens_first,
        present=_between(gaps, whole),
        token_ids=ids,
        logprobs=probabilities,
        offsets=array_offsets(
            tokens * shape[1] * spec.top_k * np.dtype(spec.dtype).itemsize,
            tokens,
            token_ids=ids is not None,
            logprobs=probabilities is not None,
        ),
    )


def unreadable(argument: str, error: Exception) -> InvalidRoutingError:
    """For an argument whose value raised something of its own when it was looked at."""
    return InvalidRoutingError(f"{argument} cannot be read: {reason_of(error)}")


@dataclass(slots=True)
class Drop:
    """The row that tells of a record which is not there."""

    request_id: bytes
    meta: bytes
    num_tokens: int
    reason: str


def drop_of(intake: Intake, reason: str) -> Drop:
    """The row of a dropped put; what describes its tokens or is large is left out."""
    meta = json.loads(intake.meta)
    kept = {name: meta[name] for name in ("start", "part", "weight") if name in meta}
    encoded = _encode({**kept, "status": "dropped", "reason": reason}).encode()
    return Drop(intake.request_id, encoded, intake.num_tokens, reason)


def take_drop(
    dataset: DatasetFormat,
    request_id: str,
    reason: str | Exception | None,
    *,
    num_tokens: int,
    token_start: int,
    part: bool,
    weight_version: str | int | None,
) -> Drop:
    """Check the arguments of `RoutingWriter.drop`, which describes them; every reason is made one that can be stored.

    Raises InvalidRequestIdError or InvalidRoutingError.
    """
    argument = "request_id"
    try:
        dataset.keys.parse(request_id)
        argument = "num_tokens"
        tokens = _count("num_tokens", num_tokens)
        meta: dict[str, Any] = {}
        argument = "token_start"
        if start := _whole(token_start, tokens)[0]:
            meta["start"] = start
        argument = "part"
        if part:
            meta["part"] = True
        argument = "weight_version"
        if weight_version is not None:
            meta["weight"] = _text("weight_version", str(weight_version))
    except InvalidInputError:
        raise
    except Exception as error:
        raise unreadable(argument, error) from error
    text = reason_of(reason)
    return Drop(request_id.encode(), _meta_bytes({**meta, "status": "dropped", "reason": text}), tokens, text)


def to_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A numpy array of `value`: an array, or a tensor that has `__dlpack__` or `numpy()`, on any device.

    Raises InvalidRoutingError for anything else, for masked values, and for a tensor that does not hand its values over. Sub-byte
    and brain floats are refused by name, since some libraries hand them over as integers (Paddle: bfloat16 as uint16).
    """
    if type(value) is np.ndarray:
        return value
    try:
        return _handed_over(name, value)
    except InvalidRoutingError:
        raise
    except Exception as error:
        raise unreadable(name, error) from error


def _handed_over(name: str, value: Any) -> npt.NDArray[Any]:
    if isinstance(value, np.ndarray):
        if hides_values(value):
            raise InvalidRoutingError(f"{name} has masked values: fill them, and tell rows without routing by missing=")
        return np.asarray(value)
    if not hasattr(value, "__dlpack__") and not hasattr(value, "numpy"):
        raise InvalidRoutingError(f"{name} is a {type(value).__name__}: expected a numpy array or a tensor")
    dtype = str(getattr(value, "dtype", ""))
    if name != "logprobs" and "float" in dtype:
        raise InvalidRoutingError(f"{name} has dtype {dtype}: expected integers")
    if any(kind in dtype for kind in ("bfloat", "float8", "float4")):
        raise InvalidRoutingError(f"{name} has dtype {dtype}, which numpy lacks: cast it to float32")
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "cpu"):
        value = value.cpu()
    return _handed_over(name, np.asanyarray(value.numpy())) if hasattr(value, "numpy") else np.from_dlpack(value)


def _routing(value: Any, layout: str, layers: int, spec: RoutingSpec) -> npt.NDArray[Any]:
    """`value` as [tokens, layers, top_k] view."""
    if layout not in LAYOUTS:
        raise InvalidRoutingError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
    array = to_array("routed_experts", value)
    if array.dtype.kind not in "iu":
        raise InvalidRoutingError(f"routed_experts has dtype {array.dtype}: expected integers")
    view = array if layout == "TLK" or array.ndim != 3 else array.transpose(1, 0, 2)
    if array.ndim != 3 or view.shape[1:] != (layers, spec.top_k):
        expected = f"(tokens, {layers}, {spec.top_k})" if layout == "TLK" else f"({layers}, tokens, {spec.top_k})"
        swapped = array.ndim == 3 and (array.shape[0] if layout == "TLK" else array.shape[1]) == layers
        hint = f'; it looks like layout="{"LTK" if layout == "TLK" else "TLK"}"' if swapped else ""
        raise InvalidRoutingError(f"routed_experts has shape {array.shape}: expected {expected} in {layout}{hint}")
    return view


def _copy(target: npt.NDArray[Any], source: npt.NDArray[Any], num_experts: int, first_token: int) -> None:
    """Range-checked copy of [tokens, layers, top_k], cast where the dtypes differ."""
    if source.dtype == target.dtype:
        _check(source, num_experts, first_token, 0)
        np.copyto(target, source)
        return
    by_layer = abs(source.strides[1]) > abs(source.strides[0])
    length = source.shape[by_layer]
    step = max(1, BLOCK_BYTES * length // max(source.nbytes, 1))
    for start in range(0, length, step):
        cut = (slice(None), slice(start, start + step)) if by_layer else (slice(start, start + step),)
        _check(source[cut], num_experts, first_token if by_layer else first_token + start, start if by_layer else 0)
        np.copyto(target[cut], source[cut], casting="unsafe")


def _check(block: npt.NDArray[Any], num_experts: int, first_token: int, first_layer: int) -> None:
    unsigned_dtype, limit = _bound(block.dtype, num_experts)
    if limit is None or not block.size:
        return
    unsigned = block.view(unsigned_dtype)
    if int(unsigned.max()) < limit:
        return
    token, layer, slot = (int(i) for i in np.argwhere(unsigned >= limit)[0])
    raise InvalidRoutingError(
        f"expert id {int(block[token, layer, slot])} at row {first_token + token}, layer index {first_layer + layer}, "
        f"slot {slot}: expected 0 to {num_experts - 1}; tell rows without routing by missing="
    )


@lru_cache
def _bound(dtype: np.dtype[Any], num_experts: int) -> tuple[np.dtype[Any], int | None]:
    """The unsigned dtype to look at ids in, and what they must stay below there; None if every id of `dtype` is one."""
    largest = int(np.iinfo(dtype).max)
    unsigned = np.dtype(dtype.str.replace("i", "u"))  # a negative id becomes one past the largest of `dtype`
    return unsigned, None if dtype.kind == "u" and largest < num_experts else min(num_experts, largest + 1)


def _per_token(name: str, value: Any, tokens: int, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    if value is None:
        return None
    array = np.asarray(value) if isinstance(value, (list, tuple)) else to_array(name, value)
    if array.shape != (tokens,):
        raise InvalidRoutingError(f"{name} has shape {array.shape}: expected ({tokens},), one for each row of routing")
    if array.dtype.kind not in ("iu" if dtype.kind == "i" else "fiu") and array.size:
        raise InvalidRoutingError(f"{name} has dtype {array.dtype}: expected what fits {dtype}")
    if dtype.kind == "i" and array.size:
        low, high = int(array.min()), int(array.max())
        if low < np.iinfo(dtype).min or high > np.iinfo(dtype).max:
            raise InvalidRoutingError(f"{name} holds {low} to {high}: expected what fits {dtype}")
    if array.dtype == np.float64:  # beyond float32 is infinite, and no news
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype)
    return np.ascontiguousarray(array, dtype)


def _status(status: Any, *, part: bool) -> str:
    status = status or ("partial" if part else "complete")
    if status not in STATUSES[:-1]:
        raise InvalidRoutingError(f"status={status!r}: expected one of {', '.join(STATUSES[:-1])}")
    return str(status)


def _count(name: str, value: Any) -> int:
    try:
        count = index(value)
    except TypeError:
        count = -1
    if not 0 <= count <= MAX_POSITION:
        raise InvalidRoutingError(f"{name}={value!r}: expected a number of tokens, 0 to 2**31 - 1")
    return count


def _whole(token_start: Any, tokens: int) -> Range:
    try:
        start = index(token_start)
    except TypeError:
        start = -1
    if not 0 <= start <= MAX_POSITION - tokens:
        raise InvalidRoutingError(
            f"token_start={token_start!r} of {tokens} tokens: expected the position of the first one, and all of them from 0 to "
            "2**31 - 1"
        )
    return start, start + tokens


def _ranges(name: str, ranges: Iterable[Range], whole: Range) -> list[Range]:
    """The non-empty ones in order, joined where they touch."""
    joined: list[Range] = []
    try:
        pairs = sorted((index(start), index(stop)) for start, stop in ranges)
    except (TypeError, ValueError) as error:
        raise InvalidRoutingError(f"{name}={ranges!r}: expected (start, stop) positions") from error
    for start, stop in pairs:
        if not whole[0] <= start <= stop <= whole[1]:
            raise InvalidRoutingError(f"{name} has ({start}, {stop}): expected ranges within the record's {whole}")
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        elif start < stop:
            joined.append((start, stop))
    return joined


def _spans(spans: Any, whole: Range) -> list[Span]:
    try:
        found = sorted((index(start), index(stop), str(version)) for start, stop, version in spans)
    except (TypeError, ValueError) as error:
        raise InvalidRoutingError(
            f"weight_version={spans!r}: expected a text, a number or (start, stop, version) spans"
        ) from error
    _ranges("weight_version", [(start, stop) for start, stop, _ in found], whole)
    for _, _, version in found:
        _text("weight_version", version)
    return found


def _between(gaps: Sequence[Range], whole: Range) -> tuple[Range, ...]:
    """What the gaps leave of `whole`, counted from its start."""
    if not gaps:
        return ((0, whole[1] - whole[0]),) if whole[0] < whole[1] else ()
    edges = [whole[0], *(edge for gap in gaps for edge in gap), whole[1]]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((start - whole[0], stop - whole[0]) for start, stop in pairs if start < stop)


def _meta_bytes(meta: Mapping[str, Any]) -> bytes:
    encoded = _encode(meta).encode()
    if len(encoded) > MAX_META_BYTES:
        sizes = {name: len(_encode(value)) for name, value in meta.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        named = "weight_version" if largest in ("weight", "spans") else largest
        raise InvalidRoutingError(
            f"{named} takes {sizes[largest]} bytes as JSON: expected at most {MAX_META_BYTES} for all that describes a put; "
            "put the record in parts (token_start=, part=True) or say less"
        )
    return encoded


def _tags(tags: Mapping[Any, Any]) -> dict[str, str]:
    if not isinstance(tags, Mapping):
        raise InvalidRoutingError(f"tags={tags!r}: expected a mapping of short texts")
    for key, value in tags.items():
        _text("tags", key)
        _text("tags", value)
    return dict(tags)


def _text(name: str, value: Any) -> str:
    try:
        str.encode(value)
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidRoutingError(f"{name} has {value!r}: expected a well-formed text") from error
    return str(value)
