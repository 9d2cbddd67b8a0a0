"""The hot path: `put`, while the worker publishes what was put before."""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import rr_dataset as rr

from .bench import LARGE_TOKENS, MIB, SMALL_TOKENS, Array, Bench, Ids, Load, Unavailable, sources
from .measure import Check, at_least, at_most, interleave, shown

COPY = "np.copyto into one touched array, worker busy"


@contextmanager
def _busy(bench: Bench, records: list[Array]) -> Iterator[tuple[rr.RoutingWriter, Ids, Load]]:
    with bench.writer() as (writer, _):
        ids = Ids()
        yield writer, ids, Load(writer, records, ids)


def put_large(bench: Bench) -> list[Check]:
    """`put` of 12.6 MB in the stored dtype against a plain copy."""
    records = sources(8, LARGE_TOKENS)
    touched = np.ones_like(records[0])
    with _busy(bench, records) as (writer, ids, load):
        pairs = interleave(
            lambda i: writer.put(ids.new(), records[i % 8]),
            lambda i: np.copyto(touched, records[i % 8]),
            bench.count(100, 500),
            before=load.keep_up,
        )
    what, slowest = "put 12.6 MB, worker busy", np.quantile(pairs.ours, 0.99)
    return [
        at_most("put-large", what, COPY, pairs, 2.0),
        Check(
            "put-large-p99",
            f"{what}, p99 of {len(pairs.ours)}",
            "",
            shown(float(slowest), "ms"),
            shown(float(np.quantile(pairs.theirs, 0.99)), "ms"),
            float(slowest) * 1e3,
            "ms",
            "<=",
            5.0,
        ),
    ]


def put_queue(bench: Bench) -> list[Check]:
    """The same against a managed queue, emptied after each put, so that it never is the longer queue that is slow."""
    records = sources(8, LARGE_TOKENS)
    with _busy(bench, records) as (writer, ids, load), multiprocessing.get_context("spawn").Manager() as manager:
        queue = manager.Queue()

        def before() -> None:
            while not queue.empty():
                queue.get()
            load.keep_up()

        pairs = interleave(
            lambda i: writer.put(ids.new(), records[i % 8]),
            lambda i: queue.put_nowait(records[i % 8]),
            bench.count(20, 100),
            before=before,
        )
    against = "Manager().Queue().put_nowait, worker busy"
    return [at_least("put-queue", "put 12.6 MB, worker busy", against, pairs, 20.0)]


def put_small(bench: Bench) -> list[Check]:
    """`put` of 0.4 MB against a plain copy, in microseconds: what a call costs beside its bytes."""
    records = sources(16, SMALL_TOKENS)
    touched = np.ones_like(records[0])
    slots = np.ones((64 * MIB // records[0].nbytes, *records[0].shape), np.uint8)
    ring = itertools.cycle(slots)
    with _busy(bench, records) as (writer, ids, load):

        def put(i: int) -> rr.Receipt:
            return writer.put(ids.new(), records[i % 16])

        rounds = bench.count(500, 3000)
        pairs = interleave(put, lambda i: np.copyto(touched, records[i % 16]), rounds, before=load.keep_up)
        kept = interleave(put, lambda i: np.copyto(next(ring), records[i % 16]), rounds // 2, before=load.keep_up)
    more = (np.array(pairs.ours) - np.array(pairs.theirs)) * 1e6
    return [
        Check(
            "put-small",
            "put 0.4 MB, worker busy, time beyond the copy",
            COPY,
            shown(pairs.ours_s, "us"),
            shown(pairs.theirs_s, "us"),
            (pairs.ours_s - pairs.theirs_s) * 1e6,
            "us",
            "<=",
            40.0,
            float(more.min()),
            float(more.max()),
            f"a copy into the next of 64 MiB of touched memory, as a spool must make it, takes {shown(kept.theirs_s, 'us')}: "
            f"put takes {(kept.ours_s - kept.theirs_s) * 1e6:.0f} us more than that",
            {"ours_s": pairs.ours, "theirs_s": pairs.theirs},
        )
    ]


def put_int32(bench: Bench) -> list[Check]:
    """`put` of 12.6 MB from int32 against the check and cast that a careful user of numpy would write."""
    records = sources(4, LARGE_TOKENS, dtype="int32")
    touched = np.ones(records[0].shape, np.uint8)

    def check_and_cast(i: int) -> None:
        ids = records[i % 4]
        if ids.min() < 0 or ids.max() >= 128:
            raise ValueError("an expert id is out of range")
        np.copyto(touched, ids, casting="unsafe")

    with bench.writer() as (writer, _):
        names = Ids()
        pairs = interleave(
            lambda i: writer.put(names.new(), records[i % 4]), check_and_cast, bench.count(30, 150), before=writer.flush
        )
    against = "min(), max(), np.copyto(casting='unsafe') into one touched array"
    return [at_most("put-int32", "put 12.6 MB from int32, worker idle", against, pairs, 1.2)]


def put_blocked(bench: Bench) -> list[Check]:
    """`put` of 0.4 MB while the file system of the dataset is frozen, against one that is not."""
    records, ids = sources(16, SMALL_TOKENS), Ids()
    with ExitStack() as stack:
        disk = stack.enter_context(_own_disk(bench))
        frozen = stack.enter_context(Bench(disk, bench.quick).writer())[0]
        running = stack.enter_context(bench.writer())[0]
        stack.callback(_run, "fsfreeze", "--unfreeze", disk)
        _run("fsfreeze", "--freeze", disk)
        pairs = interleave(
            lambda i: frozen.put(ids.new(), records[i % 16]),
            lambda i: running.put(ids.new(), records[i % 16]),
            bench.count(300, 600),
        )
    against = "the same with a disk that answers"
    return [at_most("put-blocked", "put 0.4 MB, disk of the dataset frozen", against, pairs, 1.2, unit="us")]


@contextmanager
def _own_disk(bench: Bench) -> Iterator[Path]:
    """A small ext4 of its own, which can be frozen without stopping anybody else."""
    with bench.folder() as folder, ExitStack() as stack:
        image, disk = folder / "image", folder / "disk"
        disk.mkdir()
        with image.open("wb") as file:
            file.truncate(1 << 30)
        try:
            _run("mkfs.ext4", "-q", image)
            _run("mount", "-o", "loop", image, disk)
            stack.callback(_run, "umount", disk)
        except (OSError, subprocess.CalledProcessError) as error:
            raise Unavailable(f"it takes root and mkfs.ext4 to make a disk that can be frozen: {error}") from error
        yield disk


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)
