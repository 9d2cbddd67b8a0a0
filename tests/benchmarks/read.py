"""What a trainer does: `get` and `get_many` beside `np.load`. The files of both sides are in the page cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rr_dataset as rr

from .bench import LARGE_TOKENS, SMALL_TOKENS, SPEC, Bench, sources
from .measure import Check, Pairs, at_most, interleave

LOAD = "np.load"


@dataclass(frozen=True)
class _Stored:
    """The same records as a dataset, one a shard, and as .npy files in the order at rest."""

    root: Path
    ids: list[str]
    files: list[Path]

    def open(self) -> rr.RoutingDataset:
        return rr.open_dataset(self.root)


@contextmanager
def _stored(bench: Bench, prompts: int, samples: int, tokens: int) -> Iterator[_Stored]:
    records = sources(8, tokens, "LTK")
    with bench.writer() as (writer, root):
        plain = root.parent / "plain"
        plain.mkdir()
        ids: list[str] = []
        files: list[Path] = []
        for sample in range(samples):
            for prompt in range(prompts):
                record = records[len(ids) % 8]
                ids.append(f"prompt_{prompt}:{sample}:0:0")
                writer.put(ids[-1], record, layout="LTK")
                files.append(plain / f"{prompt}_{sample}.npy")
                np.save(files[-1], record)
            writer.flush(timeout_s=600)  # so that the next sample of a prompt gets a shard of its own
        _check_same(_Stored(root, ids, files))
        yield _Stored(root, ids, files)


def _check_same(stored: _Stored) -> None:
    """A fast read of the wrong bytes is no result. It also brings the last of the files into the page cache."""
    dataset = stored.open()
    for request_id, file in zip(stored.ids, stored.files, strict=True):
        if not np.array_equal(dataset.get(request_id).routed_experts, np.load(file)):
            raise RuntimeError(f"{request_id} was not read as it was put")


def _get(
    bench: Bench, ours: Callable[[_Stored, rr.RoutingDataset, str], Any], theirs: Callable[[_Stored, int], Any]
) -> Pairs:
    """`ours` and `theirs` in turns over 16 records of 12.6 MB that a warm dataset has seen."""
    with _stored(bench, 16, 1, LARGE_TOKENS) as stored:
        dataset = stored.open()
        dataset.get_many(stored.ids, tokens=slice(0, 1))
        return interleave(
            lambda i: ours(stored, dataset, stored.ids[i % 16]),
            lambda i: theirs(stored, i % 16),
            bench.count(100, 400),
        )


def _load(stored: _Stored, number: int) -> Any:
    return np.load(stored.files[number])


def get_warm(bench: Bench) -> list[Check]:
    """12.6 MB into a ready array, the shard known."""
    out = np.ones((SPEC.num_layers, LARGE_TOKENS, SPEC.top_k), np.uint8)
    pairs = _get(bench, lambda _, dataset, request_id: dataset.get(request_id, out=out), _load)
    return [at_most("get-warm", "get 12.6 MB into a ready LTK array, shard known", LOAD, pairs, 1.2)]


def get_cold(bench: Bench) -> list[Check]:
    """12.6 MB through a dataset that is opened for it in a process that has read before."""
    out = np.ones((SPEC.num_layers, LARGE_TOKENS, SPEC.top_k), np.uint8)
    pairs = _get(bench, lambda stored, _, request_id: stored.open().get(request_id, out=out), _load)
    what = "get 12.6 MB cold: open_dataset and get, bytes in the page cache"
    return [at_most("get-cold", what, LOAD, pairs, 2.0)]


def get_layers(bench: Bench) -> list[Check]:
    """12 neighbouring layers of 48, a pipeline stage's, against all of them."""
    out = np.ones((SPEC.num_layers, LARGE_TOKENS, SPEC.top_k), np.uint8)
    with _stored(bench, 16, 1, LARGE_TOKENS) as stored:
        dataset = stored.open()
        dataset.get_many(stored.ids, tokens=slice(0, 1))
        pairs = interleave(
            lambda i: dataset.get(stored.ids[i % 16], layers=SPEC.moe_layers[12:24], out=out[:12]),
            lambda i: dataset.get(stored.ids[i % 16], out=out),
            bench.count(100, 400),
        )
    return [at_most("get-layers", "get 12 of 48 layers into a ready array", "all 48 layers", pairs, 0.4)]


def get_tokens_first(bench: Bench) -> list[Check]:
    """12.6 MB into a contiguous array of the other order."""
    out = np.ones((LARGE_TOKENS, SPEC.num_layers, SPEC.top_k), np.uint8)
    pairs = _get(bench, lambda _, dataset, request_id: dataset.get(request_id, out=out.transpose(1, 0, 2)), _load)
    return [at_most("get-tlk", "get 12.6 MB into a ready contiguous TLK array", f"{LOAD} (LTK)", pairs, 6.0)]


def get_many_small(bench: Bench) -> list[Check]:
    """A batch: 512 records of 0.4 MB, 8 of each of 64 prompts."""
    return _get_many(bench, "get-many-small", "0.4 MB", 64, SMALL_TOKENS, bench.count(10, 40), group=512)


def get_many_large(bench: Bench) -> list[Check]:
    """The same of 12.6 MB, 64 in memory at once on both sides: together they are 6.4 GB."""
    return _get_many(bench, "get-many-large", "12.6 MB", bench.count(8, 64), LARGE_TOKENS, bench.count(5, 7), group=64)


def _get_many(bench: Bench, row: str, size: str, prompts: int, tokens: int, rounds: int, *, group: int) -> list[Check]:
    with _stored(bench, prompts, 8, tokens) as stored:
        # as a trainer asks: the samples of a prompt together
        order = sorted(range(len(stored.ids)), key=stored.ids.__getitem__)
        ids, files = [stored.ids[i] for i in order], [stored.files[i] for i in order]

        def ours(_: int) -> None:
            dataset = stored.open()
            for at in range(0, len(ids), group):
                records = dataset.get_many(ids[at : at + group])
                del records

        def theirs(_: int) -> None:
            for at in range(0, len(files), group):
                arrays = [np.load(file) for file in files[at : at + group]]
                del arrays

        pairs = interleave(ours, theirs, rounds)
    kept = f", {group} kept at a time" if group < len(ids) else ""
    what = f"open_dataset, then get_many of {len(ids)} x {size}, one a shard{kept}"
    return [at_most(row, what, f"{LOAD} of {len(ids)} files{kept}", pairs, 1.2)]
