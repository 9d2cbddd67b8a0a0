"""Engines, workers, deleters, compactors and collectors of a dataset on S3, killed before a request or at a step.

`tests/test_kills.py`, `test_delete_kills.py` and `test_upkeep_kills.py` say what must hold; here are few points of each in
a normal run, and every request in the nightly one.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from s3_medium import S3Medium

import rr_dataset as rr
from rr_dataset.publisher import UNPUBLISHED, slabs_in
from rr_dataset.storage.remote import RemoteStorage
from tests.engines import SPEC, Engine, until
from tests.lifecycle import LATER_MS, Seen, collect_at, compact_at, now_ms, seen
from tests.spooled import publisher_of, quick_folder
from tests.test_delete_kills import OLD, OPERATIONS, model, plain, prepare_delete, prepare_slabs
from tests.test_kills import CODE, FAULTS, Model, finish, kill, listen, place, stored, with_fault
from tests.test_upkeep_kills import TTL_MS, prepare

if TYPE_CHECKING:
    from weed import Place, S3Server

__all__ = ["place"]  # a fixture
CODE_S3 = "root = sys.argv[1]\n" + CODE
POINTS = 3  # of each kind, in a normal run


@pytest.fixture
def medium(s3: Place, monkeypatch: pytest.MonkeyPatch) -> S3Medium:
    """The store, and who it is that looks at it, for this process and its children."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return S3Medium(s3, "obstore")


# ---- engine and worker


def downloaded(medium: S3Medium, folder: Path) -> Path:
    """A copy of all shards."""
    for path in medium.objects():
        if path.endswith(".arrow"):
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(medium.get(path) or b"")
    return folder


def end(medium: S3Medium, engine: Engine, told: Model, place: Path, tmp_path: Path, **how: bool) -> None:
    copies = (tmp_path / f"copy{number}" for number in itertools.count())
    finish(engine, told, medium.uri, place, look=lambda: stored(downloaded(medium, next(copies))), **how)


STEPS = [
    ("engine", "rr_dataset.slab:Slab.write_commit"),
    ("worker", "rr_dataset.storage.remote:RemoteStorage.list"),
    ("worker", "rr_dataset.storage.remote:RemoteStorage.create"),
    ("worker", "rr_dataset.slab:write_state"),
]
# So many calls a worker makes before it says hello: it reads the description, and tries to write and to delete.
AT_START = {"rr_dataset.storage.remote:RemoteStorage.create": 1, "rr_dataset.storage.remote:RemoteStorage._run": 3}


def at_step(
    medium: S3Medium,
    place: Path,
    tmp_path: Path,
    role: str,
    step: str,
    when: str,
    nth: int,
    *,
    both: bool,
    by_writer: bool,
) -> None:
    mark, told = tmp_path / "fired", Model()
    rr.create_dataset(medium.uri, SPEC, max_clock_skew_s=0.1)
    env = with_fault(role, step, when, nth, mark, both=both)
    starts = nth <= AT_START.get(step, 0)
    with Engine(CODE_S3, medium.uri, place, env=env) as engine:
        listen(engine, told)
        assert mark.exists(), "it came to that step"
        assert told.closed == (role == "worker" and not both and not starts)
        assert bool(told.workers) != starts
        if starts and not both:
            assert "WorkerError: the worker ended before it said hello" in engine.end()[1]
        end(medium, engine, told, place, tmp_path, both=both, by_writer=by_writer)


@pytest.mark.parametrize(("role", "step"), STEPS)
def test_killed_at_a_step(medium: S3Medium, place: Path, tmp_path: Path, role: str, step: str) -> None:
    rng = random.Random(step)
    when, nth = rng.choice(["before", "after"]), rng.randrange(1, 5)
    at_step(medium, place, tmp_path, role, step, when, nth, both=bool(rng.randrange(2)), by_writer=False)


@pytest.mark.nightly
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [1, 3, 7])
@pytest.mark.parametrize(("role", "step"), [*STEPS, ("worker", "rr_dataset.storage.remote:RemoteStorage._run")])
def test_killed_before_and_after_each_step(
    medium: S3Medium, place: Path, tmp_path: Path, role: str, step: str, nth: int, when: str, both: bool
) -> None:
    at_step(medium, place, tmp_path, role, step, when, nth, both=both, by_writer=nth == 3)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(30))
