"""All that the command line prints: tables for people, one line of JSON for machines, errors in one red line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from rr_dataset.clock import millis

EXIT_FAILED = 1
EXIT_FOUND_PROBLEMS = 3  # 2 is a usage error, which typer reports

_PIPE_WIDTH = 10_000  # a pipe has no edge to wrap at
_UNITS = ("B", "kB", "MB", "GB", "TB")
_TIMES = (("d", 86400), ("h", 3600), ("m", 60))


def show_json(value: Any) -> None:
    """One line of strict JSON on stdout."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def show_lines(lines: Iterable[str]) -> None:
    """Lines for people on stdout, never wrapped and without style: there may be a million."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


def show_line(text: str) -> None:
    """One line for people on stdout, never wrapped."""
    show_lines([text])


def show_facts(facts: Mapping[str, object]) -> None:
    """Names and values, one pair a line; values that are None or empty are left out."""
    shown = {name: str(value) for name, value in facts.items() if value not in (None, "")}
    width = max(map(len, shown))
    console = _console()
    for name, value in shown.items():
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", value), soft_wrap=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, optional: Sequence[str] = ()) -> None:
    """A table with one line a row; no value is cut or folded.

    optional: columns that a terminal too narrow for them does without, first these; a line then names them. A column
    of them without a value is no loss, and left out on any terminal. A pipe gets all.
    """
    cells = [list(columns), *([str(value) for value in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    shown = list(range(len(columns)))
    left_out = []
    if sys.stdout.isatty():
        shown = [i for i in shown if columns[i] not in optional or any(row[i] for row in cells[1:])]
        for name in optional:
            i = columns.index(name)
            if i in shown and sum(widths[j] + 2 for j in shown) - 2 > _console().width:
                shown.remove(i)
                left_out.append(name)
    console = _console()
    for number, row in enumerate(cells):
        line = "  ".join(row[i] + " " * (widths[i] - cell_len(row[i])) for i in shown).rstrip()
        console.print(Text(line, style="" if number else "bold"), soft_wrap=True)
    if left_out:
        show_line(f"not shown for want of room: {', '.join(left_out)}; a wider terminal, a pipe or --json shows all")


def show_sentences(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table whose last column is prose, folded within its column."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=name != columns[-1])
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    _console().print(table)


def show_error(error: Exception, said: Mapping[str, str] | None = None) -> None:
    """One red line on stderr. said: the library's words, and what a shell says instead."""
    text = str(error)
    for words, instead in (said or {}).items():
        text = text.replace(words, instead)
    _complain(f"error: {text}", "red")


def show_note(text: str) -> None:
    """One line on stderr beside the result."""
    _complain(f"note: {text}", "yellow")


def show_warning(
    message: Warning | str,
    category: type[Warning],  # noqa: ARG001  # the signature is that of `warnings.showwarning`
    filename: str,  # noqa: ARG001
    lineno: int,  # noqa: ARG001
    file: TextIO | None = None,  # noqa: ARG001
    line: str | None = None,  # noqa: ARG001
) -> None:
    """One yellow line on stderr; stands in for `warnings.showwarning`."""
    _complain(f"warning: {message}", "yellow")


def _complain(text: str, style: str) -> None:
    Console(stderr=True).print(Text(printable(" ".join(text.split())), style=style), soft_wrap=True)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while long work runs, gone when it ends; nothing where stderr is no terminal.

    The work calls what this gives with the bytes done and the bytes in all.
    """
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def ask(question: str) -> bool:
    """Ask on stderr, so that stdout stays for the result; no answer is a no."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def table_width() -> int:
    """Columns that a table for people may take: the terminal's, or a usual one's where there is none."""
    return _console().width if sys.stdout.isatty() else 120


def printable(text: str) -> str:
    """`text` with control characters spelled out: an id must not steer the terminal it is shown on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown_bytes(size: float) -> str:
    """`12345678` -> `12.3 MB`."""
    unit = 0
    while size >= 999.95 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size:.0f} B"


def shown_duration(seconds: float) -> str:
    """`604800` -> `7d`, in the largest unit that divides it."""
    unit, size = next((each for each in _TIMES if seconds and not seconds % each[1]), ("s", 1))
    return f"{seconds / size:.15g}{unit}"


def shown_time(stamp: int) -> str:
    """A clock stamp as local time."""
    return _local(stamp).isoformat(sep=" ", timespec="milliseconds")


def column_time(stamp: int) -> str:
    """As `shown_time`, for a column: a terminal gets seconds and no offset."""
    if not sys.stdout.isatty():
        return shown_time(stamp)
    return _local(stamp).replace(tzinfo=None).isoformat(sep=" ", timespec="seconds")


def column_run(run_id: str) -> str:
    """A run id for a column: a terminal gets its first eight characters."""
    return printable(run_id[:8] if sys.stdout.isatty() else run_id)


def shown_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """`[(0, 4), (6, 8)]` -> `0:4, 6:8`."""
    return ", ".join(f"{start}:{stop}" for start, stop in ranges)


def _local(stamp: int) -> datetime:
    return datetime.fromtimestamp(millis(stamp) / 1000, timezone.utc).astimezone()


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
