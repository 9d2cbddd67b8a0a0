"""The trainer's side of the demo, a process of its own: watches records arrive, reads a batch, compares it with the source."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.clock import millis, wall_ms
from rr_dataset.dataset import RoutingDataset, open_dataset
from rr_dataset.demo.rollouts import SPEC, Rollout, load_rollouts
from rr_dataset.errors import RoutingDatasetError
from rr_dataset.record import RoutingRecord

LAYERS = (2, 5)
TOKENS = (64, 192)  # every rollout is longer
BATCH = 32
POLL_S = 0.005
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ReadReport:
    """One read of many records. `payload_bytes` counts the expert ids that were asked for."""

    records: int
    layers: int
    tokens: int
    payload_bytes: int
    seconds: float
    different: int  # records that were not what the engine had; 0 unless something is broken


@dataclass(frozen=True)
class TrainerReport:
    """What the trainer did. Time to visible: from the engine's put until a listing of the trainer shows the record."""

    pid: int
    visible_median_ms: float
    visible_p99_ms: float
    batch: ReadReport
    everything: ReadReport
    example_id: str


def run_trainer(uri: str, epoch: int) -> TrainerReport:
    """Wait for all rollouts of one epoch, then read a batch of them in part and all of them whole.

    Raises RoutingDatasetError if they do not arrive within a minute of the last one that did.
    """
    source = {rollout.request_id(epoch): rollout for rollout in load_rollouts()}
    dataset = open_dataset(uri)
    seen_ms = _watch(dataset, set(source))
    put_ms = {head.request_id: millis(head.rows[0].t_submit) for head in dataset.heads(source)}
    median, p99 = np.percentile([seen_ms[i] - put_ms[i] for i in source], (50, 99)).tolist()
    batch = dict(list(source.items())[:: len(source) // BATCH][:BATCH])
    return TrainerReport(
        pid=os.getpid(),
        visible_median_ms=median,
        visible_p99_ms=p99,
        batch=_read(dataset, batch, LAYERS, TOKENS),
        everything=_read(dataset, source, SPEC.moe_layers, None),
        example_id=next(iter(source)),
    )


def _watch(dataset: RoutingDataset, waiting: set[str]) -> dict[str, int]:
    """Unix milliseconds at which each id was first listed."""
    seen_ms: dict[str, int] = {}
    last = time.monotonic()
    while waiting:
        arrived = waiting.intersection(dataset.ids())
        if arrived:
            seen_ms |= dict.fromkeys(arrived, wall_ms())
            waiting -= arrived
            last = time.monotonic()
        elif time.monotonic() > last + TIMEOUT_S:
            raise RoutingDatasetError(f"{len(waiting)} records did not arrive within {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    return seen_ms


def _read(
    dataset: RoutingDataset, source: dict[str, Rollout], layers: tuple[int, ...], tokens: tuple[int, int] | None
) -> ReadReport:
    asked = slice(None) if tokens is None else slice(*tokens)
    start = time.perf_counter()
    records = dataset.get_many(source, layers=layers, tokens=asked)
    seconds = time.perf_counter() - start
    different = 0
    for record, rollout in zip(records, source.values(), strict=True):
        wanted = (
            rollout.routed_experts[list(layers), asked],
            rollout.token_ids[asked].astype(np.int32),
            rollout.logprobs[asked],
        )
        different += not (record.status == "complete" and not record.missing and _same(record, wanted))
    return ReadReport(
        records=len(records),
        layers=len(layers),
        tokens=sum(record.routed_experts.shape[1] for record in records),
        payload_bytes=sum(record.routed_experts.nbytes for record in records),
        seconds=seconds,
        different=different,
    )


def _same(record: RoutingRecord, wanted: tuple[npt.NDArray[Any], ...]) -> bool:
    """Whether ids of experts, token ids and logprobs are these, byte for byte."""
    read = (record.routed_experts, record.token_ids, record.logprobs)
    return all(
        a is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(read, wanted, strict=True)
    )


if __name__ == "__main__":
    json.dump(asdict(run_trainer(sys.argv[1], int(sys.argv[2]))), sys.stdout)
