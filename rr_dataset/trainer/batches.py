"""Whole batches as the items of a dataset: read in one call, and in a loader's workers straight into shared memory.

batches = RoutingBatches(samples)
torch.utils.data.DataLoader(batches, batch_size=None, sampler=batch_sampler, num_workers=2)
paddle.io.DataLoader(batches, num_workers=2, **whole_batches(batch_sampler))
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.errors import InvalidInputError
from rr_dataset.trainer.samples import RoutingSamples, as_sample

_OF_PADDLE = ("uint8", "int8", "int16", "int32", "int64")  # numpy's uint16 is its bfloat16


class RoutingBatches:
    """A dataset whose index is a list of indices of `samples`, and whose item is the batch of these. Pickles, forks.

    A batch is a dict as the default collate functions make one of samples: `routed_experts` [B, L, T, K], the other values
    stacked or listed. The samples have to be of equal length, ids and not refs; `layout` and `dtype` of the options make it a
    copy. In a worker `routed_experts` is a tensor in shared memory that the experts were read into, so handing it over copies
    nothing (paddle: not for uint16 and uint32, which it lacks).

    A worker holds one batch, and the loader `prefetch_factor` more of each: 10 MB of its own and 12, 24 or 48 MB in shared memory
    were measured for batches of 1, 2 or 4 records of 12.6 MB, the same after 16 batches, and an index cache of at most 256 MB
    comes on top.
    """

    def __init__(self, samples: RoutingSamples, collate: Callable[..., Any] | None = None) -> None:
        """collate: makes the batch of the records instead, of any lengths, such as a `partial` of `trainer.collate.collate`. Where
        `tokens` of the options is a function, it is also given `num_tokens`, how many each sample has on this rank, padding apart.
        """
        if collate is None and samples.refs:
            raise InvalidInputError("refs: expected samples of ids; pass a collate function to batch those of refs")
        self.samples, self._collate = samples, collate

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, indices: Sequence[int]) -> Any:
        """Raises InvalidRoutingError for samples of different lengths, and as `RoutingSamples`."""
        samples, options = self.samples, self.samples.options
        if self._collate is not None:
            read = samples.records_and_shares(indices)
            how = {"num_tokens": [share.num_tokens for _, share in read]} if callable(options.tokens) else {}
            return self._collate([record for record, _ in read], **how)
        keys = [samples.ids[index] for index in indices]
        shared = _SharedMemory()
        tokens = options.share if callable(options.tokens) else options.tokens
        stacked = samples.dataset.get_stacked(keys, options.layers, tokens, shared.empty)
        parts = [
            as_sample(samples.dataset, record, samples.ids.number(index), options, experts)
            for record, index, experts in zip(stacked.records, indices, stacked.routed_experts, strict=True)
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
    """Makes an array, in a worker of a loader one in the framework's shared memory, which `tensor` then is."""

    tensor: Any = None

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        for name, share in (("torch.utils.data", _shared_by_torch), ("paddle.io", _shared_by_paddle)):
            module = sys.modules.get(name)
            if math.prod(shape) and module is not None and module.get_worker_info() is not None:
                self.tensor = share(shape, dtype)
        array: npt.NDArray[Any] = np.empty(shape, dtype) if self.tensor is None else np.from_dlpack(self.tensor)
        return array


def _shared_by_torch(shape: tuple[int, ...], dtype: str) -> Any:
    torch = sys.modules["torch"]
    size = math.prod(shape) * np.dtype(dtype).itemsize
    storage = torch.UntypedStorage._new_shared(size)  # noqa: SLF001 -- as torch's own collate; share_memory_() would copy
    return torch.empty(0, dtype=getattr(torch, dtype)).set_(storage).view(shape)


def _shared_by_paddle(shape: tuple[int, ...], dtype: str) -> Any:
    """None for types that paddle lacks. Its loader would copy an array twice, and leaves a tensor that is shared where it is."""
    if dtype not in _OF_PADDLE:
        return None
    tensor = sys.modules["paddle"].empty(shape, dtype)
    tensor.get_tensor()._share_filename(False)  # noqa: FBT003, SLF001 -- as its loader shares; False: by name, not descriptor
    return tensor


def _stack(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, np.ndarray):
        return np.stack(values)
    return np.array(values, np.int64) if isinstance(first, int) else values
