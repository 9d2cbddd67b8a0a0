"""What stands on the readers and writers, over a real S3 server: `s3://` wherever a path goes."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from counting_proxy import CountingProxy, Fault, Request
from s3_medium import S3Medium

import rr_dataset as rr
from rr_dataset.compact import compact_with
from rr_dataset.compactor import Compactor, CompactReport, named_ms
from rr_dataset.garbage import Collector, GarbageReport
from rr_dataset.layout import MARGIN_S, QUARANTINE_DIR
from rr_dataset.lookup import Lookup
from rr_dataset.maintain import Steward
from rr_dataset.storage import Entry
from tests.spooled import make_spool, put

if TYPE_CHECKING:
    from weed import Place, S3Server

SPEC = rr.RoutingSpec(range(3, 9), num_experts=64, top_k=4)
TOKENS = 40
IDS = [f"p{number % 3}:{number}:0:0" for number in range(12)]
GRACE_MS = 600_000
CLIENTS = ["obstore", "s3fs"]
ROOT = Path(__file__).parents[1]

Routing = dict[str, npt.NDArray[np.uint8]]
ROUTING: Routing = {
    request_id: np.random.default_rng(number).integers(0, 64, (TOKENS, 6, 4), np.uint8)
    for number, request_id in enumerate(IDS)
}


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve records of three prompts, in four shards each."""
    root = tmp_path_factory.mktemp("fronts") / "local"
    with rr.RoutingWriter(root, rr.WriterOptions(spool_bytes=8 << 20, slab_bytes=1 << 20), create=SPEC) as writer:
        for at in range(0, 12, 3):
            for request_id in IDS[at : at + 3]:
                writer.put(request_id, ROUTING[request_id])
            writer.flush(60)
    return root


@pytest.fixture
def filled(s3: Place, local: Path) -> Place:
    """The same in a bucket."""
    medium = S3Medium(s3, "s3fs")
    for path in local.rglob("*"):
        if path.is_file():
            medium.put(str(path.relative_to(local)), path.read_bytes())
    return s3


def holds(uri: str, options: dict[str, Any] | None, routing: Routing) -> None:
    dataset = rr.open_dataset(uri, storage_options=options)
    assert sorted(dataset.ids()) == sorted(routing)
    for record in dataset.get_many(list(routing)):
        np.testing.assert_array_equal(record.to_numpy("TLK"), routing[record.request_id])


@pytest.fixture
def counted(s3_server: S3Server, s3: Place) -> Iterator[tuple[CountingProxy, dict[str, Any]]]:
    """What the options lead through, and these."""
    with CountingProxy.before(s3_server.port) as proxy:
        yield proxy, {**s3.options, "endpoint_url": proxy.endpoint}


def requests(proxy: CountingProxy, call: Callable[[], Any]) -> list[Request]:
    proxy.forget()
    call()
    return proxy.requests()


def collect_at(place: Place, ms: int) -> GarbageReport:
    lookup = Lookup(place.uri, None, place.options)
    return Collector(Compactor(lookup, lambda: ms), lookup, lambda: ms).collect()


def compact_at(place: Place, ms: int) -> CompactReport:
    return compact_with(Compactor(Lookup(place.uri, None, place.options), lambda: ms))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# Arrow


@pytest.mark.parametrize("client", CLIENTS)
def test_pyarrow_duckdb_and_polars_query_it(filled: Place, client: str) -> None:
    duckdb = pytest.importorskip("duckdb")
    polars = pytest.importorskip("polars")
    options = {**filled.options, "client": client}
    dataset = rr.open_dataset(filled.uri, storage_options=options)
    for prune in (False, True):
        described = dataset.to_pyarrow(prune=prune)
        for each in (described, pickle.loads(pickle.dumps(described))):
            table = each.to_table(columns=["layer_004"], filter=pc.field("request_id") == IDS[5])
            assert table["layer_004"].to_pylist() == [ROUTING[IDS[5]][:, 1].tobytes()]
        assert sorted(described.to_table(columns=["request_id"])["request_id"].to_pylist()) == sorted(IDS)
    frame = polars.scan_pyarrow_dataset(described).filter(polars.col("data_id") == "p1").select("request_id").collect()
    assert sorted(frame["request_id"]) == sorted(IDS[1::3])
    counted = duckdb.sql("SELECT data_id, sum(num_tokens)::INT FROM described GROUP BY ALL ORDER BY ALL").fetchall()
    assert counted == [(f"p{number}", 4 * TOKENS) for number in range(3)]
    rows = {row["request_id"]: row for batch in dataset.scan() for row in batch.to_pylist()}
    assert {name: row["layer_008"] for name, row in rows.items()} == {
        request_id: ids[:, 5].tobytes() for request_id, ids in ROUTING.items()
    }


