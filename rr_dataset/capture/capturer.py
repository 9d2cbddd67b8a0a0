"""What one forward computes, from the router to the slot table: `record` per layer, `prepare` at launch, `flush` later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rr_dataset.capture.slots import SlotTable
from rr_dataset.capture.tensors import Arrival, StepBuffer, host_array, make_buffer, on_host, send
from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.record import RoutingSpec, shown_layers

IN_FLIGHT = 2  # steps whose rows may be on their way at once; a third waits for the first

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was launched into `table`."""

    table: SlotTable
    rows: Arrival | None  # None: they were fed, and nobody knows their rows
    slots: Arrival
    marks: Callable[[Array], Array]  # of the slots, as they were at launch
    positions: Arrival | None  # for debug


class StepCapturer:
    """Captures the steps of one model runner. Not thread-safe: all calls come from the thread that launches steps.

    A step: `record` in every MoE layer, then `prepare` behind the forward's launch, then `flush` when the rows have had time
    to arrive: at once, or one step later in an overlapped schedule. A flush that comes late, twice or never loses at
    most the last two steps, which are missing then; no row ever passes for another's.
    """

    def __init__(
        self,
        table: SlotTable | None,
        spec: RoutingSpec,
        max_tokens: int,
        *,
        layers: Sequence[int] | None = None,
        indexed: Literal["model", "moe"] = "model",
        like: Any = None,
        debug: bool = False,
    ) -> None:
        """Capture into `table`.

        table: None in processes that do not write (tensor-parallel ranks but the first): every call returns at once.
        max_tokens: of one step, padding included.
        layers: those this process computes, if not all of the spec (a pipeline stage); the table has as many.
        indexed: what `record` calls a layer, its id in the model, or its number among all MoE layers of the spec.
        like: a tensor on the engine's device, where the step's buffer is made now. Without one the first `record` makes it,
            which must then come before CUDA graphs are captured: a profile run does.
        debug: write `(position + layer + k) % num_experts`, layer by its id, instead of what the model chose, which
            `rr-dataset verify --positions` checks; `prepare` must then be given positions.
        """
        chosen = spec.check_layers(layers)
        if indexed not in ("model", "moe"):
            raise InvalidInputError(f"indexed={indexed!r}: expected model or moe")
        if type(max_tokens) is not int or max_tokens < 1:
            raise InvalidInputError(f"max_tokens={max_tokens!r}: expected a whole number over 0")
        if table is not None and (table.rows.shape[1:], table.dtype.name) != ((len(chosen), spec.top_k), spec.dtype):
            raise InvalidInputError(
                f"{table.path} has rows {table.dtype} {table.rows.shape[1:]}: expected {spec.dtype} {(len(chosen), spec.top_k)}"
            )
        self.table, self.spec, self.layers, self.max_tokens, self.debug = table, spec, chosen, max_tokens, debug
        names = chosen if indexed == "model" else [spec.moe_layers.index(layer) for layer in chosen]
        self._index = {name: at for at, name in enumerate(names)}
        self._shape = (max_tokens, len(chosen), spec.top_k)
        self._buffer: StepBuffer | None = None
        if table is not None and like is not None:
            self._buffer = make_buffer(like, self._shape, spec.dtype)
        self._reached = [0] * len(chosen)  # rows recorded of each layer since the last step
        self._whole = False  # every layer was recorded once: a CUDA graph that is replayed records without being seen
        self._pending: deque[_Step] = deque()
        self._turn = 0
        self.suspended = False  # True: nothing is recorded
        self.written = self.late = 0  # rows; late ones came when their block had been recycled

    # ---- in the forward

    def record(self, layer: int, topk_ids: Any, num_tokens: int | None = None, start: int = 0) -> None:
        """Keep what one MoE layer chose. No allocation on the device and no look at values: safe in a CUDA graph.

        layer: as `indexed` says. Others (a draft model's) are passed over.
        topk_ids: [tokens, top_k] of any integer dtype, padded rows included: numpy, torch or paddle. Where experts are
            parallel beside tensors: those of all ranks, gathered; what lies beyond `num_tokens` is cut off.
        start: the row of its first token, where a layer takes a step in several goes.

        Raises InvalidRoutingError for another shape or kind.
        """
        if self.table is None or self.suspended:
            return
        at = self._index.get(layer)
        if at is None:
            return
        if len(topk_ids.shape) != 2 or topk_ids.shape[1] != self.spec.top_k:
            raise InvalidRoutingError(
                f"layer {layer}: topk_ids has shape {tuple(topk_ids.shape)}: expected (tokens, {self.spec.top_k})"
            )
        if self._buffer is None:
            self._buffer = make_buffer(topk_ids, self._shape, self.spec.dtype)
        count = topk_ids.shape[0] if num_tokens is None else min(num_tokens, topk_ids.shape[0])
        count = min(count, self.max_tokens - start)
        if count > 0:
            self._buffer.write(start, at, topk_ids[:count])
            self._reached[at] = max(self._reached[at], start + count)

    def skip(self) -> None:
        """What was recorded since the last step was a dummy, profile or pooling run: it counts for none."""
        self._whole = self._whole or all(self._reached)
        self._reached = [0] * len(self.layers)

    # ---- around it

    def prepare(self, slots: Any, positions: Any = None, num_tokens: int | None = None) -> None:
        """Launch: start the copy of the step's rows to the host, and remember whose they are from now.

        Call it when the forward is enqueued, on the same stream, and before the allocator gives blocks of it to others.
        Not for dummy, profile and pooling runs: those have no slots.

        slots: of the step's tokens, `block * block_size + offset`; negative ones are padding. On the host or the device;
            from there they are copied along, and nobody waits. positions: of the tokens, for `debug`.
        num_tokens: how many of them count, if not all.

        Raises InvalidRoutingError when slots are out of range, or layers or rows were not recorded: of this step then
        only what is certain is written.
        """
        if self.table is None:
            return
        certain, unseen = self._end_of_step()
        while len(self._pending) >= IN_FLIGHT:
            self._write(self._pending.popleft())
        tokens = len(slots) if num_tokens is None else min(num_tokens, len(slots))
        kept = 0 if self.suspended else min(tokens, certain)
        if self.debug and positions is None:
            raise InvalidInputError("debug=True writes positions: prepare needs positions=")
        if kept and self._buffer is not None:
            rows, at = self._buffer.send(kept, self._turn), _taken(positions[:kept]) if self.debug else None
            self._pending.append(_Step(self.table, rows, *self._owners(self.table, slots[:kept]), at))
            self._turn += 1
        if kept < tokens:
            self._pending.append(_Step(self.table, None, *self._owners(self.table, slots[kept:tokens]), None))
            if not self.suspended:
                raise InvalidRoutingError(
                    f"a step of {tokens} tokens, of which {certain} were recorded in every layer"
                    + (f"; layers {shown_layers(unseen)} had none: check indexed=" if unseen else "")
                )

    def flush(self, keep: int = 0) -> int:
        """Write the rows of launched steps into the table, but those of the last `keep`; how many steps that were.

        Waits for rows that have not yet arrived.
        """
        count = 0
        while len(self._pending) > keep:
            self._write(self._pending.popleft())
            count += 1
        return count

    def discard(self) -> None:
        """Forget the steps that were launched and not written."""
        self._pending.clear()

    # ---- inside

    def _end_of_step(self) -> tuple[int, list[int]]:
        """How many rows every layer has of the step that was recorded, and the layers that have none; begins the next."""
        reached = self._reached
        self.skip()
        if any(reached):
            return min(reached), [layer for layer, rows in zip(self.layers, reached, strict=True) if not rows]
        return (self.max_tokens, []) if self._whole else (0, list(self.layers))

    @staticmethod
    def _owners(table: SlotTable, slots: Any) -> tuple[Arrival, Callable[[Array], Array]]:
        """The slots, and what gives their marks of this moment."""
        arrival = _taken(slots)
        if not on_host(slots):
            return arrival, partial(table.marks_of, table.snapshot(), epoch=table.epoch)
        marks = table.marks(np.maximum(arrival(), 0))
        return arrival, lambda _: marks

    def _write(self, step: _Step) -> None:
        slots = step.slots()
        marks = step.marks(np.maximum(slots, 0))
        real = slots >= 0
        if step.rows is None:
            step.table.erase(slots[real], marks[real])
            return
        rows = step.rows()
        if step.positions is not None:
            rows = self.spec.position_ids(step.positions(), self.layers)
        if not real.all():
            slots, rows, marks = slots[real], rows[real], marks[real]
        late = step.table.scatter(slots, rows, marks)
        self.late += late
        self.written += len(slots) - late


def _taken(value: Any) -> Arrival:
    """Whole numbers: read now if they are on the host, else on their way."""
    if on_host(value):
        numbers = host_array(value)
        return lambda: numbers
    arrival = send(value)
    return lambda: host_array(arrival())
