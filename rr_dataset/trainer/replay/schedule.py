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

    Forward calls of one layer take the queued micro-batches in the order in which they were queued, whatever the other layers
    do (pipeline stages, virtual stages). A call that computes a forward again (activation checkpointing) takes the micro-batch
    that the first computation took, by one of these, best first:

    1. The segment's `Scope`. The framework keeps it with the segment: `enter()` makes one when the segment's forward starts,
       `restore()` brings it back when the segment is computed again. Any order of backwards is right.
    2. What the caller names: `recomputing`.
    3. Inside a backward that neither names: the one micro-batch that the layer has seen since. Of two, none: the order of
       backwards is first-in-first-out in 1F1B and last-in-first-out for a sum of losses, so it is an error.

    Not thread-safe; a backward that runs in a thread of the framework while its caller waits is fine.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._waiting: dict[int, deque[Batch]] = {layer: deque() for layer in layers}
        self._seen: dict[int, deque[Batch]] = {layer: deque(maxlen=2) for layer in self._waiting}
        self._computed_again: set[int] = set()
        self._scope: Scope[Batch] = Scope()
        self.recomputing: Batch | None = None
        self._restored = False

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are hooked, rising."""
        return tuple(sorted(self._waiting))

    def queue(self, batch: Batch) -> None:
        """The next micro-batch that every layer's forward will see."""
        for waiting in self._waiting.values():
            waiting.append(batch)

    def waiting(self) -> dict[int, int]:
        """Micro-batches that a layer's forward has not taken yet, for layers that have any."""
        return {layer: len(batches) for layer, batches in sorted(self._waiting.items()) if batches}

    def forget(self) -> None:
        """Drop what is queued and what was seen; scopes that a framework holds stay good."""
        for batches in (*self._waiting.values(), *self._seen.values()):
            batches.clear()
        self._computed_again.clear()

    def enter(self) -> Scope[Batch]:
        """A segment's forward starts: its scope. While a segment is computed again, the restored scope."""
        if not self._restored:
            self._scope = Scope()
        return self._scope

    def restore(self, scope: Scope[Batch]) -> None:
        """Compute again what `scope` has seen; an empty one (made by `enter`, no router called yet) goes back to forwards."""
        self._scope = scope
        self._restored = bool(scope)

    def take(self, layer: int, *, in_backward: bool) -> tuple[Batch, bool]:
        """The micro-batch of this call of the layer's router, and whether it is computed again.

        Raises InvalidInputError if none is queued, or if it cannot be told.
        """
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
            return self._only_one_seen(layer), True
        if not self._waiting[layer]:
            raise InvalidInputError(
                f"layer {layer} was called without a micro-batch: push() one before each forward. A forward without replay "
                "(evaluation, generation) belongs outside of attach(); a recomputation that the framework does not announce "
                "(paddle with preserve_rng_state=False) inside of recompute(micro_batch)"
            )
        batch = self._waiting[layer].popleft()
        # The first call counts: a scope lasts until the next segment starts, and calls outside of any segment come between.
        self._scope.setdefault(layer, batch)
        if layer in self._computed_again:
            self._seen[layer].clear()
            self._computed_again.discard(layer)
        self._seen[layer].append(batch)
        return batch, False

    def _only_one_seen(self, layer: int) -> Batch:
        seen = self._seen[layer]
        if len(seen) != 1:
            count = "several micro-batches" if seen else "no micro-batch"
            raise InvalidInputError(
                f"layer {layer} is computed again in a backward, with {count} in flight, and nothing says which one: "
                "run the backward inside of recompute(micro_batch), or give torch.utils.checkpoint "
                "context_fn=replay.checkpoint_contexts"
            )
        self._computed_again.add(layer)
        return seen[0]
