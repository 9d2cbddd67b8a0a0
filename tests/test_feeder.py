from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stored import Stored
from thread_ranks import Ranks

import rr_dataset as rr
from rr_dataset.trainer.feeder import RankFeeder
from rr_dataset.trainer.idlist import IdList
from rr_dataset.trainer.samples import SampleOptions

IDS = IdList([f"math_{prompt}:0:0:0" for prompt in range(4)])
LAYERS = ((3, 4), (7,), (9,))  # of three pipeline stages


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    stored = Stored(tmp_path / "d")
    for request_id in IDS:
        stored.put(request_id, 5)
    return stored


def feeders(stored: Stored, ranks: Ranks, ids: tuple[IdList, ...] = (IDS, IDS, IDS)) -> list[RankFeeder]:
    return [
        RankFeeder(stored.root, ids[rank], SampleOptions(layers=LAYERS[rank]), ranks.gather(rank)) for rank in range(3)
    ]


def test_each_rank_reads_its_own_layers(stored: Stored) -> None:
    """The stage in the middle gets no batch, and takes the numbers of the others."""
    ranks = Ranks(3)
    made = feeders(stored, ranks)
    batch = IDS.numbers([2, 0])
    results = ranks.run(lambda rank: made[rank].feed(None if rank == 1 else batch))
    for rank, samples in enumerate(results):
        assert [each["request_id"] for each in samples] == [IDS[2], IDS[0]]
        for sample in samples:
            want = stored.dataset.get(sample["request_id"], LAYERS[rank]).routed_experts
            assert np.array_equal(sample["routed_experts"], want)
    for feeder in made:
        feeder.finish(expected=2)
        assert feeder.fed == 0


def test_alone_it_needs_no_collective(stored: Stored) -> None:
    feeder = RankFeeder(stored.dataset, list(IDS))
    assert [each["request_id"] for each in feeder.feed(IDS.numbers([1, 3]).reshape(2, 1))] == [IDS[1], IDS[3]]
    assert feeder.feed([]) == []
    with pytest.raises(rr.InvalidInputError, match="none of 1 ranks has row numbers"):
        feeder.feed(None)
    with pytest.raises(rr.InvalidInputError, match="int32"):
        feeder.feed(np.zeros(1, np.int32))


def test_an_error_of_one_rank_is_raised_on_all(stored: Stored) -> None:
    stored.put("half:0", 5, layers=(3, 4))
    ids = IdList([*IDS, "half:0"])
    ranks = Ranks(3)
    made = feeders(stored, ranks, (ids, ids, ids))
    made[2].options = SampleOptions(layers=(99,))
    for batch in ([0, 1], [4]):
        results = ranks.run(lambda rank, batch=batch: made[rank].feed(ids.numbers(batch)))
        assert all(isinstance(each, rr.InvalidRoutingError) for each in results)
        assert all("99" in str(each) for each in results)
        assert "rank 2 of 3: InvalidRoutingError" in str(results[0])
    made[2].options = SampleOptions(layers=(9,))
    assert all(len(each) == 1 for each in ranks.run(lambda rank: made[rank].feed(ids.numbers([0]))))


def test_an_error_that_is_not_ours_is_told_too(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3)
    made = feeders(stored, ranks)
    monkeypatch.setattr(made[1], "_read", lambda _: 1 / 0)
    first, second, third = ranks.run(lambda rank: made[rank].feed(IDS.numbers([0])))
    assert isinstance(second, ZeroDivisionError)
    for other in (first, third):
        assert isinstance(other, rr.RoutingDatasetError)
        assert "rank 1 of 3: ZeroDivisionError" in str(other)


def test_ranks_with_different_lists_hear_of_it(stored: Stored) -> None:
    ranks = Ranks(3)
    made = feeders(stored, ranks, (IDS, IDS, IdList(reversed(list(IDS)))))
    results = ranks.run(lambda rank: made[rank].feed(IDS.numbers([1]) if rank == 0 else None))
    assert all(isinstance(each, rr.InvalidInputError) for each in results)
    assert all("another list" in str(each) for each in results)


def test_no_batch_or_two_batches_are_errors_everywhere(stored: Stored) -> None:
    ranks = Ranks(3)
    made = feeders(stored, ranks)
    for each in ranks.run(lambda rank: made[rank].feed(None)):
        assert isinstance(each, rr.InvalidInputError)
    for each in ranks.run(lambda rank: made[rank].feed(IDS.numbers([rank]))):
        assert isinstance(each, rr.InvalidInputError)
        assert "different batches" in str(each)


def test_an_epoch_that_ended_early_is_an_error(stored: Stored) -> None:
    feeder = RankFeeder(stored.dataset, IDS)
    feeder.feed(IDS.numbers([0, 1]))
    with pytest.raises(rr.InvalidInputError, match="2 samples were fed and 4 expected: the loader ended early"):
        feeder.finish(expected=4)
    feeder.finish(expected=0)


def test_a_tensor_of_numbers(stored: Stored) -> None:
    torch = pytest.importorskip("torch")
    feeder = RankFeeder(stored.dataset, IDS)
    assert feeder.feed(torch.from_numpy(IDS.numbers([3])))[0]["request_id"] == IDS[3]


def test_a_rank_without_moe_layers_is_fed_too(stored: Stored) -> None:
    ranks = Ranks(3)
    made = feeders(stored, ranks)
    made[1].options = SampleOptions(layers=())
    results = ranks.run(lambda rank: made[rank].feed(IDS.numbers([1])))
    assert [each[0]["routed_experts"].shape for each in results] == [(2, 5, 2), (0, 5, 2), (1, 5, 2)]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_a_rank_that_is_interrupted_leaves_nobody_waiting(
    kind: type[BaseException], stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(3)
    made = feeders(stored, ranks)

    def interrupted(_: object) -> None:
        raise kind("stopped")

    def feed(rank: int) -> object:
        try:
            return made[rank].feed(IDS.numbers([0]))
        except kind:
            return "went down"

    monkeypatch.setattr(made[2], "_read", interrupted)
    first, second, third = ranks.run(feed)
    assert third == "went down"
    for other in (first, second):
        assert isinstance(other, rr.RoutingDatasetError)
        assert f"rank 2 of 3: {kind.__name__}: stopped" in str(other)
