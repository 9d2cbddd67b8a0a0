"""The end of a spool: nothing is reserved any more, and what is reserved still ends as it would have."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rr_dataset.errors import WriterClosedError
from rr_dataset.options import MIB
from rr_dataset.slab import ACTIVE, DROP, PUT, SEALED, read_slab, read_state
from rr_dataset.spool import Spool

WRITER = "0123456789abcdef"


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path, WRITER, spool_bytes=2 * MIB, slab_bytes=MIB, sync=False)
    made.allocate()
    made.identify({"dataset": "d", "uri": "u", "writer": WRITER, "run_id": "r", "producer": "rollout"})
    yield made
    if not made._given_up:
        made.close(remove=True)


def reserve(spool: Spool, request_id: str = "a:1", size: int = 100, *, kind: int = PUT, wait_s: float = 0) -> Any:
    return spool.reserve(kind, 0, request_id.encode(), b"{}", tokens=1, payload_bytes=size, wait_s=wait_s)


def locked(spool: Spool) -> bool:
    with (spool.directory / "lock").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def stored(spool: Spool) -> dict[str, int]:
    """State of the slab by request id."""
    found = {}
    for path in spool.directory.glob("*.slab"):
        seq, state = read_state(path)
        if seq:
            entries = read_slab(memoryview(path.read_bytes()), path).entries
            found.update({entry.request_id: state for entry in entries})
    return found


@pytest.mark.parametrize("kind", [PUT, DROP])
@pytest.mark.parametrize("size", [100, MIB, 2 * MIB - 8192])
def test_nothing_is_reserved_once_the_writer_closes(spool: Spool, kind: int, size: int) -> None:
    before = reserve(spool)
    spool.refuse()
    with pytest.raises(WriterClosedError, match="the writer is closed"):
        reserve(spool, kind=kind, size=size if kind == PUT else 0)
    before.payload[:] = 7
    batch = spool.commit(before)
    assert (batch.records, spool.batches()) == (1, [batch])
    assert {seq for seq, _ in map(read_state, spool.directory.glob("*.slab"))} == {0, 1}, "no slab was begun"


def test_nothing_is_reserved_in_what_was_given_up(spool: Spool) -> None:
    spool.close(remove=False)
    with pytest.raises(WriterClosedError):
        reserve(spool)
    assert not locked(spool)
    assert len(list(spool.directory.glob("*.slab"))) == 4


def test_who_waits_for_room_is_told_that_none_will_come(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    while (reservation := reserve(spool, size=500_000)) is not None:
        spool.commit(reservation)
    spool._full_since = None  # as if the outage began with the next put
    waiting, errors = threading.Event(), list[Exception]()
    wait = spool.changed.wait

    def waited(timeout: float | None = None) -> bool:
        waiting.set()
        return wait(timeout)

    def work() -> None:
        try:
            reserve(spool, size=500_000, wait_s=1000)
        except WriterClosedError as error:
            errors.append(error)

    monkeypatch.setattr(spool.changed, "wait", waited)
    thread = threading.Thread(target=work)
    thread.start()
    assert waiting.wait(60)
    spool.refuse()
    thread.join(60)
    assert len(errors) == 1


@pytest.mark.parametrize("closing", [True, False])
def test_what_is_still_filled_ends_and_frees_the_lock(spool: Spool, closing: bool) -> None:
    first, second, third = reserve(spool, "a:1"), reserve(spool, "a:2"), reserve(spool, "b:1", MIB - 8192)
    spool.commit(reserve(spool, "a:3"))
    if closing:
        spool.close_active()
    assert spool.close(remove=False) == 3
    for i, reservation in enumerate((first, second, third)):
        assert locked(spool)
        reservation.payload[:] = i
        spool.commit(reservation)
    assert not locked(spool)
    assert set(stored(spool)) == {"a:1", "a:2", "a:3", "b:1"}
    assert set(stored(spool).values()) == {SEALED} if closing else {SEALED, ACTIVE}


def test_what_is_given_up_frees_the_lock_too_and_once(spool: Spool) -> None:
    first, second = reserve(spool, "a:1"), reserve(spool, "a:2")
    spool.close(remove=False)
    spool.commit(first)
    spool.abort(first)  # an interrupt right after the commit
    assert locked(spool)
    spool.abort(second)
    assert not locked(spool)
    assert set(stored(spool)) == {"a:1"}
    spool.abort(second)


def test_a_reservation_ends_once(spool: Spool) -> None:
    first, second = reserve(spool, "a:1"), reserve(spool, "a:2")
    spool.close_active()
    spool.abort(first)
    spool.abort(first)
    assert spool.pending() == 1
    assert stored(spool) == {}
    spool.commit(second)
    assert stored(spool) == {"a:2": SEALED}
