"""All kinds of processes at once on one dataset, and what is left of it afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

import rr_dataset as rr
from tests.hammer import PROMPTS, SAMPLES, SPEC, Board, experts, hammer, version_of
from tests.lifecycle import collect_at, compact_at, now_ms, record_ids
from tests.spooled import quick_folder

GRACE_S = 2.0  # longer than any listing of so few files


def check(base: Path, least: int, seconds: float = 0.0) -> None:
    root = base / "dataset"
    rr.create_dataset(root, SPEC, grace_s=GRACE_S)
    board = hammer(str(root), base, least=least, seconds=seconds)
    before = agree(rr.open_dataset(root), board)
    for step in range(1, 6):
        compact_at(root, now_ms() + step * int(10_000 * GRACE_S))
        collect_at(root, now_ms() + step * int(10_000 * GRACE_S))
    dataset = rr.open_dataset(root)
    assert {head.request_id: head.record_id for head in dataset.heads(dataset.ids())} == before
    assert sorted(record_ids(root)) == sorted(before.values())
    assert rr.verify(root).sound
    assert not list((root / "_rr").glob("tmp/*/*"))


def agree(dataset: rr.RoutingDataset, board: Board) -> dict[str, str]:
    """All is there that the board says, in its last version; the record id of each request id."""
    ids = {
        f"w{writer}p{number}:{sample}:0:0": (f"w{writer}p{number}", sample)
        for writer in range(board.read("writers", "all"))
        for number in range(PROMPTS)
        for sample in range(SAMPLES)
    }
    for (prompt, sample), record in zip(ids.values(), dataset.get_many(ids, on_missing="none"), strict=True):
        if board.read("done", prompt) > board.read("perhaps", prompt):
            assert record is not None
        if record is not None:
            version = version_of(record.to_numpy())
            assert version == board.read("done", prompt)
            assert (record.to_numpy() == experts(prompt, sample, version)).all()
    return {head.request_id: head.record_id for head in dataset.heads(dataset.ids())}


def test_once_each(tmp_path: Path) -> None:
    with quick_folder(tmp_path) as folder:
        check(folder, 3)


@pytest.mark.nightly
def test_ten_minutes(tmp_path: Path) -> None:
    check(tmp_path, 50, 600.0)
