"""Write the golden files of the present format: `python tests/golden/make.py`, once for each format number.

format-<number>/<scheme>-<compression>/ is a dataset, and <the same>.json the values of its rows, bytes in hex. They are
written by the version that introduces a format and never again: later versions must read them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent
sys.path[:0] = [str(GOLDEN.parent), str(GOLDEN.parents[1])]

from test_foreign_reader import CASES, expected_rows, written  # noqa: E402 -- needs the path

from rr_dataset.layout import FORMAT_VERSION  # noqa: E402 -- likewise


def as_json(value: Any) -> Any:
    return value.tobytes().hex() if isinstance(value, np.ndarray) else value


def main() -> None:
    for scheme, partition_by, compression in CASES:
        root = GOLDEN / f"format-{FORMAT_VERSION}" / f"{scheme}-{compression}"
        shutil.rmtree(root, ignore_errors=True)
        written(root, scheme, partition_by, compression)
        shutil.rmtree(root / "_rr" / "tmp")
        rows = [{name: as_json(value) for name, value in row.items()} for row in expected_rows(scheme)]
        root.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
