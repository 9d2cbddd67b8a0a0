"""What goes wrong in FastDeploy's routing replay and cannot here: the store contract and what is built on it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.capture import fastdeploy as fd
from rr_dataset.trainer.fastdeploy import RoutingReader
from tests.engines import Engine, alive, options, stopped, stored_rows, until
from tests.fastdeploy_engine import BATCH, BLOCK, SPEC, Request, TreeA, engine_id, fd_config


def routing(seed: int, tokens: int = 12, dtype: str = "uint8") -> Any:
    """[layers, tokens, top_k]."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(SPEC.num_experts)[: SPEC.top_k] for _ in range(SPEC.num_layers * tokens)])
    return ids.reshape(SPEC.num_layers, tokens, SPEC.top_k).astype(dtype)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[rr.RoutingWriter]:
    (tmp_path / "spools").mkdir()
    with rr.RoutingWriter(tmp_path / "ds", options(tmp_path / "spools"), create=SPEC) as made:
        yield made


@pytest.fixture
def store(writer: rr.RoutingWriter) -> fd.RoutingStoreDataset:
    return fd.RoutingStoreDataset(writer)


@pytest.fixture
def wrapper(writer: rr.RoutingWriter) -> fd.StoreWrapper:
    return fd.StoreWrapper(None, writer)


@pytest.fixture
def dataset(tmp_path: Path, writer: rr.RoutingWriter) -> rr.RoutingDataset:
    return rr.open_dataset(tmp_path / "ds")


def test_a_failed_put_or_clear_raises(store: fd.RoutingStoreDataset, writer: rr.RoutingWriter, tmp_path: Path) -> None:
    wrong = routing(1, dtype="int64")
    wrong[0, 3, 0] = 200
    for key, array in [
        ("a:1:0:0", wrong),
        ("a:1:0:0_9", routing(1)[0]),
        ("a:x", routing(1)),
        ("a", np.zeros(3, np.uint8)),
    ]:
        with pytest.raises(rr.InvalidInputError):
            asyncio.run(store.put(key, array))
    with pytest.raises(rr.InvalidRequestIdError):
        asyncio.run(store.clear_prefix_batch("chatcmpl-x"))
    (tmp_path / "ds").rename(tmp_path / "gone")

    async def put() -> None:
        await asyncio.wait_for(store.put("a:1:0:0", routing(1)), 1)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(put())
    with pytest.raises(rr.FlushTimeoutError):
        writer.flush(0.2)
    (tmp_path / "gone").rename(tmp_path / "ds")
    writer.flush()


def test_what_was_awaited_is_there(store: fd.RoutingStoreDataset, dataset: rr.RoutingDataset, tmp_path: Path) -> None:
    for fused in (True, False):
        key = f"a:{int(fused)}:0:0"
        if fused:
            asyncio.run(store.put(key, routing(1)))
        else:
            for layer, number in zip(routing(1), (0, 1, 3), strict=True):
                asyncio.run(store.put(f"{key}_{number}", layer))
        assert stored_rows(tmp_path / "ds")[key] == (1 if fused else 4)
        record = dataset.get(key)
        np.testing.assert_array_equal(record.routed_experts, routing(1))
        assert record.status == "complete"
    asyncio.run(store.clear_prefix_batch(["a:0", "a:1"]))
    assert list(dataset.ids()) == []


def test_puts_and_clears_of_one_key_keep_their_order(
    store: fd.RoutingStoreDataset, wrapper: fd.StoreWrapper, dataset: rr.RoutingDataset
) -> None:
    async def many() -> None:
        calls: list[Any] = []
        for i in range(30):
            calls += [
                store.put("a:1:0:0", routing(i)),
                store.clear_prefix_batch("a:1"),
                store.put("a:2:0:0", routing(i)),
            ]
        await asyncio.gather(*calls)

    asyncio.run(many())
    assert list(dataset.ids()) == ["a:2:0:0"]
    np.testing.assert_array_equal(dataset.get("a:2:0:0").routed_experts, routing(29))
    for attempt in (1, 2):  # the same id again, layer by layer: never rows of both attempts
        for at, number in enumerate((0, 1, 3)[: 3 if attempt == 2 else 2]):
            wrapper.submit_put_task(routing(attempt, 5 + attempt)[at], "a:3:0:0", number)
    wrapper.writer.flush()
    record = dataset.get("a:3:0:0")
    assert record.status == "complete"
    np.testing.assert_array_equal(record.routed_experts, routing(2, 7))


