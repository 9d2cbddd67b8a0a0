"""PaddleFormers' own DistDataLoader in front of the feeder: what it gives each rank, and what becomes of its errors.

Its collectives are those of threads here, each a rank of three pipeline stages by two tensor ranks; the class is the real one.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from frameworks import QUIET, framework
from stored import Stored
from thread_ranks import TIMEOUT_S, Ranks

import rr_dataset as rr
from rr_dataset.trainer.feeder import RankFeeder
from rr_dataset.trainer.idlist import IdList
from rr_dataset.trainer.samples import SampleOptions

dist_dataloader = framework("paddleformers.data.dist_dataloader")
paddle = framework("paddle")

pytestmark = QUIET

STAGES, TENSOR_RANKS = 3, 2
LAYERS = ((3, 4), (7,), (9,))  # of the stages
IDS = IdList([f"math_{prompt}:0:0:0" for prompt in range(4)])


class Rows(paddle.io.Dataset):
    """The trainer's own samples, each with its row number."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": np.full(3, row, np.int64), "routing_row": np.array(IDS.number(row), np.int64)}


class Groups:
    """Broadcasts among threads, in the place of paddle.distributed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._here = threading.local()
        self._lock = threading.Lock()
        self._boxes: dict[tuple[int, ...], tuple[threading.Barrier, list[Any]]] = {}
        for name in ("broadcast_object_list", "broadcast"):
            monkeypatch.setattr(paddle.distributed, name, getattr(self, name))
        monkeypatch.setattr(paddle.distributed, "get_rank", lambda: self._here.rank)
        monkeypatch.setattr(dist_dataloader.fleet, "get_hybrid_communicate_group", self._topology)

    def enter(self, rank: int) -> None:
        """This thread is that rank."""
        self._here.rank = rank

    def broadcast_object_list(self, objects: list[Any], src: int, group: Any) -> None:
        objects[:] = pickle.loads(self._send(lambda: pickle.dumps(objects), src, group))

    def broadcast(self, tensor: Any, src: int, group: Any, *, sync_op: bool) -> None:
        assert sync_op
        sent = self._send(tensor.numpy, src, group)
        if self._here.rank != src:
            tensor.set_value(sent)

    def _send(self, value: Callable[[], Any], src: int, group: Any) -> Any:
        with self._lock:
            barrier, box = self._boxes.setdefault(
                tuple(group.ranks), (threading.Barrier(len(group.ranks), timeout=TIMEOUT_S), [])
            )
        if self._here.rank == src:
            box[:] = [value()]
        barrier.wait()
        (sent,) = box
        barrier.wait()
        return sent

    def _topology(self) -> Any:
        stage, tensor_rank = divmod(self._here.rank, TENSOR_RANKS)
        return SimpleNamespace(
            get_pipe_parallel_world_size=lambda: STAGES,
            get_pipe_parallel_group=lambda: group(range(tensor_rank, STAGES * TENSOR_RANKS, TENSOR_RANKS)),
            get_model_parallel_group=lambda: group(range(stage * TENSOR_RANKS, (stage + 1) * TENSOR_RANKS)),
            get_model_parallel_rank=lambda: tensor_rank,
            get_model_parallel_group_src_rank=lambda: stage * TENSOR_RANKS,
            get_stage_id=lambda: stage,
            get_data_parallel_rank=lambda: 0,
            get_sharding_parallel_rank=lambda: 0,
        )


def group(ranks: Sequence[int]) -> Any:
    return SimpleNamespace(ranks=list(ranks), nranks=len(ranks))


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    stored = Stored(tmp_path / "d")
    for request_id in IDS:
        stored.put(request_id, 5)
    return stored


def failing() -> Iterator[Any]:
    """What paddle's loader is behind the real class: here it raises after a batch (with `num_workers=0` paddle 3.3 would hang)."""
    yield {"routing_row": paddle.to_tensor(IDS.numbers([0, 1]))}
    raise OSError("no space left")


def epoch(
    stored: Stored, groups: Groups, ranks: Ranks, rank: int, loads: Iterator[Any] | None = None
) -> list[list[Any]]:
    """Each batch as its feeder gave it, on one rank of a training loop. loads: in place of paddle's loader."""
    groups.enter(rank)
    stage, tensor_rank = divmod(rank, TENSOR_RANKS)
    ends = (0, STAGES - 1)
    data_group = group([tensor_rank, (STAGES - 1) * TENSOR_RANKS + tensor_rank]) if stage in ends else None
    loader = dist_dataloader.DistDataLoader(
        Rows() if rank == 0 else None, batch_size=2, pp_data_group=data_group, places=paddle.CPUPlace()
    )
    if rank == 0 and loads is not None:
        loader._lazy_dataloader_iter = loads
    feeder = RankFeeder(stored.root, IDS, SampleOptions(layers=LAYERS[stage]), ranks.gather(rank))
    fed = []
    for batch in loader:
        if stage not in ends and tensor_rank == 0:
            assert batch == {}
        fed.append(feeder.feed(batch.get("routing_row") if stage in ends else None))
    feeder.finish(expected=len(IDS))
    return fed


def test_every_rank_gets_its_layers_of_what_one_rank_loaded(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, ranks = Groups(monkeypatch), Ranks(STAGES * TENSOR_RANKS)
    results = ranks.run(lambda rank: epoch(stored, groups, ranks, rank))
    for rank, batches in enumerate(results):
        assert not isinstance(batches, Exception), batches
        assert [[each["request_id"] for each in batch] for batch in batches] == [IDS[:2], IDS[2:]]
        for sample in (each for batch in batches for each in batch):
            want = stored.dataset.get(sample["request_id"], LAYERS[rank // TENSOR_RANKS]).routed_experts
            assert np.array_equal(sample["routed_experts"], want)


def test_an_epoch_that_its_loader_ended_over_an_error_is_one_on_every_rank(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, ranks = Groups(monkeypatch), Ranks(STAGES * TENSOR_RANKS)
    for error in ranks.run(lambda rank: epoch(stored, groups, ranks, rank, failing())):
        assert isinstance(error, rr.InvalidInputError), error
        assert "2 samples were fed and 4 expected: the loader ended early" in str(error)


def test_a_record_that_one_stage_cannot_read_is_an_error_on_every_rank(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.put(IDS[2], status="dropped", reason="spool full")
    groups, ranks = Groups(monkeypatch), Ranks(STAGES * TENSOR_RANKS)
    for error in ranks.run(lambda rank: epoch(stored, groups, ranks, rank)):
        assert isinstance(error, rr.RecordDroppedError), error
        assert f"{IDS[2]} (spool full)" in str(error)
