"""All kinds of processes at once on one bucket, and what is left of it afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from s3_medium import S3Medium

import rr_dataset as rr
from tests.hammer import SPEC, hammer
from tests.lifecycle import collect_at, compact_at, now_ms
from tests.spooled import quick_folder
from tests.test_hammer import agree

if TYPE_CHECKING:
    from weed import Place

GRACE_S = 5.0  # longer than any listing, also where eleven processes share two cores
SKEW_S = 0.2  # all have the same clock
ROLES = ("write-0", "write-1", "read-0", "compact-0", "delete", "gc")
MORE = ("write-2", "write-3", "read-1")


def check(
    s3: Place,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    least: int,
    seconds: float = 0.0,
    roles: tuple[str, ...] = ROLES,
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    rr.create_dataset(s3.uri, SPEC, grace_s=GRACE_S, max_clock_skew_s=SKEW_S)
    board = hammer(s3.uri, base, least=least, seconds=seconds, roles=roles)
    before = agree(rr.open_dataset(s3.uri), board)
    for step in range(1, 6):
        compact_at(s3.uri, now_ms() + step * int(10_000 * GRACE_S))
        collect_at(s3.uri, now_ms() + step * int(10_000 * GRACE_S))
    dataset = rr.open_dataset(s3.uri)
    assert {head.request_id: head.record_id for head in dataset.heads(dataset.ids())} == before
    assert rr.verify(s3.uri).sound
    medium = S3Medium(s3, "obstore")
    shards = [path for path in medium.objects() if not path.startswith("_rr/")]
    assert len(shards) == len({path.partition("/")[0] for path in shards}), "one a prompt"
    assert not [path for path in medium.objects() if path.startswith("_rr/tmp/")]
    assert not medium.uploads()


def test_once_each(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quick_folder(tmp_path) as folder:
        check(s3, folder, monkeypatch, least=2)


@pytest.mark.nightly
def test_ninety_seconds(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(s3, tmp_path, monkeypatch, least=10, seconds=90.0, roles=ROLES + MORE)
