"""FastDeploy's store contract on a dataset: what is awaited is durable, calls keep their order, and failures are raised."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rr_dataset.capture.fastdeploy.config import open_writer
from rr_dataset.contracts import unpadded
from rr_dataset.errors import InvalidRequestIdError, InvalidRoutingError
from rr_dataset.intake import to_array
from rr_dataset.receipt import Receipt
from rr_dataset.writer import RoutingWriter

CLEAR_TIMEOUT_S = 60.0
MAX_LOWER_TURNS = 1_000  # that one call clears
MAX_BEGUN = 10_000  # records that come layer by layer at once
_DIGITS = 10  # of a layer
INCOMPLETE = "its layers did not all come"


class RoutingStoreDataset:
    """The store contract: `put`, `clear_store`, `clear_prefix_batch`, each done when its await returns."""

    def __init__(self, writer: RoutingWriter) -> None:
        """writer: stays the caller's to close."""
        self.writer = writer
        self._spec = writer.dataset.spec
        self._begun: dict[str, set[int]] = {}  # ids that come layer by layer, and the layers they have

    async def put(self, routing_key: str, routing_indices: Any) -> None:
        """Store one record and return when it is durable.

        routing_key: the id of the record with [layers, tokens, top_k], or `<id>_<layer>` with [tokens, top_k], the layer counted
            from the first MoE layer. Rows of -1, in unsigned types the greatest number, are padding at the end and missing
            before it. A record that comes layer by layer is final when it has them all; a layer that comes again starts it over.

        Raises InvalidRoutingError or InvalidRequestIdError, RecordDroppedError with a full spool, and what `Receipt.wait` raises.
        """
        await self.submit(routing_key, routing_indices)

    async def clear_store(self) -> None:
        """Delete all that this run has put before this call, and return when it is gone for readers."""
        await self.writer.clear_run()

    async def clear_prefix_batch(self, routing_prefix_key: str | Sequence[str]) -> None:
        """Delete what was put under a prefix, or several, before this call: by component, `a:1` leaves `a:10`."""
        keys = [routing_prefix_key] if isinstance(routing_prefix_key, str) else list(routing_prefix_key)
        for receipt in [self.writer.delete_prefix(key) for key in keys]:
            await receipt

    def submit(self, routing_key: str, routing_indices: Any) -> Receipt:
        """As `put`, without the wait."""
        array = to_array("routing_indices", routing_indices)
        if array.dtype.kind not in "iu":
            raise InvalidRoutingError(
                f"routing_indices has dtype {array.dtype}: expected the ids of experts, of an integer dtype"
            )
        if not isinstance(routing_key, str):
            raise InvalidRequestIdError(f"routing key {routing_key!r}: expected a text")
        if array.ndim == 3:
            return self._put(routing_key, self._moe_layers(array), None)
        request_id, _, number = routing_key.rpartition("_")
        if array.ndim != 2 or not request_id or not (number.isascii() and number.isdecimal() and len(number) < _DIGITS):
            raise InvalidRoutingError(
                f"routing key {routing_key!r} with {list(array.shape)}: expected <id> with [layers, tokens, top_k], or "
                "<id>_<layer> with [tokens, top_k]"
            )
        return self._put_layer(request_id, int(number), array)

    def _put_layer(self, request_id: str, number: int, array: Any) -> Receipt:
        layer = self._spec.moe_layers[0] + number
        if layer not in self._spec.moe_layers:
            raise InvalidRoutingError(
                f"record {request_id!r}: layer {number} from the first MoE layer on is layer {layer} of the model, which is no "
                "MoE layer of the dataset"
            )
        self.writer.dataset.keys.parse(request_id)
        begun = self._begun.setdefault(request_id, set())
        if not begun or layer in begun:  # a whole put of nothing: what an earlier attempt had is no part of this one
            begun.clear()
            with self.writer.reserve(request_id, 0, status="partial"):
                pass
        receipt = self._put(request_id, array[None], (layer,))
        begun.add(layer)
        if len(self._begun) > MAX_BEGUN:
            oldest = next(iter(self._begun))
            del self._begun[oldest]
            self.writer.drop(oldest, INCOMPLETE, part=True)
        if len(begun) == self._spec.num_layers:
            del self._begun[request_id]
        return receipt

    def _put(self, request_id: str, array: Any, layers: tuple[int, ...] | None) -> Receipt:
        spec = self._spec if layers is None else replace(self._spec, moe_layers=layers)
        experts, missing = unpadded(array, spec)
        return self.writer.put(request_id, experts, "LTK", layers=layers, status="complete", missing=missing)

    def _moe_layers(self, array: Any) -> Any:
        """Of the layers from the first MoE layer on, those that route: FastDeploy counts the others too."""
        layers = self._spec.moe_layers
        tail = [layer - layers[0] for layer in layers]
        between = len(layers) < tail[-1] + 1 <= len(array)
        return array[tail] if between else array


