"""A small paged engine over a real model, and what its capture must equal.

Block tables, a prefix cache, chunked prefill and decoding in padded batches, preemption; the model is that of a framework, on the
CPU in fp32, and computes nothing twice that a KV cache spares it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import rr_dataset as rr
from rr_dataset.capture import BlockWatcher, Finished, RoutingCapture, SlotTable, StepCapturer

Array = npt.NDArray[Any]
BLOCK, BLOCKS, BATCH, CHUNK = 8, 26, 3, 16
COLUMNS = 16  # of the block table
STEP_TOKENS = BATCH * CHUNK
VOCABULARY = 128
MARGIN = 1e-5  # between scores: nearer ones may swap by float noise
OPTIONS = rr.WriterOptions(spool_bytes=4 << 20, slab_bytes=1 << 20)
HASTY = 12  # the step in which a request is preempted

Keep = Callable[[int, Any, Any], None]  # layer, ids [tokens, top_k] and scores [tokens, experts] of its router


class Runner(Protocol):
    """A model of one framework."""

    spec: rr.RoutingSpec
    cache_shape: tuple[int, int, int]  # layers, heads, width of a head

    def forward(self, tokens: Array, positions: Array, past: Array | None, mask: Array) -> tuple[Array, Array]:
        """Logits [B, T, vocabulary], and keys and values of the new tokens [layers, 2, B, T, heads, width].

        tokens, positions: [B, T]. past: [layers, 2, B, S, heads, width]. mask: bool [B, T, S + T], true where one looks.
        """

    def tensor(self, array: Array) -> Any:
        """The framework's."""

    def routers(self, keep: Keep) -> Any:
        """A context in which every router's forward tells `keep` what it chose."""


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    limit: int
    fed: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int = -1  # of the block table
    seen: dict[int, Array] = field(default_factory=dict)  # position: what was chosen when it was fed, [layers, top_k]
    stored: dict[int, Array] = field(default_factory=dict)  # and before it was preempted


