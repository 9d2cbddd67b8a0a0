"""A spool that a test fills itself, without a worker, and what publishes it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rr_dataset.intake import take_in
from rr_dataset.publisher import Publisher, slabs_in
from rr_dataset.slab import DELETE, PUT, SEALED, TOKENS_FIRST
from rr_dataset.spool import Spool
from rr_dataset.storage import open_storage

MEMORY = Path("/dev/shm")  # where nobody waits for a disk
SLAB = 1 << 18
WRITER = "0123456789abcdef"


@contextmanager
def quick_folder(otherwise: Path) -> Iterator[Path]:
    """A folder in memory if there is one: for what is done hundreds of times and does not try the disk."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else otherwise) as name:
        yield Path(name)


def identity(dataset: Any, writer: str) -> dict[str, Any]:
    return {
        "dataset": dataset.format.uuid,
        "uri": dataset.uri,
        "writer": writer,
        "run_id": "run-1",
        "producer": "rollout",
        "host": "h",
        "pid": 1,
    }


def make_spool(base: Path, dataset: Any, writer: str = WRITER) -> Spool:
    spool = Spool(base, writer, spool_bytes=4 * SLAB, slab_bytes=SLAB, sync=False)
    spool.allocate()
    spool.identify(identity(dataset, writer))
    return spool


def put(spool: Spool, dataset: Any, request_id: str, array: Any, layout: str = "LTK", **more: Any) -> int:
    """What `RoutingWriter.put` does, without a worker; the stamp."""
    arguments = {
        "layers": None,
        "token_ids": None,
        "logprobs": None,
        "token_start": 0,
        "part": False,
        "status": None,
        "missing": (),
        "weight_version": None,
        "tags": None,
    }
    intake = take_in(dataset.format, request_id, array, layout=layout, **{**arguments, **more})
    reservation = spool.reserve(
        PUT,
        TOKENS_FIRST if intake.tokens_first else 0,
        intake.request_id,
        intake.meta,
        tokens=intake.num_tokens,
        payload_bytes=intake.payload_bytes,
    )
    assert reservation is not None
    intake.fill(reservation.payload)
    spool.commit(reservation)
    return reservation.t_submit


def delete(spool: Spool, kind: str, text: Any, run: str | None = None) -> int:
    """What `RoutingWriter.delete_prefix` and `clear_run` do; the stamp."""
    meta = json.dumps({"kind": kind, "text": text, "run": run}).encode()
    reservation = spool.reserve(DELETE, 0, b"", meta, tokens=0, payload_bytes=0)
    assert reservation is not None
    spool.commit(reservation)
    return reservation.t_submit


def publisher_of(dataset: Any) -> Publisher:
    return Publisher(open_storage(dataset.uri), dataset.format, "none")


def sealed(spool: Spool) -> list[Path]:
    spool.close_active()
    return slabs_in(spool.directory, (SEALED,))
