"""The entry point of `rr-dataset`: its commands, and how their errors end.

Exit codes: 0 ok, 1 failed, 2 usage, 3 found problems.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from rr_dataset.description import WAYS_OUT
from rr_dataset.errors import RoutingDatasetError, RoutingDatasetWarning

from . import datasets, delete, demo, doctor, exchange, output, records, recover, stats, upkeep, verify
from .help import Command, Group

app = typer.Typer(
    name="rr-dataset",
    cls=Group,
    help="Store and read the expert routing of Mixture-of-Experts rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(datasets.create)
app.command(cls=Command)(datasets.info)
app.command(cls=Command)(datasets.ls)
app.command(cls=Command)(records.get)
app.command(cls=Command)(stats.stats)
app.command(cls=Command)(delete.delete)
app.command(cls=Command)(doctor.doctor)
app.command(cls=Command)(recover.recover)
app.command(cls=Command)(verify.verify)
app.command(cls=Command)(exchange.copy)
app.command("import", cls=Command)(exchange.import_records)
app.command(cls=Command)(exchange.export)
app.command(cls=Command)(upkeep.compact)
app.command(cls=Command)(upkeep.gc)
app.command(cls=Command)(upkeep.maintain)
app.command(cls=Command)(demo.demo)


def _show_version(asked: bool) -> None:
    if asked:
        output.show_line(f"rr-dataset {version('rr-dataset')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Store and read the expert routing of Mixture-of-Experts rollouts."""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit. An expected error or warning is one line on stderr, without a traceback."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RoutingDatasetWarning)
        warnings.showwarning = output.show_warning
        try:
            app(args=args, prog_name="rr-dataset")
        except (RoutingDatasetError, OSError) as error:
            output.show_error(error, {WAYS_OUT: "or create one with `rr-dataset create`"})
            sys.exit(output.EXIT_FAILED)
