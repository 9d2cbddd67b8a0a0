"""A dataset with everything that compaction and garbage collection must tell apart, and what a reader must see of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rr_dataset as rr
from rr_dataset.compact import compact_with
from rr_dataset.compactor import Compactor, CompactReport
from rr_dataset.garbage import Collector, GarbageReport
from rr_dataset.lookup import Lookup
from rr_dataset.record import RowData
from tests.stored import Stored, expected

Seen = dict[str, tuple[bytes, bytes, str]]
GRACE_MS = 600_000
LATER_MS = 2 * GRACE_MS  # past every grace


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def compact_at(root: Path | str, ms: int, **how: Any) -> CompactReport:
    return compact_with(Compactor(Lookup(str(root), None, None), lambda: ms), **how)


def collect_at(root: Path | str, ms: int, *, dry_run: bool = False) -> GarbageReport:
    lookup = Lookup(str(root), None, None)
    return Collector(Compactor(lookup, lambda: ms), lookup, lambda: ms).collect(dry_run=dry_run)


def seen(root: Path | str, run: str | None = None) -> Seen:
    """All that a fresh reader shows: routing, which of it is there, status."""
    dataset = rr.open_dataset(root, run=run)
    found: Seen = {}
    for head in dataset.heads(dataset.ids()):
        if head.status == "dropped":
            found[head.request_id] = (b"", b"", "dropped")
        else:
            record = dataset.get(head.request_id)
            found[head.request_id] = (record.to_numpy().tobytes(), record.present().tobytes(), record.status)
    return found


def modelled(stored: Stored, rows: dict[str, list[RowData]], statuses: dict[str, str]) -> Seen:
    """What the rows make, by the tests' own rules."""
    found: Seen = {}
    for request_id, puts in rows.items():
        if statuses.get(request_id) == "dropped":
            found[request_id] = (b"", b"", "dropped")
            continue
        stop = max(data.row.token_stop for data in puts)
        experts, present = expected(puts, stored.spec, stored.spec.moe_layers, range(stop))
        found[request_id] = (experts.tobytes(), present.tobytes(), statuses.get(request_id, "complete"))
    return found


def shards(root: Path, partition: str = "*") -> list[Path]:
    return sorted(root.glob(f"{partition}/*.arrow"))


def fill(root: Path, made: int) -> tuple[Stored, Seen]:
    """Replaced, partial, dropped, doubled and deleted rows, in raw and in compacted shards; and what is to be seen."""
    stored = Stored(root)
    rows: dict[str, list[RowData]] = {}
    stored.put("p:0:0:0", 7)  # replaced below
    rows["p:0:0:0"] = [stored.put("p:0:0:0", 9, vectors=True)]
    rows["p:1:0:0"] = [
        stored.put("p:1:0:0", 4, part=True, status="partial"),
        stored.put("p:1:0:0", 5, start=3, part=True, status="complete"),
    ]
    rows["p:2:0:0"] = [stored.put("p:2:0:0", 6, layers=(3, 9), missing=((1, 3),))]
    stored.put("p:3:0:0", 6)
    stored.put("p:5:0:0", 3, run="run-2")
    gone = [stored.row("p:4:0:0", 5), stored.row("p:4:1:0", 5)]
    rows["p:6:0:0"] = [stored.row("p:6:0:0", 5)]
    inputs = [stored.shard(gone[0], rows["p:6:0:0"][0]), stored.shard(gone[1])]
    stored.shard(*gone, rows["p:6:0:0"][0], inputs=inputs, level=1, compression="zstd")
    stored.tombstone("prefix", "p:4", made=made)
    stored.tombstone("ids", ["p:3:0:0"], made=made + 1)
    stored.tombstone("all", "", run="run-2", made=made + 2)
    rows["p:3:0:0"] = [stored.put("p:3:0:0", 2)]  # again, after the delete
    stored.put("q:0:0:0", 5)
    stored.put("q:1:0:0", 5)
    stored.tombstone("prefix", "q", made=made + 3)
    rows["r:0:0:0"] = [stored.put("r:0:0:0", 12, vectors=True, tags={"a": "b"})]
    rows["s:0:0:0"] = [stored.put("s:0:0:0", 3, status="dropped", reason="spool_full")]
    left = root / "_rr/tmp/dead"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"cut off")
    (root / "_rr/quarantine").mkdir()
    (root / "_rr/quarantine/kept").write_bytes(b"evidence")
    return stored, modelled(stored, rows, {"p:2:0:0": "partial", "s:0:0:0": "dropped"})


def record_ids(root: Path) -> Iterator[str]:
    """Of every row in every shard, as pyarrow sees them."""
    import pyarrow as pa

    for path in shards(root):
        yield from pa.ipc.open_file(path).read_all()["record_id"].to_pylist()
