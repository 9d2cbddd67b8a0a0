"""A simulated engine that drives capture, and a naive oracle of it: a dict per request and position.

The engine has a block allocator with prefix cache and eviction, chunked prefill, decoding with drafts, preemption, swap, and
schedules that overlap. Every token that is fed gets a row of its own, so that no row can pass for another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

import rr_dataset as rr
from rr_dataset.capture.capturer import StepCapturer
from rr_dataset.capture.manager import Finished, RoutingCapture
from rr_dataset.capture.slots import SlotTable
from rr_dataset.capture.watcher import BlockWatcher
from rr_dataset.layout import DatasetFormat

SPEC = rr.RoutingSpec((3, 4), num_experts=256, top_k=2)
BLOCK = 4
BLOCKS = 14
HOST_BLOCKS = 6
BATCH = 4
MAX_TOKENS = 24

Row = tuple[int, ...]
Known = tuple[Row | None, str]  # the row, None if it cannot be known; the weights that made it


class FakeWriter:
    """What `RoutingCapture` asks of a writer, kept in lists."""

    def __init__(self) -> None:
        self.dataset = DatasetFormat("0" * 8 + "-0000-4000-8000-" + "0" * 12, SPEC, rr.KeyScheme.fastdeploy())
        self.parts: dict[str, list[SimpleNamespace]] = {}
        self.ends: Counter[str] = Counter()
        self.drops: dict[str, str] = {}

    @contextmanager
    def reserve(self, request_id: str, num_tokens: int, **said: Any) -> Iterator[SimpleNamespace]:
        experts = np.full((num_tokens, SPEC.num_layers, SPEC.top_k), 255, SPEC.dtype)
        record = SimpleNamespace(experts=experts, receipt=None, num_tokens=num_tokens, **said)
        yield record
        if record.token_ids is not None:
            assert len(record.token_ids) == num_tokens
        if not record.part:
            self.parts[request_id] = []
        self.parts.setdefault(request_id, []).append(record)
        self.ends[request_id] += record.status != "partial"

    def drop(self, request_id: str, reason: str, token_start: int = 0, part: bool = False) -> None:
        self.drops[request_id] = reason
        self.ends[request_id] += 1

    def known(self, request_id: str) -> tuple[dict[int, Known], int, str]:
        """Of the parts of a record, the first that has a position: rows and weights; its length; its status."""
        rows: dict[int, Known] = {}
        end = 0
        for part in self.parts[request_id]:
            gone = {p for start, stop in part.missing for p in range(start, stop)}
            for i in range(part.num_tokens):
                position = part.token_start + i
                if position in gone:
                    assert not part.experts[i].any(), "missing rows are zero"
                else:
                    row = tuple(part.experts[i].ravel().tolist())
                    rows.setdefault(position, (row, _version_at(part.weight_version, position)))
            end = part.token_start + part.num_tokens
        return rows, end, self.parts[request_id][-1].status


def _version_at(versions: Any, position: int) -> str:
    if versions is None or isinstance(versions, str):
        return versions or ""
    return next((version for start, stop, version in versions if start <= position < stop), "")


@dataclass(eq=False)
class Request:
    name: str
    tokens: list[int]
    limit: int  # tokens it may have in the end
    drafts: int
    captured: bool = True
    blocks: list[int] = field(default_factory=list)
    host: list[int] | None = None  # where its blocks are, swapped out
    fed: int = 0
    launched: int = 0
    batch: int = -1
    truth: dict[int, Known] = field(default_factory=dict)  # what its tokens were fed with, the last time
    stored: dict[int, Known] = field(
        default_factory=dict
    )  # and before it was saved or preempted, where that was stored
    reached: int = 0
    looked: int = 0  # positions before it are not saved again


@dataclass
class Launched:
    """A step whose results are not yet known to the scheduler."""

    spans: list[tuple[Request, int, int]]


class Engine:
    """Random schedules of it are a function of the seed."""

    def __init__(
        self,
        seed: int,
        writer: Any,
        *,
        hooked: bool = True,
        overlap: bool = False,
        prefix: str = "r",
        capturer: type[StepCapturer] = StepCapturer,
        table: type[SlotTable] = SlotTable,
    ) -> None:
        """hooked: the allocator tells of its blocks; else a watcher does. overlap: a step is launched before the last one is read."""
        self.random = random.Random(seed)
        self.hooked, self.overlap, self.prefix, self.writer = hooked, overlap, prefix, writer
        shape = (SPEC.num_layers, SPEC.top_k, SPEC.dtype)
        self.table = table.create(f"sim-{prefix}-{seed}", BLOCKS, BLOCK, *shape)
        self.swap = table.create(f"sim-{prefix}-{seed}-host", HOST_BLOCKS, BLOCK, *shape)
        self.capturer = capturer(self.table, SPEC, MAX_TOKENS)
        self.capture = RoutingCapture(writer, self.table, self.capturer, strict=True)
        self.watcher = BlockWatcher(self.table, BATCH, 16)
        self.free = list(range(BLOCKS))
        self.free_host = list(range(HOST_BLOCKS))
        self.owners: Counter[int] = Counter()
        self.cached: dict[tuple[int, ...], int] = {}  # what a block holds, by all tokens up to its end
        self.content: dict[tuple[int, int], Known] = {}  # block and offset
        self.swapped: dict[tuple[int, int], Known] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.in_flight: list[Launched] = []
        self.pending: list[list[tuple[int, int]]] = []  # places of steps whose rows may not yet be in the table
        self.expected: dict[str, tuple[dict[int, Known], int, str]] = {}
        self.dropped: set[str] = set()
        self.opted_out: set[str] = set()
        self.count = self.rows = 0
        self.version, self.suspended = "", False

    def close(self) -> None:
        self.table.close()
        self.swap.close()

    # ---- the allocator

    def allocate(self) -> int | None:
        if self.free:
            block = self.free.pop(self.random.randrange(len(self.free)))
        else:
            idle = [(key, block) for key, block in self.cached.items() if not self.owners[block]]
            if not idle:
                return None
            key, block = self.random.choice(idle)
            del self.cached[key]
        if self.hooked:
            self.table.recycle([block])
        for offset in range(BLOCK):
            self.content.pop((block, offset), None)
        self.owners[block] = 1
        return block

    def release(self, request: Request) -> None:
        held = set(self.cached.values())
        for block in request.blocks:
            self.owners[block] -= 1
            if not self.owners[block] and block not in held:
                self.free.append(block)
        request.blocks = []

    def remember(self, request: Request) -> None:
        """Full blocks are found by requests with the same beginning."""
        for i in range(request.fed // BLOCK):
            self.cached.setdefault(tuple(request.tokens[: (i + 1) * BLOCK]), request.blocks[i])

    def admit(self, request: Request) -> None:
        for i in range((len(request.tokens) - 1) // BLOCK):
            block = self.cached.get(tuple(request.tokens[: (i + 1) * BLOCK]))
            if block is None:
                break
            self.owners[block] += 1
            request.blocks.append(block)
            for offset in range(BLOCK):
                request.truth[i * BLOCK + offset] = self.content[block, offset]
        request.fed = request.launched = len(request.blocks) * BLOCK
        taken = {other.batch for other in self.running}
        request.batch = next(i for i in range(BATCH) if i not in taken)
        self.watcher.forget(request.batch)
        self.running.append(request)

    # ---- a step

    def step(self) -> None:
        while self.waiting and len(self.running) < BATCH and self.random.random() < 0.7:
            self.admit(self.waiting.pop(0))
        self.act()
        launched = self.launch()
        if launched is not None:
            self.in_flight.append(launched)
        while len(self.in_flight) > (1 if self.overlap and launched is not None else 0):
            self.process(self.in_flight.pop(0))

    def act(self) -> None:
        """Something that happens now and then."""
        at = self.random.random()
        idle = [r for r in self.running if r.launched == r.fed]
        request = self.random.choice(idle) if idle else None
        if at < 0.05 and request:
            self.preempt(request)
        elif at < 0.12 and request and self.hooked:
            self.swap_out(request)
        elif at < 0.16 and request:
            self.abort(request)
        elif at < 0.19:
            self.version = f"w{self.count}.{self.rows}"
            self.capture.set_weight_version(self.version)
        elif at < 0.22:
            self.suspended = not self.suspended
            (self.capture.suspend if self.suspended else self.capture.resume)()
            self.pending = []
        elif at < 0.23 and not self.in_flight:
            self.reset()
        elif at < 0.30:  # a dummy run
            self.record(np.full((self.random.randrange(1, MAX_TOKENS), SPEC.num_layers, SPEC.top_k), 9))
            self.capturer.skip()
        elif at < 0.33 and request and request.host is None:
            self.save(request)
        elif at < 0.60:
            self.flush()

    def record(self, rows: np.ndarray) -> None:
        for i, layer in enumerate(SPEC.moe_layers):
            self.capture.record(layer, rows[:, i])
        self.capture.record(61, rows[:, 0] * 0)  # a draft model's layer

    def flush(self) -> None:
        self.capture.flush()
        self.pending = []

    def launch(self) -> Launched | None:
        spans: list[tuple[Request, int, int]] = []
        left = MAX_TOKENS - 6
        for request in list(self.running):
            if request not in self.running or request.host is not None or left <= 0:
                continue
            want = len(request.tokens) - request.launched
            if want > 0:  # a chunk of its prompt, or the last token and drafts
                want = min(self.random.randrange(1, want + 1), left)
                if request.launched + want == len(request.tokens) and not self.overlap:
                    want += self.random.randrange(request.drafts + 1)
            elif self.overlap and request.launched == request.fed + 1:  # whose token the last step will tell
                want = 1
            if want > 0 and self.provide(request, request.launched + want):
                spans.append((request, request.launched, request.launched + want))
                request.launched += want
                left -= want
        spans = [span for span in spans if span[0] in self.running and span[0].host is None]
        if not spans:
            return None
        self.feed(spans)
        return Launched(spans)

    def provide(self, request: Request, tokens: int) -> bool:
        while len(request.blocks) * BLOCK < tokens:
            block = self.allocate()
            if block is None:
                if request.launched == request.fed and len(self.running) > 1:
                    self.preempt(request)
                return False
            request.blocks.append(block)
        return True

    def feed(self, spans: list[tuple[Request, int, int]]) -> None:
        places, rows, batch, positions = [], [], [], []
        tables = np.full((BATCH, 16), -1)
        for request, start, stop in spans:
            tables[request.batch, : len(request.blocks)] = request.blocks
            for position in range(start, stop):
                self.rows += 1
                row = tuple(self.rows // 251**i % 251 for i in range(SPEC.num_layers * SPEC.top_k))
                place = (request.blocks[position // BLOCK], position % BLOCK)
                self.content[place] = (None if self.suspended else row, self.version)
                places.append(place)
                rows.append(row)
                batch.append(request.batch)
                positions.append(position)
        padding = self.random.randrange(4)
        array = np.array(rows + [(7,) * len(rows[0])] * padding).reshape(-1, SPEC.num_layers, SPEC.top_k)
        self.record(array)
        if self.hooked:
            slots = np.array([block * BLOCK + offset for block, offset in places] + [-1] * padding)
        else:
            slots = self.watcher.slots(tables, np.array(batch + [0] * padding), np.array(positions + [-1] * padding))
        if self.random.random() < 0.5:
            self.capture.step(slots)
        else:
            self.capture.step(slots[: len(rows)] if self.hooked else slots, num_tokens=len(rows))
        self.pending = [*self.pending, places][-2:]

    def process(self, step: Launched) -> None:
        """The results of a step: tokens are sampled, drafts accepted, requests end."""
        ended: list[Request] = []
        for request, start, stop in step.spans:
            if request not in self.running:
                continue
            drafts = max(stop - len(request.tokens), 0)
            accepted = self.random.randrange(drafts + 1)
            request.tokens += [self.random.randrange(50) for _ in range(accepted)]
            request.fed = stop - drafts + accepted
            for position in range(start, request.fed):
                request.truth[position] = self.content[request.blocks[position // BLOCK], position % BLOCK]
            if not self.overlap:
                request.launched = request.fed
            if request.fed == len(request.tokens):
                request.tokens.append(self.random.randrange(50))
                if len(request.tokens) >= request.limit or self.random.random() < 0.1:
                    ended.append(request)
            self.remember(request)
        if ended:
            self.finish(ended)

    # ---- ends

    def finish(self, ended: list[Request]) -> None:
        ends = []
        for request in ended:
            # As long as the record is, more tokens may be counted than were fed.
            total = request.fed + self.random.randrange(2)
            reason = self.random.choice(["stop", "length"])
            ends.append(Finished(request.name, request.blocks, request.fed, reason, list(request.tokens), total))
            self.expect(request, total, "complete")
        self.capture.finish_many(ends, steps_ahead=len(self.in_flight))
        self.pending = self.pending[-1:] if self.in_flight else []
        for request in ended:
            self.leave(request)

    def expect(self, request: Request, total: int, status: str) -> None:
        if request.captured:
            fed = {position: known for position, known in request.truth.items() if position < request.fed}
            known = {**fed, **request.stored}
            if any(row is not None for row, _ in known.values()):
                self.expected[request.name] = (known, max(total, request.reached), status)
            else:  # suspended all the time
                self.dropped.add(request.name)
        else:
            self.opted_out.add(request.name)

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.release(request)
        if request.host is not None:
            self.free_host += request.host
        self.watcher.forget(request.batch)

    def abort(self, request: Request) -> None:
        if request.fed and request.host is None and self.random.random() < 0.7:
            self.expect(request, request.fed, "aborted")
            self.capture.abort(request.name, request.blocks, request.fed, list(request.tokens))
            self.pending = []
        else:
            (self.dropped if request.captured else self.opted_out).add(request.name)
            self.capture.abort(request.name)
        self.leave(request)

    def preempt(self, request: Request) -> None:
        if request.host is not None:
            return
        if request.fed and self.random.random() < 0.5:
            self.capture.preempt(request.name, request.blocks, request.fed, list(request.tokens))
            self.saved(request, 0)
        else:
            self.capture.preempt(request.name)
        self.leave(request)
        request.fed = request.launched = 0
        self.waiting.insert(0, request)

    def save(self, request: Request) -> None:
        self.capture.save(request.name, request.blocks, request.fed, list(request.tokens))
        self.saved(request, request.looked)

    def saved(self, request: Request, start: int) -> None:
        """What the request was fed from there on is stored, unless something of it was before."""
        self.flush()
        for position in range(start, request.fed):
            if request.truth[position][0] is not None:
                request.stored.setdefault(position, request.truth[position])
        if request.stored:
            request.reached = max(request.reached, request.fed)
            request.looked = max(request.looked, request.fed)

    def swap_out(self, request: Request) -> None:
        if request.host is not None:
            if self.random.random() < 0.7:
                self.swap_in(request)
            return
        if len(request.blocks) > len(self.free_host):
            return
        if self.random.random() < 0.7:
            self.flush()
        lost = {place for step in self.pending for place in step}
        request.host = [self.free_host.pop() for _ in request.blocks]
        for block, host in zip(request.blocks, request.host, strict=True):
            for offset in range(BLOCK):
                row, version = self.content.get((block, offset), (None, ""))
                self.swapped[host, offset] = (None if (block, offset) in lost else row, version)
        self.table.move(request.blocks, self.swap, request.host)
        self.release(request)

    def swap_in(self, request: Request) -> None:
        idle = sum(not self.owners[block] for block in self.cached.values())
        host = request.host
        if host is None or len(self.free) + idle < len(host):
            return
        request.host = None
        self.provide(request, len(host) * BLOCK)
        self.swap.move(host, self.table, request.blocks)
        self.free_host += host
        for i, (block, place) in enumerate(zip(request.blocks, host, strict=True)):
            for offset in range(BLOCK):
                known = self.content[block, offset] = self.swapped[place, offset]
                if i * BLOCK + offset < request.fed:
                    request.truth[i * BLOCK + offset] = known

    def reset(self) -> None:
        self.capture.reset()
        for request in self.running + self.waiting:
            (self.dropped if request.captured else self.opted_out).add(request.name)
        self.running, self.waiting, self.pending = [], [], []
        self.free, self.free_host = list(range(BLOCKS)), list(range(HOST_BLOCKS))
        self.owners, self.cached, self.content = Counter(), {}, {}

    # ---- the whole

    def arrive(self) -> None:
        """A request, often with the beginning of another."""
        length = self.random.randrange(1, 18)
        stem = [1] * self.random.randrange(length + 1) if self.random.random() < 0.7 else []
        tokens = (stem + [self.random.randrange(50) for _ in range(length)])[:length]
        answer = self.random.choice([1, 1, 3, 8])
        request = Request(
            f"{self.prefix}{self.count}:0:0:0",
            tokens,
            length + answer,
            self.random.randrange(3),
            self.random.random() < 0.9,
        )
        self.count += 1
        self.capture.register(request.name, capture=request.captured)
        self.waiting.append(request)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.random.random() < 0.5 and len(self.waiting) < 3:
                self.arrive()
            self.step()
        while self.in_flight:
            self.process(self.in_flight.pop(0))
        self.capture.close()
        for request in self.running + self.waiting:
            (self.dropped if request.captured else self.opted_out).add(request.name)


def check(engine: Engine, known: Mapping[str, tuple[dict[int, Known], int, str]]) -> int:
    """Every record is the oracle's, and misses only what could not be known; how many rows there were."""
    rows = 0
    for name, (truth, total, status) in engine.expected.items():
        found, end, found_status = known[name]
        assert (end, found_status) == (total, status), name
        for position in range(total):
            row, version = truth.get(position, (None, ""))
            if position in found:
                assert found[position] == (row, version), f"{name} at {position}"
                rows += 1
            else:
                assert row is None, f"{name} misses {position}"
    return rows
