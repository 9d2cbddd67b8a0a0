"""All kinds of processes at once on one dataset, and what is left of it afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

import rr_dataset as rr
from tests.hammer import GRACE_S, PROMPTS, SAMPLES, Board, experts, hammer, version_of
from tests.lifecycle import collect_at, compact_at, now_ms, record_ids
from tests.spooled import quick_folder


def check(root: Path, seconds: float, least: int) -> None:
    done = hammer(root, seconds)
    assert min(done.values()) >= least, done
    dataset, board = rr.open_dataset(root), Board(root)
    before = {head.request_id: head.record_id for head in dataset.heads(dataset.ids())}
    for writer in range(2):
        for prompt in (f"w{writer}p{i}" for i in range(PROMPTS)):
            for sample in range(SAMPLES):
                record = dataset.get_many([f"{prompt}:{sample}:0:0"], on_missing="none")[0]
                if board.read("done", prompt) > board.read("perhaps", prompt):
                    assert record is not None
                if record is not None:
                    version = version_of(record.to_numpy())
                    assert version == board.read("done", prompt)
                    assert (record.to_numpy() == experts(prompt, sample, version)).all()
    for step in range(1, 6):
        compact_at(root, now_ms() + step * int(10_000 * GRACE_S))
        collect_at(root, now_ms() + step * int(10_000 * GRACE_S))
    assert {head.request_id: head.record_id for head in dataset.heads(dataset.ids())} == before
    assert sorted(record_ids(root)) == sorted(before.values())
    assert rr.verify(root).sound
    assert not list((root / "_rr").glob("tmp/*/*"))


def test_ten_seconds(tmp_path: Path) -> None:
    with quick_folder(tmp_path) as folder:
        check(folder / "dataset", 10.0, 1)


@pytest.mark.nightly
def test_ten_minutes(tmp_path: Path) -> None:
    check(tmp_path / "dataset", 600.0, 50)
