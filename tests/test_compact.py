"""Compaction: what stays, what goes, what is visible meanwhile, and what it leaves alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import rr_dataset as rr
from rr_dataset.compact_plan import Task
from rr_dataset.compactor import Compactor, CompactReport
from rr_dataset.layout import parse_shard_name
from rr_dataset.lookup import Lookup
from rr_dataset.merge import DamagedInputError
from rr_dataset.shard import ShardBuilder, read_index
from rr_dataset.shard import read as shard_read
from rr_dataset.storage import open_storage
from rr_dataset.storage.local import LocalStorage
from tests.lifecycle import GRACE_MS, LATER_MS, collect_at, compact_at, fill, now_ms, record_ids, seen, shards
from tests.stored import SPEC, Stored


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "dataset"


def index_of(path: Path) -> Any:
    with open_storage(path.parent).open(path.name) as source:
        return read_index(source)


def compactor_of(root: Path, ms: int | None = None) -> Compactor:
    return Compactor(Lookup(str(root), None, None), lambda: now_ms() if ms is None else ms)


def task_of(root: Path, *names: str, partition: str = "data_id=p", compression: str = "zstd:3") -> Task:
    listed = {path.name: path for path in shards(root, partition)}
    chosen = names or tuple(listed)
    return Task(partition, chosen, sum(listed[name].stat().st_size for name in chosen), len(chosen), compression)


def test_a_reader_sees_the_same_before_between_and_after(root: Path) -> None:
    _, model = fill(root, now_ms())
    assert seen(root) == model
    rest = seen(root, run="run-1")
    report = rr.compact(root)
    assert report.damaged == ()
    assert report.outputs == 3
    assert seen(root) == model
    assert seen(root, run="run-1") == rest
    assert compact_at(root, now_ms() + LATER_MS).shards_removed > 0
    assert seen(root) == model
    assert seen(root, run="run-1") == rest


def test_only_what_lives_is_left_at_last(root: Path) -> None:
    _, model = fill(root, now_ms())
    for step in range(1, 5):
        compact_at(root, now_ms() + step * LATER_MS)
    assert not (root / "data_id=q").exists()
    left = list(record_ids(root))
    assert len(left) == len(set(left)) == 8
    assert [len(shards(root, f"data_id={name}")) for name in "prs"] == [1, 1, 1]
    assert seen(root) == model
    assert compact_at(root, now_ms() + 5 * LATER_MS) == CompactReport()


def test_names_and_index_of_an_output(root: Path) -> None:
    stored = Stored(root)
    first, second = stored.put("p:0"), stored.put("p:1")
    inputs = [path.name for path in shards(root)]
    mark = stored.tombstone("ids", ["p:0", "p:9"], t_del=5)
    stored.tombstone("ids", ["p:1"], t_del=1)  # reaches the input, not the output
    stored.tombstone("ids", ["q:0"], t_del=9)
    rr.compact(root)
    output = next(path for path in shards(root) if path.name not in inputs)
    name, index = parse_shard_name(output.name), index_of(output)
    assert first.row.t_submit == 1
    assert second.row.t_submit == 2
    assert name is not None
    assert (name.level, name.tmin, name.tmax, name.rows) == (1, 2, 2, 1)
    assert sorted(index.inputs) == inputs
    assert index.compression == "zstd"
    assert index.tombstones_applied == (json.loads(mark.read_text())[0]["uuid"],)
    assert not (root / "_rr/tmp").exists()


def test_a_level_ends_at_99(root: Path) -> None:
    stored = Stored(root)
    stored.shard(stored.row("p:0"), level=99)
    stored.shard(stored.row("p:1"), level=4)
    assert compactor_of(root).execute(task_of(root)).outputs == 1
    assert sorted(path.name[:2] for path in shards(root)) == ["04", "99", "99"]
    assert len(seen(root)) == 2


def test_a_newer_row_elsewhere_replaces_nothing(root: Path) -> None:
    stored = Stored(root)
    old, other, newer = stored.row("p:0"), stored.row("p:1"), stored.row("p:0")
    inputs = [stored.shard(old), stored.shard(other)]
    stored.shard(newer)
    report = compactor_of(root).execute(task_of(root, *(path.name for path in inputs)))
    assert report.rows_dropped == 0
    assert report.rows == 2


def test_a_newer_row_of_another_run_replaces_nothing(root: Path) -> None:
    stored = Stored(root)
    stored.put("p:0", run="a")
    stored.put("p:0", run="b")
    before = seen(root, run="a")
    rr.compact(root)
    compact_at(root, now_ms() + LATER_MS)
    assert len(shards(root)) == 1
    assert seen(root, run="a") == before != seen(root, run="b")


def test_what_a_drop_replaced_still_hides_lower_turns(root: Path) -> None:
    stored = Stored(root, keep="last_turn")
    low = stored.shard(stored.row("p:0:1:0"))
    high = [stored.shard(stored.row("p:0:2:0")), stored.shard(stored.row("p:0:2:0", status="dropped"))]
    assert set(seen(root)) == {"p:0:2:0"}
    assert compactor_of(root).execute(task_of(root, *(path.name for path in high))).rows_dropped == 0
    for step in (1, 2):
        compact_at(root, now_ms() + step * LATER_MS)
    assert set(seen(root)) == {"p:0:2:0"}
    assert not low.exists()


def test_lower_turns_go_with_their_files(root: Path) -> None:
    stored = Stored(root, keep="last_turn")
    for turn in range(3):
        stored.put(f"p:0:{turn}:0")
        stored.put(f"p:1:{turn}:0#{turn}")  # other samples
    before = seen(root)
    assert rr.compact(root).rows_dropped == 2
    compact_at(root, now_ms() + LATER_MS)
    assert seen(root) == before
    assert len(before) == 4


def test_two_compactors_of_the_same_files(root: Path) -> None:
    _, model = fill(root, now_ms())
    tasks = list(rr.plan_compaction(root))
    one, two = compactor_of(root), compactor_of(root)
    views = {task.partition: two.view(task.partition) for task in tasks}
    assert sum(one.execute(task).outputs for task in tasks) == 3
    two.view = lambda path: views[path]  # type: ignore[method-assign]  # it had listed before
    assert sum(two.execute(task).outputs for task in tasks) == 3
    assert seen(root) == model
    for step in range(1, 5):
        compact_at(root, now_ms() + step * LATER_MS)
        collect_at(root, now_ms() + step * LATER_MS)
        assert seen(root) == model
    assert len(list(record_ids(root))) == 8


def test_a_task_is_done_once(root: Path) -> None:
    stored = Stored(root)
    stored.put("p:0")
    task = task_of(root)
    assert compactor_of(root).execute(task).outputs == 1
    assert compactor_of(root).execute(task) == CompactReport(skipped=1)
    shards(root)[0].unlink()
    assert compactor_of(root).execute(task) == CompactReport(skipped=1)


def test_a_compactor_that_is_too_slow_gives_up(root: Path) -> None:
    stored = Stored(root, tombstone_ttl_s=4000.0)
    stored.put("p:0")
    times = iter([0, 1_000_000, 1_000_001])
    compactor = Compactor(Lookup(str(root), None, None), lambda: next(times))
    assert compactor.execute(task_of(root)).outputs == 1  # a quarter of a life is not too long
    times = iter([0, 1_000_001])
    stored.put("p:1")
    task = task_of(root, next(path.name for path in shards(root) if path.name.startswith("00-" + "0" * 15 + "2")))
    assert compactor.execute(task) == CompactReport(skipped=1)
    assert len(shards(root)) == 3


def test_an_output_that_was_deleted_meanwhile_goes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(root)
    stored.put("p:0")
    create = LocalStorage.create

    def delete_at_once(self: LocalStorage, path: str, *args: Any, **kwargs: Any) -> bool:
        made = create(self, path, *args, **kwargs)
        if path.endswith(".arrow"):
            stored.tombstone("prefix", "p")
        return made

    monkeypatch.setattr(LocalStorage, "create", delete_at_once)
    rr.compact(root)
    assert [path.name[:2] for path in shards(root)] == ["00"]
    assert seen(root) == {}


@pytest.mark.parametrize("column", ["routed_experts", "token_ids", "index"])
def test_nothing_is_published_that_reads_back_otherwise(
    root: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    stored = Stored(root)
    data = stored.put("p:0", 4000, vectors=True)
    content = b"inputs" if column == "index" else getattr(data, column).tobytes()[:4000]
    finish = ShardBuilder.finish

    def slip(self: ShardBuilder, *args: Any) -> memoryview:
        built = finish(self, *args)
        at = bytes(built).index(content)
        built[at] ^= 1
        return built

    monkeypatch.setattr(ShardBuilder, "finish", slip)
    with pytest.raises(rr.CorruptShardError, match="built wrong and is not published"):
        rr.compact(root, compression="none")
    assert len(shards(root)) == 1


@pytest.mark.parametrize("vectors", [False, True])
def test_bit_rot_is_never_given_a_new_checksum(root: Path, vectors: bool) -> None:
    stored = Stored(root)
    data = stored.row("p:0", 5000, vectors=vectors)
    path = stored.shard(data)
    stored.put("p:1")
    assert data.routed_experts is not None
    content = bytearray(path.read_bytes())
    at = content.index(data.routed_experts[1].tobytes())
    content[at + 7] ^= 1
    path.write_bytes(content)
    report = rr.compact(root)
    assert len(report.damaged) == 1
    assert path.name in report.damaged[0]
    assert "checksum" in report.damaged[0]
    assert report.outputs == 1
    assert report.rows == 1
    compact_at(root, now_ms() + LATER_MS)
    assert path.exists()


def test_a_damaged_shard_is_left_alone_and_reported(root: Path) -> None:
    stored = Stored(root)
    path = stored.shard(stored.row("p:0"))
    stored.put("p:1")
    path.write_bytes(path.read_bytes()[:-20])
    report = rr.compact(root)
    assert report.outputs == 1
    assert len(report.damaged) == 1
    assert path.name in report.damaged[0]
    with pytest.raises(DamagedInputError):
        compactor_of(root).execute(task_of(root, path.name))


@pytest.mark.filterwarnings("error")
def test_foreign_readers_see_every_row_after(root: Path) -> None:
    fill(root, now_ms())
    before = set(record_ids(root))
    rr.compact(root)
    for step in (1, 2, 3):
        compact_at(root, now_ms() + step * LATER_MS)
    assert set(record_ids(root)) < before
    for path in shards(root):
        table = pa.ipc.open_file(path).read_all()
        table.validate(full=True)
        keys = list(zip(*(table[name].to_pylist() for name in ("request_id", "t_submit", "record_id")), strict=True))
        assert keys == sorted(keys)


def test_a_reader_that_keeps_old_indexes(root: Path) -> None:
    _, model = fill(root, now_ms())
    dataset = rr.open_dataset(root)
    ids = [request_id for request_id, (_, _, status) in model.items() if status != "dropped"]

    def check() -> None:
        assert [record.to_numpy().tobytes() for record in dataset.get_many(ids)] == [model[key][0] for key in ids]
        assert sorted(dataset.ids()) == sorted(model)

    check()
    for step in range(1, 5):
        compact_at(root, now_ms() + step * LATER_MS)
        check()
        collect_at(root, now_ms() + step * LATER_MS)
        check()


@pytest.mark.parametrize("packed_bytes", [1, 32 << 20])
def test_a_prompt_is_decoded_once_per_call(root: Path, monkeypatch: pytest.MonkeyPatch, packed_bytes: int) -> None:
    monkeypatch.setattr(shard_read, "_PACKED_BYTES", packed_bytes)
    stored = Stored(root)
    ids = [f"p:{i}:0:0" for i in range(12)]
    for request_id in ids:
        stored.put(request_id, 300)
    model = seen(root)
    rr.compact(root)
    for path in shards(root):
        if path.name.startswith("00-"):
            path.unlink()
    decoded: list[int] = []
    decompress = shard_read._decompress
    monkeypatch.setattr(shard_read, "_decompress", lambda *args: decoded.append(args[2]) or decompress(*args))
    for request_id, record in zip(ids, rr.open_dataset(root).get_many(ids), strict=True):
        assert record.request_id == request_id
        assert record.to_numpy().tobytes() == model[request_id][0]
    assert len(decoded) == len(set(decoded)) == SPEC.num_layers


def test_jobs_and_parts_share_the_work(root: Path) -> None:
    stored = Stored(root)
    for i in range(30):
        stored.put(f"p{i % 10}:{i}:0:0")
    before = seen(root)
    planned = [len(list(rr.plan_compaction(root, shard=(i, 3)))) for i in (1, 2, 3)]
    assert sum(planned) == 10
    assert min(planned) > 0
    told: list[CompactReport] = []
    done = [rr.compact(root, shard=(i, 3), jobs=2, progress=told.append).tasks for i in (1, 2, 3)]
    assert done == planned
    assert len(told) == 10
    assert rr.compact(root) == CompactReport()
    assert seen(root) == before


def test_a_plan_can_be_kept_and_run_later(root: Path) -> None:
    fill(root, now_ms())
    tasks = list(rr.plan_compaction(root, prefix="p"))
    assert {task.partition for task in tasks} == {"data_id=p"}
    assert rr.compact(root, dry_run=True, prefix="p").tasks == len(tasks)
    files = shards(root)
    assert rr.compact(root, dry_run=True, tasks=tasks).bytes_read == sum(task.bytes for task in tasks)
    assert shards(root) == files
    assert rr.compact(root, tasks=[Task(**vars(task)) for task in tasks]).outputs == len(tasks)


@pytest.mark.parametrize(
    "how", [{"jobs": 0}, {"target_bytes": 0}, {"shard": (0, 2)}, {"shard": (3, 2)}, {"compression": "zip"}]
)
def test_arguments_are_checked(root: Path, how: dict[str, Any]) -> None:
    Stored(root)
    with pytest.raises(rr.InvalidInputError, match=next(iter(how))):
        rr.compact(root, **how)
    if "jobs" not in how:
        with pytest.raises(rr.InvalidInputError, match=next(iter(how))):
            rr.plan_compaction(root, **how)


def test_inputs_stay_for_grace(root: Path) -> None:
    stored = Stored(root)
    stored.put("p:0")
    rr.compact(root)
    compact_at(root, now_ms() + GRACE_MS - 5000)
    assert len(shards(root)) == 2
    assert compact_at(root, now_ms() + GRACE_MS + 5000).shards_removed == 1
    assert [path.name[:2] for path in shards(root)] == ["01"]


def test_a_torn_listing_within_grace(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever mix of an old and a new listing a store gives within grace, a reader sees the same."""
    _, model = fill(root, now_ms())
    old = {path: LocalStorage(str(root)).list(path) for path in ("data_id=p", "data_id=r")}
    rr.compact(root)
    listing = LocalStorage.list
    choose: list[Callable[[int], bool]] = [lambda _: True, lambda _: False, lambda i: i % 2 == 0, lambda i: i % 2 == 1]
    for keep in choose:

        def torn(self: LocalStorage, path: str, keep: Callable[[int], bool] = keep) -> Any:
            now = listing(self, path)
            if path not in old:
                return now
            before = {entry.name for entry in old[path]}
            fresh = [entry for entry in now if entry.name not in before]
            return [*old[path], *(entry for i, entry in enumerate(fresh) if keep(i))]

        monkeypatch.setattr(LocalStorage, "list", torn)
        assert seen(root) == model
        compact_at(root, now_ms() + 1000)  # a compactor with such a listing
        monkeypatch.setattr(LocalStorage, "list", listing)
        assert seen(root) == model
    for step in range(1, 6):
        compact_at(root, now_ms() + step * LATER_MS)
    assert seen(root) == model
    assert len(list(record_ids(root))) == 8
