"""The vLLM hook: what its engine hands out is stored, and nothing that is wrong with it reaches serving."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import wire
from wire import SPEC, Run, small_run

import rr_dataset as rr
from rr_dataset.capture.vllm import VllmRoutingHook

OPTIONS = rr.WriterOptions(spool_bytes=4 << 20, slab_bytes=1 << 20)


@dataclass
class CompletionOutput:  # the attributes that the hook looks at, as vLLM names them
    index: int
    token_ids: list[int]
    routed_experts: Any
    finish_reason: str | None = "stop"
    logprobs: Any = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


@dataclass
class SplitRequestOutput(RequestOutput):
    prompt_routed_experts: Any = field(default=None)


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


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


def entry(logprob: float) -> Any:
    return SimpleNamespace(logprob=logprob, rank=1)


def newest(run: Run, start: int = 0, dtype: str = "uint8", **more: Any) -> RequestOutput:
    routed = run.routing[start:-1].astype(dtype)
    logprobs = [{token: entry(p), 99: entry(-9.0)} for token, p in zip(run.output, run.logprobs, strict=True)]
    return RequestOutput(run.prompt, [CompletionOutput(0, run.output, routed, logprobs=logprobs, **more)])


def test_newest(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = VllmRoutingHook(writer, strict=True)
    (receipt,) = hook.on_finished("a:0:0:0", newest(run), weight_version="step-1", tags={"env": "math"})
    dataset = stored(writer, tmp_path)
    (record,) = dataset.resolve([receipt.ref])
    np.testing.assert_array_equal(record.to_numpy("TLK"), run.moe[:-1])
    assert record.token_ids is not None
    assert record.logprobs is not None
    assert record.token_ids.tolist() == (run.prompt + run.output)[:-1]
    np.testing.assert_array_equal(record.logprobs, np.array([np.nan] * 3 + run.logprobs[:-1], np.float32))
    assert (record.status, record.missing, dict(record.tags)) == ("complete", (), {"env": "math"})
    assert record.weights == ((0, 6, "step-1"),)


def test_a_start_is_a_part(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = VllmRoutingHook(writer, strict=True)
    shorter = Run(SPEC, 5, run.prompt, run.output[:1], run.logprobs[:1], run.routing[:4])
    hook.on_finished("a:0:0:0", newest(shorter))
    hook.on_finished("a:0:0:0", newest(run, 3), token_start=3)
    record = stored(writer, tmp_path).get("a:0:0:0")
    np.testing.assert_array_equal(record.to_numpy("TLK"), run.moe[:-1])
    assert (record.status, record.missing) == ("complete", ())


def test_a_part_that_does_not_fit_leaves_the_earlier_ones(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = VllmRoutingHook(writer)
    hook.on_finished("a:0:0:0", newest(run))
    hook.on_finished("a:0:0:0", newest(run, 3), token_start=2)
    record = stored(writer, tmp_path).get("a:0:0:0")
    np.testing.assert_array_equal(record.to_numpy("TLK"), run.moe[:-1])


def test_several_choices(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    output = newest(run)
    output.outputs += [
        CompletionOutput(1, run.output, run.routing[:-1].astype("uint8")),
        CompletionOutput(2, run.output, run.routing[:-2].astype("uint8")),
        CompletionOutput(3, run.output, None, "abort"),
        CompletionOutput(4, run.output, run.routing[:-1].astype("uint8") | 128),
        CompletionOutput(5, run.output, run.routing[:-1].astype("uint8"), "length"),
    ]
    hook = VllmRoutingHook(writer)
    receipts = hook.on_finished("a:0:0:0", output)
    assert [receipt.ref.partition(":")[2] for receipt in receipts] == [f"a:0:0:0#{i}" for i in range(6)]
    dataset = stored(writer, tmp_path)
    heads = dataset.heads([f"a:0:0:0#{i}" for i in range(6)])
    assert [head.status for head in heads] == ["complete", "complete", "dropped", "dropped", "dropped", "complete"]
    assert "rows: expected 6 (3 prompt + 4 output tokens, all but the last); came 5" in str(heads[2].reason)
    assert "aborted" in str(heads[3].reason)
    assert "expert id" in str(heads[4].reason)
    assert hook.faults.counts == {"on_finished": 2}


def test_two_parts_of_0_21(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    sent = run.routing.astype(np.int16)
    sent[:2] = -1
    outputs = [CompletionOutput(0, run.output, sent[3:-1])]
    hook = VllmRoutingHook(writer, strict=True)
    hook.on_finished("a:0:0:0", SplitRequestOutput(run.prompt, outputs, prompt_routed_experts=sent[:3]))
    hook.on_finished(
        "b:0:0:0",
        SplitRequestOutput(run.prompt, [CompletionOutput(0, run.output, None)], prompt_routed_experts=sent[:3]),
    )
    hook.on_finished("c:0:0:0", wire.vllm_split(run))
    hook.on_finished("d:0:0:0", SplitRequestOutput(run.prompt, outputs))
    hook.on_finished("e:0:0:0", SplitRequestOutput(run.prompt, newest(run).outputs))
    dataset = stored(writer, tmp_path)
    record = dataset.get("a:0:0:0")
    np.testing.assert_array_equal(record.to_numpy("TLK")[2:], run.moe[2:-1])
    assert (record.missing, record.status) == (((0, 2),), "complete")
    record = dataset.get("b:0:0:0")
    assert (record.num_tokens, record.status) == (3, "preempted")
    np.testing.assert_array_equal(dataset.get("c:0:0:0").to_numpy("TLK"), run.moe[:-1])
    record = dataset.get("d:0:0:0")
    assert record.missing == ((0, 3),)
    np.testing.assert_array_equal(record.to_numpy("TLK")[3:], run.moe[3:-1])
    np.testing.assert_array_equal(
        dataset.get("e:0:0:0").to_numpy("TLK"), run.moe[:-1]
    )  # newest, whose class kept the name


def test_json_of_a_server(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = VllmRoutingHook(writer, strict=True)
    hook.on_finished("a:0:0:0", wire.vllm(run))
    hook.on_finished("b:0:0:0", {**wire.vllm(run), "prompt_routed_experts": None})
    dataset = stored(writer, tmp_path)
    for request_id in ("a:0:0:0", "b:0:0:0"):
        np.testing.assert_array_equal(dataset.get(request_id).to_numpy("TLK"), run.moe[:-1])


def test_arrays_in_the_place_of_lists(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = VllmRoutingHook(writer, strict=True)
    prompt: Any = np.array(run.prompt)
    outputs = [CompletionOutput(0, np.array(run.output), run.routing[:-1])]  # type: ignore[arg-type]
    hook.on_finished("a:0:0:0", RequestOutput(prompt, outputs))
    hook.on_finished("b:0:0:0", SplitRequestOutput(prompt, outputs))
    hook.on_finished("c:0:0:0", SplitRequestOutput(prompt, [CompletionOutput(0, run.output, run.routing[3:-1])]))
    dataset = stored(writer, tmp_path)
    for request_id in ("a:0:0:0", "b:0:0:0", "c:0:0:0"):
        record = dataset.get(request_id)
        known = 3 if request_id == "c:0:0:0" else 0
        assert record.token_ids is not None
        assert record.token_ids.tolist()[known:] == (run.prompt + run.output)[known:-1]
        assert record.missing == (((0, 3),) if known else ())


def test_masked_rows_are_never_taken_for_real_ones(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    hook = VllmRoutingHook(writer)
    rows = np.ma.masked_array(run.routing[:-1], mask=np.zeros(run.routing[:-1].shape, bool))
    hook.on_finished("a:0:0:0", RequestOutput(run.prompt, [CompletionOutput(0, run.output, rows.copy())]))
    rows[1] = np.ma.masked
    hook.on_finished("b:0:0:0", RequestOutput(run.prompt, [CompletionOutput(0, run.output, rows)]))
    hook.on_finished("c:0:0:0", RequestOutput(run.prompt, []))
    heads = stored(writer, tmp_path).heads(["a:0:0:0", "b:0:0:0", "c:0:0:0"])
    assert [head.status for head in heads] == ["complete", "dropped", "dropped"]
    assert "masked" in str(heads[1].reason)
    assert "samples: expected at least one" in str(heads[2].reason)


def test_nothing_reaches_serving(writer: rr.RoutingWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outputs: list[Any] = [None, 7, {}, RequestOutput([1], None), RequestOutput([1], [None]), Hostile()]  # type: ignore[arg-type, list-item]
    outputs.append(RequestOutput(["x"], [CompletionOutput(0, [1], 3)]))  # type: ignore[list-item]
    hook = VllmRoutingHook(writer)
    with caplog.at_level(logging.WARNING, logger="rr_dataset"):
        for i, output in enumerate(outputs):
            for _ in range(3):
                (receipt,) = hook.on_finished(f"a:{i}:0:0", output)
            with pytest.raises(rr.RecordDroppedError):
                receipt.wait()
    heads = stored(writer, tmp_path).heads([f"a:{i}:0:0" for i in range(len(outputs))])
    assert all(head.status == "dropped" and head.reason for head in heads)
    assert sum("routing capture" in record.message for record in caplog.records) == 1


def test_an_id_that_is_none_is_counted(writer: rr.RoutingWriter, run: Run) -> None:
    hook = VllmRoutingHook(writer)
    assert hook.on_finished("chatcmpl-1", newest(run)) == []
    assert hook.on_finished("", None) == []
    assert hook.faults.counts == {"on_finished": 2}


def test_a_closed_writer(tmp_path: Path, run: Run) -> None:
    with rr.RoutingWriter(tmp_path / "routing", OPTIONS, create=SPEC) as writer:
        hook = VllmRoutingHook(writer)
    assert hook.on_finished("a:0:0:0", newest(run)) == []
    assert hook.faults.counts == {"on_finished": 1}


def test_strict_raises_when_the_rest_is_stored(writer: rr.RoutingWriter, tmp_path: Path, run: Run) -> None:
    output = newest(run)
    output.outputs.insert(0, CompletionOutput(1, run.output, run.routing[:2]))
    hook = VllmRoutingHook(writer, strict=True)
    with pytest.raises(rr.InvalidRoutingError, match="vllm: rows: expected 6"):
        hook.on_finished("a:0:0:0", output)
    heads = stored(writer, tmp_path).heads(["a:0:0:0#0"])
    assert heads[0].status == "complete"
