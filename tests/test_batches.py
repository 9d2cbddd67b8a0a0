from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored import Stored

import rr_dataset as rr
from rr_dataset.trainer.batches import RoutingBatches
from rr_dataset.trainer.collate import collate
from rr_dataset.trainer.samples import RoutingSamples, SampleOptions, whole_batches

IDS = [f"math_{prompt}:{sample}:0:0" for prompt in range(3) for sample in range(2)]
BATCHES = [[0, 1, 2, 3], [5, 4]]
TIMEOUT_S = 120


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    stored = Stored(tmp_path / "d")
    for request_id in IDS:
        stored.put(request_id, 6)
    return stored


def batches(stored: Stored, **options: Any) -> RoutingBatches:
    return RoutingBatches(RoutingSamples(stored.root, IDS, SampleOptions(**options)))


def check(stored: Stored, found: list[Any]) -> None:
    assert [each["request_id"] for each in found] == [[IDS[i] for i in batch] for batch in BATCHES]
    for batch in found:
        want = np.stack([stored.dataset.get(each).routed_experts for each in batch["request_id"]])
        assert np.array_equal(np.asarray(batch["routed_experts"]), want)
        assert np.asarray(batch["present"]).shape == want.shape[:1] + want.shape[2:3]


def test_records_are_views_of_one_array(stored: Stored) -> None:
    made: list[Any] = []

    def empty(shape: tuple[int, ...], dtype: str) -> Any:
        made.append(np.full(shape, 7, dtype))
        return made[-1]

    stacked = stored.dataset.get_stacked([IDS[1], IDS[0], IDS[1]], [4, 9], slice(1, 3), empty)
    assert stacked.routed_experts is made[0]
    assert stacked.routed_experts.shape == (3, 2, 2, 2)
    for record, experts in zip(stacked.records, stacked.routed_experts, strict=True):
        assert np.shares_memory(record.routed_experts, experts)
        assert np.array_equal(experts, stored.dataset.get(record.request_id, [4, 9], slice(1, 3)).routed_experts)
    assert stored.dataset.get_stacked([]).routed_experts.shape == (0, 4, 0, 2)


def test_other_lengths_are_an_error_that_names_them(stored: Stored) -> None:
    stored.put("long:0", 9)
    with pytest.raises(rr.InvalidRoutingError, match="'long:0' has 9 rows and 'math_0:0:0:0' has 6"):
        stored.dataset.get_stacked([IDS[0], "long:0"])
    last_two = [slice(4, 6), slice(7, 9)]
    stacked = stored.dataset.get_stacked([IDS[0], "long:0"], None, last_two)
    assert np.array_equal(stacked.routed_experts[1], stored.dataset.get("long:0").routed_experts[:, 7:])


def test_missing_tokens_are_zero_bytes_whatever_the_array_held(stored: Stored) -> None:
    stored.put("gap:0", 4, missing=((1, 3),))
    stacked = stored.dataset.get_stacked(["gap:0"], empty=lambda shape, dtype: np.full(shape, 9, dtype))
    assert not stacked.routed_experts[0, :, 1:3].any()
    assert np.array_equal(stacked.routed_experts[0], stored.dataset.get("gap:0").routed_experts)


def test_options_hold_for_batches_too(stored: Stored) -> None:
    plain = batches(stored)[[0, 1]]
    turned = batches(stored, layout="TLK", dtype="int32", vectors=True)[[0, 1]]
    assert np.array_equal(turned["routed_experts"], plain["routed_experts"].transpose(0, 2, 1, 3))
    assert (turned["routed_experts"].dtype, turned["token_ids"].shape) == (np.int32, (2, 6))
    assert plain["number"].dtype == np.int64
    check(stored, [pickle.loads(pickle.dumps(batches(stored)))[batch] for batch in BATCHES])


