"""What one forward computes, from the router to the slot table: `record` per layer, `prepare` at launch, `flush` later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rr_dataset.capture.slots import SlotTable
from rr_dataset.capture.tensors import Arrival, StepBuffer, check_ids, host_array, make_buffer, on_host, send
from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.record import RoutingSpec, shown_layers

IN_FLIGHT = 2  # steps whose rows may be on their way at once; a third waits for the first
_MOST_SLOTS = 1 << 53  # what a float counts exactly

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was launched into `table`."""

    table: SlotTable
    rows: Arrival | None  # None: they were fed, and nobody knows their rows
    slots: Arrival
    marks: Callable[[Array], Array]  # of the slots, as they were at launch
    positions: Arrival | None = None  # for debug
    told: bool = False  # that rows were not recorded


class StepCapturer:
    """Captures the steps of one model runner. Not thread-safe: all calls come from the thread that launches steps.

    A step: `record` in every MoE layer, then `prepare` behind the forward's launch, then `flush` when the rows have had time
    to arrive: at once, or one step later in an overlapped schedule. A flush that comes late, twice or never loses at
    most the last two steps, which are missing then; no row ever passes for another's: the buffer is cleared after each step, so
    a replayed CUDA graph, which records without being seen, is told from a forward that recorded nothing.
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
            self._buffer = make_buffer(like, self._shape, spec.dtype, spec.num_experts)
        self._recorded = [0] * len(chosen)  # rows of each layer since the last step, as far as is seen
        self._high = 0  # where the furthest of them ends
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

        Raises InvalidRoutingError for another shape, dtype or kind. What is no expert's id is found by `flush`.
        """
        if self.table is None or self.suspended:
            return
        at = self._index.get(layer)
        if at is None:
            return
        check_ids(f"layer {layer}: topk_ids", topk_ids, self.spec.top_k)
        if start < 0:
            raise InvalidRoutingError(f"layer {layer}: start={start!r}: expected the row of the first token")
        if self._buffer is None:
            self._buffer = make_buffer(topk_ids, self._shape, self.spec.dtype, self.spec.num_experts)
        count = topk_ids.shape[0] if num_tokens is None else min(num_tokens, topk_ids.shape[0])
        count = min(count, self.max_tokens - start)
        if count > 0:
            self._high = max(self._high, start + count)
            self._buffer.write(start, at, topk_ids[:count])
            self._recorded[at] += count

    def skip(self) -> None:
        """What was recorded since the last step was a dummy, profile or pooling run: it counts for none."""
        if self.table is not None:
            self._clear(0)

    # ---- around it

    def prepare(self, slots: Any, positions: Any = None, num_tokens: int | None = None) -> None:
        """Launch: start the copy of the step's rows to the host, and remember whose they are from now.

        Call it when the forward is enqueued, on the same stream, and before the allocator gives blocks of it to others.
        Not for dummy, profile and pooling runs: those have no slots.

        slots: of the step's tokens, `block * block_size + offset`; negative ones are padding. On the host or the device;
            from there they are copied along, and nobody waits. positions: of the tokens, for `debug`.
        num_tokens: how many of them count, if not all.

        Raises InvalidRoutingError when slots are out of range, or layers or rows were not recorded: of this step then
        only what is certain is written, and no row that its slots had before counts.
        """
        if self.table is None:
            return
        recorded = self._recorded
        fewest = min(recorded) if any(recorded) else self.max_tokens if self._buffer is not None else 0
        errors = self._write_all_but(IN_FLIGHT - 1)
        tokens, counted = 0, slots
        try:
            tokens = len(slots) if num_tokens is None else max(min(num_tokens, len(slots)), 0)
            counted = slots[:tokens]
            written = self._buffer is not None and not self.suspended
            kept = min(tokens, self.max_tokens) if written else 0
            self._launch(self.table, counted, positions, kept, told=fewest < tokens)
        except Exception:
            self.forget(counted)
            raise
        finally:
            self._clear(tokens)
        if fewest < tokens and not self.suspended:
            unseen = [layer for layer, rows in zip(self.layers, recorded, strict=True) if not rows]
            raise InvalidRoutingError(
                f"a step of {tokens} tokens, of which {fewest} were recorded in every layer"
                + (f"; layers {shown_layers(unseen)} had none: check indexed=" if unseen and any(recorded) else "")
            )
        if errors:
            raise errors[0]

    def forget(self, slots: Any) -> None:
        """These slots were fed, and nobody knows the rows: what they had before counts no more, once the steps before are written."""
        if self.table is not None:
            real = _readable(slots)
            real = real[(real >= 0) & (real < self.table.num_slots)]
            self._pending.append(_Step(self.table, None, *self._owners(self.table, real)))

    def flush(self, keep: int = 0) -> int:
        """Write the rows of launched steps into the table, but those of the last `keep`; how many steps that were.

        Waits for rows that have not yet arrived. Raises InvalidRoutingError, when all else is written, for a step with rows that no
        layer wrote, ids of no expert, or slots out of range: those are missing.
        """
        count = max(len(self._pending) - keep, 0)
        errors = self._write_all_but(keep)
        if errors:
            raise errors[0]
        return count

    def discard(self) -> None:
        """Forget the steps that were launched and not written."""
        self._pending.clear()

    # ---- inside

    def _launch(self, table: SlotTable, slots: Any, positions: Any, kept: int, *, told: bool) -> None:
        """The first `kept` of a step's tokens have rows in the buffer, if they were written; of the others nobody knows any."""
        if self.debug and (positions is None or len(positions) < len(slots)):
            raise InvalidInputError("debug=True writes positions: prepare needs positions=, one for each token")
        owned = [self._owners(table, part) for part in (slots[:kept], slots[kept:])]
        at = _taken(positions[:kept]) if self.debug else None
        if kept and self._buffer is not None:
            self._pending.append(_Step(table, self._buffer.send(kept, self._turn), *owned[0], at, told))
            self._turn += 1
        if kept < len(slots):
            self._pending.append(_Step(table, None, *owned[1]))

    def _write_all_but(self, keep: int) -> list[Exception]:
        """Of the steps that were launched, oldest first; what went wrong."""
        errors: list[Exception] = []
        while len(self._pending) > keep:
            step = self._pending.popleft()
            try:
                self._write(step)
            except InvalidRoutingError as error:
                errors.append(error)
            except Exception as error:  # noqa: BLE001 - such as a device's: the rows did not arrive
                errors.append(error)
                with suppress(Exception):
                    self._write(replace(step, rows=None))
        return errors

    def _clear(self, tokens: int) -> None:
        """Nothing that was written so far is taken for the next step's."""
        if self._buffer is not None:
            self._buffer.clear(max(self._high, tokens))
        self._recorded, self._high = [0] * len(self.layers), 0

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
        beyond = slots >= step.table.num_slots
        if beyond.any():  # only of slots on a device: then the rest of the step is in doubt too
            slots = np.where(beyond, -1, slots)
            step = replace(step, rows=None)
        marks = step.marks(np.maximum(slots, 0))
        real = slots >= 0
        if step.rows is None:
            step.table.erase(slots[real], marks[real])
            if beyond.any():
                raise InvalidRoutingError(f"{np.count_nonzero(beyond)} slots of a step over {step.table.num_slots - 1}")
            return
        rows = step.rows()
        known = None if not rows.size or rows.max() < self.spec.num_experts else _known(rows, self.spec.num_experts)
        if step.positions is not None:
            rows = self.spec.position_ids(step.positions(), self.layers)
        unknown = 0
        if known is not None:
            lost = real & ~known
            unknown = int(np.count_nonzero(lost))
            step.table.erase(slots[lost], marks[lost])
            real &= known
        if not real.all():
            slots, rows, marks = slots[real], rows[real], marks[real]
        late = step.table.scatter(slots, rows.astype(step.table.dtype), marks)
        self.late += late
        self.written += len(slots) - late
        if unknown and not step.told:
            raise InvalidRoutingError(
                f"{unknown} rows of a step are missing: not every layer wrote them, or an id is not of 0 to "
                f"{self.spec.num_experts - 1}"
            )


def _known(rows: Array, num_experts: int) -> Array:
    return np.asarray((rows < num_experts).all(axis=(1, 2)))


def _readable(value: Any) -> npt.NDArray[np.int64]:
    """Of slots that were refused, those that are meant beyond doubt: whole numbers, of whatever type."""
    try:
        numbers = np.asarray(value if on_host(value) else value.tolist(), np.float64).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        return np.empty(0, np.int64)
    whole = np.isfinite(numbers) & (numbers == np.rint(numbers)) & (np.abs(numbers) < _MOST_SLOTS)
    return np.asarray(numbers[whole], np.int64)


def _taken(value: Any) -> Arrival:
    """Whole numbers: read now if they are on the host, else on their way."""
    if on_host(value):
        numbers = host_array(value)
        return lambda: numbers
    arrival = send(value)
    return lambda: host_array(arrival())
