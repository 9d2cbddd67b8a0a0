"""A whole trainer of 16 ranks on the demo's routing: what they read makes up the global batch, cut as a trainer cuts its tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from stored import Stored
from thread_ranks import Ranks

import rr_dataset as rr
from rr_dataset.demo.rollouts import SPEC, Rollout, load_rollouts
from rr_dataset.padding import RowKind
from rr_dataset.record import RowData
from rr_dataset.trainer.batches import RoutingBatches
from rr_dataset.trainer.collate import collate
from rr_dataset.trainer.feeder import RankFeeder
from rr_dataset.trainer.idlist import IdList
from rr_dataset.trainer.ranks import RankView, pipeline_chunks
from rr_dataset.trainer.samples import RoutingSamples, SampleOptions, read_samples
from rr_dataset.trainer.stream_options import StreamOptions
from rr_dataset.trainer.streaming import RoutingStream

PP, CP, TP, DP = 2, 2, 2, 2
SAMPLES = 8
MODEL = [(pp, cp, tp) for pp in range(PP) for cp in range(CP) for tp in range(TP)]  # ranks that get the same samples

Array = npt.NDArray[Any]


class World(NamedTuple):
    """Records that lack their last token, and the trainer's padded [samples, tokens, layers, top_k] with -1 where none is known."""

    stored: Stored
    ids: IdList
    lengths: list[int]
    padded: Array


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    stored = Stored(tmp_path_factory.mktemp("world") / "d", SPEC)
    rollouts = load_rollouts()[: 3 * SAMPLES : 3]
    for rollout in rollouts:
        put(stored, rollout)
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    padded = np.full((SAMPLES, view(0, 0, 0, 0).padded(max(lengths)), SPEC.num_layers, SPEC.top_k), -1, np.int16)
    for sample, rollout in zip(padded, rollouts, strict=True):
        recorded = len(rollout.token_ids) - 1
        sample[:recorded] = rollout.routed_experts[:, :recorded].transpose(1, 0, 2)
    return World(stored, IdList([rollout.request_id(0) for rollout in rollouts]), lengths, padded)


def put(stored: Stored, rollout: Rollout) -> None:
    """All rows but that of the last token, which was sampled and never fed."""
    row = stored.row(rollout.request_id(0), len(rollout.token_ids) - 1).row
    stored.shard(RowData(row, np.ascontiguousarray(rollout.routed_experts[:, :-1]), None, None))


def view(pp: int, cp: int, tp: int, dp: int) -> RankView:
    return RankView(
        SPEC,
        pipeline_chunks(SPEC.num_layers, pp, PP),
        tp_rank=tp,
        tp_size=TP,
        sequence_parallel=True,
        cp_rank=cp,
        cp_size=CP,
        dp_rank=dp,
        dp_size=DP,
    )


def of_context(sample: Array, cp: int) -> Array:
    """Zigzag, as Megatron-LM cuts token ids."""
    pieces = np.split(sample, 2 * CP)
    return np.concatenate([pieces[cp], pieces[2 * CP - 1 - cp]])


def cut(sample: Array, cp: int, tp: int) -> Array:
    """A rank's rows of the trainer's padded sample."""
    return np.split(of_context(sample, cp), TP)[tp]


def options(world: World, rank: RankView, **more: Any) -> SampleOptions:
    share = partial(rank.share, length=world.padded.shape[1])
    return SampleOptions(**{"layers": rank.layers, "tokens": share, "lengths": "S-1", **more})


class Global:
    """The global batch, put together from what ranks have."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.experts = np.full_like(world.padded, -1)
        self.written = np.zeros(world.padded.shape[:3], np.int64)

    def add(self, sample: int, rank: RankView, experts: Array, present: Array) -> None:
        """experts: [rows, layers, top_k] of a rank. present: [rows]."""
        places = cut(np.arange(len(self.experts[sample])), rank.cp_rank, rank.tp_rank)
        assert experts.shape[:2] == (len(places), len(rank.layers))
        at = np.ix_([sample], places[present], rank.layers)
        self.experts[at] = experts[present]
        self.written[at] += 1

    def check(self) -> None:
        """Every recorded row was on one rank, nothing else on any, and all bytes are those of the source."""
        assert np.array_equal(self.written, (self.world.padded >= 0).all(axis=-1))
        assert np.array_equal(self.experts, self.world.padded)


def test_samples_of_all_ranks_are_the_global_batch(world: World) -> None:
    whole = Global(world)
    for dp in range(DP):
        for pp, cp, tp in MODEL:
            rank = view(pp, cp, tp, dp)
            samples = RoutingSamples(world.stored.root, world.ids, options(world, rank))
            mine = list(rank.samples(len(world.ids)))
            (batch,) = (RoutingBatches(samples)[mine],)
            assert np.array_equal(batch["routed_experts"], [each["routed_experts"] for each in samples[mine]])
            for sample, experts, present in zip(mine, batch["routed_experts"], batch["present"], strict=True):
                whole.add(sample, rank, experts.transpose(1, 0, 2), present)
    whole.check()


def test_feeders_of_all_ranks_are_the_global_batch(world: World) -> None:
    """Only the first rank of each model is given the batch's numbers."""
    whole = Global(world)
    for dp in range(DP):
        ranks = Ranks(len(MODEL))
        views = [view(*place, dp) for place in MODEL]
        feeders = [
            RankFeeder(world.stored.root, world.ids, options(world, views[number], layout="TLK"), ranks.gather(number))
            for number in range(len(MODEL))
        ]
        mine = views[0].samples(len(world.ids))
        results = ranks.run(lambda number: feeders[number].feed(world.ids.numbers(mine) if not number else None))  # noqa: B023
        for rank, samples in zip(views, results, strict=True):
            for at, sample in zip(mine, samples, strict=True):
                whole.add(at, rank, sample["routed_experts"], sample["present"])
    whole.check()


