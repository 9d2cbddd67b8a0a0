"""What an engine or a user may hand over to FastDeploy's names and should not: no record is lost by it, none is replaced."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.capture import fastdeploy as fd
from rr_dataset.capture.fastdeploy import store as store_module
from rr_dataset.capture.fastdeploy.worker import CLEARED, UNSEEN_END
from tests.engines import options
from tests.fastdeploy_engine import BATCH, BLOCK, LONGEST, SPEC, Engine, Request, TreeA, TreeB, engine_id, fd_config


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[rr.RoutingWriter]:
    (tmp_path / "spools").mkdir()
    with rr.RoutingWriter(tmp_path / "ds", options(tmp_path / "spools"), create=SPEC) as made:
        yield made


@pytest.fixture
def config(tmp_path: Path) -> Any:
    return fd_config(tmp_path / "ds")


@pytest.fixture
def worker(config: Any) -> Iterator[fd.RoutedExpertsCapturer]:
    made = fd.RoutedExpertsCapturer(config, 40)
    yield made
    made.close()


@pytest.fixture
def cache(config: Any, worker: Any, writer: rr.RoutingWriter) -> Iterator[fd.RoutingCacheManager]:
    made = fd.RoutingCacheManager(config, 40, writer)
    yield made
    made.close()


@pytest.fixture
def manager(config: Any, writer: rr.RoutingWriter) -> Iterator[fd.RoutingReplayManager]:
    made = fd.RoutingReplayManager(config, np.full((BATCH, LONGEST // BLOCK), -1, np.int32), 40, writer)
    yield made
    made.close()


def rows(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (tokens, SPEC.num_layers, SPEC.top_k))


def feed(worker: fd.RoutedExpertsCapturer, given: np.ndarray, slots: Any) -> None:
    for at, layer in enumerate(SPEC.moe_layers):
        fd.save_routing_to_buffer_v2(worker, given[:, at], layer - SPEC.moe_layers[0], 1, 1, None, len(given))
    worker.prepare_pending_save(len(given), slots)
    worker.flush_pending_save()


def head(writer: rr.RoutingWriter, tmp_path: Path, request_id: str) -> Any:
    writer.flush()
    return rr.open_dataset(tmp_path / "ds").heads([request_id], on_missing="none")[0]


def lengths(*each: int) -> np.ndarray:
    return np.array([*each, *[0] * (BATCH - len(each))]).reshape(-1, 1)


def test_a_request_ends_once(
    worker: fd.RoutedExpertsCapturer, cache: fd.RoutingCacheManager, writer: rr.RoutingWriter, tmp_path: Path
) -> None:
    name = engine_id("a:0:0:0")
    cache.recycle([0, 1])
    feed(worker, rows(0, 8), np.arange(8))
    cache.on_request_finished(name, [0, 1], 8)
    cache.on_request_aborted(name)
    cache.recycle([0, 1])
    cache.on_request_finished(name, [0, 1], 8)
    assert (head(writer, tmp_path, "a:0:0:0").status, head(writer, tmp_path, "a:0:0:0").missing) == ("complete", ())
    assert cache.counts["requests that ended twice"] == 2
    feed(worker, rows(1, 8), np.arange(8))
    cache.on_request_finished(engine_id("a:0:0:0"), [0, 1], 8)  # the rollout again
    writer.flush()
    assert (rr.open_dataset(tmp_path / "ds").get("a:0:0:0").to_numpy("TLK") == rows(1, 8)).all()


def test_an_overlapped_schedule_must_say_how_much_it_fed(
    config: Any, cache: fd.RoutingCacheManager, writer: rr.RoutingWriter, tmp_path: Path
) -> None:
    config.scheduler_config.enable_overlap_schedule = True
    worker = fd.RoutedExpertsCapturer(config, 40)
    cache.recycle([0, 1])
    feed(worker, rows(0, 8), np.arange(8))
    assert worker.faults.counts == {"step": 1}
    cache.on_request_finished(engine_id("a:0:0:0"), [0, 1], 8)
    assert head(writer, tmp_path, "a:0:0:0").reason == "no routing was captured"
    worker.close()


def step(manager: fd.RoutingReplayManager, starts: np.ndarray, counts: np.ndarray, given: np.ndarray) -> None:
    """One step of the tree whose manager lives in the worker."""
    positions = manager.get_token_positions(starts, counts)
    for at, layer in enumerate(SPEC.moe_layers):
        fd.save_routing_to_buffer(manager, given[:, at], np.zeros(len(given)), None, None, layer - 1, 1, 1, None)
    manager.update_host_cache(positions, manager.compute_slot_mapping(positions))


@pytest.fixture
def drafting(config: Any) -> Any:
    config.speculative_config = SimpleNamespace(method="mtp", num_speculative_tokens=2)
    return config


def test_rejected_drafts_of_a_preempted_request_are_never_its_rows(
    drafting: Any, writer: rr.RoutingWriter, tmp_path: Path
) -> None:
    manager = fd.RoutingReplayManager(drafting, np.full((BATCH, LONGEST // BLOCK), -1, np.int32), 40, writer)
    manager.block_table[0, :3] = 5, 6, 7
    name, first, again = engine_id("a:0:0:0"), rows(0, 7), rows(1, 9)
    manager.register_request(0, name)
    step(manager, lengths(0), lengths(4), first[:4])
    step(manager, lengths(4), lengths(3), first[4:])  # the token sampled, and two drafts that are rejected
    manager.clear_request(0)
    manager.register_request(0, name)
    step(manager, lengths(0), lengths(9), again)
    manager.put_finished_batch([1], lengths(9))
    assert (head(writer, tmp_path, "a:0:0:0").missing, manager.faults.counts) == ((), {})
    record = rr.open_dataset(tmp_path / "ds").get("a:0:0:0")
    assert (record.to_numpy("TLK") == np.concatenate([first[:5], again[5:]])).all()
    manager.close()


def test_an_abort_that_only_a_clear_tells_ends_in_time(config: Any, writer: rr.RoutingWriter, tmp_path: Path) -> None:
    manager = fd.RoutingReplayManager(config, np.full((BATCH, LONGEST // BLOCK), -1, np.int32), 40, writer)
    manager.block_table[0, :1] = 5
    waiting = CLEARED * BATCH
    for number in range(waiting + 1):
        manager.register_request(0, engine_id(f"a:{number}:0:0"))
        step(manager, lengths(0), lengths(2), rows(number, 2))
        manager.clear_request(0)
        if number == waiting - 1:
            manager.register_request(1, engine_id("a:0:0:0"))  # it was preempted, and is back
    assert not manager.counts
    manager.clear_request(1)
    assert manager.counts == {UNSEEN_END: 1}
    assert [head(writer, tmp_path, f"a:{number}:0:0").status for number in range(3)] == [
        "partial",
        "dropped",
        "partial",
    ]
    manager.close()


def test_a_rejected_draft_is_never_the_row_of_a_last_token_that_was_not_fed(
    drafting: Any, writer: rr.RoutingWriter, tmp_path: Path
) -> None:
    """At the maximum length the last token is counted, and lies where a draft was fed and rejected."""
    worker, cache = fd.RoutedExpertsCapturer(drafting, 40), fd.RoutingCacheManager(drafting, 40, writer)
    cache.recycle([0, 1, 2])
    given = rows(0, 10)
    feed(worker, given, np.arange(10))
    cache.on_request_finished(engine_id("a:0:0:0"), [0, 1, 2], 9)
    assert head(writer, tmp_path, "a:0:0:0").missing == ((8, 9),)
    assert (rr.open_dataset(tmp_path / "ds").get("a:0:0:0").to_numpy("TLK")[:8] == given[:8]).all()
    cache.on_request_aborted(engine_id("a:1:0:0"), [0, 1, 2], 9)
    assert head(writer, tmp_path, "a:1:0:0").num_tokens == 8
    cache.writer = None  # as where the routing goes into the response
    found = cache.on_request_finished(engine_id("a:2:0:0"), [0, 1, 2], 9)
    assert found is not None
    assert (found[:8] == given[:8]).all()
    assert (found[8] == 255).all()
    worker.close()
    cache.close()


@pytest.mark.parametrize("kind", [TreeA, TreeB])
def test_with_drafts_no_row_is_another_token_s(
    kind: Any, drafting: Any, writer: rr.RoutingWriter, tmp_path: Path
) -> None:
    tree: Engine
    if kind is TreeA:
        manager = fd.RoutingReplayManager(drafting, np.zeros((BATCH, LONGEST // BLOCK)), 40, writer)
        tree, used = TreeA(manager), [manager]
    else:
        parts = fd.RoutedExpertsCapturer(drafting, 40), fd.RoutingCacheManager(drafting, 40, writer)
        tree, used = TreeB(*parts), [*parts]
    tree.drafts = 2
    rng = random.Random(0)
    asked = [
        Request(
            engine_id(f"a:{i}:0:0"), [i % 5, *range(rng.randrange(1, 20))], rng.randrange(1, 12), eos=rng.random() < 0.5
        )
        for i in range(60)
    ]
    tree.run(asked, rng, preempt=0.05)
    writer.flush()
    dataset = rr.open_dataset(tmp_path / "ds")
    for i, request in enumerate(asked):
        record = dataset.get(f"a:{i}:0:0")
        truth, there = request.expected(), record.present()
        assert not there[:, request.last :].any(), i
        there, found = there[:, : request.last], record.routed_experts[:, : request.last]
        assert (found[there] == truth[:, : there.shape[1]][there]).all(), i
        unsure = 1 if kind is TreeB else 2 if request.answer == 1 else 0  # nothing tells drafts from a chunk of two
        assert there[:, : request.last - unsure].all(), i
        assert record.status == "complete"
    for each in used:
        each.close()


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("cache_config", "enable_hierarchical_cache", True),
        ("cache_config", "kvcache_storage_backend", "mooncake"),
        ("scheduler_config", "splitwise_role", "decode"),
        (None, "", None),
    ],
)
def test_content_that_came_from_elsewhere_has_no_rows_of_the_block_s_last_owner(
    config: Any, writer: rr.RoutingWriter, tmp_path: Path, part: str | None, key: str, value: Any
) -> None:
    if part is not None:
        setattr(getattr(config, part), key, value)
    manager = fd.RoutingReplayManager(config, np.full((BATCH, LONGEST // BLOCK), -1, np.int32), 40, writer)
    manager.block_table[0, :2] = manager.block_table[1, :2] = 5, 6
    given = rows(0, 8)
    manager.register_request(0, engine_id("a:0:0:0"))
    step(manager, lengths(0), lengths(8), given)
    manager.put_finished_batch([1], lengths(8))
    manager.block_table[0] = -1
    manager.register_request(1, engine_id("a:1:0:0"))
    step(manager, lengths(0, 4), lengths(0, 2), rows(1, 2))  # block 5 came with its content
    manager.put_finished_batch([0, 1], lengths(0, 6))
    assert head(writer, tmp_path, "a:0:0:0").missing == ()
    assert head(writer, tmp_path, "a:1:0:0").missing == (((0, 4),) if part else ())
    assert manager.faults.counts == {}
    manager.close()


@pytest.mark.parametrize(
    "odd", [None, "x", [], {}, np.zeros((0, 1)), np.ones(2) / 3, [[-1]] * BATCH, 99, object()], ids=str
)
def test_no_hook_raises_into_serving(
    manager: fd.RoutingReplayManager, worker: fd.RoutedExpertsCapturer, cache: fd.RoutingCacheManager, odd: Any
) -> None:
    for call in (
        lambda: manager.register_request(odd, engine_id("a:0:0:0")),
        lambda: manager.register_request(1, odd),
        lambda: manager.clear_request(odd),
        lambda: manager.get_token_positions(odd, odd),
        lambda: manager.get_token_positions(lengths(1), odd),
        lambda: manager.compute_slot_mapping(odd),
        lambda: manager.update_host_cache(odd, odd),
        lambda: manager.update_host_cache([np.arange(2)], odd),
        lambda: manager.put_finished_batch(odd, odd),
        lambda: manager.save(odd, odd, odd),
        lambda: fd.save_routing_to_buffer(manager, odd, odd, None, None, odd, 1, 1, None),
        lambda: fd.save_routing_to_buffer_v2(worker, odd, odd, 1, 1, None, odd),
        lambda: worker.prepare_pending_save(odd, odd),
        lambda: worker.prepare_pending_save(3, odd),
        lambda: cache.recycle(odd),
        lambda: cache.on_request_finished(odd, odd, odd),
        lambda: cache.on_request_finished(engine_id("a:1:0:0"), odd, odd),
        lambda: cache.on_request_aborted(engine_id("a:2:0:0"), odd, odd),
    ):
        call()


def test_requests_whose_lengths_are_not_told_keep_what_was_fed(
    manager: fd.RoutingReplayManager, writer: rr.RoutingWriter, tmp_path: Path
) -> None:
    given = rows(0, 4)
    for batch in (0, 1):
        manager.block_table[batch, 0] = 5 + batch
        manager.register_request(batch, engine_id(f"a:{batch}:0:0"))
    positions = manager.get_token_positions(lengths(), lengths(2, 2))
    for at, layer in enumerate(SPEC.moe_layers):
        fd.save_routing_to_buffer(manager, given[:, at], np.zeros(4), None, None, layer - 1, 1, 1, None)
    manager.update_host_cache(positions, manager.compute_slot_mapping(positions))
    manager.put_finished_batch([1, 1], [2])
    for batch in (0, 1):
        assert head(writer, tmp_path, f"a:{batch}:0:0").status == "complete"
    assert manager.faults.counts == {"put_finished_batch": 1}


@pytest.mark.parametrize(
    "routing", [np.zeros((3, 2, 2)), np.full((3, 2, 2), np.nan), np.zeros((3, 2, 2), bool)], ids=str
)
def test_the_store_takes_whole_numbers_alone(writer: rr.RoutingWriter, routing: Any) -> None:
    with pytest.raises(rr.InvalidRoutingError, match="expected the ids of experts"):
        fd.RoutingStoreDataset(writer).submit("a:0:0:0", routing)


@pytest.mark.parametrize(
    "key", [5, None, "a:0:0:0_" + "9" * 5000, "a:0:0:0_٣"], ids=["number", "none", "long", "digit"]
)
def test_the_store_names_a_bad_key(writer: rr.RoutingWriter, key: Any) -> None:
    with pytest.raises(rr.InvalidInputError, match="routing key"):
        fd.RoutingStoreDataset(writer).submit(key, np.zeros((2, 2), np.uint8))


def test_records_whose_layers_never_come_are_told(
    writer: rr.RoutingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_BEGUN", 2)
    store = fd.RoutingStoreDataset(writer)
    for name in range(3):
        store.submit(f"a:{name}:0:0_0", np.array([[1, 2]], np.uint8))
    assert len(store._begun) == 2
    assert head(writer, tmp_path, "a:0:0:0").reason == "its layers did not all come"


def test_turns_are_cleared_up_to_a_bound(writer: rr.RoutingWriter) -> None:
    wrapper = fd.StoreWrapper(None, writer)
    with pytest.raises(rr.InvalidRequestIdError, match='1000000 lower turns: at most 1000 .* keep="last_turn"'):
        wrapper.submit_clear_prefix_batch_task("a:0:1000000:0")
    assert len(wrapper.submit_clear_prefix_batch_task("a:0:20:0")) == 20


def test_the_host_buffer_takes_what_it_holds() -> None:
    buffer = fd.RoutingHostBuffer(8, 4, 3, 2, "uint8", dp_suffix=engine_id("x")[-12:])
    try:
        buffer.table.recycle([0])
        buffer.scatter([0, 1, 2], np.ones((3, 3, 2), int))
        given = np.ones((4, 3, 2), int)
        given[0, 0, 0], given[1, 2, 1], given[2] = 256, -1, -1
        with pytest.raises(rr.InvalidRoutingError, match="2 rows have ids beyond uint8"):
            buffer.scatter([0, 1, 2, 3], given)
        assert buffer.table.gather([0], 0, 4).missing == ((0, 3),)
        for wrong in (given / 2, given > 0, given[:1], given.astype(object)):
            with pytest.raises(rr.InvalidRoutingError, match="expected integers"):
                buffer.scatter([0, 1, 2, 3], wrong)
        with pytest.raises(rr.InvalidRoutingError, match="slot_mapping"):
            buffer.gather([0.5])
    finally:
        buffer.close()


def test_two_requests_are_never_one_record() -> None:
    assert fd.record_id_of(engine_id("a:0:0:0#1")) is None
    assert fd.record_id_of(engine_id("a:0:0:0#1", 1)) is None
    assert fd.record_id_of(engine_id("a#b:0:0:0", 1)) == "a#b:0:0:0#1"


def test_a_deep_config_is_no_json() -> None:
    with pytest.raises(rr.InvalidInputError, match="is no JSON"):
        fd.RoutingReplayConfig("[" * 100_000)
