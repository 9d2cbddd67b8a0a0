"""What a kill leaves behind, for the tests of recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rr_dataset as rr
from rr_dataset.clock import HybridClock, wall_ms
from rr_dataset.recovery import SpoolReport, adopt
from rr_dataset.spool import Spool
from rr_dataset.spool_place import spools_of
from tests.engines import SPEC, experts
from tests.spooled import WRITER, make_spool, publisher_of, put


def adopt_all(dataset: Any, base: Path) -> list[SpoolReport]:
    """What the worker of a new writer does."""
    return [report for report in adopt(spools_of(base), publisher_of(dataset)) if report is not None]


def die(spool: Spool) -> Path:
    """What a kill of engine and worker leaves."""
    spool.close(remove=False)
    return spool.directory


def contents(directory: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


def old(spool: Spool) -> None:
    """From here on the spool stamps as it did eight days ago; tombstones live for seven."""
    spool._clock = HybridClock(lambda: wall_ms() - 8 * 86400 * 1000)


def two_dead_spools(base: Path, dataset: Any) -> list[Path]:
    """Two spools of two datasets; the second dataset is `base / "other"`."""
    other = rr.create_dataset(base / "other", SPEC)
    dead = []
    for i, (writer, of) in enumerate([(WRITER, dataset), ("f" * 16, other)]):
        spool = make_spool(base, of, writer)
        put(spool, of, f"a:{i}", experts(i))
        dead.append(die(spool))
    return dead


def outcomes(reports: list[SpoolReport]) -> list[tuple[str, str, int]]:
    return [(Path(report.path).name, report.outcome, report.records) for report in reports]
