"""Puts, deletes, publication, compaction, garbage collection and reading in any order, on any hosts, killed at any step and
in between one another's steps, against the rules as `routing_oracle` reads them.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import rr_dataset as rr
from rr_dataset.compact import compact_with
from rr_dataset.compactor import Compactor
from rr_dataset.garbage import Collector
from rr_dataset.lookup import Lookup
from rr_dataset.publisher import Publisher
from rr_dataset.slab import ASIDE, DELETE, DROP, PUBLISHED, PUT, SEALED, Entry, SlabContents
from rr_dataset.storage.local import LocalStorage
from tests.memory_store import MemoryStorage
from tests.routing_oracle import (
    LAYERS,
    TOP_K,
    TURN,
    Delete,
    Matches,
    Parts,
    Put,
    Seen,
    State,
    Unit,
    between,
    directory,
    marks_in,
    records,
    shard_name,
    split,
)
from tests.spooled import MEMORY
from tests.stepped_store import STORE, Fault, Inline, Process, SteppedStorage, Time

SPEC = rr.RoutingSpec(LAYERS, num_experts=200, top_k=TOP_K)
DAY_S, MINUTE_MS = 86_400, 60_000
SKEW_MS = 2_000
TTL_S, GRACE_S = 4 * DAY_S, 600
IDS = (
    "p:0:0:0", "p:0:1:0", "p:0:2:0", "p:0:1:0#1", "p:0:2:0#1", "p:0", "p:1:1:0", "p:1:2:1",
    "q:0:0:0", "q:0:1:0", "q:1:0:0", "q", "r:0:0:0",
)  # fmt: skip
RUNS = ("run-1", "run-2", "run-1")  # of each writer
EVERY_MS = [0, 1, 900, SKEW_MS + 1, 5 * MINUTE_MS, 12 * MINUTE_MS, 61 * MINUTE_MS, DAY_S * 1100]
EVERY_MS += [(TTL_S - 3600) * 1000 - 1, TTL_S * 1000 + SKEW_MS + 1]

_RAW = re.compile(r"(?P<where>.+)/(?P<name>00-.*-(?P<writer>[0-9a-f]{16})-(?P<seq>[0-9]+)\.arrow)")
_COMPACTED = re.compile(r"(?P<where>[^_].*)/(?!00-)[0-9]{2}-[0-9a-f]{16}-(?P<tmax>[0-9a-f]{16})-.*\.arrow")


@dataclass(frozen=True)
class Target:
    """What to delete: for the product, and by hand."""

    kind: str
    text: Any
    matches: Callable[[bool, Parts, str | None], bool]  # with keep="last_turn" or not
    path: tuple[str, ...] | None = None  # it is all that is under these components

    def covers(self, *, last_turn: bool) -> Matches:
        return partial(self.matches, last_turn)

    def arguments(self) -> dict[str, Any]:
        named = {"prefix": "prefixes", "ids": "ids"}
        return {named[self.kind]: [self.text] if self.kind == "prefix" else self.text} if self.kind in named else {
            "glob": self.text
        } if self.kind == "glob" else {"everything": True}  # fmt: skip


def same(last_turn: bool, level: int, want: str, have: str | None) -> bool:
    if level == TURN and last_turn:
        return have is not None and int(have) <= int(want)
    return have == want


def prefix(text: Any) -> Target:
    if isinstance(text, str):
        pinned, choice = split(text)
    else:
        pinned = tuple(text.get(name) for name in ("data_id", "gen_id", "turn_id", "segment_id"))
        choice = text.get("choice")

    def matches(last_turn: bool, parts: Parts, sample: str | None) -> bool:
        named = [(i, want) for i, want in enumerate(pinned) if want is not None]
        return choice in (None, sample) and all(same(last_turn, i, want, parts[i]) for i, want in named)

    values = tuple(value for value in pinned if value is not None)
    return Target("prefix", text, matches, values if choice is None and pinned[: len(values)] == values else None)


def ids(*texts: str) -> Target:
    def matches(last_turn: bool, parts: Parts, sample: str | None) -> bool:
        for text in texts:
            pinned, choice = split(text)
            turn = pinned[TURN]
            if choice == sample and all(
                (want == have) if i != TURN or turn is None else same(last_turn, i, turn, have)
                for i, (want, have) in enumerate(zip(pinned, parts, strict=True))
            ):
                return True
        return False

    return Target("ids", texts, matches)


TARGETS = (
    Target("all", "", lambda last_turn, parts, sample: True, ()),
    *map(prefix, ("p", "q", "r", "p:0", "p:1", "q:0", "p:0:1", "p:0:2", "p:0:2:0", "p:0:2:0#1", "q:0:1:0")),
    *map(prefix, ({"turn_id": "1"}, {"data_id": "p", "choice": "1"}, {"gen_id": "0", "segment_id": "0"})),
    ids("p:0:1:0"), ids("p:0:2:0", "q:0:1:0"), ids("q", "p:0"), ids("p:0:2:0#1"), ids("r:0:0:0"),
    Target("glob", "p:*", lambda last, parts, sample: parts[0] == "p" and parts[1] is not None),
    Target("glob", "?:1", lambda last, parts, sample: parts[1] == "1"),
    Target("glob", "*:*:1", lambda last, parts, sample: same(last, TURN, "1", parts[TURN])),
    Target("glob", "p:0:*:0", lambda last, parts, sample: parts[:2] == ("p", "0") and parts[3] == "0"),
    Target("glob", "*:0#1", lambda last, parts, sample: parts[1] == "0" and sample == "1"),
)  # fmt: skip
PREFIXES = tuple(target for target in TARGETS if target.kind in ("prefix", "all"))


@dataclass
class Slab:
    contents: SlabContents
    units: dict[Unit, list[Put]]
    deletes: list[Delete]
    state: int = SEALED


@dataclass
class Writer:
    """One writer and its worker, on a host."""

    name: str
    run: str
    host: int
    last: int = 0
    seq: int = 0
    busy: bool = False
    publisher: Publisher | None = None
    entries: list[tuple[Entry, Put | Delete]] = field(default_factory=list)
    slabs: list[Path] = field(default_factory=list)  # sealed, and not yet acknowledged


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
steps = st.integers(0, 12) | st.integers(0, 30)
deaths = st.one_of(st.none(), st.none(), st.builds(Fault, steps, st.just("kill")))


def others() -> st.SearchStrategy[tuple[Any, ...]]:
    one = st.one_of(
        st.tuples(st.just("put"), whom, st.sampled_from(IDS), shapes, spans),
        st.tuples(st.just("mark"), whom, marks),
        st.tuples(st.just("flush"), whom, st.booleans(), deaths),
        st.tuples(st.just("flush"), whom, st.booleans(), st.none()),
        st.tuples(st.just("delete"), hosts, wishes, deaths),
        st.tuples(st.just("compact"), hosts, st.sampled_from([40, 1 << 20]), deaths),
        st.tuples(st.just("collect"), hosts, deaths),
        st.tuples(st.just("pass_by"), st.sampled_from(EVERY_MS)),
    )
    return st.lists(one, min_size=1, max_size=5).map(tuple)


between_steps = st.builds(Fault, steps, st.just("between"), others())
torn = st.builds(
    Fault, st.integers(0, 5), st.just("torn"), others(), st.lists(st.booleans(), min_size=1, max_size=4).map(tuple)
)
faults = st.one_of(st.none(), st.builds(Fault, steps, st.just("kill")), between_steps, between_steps, torn, torn)


class Lifecycle(RuleBasedStateMachine):
    """One dataset and all who use it."""

    def local(self) -> bool:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.fine = True

    @initialize(last_turn=st.booleans(), depth=st.sampled_from([1, 1, 2]), some=puts)
    def create(self, last_turn: bool, depth: int, some: list[tuple[Any, ...]]) -> None:
        self.last_turn, self.depth = last_turn, depth
        self.time = Time(2_000_000_000_000, SKEW_MS)
        self.now, self.event = State(), 0
        self.makers: dict[str, Process] = {}
        self.by_slab: dict[tuple[str, int], Slab] = {}
        self.slabs: dict[Path, Slab] = {}
        self.returned: list[tuple[Delete, Target]] = []  # from outside, and not of a certain age
        self.ends: list[tuple[Delete, Target]] = []  # deletes that came to their end
        self.writers = [Writer(f"{i:016x}", run, i) for i, run in enumerate(RUNS)]
        if self.local():
            self.root = Path(tempfile.mkdtemp(prefix="rr-lifecycle-", dir=MEMORY if MEMORY.is_dir() else None))
            self.stack.callback(shutil.rmtree, self.root)
        inner = LocalStorage(str(self.root)) if self.local() else MemoryStorage()
        self.storage = SteppedStorage(inner, self.time, self.other, self.arrived)
        self.storage.running.append(Process(STORE))
        self.patch()
        rr.create_dataset(
            self.storage.uri,
            SPEC,
            keys=rr.KeyScheme.fastdeploy(partition_by=depth),
            keep="last_turn" if last_turn else "all",
            max_clock_skew_s=SKEW_MS / 1000,
            tombstone_ttl_s=TTL_S,
            grace_s=GRACE_S,
        )
        self.kept = [rr.open_dataset(self.storage.uri), rr.open_dataset(self.storage.uri, run="run-1")]
        self.format = self.kept[0].format
        self.compactor: Compactor | None = None
        self.flushed(some)

    def patch(self) -> None:
        def put(module: Any, **values: Any) -> None:
            for name, value in values.items():
                self.stack.enter_context(mock.patch.object(module, name, value))

        random = Random(7)
        clock = types.SimpleNamespace(
            monotonic=lambda: self.time.ms / 1000,
            sleep=lambda seconds: self.time.pass_by(max(1, round(seconds * 1000))),
            perf_counter=lambda: 0.0,
            thread_time=lambda: 0.0,
        )
        lookup, dataset, delete, publisher, compact, snapshot = (
            import_module(f"rr_dataset.{name}")
            for name in ("lookup", "dataset", "delete", "publisher", "compact", "snapshot")
        )
        for module in (lookup, dataset, delete):
            put(module, open_storage=lambda uri, options=None: self.storage)
        for module in (delete, publisher):
            put(module, wall_ms=self.storage.now_ms, ThreadPoolExecutor=Inline)
        put(compact, ThreadPoolExecutor=Inline)
        put(delete, time=clock)
        put(snapshot, time=clock, READ_THREADS=1)
        put(publisher, open_slab=self.open_slab, write_state=self.write_state)
        put(uuid, uuid4=lambda: uuid.UUID(int=random.getrandbits(128), version=4))

    # What the product asks of a spool.

    @contextmanager
    def open_slab(self, path: Path) -> Iterator[SlabContents]:
        yield self.slabs[path].contents

    def write_state(self, path: Path, state: int) -> None:
        self.storage.step("write_state")
        self.slabs[path].state = state

    # What becomes visible.

    def arrived(self, path: str, content: bytes) -> None:
        self.makers[path] = self.storage.process
        if path.startswith("_rr/tombstones/"):
            tell = self.storage.process.tell
            if tell is not None:
                self.now.deletes[len(self.now.deletes)] = tell(marks_in(content))
            return
        found = _RAW.fullmatch(path)
        if found is not None:
            unit = Unit(found["writer"], int(found["seq"]), found["where"])
            puts = self.by_slab[unit.writer, unit.seq].units[unit]
            assert found["name"] == shard_name(puts, unit.writer, unit.seq)
            self.now.units[unit] = puts

    # What can be done, also by others in between.

    def other(self, what: tuple[Any, ...]) -> None:
        name, *how = what
        getattr(self, f"do_{name}")(*how)

    def stamp(self, writer: Writer) -> int:
        writer.last = max(writer.last + 1, self.time.on(writer.host) << 16)
        self.event += 1
        return writer.last

    def do_put(self, whose: int, request_id: str, shape: str, span: tuple[int, int]) -> None:
        writer = self.writers[whose]
        stamp = self.stamp(writer)
        start, tokens = span if "part" in shape or shape == "layer part" else (0, span[1])
        layers = LAYERS[stamp % 2 :][:1] if "layer" in shape else LAYERS
        status = "partial" if shape in ("part", "layer part") else "complete"
        gap = tuple(range(start, start + tokens))[1:3] if shape == "gap" else ()
        if shape.startswith("drop"):
            layers, status = (), "dropped"
        put = Put(
            stamp, f"{stamp:016x}-{writer.name}", request_id, writer.run, start, tokens,
            "part" in shape, status, layers, gap, self.event % 199 + 1, self.event,
        )  # fmt: skip
        for delete, target in self.returned:
            assert stamp > delete.t_del, f"{target} covers what was put after it returned"
        experts = np.full((len(layers), tokens, TOP_K), put.value, np.uint8)
        for position in gap:
            experts[:, position - start] = 0
        meta = {"status": status, "start": start, "part": put.part, "layers": list(layers), "reason": "full"}
        if gap:
            meta["missing"] = [[gap[0], gap[-1] + 1]]
        payload = np.zeros(-(-experts.size // 8) * 8, np.uint8)
        payload[: experts.size] = experts.reshape(-1)
        entry = Entry(DROP if status == "dropped" else PUT, stamp, request_id, meta, tokens, False, payload)
        writer.entries.append((entry, put))

    def do_mark(self, whose: int, mark: tuple[Target, bool]) -> None:
        """A writer's own delete."""
        writer, (target, of_run) = self.writers[whose], mark
        stamp = self.stamp(writer)
        run = writer.run if of_run or target.kind == "all" else None
        delete = Delete(str(target.text), target.covers(last_turn=self.last_turn), run, stamp)
        meta = {"kind": target.kind, "text": target.text, "run": run}
        writer.entries.append((Entry(DELETE, stamp, "", meta, 0, False, np.zeros(0, np.uint8)), delete))

    def do_seal(self, whose: int, apart: bool) -> None:
        """apart: drops and deletes go into a slab of their own."""
        writer = self.writers[whose]
        groups = [writer.entries]
        if apart:
            control = [each for each in writer.entries if each[0].kind != PUT]
            groups = [control, [each for each in writer.entries if each[0].kind == PUT]]
        for group in groups:
            if not group:
                continue
            writer.seq += 1
            identity = {
                "dataset": self.format.uuid, "uri": "", "writer": writer.name, "run_id": writer.run, "producer": "rollout",
            }  # fmt: skip
            slab = Slab(SlabContents(writer.seq, SEALED, identity, [entry for entry, _ in group], 0), {}, [])
            for _, told in group:
                if isinstance(told, Put):
                    unit = Unit(writer.name, writer.seq, directory(told.request_id, self.depth))
                    slab.units.setdefault(unit, []).append(told)
                else:
                    slab.deletes.append(told)
            path = Path(f"{writer.name}/{writer.seq}.slab")
            self.slabs[path] = self.by_slab[writer.name, writer.seq] = slab
            writer.slabs.append(path)
        writer.entries = []

    def run(self, host: int, fault: Fault | None, work: Callable[[], Any], tell: Any = None) -> Process:
        process = Process(host, fault, tell)
        with self.storage.started(process):
            work()
        return process

    def do_publish(self, whose: int, which: int, fault: Fault | None) -> None:
        writer = self.writers[whose]
        if writer.busy or not writer.slabs:
            return
        path = writer.slabs[which % len(writer.slabs)]
        slab = self.slabs[path]
        writer.busy = True
        if writer.publisher is None:
            writer.publisher = Publisher(self.storage, self.format, "none")
        process = self.run(writer.host, fault, lambda: writer.publisher.publish(path), lambda marks: slab.deletes)
        writer.busy = False
        if process.dead:
            writer.publisher = None
        else:
            assert slab.state in (PUBLISHED, ASIDE)
            writer.slabs.remove(path)

    def do_flush(self, whose: int, apart: bool, fault: Fault | None) -> None:
        self.do_seal(whose, apart)
        for _ in range(len(self.writers[whose].slabs)):
            self.do_publish(whose, 0, fault)

    def do_delete(self, host: int, wish: tuple[list[Target], str | None, int | None], fault: Fault | None) -> None:
        targets, run, age_s = wish
        began_ms, began = self.time.ms, self.event
        made: list[tuple[Delete, Target]] = []

        def tell(stamps: list[tuple[int, int]]) -> list[Delete]:
            for target, (t_del, _) in zip(targets, stamps, strict=True):
                made.append((Delete(str(target.text), target.covers(last_turn=self.last_turn), run, t_del), target))
                if age_s is None:
                    for slab in self.by_slab.values():
                        for put in (put for puts in slab.units.values() for put in puts):
                            assert put.put_at > began or put.stamp <= t_del
                else:
                    assert began_ms <= (t_del >> 16) + age_s * 1000 <= self.time.ms + SKEW_MS
            return [delete for delete, _ in made]

        arguments: dict[str, Any] = {}
        for target in targets:
            arguments.update(target.arguments())

        def work() -> None:
            rr.delete(self.storage.uri, run=run, older_than_s=age_s, **arguments)

        process = self.run(host, fault, work, tell)
        if not process.dead:
            self.ends += made
            if age_s is None:
                self.returned += made

    def do_compact(self, host: int, target_bytes: int, fault: Fault | None, *, kept: bool = False) -> None:
        compactor = self.compactor if kept else None

        def work() -> None:
            nonlocal compactor
            if compactor is None:
                compactor = Compactor(Lookup(self.storage.uri, None, None), self.storage.now_ms)
            report = compact_with(compactor, target_bytes=target_bytes, compression="none")
            assert report.damaged == ()

        process = self.run(host, fault, work)
        if kept:
            self.compactor = None if process.dead else compactor

    def do_collect(self, host: int, fault: Fault | None) -> None:
        def work() -> None:
            lookup = Lookup(self.storage.uri, None, None)
            Collector(Compactor(lookup, self.storage.now_ms), lookup, self.storage.now_ms).collect()

        self.run(host, fault, work)

    def do_pass_by(self, ms: int) -> None:
        self.time.pass_by(ms)

    # The rules.

    @contextmanager
    def looking(self) -> Iterator[None]:
        """A failure is told once."""
        self.fine = False
        yield
        self.check()
        self.fine = True

    def flushed(self, some: list[tuple[Any, ...]]) -> None:
        for one in some:
            self.do_put(*one)
        for whose in {one[0] for one in some}:
            self.do_flush(whose, len(some) % 2 == 0, None)

    @rule(some=puts)
    def put(self, some: list[tuple[Any, ...]]) -> None:
        for one in some:
            self.do_put(*one)

    @rule(whose=whom, mark=marks, some=puts)
    def mark(self, whose: int, mark: tuple[Target, bool], some: list[tuple[Any, ...]]) -> None:
        self.do_mark(whose, mark)
        self.put_here(whose, some)

    def put_here(self, whose: int, some: list[tuple[Any, ...]]) -> None:
        for _, *how in some:
            self.do_put(whose, *how)

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

    @rule(which=st.integers(0, 2), whole=st.booleans(), some=puts, fault=faults)
    def look(self, which: int, whole: bool, some: list[tuple[Any, ...]], fault: Fault | None) -> None:
        """A reader into whose steps others come."""
        with self.looking():
            self.flushed(some)
            dataset = rr.open_dataset(self.storage.uri) if which == 2 else self.kept[which]
            dropped = {
                put.request_id
                for writer in self.writers
                for put in self.puts_of(writer)
                if put.status == "dropped"
            } if whole else set()  # fmt: skip
            asked = [request_id for request_id in IDS if request_id not in dropped]
            before, found = self.now.copy(), []
            ask = dataset.get_many if whole else dataset.heads
            if any(what[0] == "put" and what[3].startswith("drop") for what in (fault.others if fault else ())):
                ask, whole = dataset.heads, False
            process = self.run(3, fault, lambda: found.extend(ask(asked, on_missing="none")))
            if process.dead:
                self.kept[which % 2] = rr.open_dataset(self.storage.uri, run="run-1" if which % 2 else None)
                return
            self.compare(dataset.run, asked, found, before, process.struck, whole=whole)

    def puts_of(self, writer: Writer) -> Iterator[Put]:
        for slab in self.by_slab.values():
            for puts in slab.units.values():
                yield from puts
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
            assert set(dataset.ids()) == set(expected)
            heads = dataset.heads(IDS, on_missing="none")
            assert {head.request_id: told(head, whole=False) for head in heads if head is not None} == {
                request_id: each._replace(experts=()) for request_id, each in expected.items()
            }
            there = [request_id for request_id, each in expected.items() if each.status != "dropped"]
            got = {record.request_id: told(record, whole=True) for record in dataset.get_many(there)}
            assert got == {request_id: expected[request_id] for request_id in there}
        self.check_files()

    def check_files(self) -> None:
        for path, process in self.makers.items():
            if process.dead or process in self.storage.running or not self.exists(path):
                continue
            raw, compacted = _RAW.fullmatch(path), _COMPACTED.fullmatch(path)
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

    def exists(self, path: str) -> bool:
        return (self.root / path).exists() if self.local() else path in self.storage.inner.objects

    def teardown(self) -> None:
        try:
            if self.fine and hasattr(self, "kept"):
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
        left = [path for path in self.makers if self.exists(path)]
        assert left == ["_rr/format.json"]
        if self.local():
            assert [path.name for path in self.root.iterdir()] == ["_rr"]


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

    def local(self) -> bool:
        return True


class InMemory(Lifecycle):
    """Objects and nothing else."""

    def local(self) -> bool:
        return False


OnDisk.TestCase.settings = settings(stateful_step_count=20, max_examples=settings().max_examples)
InMemory.TestCase.settings = settings(stateful_step_count=20, max_examples=settings().max_examples * 2)
TestOnDisk = OnDisk.TestCase
TestInMemory = InMemory.TestCase
