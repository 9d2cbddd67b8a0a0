"""FastDeploy's local store into a dataset: files that paddle wrote, files that nobody should trust."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rr_dataset as rr
from rr_dataset.interchange.pdtensor import read_pdtensor

# What paddle.save of paddlepaddle 3.3.1 wrote: tensors and numpy arrays, per layer and fused, padded to 12 tokens.
STORE = Path(__file__).parent / "data" / "fastdeploy_store.zip"
STORE_SPEC = rr.RoutingSpec((2, 3, 4), num_experts=100, top_k=2)
STORED_TOKENS = {  # tokens and seed of each record
    "math_0_epoch_1:0:0:0": (9, 0),
    "math_0_epoch_1:1:0:0": (12, 1),
    "math_0_epoch_1:2:0:0": (5, 2),
    "wide:0:0:0": (7, 3),
    "wide:1:0:0": (6, 4),
    "gap:0:0:0": (8, 5),
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with zipfile.ZipFile(STORE) as archive:
        archive.extractall(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    rr.create_dataset(tmp_path / "imported", STORE_SPEC)
    return tmp_path / "imported"


# --- import


def test_what_paddle_wrote(store: Path, uri: Path) -> None:
    report = rr.import_fastdeploy(uri, store, weight_version="step-1", run_id="run-9")
    assert (report.imported, report.tokens, report.existing, report.refused) == (6, 47, 0, ())
    dataset = rr.open_dataset(uri)
    assert set(dataset.ids()) == set(STORED_TOKENS)
    for request_id, (tokens, seed) in STORED_TOKENS.items():
        record = dataset.get(request_id)
        layers, positions, slots = np.arange(3)[:, None, None], np.arange(tokens)[None, :, None], np.arange(2)
        wanted = (layers * 3 + positions * 7 + slots + seed) % 100
        if request_id.startswith("gap"):
            wanted[:, 3:5] = 0
        np.testing.assert_array_equal(record.routed_experts, wanted)
        assert record.missing == (((3, 5),) if request_id.startswith("gap") else ())
        assert (record.status, record.run_id) == ("complete", "run-9")
        assert {text for _, _, text in record.weights} == {"step-1"}
    assert rr.verify(uri).sound
    assert not list((uri / "_rr" / "tmp").glob("*"))


def test_an_import_can_be_run_again(store: Path, uri: Path) -> None:
    shutil.move(store / "wide:0:0:0", store.parent)
    assert rr.import_fastdeploy(uri, store).imported == 5
    shutil.move(store.parent / "wide:0:0:0", store)
    report = rr.import_fastdeploy(uri, store)
    assert (report.imported, report.existing) == (1, 5)
    assert rr.open_dataset(uri).info().rows == 6


def test_progress_ends_at_all_bytes(store: Path, uri: Path) -> None:
    told: list[tuple[int, int]] = []
    rr.import_fastdeploy(uri, store, progress=lambda done, total: told.append((done, total)))
    size = sum(path.stat().st_size for path in store.rglob("*.pdtensor"))
    assert (len(told), told[-1], told) == (6, (size, size), sorted(told))


def as_paddle(array: npt.NDArray[Any]) -> bytes:
    """What paddle.save makes of a numpy array, byte for byte but for the order of equal texts."""
    return pickle.dumps(array, protocol=4)


def put_layers(store: Path, request_id: str, *arrays: npt.NDArray[Any]) -> Path:
    folder = store / request_id
    folder.mkdir(parents=True, exist_ok=True)
    for i, array in enumerate(arrays):
        (folder / f"layer_{i}.pdtensor").write_bytes(as_paddle(array))
    return folder


def layer(tokens: int, dtype: str = "uint8", pad: int = 3) -> npt.NDArray[Any]:
    """[tokens + pad, 2]: routing, then padding."""
    made = np.full((tokens + pad, 2), np.array(-1).astype(dtype), dtype)
    made[:tokens] = np.arange(2 * tokens).reshape(tokens, 2) % 90
    return made


def only_reason(uri: Path, store: Path) -> str:
    report = rr.import_fastdeploy(uri, store)
    assert (report.imported, len(report.refused)) == (0, 1)
    return report.refused[0].reason


def mixed(*lengths: int) -> list[npt.NDArray[Any]]:
    return [layer(length, pad=9 - length) for length in lengths]


def with_value(value: int, at: tuple[Any, ...]) -> list[npt.NDArray[Any]]:
    arrays = [layer(5, "int32") for _ in range(3)]
    arrays[1][at] = value
    return arrays


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        (mixed(5, 5, 4), "not certain: 4 tokens in layer 2, 5 in others"),
        (mixed(0, 0, 0), "no token"),
        (mixed(5, 5), "layer_2.pdtensor is absent"),
        ([*mixed(5, 5, 5), layer(5, pad=4)], "4 layers"),
        ([layer(5), layer(5), layer(5, pad=2)], "different shapes"),
        (with_value(100, (2, 1)), "ids from 0 to 100, of 100 experts"),
        (with_value(-1, (2, 1)), "ids from -1 to"),
        (with_value(-1, (2,)), "different gaps"),
        ([np.zeros((5, 3), np.uint8)] * 3, "3 experts a token"),
        ([np.zeros(5, np.uint8)] * 3, "expected 2 dimensions"),
        ([np.zeros((5, 2), np.float32)] * 3, "layer_0.pdtensor: no array"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_certain_is_refused(uri: Path, tmp_path: Path, arrays: list[Any], reason: str) -> None:
    put_layers(tmp_path / "s", "a:0:0:0", *arrays)
    assert reason in only_reason(uri, tmp_path / "s")


def test_a_layer_that_is_none_at_the_end_is_left_out(uri: Path, tmp_path: Path) -> None:
    put_layers(tmp_path / "s", "a:0:0:0", *mixed(5, 5, 5, 0))  # 46 layers for 45: counted to the model's end
    assert rr.import_fastdeploy(uri, tmp_path / "s").imported == 1
    assert rr.open_dataset(uri).get("a:0:0:0").num_tokens == 5


def test_padding_that_may_be_an_expert(tmp_path: Path) -> None:
    one = rr.RoutingSpec((2,), num_experts=256, top_k=1)
    rr.create_dataset(tmp_path / "one", one)
    put_layers(tmp_path / "s", "a:0:0:0", np.array([[3], [4], [255], [255]], np.uint8))
    assert "255 may be an expert or padding" in only_reason(tmp_path / "one", tmp_path / "s")
    rr.create_dataset(tmp_path / "two", rr.RoutingSpec((2,), num_experts=256, top_k=2))
    shutil.rmtree(tmp_path / "s")
    put_layers(tmp_path / "s", "a:0:0:0", np.array([[3, 4], [255, 7], [255, 255]], np.uint8))  # no token has one twice
    assert rr.import_fastdeploy(tmp_path / "two", tmp_path / "s").imported == 1
    assert rr.open_dataset(tmp_path / "two").get("a:0:0:0").routed_experts.tolist() == [[[3, 4], [255, 7]]]


def test_places_that_hold_no_record(uri: Path, store: Path) -> None:
    (store / "notes.txt").touch()
    put_layers(store, "chatcmpl-a", *mixed(5, 5, 5))
    (store / "wide:0:0:0" / "layer_0.pdtensor").write_bytes(b"")
    (store / "other").mkdir()
    (store / "other" / "name.pdtensor").write_bytes(as_paddle(np.zeros((3, 4, 2), np.uint8)))
    report = rr.import_fastdeploy(uri, store)
    assert report.imported == 5
    refused = {each.path: each.reason for each in report.refused}
    assert set(refused) == {"./notes.txt", "chatcmpl-a", "wide:0:0:0", "other"}
    assert "more than one record" in refused["wide:0:0:0"]
    assert "engine's own id" in refused["chatcmpl-a"]
    assert "neither" in refused["other"]


def test_ids_with_a_slash(uri: Path, tmp_path: Path) -> None:
    put_layers(tmp_path / "s", "x/y:0:0:0", *mixed(5, 5, 5))
    fused = tmp_path / "s" / "p/q:1:0:0" / "p/q:1:0:0.pdtensor"
    fused.parent.mkdir(parents=True)
    fused.write_bytes(as_paddle(np.stack(mixed(4, 4, 4))))
    assert rr.import_fastdeploy(uri, tmp_path / "s").refused == ()
    assert set(rr.open_dataset(uri).ids()) == {"x/y:0:0:0", "p/q:1:0:0"}


def test_no_folder(uri: Path, tmp_path: Path) -> None:
    with pytest.raises(rr.InvalidInputError, match="local_store_dir"):
        rr.import_fastdeploy(uri, tmp_path / "none")


def test_large_imports_go_in_slabs(uri: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rr_dataset.interchange.imported.SLAB_BYTES", 70)
    for i in range(5):
        put_layers(tmp_path / "s", f"a:{i}:0:0", *mixed(5, 5, 5))  # 30 bytes
    assert rr.import_fastdeploy(uri, tmp_path / "s").imported == 5
    assert rr.open_dataset(uri).info().shards == 3


# --- files that are not trusted


class Evil:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Evil(os.mkdir, "/tmp/rr-evil"), 4),
        pickle.dumps(Evil(eval, "1/0"), 4),
        pickle.dumps([np.zeros(3, np.uint8)], 4),
        pickle.dumps(np.array(["text"]), 4),
        pickle.dumps(np.array([object], dtype=object), 4),
        pickle.dumps(np.zeros(3, ">u2"), 4),
        pickle.dumps(np.dtype("u1"), 4),
        pickle.dumps(np.ndarray, 4),
        pickle.dumps(("name", 3), 4),
        pickle.dumps(np.zeros((2, 2), np.uint8), 4)[:-8],
        pickle.dumps(np.zeros((2, 2), np.uint8), 4).replace(b"K\x02K\x02\x86", b"K\x02K\x09\x86"),
        b"",
        b"\x80\x04.",
        b"cposix\nsystem\n(S'true'\ntR.",
    ],
    ids=range(14),
)
def test_nothing_in_a_file_runs(content: bytes) -> None:
    with pytest.raises(rr.FormatError, match=r"no array that paddle\.save wrote"):
        read_pdtensor(content)
    assert not Path("/tmp/rr-evil").exists()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
def test_arrays_come_back(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for made in (array, np.asfortranarray(array), array.transpose(1, 0, 2)):
        np.testing.assert_array_equal(read_pdtensor(as_paddle(made)), made)


def test_paddle_itself_agrees() -> None:
    paddle = pytest.importorskip("paddle")
    for made in (np.arange(12).reshape(2, 6).astype("uint8"), np.arange(4).astype("int32")):
        for value in (made, paddle.to_tensor(made)):
            file = io.BytesIO()
            paddle.save(value, file)
            np.testing.assert_array_equal(read_pdtensor(file.getvalue()), made)
