"""Which routers a model has, read off a model of either framework, and that each is hooked once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rr_dataset.errors import InvalidInputError, RoutingDatasetWarning

_hooked: set[int] = set()  # by id; a hooked router is alive


def by_layer(modules: Mapping[str, Any], routers: Iterable[str], last: int) -> dict[int, Any]:
    """The routers by 0-based layer id of the model.

    modules: every module of the model by dotted name. routers: the names of those that route. last: the last layer that
    records have; routers behind it (of layers that predict several tokens ahead, as a rule) have no record and are left live,
    with a RoutingDatasetWarning.

    The id is the decoder layer's `self_attn.layer_idx` (right on a pipeline stage too, whose own numbering starts at 0), else
    the last number in the name. Raises InvalidInputError if there is none or two routers share one.
    """
    found: dict[int, Any] = {}
    names: dict[int, str] = {}
    live = []
    for name in routers:
        layer = _layer_of(name, modules)
        if layer in found and found[layer] is not modules[name]:
            raise InvalidInputError(
                f"{names[layer]} and {name} both are the router of layer {layer}: name them with gates="
            )
        if layer <= last:
            found[layer], names[layer] = modules[name], name
        else:
            live.append(name)
    if live:
        warnings.warn(
            f"the dataset's last layer is {last}, so these routers have no record and stay live: {', '.join(live)}. Right for layers "
            "that predict several tokens ahead; else the dataset is of another model. Name the routers with gates= to say it is meant",
            RoutingDatasetWarning,
            stacklevel=2,
        )
    return dict(sorted(found.items()))


@contextmanager
def claimed(routers: Mapping[int, Any]) -> Iterator[None]:
    """These routers are hooked, each under one layer and by one replay. Raises InvalidInputError."""
    layers: dict[int, int] = {}
    for layer, router in routers.items():
        other = layers.setdefault(id(router), layer)
        if other != layer:
            raise InvalidInputError(
                f"layers {other} and {layer} have one router, {type(router).__name__}: its calls do not tell which layer's they are"
            )
        if id(router) in _hooked:
            raise InvalidInputError(
                f"the router of layer {layer} is hooked already, by another RoutingReplay: one at a time for a model"
            )
    _hooked.update(layers)
    try:
        yield
    finally:
        _hooked.difference_update(layers)


def _layer_of(name: str, modules: Mapping[str, Any]) -> int:
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        index = getattr(getattr(modules.get(parent), "self_attn", None), "layer_idx", None)
        if isinstance(index, int):
            return index
    numbers = re.findall(r"(?:^|\.)([0-9]+)(?=\.|$)", name)
    if not numbers:
        raise InvalidInputError(
            f"cannot tell the layer of the router {name!r}: name the routers with gates={{layer id: router}}"
        )
    return int(numbers[-1])
