"""The columns of a shard, and the generated description of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from strategies import key_schemes, specs

from rr_dataset.keys import RESERVED_NAMES, KeyScheme
from rr_dataset.layout import FORMAT_VERSION
from rr_dataset.record import RoutingSpec, Row
from rr_dataset.schema import VECTORS, describe, describe_json, scalar_schema, shard_schema

ROOT = Path(__file__).parents[1]
SPEC = RoutingSpec(moe_layers=(3, 60, 1000), num_experts=256, top_k=8)
NOT_COLUMNS = {"components", "layers", "has_token_ids", "has_logprobs"}  # of a Row: told by which columns are null


def test_the_stored_description_is_the_generated_one() -> None:
    assert (ROOT / "schemas" / "v1.json").read_text() == describe_json(), "run `python -m rr_dataset.schema`"


def test_the_module_prints_the_description() -> None:
    done = subprocess.run([sys.executable, "-m", "rr_dataset.schema"], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode() == describe_json()


def test_every_column_has_a_doc_of_its_own() -> None:
    docs = [column["doc"] for column in describe()["columns"]]
    assert all(doc.endswith(".") for doc in docs)
    assert len(set(docs)) == len(docs)
    assert describe()["format"] == FORMAT_VERSION


def test_format_md_names_every_column() -> None:
    text = (ROOT / "schemas" / "FORMAT.md").read_text()
    assert [column["name"] for column in describe()["columns"] if f"`{column['name']}`" not in text] == []


def test_a_row_has_a_column_for_every_field() -> None:
    names = set(scalar_schema(KeyScheme.by_step()).names) - {"step", "rest"}
    assert names == set(Row.__dataclass_fields__) - NOT_COLUMNS


def test_no_component_may_take_the_name_of_a_column() -> None:
    names = {column["name"] for column in describe()["columns"]}
    assert names - {"<component>", "layer_<id>"} == RESERVED_NAMES


def test_columns_in_order() -> None:
    schema = shard_schema(SPEC, KeyScheme.fastdeploy())
    assert schema.names[:7] == ["record_id", "request_id", "data_id", "gen_id", "turn_id", "segment_id", "choice"]
    assert schema.names[-6:] == ["checksum", *VECTORS, "layer_003", "layer_060", "layer_1000"]
    assert schema.field("layer_003").type == pa.binary()
    assert schema.field("t_submit").type == pa.uint64()


@given(spec=specs(), keys=key_schemes)
def test_the_schema_tells_spec_and_keys(spec: RoutingSpec, keys: KeyScheme) -> None:
    schema = shard_schema(spec, keys)
    assert len(set(schema.names)) == len(schema.names)
    assert RoutingSpec.from_dict(json.loads(schema.metadata[b"rr.spec"])) == spec
    assert KeyScheme.from_dict(json.loads(schema.metadata[b"rr.keys"])) == keys
    assert all(text.isascii() for text in schema.metadata.values()), "Polars refuses other metadata"


@pytest.mark.parametrize("name", ["request_id", "t_submit", "part", "missing", "checksum"])
def test_what_every_row_has_is_not_nullable(name: str) -> None:
    assert not shard_schema(SPEC, KeyScheme.uuid()).field(name).nullable
