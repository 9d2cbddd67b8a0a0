"""FastDeploy's tree of three processes: the worker captures into a shared table, the engine gathers from it by block table."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.capture.capturer import StepCapturer
from rr_dataset.capture.fastdeploy.config import DATASET, open_writer
from rr_dataset.capture.fastdeploy.ids import record_id_of
from rr_dataset.capture.fastdeploy.shared import marked, open_table, table_name, wire_dtype
from rr_dataset.capture.fastdeploy.worker import FOREIGN, gathered, max_drafts, max_step_tokens
from rr_dataset.capture.faults import Faults
from rr_dataset.capture.manager import RoutingCapture
from rr_dataset.capture.slots import Blocks, SlotTable
from rr_dataset.contracts.arrays import minus_one
from rr_dataset.errors import InvalidInputError
from rr_dataset.record import RoutingSpec
from rr_dataset.writer import RoutingWriter

NO_ALLOCATOR = "nothing tells which blocks were reused: call RoutingCacheManager.recycle where blocks are allocated"
ENDED_TWICE = "requests that ended twice"
MAX_ENDED = 100_000  # that are known to have ended


def _open(fd_config: Any, spec: RoutingSpec, num_blocks: int) -> SlotTable:
    size = fd_config.cache_config.block_size
    return open_table(table_name(fd_config), num_blocks, size, spec.num_layers, spec.top_k, spec.dtype)


class RoutedExpertsCapturer:
    """The worker's side. On tensor-parallel ranks but the first every call returns at once."""

    def __init__(self, fd_config: Any, total_block_num: int) -> None:
        """total_block_num: of the KV cache on the device."""
        config = fd_config.routing_replay_config
        self.spec = RoutingSpec.from_config(fd_config.model_config)
        self.tp_rank: int = fd_config.parallel_config.tensor_parallel_rank
        self.token_num_overlap: int | None = None  # of the step before, where schedules overlap; the runner sets it
        self.debug_mode = bool(config.debug_mode)
        self._overlaps = bool(getattr(fd_config.scheduler_config, "enable_overlap_schedule", False))
        self.table = _open(fd_config, self.spec, total_block_num) if self.tp_rank == 0 else None
        self._capturer = StepCapturer(self.table, self.spec, max_step_tokens(fd_config), debug=self.debug_mode)
        self._capture = None if self.table is None else RoutingCapture(None, self.table, self._capturer)
        self.faults = Faults() if self._capture is None else self._capture.faults

    def get_device_routing_buffer(self) -> RoutedExpertsCapturer:
        """What `save_routing_to_buffer_v2` writes to."""
        return self

    def save(self, topk_ids: Any, layer_idx: int, num_tokens: int | None) -> None:
        """Keep what a layer chose; layer_idx counts from the first MoE layer, dense ones between included."""
        if self._capture is not None:
            first = self.spec.moe_layers[0]
            self.faults.attempt("record", lambda: self._capturer.record(first + layer_idx, topk_ids, num_tokens))

    def prepare_pending_save(self, num_tokens: int, slot_mapping_gpu: Any, position_ids_gpu: Any = None) -> None:
        """When a step's forward is launched: its rows start their way to the host. With no tokens, a dummy run, nothing does."""
        if self._capture is None:
            return
        self._capture.faults.attempt(
            "step", self._prepare, self._capture, num_tokens, slot_mapping_gpu, position_ids_gpu
        )

    def _prepare(self, capture: RoutingCapture, num_tokens: int, slots: Any, positions: Any) -> None:
        if num_tokens <= 0:
            self._capturer.skip()
            return
        tokens = self.token_num_overlap if self._overlaps else num_tokens
        if tokens is None:
            self._capturer.skip()
            self._capturer.forget(slots)
            raise InvalidInputError(
                "token_num_overlap was never set, and schedules overlap: the runner must set it at each step"
            )
        capture.step(slots, positions, tokens)

    def flush_pending_save(self) -> None:
        """One step later: the rows into the shared table."""
        if self._capture is not None:
            self._capture.flush()

    def clear(self) -> None:
        """Forget the steps that were launched and not written."""
        self._capturer.discard()

    def close(self) -> None:
        """Give the table up."""
        if self.table is not None:
            self.table.close()


def save_routing_to_buffer_v2(
    device_routing_buffer: RoutedExpertsCapturer,
    topk_ids: Any,
    layer_idx: int,
    tp_size: int,
    ep_size: int,
    tp_group: Any,
    total_token_num: int = -1,
    position_ids: Any = None,  # noqa: ARG001 - FastDeploy's name; debug takes those of prepare_pending_save
    debug_mode: bool = False,  # noqa: ARG001
) -> None:
    """In the forward of a MoE layer; topk_ids: [tokens, top_k]. Where experts are parallel beside tensors, all ranks call it."""

    def save() -> None:
        tokens = None if total_token_num < 0 else total_token_num
        device_routing_buffer.save(gathered(topk_ids, tp_size, ep_size, tp_group), layer_idx, tokens)

    device_routing_buffer.faults.attempt("record", save)


