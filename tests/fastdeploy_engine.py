"""FastDeploy as far as routing goes: a block allocator with prefix cache and eviction, chunked prefill, and the call
sequences of both generations of its tree. A token's routing is a function of it and all tokens before it, so no row can
pass for another's.
"""

from __future__ import annotations

import random
import uuid
import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

import rr_dataset as rr
from rr_dataset.capture import fastdeploy as fd

SPEC = rr.RoutingSpec((1, 2, 4), num_experts=200, top_k=2)  # layer 3 is dense, between MoE layers
MODEL = {
    "num_hidden_layers": 6,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "dense"],
    "num_experts": 200,
    "num_experts_per_tok": 2,
    "moe_layer_start_index": 0,
}
BLOCK, BATCH, CHUNK, LONGEST = 4, 6, 8, 64


def fd_config(uri: Any, **changes: Any) -> SimpleNamespace:
    config = {"enable_routing_replay": True, "routing_store_type": "dataset", "dataset_uri": str(uri), **changes}
    return SimpleNamespace(
        routing_replay_config=fd.RoutingReplayConfig(config),
        model_config=SimpleNamespace(**MODEL, max_model_len=LONGEST),
        scheduler_config=SimpleNamespace(max_num_seqs=BATCH, max_num_batched_tokens=256, enable_overlap_schedule=False),
        parallel_config=SimpleNamespace(tensor_parallel_rank=0, local_engine_worker_queue_port=uuid.uuid4().hex[:12]),
        cache_config=SimpleNamespace(block_size=BLOCK),
    )


def engine_id(rollout: str, index: int = 0) -> str:
    return f"chatcmpl-{rollout}-{uuid.uuid4()}_{index}"


def row(tokens: list[int]) -> Any:
    """[layers, top_k] of the last of these tokens."""
    seed = zlib.crc32(np.array(tokens, np.int32).tobytes())
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(SPEC.num_experts)[: SPEC.top_k] for _ in SPEC.moe_layers])


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: list[int]
    answer: int  # tokens it will have, the last one an EOS or not
    eos: bool = True
    batch: int = -1
    fed: int = 0
    rejected: int = 0  # drafts at the end of its last step
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.request_id)
        self.tokens = self.prompt + [rng.randrange(1000) for _ in range(self.answer)]

    @property
    def last(self) -> int:
        """How many tokens are fed: all but the last that was sampled."""
        return len(self.tokens) - 1

    def expected(self) -> Any:
        """[layers, tokens, top_k]."""
        return np.stack([row(self.tokens[: i + 1]) for i in range(self.last)], axis=1)


