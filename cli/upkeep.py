"""`rr-dataset compact`, `gc` and `maintain`: what keeps a dataset small and fast."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import rr_dataset as rr
from rr_dataset.compact_plan import Task

from . import output
from .options import DryRun, Json, PrefixOfDirectories, Uri, parse_part, parse_size

Compression = Annotated[
    str, typer.Option(metavar="CODEC", help="none, lz4 or zstd, with its level: zstd:3 or more for long records")
]
Jobs = Annotated[
    int, typer.Option(metavar="N", min=1, help="Threads, each with up to three times the target size in memory")
]
TargetSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Payload of a file before compression, such as 64MiB or 1GB")
]

_TARGET = "256MiB"  # compact_plan.TARGET_BYTES


def compact(
    uri: Uri,
    prefix: PrefixOfDirectories = None,
    compression: Compression = "zstd:3",
    jobs: Jobs = 1,
    target_size: TargetSize = _TARGET,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            help="Carry out this plan; with --dry-run: write it there, a JSON line for each task",
            show_default=False,
        ),
    ] = None,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Only the i-th, from 1, of n parts of the directories")
    ] = "1/1",
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Join and compress the files of each directory, and leave out what is deleted or replaced."""
    part, target = parse_part(shard), parse_size(target_size)
    tasks = None if plan is None or dry_run else list(_read_plan(plan))
    if dry_run and plan is not None:
        tasks = list(rr.plan_compaction(uri, prefix, compression, target, part))
        plan.write_text("".join(json.dumps(asdict(task)) + "\n" for task in tasks))

    def run(*, dry_run: bool, progress: Callable[[rr.CompactReport], None] | None = None) -> rr.CompactReport:
        return rr.compact(
            uri, prefix, compression, jobs, target, dry_run=dry_run, shard=part, tasks=tasks, progress=progress
        )

    if dry_run:
        report = run(dry_run=True)
    else:
        with _progress("compact", lambda: run(dry_run=True).bytes_read) as progress:
            report = run(dry_run=False, progress=progress)
    if as_json:
        output.show_json(asdict(report))
    else:
        output.show_line(_compacted(report, dry_run=dry_run))
        output.show_lines(output.printable(f"damaged, left as it is: {text}") for text in report.damaged)
    if report.damaged:
        raise typer.Exit(output.EXIT_FOUND_PROBLEMS)


def gc(uri: Uri, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Remove deleted and replaced files, leftovers of dead processes, and delete marks that have done their work."""
    report = rr.collect_garbage(uri, dry_run=dry_run)
    if as_json:
        output.show_json(asdict(report))
    else:
        output.show_line(_collected(report, dry_run=dry_run))


def maintain(
    uri: Uri,
    every: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Again and again, so long apart", show_default="one pass"),
    ] = None,
    compression: Compression = "zstd:3",
    jobs: Jobs = 1,
    target_size: TargetSize = _TARGET,
    as_json: Json = False,
) -> None:
    """Delete what is older or more than the dataset's limits, collect garbage, compact. Several at once are safe."""
    for report in rr.maintain(uri, every, compression, jobs, parse_size(target_size)):
        if as_json:
            output.show_json(asdict(report))
            sys.stdout.flush()
            continue
        deleted = report.deleted
        output.show_line(
            f"deleted {deleted.records:,} records; {_collected(report.garbage)}; {_compacted(report.compacted)}"
        )
        if report.problem:
            output.show_error(rr.StorageError(f"this pass was cut short: {report.problem}"))


@contextmanager
def _progress(what: str, total: Callable[[], int]) -> Iterator[Callable[[rr.CompactReport], None]]:
    """Bytes and rate while it runs. The total costs a plan, so only a terminal asks for it."""
    in_all = total() if sys.stderr.isatty() else 0
    with output.progress(what) as update:
        update(0, in_all)
        yield lambda report: update(report.bytes_read, max(in_all, report.bytes_read))


def _compacted(report: rr.CompactReport, *, dry_run: bool = False) -> str:
    if dry_run:
        return (
            f"would compact {report.shards:,} files in {report.tasks:,} tasks, {output.shown_bytes(report.bytes_read)}"
        )
    read, written = output.shown_bytes(report.bytes_read), output.shown_bytes(report.bytes_written)
    parts = [f"compacted {report.shards:,} files into {report.outputs:,}, {read} into {written}"]
    if report.rows_dropped:
        parts.append(f"{report.rows_dropped:,} dead rows left out")
    if report.shards_removed:
        parts.append(f"removed {report.shards_removed:,} replaced files, {output.shown_bytes(report.bytes_removed)}")
    if report.skipped:
        parts.append(f"{report.skipped:,} tasks were others' or took too long")
    return "; ".join(parts)


def _collected(report: rr.GarbageReport, *, dry_run: bool = False) -> str:
    files = report.covered + report.replaced
    parts = [f"{'would remove' if dry_run else 'removed'} {files:,} files, {output.shown_bytes(report.bytes)}"]
    if report.staged:
        parts.append(f"{report.staged:,} unfinished files, {output.shown_bytes(report.staged_bytes)}")
    if report.tombstones_dropped:
        parts.append(f"{report.tombstones_dropped:,} delete marks that have done their work")
    if report.tombstones_folded:
        parts.append(f"{'would fold' if dry_run else 'folded'} {report.tombstones_folded:,} delete marks into one file")
    return "; ".join(parts)


def _read_plan(path: Path) -> Iterator[Task]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            yield Task(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise typer.BadParameter(f"{path}, line {number}: {error}", param_hint="--plan") from error
