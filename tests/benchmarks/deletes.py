"""Deletes: their time in small and large stores, beside the seed's, and what they leave for reads and puts to bear.

But for `get` and `put`, records are tiny (8 bytes of experts): what counts is how many there are. They are published by the
worker's own code, in this process: files and directories are synced.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np

import rr_dataset as rr
from rr_dataset.clock import HybridClock, wall_ms
from rr_dataset.description import read_format
from rr_dataset.folding import FOLD_AFTER_S, Fold
from rr_dataset.layout import TOMBSTONE_DIR
from rr_dataset.publish import PUBLISH_THREADS, publish_slab
from rr_dataset.record import Row, RowData
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import TombstoneCache

from .bench import SMALL_TOKENS, Bench, Ids, sources
from .measure import Check, Pairs, at_least, at_most, interleave, shown
from .seed import STORE, metadata_server, peer

PREFIX_RECORDS = 64
PREFIX_FILES = 8  # as many slabs saw a sample of the prompt
SLAB_PREFIXES = 256
TINY = rr.RoutingSpec((0,), num_experts=16, top_k=2)
TINY_TOKENS = 4
WRITER = "a" * 16
DELETES = 16_000
PUTS_AT_ONCE = 50

# The peak of a process begins with that of who started it, so a small one starts it.
_MEASURE = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(json.dumps([time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]))
"""


def delete_scale(bench: Bench) -> list[Check]:
    """One prefix of 64 records out of a store, and out of one 16 times as large. The clocks' skew is 0: nobody waits."""
    small, rounds = 64, bench.count(20, 40)
    large = 16 * small
    with bench.folder() as folder:
        _build(folder / "small", small, PREFIX_FILES)
        _build(folder / "large", large, PREFIX_FILES)
        pairs = interleave(
            lambda i: _delete(folder / "large", i + 1), lambda i: _delete(folder / "small", i + 1), rounds
        )
    what = f"delete a prefix of 64 records in {PREFIX_FILES} files, {large * PREFIX_RECORDS:,} records in the store"
    return [at_most("delete-scale", what, f"{small * PREFIX_RECORDS:,} in the store", pairs, 1.2)]


