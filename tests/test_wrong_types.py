"""An argument of a wrong type is an InvalidInputError that says what was expected, whatever the call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import options

import rr_dataset as rr

SPEC = rr.RoutingSpec(range(3, 61), num_experts=256, top_k=8)  # type: ignore[arg-type]
EXPERTS = np.zeros((4, 58, 8), np.uint8)
ID = "a:1:0:0"


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rr.RoutingWriter]:
    place = tmp_path_factory.mktemp("types")
    with rr.RoutingWriter(place / "ds", options(place), create=SPEC) as made:
        made.put(ID, EXPERTS)
        made.flush()
        yield made


@pytest.fixture(scope="module")
def dataset(writer: rr.RoutingWriter, tmp_path_factory: pytest.TempPathFactory) -> rr.RoutingDataset:
    (place,) = tmp_path_factory.getbasetemp().glob("types0/ds")
    return rr.open_dataset(place)


READS: list[tuple[Callable[[Any], object], str]] = [
    (lambda ds: ds.get(ID, layers=1), "layers=1: expected a list of layer ids"),
    (lambda ds: ds.get(ID, layers="34"), "layers='34': expected a list of layer ids"),
    (lambda ds: ds.get(ID, layers=[61]), "layers [61] are not MoE layers of this dataset, which has 3-60"),
    (lambda ds: ds.get(ID, tokens=5), "tokens=5: expected None, a slice"),
    (lambda ds: ds.get(ID, out=[1]), "out is a list: expected a numpy array"),
    (lambda ds: ds.get(5), "request id 5: expected a text"),
    (lambda ds: ds.get_many(5), "5: expected several request ids"),
    (lambda ds: ds.get_many(None), "None: expected several request ids"),
    (lambda ds: ds.get_many([ID], layers=3), "layers=3: expected a list"),
    (lambda ds: ds.heads(5), "5: expected several request ids"),
    (lambda ds: ds.resolve(5), "5: expected several refs"),
    (lambda ds: ds.resolve([5]), "ref 5: expected the `ref` of a Receipt"),
    (lambda ds: ds.wait_for(5), "5: expected several request ids"),
    (lambda ds: ds.wait_for([ID], timeout_s=None), "timeout_s=None: expected zero or more seconds"),
    (lambda ds: ds.wait_for([ID], timeout_s="1"), "timeout_s='1': expected zero or more seconds"),
    (lambda ds: ds.poll(5), "cursor=5: expected None or the PollCursor"),
    (lambda ds: list(ds.scan(columns=5)), "columns=5: expected a list of different names"),
    (lambda ds: list(ds.ids(5)), "prefix 5: expected a text"),
    (lambda ds: rr.open_dataset(ds.uri, wait_s="a"), "wait_s='a': expected zero or more seconds"),
    (lambda ds: rr.open_dataset(ds.uri, storage_options=5), "storage_options: expected a mapping, not int"),
    (lambda ds: rr.expert_counts(ds.uri, by=5), "by=5: expected different names among"),
    (lambda ds: rr.expert_counts(ds.uri, layers=3), "layers=3: expected a list"),
    (lambda ds: rr.to_long(ds.uri, layers=3), "layers=3: expected a list"),
    (lambda ds: rr.delete(ds.uri, prefixes=5), "prefixes=5: expected several"),
    (lambda ds: rr.delete(ds.uri, ids=5), "ids=5: expected several"),
    (lambda ds: rr.delete(ds.uri, run=5), "run=5: expected the id of a run, a text"),
    (lambda ds: rr.delete(ds.uri, older_than_s="5"), "older_than_s='5': expected zero or more seconds"),
    (lambda ds: rr.compact(ds.uri, compression=5), "compression=5: expected one of"),
    (lambda ds: rr.compact(ds.uri, jobs="a"), "jobs=a: expected at least 1"),
    (lambda ds: rr.compact(ds.uri, target_bytes="a"), "target_bytes=a: expected at least 1"),
    (lambda ds: rr.recover(5), "spool_dir=5: expected a folder"),
]
TRAINS: list[tuple[Callable[[Any], object], str]] = [
    (lambda ds: rr.SampleOptions(dtype="bogus"), "dtype='bogus': expected an integer type"),
    (
        lambda ds: rr.RoutingSamples(ds, [ID], rr.SampleOptions(tokens=lambda n: None, lengths={ID: "x"}))[0],  # type: ignore[dict-item]
        "lengths= of 'a:1:0:0'='x': expected a whole number",
    ),
    (lambda ds: list(rr.RoutingSamples(ds, [ID]).read_ahead([[0]], 0.5)), "prefetch_bytes=0.5: expected a whole"),  # type: ignore[arg-type]
    (lambda ds: rr.StreamOptions(records=1.5), "records=1.5: expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.StreamOptions(rank="0"), "rank='0': expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.StreamOptions(num_ranks=2.0), "num_ranks=2.0: expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.StreamOptions(min_weight_version="7"), "min_weight_version='7': expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.RankView(SPEC, tp_size=2.0), "tp_size=2.0: expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.RankView(SPEC).share(5.5), "num_tokens=5.5: expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.RankView(SPEC).share(5, 8.0), "length=8.0: expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.pipeline_chunks("61", 1, 4), "num_layers='61': expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.collate([ds.get(ID)], SPEC, num_tokens=[5.9]), "num_tokens=5.9: expected a whole number"),  # type: ignore[list-item]
    (lambda ds: rr.collate([ds.get(ID)], SPEC, length="9"), "length='9': expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.collate([ds.get(ID)], SPEC, pad_to_multiple=1.5), "pad_to_multiple=1.5: expected a whole"),  # type: ignore[arg-type]
    (lambda ds: ds.get_packed([ID], pad_to_multiple="2"), "pad_to_multiple='2': expected a whole number"),
    (lambda ds: rr.align(ds.get(ID), 5, trailing="1"), "trailing='1': expected a whole number"),  # type: ignore[arg-type]
    (lambda ds: rr.trajectory(ds, [ID], ["x"]), "prompt_lengths='x': expected a whole number"),  # type: ignore[list-item]
]
WRITES: list[tuple[Callable[[Any], object], str]] = [
    (lambda writer: writer.put(ID, EXPERTS, layers=3), "layers=3: expected a list of layer ids"),
    (lambda writer: writer.put(ID, EXPERTS, tags="abc"), "tags='abc': expected a mapping"),
    (lambda writer: writer.put(ID, EXPERTS, tags=5), "tags=5: expected a mapping"),
    (lambda writer: writer.put(5, EXPERTS), "request id 5: expected a text"),
    (lambda writer: writer.put(ID, [[1]]), "routed_experts is a list"),
    (lambda writer: writer.flush("a"), "timeout_s='a': expected zero or more seconds"),
    (lambda writer: writer.put(ID, EXPERTS).wait("a"), "timeout_s='a': expected zero or more seconds"),
]
OPENS: list[tuple[Callable[[Path], object], str]] = [
    (lambda place: rr.RoutingWriter(place, create={"a": 1}), "create={'a': 1}: expected a RoutingSpec"),  # type: ignore[arg-type]
    (lambda place: rr.RoutingWriter(place, create={}), "create={}: expected a RoutingSpec"),  # type: ignore[arg-type]
    (lambda place: rr.RoutingWriter(place, SPEC), "expected WriterOptions"),  # type: ignore[arg-type]
    (lambda place: rr.RoutingWriter(5, create=SPEC), "uri=5: expected the path"),  # type: ignore[arg-type]
    (lambda place: rr.create_dataset(place, {"a": 1}), "spec={'a': 1}: expected a RoutingSpec"),  # type: ignore[arg-type]
    (lambda place: rr.create_dataset(place, SPEC, keys="uuid"), "keys='uuid': expected a KeyScheme"),  # type: ignore[arg-type]
    (lambda place: rr.create_dataset(5, SPEC), "uri=5: expected the path"),  # type: ignore[arg-type]
    (lambda place: rr.open_dataset(None), "uri=None: expected the path"),  # type: ignore[arg-type]
    (lambda place: rr.verify(5), "uri=5: expected the path"),  # type: ignore[arg-type]
    (lambda place: rr.WriterOptions(spool_dir=5), "spool_dir=5: expected a directory"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "says"), READS, ids=[says for _, says in READS])
def test_reads_and_deletes(dataset: rr.RoutingDataset, call: Callable[[Any], object], says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=re.escape(says)):
        call(dataset)
    assert dataset.get(ID).status == "complete"


@pytest.mark.parametrize(("call", "says"), TRAINS, ids=[says for _, says in TRAINS])
def test_what_a_trainer_says(dataset: rr.RoutingDataset, call: Callable[[Any], object], says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=re.escape(says)):
        call(dataset)


@pytest.mark.parametrize(("call", "says"), WRITES, ids=[says for _, says in WRITES])
def test_puts(writer: rr.RoutingWriter, call: Callable[[Any], object], says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=re.escape(says)):
        call(writer)


@pytest.mark.parametrize(("call", "says"), OPENS, ids=[says for _, says in OPENS])
def test_opening_writes_nothing(tmp_path: Path, call: Callable[[Path], object], says: str) -> None:
    with pytest.raises(rr.InvalidInputError, match=re.escape(says)):
        call(tmp_path / "ds")
    assert list(tmp_path.iterdir()) == []


def test_a_wait_without_end_is_one_that_threads_can_wait(writer: rr.RoutingWriter, dataset: rr.RoutingDataset) -> None:
    writer.put(ID, EXPERTS).wait(float("inf"))
    writer.flush(float("inf"))
    assert dataset.wait_for([ID], timeout_s=float("inf"))[0].num_tokens == 4
