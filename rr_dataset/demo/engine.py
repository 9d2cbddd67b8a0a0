"""The engine's side of the demo, a process of its own: puts each rollout when it finishes, reports one line of JSON."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np

from rr_dataset.demo.rollouts import as_they_finish, load_rollouts
from rr_dataset.writer import RoutingWriter


@dataclass(frozen=True)
class EngineReport:
    """What the engine did. `payload_bytes` counts expert ids only; times are those of its own calls."""

    pid: int
    records: int
    tokens: int
    payload_bytes: int
    put_median_us: float
    put_p99_us: float
    flush_ms: float
    durable: int
    dropped: dict[str, int]


def run_engine(uri: str, epoch: int, rate: float, seed: int) -> EngineReport:
    """Put all rollouts of one epoch, about `rate` a second (0: without a pause), and wait until they are durable."""
    finished = list(as_they_finish(load_rollouts(), seed))
    chance = random.Random(seed)  # noqa: S311  # gaps between requests, not a secret
    put_s = []
    with RoutingWriter(uri) as writer:
        for rollout in finished:
            if rate:
                time.sleep(chance.expovariate(rate))
            start = time.perf_counter()
            writer.put(
                rollout.request_id(epoch),
                rollout.routed_experts,
                layout="LTK",
                token_ids=rollout.token_ids,
                logprobs=rollout.logprobs,
                weight_version=f"epoch-{epoch}",
            )
            put_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        flushed = writer.flush(timeout_s=30)
        flush_s = time.perf_counter() - start
    median, p99 = np.percentile(put_s, (50, 99)).tolist()
    return EngineReport(
        pid=os.getpid(),
        records=len(finished),
        tokens=sum(rollout.token_ids.size for rollout in finished),
        payload_bytes=sum(rollout.routed_experts.nbytes for rollout in finished),
        put_median_us=median * 1e6,
        put_p99_us=p99 * 1e6,
        flush_ms=flush_s * 1e3,
        durable=flushed.records,
        dropped=dict(flushed.dropped),
    )


if __name__ == "__main__":
    uri, epoch, rate, seed = sys.argv[1:]
    json.dump(asdict(run_engine(uri, int(epoch), float(rate), int(seed))), sys.stdout)
