"""Every reader under what programs do to it: threads, forks, spawned workers, shards that vanish, tight limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from every_reader import READERS, Reads, read_all
from stored import Stored

import rr_dataset as rr
from rr_dataset.layout import row_ref
from rr_dataset.record import RowData
from rr_dataset.storage.local import LocalStorage

ROOT = Path(__file__).parents[1]
MIB = 1 << 20


class Filled:
    """Records in shards of one and of several rows, in a few partitions, of one or two levels."""

    def __init__(self, root: Path, partition_by: int = 1) -> None:
        self.stored = Stored(root, keys=rr.KeyScheme.fastdeploy(partition_by))
        self.rows = [self.stored.row(f"p{number % 5}:{number % 2}:{number}") for number in range(30)]
        self.shards: list[tuple[Path, list[RowData]]] = []
        for first in range(10):
            for rows in ([self.rows[first]], [self.rows[first + 10], self.rows[first + 20]]):
                self.shards.append((self.stored.shard(*rows), rows))
        self.ids = [data.row.request_id for data in self.rows]
        self.refs = [row_ref(data.row.record_id, data.row.request_id) for data in self.rows]

    def open(self) -> rr.RoutingDataset:
        return rr.open_dataset(self.stored.root)

    def expected(self) -> Reads:
        payload = [(data.row.request_id, data.routed_experts[3].tobytes()) for data in self.rows]  # type: ignore[index]
        names = sorted(self.ids)
        rows = sorted(payload)
        return {
            "get": payload[:20],
            "get_many": payload,
            "heads": [(name, 5) for name in self.ids],
            "ids": names,
            "wait_for": [(name, "complete") for name in self.ids],
            "resolve": payload,
            "poll": names,
            "scan": rows,
            "to_pyarrow": rows,
            "to_pyarrow names": rows,
        }


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path / "ds")


def run(code: str, *arguments: object, **limits: str) -> Any:
    """What a child process prints as JSON; it has `ds` of argv[1]."""
    head = """
    import json, sys, os, resource, warnings
    import rr_dataset as rr
    from every_reader import READERS, read_all, read_into
    ds = rr.open_dataset(sys.argv[1])
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **limits}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("partition_by", [1, 2])
def test_all_readers_agree(tmp_path: Path, partition_by: int) -> None:
    filled = Filled(tmp_path / "ds", partition_by)
    assert read_all(filled.open(), filled.ids, filled.refs) == filled.expected()
    assert len(list(filled.stored.root.glob("*/" * partition_by + "*.arrow"))) == len(filled.shards)


def test_two_levels_with_an_absent_second(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "ds", keys=rr.KeyScheme.fastdeploy(2))
    rows = [stored.put(request_id) for request_id in ("a", "a:1", "a:1:2", "b:1")]
    ids = [data.row.request_id for data in rows]
    reads = read_all(stored.dataset, ids, [row_ref(data.row.record_id, data.row.request_id) for data in rows])
    assert (stored.root / "data_id=a" / "gen_id=__HIVE_DEFAULT_PARTITION__").is_dir()
    assert [name for name, _ in reads["get_many"]] == reads["ids"] == reads["poll"] == ids
    assert [name for name, _ in reads["scan"]] == [name for name, _ in reads["to_pyarrow names"]] == ids
    assert sorted(stored.dataset.ids("a:1")) == ["a:1", "a:1:2"]
    assert stored.dataset.to_pyarrow("a:1", prune=False).count_rows() == 2


def test_all_readers_show_the_last_turn_only(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "ds", keep="last_turn")
    stored.put("a:1:0")
    _, cursor = stored.dataset.poll()
    rows = [stored.put("a:1:1"), stored.put("a:2:0")]
    ids = [data.row.request_id for data in rows]
    reads = read_all(stored.dataset, ids, [row_ref(data.row.record_id, data.row.request_id) for data in rows])
    assert reads["ids"] == reads["poll"] == ids
    assert [name for name, _ in reads["scan"]] == [name for name, _ in reads["to_pyarrow"]] == ids
    assert [name for name, _ in reads["to_pyarrow names"]] == ids
    assert [head.request_id for head in stored.dataset.poll(cursor)[0]] == ids


def test_threads_share_a_dataset_in_every_reader(filled: Filled) -> None:
    ds, expected = filled.open(), filled.expected()
    names = list(READERS) * 8
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda name: READERS[name](ds, filled.ids, filled.refs), names))
    assert all(answer == expected[name] for name, answer in zip(names, got, strict=True))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes(filled: Filled, method: str) -> None:
    """A dataset that has been used in every way goes to child processes as an argument, and the parent goes on."""
    code = """
    import multiprocessing
    if __name__ == "__main__":
        ids, refs = json.loads(sys.argv[2])
        before = read_all(ds, ids, refs)
        context = multiprocessing.get_context(sys.argv[3])
        children = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # threads and fork: what is tested
                child = context.Process(target=read_into, args=(ds, ids, refs, theirs))
                child.start()
            children.append((child, ours))
        answers = [ours.recv() for _, ours in children]
        for child, _ in children:
            child.join()
        assert [child.exitcode for child, _ in children] == [0, 0]
        print(json.dumps([answer == before for answer in [*answers, read_all(ds, ids, refs)]]))
    """
    # A spawned child imports what its target is in; the program itself must not run again in it.
    assert run(code, filled.stored.root, json.dumps([filled.ids, filled.refs]), method) == [True, True, True]


