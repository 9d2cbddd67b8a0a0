"""Capture in the engine's thread, against how FastDeploy goes about it: a loop per sequence, fresh arrays, a managed queue."""

from __future__ import annotations

import itertools
import multiprocessing
from functools import partial

import numpy as np

import rr_dataset as rr
from rr_dataset.capture import Finished, RoutingCapture, SlotTable, StepCapturer

from .bench import SPEC, Array, Bench, Ids
from .measure import Check, Pairs, at_least, interleave, shown

SEQUENCES = 256
CHUNK = 8_192
BLOCK = 64
BLOCKS = 16  # of a sequence
TOKENS = BLOCK * BLOCKS  # of a request that ends
AGAINST = "numpy in a loop over the sequences, fresh arrays, Manager().Queue per layer (FastDeploy's default)"


class Steps:
    """Steps of one shape, over and over, each at the next places of the cache."""

    def __init__(self, sequences: int, tokens_each: int) -> None:
        rng = np.random.default_rng(sequences)
        self.tables = rng.permutation(SEQUENCES * BLOCKS).reshape(SEQUENCES, BLOCKS)[:sequences]
        self.starts = rng.integers(0, TOKENS, sequences) if tokens_each == 1 else np.zeros(sequences, np.int64)
        self.count = tokens_each
        self.batch = np.repeat(np.arange(sequences), tokens_each)
        self.offsets = np.tile(np.arange(tokens_each), sequences)
        self.ids = np.arange(TOKENS)  # of the request's tokens

    def first(self, i: int) -> Array:
        """Position of the first token of each sequence in the i-th step."""
        first: Array = (self.starts + i * self.count) % TOKENS
        return first


class Loops:
    """As FastDeploy does it in the thread of the engine: positions, slots and rows sequence by sequence."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._cache = np.ones((SEQUENCES * BLOCKS * BLOCK, SPEC.num_layers, SPEC.top_k), np.uint8)
        # The device's table has a place for each token of each sequence.
        self._device = np.ones((len(steps.tables), TOKENS, SPEC.num_layers, SPEC.top_k), np.uint8)

    def step(self, i: int) -> None:
        steps = self._steps
        positions = [np.arange(first, first + steps.count) for first in steps.first(i)]
        slots = [steps.tables[n, at // BLOCK] * BLOCK + at % BLOCK for n, at in enumerate(positions)]
        for n, at in enumerate(positions):
            self._cache[slots[n]] = self._device[n, at]

    def gather(self, i: int) -> Array:
        at = np.arange(TOKENS)
        blocks = self._steps.tables[i % len(self._steps.tables)]
        rows = self._cache[blocks[at // BLOCK] * BLOCK + at % BLOCK]
        return np.ascontiguousarray(rows.transpose(1, 0, 2))


class Ours:
    """The same through a capturer, a table and a writer."""

    def __init__(self, steps: Steps, writer: rr.RoutingWriter, table: SlotTable) -> None:
        self._steps, self._ids = steps, Ids()
        capturer = StepCapturer(table, SPEC, len(steps.batch))
        self._capture = RoutingCapture(writer, table, capturer, strict=True)
        for layer in SPEC.moe_layers:  # as when a graph is captured, which is then replayed
            self._capture.record(layer, np.ones((len(steps.batch), SPEC.top_k), np.int32))
        self._buffer = capturer._buffer.rows
        capturer.skip()

    def step(self, i: int) -> None:
        steps = self._steps
        self._capture.flush()
        self._buffer[:] = 1  # what the replay does, on a device beside this thread; each step clears it
        positions = steps.first(i)[steps.batch] + steps.offsets
        self._capture.step(steps.tables[steps.batch, positions // BLOCK] * BLOCK + positions % BLOCK)

    def end(self, count: int) -> None:
        ends = [
            Finished(self._ids.new(), self._steps.tables[n], TOKENS, token_ids=self._steps.ids) for n in range(count)
        ]
        for end in ends:
            self._capture.register(end.request_id)
        self._capture.finish_many(ends)


def _capture(bench: Bench, row: str, what: str, steps: Steps, many: int, ended: int) -> list[Check]:
    """`many` steps, and as many requests ended as tokens of theirs were fed: what capture takes of the engine's thread.

    The kernels that write the device's buffer are the same in both, and left out.
    """
    asked, turns = itertools.count(), itertools.count()
    shape = (SPEC.num_layers, SPEC.top_k, SPEC.dtype)
    with (
        bench.writer() as (writer, _),
        SlotTable.create("bench", SEQUENCES * BLOCKS, BLOCK, *shape) as table,
        multiprocessing.get_context("spawn").Manager() as manager,
    ):
        queue, loops, capture = manager.Queue(), Loops(steps), Ours(steps, writer, table)

        def ours(_: int) -> None:
            for _ in range(many):
                capture.step(next(asked))
            capture.end(ended)

        def theirs(_: int, *, per_layer: bool) -> None:
            for _ in range(many):
                loops.step(next(asked))
            for n in range(ended):
                rows = loops.gather(n)
                for layer, part in enumerate(rows if per_layer else [rows]):
                    queue.put_nowait((f"prompt_{n}:0:0:0_{layer}", part))

        def before() -> None:
            while not queue.empty():
                queue.get()
            if next(turns) % 16 == 0:  # as in serving, a request that ends seldom finds the worker idle
                writer.flush()

        for i in range(TOKENS // steps.count):  # the whole cache is warm
            loops.step(i)
            capture.step(i)
        rounds = bench.count(10, 60)
        default, fused = (
            interleave(ours, partial(theirs, per_layer=per_layer), rounds, before=before) for per_layer in (True, False)
        )
    each = Pairs([s / many for s in default.ours], [s / many for s in default.theirs])
    note = (
        f"with use_fused_put, a request in one put, theirs take {shown(fused.theirs_s / many, 'us')}, "
        f"{fused.theirs_s / fused.ours_s:.1f} x ours in the same turns"
    )
    return [at_least(row, what, AGAINST, each, 10.0, unit="us", note=note)]


def capture_decode(bench: Bench) -> list[Check]:
    """A decode step of 256 sequences; at 1,024 tokens each, every fourth step ends one."""
    what = "capture of a decode step, 256 sequences, and a fourth of a request that ends"
    return _capture(bench, "capture-decode", what, Steps(SEQUENCES, 1), many=4, ended=1)


def capture_prefill(bench: Bench) -> list[Check]:
    """A prefill chunk of 8 prompts of 1,024 tokens, which end."""
    what = "capture of a prefill chunk, 8,192 tokens, and 8 requests that end"
    return _capture(bench, "capture-prefill", what, Steps(CHUNK // TOKENS, TOKENS), many=1, ended=8)
