"""Any sequence of puts, deletes, flushes, kills, take-overs and reopenings, against a dict of what was put.

The oracle works token by token on plain dicts and shares no code with the product.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import rr_dataset as rr
from rr_dataset import supervisor as supervisor_module
from rr_dataset import writer as writer_module
from tests.engines import SPEC, experts, options, spools, until

IDS = ["a:0", "a:1", "b:0", "b:0#1", "c d/ü:7:2:0"]
ids = st.sampled_from(IDS)
PREFIXES = {  # what they cover, by hand
    "a": ["a:0", "a:1"],
    "a:1": ["a:1"],
    "b": ["b:0", "b:0#1"],
    "b:0#1": ["b:0#1"],
    "c d/ü:7:2:0": ["c d/ü:7:2:0"],
    "d": [],
}
prefixes = st.sampled_from(sorted(PREFIXES))
lengths = st.sampled_from([0, 1, 7, 60, 3000])


@dataclass
class Told:
    """One put as the oracle remembers it."""

    start: int
    array: npt.NDArray[Any]  # [layers, tokens, top_k]
    part: bool
    status: str


def expected(puts: list[Told]) -> tuple[dict[int, Any], int, str]:
    """(routing by token, tokens, status) of a record, from all its puts in order."""
    last_whole = max([i for i, put in enumerate(puts) if not put.part], default=0)
    tokens: dict[int, Any] = {}
    end, status = -1, ""
    for put in puts[last_whole:]:
        stop = put.start + put.array.shape[1]
        for token in range(put.start, stop):
            tokens.setdefault(token, put.array[:, token - put.start])
        if stop >= end:
            end, status = stop, put.status
    return tokens, end, status


def abandon(writer: rr.RoutingWriter) -> None:
    """What is left of a writer whose process and worker were killed."""
    supervisor = writer._supervisor
    supervisor._stopping = True
    supervisor.wake()
    assert supervisor._thread is not None
    supervisor._thread.join()
    supervisor._process.kill()
    supervisor._process.wait()
    supervisor_module._running.discard(supervisor)
    supervisor._close_descriptors()
    writer_module._open_writers.discard(writer)
    writer._spool.close(remove=False)


class Sequences(RuleBasedStateMachine):
    """The writer, its kills, and a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="rr-stateful-"))
        (self.base / "spools").mkdir()
        self.puts: dict[str, list[Told]] = {}
        self.past: dict[str, list[Told]] = {}  # all puts ever, also deleted ones
        self.durable: set[str] = set()
        self.fading: set[str] = set()  # deleted by the writer since the last flush: may still be seen
        self.seed = 0

    @initialize()
    def open(self) -> None:
        self.writer = self.new_writer()
        self.reader = rr.open_dataset(self.base / "ds")

    def new_writer(self) -> rr.RoutingWriter:
        made = options(self.base / "spools", block_timeout_s=60, idle_seal_s=0.001)
        return rr.RoutingWriter(self.base / "ds", made, create=SPEC)

    def put(self, request_id: str, told: Told, **more: Any) -> None:
        receipt = self.writer.put(request_id, told.array, "LTK", token_start=told.start, part=told.part, **more)
        assert receipt.ref.endswith(f":{request_id}")
        self.puts.setdefault(request_id, []).append(told)
        self.past.setdefault(request_id, []).append(told)

    def fresh(self, tokens: int) -> npt.NDArray[Any]:
        self.seed += 1
        return experts(self.seed, tokens)

    @rule(request_id=ids, tokens=lengths, count=st.sampled_from([1, 1, 5, 40]))
    def put_whole(self, request_id: str, tokens: int, count: int) -> None:
        for _ in range(count):
            self.put(request_id, Told(0, self.fresh(tokens), part=False, status="complete"))

    @rule(request_id=ids, tokens=lengths, start=st.integers(0, 80), last=st.booleans())
    def put_part(self, request_id: str, tokens: int, start: int, last: bool) -> None:
        status = "complete" if last else "partial"
        self.put(request_id, Told(start, self.fresh(tokens), part=True, status=status), status=status)

    def forget(self, covered: list[str]) -> None:
        for request_id in covered:
            self.puts.pop(request_id, None)
        self.durable -= set(covered)

    @rule(prefix=prefixes)
    def delete_in_order(self, prefix: str) -> None:
        self.writer.delete_prefix(prefix)
        self.fading |= self.puts.keys() & set(PREFIXES[prefix])
        self.forget(PREFIXES[prefix])

    @rule(prefix=prefixes)
    def delete_from_outside(self, prefix: str) -> None:
        rr.delete_prefix(self.base / "ds", prefix)
        self.forget(PREFIXES[prefix])
        self.fading -= set(PREFIXES[prefix])
        assert not set(self.reader.ids()) & set(PREFIXES[prefix])

    @rule(request_ids=st.lists(ids, min_size=1, max_size=3))
    def delete_ids_from_outside(self, request_ids: list[str]) -> None:
        rr.delete(self.base / "ds", ids=request_ids)
        self.forget(request_ids)
        self.fading -= set(request_ids)
        assert not set(self.reader.ids()) & set(request_ids)

    @rule()
    def kill_worker(self) -> None:
        with suppress(ProcessLookupError):  # killed just before, and not yet followed by another
            os.kill(self.writer.stats().worker_pid, signal.SIGKILL)

    @rule()
    def kill_both_and_take_over(self) -> None:
        abandon(self.writer)
        self.writer = self.new_writer()
        until(lambda: len(spools(self.base / "spools")) == 1, "the next writer has taken everything over")
        self.check_all()

    @rule()
    def kill_both_and_recover(self) -> None:
        abandon(self.writer)
        assert {report.outcome for report in rr.recover(self.base / "spools")} == {"recovered"}
        self.check_all()
        self.writer = self.new_writer()

    @rule()
    def close_and_open(self) -> None:
        self.writer.close()
        assert spools(self.base / "spools") == []
        self.check_all()
        self.writer = self.new_writer()

    @rule()
    def reopen_reader(self) -> None:
        self.reader = pickle.loads(pickle.dumps(rr.open_dataset(self.base / "ds")))

    @precondition(lambda self: self.puts)
    @rule()
    def flush(self) -> None:
        self.writer.flush(timeout_s=60)
        self.check_all()

    @rule()
    def look(self) -> None:
        """Between two flushes a reader sees whole records of what was put, at least those that were flushed."""
        seen = set(self.reader.ids())
        assert self.durable <= seen <= self.puts.keys() | self.fading
        for record in self.reader.get_many(sorted(seen), on_missing="none"):
            if record is None:  # its delete has just become visible
                continue
            told = self.past[record.request_id]
            present = record.present().all(axis=0)
            for token in np.flatnonzero(present)[:: max(1, len(present) // 10)]:
                routing = record.routed_experts[:, token]
                candidates = [
                    put.array[:, token - put.start] for put in told if 0 <= token - put.start < put.array.shape[1]
                ]
                assert any(np.array_equal(routing, each) for each in candidates)

    def check_all(self) -> None:
        self.durable, self.fading = set(self.puts), set()
        assert set(self.reader.ids()) == self.durable
        for request_id, record in zip(self.puts, self.reader.get_many(list(self.puts)), strict=True):
            tokens, end, status = expected(self.puts[request_id])
            assert (record.num_tokens, record.status) == (end, status)
            present = record.present()
            assert set(np.flatnonzero(present.all(axis=0))) == set(tokens)
            assert set(np.flatnonzero(present.any(axis=0))) == set(tokens)
            for token, routing in tokens.items():
                np.testing.assert_array_equal(record.routed_experts[:, token], routing)

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
            self.check_all()
            assert spools(self.base / "spools") == []
        shutil.rmtree(self.base)


Sequences.TestCase.settings = settings(max_examples=settings().max_examples // 6, stateful_step_count=14)
TestSequences = Sequences.TestCase
