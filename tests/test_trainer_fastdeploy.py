"""The reader of FastDeploy's contract: its keys, its dtype, its padding, and -1 wherever there is no routing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rr_dataset as rr
from rr_dataset.trainer.fastdeploy import RoutingReader
from tests.engines import options
from tests.fastdeploy_engine import SPEC


def routing(seed: int, tokens: int, spec: rr.RoutingSpec = SPEC) -> Any:
    rng = np.random.default_rng(seed)
    return rng.integers(0, spec.num_experts, (spec.num_layers, tokens, spec.top_k)).astype(spec.dtype)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("reader")
    with rr.RoutingWriter(base / "ds", options(base), create=SPEC) as writer:
        writer.put("a:1:0:0", routing(1, 10), "LTK", missing=[(2, 4)])
        writer.put("a:2:0:0", routing(2, 7), "LTK")
        writer.put("a:3:0:0", routing(3, 7)[1:2], "LTK", layers=[2])
        writer.drop("a:4:0:0", "lost")
    return base / "ds"


def test_fused_keys(place: Path) -> None:
    reader = RoutingReader(place, use_fused_put=True)
    array = reader.get("a:1:0:0", pad_to=16)
    assert (array.shape, array.dtype) == ((4, 16, 2), np.uint8)
    assert array.flags.writeable
    expected = np.full((4, 16, 2), 255, np.uint8)  # the third is a dense layer
    expected[[0, 1, 3], :10] = routing(1, 10)
    expected[:, 2:4] = 255
    np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(reader.get("a:1:0:0"), expected[:, :10])
    np.testing.assert_array_equal(reader.get("a:2:0:0")[[0, 1, 3]], routing(2, 7))


def test_keys_by_layer(place: Path) -> None:
    reader = RoutingReader(place, pad_to=12)
    for number, at in ((0, 0), (1, 1), (3, 2)):
        array = reader.get(f"a:2:0:0_{number}")
        assert array.shape == (12, 2)
        np.testing.assert_array_equal(array[:7], routing(2, 7)[at])
        assert (array[7:] == 255).all()
    np.testing.assert_array_equal(reader.get("a:2:0:0_1", pad_to=7), routing(2, 7)[1])
    for key in ("a:2:0:0_2", "a:2:0:0", "a:2:0:0_x", "a:2:0:0_9"):
        with pytest.raises(rr.InvalidRoutingError, match="expected <id>_<layer>"):
            reader.get(key)


def test_layers_that_are_not_there_are_minus_one(place: Path) -> None:
    array = RoutingReader(place, use_fused_put=True).get("a:3:0:0")
    np.testing.assert_array_equal(array[1], routing(3, 7)[1])
    assert (array[[0, 2, 3]] == 255).all()


def test_many_are_padded_to_the_longest(place: Path) -> None:
    reader = pickle.loads(pickle.dumps(RoutingReader(rr.open_dataset(place))))
    arrays = reader.get_many(["a:2:0:0", "a:1:0:0"])
    assert arrays.shape == (2, 4, 10, 2)
    np.testing.assert_array_equal(arrays[0, [0, 1, 3], :7], routing(2, 7))
    assert (arrays[0, :, 7:] == 255).all()
    assert reader.get_many(["a:2:0:0"], pad_to=20).shape == (1, 4, 20, 2)


def test_what_is_not_there_raises(place: Path) -> None:
    reader = RoutingReader(place, use_fused_put=True)
    with pytest.raises(rr.RecordDroppedError, match="lost"):
        reader.get("a:4:0:0")
    with pytest.raises(rr.RecordNotFoundError):
        reader.get("a:9:0:0")
    with pytest.raises(rr.InvalidRoutingError, match="has 10 tokens: expected at most pad_to=9"):
        reader.get("a:1:0:0", pad_to=9)


def test_the_dtype_has_room_for_minus_one(tmp_path: Path) -> None:
    spec = rr.RoutingSpec((0, 1), num_experts=256, top_k=2)
    with rr.RoutingWriter(tmp_path / "ds", options(tmp_path), create=spec) as writer:
        writer.put("a:1:0:0", np.full((2, 3, 2), 255, np.uint8), "LTK")
    array = RoutingReader(tmp_path / "ds", use_fused_put=True).get("a:1:0:0", pad_to=4)
    assert array.dtype == np.uint16
    assert (array[:, :3] == 255).all()
    assert (array[:, 3:] == 65535).all()
