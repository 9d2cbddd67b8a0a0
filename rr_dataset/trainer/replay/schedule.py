"""Which micro-batch a call of a router belongs to. Knows layers and order, no arrays and no framework."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from rr_dataset.errors import InvalidInputError

Batch = TypeVar("Batch")


class Scope(dict[int, Batch]):
    """What one recomputed segment used in its forward: the micro-batch by layer. It lives as long as its autograd node."""


class Schedule(Generic[Batch]):
    """Gives each call of a layer's router its micro-batch.

    Forward calls of one layer take the queued micro-batches in the order in which they were queued. One is queued at a time,
    when all layers have taken the one before; with `ahead` several are, and then the layers of one chunk (those that one call
    of the model runs) take a micro-batch only when none of them waits for an older one. Chunks are free of one another
    (virtual pipeline stages).

    A call that computes a forward again (activation checkpointing) takes the micro-batch that the first computation took:
    what the caller names (`recomputing`), else what the segment's `Scope` says. The framework keeps the scope with the segment:
    `enter()` makes one when the segment's forward starts, `restore()` brings it back when it is computed again. Any order of
    backwards is right. Inside a backward that neither names it is an error: nothing tells how many backwards of which
    micro-batch are still to come.

    Not thread-safe; a backward that runs in a thread of the framework while its caller waits is fine.
    """

    def __init__(self, chunks: Iterable[Iterable[int]], *, ahead: bool = False) -> None:
        self._chunk_of = {layer: chunk for chunk in map(tuple, chunks) for layer in chunk}
        self._ahead = ahead
        self._waiting: dict[int, deque[tuple[int, Batch]]] = {layer: deque() for layer in self._chunk_of}
        self._queued = 0
        self._gradients: dict[int, bool] = {}  # by layer, since its queue was last empty
        self._scope: Scope[Batch] = Scope()
        self.recomputing: Batch | None = None
        self._restored = False

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are hooked, rising."""
        return tuple(sorted(self._waiting))

    def queue(self, batch: Batch) -> None:
        """The next micro-batch that every layer's forward will see.

        Raises InvalidInputError if one is waiting, without `ahead`.
        """
        if not self._ahead and self.waiting():
            left = next(waiting[0][1] for waiting in self._waiting.values() if waiting)
            raise InvalidInputError(
                f"{left} is still waiting for the forward of layers {sorted(self.waiting())}: a forward that ended early (an error, a "
                "batch that was skipped) would give its rows to the next one. Call abandon() to drop it and push() again; say "
                "attach(..., ahead=True) if several are pushed before their forwards, as for a pipeline"
            )
        for waiting in self._waiting.values():
            waiting.append((self._queued, batch))
        self._queued += 1

    def abandon(self, batch: Batch | None) -> None:
        """No forward will take `batch` any more; None: any that waits."""
        for layer, waiting in self._waiting.items():
            self._waiting[layer] = deque(each for each in waiting if batch is not None and each[1] != batch)
        self._gradients.clear()

    def waiting(self) -> dict[int, int]:
        """Micro-batches that a layer's forward has not taken yet, for layers that have any."""
        return {layer: len(batches) for layer, batches in sorted(self._waiting.items()) if batches}

    def enter(self) -> Scope[Batch]:
        """A segment's forward starts: its scope. While a segment is computed again, the restored scope."""
        if not self._restored:
            self._scope = Scope()
        return self._scope

    def restore(self, scope: Scope[Batch]) -> None:
        """Compute again what `scope` has seen; an empty one (made by `enter`, no router called yet) goes back to forwards."""
        self._scope = scope
        self._restored = bool(scope)

    def take(self, layer: int, *, in_backward: bool, gradients: bool) -> tuple[Batch, bool]:
        """The micro-batch of this call of the layer's router, and whether it is computed again.

        gradients: whether the framework records them. Where several wait, one forward with and one without them is an
        evaluation among forwards, which would take the next one's.

        Raises InvalidInputError if none is queued, or if it cannot be told.
        """
        if layer not in self._waiting:
            raise InvalidInputError(f"layer {layer} is not replayed in this attach(), which has layers {self.layers}")
        if self.recomputing is not None:
            return self.recomputing, True
        if self._restored:
            if layer not in self._scope:
                raise InvalidInputError(
                    f"layer {layer} is computed again in a segment whose forward never called its router: the model took another "
                    "path the second time"
                )
            return self._scope[layer], True
        if in_backward:
            raise InvalidInputError(
                f"layer {layer} is computed again in a backward, and nothing says for which micro-batch: this checkpointing does "
                "not announce its segments (torch.utils.checkpoint and paddle's recompute with preserve_rng_state=True do). Run "
                "the backward inside of recompute(micro_batch), with what push() returned"
            )
        batch = self._next(layer, gradients)
        # The first call counts: a scope lasts until the next segment starts, and calls outside of any segment come between.
        self._scope.setdefault(layer, batch)
        return batch, False

    def _next(self, layer: int, gradients: bool) -> Batch:
        waiting = self._waiting[layer]
        if not waiting:
            raise InvalidInputError(
                f"layer {layer} was called without a micro-batch: push() one before each forward. A forward without replay "
                "(evaluation, generation) belongs inside of paused() or outside of attach(); a recomputation that the framework "
                "does not announce (paddle with preserve_rng_state=False) inside of recompute(micro_batch)"
            )
        number, batch = waiting[0]
        behind = [
            other for other in self._chunk_of[layer] if self._waiting[other] and self._waiting[other][0][0] < number
        ]
        if behind:
            raise InvalidInputError(
                f"layer {layer} would take {batch}, but layers {behind} still wait for {self._waiting[behind[0]][0][1]}: its forward "
                "ended early. Call abandon(micro_batch), with what push() returned, and go on"
            )
        if self._gradients.setdefault(layer, gradients) != gradients:
            raise InvalidInputError(
                f"layer {layer} was called {'with' if gradients else 'without'} gradients between forwards that were not, while "
                "micro-batches wait: an evaluation took one that it should not. Run it inside of paused()"
            )
        waiting.popleft()
        if not waiting:
            del self._gradients[layer]
        return batch
