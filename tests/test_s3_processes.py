"""Processes that use a dataset on S3: forked, spawned, a loader's, interrupted, at their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from counting_proxy import CountingProxy, Fault
from s3_medium import S3Medium

import rr_dataset as rr
from rr_dataset.storage import open_storage
from tests.engines import DEADLINE_S, SPEC, alive, experts, options, until
from tests.spooled import quick_folder

if TYPE_CHECKING:
    from weed import Place, S3Server

IDS = [f"p{number % 3}:0:{number}:0" for number in range(12)]
PRELUDE = """
import os, sys, threading
import numpy as np
import rr_dataset as rr
from rr_dataset.storage import open_storage
from tests.engines import SPEC, experts, options
from tests.test_s3_processes import IDS, same
uri, client, *more = sys.argv[1:]
dataset = rr.open_dataset(uri, storage_options={"client": client})
"""


def same(records: Any) -> bool:
    """Whether these are the records of IDS."""
    return [record.request_id for record in records] == IDS and all(
        (record.to_numpy() == experts(number)).all() for number, record in enumerate(records)
    )


@pytest.fixture(scope="module")
def stored(s3_server: S3Server) -> Iterator[Place]:
    """Twelve records, and this process and its children know where."""
    place = s3_server.place()
    with pytest.MonkeyPatch.context() as patch, quick_folder(Path(os.curdir)) as spools:
        for name, value in place.environment.items():
            patch.setenv(name, value)
        with rr.RoutingWriter(place.uri, options(spools), create=SPEC) as writer:
            for number, request_id in enumerate(IDS):
                writer.put(request_id, experts(number), "LTK")
        yield place


@contextmanager
def python(code: str, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that is gone afterwards, with those that it made."""
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + code, *arguments],
        cwd=root,
        env={**os.environ, **(environment or {}), "PYTHONPATH": str(root / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ends(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it wrote to stderr, once it has ended by itself."""
    _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == code, stderr
    return stderr


CLIENTS = ["obstore", "s3fs"]

FORKED = """
assert same(dataset.get_many(IDS))
stop = threading.Event()
def read():
    while not stop.is_set():
        dataset.get_many(IDS)
reading = threading.Thread(target=read)
reading.start()
for _ in range(3):
    pid = os.fork()
    if not pid:
        os._exit(0 if same(dataset.get_many(IDS)) else 9)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
reading.join()
assert same(dataset.get_many(IDS))
"""


@pytest.mark.parametrize("client", CLIENTS)
def test_children_that_are_forked_while_a_thread_reads(stored: Place, client: str) -> None:
    with python(FORKED, stored.uri, client) as process:
        ends(process)


CHILD_ENDS = """
storage = open_storage(uri, {"client": client})
storage.list("")
pid = os.fork()
if not pid:
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
storage.list("data_id=p1")
"""


@pytest.mark.parametrize("client", CLIENTS)
def test_a_forked_child_that_ends_leaves_the_connections_of_its_parent(
    stored: Place, s3_server: S3Server, client: str
) -> None:
    with CountingProxy.before(s3_server.port) as proxy:
        with python(CHILD_ENDS, stored.uri, client, environment={"AWS_ENDPOINT_URL": proxy.endpoint}) as process:
            assert not ends(process)
        asked = [each.target for each in proxy.requests() if "data_id%3Dp1" in each.target]
        assert len(asked) == 1, "the answer to the first was not heard"


SPAWNED = """
import multiprocessing
with multiprocessing.get_context("spawn").Pool(2) as pool:
    found = [pool.apply_async(dataset.get_many, (IDS,)) for _ in range(2)]
    assert all(same(each.get(60)) for each in found)
"""


@pytest.mark.parametrize("client", CLIENTS)
def test_a_dataset_goes_to_spawned_children(stored: Place, client: str) -> None:
    with python(SPAWNED, stored.uri, client) as process:
        ends(process)


LOADED = """
import warnings
warnings.simplefilter("default")  # torch's own
from torch.utils.data import DataLoader
loader = DataLoader(IDS, batch_size=3, num_workers=2, collate_fn=dataset.get_many, multiprocessing_context=more[0])
for _ in range(2):
    assert same([record for batch in loader for record in batch])
"""


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_of_a_loader(stored: Place, start: str) -> None:
    pytest.importorskip("torch")
    with python(LOADED, stored.uri, "obstore", start) as process:
        ends(process)


INHERITED = """
with rr.RoutingWriter(uri, options(more[0], storage_options={"client": client})) as writer:
    writer.put("q:0:0:0", experts(1), "LTK")
    pid = os.fork()
    if not pid:
        for use in (lambda: writer.put("q:1:0:0", experts(1), "LTK"), writer.flush, lambda: writer.delete_prefix("q")):
            try:
                use()
            except rr.WriterForkedError:
                pass
            else:
                os._exit(9)
        os._exit(0 if "p0:0:0:0" in dataset.ids() else 8)
    assert os.waitpid(pid, 0)[1] == 0
    writer.flush(60)
assert dataset.get("q:0:0:0").num_tokens
rr.delete_prefix(uri, "q")
"""


def test_a_forked_child_cannot_use_the_writer(stored: Place, tmp_path: Path) -> None:
    with python(INHERITED, stored.uri, "obstore", str(tmp_path)) as process:
        ends(process)


ENDS = {
    "read": "assert same(dataset.get_many(IDS))",
    "error": "dataset.get(IDS[0]); raise SystemExit(3)",
    "thread": """
def read():
    while True:
        dataset.get_many(IDS)
        began.set()
began = threading.Event()
threading.Thread(target=read, daemon=True).start()
assert began.wait(60)
""",
    "arrow": """
began = threading.Event()
def read():
    batches = dataset.to_pyarrow().to_batches()
    next(batches)
    began.set()
    threading.Event().wait()
threading.Thread(target=read, daemon=True).start()
assert began.wait(60)
""",
    "writer": """
writer = rr.RoutingWriter(uri, options(more[0], storage_options={"client": client}))
writer.put("q:0:0:0", experts(1), "LTK").wait(60)
""",
}


def start_and_end(stored: Place, spools: Path, number: int) -> None:
    how = list(ENDS)[number % len(ENDS)]
    client = CLIENTS[number // len(ENDS) % 2]
    with python(ENDS[how], stored.uri, client, str(spools)) as process:
        stderr = ends(process, 3 if how == "error" else 0)
        assert not stderr


def test_interpreters_end(stored: Place, tmp_path: Path) -> None:
    for number in (0, 1, 2, 3, 4, 7):
        start_and_end(stored, tmp_path, number)


@pytest.mark.nightly
def test_a_hundred_interpreters_end(stored: Place, tmp_path: Path) -> None:
    for number in range(100):
        start_and_end(stored, tmp_path, number)


LISTED = ("GET", "prefix=.*data_id%3D")
INTERRUPTED = {  # code, and which of its requests hang
    "listing": ("dataset.get_many(IDS)", *LISTED),
    "ids": ("list(dataset.ids())", *LISTED),
    "scan": ("list(dataset.scan())", *LISTED),
    "scan of tails": ("list(dataset.scan())", "GET", r"\.arrow$"),
    "info": ("dataset.info()", *LISTED),
    "delete": (
        "rr.delete(uri, prefixes=['p0', 'p1', 'p2'], older_than_s=600, storage_options=dict(client=client))",
        *LISTED,
    ),
    "compact": ("rr.compact(uri, storage_options=dict(client=client))", *LISTED),
    "compact of files": ("rr.compact(uri, storage_options=dict(client=client))", "GET", r"\.arrow$"),
    "verify": ("rr.verify(uri, storage_options=dict(client=client))", *LISTED),
    "get_many": ("dataset.get_many(IDS)", "GET", r"\.arrow$"),
    "flush": (
        """
with rr.RoutingWriter(uri, options(more[0], storage_options={"client": client}, drain_timeout_s=1)) as writer:
    print(writer.stats().worker_pid, flush=True)
    writer.put("r:0:0:0", experts(1), "LTK")
    writer.flush(600)
""",
        "PUT",
        "data_id",
    ),
}


BY_BOTH = ("listing", "get_many", "flush")  # in a normal run


@pytest.mark.parametrize(
    ("call", "client"),
    [
        *((call, "obstore") for call in INTERRUPTED),
        *((call, "s3fs") for call in BY_BOTH),
        *(pytest.param(call, "s3fs", marks=pytest.mark.nightly) for call in INTERRUPTED if call not in BY_BOTH),
    ],
)
def test_an_interrupt_ends_it(stored: Place, s3_server: S3Server, tmp_path: Path, call: str, client: str) -> None:
    """While the store hangs: nothing waits until a request times out and is tried again."""
    code, method, target = INTERRUPTED[call]
    partitions = len({request_id.partition(":")[0] for request_id in IDS})
    one_by_one = call in ("flush", "compact of files")
    most = (
        len(open_storage(stored.uri, stored.options).list_dirs(""))  # of other tests too, whose objects may have gone
        if (method, target) == LISTED
        else sum(path.endswith(".arrow") for path in S3Medium(stored, "").objects())
    )
    with CountingProxy.before(s3_server.port) as proxy:
        fault = proxy.add(Fault("delay", method=method, target=target, times=1000, delay_s=600))
        environment = {"AWS_ENDPOINT_URL": proxy.endpoint}
        with python(code, stored.uri, client, str(tmp_path), environment=environment) as process:
            assert process.stdout is not None
            worker = int(process.stdout.readline()) if call == "flush" else 0
            until(lambda: fault.hits >= (1 if one_by_one else partitions), "it waits for the store")
            process.send_signal(signal.SIGINT)
            assert "KeyboardInterrupt" in ends(process, -signal.SIGINT)
        assert not worker or not alive(worker)
        assert worker or fault.hits <= most
