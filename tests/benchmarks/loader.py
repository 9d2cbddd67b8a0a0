"""What a training loop does: batches out of a DataLoader with two workers, beside one file per record in the same loader.

All sides collate with the loader's own function and hand over the same bytes; files of all sides are in the page cache.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as pads

from rr_dataset.trainer.batches import RoutingBatches
from rr_dataset.trainer.samples import RoutingSamples, SampleOptions, whole_batches

from .bench import LARGE_TOKENS, SMALL_TOKENS, SPEC, Bench, Unavailable
from .measure import Check, Pairs, at_least, at_most
from .read import _Stored, _stored

WORKERS = 2
QUARTER = SPEC.moe_layers[12:24]  # a pipeline stage's
TIMEOUT_S = 120


@dataclass(frozen=True)
class _Size:
    name: str
    tokens: int
    prompts: int
    batch: int


SMALL = _Size("0.4 MB", SMALL_TOKENS, 32, 16)
LARGE = _Size("12.6 MB", LARGE_TOKENS, 4, 2)


@dataclass(frozen=True)
class _Files:
    """One file per record, opened by `load`; `layers` of it."""

    files: Sequence[Path]
    load: Callable[[Path], Any]
    layers: slice | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        experts = self.load(self.files[index])
        return {"routed_experts": experts if self.layers is None else experts[self.layers]}


class _Arrow:
    """Each record through `pyarrow.dataset`, which is opened once in each worker and prunes by the partition."""

    def __init__(self, root: Path, ids: Sequence[str]) -> None:
        self._root, self._ids = root, ids
        self._opened: pads.Dataset | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._opened is None:
            self._opened = pads.dataset(self._root, format="ipc", partitioning="hive", exclude_invalid_files=False)
        wanted = self._ids[index]
        match = (pads.field("data_id") == wanted.split(":")[0]) & (pads.field("request_id") == wanted)
        columns = [f"layer_{layer:03d}" for layer in SPEC.moe_layers]
        table = self._opened.to_table(columns=columns, filter=match)
        layers = [np.frombuffer(table.column(name)[0].as_buffer(), np.uint8) for name in columns]
        return {"routed_experts": np.stack(layers).reshape(len(columns), -1, SPEC.top_k)}


def _torch(samples: Any, batch: int) -> Any:
    data = import_module("torch.utils.data")
    how: dict[str, Any] = {"batch_size": batch}
    if isinstance(samples, RoutingBatches):
        how = {"batch_size": None, "sampler": data.BatchSampler(range(len(samples)), batch, drop_last=False)}
    return data.DataLoader(samples, num_workers=WORKERS, timeout=TIMEOUT_S, **how)


def _paddle(samples: Any, batch: int) -> Any:
    io = import_module("paddle.io")
    how: dict[str, Any] = {"batch_size": batch}
    if isinstance(samples, RoutingBatches):
        how = whole_batches(io.BatchSampler(samples, batch_size=batch))
    return io.DataLoader(samples, num_workers=WORKERS, timeout=TIMEOUT_S, **how)


LOADERS = {"torch": _torch, "paddle": _paddle}


def _epoch(loader: Any) -> tuple[float, float, int]:
    """Seconds to the first batch, from there to the end, and bytes of experts. Batches are dropped as they come."""
    began = time.perf_counter()
    first, size = 0.0, 0
    for batch in loader:
        first = first or time.perf_counter()
        experts = batch["routed_experts"]
        size += int(np.prod(experts.shape))
        del batch, experts
    return first - began, time.perf_counter() - first, size


def _race(ours: Any, theirs: Any, rounds: int) -> tuple[Pairs, Pairs]:
    """Pairs of seconds to the first batch, and of the rest; sides take turns."""
    firsts, rests = Pairs([], []), Pairs([], [])
    for i in range(-1, rounds):
        turns = ((ours, firsts.ours, rests.ours), (theirs, firsts.theirs, rests.theirs))
        for loader, first_s, rest_s in turns if i % 2 == 0 else turns[::-1]:
            first, rest, _ = _epoch(loader)
            if i >= 0:
                first_s.append(first)
                rest_s.append(rest)
    return firsts, rests


@contextmanager
def _framework(name: str) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paddle's, of compilers it does not find
        try:
            yield import_module(name)
        except ModuleNotFoundError as error:
            raise Unavailable(f"{name} is not installed") from error


def _compare(
    bench: Bench,
    framework: str,
    size: _Size,
    opponent: str,
    target: float,
    theirs: Callable[[_Stored], Any],
    layers: Sequence[int] | None = None,
) -> list[Check]:
    rounds = bench.count(3, 11)
    with _framework(framework), _stored(bench, size.prompts, 8, size.tokens) as made:
        order = sorted(range(len(made.ids)), key=made.ids.__getitem__)  # as a trainer asks: a prompt's samples together
        stored = _Stored(made.root, [made.ids[i] for i in order], [made.files[i] for i in order])
        samples = RoutingBatches(RoutingSamples(stored.root, stored.ids, SampleOptions(layers=layers, present="none")))
        loader = LOADERS[framework]
        firsts, rests = _race(loader(samples, size.batch), loader(theirs(stored), size.batch), rounds)
    row = "loader-arrow" if "pyarrow" in opponent else f"loader-{framework}"
    batches = -(-len(stored.ids) // size.batch)
    some = "" if layers is None else f", {len(layers)} of {SPEC.num_layers} layers"
    what = f"{framework} DataLoader, {WORKERS} workers, batches of {size.batch} x {size.name}{some}"
    per_s = f"batches/s {(batches - 1) / rests.ours_s:.0f} against {(batches - 1) / rests.theirs_s:.0f}"
    return [
        at_least(row, f"{what}: {batches - 1} batches after the first", opponent, rests, target, note=per_s),
        at_most(row, f"{what}: the first batch", opponent, firsts, 1.2),
    ]


def _npy(stored: _Stored, layers: slice | None = None) -> _Files:
    return _Files(stored.files, np.load, layers)


def _pdparams(stored: _Stored) -> _Files:
    paddle = import_module("paddle")
    files = []
    for file in stored.files:
        files.append(file.with_suffix(".pdtensor"))
        paddle.save(paddle.to_tensor(np.load(file)), str(files[-1]))
    return _Files(files, _paddle_load)


def _paddle_load(path: Path) -> Any:
    return import_module("paddle").load(str(path), return_numpy=True)


def loader_torch(bench: Bench) -> list[Check]:
    """Whole records and a quarter of their layers, against `np.load`."""
    checks = []
    for size in (SMALL, LARGE):
        checks += _compare(bench, "torch", size, "np.load", 1.0, _npy)
        checks += _compare(bench, "torch", size, "np.load of all layers", 2.5, _npy, QUARTER)
    return checks


def loader_paddle(bench: Bench) -> list[Check]:
    """The same in paddle's loader, against `np.load` and `paddle.load`."""
    checks = []
    for size in (SMALL, LARGE):
        checks += _compare(bench, "paddle", size, "np.load", 1.0, _npy)
        checks += _compare(bench, "paddle", size, "paddle.load", 1.0, _pdparams)
        checks += _compare(bench, "paddle", size, "np.load of all layers", 2.5, _npy, QUARTER)
    return checks


def loader_arrow(bench: Bench) -> list[Check]:
    """Records one by one through `pyarrow.dataset`."""
    checks = []
    for size in (SMALL, LARGE):
        checks += _compare(
            bench, "torch", size, "pyarrow.dataset per record", 5.0, lambda stored: _Arrow(stored.root, stored.ids)
        )
    return checks
