"""Decoding as a caller does, with what `put` would say to it."""

from __future__ import annotations

from typing import Any

import numpy as np
from wire import Run

import rr_dataset as rr
from rr_dataset.contracts import Decoded, decode
from rr_dataset.intake import take_in
from rr_dataset.layout import DatasetFormat


def one(contract: str, response: Any, spec: rr.RoutingSpec, **facts: Any) -> Any:
    (decoded,) = decode(contract, response, spec, thorough=True, **facts)
    assert decoded.put is not None, decoded.reason
    taken(decoded, spec)
    return decoded.put


def taken(decoded: Decoded, spec: rr.RoutingSpec) -> None:
    """`put` accepts it, ids and all."""
    fmt = DatasetFormat("0" * 32, spec, rr.KeyScheme.fastdeploy())
    put: dict[str, Any] = dict(decoded.put or {})
    defaults = {
        "layout": "TLK", "layers": None, "token_ids": None, "logprobs": None, "token_start": 0, "part": False,
        "status": None, "missing": (), "weight_version": None, "tags": None,
    }  # fmt: skip
    intake = take_in(fmt, "a:0:0:0", put.pop("routed_experts"), **{**defaults, **put})
    intake.fill(np.empty(intake.payload_bytes, np.uint8))


def tlk(put: Any) -> Any:
    return put["routed_experts"] if put.get("layout", "TLK") == "TLK" else put["routed_experts"].transpose(1, 0, 2)


def check(put: Any, run: Run, start: int, stop: int, missing: tuple[tuple[int, int], ...] = ()) -> None:
    """Against the model's own choices, position by position."""
    assert len(tlk(put)) == stop - start
    assert (put.get("token_start", 0), put.get("part", False), tuple(put.get("missing", ()))) == (
        start,
        start > 0,
        missing,
    )
    holes = {position for a, b in missing for position in range(a, b)}
    for position in range(start, stop):
        if position not in holes:
            np.testing.assert_array_equal(tlk(put)[position - start], run.moe[position])