def test_collated_batches_tell_padding_from_what_is_missing(world: World) -> None:
    whole = Global(world)
    rows = world.padded.shape[1] // (CP * TP)
    for dp in range(DP):
        for pp, cp, tp in MODEL:
            rank = view(pp, cp, tp, dp)
            samples = RoutingSamples(world.stored.root, world.ids, options(world, rank))
            mine = list(rank.samples(len(world.ids)))
            batch = RoutingBatches(samples, partial(collate, spec=SPEC, length=rows))[mine]
            for sample, experts, mask in zip(mine, batch.routed_experts, batch.mask, strict=True):
                whole.add(sample, rank, experts, mask == RowKind.REAL)
                kinds = np.full(world.padded.shape[1], RowKind.PADDING)
                kinds[: world.lengths[sample]] = RowKind.REAL
                kinds[world.lengths[sample] - 1] = RowKind.MISSING
                assert np.array_equal(mask, cut(kinds, cp, tp))
    whole.check()


def test_streams_of_all_ranks_are_the_global_batch(world: World) -> None:
    """Equal parts for the data ranks, by option."""
    whole = Global(world)
    for dp in range(DP):
        for pp, cp, tp in MODEL:
            rank = view(pp, cp, tp, dp)
            how = StreamOptions(rank=dp, num_ranks=DP, equal=True, timeout_s=0)
            samples = list(RoutingStream(world.stored.dataset, how, options(world, rank), world.ids))
            assert len(samples) == SAMPLES // DP
            for sample in samples:
                (at,) = world.ids.rows([sample["number"]])
                whole.add(at, rank, sample["routed_experts"].transpose(1, 0, 2), sample["present"])
    whole.check()


def test_packed_buffers_of_all_ranks_are_the_global_batch(world: World) -> None:
    """Samples one after the other, each padded by itself, and tensor ranks cut through all of them."""
    for dp in range(DP):
        mine = view(0, 0, 0, dp).samples(len(world.ids))
        ids, lengths = [world.ids[at] for at in mine], [world.lengths[at] for at in mine]
        for pp, cp, tp in MODEL:
            rank = view(pp, cp, tp, dp)
            padded = [world.padded[at][: rank.padded(length)] for at, length in zip(mine, lengths, strict=True)]
            rows = np.split(np.concatenate([of_context(sample, cp) for sample in padded]), TP)[tp]
            packed = world.stored.dataset.get_packed(ids, rank.layers, rank.shares(lengths), padding="minus_one")
            for layer in rank.layers:
                assert np.array_equal(packed.experts[layer], rows[:, layer])
                assert np.array_equal(packed.mask == RowKind.REAL, (rows[:, layer] >= 0).all(axis=-1))


@pytest.mark.parametrize("cp", range(2))
def test_a_context_rank_has_the_trainers_rows_and_not_the_records(world: World, cp: int) -> None:
    """With the record's number of tokens in place of the trainer's, the pieces would begin elsewhere."""
    rank = RankView(SPEC, cp_rank=cp, cp_size=2)
    chosen = [
        world.ids[at] for at in range(SAMPLES) if rank.padded(world.lengths[at]) != rank.padded(world.lengths[at] - 1)
    ]
    assert chosen
    by_id = dict(zip(world.ids, world.lengths, strict=True))
    for lengths in ("S-1", by_id, by_id.__getitem__):
        how = SampleOptions(tokens=rank.share, lengths=lengths, layout="TLK")
        for sample in read_samples(world.stored.dataset, chosen, [0] * len(chosen), how):
            at = world.ids.index(sample["request_id"])
            naive = of_context(world.padded[at][: rank.padded(world.lengths[at])], cp)
            assert np.array_equal(sample["present"], naive[:, 0, 0] >= 0)
            assert np.array_equal(sample["routed_experts"][sample["present"]], naive[sample["present"]])
    with pytest.raises(rr.InvalidInputError, match="'S-1' where it lacks the last"):
        SampleOptions(tokens=rank.tokens)


def test_lists_that_do_not_divide_give_equal_parts(world: World) -> None:
    parts = []
    for dp in range(3):
        how = StreamOptions(rank=dp, num_ranks=3, equal=True, timeout_s=0)
        parts.append([sample["request_id"] for sample in RoutingStream(world.stored.dataset, how, ids=world.ids)])
    assert [len(part) for part in parts] == [2, 2, 2]
    assert len({each for part in parts for each in part}) == 6