def test_a_collate_function_makes_the_batch_of_records(stored: Stored) -> None:
    stored.put("long:0", 9)
    samples = RoutingSamples(stored.root, [*IDS, "long:0"])
    batch = RoutingBatches(samples, partial(collate, spec=stored.spec))[[0, 6]]
    assert batch.routed_experts.shape == (2, 9, 4, 2)
    refs = RoutingSamples(stored.root, refs=[])
    with pytest.raises(rr.InvalidInputError, match="refs"):
        RoutingBatches(refs)


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_gets_what_was_read_into_shared_memory(workers: int, stored: Stored) -> None:
    data = pytest.importorskip("torch.utils.data")
    how = {"num_workers": workers, "timeout": TIMEOUT_S if workers else 0}
    found = list(data.DataLoader(batches(stored), batch_size=None, sampler=BATCHES, **how))
    check(stored, found)
    assert all(batch["routed_experts"].is_shared() == bool(workers) for batch in found)


def test_in_a_worker_nothing_is_copied(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("torch.utils.data.get_worker_info", lambda: "a worker")
    experts = batches(stored)[[0, 1]]["routed_experts"]
    assert isinstance(experts, torch.Tensor)
    assert experts.is_shared()
    assert experts.dtype == torch.uint8


class Weighed(RoutingBatches):
    """Each batch tells how much private memory its worker has."""

    def __getitem__(self, indices: Any) -> Any:
        batch = super().__getitem__(indices)
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        batch["private"] = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
        return batch


def test_a_worker_keeps_nothing_of_what_it_gave(tmp_path: Path) -> None:
    """32 batches of 4 MB: its private memory does not grow by as much as two."""
    data = pytest.importorskip("torch.utils.data")
    stored = Stored(tmp_path / "large")
    ids = [f"a:{number}:0:0" for number in range(4)]
    for request_id in ids:
        stored.put(request_id, 1 << 18)
    made = Weighed(RoutingSamples(stored.root, ids, SampleOptions(present="none")))
    how = {"num_workers": 1, "timeout": TIMEOUT_S, "sampler": [[number % 4, (number + 1) % 4] for number in range(32)]}
    private = [batch["private"] for batch in data.DataLoader(made, batch_size=None, **how)]
    assert max(private) - private[1] < 2 * (4 << 20)


@pytest.mark.parametrize("workers", [0, 2])
def test_paddle_takes_whole_batches(workers: int, stored: Stored) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of compilers it does not find
        paddle = pytest.importorskip("paddle")
        io = pytest.importorskip("paddle.io")
    how = {"num_workers": workers, "timeout": TIMEOUT_S, "places": paddle.CPUPlace()}
    check(stored, list(io.DataLoader(batches(stored), **how, **whole_batches(BATCHES))))


def test_in_a_worker_of_paddle_nothing_is_copied(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        io = pytest.importorskip("paddle.io")
    monkeypatch.setattr(io, "get_worker_info", lambda: "a worker")
    experts = batches(stored)[[0, 1]]["routed_experts"]
    name = experts.get_tensor()._share_filename(False)[0]
    assert Path(f"/dev/shm{name}").exists()
    assert experts.get_tensor()._share_filename(False)[0] == name  # so the loader leaves it there
    assert np.array_equal(np.from_dlpack(experts), [stored.dataset.get(each).routed_experts for each in IDS[:2]])


@pytest.fixture(autouse=True)
def _no_warning_of_workers() -> Iterator[None]:
    """Python 3.12 warns of every fork of a process with threads, and the frameworks start some."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield


def test_samples_of_several_lengths_in_a_loader_as_the_docstring_says(stored: Stored) -> None:
    data = pytest.importorskip("torch.utils.data")
    stored.put(IDS[5], 9)
    made = RoutingBatches(RoutingSamples(stored.root, IDS), partial(rr.collate, spec=stored.spec))
    loader = data.DataLoader(made, batch_size=None, sampler=BATCHES, collate_fn=rr.to_torch, num_workers=2)
    found = list(loader)
    assert [tuple(batch.routed_experts.shape) for batch in found] == [(4, 6, 4, 2), (2, 9, 4, 2)]
    assert (found[1].mask.numpy()[1, 6:] == rr.RowKind.PADDING).all()
    plain = data.DataLoader(RoutingSamples(stored.root, IDS), batch_size=6, collate_fn=list)
    assert [len(sample["present"]) for sample in next(iter(plain))] == [6, 6, 6, 6, 6, 9]