def test_no_start_clears_what_others_wrote(
    store: fd.RoutingStoreDataset, dataset: rr.RoutingDataset, tmp_path: Path
) -> None:
    asyncio.run(store.put("mine:1:0:0", routing(1)))
    other = options(tmp_path / "spools", run_id="another run")
    with rr.RoutingWriter(tmp_path / "ds", other) as second:
        wrapper = fd.StoreWrapper(None, second)
        wrapper.start_store_warpper()
        asyncio.run(wrapper.store.put("theirs:1:0:0", routing(2)))
        assert sorted(dataset.ids()) == ["mine:1:0:0", "theirs:1:0:0"]
        wrapper.submit_clear_store_task()
        assert list(dataset.ids()) == ["mine:1:0:0"]
        asyncio.run(wrapper.store.put("theirs:2:0:0", routing(2)))
    asyncio.run(store.clear_store())
    assert list(dataset.ids()) == ["theirs:2:0:0"]


def test_a_local_prefix_is_cleared_by_component(store: fd.RoutingStoreDataset, dataset: rr.RoutingDataset) -> None:
    for key in ("a:1:0:0", "a:10:0:0", "a:1:1:0", "a:1:0:0#3"):
        asyncio.run(store.put(key, routing(1)))
    asyncio.run(store.clear_prefix_batch("a:1:0:0"))
    assert sorted(dataset.ids()) == ["a:10:0:0", "a:1:1:0"]
    asyncio.run(store.clear_prefix_batch("a:1"))
    assert list(dataset.ids()) == ["a:10:0:0"]


def test_skipped_turns_do_not_leak(wrapper: fd.StoreWrapper, dataset: rr.RoutingDataset) -> None:
    turns = ["a:1:0:1", "a:1:2:1", "a:1:2:2", "a:1:2:1#1", "a:1:5:1"]
    for key in turns:
        wrapper.submit_put_task(routing(1), key)
    wrapper.submit_clear_prefix_batch_task("a:1:0:1")
    wrapper.submit_clear_prefix_batch_task("a:1:5:1")
    wrapper.writer.flush()
    assert sorted(dataset.ids()) == ["a:1:2:2", "a:1:5:1"]


def test_with_last_turn_nothing_needs_to_be_cleared(tmp_path: Path) -> None:
    config = fd_config(tmp_path / "last", only_last_turn=True)
    wrapper = fd.StoreWrapper(config)
    for turn in (0, 2, 5):
        wrapper.submit_put_task(routing(turn), f"a:1:{turn}:1")
        assert wrapper.submit_clear_prefix_batch_task(f"a:1:{turn}:1") == []
    wrapper.submit_put_task(routing(9), "a:1:1:2")
    wrapper.shutdown()
    wrapper.shutdown()
    assert sorted(rr.open_dataset(tmp_path / "last").ids()) == ["a:1:1:2", "a:1:5:1"]


def test_ids_are_texts_and_samples_have_their_own(
    store: fd.RoutingStoreDataset, dataset: rr.RoutingDataset, tmp_path: Path
) -> None:
    strange = ["../../up:1:0:0", "/etc/passwd:1:0:0", "__import__('os').abort():1:0:0", "one", "a/b:1:0:0"]
    for rollout in strange:
        for index in (0, 1, 2):
            key = fd.record_id_of(engine_id(rollout, index))
            assert key is not None
            asyncio.run(store.put(key, routing(index)))
    for rollout in strange:
        for index in (0, 1, 2):
            key = f"{rollout}#{index}" if index else rollout
            np.testing.assert_array_equal(dataset.get(key).routed_experts, routing(index))
    assert {path.name for path in tmp_path.iterdir()} == {"ds", "spools"}


@pytest.mark.parametrize("kind", ["datset", "Local", ""])
def test_a_misspelt_store_type_names_the_valid_ones(kind: str, tmp_path: Path) -> None:
    with pytest.raises(rr.InvalidInputError, match="valid are dataset, local, rdma, response"):
        fd.RoutingReplayConfig({"routing_store_type": kind})
    config = fd_config(tmp_path / "ds")
    config.routing_replay_config.routing_store_type = kind
    with pytest.raises(rr.InvalidInputError, match="expected 'dataset' and the place"):
        fd.get_routing_store(config)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8", "int16", "int32"])
