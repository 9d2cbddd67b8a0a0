"""The SGLang hook: what `/generate` answers is stored, and nothing that is wrong with it reaches serving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire
from wire import Run, make_run

import rr_dataset as rr
from rr_dataset.capture.sglang import SglangRoutingHook

SPEC = rr.RoutingSpec((1, 2, 4), num_experts=128, top_k=2)
OPTIONS = rr.WriterOptions(spool_bytes=4 << 20, slab_bytes=1 << 20)


@pytest.fixture
def run() -> Run:
    return make_run(SPEC, 5, [11, 12, 13], [21, 22, 23, 24], np.random.default_rng(0))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[rr.RoutingWriter]:
    with rr.RoutingWriter(tmp_path / "routing", OPTIONS, create=SPEC) as writer:
        yield writer


def stored(writer: rr.RoutingWriter, tmp_path: Path) -> rr.RoutingDataset:
    writer.flush()
    return rr.open_dataset(tmp_path / "routing")


def test_a_response(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = SglangRoutingHook(writer, strict=True)
    (receipt,) = hook.on_finished("a:0:0:0", wire.sglang(run, holes=(0,)), prompt_token_ids=run.prompt)
    (record,) = stored(writer, tmp_path).resolve([receipt.ref])
    np.testing.assert_array_equal(record.to_numpy("TLK")[1:], run.moe[1:-1])
    assert record.token_ids is not None
    assert record.token_ids.tolist() == (run.prompt + run.output)[:-1]
    assert (record.status, record.missing, record.weights) == ("complete", ((0, 1),), ((1, 6, "step-7"),))


def test_meta_info_alone_and_several_samples(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = SglangRoutingHook(writer, strict=True)
    hook.on_finished("a:0:0:0", wire.sglang(run)["meta_info"], weight_version=8)
    hook.on_finished("b:0:0:0", [wire.sglang(run), wire.sglang(run, finish="abort")])
    dataset = stored(writer, tmp_path)
    assert {head.request_id: head.status for head in dataset.heads(list(dataset.ids()))} == {
        "a:0:0:0": "complete",
        "b:0:0:0#0": "complete",
        "b:0:0:0#1": "aborted",
    }
    assert dataset.get("a:0:0:0").weights == ((0, 6, "8"),)


def test_turns_that_ask_only_for_what_is_new(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = SglangRoutingHook(writer)
    shorter = Run(SPEC, 5, run.prompt, run.output[:1], run.logprobs[:1], run.routing[:4])
    hook.on_finished("a:0:0:0", wire.sglang(shorter))
    hook.on_finished("a:0:0:0", wire.sglang(run, 3))
    broken = wire.sglang(run, 3)
    broken["meta_info"]["routed_experts"] += "AAAA"
    hook.on_finished("a:0:0:0", broken)  # leaves what is there
    record = stored(writer, tmp_path).get("a:0:0:0")
    np.testing.assert_array_equal(record.to_numpy("TLK"), run.moe[:-1])
    assert hook.faults.counts == {"on_finished": 1}


def test_a_drop_row_says_why(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    changes: dict[str, Any] = {
        "aborted before any token was computed": {"routed_experts": None, "finish_reason": {"type": "abort"}},
        "size: expected 6 rows": {"routed_experts": "AAAA"},
        "one for each of 3 output tokens": {"completion_tokens": 3},
        "dtype: expected int32 or uint16 or uint8": {"routed_experts_dtype": "bfloat16"},
    }
    hook = SglangRoutingHook(writer)
    for i, change in enumerate(changes.values()):
        response = wire.sglang(run)
        response["meta_info"].update(change)
        hook.on_finished(f"a:{i}:0:0", response)
    heads = stored(writer, tmp_path).heads([f"a:{i}:0:0" for i in range(len(changes))])
    for head, reason in zip(heads, changes, strict=True):
        assert head.status == "dropped"
        assert reason in str(head.reason)


def test_nothing_reaches_serving(writer: rr.RoutingWriter) -> None:
    hook = SglangRoutingHook(writer)
    for output in (None, 3, [None], {"meta_info": 4}, []):
        for receipt in hook.on_finished("a:0:0:0", output):
            assert not receipt.durable()
