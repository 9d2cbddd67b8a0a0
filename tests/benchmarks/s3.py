"""A dataset on a real S3 server on loopback, beside the plain requests of the client that it uses (obstore).

Both sides move the same bytes through the same server, which takes most of the time of each. Bandwidth is no limit here,
so `s3-compression` says from which bandwidth on each compression would be the fastest.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import obstore

import rr_dataset as rr
from rr_dataset.spool_place import SHM
from rr_dataset.storage.client import REQUESTS_AT_ONCE
from tests.counting_proxy import CountingProxy
from tests.weed import Place

from .bench import LARGE_TOKENS, MIB, SMALL_TOKENS, SPEC, Array, Bench, Ids, sources
from .clients import s3_server, s3_store
from .compaction import SPEC as REAL_SPEC
from .compaction import joined_records
from .measure import Check, Pairs, at_least, at_most, interleave, shown

QUARTER = SPEC.moe_layers[12:24]
BANDWIDTHS = (50, 100, 200, 400, 800, 1600)  # MB/s to the store


@contextmanager
def _writer(place: Place, spec: rr.RoutingSpec = SPEC, **how: Any) -> Iterator[rr.RoutingWriter]:
    """It waits for room instead of dropping; a dataset of one host needs no skew."""
    rr.create_dataset(place.uri, spec, max_clock_skew_s=0.0, storage_options=place.options)
    options = rr.WriterOptions(
        spool_dir=str(SHM), block_timeout_s=120, drain_timeout_s=120, storage_options=place.options, **how
    )
    with rr.RoutingWriter(place.uri, options) as writer:
        yield writer


class Plain:
    """The client alone: whole puts, and ranges in parallel, as many at once as ours."""

    def __init__(self, place: Place) -> None:
        self.base, self.store = place.prefix, s3_store(place)

    def put(self, blobs: Sequence[tuple[str, bytes]]) -> None:
        async def one(name: str, data: bytes, room: asyncio.Semaphore) -> None:
            async with room:
                await obstore.put_async(self.store, f"{self.base}/plain/{name}", data, use_multipart=False)

        async def every() -> None:
            room = asyncio.Semaphore(REQUESTS_AT_ONCE)
            await asyncio.gather(*(one(name, data, room) for name, data in blobs))

        asyncio.run(every())

    def put_one(self, name: str, data: bytes) -> None:
        obstore.put(self.store, f"{self.base}/plain/{name}", data, use_multipart=False)

    def ranges(self, wanted: Sequence[tuple[str, int, int]]) -> list[Any]:
        async def one(name: str, start: int, stop: int, room: asyncio.Semaphore) -> Any:
            async with room:
                return await obstore.get_range_async(self.store, name, start=start, end=stop)

        async def every() -> list[Any]:
            room = asyncio.Semaphore(REQUESTS_AT_ONCE)
            return await asyncio.gather(*(one(*each, room) for each in wanted))

        return asyncio.run(every())

    def shards(self) -> list[str]:
        """Keys of the dataset's, in the order of their directories."""
        listed = obstore.list(self.store, f"{self.base}/").collect()
        return sorted(each["path"] for each in listed if each["path"].endswith(".arrow"))


