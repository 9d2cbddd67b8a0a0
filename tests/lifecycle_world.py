"""Writers with their workers, deleters, compactors and collectors of one dataset, all in one process, one step at a time."""

from __future__ import annotations

import itertools
import re
import types
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np

import rr_dataset as rr
from rr_dataset.compact import compact_with
from rr_dataset.compactor import Compactor
from rr_dataset.garbage import Collector
from rr_dataset.lookup import Lookup
from rr_dataset.publisher import Publisher
from rr_dataset.slab import ASIDE, DELETE, DROP, PUBLISHED, PUT, SEALED, Entry, SlabContents
from rr_dataset.storage import Storage
from tests.routing_oracle import LAYERS, TOP_K, Delete, Put, State, Unit, directory, marks_in, shard_name
from tests.stepped_store import STORE, Fault, Inline, Process, SteppedStorage, Time
from tests.targets import Target

SPEC = rr.RoutingSpec(LAYERS, num_experts=200, top_k=TOP_K)
DAY_S, MINUTE_MS = 86_400, 60_000
SKEW_MS = 2_000
TTL_S, GRACE_S = 4 * DAY_S, 600
RUNS = ("run-1", "run-2", "run-1")  # of each writer
RAW = re.compile(r"(?P<where>.+)/(?P<name>00-.*-(?P<writer>[0-9a-f]{16})-(?P<seq>[0-9]+)\.arrow)")


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


class Late(Future):  # type: ignore[type-arg]
    """What is not done before somebody wants it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self.work = work

    def result(self, timeout: float | None = None) -> Any:
        return self.work()


class World:
    """What there is, and what can be done to it. `stack` undoes it all."""

    def place(self) -> Storage:
        """An empty store, of which `stack` leaves nothing."""
        raise NotImplementedError

    def objects(self) -> set[str]:
        """The paths of all that the store holds."""
        raise NotImplementedError

    def begin(self, *, last_turn: bool, depth: int) -> None:
        self.stack = ExitStack()
        self.last_turn, self.depth = last_turn, depth
        self.time = Time(2_000_000_000_000, SKEW_MS)
        self.now, self.event = State(), 0
        self.makers: dict[str, Process] = {}
        self.by_slab: dict[tuple[str, int], Slab] = {}
        self.slabs: dict[Path, Slab] = {}
        self.returned: list[tuple[Delete, Target]] = []  # from outside, and not of a certain age
        self.ends: list[tuple[Delete, Target]] = []  # deletes that came to their end
        self.writers = [Writer(f"{i:016x}", run, i) for i, run in enumerate(RUNS)]
        self.storage = SteppedStorage(self.place(), self.time, self.other, self.arrived)
        self.storage.running.append(Process(STORE))
        with ExitStack() as undo:  # what is patched and stays so would be every later test's
            undo.push(self.stack)
            self.patch()
            undo.pop_all()
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

    def patch(self) -> None:
        def put(module: Any, **values: Any) -> None:
            for name, value in values.items():
                self.stack.enter_context(mock.patch.object(module, name, value))

        random = Random(7)
        clock = types.SimpleNamespace(
            monotonic=lambda: self.time.ms / 1000,
            sleep=lambda seconds: self.time.wait(max(1, round(seconds * 1000))),
            perf_counter=lambda: 0.0,
            thread_time=lambda: 0.0,
        )
        begun = itertools.count()

        def start(_workers: Any, work: Callable[[], Any]) -> Future[Any]:
            """As late as possible, every second time."""
            return Late(work) if next(begun) % 2 else Inline().submit(work)

        lookup, dataset, delete, publisher, snapshot, at_once = (
            import_module(f"rr_dataset.{name}")
            for name in ("lookup", "dataset", "delete", "publisher", "snapshot", "at_once")
        )
        for module in (lookup, dataset, delete):
            put(module, open_storage=lambda uri, options=None: self.storage)
        for module in (delete, publisher):
            put(module, wall_ms=self.storage.now_ms, ThreadPoolExecutor=Inline)
        put(at_once, ThreadPoolExecutor=Inline)
        put(at_once.Workers, start=start)
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
        found = RAW.fullmatch(path)
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

    def do_bring(self, whose: int, mark: Any, some: list[tuple[Any, ...]], fault: Fault | None) -> None:
        """A delete and what is put after it."""
        if mark is not None:
            self.do_mark(whose, mark)
        self.put_here(whose, some)
        self.do_flush(whose, False, fault)

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

    def put_here(self, whose: int, some: list[tuple[Any, ...]]) -> None:
        for _, *how in some:
            self.do_put(whose, *how)

    def flushed(self, some: list[tuple[Any, ...]]) -> None:
        for one in some:
            self.do_put(*one)
        for whose in {one[0] for one in some}:
            self.do_flush(whose, len(some) % 2 == 0, None)
