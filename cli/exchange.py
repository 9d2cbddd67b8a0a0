"""`rr-dataset import`, `export` and `copy`: data in and out."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

import rr_dataset as rr
from rr_dataset.contracts import CONTRACTS

from . import output
from .datasets import Keys, is_dataset, scheme_of, spec_of
from .options import IdsFile, Json, Layers, Prefix, Uri, file_option, parse_layers, read_ids

_SHOWN_REFUSED = 20


class Format(str, Enum):
    """What records can be written as."""

    NPZ = "npz"
    SAFETENSORS = "safetensors"
    PARQUET = "parquet"


def import_records(
    uri: Uri,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="FastDeploy's local_store_dir; with --contract a file of responses",
            show_default=False,
        ),
    ],
    contract: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="SOURCE has a response a line, as JSON: " + ", ".join(CONTRACTS),
            show_default=False,
        ),
    ] = None,
    id_field: Annotated[
        str | None,
        typer.Option(metavar="FIELD", help="Where a response has its id, a.b within a", show_default="the usual ones"),
    ] = None,
    hidden_layers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of the model, if dense layers follow the MoE layers", show_default=False),
    ] = None,
    config: Annotated[Path | None, file_option("A model's config.json: create the dataset if it is not there")] = None,
    keys: Annotated[
        Keys, typer.Option(metavar="fastdeploy|uuid|by-step", help="Of a dataset that --config creates")
    ] = Keys.FASTDEPLOY,
    weight_version: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of all records", show_default=False)
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="TEXT", help="Run id of all records", show_default="new")] = None,
    as_json: Json = False,
) -> None:
    """Import FastDeploy's local store, or responses of other engines; exit code 3 if records are refused."""
    if contract is None and (id_field is not None or hidden_layers is not None):
        raise typer.BadParameter(
            "only responses have it: say which, --contract", param_hint="--id-field, --hidden-layers"
        )
    if config is None and keys != Keys.FASTDEPLOY:
        raise typer.BadParameter("only a dataset that --config creates takes it", param_hint="--keys")
    if config is not None and not is_dataset(uri):
        rr.create_dataset(uri, spec_of(config, None, None, None), keys=scheme_of(keys, None, None))
    with output.progress("import") as progress:
        if contract is None:
            report = rr.import_fastdeploy(uri, source, weight_version=weight_version, run_id=run, progress=progress)
        else:
            report = rr.import_responses(
                uri, source, contract, id_field, hidden_layers, weight_version, run, progress=progress
            )
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
        str,
        typer.Argument(
            metavar="FOLDER", help="Where the files go, also s3://: empty, or not there yet", show_default=False
        ),
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
            f"wrote {report.files:,} files, {output.shown_bytes(report.bytes)}, below {output.printable(out)}"
            + ("" if counts else f": {report.records:,} records")
        )


def copy(
    uri: Uri,
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DESTINATION", help="Another dataset, also s3://, made if it is not there", show_default=False
        ),
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
