"""`rr-dataset recover`: make durable what dead writers left in their spools."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import rr_dataset as rr

from . import output
from .options import DryRun, Json


def recover(
    spool_dir: Annotated[
        Path,
        typer.Argument(
            metavar="SPOOL_DIR",
            help="Where writers put their spools, such as /dev/shm, or one spool",
            show_default=False,
        ),
    ],
    uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="Where the dataset is now: a path, file:// or s3://", show_default="as the spool says"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Publish also what was set aside by age; may revive deleted ids")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Publish what dead writers left in their spools; exit code 3 if something stays there."""
    reports = rr.recover(spool_dir, force=force, uri=uri, dry_run=dry_run)
    left = [report for report in reports if report.outcome == "left"]
    if as_json:
        output.show_json([asdict(report) for report in reports])
    elif reports:
        columns = ("spool", "outcome", "records", "size", "torn", "why")
        output.show_table(columns, map(_shown, reports))
    else:
        output.show_line(f"no spool in {output.printable(str(spool_dir))}")
    if left:
        raise typer.Exit(output.EXIT_FOUND_PROBLEMS)


def _shown(report: rr.SpoolReport) -> tuple[object, ...]:
    return (
        output.printable(report.path),
        report.outcome,
        report.records,
        output.shown_bytes(report.bytes),
        report.torn,
        output.printable(report.reason),
    )
