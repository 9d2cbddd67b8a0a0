"""Records as samples of a dataloader: a map-style dataset that `torch.utils.data.DataLoader` and `paddle.io.DataLoader` take.

    samples = RoutingSamples(uri, ids, SampleOptions(layers=view.layers, tokens=view.share, lengths="S-1"))
    torch.utils.data.DataLoader(samples, batch_size=8, num_workers=2)                       # reads a batch at once
    paddle.io.DataLoader(samples, num_workers=2, **whole_batches(batch_sampler, collate))   # so does this

Samples of several lengths need a `collate_fn` of yours (`list` gives them as they are), for default ones stack; or let

    batches = RoutingBatches(samples, functools.partial(rr.collate, spec=spec))             # one padded `Batch` of any lengths
    torch.utils.data.DataLoader(batches, batch_size=None, sampler=batch_sampler, collate_fn=rr.to_torch, num_workers=2)

`RoutingBatches` (batches.py) saves copies. Neither framework is imported. A worker holds a batch twice, as it was read and as it
was collated (the loader's shared memory holds `prefetch_factor` more of them per worker), and an index cache of at most 256 MB.
What the dataset object of the parent knew before workers are forked (by `wait_for`, `heads` or a read) they share with it.

With `num_workers=0` paddle's DataLoader (3.3) waits for ever when a dataset raises: give it a worker where a record may be missing.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, TypedDict, overload

import numpy as np
import numpy.typing as npt

from rr_dataset.dataset import RoutingDataset, open_dataset
from rr_dataset.errors import (
    AlignmentError,
    InvalidInputError,
    NotFoundError,
    ReadConflictError,
    RoutingDatasetError,
)
from rr_dataset.lookup import listed
from rr_dataset.options import check_whole
from rr_dataset.payload import NO_LOGPROB, NO_TOKEN_ID
from rr_dataset.record import LAYOUTS, RecordHead, RoutingRecord
from rr_dataset.selection import Share, Tokens, token_ranges
from rr_dataset.trainer.idlist import IdList
from rr_dataset.trainer.prefetch import Prefetch

PREFETCH_BYTES = 256 << 20
_TRIES = 5  # reads of records that are put again meanwhile

PRESENT = ("tokens", "layers", "none")

Lengths = Literal["S", "S-1"] | Mapping[str, int] | Callable[[str], int]


class Sample(TypedDict, total=False):
    """What a dataset gives for one id: plain values and numpy arrays, the same keys for every sample of one dataset.

    T: rows asked for, L: layers read, K: top_k. Default collate functions stack samples of equal T.
    """

    request_id: str
    number: int  # what IdList.number says of it: the row and a check
    num_tokens: int  # of the whole record
    routed_experts: npt.NDArray[Any]  # [L, T, K] or [T, L, K]; bytes of rows that are not present mean nothing
    present: npt.NDArray[np.bool_]  # [T] or [L, T]: whether the experts are real
    token_ids: npt.NDArray[np.int32]  # [T], -1 where none is known
    logprobs: npt.NDArray[np.float32]  # [T], NaN where none is known


@dataclass(frozen=True)
class SampleOptions:
    """What to read of each record and in which form. Pickles if `tokens` and `lengths` do.

    layers: rising layer ids; None: all. A pipeline stage asks for its own.
    tokens: for all records alike as in `RoutingDataset.get`; None: all. Or what cuts the trainer's sequence, a function from the
        trainer's number of tokens of a sample to a selection or a `Share`, such as `RankView.share`: rows that it asks for and
        the record does not have are there and not present, at the end (it costs one more listing).
    lengths: needed with a function, which a record cannot tell it: the trainer's number of tokens of each sample, by request id
        or as a function of it; "S": as many as recorded; "S-1": one more than recorded, the last one was sampled and never
        fed (vLLM, SGLang, slime).
    layout: "LTK" [layers, tokens, top_k], the order at rest, or "TLK", a view of it.
    dtype: an integer dtype that holds the ids, for frameworks that lack the stored one: paddle reads uint16 as bfloat16 and
        has no uint32, torch cannot compare uint16. None: as stored, without a copy.
    present: "tokens" for [T], true where every layer that was read is there; "layers" for [L, T]; "none" to leave it out.
    vectors: token_ids and logprobs too.
    """

    layers: Sequence[int] | None = None
    tokens: Tokens | Callable[[int], Tokens | Share] = None
    lengths: Lengths | None = None
    layout: Literal["LTK", "TLK"] = "LTK"
    dtype: str | None = None
    present: Literal["tokens", "layers", "none"] = "tokens"
    vectors: bool = False

    def __post_init__(self) -> None:
        if callable(self.tokens) != (self.lengths is not None):
            raise InvalidInputError(
                f"tokens={self.tokens!r}, lengths={self.lengths!r}: a function, and only that, needs lengths=, the trainer's number "
                "of tokens of each sample: 'S' where a record has a row for each, 'S-1' where it lacks the last one's, or by id"
            )
        if isinstance(self.lengths, str) and self.lengths not in ("S", "S-1"):
            raise InvalidInputError(
                f"lengths={self.lengths!r}: expected S, S-1, a mapping from ids, or a function of them"
            )
        if self.layout not in LAYOUTS:
            raise InvalidInputError(f"layout={self.layout!r}: expected one of {', '.join(LAYOUTS)}")
        if self.present not in PRESENT:
            raise InvalidInputError(f"present={self.present!r}: expected one of {', '.join(PRESENT)}")
        if self.dtype is not None and not _is_integer_type(self.dtype):
            raise InvalidInputError(f"dtype={self.dtype!r}: expected an integer type, such as 'int32'")

    def share(self, head: RecordHead) -> Share:
        """The rows asked of a record. Raises AlignmentError for one that has more tokens than the trainer."""
        recorded, request_id = head.num_tokens, head.request_id
        if not callable(self.tokens):
            return Share(token_ranges(self.tokens, recorded, request_id))
        count = self._length(request_id, recorded)
        if count < recorded:
            raise AlignmentError(
                f"{request_id!r} has {recorded} rows and lengths= says {count} tokens: a trainer that cuts samples off says the "
                "number before, and cuts in tokens="
            )
        asked = self.tokens(count)
        share = asked if isinstance(asked, Share) else Share(token_ranges(asked, count, request_id))
        token_ranges(share.ranges, count, request_id)
        return share

    def _length(self, request_id: str, recorded: int) -> int:
        if isinstance(self.lengths, str):
            return recorded + (self.lengths == "S-1")
        if callable(self.lengths):
            found: object = self.lengths(request_id)
        elif self.lengths is None or request_id not in self.lengths:
            raise InvalidInputError(f"lengths= has no number of tokens for {request_id!r}")
        else:
            found = self.lengths[request_id]
        return check_whole(f"lengths= of {request_id!r}", found, 0)


class RoutingSamples:
    """The records of some ids, or the very puts that refs name, as a map-style dataset. Pickles, forks, thread-safe.

    Nothing is read until a sample is asked for; each process makes a client of its own.
    """

    def __init__(
        self,
        dataset: RoutingDataset | str | os.PathLike[str],
        ids: Iterable[str] | None = None,
        options: SampleOptions | None = None,
        *,
        refs: Iterable[str] | None = None,
    ) -> None:
        """ids: request ids; an id may stand there more than once. refs: instead of ids, what `Receipt.ref` says.

        Raises InvalidInputError unless one of the two is given, DatasetNotFoundError for an address without a dataset.
        """
        if (ids is None) == (refs is None):
            raise InvalidInputError("expected either ids or refs")
        self.dataset = dataset if isinstance(dataset, RoutingDataset) else open_dataset(dataset)
        self.options = SampleOptions() if options is None else options
        self.ids = ids if isinstance(ids, IdList) else IdList(refs or () if ids is None else ids)
        self.refs = refs is not None

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, index: list[int]) -> list[Sample]: ...

    def __getitem__(self, index: SupportsIndex | list[int]) -> Sample | list[Sample]:
        """One sample, or with a list of indices all of them, read together.

        Raises IndexError, and as `RoutingDataset.get` with the request id in the text.
        """
        if isinstance(index, list):
            return self.__getitems__(index)
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples in the order asked, read in one call: what torch's DataLoader asks for a batch."""
        keys = [self.ids[index] for index in indices]
        numbers = [self.ids.number(index) for index in indices]
        return read_samples(self.dataset, keys, numbers, self.options, refs=self.refs)

    def records(self, indices: Sequence[int]) -> list[RoutingRecord]:
        """The records themselves, read in one call: what there is of the rows asked for."""
        return [record for record, _ in self.records_and_shares(indices)]

    def records_and_shares(self, indices: Sequence[int]) -> list[tuple[RoutingRecord, Share]]:
        """The same, each with what was asked for."""
        return read_records(self.dataset, [self.ids[index] for index in indices], self.options, refs=self.refs)

    def read_ahead(
        self, batches: Iterable[Sequence[int]], prefetch_bytes: int = PREFETCH_BYTES
    ) -> Iterator[list[Sample]]:
        """The samples of each batch of indices, read by a thread ahead of the caller: a loader without processes.

        prefetch_bytes: arrays of at most so many bytes wait, besides one batch. Break off or exhaust it to end the thread.
        """
        check_whole("prefetch_bytes", prefetch_bytes, 0)
        return iter(Prefetch(self.__getitems__, batches, sample_bytes, prefetch_bytes))


