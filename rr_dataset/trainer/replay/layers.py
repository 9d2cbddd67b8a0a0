"""The layer id of a router, read off a model of either framework."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rr_dataset.errors import InvalidInputError


def by_layer(modules: Mapping[str, Any], routers: Iterable[str], last: int) -> dict[int, Any]:
    """The routers by 0-based layer id of the model.

    modules: every module of the model by dotted name. routers: the names of those that route. last: the last layer that
    records have; routers behind it predict several tokens ahead, have no record and are left live.

    The id is the decoder layer's `self_attn.layer_idx` (right on a pipeline stage too, whose own numbering starts at 0), else
    the last number in the name. Raises InvalidInputError if there is none or two routers share one.
    """
    found: dict[int, Any] = {}
    names: dict[int, str] = {}
    for name in routers:
        layer = _layer_of(name, modules)
        if layer in found:
            raise InvalidInputError(
                f"{names[layer]} and {name} both are the router of layer {layer}: name them with gates="
            )
        if layer <= last:
            found[layer], names[layer] = modules[name], name
    return dict(sorted(found.items()))


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
