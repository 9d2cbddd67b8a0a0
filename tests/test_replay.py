"""Replay's rules, with a framework of plain numpy: which rows a router call gets, and what is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rr_dataset as rr
from rr_dataset.errors import InvalidInputError, InvalidRoutingError
from rr_dataset.padding import RowKind
from rr_dataset.trainer.collate import collate
from rr_dataset.trainer.replay import RoutingReplay, replay
from rr_dataset.trainer.replay.layers import by_layer, claimed
from rr_dataset.trainer.replay.schedule import Schedule

SPEC = rr.RoutingSpec(moe_layers=(1, 2, 5), num_experts=8, top_k=2)
LIVE = np.array([[6, 7]] * 4)


class Numpy:
    """A framework whose tensors are arrays and whose model is a list of layer ids."""

    backward = False
    gradients = True

    @contextmanager
    def hook(self, replay: RoutingReplay, model: list[int], gates: Mapping[int, Any] | None) -> Iterator[list[int]]:
        yield list(gates or model)

    def in_backward(self) -> bool:
        return self.backward

    def with_gradients(self) -> bool:
        return self.gradients

    def load(self, array: npt.NDArray[Any], live: Any) -> Any:
        return array

    def merge(self, live: Any, ids: Any, forced: Any) -> Any:
        return ids.astype(live.dtype) if forced is None else np.where(forced[:, None], ids, live)

    def count_equal(self, live: Any, ids: Any, counted: Any) -> Any:
        equal = (live[:, :, None] == ids[:, None, :]).sum(axis=(1, 2))
        return (equal if counted is None else equal[counted]).sum()


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Numpy:
    framework = Numpy()
    monkeypatch.setattr(replay, "_framework_of", lambda model: framework)
    return framework


def routing(seed: int = 0, rows: int = 4, layers: int = 3, dtype: str = "uint8") -> npt.NDArray[Any]:
    chance = np.random.default_rng(seed)
    return np.argsort(chance.random((rows, layers, 8)), axis=-1)[..., :2].astype(dtype)


class TestSchedule:
    @given(st.data())
    def test_a_recomputed_segment_gets_the_rows_of_its_own_forward(self, data: st.DataObject) -> None:
        """Any order of forwards and backwards over micro-batches and segments, with any layers in a segment."""
        cuts = data.draw(st.lists(st.integers(1, 5), max_size=3, unique=True).map(sorted))
        segments = [list(range(a, b)) for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
        batches = data.draw(st.integers(1, 4))
        schedule: Schedule[int] = Schedule([range(6)], ahead=True)
        kept: dict[tuple[int, int], Any] = {}
        waiting = deque(range(batches))
        for batch in range(batches):
            schedule.queue(batch)
        while waiting or kept:
            if waiting and (not kept or data.draw(st.booleans())):
                batch = waiting.popleft()
                for number, layers in enumerate(segments):
                    kept[batch, number] = schedule.enter()
                    assert [schedule.take(layer, in_backward=False, gradients=True) for layer in layers] == [
                        (batch, False)
                    ] * len(layers)
            else:
                batch = data.draw(st.sampled_from(sorted({batch for batch, _ in kept})))
                for number in reversed(range(len(segments))):
                    before = schedule.enter()
                    schedule.restore(kept.pop((batch, number)))
                    for layer in segments[number]:
                        assert schedule.take(layer, in_backward=True, gradients=True) == (batch, True)
                    schedule.restore(before)
        assert not schedule.waiting()

    def test_stages_may_be_at_different_micro_batches(self) -> None:
        schedule: Schedule[str] = Schedule([[0], [1]], ahead=True)
        for batch in "abc":
            schedule.queue(batch)
        taken = [schedule.take(layer, in_backward=False, gradients=True)[0] for layer in (0, 0, 1, 0, 1, 1)]
        assert taken == ["a", "b", "a", "c", "b", "c"]

    def test_a_forward_between_does_not_change_what_a_segment_remembers(self) -> None:
        schedule: Schedule[str] = Schedule([[0]], ahead=True)
        schedule.queue("trained")
        schedule.queue("evaluated")
        scope = schedule.enter()
        schedule.take(0, in_backward=False, gradients=True)
        schedule.take(0, in_backward=False, gradients=True)  # outside of any segment
        schedule.restore(scope)
        assert schedule.take(0, in_backward=True, gradients=True) == ("trained", True)

    def test_without_a_scope_it_is_refused_until_somebody_says_which(self) -> None:
        """Also with one in flight: it may be another's second backward."""
        schedule: Schedule[str] = Schedule([[0]])
        schedule.queue("a")
        assert schedule.take(0, in_backward=False, gradients=True) == ("a", False)
        with pytest.raises(InvalidInputError, match="layer 0 .*nothing says for which micro-batch"):
            schedule.take(0, in_backward=True, gradients=True)
        schedule.recomputing = "a"
        assert schedule.take(0, in_backward=True, gradients=True) == ("a", True)

    @given(st.lists(st.sampled_from("fsx"), max_size=12), st.integers(0, 3))
    def test_whatever_forwards_end_early_every_layer_has_the_rows_of_one_micro_batch(
        self, fates: list[str], broken: int
    ) -> None:
        """f: whole. s: ends early before layer `broken`. x: never starts. The next push says so, and abandon goes on."""
        schedule: Schedule[int] = Schedule([range(3)])
        for batch, fate in enumerate(fates):
            try:
                schedule.queue(batch)
            except InvalidInputError:
                assert fates[batch - 1] == "x" or (fates[batch - 1] == "s" and broken < 3)
                schedule.abandon(batch - 1)
                schedule.queue(batch)
            else:
                assert not batch or fates[batch - 1] == "f" or (fates[batch - 1] == "s" and broken == 3)
            for layer in range({"f": 3, "s": broken, "x": 0}[fate]):
                assert schedule.take(layer, in_backward=False, gradients=True) == (batch, False)

    def test_a_forward_after_one_that_ended_early_is_refused_also_with_more_queued(self) -> None:
        schedule: Schedule[str] = Schedule([[0, 1, 2]], ahead=True)
        for batch in "abc":
            schedule.queue(batch)
        schedule.take(0, in_backward=False, gradients=True)
        with pytest.raises(InvalidInputError, match=r"would take b, but layers \[1, 2\] still wait for a"):
            schedule.take(0, in_backward=False, gradients=True)
        schedule.abandon("a")
        for batch in "bc":
            assert [schedule.take(i, in_backward=False, gradients=True)[0] for i in range(3)] == [batch] * 3

    def test_an_evaluation_among_queued_forwards_is_seen(self) -> None:
        schedule: Schedule[str] = Schedule([[0]], ahead=True)
        for batch in "ab":
            schedule.queue(batch)
        schedule.take(0, in_backward=False, gradients=False)
        with pytest.raises(InvalidInputError, match="called with gradients .*paused"):
            schedule.take(0, in_backward=False, gradients=True)
        schedule.abandon(None)
        schedule.queue("c")
        assert schedule.take(0, in_backward=False, gradients=True) == ("c", False)

    def test_another_path_the_second_time_is_refused(self) -> None:
        schedule: Schedule[str] = Schedule([[0, 1]])
        schedule.queue("a")
        scope = schedule.enter()
        schedule.take(0, in_backward=False, gradients=True)
        schedule.restore(scope)
        with pytest.raises(InvalidInputError, match="layer 1 .*another path"):
            schedule.take(1, in_backward=True, gradients=True)


