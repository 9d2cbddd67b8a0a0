"""The texts of options into the values of the library, and the options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

_LAYER_RUN = re.compile("([0-9]+)(?:-([0-9]+))?")
_DURATION = re.compile("([0-9]+(?:[.][0-9]+)?)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_TOKEN_RANGE = re.compile("(-?[0-9]+)?:(-?[0-9]+)?")
_SIZE = re.compile("([0-9]+)[ ]*([kmgt]?)(i?)b?", re.IGNORECASE)
_PART = re.compile("([0-9]+)/([0-9]+)")


def parse_layers(text: str) -> list[int]:
    """`0,3-5` -> [0, 3, 4, 5]."""
    layers: list[int] = []
    for run in text.split(","):
        match = _LAYER_RUN.fullmatch(run.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise typer.BadParameter(f"{run!r}: expected layer ids such as 3-60 or 0,2,5-7")
        layers += range(first, last + 1)
    return layers


def parse_tokens(text: str) -> slice:
    """`10:20` -> slice(10, 20), `-8:` -> slice(-8, None); either end may be left out."""
    match = _TOKEN_RANGE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r}: expected a token range such as 0:128, :128, 128: or -128:")
    start, stop = (int(end) if end else None for end in match.groups())
    if start is not None and stop is not None and (start < 0) == (stop < 0) and start > stop:
        raise typer.BadParameter(f"{text!r}: expected a token range that does not end before it starts")
    return slice(start, stop)


def parse_duration(text: str) -> float:
    """`90`, `90s`, `1.5m`, `12h`, `7d` -> seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r}: expected a time such as 90s, 30m, 12h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def parse_size(text: str) -> int:
    """`64MiB` -> 67108864, `1GB` -> 1000000000, `100` -> 100."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2].lower() or " ") if match else 0
    if not size:
        raise typer.BadParameter(f"{text!r}: expected a size such as 64MiB or 1GB")
    return size


def parse_part(text: str) -> tuple[int, int]:
    """`2/3` -> (2, 3), the second of three parts."""
    match = _PART.fullmatch(text.strip())
    part = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise typer.BadParameter(f"{text!r}: expected I/N such as 1/4, with I from 1 to N")
    return part


def read_ids(path: Path) -> list[str]:
    """Request ids, one a line; empty lines are none. A line ends with a newline, or a carriage return and a newline."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is no UTF-8: {error}", param_hint="--ids-file") from error
    return [line for line in text.replace("\r\n", "\n").split("\n") if line]


def file_option(text: str) -> Any:
    """An option that takes a file which is there; text: its help."""
    return typer.Option(exists=True, dir_okay=False, metavar="FILE", help=text, show_default=False)


Uri = Annotated[str, typer.Argument(metavar="URI", help="The dataset: a path, file:// or s3://", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON, for machines")]
Prefix = Annotated[
    str | None, typer.Option(metavar="PREFIX", help="Only ids that begin with these components", show_default=False)
]
PrefixOfDirectories = Annotated[
    str | None, typer.Option(metavar="PREFIX", help="Only directories that may hold such ids", show_default=False)
]
IdsFile = Annotated[Path | None, file_option("The ids in this file, one a line")]
Layers = Annotated[str | None, typer.Option(metavar="LIST", help="Layer ids, such as 0,3-5", show_default="all")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would be done")]
