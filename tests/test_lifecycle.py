"""Puts, deletes, publication, compaction, garbage collection and reading in any order, on any hosts, killed at any step and
in between one another's steps, against the rules as `routing_oracle` reads them.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import rr_dataset as rr
from rr_dataset.storage import Storage
from rr_dataset.storage.local import LocalStorage
from tests.lifecycle_world import DAY_S, MINUTE_MS, RAW, RUNS, SKEW_MS, TTL_S, World
from tests.memory_store import MemoryStorage, RemoteMemory
from tests.routing_oracle import LAYERS, Put, Seen, State, Unit, between, directory, records
from tests.spooled import MEMORY
from tests.stepped_store import STORE, Fault
from tests.targets import PREFIXES, TARGETS, Target

IDS = (
    "p:0:0:0", "p:0:1:0", "p:0:2:0", "p:0:1:0#1", "p:0:2:0#1", "p:0", "p:1:1:0", "p:1:2:1",
    "q:0:0:0", "q:0:1:0", "q:1:0:0", "q", "r:0:0:0",
)  # fmt: skip
EVERY_MS = [0, 1, 900, SKEW_MS + 1, 5 * MINUTE_MS, 12 * MINUTE_MS, 61 * MINUTE_MS, DAY_S * 1100]
EVERY_MS += [(TTL_S - 3600) * 1000 - 1, TTL_S * 1000 + SKEW_MS + 1]

_COMPACTED = re.compile(r"(?P<where>[^_].*)/(?!00-)[0-9]{2}-[0-9a-f]{16}-(?P<tmax>[0-9a-f]{16})-.*\.arrow")

whom = st.integers(0, len(RUNS) - 1)
hosts = st.integers(0, 3)
spans = st.tuples(st.integers(0, 3), st.integers(0, 4))
shapes = st.sampled_from(
    ["whole", "whole", "whole", "part", "last part", "layer", "layer part", "drop", "drop part", "gap"]
)
puts = st.lists(st.tuples(whom, st.sampled_from(IDS), shapes, spans), max_size=4)
marks = st.tuples(st.sampled_from(PREFIXES), st.booleans())
wishes = st.tuples(
    st.lists(st.sampled_from(TARGETS), min_size=1, max_size=1),
    st.sampled_from([None, None, None, "run-1", "run-2"]),
    st.sampled_from([None, None, None, 0, 1, 3600]),
)
targets_bytes = st.sampled_from([40, 1 << 20])
steps = st.integers(0, 12) | st.integers(0, 30)
deaths = st.one_of(st.none(), st.none(), st.builds(Fault, steps, st.just("kill")))


def others() -> st.SearchStrategy[tuple[Any, ...]]:
    one = st.one_of(
        st.tuples(st.just("bring"), whom, st.none(), puts, deaths),
        st.tuples(st.just("bring"), whom, marks, puts, deaths),
        st.tuples(st.just("flush"), whom, st.booleans(), deaths),
        st.tuples(st.just("delete"), hosts, wishes, deaths),
        st.tuples(st.just("compact"), hosts, targets_bytes, deaths),
        st.tuples(st.just("compact"), hosts, targets_bytes, st.none()),
        st.tuples(st.just("collect"), hosts, deaths),
        st.tuples(st.just("pass_by"), st.sampled_from(EVERY_MS)),
    )
    return st.lists(one, min_size=1, max_size=4).map(tuple)


between_steps = st.builds(Fault, steps, st.just("between"), others())
coins = st.one_of(st.just((False,)), st.lists(st.booleans(), min_size=1, max_size=5).map(tuple))
torn = st.builds(Fault, st.integers(0, 4), st.just("torn"), others(), coins)
races = st.builds(Fault, st.integers(0, 4), st.just("between"), others()) | between_steps | torn | torn
faults = st.one_of(st.none(), st.builds(Fault, steps, st.just("kill")), between_steps, between_steps, torn, torn)


class Lifecycle(World, RuleBasedStateMachine):
    """One dataset and all who use it."""

    @initialize(last_turn=st.booleans(), depth=st.sampled_from([1, 1, 2]), some=puts)
    def create(self, last_turn: bool, depth: int, some: list[tuple[Any, ...]]) -> None:
        self.fine = False
        self.begin(last_turn=last_turn, depth=depth)
        self.flushed(some)
        self.fine = True

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A failure is told once."""
        self.fine = False
        yield
        self.check()
        self.fine = True

    @rule(some=puts)
    def put(self, some: list[tuple[Any, ...]]) -> None:
        for one in some:
            self.do_put(*one)

    @rule(whose=whom, mark=marks, some=puts)
    def mark(self, whose: int, mark: tuple[Target, bool], some: list[tuple[Any, ...]]) -> None:
        self.do_mark(whose, mark)
        self.put_here(whose, some)

    @rule(whose=whom, apart=st.booleans(), which=st.integers(0, 2), some=puts, fault=faults)
    def publish(self, whose: int, apart: bool, which: int, some: list[tuple[Any, ...]], fault: Fault | None) -> None:
        with self.looking():
            self.put_here(whose, some)
            self.do_seal(whose, apart)
            self.do_publish(whose, which, fault)

    @rule(host=hosts, wish=wishes, some=puts, fault=faults)
    def delete(self, host: int, wish: Any, some: list[tuple[Any, ...]], fault: Fault | None) -> None:
        with self.looking():
            self.flushed(some)
            self.do_delete(host, wish, fault)

    @rule(host=hosts, target_bytes=st.sampled_from([40, 1 << 20, 1 << 20]), some=puts, fault=faults, kept=st.booleans())
    def compact(
        self, host: int, target_bytes: int, some: list[tuple[Any, ...]], fault: Fault | None, kept: bool
    ) -> None:
        with self.looking():
            self.flushed(some)
            self.do_compact(host, target_bytes, fault, kept=kept)

    @rule(host=hosts, fault=faults)
    def collect(self, host: int, fault: Fault | None) -> None:
        with self.looking():
            self.do_collect(host, fault)

    @rule(ms=st.sampled_from(EVERY_MS))
    def pass_by(self, ms: int) -> None:
        self.time.pass_by(ms)

    @rule(host=st.integers(STORE, 3), ahead=st.sampled_from([0, 1, SKEW_MS // 2, SKEW_MS]))
    def set_clock(self, host: int, ahead: int) -> None:
        """Also back."""
        self.time.ahead[host] = ahead

    @rule(which=st.integers(0, 2), whole=st.booleans(), some=puts, fault=races)
    def look(self, which: int, whole: bool, some: list[tuple[Any, ...]], fault: Fault) -> None:
        """A reader into whose steps others come."""
        with self.looking():
            self.flushed(some)
            dataset = rr.open_dataset(self.storage.uri) if which == 2 else self.kept[which]
            dropped = {put.request_id for put in self.puts_so_far() if whole and put.status == "dropped"}
            asked = [request_id for request_id in IDS if request_id not in dropped]
            before, found = self.now.copy(), []
            ask = dataset.get_many if whole else dataset.heads
            if any(what[0] == "bring" and any("drop" in one[2] for one in what[3]) for what in fault.others):
                ask, whole = dataset.heads, False
            process = self.run(3, fault, lambda: found.extend(ask(asked, on_missing="none")))
            if process.dead:
                self.kept[which % 2] = rr.open_dataset(self.storage.uri, run="run-1" if which % 2 else None)
                return
            self.compare(dataset.run, asked, found, before, process.struck, whole=whole)

    def puts_so_far(self) -> Iterator[Put]:
        for slab in self.by_slab.values():
            for each in slab.units.values():
                yield from each
        for writer in self.writers:
            yield from (told for _, told in writer.entries if isinstance(told, Put))

    def compare(
        self, run: str | None, asked: list[str], found: list[Any], before: State, struck: str, *, whole: bool
    ) -> None:
        seen = {record.request_id: told(record, whole=whole) for record in found if record is not None}
        for where in {directory(request_id, self.depth) for request_id in asked}:
            here = [request_id for request_id in asked if directory(request_id, self.depth) == where]
            got = {request_id: seen[request_id] for request_id in here if request_id in seen}
            call = struck if struck in (f"torn {where}", "torn _rr/tombstones") else ""
            allowed = []
            for state in between(before.within(where), self.now.within(where), call):
                expected = records(state, run=run, last_turn=self.last_turn)
                wanted = {
                    request_id: each if whole else each._replace(experts=())
                    for request_id, each in expected.items()
                    if request_id in here
                }
                if wanted == got:
                    break
                if wanted not in allowed:
                    allowed.append(wanted)
            else:
                raise AssertionError(f"{where}, {struck}: a reader of {run} saw {got}, allowed were {allowed}")

    def check(self) -> None:
        """Readers see what the rules say, and no file is left that a finished delete should have taken."""
        for dataset in (rr.open_dataset(self.storage.uri), *self.kept):
            expected = records(self.now, run=dataset.run, last_turn=self.last_turn)
            there = {request_id: each for request_id, each in expected.items() if each.status != "dropped"}
            asked = [request_id for request_id in IDS if request_id in there or request_id not in expected]
            found = dataset.get_many(asked, on_missing="none")  # first: those that are kept know old tombstones then
            assert {record.request_id: told(record, whole=True) for record in found if record is not None} == there
            assert set(dataset.ids()) == set(expected)
            heads = dataset.heads(IDS, on_missing="none")
            assert {head.request_id: told(head, whole=False) for head in heads if head is not None} == {
                request_id: each._replace(experts=()) for request_id, each in expected.items()
            }
        self.check_files()

    def check_files(self) -> None:
        there = self.objects()
        for path, process in self.makers.items():
            if process.dead or process in self.storage.running or path not in there:
                continue
            raw, compacted = RAW.fullmatch(path), _COMPACTED.fullmatch(path)
            for delete, target in self.ends:
                if raw is not None:
                    puts = self.by_slab[raw["writer"], int(raw["seq"])].units[
                        Unit(raw["writer"], int(raw["seq"]), raw["where"])
                    ]
                    assert not all(map(delete.covers, puts)), f"{path} was left by {delete}"
                elif compacted is not None and delete.run is None and target.path is not None:
                    values = [part.partition("=")[2] for part in compacted["where"].split("/")]
                    under = len(target.path) <= len(values) and values[: len(target.path)] == [*target.path]
                    assert not (under and int(compacted["tmax"], 16) <= delete.t_del), f"{path} was left by {delete}"

    def teardown(self) -> None:
        try:
            if self.fine:
                self.finish()
        finally:
            self.stack.close()

    def finish(self) -> None:
        """All that was left is done, by others; then everything goes."""
        for whose in range(len(RUNS)):
            self.do_flush(whose, False, None)
        for _ in range(3):
            self.do_compact(0, 1 << 20, None)
            self.do_collect(1, None)
            self.time.pass_by(20 * MINUTE_MS)
        self.check()
        self.do_delete(2, ([TARGETS[0]], None, None), None)
        assert records(self.now, run=None, last_turn=self.last_turn) == {}
        self.time.pass_by(TTL_S * 1000 + 2 * SKEW_MS)
        for _ in range(3):
            self.do_collect(1, None)
            self.time.pass_by(20 * MINUTE_MS)
        self.check()
        assert self.makers.keys() & self.objects() == {"_rr/format.json"}


def told(record: Any, *, whole: bool) -> Seen:
    experts: tuple[tuple[int | None, ...], ...] = ()
    if whole:
        values, there = record.to_numpy(), record.present()
        assert ((values == values[..., :1]).all(axis=2) | ~there).all()
        experts = tuple(
            tuple(int(value) if here else None for value, here in zip(values[i, :, 0], there[i], strict=True))
            for i in range(len(LAYERS))
        )
    return Seen(record.status, record.num_tokens, tuple(row.record_id for row in record.rows), experts)


class OnDisk(Lifecycle):
    """Links, folders and stages."""

    def place(self) -> Storage:
        self.root = Path(tempfile.mkdtemp(prefix="rr-lifecycle-", dir=MEMORY if MEMORY.is_dir() else None))
        self.stack.callback(shutil.rmtree, self.root)
        return LocalStorage(str(self.root))

    def objects(self) -> set[str]:
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}

    def finish(self) -> None:
        super().finish()
        assert [path.name for path in self.root.iterdir()] == ["_rr"]


class InMemory(Lifecycle):
    """Objects and nothing else."""

    made = MemoryStorage

    def place(self) -> Storage:
        return self.made()

    def objects(self) -> set[str]:
        return set(self.storage.inner.objects)


class FarAway(InMemory):
    """Behind a network: reads go ahead of the tombstones."""

    made = RemoteMemory


OnDisk.TestCase.settings = settings(stateful_step_count=20, max_examples=settings().max_examples // 4)
InMemory.TestCase.settings = FarAway.TestCase.settings = settings(stateful_step_count=20)
TestOnDisk = OnDisk.TestCase
TestInMemory = InMemory.TestCase
TestFarAway = FarAway.TestCase


@pytest.mark.parametrize("kind", [InMemory, FarAway])
@pytest.mark.parametrize("coins", list(product((False, True), repeat=3)))
def test_a_torn_listing_of_what_is_newer_than_an_output(kind: type[InMemory], coins: tuple[bool, ...]) -> None:
    """Whatever a reader sees of an old row, a newer one of the same run and what compaction makes of each, it finds the one or the other."""
    machine = kind()
    machine.create(last_turn=False, depth=1, some=[(0, "p:0:0:0", "whole", (0, 3))])
    newer = ("bring", 2, None, [(2, "p:0:0:0", "whole", (0, 4))], None)
    one_each = ("compact", 0, 40, None)
    machine.look(which=2, whole=False, some=[], fault=Fault(0, "torn", (newer, one_each), coins))
    machine.teardown()


@pytest.mark.parametrize("kind", [InMemory, FarAway])
@pytest.mark.parametrize("step", range(5))
def test_a_whole_delete_between_two_steps_of_a_worker(kind: type[InMemory], step: int) -> None:
    """It leaves no file: what the delete could not list yet, the worker takes back."""
    machine = kind()
    machine.create(last_turn=False, depth=1, some=[])
    fault = Fault(step, "between", (("delete", 1, ([TARGETS[1]], None, None), None),))
    machine.publish(0, apart=False, which=0, some=[(0, "p:0:0:0", "whole", (0, 3))], fault=fault)
    machine.teardown()
