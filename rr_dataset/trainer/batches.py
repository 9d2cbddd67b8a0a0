"""Whole batches as the items of a dataset: read in one call, and in torch's workers straight into shared memory.

batches = RoutingBatches(samples)
torch.utils.data.DataLoader(batches, batch_size=None, sampler=batch_sampler, num_workers=2)
paddle.io.DataLoader(batches, num_workers=2, **whole_batches(batch_sampler))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidInputError
from rr_dataset.record import RoutingRecord
from rr_dataset.trainer.samples import RoutingSamples, as_sample


class RoutingBatches:
    """A dataset whose index is a list of indices of `samples`, and whose item is the batch of these. Pickles, forks.

    A batch is a dict as the default collate functions make one of samples: `routed_experts` [B, L, T, K], the other values
    stacked or listed. The samples have to be of equal length, ids and not refs; `layout` and `dtype` of the options make it a
    copy. In a torch worker `routed_experts` is a tensor in shared memory that the experts were read into, so handing it over
    copies nothing.

    A worker holds one batch, and the loader `prefetch_factor` more of each.
    """

    def __init__(self, samples: RoutingSamples, collate: Callable[[list[RoutingRecord]], Any] | None = None) -> None:
        """collate: makes the batch of the records instead, of any lengths, such as a `partial` of `trainer.collate.collate`."""
        if collate is None and samples.refs:
            raise InvalidInputError("refs: expected samples of ids; pass a collate function to batch those of refs")
        self.samples, self._collate = samples, collate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, indices: Sequence[int]) -> Any:
        """Raises InvalidRoutingError for samples of different lengths, and as `RoutingSamples`."""
        samples, options = self.samples, self.samples.options
        if self._collate is not None:
            return self._collate(samples.records(indices))
        keys = [samples.ids[index] for index in indices]
        shared = _SharedMemory()
        stacked = samples.dataset.get_stacked(keys, options.layers, options.tokens, shared.empty)
        parts = [
            as_sample(samples.dataset, record, samples.ids.number(index), options)
            for record, index in zip(stacked.records, indices, strict=True)
        ]
        batch = {
            name: _stack([part[name] for part in parts])  # type: ignore[literal-required]
            for name in (parts[0] if parts else {})
            if name != "routed_experts"
        }
        if options.layout == "LTK" and options.dtype in (None, stacked.routed_experts.dtype):
            batch["routed_experts"] = stacked.routed_experts if shared.tensor is None else shared.tensor
        elif parts:
            batch["routed_experts"] = np.stack([part["routed_experts"] for part in parts])
        return batch


class _SharedMemory:
    """Makes an array, in a worker of torch's loader one in shared memory, which `tensor` then is."""

    tensor: Any = None

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        torch = sys.modules.get("torch")
        if torch is None or torch.utils.data.get_worker_info() is None:
            return np.empty(shape, dtype)
        kind = getattr(torch, dtype)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        storage = torch.UntypedStorage._new_shared(size)  # noqa: SLF001 -- as torch's own collate; share_memory_() would copy
        self.tensor = torch.empty(0, dtype=kind).set_(storage).view(shape)
        array: npt.NDArray[Any] = self.tensor.numpy()
        return array


def _stack(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.stack(values)
    return np.array(values, np.int64) if isinstance(first, int) else values