def delete_seed(bench: Bench) -> list[Check]:
    """The same beside `P2PClient.delete_prefix`, which deletes the metadata; the engine's memory is given back later."""
    checks = []
    for keys in (10_000,) if bench.quick else (10_000, 100_000):
        prefixes = -(-keys // PREFIX_RECORDS)
        with (
            bench.folder() as folder,
            metadata_server(folder / "valkey") as metadata,
            peer(metadata) as (theirs, loop),
        ):
            _build(folder / "dataset", prefixes, PREFIX_FILES)
            loop.run_until_complete(_fill(theirs, prefixes))

            def delete_there(i: int) -> None:
                if not loop.run_until_complete(theirs.delete_prefix(f"prompt_{i + 1}:")):
                    raise RuntimeError("p2pstore refused a delete")

            pairs = interleave(
                lambda i: _delete(folder / "dataset", i + 1),
                delete_there,
                bench.count(20, 40),
            )
        what = (
            f"delete a prefix of 64 records in {PREFIX_FILES} files, {prefixes * PREFIX_RECORDS:,} records in the store"
        )
        checks.append(at_least(f"delete-seed-{keys // 1000}k", what, STORE, pairs, 1.0))
    return checks


def get_after_deletes(bench: Bench) -> list[Check]:
    """0.4 MB, the shard known, under 16,000 folded deletes of other prompts, or of other samples of the same prompt."""
    checks = []
    records = sources(8, SMALL_TOKENS, "LTK")
    for row, what in (("get-deletes", "of other prompts"), ("get-deletes-near", "of other samples of its prompt")):
        with bench.writer() as (writer, root), bench.writer() as (other, plain):
            ids = [f"prompt_{i}:0:0:0" for i in range(len(records))]
            for request_id, record in zip(ids, records, strict=True):
                for each in (writer, other):
                    each.put(request_id, record, layout="LTK")
            writer.flush()
            other.flush()
            near = row.endswith("near")
            _delete_others(root, [f"prompt_{i % len(ids)}:{i + 1}" if near else f"gone_{i}" for i in range(DELETES)])
            after, before = rr.open_dataset(root), rr.open_dataset(plain)
            began = time.perf_counter()
            after.get(ids[0])
            cold_s = time.perf_counter() - began
            rr.delete_prefix(root, "another")
            began = time.perf_counter()
            after.get(ids[0])
            next_s = time.perf_counter() - began
            pairs = interleave(
                lambda i: after.get(ids[i % len(ids)]),  # noqa: B023 - called here
                lambda i: before.get(ids[i % len(ids)]),  # noqa: B023 - called here
                bench.count(200, 1000),
            )
        note = (
            f"the first get of a process, which reads the deletes: {shown(cold_s, 'ms')}; "
            f"the first after one more delete: {shown(next_s, 'ms')}"
        )
        title = f"get 0.4 MB after {DELETES:,} deletes {what}, folded"
        checks.append(at_most(row, title, "before", pairs, 1.2, unit="us", note=note))
    return checks


def delete_after_deletes(bench: Bench) -> list[Check]:
    """One prefix of 64 records under 16,000 folded deletes of others."""
    with bench.folder() as folder:
        for name in ("after", "before"):
            _build(folder / name, 64, PREFIX_FILES)
        _delete_others(folder / "after", [f"gone_{i}" for i in range(DELETES)])
        pairs = interleave(
            lambda i: _delete(folder / "after", i + 1),
            lambda i: _delete(folder / "before", i + 1),
            bench.count(20, 40),
        )
    what = f"delete a prefix of 64 records in {PREFIX_FILES} files after {DELETES:,} deletes, folded"
    return [at_most("delete-deletes", what, "before", pairs, 1.2)]


def put_while_deleting(bench: Bench) -> list[Check]:
    """`put` while another process deletes one prompt after the other."""
    records, ids = sources(8, SMALL_TOKENS), Ids()
    with bench.writer() as (writer, root):
        with _deleter(root) as go:

            def puts(deleting: bool) -> float:
                if deleting:
                    go.set()
                seconds = []
                for record in (records * PUTS_AT_ONCE)[:PUTS_AT_ONCE]:
                    time.sleep(0.002)  # less than the worker can take
                    began = time.perf_counter()
                    writer.put(ids.new(), record)
                    seconds.append(time.perf_counter() - began)
                go.clear()
                writer.flush()
                return float(np.median(seconds))

            turns = [(puts(deleting=True), puts(deleting=False)) for _ in range(bench.count(6, 20) + 1)][1:]
        left = sum(1 for _ in rr.open_dataset(root).ids())
        deletes = rr.open_dataset(root).info().tombstone_files
    pairs = Pairs([ours for ours, _ in turns], [theirs for _, theirs in turns])
    note = f"medians of {PUTS_AT_ONCE} puts; {deletes} deletes meanwhile, {left} records left"
    return [
        at_most(
            "put-deleting",
            "put 0.4 MB while another process deletes",
            "nobody deletes",
            pairs,
            2.0,
            unit="us",
            note=note,
        )
    ]


def many_prefixes(bench: Bench) -> list[Check]:
    """10^6 records in 15,625 prefixes, one file each: build, list, delete 1,000 of them, delete all, by the command line."""
    prefixes, some = bench.count(976, 15_625), bench.count(62, 1_000)
    records = prefixes * PREFIX_RECORDS
    with bench.folder() as folder:
        root = folder / "dataset"
        began = time.perf_counter()
        size = _build(root, prefixes, 1)
        build_s = time.perf_counter() - began
        ls_s, ls_bytes = _command("ls", str(root))
        marks = [argument for number in range(some) for argument in ("--prefix", _prompt(number))]
        some_s, some_bytes = _command("delete", str(root), "--yes", *marks)
        left = sum(part.rows for part in rr.open_dataset(root).partitions())
        if left != records - some * PREFIX_RECORDS:
            raise RuntimeError(f"{left} records are left")
        all_s, all_bytes = _command("delete", str(root), "--yes", "--all")
        if [path.name for path in root.iterdir()] != ["_rr"]:
            raise RuntimeError("delete --all left something")
    what = f"{records:,} records in {prefixes:,} prefixes of 64, one file each"
    note = (
        f"{size / prefixes / 1e3:.0f} KB a file; published in this process in {build_s:.0f} s, {prefixes / build_s:.0f} files/s; "
        f"ls {ls_s:.1f} s, {ls_bytes / 1e6:.0f} MB; delete {some:,} prefixes {some_s:.1f} s, {some_bytes / 1e6:.0f} MB; "
        f"delete --all {all_s:.1f} s, {all_bytes / 1e6:.0f} MB; each with the start of Python"
    )
    samples = {"build_s": [build_s], "ls_s": [ls_s], "some_s": [some_s], "all_s": [all_s]}
    peaks = [ls_bytes / 1e6, some_bytes / 1e6, all_bytes / 1e6]
    return [
        Check(
            "many-delete-all",
            f"delete --all of {what}",
            "",
            f"{all_s:.1f} s",
            "",
            all_s,
            "s",
            "<=",
            120,
            note=note,
            samples=samples,
        ),
        Check(
            "many-memory",
            f"most memory of ls, delete 1,000 and delete --all, {what}",
            "",
            f"{max(peaks):.0f} MB",
            "",
            max(peaks),
            "MB",
            "<=",
            512,
            samples={"ls, some, all": peaks},
        ),
    ]


def _prompt(number: int) -> str:
    return f"prompt_{number}"


def _delete(root: Path, number: int) -> None:
    report = rr.delete_prefix(root, _prompt(number))
    if report.records != PREFIX_RECORDS:
        raise RuntimeError(f"deleted {report}")


def _build(root: Path, prefixes: int, files: int) -> int:
    """A dataset with 64 records of each prefix in as many files; their bytes."""
    fmt, storage, clock = rr.create_dataset(root, TINY).format, open_storage(root), HybridClock()
    cache = TombstoneCache(fmt.keys)
    experts = np.random.default_rng(0).integers(0, TINY.num_experts, (1, TINY_TOKENS, TINY.top_k), np.uint8)
    size = seq = 0
    with ThreadPoolExecutor(PUBLISH_THREADS) as pool:
        for numbers in _split(range(prefixes), SLAB_PREFIXES):
            for samples in _split(range(PREFIX_RECORDS), PREFIX_RECORDS // files):
                rows = []
                for request_id in [f"{_prompt(number)}:{sample}:0:0" for number in numbers for sample in samples]:
                    key, stamp = fmt.keys.parse(request_id), clock.tick()
                    row = Row(
                        record_id=f"{stamp:016x}-{WRITER}",
                        request_id=request_id,
                        components=key.components,
                        choice=key.choice,
                        t_submit=stamp,
                        token_start=0,
                        num_tokens=TINY_TOKENS,
                        part=False,
                        status="complete",
                        run_id="bench",
                        layers=TINY.moe_layers,
                    )
                    rows.append(RowData(row, experts))
                report = publish_slab(storage, fmt, writer=WRITER, seq=seq, rows=rows, cache=cache, pool=pool)
                size += report.bytes
                seq += 1
    return size


def _split(numbers: range, step: int) -> Iterator[range]:
    return (numbers[first : first + step] for first in range(0, len(numbers), step))


async def _fill(theirs: Any, prefixes: int) -> None:
    """As many keys of as many prefixes, the puts of a prefix at once."""
    experts = np.zeros((1, TINY_TOKENS, TINY.top_k), np.uint8)
    for number in range(prefixes):
        puts = [theirs.put(f"{_prompt(number)}:{sample}:0:0", experts) for sample in range(PREFIX_RECORDS)]
        if not all(await asyncio.gather(*puts)):
            raise RuntimeError("p2pstore refused a put")


def _delete_others(root: Path, prefixes: Sequence[str]) -> None:
    """Delete what is not there, and fold as gc does once the marks are old enough: in its second run the old files go."""
    for first in range(0, len(prefixes), 1000):
        rr.delete(root, prefixes=prefixes[first : first + 1000])
    storage = open_storage(root)
    fmt = read_format(storage)
    for runs in (1, 2):
        later_ms = wall_ms() + runs * int((FOLD_AFTER_S + fmt.grace_s + 60) * 1000)
        Fold.begin(storage, fmt, TombstoneCache(fmt.keys), partial(int, later_ms)).finish(frozenset(), dry_run=False)
    if len(storage.list(TOMBSTONE_DIR)) != 1:
        raise RuntimeError("the deletes were not folded into one file")


@contextmanager
def _deleter(root: Path) -> Iterator[Event]:
    """Another process, which deletes one prompt after the other while the event is set."""
    context = multiprocessing.get_context("spawn")
    go, stop = context.Event(), context.Event()
    process = context.Process(target=_delete_all_the_time, args=(root, go, stop))
    process.start()
    try:
        yield go
    finally:
        stop.set()
        go.set()
        process.join()


def _delete_all_the_time(root: Path, go: Event, stop: Event) -> None:
    ids = Ids()
    while not stop.is_set():
        go.wait()
        rr.delete_prefix(root, ids.new().partition(":")[0])


def _command(*arguments: str) -> tuple[float, int]:
    """Seconds and peak bytes of `rr-dataset` with these arguments."""
    program = str(Path(sys.executable).with_name("rr-dataset"))
    found = subprocess.run([sys.executable, "-c", _MEASURE, program, *arguments], check=True, stdout=subprocess.PIPE)
    seconds, peak = json.loads(found.stdout)
    return seconds, peak