class PagedEngine:
    """Greedy decoding. It keeps what a second hook on the routers saw of each token, with no code of the product."""

    def __init__(
        self, runner: Runner, capture: RoutingCapture, capturer: StepCapturer, *, hooked: bool, late: bool
    ) -> None:
        """hooked: the allocator tells of blocks, else a watcher. late: rows are flushed one step later."""
        self.runner, self.capture, self.capturer, self.late = runner, capture, capturer, late
        layers, heads, width = runner.cache_shape
        self.cache = np.zeros((layers, 2, BLOCKS, BLOCK, heads, width), np.float32)
        assert capturer.table is not None
        self.recycle = capturer.table.recycle if hooked else lambda blocks: None
        self.watcher = None if hooked else BlockWatcher(capturer.table, BATCH, COLUMNS)
        self.free = list(range(BLOCKS))
        self.owners: Counter[int] = Counter()
        self.known: dict[tuple[int, ...], tuple[int, list[Array]]] = {}  # all tokens up to a block's end: it, its rows
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.done: list[Request] = []
        self.chosen: dict[int, Array] = {}
        self.did: Counter[str] = Counter()

    def run(self, requests: list[Request]) -> None:
        self.waiting += requests
        for request in requests:
            self.capture.register(request.name)
        with self.runner.routers(self.record), self.runner.routers(self.watch):
            self.runner.forward(np.ones((1, 5), np.int64), np.arange(5)[None], None, np.ones((1, 5, 5), bool))
            self.capturer.skip()  # it was a profile run
            while self.waiting or self.running:
                self.step()

    # ---- the routers

    def record(self, layer: int, ids: Any, scores: Any) -> None:
        self.capture.record(layer, ids)

    def watch(self, layer: int, ids: Any, scores: Any) -> None:
        self.chosen[layer] = np.array(ids.numpy())

    # ---- blocks

    def allocate(self) -> int:
        block = self.free.pop(0)
        gone = [tokens for tokens, (cached, _) in self.known.items() if cached == block]
        self.did["evicted"] += len(gone)
        for tokens in gone:
            del self.known[tokens]
        self.recycle([block])
        self.owners[block] = 1
        return block

    def release(self, request: Request) -> None:
        for block in request.blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)
        request.blocks = []
        self.running.remove(request)
        if self.watcher is not None:
            self.watcher.forget(request.row)

    def admit(self, request: Request) -> None:
        for end in range(BLOCK, len(request.tokens), BLOCK):
            found = self.known.get(tuple(request.tokens[:end]))
            if found is None:
                break
            block, rows = found
            if not self.owners[block]:
                self.free.remove(block)
            self.owners[block] += 1
            request.blocks.append(block)
            request.seen.update(enumerate(rows, end - BLOCK))
            self.did["hit"] += 1
        request.fed = len(request.blocks) * BLOCK
        request.row = min(set(range(BATCH)) - {other.row for other in self.running})
        self.running.append(request)

    # ---- a step

    def step(self) -> None:
        while self.waiting and len(self.running) < BATCH:
            self.admit(self.waiting.pop(0))
        self.did["steps"] += 1
        if self.did["steps"] == HASTY:
            self.preempt(self.running[-1])
        counts = [min(len(request.tokens) - request.fed, CHUNK) for request in self.running]
        for request, count in zip(self.running, counts, strict=True):
            while len(request.blocks) * BLOCK < request.fed + count:
                request.blocks.append(self.allocate())
            self.did["chunk"] += request.fed + count < len(request.tokens)
        self.did["decoded beside a prefill"] += 1 in counts and max(counts) > 1
        self.did["decoded"] += counts.count(1)
        logits = self.forward(counts)
        for i, (request, count) in enumerate(zip(list(self.running), counts, strict=True)):
            request.fed += count
            for end in range(BLOCK, request.fed + 1, BLOCK):
                rows = [request.seen[position] for position in range(end - BLOCK, end)]
                self.known.setdefault(tuple(request.tokens[:end]), (request.blocks[end // BLOCK - 1], rows))
            if request.fed == len(request.tokens):
                request.tokens.append(int(logits[i, count - 1].argmax()))
        ended = [request for request in self.running if len(request.tokens) == request.limit]
        self.capture.finish_many(
            [Finished(r.name, r.blocks, token_ids=r.tokens, finish_reason="length") for r in ended]
        )
        for request in ended:
            self.release(request)
            self.done.append(request)

    def forward(self, counts: list[int]) -> Array:
        """One batch: its rows padded to the longest, and what lies in the cache gathered by block table."""
        size, longest = len(counts), max(counts)
        past_length = max(request.fed for request in self.running)
        steps = np.arange(longest)
        real = steps < np.array(counts)[:, None]
        fed = np.array([request.fed for request in self.running])
        tables = np.full((BATCH, COLUMNS), -1)
        tokens = np.zeros((size, longest), np.int64)
        for i, (request, count) in enumerate(zip(self.running, counts, strict=True)):
            tables[request.row, : len(request.blocks)] = request.blocks
            tokens[i, :count] = request.tokens[request.fed : request.fed + count]
        rows = np.array([request.row for request in self.running])[:, None]
        positions = np.where(real, fed[:, None] + steps, -1)
        slots = np.where(real, tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK, -1)
        before = np.arange(past_length)
        past = self.flat()[:, :, tables[rows, before // BLOCK] * BLOCK + before % BLOCK] if past_length else None
        looks = np.broadcast_to((before < fed[:, None])[:, None], (size, longest, past_length))
        causal = np.broadcast_to(steps <= steps[:, None], (size, longest, longest))
        mask = np.concatenate([looks, causal], axis=2)

        if self.watcher is not None:
            batch = np.broadcast_to(rows, positions.shape).ravel()
            assert np.array_equal(slots.ravel(), self.watcher.slots(tables, batch, positions.ravel()))
        logits, new = self.runner.forward(tokens, np.maximum(positions, 0), past, mask)
        self.capture.step(self.runner.tensor(slots.ravel()), self.runner.tensor(positions.ravel()))
        self.capture.flush(keep=1 if self.late else 0)

        self.flat()[:, :, slots[real]] = new[:, :, real]
        self.did["padded"] += int((~real).sum())
        chosen = np.stack([self.chosen[layer] for layer in self.runner.spec.moe_layers], axis=1)
        chosen = chosen.reshape(size, longest, *chosen.shape[1:])
        for i, (request, count) in enumerate(zip(self.running, counts, strict=True)):
            request.seen.update(enumerate(chosen[i, :count], request.fed))
        return logits

    def flat(self) -> Array:
        """The cache by slot."""
        layers, kinds, blocks, size, heads, width = self.cache.shape
        return self.cache.reshape(layers, kinds, blocks * size, heads, width)

    def preempt(self, request: Request) -> None:
        """What it was fed is stored, its blocks are given away, and it starts again."""
        self.capture.preempt(request.name, request.blocks, request.fed, request.tokens)
        request.stored = dict(request.seen)
        self.did["preempted"] += request.fed
        self.release(request)
        request.fed = 0
        self.waiting.insert(0, request)


def requests() -> list[Request]:
    """Prompts with a beginning in common and without, long and short answers, more of them than the cache can hold."""
    chance = np.random.default_rng(7)
    common = chance.integers(1, VOCABULARY, 35).tolist()
    made = []
    for i, (shared, own, answer) in enumerate(
        [(35, 6, 12), (0, 3, 30), (0, 50, 9), (35, 1, 1), (20, 40, 8), (0, 1, 5), (33, 0, 14), (0, 64, 2), (35, 9, 20)]
    ):
        tokens = common[:shared] + chance.integers(1, VOCABULARY, own).tolist()
        made.append(Request(f"p{i}:0:0:0", tokens, len(tokens) + answer))
    return made


@contextmanager
def serving(runner: Runner, root: Path, *, hooked: bool, late: bool, debug: bool = False) -> Iterator[PagedEngine]:
    """An engine whose capture writes into a dataset."""
    with ExitStack() as open_ones:
        spec = runner.spec
        writer = open_ones.enter_context(rr.RoutingWriter(root, OPTIONS, create=spec))
        name = f"real-{type(runner).__name__}-{root.parent.name}"
        table = open_ones.enter_context(
            SlotTable.create(name, BLOCKS, BLOCK, spec.num_layers, spec.top_k, spec.dtype, directory=root.parent)
        )
        capturer = StepCapturer(table, spec, STEP_TOKENS, debug=debug)
        capture = RoutingCapture(writer, table, capturer, strict=True)
        capture.set_weight_version("step-1")
        yield PagedEngine(runner, capture, capturer, hooked=hooked, late=late)
        writer.flush(timeout_s=60)


def whole_prefill(runner: Runner, tokens: list[int]) -> tuple[Array, Array]:
    """Ids [tokens, layers, top_k] and scores [tokens, layers, experts] without a cache."""
    found: dict[int, tuple[Array, Array]] = {}
    fed = np.array(tokens)[None]
    with runner.routers(lambda layer, ids, scores: found.__setitem__(layer, (ids.numpy(), scores.numpy()))):
        runner.forward(fed, np.arange(fed.size)[None], None, np.tril(np.ones((1, fed.size, fed.size), bool)))
    layers = [found[layer] for layer in runner.spec.moe_layers]
    return np.stack([ids for ids, _ in layers], axis=1), np.stack([scores for _, scores in layers], axis=1)


def check_capture(runner: Runner, root: Path, *, hooked: bool, late: bool) -> str:
    """Every record is what the second hook saw, and what a whole prefill chooses; how many rows that was."""
    with serving(runner, root, hooked=hooked, late=late) as engine:
        engine.run(requests())
        for what in ("hit", "chunk", "evicted", "decoded", "decoded beside a prefill", "padded", "preempted"):
            assert engine.did[what], f"the schedule does not test {what}"
    stats = engine.capture.stats()
    assert (stats.records, dict(stats.dropped), dict(stats.faults)) == (len(engine.done), {}, {})
    dataset = rr.open_dataset(root)
    rows = near = swapped = 0
    for request in engine.done:
        record = dataset.get(request.name)
        total = len(request.tokens) - 1  # the last one was never fed
        assert (record.num_tokens, record.missing, record.status) == (total, (), "complete")
        assert record.weights == ((0, total, "step-1"),)
        assert record.token_ids is not None
        assert record.token_ids.tolist() == request.tokens[:-1]
        assert record.layers == runner.spec.moe_layers
        experts = record.to_numpy("TLK")
        naive = {**request.seen, **request.stored}
        assert np.array_equal(experts, np.stack([naive[position] for position in range(total)]))

        ids, scores = whole_prefill(runner, request.tokens[:-1])
        ranked = np.sort(scores, axis=-1)[..., ::-1]
        close = ranked[..., runner.spec.top_k - 1] - ranked[..., runner.spec.top_k] <= MARGIN
        differs = (np.sort(experts, axis=-1) != np.sort(ids, axis=-1)).any(axis=-1)
        # What swapped by noise changes what later layers see, at that token and after it.
        upset = np.logical_or.accumulate(np.logical_or.accumulate(differs, axis=0), axis=1)
        upset = np.pad(upset, ((0, 0), (1, 0)))[:, :-1]
        assert not (differs & ~close & ~upset).any(), f"{request.name}: the cache chose otherwise, with no tie"
        rows, near, swapped = rows + differs.size, near + int(close.sum()), swapped + int(differs.sum())
    assert {problem.kind for problem in rr.verify(root, positions=True).problems} == {"positions"}
    return f"{len(engine.done)} requests, {rows} rows of a layer, {near} nearer than {MARGIN}, {swapped} swapped; {dict(engine.did)}"


def check_positions(runner: Runner, root: Path) -> None:
    """Debug mode writes positions, and `verify` finds nothing else."""
    with serving(runner, root, hooked=True, late=True, debug=True) as engine:
        engine.run(requests())
    assert rr.verify(root, positions=True).problems == ()