def s3_get(bench: Bench) -> list[Check]:
    """12.6 MB into a ready array, shard known, and a quarter of the layers."""
    records = sources(8, LARGE_TOKENS, "LTK")
    ids = [f"prompt_{number}:0:0:0" for number in range(8)]
    out = np.ones((SPEC.num_layers, LARGE_TOKENS, SPEC.top_k), np.uint8)
    with s3_server() as server:
        place = server.place()
        with _writer(place) as writer:
            for request_id, record in zip(ids, records, strict=True):
                writer.put(request_id, record, "LTK")
        dataset = rr.open_dataset(place.uri, storage_options=place.options)
        for request_id, record in zip(ids, dataset.get_many(ids), strict=True):
            _same(record.routed_experts, records[ids.index(request_id)])
        plain, rounds = Plain(place), bench.count(40, 200)
        shards = plain.shards()

        def whole(i: int) -> object:
            return dataset.get(ids[i % 8], out=out)

        def range_(i: int) -> object:
            return obstore.get_range(plain.store, shards[i % 8], start=4096, end=4096 + records[0].nbytes)

        one = interleave(whole, range_, rounds)
        cold = interleave(lambda i: _opened(place).get(ids[i % 8], out=out), range_, rounds // 2)
        quarter = interleave(lambda i: dataset.get(ids[i % 8], layers=QUARTER, out=out[:12]), whole, rounds)
    against = "one ranged GET of as many bytes, obstore"
    return [
        at_most("s3-get", "get 12.6 MB from S3 into a ready array, shard known", against, one, 1.5),
        at_most("s3-get", "the same cold: open_dataset and get", against, cold, 2.0, note="cold has no target"),
        at_most("s3-get", "get 12 of 48 layers from S3", "all 48 layers", quarter, 0.4),
    ]


def s3_get_many(bench: Bench) -> list[Check]:
    """512 records of 64 prompts, one a shard."""
    prompts, samples = 64, 8
    records = sources(8, SMALL_TOKENS, "LTK")
    ids = [f"prompt_{prompt:02}:{sample}:0:0" for prompt in range(prompts) for sample in range(samples)]
    with s3_server() as server:
        place = server.place()
        with _writer(place) as writer:
            for sample in range(samples):
                for at, request_id in enumerate(ids[sample::samples]):
                    writer.put(request_id, records[at % 8], "LTK")
                writer.flush(timeout_s=600)
        plain, size = Plain(place), records[0].nbytes
        shards = plain.shards()
        if len(shards) != len(ids):
            raise RuntimeError(f"{len(shards)} shards of {len(ids)} records")
        _same(_opened(place).get_many(ids)[samples].routed_experts, records[1])
        dataset = _opened(place)

        def ranges(part: int) -> object:
            return plain.ranges([(shard, 4096, 4096 + part) for shard in shards])

        rounds = bench.count(4, 20)
        warm = interleave(lambda _: dataset.get_many(ids), lambda _: ranges(size), rounds)
        cold = interleave(lambda _: _opened(place).get_many(ids), lambda _: ranges(size), rounds // 2)
        quarter = interleave(lambda _: dataset.get_many(ids, layers=QUARTER), lambda _: dataset.get_many(ids), rounds)
    what, against = f"get_many of {len(ids)} x 0.4 MB over {prompts} prefixes, S3", "as many range GETs in parallel"
    return [
        at_most("s3-get-many", f"{what}, shards known", against, warm, 1.5),
        at_most("s3-get-many", f"open_dataset, then {what}", against, cold, 3.0, note="cold has no target"),
        at_most("s3-get-many", "the same, 12 of 48 layers", "all 48 layers", quarter, 0.4),
    ]


def s3_ingest(bench: Bench) -> list[Check]:
    """Records, one a shard, against the client's PUTs of as many bytes each."""
    checks = []
    for name, tokens, count in (
        ("12.6 MB", LARGE_TOKENS, bench.count(16, 64)),
        ("0.4 MB", SMALL_TOKENS, bench.count(256, 1024)),
    ):
        records = sources(8, tokens)
        with s3_server() as server:
            place = server.place()
            with _writer(place) as writer:
                ids, plain, numbers = Ids(), Plain(place), itertools.count()
                blobs = [record.tobytes() for record in records]

                def ours(_: int) -> None:
                    for i in range(count):  # noqa: B023 -- called before the next turn
                        writer.put(ids.new(), records[i % 8])  # noqa: B023
                    writer.flush(timeout_s=600)

                def theirs(_: int) -> None:
                    plain.put([(str(next(numbers)), blobs[i % 8]) for i in range(count)])  # noqa: B023

                pairs = interleave(ours, theirs, bench.count(3, 7))
        what, against = f"ingest {count} x {name} into S3, one a shard", f"as many PUTs, {REQUESTS_AT_ONCE} at once"
        checks.append(at_least("s3-ingest", what, against, pairs, 0.9))
    return checks


def s3_durable(bench: Bench) -> list[Check]:
    """From `put` to a durable receipt, of one record when nothing else is on its way."""
    checks = []
    with s3_server() as server:
        place = server.place()
        with _writer(place) as writer:
            plain, ids, numbers = Plain(place), Ids(), itertools.count()
            for name, tokens in (("12.6 MB", LARGE_TOKENS), ("0.4 MB", SMALL_TOKENS)):
                (record,) = sources(1, tokens)
                blob = record.tobytes()
                pairs = interleave(
                    lambda _: writer.put(ids.new(), record).wait(60),  # noqa: B023 -- called before the next turn
                    lambda _: plain.put_one(str(next(numbers)), blob),  # noqa: B023
                    bench.count(20, 100),
                )
                note = "three round trips: listing, creation, listing"
                checks.append(
                    at_most("s3-durable", f"put to durable, {name}", "one PUT", pairs, 6.0, note=f"no target; {note}")
                )
    return checks


def s3_delete(bench: Bench) -> list[Check]:
    """A prompt of 64 records in 4 shards, in a small store and in one of 16 times as many prompts."""
    rounds = bench.count(6, 20)
    with s3_server() as server:
        small, large = server.place(), server.place()
        for place, prompts in ((small, rounds + 1), (large, 16 * (rounds + 1))):
            _fill(place, prompts)

        def delete(place: Place, number: int) -> None:
            rr.delete_prefix(place.uri, f"prompt_{number + 1}", storage_options=place.options)

        pairs = interleave(lambda i: delete(large, i), lambda i: delete(small, i), rounds)
    what = "delete one prompt of 64 records in 4 shards from S3, skew 0"
    return [at_most("s3-delete", f"{what}, 16 x as many prompts", "the smaller store", pairs, 1.2)]


def _fill(place: Place, prompts: int) -> None:
    (record,) = sources(1, 16)
    with _writer(place) as writer:
        for shard in range(4):
            for prompt in range(prompts):
                for sample in range(16):
                    writer.put(f"prompt_{prompt}:{16 * shard + sample}:0:0", record)
            writer.flush(timeout_s=600)


@dataclass(frozen=True)
class _Counted:
    what: str
    requests: dict[str, int]

    def __str__(self) -> str:
        listed = ", ".join(f"{count} {method}" for method, count in sorted(self.requests.items()))
        return f"{self.what}: {listed or 'none'}"


def s3_requests(_: Bench) -> list[Check]:
    """What each operation asks of the store, as a proxy on the wire counts it."""
    (record,) = sources(1, SMALL_TOKENS, "LTK")
    (large,) = sources(1, LARGE_TOKENS, "LTK")
    counted: list[_Counted] = []
    with s3_server() as server, CountingProxy.before(server.port) as proxy:
        place = server.place()
        options = server.options(endpoint=proxy.endpoint)
        place = Place(place.uri, options, place.bucket, place.prefix, place.client)

        def count(what: str, work: Callable[[], object]) -> Any:
            proxy.forget()
            result = work()
            kinds = Counter(_kind(each.method, each.target) for each in proxy.requests())
            counted.append(_Counted(what, dict(kinds)))
            return result

        with _writer(place) as writer:

            def put(name: str, array: Array) -> Callable[[], object]:
                return lambda: writer.put(name, array, "LTK").wait(60)

            count("put of 0.4 MB until durable", put("a:0:0:0", record))
            count("put of 12.6 MB until durable", put("b:0:0:0", large))

            def batch() -> None:
                for number in range(64):
                    writer.put(f"c{number}:0:0:0", record, "LTK")
                writer.flush(60)

            count("64 puts of 64 prompts, one flush", batch)
            dataset = count("open_dataset", lambda: _opened(place))
            count("get of 12.6 MB, cold", lambda: dataset.get("b:0:0:0"))
            count("get of 12.6 MB, warm", lambda: dataset.get("b:0:0:0"))
            count("get of 12 of 48 layers, warm", lambda: dataset.get("b:0:0:0", layers=QUARTER))
            ids = [f"c{number}:0:0:0" for number in range(64)]
            count("get_many of 64 x 0.4 MB over 64 prefixes, cold", lambda: dataset.get_many(ids))
            count("the same, warm", lambda: dataset.get_many(ids))
            count("heads of 64, warm", lambda: dataset.heads(ids))
            count("delete of one prompt", lambda: rr.delete_prefix(place.uri, "a", storage_options=options))
        count("compact, 65 shards", lambda: rr.compact(place.uri, storage_options=options))
        count("collect_garbage", lambda: rr.collect_garbage(place.uri, storage_options=options))
        count(
            "delete of everything, 65 prompts",
            lambda: rr.delete(place.uri, everything=True, storage_options=options),
        )
    warm = sum(next(each for each in counted if each.what == "get of 12.6 MB, warm").requests.values())
    return [
        Check(
            "s3-requests", "requests of a warm get of 12.6 MB from S3", "", f"{warm}", "", warm, "", "<=", 3,
            note="; ".join(map(str, counted)),
        )
    ]  # fmt: skip


def _kind(method: str, target: str) -> str:
    if method == "GET" and "list-type" in target:
        return "LIST"
    return "DELETE" if method == "POST" and "delete" in target.partition("?")[2] else method


def s3_compression(bench: Bench) -> list[Check]:
    """Put to durable plus a read, by compression, of real routing; what a bandwidth adds follows from the bytes."""
    records = list(joined_records().values())
    rounds = bench.count(8, 40)
    kinds = ("none", "lz4", "zstd")
    durable: dict[str, list[float]] = {kind: [] for kind in kinds}
    reading: dict[str, list[float]] = {kind: [] for kind in kinds}
    stored: dict[str, float] = {}
    with s3_server() as server, ExitStack() as held:
        places, ids = {kind: server.place() for kind in kinds}, Ids()
        writers = {
            kind: held.enter_context(_writer(place, REAL_SPEC, compression=kind)) for kind, place in places.items()
        }
        datasets = {kind: _opened(place) for kind, place in places.items()}
        for at in range(-1, rounds):
            for kind in kinds[at % 3 :] + kinds[: at % 3]:
                name, began = ids.new(), time.perf_counter()
                writers[kind].put(name, records[at % len(records)], "LTK").wait(60)
                put = time.perf_counter()
                datasets[kind].get(name)
                if at >= 0:
                    durable[kind].append(put - began)
                    reading[kind].append(time.perf_counter() - put)
        for kind, dataset in datasets.items():
            stored[kind] = dataset.info().bytes / (rounds + 1)
    medians = {kind: float(np.median(durable[kind]) + np.median(reading[kind])) for kind in kinds}
    note = ", ".join(
        f"{kind} {stored[kind] / MIB:.2f} MiB, durable {shown(float(np.median(durable[kind])), 'ms')}, "
        f"read {shown(float(np.median(reading[kind])), 'ms')}"
        for kind in kinds
    )
    best = ", ".join(
        f"{mb} MB/s: {min(kinds, key=lambda kind: medians[kind] + 2 * stored[kind] / (mb * 1e6))}" for mb in BANDWIDTHS
    )
    return [
        at_most(
            "s3-compression",
            "put to durable plus a cold read of 0.4 MB of real routing on S3, uncompressed",
            "zstd",
            Pairs(
                [a + b for a, b in zip(durable["none"], reading["none"], strict=True)],
                [a + b for a, b in zip(durable["zstd"], reading["zstd"], strict=True)],
            ),
            1.0,
            note=f"{note}; fastest with a connection of {best}",
        )
    ]


def _opened(place: Place) -> rr.RoutingDataset:
    return rr.open_dataset(place.uri, storage_options=place.options)


def _same(found: Array, wanted: Array) -> None:
    """A fast read of the wrong bytes is no result."""
    if not np.array_equal(found, wanted):
        raise RuntimeError("a record was not read as it was put")
