"""The Arrow columns of a shard: a type and a doc per field. The only place that knows Arrow types.

    python -m rr_dataset.schema      prints schemas/v1.json

A shard's columns are the scalar ones in the order of `SCALARS` (the key scheme's components stand after request_id),
then the payload: token_ids, logprobs and one binary column per MoE layer.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rr_dataset.keys import KeyScheme
from rr_dataset.layout import FORMAT_VERSION
from rr_dataset.record import RoutingSpec

LAYER_COLUMN = "layer_%03d"
COMPONENTS_AFTER = "request_id"
VECTORS = ("token_ids", "logprobs")  # per-token payload columns, before the layers
FORMAT_KEY = "rr.format"
SPEC_KEY = "rr.spec"
KEYS_KEY = "rr.keys"

_RANGE = pa.struct([pa.field("start", pa.int64(), nullable=False), pa.field("stop", pa.int64(), nullable=False)])
_SPAN = pa.struct([*_RANGE, pa.field("version", pa.string(), nullable=False)])


@dataclass(frozen=True)
class Column:
    """One column, or one family of columns, of a shard."""

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = False

    @property
    def field(self) -> pa.Field:
        """The Arrow field; the doc stays in `v1.json`, so that a shard does not carry it twice."""
        return pa.field(self.name, self.type, nullable=self.nullable)


def _items(of: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", of, nullable=False))


SCALARS = (
    Column("record_id", pa.string(), "Names the row: t_submit as 16 hex digits, '-', the writer's 16 hex digits."),
    Column("request_id", pa.string(), "The key of the record, with its #sample if it has one."),
    Column("choice", pa.int32(), "The sample number n of a request id that ends in #n, else null.", nullable=True),
    Column("t_submit", pa.uint64(), "Hybrid logical clock of the put: Unix milliseconds << 16 | counter."),
    Column("token_start", pa.int64(), "Absolute position of the row's first token, from 0."),
    Column("num_tokens", pa.int64(), "Tokens of the row. In a drop row those that were given up."),
    Column("part", pa.bool_(), "False: a whole put, everything submitted before it is dead. True: it adds."),
    Column("status", pa.string(), "complete, partial, preempted, aborted or dropped."),
    Column("reason", pa.string(), "Why the row was dropped or aborted, in words.", nullable=True),
    Column("missing", _items(_RANGE), "Absolute positions [start, stop) whose bytes are zero and mean nothing."),
    Column(
        "weight_version",
        pa.string(),
        "The model version that routed, where one holds for the whole row.",
        nullable=True,
    ),
    Column("weight_spans", _items(_SPAN), "Versions by absolute positions [start, stop), where they changed."),
    Column("run_id", pa.string(), "The run that wrote the row."),
    Column("producer", pa.string(), "rollout or trainer."),
    Column("tags", pa.map_(pa.string(), pa.string()), "The caller's own texts."),
    Column("checksum", pa.uint64(), "XXH3-64, seed 0, of the row's layer bytes, one layer after the other."),
)
COMPONENT = Column(
    "<component>", pa.string(), "A part of the request id, named by the key scheme; null if absent.", nullable=True
)
TOKEN_IDS = Column("token_ids", _items(pa.int32()), "num_tokens token ids, or null.", nullable=True)
LOGPROBS = Column("logprobs", _items(pa.float32()), "num_tokens log-probabilities, or null.", nullable=True)
LAYER = Column(
    "layer_<id>",
    pa.binary(),
    "Expert ids of the MoE layer with this 0-based id, zero-padded to three digits: [num_tokens, top_k], C order, "
    "little-endian, of the spec's dtype. Null: the row does not have this layer.",
    nullable=True,
)


def scalar_schema(keys: KeyScheme) -> pa.Schema:
    """The columns that say what a row is: all but the payload; checksum is the last."""
    components = [pa.field(name, COMPONENT.type, nullable=COMPONENT.nullable) for name in keys.components]
    fields = [column.field for column in SCALARS]
    at = 1 + [column.name for column in SCALARS].index(COMPONENTS_AFTER)
    return pa.schema([*fields[:at], *components, *fields[at:]])


def shard_schema(spec: RoutingSpec, keys: KeyScheme) -> pa.Schema:
    """All columns of a shard, with the format number, the spec and the key scheme as schema metadata."""
    layers = [pa.field(LAYER_COLUMN % layer, LAYER.type, nullable=True) for layer in spec.moe_layers]
    fields = [*scalar_schema(keys), TOKEN_IDS.field, LOGPROBS.field, *layers]
    metadata = {
        FORMAT_KEY: str(FORMAT_VERSION),
        SPEC_KEY: json.dumps(spec.to_dict()),
        KEYS_KEY: json.dumps(keys.to_dict()),
    }
    return pa.schema(fields, metadata=metadata)


def describe() -> dict[str, Any]:
    """The columns as data: what `schemas/v1.json` holds."""
    at = 1 + [column.name for column in SCALARS].index(COMPONENTS_AFTER)
    columns = [*SCALARS[:at], COMPONENT, *SCALARS[at:], TOKEN_IDS, LOGPROBS, LAYER]
    return {
        "format": FORMAT_VERSION,
        "schema_metadata": {
            FORMAT_KEY: "The format number, as decimal digits.",
            SPEC_KEY: "JSON: moe_layers, num_experts, top_k, dtype and topk_order.",
            KEYS_KEY: "JSON: the key scheme, as in format.json.",
        },
        "columns": [
            {"name": column.name, "type": str(column.type), "nullable": column.nullable, "doc": column.doc}
            for column in columns
        ],
    }


def describe_json() -> str:
    """The text of `schemas/v1.json`."""
    return json.dumps(describe(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(describe_json())
