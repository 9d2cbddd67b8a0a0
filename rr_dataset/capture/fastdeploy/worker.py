"""FastDeploy's tree whose routing manager lives in the worker: register, positions, host cache, put when finished."""

from __future__ import annotations

import os
from collections import Counter
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.capture.capturer import StepCapturer
from rr_dataset.capture.fastdeploy.config import open_writer
from rr_dataset.capture.fastdeploy.ids import record_id_of
from rr_dataset.capture.fastdeploy.shared import open_table, table_name
from rr_dataset.capture.faults import Faults
from rr_dataset.capture.manager import Finished, RoutingCapture
from rr_dataset.capture.watcher import BlockWatcher
from rr_dataset.errors import InvalidInputError
from rr_dataset.record import RoutingSpec
from rr_dataset.writer import RoutingWriter

SUSPEND = "FD_SUSPEND_ROUTING_REPLAY"  # FastDeploy's environment variable
FOREIGN = "foreign request ids"
UNSEEN_END = "its end was not seen"
CLEARED = 16  # times the rows of the batch: so many preempted requests wait for their turn, an older one was aborted

Positions = list[npt.NDArray[np.int64]]


class RoutingReplayManager:
    """The hooks of a worker. On tensor-parallel ranks but the first every call returns at once.

    Where blocks may be given content that this worker did not compute (a cache on the host or in a store, a prefill engine),
    nothing tells such a block from a prefix hit here: then rows of blocks that a request has not fed itself are missing.

    A caller's fault never raises into serving: it is logged and counted in `capture.stats()`.
    """

    def __init__(
        self, fd_config: Any, block_table: Any, total_block_num: int, writer: RoutingWriter | None = None
    ) -> None:
        """block_table: [max_num_seqs, blocks of a request], a tensor that the worker keeps up to date.

        writer: one that is open already; else that of the config is opened, and closed by `close`.
        """
        self.tp_rank: int = fd_config.parallel_config.tensor_parallel_rank
        self.max_num_seqs: int = fd_config.scheduler_config.max_num_seqs
        self.block_table = block_table
        self.counts: Counter[str] = Counter()
        self.routing_batch_to_request: dict[int, str] = {}  # the record's id, "" of a foreign request
        self._cleared: dict[str, None] = {}  # and not registered again so far, the oldest first
        self._fed = np.zeros(self.max_num_seqs, np.int64)
        self._unsure = np.zeros(self.max_num_seqs, np.int64)  # of these, at the end: drafts that may have been rejected
        self._drafts = max_drafts(fd_config)
        self._hits_are_sure = not _content_from_elsewhere(fd_config)
        self._none = np.empty(0, np.int64)
        self._slots: npt.NDArray[np.int64] = self._none
        self._own = writer is None
        self.writer = None if self.tp_rank else writer or open_writer(fd_config)
        if self.writer is None:
            self.spec = RoutingSpec.from_config(fd_config.model_config)
            self.capture, self.faults = None, Faults()
            return
        self.spec = self.writer.dataset.spec
        size = fd_config.cache_config.block_size
        self.table = open_table(
            table_name(fd_config), total_block_num, size, self.spec.num_layers, self.spec.top_k, self.spec.dtype
        )
        longest: int = fd_config.model_config.max_model_len
        self._watcher = BlockWatcher(self.table, self.max_num_seqs, max(int(block_table.shape[1]), -(-longest // size)))
        self._capturer = StepCapturer(
            self.table,
            self.spec,
            max_step_tokens(fd_config),
            debug=bool(getattr(fd_config.routing_replay_config, "debug_mode", False)),
        )
        self.capture = RoutingCapture(self.writer, self.table, self._capturer)
        self.faults = self.capture.faults

    # ---- the forward

    def get_routing_table(self) -> RoutingReplayManager:
        """What `save_routing_to_buffer` writes to."""
        return self

    def save(self, topk_ids: Any, layer_idx: int, num_tokens: int) -> None:
        """Keep what a layer chose; layer_idx counts from the first MoE layer, dense ones between included."""
        if self.capture is not None:
            first = self.spec.moe_layers[0]
            self.faults.attempt("record", lambda: self._capturer.record(first + layer_idx, topk_ids, num_tokens))

    # ---- requests

    def register_request(self, batch_id: int, request_id: str) -> None:
        """A request begins in a row of the batch; chunks of its prefill repeat this."""
        self.faults.attempt("register_request", self._register, batch_id, request_id)

    def _register(self, batch_id: int, request_id: str) -> None:
        self._check_row(batch_id)
        record_id = record_id_of(request_id) or ""
        before = self.routing_batch_to_request.get(batch_id)
        if self.capture is None or before == record_id != "":
            return
        if before:
            self._end_unseen(self.capture, before)
        self._cleared.pop(record_id, None)
        self._forget(batch_id)
        self.routing_batch_to_request[batch_id] = record_id
        if record_id:
            self.capture.register(record_id)
        elif before is None:
            self.counts[FOREIGN] += 1

    def clear_request(self, batch_id: int) -> None:
        """A request was preempted: what the model chose for it so far is stored, and it goes on when it is registered again.

        An abort may be told by this alone: the oldest of CLEARED * max_num_seqs that have not come back leaves a drop row.
        With speculative decoding that is without the last step's drafts, since nothing says here which of them were accepted.
        """
        self.faults.attempt("clear_request", self._clear_request, batch_id)

    def _clear_request(self, batch_id: int) -> None:
        self._check_row(batch_id)
        record_id = self.routing_batch_to_request.pop(batch_id, "")
        if self.capture is not None and record_id:
            blocks = self.faults.attempt("clear_request", lambda: self._own_blocks(batch_id, self._blocks()))
            sure = int(self._fed[batch_id] - self._unsure[batch_id])
            self.capture.preempt(record_id, () if blocks is None else blocks, sure)
            self._cleared[record_id] = None
            if len(self._cleared) > CLEARED * self.max_num_seqs:
                oldest = next(iter(self._cleared))
                del self._cleared[oldest]
                self._end_unseen(self.capture, oldest)
        self._forget(batch_id)

    def _end_unseen(self, capture: RoutingCapture, record_id: str) -> None:
        self.counts[UNSEEN_END] += 1
        capture.abort(record_id, reason=UNSEEN_END)

    def _check_row(self, batch_id: int) -> None:
        if not 0 <= batch_id < self.max_num_seqs:
            raise InvalidInputError(f"row {batch_id!r} of the batch: expected 0 to {self.max_num_seqs - 1}")

    def clear_all_request(self) -> None:
        """The engine forgets its requests and its cache; those in flight leave a drop row each."""
        self.routing_batch_to_request, self._cleared = {}, {}
        if self.capture is not None:
            self._watcher.forget(slice(None))
            self._fed[:] = self._unsure[:] = 0
            self.capture.reset()

    def update_suspend_routing_replay(self) -> None:
        """Suspend or resume as the environment says; what is fed meanwhile is missing."""
        if self.capture is not None:
            if os.environ.get(SUSPEND, "0") not in ("", "0"):
                self.capture.suspend()
            else:
                self.capture.resume()

    # ---- steps

    def get_token_positions(self, seq_lens_decoder: Any, seq_lens_this_time: Any) -> Positions:
        """Before the forward: the positions each row of the batch feeds. Blocks that get new content are recycled here."""
        self._slots = self._none
        if self.capture is not None:
            self._capturer.skip()  # what dummy and profile runs have recorded
        return self.faults.attempt("get_token_positions", self._positions, seq_lens_decoder, seq_lens_this_time) or []

    def _positions(self, seq_lens_decoder: Any, seq_lens_this_time: Any) -> Positions:
        starts, counts = _flat(seq_lens_decoder), _flat(seq_lens_this_time)
        if len(starts) != len(counts) or len(starts) > self.max_num_seqs or (counts < 0).any():
            raise InvalidInputError(
                f"{len(starts)} starts and {len(counts)} counts of at most {self.max_num_seqs} rows, over 0"
            )
        positions = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        if self.capture is not None and positions:
            rows = np.repeat(np.arange(len(positions)), counts)
            self._slots = np.full(len(rows), -1, np.int64)
            found = self.faults.attempt(
                "get_token_positions", lambda: self._watcher.slots(self._blocks(), rows, np.concatenate(positions))
            )
            self._slots = self._slots if found is None else found
            fed = starts + counts
            self._fed[: len(fed)][counts > 0] = fed[counts > 0]
            unsure = np.where(counts <= 1 + self._drafts, counts - 1, 0)  # more are a chunk of a prompt
            self._unsure[: len(fed)][counts > 0] = unsure[counts > 0]
        return positions

    def compute_slot_mapping(self, positions: Positions) -> Positions:
        """The slots of the positions that were fed, for each row of the batch."""
        return self.faults.attempt("compute_slot_mapping", self._mapping, positions) or []

    def _mapping(self, positions: Positions) -> Positions:
        if self.capture is None or sum(len(each) for each in positions) != len(self._slots):
            return [np.empty(0, np.int64) for _ in positions]
        return np.split(self._slots, np.cumsum([len(each) for each in positions])[:-1]) if positions else []

    def update_host_cache(self, positions: Positions, slot_mapping: Positions) -> None:
        """After the forward: its rows into the table, by slot."""
        if self.capture is not None:
            self.faults.attempt("update_host_cache", self._update, self.capture, positions, slot_mapping)

    def _update(self, capture: RoutingCapture, positions: Positions, slot_mapping: Positions) -> None:
        try:
            fed, slots = np.concatenate([*positions, self._none]), np.concatenate([*slot_mapping, self._none])
        except Exception:
            self._lose_step()
            raise
        if len(fed) != len(slots):
            self._lose_step()
            raise InvalidInputError(f"{len(slots)} slots for {len(fed)} positions")
        if len(slots):
            capture.step(slots, fed)
            capture.flush()

    def _lose_step(self) -> None:
        self._capturer.skip()
        self._capturer.forget(self._slots)

    def put_finished_batch(self, finished_batch_ids: Any, seq_lens_decoder: Any) -> None:
        """Requests end: each becomes one record, gathered straight into the spool. Call it before their blocks are given away.

        finished_batch_ids: a flag for each row of the batch. seq_lens_decoder: how long each is; rows that were never fed are
            missing, and where it says 0 the length is what was fed.
        """
        if self.capture is None:
            return
        with self.faults.held():
            flags = self.faults.attempt("put_finished_batch", _flat, finished_batch_ids)
            lengths = self.faults.attempt("put_finished_batch", _flat, seq_lens_decoder)
            blocks = self.faults.attempt("put_finished_batch", self._blocks)
            ended: list[Finished] = []
            for batch_id in [] if flags is None else np.flatnonzero(flags).tolist():
                end = self.faults.attempt("put_finished_batch", self._ended, batch_id, lengths, blocks)
                if end is not None:
                    ended.append(end)
            if ended:
                self.capture.finish_many(ended)

    def _ended(self, batch_id: int, lengths: Any, blocks: Any) -> Finished | None:
        """How the request in a row of the batch ends; where length or blocks are not told, with what is known."""
        record_id = self.routing_batch_to_request.pop(batch_id, None)
        if record_id is None:
            raise InvalidInputError(f"row {batch_id} of the batch ended, which no request was registered in")
        fed, unsure = int(self._fed[batch_id]), int(self._unsure[batch_id])
        own = self._own_blocks(batch_id, blocks)
        self._forget(batch_id)
        if not record_id:
            return None
        told = lengths is not None and batch_id < len(lengths)
        if not told:
            self.faults.tell(
                "put_finished_batch", InvalidInputError(f"row {batch_id} of the batch ended, and has no length")
            )
        length = int(lengths[batch_id]) if told else 0
        if not length:
            length, fed = fed, fed - unsure
        return Finished(record_id, own, min(fed, length), num_tokens=length)

    def close(self) -> None:
        """Requests in flight leave a drop row; everything else becomes durable. Raises what `RoutingWriter.close` raises."""
        if self.capture is not None:
            self.capture.close()
            self.table.close()
        if self._own and self.writer is not None:
            self.writer.close()

    def _blocks(self) -> npt.NDArray[Any]:
        table = self.block_table
        return np.asarray(table if isinstance(table, np.ndarray) else table.numpy())

    def _own_blocks(self, batch_id: int, blocks: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        """The blocks of a row of the batch whose rows are its request's, by their place in its block table."""
        if blocks is None or batch_id >= len(blocks):
            return self._none
        if self._hits_are_sure:
            return np.array(blocks[batch_id])
        fed = self._watcher.fed_blocks(batch_id)[: len(blocks[batch_id])]
        return np.where(fed == blocks[batch_id], fed, -1)

    def _forget(self, batch_id: int) -> None:
        if self.capture is not None:
            self._watcher.forget(batch_id)
            self._fed[batch_id] = self._unsure[batch_id] = 0


def initialize_routing_replay_manager(
    fd_config: Any, block_table: Any, total_block_num: int
) -> RoutingReplayManager | None:
    """The manager, if the config wants one. Call it after the KV cache was made."""
    wanted = fd_config.routing_replay_config.enable_routing_replay
    return RoutingReplayManager(fd_config, block_table, total_block_num) if wanted else None


def save_routing_to_buffer(
    routing_replay_table: RoutingReplayManager,
    topk_ids: Any,
    batch_id_per_token: Any,
    seq_lens_decoder: Any,  # noqa: ARG001 - FastDeploy's; rows lie in the order of the step, and positions come with it
    cu_seqlens_q: Any,  # noqa: ARG001
    layer_idx: int,
    tp_size: int,
    ep_size: int,
    tp_group: Any,
) -> None:
    """In the forward of a MoE layer; topk_ids: [tokens, top_k]. Where experts are parallel beside tensors, all ranks call it."""

    def save() -> None:
        num_tokens = int(batch_id_per_token.shape[0])
        routing_replay_table.save(gathered(topk_ids, tp_size, ep_size, tp_group), layer_idx, num_tokens)

    routing_replay_table.faults.attempt("record", save)


def max_step_tokens(fd_config: Any) -> int:
    """The most tokens that one step feeds."""
    most = getattr(fd_config, "get_max_chunk_tokens", None)
    return int(fd_config.scheduler_config.max_num_batched_tokens if most is None else most())


def _content_from_elsewhere(fd_config: Any) -> bool:
    cache, role = fd_config.cache_config, getattr(fd_config.scheduler_config, "splitwise_role", "mixed")
    stores = (getattr(cache, name, None) for name in ("enable_hierarchical_cache", "kvcache_storage_backend"))
    return role == "decode" or any(stores)


def max_drafts(fd_config: Any) -> int:
    """The most tokens that a step of one request feeds beyond what is certain; 0 without speculative decoding."""
    speculative: Any = getattr(fd_config, "speculative_config", None)
    return 0 if getattr(speculative, "method", None) is None else int(speculative.num_speculative_tokens)


def gathered(topk_ids: Any, tp_size: int, ep_size: int, tp_group: Any) -> Any:
    """[tokens, top_k] of all tensor-parallel ranks, in their order, where each has only its share."""
    if tp_size <= 1 or ep_size <= 1 or not topk_ids.shape[0]:
        return topk_ids
    paddle = import_module("paddle")
    everything = paddle.zeros([topk_ids.shape[0] * tp_size, topk_ids.shape[1]], dtype=topk_ids.dtype)
    paddle.distributed.all_gather(everything, topk_ids, tp_group)
    return everything


def _flat(value: Any) -> npt.NDArray[np.int64]:
    """Lengths or flags, [n, 1] or [n], on any device."""
    plain = np.asarray(value if isinstance(value, (np.ndarray, list, tuple)) else value.numpy()).reshape(-1)
    if plain.size and plain.dtype.kind not in "iub":
        raise InvalidInputError(f"lengths or flags of dtype {plain.dtype}: expected whole numbers")
    return plain.astype(np.int64)
