"""A writer and its worker while the store fails: puts go on, stats and flush say why, and then all is there once."""

from __future__ import annotations

import io
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from counting_proxy import CountingProxy, Fault
from s3_medium import S3Medium
from weed import S3Server

import rr_dataset as rr
from rr_dataset.recovery import recover
from tests.engines import BIG, SPEC, Engine, alive, experts, fill, options, spools, until
from tests.test_writer_full import Waits

CLIENTS = ("obstore", "s3fs")
LASTING = 10**6
FAULTS = {
    "slow down": (Fault("status", status=503, code="SlowDown"), "fewer requests"),
    "500": (Fault("status", status=500), "the store failed"),
    "409": (Fault("status", method="GET", status=409, code="OperationAborted"), "another request"),
    "denied": (Fault("status", status=403, code="AccessDenied"), "s3:PutObject"),
    "reset before": (Fault("reset_before"), "cannot be reached|failed"),
    "lost answers": (Fault("reset_after"), "cannot be reached|failed"),
    "half answers": (Fault("half", method="GET"), "cannot be reached|failed"),
}
PASSING = {
    "a lost put": Fault("reset_after", method="PUT", target=r"\.arrow"),
    "a lost tombstone": Fault("reset_after", method="PUT", target="tombstones"),
    "a lost delete": Fault("reset_after", method="POST", target="delete"),
    "half a listing": Fault("half", method="GET", target="list-type"),
    "half a format": Fault("half", method="GET", target="format.json"),
    "a conflict": Fault("status", method="PUT", status=409, code="ConditionalRequestConflict"),
    "a slow down": Fault("status", method="PUT", status=503, code="SlowDown"),
}


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[CountingProxy]:
    with CountingProxy.before(s3_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def own_server() -> Iterator[S3Server]:
    """A server that may be stopped and killed."""
    with S3Server.started() as server:
        yield server


def rows(medium: S3Medium) -> Counter[str]:
    """How often each request id stands in the bucket, by pyarrow."""
    found: Counter[str] = Counter()
    for path in medium.objects():
        if path.endswith(".arrow"):
            table = pa.ipc.open_file(io.BytesIO(medium.get(path) or b"")).read_all()
            found.update(table["request_id"].to_pylist())
    return found


def holds(medium: S3Medium, numbers: dict[str, int], tokens: int = 20) -> None:
    """Every record once, with every byte, and nothing else."""
    assert rows(medium) == dict.fromkeys(numbers, 1)
    dataset = rr.open_dataset(medium.uri, storage_options=medium.options)
    for request_id, record in zip(numbers, dataset.get_many(list(numbers)), strict=True):
        np.testing.assert_array_equal(record.to_numpy(), experts(numbers[request_id], tokens))
    assert not medium.uploads()


def secrets_in(folder: Path, medium: S3Medium) -> list[Path]:
    secret = medium.options["secret"].encode()
    return [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]


@contextmanager
def no_waits(writer: rr.RoutingWriter) -> Iterator[None]:
    """No put waits meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        waits = Waits(writer, patch)
        yield
        assert waits.seen == []


@pytest.mark.parametrize(
    ("client", "kinds"),
    [
        ("obstore", ["slow down", "denied", "half answers"]),
        ("s3fs", ["lost answers"]),
        *(pytest.param(client, list(FAULTS), marks=pytest.mark.nightly) for client in CLIENTS),
    ],
    ids=["obstore", "s3fs", "obstore-all", "s3fs-all"],
)
def test_outages_of_every_kind(
    s3_server: S3Server, proxy: CountingProxy, tmp_path: Path, client: str, kinds: list[str]
) -> None:
    medium = S3Medium(s3_server.place(), client)
    behind = {**medium.options, "endpoint_url": proxy.endpoint}
    numbers: dict[str, int] = {}
    with rr.RoutingWriter(medium.uri, options(tmp_path, storage_options=behind), create=SPEC) as writer:

        def put(name: str, count: int) -> None:
            with no_waits(writer):
                for _ in range(count):
                    request_id = f"{name.replace(' ', '_')}:{len(numbers)}"
                    numbers[request_id] = len(numbers)
                    writer.put(request_id, experts(numbers[request_id]), "LTK")

        for name, (kind, says) in ((name, FAULTS[name]) for name in kinds):
            before = writer.stats()
            assert (before.failing_slabs, before.failing_s, before.next_attempt_s) == (0, 0.0, None)
            fault = proxy.add(Fault(kind.kind, kind.method, kind.target, LASTING, status=kind.status, code=kind.code))
            put(name, 2)
            until(lambda before=before: writer.stats().retries > before.retries, "it is to be tried again")
            assert fault.hits >= 2
            stats = writer.stats()
            assert stats.failing_slabs >= 1
            assert stats.failing_s > 0
            assert stats.next_attempt_s is not None
            assert proxy.endpoint in (stats.last_error or "")
            put(name, 1)
            with pytest.raises(rr.FlushTimeoutError) as caught:
                writer.flush(timeout_s=0)
            assert isinstance(caught.value.__cause__, rr.StorageError)
            assert caught.match(says)
            assert caught.value.__cause__.errno
            assert (caught.value.__cause__.filename or "").startswith(medium.uri)
            assert secrets_in(tmp_path, medium) == []
            proxy.heal()
            assert writer.flush(60).records == 3
            assert writer.stats().last_error is None

        before = writer.stats()
        for name, kind in PASSING.items():
            fault = proxy.add(kind)
            kind.hits = 0
            put(name, 1)
            writer.delete_prefix(f"old_{name.replace(' ', '_')}:1")
            writer.put(f"old_{name.replace(' ', '_')}:1", experts(1), "LTK")
            writer.flush(60)
            writer.delete_prefix(f"old_{name.replace(' ', '_')}:1")
            writer.flush(60)
            assert fault.hits == 1, name
            proxy.heal()
        assert writer.stats().retries == before.retries, "the client has seen to it"
        accepted = writer.stats().accepted
    assert accepted == len(numbers) + len(PASSING)
    holds(medium, numbers)
    assert secrets_in(tmp_path, medium) == []


def test_a_full_spool_costs_one_wait_and_drops_with_rows(
    s3_server: S3Server, proxy: CountingProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = S3Medium(s3_server.place(), "obstore")
    how = options(tmp_path, block_timeout_s=0.01, storage_options={**medium.options, "endpoint_url": proxy.endpoint})
    with rr.RoutingWriter(medium.uri, how, create=SPEC) as writer:
        for outage in ("x", "y"):
            fault = proxy.add(Fault("status", status=503, code="SlowDown", times=LASTING))
            with monkeypatch.context() as patch:
                waits = Waits(writer, patch)
                kept = fill(writer, outage)[:-1]
                for number in range(len(kept) + 1, len(kept) + 4):
                    writer.put(f"{outage}:{number}", experts(number, BIG), "LTK")
                assert waits.seen == [pytest.approx(0.01, abs=0.01)]
            until(lambda: "fewer requests" in (writer.stats().last_error or ""), "the worker has said why")
            assert fault.hits
            proxy.heal()
            report = writer.flush(60)
            assert (report.records, report.dropped) == (len(kept), {"spool full": 4})
            dataset = rr.open_dataset(medium.uri, storage_options=medium.options)
            for number, record in enumerate(dataset.get_many([f"{outage}:{i}" for i in range(len(kept))])):
                np.testing.assert_array_equal(record.to_numpy(), experts(number, BIG))
            with pytest.raises(rr.RecordDroppedError, match="spool full"):
                dataset.get(f"{outage}:{len(kept)}")
    assert set(rows(medium).values()) == {1}


@contextmanager
def one_by_one(medium: S3Medium, spool_dir: Path) -> Iterator[tuple[rr.RoutingWriter, Callable[[], None]]]:
    """A writer and what puts one more record without a wait; in the end all are there."""
    numbers: dict[str, int] = {}
    with rr.RoutingWriter(medium.uri, options(spool_dir, storage_options=medium.options), create=SPEC) as writer:

        def put() -> None:
            with no_waits(writer):
                request_id = f"p:{len(numbers)}"
                numbers[request_id] = len(numbers)
                writer.put(request_id, experts(numbers[request_id]), "LTK")

        yield writer, put
    holds(medium, numbers)


def test_a_server_that_is_stopped(own_server: S3Server, tmp_path: Path) -> None:
    with one_by_one(S3Medium(own_server.place(), "obstore"), tmp_path) as (writer, put):
        own_server.pause()
        try:
            put()
            with pytest.raises(rr.FlushTimeoutError, match="1 records are not durable .*neither taken them nor failed"):
                writer.flush(timeout_s=0.5)
            put()
        finally:
            own_server.resume()
        assert writer.flush(60).records == 2


@pytest.mark.nightly  # the server takes 20 s to come back
@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_is_killed(own_server: S3Server, tmp_path: Path, client: str) -> None:
    with one_by_one(S3Medium(own_server.place(), client), tmp_path) as (writer, put):
        put()
        writer.flush(60)
        own_server.kill()
        put()
        until(lambda: writer.stats().retries >= 2, "it is tried again")
        with pytest.raises(rr.FlushTimeoutError, match="cannot be reached|failed") as caught:
            writer.flush(timeout_s=0)
        assert isinstance(caught.value.__cause__, rr.StorageError)
        put()
        own_server.restart()
        assert writer.flush(60).records == 2


SERVE = """
import json, time
uri, storage_options = json.loads(sys.argv[1])
with rr.RoutingWriter(uri, options(spool_dir, drain_timeout_s=0.5, storage_options=storage_options)) as writer:
    print(writer.stats().worker_pid, flush=True)
    sys.stdin.readline()
    for number in range(4):
        writer.put(f"p:{number}", experts(number), "LTK")
    print("put", flush=True)
    while True:
        time.sleep(1000)
"""


def test_ctrl_c_in_an_outage_leaves_the_spool(s3_server: S3Server, proxy: CountingProxy, tmp_path: Path) -> None:
    medium = S3Medium(s3_server.place(), "obstore")
    rr.create_dataset(medium.uri, SPEC, storage_options=medium.options)
    behind = {**medium.options, "endpoint_url": proxy.endpoint}
    with Engine(SERVE, json.dumps([medium.uri, behind]), tmp_path) as engine:
        assert engine.line()
        fault = proxy.add(Fault("delay", delay_s=60, times=LASTING))  # it hangs, and nobody says no
        assert engine.process.stdin is not None
        engine.process.stdin.write("go\n")
        engine.process.stdin.flush()
        assert engine.line() == "put"
        until(lambda: fault.hits, "the worker asks the store")
        engine.process.send_signal(signal.SIGINT)
        _, err = engine.process.communicate(timeout=30)
    assert engine.process.returncode != 0
    assert "KeyboardInterrupt" in err
    assert "4 records are not durable after 0.5 s" in err
    (spool,) = spools(tmp_path)
    assert str(spool) in err
    assert medium.options["secret"] not in err
    proxy.heal()
    (report,) = recover(tmp_path, storage_options=medium.options)
    assert (report.outcome, report.records) == ("recovered", 4), report.reason
    assert spools(tmp_path) == []
    holds(medium, {f"p:{number}": number for number in range(4)})


@pytest.mark.nightly
def test_a_worker_without_engine_ends_though_the_store_hangs(
    s3_server: S3Server, proxy: CountingProxy, tmp_path: Path
) -> None:
    medium = S3Medium(s3_server.place(), "obstore")
    rr.create_dataset(medium.uri, SPEC, storage_options=medium.options)
    behind = {**medium.options, "endpoint_url": proxy.endpoint}
    with Engine(SERVE, json.dumps([medium.uri, behind]), tmp_path) as engine:
        worker = int(engine.line())
        fault = proxy.add(Fault("delay", delay_s=600, times=LASTING))
        assert engine.process.stdin is not None
        engine.process.stdin.write("go\n")
        engine.process.stdin.flush()
        assert engine.line() == "put"
        until(lambda: fault.hits, "the worker asks the store")
    until(lambda: not alive(worker), "drain_timeout_s and OVERTIME_S are over")
    proxy.heal()
    (report,) = recover(tmp_path, storage_options=medium.options)
    assert (report.outcome, report.records) == ("recovered", 4), report.reason
    holds(medium, {f"p:{number}": number for number in range(4)})


@pytest.mark.nightly
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", ["delay", "late"])
def test_half_a_minute_of_latency(
    s3_server: S3Server, proxy: CountingProxy, tmp_path: Path, client: str, kind: Any
) -> None:
    medium = S3Medium(s3_server.place(), client)
    behind = {**medium.options, "endpoint_url": proxy.endpoint}
    with rr.RoutingWriter(medium.uri, options(tmp_path, storage_options=behind), create=SPEC) as writer:
        fault = proxy.add(Fault(kind, delay_s=30, times=LASTING))
        writer.put("p:1", experts(1), "LTK")
        until(lambda: writer.stats().retries, "the client has given up")
        with pytest.raises(rr.FlushTimeoutError, match="in time"):
            writer.flush(timeout_s=0)
        writer.put("p:2", experts(2), "LTK")
        assert fault.hits >= 2
        proxy.heal()
        writer.flush(200)
    holds(medium, {"p:1": 1, "p:2": 2})


@pytest.mark.nightly
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", ["reset_after", "status"])
def test_a_large_record_whose_last_answer_is_lost(
    s3_server: S3Server, proxy: CountingProxy, tmp_path: Path, client: str, kind: Any
) -> None:
    medium = S3Medium(s3_server.place(), client)
    behind = {**medium.options, "endpoint_url": proxy.endpoint}
    tokens = 9 << 20  # 72 MiB: it goes up in parts
    how = options(tmp_path, spool_bytes=256 << 20, slab_bytes=64 << 20, storage_options=behind)
    with rr.RoutingWriter(medium.uri, how, create=SPEC) as writer:
        fault = proxy.add(Fault(kind, method="POST", target="uploadId", times=2))
        writer.put("p:1", experts(1, tokens), "LTK")
        writer.flush(300)
        assert fault.hits
    holds(medium, {"p:1": 1}, tokens)
