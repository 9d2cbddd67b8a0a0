"""FastDeploy's call sequences, of both generations of its tree, over hundreds of interleaved requests: every record is its own
requests' routing, or says what is missing. Configs, ids and the table of shared rows.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.capture import fastdeploy as fd
from rr_dataset.capture.fastdeploy.processes import NO_ALLOCATOR
from rr_dataset.capture.fastdeploy.shared import open_table, wire_dtype
from rr_dataset.capture.fastdeploy.worker import FOREIGN, SUSPEND, UNSEEN_END, gathered
from rr_dataset.options import MIB
from tests.engines import options
from tests.fastdeploy_engine import BATCH, BLOCK, SPEC, Request, TreeA, TreeB, engine_id, fd_config

MANY = 150


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[rr.RoutingWriter]:
    (tmp_path / "spools").mkdir()
    with rr.RoutingWriter(
        tmp_path / "ds", options(tmp_path / "spools", spool_bytes=16 * MIB, block_timeout_s=30), create=SPEC
    ) as made:
        yield made


@pytest.fixture
def tree_a(tmp_path: Path, writer: rr.RoutingWriter) -> Iterator[TreeA]:
    manager = fd.RoutingReplayManager(fd_config(tmp_path / "ds"), np.zeros((BATCH, 16)), 40, writer=writer)
    yield TreeA(manager)
    manager.close()


@pytest.fixture
def tree_b(tmp_path: Path, writer: rr.RoutingWriter) -> Iterator[TreeB]:
    config = fd_config(tmp_path / "ds")
    worker, manager = fd.RoutedExpertsCapturer(config, 40), fd.RoutingCacheManager(config, 40, writer=writer)
    yield TreeB(worker, manager)
    worker.close()
    manager.close()


@pytest.fixture(params=["tree_a", "tree_b"])
def tree(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def requests(seed: int, count: int, *, data: str = "math") -> list[Request]:
    """Groups that share prompts, samples of n > 1, one-token answers, ends by EOS and by length."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000) for _ in range(rng.randrange(2, 26))] for _ in range(max(count // 4, 1))]
    made = []
    for i in range(count):
        group, index = divmod(i, 3)
        answer = rng.choice([1, 1, 2, 5, 9])
        name = engine_id(f"{data}_{group % 5}:{group}:0:0", index)
        made.append(Request(name, prompts[group % len(prompts)], answer, eos=rng.random() < 0.7))
    return made


def check(dataset: rr.RoutingDataset, request: Request, *, partly: bool = False) -> int:
    """The record is the request's own routing where it is there; how many rows are missing."""
    record_id = fd.record_id_of(request.request_id)
    assert record_id is not None
    record = dataset.get(record_id)
    fed = min(record.num_tokens, request.last)
    there = record.present()[:, :fed]
    expected = request.expected()[:, :fed]
    np.testing.assert_array_equal(record.routed_experts[:, :fed][there], expected[there], err_msg=record_id)
    assert not record.present()[:, request.last :].any(), "the last token was never fed"
    if not partly:
        assert fed == request.last
        assert there.all(), (record_id, record.missing)
        assert record.status == "complete"
    return int((~there).sum())


# ---- the trees


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_hundreds_of_requests_interleaved(tree: Any, writer: rr.RoutingWriter, tmp_path: Path, seed: int) -> None:
    all_requests = requests(seed, MANY)
    tree.run(all_requests, random.Random(seed))
    assert tree.hits > 20, "prompts were found in the cache"
    assert writer.flush().dropped == {}
    dataset = rr.open_dataset(tmp_path / "ds")
    assert len(list(dataset.ids())) == MANY
    for request in all_requests:
        check(dataset, request)


