"""`rr-dataset doctor`: does this host give what rr_dataset builds on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import rr_dataset as rr

from . import output
from .options import Json, Uri


def doctor(
    uri: Uri,
    spool_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where writers put their spools", show_default="as a writer chooses"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this host, its spools and the folder of a dataset, there or still to be made."""
    with _swept_on_sigterm():
        findings = rr.doctor(uri, spool_dir)
    if as_json:
        output.show_json([asdict(finding) for finding in findings])
    else:
        output.show_sentences(("", "check", "seen"), [(f.level, f.check, _shown(f)) for f in findings])
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(output.EXIT_FOUND_PROBLEMS)


def _shown(finding: rr.Finding) -> str:
    return output.printable(f"{finding.seen}. Way out: {finding.way_out}" if finding.way_out else finding.seen)


@contextmanager
def _swept_on_sigterm() -> Iterator[None]:
    """A SIGTERM, as `timeout` sends it, ends the checks by way of their clean-up."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
