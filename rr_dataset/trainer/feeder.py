"""Routing for trainers whose dataloader runs on one rank and broadcasts.

PaddleFormers' DistDataLoader (0.4.1) loads on one rank of a model, gives pipeline stages in the middle an empty batch, or one of
memory that was never written where there are tensor ranks, and takes an error for the end of the epoch. So the batch carries one
int64 number per sample and no routing, and every rank reads its own layers:

    ids = IdList(manifest)                                # alike on every rank
    dataset rows: {..., "routing_row": ids.number(row)}   # in the trainer's own dataset
    feeder = RankFeeder(uri, ids, SampleOptions(layers=view.layers, tokens=view.share, lengths="S-1"), gather)
    for batch in loader: samples = feeder.feed(batch["routing_row"] if stage in (0, last_stage) else None)
    feeder.finish(expected=num_samples)                   # an epoch that ended early is an error

The numbers are checked on every rank (see idlist.py), and what goes wrong on one rank is raised on all that `gather` reaches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from rr_dataset import errors
from rr_dataset.dataset import RoutingDataset, open_dataset
from rr_dataset.errors import InvalidInputError, RoutingDatasetError
from rr_dataset.trainer.idlist import IdList, as_numbers
from rr_dataset.trainer.samples import Sample, SampleOptions, read_samples

Gather = Callable[[Any], Sequence[Any]]

_T = TypeVar("_T")


class RankFeeder:
    """Reads, on each rank by itself, the samples that the numbers of a batch name. One thread at a time."""

    def __init__(
        self,
        dataset: RoutingDataset | str | os.PathLike[str],
        ids: IdList | Iterable[str],
        options: SampleOptions | None = None,
        gather: Gather | None = None,
    ) -> None:
        """ids: the list that numbers count in, alike on every rank.

        gather: a collective that takes this rank's value and returns the values of all ranks, in the order of ranks, over exactly
            those that get the same batch (tensor and pipeline ranks of one model). With `torch.distributed` or
            `paddle.distributed` that is their all_gather_object. Values are small and pickle. None: no rank hears of the errors
            of another, and each must be given the numbers.

        Raises DatasetNotFoundError for an address without a dataset.
        """
        self.dataset = dataset if isinstance(dataset, RoutingDataset) else open_dataset(dataset)
        self.ids = ids if isinstance(ids, IdList) else IdList(ids)
        self.options = SampleOptions() if options is None else options
        self.fed = 0  # samples since the start or the last `finish`
        self._gather = gather

    def feed(self, numbers: npt.ArrayLike | None) -> list[Sample]:
        """The samples of a batch, in its order, with this rank's layers and tokens. With `gather`, all ranks call it together.

        numbers: int64 [samples], of any shape, from `IdList.number`; None on a rank to which the loader gave nothing: it then takes those of the
            others.

        Either every rank gets its samples or every rank raises: what failed here as it is, what failed on another rank as an
        error of the same class that names the rank. No rank is left waiting, not even by one that is interrupted while it reads.
        Raises InvalidInputError for numbers of another list, or where ranks disagree, and as `RoutingDataset.get_many`.
        """
        _, everywhere = self._together(lambda: None if numbers is None else as_numbers(numbers), lambda given: given)
        agreed = _agreed(everywhere)
        samples, _ = self._together(lambda: self._read(agreed), lambda _: None)
        self.fed += len(samples)
        return samples

    def finish(self, expected: int) -> None:
        """Say that the epoch is over: the loader has ended, and `expected` samples should have been fed to this rank.

        Raises InvalidInputError when it were others: a loader that swallows exceptions ends early and says nothing.
        """
        fed, self.fed = self.fed, 0
        if fed != expected:
            raise InvalidInputError(
                f"{fed} samples were fed and {expected} expected: the loader ended early, perhaps over an error that it keeps to "
                "itself; look at its log on the rank that loads"
            )

    def _read(self, numbers: Sequence[int]) -> list[Sample]:
        keys = [self.ids[row] for row in self.ids.rows(numbers)]
        return read_samples(self.dataset, keys, numbers, self.options)

    def _together(self, work: Callable[[], _T], tell: Callable[[_T], Any]) -> tuple[_T, list[Any]]:
        """The result of `work`, and what each rank tells of its own. Each takes part in the collective, whatever befell it."""
        failure: BaseException | None = None
        told = None
        try:
            result = work()
            told = tell(result)
        except BaseException as error:  # noqa: BLE001 -- Ctrl-C too; raised below, once the others have heard of it
            failure = error
        if self._gather is not None:
            reason = None if failure is None else (type(failure).__name__, str(failure))
            everywhere = list(self._gather((told, reason)))
        else:
            everywhere = [(told, None)]
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(everywhere):
            if reason is not None:
                kind = getattr(errors, reason[0], RoutingDatasetError)
                raise kind(f"rank {rank} of {len(everywhere)}: {reason[0]}: {reason[1]}")
        return result, [told for told, _ in everywhere]


def _agreed(everywhere: Sequence[list[int] | None]) -> list[int]:
    """The numbers of the batch. Every rank decides from the same values, so all raise or none does."""
    given = [(rank, numbers) for rank, numbers in enumerate(everywhere) if numbers is not None]
    if not given:
        raise InvalidInputError(
            f"none of {len(everywhere)} ranks has row numbers: pass those of the batch, or a `gather` that spans the rank that loads"
        )
    first, batch = given[0]
    for rank, numbers in given:
        if numbers != batch:
            raise InvalidInputError(
                f"ranks {first} and {rank} have different batches, numbers {batch[:4]} and {numbers[:4]}: `gather` must span only "
                "ranks that get the same one"
            )
    return batch
