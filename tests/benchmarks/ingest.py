"""From the first put to everything durable, and the memory of the worker that does it."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rr_dataset.publish import PUBLISH_THREADS

from .bench import LARGE_TOKENS, MIB, SMALL_TOKENS, Array, Bench, Ids, sources, sync_directory, write_file
from .measure import Check, Pairs, at_least, interleave

THREADS = (1, PUBLISH_THREADS)  # of the opponent: what a simple writer does, and what the worker has


def ingest_large(bench: Bench) -> list[Check]:
    """12.6 MB records, each in a shard and a directory of its own."""
    count, records = bench.count(40, 80), sources(8, LARGE_TOKENS)
    what = f"ingest {count} x 12.6 MB, one a shard"
    return [
        at_least("ingest-large", what, _files(threads), _ingest(bench, records, count, threads), 0.9)
        for threads in THREADS
    ]


def ingest_small(bench: Bench) -> list[Check]:
    """The same of 0.4 MB records."""
    count, records = bench.count(320, 1280), sources(16, SMALL_TOKENS)
    what = f"ingest {count} x 0.4 MB, one a shard"
    every = [_ingest(bench, records, count, threads) for threads in THREADS]
    rates = [count / seconds for pairs in every for seconds in pairs.ours]
    rate = float(np.median(rates))
    return [
        *(
            at_least("ingest-small", what, _files(threads), pairs, 0.7)
            for threads, pairs in zip(THREADS, every, strict=True)
        ),
        Check(
            "ingest-small-rate",
            f"{what}, shards a second",
            "",
            f"{rate:,.0f}/s",
            "",
            rate,
            "/s",
            ">=",
            200.0,
            min(rates),
            max(rates),
        ),
    ]


def _files(threads: int) -> str:
    return f"as many plain files, a directory each, all synced, {threads} thread{'s' * (threads > 1)}"


def _ingest(bench: Bench, records: Sequence[Array], count: int, threads: int) -> Pairs:
    """Nothing is deleted in between: ext4 takes up to a millisecond for a new file where many have just been deleted."""
    with bench.writer() as (writer, root), ThreadPoolExecutor(threads) as pool:
        ids, numbers, plain = Ids(), itertools.count(), root.parent / "plain"
        plain.mkdir()

        def ingest(_: int) -> None:
            for i in range(count):
                writer.put(ids.new(), records[i % len(records)])
            writer.flush(timeout_s=600)

        def write(number: int) -> None:
            directory = plain / str(number)
            directory.mkdir()
            write_file(directory / "record", records[number % len(records)])
            sync_directory(directory)

        def write_files(_: int) -> None:
            for _done in pool.map(write, itertools.islice(numbers, count)):
                pass
            sync_directory(plain)

        return interleave(ingest, write_files, bench.count(5, 7))


def worker_memory(bench: Bench) -> list[Check]:
    """The most private memory that the worker has while much is ingested."""
    records = sources(8, LARGE_TOKENS)
    gigabytes = bench.count(2, 10)
    with bench.writer() as (writer, root):
        ids, slab_bytes = Ids(), writer.options.slab_bytes
        with _sampled_memory(writer.stats().worker_pid) as samples:
            for _ in range(gigabytes):
                for i in range(10**9 // records[0].nbytes + 1):
                    writer.put(ids.new(), records[i % 8])
                writer.flush(timeout_s=600)
                for partition in root.glob("data_id=*"):
                    shutil.rmtree(partition)
    peak = max(samples) / MIB
    return [
        Check(
            "worker-memory",
            f"private memory of the worker, {gigabytes} GB ingested",
            "256 MB + 3 x the largest slab",
            f"{peak:,.0f} MiB",
            "",
            peak,
            "MiB",
            "<=",
            (256 * 10**6 + 3 * slab_bytes) / MIB,
            min(samples) / MIB,
            peak,
            f"{len(samples)} samples of smaps_rollup",
        )
    ]


@contextmanager
def _sampled_memory(pid: int) -> Iterator[list[int]]:
    """Private bytes of a process, every 20 ms."""
    samples, over = [_private_bytes(pid)], threading.Event()

    def sample() -> None:
        while not over.wait(0.02):
            samples.append(_private_bytes(pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) * 1024