def test_killed_at_random(medium: S3Medium, place: Path, tmp_path: Path, seed: int) -> None:
    rng, told, who = random.Random(seed), Model(), ("both", "engine", "worker")[seed % 3]
    with Engine(CODE_S3, medium.uri, place) as engine:
        listen(engine, told, rng.randrange(1, 4000))
        kill(engine, told, who)
        listen(engine, told)
        end(medium, engine, told, place, tmp_path, both=who == "both", by_writer=bool(rng.randrange(2)))


LARGE = """
made = options(spool_dir, spool_bytes=64 << 20, slab_bytes=32 << 20, storage_options={"client": "s3fs"})
with rr.RoutingWriter(sys.argv[1], made) as writer:
    writer.put("a:0:0:0", experts(1, 1_600_000), "LTK")
    writer.flush(60)
"""


@pytest.mark.parametrize("both", [False, True])
def test_killed_in_an_upload_of_parts(medium: S3Medium, tmp_path: Path, both: bool) -> None:
    """What was uploaded is in nobody's way, and goes with the garbage."""
    mark, spools = tmp_path / "fired", tmp_path / "spools"
    spools.mkdir()
    rr.create_dataset(medium.uri, SPEC, max_clock_skew_s=0.1)
    client = "rr_dataset.storage.s3fs_client"
    env = with_fault("worker", f"{client}:S3fsClient._put_part", "before", 3, mark, both=both)
    small = {f"{client}:SINGLE_BYTES": 1 << 20, f"{client}:PART_BYTES": 5 << 20}
    env["RR_FAULT"] = json.dumps({**json.loads(env["RR_FAULT"]), "set": small})
    with Engine(LARGE, medium.uri, spools, env=env) as engine:
        code, stderr = engine.end()
        assert code == (-signal.SIGKILL if both else 0), stderr
    assert mark.exists()
    assert len(medium.uploads()) == 1, "the one that was killed"
    if both:
        assert not list(rr.open_dataset(medium.uri).ids())
        until(
            lambda: [each.outcome for each in rr.recover(spools, uri=medium.uri)] == ["recovered"], "the worker is gone"
        )
    assert rr.open_dataset(medium.uri).get("a:0:0:0").num_tokens == 1_600_000
    assert len([path for path in medium.objects() if path.endswith(".arrow")]) == 1
    collect_at(medium.uri, now_ms() + 10 * LATER_MS)
    assert not medium.uploads()


# ---- at each request of what runs once


def act(scenario: str, uri: str, spool: str, ms: int) -> None:
    """What is killed."""
    if scenario == "delete":
        rr.delete(uri, prefixes=["a", "b:1"], ids=["c:1:0", "b:2:7"])
    elif scenario == "slabs":
        publisher = publisher_of(rr.open_dataset(uri))
        (directory,) = Path(spool).glob("rr_dataset-*/*")
        for slab in slabs_in(directory, UNPUBLISHED):
            publisher.publish(slab)
        publisher.close()
    elif scenario == "compact":
        compact_at(uri, ms + LATER_MS)
    else:
        collect_at(uri, ms + TTL_MS + 2 * LATER_MS)


def drive() -> None:
    """Do what each line says in a child, which is killed before its request of this number."""
    for line in sys.stdin:
        number, *what = json.loads(line)
        made, done = os.pipe()
        pid = os.fork()
        if not pid:
            count = counted(number)
            act(*what)
            os.write(done, f"{next(count)}".encode())
            os._exit(0)
        os.close(done)
        with os.fdopen(made) as pipe:
            requests = pipe.read()
        _, status = os.waitpid(pid, 0)
        print(json.dumps([requests, status]), flush=True)


def counted(number: int) -> Iterator[int]:
    """Counts requests, and this process dies before the one of this number; the event loop makes them all, one by one."""
    count, once = itertools.count(), RemoteStorage._once

    def dying(*arguments: Any) -> Any:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return once(*arguments)

    RemoteStorage._once = dying  # type: ignore[method-assign]
    return count


Doing = Callable[[int, str, str, str, int], "tuple[str, int]"]


