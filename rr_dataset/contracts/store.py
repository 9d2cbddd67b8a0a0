"""FastDeploy's store form: one array per record, or one per layer, padded to the longest that the model takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.contracts.arrays import from_memory, minus_one
from rr_dataset.contracts.rows import Decoded, Facts, PutArguments, field
from rr_dataset.errors import InvalidRoutingError
from rr_dataset.record import Range, RoutingSpec, ranges_of

_BFLOAT16_MINUS_ONE = 0xBF80  # what paddle makes of -1 in its 16-bit type


def fastdeploy_store(response: Any, spec: RoutingSpec, facts: Facts) -> Iterator[Decoded]:
    """[MoE layers, padded tokens, top_k], or a list of [padded tokens, top_k] for each layer from the first MoE layer on.

    Prompt and output, less one if the last is EOS; the real length is found again, rows of -1 in between are missing.
    """
    if isinstance(response, Mapping):
        response = field(response, "routed_experts", "routing_indices")
    if isinstance(response, (list, tuple)) and response and not isinstance(response[0], (list, tuple)):
        layers = [from_memory("fastdeploy-store", layer) for layer in response]
        if any(layer.ndim != 2 or layer.shape != layers[0].shape for layer in layers):
            shapes = ", ".join(str(list(layer.shape)) for layer in layers[:4])
            raise InvalidRoutingError(f"fastdeploy-store: expected layers of one shape [tokens, top_k]; came {shapes}")
        array = np.stack(layers)
    else:
        array = from_memory("fastdeploy-store", response)
    if array.ndim != 3:
        raise InvalidRoutingError(f"fastdeploy-store: expected [layers, tokens, top_k]; came {list(array.shape)}")
    experts, missing = unpadded(array, spec)
    put = PutArguments(routed_experts=experts, layout="LTK", missing=missing)
    if facts.weight_version is not None:
        put["weight_version"] = facts.weight_version
    yield Decoded(0, put)


def unpadded(array: npt.NDArray[Any], spec: RoutingSpec) -> tuple[npt.NDArray[Any], tuple[Range, ...]]:
    """[layers, padded tokens, top_k] -> the same of its real length and of the spec's dtype, and the gaps in it.

    Raises InvalidRoutingError where length, gaps or layers are not certain, or an id is none.
    """
    if array.shape[2] != spec.top_k:
        raise InvalidRoutingError(f"it has {array.shape[2]} experts a token, the dataset has {spec.top_k}")
    empty = _empty(array, spec)
    more = array.shape[0] - spec.num_layers
    # A model whose last layers are no MoE layers: FastDeploy counts from the first one to the end.
    if more < 0 or not empty[spec.num_layers :].all():
        raise InvalidRoutingError(f"it has {array.shape[0]} layers, the dataset has {spec.num_layers}")
    array, empty = array[: spec.num_layers], empty[: spec.num_layers]
    there = ~empty
    lengths = np.where(there.any(axis=1), there.shape[1] - there[:, ::-1].argmax(axis=1), 0)
    tokens = int(lengths.max(initial=0))
    if tokens == 0:
        raise InvalidRoutingError("it holds no token")
    if lengths.min() < tokens:
        at = int(lengths.argmin())
        raise InvalidRoutingError(f"its length is not certain: {lengths[at]} tokens in layer {at}, {tokens} in others")
    array, empty = array[:, :tokens], empty[:, :tokens]
    if (empty != empty[0]).any():
        raise InvalidRoutingError("its layers have different gaps")
    real = array[:, ~empty[0]]
    if real.min() < 0 or real.max() >= spec.num_experts:
        raise InvalidRoutingError(f"it has ids from {real.min()} to {real.max()}, of {spec.num_experts} experts")
    experts = np.zeros(array.shape, spec.dtype)
    experts[:, ~empty[0]] = real
    return experts, ranges_of(empty[0])


def _empty(array: npt.NDArray[Any], spec: RoutingSpec) -> npt.NDArray[np.bool_]:
    """bool [layers, tokens]: where every id is the marker. No token has one expert twice, so several alike are no routing."""
    markers = [minus_one(array.dtype)]
    if array.dtype.itemsize == 2:
        markers.append(int(np.array(_BFLOAT16_MINUS_ONE).astype(array.dtype)))
    found: npt.NDArray[np.bool_] = np.zeros(array.shape[:2], np.bool_)
    for marker in markers:
        alike = (array == marker).all(axis=2)
        if spec.top_k == 1 and 0 <= marker < spec.num_experts and alike.any():
            raise InvalidRoutingError(f"its length is not certain: {marker} may be an expert or padding")
        found |= alike
    return found
