"""Where a spool goes: what shared memory and disks have room for, and what is refused."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rr_dataset import spool_place as place_module
from rr_dataset.errors import InvalidInputError, SpoolUnavailableError
from rr_dataset.options import MIB
from rr_dataset.spool import Spool
from rr_dataset.spool_place import CONTROL_BYTES, CONTROL_SLABS, SHM_SHARE, choose_base, spools_of

SLAB = MIB
POOL = 4 * SLAB
WRITER = "0123456789abcdef"


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    spools_of(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpoolUnavailableError, match="belongs to somebody else"):
        Spool(tmp_path, WRITER, spool_bytes=POOL, slab_bytes=SLAB, sync=False)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_pool_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, WRITER, spool_bytes=POOL, slab_bytes=SLAB, sync=False)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(SpoolUnavailableError, match=r"No space left.*smaller spool_bytes="):
        spool.allocate()
    spool.close(remove=True)
    assert not spools_of(tmp_path).exists()


def test_somebody_who_looks_whether_it_is_dead_keeps_no_spool_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, tries = fcntl.flock, []

    def probed(fd: int, operation: int) -> None:
        tries.append(operation)
        with (spools_of(tmp_path) / f".{WRITER}" / "lock").open("rb") as probe:
            if len(tries) < 4:
                flock(probe, fcntl.LOCK_EX)
            flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", probed)
    spool = Spool(tmp_path, WRITER, spool_bytes=POOL, slab_bytes=SLAB, sync=False)
    assert len(tries) == 4
    spool.close(remove=True)
    tries.clear()
    monkeypatch.setattr(place_module, "LOCK_WAIT_S", 0)  # nobody is waited for without end
    with pytest.raises(SpoolUnavailableError, match="Resource temporarily unavailable"):
        Spool(tmp_path, WRITER, spool_bytes=POOL, slab_bytes=SLAB, sync=False)
    assert not spools_of(tmp_path).exists()


def test_what_tells_whose_a_spool_is_must_fit_and_what_is_too_long_is_named(tmp_path: Path) -> None:
    spool = Spool(tmp_path, WRITER, spool_bytes=POOL, slab_bytes=SLAB, sync=False)
    spool.allocate()
    with pytest.raises(InvalidInputError, match=r"takes 40\d\d, 4002 of them uri: shorten that"):
        spool.identify({"dataset": "d", "uri": "u" * 4000, "writer": WRITER, "run_id": "r"})
    spool.close(remove=True)


def test_a_child_that_is_forked_while_the_lock_is_made_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors: list[int] = []
    codes: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                os.fstat(descriptors[0])
            except OSError:
                os._exit(0)
            os._exit(1)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    open_file = os.open

    def opened(*arguments: Any) -> int:
        descriptors.append(open_file(*arguments))
        thread.start()
        thread.join(0.3)  # a fork that does not wait has happened by then
        return descriptors[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        spool = Spool(tmp_path, WRITER, spool_bytes=POOL, slab_bytes=SLAB, sync=False)
    thread.join()
    fork()
    assert codes == [0, 0]
    with (spool.directory / "lock").open("rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    spool.close(remove=True)
    descriptors[:] = [os.open(os.devnull, os.O_RDONLY)]  # the number is free, and a child keeps who has it next
    assert descriptors[0] == spool.lock_fd
    fork()
    assert codes[2:] == [1]
    os.close(descriptors[0])


NEED = POOL + CONTROL_SLABS * CONTROL_BYTES


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A shared memory of `total` bytes and a temporary folder with room, both of them made up."""
    found = SimpleNamespace(shm=tmp_path / "shm", tmp=tmp_path / "tmp", total=SHM_SHARE * NEED, free=1 << 40)
    found.shm.mkdir()
    found.tmp.mkdir()

    def statvfs(path: Path) -> SimpleNamespace:
        if not Path(path).exists():
            raise FileNotFoundError(2, "No such file or directory")
        shared = Path(path) == found.shm
        return SimpleNamespace(f_frsize=1, f_blocks=found.total, f_bavail=found.free if shared else found.total)

    monkeypatch.setattr(place_module, "SHM", found.shm)
    monkeypatch.setattr(place_module.tempfile, "gettempdir", lambda: str(found.tmp))
    monkeypatch.setattr(place_module.os, "statvfs", statvfs)
    return found


def test_shared_memory_is_taken_while_it_has_room(places: SimpleNamespace) -> None:
    assert choose_base(None, POOL) == places.shm
    places.free = NEED - 1
    assert choose_base(None, POOL) == places.tmp
    places.free, places.total = NEED, SHM_SHARE * NEED - 1
    assert choose_base(None, POOL) == places.tmp


def test_all_spools_of_a_host_share_an_eighth(places: SimpleNamespace) -> None:
    other = places.shm / "rr_dataset-77" / WRITER
    other.mkdir(parents=True)
    places.total = SHM_SHARE * (NEED + 4096)
    (other / "000001.slab").write_bytes(bytes(4096))
    assert choose_base(None, POOL) == places.shm
    (other / "000002.slab").write_bytes(bytes(1))
    assert choose_base(None, POOL) == places.tmp


def test_a_slab_that_vanishes_while_they_are_counted_is_none(places: SimpleNamespace) -> None:
    other = places.shm / "rr_dataset-77" / WRITER
    other.mkdir(parents=True)
    (other / "000001.slab").symlink_to(other / "gone")
    assert choose_base(None, POOL) == places.shm


def test_a_missing_shared_memory_falls_back(places: SimpleNamespace) -> None:
    places.shm.rmdir()
    assert choose_base(None, POOL) == places.tmp


def test_no_room_anywhere_names_what_was_tried(places: SimpleNamespace) -> None:
    places.free = places.total = 10
    with pytest.raises(
        SpoolUnavailableError, match=rf"{POOL} bytes \({places.shm}: room for 1 bytes; {places.tmp}: room"
    ):
        choose_base(None, POOL)


def test_a_place_of_ones_own_is_taken_or_refused_never_replaced(places: SimpleNamespace) -> None:
    assert choose_base(str(places.tmp), POOL) == places.tmp
    places.total = NEED
    assert choose_base(str(places.shm), POOL) == places.shm, "the eighth is for what nobody asked for"
    with pytest.raises(SpoolUnavailableError, match=r"nowhere: No such file.*give spool_dir="):
        choose_base(str(places.tmp / "nowhere"), POOL)


def test_without_a_temporary_folder_shared_memory_is_still_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_folder() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", no_folder)
    monkeypatch.setattr(place_module, "SHM", tmp_path)
    monkeypatch.setattr(place_module, "SHM_SHARE", 1)
    assert choose_base(None, POOL) == tmp_path
    monkeypatch.setattr(place_module, "SHM", tmp_path / "nowhere")
    with pytest.raises(SpoolUnavailableError, match=r"No such file or directory; No usable temporary directory found"):
        choose_base(None, POOL)