@pytest.mark.parametrize("moment", ["before it is opened", "after its index was read"])
@pytest.mark.parametrize("name", READERS)
def test_a_shard_that_vanishes_while_read(
    filled: Filled, monkeypatch: pytest.MonkeyPatch, name: str, moment: str
) -> None:
    """Compaction replaces one under a reader that has listed it: the reader starts over and gives the same."""
    expected = filled.expected()[name]
    ds = filled.open()
    if moment == "after its index was read":
        list(ds.ids())
    path, rows = filled.shards[-1]
    open_, listed = LocalStorage.open, LocalStorage.list
    armed = [True]

    def compact(at: str) -> None:
        if armed and at.split("/", 1)[0] == path.parent.name:
            armed.clear()
            filled.stored.shard(*rows, inputs=[path], level=1)
            path.unlink()

    def open_later(storage: LocalStorage, at: str, entry: Any = None) -> Any:
        if at.endswith(path.name):
            compact(at)
        return open_(storage, at)

    def list_then(storage: LocalStorage, at: str) -> Any:
        found = listed(storage, at)
        if moment == "after its index was read" and name not in ("heads", "ids", "wait_for", "poll"):
            return found
        compact(at)
        return found

    monkeypatch.setattr(LocalStorage, "open", open_later)
    monkeypatch.setattr(LocalStorage, "list", list_then)
    if name.startswith("to_pyarrow") and moment == "after its index was read":
        view = ds.to_pyarrow()
        compact(path.parent.name)
        with pytest.raises(FileNotFoundError, match=path.name):  # a view of its moment
            view.to_table()
    assert READERS[name](ds, filled.ids, filled.refs) == expected
    assert not armed


@pytest.fixture(scope="module", params=[1, 500])
def many_shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Stored, list[str]]:
    """2,000 shards in one or in many partitions, and the refs."""
    stored = Stored(tmp_path_factory.mktemp("many") / "ds")
    rows = [stored.put(f"p{number % request.param}:{number}", 2) for number in range(2000)]
    return stored, [row_ref(data.row.record_id, data.row.request_id) for data in rows]


def test_2000_shards_under_a_limit_of_128_descriptors(many_shards: tuple[Stored, list[str]], tmp_path: Path) -> None:
    """Four threads at once."""
    stored, refs = many_shards
    (tmp_path / "refs").write_text(json.dumps(refs))
    code = """
    from concurrent.futures import ThreadPoolExecutor
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    refs = json.loads(open(sys.argv[2]).read())
    ids = [ref.split(":", 1)[1] for ref in refs]
    readers = {name: read for name, read in READERS.items() if name != "get"}
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda name: len(readers[name](ds, ids, refs)), readers))
    print(json.dumps([counts, len(os.listdir("/proc/self/fd"))]))
    """
    counts, open_descriptors = run(code, stored.root, tmp_path / "refs")
    assert counts == [2000] * (len(READERS) - 1)
    assert open_descriptors < 20


LIMIT_MB = 32


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """More than ten times the limit: records of 1 MB, four a shard."""
    stored = Stored(tmp_path_factory.mktemp("large") / "ds")
    tokens = MIB // stored.spec.bytes_per_token
    for shard in range(LIMIT_MB * 10 // 4 + 1):
        stored.shard(*[stored.row(f"p{shard % 8}:{shard}:{number}", tokens) for number in range(4)])
    return stored


LIMITED = """
def data_bytes():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])

ids = list(ds.ids())
ds.get_many(ids[:8])  # what a process takes once: threads, their stacks
next(ds.scan("p0:0"))
limit = data_bytes() + int(sys.argv[2]) * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
"""


@pytest.mark.parametrize(
    "loop",
    [
        "sum(batch.nbytes for batch in ds.scan())",
        "sum(batch.nbytes for batch in ds.scan(columns=['layer_003', 'layer_004', 'layer_007', 'layer_009']))",
        "sum(r.routed_experts.nbytes for at in range(0, len(ids), 8) for r in ds.get_many(ids[at : at + 8]))",
        "sum(ds.get(request_id).routed_experts.nbytes for request_id in ids)",
    ],
)
def test_a_dataset_ten_times_the_memory_is_read_through(large: Stored, loop: str) -> None:
    total = run(LIMITED + f"print(json.dumps({loop}))", large.root, LIMIT_MB, ARROW_DEFAULT_MEMORY_POOL="system")
    assert total > LIMIT_MB * 10 * MIB


def test_the_limit_is_one(large: Stored) -> None:
    """To keep all that was read is more than the limit allows."""
    code = """
    try:
        kept = list(ds.scan())
    except MemoryError:
        kept = None
    print(json.dumps(kept is None))
    """
    assert run(LIMITED + textwrap.dedent(code), large.root, LIMIT_MB, ARROW_DEFAULT_MEMORY_POOL="system")


@pytest.mark.nightly
def test_100000_partitions(tmp_path: Path) -> None:
    stored = Stored(tmp_path / "ds")
    ids = sorted(f"p{number}:0" for number in range(100_000))
    for request_id in ids:
        stored.put(request_id, 1)
    ds = rr.open_dataset(stored.root)
    assert sorted(ds.ids()) == ids
    assert [record.request_id for record in ds.get_many(ids[::1000])] == ids[::1000]
    heads, cursor = ds.poll()
    assert len(heads) == len(ids)
    assert len(cursor.to_bytes()) < 25 * len(ids)
    stored.put("new")
    assert [head.request_id for head in ds.poll(cursor)[0]] == ["new"]
    assert len(list(islice(ds.scan(columns=["request_id"]), 1000))) == 1000
    assert len(ds.to_pyarrow(prune=False).files) == len(ids) + 1