def sample_bytes(samples: Iterable[Sample]) -> int:
    """Bytes of the arrays of some samples."""
    return sum(value.nbytes for sample in samples for value in sample.values() if isinstance(value, np.ndarray))


def read_samples(
    dataset: RoutingDataset, keys: Sequence[str], numbers: Sequence[int], options: SampleOptions, *, refs: bool = False
) -> list[Sample]:
    """The samples of some ids or refs. Whatever is raised names the id."""
    records = read_records(dataset, keys, options, refs=refs)
    return [
        as_sample(dataset, record, number, options, _filled_up(record.routed_experts, share.num_rows, 0, axis=1))
        for (record, share), number in zip(records, numbers, strict=True)
    ]


def read_records(
    dataset: RoutingDataset, keys: Sequence[str], options: SampleOptions, *, refs: bool = False
) -> list[tuple[RoutingRecord, Share]]:
    """Their records, each with what was asked of it, likewise."""
    try:
        return _read(dataset, keys, options, refs=refs)
    except NotFoundError:
        raise  # these name ids
    except RoutingDatasetError:
        for key in keys:
            try:
                _read(dataset, [key], options, refs=refs)
            except RoutingDatasetError as error:
                raise type(error)(f"{key!r}: {error}") from error
        raise


def _read(
    dataset: RoutingDataset, keys: Sequence[str], options: SampleOptions, *, refs: bool
) -> list[tuple[RoutingRecord, Share]]:
    read = dataset.resolve if refs else dataset.get_many
    if not callable(options.tokens):
        return [(record, Share(record.token_ranges)) for record in read(keys, options.layers, options.tokens)]
    for _ in range(_TRIES):
        heads = read(keys, options.layers, slice(0, 0))
        shares = [options.share(head) for head in heads]
        tokens = [share.recorded(head.num_tokens) for share, head in zip(shares, heads, strict=True)]
        records = read(keys, options.layers, tokens)
        if all(record.num_tokens == head.num_tokens for record, head in zip(records, heads, strict=True)):
            return list(zip(records, shares, strict=True))
    raise ReadConflictError(f"{listed(keys)}: put again, of another length, in each of {_TRIES} reads")


