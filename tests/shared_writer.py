"""A writer and its dataset that the tests of a file share, each with ids of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from tests.engines import SPEC, options, spools


def shared_writer(**changes: Any) -> tuple[Any, Any, Any, Any]:
    """The fixtures `base`, `writer`, `dataset` and `name` of a file; changes: of the writer's options."""
    names = count()

    @pytest.fixture(scope="module")
    def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Holds the dataset `ds`, and `spools`."""
        return tmp_path_factory.mktemp("writer")

    @pytest.fixture(scope="module")
    def writer(base: Path) -> Iterator[rr.RoutingWriter]:
        """For the tests that leave it usable."""
        (base / "spools").mkdir()
        with rr.RoutingWriter(base / "ds", options(base / "spools", **changes), create=SPEC) as made:
            yield made
        assert spools(base / "spools") == []

    @pytest.fixture(scope="module")
    def dataset(base: Path, writer: rr.RoutingWriter) -> rr.RoutingDataset:
        return rr.open_dataset(base / "ds")

    @pytest.fixture
    def name(writer: rr.RoutingWriter) -> str:
        """A data id that no other test uses; what others put is flushed and reported."""
        writer.flush()
        return f"t{next(names)}"

    return base, writer, dataset, name