def test_rows_of_minus_one_are_missing_in_any_dtype(
    store: fd.RoutingStoreDataset, dataset: rr.RoutingDataset, dtype: str
) -> None:
    array = (routing(1) % 100).astype("int64")
    array[..., 1] = (array[..., 0] + 1) % 100
    array[:, 4:6] = -1
    asyncio.run(store.put("a:1:0:0", array.astype(dtype)))
    record = dataset.get("a:1:0:0")
    assert record.missing == ((4, 6),)
    np.testing.assert_array_equal(record.routed_experts[:, 6:], array[:, 6:])


def test_padding_is_not_stored(store: fd.RoutingStoreDataset, dataset: rr.RoutingDataset, tmp_path: Path) -> None:
    padded = np.full((SPEC.num_layers, 32 * 1024, SPEC.top_k), 255, np.uint8)
    padded[:, :12] = routing(1)
    asyncio.run(store.put("a:1:0:0", padded))
    assert dataset.get("a:1:0:0").num_tokens == 12
    stored = sum(path.stat().st_size for path in (tmp_path / "ds").rglob("*.arrow"))
    assert stored < padded.nbytes // 8


def test_memory_is_bounded_in_bytes_and_a_dead_consumer_is_started_again(
    wrapper: fd.StoreWrapper, dataset: rr.RoutingDataset
) -> None:
    writer = wrapper.writer
    large = np.tile(routing(1, 1000), (1, 45, 1))
    with stopped(writer.stats().worker_pid):
        receipts = [wrapper.submit_put_task(large, f"big:{i}:0:0") for i in range(40)]
        assert writer.stats().spool_used_bytes <= writer.options.spool_bytes
    dropped = writer.flush().dropped["spool full"]
    assert 0 < dropped < 40
    assert sum(receipt.durable() for receipt in receipts) == 40 - dropped
    pid = writer.stats().worker_pid
    os.kill(pid, signal.SIGKILL)
    wrapper.submit_put_task(routing(2), "after:1:0:0").wait()
    assert writer.stats().worker_pid != pid
    np.testing.assert_array_equal(dataset.get("after:1:0:0").routed_experts, routing(2))


def test_a_killed_group_hangs_nothing_and_loses_nothing(tmp_path: Path) -> None:
    code = """
import signal
from tests.test_fastdeploy_faults import routing, fd, fd_config
wrapper = fd.StoreWrapper(fd_config(root))
for i in range(20):
    wrapper.submit_put_task(routing(i), f"a:{i}:0:0")
print(wrapper.writer.stats().worker_pid, flush=True)
signal.pause()
"""
    with Engine(code, tmp_path / "ds", tmp_path, start_new_session=True) as engine:
        worker = int(engine.line())
        os.killpg(engine.process.pid, signal.SIGTERM)
        engine.process.wait(30)
        until(lambda: not alive(worker), "the worker has published what was left")
    rows = until(lambda: len(list(rr.open_dataset(tmp_path / "ds").ids())) == 20 and 20, "all records are there")
    assert rows == 20


def test_a_reused_block_s_old_rows_are_missing_and_never_data(
    tmp_path: Path, writer: rr.RoutingWriter, dataset: rr.RoutingDataset
) -> None:
    manager = fd.RoutingReplayManager(fd_config(tmp_path / "ds"), np.zeros((BATCH, 16)), 8, writer=writer)
    tree = TreeA(manager, 8)
    first, second = Request(engine_id("a:1:0:0"), [1] * 9, 4), Request(engine_id("a:2:0:0"), [2] * 9, 4)
    tree._start(first, 0)
    tree._grow(first, 12)
    tree.block_table[0, :3] = first.blocks
    tree.step([(first, 12)])
    blocks = list(first.blocks)
    first.fed = 12
    tree.ended([first])
    tree.release(first)
    tree._start(second, 0)
    second.blocks = blocks  # the very blocks, and only some of its tokens are captured
    tree.block_table[0, :3] = blocks
    tree.step([(second, 2)])
    manager._fed[0] = second.fed = 12
    tree.ended([second])
    writer.flush()
    np.testing.assert_array_equal(dataset.get("a:1:0:0").routed_experts, first.expected())
    record = dataset.get("a:2:0:0")
    np.testing.assert_array_equal(record.routed_experts[:, :2], second.expected()[:, :2])
    assert record.missing[0][0] == 2
    old = first.expected()[:, 2:BLOCK]
    assert not (record.routed_experts[:, 2:BLOCK] == old).all()
    manager.close()