def as_sample(
    dataset: RoutingDataset, record: RoutingRecord, number: int, options: SampleOptions, experts: npt.NDArray[Any]
) -> Sample:
    """The form that the options ask for. Raises InvalidInputError for a dtype that does not hold the ids.

    experts: [L, T, K], which begins with those of the record; of rows behind them nothing is present.
    """
    rows = experts.shape[1]
    if options.layout == "TLK":
        experts = experts.transpose(1, 0, 2)
    if options.dtype is not None and experts.dtype != options.dtype:
        largest = dataset.spec.num_experts - 1
        if largest > np.iinfo(options.dtype).max:
            raise InvalidInputError(f"dtype={options.dtype!r} does not hold expert {largest}: pass a wider one")
        experts = experts.astype(options.dtype)
    sample = Sample(request_id=record.request_id, number=number, num_tokens=record.num_tokens, routed_experts=experts)
    count = record.routed_experts.shape[1]
    if options.present == "layers":
        sample["present"] = _filled_up(record.present(), rows, 0, axis=1)
    elif options.present == "tokens":
        there = record.present().min(axis=0) if record.missing_by_layer else np.ones(count, np.bool_)
        sample["present"] = _filled_up(there, rows, 0)
    if options.vectors:
        ids, logprobs = record.token_ids, record.logprobs
        ids = np.full(count, NO_TOKEN_ID, np.int32) if ids is None else ids
        logprobs = np.full(count, NO_LOGPROB, np.float32) if logprobs is None else logprobs
        sample["token_ids"] = _filled_up(ids, rows, NO_TOKEN_ID)
        sample["logprobs"] = _filled_up(logprobs, rows, NO_LOGPROB)
    return sample


def _filled_up(array: npt.NDArray[Any], rows: int, filler: float, axis: int = 0) -> npt.NDArray[Any]:
    """The array with so many rows; itself, if it has them."""
    read = array.shape[axis]
    if read == rows:
        return array
    filled = np.empty((*array.shape[:axis], rows, *array.shape[axis + 1 :]), array.dtype)
    by_row = np.moveaxis(filled, axis, 0)
    by_row[:read] = np.moveaxis(array, axis, 0)
    by_row[read:] = filler
    return filled


def _is_integer_type(name: object) -> bool:
    try:
        return np.dtype(name).kind in "iu"  # type: ignore[call-overload]  # whatever it is
    except TypeError:
        return False


def whole_batches(
    batch_sampler: Iterable[Sequence[int]], collate_fn: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Arguments for `paddle.io.DataLoader` with which a batch is read in one call, not sample by sample.

    batch_sampler: paddle's, or any iterable of lists of indices.
    collate_fn: gets the list of `RoutingSamples`, as without this; None for `RoutingBatches`, whose items are batches.
    """
    return {"batch_sampler": _Wrapped(batch_sampler), "collate_fn": _Unwrapping(collate_fn)}


class _Wrapped:
    """A batch sampler whose batches have one index each: the list of indices."""

    def __init__(self, batch_sampler: Iterable[Sequence[int]]) -> None:
        self._batches = batch_sampler

    def __iter__(self) -> Iterator[list[list[int]]]:
        return ([list(indices)] for indices in self._batches)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Unwrapping:
    collate_fn: Callable[[Any], Any] | None

    def __call__(self, batch: list[Any]) -> Any:
        (whole,) = batch
        return whole if self.collate_fn is None else self.collate_fn(whole)
