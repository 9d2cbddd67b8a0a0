"""Where a spool goes: what shared memory and disks have room for, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rr_dataset import spool as spool_module
from rr_dataset.errors import SpoolUnavailableError
from rr_dataset.options import MIB
from rr_dataset.spool import CONTROL_BYTES, CONTROL_SLABS, SHM_SHARE, Spool, choose_base, spools_of

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

    monkeypatch.setattr(spool_module, "SHM", found.shm)
    monkeypatch.setattr(spool_module.tempfile, "gettempdir", lambda: str(found.tmp))
    monkeypatch.setattr(spool_module.os, "statvfs", statvfs)
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
    monkeypatch.setattr(spool_module, "SHM", tmp_path)
    monkeypatch.setattr(spool_module, "SHM_SHARE", 1)
    assert choose_base(None, POOL) == tmp_path
    monkeypatch.setattr(spool_module, "SHM", tmp_path / "nowhere")
    with pytest.raises(SpoolUnavailableError, match=r"No such file or directory; No usable temporary directory found"):
        choose_base(None, POOL)