def test_rows_of_a_reused_block_never_reach_its_new_owner(
    tmp_path: Path, writer: rr.RoutingWriter, dataset: rr.RoutingDataset
) -> None:
    manager = fd.RoutingCacheManager(fd_config(tmp_path / "ds"), 4, writer=writer)
    slots = np.arange(4 * BLOCK)
    rows = np.random.default_rng(0).integers(0, 200, (len(slots), 3, 2)).astype(np.uint8)
    manager.recycle([0, 1, 2, 3])
    manager.table.scatter(slots, rows, manager.table.marks(slots))
    manager.recycle([1, 3])
    manager.on_request_finished(engine_id("a:1:0:0"), [0, 1, 2, 3], 16)
    assert manager.gather_routing_for_request([1], 4).max() == 255
    writer.flush()
    assert dataset.get("a:1:0:0").missing == ((4, 8), (12, 16))
    manager.close()


def test_a_record_says_its_shape_dtype_and_layers(store: fd.RoutingStoreDataset, dataset: rr.RoutingDataset) -> None:
    asyncio.run(store.put("a:1:0:0", routing(1, 7, "int32")))
    record = dataset.get("a:1:0:0")
    assert (record.routed_experts.shape, record.routed_experts.dtype) == ((3, 7, 2), np.uint8)
    assert (record.layers, record.num_tokens, dataset.spec.num_experts) == ((1, 2, 4), 7, 200)
    with pytest.raises(rr.InvalidRoutingError, match="it has 3 experts a token"):
        asyncio.run(store.put("a:2:0:0", np.zeros((3, 7, 3), np.uint8)))
    with pytest.raises(rr.InvalidRoutingError, match="it has 2 layers"):
        asyncio.run(store.put("a:2:0:0", np.zeros((2, 7, 2), np.uint8)))


def test_dense_layers_between_and_behind_moe_layers_shift_nothing(
    store: fd.RoutingStoreDataset, dataset: rr.RoutingDataset
) -> None:
    tail = np.full((5, 12, 2), 255, np.uint8)  # layers 1 to 5 of the model, of which 3 and 5 are dense
    tail[[0, 1, 3]] = routing(1)
    asyncio.run(store.put("a:1:0:0", tail))
    np.testing.assert_array_equal(dataset.get("a:1:0:0").routed_experts, routing(1))
    np.testing.assert_array_equal(dataset.get("a:1:0:0").layer(4), routing(1)[2])
    with pytest.raises(rr.InvalidRoutingError, match="layer 2 from the first MoE layer on is layer 3 of the model"):
        asyncio.run(store.put("a:2:0:0_2", routing(1)[0]))


@pytest.mark.parametrize("experts", [300, 60_000])
def test_paddle_gets_ids_and_no_bfloat16(tmp_path: Path, experts: int) -> None:
    paddle = pytest.importorskip("paddle")
    spec = rr.RoutingSpec((0, 1), num_experts=experts, top_k=2)
    ids = np.random.default_rng(0).integers(256, experts, (2, 6, 2))
    ids[..., 1] = (ids[..., 0] + 1) % experts
    with rr.RoutingWriter(tmp_path / "ds", options(tmp_path), create=spec) as made:
        store = fd.RoutingStoreDataset(made)
        asyncio.run(store.put("a:1:0:0", paddle.to_tensor(ids)))
        asyncio.run(store.put("a:2:0:0", paddle.to_tensor(ids.astype(np.int32))))
    reader = RoutingReader(tmp_path / "ds", use_fused_put=True)
    for key in ("a:1:0:0", "a:2:0:0"):
        tensor = paddle.to_tensor(reader.get(key).astype(np.int32))
        np.testing.assert_array_equal(tensor.numpy(), ids)
