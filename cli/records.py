"""`rr-dataset get`: one record as a table, as JSON or as an .npz file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rr_dataset import RecordHead, RoutingRecord, open_dataset
from rr_dataset.clock import millis
from rr_dataset.interchange.export import record_arrays
from rr_dataset.record import shown_layers

from . import output
from .options import Json, Layers, Uri, parse_layers, parse_tokens

_SHOWN_TOKENS = 16


def get(
    uri: Uri,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The request id", show_default=False)],
    layers: Layers = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="RANGE", help="Token positions, such as 0:128, 128: or -8:", show_default="all"),
    ] = None,
    npz: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the record there as NumPy arrays", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one record, or the layers and tokens of it that are asked for."""
    record = open_dataset(uri).get(
        request_id,
        layers=None if layers is None else parse_layers(layers),
        tokens=None if tokens is None else parse_tokens(tokens),
    )
    if npz is not None:
        with npz.open("wb") as file:
            np.savez(file, **record_arrays(record))
    if as_json:
        output.show_json(record_json(record))
    elif npz is not None:
        output.show_line(
            f"wrote {npz}: routed_experts {record.routed_experts.dtype} {list(record.routed_experts.shape)}"
        )
    else:
        output.show_facts(record_facts(record))
        output.show_line("")
        _show_experts(record)


def head_json(head: RecordHead) -> dict[str, Any]:
    """What JSON says of a record without its payload."""
    return {
        "request_id": head.request_id,
        "components": list(head.components),
        "choice": head.choice,
        "status": head.status,
        "reason": head.reason,
        "num_tokens": head.num_tokens,
        "missing": [list(span) for span in head.missing],
        "weights": [list(span) for span in head.weights],
        "run_id": head.run_id,
        "tags": dict(head.tags),
        "record_id": head.record_id,
        "submitted_ms": millis(head.rows[-1].t_submit),
    }


def record_json(record: RoutingRecord) -> dict[str, Any]:
    """What JSON says of a record; `routed_experts` is [layers][tokens][top_k], missing logprobs are null."""
    logprobs = None if record.logprobs is None else record.logprobs.tolist()
    return {
        **head_json(record),
        "layers": list(record.layers),
        "token_ranges": [list(span) for span in record.token_ranges],
        "missing_by_layer": {str(k): [list(span) for span in v] for k, v in record.missing_by_layer.items()},
        "routed_experts": record.routed_experts.tolist(),
        "token_ids": None if record.token_ids is None else record.token_ids.tolist(),
        "logprobs": logprobs and [value if math.isfinite(value) else None for value in logprobs],
    }


def record_facts(record: RoutingRecord) -> Mapping[str, object]:
    """What a person wants to know of a record before its ids."""
    return {
        "id": output.printable(record.request_id),
        "status": record.status if record.reason is None else f"{record.status}: {output.printable(record.reason)}",
        "tokens": record.num_tokens,
        "missing": output.shown_ranges(record.missing),
        "weights": ", ".join(f"{output.printable(v)} ({start}:{stop})" for start, stop, v in record.weights),
        "submitted": output.shown_time(record.rows[-1].t_submit),
        "run": output.printable(record.run_id),
        "tags": ", ".join(f"{output.printable(k)}={output.printable(v)}" for k, v in record.tags.items()),
        "read": f"layers {shown_layers(record.layers)}; tokens {output.shown_ranges(record.token_ranges)}; "
        f"{record.routed_experts.dtype}, {output.shown_bytes(record.routed_experts.nbytes)}",
    }


def _show_experts(record: RoutingRecord) -> None:
    """The first tokens, one a line, with as many layers as the terminal is wide."""
    layers, tokens, top_k = record.routed_experts.shape
    digits = len(str(record.routed_experts.max(initial=0)))
    columns = {"token": [str(p) for start, stop in record.token_ranges for p in range(start, stop)][:_SHOWN_TOKENS]}
    if record.token_ids is not None:
        columns["id"] = [str(i) for i in record.token_ids[:_SHOWN_TOKENS].tolist()]
    if record.logprobs is not None:
        columns["logprob"] = ["" if math.isnan(p) else f"{p:.3f}" for p in record.logprobs[:_SHOWN_TOKENS].tolist()]
    taken = sum(2 + max(map(len, (name, *cells))) for name, cells in columns.items())
    columns_shown = min(layers, max(1, (output.table_width() - taken) // (2 + max(top_k * (digits + 1) - 1, 9))))
    present = record.present()
    for i in range(columns_shown):
        ids = record.routed_experts[i, :_SHOWN_TOKENS].tolist()
        columns[f"layer {record.layers[i]}"] = [
            " ".join(f"{expert:{digits}}" for expert in row) if there else "missing"
            for row, there in zip(ids, present[i, :_SHOWN_TOKENS].tolist(), strict=True)
        ]
    output.show_table(list(columns), zip(*columns.values(), strict=True))
    if columns_shown < layers or tokens > _SHOWN_TOKENS:
        output.show_line(
            f"shown: {min(tokens, _SHOWN_TOKENS)} of {tokens} tokens, {columns_shown} of {layers} layers; "
            "choose with --tokens and --layers, take all with --npz FILE or --json"
        )
