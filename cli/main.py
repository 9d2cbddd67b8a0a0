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

from rr_dataset.errors import RoutingDatasetError, RoutingDatasetWarning

from . import datasets, delete, demo, doctor, exchange, output, records, recover, stats, upkeep, verify

app = typer.Typer(
    name="rr-dataset",
    help="Store and read the expert routing of Mixture-of-Experts rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(datasets.create)
app.command()(datasets.info)
app.command()(datasets.ls)
app.command()(records.get)
app.command()(stats.stats)
app.command()(delete.delete)
app.command()(doctor.doctor)
app.command()(recover.recover)
app.command()(verify.verify)
app.command()(exchange.copy)
app.command("import")(exchange.import_fastdeploy)
app.command()(exchange.export)
app.command()(upkeep.compact)
app.command()(upkeep.gc)
app.command()(upkeep.maintain)
app.command()(demo.demo)


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
            output.show_error(error)
            sys.exit(output.EXIT_FAILED)