class TestRows:
    @pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int16", "int32", "int64"])
    def test_every_layer_gets_its_own_rows_in_row_major_order(self, framework: Numpy, dtype: str) -> None:
        given_ids = routing(rows=4, dtype=dtype)
        replay = RoutingReplay(SPEC)
        with replay.attach([1, 5]):
            replay.push(given_ids.reshape(2, 2, 3, 2))
            for layer, at in ((1, 0), (5, 2)):
                chosen = replay.choose(layer, LIVE)
                assert chosen.dtype == LIVE.dtype
                assert chosen.tolist() == given_ids[:, at].tolist()

    def test_layers_by_name_and_a_part_of_them(self, framework: Numpy) -> None:
        ids = routing()
        replay = RoutingReplay(SPEC)
        with replay.attach([2]):
            replay.push({2: ids[:, 1], 5: ids[:, 2]})
            assert replay.choose(2, LIVE).tolist() == ids[:, 1].tolist()
            replay.push(ids[:, 1:], layers=[2, 5])
            assert replay.choose(2, LIVE).tolist() == ids[:, 1].tolist()
            with pytest.raises(InvalidRoutingError, match=r"layers \[2\] of the model have no routing.*\[5\]"):
                replay.push({5: ids[:, 2]})

    @pytest.mark.parametrize("marked", ["bool", "kinds", "by layer", "negative"])
    def test_rows_without_a_record_are_left_to_the_live_router(self, framework: Numpy, marked: str) -> None:
        ids = routing(dtype="int16")
        ids[2] = -1 if marked == "negative" else 0
        there = np.array([True, True, False, True])
        kinds = np.where(there, RowKind.REAL, RowKind.MISSING).astype(np.uint8)
        mask = {"bool": there, "kinds": kinds, "by layer": {1: there, 2: kinds, 5: there}, "negative": None}[marked]
        replay = RoutingReplay(SPEC)
        with replay.attach([1]):
            replay.push(ids, mask)
            assert replay.choose(1, LIVE).tolist() == [*ids[:2, 0].tolist(), [6, 7], ids[3, 0].tolist()]
        assert (replay.metrics().rows, replay.metrics().replayed) == (4, 3)

    def test_a_mask_that_leaves_out_a_layer_or_has_an_unknown_kind_is_refused(self, framework: Numpy) -> None:
        kinds = np.full(4, RowKind.MISSING, np.uint8)
        replay = RoutingReplay(SPEC)
        with replay.attach([1, 2]):
            with pytest.raises(InvalidInputError, match=r"mask has no rows for layers \[2\]"):
                replay.push(routing(), {1: kinds})
            with pytest.raises(InvalidInputError, match="mask has the value 7: .*2 REAL"):
                replay.push(routing(), kinds + 6)

    def test_padding_counts_nowhere_and_is_spread_or_live(self, framework: Numpy) -> None:
        ids = routing()
        ids[2], ids[3] = 0, [0, 1]
        kinds = np.array([2, 2, 0, 0], np.uint8)
        replay = RoutingReplay(SPEC)
        with replay.attach([1]):
            replay.push(ids, kinds)
            assert replay.choose(1, LIVE).tolist() == [*ids[:2, 0].tolist(), [6, 7], [0, 1]]
        metrics = replay.metrics()
        assert (metrics.rows, metrics.replayed, metrics.coverage) == (2, 2, 1.0)

    def test_what_collate_makes_goes_in_as_it_is(self, framework: Numpy, tmp_path: Any) -> None:
        ids = routing(rows=6)
        with rr.RoutingWriter(tmp_path / "d", create=SPEC) as writer:
            writer.put("a:0:0:0", ids)
            writer.put("b:0:0:0", ids[:4], missing=[(1, 2)])
        batch = collate(rr.open_dataset(tmp_path / "d").get_many(["a:0:0:0", "b:0:0:0"]), SPEC, length=6)
        replay = RoutingReplay(SPEC)
        live = np.tile(LIVE, (3, 1))
        with replay.attach([1, 2, 5]):
            replay.push(batch.routed_experts, batch.mask, batch.layers)
            for layer, at in ((5, 2), (1, 0), (2, 1)):
                chosen = replay.choose(layer, live).reshape(2, 6, 2)
                assert chosen[0].tolist() == ids[:, at].tolist()
                assert chosen[1, [0, 2, 3]].tolist() == ids[[0, 2, 3], at].tolist()
                assert chosen[1, 1].tolist() == [6, 7]
        assert (replay.metrics().rows, replay.metrics().replayed) == (30, 27)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda ids: ids.astype(float), "float64"),
            (lambda ids: ids[:, :2], r"expected \[batch, tokens, 3, 2\]"),
            (lambda ids: ids.transpose(1, 0, 2), r"expected \[batch, tokens, 3, 2\]"),
            (lambda ids: np.where(ids == ids[1, 0, 0], 8, ids), "beyond the 8 there are"),
            (lambda ids: np.where(np.arange(4)[:, None, None] == 3, 255, ids), r"row 3: \[255, 255\].*mask it"),
            (lambda ids: ids * 0, r"layer 1, row 0: \[0, 0\] names an expert twice"),
        ],
    )
    def test_wrong_routing_is_refused_and_nothing_is_queued(self, framework: Numpy, change: Any, message: str) -> None:
        replay = RoutingReplay(SPEC)
        with replay.attach([1, 2, 5]):
            with pytest.raises(InvalidRoutingError, match=message):
                replay.push(change(routing()))
            replay.check_consumed()

    def test_rows_of_another_count_are_refused(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        with replay.attach([1]):
            replay.push(routing())
            replay.choose(1, LIVE)
            replay.push(routing(rows=3))
            with pytest.raises(InvalidInputError, match=r"routes \[4, 2\].* has \[3, 2\]"):
                replay.choose(1, LIVE)

    @pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (257, "int16"), (32768, "int16"), (40000, "int32")])
    def test_ids_go_to_the_device_in_a_dtype_that_every_framework_has(
        self, framework: Numpy, experts: int, dtype: str
    ) -> None:
        spec = rr.RoutingSpec([0], experts, 2)
        replay = RoutingReplay(spec)
        ids = np.array([[[experts - 1, 0]]], spec.dtype)
        with replay.attach([0]):
            batch = replay.push(ids)
            assert batch.layers[0].ids.dtype == dtype
            assert replay.choose(0, LIVE[:1]).tolist() == ids[0].tolist()


