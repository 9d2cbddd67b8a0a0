"""The routing rows that FastDeploy's processes share, by its names, as slot tables: a reused block's old rows never pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.capture.slots import Gathered, SlotTable, whole_numbers
from rr_dataset.contracts.arrays import minus_one
from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.record import RoutingSpec

MARKER_VALUES = 1  # FastDeploy keeps one id of a dtype free for -1


def wire_dtype(spec: RoutingSpec) -> np.dtype[Any]:
    """The dtype that FastDeploy gives this routing: one in which -1 is no expert."""
    return np.min_scalar_type(spec.num_experts - 1 + MARKER_VALUES)


def open_table(name: str, num_blocks: int, block_size: int, layers: int, top_k: int, dtype: str) -> SlotTable:
    """The table of this name, made by whichever process comes first. Raises InvalidInputError for one of another shape."""
    try:
        return SlotTable.create(name, num_blocks, block_size, layers, top_k, dtype)
    except InvalidInputError:  # another process has it, or an argument is wrong
        table = SlotTable.attach(name)
    found = (table.num_blocks, table.block_size, *table.rows.shape[1:], table.dtype.name)
    wanted = (num_blocks, block_size, layers, top_k, dtype)
    if found != wanted:
        table.close()
        raise InvalidInputError(
            f"{table.path} has {found}: expected {wanted} (blocks, block size, layers, top_k, dtype)"
        )
    return table


def table_name(fd_config: Any, kind: str = "routing_host_buffer") -> str:
    """One for each engine and DP rank of a host: by its port, as FastDeploy does."""
    return f"{kind}.{fd_config.parallel_config.local_engine_worker_queue_port}"


def marked(found: Gathered, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Gathered rows as FastDeploy hands them over: missing ones are -1, wrapped."""
    rows = found.rows.astype(dtype)
    for start, stop in found.missing:
        rows[start:stop] = minus_one(dtype)
    return rows


class RoutingHostBufferView:
    """A table that another process, or this one, has opened. Slots are `block * block_size + offset`."""

    def __init__(self, shape: Any, dtype: str, shm_name: str) -> None:
        """shape: [slots, layers, top_k]. dtype: of what `gather` returns. Raises InvalidInputError without such a table."""
        self._use(SlotTable.attach(shm_name), dtype)
        if tuple(shape) != self.buffer.shape:
            raise InvalidInputError(f"{self.table.path} has {self.buffer.shape}: expected {tuple(shape)}")

    def _use(self, table: SlotTable, dtype: str) -> None:
        self.table, self.dtype, self.shm_name = table, np.dtype(dtype), table.path.name.split("-", 2)[-1]
        self.buffer, self.shape, self.block_size = table.rows, table.rows.shape, table.block_size

    def scatter(self, slot_mapping: npt.ArrayLike, data: npt.ArrayLike) -> None:
        """Write rows [slots, layers, top_k]; those of -1, in unsigned types the greatest number, are missing.

        Raises InvalidRoutingError for anything but whole numbers, then nothing is written, and, once the others are written, for
        rows with ids that the table's dtype does not hold, which are missing.
        """
        slots, rows = whole_numbers("slot_mapping", slot_mapping), np.asarray(data)
        if rows.dtype.kind not in "iu" or rows.shape != (len(slots), *self.buffer.shape[1:]):
            raise InvalidRoutingError(
                f"rows of dtype {rows.dtype} and shape {rows.shape}: expected integers, {(len(slots), *self.buffer.shape[1:])}"
            )
        missing = (rows == minus_one(rows.dtype)).all(axis=(1, 2))
        if self.buffer.shape[2] == 1 and rows.dtype == self.table.dtype:
            missing[:] = False  # the marker may be an expert
        foreign = ~missing & ((rows < 0) | (rows > np.iinfo(self.table.dtype).max)).any(axis=(1, 2))
        marks = self.table.marks(slots)
        there = ~(missing | foreign)
        self.table.erase(slots[~there], marks[~there])
        self.table.scatter(slots[there], np.ascontiguousarray(rows[there], self.table.dtype), marks[there])
        if foreign.any():
            raise InvalidRoutingError(
                f"{np.count_nonzero(foreign)} rows have ids beyond {self.table.dtype}: they are missing"
            )

    def gather(self, slot_mapping: npt.ArrayLike) -> npt.NDArray[Any]:
        """[slots, layers, top_k] of a request from position 0; missing rows are -1, wrapped. Raises InvalidRoutingError for others."""
        slots = whole_numbers("slot_mapping", slot_mapping)
        blocks, offsets = slots[:: self.block_size] // self.block_size, np.arange(len(slots)) % self.block_size
        if not np.array_equal(slots, np.repeat(blocks, self.block_size)[: len(slots)] * self.block_size + offsets):
            raise InvalidRoutingError("slots of a request from position 0 on are expected: block * block_size + offset")
        return marked(self.table.gather(blocks, 0, len(slots)), self.dtype)

    def swap(self, blocks: Any, target: RoutingHostBufferView, target_blocks: Any) -> None:
        """Copy blocks into those of another buffer, a swap out or in: what is valid here is valid there."""
        self.table.move(blocks, target.table, target_blocks)

    def close(self) -> None:
        """Give it up; who made it also removes it."""
        self.table.close()


class RoutingHostBuffer(RoutingHostBufferView):
    """The table beside the KV cache on the device."""

    KIND = "routing_host_buffer"

    def __init__(
        self, num_gpu_blocks: int, block_size: int, num_moe_layers: int, top_k: int, dtype: str, dp_suffix: str = ""
    ) -> None:
        """dp_suffix: another one for each engine and DP rank of the host."""
        name = f"{self.KIND}.{dp_suffix}"
        self._use(open_table(name, num_gpu_blocks, block_size, num_moe_layers, top_k, dtype), dtype)


class RoutingSwapBuffer(RoutingHostBuffer):
    """The table beside the KV cache on the host."""

    KIND = "routing_swap_buffer"


class RoutingSwapBufferView(RoutingHostBufferView):
    """The swap buffer that another process has opened."""
