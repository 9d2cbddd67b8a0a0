"""The trainer's side of FastDeploy's store contract: `get`, with its dtype, its padding and its mark of missing rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.capture.fastdeploy.shared import wire_dtype
from rr_dataset.contracts.arrays import minus_one
from rr_dataset.dataset import RoutingDataset, open_dataset
from rr_dataset.errors import InvalidRoutingError
from rr_dataset.record import RoutingRecord


class RoutingReader:
    """Gives records as FastDeploy's stores do. Pickles as a RoutingDataset does."""

    def __init__(
        self,
        dataset: RoutingDataset | str | os.PathLike[str],
        *,
        use_fused_put: bool = False,
        pad_to: int | None = None,
    ) -> None:
        """dataset: one that is open, or its place. use_fused_put: what keys look like, as in FastDeploy's config.

        pad_to: of every call that gives none; FastDeploy pads to `max_model_len`.
        """
        self.dataset = dataset if isinstance(dataset, RoutingDataset) else open_dataset(dataset)
        self.use_fused_put, self.pad_to = use_fused_put, pad_to
        self._layers = self.dataset.spec.moe_layers
        self.dtype = wire_dtype(self.dataset.spec)  # one in which -1 is no expert

    def get(self, routing_key: str, pad_to: int | None = None) -> npt.NDArray[Any]:
        """The routing of one key, an array of the caller's own.

        routing_key: a record's id for [layers, tokens, top_k], from the first MoE layer to the last; with `use_fused_put=False`
            `<id>_<layer>` for [tokens, top_k], the layer counted from the first MoE layer.
        pad_to: the length of the token axis. Rows beyond the record, missing rows and layers that do not route are -1, wrapped:
            255, 65535 or 4294967295. paddle takes numpy's uint16 for bfloat16: cast it to int32 before `paddle.to_tensor`.

        Raises RecordNotFoundError, RecordDroppedError, and InvalidRoutingError for a record longer than `pad_to` or a layer that
        is none.
        """
        if self.use_fused_put:
            return self._padded(self.dataset.get(routing_key), pad_to or self.pad_to)
        request_id, _, number = routing_key.rpartition("_")
        layer = self._layers[0] + int(number) if number.isascii() and number.isdecimal() else -1
        if layer not in self._layers:
            raise InvalidRoutingError(
                f"routing key {routing_key!r}: expected <id>_<layer>, the layer counted from the first MoE layer"
            )
        record = self.dataset.get(request_id, layers=[layer])
        one: npt.NDArray[Any] = self._padded(record, pad_to or self.pad_to)[layer - self._layers[0]]
        return one

    def get_many(self, request_ids: Sequence[str], pad_to: int | None = None) -> npt.NDArray[Any]:
        """[records, layers, tokens, top_k] of whole records in the order asked, as `get`; by default as long as the longest."""
        records = self.dataset.get_many(request_ids)
        longest = max((record.num_tokens for record in records), default=0)
        return np.stack([self._padded(record, pad_to or self.pad_to or longest) for record in records])

    def _padded(self, record: RoutingRecord, pad_to: int | None) -> npt.NDArray[Any]:
        length = record.num_tokens if pad_to is None else pad_to
        if length < record.num_tokens:
            raise InvalidRoutingError(
                f"record {record.request_id!r} has {record.num_tokens} tokens: expected at most pad_to={length}"
            )
        first, last = self._layers[0], self._layers[-1]
        shape = (last - first + 1, length, self.dataset.spec.top_k)
        out = np.full(shape, minus_one(self.dtype), self.dtype)
        for layer, there in zip(record.layers, record.present(), strict=True):
            out[layer - first, : record.num_tokens][there] = record.layer(layer)[there]
        return out