class TestConsumption:
    def test_no_layer_hooked_is_an_error(self, framework: Numpy) -> None:
        with pytest.raises(InvalidInputError, match="no router was found in list"), RoutingReplay(SPEC).attach([]):
            pass

    def test_a_layer_that_the_spec_lacks_is_an_error(self, framework: Numpy) -> None:
        with pytest.raises(InvalidRoutingError, match=r"\[0\] are not MoE layers"), RoutingReplay(SPEC).attach([0, 1]):
            pass

    def test_a_micro_batch_that_no_forward_took_is_an_error_once(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        with replay.attach([1, 2]):
            replay.push(routing())
            replay.choose(1, LIVE)
            with pytest.raises(InvalidInputError, match=r"\{2: 1\}"):
                replay.check_consumed()
            replay.check_consumed()

    def test_leaving_checks_too_but_hides_no_error(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        with pytest.raises(InvalidInputError, match="no forward took"), replay.attach([1]):
            replay.push(routing())
        with pytest.raises(ZeroDivisionError), replay.attach([1]):
            replay.push(routing()).layers[1 // 0]

    def test_what_a_failed_forward_left_is_told_at_the_next_push_and_abandoned(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        with replay.attach([1, 2]):
            replay.push(routing(0))
            replay.choose(1, LIVE)
            with pytest.raises(InvalidInputError, match=r"MicroBatch\(0\) is still waiting .*\[2\].*abandon"):
                replay.push(routing(1))
            replay.abandon()
            replay.push(routing(1))
            for layer, at in ((1, 0), (2, 1)):
                assert replay.choose(layer, LIVE).tolist() == routing(1)[:, at].tolist()
            replay.check_consumed()
            skipped = replay.push(routing(2))
            for _ in range(2):
                replay.abandon(skipped)

    def test_virtual_stages_run_free_of_one_another(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)  # layers 1 and 5 do not follow each other
        with replay.attach([1, 5], ahead=True):
            for i in range(2):
                replay.push(routing(i))
            for i, layer in ((0, 1), (1, 1), (0, 5), (1, 5)):
                assert replay.choose(layer, LIVE).tolist() == routing(i)[:, {1: 0, 5: 2}[layer]].tolist()

    def test_a_paused_forward_is_live_and_takes_nothing(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        with replay.attach([1]):
            replay.push(routing())
            with replay.paused():
                assert replay.choose(1, LIVE) is LIVE
            framework.gradients = False  # replayed as well: log-probabilities of the old policy
            assert replay.choose(1, LIVE).tolist() == routing()[:, 0].tolist()

    def test_own_routers_are_those_of_the_spec_or_of_this_stage(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        assert replay.choose(1, LIVE) is LIVE, "outside of attach a block routes as ever"
        for own, at in ((True, (1, 2, 5)), ([2], (2,))):
            with replay.attach([], own=own):
                replay.push(routing())
                with pytest.raises(InvalidInputError, match="layer 7 is not replayed"):
                    replay.choose(7, LIVE)
                for wrong in (LIVE * 0.5, LIVE.tolist(), None):
                    with pytest.raises(InvalidInputError, match="layer 2: expected the ids"):
                        replay.choose(2, wrong)
                for layer in at:
                    replay.choose(layer, LIVE)
        with pytest.raises(InvalidInputError, match="one of them"), replay.attach([], {1: None}, own=True):
            pass

    def test_nothing_replayed_is_an_error(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        with replay.attach([1]):
            replay.push(routing(), np.zeros(4, np.bool_))
            assert replay.choose(1, LIVE).tolist() == LIVE.tolist()
            with pytest.raises(InvalidInputError, match="nothing was replayed"):
                replay.check_consumed()

    def test_a_forward_without_a_push_is_an_error(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        with pytest.raises(InvalidInputError, match="layer 1 was called without a micro-batch"), replay.attach([1]):
            replay.choose(1, LIVE)

    def test_outside_of_attach_nothing_is_queued_and_nothing_recomputed(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC)
        with pytest.raises(InvalidInputError, match="not attached"):
            replay.push(routing())
        with replay.attach([1]):
            with pytest.raises(InvalidInputError, match="attached already"), replay.attach([1]):
                pass
            replay.push(routing())
            forward, again = replay.checkpoint_contexts()
            with forward:
                replay.choose(1, LIVE)
        with pytest.raises(InvalidInputError, match="not attached.*backward"), again:
            pass

    def test_no_module_of_a_framework_is_refused(self) -> None:
        wrong = RoutingReplay(SPEC).attach([1])
        with pytest.raises(InvalidInputError, match=r"list is no torch.nn.Module and no paddle.nn.Layer"), wrong:
            pass


class TestMetrics:
    def test_agreement_is_of_sets_and_by_layer_and_recomputation_counts_once(self, framework: Numpy) -> None:
        live = np.array([[3, 1], [0, 2]])
        replay = RoutingReplay(SPEC)
        with replay.attach([1, 2]):
            batch = replay.push({1: [[1, 3], [2, 0]], 2: [[1, 3], [7, 6]]})
            replay.choose(1, live)
            replay.choose(2, live)
            with replay.recompute(batch):
                replay.choose(2, live)
        assert replay.metrics(reset=True) == rr_metrics(rows=4, replayed=4, agreement={1: 1.0, 2: 0.5})
        assert replay.metrics() == rr_metrics(rows=0, replayed=0, agreement={})

    def test_it_can_be_left_out(self, framework: Numpy) -> None:
        replay = RoutingReplay(SPEC, agreement=False)
        with replay.attach([1]):
            replay.push(routing())
            replay.choose(1, LIVE)
        assert replay.metrics().agreement == {}


def rr_metrics(**values: Any) -> Any:
    return replay.ReplayMetrics(**values)


class Attention:
    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx


class Block:
    def __init__(self, layer_idx: int | None = None) -> None:
        if layer_idx is not None:
            self.self_attn = Attention(layer_idx)


class TestLayers:
    def test_the_model_knows_better_than_the_name(self) -> None:
        modules = {"layers.0": Block(7), "layers.0.mlp.gate": "a", "layers.1": Block(), "layers.1.mlp.gate": "b"}
        found = by_layer(modules, ["layers.0.mlp.gate", "layers.1.mlp.gate"], last=9)
        assert found == {1: "b", 7: "a"}

    def test_layers_behind_the_last_are_left_alone_and_named(self) -> None:
        with pytest.warns(rr.RoutingDatasetWarning, match=r"last layer is 4.*layers\.5\.gate"):
            found = by_layer({"layers.4.gate": "a", "layers.5.gate": "mtp"}, ["layers.4.gate", "layers.5.gate"], 4)
        assert found == {4: "a"}

    def test_a_router_is_hooked_once(self) -> None:
        a, b = Block(), Block()
        with pytest.raises(InvalidInputError, match="layers 0 and 2 have one router"), claimed({0: a, 1: b, 2: a}):
            pass
        hooked_twice = pytest.raises(InvalidInputError, match="router of layer 5 is hooked already")
        with claimed({0: a, 1: b}), hooked_twice, claimed({5: b}):
            pass
        with claimed({5: b}):
            pass

    def test_two_of_one_layer_and_none_are_refused(self) -> None:
        with pytest.raises(InvalidInputError, match="both are the router of layer 3"):
            by_layer({"a.3.gate": 1, "b.3.gate": 2}, ["a.3.gate", "b.3.gate"], 9)
        with pytest.raises(InvalidInputError, match="gates="):
            by_layer({"gate": 1}, ["gate"], 9)