class StoreWrapper:
    """FastDeploy's queue in front of a store, without the queue: what is submitted lies in the spool."""

    def __init__(self, fd_config: Any, writer: RoutingWriter | None = None) -> None:
        """writer: one that is open already; else one is opened, and closed by `shutdown`."""
        self._own = writer is None
        self.writer = open_writer(fd_config) if writer is None else writer
        self.store = RoutingStoreDataset(self.writer)
        if self._own:
            atexit.register(self.shutdown)

    def start_store_warpper(self) -> None:
        """Nothing is left to start; nothing is cleared."""

    def submit_put_task(self, routing_indices: Any, rollout_id: str, layer_idx: int | None = None) -> Receipt:
        """As `RoutingStoreDataset.put`, at once; the receipt can be waited for."""
        return self.store.submit(rollout_id if layer_idx is None else f"{rollout_id}_{layer_idx}", routing_indices)

    def submit_clear_store_task(self) -> None:
        """Delete what this run has put, and return when that is done. Raises what `Receipt.wait` raises."""
        self.writer.clear_run().wait(CLEAR_TIMEOUT_S)

    def submit_clear_prefix_batch_task(self, rollout_id: str, layer_idx: int | None = None) -> list[Receipt]:
        """Delete all lower turns of a rollout's conversation, sample and segment, also those that were skipped.

        A dataset with keep="last_turn" shows and keeps the highest turn only, by itself: then there is nothing to delete. Elsewhere
        each lower turn is a delete of its own, so InvalidRequestIdError is raised where there are more than MAX_LOWER_TURNS.
        """
        dataset = self.writer.dataset
        if dataset.last_turn is not None or layer_idx:
            return []
        keys, key = dataset.keys, dataset.keys.parse(rollout_id)
        found = dict(zip(keys.components, key.components, strict=True))
        turn = None if keys.turn is None else found[keys.turn]
        if turn is None:
            return []
        if int(turn) > MAX_LOWER_TURNS:
            raise InvalidRequestIdError(
                f"{rollout_id!r} has {turn} lower turns: at most {MAX_LOWER_TURNS} are cleared at once; make the dataset with "
                'keep="last_turn" (only_last_turn), or delete the conversation'
            )
        prefix: dict[str, str | int] = {name: value for name, value in found.items() if value is not None}
        if key.choice is not None:
            prefix["choice"] = key.choice
        return [self.writer.delete_prefix({**prefix, str(keys.turn): number}) for number in range(int(turn))]

    def shutdown(self) -> None:
        """Make everything durable. Raises what `RoutingWriter.close` raises."""
        if self._own:
            atexit.unregister(self.shutdown)
            self.writer.close()


def get_routing_store(fd_config: Any) -> RoutingStoreDataset:
    """The store of a config. Raises InvalidInputError for a type that is no dataset; never drops in silence."""
    return RoutingStoreDataset(open_writer(fd_config))
