"""Each way to read a dataset, for tests in which all of them must give the same. Imported by child processes too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import rr_dataset as rr

LAYER = "layer_009"
Reads = dict[str, Any]


def _payload(records: Sequence[rr.RoutingRecord]) -> list[tuple[str, bytes]]:
    return [(record.request_id, record.layer(9).tobytes()) for record in records]


def _rows(batches: Any) -> list[tuple[str, bytes]]:
    return sorted(
        (row["request_id"], row[LAYER]) for batch in batches for row in batch.select(["request_id", LAYER]).to_pylist()
    )


READERS: dict[str, Callable[[rr.RoutingDataset, list[str], list[str]], Any]] = {
    "get": lambda ds, ids, refs: _payload([ds.get(request_id, layers=[9]) for request_id in ids[:20]]),
    "get_many": lambda ds, ids, refs: _payload(ds.get_many(ids)),
    "heads": lambda ds, ids, refs: [(head.request_id, head.num_tokens) for head in ds.heads(ids)],
    "ids": lambda ds, ids, refs: sorted(ds.ids()),
    "wait_for": lambda ds, ids, refs: [(head.request_id, head.status) for head in ds.wait_for(ids, timeout_s=0)],
    "resolve": lambda ds, ids, refs: _payload(ds.resolve(refs)),
    "poll": lambda ds, ids, refs: sorted(head.request_id for head in ds.poll()[0]),
    "scan": lambda ds, ids, refs: _rows(ds.scan(columns=["request_id", LAYER])),
    "to_pyarrow": lambda ds, ids, refs: _rows(ds.to_pyarrow().to_batches(columns=["request_id", LAYER])),
    "to_pyarrow names": lambda ds, ids, refs: _rows(
        ds.to_pyarrow(prune=False).to_batches(columns=["request_id", LAYER])
    ),
}


def read_all(ds: rr.RoutingDataset, ids: list[str], refs: list[str]) -> Reads:
    """What each reader gives."""
    return {name: read(ds, ids, refs) for name, read in READERS.items()}


def read_into(ds: rr.RoutingDataset, ids: list[str], refs: list[str], pipe: Any) -> None:
    """The body of a child process: what each reader gives, or the error."""
    warnings.simplefilter("error")
    try:
        pipe.send(read_all(ds, ids, refs))
    except BaseException as error:
        pipe.send(repr(error))
        raise
