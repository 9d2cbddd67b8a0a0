"""`rr-dataset verify`: is everything in a dataset what it claims to be."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

import rr_dataset as rr

from . import output
from .options import Json, PrefixOfDirectories, Uri


def verify(
    uri: Uri,
    prefix: PrefixOfDirectories = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move damaged and foreign files to _rr/quarantine/; deletes nothing")
    ] = False,
    positions: Annotated[
        bool,
        typer.Option(
            "--positions",
            help="Also hold records against what a capture with debug=True writes, to check its integration",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read and check every byte; exit code 3 if something is wrong."""
    with output.progress("verify") as progress:
        report = rr.verify(uri, prefix, repair=repair, progress=progress, positions=positions)
    if as_json:
        problems = [{"level": problem.level, **asdict(problem)} for problem in report.problems]
        output.show_json({**asdict(report), "problems": problems, "sound": report.sound})
    else:
        _show(report)
    if not report.sound:
        raise typer.Exit(output.EXIT_FOUND_PROBLEMS)


def _show(report: rr.VerifyReport) -> None:
    for problem in report.problems:
        name = "" if problem.request_id is None else f" {problem.request_id} ({problem.record_id})"
        more = "" if problem.count == 1 else f" [{problem.count} in all]"
        moved = "" if problem.moved_to is None else f"; moved to {problem.moved_to}"
        text = f"{problem.level}: {problem.kind}: {problem.path or '.'}:{name} {problem.text}{more}{moved}"
        output.show_line(output.printable(text))
    errors = sum(problem.level == "error" for problem in report.problems)
    output.show_line(
        f"{report.records:,} records, {report.rows:,} rows in {report.shards:,} shards, "
        f"{output.shown_bytes(report.bytes)}: {f'{errors} problems' if errors else 'sound'}"
    )
