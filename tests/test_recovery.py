"""Dead spools: what the next writer or `recover` makes durable, and what they leave, name and never touch."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rr_dataset as rr
from rr_dataset import recovery
from rr_dataset.clock import HybridClock, wall_ms
from rr_dataset.publisher import UNPUBLISHED, slabs_in
from rr_dataset.slab import ASIDE, PUT, SLAB_VERSION
from rr_dataset.spool import Spool
from rr_dataset.spool_place import spools_of
from tests.dead_spools import adopt_all, contents, die, outcomes, two_dead_spools
from tests.engines import SPEC, experts, stored_rows
from tests.spooled import SLAB, WRITER, make_spool, put


@pytest.fixture
def dataset(tmp_path: Path) -> Any:
    return rr.create_dataset(tmp_path / "ds", SPEC)


@pytest.fixture
def spool(tmp_path: Path, dataset: Any) -> Iterator[Spool]:
    made = make_spool(tmp_path, dataset)
    yield made
    made.close(remove=True)


def test_a_dead_spool_is_published_and_removed(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    for i in range(3):
        put(spool, dataset, f"a:{i}", experts(i))
        spool.close_active()
    put(spool, dataset, "a:3", experts(3))
    torn = spool.reserve(PUT, 0, b"torn:1", b"{}", tokens=1, payload_bytes=8)
    assert torn is not None
    spool.abort(torn)
    dead = die(spool)
    (report,) = adopt_all(dataset, tmp_path)
    assert (report.path, report.outcome, report.reason) == (str(dead), "recovered", "")
    assert (report.dataset, report.uri) == (dataset.format.uuid, dataset.uri)
    assert (report.records, report.torn) == (4, 1)
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "ds").rglob("*.arrow"))
    assert not dead.exists()
    assert stored_rows(tmp_path / "ds") == Counter(f"a:{i}" for i in range(4))
    assert adopt_all(dataset, tmp_path) == []
    assert adopt_all(dataset, tmp_path / "nowhere") == []


def test_a_living_spool_is_not_touched(tmp_path: Path, dataset: Any, spool: Spool) -> None:
    put(spool, dataset, "a:1", experts(1))
    spool.close_active()
    before = contents(spool.directory)
    adopt_all(dataset, tmp_path)
    assert contents(spool.directory) == before
    assert stored_rows(tmp_path / "ds") == {}


def test_a_spool_whose_worker_lives_is_not_dead(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    put(spool, dataset, "a:1", experts(1))
    inherited = os.dup(spool.lock_fd)  # as the worker has it: one open file description
    dead = die(spool)
    adopt_all(dataset, tmp_path)
    assert dead.exists()
    os.close(inherited)
    adopt_all(dataset, tmp_path)
    assert not dead.exists()


def test_two_adopters_publish_once(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    put(spool, dataset, "a:1", experts(1))
    dead = die(spool)
    with (dead / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        adopt_all(dataset, tmp_path)
        assert stored_rows(tmp_path / "ds") == {}
    adopt_all(dataset, tmp_path)
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}


def test_what_is_set_aside_keeps_its_dead_spool(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    spool._clock = HybridClock(lambda: wall_ms() - 8 * 86400 * 1000)
    put(spool, dataset, "a:1", experts(1))
    dead = die(spool)
    adopt_all(dataset, tmp_path)
    assert len(slabs_in(dead, (ASIDE,))) == 1
    before = contents(dead)
    adopt_all(dataset, tmp_path)
    assert contents(dead) == before


def of_another_dataset(dead: Path) -> None:
    other = rr.create_dataset(dead.parent.parent / "other", SPEC)
    shutil.rmtree(dead)
    spool = make_spool(dead.parent.parent, other)
    put(spool, other, "a:1", experts(1))
    die(spool)


def of_another_version(dead: Path) -> None:
    path = slabs_in(dead, UNPUBLISHED)[0]
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, 8, SLAB_VERSION + 1)
    path.write_bytes(content)


def cut(dead: Path) -> None:
    os.truncate(slabs_in(dead, UNPUBLISHED)[0], 5000)


def foreign_file(dead: Path) -> None:
    (dead / "000000.slab").write_bytes(b"a stranger's notes" * 100)


def of_another_state(dead: Path) -> None:
    path = slabs_in(dead, UNPUBLISHED)[0]
    content = bytearray(path.read_bytes())
    struct.pack_into("<Q", content, 32, 99)
    path.write_bytes(content)


def lock_that_is_a_link(dead: Path) -> None:
    (dead / "lock").rename(dead.parent.parent / "elsewhere")
    (dead / "lock").symlink_to(dead.parent.parent / "elsewhere")


def lock_that_is_a_folder(dead: Path) -> None:
    (dead / "lock").unlink()
    (dead / "lock").mkdir()


def link_to_a_spool(dead: Path) -> None:
    dead.rename(dead.parent.parent / "elsewhere")
    dead.symlink_to(dead.parent.parent / "elsewhere")


def strange_identity(dead: Path) -> None:
    identified_as(dead, {"by": "a stranger"})


def identity_of_no_kind(dead: Path) -> None:
    identified_as(dead, {"dataset": 1, "uri": [2]})


def identity_that_is_a_list(dead: Path) -> None:
    identified_as(dead, [1])


def identified_as(dead: Path, identity: Any) -> None:
    shutil.rmtree(dead)
    spool = Spool(dead.parent.parent, WRITER, spool_bytes=2 * SLAB, slab_bytes=SLAB, sync=False)
    spool.allocate()
    spool.identify(identity)
    reservation = spool.reserve(PUT, 0, b"a:1", b"{}", tokens=0, payload_bytes=0)
    assert reservation is not None
    spool.commit(reservation)
    die(spool)


def without_a_lock(dead: Path) -> None:
    (dead / "lock").unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        of_another_dataset,
        of_another_version,
        cut,
        foreign_file,
        of_another_state,
        lock_that_is_a_link,
        lock_that_is_a_folder,
        link_to_a_spool,
        strange_identity,
        identity_of_no_kind,
        identity_that_is_a_list,
        without_a_lock,
    ],
)
def test_what_cannot_be_taken_over_is_left_named_and_keeps_nobody_from_the_rest(
    tmp_path: Path, dataset: Any, spoil: Callable[[Path], None]
) -> None:
    spool = make_spool(tmp_path, dataset)
    put(spool, dataset, "bad:1", experts(1))
    bad = die(spool)
    spoil(bad)
    before = contents(bad)
    good = make_spool(tmp_path, dataset, "f" * 16)
    put(good, dataset, "good:1", experts(1))
    die(good)
    reports = adopt_all(dataset, tmp_path)
    assert [(report.path, report.outcome) for report in reports] == [
        (str(bad), "left"),
        (str(good.directory), "recovered"),
    ]
    assert reports[0].reason
    assert "Error" not in reports[0].reason.replace("Error: [Errno", "")
    assert contents(bad) == before
    assert stored_rows(tmp_path / "ds") == {"good:1": 1}
    assert not good.directory.exists()


def notes(directory: Path) -> None:
    (directory / "notes.txt").write_text("precious")
    (directory / "000001.slab.bak").write_text("a copy of a slab")


def folder(directory: Path) -> None:
    (directory / "sub").mkdir()
    (directory / "sub/a.txt").write_text("precious")


def folder_named_like_a_slab(directory: Path) -> None:
    (directory / "999999.slab").mkdir()


def link_to_a_slab(directory: Path) -> None:
    target = directory.parent.parent / "of somebody"
    target.write_bytes(b"precious")
    (directory / "999999.slab").symlink_to(target)


def foreign_name_of_a_slab(directory: Path) -> None:
    (directory / "copy.slab").write_bytes(b"precious")


FOREIGN = [notes, folder, folder_named_like_a_slab, link_to_a_slab, foreign_name_of_a_slab]


@pytest.mark.parametrize("filled", [True, False], ids=["filled", "empty"])
@pytest.mark.parametrize("add", FOREIGN)
def test_what_no_writer_made_stays_and_is_named(
    tmp_path: Path, dataset: Any, add: Callable[[Path], None], filled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    spool = make_spool(tmp_path, dataset)
    if filled:
        put(spool, dataset, "a:1", experts(1))
    dead = die(spool)
    made = set(dead.iterdir())
    add(dead)
    foreign = sorted(path.name for path in set(dead.iterdir()) - made)
    precious = {name: of for name, of in contents(dead).items() if Path(name) not in made}
    before = contents(dead)
    said = rr.recover(tmp_path, dry_run=True)
    assert contents(dead) == before
    assert not caplog.records
    done = rr.recover(tmp_path)
    assert outcomes(said) == outcomes(done) == [(WRITER, "left", int(filled))]
    reason = f"no writer made what else lies in it, {', '.join(foreign)}: move that away and recover again"
    assert said[0].reason == done[0].reason
    assert done[0].reason.startswith(reason)
    assert contents(dead) == {**precious, str(dead / "lock"): b""}
    assert f"what else lies there: {', '.join(foreign)}" in caplog.text
    assert stored_rows(tmp_path / "ds") == ({"a:1": 1} if filled else {})
    (again,) = adopt_all(dataset, tmp_path)
    assert (again.outcome, again.reason) == ("left", done[0].reason)
    for name in foreign:
        (dead / name).rename(tmp_path / name)
    assert rr.recover(tmp_path) == []
    assert not dead.exists()


def test_of_many_foreign_files_some_are_named(tmp_path: Path, dataset: Any) -> None:
    dead = die(make_spool(tmp_path, dataset))
    for i in range(8):
        (dead / f"{i}.txt").touch()
    (report,) = rr.recover(tmp_path)
    assert "0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 3 more: move" in report.reason


def test_a_folder_that_is_no_writers_is_not_looked_into(tmp_path: Path, dataset: Any) -> None:
    folder = spools_of(tmp_path) / "backup"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "notes").write_text("of somebody")
    before = contents(folder.parent)
    adopt_all(dataset, tmp_path)
    assert contents(folder.parent) == before


def test_an_outage_leaves_the_dead_spool_for_later(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    put(spool, dataset, "a:1", experts(1))
    dead = die(spool)
    (tmp_path / "ds/data_id=a").write_text("")
    adopt_all(dataset, tmp_path)
    assert dead.exists()
    (tmp_path / "ds/data_id=a").unlink()
    adopt_all(dataset, tmp_path)
    assert not dead.exists()
    assert stored_rows(tmp_path / "ds") == {"a:1": 1}


def test_one_slab_that_fails_does_not_hold_up_the_others(tmp_path: Path, dataset: Any) -> None:
    spool = make_spool(tmp_path, dataset)
    for i, name in enumerate("abc"):
        put(spool, dataset, f"{name}:{i}", experts(i))
        spool.close_active()
    short = spool.reserve(PUT, 0, b"short:1", b'{"status":"complete"}', tokens=100, payload_bytes=64)
    assert short is not None
    spool.commit(short)
    dead = die(spool)
    (tmp_path / "ds/data_id=b").write_text("a file where a directory must be")
    (report,) = adopt_all(dataset, tmp_path)
    assert (report.outcome, report.records) == ("left", 2)
    assert "data_id=b" in report.reason
    assert "record 'short:1' needs 800 bytes, its entry has 64" in report.reason
    assert stored_rows(tmp_path / "ds") == {"a:0": 1, "c:2": 1}
    (tmp_path / "ds/data_id=b").unlink()
    (report,) = adopt_all(dataset, tmp_path)
    assert (report.outcome, report.records) == ("left", 1)
    assert stored_rows(tmp_path / "ds") == {"a:0": 1, "b:1": 1, "c:2": 1}
    assert len(slabs_in(dead, UNPUBLISHED)) == 1


@pytest.mark.parametrize("step", range(8))
def test_a_removal_that_was_cut_short_is_finished_by_the_next(tmp_path: Path, dataset: Any, step: int) -> None:
    spool = make_spool(tmp_path, dataset)
    dead = die(spool)
    files = sorted(dead.iterdir(), key=lambda path: path.name == "lock")
    assert len(files) == 7
    for path in files[:step]:
        path.unlink()
    os.utime(dead, (0, 0))
    adopt_all(dataset, tmp_path)
    assert not dead.exists()


def test_a_lock_that_is_being_made_is_not_tried(tmp_path: Path, dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    new = spools_of(tmp_path) / f".{WRITER}"
    new.mkdir(parents=True)
    (new / "lock").touch()
    tried: list[int] = []
    monkeypatch.setattr(fcntl, "flock", lambda fd, _: tried.append(fd))
    assert adopt_all(dataset, tmp_path) == []
    assert tried == []
    os.utime(new, (0, 0))
    assert adopt_all(dataset, tmp_path) == []
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("where", "function", "victim", "rest"),
    [
        (Path, "lstat", "", []),
        (Path, "iterdir", "", []),
        (recovery, "_lock_of", WRITER, [("f" * 16, "recovered", 1)]),
        (recovery, "sort_out", WRITER, [("f" * 16, "recovered", 1)]),
        (recovery, "_publish", f"{WRITER}/000003.slab", [(WRITER, "recovered", 0), ("f" * 16, "recovered", 1)]),
    ],
)
def test_what_vanishes_meanwhile_is_gone_and_the_rest_goes_on(
    tmp_path: Path,
    dataset: Any,
    monkeypatch: pytest.MonkeyPatch,
    where: object,
    function: str,
    victim: str,
    rest: list[tuple[str, str, int]],
) -> None:
    first, _ = two_dead_spools(tmp_path, dataset)
    assert [path.name for path in slabs_in(first, UNPUBLISHED)] == ["000003.slab"]
    real, gone = getattr(where, function), spools_of(tmp_path) / victim

    def vanishing(path: Path, *args: Any, **more: Any) -> Any:
        if path == gone and gone.exists():
            shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        return real(path, *args, **more)

    monkeypatch.setattr(where, function, vanishing)
    assert outcomes(rr.recover(tmp_path)) == rest
    assert not gone.exists()


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = spools_of(die(make_spool(tmp_path, dataset)).parent.parent)
    real = Path.iterdir

    def refused(path: Path) -> Iterator[Path]:
        if path in refusing:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    refusing = {folder}
    for reports in (rr.recover(tmp_path), adopt_all(dataset, tmp_path)):
        assert [(report.path, report.outcome) for report in reports] == [(str(folder), "left")]
        assert "Permission denied" in reports[0].reason
    refusing = {tmp_path}
    with pytest.raises(rr.InvalidInputError, match=f"{tmp_path}: Permission denied; give a spool_dir"):
        rr.recover(tmp_path)


def test_what_is_being_made_is_left_for_a_minute(tmp_path: Path, dataset: Any) -> None:
    folder = spools_of(tmp_path)
    made = [folder / f".{WRITER}", folder / f".{'f' * 16}", folder / f"{'e' * 16}"]
    for path in made:
        path.mkdir(parents=True)
    (made[0] / "lock").touch()
    assert adopt_all(dataset, tmp_path) == []
    assert all(path.exists() for path in made)
    for path in made:
        os.utime(path, (0, 0))
    assert adopt_all(dataset, tmp_path) == []
    assert not folder.exists()