class RoutingCacheManager:
    """The engine's side: it keeps no requests, gathers by block table when one ends, and stores the record.

    The allocator must call `recycle` for blocks that get new content: it alone knows. Until it has done so once, requests that
    end leave drop rows that say this, and never somebody else's rows.
    """

    def __init__(self, fd_config: Any, num_gpu_blocks: int, writer: RoutingWriter | None = None) -> None:
        """writer: one that is open already; else that of the config is opened, and closed by `close`."""
        config = fd_config.routing_replay_config
        self._own = writer is None
        self.return_mode: str = config.routing_store_type
        self.writer = writer or (open_writer(fd_config) if self.return_mode == DATASET else None)
        self.spec = RoutingSpec.from_config(fd_config.model_config) if self.writer is None else self.writer.dataset.spec
        self.table = _open(fd_config, self.spec, num_gpu_blocks)
        self.routing_dtype = np.dtype(getattr(config, "routing_dtype", None) or wire_dtype(self.spec))
        self.counts: Counter[str] = Counter()
        self._capture = RoutingCapture(self.writer, self.table)
        self._told_of_blocks = False
        self._unsure = min(max_drafts(fd_config), 1)
        self._ended: dict[str, None] = {}  # requests by the engine's id, oldest first

    def recycle(self, block_ids: Blocks) -> None:
        """The allocator gives these blocks to a request with new content. Not for blocks of a prefix hit."""
        self._told_of_blocks = True
        self._capture.faults.attempt("recycle", self.table.recycle, block_ids)

    def gather_routing_for_request(self, block_table: Blocks, seq_len: int) -> npt.NDArray[Any]:
        """[seq_len, layers, top_k] of `routing_dtype`, for another engine or a response; missing rows are -1, wrapped."""
        return marked(self.table.gather(block_table, 0, seq_len), self.routing_dtype)

    def on_request_finished(self, request_id: str, block_table: Blocks, seq_len: int) -> npt.NDArray[Any] | None:
        """One request ends: one record, or a drop row. Call it before its blocks are given away.

        seq_len: prompt and answer, less 1 if the last token is EOS; a last token that was never fed is missing. With speculative
            decoding a rejected draft may have been fed in its place, so there the last token's row is always missing. Where
            the config stores into no dataset, the routing is returned instead.
        """
        attempt = self._capture.faults.attempt
        if self.writer is None:
            return attempt("finish", self._gather_ended, block_table, seq_len)
        record_id = self._begin_end(request_id)
        if record_id is not None and self._told_of_blocks:
            self._capture.finish(record_id, block_table, attempt("finish", self._sure, seq_len), num_tokens=seq_len)
        elif record_id is not None:
            self._capture.abort(record_id, reason=NO_ALLOCATOR)
        return None

    def on_request_aborted(self, request_id: str, block_table: Blocks = (), seq_len: int = 0) -> None:
        """One request is given up: what was fed becomes a record of status "aborted"; without blocks, a drop row."""
        record_id = self._begin_end(request_id)
        if record_id is not None:
            fed = self._capture.faults.attempt("abort", self._sure, seq_len) if self._told_of_blocks else None
            self._capture.abort(record_id, block_table, fed or 0)

    def _sure(self, seq_len: int) -> int:
        """How many of a request's tokens were fed, beyond doubt."""
        return max(seq_len - self._unsure, 0)

    def _gather_ended(self, block_table: Blocks, seq_len: int) -> npt.NDArray[Any]:
        rows = self.gather_routing_for_request(block_table, seq_len)
        rows[self._sure(seq_len) :] = minus_one(rows.dtype)
        return rows

    def _begin_end(self, request_id: str) -> str | None:
        """The record's id; None for a foreign request, and for one that has ended before: the record that it has stays."""
        record_id = record_id_of(request_id)
        if record_id is None:
            self.counts[FOREIGN] += 1
        elif request_id in self._ended:
            self.counts[ENDED_TWICE] += 1
            return None
        else:
            self._ended[request_id] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            self._capture.register(record_id)
        return record_id

    def reset(self) -> None:
        """No row of the table counts any more."""
        self._capture.reset()

    def stats(self) -> Any:
        """Counts, as `RoutingCapture.stats`."""
        return self._capture.stats()

    def close(self) -> None:
        """Give the table up; everything stored becomes durable. Raises what `RoutingWriter.close` raises."""
        self.table.close()
        if self._own and self.writer is not None:
            self.writer.close()
