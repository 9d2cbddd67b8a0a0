"""Deletes against puts of another process that are not flushed: what was put before the call dies, what comes after lives."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rr_dataset as rr
from rr_dataset.clock import HybridClock
from tests.engines import SPEC, Engine, experts, stored_rows
from tests.spooled import make_spool, publisher_of, put, quick_folder, sealed

module = importlib.import_module("rr_dataset.delete")
ROUNDS = 20

ENGINE = """
with rr.RoutingWriter(root, options(spool_dir, max_age_s=1000.0, idle_seal_s=1000.0), create=SPEC) as writer:
    print("open", flush=True)
    for line in sys.stdin:
        kind, *ids = line.split()
        for request_id in ids:
            writer.put(request_id, experts(1), "LTK")
        if kind == "flush":
            writer.flush()
        print(kind, flush=True)
"""


class Other:
    """Another process with a writer that publishes only what it is told to."""

    def __init__(self, root: Path, spool_dir: Path) -> None:
        self._engine = Engine(ENGINE, root, spool_dir)
        assert self._engine.line() == "open"

    def do(self, kind: str, *ids: str) -> None:
        """put or flush; back when the other process has done it."""
        assert self._engine.process.stdin is not None
        self._engine.process.stdin.write(" ".join([kind, *ids]) + "\n")
        self._engine.process.stdin.flush()
        assert self._engine.line() == kind

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *error: object) -> None:
        _, stderr = self._engine.process.communicate(timeout=60)
        assert self._engine.process.returncode == 0, stderr


def race(tmp_path: Path, rounds: int) -> None:
    with Other(tmp_path / "ds", tmp_path) as other:
        _race(tmp_path, rounds, other)


def _race(tmp_path: Path, rounds: int, other: Other) -> None:
    dataset = rr.open_dataset(tmp_path / "ds")
    for i in range(rounds):
        what: dict[str, Any] = ({"prefixes": [f"p{i}"]}, {"ids": [f"p{i}:1", f"p{i}:2"]}, {"glob": f"p{i}:[12]"})[i % 3]
        # Put, deleted, flushed; put, flushed, deleted; and put again right after the delete returned.
        other.do("put", f"p{i}:1")
        if i % 2:
            other.do("flush", f"p{i}:2")
        rr.delete(dataset.uri, **what)
        assert list(dataset.ids(f"p{i}")) == [], i
        other.do("put", f"p{i}:2")
        other.do("flush")
        assert list(dataset.ids(f"p{i}")) == [f"p{i}:2"], i
    assert stored_rows(tmp_path / "ds") == {f"p{i}:2": 1 for i in range(rounds)}  # what died is not even hidden


def test_unflushed_puts_of_another_process(tmp_path: Path) -> None:
    race(tmp_path, ROUNDS)


@pytest.mark.nightly
def test_unflushed_puts_of_another_process_many_times(tmp_path: Path) -> None:
    race(tmp_path, 1000)


class Moment:
    """A wall clock that spool and deleter share, and that moves only when somebody waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = 1_800_000_000_000
        monkeypatch.setattr(module, "wall_ms", lambda: self.ms)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.ms / 1000, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.ms += max(1, int(seconds * 1000))


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Moment:
    return Moment(monkeypatch)


@pytest.mark.parametrize(
    ("skew_s", "ahead_ms", "flushed"),
    [(0.0, 0, False), (0.0, 0, True), (2.0, 0, False), (2.0, -2000, False), (2.0, 2000, False), (2.0, 2000, True)],
)
def test_within_one_millisecond(
    base: Path, monkeypatch: pytest.MonkeyPatch, moment: Moment, skew_s: float, ahead_ms: int, flushed: bool
) -> None:
    dataset = rr.create_dataset(base / "ds", SPEC, max_clock_skew_s=skew_s)
    monkeypatch.setattr(importlib.import_module("rr_dataset.publisher"), "wall_ms", lambda: moment.ms)
    spool = make_spool(base, dataset)
    spool._clock = HybridClock(lambda: moment.ms + ahead_ms)  # of another host
    publisher = publisher_of(dataset)

    def flush() -> None:
        for path in sealed(spool):
            publisher.publish(path)
        spool.collect()

    for i in range(ROUNDS):
        before = moment.ms
        early = put(spool, dataset, f"p{i}:1", experts(1))
        assert early >> 16 >= before + ahead_ms
        if flushed:
            flush()
        rr.delete_prefix(dataset.uri, f"p{i}")
        late = put(spool, dataset, f"p{i}:2", experts(2))
        flush()
        assert list(dataset.ids(f"p{i}")) == [f"p{i}:2"], (i, early, late)
    publisher.close()
    spool.close(remove=True)


def test_many_deleters_at_once(tmp_path: Path) -> None:
    dataset = rr.create_dataset(tmp_path / "ds", SPEC)
    spool = make_spool(tmp_path, dataset)
    for i in range(40):
        put(spool, dataset, f"p{i % 8}:{i}", experts(i))
    for path in sealed(spool):
        publisher_of(dataset).publish(path)
    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(lambda i: rr.delete(dataset.uri, prefixes=[f"p{i % 4}"], ids=["p7:7"]), range(8)))
    assert sum(report.files for report in reports) >= 4
    assert {i.partition(":")[0] for i in dataset.ids()} == {"p4", "p5", "p6", "p7"}
    assert "p7:7" not in set(dataset.ids())
    left = sorted(path.name for path in Path(dataset.uri).iterdir())
    assert left == ["_rr", "data_id=p4", "data_id=p5", "data_id=p6", "data_id=p7"]
    spool.close(remove=True)
