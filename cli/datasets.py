"""`rr-dataset create`, `info` and `ls`: a dataset as a whole."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from rr_dataset import (
    DatasetInfo,
    DatasetNotFoundError,
    InvalidInputError,
    KeyScheme,
    RecordHead,
    RoutingDataset,
    RoutingSpec,
    create_dataset,
    open_dataset,
)
from rr_dataset.layout import DatasetFormat
from rr_dataset.record import BY_HAND, shown_layers

from . import output
from .options import Json, Prefix, Uri, file_option, parse_duration, parse_layers, parse_size
from .records import head_json

_HEADS_AT_ONCE = 10_000
_OPTIONS = {"moe_layers": "--layers", "num_experts": "--experts", "top_k": "--top-k", "ttl_s": "--ttl"}


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
    config: Annotated[Path | None, file_option("A model's config.json, instead of the next three")] = None,
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
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="`maintain` deletes what is older: 90s, 30m, 12h, 7d", show_default="no limit"
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="`maintain` deletes the oldest beyond it, such as 500GB", show_default="no limit"
        ),
    ] = None,
    max_clock_skew: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS", help="Between the clocks of any two hosts that use it", show_default="0, for one host"
        ),
    ] = None,
    exist_ok: Annotated[bool, typer.Option(help="Accept the same dataset if it is there")] = True,
    as_json: Json = False,
) -> None:
    """Create an empty dataset for the routing of one model."""
    spec = spec_of(config, layers, experts, top_k)
    scheme = scheme_of(keys, partition_by, buckets)
    existed = is_dataset(uri)
    with _options_named():
        dataset = create_dataset(
            uri,
            spec,
            keys=scheme,
            keep=keep.value,
            ttl_s=None if ttl is None else parse_duration(ttl),
            max_bytes=None if max_bytes is None else parse_size(max_bytes),
            max_clock_skew_s=None if max_clock_skew is None else parse_duration(max_clock_skew),
            exist_ok=exist_ok,
        )
    if not as_json:
        output.show_line("exists already, with these settings" if existed else "created")
    _show_info(dataset.info(), as_json)


def info(uri: Uri, as_json: Json = False) -> None:
    """Show what a dataset is and what is in it."""
    _show_info(open_dataset(uri).info(), as_json)


def ls(
    uri: Uri,
    prefix: Prefix = None,
    long: Annotated[bool, typer.Option("--long", "-l", help="A line of facts for each record")] = False,
    as_json: Json = False,
) -> None:
    """List the request ids of a dataset."""
    dataset = open_dataset(uri)
    heads = _heads(dataset, prefix)
    if not long:
        _show_ids(heads, as_json)
    elif as_json:
        output.show_json([head_json(head) for head in heads])
    else:
        columns = ("id", "status", "tokens", "missing", "weights", "submitted", "run")
        output.show_table(
            columns, map(_head_cells, heads), optional=("run", "weights", "submitted", "missing", "tokens")
        )


def _heads(dataset: RoutingDataset, prefix: str | None) -> Iterator[RecordHead]:
    """What is there, some records in memory at a time; one that is deleted meanwhile is left out."""
    ids = dataset.ids(prefix)
    while some := list(islice(ids, _HEADS_AT_ONCE)):
        yield from (head for head in dataset.heads(some, on_missing="none") if head is not None)


def _show_ids(heads: Iterable[RecordHead], as_json: bool) -> None:
    """Ids alone; a terminal marks the dropped ones, and a note on stderr counts them."""
    seen: Counter[bool] = Counter()

    def counted() -> Iterator[RecordHead]:
        for head in heads:
            seen[head.status == "dropped"] += 1
            yield head

    if as_json:
        output.show_json([head.request_id for head in counted()])
    else:
        mark = "  dropped" if sys.stdout.isatty() else ""
        output.show_lines(
            output.printable(head.request_id) + (mark if head.status == "dropped" else "") for head in counted()
        )
    if seen[True]:
        output.show_note(
            f"{seen[True]:,} of these {seen.total():,} ids were dropped by their writer: `ls --long --json` says why"
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
            "routing": f"layers {shown_layers(spec.moe_layers)}; {spec.num_experts} experts, top-{spec.top_k}, "
            f"{spec.dtype}, {spec.topk_order} order; {spec.bytes_per_token} B a token",
            "ids": keys.rest if keys.buckets else keys.delimiter.join(keys.components),
            "keeps": "; ".join(_kept(info.format)),
            "directories": f"{info.partitions:,} by {', '.join(keys.components[: keys.partition_by])}",
            "shards": f"{info.shards:,}",
            "rows": f"{info.rows:,} puts and drops" if info.rows else "0",
            "size": output.shown_bytes(info.bytes),
            "delete marks": info.tombstone_files or None,
            "clocks": f"within {info.format.max_clock_skew_s:g} s",
            "format": f"version {info.format.format_version}",
        }
    )


def _kept(fmt: DatasetFormat) -> Iterator[str]:
    """What is kept of all that is put."""
    if fmt.keep == "last_turn":
        yield "the last turn only"
    if fmt.ttl_s is not None:
        yield f"up to {output.shown_duration(fmt.ttl_s)}"
    if fmt.max_bytes is not None:
        yield f"up to {output.shown_bytes(fmt.max_bytes)}"


def spec_of(config: Path | None, layers: str | None, experts: int | None, top_k: int | None) -> RoutingSpec:
    """The spec that the options say."""
    if config is not None:
        if layers is not None or experts is not None or top_k is not None:
            raise typer.BadParameter("says layers, experts and top-k already; leave those out", param_hint="--config")
        try:
            return RoutingSpec.from_config(json.loads(config.read_text("utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{config} is no JSON: {error}", param_hint="--config") from error
        except InvalidInputError as error:
            text = str(error).replace(BY_HAND, "--layers, --experts and --top-k")
            raise InvalidInputError(f"--config {config}: {text}") from error
    if layers is None or experts is None or top_k is None:
        given = {"--layers": layers, "--experts": experts, "--top-k": top_k}
        lacking = " and ".join(name for name, value in given.items() if value is None)
        raise typer.BadParameter("needed, unless a --config says it", param_hint=lacking)
    with _options_named():
        return RoutingSpec(moe_layers=tuple(parse_layers(layers)), num_experts=experts, top_k=top_k)


@contextmanager
def _options_named() -> Iterator[None]:
    """Errors of the library name the options that its arguments came from."""
    try:
        yield
    except InvalidInputError as error:
        text = str(error)
        for name, option in _OPTIONS.items():
            text = text.replace(f"{name}=", f"{option} ")
        raise type(error)(text) from error


def is_dataset(uri: str) -> bool:
    """Whether there is one."""
    with suppress(DatasetNotFoundError):
        open_dataset(uri)
        return True
    return False


def scheme_of(keys: Keys, partition_by: int | None, buckets: int | None) -> KeyScheme:
    """The key scheme that the options say."""
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
        output.column_time(head.rows[-1].t_submit),
        output.column_run(head.run_id),
    )
