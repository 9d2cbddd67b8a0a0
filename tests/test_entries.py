"""What no writer would have written is never published, whatever its checksums say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from rr_dataset.errors import CorruptSpoolError
from rr_dataset.publisher import open_slab
from rr_dataset.slab import DELETE, DROP, PUT, SEALED, read_state
from rr_dataset.spool import Spool
from tests.engines import SPEC, experts
from tests.spooled import make_spool, publisher_of, put, sealed

TOKENS = 8
PAYLOAD = bytes(SPEC.bytes_per_token * TOKENS)
PART = {"status": "partial", "part": True}
DONE = {"status": "complete"}
DROPPED = {"status": "dropped", "reason": "full"}
MARK = {"kind": "prefix", "text": "a", "run": None}
BEYOND = SPEC.moe_layers[-1] + 1


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    return rr.create_dataset(tmp_path / "ds", SPEC)


@pytest.fixture
def spool(tmp_path: Path, dataset: Any) -> Iterator[Spool]:
    made = make_spool(tmp_path, dataset)
    yield made
    made.close(remove=True)


def entry(
    spool: Spool, kind: int, meta: Any, request_id: str = "a:1", tokens: int = TOKENS, payload: bytes = b""
) -> None:
    reservation = spool.reserve(
        kind, 0, request_id.encode(), json.dumps(meta).encode(), tokens=tokens, payload_bytes=len(payload)
    )
    assert reservation is not None
    reservation.payload[:] = memoryview(payload)
    spool.commit(reservation)


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != "format.json"]


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        (PUT, DONE),
        (PUT, {**PART, "start": 5, "missing": [[5, 6], [8, 13]], "layers": list(SPEC.moe_layers[:1])}),
        (PUT, {**DONE, "spans": [[0, 3, "a"], [3, 3, "b"], [2, 8, "c"]], "tags": {"x": "y"}}),
        (PUT, {**DONE, "weight": "v", "token_ids": False}),
        (DROP, {**DROPPED, "start": 5, "token_ids": True}),
        (DELETE, MARK),
        (DELETE, {"kind": "all", "text": "", "run": "r"}),
        (DELETE, {**MARK, "text": {"data_id": "a"}}),
    ],
)
def test_what_a_writer_writes_is_published(dataset: Any, spool: Spool, kind: int, meta: Any) -> None:
    entry(spool, kind, meta, "" if kind == DELETE else "a:1", payload=PAYLOAD if kind == PUT else b"")
    (path,) = sealed(spool)
    assert publisher_of(dataset).publish(path).records == (kind != DELETE)


@pytest.mark.parametrize(
    ("kind", "meta", "named"),
    [
        (7, DONE, "kind=7"),
        (PUT, {}, "status=None"),
        (PUT, {"status": "xyz"}, "status='xyz'"),
        (PUT, {"status": 5}, "status=5"),
        (PUT, {"status": []}, r"status=\[\]"),
        (PUT, {"status": "dropped"}, "status='dropped'"),
        (DROP, DONE, "status='complete'"),
        (DROP, {**DROPPED, "reason": 5}, "reason=5"),
        (DROP, {**DROPPED, "start": -1}, "starts at -1"),
        (PUT, {**PART, "start": -5}, "starts at -5"),
        (PUT, {**PART, "start": 2**70}, "starts at 1180591620717411303424"),
        (PUT, {**PART, "start": "x"}, "start='x'"),
        (PUT, {**PART, "start": True}, "start=True"),
        (PUT, {**PART, "start": 1.0}, "start=1.0"),
        (PUT, {**DONE, "part": "yes"}, "part='yes'"),
        (PUT, {**PART, "layers": []}, "layers"),
        (PUT, {**PART, "layers": list(SPEC.moe_layers[:1] * 2)}, "rising"),
        (PUT, {**PART, "layers": [BEYOND]}, f"layers .{BEYOND}. are not MoE layers"),
        (PUT, {**PART, "layers": [str(SPEC.moe_layers[0])]}, "layers="),
        (PUT, {**PART, "layers": {"0": 1}}, "layers="),
        (PUT, {**DONE, "missing": [[4, 2]]}, "missing="),
        (PUT, {**DONE, "missing": [[-1, 2]]}, "missing="),
        (PUT, {**DONE, "missing": [[2, 9]]}, "missing="),
        (PUT, {**DONE, "missing": [[4, 5], [1, 2]]}, "missing="),
        (PUT, {**DONE, "missing": [[1, 2], [2, 3]]}, "missing="),
        (PUT, {**DONE, "missing": ["ab"]}, "missing='ab'"),
        (PUT, {**DONE, "missing": [["a", "b"]]}, "missing='a'"),
        (PUT, {**DONE, "spans": [[0, 99, "v"]]}, "spans="),
        (PUT, {**DONE, "spans": [[0, 9]]}, "spans="),
        (PUT, {**DONE, "spans": [[0, 8, 5]]}, "spans=5"),
        (PUT, {**DONE, "weight": 5}, "weight=5"),
        (PUT, {**DONE, "weight": "\ud800"}, "surrogates"),
        (PUT, {**DONE, "tags": {"a": 5}}, "tags=5"),
        (PUT, {**DONE, "tags": [1]}, "tags="),
        (PUT, {**DONE, "token_ids": 1}, "token_ids=1"),
        (DELETE, {}, "kind=None"),
        (DELETE, {**MARK, "kind": "wipe"}, "kind='wipe'"),
        (DELETE, {**MARK, "kind": "glob"}, "kind='glob'"),
        (DELETE, {**MARK, "text": 5}, "text=5"),
        (DELETE, {**MARK, "text": ""}, "data_id"),
        (DELETE, {**MARK, "text": {"nobody": "a"}}, "nobody"),
        (DELETE, {**MARK, "kind": "all"}, "text='a'"),
        (DELETE, {**MARK, "run": 5}, "run=5"),
        (DELETE, {**MARK, "run": ""}, "run=''"),
    ],
)
def test_what_no_writer_writes_is_refused_by_name_and_nothing_of_its_slab_is_published(
    tmp_path: Path, dataset: Any, spool: Spool, kind: int, meta: Any, named: str
) -> None:
    if kind == PUT:
        put(spool, dataset, "good:1", experts(1))
    else:
        entry(spool, DELETE, MARK, "")
    entry(spool, kind, meta, "" if kind == DELETE else "a:1", payload=PAYLOAD if kind in (PUT, 7) else b"")
    path = next(path for path in sealed(spool))
    with pytest.raises(CorruptSpoolError, match=named) as caught:
        publisher_of(dataset).publish(path)
    request_id = "''" if kind == DELETE else "'a:1'"
    assert f"{path}: entry 1 (request id {request_id}) is none that a writer of this dataset makes" in str(caught.value)
    assert read_state(path)[1] == SEALED
    assert files(tmp_path / "ds") == []


@pytest.mark.parametrize("request_id", ["", "x:y", "a:01", "chatcmpl-1"])
def test_ids_that_the_key_scheme_refuses(dataset: Any, spool: Spool, request_id: str) -> None:
    entry(spool, PUT, DONE, request_id, payload=PAYLOAD)
    (path,) = sealed(spool)
    with pytest.raises(CorruptSpoolError, match="entry 0"):
        publisher_of(dataset).publish(path)


@pytest.mark.parametrize("tokens", [2**31, 2**60, 2**63, 2**64 - 1])
@pytest.mark.parametrize("kind", [PUT, DROP])
def test_more_tokens_than_there_are_positions(dataset: Any, spool: Spool, kind: int, tokens: int) -> None:
    entry(spool, kind, DONE if kind == PUT else DROPPED, tokens=tokens)
    (path,) = sealed(spool)
    with pytest.raises(CorruptSpoolError, match=f"has {tokens} tokens"):
        publisher_of(dataset).publish(path)


@pytest.mark.parametrize("num_experts", [255, 256, 257])
def test_expert_ids_are_those_of_the_spec_and_looked_at_only_where_the_dtype_holds_more(
    tmp_path: Path, num_experts: int
) -> None:
    spec = rr.RoutingSpec((0,), num_experts, top_k=2)
    dataset = rr.create_dataset(tmp_path / "experts", spec)
    spool = make_spool(tmp_path, dataset)
    largest = num_experts - 1
    width = 1 if num_experts <= 256 else 2
    entry(spool, PUT, DONE, tokens=1, payload=largest.to_bytes(width, "little") * 2)
    if num_experts != 256:
        entry(spool, PUT, DONE, "bad:1", tokens=1, payload=bytes(width) + num_experts.to_bytes(width, "little"))
    (path,) = sealed(spool)
    if num_experts == 256:
        assert publisher_of(dataset).publish(path).records == 1
    else:
        with pytest.raises(CorruptSpoolError, match=f"'bad:1'.*expert id {num_experts}: expected 0 to {largest}"):
            publisher_of(dataset).publish(path)
    spool.close(remove=True)


@pytest.mark.parametrize("size", [0, 100])
def test_a_slab_that_is_cut_is_named(tmp_path: Path, size: int) -> None:
    path = tmp_path / "000001.slab"
    path.write_bytes(bytes(size))
    with pytest.raises(CorruptSpoolError, match=f"000001.slab: cut to {size} bytes"), open_slab(path):
        pass
