"""`rr-dataset import`, `export` and `copy`: data in and out."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

import rr_dataset as rr

from . import output
from .options import IdsFile, Json, Layers, Prefix, Uri, parse_layers, read_ids

_SHOWN_REFUSED = 20


class Format(str, Enum):
    """What records can be written as."""

    NPZ = "npz"
    SAFETENSORS = "safetensors"
    PARQUET = "parquet"


def import_fastdeploy(
    uri: Uri,
    store: Annotated[
        Path, typer.Argument(metavar="STORE_DIR", help="FastDeploy's local_store_dir", show_default=False)
    ],
    weight_version: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of all records", show_default=False)
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="TEXT", help="Run id of all records", show_default="new")] = None,
    as_json: Json = False,
) -> None:
    """Import the .pdtensor folders of FastDeploy's local store; exit code 3 if records are refused."""
    with output.progress("import") as progress:
        report = rr.import_fastdeploy(uri, store, weight_version=weight_version, run_id=run, progress=progress)
    if as_json:
        output.show_json(asdict(report))
    else:
        for refused in report.refused[:_SHOWN_REFUSED]:
            output.show_line(output.printable(f"refused: {refused.path}: {refused.reason}"))
        if len(report.refused) > _SHOWN_REFUSED:
            output.show_line(f"... {len(report.refused) - _SHOWN_REFUSED} more are refused: see --json")
        output.show_line(
            f"imported {report.imported:,} records, {report.tokens:,} tokens; "
            f"{report.existing:,} were there, {len(report.refused):,} refused"
        )
    if report.refused:
        raise typer.Exit(output.EXIT_FOUND_PROBLEMS)


def export(
    uri: Uri,
    out: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the files go: empty, or not there yet", show_default=False)
    ],
    format: Annotated[  # noqa: A002 -- the option's name
        Format, typer.Option(metavar="npz|safetensors|parquet", help="Files of whole records")
    ] = Format.PARQUET,
    long: Annotated[bool, typer.Option("--long", help="Parquet with a row per token, layer and slot instead")] = False,
    counts: Annotated[
        bool, typer.Option("--counts", help="Parquet of counts per layer, weight version and expert instead")
    ] = False,
    prefix: Prefix = None,
    layers: Layers = None,
    as_json: Json = False,
) -> None:
    """Write records as files for other tools."""
    if long and counts:
        raise typer.BadParameter("choose one of --long and --counts", param_hint="--long")
    if (long or counts) and format != Format.PARQUET:
        raise typer.BadParameter("--long and --counts are Parquet", param_hint="--format")
    kind = "long" if long else "counts" if counts else format.value
    chosen = None if layers is None else parse_layers(layers)
    with output.progress("export") as progress:
        report = rr.export(uri, out, kind, prefix, chosen, progress=progress)
    if as_json:
        output.show_json(asdict(report))
    else:
        output.show_line(
            f"wrote {report.files:,} files, {output.shown_bytes(report.bytes)}, below {out}"
            + ("" if counts else f": {report.records:,} records")
        )


def copy(
    uri: Uri,
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="Another dataset, made if it is not there", show_default=False)
    ],
    prefix: Prefix = None,
    ids_file: IdsFile = None,
    compression: Annotated[
        str, typer.Option(metavar="CODEC", help="Of the new files: none, lz4 or zstd, with its level")
    ] = "zstd:3",
    as_json: Json = False,
) -> None:
    """Copy records, ids and all, into another dataset; what is there is not copied again."""
    ids = None if ids_file is None else read_ids(ids_file)
    with output.progress("copy") as progress:
        report = rr.copy(uri, destination, ids=ids, prefix=prefix, compression=compression, progress=progress)
    if as_json:
        output.show_json(asdict(report))
    else:
        output.show_line(
            f"copied {report.records:,} records, {report.rows:,} rows, {output.shown_bytes(report.bytes)} in "
            f"{report.shards:,} shards; {report.existing:,} rows were there"
        )
