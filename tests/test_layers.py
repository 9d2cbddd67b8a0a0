"""A module imports lower rows of the table, or modules to its left in its own row, and an engine process stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rr_dataset"
ENGINE = 1
FRONTS = 5
FACADE = "__init__"

ROWS = (
    (
        "errors",
        "options",
        "clock",
        "buffers",
        "record",
        "keys",
        "layout",
        "live",
        "selection",
        "padding",
        "masked",
        "contracts",
    ),
    (
        "slab",
        "own_locks",
        "spool_place",
        "spool",
        "supervisor",
        "receipt",
        "intake",
        "feed",
        "reserved",
        "items",
        "writer",
        "capture",
    ),
    ("schema", "shard"),
    ("storage",),
    (
        "at_once",
        "walk",
        "tombstones",
        "publish",
        "description",
        "delete",
        "snapshot",
        "payload",
        "lookup",
        "packed",
        "stacked",
        "follow",
        "far_source",
        "arrow_store",
        "arrow_view",
        "dataset",
        "merge",
        "compact_plan",
        "compactor",
        "compact",
        "folding",
        "garbage",
        "maintain",
        "verify",
        "stats",
        "interchange",
    ),
    ("entries", "publisher", "recovery", "worker", "doctor", "trainer", "demo", "cli"),
)
# What each row may import besides the standard library. The fronts may import anything.
THIRD_PARTY = (
    {"numpy"},
    {"numpy", "xxhash"},
    {"numpy", "xxhash", "pyarrow"},
    {"numpy", "fsspec", "s3fs", "aiobotocore", "aiohttp", "botocore", "obstore"},
    {"numpy", "xxhash", "pyarrow"},
)
# The engine process imports the module a tensor came from when it sees one; nothing else is imported in a function.
LAZY_IMPORTS = {"capture"}
HEAVY = ("pyarrow", "fsspec", "paddle", "torch")

PLACE = {unit: (row, column) for row, units in enumerate(ROWS) for column, unit in enumerate(units)}


def sources() -> list[tuple[str, Path]]:
    """Every source file with its unit: a module, or the first folder below the package."""
    found = []
    for root, prefix in ((PACKAGE, ()), (ROOT / "cli", ("cli",))):
        for path in sorted(root.rglob("*.py")):
            parts = (*prefix, *path.relative_to(root).with_suffix("").parts)
            found.append((parts[0], path))
    return found


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """The absolute names of all modules imported anywhere in `tree`, also under TYPE_CHECKING."""
    inside = path.is_relative_to(PACKAGE)
    package = ("rr_dataset", *path.relative_to(PACKAGE).parts[:-1]) if inside else ("rr_dataset", "cli")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def faults(unit: str, path: Path, text: str) -> list[str]:
    """What is wrong with the imports of one source file."""
    tree = ast.parse(text)
    row, column = PLACE[unit]
    wrong = []
    for name in imports(tree, path):
        top, _, rest = name.partition(".")
        if top == "rr_dataset":
            target = rest.partition(".")[0]
            if target not in PLACE:
                if row != FRONTS:
                    wrong.append(f"{name}: no module of the table; only the fronts import the facade")
                continue
            other_row, other_column = PLACE[target]
            if target != unit and (other_row, other_column) > (row, column):
                wrong.append(f"{name}: not below and not to the left")
            if ENGINE == other_row != row and row != FRONTS:
                wrong.append(f"{name}: only the fronts join the engine's row with the rest")
        elif top not in sys.stdlib_module_names and row != FRONTS and top not in THIRD_PARTY[row]:
            wrong.append(f"{name}: row {row} may use {sorted(THIRD_PARTY[row])}")
    if unit not in LAZY_IMPORTS and row != FRONTS:
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                nested = [node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom)]
                wrong += [f"line {node.lineno}: import inside {function.name}()" for node in nested]
    return wrong


def test_every_module_has_a_place() -> None:
    units = {unit for unit, _ in sources()} - {FACADE}
    assert {"errors", "record", "dataset"} <= units
    assert units <= set(PLACE), f"give these a row: {sorted(units - set(PLACE))}"


@pytest.mark.parametrize(("unit", "path"), [pytest.param(u, p, id=str(p.relative_to(ROOT))) for u, p in sources()])
def test_imports_follow_the_rows(unit: str, path: Path) -> None:
    if unit != FACADE:
        assert faults(unit, path, path.read_text()) == []


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("record", "from rr_dataset.live import assemble"),
        ("record", "import xxhash"),
        ("writer", "from rr_dataset.shard import read_index"),
        ("writer", "import pyarrow as pa"),
        ("shard", "from rr_dataset.spool import Slab"),
        ("shard", "import fsspec"),
        ("dataset", "from rr_dataset import RoutingSpec"),
        ("dataset", "from .worker import main"),
        ("dataset", "def f():\n    import json"),
        ("publish", "from rr_dataset import dataset"),
    ],
)
def test_a_wrong_import_is_found(unit: str, text: str) -> None:
    assert faults(unit, PACKAGE / f"{unit}.py", text)


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("live", "from rr_dataset.record import Row\nimport numpy as np"),
        ("dataset", "from rr_dataset import live, publish"),
        ("worker", "from rr_dataset.writer import RoutingWriter\nfrom rr_dataset.publish import publish_slab"),
        ("demo", "import rr_dataset as rr\nimport rich"),
    ],
)
def test_a_right_import_passes(unit: str, text: str) -> None:
    assert faults(unit, PACKAGE / f"{unit}.py", text) == []


IMPORTS = "import rr_dataset"
RUNS = """
import numpy as np, rr_dataset as rr
options = rr.WriterOptions(spool_bytes=4 << 20, slab_bytes=1 << 20)
with rr.RoutingWriter("{dataset}", options, create=rr.RoutingSpec(range(4), 16, 2)) as writer:
    writer.put("a:0:0:0", np.zeros((3, 4, 2), np.int64)).wait()
    writer.delete_prefix("a")
    writer.flush(), writer.stats()
"""


@pytest.mark.parametrize("program", [IMPORTS, RUNS], ids=["import", "run"])
def test_an_engine_process_stays_light(program: str, tmp_path: Path) -> None:
    code = f"import sys\n{program.format(dataset=tmp_path / 'd')}\nprint(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
