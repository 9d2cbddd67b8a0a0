"""An engine and a deleter on hosts whose clocks differ, on S3: what a delete covers, what it costs, what is said beyond the skew."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from weed import Place

import rr_dataset as rr
from tests.engines import DEADLINE_S, SPEC, Engine

FAULTS = Path(__file__).parent / "faults"
SKEW_S = 0.5
APART_S = 0.48  # the clocks, and nothing for what passes between two calls

READ = """
import json, time, warnings
uri, storage_options, ahead_s = json.loads(sys.argv[1])
assert abs(time.time() - time.clock_gettime(time.CLOCK_REALTIME) - ahead_s) < 0.1
"""
ENGINE = (
    READ
    + """
with rr.RoutingWriter(
    uri, options(spool_dir, max_age_s=1000.0, idle_seal_s=1000.0, storage_options=storage_options)
) as writer:
    print("open", flush=True)
    for line in sys.stdin:
        kind, *ids = line.split()
        for request_id in ids:
            writer.put(request_id, experts(1), "LTK")
        if kind == "flush":
            writer.flush(60)
        print(kind, flush=True)
"""
)
DELETER = (
    READ
    + """
print("open", flush=True)
for line in sys.stdin:
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        rr.delete(uri, line.split(), storage_options=storage_options)
    print(json.dumps([time.monotonic() - began, [str(each.message) for each in said]]), flush=True)
"""
)


class Host:
    """A process with a clock of its own that does what it is told, line by line."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        assert engine.line() == "open"

    def do(self, line: str) -> str:
        """What it says when it has done it."""
        assert self._engine.process.stdin is not None
        self._engine.process.stdin.write(f"{line}\n")
        self._engine.process.stdin.flush()
        return self._engine.line()


@contextmanager
def host(program: str, place: Place, ahead_s: float, spool_dir: Path) -> Iterator[Host]:
    path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "RR_CLOCK_AHEAD_S": str(ahead_s)}
    with Engine(program, json.dumps([place.uri, place.options, ahead_s]), spool_dir, env=environment) as engine:
        yield Host(engine)
        _, stderr = engine.process.communicate(timeout=DEADLINE_S)
        assert (engine.process.returncode, stderr) == (0, "")


@contextmanager
def hosts(place: Place, engine_s: float, deleter_s: float, spool_dir: Path) -> Iterator[tuple[Host, Host]]:
    with host(ENGINE, place, engine_s, spool_dir) as engine, host(DELETER, place, deleter_s, spool_dir) as deleter:
        yield engine, deleter


@pytest.mark.parametrize(
    ("engine_s", "deleter_s", "rounds"),
    [
        (APART_S / 2, -APART_S / 2, 2),
        pytest.param(-APART_S / 2, APART_S / 2, 40, marks=pytest.mark.nightly),
        pytest.param(APART_S, 0.0, 40, marks=pytest.mark.nightly),
        pytest.param(0.0, APART_S, 40, marks=pytest.mark.nightly),
    ],
)
def test_within_the_skew_a_delete_is_exact(
    s3: Place, tmp_path: Path, engine_s: float, deleter_s: float, rounds: int
) -> None:
    dataset = rr.create_dataset(s3.uri, SPEC, max_clock_skew_s=SKEW_S, storage_options=s3.options)
    with hosts(s3, engine_s, deleter_s, tmp_path) as (engine, deleter):
        for number in range(rounds):
            engine.do(f"put p{number}:1")
            if number % 2:
                engine.do("flush")
            took_s, said = json.loads(deleter.do(f"p{number}"))
            assert said == []
            assert took_s >= 2 * SKEW_S  # what a delete waits
            engine.do(f"put p{number}:2")
            engine.do("flush")
            assert list(dataset.ids(f"p{number}")) == [f"p{number}:2"], number


def test_a_put_by_a_clock_beyond_the_skew_is_told(s3: Place, tmp_path: Path) -> None:
    dataset = rr.create_dataset(s3.uri, SPEC, max_clock_skew_s=SKEW_S, storage_options=s3.options)
    with hosts(s3, 3600.0, 0.0, tmp_path) as (engine, deleter):
        engine.do("put p:1")
        engine.do("flush")
        _, (said,) = json.loads(deleter.do("p"))
        assert "data_id=p/" in said
        assert "ahead of this host's by more than max_clock_skew_s" in said
        assert list(dataset.ids()) == ["p:1"]  # hidden it would be a put that was submitted after the delete
    with host(DELETER, s3, 3600.0, tmp_path) as later:
        assert json.loads(later.do("p"))[1] == []
    assert list(dataset.ids()) == []