@pytest.mark.parametrize("seed", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_with_preemptions_and_aborts_no_row_is_another_request_s(
    tree: Any, writer: rr.RoutingWriter, tmp_path: Path, seed: int
) -> None:
    all_requests = requests(seed, MANY)
    aborted = tree.run(all_requests, random.Random(seed), preempt=0.03, abort=0.02)
    assert aborted
    if isinstance(tree, TreeA):
        tree.manager.clear_all_request()
    writer.flush()
    dataset = rr.open_dataset(tmp_path / "ds")
    ended = 0
    for request in all_requests:
        (head,) = dataset.heads([str(fd.record_id_of(request.request_id))])
        assert head.final
        if request in aborted:
            assert head.status in ("aborted", "dropped")
        else:
            ended += 1
            check(dataset, request)
    assert ended > MANY // 2


def test_reset_in_flight_leaves_a_reason_and_no_row_for_later(
    tree: Any, writer: rr.RoutingWriter, tmp_path: Path
) -> None:
    first, second = requests(5, 12, data="first"), requests(5, 12, data="second")
    tree.run(first, random.Random(0))
    flying = Request(engine_id("flying:1:0:0"), list(range(9)), 4)
    tree._start(flying, 0)
    tree._grow(flying, 8)
    tree.block_table[0, : len(flying.blocks)] = flying.blocks
    tree.step([(flying, 8)])
    if isinstance(tree, TreeA):
        tree.manager.clear_all_request()
    else:
        tree.worker.clear()
        tree.manager.reset()
    tree.release(flying)
    tree.cached, tree.content = {}, {}
    tree.run(second, random.Random(1))
    assert writer.flush().dropped == ({"engine reset": 1} if isinstance(tree, TreeA) else {})
    dataset = rr.open_dataset(tmp_path / "ds")
    for request in second:
        check(dataset, request)


def test_rows_of_before_a_reset_are_missing_if_the_cache_hands_them_out(
    tree_b: TreeB, writer: rr.RoutingWriter, tmp_path: Path
) -> None:
    prompt = list(range(20))
    tree_b.run([Request(engine_id("a:1:0:0"), prompt, 3)], random.Random(0))
    tree_b.manager.reset()
    late = Request(engine_id("a:2:0:0"), prompt, 3)
    tree_b.run([late], random.Random(0))
    writer.flush()
    dataset = rr.open_dataset(tmp_path / "ds")
    assert dataset.get("a:2:0:0").missing == ((0, 16),)
    assert check(dataset, late, partly=True) == 16 * SPEC.num_layers


def test_suspended_steps_are_missing(
    tree_a: TreeA, writer: rr.RoutingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = requests(6, 6, data="early"), requests(7, 6, data="late")
    monkeypatch.setenv(SUSPEND, "1")
    tree_a.manager.update_suspend_routing_replay()
    tree_a.run(early, random.Random(0))
    monkeypatch.setenv(SUSPEND, "0")
    tree_a.manager.update_suspend_routing_replay()
    tree_a.cached, tree_a.content = {}, {}
    tree_a.run(late, random.Random(0))
    writer.flush()
    dataset = rr.open_dataset(tmp_path / "ds")
    for request in early:
        with pytest.raises(rr.RecordDroppedError, match="no routing was captured"):
            dataset.get(str(fd.record_id_of(request.request_id)))
    for request in late:
        check(dataset, request)


def test_foreign_ids_are_counted_and_leave_nothing(tree: Any, writer: rr.RoutingWriter, tmp_path: Path) -> None:
    foreign = [Request(name, [1, 2, 3, 4, 5], 2) for name in ("health", "cmpl-1", f"chatcmpl-{engine_id('x')[-38:]}")]
    own = requests(8, 3)
    tree.run([*foreign, *own], random.Random(0))
    assert tree.manager.counts[FOREIGN] == 3
    assert writer.flush().dropped == {}
    assert len(list(rr.open_dataset(tmp_path / "ds").ids())) == 3


def test_an_end_that_was_not_seen_is_a_drop_row(tree_a: TreeA, writer: rr.RoutingWriter, tmp_path: Path) -> None:
    manager = tree_a.manager
    for chunk in range(2):
        manager.register_request(0, f"chatcmpl-a:1:0:{chunk * 0}-00000000-0000-4000-8000-000000000000_0")
    manager.register_request(0, engine_id("a:2:0:0"))
    manager.clear_all_request()
    assert writer.flush().dropped == {UNSEEN_END: 1, "engine reset": 1}
    with pytest.raises(rr.RecordDroppedError, match=UNSEEN_END):
        rr.open_dataset(tmp_path / "ds").get("a:1:0:0")


def test_faults_of_the_caller_never_raise_into_serving(tree: Any) -> None:
    if isinstance(tree, TreeA):
        tree.manager.put_finished_batch([1, 0, 0, 0, 0, 0], [5] * BATCH)
        tree.manager.get_token_positions([0, 0, 0, 0, 0, 10_000], [0, 0, 0, 0, 0, 3])
        assert tree.manager.capture.stats().faults == {"put_finished_batch": 1, "get_token_positions": 1}
    else:
        tree.worker.prepare_pending_save(2, np.array([0, 10_000]))
        tree.manager.recycle([10_000])
        tree.manager.on_request_finished(engine_id("a:1:0:0"), [10_000], 3)
        assert tree.manager.stats().faults == {"recycle": 1, "finish": 1}


@pytest.mark.parametrize("rank", [1])
def test_other_ranks_open_nothing_and_do_nothing(tmp_path: Path, rank: int) -> None:
    config = fd_config(tmp_path / "ds")
    config.parallel_config.tensor_parallel_rank = rank
    manager = fd.RoutingReplayManager(config, np.zeros((BATCH, 16)), 40)
    worker = fd.RoutedExpertsCapturer(config, 40)
    manager.register_request(0, engine_id("a:1:0:0"))
    positions = manager.get_token_positions([0] * BATCH, [3] + [0] * (BATCH - 1))
    fd.save_routing_to_buffer(manager.get_routing_table(), np.zeros((3, 2)), np.zeros(3), None, None, 0, 1, 1, None)
    manager.update_host_cache(positions, manager.compute_slot_mapping(positions))
    manager.put_finished_batch([1] + [0] * (BATCH - 1), [3] * BATCH)
    manager.clear_all_request()
    worker.save(np.zeros((3, 2)), 0, 3)
    worker.prepare_pending_save(3, np.arange(3))
    worker.flush_pending_save()
    worker.clear()
    manager.close()
    worker.close()
    assert not (tmp_path / "ds").exists()


def test_gathered_experts_are_cut_to_the_tokens_of_the_step() -> None:
    paddle = pytest.importorskip("paddle")

    class Group:
        """All ranks have the same."""

    def all_gather(out: Any, ids: Any, group: Any) -> None:
        assert isinstance(group, Group)
        out[:] = paddle.concat([ids, ids + 100])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paddle.distributed, "all_gather", all_gather)
        ids = paddle.arange(6).reshape([3, 2])
        found = gathered(ids, 2, 2, Group())
    np.testing.assert_array_equal(found.numpy()[:5], [[0, 1], [2, 3], [4, 5], [100, 101], [102, 103]])
    assert gathered(ids, 2, 1, None) is ids


def test_prefill_and_decode_engines_hand_rows_over(tmp_path: Path, writer: rr.RoutingWriter) -> None:
    prompt = Request(engine_id("pd:1:0:0"), list(range(18)), 4)
    first, second = fd_config(tmp_path / "ds"), fd_config(tmp_path / "ds")
    made = [
        TreeB(fd.RoutedExpertsCapturer(config, 40), fd.RoutingCacheManager(config, 40, writer=writer))
        for config in (first, second)
    ]
    prefill, decode = made
    prefill._start(prompt, 0)
    prefill._grow(prompt, 18)
    prefill.step([(prompt, 18)])
    data = prefill.manager.gather_routing_for_request(prompt.blocks, 18)
    np.testing.assert_array_equal(data.transpose(1, 0, 2), prompt.expected()[:, :18])
    prompt.fed = 18
    prefill.release(prompt)
    view = fd.RoutingHostBufferView(
        decode.manager.table.rows.shape,
        str(data.dtype),
        f"routing_host_buffer.{second.parallel_config.local_engine_worker_queue_port}",
    )
    decode._start(prompt, 1)
    decode._grow(prompt, 18)
    data[3] = np.iinfo(data.dtype).max  # a row that the other engine lacks
    view.scatter(np.array([prompt.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(18)]), data)
    prompt.fed = 18
    while prompt.fed < prompt.last:
        decode._grow(prompt, prompt.fed + 1)
        decode.step([(prompt, 1)])
        prompt.fed += 1
    decode.ended([prompt])
    writer.flush()
    dataset = rr.open_dataset(tmp_path / "ds")
    assert check(dataset, prompt, partly=True) == SPEC.num_layers
    assert dataset.get("pd:1:0:0").missing == ((3, 4),)
    view.close()
    for tree in made:
        tree.worker.close()
        tree.manager.close()


def test_swapped_blocks_keep_their_rows_and_reused_ones_do_not() -> None:
    host = fd.RoutingHostBuffer(8, BLOCK, 3, 2, "uint8", "swap-test")
    swap = fd.RoutingSwapBuffer(4, BLOCK, 3, 2, "uint8", "swap-test")
    view = fd.RoutingSwapBufferView(swap.shape, "uint8", swap.shm_name)
    slots = np.arange(2 * BLOCK, 4 * BLOCK)  # blocks 2 and 3
    rows = np.arange(2 * BLOCK * 6).reshape(2 * BLOCK, 3, 2).astype(np.uint8)
    host.scatter(slots, rows)
    host.swap([2, 3], view, [1, 0])
    host.table.recycle([2, 3])
    assert (host.gather(slots) == 255).all()
    view.swap([1, 0], host, [6, 5])
    back = np.concatenate([np.arange(6 * BLOCK, 7 * BLOCK), np.arange(5 * BLOCK, 6 * BLOCK)])
    np.testing.assert_array_equal(host.gather(back), rows)
    with pytest.raises(rr.InvalidRoutingError, match="from position 0"):
        host.gather(back[1:])
    with pytest.raises(rr.InvalidInputError, match="expected"):
        fd.RoutingHostBufferView((1, 2, 3), "uint8", host.shm_name)
    for each in (view, host, swap):
        each.close()


@pytest.mark.parametrize(("dtype", "marker"), [("uint8", 255), ("uint16", 65_535), ("int32", -1)])
def test_a_missing_row_is_minus_one_in_the_dtype_that_is_asked_for(dtype: str, marker: int) -> None:
    host = fd.RoutingHostBuffer(2, BLOCK, 3, 2, "uint8", "marked")
    view = fd.RoutingHostBufferView(host.shape, dtype, host.shm_name)
    view.scatter(np.array([0]), np.full((1, 3, 2), 7, dtype))
    found = view.gather(np.arange(2))
    assert found.dtype == dtype
    assert found[:, 0, 0].tolist() == [7, marker]
    view.scatter(np.arange(2), found)
    assert view.table.gather([0], 0, 2).missing == ((1, 2),)
    for each in (view, host):
        each.close()


def test_whoever_comes_first_makes_the_table() -> None:
    one = open_table("first-comes", 4, BLOCK, 3, 2, "uint8")
    two = open_table("first-comes", 4, BLOCK, 3, 2, "uint8")
    one.rows[3] = 7
    assert (two.rows[3] == 7).all()
    with pytest.raises(rr.InvalidInputError, match=r"expected \(5, "):
        open_table("first-comes", 5, BLOCK, 3, 2, "uint8")
    two.close()
    one.close()


# ---- ids


UUID = "d9f16c5c-65f6-4815-b44d-14e2c581907c"


@pytest.mark.parametrize(
    ("engine", "record"),
    [
        (f"chatcmpl-xxx_xxx_epoch_15:2:2:1-{UUID}_0", "xxx_xxx_epoch_15:2:2:1"),
        (f"chatcmpl-xxx_epoch_15:2:2:1-{UUID}_3", "xxx_epoch_15:2:2:1#3"),
        (f"chatcmpl-with-dashes-in-it:1-{UUID}_0", "with-dashes-in-it:1"),
        (f"chatcmpl-one-{UUID}", "one"),
        (f"chatcmpl-../../etc/passwd:1:0:0-{UUID}_0", "../../etc/passwd:1:0:0"),
        (f"chatcmpl-__import__('os').abort():1:0:0-{UUID}_0", "__import__('os').abort():1:0:0"),
        (f"chatcmpl-{UUID}_0", None),
        (f"chatcmpl-{UUID}", None),
        (f"cmpl-a:1:0:0-{UUID}_0", None),
        (f"chatcmpl-a-{UUID}_01", None),
        ("", None),
        (None, None),
    ],
)
def test_ids(engine: Any, record: str | None) -> None:
    assert fd.record_id_of(engine) == record
    if record is not None:
        assert fd.split_request_id(engine) == record.partition("#")[0]
    elif engine is not None:
        with pytest.raises(rr.InvalidRequestIdError, match="expected chatcmpl-"):
            fd.split_request_id(engine)


# ---- config


def test_a_user_s_config_is_checked() -> None:
    config = fd.RoutingReplayConfig(
        '{"enable_routing_replay": true, "routing_store_type": "dataset", "dataset_uri": "/d"}'
    )
    assert (config.enable_routing_replay, config.dataset_uri, config.only_last_turn) == (True, "/d", False)
    assert vars(fd.RoutingReplayConfig(config.to_json_string())) == vars(config)
    for args, match in [
        (
            {"routing_store_typ": "dataset"},
            "'routing_store_typ', did you mean 'routing_store_type'.*valid are enable_routing",
        ),
        ({"only_last_turn": "yes"}, "only_last_turn='yes': expected a bool"),
        ({"enable_routing_replay": True}, 'needs "dataset_uri"'),
        ("{", "is no JSON"),
        ([1], "expected a JSON object"),
    ]:
        with pytest.raises(rr.InvalidInputError, match=match):
            fd.RoutingReplayConfig(args)  # type: ignore[arg-type]
    assert not fd.RoutingReplayConfig(None).enable_routing_replay
    assert fd.RoutingReplayConfig({"routing_store_type": "rdma", "rdma_store_server": "x"}).rdma_store_server == "x"


def test_what_the_engine_feeds_itself_is_no_fault() -> None:
    @dataclass
    class EngineArgs:
        model: str
        max_model_len: int
        use_fused_put: bool
        routing_replay_config: dict[str, Any]
        graph_optimization_config: None = None

    user = {"enable_routing_replay": True, "dataset_uri": "/d"}
    config = fd.RoutingReplayConfig(asdict(EngineArgs("m", 5, use_fused_put=True, routing_replay_config=user)))
    assert (config.enable_routing_replay, config.dataset_uri, config.use_fused_put) == (True, "/d", True)
    config.routing_dtype, config.num_moe_layers, config.moe_top_k = "uint8", 3, 2
    again = fd.RoutingReplayConfig(json.loads(config.to_json_string()))
    assert (again.routing_dtype, again.num_moe_layers, again.moe_top_k) == ("uint8", 3, 2)
    with pytest.raises(rr.InvalidInputError, match="dataset_ury"):
        fd.RoutingReplayConfig({"model": "m", "routing_replay_config": {"dataset_ury": "/d"}})


def test_the_manager_is_made_if_the_config_wants_one(tmp_path: Path) -> None:
    config = fd_config(tmp_path / "ds", only_last_turn=True)
    manager = fd.initialize_routing_replay_manager(config, np.zeros((BATCH, 16)), 40)
    assert manager is not None
    manager.close()
    dataset = rr.open_dataset(tmp_path / "ds")
    assert (dataset.spec, dataset.format.keep) == (SPEC, "last_turn")
    config.routing_replay_config.only_last_turn = False
    with pytest.raises(rr.InvalidInputError, match="was made with keep='last_turn'"):
        fd.initialize_routing_replay_manager(config, np.zeros((BATCH, 16)), 40)
    config.routing_replay_config.enable_routing_replay = False
    assert fd.initialize_routing_replay_manager(config, np.zeros((BATCH, 16)), 40) is None


def test_dtypes_are_those_of_the_field() -> None:
    for experts, dtype in [(128, "uint8"), (255, "uint8"), (256, "uint16"), (512, "uint16"), (65_536, "uint32")]:
        assert wire_dtype(rr.RoutingSpec((1,), experts, 2)) == dtype


def test_without_the_allocator_s_word_nothing_stale_is_stored(
    tree_b: TreeB, writer: rr.RoutingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_b, "allocated", lambda _: None)
    tree_b.run(requests(9, 6), random.Random(0))
    assert writer.flush().dropped == {NO_ALLOCATOR: 6}


def test_it_loads_nothing_heavy_into_the_engine() -> None:
    code = (
        "import sys, rr_dataset.capture.fastdeploy; print(*{'pyarrow', 'fsspec', 'paddle', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
