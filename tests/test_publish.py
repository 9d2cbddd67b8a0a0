"""The worker's steps 1 to 4: what a slab becomes, also when it is replayed, deleted meanwhile, or too old."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rr_dataset import publish
from rr_dataset.clock import pack
from rr_dataset.errors import ObjectNotFoundError, StorageError
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import DatasetFormat
from rr_dataset.publish import PUBLISH_THREADS, PublishReport, publish_slab
from rr_dataset.record import RoutingSpec, Row, RowData
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import TombstoneCache

WRITER = "00112233aabbccdd"
SPEC = RoutingSpec((3, 5), 16, 2)
FMT = DatasetFormat("6f0a2f4a-4d7e-4b58-9d9c-0c8f5a3f1e11", SPEC, KeyScheme.fastdeploy())
NOW_MS = 1_800_000_000_000
TTL_MS, MARGIN_MS = int(FMT.tombstone_ttl_s * 1000), 3_600_000


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(PUBLISH_THREADS) as pool:
        yield pool


def data(request_id: str, ms: int, tokens: int = 3, fmt: DatasetFormat = FMT) -> RowData:
    """A put `ms` after NOW_MS, with content of its own; no tokens: a drop."""
    key, stamp = fmt.keys.parse(request_id), pack(NOW_MS + ms)
    row = Row(
        f"{stamp:016x}-{WRITER}", request_id, key.components, key.choice, stamp, 0, tokens,
        part=False, status="complete" if tokens else "dropped", run_id="r",
        layers=SPEC.moe_layers if tokens else (), reason=None if tokens else "spool_full",
    )  # fmt: skip
    experts = np.random.default_rng(ms).integers(0, 16, (2, tokens, 2), np.uint8) if tokens else None
    return RowData(row, experts)


def name(rows: list[RowData], seq: int = 7) -> str:
    stamps = [each.row.t_submit for each in rows]
    return f"00-{min(stamps):016x}-{max(stamps):016x}-{len(rows)}-{WRITER}-{seq}.arrow"


def shards(root: Path) -> dict[str, list[str]]:
    """Path below the root and request ids of every shard, by pyarrow."""
    found = {}
    for path in sorted(root.glob("data_id=*/**/*.arrow")):
        with pa.ipc.open_file(path.read_bytes()) as file:
            found[str(path.relative_to(root))] = file.read_all().column("request_id").to_pylist()
    return found


def footer(path: Path) -> dict[str, Any]:
    with pa.ipc.open_file(path.read_bytes()) as file:
        return dict(json.loads(file.schema.metadata.get(b"rr.index") or file.metadata[b"rr.index"]))


def bury(root: Path, text: str, t_del: int, number: int = 1, kind: str = "prefix") -> Path:
    """A tombstone as somebody else makes it."""
    path = root / "_rr/tombstones" / f"{NOW_MS:012x}-{number:032x}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"uuid": f"{number:032x}", "kind": kind, "text": text, "run": None, "t_del": t_del, "made": NOW_MS}
    path.write_text(json.dumps([values]))
    return path


class Spy:
    """A storage that tells its calls, and does something before or after some."""

    def __init__(self, root: Path, **hooks: Callable[..., object]) -> None:
        self._storage = open_storage(root)
        self._hooks = hooks
        self._lock = threading.Lock()
        self.calls: list[str] = []

    def __getattr__(self, call: str) -> Any:
        if not callable(getattr(self._storage, call)):
            return getattr(self._storage, call)

        def run(*args: Any, **kwargs: Any) -> Any:
            args = (list(args[0]), *args[1:]) if call in ("delete", "sync_dirs") else args
            with self._lock:
                self.calls.append(f"{call} {args[0]}")
                if f"before_{call}" in self._hooks:
                    self._hooks[f"before_{call}"](args[0])
            result = getattr(self._storage, call)(*args, **kwargs)
            if f"after_{call}" in self._hooks:
                self._hooks[f"after_{call}"](args[0])
            return result

        return run


@pytest.fixture(autouse=True)
def _founded(tmp_path: Path) -> None:
    (tmp_path / "_rr").mkdir()


def run(storage: Any, rows: list[RowData], pool: ThreadPoolExecutor, **options: Any) -> PublishReport:
    """One attempt, by a worker that has just started."""
    fmt = options.pop("fmt", FMT)
    options = {"cache": TombstoneCache(fmt.keys), "now_ms": lambda: NOW_MS, "writer": WRITER, "seq": 7, **options}
    return publish_slab(storage, fmt, rows=rows, pool=pool, **options)


A = [data("a:1", 5), data("a:0", 1), data("a:0:1", 9, tokens=0)]
B = [data("b", 3)]
SLAB = [A[0], B[0], A[1], A[2]]
PUBLISHED = {f"data_id=a/{name(A)}": ["a:0", "a:0:1", "a:1"], f"data_id=b/{name(B)}": ["b"]}


def test_a_shard_for_each_partition(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    report = run(open_storage(tmp_path), SLAB, pool)
    assert shards(tmp_path) == PUBLISHED
    assert report == PublishReport(4, sum((tmp_path / path).stat().st_size for path in PUBLISHED), 2, set_aside=False)
    assert footer(tmp_path / f"data_id=a/{name(A)}")["tombstones_applied"] == []
    assert not [path for path in (tmp_path / "_rr").rglob("*") if path.is_file()]


def test_two_path_levels(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    fmt = DatasetFormat(FMT.uuid, SPEC, KeyScheme.fastdeploy(2))
    rows = [data("a:1", 1, fmt=fmt), data("a:2:0", 2, fmt=fmt), data("b", 3, fmt=fmt)]
    run(open_storage(tmp_path), rows, pool, fmt=fmt)
    folders = ("data_id=a/gen_id=1", "data_id=a/gen_id=2", "data_id=b/gen_id=__HIVE_DEFAULT_PARTITION__")
    assert list(shards(tmp_path)) == [f"{folder}/{name([each])}" for folder, each in zip(folders, rows, strict=True)]


def test_nothing_in_the_slab(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    assert run(open_storage(tmp_path), [], pool) == PublishReport(0, 0, 0, set_aside=False)


@pytest.mark.parametrize("large", [0, 1 << 30])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_many_at_once_keep_their_own_bytes(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, large: int, compression: str
) -> None:
    monkeypatch.setattr(publish, "LARGE_SHARD_BYTES", large)
    rows = [data(f"p{i}", i, tokens=200 + i) for i in range(60)]
    assert run(open_storage(tmp_path), rows, pool, compression=compression).shards == 60
    for each in rows:
        with pa.ipc.open_file((tmp_path / f"data_id={each.row.request_id}" / name([each])).read_bytes()) as file:
            table = file.read_all()
        assert each.routed_experts is not None
        for layer, stored in zip(SPEC.moe_layers, each.routed_experts, strict=True):
            assert table.column(f"layer_{layer:03d}").to_pylist() == [stored.tobytes()]


def test_the_order_of_the_steps(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    spy = Spy(tmp_path)
    run(spy, SLAB, pool)
    calls = [call for call in spy.calls if not call.startswith(("delete []",))]
    assert calls[0] == calls[-1] == "list _rr/tombstones"
    assert sorted(calls[1:-2]) == [f"create {path}" for path in PUBLISHED]
    assert calls[-2] == "sync_dirs ['data_id=a', 'data_id=b']"


def test_a_replay_writes_the_same_names_and_changes_nothing(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    first = run(open_storage(tmp_path), SLAB, pool)
    before = {path: (tmp_path / path).stat() for path in PUBLISHED}
    spy = Spy(tmp_path)
    assert run(spy, SLAB, pool, now_ms=lambda: NOW_MS + 1000) == first
    assert shards(tmp_path) == PUBLISHED
    assert {path: (tmp_path / path).stat() for path in PUBLISHED} == before
    assert "sync_dirs ['data_id=a', 'data_id=b']" in spy.calls  # the first attempt may have died before its own


class DiedError(Exception):
    """The worker ends here."""


@given(at=st.integers(0, 8), covered=st.sampled_from(["", "a", "a:0", "b"]), when=st.integers(0, 8))
def test_a_death_anywhere_is_healed_by_a_replay(
    tmp_path_factory: pytest.TempPathFactory, pool: ThreadPoolExecutor, at: int, covered: str, when: int
) -> None:
    root = tmp_path_factory.mktemp("died")
    (root / "_rr").mkdir()
    count = 0

    def step(_: object) -> None:
        nonlocal count
        if count == when and covered:
            bury(root, covered, pack(NOW_MS + 9))
        count += 1
        if count > at:
            raise DiedError

    hooks = {f"before_{call}": step for call in ("list", "create", "sync_dirs", "delete", "remove_empty_dirs")}
    with suppress(DiedError):
        run(Spy(root, **hooks), SLAB, pool)  # dies before it is acknowledged at the latest
    if covered:
        bury(root, covered, pack(NOW_MS + 9))
    run(open_storage(root), SLAB, pool)
    found = shards(root)
    gone = {"a": "data_id=a", "b": "data_id=b"}.get(covered, "none")
    assert list(found) == [path for path in PUBLISHED if not path.startswith(gone)]
    for path, ids in found.items():
        assert set(ids) in ({*PUBLISHED[path]}, {*PUBLISHED[path]} - ({"a:0", "a:0:1"} if covered == "a:0" else set()))
    assert not (root / gone).exists()


def test_covered_rows_are_not_written_but_named(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    bury(tmp_path, "a:0", pack(NOW_MS + 9))
    bury(tmp_path, "a:9", pack(NOW_MS + 1), number=2)  # reaches into the partition, matches nothing
    bury(tmp_path, "a:9", pack(NOW_MS + 1) - 1, number=3)  # older than every row
    bury(tmp_path, "b", pack(NOW_MS + 2), number=4)
    report = run(open_storage(tmp_path), SLAB, pool)
    assert shards(tmp_path) == {f"data_id=a/{name(A)}": ["a:1"], f"data_id=b/{name(B)}": ["b"]}
    assert report.records == 2
    assert footer(tmp_path / f"data_id=a/{name(A)}")["tombstones_applied"] == [f"{1:032x}", f"{2:032x}"]
    assert footer(tmp_path / f"data_id=b/{name(B)}")["tombstones_applied"] == []


def test_a_replay_removes_its_own_shard_when_all_rows_are_covered(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    run(open_storage(tmp_path), SLAB, pool)
    other = tmp_path / "data_id=b" / name(B, seq=8)
    other.write_bytes(b"of another slab")
    bury(tmp_path, "", pack(NOW_MS + 9), kind="all")
    report = run(open_storage(tmp_path), SLAB, pool)
    assert report == PublishReport(0, 0, 0, set_aside=False)
    assert [path.name for path in tmp_path.glob("data_id=*")] == ["data_id=b"]
    assert [path.name for path in other.parent.iterdir()] == [other.name]


def test_a_shard_deleted_while_it_was_published_is_removed(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    def delete(_: object) -> None:
        bury(tmp_path, "b", pack(NOW_MS + 9), number=1)
        bury(tmp_path, "a:0", pack(NOW_MS + 9), number=2)

    run(Spy(tmp_path, after_sync_dirs=delete), SLAB, pool)
    assert shards(tmp_path) == {f"data_id=a/{name(A)}": ["a:0", "a:0:1", "a:1"]}  # not all of its rows are covered
    assert not (tmp_path / "data_id=b").exists()


def test_rows_put_after_the_delete_stay(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    bury(tmp_path, "", pack(NOW_MS + 5), kind="all")
    run(open_storage(tmp_path), SLAB, pool)
    assert shards(tmp_path) == {f"data_id=a/{name(A)}": ["a:0:1"]}


def test_a_slab_as_old_as_tombstones_live_is_set_aside(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    last = NOW_MS + 1 + TTL_MS - MARGIN_MS  # the oldest row of the slab decides, for every partition
    report = run(open_storage(tmp_path), SLAB, pool, now_ms=lambda: last + 1)
    assert report == PublishReport(0, 0, 0, set_aside=True)
    assert not list(tmp_path.glob("data_id=*"))
    assert not run(open_storage(tmp_path), SLAB, pool, now_ms=lambda: last).set_aside
    assert shards(tmp_path) == PUBLISHED


def test_the_age_is_checked_before_every_create(tmp_path: Path) -> None:
    last = NOW_MS + 1 + TTL_MS - MARGIN_MS
    times = iter([last, last + 1])
    with ThreadPoolExecutor(1) as pool:
        report = run(open_storage(tmp_path), SLAB, pool, now_ms=lambda: next(times))
    assert (report.records, report.shards, report.set_aside) == (3, 1, True)
    assert list(shards(tmp_path)) == [f"data_id=a/{name(A)}"]


def test_covered_rows_need_no_create_however_old(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    bury(tmp_path, "", pack(NOW_MS + 9), kind="all")
    assert not run(open_storage(tmp_path), SLAB, pool, now_ms=lambda: NOW_MS + 2 * TTL_MS).set_aside


def test_a_failing_store_is_reported_when_all_threads_have_stopped(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    def fail(path: str) -> None:
        if path.startswith("data_id=b"):
            raise StorageError(5, "Input/output error", path)

    spy = Spy(tmp_path, before_create=fail)
    with pytest.raises(StorageError, match="data_id=b"):
        run(spy, [*B, *A], pool)
    assert list(shards(tmp_path)) == [f"data_id=a/{name(A)}"]
    assert run(open_storage(tmp_path), [*B, *A], pool).records == 4
    assert shards(tmp_path) == PUBLISHED


def test_it_lists_again_when_a_tombstone_file_vanishes(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    path = bury(tmp_path, "a", pack(NOW_MS + 9))
    run(Spy(tmp_path, before_read_bytes=lambda _: path.unlink()), SLAB, pool)
    assert shards(tmp_path) == PUBLISHED

    def vanish(path: str) -> None:
        raise ObjectNotFoundError(2, "No such file or directory", path)

    bury(tmp_path, "a", pack(NOW_MS + 9))
    with pytest.raises(ObjectNotFoundError):
        run(Spy(tmp_path, before_read_bytes=vanish), SLAB, pool)


LAST = DatasetFormat(FMT.uuid, SPEC, KeyScheme.fastdeploy(), keep="last_turn")


def test_a_turn_left_behind_within_the_slab_is_never_written(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    rows = [
        data("a:1:0", 1), data("a:1:1", 2), data("a:1:10", 3), data("a:1:2", 4), data("a:2:0", 5), data("a:1", 6),
        data("b:0:0", 7), data("b:0:1", 8, tokens=0),
    ]  # fmt: skip
    left = {
        f"data_id=a/{name(rows[:6])}": ["a:1", "a:1:10", "a:1:2", "a:2:0"],
        f"data_id=b/{name(rows[6:])}": ["b:0:0", "b:0:1"],
    }
    for _ in range(2):
        assert run(open_storage(tmp_path), rows, pool, fmt=LAST).records == 6
        assert shards(tmp_path) == left
    bury(tmp_path, "a:1:10", pack(NOW_MS + 9))
    run(open_storage(tmp_path), rows, pool, fmt=LAST, cache=TombstoneCache(LAST.keys, LAST.last_turn), seq=8)
    (path,) = (path for path in shards(tmp_path) if path.endswith("-8.arrow") and path.startswith("data_id=a"))
    assert shards(tmp_path)[path] == ["a:1", "a:2:0"]  # no lower turn comes back, also not the late 2