def test_requests_of_a_query_and_a_scan(filled: Place, counted: tuple[CountingProxy, dict[str, Any]]) -> None:
    """Small shards: all of one comes with its footer; pyarrow opens a file for its schema, and again for its rows."""
    proxy, options = counted
    dataset = rr.open_dataset(filled.uri, storage_options=options)
    described = dataset.to_pyarrow(prune=True)
    one = pc.field("request_id") == IDS[5]
    assert len(requests(proxy, lambda: described.to_table(columns=["layer_004"], filter=one))) == 2
    found = requests(proxy, lambda: dataset.to_pyarrow(prune=True))
    assert len(found) == 1 + 3 + 1  # directories, shards of each, tombstones; indexes are known
    assert len(requests(proxy, lambda: list(dataset.scan()))) == 1 + 3 + 1 + 12
    assert len(requests(proxy, lambda: list(dataset.scan("p1", ["request_id"])))) == 1 + 1 + 4


def test_a_file_that_vanished_is_not_found(filled: Place) -> None:
    described = rr.open_dataset(filled.uri, storage_options=filled.options).to_pyarrow()
    assert described.count_rows() == 12
    rr.delete_prefix(filled.uri, "p1", storage_options=filled.options)
    with pytest.raises(FileNotFoundError, match="no such object"):
        described.to_table()