@contextmanager
def driver() -> Iterator[Doing]:
    code = "import sys; sys.path.insert(0, 'tests'); from tests.test_s3_kills import drive; drive()"
    command = [sys.executable, "-W", "error", "-c", code]
    with subprocess.Popen(
        command, cwd=FAULTS.parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def do(*what: Any) -> tuple[str, int]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
            requests, status = json.loads(process.stdout.readline())
            return requests, status

        yield do
        process.stdin.close()


def upload(root: Path, medium: S3Medium) -> S3Medium:
    with ThreadPoolExecutor(4) as threads:
        files = [path for path in root.rglob("*") if path.is_file()]
        list(threads.map(lambda path: medium.put(str(path.relative_to(root)), path.read_bytes()), files))
    return medium


def check_delete(medium: S3Medium, _: Any) -> None:
    assert set(rr.open_dataset(medium.uri).ids()) in (set(OLD), {"b:2:0"})
    act("delete", medium.uri, "", 0)
    assert set(rr.open_dataset(medium.uri).ids()) == {"b:2:0"}
    assert {path.partition("/")[0] for path in medium.objects()} == {"_rr", "data_id=b"}
    rr.delete(medium.uri, everything=True)
    assert {path.partition("/")[0] for path in medium.objects()} == {"_rr"}


def check_slabs(medium: S3Medium, spool: Path) -> None:
    stamps = [int(text) for text in (spool / "stamps").read_text().split()]
    found = plain(shown(medium.uri))
    dead = {i for i in found if found[i] < stamps[3] and i.startswith("a:")}
    dead |= {i for i in found if found[i] < stamps[6] and i.startswith("b:1")}
    assert not (set(found.values()) & set(stamps[7:]) and dead)
    for _ in range(2):
        act("slabs", medium.uri, str(spool), 0)
        assert plain(shown(medium.uri)) == model(stamps, len(OPERATIONS))


def shown(uri: str) -> dict[str, int]:
    dataset = rr.open_dataset(uri)
    return {head.request_id: head.rows[-1].t_submit for head in dataset.heads(list(dataset.ids()))}


def check_upkeep(medium: S3Medium, expected: tuple[Seen, int]) -> None:
    wanted, ms = expected
    assert seen(medium.uri) == wanted
    for again in range(3, 6):
        compact_at(medium.uri, ms + again * LATER_MS)
        collect_at(medium.uri, ms + TTL_MS + again * LATER_MS)
    assert seen(medium.uri) == wanted
    left = medium.objects()
    assert len([path for path in left if path.endswith(".arrow")]) == 4
    assert not [path for path in left if path.startswith(("_rr/tmp/", "_rr/tombstones/"))]


def killed(server: S3Server, base: Path, scenario: str, points: int | None) -> int:
    """Killed before each request, or so many of them; how many there are."""
    ms, template, wanted = now_ms(), base / "template", None
    template.mkdir()
    if scenario == "delete":
        prepare_delete(template)
    elif scenario == "slabs":
        prepare_slabs(template)
    else:
        wanted = prepare(template / "ds", ms), ms
    check = {"delete": check_delete, "slabs": check_slabs}.get(scenario, check_upkeep)
    with driver() as do:

        def at(number: int) -> tuple[str, int]:
            spool = base / str(number)
            shutil.copytree(template, spool, ignore=shutil.ignore_patterns("ds"))
            medium = upload(template / "ds", S3Medium(server.place(), "obstore"))
            requests, status = do(number, scenario, medium.uri, str(spool), ms)
            assert status == (0 if requests else signal.SIGKILL), status
            check(medium, spool if scenario == "slabs" else wanted)  # type: ignore[arg-type]
            return requests, status

        requests = int(at(1_000_000)[0])
        step = 1 if points is None else max(1, requests // points)
        for number in range(random.Random(scenario).randrange(step), requests, step):
            made, _ = at(number)  # a compaction asks once or twice less, depending on what comes first
            assert not made or int(made) <= number
    return requests


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


SCENARIOS = ["delete", "slabs", "compact", "collect"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_before_some_requests(medium: S3Medium, s3_server: S3Server, base: Path, scenario: str) -> None:
    assert killed(s3_server, base, scenario, POINTS) > 2 * POINTS


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_before_every_request(medium: S3Medium, s3_server: S3Server, base: Path, scenario: str) -> None:
    assert killed(s3_server, base, scenario, None) > 2 * POINTS
