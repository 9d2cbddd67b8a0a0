"""`python -m tests.benchmarks`: measure the rows, print one table, write one JSON file."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .bench import Bench, Unavailable
from .capture import capture_decode, capture_prefill
from .clients import clients
from .compaction import compact_get, compact_size, compact_speed
from .contracts import decode_contracts
from .deletes import (
    delete_after_deletes,
    delete_scale,
    delete_seed,
    get_after_deletes,
    many_prefixes,
    put_while_deleting,
)
from .facts import facts
from .ingest import ingest_large, ingest_small, worker_memory
from .loader import loader_arrow, loader_paddle, loader_torch
from .measure import Check
from .put import put_blocked, put_int32, put_large, put_queue, put_small
from .read import get_cold, get_layers, get_many_large, get_many_small, get_tokens_first, get_warm
from .s3 import s3_compression, s3_delete, s3_durable, s3_get, s3_get_many, s3_ingest, s3_requests
from .seed import seed_store

ROWS = {  # ingest comes before the others have deleted many files
    "ingest-large": ingest_large,
    "ingest-small": ingest_small,
    "put-large": put_large,
    "put-queue": put_queue,
    "put-small": put_small,
    "put-int32": put_int32,
    "put-blocked": put_blocked,
    "decode": decode_contracts,
    "capture-decode": capture_decode,
    "capture-prefill": capture_prefill,
    "get-warm": get_warm,
    "get-cold": get_cold,
    "get-layers": get_layers,
    "get-tlk": get_tokens_first,
    "seed": seed_store,
    "get-many-small": get_many_small,
    "get-many-large": get_many_large,
    "worker-memory": worker_memory,
    "compact-size": compact_size,
    "compact-speed": compact_speed,
    "compact-get": compact_get,
    "delete-scale": delete_scale,
    "delete-seed": delete_seed,
    "delete-deletes": delete_after_deletes,
    "get-deletes": get_after_deletes,
    "put-deleting": put_while_deleting,
    "many-prefixes": many_prefixes,
    "loader-torch": loader_torch,
    "loader-paddle": loader_paddle,
    "loader-arrow": loader_arrow,
    "clients": clients,
    "s3-get": s3_get,
    "s3-get-many": s3_get_many,
    "s3-ingest": s3_ingest,
    "s3-durable": s3_durable,
    "s3-delete": s3_delete,
    "s3-requests": s3_requests,
    "s3-compression": s3_compression,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute: fewer rounds, fewer bytes")
    parser.add_argument(
        "--only", action="append", choices=ROWS, metavar="NAME", help=f"one of {', '.join(ROWS)}; again for more"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="where datasets go, and are removed"
    )
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="the numbers, with every sample")
    options = parser.parse_args()

    log = Console(stderr=True)
    machine = facts(options.dir)
    checks, skipped = _measure(Bench(options.dir, options.quick), options.only or list(ROWS), log)
    _show(machine, checks, skipped)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(_report(machine, checks, skipped, options.quick), indent=1) + "\n")
    log.print(f"all samples: {options.json}")


def _measure(bench: Bench, names: Sequence[str], log: Console) -> tuple[list[Check], dict[str, str]]:
    checks: list[Check] = []
    skipped: dict[str, str] = {}
    for name in names:
        began = time.perf_counter()
        try:
            checks += ROWS[name](bench)
        except Unavailable as error:
            skipped[name] = str(error)
        log.print(f"{name}: {time.perf_counter() - began:.0f} s")
    return checks, skipped


def _show(machine: dict[str, str], checks: Sequence[Check], skipped: dict[str, str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), soft_wrap=True)
    table = Table("what", "against", "ours", "theirs", "measured", "pairs", "target", "")
    for check in checks:
        target = f"{check.bound} {check.target:,.3g} {check.unit}"
        verdict = "[green]ok[/green]" if check.ok else "[red]misses[/red]"
        measured = _number(check.value, check.unit)
        pairs = "" if check.low is None or check.high is None else f"{check.low:,.3g} .. {check.high:,.3g}"
        table.add_row(check.what, check.against, check.ours, check.theirs, measured, pairs, target, verdict)
    if checks:
        console.print(table)
    for check in checks:
        if check.note:
            console.print(f"{check.row}: {check.note}", soft_wrap=True, markup=False)
    for name, why in skipped.items():
        console.print(f"{name}: skipped: {why}", soft_wrap=True, markup=False)


def _number(value: float, unit: str) -> str:
    return f"{value:,.2f} {unit}" if value < 10 else f"{value:,.0f} {unit}"


def _report(machine: dict[str, str], checks: Sequence[Check], skipped: dict[str, str], quick: bool) -> dict[str, Any]:
    return {
        "machine": machine,
        "quick": quick,
        "checks": [{**asdict(check), "ok": check.ok} for check in checks],
        "skipped": skipped,
    }


if __name__ == "__main__":
    main()