def test_exit_in_the_middle_of_a_query_does_not_hang(filled: Place) -> None:
    program = f"""
import rr_dataset as rr
dataset = rr.open_dataset({filled.uri!r})
described = dataset.to_pyarrow()
batches = described.to_batches()
print(next(batches).num_rows > 0, next(dataset.scan()).num_rows > 0)
"""
    environment = {**filled.environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")


PAGE = b"<html><body>Please log in</body></html>"


@pytest.mark.parametrize(
    ("target", "error", "said"),
    [
        (r"_rr/format\.json", rr.FormatError, r"_rr/format\.json is no JSON, it begins with b'<html><body>Please"),
        (r"_rr/tombstones/[0-9]", rr.FormatError, r"is no JSON, it begins with b'<html>"),
        (r"prefix=[^&]*data_id%3D", rr.StorageError, "does not list"),
    ],
)
def test_a_page_in_place_of_an_answer_is_no_content(
    filled: Place, counted: tuple[CountingProxy, dict[str, Any]], target: str, error: type[Exception], said: str
) -> None:
    """As of a portal that answers for the store, with 200."""
    proxy, options = counted
    rr.delete(filled.uri, ids=[IDS[1]], storage_options=filled.options)
    fault = proxy.add(Fault("status", method="GET", target=target, times=100, status=200, body=PAGE))
    with pytest.raises(error, match=said):
        rr.open_dataset(filled.uri, storage_options=options).get(IDS[0])
    assert fault.hits


@pytest.mark.parametrize("client", CLIENTS)
def test_no_answer_comes_of_a_listing_that_is_none(
    filled: Place, counted: tuple[CountingProxy, dict[str, Any]], client: str
) -> None:
    proxy, options = counted
    options = {**options, "client": client}
    rr.delete(filled.uri, prefixes=["p0"], storage_options=filled.options)
    before = S3Medium(filled, client).objects()
    calls: list[Callable[[], object]] = [
        lambda: list(rr.open_dataset(filled.uri, storage_options=options).ids()),
        lambda: rr.collect_garbage(filled.uri, storage_options=options),
        lambda: rr.compact(filled.uri, storage_options=options),
        lambda: rr.verify(filled.uri, storage_options=options),
    ]
    for prefix in ("routing%2F(&|$)", "tombstones", "data_id%3D"):
        fault = proxy.add(
            Fault("status", method="GET", target=f"prefix=[^&]*{prefix}", times=1000, status=200, body=PAGE)
        )
        for call in calls:
            with pytest.raises(rr.StorageError, match="does not list"):
                call()
        assert fault.hits
        proxy.heal()
    assert S3Medium(filled, client).objects() == before


# Upkeep


def test_verify_moves_what_is_damaged_out_of_the_way(
    filled: Place, counted: tuple[CountingProxy, dict[str, Any]]
) -> None:
    proxy, options = counted
    seen = requests(proxy, lambda: rr.verify(filled.uri, storage_options=options))
    assert {request.method for request in seen} == {"GET"}
    assert sum(request.path.endswith(".arrow") for request in seen) == 12  # each as a whole, once
    medium = S3Medium(filled, "s3fs")
    bad = min(path for path in medium.objects() if path.startswith("data_id=p2/"))
    medium.put(bad, (medium.get(bad) or b"")[:-100])
    medium.put("data_id=p2/notes.txt", b"mine")
    problems = rr.verify(filled.uri, storage_options=options).problems
    assert {problem.path for problem in problems} == {bad, "data_id=p2/notes.txt"}
    moved = rr.verify(filled.uri, repair=True, storage_options=options)
    assert {problem.moved_to for problem in moved.problems} == {
        f"{QUARANTINE_DIR}/{bad}.0",
        f"{QUARANTINE_DIR}/data_id=p2/notes.txt.0",
    }
    assert medium.get(f"{QUARANTINE_DIR}/data_id=p2/notes.txt.0") == b"mine"
    assert medium.get("data_id=p2/notes.txt") is None
    assert rr.verify(filled.uri, storage_options=options).sound
    left = set(rr.open_dataset(filled.uri, storage_options=options).ids())
    assert len(left) == 11
    holds(filled.uri, options, {request_id: ROUTING[request_id] for request_id in left})


def test_compaction_reads_each_input_with_two_requests(
    filled: Place, counted: tuple[CountingProxy, dict[str, Any]]
) -> None:
    proxy, options = counted
    began = now_ms()
    reports: list[CompactReport] = []
    seen = requests(proxy, lambda: reports.append(rr.compact(filled.uri, "p1", storage_options=options)))
    assert (reports[0].shards, reports[0].outputs) == (4, 1)
    shards = [request for request in seen if request.path.endswith(".arrow")]
    assert [request.method for request in shards] == ["GET"] * 8 + ["PUT"]  # index, then rows, of each
    assert shards[-1].headers["if-none-match"] == "*"
    holds(filled.uri, options, ROUTING)
    assert rr.compact(filled.uri, storage_options=options).outputs == 2
    assert rr.verify(filled.uri, storage_options=options).sound
    before = requests(proxy, lambda: compact_at(filled, now_ms()))
    assert not [request for request in before if request.method in ("PUT", "DELETE", "POST")]
    assert collect_at(filled, began + GRACE_MS - 5000).replaced == 0  # no later than this after the compaction
    assert collect_at(filled, now_ms() + GRACE_MS + 5000).replaced == 12
    holds(filled.uri, options, ROUTING)


def test_the_age_of_an_object_allows_for_how_s3_stamps() -> None:
    assert named_ms(Entry("a", 1, 1000.25)) == 1000_250
    assert named_ms(Entry("a", 1, 1000.0, '"abc"')) == 1001_000
    assert named_ms(Entry("a", 1, 1000.0, '"abc-12"')) == 1000_000 + MARGIN_S * 1000


def test_abandoned_uploads_are_collected(filled: Place) -> None:
    medium = S3Medium(filled, "s3fs")
    key = medium.key("data_id=p1/half.arrow")
    begun = filled.client.create_multipart_upload(Bucket=filled.bucket, Key=key)
    filled.client.upload_part(Bucket=filled.bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 1000)
    assert medium.uploads() == [key]
    assert collect_at(filled, now_ms()).staged == 0
    assert medium.uploads() == [key]
    later = now_ms() + int(MARGIN_S * 1000) + 60_000
    (problem,) = rr.verify(filled.uri, storage_options=filled.options, now_ms=lambda: later).problems
    assert (problem.kind, problem.count) == ("staging", 1)
    assert collect_at(filled, later).staged == 1
    assert medium.uploads() == []


def test_marks_are_folded_and_dropped(filled: Place) -> None:
    for prefix in ("p0:0", "p0:3", "p1:1"):
        rr.delete_prefix(filled.uri, prefix, storage_options=filled.options)
    medium = S3Medium(filled, "s3fs")

    def marks() -> int:
        return sum(path.startswith("_rr/tombstones/") for path in medium.objects())

    begun = now_ms()
    assert marks() == 3
    assert collect_at(filled, begun + 2 * GRACE_MS).tombstones_folded == 3
    assert marks() == 4
    assert collect_at(filled, begun + 3 * GRACE_MS).tombstone_files_removed == 3
    assert marks() == 1
    assert len(list(rr.open_dataset(filled.uri, storage_options=filled.options).ids())) == 9


def test_maintain_keeps_within_the_limits(filled: Place) -> None:
    medium = S3Medium(filled, "s3fs")
    text = json.loads(medium.get("_rr/format.json") or b"")
    medium.put("_rr/format.json", json.dumps({**text, "ttl_s": 3600.0}).encode())
    (report,) = rr.maintain(filled.uri, storage_options=filled.options)
    assert (report.deleted.records, report.compacted.outputs) == (0, 3)
    lookup = Lookup(filled.uri, None, filled.options)
    later = now_ms() + 2 * 3600_000
    assert Steward(lookup, Compactor(lookup, lambda: later), lambda: later).retain().partitions == 3
    assert list(rr.open_dataset(filled.uri, storage_options=filled.options).ids()) == []


# In and out


def test_copies_between_places(s3_server: S3Server, local: Path, tmp_path: Path) -> None:
    one, other = s3_server.place(), s3_server.place()
    assert rr.copy(local, one.uri, destination_options=one.options).records == 12
    ends = {"source_options": one.options, "destination_options": other.options}
    assert rr.copy(one.uri, other.uri, **ends).records == 12
    assert rr.copy(one.uri, other.uri, **ends).existing == 12
    assert rr.copy(other.uri, tmp_path / "b", source_options=other.options).records == 12
    for uri, options in ((one.uri, one.options), (other.uri, other.options), (str(tmp_path / "b"), None)):
        holds(uri, options, ROUTING)
    with pytest.raises(rr.InvalidInputError, match="both source and destination"):
        rr.copy(one.uri, f"{one.uri}/", source_options=one.options)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet", "long", "counts"])
def test_exports_from_and_into_a_bucket(filled: Place, s3_server: S3Server, tmp_path: Path, kind: str) -> None:
    out = s3_server.place()
    local = rr.export(filled.uri, tmp_path / "out", kind, storage_options=filled.options)
    remote = rr.export(filled.uri, out.uri, kind, storage_options=filled.options, out_options=out.options)
    assert local == remote
    files = {str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    medium = S3Medium(out, "s3fs")
    assert medium.objects() == files.keys()
    for name, path in files.items():
        data = medium.get(name)
        assert data is not None
        if name.endswith(".parquet"):
            assert pq.read_table(pa.BufferReader(data)).equals(pq.ParquetFile(path).read())
        else:
            assert len(data) == path.stat().st_size
    with pytest.raises(rr.InvalidInputError, match="holds files, such as"):
        rr.export(filled.uri, out.uri, kind, storage_options=filled.options, out_options=out.options)


def test_an_import_of_what_fastdeploy_stored(s3: Place, tmp_path: Path) -> None:
    with zipfile.ZipFile(ROOT / "tests/data/fastdeploy_store.zip") as archive:
        archive.extractall(tmp_path / "store")
    rr.create_dataset(s3.uri, rr.RoutingSpec((2, 3, 4), num_experts=100, top_k=2), storage_options=s3.options)
    rr.create_dataset(tmp_path / "local", rr.RoutingSpec((2, 3, 4), num_experts=100, top_k=2))
    local = rr.import_fastdeploy(tmp_path / "local", tmp_path / "store")
    assert rr.import_fastdeploy(s3.uri, tmp_path / "store", storage_options=s3.options) == local
    again = rr.import_fastdeploy(s3.uri, tmp_path / "store", storage_options=s3.options)
    assert (again.imported, again.existing) == (0, local.imported)
    ids = sorted(rr.open_dataset(tmp_path / "local").ids())
    records = [
        rr.open_dataset(uri, storage_options=options).get_many(ids)
        for uri, options in ((s3.uri, s3.options), (tmp_path / "local", None))
    ]
    for one, other in zip(*records, strict=True):
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


def test_counts_and_the_long_form(filled: Place) -> None:
    loads = rr.layer_loads(filled.uri, "p0", storage_options=filled.options)
    expected = np.bincount(np.concatenate([ROUTING[each][:, 2].ravel() for each in IDS[::3]]), minlength=64)
    assert loads[2].counts == tuple(expected.tolist())
    assert rr.to_long(filled.uri, storage_options=filled.options).read_all().num_rows == 12 * TOKENS * 6 * 4


def test_a_foreign_prefix_is_no_place_for_a_dataset(s3: Place) -> None:
    medium = S3Medium(s3, "s3fs")
    medium.put("models/weights.bin")
    with pytest.raises(rr.InvalidInputError, match="no dataset and not empty, it holds 'models'"):
        rr.create_dataset(s3.uri, SPEC, storage_options=s3.options)
    assert medium.objects() == {"models/weights.bin"}


def test_a_dead_spool_of_a_dataset_that_is_in_a_bucket_now(s3: Place, tmp_path: Path) -> None:
    dataset = rr.create_dataset(tmp_path / "ds", rr.RoutingSpec((0, 1), num_experts=16, top_k=2))
    (tmp_path / "spools").mkdir()
    spool = make_spool(tmp_path / "spools", dataset)
    put(spool, dataset, "a:1:0:0", np.zeros((2, 3, 2), np.uint8))
    spool.close(remove=False)
    S3Medium(s3, "s3fs").put("_rr/format.json", (tmp_path / "ds/_rr/format.json").read_bytes())
    (report,) = rr.recover(tmp_path / "spools", uri=s3.uri, storage_options=s3.options)
    assert (report.outcome, report.records) == ("recovered", 1)
    assert list(rr.open_dataset(s3.uri, storage_options=s3.options).ids()) == ["a:1:0:0"]
