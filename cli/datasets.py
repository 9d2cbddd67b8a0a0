"""`rr-dataset create`, `info` and `ls`: a dataset as a whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from rr_dataset import DatasetInfo, KeyScheme, RecordHead, RoutingSpec, create_dataset, open_dataset

from . import output
from .options import Json, Uri, parse_layers
from .records import head_json


class Keep(str, Enum):
    """Which turns of a conversation are kept."""

    ALL = "all"
    LAST_TURN = "last_turn"


class Keys(str, Enum):
    """The ready key schemes."""

    FASTDEPLOY = "fastdeploy"
    UUID = "uuid"
    BY_STEP = "by-step"


def create(
    uri: Uri,
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="A model's config.json, instead of the next three",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="0-based ids of the MoE layers, such as 3-60", show_default=False)
    ] = None,
    experts: Annotated[
        int | None, typer.Option(metavar="N", help="Logical experts per layer", show_default=False)
    ] = None,
    top_k: Annotated[int | None, typer.Option(metavar="N", help="Experts per token", show_default=False)] = None,
    keys: Annotated[
        Keys, typer.Option(metavar="fastdeploy|uuid|by-step", help="How request ids split into components")
    ] = Keys.FASTDEPLOY,
    partition_by: Annotated[
        int | None,
        typer.Option(metavar="N", help="fastdeploy: components that name the directory, 1 or 2", show_default="1"),
    ] = None,
    buckets: Annotated[
        int | None, typer.Option(metavar="N", help="uuid: number of directories", show_default="256")
    ] = None,
    keep: Annotated[
        Keep,
        typer.Option(metavar="all|last_turn", help="Show and keep every turn of a conversation, or the highest only"),
    ] = Keep.ALL,
    exist_ok: Annotated[bool, typer.Option(help="Accept the same dataset if it is there")] = True,
    as_json: Json = False,
) -> None:
    """Create an empty dataset for the routing of one model."""
    spec = _spec(config, layers, experts, top_k)
    scheme = _scheme(keys, partition_by, buckets)
    dataset = create_dataset(uri, spec, keys=scheme, keep=keep.value, exist_ok=exist_ok)
    _show_info(dataset.info(), as_json)


def info(uri: Uri, as_json: Json = False) -> None:
    """Show what a dataset is and what is in it."""
    _show_info(open_dataset(uri).info(), as_json)


def ls(
    uri: Uri,
    prefix: Annotated[
        str | None, typer.Option(metavar="PREFIX", help="Only ids that begin with these components", show_default=False)
    ] = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="A line of facts for each record")] = False,
    as_json: Json = False,
) -> None:
    """List the request ids of a dataset."""
    dataset = open_dataset(uri)
    ids = dataset.ids(prefix)
    if not long:
        output.show_json(list(ids)) if as_json else output.show_lines(output.printable(i) for i in ids)
        return
    heads = [head for head in dataset.heads(ids, on_missing="none") if head is not None]
    if as_json:
        output.show_json([head_json(head) for head in heads])
    else:
        output.show_table(
            ("id", "status", "tokens", "missing", "weights", "submitted", "run"), [_head_cells(head) for head in heads]
        )


def _show_info(info: DatasetInfo, as_json: bool) -> None:
    spec, keys = info.format.spec, info.format.keys
    if as_json:
        output.show_json({**asdict(info), "format": json.loads(info.format.to_json())})
        return
    output.show_facts(
        {
            "dataset": info.uri,
            "uuid": info.format.uuid,
            "routing": f"layers {output.shown_layers(spec.moe_layers)}; {spec.num_experts} experts, top-{spec.top_k}, "
            f"{spec.dtype}, {spec.topk_order} order; {spec.bytes_per_token} B a token",
            "ids": keys.rest if keys.buckets else keys.delimiter.join(keys.components),
            "keeps": "the last turn only" if info.format.keep == "last_turn" else None,
            "directories": f"{info.partitions:,} by {', '.join(keys.components[: keys.partition_by])}",
            "shards": f"{info.shards:,}",
            "rows": f"{info.rows:,}",
            "size": output.shown_bytes(info.bytes),
            "delete marks": info.tombstone_files or None,
            "format": f"version {info.format.format_version}",
        }
    )


def _spec(config: Path | None, layers: str | None, experts: int | None, top_k: int | None) -> RoutingSpec:
    if config is not None:
        if layers is not None or experts is not None or top_k is not None:
            raise typer.BadParameter("says layers, experts and top-k already; leave those out", param_hint="--config")
        try:
            return RoutingSpec.from_config(json.loads(config.read_text()))
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"{config} is no JSON: {error}", param_hint="--config") from error
    if layers is None or experts is None or top_k is None:
        raise typer.BadParameter("give --layers, --experts and --top-k, or --config", param_hint="URI")
    return RoutingSpec(moe_layers=tuple(parse_layers(layers)), num_experts=experts, top_k=top_k)


def _scheme(keys: Keys, partition_by: int | None, buckets: int | None) -> KeyScheme:
    if partition_by is not None and keys != Keys.FASTDEPLOY:
        raise typer.BadParameter("only --keys fastdeploy takes it", param_hint="--partition-by")
    if buckets is not None and keys != Keys.UUID:
        raise typer.BadParameter("only --keys uuid takes it", param_hint="--buckets")
    if keys == Keys.FASTDEPLOY:
        return KeyScheme.fastdeploy() if partition_by is None else KeyScheme.fastdeploy(partition_by=partition_by)
    if keys == Keys.UUID:
        return KeyScheme.uuid() if buckets is None else KeyScheme.uuid(buckets=buckets)
    return KeyScheme.by_step()


def _head_cells(head: RecordHead) -> Sequence[object]:
    return (
        output.printable(head.request_id),
        head.status,
        head.num_tokens,
        output.shown_ranges(head.missing),
        ", ".join(dict.fromkeys(output.printable(version) for _, _, version in head.weights)),
        output.shown_time(head.rows[-1].t_submit),
        output.printable(head.run_id),
    )
