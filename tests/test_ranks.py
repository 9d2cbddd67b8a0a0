"""What ranks hold: over all of them, every layer, token and sample exactly once, cut as the trainers cut them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import rr_dataset as rr
from rr_dataset.trainer.ranks import RankView, pipeline_chunks

SPEC = rr.RoutingSpec(range(3, 12), num_experts=64, top_k=4)


def positions(ranges: Any) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(1, 3), st.data()
)
def test_every_layer_is_on_one_rank(
    pp: int, vpp: int, each: int, embedding: bool, loss: bool, first: int, data: st.DataObject
) -> None:
    uneven: dict[str, Any] = {"embedding_counts": embedding, "loss_counts": loss}
    num_layers = pp * vpp * each - embedding - loss
    assume(num_layers >= 0)
    if pp > 2 and data.draw(st.booleans()):
        uneven = {"first_stage_layers": first * vpp, "last_stage_layers": 0}
        num_layers = first * vpp + (pp - 2) * vpp * each
    chunks = [pipeline_chunks(num_layers, rank, pp, vpp, **uneven) for rank in range(pp)]
    in_order = [layer for stage in range(vpp) for rank in range(pp) for layer in chunks[rank][stage]]
    assert in_order == list(range(num_layers))
    views = [RankView(SPEC, of_rank) for of_rank in chunks]
    held = [layer for view in views for layer in view.layers]
    assert sorted(held) == [layer for layer in SPEC.moe_layers if layer < num_layers]
    for view in views:
        assert view.layers == tuple(sorted(view.layers))
        assert sorted(layer for chunk in view.layers_of_chunks for layer in chunk) == list(view.layers)


def test_stages_of_interleaved_and_uneven_pipelines() -> None:
    assert pipeline_chunks(8, 1, 2, 2) == ((2, 3), (6, 7))
    assert pipeline_chunks(10, 0, 3, first_stage_layers=2) == ((0, 1),)
    assert pipeline_chunks(10, 2, 3, first_stage_layers=2) == ((6, 7, 8, 9),)
    assert pipeline_chunks(12, 1, 3, 2, first_stage_layers=2, last_stage_layers=2) == ((1, 2, 3, 4), (7, 8, 9, 10))
    assert pipeline_chunks(6, 0, 4, embedding_counts=True, loss_counts=True) == ((0,),)
    assert pipeline_chunks(6, 3, 4, embedding_counts=True, loss_counts=True) == ((5,),)
    assert RankView(SPEC, ((0, 1, 2),)).layers == ()
    assert RankView(SPEC).layers_of_chunks == (SPEC.moe_layers,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((10, 0, 4), "10 layers do not divide over 4 stages of 1"),
        ((10, 0, 2, 3), "do not divide over 2 stages of 3 virtual"),
        ((10, 2, 2), "pp_rank=2, pp_size=2"),
        ((10, 0, 2, 0), "vpp_size=0"),
    ],
)
def test_layers_that_do_not_divide_are_named(arguments: tuple[int, ...], says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=says):
        pipeline_chunks(*arguments)


def test_uneven_stages_that_do_not_fit_are_named() -> None:
    with pytest.raises(rr.InvalidInputError, match=r"\(first 12, last None\)"):
        pipeline_chunks(10, 0, 2, first_stage_layers=12)
    with pytest.raises(rr.InvalidInputError, match="either"):
        pipeline_chunks(10, 0, 2, first_stage_layers=4, loss_counts=True)


sizes = st.integers(1, 4)


@given(st.integers(0, 90), sizes, sizes, st.booleans(), st.sampled_from(["zigzag", "contiguous"]), st.integers(1, 7))
def test_every_token_is_on_one_rank(
    num_tokens: int, cp: int, tp: int, parallel: bool, order: str, multiple: int
) -> None:
    found = []
    rows = set()
    for cp_rank in range(cp):
        for tp_rank in range(tp if parallel else 1):
            view = RankView(
                SPEC,
                tp_rank=tp_rank,
                tp_size=tp,
                sequence_parallel=parallel,
                cp_rank=cp_rank,
                cp_size=cp,
                cp_order=order,
                pad_multiple=multiple,
            )
            share = view.share(num_tokens)
            assert view.tokens(num_tokens) == list(share.ranges)
            fewer = positions(view.tokens(num_tokens, max(num_tokens - 1, 0)))
            assert fewer == [position for position in positions(share.ranges) if position < num_tokens - 1]
            assert (share.num_tokens, share.num_rows) == (
                len(positions(share.ranges)),
                share.num_tokens + share.padding,
            )
            found += positions(share.ranges)
            rows.add(share.num_rows)
    assert sorted(found) == list(range(num_tokens))
    (each,) = rows
    assert each * cp * (tp if parallel else 1) == view.padded(num_tokens)
    assert view.padded(num_tokens) % multiple == 0
    assert 0 <= view.padded(num_tokens) - num_tokens < multiple * view.unit


def naive(lengths: list[int], padded: list[int], cp: tuple[int, int], tp: tuple[int, int], order: str) -> list[Any]:
    """The (sample, position) of each row of a rank, -1 for padding: arrays cut as a trainer cuts its token ids."""
    rows = []
    for number, (length, count) in enumerate(zip(lengths, padded, strict=True)):
        sample = np.full((count, 2), -1)
        sample[:length, 0], sample[:length, 1] = number, np.arange(length)
        if cp[1] == 1 or order == "contiguous":
            rows.append(np.split(sample, cp[1])[cp[0]])
        else:
            pieces = np.split(sample, 2 * cp[1])
            rows.append(np.concatenate([pieces[cp[0]], pieces[2 * cp[1] - 1 - cp[0]]]))
    return np.split(np.concatenate(rows), tp[1])[tp[0]].tolist()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), sizes, sizes, st.sampled_from(["zigzag", "contiguous"]))
def test_flattened_samples_are_cut_as_arrays_are(lengths: list[int], cp: int, tp: int, order: str) -> None:
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            view = RankView(
                SPEC,
                tp_rank=tp_rank,
                tp_size=tp,
                sequence_parallel=True,
                cp_rank=cp_rank,
                cp_size=cp,
                cp_order=order,
            )
            for length in (None, view.padded(max(lengths))):
                shares = view.shares(lengths, length)
                padded = [view.padded(count) if length is None else length for count in lengths]
                got = []
                for number, share in enumerate(shares):
                    got += [[number, position] for position in positions(share.ranges)] + [[-1, -1]] * share.padding
                assert got == naive(lengths, padded, (cp_rank, cp), (tp_rank, tp), order)


def test_zigzag_is_as_documented() -> None:
    views = [RankView(SPEC, cp_rank=rank, cp_size=2) for rank in range(2)]
    assert [view.tokens(16) for view in views] == [[(0, 4), (12, 16)], [(4, 12)]]
    short = [view.share(3, 16) for view in views]
    assert [(share.ranges, share.padding) for share in short] == [(((0, 3),), 5), ((), 8)]


@pytest.mark.parametrize(("length", "says"), [(10, "length=10"), (4, "a sample of 5 tokens")])
def test_a_length_that_does_not_fit_is_named(length: int, says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=says):
        RankView(SPEC, cp_size=2).share(5, length)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tp_rank": 1}, "tp_rank=1, tp_size=1"),
        ({"cp_order": "ring"}, "cp_order='ring'"),
        ({"pad_multiple": 0}, "pad_multiple=0"),
    ],
)
def test_impossible_ranks_are_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=says):
        RankView(SPEC, **wrong)
    with pytest.raises(rr.InvalidInputError, match="num_tokens=-1"):
        RankView(SPEC).tokens(-1)


def test_data_ranks_deal_the_samples() -> None:
    dealt = [index for rank in range(3) for index in RankView(SPEC, dp_rank=rank, dp_size=3).samples(10)]
    assert sorted(dealt) == list(range(10))


def state(**values: tuple[int, int]) -> Any:
    """Something with the functions of megatron.core.parallel_state."""
    names = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "data_parallel")
    made = {}
    for name in names:
        rank, size = values.get(name, (0, 1))
        made[f"get_{name}_rank"] = lambda rank=rank: rank
        made[f"get_{name}_world_size"] = lambda size=size: size
    return SimpleNamespace(**made)


def test_a_rank_of_megatron() -> None:
    config = SimpleNamespace(
        num_layers=12,
        sequence_parallel=True,
        virtual_pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_model_parallel_layout=None,
    )
    ranks = state(
        pipeline_model_parallel=(1, 2), tensor_model_parallel=(1, 2), context_parallel=(0, 2), data_parallel=(3, 4)
    )
    view = RankView.from_megatron(SPEC, config, ranks)
    assert view.layers_of_chunks == ((3, 4, 5), (9, 10, 11))
    assert (view.tokens(16), view.unit, view.samples(8)) == ([(12, 16)], 4, range(3, 8, 4))
    assert pickle.loads(pickle.dumps(view)) == view
    config.pipeline_model_parallel_layout = "Et*3|t*9L"
    with pytest.raises(rr.InvalidInputError, match="layer_numbers="):
        RankView.from_megatron(SPEC, config, ranks)
    assert RankView.from_megatron(SPEC, config, ranks, layer_numbers=range(1, 5)).layers == (3,)
    with pytest.raises(rr.InvalidInputError, match="counts layers from 1"):
        RankView.from_megatron(SPEC, config, ranks, layer_numbers=range(4))


def group(**values: tuple[int, int]) -> Any:
    """Something with the methods of fleet's HybridCommunicateGroup."""
    pp_rank, pp_size = values.pop("pipe", (0, 1))
    made: dict[str, Any] = {"get_stage_id": lambda: pp_rank, "get_pipe_parallel_world_size": lambda: pp_size}
    for name, (rank, size) in values.items():
        made[f"get_{name}_parallel_rank"] = lambda rank=rank: rank
        made[f"get_{name}_parallel_world_size"] = lambda size=size: size
    return SimpleNamespace(**made)