class Engine:
    """The scheduler and its allocator; subclasses call the hooks of a tree."""

    drafts = 0  # of a step of a request at most; they may be rejected

    def __init__(self, num_blocks: int = 40) -> None:
        self.free = list(range(num_blocks))
        self.users = dict.fromkeys(range(num_blocks), 0)
        self.cached: dict[tuple[int, ...], int] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.running: list[Request | None] = [None] * BATCH
        self.block_table = np.full((BATCH, LONGEST // BLOCK), -1, np.int32)
        self.hits = 0

    # hooks
    def allocated(self, blocks: list[int]) -> None: ...
    def registered(self, request: Request) -> None: ...
    def step(self, batch: list[tuple[Request, int]]) -> None: ...
    def ended(self, requests: list[Request]) -> None: ...
    def preempted(self, request: Request) -> None: ...
    def aborted(self, request: Request) -> None: ...

    def _take(self) -> int | None:
        if not self.free:
            return None
        block = self.free.pop(0)
        if block in self.content:  # evicted from the prefix cache
            del self.cached[self.content.pop(block)]
        return block

    def _start(self, request: Request, batch: int) -> None:
        request.batch, request.fed, request.blocks, request.rejected = batch, 0, [], 0
        for end in range(BLOCK, len(request.prompt), BLOCK):
            block = self.cached.get(tuple(request.tokens[:end]))
            if block is None:
                break
            if self.users[block] == 0:
                self.free.remove(block)
            self.users[block] += 1
            request.blocks.append(block)
            request.fed = end
            self.hits += 1
        self.running[batch] = request
        self.registered(request)

    def _grow(self, request: Request, stop: int) -> bool:
        new = []
        while len(request.blocks) * BLOCK < stop:
            block = self._take()
            if block is None:
                self.allocated(new)
                return False
            self.users[block] = 1
            request.blocks.append(block)
            new.append(block)
        self.allocated(new)
        return True

    def release(self, request: Request) -> None:
        for i, block in enumerate(request.blocks):
            key = tuple(request.tokens[: (i + 1) * BLOCK])
            if (i + 1) * BLOCK <= request.fed and key not in self.cached and block not in self.content:
                self.cached[key], self.content[block] = block, key
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)
        self.running[request.batch] = None
        self.block_table[request.batch] = -1
        request.blocks = []

    def run(self, waiting: list[Request], rng: random.Random, *, preempt: float = 0, abort: float = 0) -> list[Request]:
        """Run all to their ends; those that were aborted."""
        waiting, aborted = list(waiting), []
        while waiting or any(self.running):
            for batch in range(BATCH):
                if self.running[batch] is None and waiting and len(self.free) > 6:
                    self._start(waiting.pop(0), batch)
            fed: list[tuple[Request, int]] = []
            for request in [r for r in self.running if r]:
                count, request.rejected = min(CHUNK, len(request.prompt) - request.fed), 0
                if count <= 0:
                    drafts = rng.randrange(self.drafts + 1)
                    accepted = min(rng.randrange(drafts + 1), request.last - request.fed - 1)
                    count, request.rejected = 1 + drafts, drafts - accepted
                if rng.random() < abort:
                    self.aborted(request)
                    aborted.append(request)
                    self.release(request)
                elif rng.random() < preempt or not self._grow(request, request.fed + count):
                    self.preempted(request)
                    self.release(request)
                    waiting.insert(0, request)
                else:
                    self.block_table[request.batch, : len(request.blocks)] = request.blocks
                    self.registered(request)
                    fed.append((request, count))
            if fed:
                self.step(fed)
            for request, count in fed:
                request.fed += count - request.rejected
            done = [request for request, _ in fed if request.fed >= request.last]
            self.ended(done)
            for request in done:
                self.release(request)
        return aborted


def packed(batch: list[tuple[Request, int]]) -> tuple[Any, Any, Any]:
    """Of a step in the order of its batch: rows [tokens, layers, top_k], slots, positions."""
    spans = [(request, position) for request, count in batch for position in range(request.fed, request.fed + count)]
    kept = {request.request_id: request.fed + count - request.rejected for request, count in batch}
    rows = np.stack(
        [row([*r.tokens[: min(p + 1, kept[r.request_id])], *[-1] * (p >= kept[r.request_id])]) for r, p in spans]
    )
    slots = np.array([request.blocks[p // BLOCK] * BLOCK + p % BLOCK for request, p in spans])
    return rows, slots, np.array([p for _, p in spans])


class TreeA(Engine):
    """The calls of the worker whose manager does everything."""

    def __init__(self, manager: fd.RoutingReplayManager, num_blocks: int = 40) -> None:
        super().__init__(num_blocks)
        self.manager = manager
        manager.block_table = self.block_table

    def registered(self, request: Request) -> None:
        self.manager.register_request(request.batch, request.request_id)

    def step(self, batch: list[tuple[Request, int]]) -> None:
        self.forward(np.zeros((3, SPEC.num_layers, SPEC.top_k), np.int64))  # a dummy run between steps
        starts, counts = np.zeros((BATCH, 1), np.int32), np.zeros((BATCH, 1), np.int32)
        for request, count in batch:
            starts[request.batch], counts[request.batch] = request.fed, count
        order = sorted(batch, key=lambda each: each[0].batch)
        positions = self.manager.get_token_positions(starts, counts)
        self.forward(packed(order)[0])
        self.manager.update_host_cache(positions, self.manager.compute_slot_mapping(positions))

    def forward(self, rows: Any) -> None:
        padded = np.concatenate([rows, np.full((2, *rows.shape[1:]), 7)])  # rows of a CUDA graph's padding
        for at, layer in enumerate(SPEC.moe_layers):
            batch_ids = np.zeros(len(padded), np.int32)
            table = self.manager.get_routing_table()
            fd.save_routing_to_buffer(table, padded[:, at], batch_ids, None, None, layer - 1, 1, 1, None)

    def ended(self, requests: list[Request]) -> None:
        flags, lengths = np.zeros((BATCH, 1), bool), np.zeros((BATCH, 1), np.int32)
        for request in requests:
            flags[request.batch] = True
            lengths[request.batch] = request.fed if request.answer > 1 else 0  # one-token EOS: not yet counted there
        self.manager.put_finished_batch(flags, lengths)

    def preempted(self, request: Request) -> None:
        self.manager.clear_request(request.batch)

    def aborted(self, request: Request) -> None:
        self.manager.clear_request(request.batch)


class TreeB(Engine):
    """The calls of a worker and of the engine, which share a table."""

    def __init__(self, worker: fd.RoutedExpertsCapturer, manager: fd.RoutingCacheManager, num_blocks: int = 40) -> None:
        super().__init__(num_blocks)
        self.worker, self.manager = worker, manager

    def allocated(self, blocks: list[int]) -> None:
        self.manager.recycle(blocks)

    def step(self, batch: list[tuple[Request, int]]) -> None:
        self.forward(np.zeros((3, SPEC.num_layers, SPEC.top_k), np.int64))
        self.worker.prepare_pending_save(0, np.empty(0, np.int64))
        rows, slots, positions = packed(batch)
        self.forward(rows)
        self.worker.prepare_pending_save(len(rows), slots, positions)
        self.worker.flush_pending_save()

    def forward(self, rows: Any) -> None:
        buffer = self.worker.get_device_routing_buffer()
        for at, layer in enumerate(SPEC.moe_layers):
            fd.save_routing_to_buffer_v2(buffer, rows[:, at], layer - 1, 1, 1, None, len(rows))

    def ended(self, requests: list[Request]) -> None:
        for request in requests:
            seq_len = len(request.tokens) - request.eos  # stopped by length: the last token was counted and never fed
            self.manager.on_request_finished(request.request_id, request.blocks, seq_len)

    def aborted(self, request: Request) -> None:
        self.manager.on_request_aborted(request.request_id, request.blocks, request.fed)
