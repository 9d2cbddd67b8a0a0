"""The SGLang hook: what `/generate` answers is stored, and nothing that is wrong with it reaches serving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire
from wire import SPEC, Run, small_run

import rr_dataset as rr
from rr_dataset.capture.sglang import SglangRoutingHook

OPTIONS = rr.WriterOptions(spool_bytes=4 << 20, slab_bytes=1 << 20)


@pytest.fixture
def run() -> Run:
    return small_run()


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


def test_a_part_that_does_not_fit_leaves_what_came_before_in_every_form(
    writer: rr.RoutingWriter, tmp_path: Path, run: Run
) -> None:
    hook = SglangRoutingHook(writer)
    shorter = Run(SPEC, 5, run.prompt, run.output[:1], run.logprobs[:1], run.routing[:4])
    broken = wire.sglang(run, 3)
    broken["meta_info"]["routed_experts"] += "AAAA"
    forms: list[Any] = [
        lambda first, second: [first, second],
        lambda first, second: {"choices": [{**first, "index": 0}, {**second, "index": 1}]},
    ]
    for i, form in enumerate(forms):
        hook.on_finished(f"a:{i}:0:0", form(wire.sglang(shorter), wire.sglang(shorter)))
        hook.on_finished(f"a:{i}:0:0", form(wire.sglang(run, 3), broken))
    dataset = stored(writer, tmp_path)
    for i in range(len(forms)):
        whole, first = dataset.get_many([f"a:{i}:0:0#0", f"a:{i}:0:0#1"])
        np.testing.assert_array_equal(whole.to_numpy("TLK"), run.moe[:-1])
        np.testing.assert_array_equal(first.to_numpy("TLK")[:3], run.moe[:3])
    assert hook.faults.counts == {"on_finished": len(forms)}
    assert repr(hook.faults).startswith("Faults(on_finished: 2, the last: sglang: size: expected 3 rows")
    assert repr(SglangRoutingHook(writer).faults) == "Faults(none)"


def test_samples_that_say_one_index_are_apart(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = SglangRoutingHook(writer)
    other = Run(SPEC, 5, run.prompt, run.output[:2], run.logprobs[:2], run.routing[:5])
    broken = {"index": 7, "meta_info": {"routed_experts": 3}}
    samples = [broken, *({**wire.sglang(each), "index": index} for each, index in ((run, 0), (other, 0), (other, 2)))]
    receipts = hook.on_finished("a:0:0:0", samples)
    assert [receipt.ref.partition(":")[2] for receipt in receipts] == [f"a:0:0:0#{i}" for i in (7, 0, 3, 2)]
    heads = stored(writer, tmp_path).heads([f"a:0:0:0#{i}" for i in (0, 2, 3, 7)])
    assert [(head.status, head.num_tokens) for head in heads[:2]] == [("complete", 6), ("complete", 4)]
    assert "index: expected another one for each sample; came 0 twice" in str(heads[2].reason)
    assert "shape: expected" in str(heads[3].reason)


def test_one_sample_that_raises_keeps_no_other_from_being_stored(
    writer: rr.RoutingWriter, tmp_path: Path, run: Run
) -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise ZeroDivisionError(name)

    hook = SglangRoutingHook(writer)
    odd = wire.sglang(run)
    odd["meta_info"]["finish_reason"] = ["x"]
    hook.on_finished("a:0:0:0", [odd, Hostile(), wire.sglang(run)], token_start=0)
    heads = stored(writer, tmp_path).heads([f"a:0:0:0#{i}" for i in range(3)])
    assert [head.status for head in heads] == ["complete", "dropped", "complete"]
    assert "ZeroDivisionError: meta_info" in str(heads[1].reason)


def test_whatever_is_wrong_leaves_a_row(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    class Raises:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def __getattr__(self, name: str) -> Any:
            raise self.error

    hook = SglangRoutingHook(writer)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ([], {}),
        ({"choices": []}, {}),
        (Raises(AssertionError()), {}),
        (Raises(ValueError("bad \ud800")), {}),
        (wire.sglang(run), {"token_start": np.array([1, 2])}),
        (wire.sglang(run), {"tags": 5}),
        (wire.sglang(run), {"weight_version": np.zeros(2)}),
        (np.ma.masked_array(np.zeros((2, 2))), {}),
    ]
    ids = [f"a:{i}:0:0" for i in range(len(calls))] + ["a:99:0:0#1"]
    for request_id, (output, more) in zip(ids, [*calls, ([wire.sglang(run)] * 2, {})], strict=True):
        receipts = hook.on_finished(request_id, output, **more)
        assert [receipt.durable() for receipt in receipts] == [False], output
    heads = stored(writer, tmp_path).heads(ids)
    assert all(head.status == "dropped" and head.reason for head in heads)
    assert hook.on_finished(5, [wire.sglang(run)] * 2) == []  # type: ignore[arg-type]
    assert hook.faults.counts["on_finished"] >= len(calls) + 1


def test_arrays_in_the_place_of_lists(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = SglangRoutingHook(writer, strict=True)
    response = wire.sglang(run)
    del response["output_ids"]
    response["meta_info"]["output_token_logprobs"] = np.array(
        [[p, i] for p, i in zip(run.logprobs, run.output, strict=True)]
    )
    hook.on_finished("a:0:0:0", response, prompt_token_ids=np.array(run.prompt))
    record = stored(writer, tmp_path).get("a:0:0:0")
    assert record.token_ids is not None
    assert record.logprobs is not None
    assert record.token_ids.tolist() == (run.prompt + run.output)[:-1]
    np.testing.assert_array_equal(record.logprobs[3:], np.array(run.logprobs[:-1], np.float32))


def test_a_version_that_nobody_set_is_none(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = SglangRoutingHook(writer, strict=True)
    response = wire.sglang(run)
    response["meta_info"]["weight_version"] = "default"
    hook.on_finished("a:0:0:0", response)
    hook.on_finished("a:1:0:0", response, weight_version="default")
    unknown, told = stored(writer, tmp_path).heads(["a:0:0:0", "a:1:0:0"])
    assert (unknown.weights, told.weights) == ((), ((0, 6, "default"),))


def test_nothing_reaches_serving(writer: rr.RoutingWriter) -> None:
    hook = SglangRoutingHook(writer)
    for output in (None, 3, [None], {"meta_info": 4}, []):
        for receipt in hook.on_finished("a:0:0:0", output):
            assert not receipt.durable()