def test_a_rank_of_fleet() -> None:
    ranks = group(pipe=(1, 2), model=(1, 2), sep=(1, 2), data=(1, 2), sharding=(2, 3))
    view = RankView.from_fleet(SPEC, 12, ranks, sequence_parallel=True, cp_order="contiguous")
    assert (view.layers, view.tokens(16)) == ((6, 7, 8, 9, 10, 11), [(12, 16)])
    assert (view.dp_rank, view.dp_size) == (5, 6)
    with pytest.raises(rr.InvalidInputError, match="split over 2 ranks: say cp_order="):
        RankView.from_fleet(SPEC, 12, ranks, sequence_parallel=True)
    alone = RankView.from_fleet(SPEC, 12, group(model=(0, 1), data=(0, 1)), sequence_parallel=False, chunks=((3, 4),))
    assert (alone.layers, alone.tokens(7), alone.dp_size) == ((3, 4), [(0, 7)], 1)


def test_paddle_divides_layers_likewise() -> None:
    pipeline = pytest.importorskip("paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers")

    class Decoder: ...

    layers = [object(), *[Decoder] * 12, object()]
    parts = pipeline.SegmentLayers(layers, 2, "layer:Decoder", num_virtual_pipeline_stage=3).do_segment()
    for rank in range(2):
        wanted = [range(max(parts[i] - 1, 0), min(parts[i + 1] - 1, 12)) for i in (rank, rank + 2, rank + 4)]
        assert [list(chunk) for chunk in pipeline_chunks(12, rank, 2, 3)] == [list(ids) for ids in wanted]


def test_the_methods_of_fleet_exist() -> None:
    topology = pytest.importorskip("paddle.distributed.fleet.base.topology")
    found = {name for each in vars(topology).values() if isinstance(each, type) for name in vars(each)}
    for name in ("model", "sep", "context", "data", "sharding"):
        assert {f"get_{name}_parallel_rank", f"get_{name}_parallel_world_size"} <= found
    assert {"get_stage_id", "get_pipe_parallel_world_size"} <= found
