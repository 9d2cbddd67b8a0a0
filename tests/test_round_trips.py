"""How many requests each operation sends to a remote store, and how many of them follow one another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from counting_proxy import CountingProxy
from memory_store import RemoteMemory
from stored import Stored
from virtual_time import Pool, VirtualTime

import rr_dataset as rr
from rr_dataset.layout import ShardName
from rr_dataset.publish import publish_slab, publish_threads
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import TombstoneCache

SPEC = rr.RoutingSpec(tuple(range(3, 51)), num_experts=256, top_k=8)
PREFIXES = 64
PER_PREFIX = 64
ACROSS = 160  # prefixes of the large delete


class Rows:
    """What `Stored.row` needs."""

    def __init__(self, dataset: rr.RoutingDataset) -> None:
        self.spec, self.keys, self._stamp = dataset.spec, dataset.keys, 0


class Cost(NamedTuple):
    """Of one call."""

    trips: int
    requests: int


class World:
    """A dataset in a remote store, with a virtual time."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stored = Stored(root / "ds", SPEC)
        self.store = RemoteMemory()
        self.time = VirtualTime()
        self.time.patch(monkeypatch)
        self.store.takes_time = self.time.request
        for module in ("lookup", "dataset", "delete"):
            monkeypatch.setattr(import_module(f"rr_dataset.{module}"), "open_storage", lambda *_: self.store)

    def load(self) -> None:
        self.store.load(self.stored.root)

    def opened(self) -> rr.RoutingDataset:
        """A reader that knows the format and nothing else."""
        dataset = rr.RoutingDataset("memory")
        assert self.cost(lambda: dataset.format) == Cost(1, 1)
        return dataset

    def cost(self, call: Callable[[], object]) -> Cost:
        ticks, requests = self.time.ticks, len(self.store.requests)
        call()
        return Cost(self.time.ticks - ticks, len(self.store.requests) - requests)

    def asked_since(self, requests: int) -> list[str]:
        return [call for call, _ in self.store.requests[requests:]]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_get(world: World) -> None:
    put = world.stored.put("a:1", 900)
    world.load()
    dataset = world.opened()
    assert world.cost(lambda: dataset.get("a:1")) == Cost(3, 4)
    assert world.cost(lambda: dataset.get("a:1")) == Cost(2, 3)
    np.testing.assert_array_equal(dataset.get("a:1").routed_experts, put.routed_experts)
    other = world.opened()
    assert world.cost(lambda: other.get("a:1", layers=range(3, 15))) == Cost(3, 4)


def test_get_of_a_record_in_three_shards(world: World) -> None:
    for start in (0, 300, 600):
        world.stored.put("a:1", 300, start=start, part=True)
    world.load()
    dataset = world.opened()
    assert world.cost(lambda: dataset.get("a:1")) == Cost(3, 8)
    assert world.cost(lambda: dataset.get("a:1")) == Cost(2, 5)


def test_get_with_tombstones_not_seen_before(world: World) -> None:
    world.stored.put("a:1", 900)
    for number in range(3):
        world.stored.tombstone("prefix", f"other:{number}")
    world.load()
    dataset = world.opened()
    assert world.cost(lambda: dataset.get("a:1")) == Cost(3, 4 + 3)
    assert world.cost(lambda: dataset.get("a:1")) == Cost(2, 3)
    world.stored.tombstone("prefix", "other")
    world.load()
    assert world.cost(lambda: dataset.get("a:1")) == Cost(3, 3 + 1)  # the payload is not read twice
    assert world.cost(lambda: dataset.get("a:1")) == Cost(2, 3)


def test_an_index_beyond_the_usual_tail_is_one_request(world: World) -> None:
    world.stored.shard(*[world.stored.row(f"a:{number}", 3) for number in range(1000)])
    world.load()
    dataset = world.opened()
    assert world.cost(lambda: dataset.heads(["a:1"])) == Cost(2, 3)


