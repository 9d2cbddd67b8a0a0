"""`rr-dataset delete`: records by prefix, id, pattern, age or run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

import rr_dataset as rr
from rr_dataset.clock import pack, wall_ms
from rr_dataset.delete import PartitionPlan, plan_delete

from . import output
from .options import DryRun, IdsFile, Json, Uri, parse_duration, read_ids

RECENT_MS = 600_000  # the store does not tell whether a writer that put so lately is still there


def delete(
    uri: Uri,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PREFIX", help="Ids that begin with these components; may be repeated", show_default=False
        ),
    ] = None,
    ids_file: IdsFile = None,
    glob: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Ids whose components match, such as 'math_*:2'", show_default=False),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only what was put so long ago: 90s, 30m, 12h, 7d", show_default=False),
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Only what this run put", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="All records")] = False,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    as_json: Json = False,
) -> None:
    """Delete records, also those that writers have put and not yet published; puts after it returned live."""
    what: dict[str, Any] = {
        "prefixes": prefix or [],
        "ids": [] if ids_file is None else read_ids(ids_file),
        "glob": glob,
        "older_than_s": None if older_than is None else parse_duration(older_than),
        "run": run,
        "everything": everything,
    }
    if not (prefix or what["ids"] or glob or older_than or run or everything):
        raise typer.BadParameter("say what: --prefix, --ids-file, --glob, --older-than, --run, or --all")
    if dry_run:
        _show_plan(plan_delete(uri, **what), as_json=as_json)
        return
    planned = rr.DeleteReport()
    if not yes:
        planned = _ask(uri, plan_delete(uri, **what))
    with output.progress("delete") as bar:
        report = rr.delete(uri, **what, progress=lambda done: bar(done.bytes, max(done.bytes, planned.bytes)))
    if as_json:
        output.show_json(asdict(report))
    else:
        output.show_line(f"deleted {_shown(report)}")


def _show_plan(tasks: Iterable[PartitionPlan], *, as_json: bool) -> None:
    found = list(tasks)
    total = _total(found)
    if as_json:
        output.show_json({**asdict(total), "runs": _runs(found), "plan": [asdict(task) for task in found]})
        return
    if found:
        output.show_table(
            ("directory", "files", "size", "records", "of these hidden"),
            [
                (
                    output.printable(each.path),
                    len(each.remove),
                    output.shown_bytes(each.bytes),
                    each.records,
                    each.hidden,
                )
                for each in found
            ],
        )
    output.show_line(f"would delete {_shown(total)}")
    for line in _shown_runs(_runs(found)):
        output.show_line(line)


def _ask(uri: str, tasks: Iterable[PartitionPlan]) -> rr.DeleteReport:
    """Say what will be deleted, and whose it is; end unless the answer is yes."""
    total = rr.DeleteReport()
    runs: dict[str, int] = {}
    for task in tasks:
        total = total.with_plan(task)
        _add_runs(runs, task.runs)
    lines = [f"{output.printable(uri)}: {_shown(total)}, and what writers have put there and not yet published"]
    if not output.ask("\n".join([*lines, *_shown_runs(runs), "Delete?"])):
        output.show_error(Exception("nothing was deleted"))
        raise typer.Exit(output.EXIT_FAILED)
    return total


def _total(tasks: Iterable[PartitionPlan]) -> rr.DeleteReport:
    total = rr.DeleteReport()
    for task in tasks:
        total = total.with_plan(task)
    return total


def _runs(tasks: Iterable[PartitionPlan]) -> dict[str, int]:
    runs: dict[str, int] = {}
    for task in tasks:
        _add_runs(runs, task.runs)
    return runs


def _add_runs(runs: dict[str, int], more: Mapping[str, int]) -> None:
    for run, newest_ms in more.items():
        runs[run] = max(runs.get(run, 0), newest_ms)


def _shown(report: rr.DeleteReport) -> str:
    hidden = f", {report.hidden:,} of them hidden until compaction" if report.hidden else ""
    return (
        f"{report.records:,} records in {report.partitions:,} directories{hidden}; "
        f"{report.files:,} files, {output.shown_bytes(report.bytes)}"
    )


def _shown_runs(runs: Mapping[str, int]) -> Iterable[str]:
    now_ms = wall_ms()
    for run, newest_ms in sorted(runs.items(), key=lambda item: -item[1]):
        age_ms = max(now_ms - newest_ms, 0)
        ago = output.shown_duration(age_ms // 1000)
        recent = f", {ago} ago: its writer may still be open, and put more" if age_ms < RECENT_MS else ""
        yield f"  of run {output.printable(run)}, newest put {output.shown_time(pack(newest_ms))}{recent}"
