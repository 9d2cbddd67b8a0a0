"""Readers, deletes, compaction and verify while the store fails: the right answer or an error that says so, never less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, product
from pathlib import Path
from typing import Any

import pytest
from counting_proxy import CountingProxy, Fault
from s3_medium import S3Medium
from weed import S3Server

import rr_dataset as rr
from rr_dataset.publisher import Publisher
from rr_dataset.storage import open_storage, remote
from tests.engines import SPEC, experts
from tests.spooled import make_spool, put, sealed

CLIENTS = ("obstore", "s3fs")
LASTING = 10**6
CUT = b"<?xml version='1.0'?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated><Contents><Key>"
FAULTS = (
    Fault("reset_before"),
    Fault("reset_after"),
    Fault("half"),
    Fault("status", status=500),
    Fault("status", status=503, code="SlowDown"),
    Fault("status", status=409, code="OperationAborted"),
    Fault("status", status=200, body=CUT, target="list-type=2"),
)
Answer = Callable[[], Any]


@dataclass(frozen=True)
class World:
    """A dataset that is read through a proxy."""

    medium: S3Medium
    proxy: CountingProxy
    direct: dict[str, Any]  # storage_options past the proxy
    base: Path
    names = count()

    @property
    def uri(self) -> str:
        return self.medium.uri

    @property
    def options(self) -> dict[str, Any]:
        return {**self.direct, "endpoint_url": self.proxy.endpoint}

    def fill(self, *ids: str) -> None:
        """Each put in a shard of its own, past the proxy."""
        dataset = rr.open_dataset(self.uri, storage_options=self.direct)
        publisher = Publisher(open_storage(self.uri, self.direct), dataset.format, "none")
        for request_id in ids:
            spool = make_spool(self.base, dataset, f"{next(self.names):016x}")
            put(spool, dataset, request_id, experts(len(request_id) + int(request_id.rpartition(":")[2])))
            for slab in sealed(spool):
                publisher.publish(slab)
            spool.close(remove=True)
        publisher.close()

    def content(self, prefix: str | None = None) -> dict[str, bytes]:
        """What a fresh reader shows, past the proxy."""
        return seen(rr.open_dataset(self.uri, storage_options=self.direct), prefix)

    def back_to(self, objects: set[str]) -> None:
        """Drop what came since, past the product: hundreds of deletes leave a tombstone each for every reader."""
        for path in self.medium.objects() - objects:
            self.medium.drop(path)

    def fails(self, fault: Fault, call: Answer) -> tuple[int, Any]:
        """How often the fault struck, and what came of it: what was returned, or a rr.RoutingDatasetError."""
        self.proxy.add(fault)
        try:
            came = call()
        except rr.RoutingDatasetError as error:
            came = error
        finally:
            self.proxy.heal()
        return fault.hits, came

    def requests(self, call: Answer) -> int:
        self.proxy.forget()
        call()
        return len(self.proxy.requests())


def seen(dataset: rr.RoutingDataset, prefix: str | None = None) -> dict[str, bytes]:
    ids = list(dataset.ids(prefix))
    return {request_id: dataset.get(request_id).to_numpy().tobytes() for request_id in ids}


@pytest.fixture(scope="module", params=CLIENTS)
def world(
    s3_server: S3Server, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    place = s3_server.place()
    medium = S3Medium(place, request.param)
    with CountingProxy.before(s3_server.port) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "FIRST_PAUSE_S", 0.001)
        rr.create_dataset(place.uri, SPEC, max_clock_skew_s=0.0, storage_options=medium.options)
        made = World(medium, proxy, medium.options, tmp_path_factory.mktemp("spools"))
        made.fill("p:1", "p:2", "q:1", "r:1", "r:2")
        rr.delete_prefix(place.uri, "r:1", storage_options=medium.options)  # so that there is a tombstone to miss
        yield made


def reads(world: World) -> dict[str, Answer]:
    def dataset() -> rr.RoutingDataset:
        return rr.open_dataset(world.uri, storage_options=world.options)

    def found(records: Any) -> Any:
        return [(each.request_id, each.to_numpy().tobytes()) for each in records]

    return {
        "get": lambda: found([dataset().get("p:1")]),
        "get_many": lambda: found(dataset().get_many(["q:1", "p:2", "p:1"])),
        "missing": lambda: dataset().get_many(["r:1", "s:1", "r:2"], on_missing="none")[:2],
        "ids": lambda: list(dataset().ids()),
        "heads": lambda: [head.request_id for head in dataset().heads(["q:1", "r:2"])],
        "wait_for": lambda: [head.request_id for head in dataset().wait_for(["p:1", "q:1"], timeout_s=30)],
        "poll": lambda: [head.request_id for head in dataset().poll()[0]],
        "verify": lambda: rr.verify(world.uri, storage_options=world.options),
    }


def faults(requests: int, step: int) -> Iterator[Fault]:
    """Each fault, once and to stay, at each of so many requests; of these every `step`-th."""
    for fault, times, after in islice(product(FAULTS, (1, LASTING), range(requests)), 0, None, step):
        yield replace(fault, times=times, after=after)


@pytest.mark.parametrize("step", [53, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("what", ["get", "get_many", "missing", "ids", "heads", "wait_for", "poll", "verify"])
def test_a_read_is_right_or_an_error(world: World, what: str, step: int) -> None:
    call = reads(world)[what]
    expected, requests = call(), world.requests(call)
    assert requests >= 3
    for fault in faults(requests, step):
        hits, came = world.fails(fault, call)
        if fault.times == 1 or not hits:
            assert came == expected, fault
        else:
            assert isinstance(came, rr.StorageError) or came == expected, (fault, came)
            if fault.kind == "status" and isinstance(came, rr.StorageError):
                assert world.proxy.endpoint in str(came)
                assert world.uri in str(came.filename)


def test_every_fault_is_hit(world: World) -> None:
    call = reads(world)["ids"]
    for fault in FAULTS:
        hits, came = world.fails(replace(fault, times=LASTING), call)
        assert hits >= remote.TRIES
        assert isinstance(came, rr.StorageError)


@pytest.mark.parametrize("step", [89, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_delete_ends_or_can_be_done_again(world: World, step: int) -> None:
    def delete(prefix: str, options: Any) -> rr.DeleteReport:
        return rr.delete(world.uri, [prefix], storage_options=options)

    others, objects = world.content(), world.medium.objects()
    world.fill("d0:1")
    requests = world.requests(lambda: delete("d0", world.options))
    for fault in faults(requests, step):
        prefix = f"d{next(world.names)}"
        world.fill(f"{prefix}:1", f"{prefix}:2")
        hits, came = world.fails(fault, lambda prefix=prefix: delete(prefix, world.options))
        if fault.times == 1 or not hits:
            assert isinstance(came, rr.DeleteReport), (fault, came)
        if isinstance(came, rr.DeleteReport):
            assert world.content(prefix) == {}, fault
        else:
            assert isinstance(came, rr.StorageError)
        delete(prefix, world.direct)
        assert not [path for path in world.medium.objects() if path.startswith(f"data_id={prefix}/")]
    assert world.content() == others
    world.back_to(objects)


@pytest.mark.parametrize("step", [89, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_compaction_changes_nothing_that_is_seen(world: World, step: int) -> None:
    def compact(options: Any) -> Any:
        return rr.compact(world.uri, prefix, storage_options=options)

    objects = world.medium.objects()
    prefix = f"c{next(world.names)}"
    world.fill(f"{prefix}:1", f"{prefix}:2")
    requests = world.requests(lambda: compact(world.options))
    for fault in faults(requests, step):
        prefix = f"c{next(world.names)}"
        world.fill(f"{prefix}:1", f"{prefix}:2")
        before = world.content(prefix)
        hits, came = world.fails(fault, lambda: compact(world.options))
        if fault.times == 1 or not hits:
            assert came.outputs == 1, (fault, came)
        else:
            assert isinstance(came, rr.StorageError) or came.outputs == 1, (fault, came)
        assert world.content(prefix) == before
        again = compact(world.direct)
        assert not again.damaged
        assert world.content(prefix) == before
        world.back_to(objects)
    assert rr.verify(world.uri, storage_options=world.direct).sound


@pytest.mark.parametrize("client", CLIENTS)
def test_a_listing_that_is_cut_anywhere_is_no_listing(
    s3_server: S3Server, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(remote, "TRIES", 1)
    place = s3_server.place()
    medium = S3Medium(place, client)
    for name in ("a", "b/c"):
        medium.put(name, b"12345")
    with CountingProxy.before(s3_server.port) as proxy:
        storage = open_storage(place.uri, {**medium.options, "endpoint_url": proxy.endpoint})
        whole = (
            f"<?xml version='1.0' encoding='UTF-8'?>\n<ListBucketResult><Name>{place.bucket}</Name><Prefix>x/</Prefix>"
            "<KeyCount>2</KeyCount><IsTruncated>false</IsTruncated><Contents><Key>x/a</Key><LastModified>2026-01-01T00:00:00.000Z"
            "</LastModified><ETag>&#34;e&#34;</ETag><Size>5</Size></Contents><CommonPrefixes><Prefix>x/b/</Prefix>"
            "</CommonPrefixes></ListBucketResult>"
        ).encode()
        for at in range(0, len(whole), 7):
            fault = proxy.add(Fault("status", status=200, body=whole[:at] or b"\n", times=LASTING))
            with pytest.raises(rr.StorageError):
                storage.list("")
            assert fault.hits == 1, at
            proxy.heal()
        assert [entry.name for entry in storage.list("")] == ["a"]


def test_a_page_of_somebody_else_is_no_answer(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With s3fs; obstore takes it for the content of an object."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.0)
    place = s3_server.place()
    medium = S3Medium(place, "s3fs")
    medium.put("a/1", b"0123456789")
    with CountingProxy.before(s3_server.port) as proxy:
        storage = open_storage(place.uri, {**medium.options, "endpoint_url": proxy.endpoint})
        (entry,) = storage.list("a")
        fault = proxy.add(
            Fault("status", method="GET|PUT|POST", status=200, body=b"<html>Please log in</html>", times=LASTING)
        )
        for call in (
            lambda: storage.list("a"),
            lambda: storage.list_dirs(""),
            lambda: storage.list("_rr/tmp/uploads"),
            lambda: storage.read_bytes("a/1"),
            lambda: storage.open("a/1", entry).read(2, 3),
            lambda: storage.create("a/2", b"x", staging="w"),
            lambda: storage.delete(["a/1"]),
        ):
            fault.hits = 0
            with pytest.raises(rr.StorageError):
                call()
            assert fault.hits
    assert medium.objects() == {"a/1"}