def test_get_many_of_64_prefixes(world: World) -> None:
    ids = [f"a{number}:1" for number in range(PREFIXES)]
    for request_id in ids:
        world.stored.put(request_id, 100)
    world.load()
    dataset = world.opened()
    at_once = -(-PREFIXES // world.store.requests_at_once)
    assert world.cost(lambda: dataset.get_many(ids)) == Cost(3 * at_once, 3 * PREFIXES + 1)
    assert world.cost(lambda: dataset.get_many(ids)) == Cost(2 * at_once, 2 * PREFIXES + 1)
    assert world.cost(lambda: dataset.get_many(ids * 3)) == Cost(2 * at_once, 4 * PREFIXES + 1)  # a run for each copy
    assert world.cost(lambda: dataset.heads(ids)) == Cost(at_once + 1, PREFIXES + 1)
    assert world.time.most_at_once <= world.store.requests_at_once + 1


def test_what_lists_everything(world: World) -> None:
    for number in range(PREFIXES):
        world.stored.put(f"a{number}:1", 10)
    world.load()
    at_once = -(-PREFIXES // world.store.requests_at_once)
    walked = Cost(1 + 2 * at_once, 1 + 2 * PREFIXES + 1)
    assert world.cost(lambda: list(world.opened().ids())) == Cost(walked.trips + 1, walked.requests + 1)
    dataset = world.opened()
    cursors: list[Any] = []
    assert world.cost(lambda: cursors.append(dataset.poll(None)[1])) == walked
    assert world.cost(lambda: dataset.poll(cursors[0])) == Cost(1 + at_once + 1, 1 + PREFIXES + 1)
    ids = [f"a{number}:1" for number in range(PREFIXES)]
    assert world.cost(lambda: dataset.wait_for(ids)) == Cost(at_once + 1, PREFIXES + 1)
    assert world.cost(dataset.info) == Cost(1 + at_once + 1, 1 + PREFIXES + 1)


def test_only_the_layers_and_tokens_asked_for_are_read(world: World) -> None:
    put = world.stored.put("a:1", 4000)
    world.load()
    dataset = world.opened()
    dataset.heads(["a:1"])

    def read(**how: Any) -> int:
        before = world.store.bytes_read
        dataset.get("a:1", **how)
        return world.store.bytes_read - before

    assert put.routed_experts is not None
    whole = put.routed_experts.nbytes
    over = 64 * len(SPEC.moe_layers)  # each layer is padded to 64 bytes
    assert whole <= read() <= whole + over
    assert whole // 4 <= read(layers=range(3, 15)) <= whole // 4 + over
    assert read(layers=range(3, 51, 2)) == whole // 2
    assert read(tokens=slice(1000, 1010)) == whole // 400


# ---- publishing


def test_a_slab_of_forty_shards(world: World) -> None:
    world.load()
    rows = [world.stored.row(f"a{number}:1", 50) for number in range(40)]
    cache = TombstoneCache(world.stored.keys)
    fmt = world.stored.dataset.format
    pool = Pool(world.time, publish_threads(world.store))  # type: ignore[arg-type]
    checks = []

    def publish() -> None:
        publish_slab(
            world.store,  # type: ignore[arg-type]
            fmt,
            writer="a" * 16,
            seq=1,
            rows=rows,
            cache=cache,
            pool=pool,
            check=lambda: checks.append(world.store.read_bytes("_rr/format.json")),
            now_ms=lambda: 0,
        )

    at_once = -(-len(rows) // world.store.requests_at_once)
    assert world.cost(publish) == Cost(1 + at_once + 1, 2 + len(rows) + 2)


# ---- deleting


def test_a_prefix(world: World) -> None:
    for number in range(PER_PREFIX):
        world.stored.put(f"a:{number}", 3)
    world.load()
    assert world.cost(lambda: rr.delete_prefix("memory", "a")) == Cost(4, 4)
    assert not any(path.startswith("data_id=") for path in world.store.objects)


def test_ten_thousand_objects(world: World) -> None:
    world.load()
    for prefix in range(ACROSS):
        for number in range(PER_PREFIX):
            name = ShardName(0, 1, 2, 1, writer="a" * 16, seq=prefix * PER_PREFIX + number)
            world.store.objects[f"data_id=a{prefix}/{name.text}"] = b""
    before = len(world.store.requests)
    lists = -(-ACROSS // world.store.requests_at_once)
    report: list[rr.DeleteReport] = []
    cost = world.cost(lambda: report.append(rr.delete("memory", everything=True)))
    assert report[0].files == ACROSS * PER_PREFIX
    assert not any(path.startswith("data_id=") for path in world.store.objects)
    asked = world.asked_since(before)
    assert (asked.count("put"), asked.count("list"), asked.count("get")) == (1, 1 + ACROSS, 1)
    assert asked.count("delete") <= 2 + ACROSS * PER_PREFIX // 1000 + 1
    assert cost.trips <= 3 + lists + 3


def test_deep_deletes_read_indexes_side_by_side(world: World) -> None:
    for number in range(20):
        world.stored.shard(world.stored.row(f"a:{number}", 3), world.stored.row(f"a:{number}:0", 3))
    world.load()
    ids = [f"a:{number}" for number in range(20)]
    # format, mark, listing, 20 indexes and the other marks; nothing goes
    assert world.cost(lambda: rr.delete("memory", ids=ids)) == Cost(4, 3 + 20 + 1)


# ---- a real server


def test_the_same_counts_on_a_real_server(s3: Any, s3_server: Any) -> None:
    with CountingProxy.before(s3_server.port) as proxy:
        options = {**s3.options, "endpoint_url": proxy.endpoint}

        def requests(call: Callable[[], object]) -> int:
            before = sum(proxy.counts().values())
            call()
            return sum(proxy.counts().values()) - before

        dataset = rr.create_dataset(s3.uri, SPEC, storage_options=options, max_clock_skew_s=0)
        source = Rows(dataset)
        rows = [Stored.row(source, f"a{number}:1", 50) for number in range(8)]  # type: ignore[arg-type]
        storage = open_storage(s3.uri, options)
        with ThreadPoolExecutor(publish_threads(storage)) as pool:
            cache = TombstoneCache(dataset.keys)
            how: dict[str, Any] = {"writer": "a" * 16, "seq": 1, "rows": rows, "cache": cache, "pool": pool}
            check = lambda: storage.read_bytes("_rr/format.json")  # noqa: E731
            publish = partial(publish_slab, storage, dataset.format, check=check, now_ms=lambda: 0, **how)
            assert requests(publish) == 8 + 4
        reader = rr.open_dataset(s3.uri, storage_options=options)
        assert requests(lambda: reader.get("a0:1")) == 4
        assert requests(lambda: reader.get("a0:1")) == 3
        assert requests(lambda: reader.heads([f"a{number}:1" for number in range(8)])) == 8 + 1 + 7
        assert requests(lambda: rr.delete_prefix(s3.uri, "a0", options)) == 4
