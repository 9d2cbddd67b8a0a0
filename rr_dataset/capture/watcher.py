"""For engines whose allocator cannot be hooked: what it did, told from the block tables of the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.capture.slots import SlotTable
from rr_dataset.errors import InvalidRoutingError


class BlockWatcher:
    """Slots of a step's tokens, and `recycle` for blocks that a request feeds for the first time.

    A block that a request is given with its content, a prefix hit, is never fed by it and keeps its rows. Where the last block
    of a hit is fed again (a prompt that was cached whole), that block is recycled, and its earlier rows are missing.

    Content that came in another way, swapped in from the host or sent by another engine, looks like a hit too, and its block
    still has the rows of whoever had it before: recycle it yourself, or gather from `fed_blocks` alone. Not thread-safe.
    """

    def __init__(self, table: SlotTable, max_requests: int, max_blocks: int) -> None:
        """max_requests: rows of the engine's block table. max_blocks: its columns."""
        self._table = table
        self._fed = np.full((max_requests, max_blocks), -1, np.int64)

    def forget(self, batch_ids: Any) -> None:
        """These rows of the block table have new requests, or none: call it when a request is registered, preempted or done."""
        self._fed[batch_ids] = -1

    def fed_blocks(self, batch_id: int) -> npt.NDArray[np.int64]:
        """The blocks of a request that it has fed itself, by their place in its block table; -1 elsewhere."""
        return np.array(self._fed[batch_id])

    def slots(
        self, block_tables: npt.NDArray[Any], batch_ids: npt.NDArray[Any], positions: npt.NDArray[Any]
    ) -> npt.NDArray[np.int64]:
        """Slots of tokens about to be fed, for `StepCapturer.prepare`; their new blocks are recycled. Call it once a step, at launch.

        block_tables: [max_requests, max_blocks], on the host. batch_ids, positions: of each token; a negative position is
            padding, whose slot is -1, and so is a token whose block the table does not have.

        Raises InvalidRoutingError for tokens outside of the table, or what is no whole number; nothing is recycled then.
        """
        for name, array in (("block_tables", block_tables), ("batch_ids", batch_ids), ("positions", positions)):
            if array.size and array.dtype.kind not in "iu":
                raise InvalidRoutingError(f"{name} of dtype {array.dtype}: expected whole numbers")
        size = self._table.block_size
        real = positions >= 0
        rows, columns = np.where(real, batch_ids, 0), np.where(real, positions, 0) // size
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self._fed) or columns.max() >= self._fed.shape[1]):
            raise InvalidRoutingError(
                f"tokens in rows {rows.min()} to {rows.max()}, up to column {columns.max()}, of a block table of {self._fed.shape}"
            )
        blocks = block_tables[rows, columns].astype(np.int64)
        real &= blocks >= 0
        new = real & (blocks != self._fed[rows, columns])
        if new.any():
            self._table.recycle(blocks[new])
            self._fed[rows[new], columns[new]] = blocks[new]
        slots: npt.NDArray[np.int64] = np.where(real, blocks * size + positions % size, -1)
        return slots
