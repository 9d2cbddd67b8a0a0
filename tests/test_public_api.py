"""The public names are fixed: added to, never renamed."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rr_dataset as rr

ROOT = Path(__file__).parents[1]

# Parameters by name, in order, as callers may rely on them.
SIGNATURES = {
    "create_dataset": [
        "uri",
        "spec",
        "keys",
        "keep",
        "ttl_s",
        "max_bytes",
        "exist_ok",
        "max_clock_skew_s",
        "tombstone_ttl_s",
        "grace_s",
        "storage_options",
    ],
    "compact": [
        "uri",
        "prefix",
        "compression",
        "jobs",
        "target_bytes",
        "dry_run",
        "shard",
        "tasks",
        "storage_options",
        "progress",
    ],
    "plan_compaction": ["uri", "prefix", "compression", "target_bytes", "shard", "storage_options"],
    "collect_garbage": ["uri", "dry_run", "storage_options"],
    "maintain": [
        "uri",
        "every_s",
        "compression",
        "jobs",
        "target_bytes",
        "storage_options",
        "progress",
        "stop",
    ],
    "open_dataset": ["uri", "run", "wait_s", "storage_options"],
    "RoutingDataset.get": ["self", "request_id", "layers", "tokens", "out"],
    "RoutingDataset.get_many": ["self", "ids", "layers", "tokens", "on_missing"],
    "RoutingDataset.get_packed": [
        "self",
        "ids",
        "layers",
        "tokens",
        "out",
        "padding",
        "pad_to_multiple",
        "on_missing",
    ],
    "RoutingDataset.get_spans": ["self", "spans", "layers"],
    "align": ["record", "tokens", "coverage", "eos_ids", "trailing"],
    "collate": ["records", "spec", "num_tokens", "length", "pad_to_multiple", "padding", "order"],
    "trajectory": ["dataset", "turns", "prompt_lengths", "layers", "refs"],
    "RankView.from_megatron": ["spec", "config", "state", "layer_numbers", "cp_order", "pad_multiple"],
    "RankView.from_fleet": [
        "spec",
        "num_layers",
        "group",
        "sequence_parallel",
        "vpp_size",
        "chunks",
        "cp_order",
        "pad_multiple",
    ],
    "RankView.share": ["self", "num_tokens", "length"],
    "RankView.shares": ["self", "lengths", "length"],
    "RankView.tokens": ["self", "num_tokens", "recorded"],
    "RoutingDataset.heads": ["self", "ids", "on_missing"],
    "RoutingDataset.ids": ["self", "prefix"],
    "RoutingDataset.info": ["self"],
    "RoutingDataset.poll": ["self", "cursor"],
    "RoutingDataset.resolve": ["self", "refs", "layers", "tokens"],
    "RoutingDataset.scan": ["self", "prefix", "columns"],
    "RoutingDataset.to_pyarrow": ["self", "prefix", "prune"],
    "RoutingDataset.wait_for": ["self", "ids", "timeout_s", "weight_version"],
    "PollCursor.to_bytes": ["self"],
    "PollCursor.from_bytes": ["data"],
    "RoutingRecord.to_numpy": ["self", "layout", "out"],
    "RoutingRecord.layer": ["self", "layer"],
    "RoutingSpec.from_config": ["config"],
}
WRITER_SIGNATURES = {
    "RoutingWriter.put": [
        "self",
        "request_id",
        "routed_experts",
        "layout",
        "layers",
        "token_ids",
        "logprobs",
        "token_start",
        "part",
        "status",
        "missing",
        "weight_version",
        "tags",
    ],
    "RoutingWriter.put_many": ["self", "items"],
    "RoutingWriter.reserve": [
        *("self", "request_id", "num_tokens", "layers", "token_ids", "logprobs", "token_start", "part", "status"),
        *("missing", "weight_version", "tags"),
    ],
    "RoutingWriter.drop": ["self", "request_id", "reason", "num_tokens", "token_start", "part", "weight_version"],
    "RoutingWriter.flush": ["self", "timeout_s"],
    "RoutingWriter.close": ["self"],
    "RoutingWriter.stats": ["self"],
    "Receipt.durable": ["self"],
    "Receipt.wait": ["self", "timeout_s"],
}


def parameters(dotted: str) -> list[str]:
    found = rr
    for part in dotted.split("."):
        found = getattr(found, part)
    return list(inspect.signature(found).parameters)


@pytest.mark.parametrize(("dotted", "names"), SIGNATURES.items(), ids=SIGNATURES)
def test_signature(dotted: str, names: list[str]) -> None:
    assert parameters(dotted)[: len(names)] == names


@pytest.mark.parametrize(("dotted", "names"), WRITER_SIGNATURES.items(), ids=WRITER_SIGNATURES)
def test_writer_signature(dotted: str, names: list[str]) -> None:
    assert parameters(dotted)[: len(names)] == names


@pytest.mark.parametrize("name", rr.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    found = getattr(rr, name)
    assert found.__name__ == name
    assert found.__doc__


def test_all_is_sorted_and_covers_the_lazy_names() -> None:
    assert rr.__all__ == sorted(rr.__all__, key=lambda name: (name[0].islower(), name))
    assert set(rr._LAZY) <= set(rr.__all__) <= set(dir(rr))


def test_every_error_is_exported() -> None:
    errors = importlib.import_module("rr_dataset.errors")
    declared = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert declared <= set(rr.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'open_datset'"):
        rr.open_datset  # noqa: B018  # the access is what is tested


def test_reading_names_are_loaded_on_first_use() -> None:
    code = (
        "import sys, rr_dataset as rr; assert 'rr_dataset.dataset' not in sys.modules; "
        "rr.open_dataset; assert 'rr_dataset.dataset' in sys.modules; assert 'open_dataset' in vars(rr)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
