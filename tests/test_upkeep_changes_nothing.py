"""Whatever was put and deleted, and whatever is compacted and collected in whatever order: no reader sees a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rr_dataset.compact_plan import Task
from rr_dataset.compactor import Compactor
from rr_dataset.lookup import Lookup
from tests.lifecycle import LATER_MS, Seen, collect_at, compact_at, now_ms, seen, shards
from tests.spooled import quick_folder
from tests.stored import Stored

TTL_MS = 7 * 86_400_000
RUNS = ("a", "b")

ids = st.builds("p:{}:{}:0{}".format, st.sampled_from("01"), st.sampled_from("0123"), st.sampled_from(["", "", "#0"]))
puts = st.fixed_dictionaries(
    {
        "request_id": ids,
        "tokens": st.integers(1, 6),
        "run": st.sampled_from(RUNS),
    },
    optional={
        "part": st.booleans(),
        "start": st.integers(0, 3),
        "layers": st.sampled_from([None, (3,), (7, 9)]),
        "status": st.sampled_from(["complete", "partial", "aborted", "dropped"]),
    },
)
deletes = st.tuples(
    st.sampled_from(["prefix", "ids", "all"]), ids, st.integers(1, 3), st.sampled_from([None, *RUNS]), st.integers(0, 4)
)
upkeep = st.sampled_from(["compact", "some", "later", "collect", "expire"])
steps = st.lists(st.one_of(st.lists(puts, min_size=1, max_size=3), deletes, upkeep, upkeep), min_size=3, max_size=14)


def everyone(root: Path) -> tuple[Seen, ...]:
    return seen(root), *(seen(root, run=run) for run in RUNS)


def tombstone(stored: Stored, kind: str, request_id: str, depth: int, run: str | None, ago: int, made: int) -> None:
    text: Any = ""
    if kind == "prefix":
        text = ":".join(request_id.partition("#")[0].split(":")[:depth])
    elif kind == "ids":
        text = [request_id]
    stored.tombstone(kind, text, t_del=max(stored._stamp - ago, 0), run=run, made=made)


def maintain(root: Path, how: str, ms: int, data: st.DataObject) -> None:
    if how == "compact":
        compact_at(root, ms)
    elif how == "collect":
        collect_at(root, ms)
    elif how == "some":  # any subset of what is visible is a compaction
        compactor = Compactor(Lookup(str(root), None, None), lambda: ms)
        names = [item.name.text for item in compactor.view("data_id=p").visible]
        if names:
            chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
            compactor.execute(Task("data_id=p", tuple(chosen), 0, 0))


@settings(max_examples=min(2 * settings().max_examples, 600))  # a tenth of a second each
@given(st.sampled_from(["all", "last_turn"]), steps, st.data())
def test_upkeep_changes_nothing(keep: str, work: list[Any], data: st.DataObject) -> None:
    with quick_folder(Path.cwd()) as folder:
        stored = Stored(folder / "d", keep=keep)
        ms = now_ms()
        for step in work:
            if isinstance(step, list):
                stored.shard(*(stored.row(**put) for put in step))
            elif isinstance(step, tuple):
                tombstone(stored, *step, made=ms)
            elif step in ("later", "expire"):
                ms += LATER_MS if step == "later" else TTL_MS
            else:
                before = everyone(stored.root)
                maintain(stored.root, step, ms, data)
                assert everyone(stored.root) == before, step
        before = everyone(stored.root)
        for _ in range(4):
            ms += LATER_MS
            compact_at(stored.root, ms)
            collect_at(stored.root, ms)
            assert everyone(stored.root) == before
        visible = Compactor(Lookup(str(stored.root), None, None)).view("data_id=p").visible
        assert len(shards(stored.root)) == len(visible)
