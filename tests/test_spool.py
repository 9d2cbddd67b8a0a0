"""The spool: what its pool holds in bytes, when slabs are sealed, and which directories it touches."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rr_dataset import spool as spool_module
from rr_dataset.errors import RecordTooLargeError, SpoolUnavailableError
from rr_dataset.options import MIB
from rr_dataset.slab import (
    ACTIVE,
    ASIDE,
    CHECKSUMMED,
    DROP,
    FREE,
    HEADER_BYTES,
    PUBLISHED,
    PUT,
    SEALED,
    Reservation,
    read_slab,
    read_state,
    write_state,
)
from rr_dataset.spool import Spool
from rr_dataset.spool_place import CONTROL_BYTES, CONTROL_SLABS, spools_of

SLAB = MIB
POOL = 4 * SLAB
HALF = SLAB // 2 - HEADER_BYTES  # two of these fit into a slab, and a little more
META = b"{}"
WRITER = "0123456789abcdef"

MakeSpool = Callable[..., Spool]


def identity(writer: str) -> dict[str, str]:
    return {"dataset": "d", "uri": "u", "writer": writer, "run_id": "r", "producer": "rollout"}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeSpool]:
    made = []

    def make_spool(writer: str = WRITER, *, spool_bytes: int = POOL, sync: bool = False) -> Spool:
        spool = Spool(tmp_path, writer, spool_bytes=spool_bytes, slab_bytes=SLAB, sync=sync)
        made.append(spool)
        spool.allocate()
        spool.identify(identity(writer))
        return spool

    yield make_spool
    for spool in made:
        if spool._control:  # not closed yet
            spool.close(remove=True)


@pytest.fixture
def spool(make: MakeSpool) -> Spool:
    return make()


def reserve(spool: Spool, size: int, request_id: bytes = b"a:1", *, kind: int = PUT, wait_s: float = 0) -> Any:
    return spool.reserve(kind, 0, request_id, META, tokens=1, payload_bytes=size, wait_s=wait_s)


def put(spool: Spool, size: int = 100, request_id: bytes = b"a:1", kind: int = PUT) -> Any:
    reservation = reserve(spool, size, request_id, kind=kind)
    assert reservation is not None, "the pool is full"
    reservation.payload[:] = 7
    return spool.commit(reservation)


def fill(spool: Spool) -> int:
    """Put until nothing more fits; how many that took."""
    count = 0
    while (reservation := reserve(spool, HALF)) is not None:
        spool.commit(reservation)
        count += 1
    return count


def files(spool: Spool) -> list[Path]:
    return sorted(spool.directory.glob("*.slab"))


def states(spool: Spool) -> dict[int, int]:
    """State by sequence number, of the slabs that were used."""
    return {seq: state for seq, state in map(read_state, files(spool)) if seq}


def publish(spool: Spool, *, state: int = PUBLISHED) -> list[int]:
    """What a worker does to the sealed slabs; their sequence numbers."""
    done = []
    for path in files(spool):
        seq, found = read_state(path)
        if found == SEALED:
            write_state(path, state)
            done.append(seq)
    return sorted(done)


def pool_bytes(spool: Spool) -> int:
    return sum(path.stat().st_size for path in files(spool)) - CONTROL_SLABS * CONTROL_BYTES


# ---- the pool


def test_all_memory_is_there_from_the_start_and_never_more(spool: Spool) -> None:
    assert pool_bytes(spool) == POOL
    assert all(path.stat().st_blocks * 512 >= path.stat().st_size for path in files(spool)), "reserved, not sparse"
    assert fill(spool) == 8
    assert pool_bytes(spool) == POOL
    assert 8 * HALF <= spool.used_bytes() <= POOL


def test_the_directory_is_for_its_user_alone(spool: Spool) -> None:
    assert spool.directory.stat().st_mode & 0o777 == 0o700
    assert spool.directory.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in spool.directory.iterdir()} == {0o600}


def test_published_slabs_are_filled_again_under_a_new_number(spool: Spool) -> None:
    for turn in range(5):
        fill(spool)
        spool.close_active()
        assert publish(spool) == list(range(4 * turn + 1, 4 * turn + 5))
        assert [batch.seq for batch in spool.collect()] == list(range(4 * turn + 1, 4 * turn + 5))
    assert pool_bytes(spool) == POOL
    assert len(files(spool)) == 4 + CONTROL_SLABS


def test_a_batch_is_done_only_when_its_slab_is_published(spool: Spool) -> None:
    batch = put(spool, 1000)
    put(spool, 24)
    spool.close_active()
    assert (batch.records, batch.bytes, batch.done) == (2, 1024, False)
    assert spool.collect() == []
    publish(spool)
    assert spool.collect() == [batch]
    assert batch.done
    assert spool.collect() == []
    assert spool.batches() == []
    assert spool.used_bytes() == 0


def test_a_slab_that_was_set_aside_is_never_filled_again(spool: Spool) -> None:
    batch = put(spool)
    spool.close_active()
    publish(spool, state=ASIDE)
    spool.collect()
    assert "set aside" in (batch.failure or "")
    assert fill(spool) == 6, "three slabs are left"
    assert states(spool)[1] == ASIDE


def test_a_record_larger_than_a_slab_gets_one_of_its_own(spool: Spool) -> None:
    first = put(spool, 100)
    large = put(spool, 2 * SLAB)
    assert large is not first
    assert spool.pending() == 1, "the slab that it did not fit was closed"
    assert pool_bytes(spool) <= POOL
    assert max(path.stat().st_size for path in files(spool)) - 2 * SLAB <= 3 * HEADER_BYTES, "no more than it needs"
    publish(spool)
    assert spool.collect() == [first]


def test_ordinary_slabs_come_back_after_a_large_record(spool: Spool) -> None:
    large = put(spool, POOL - 2 * HEADER_BYTES)
    assert pool_bytes(spool) <= POOL
    assert reserve(spool, SLAB // 2) is None
    spool.close_active()
    publish(spool)
    assert spool.collect() == [large]
    assert pool_bytes(spool) == 0
    assert fill(spool) == 8
    assert pool_bytes(spool) == POOL
    assert len({path.name for path in files(spool)}) == 4 + CONTROL_SLABS


def test_a_large_record_waits_until_enough_of_the_pool_is_free(spool: Spool) -> None:
    put(spool, HALF)
    put(spool, HALF)
    put(spool, HALF)
    assert reserve(spool, 3 * SLAB) is None
    assert pool_bytes(spool) <= POOL
    assert spool.pending() == 2, "what stands in its way was closed"
    publish(spool)
    spool.collect()
    assert reserve(spool, 3 * SLAB) is not None
    assert pool_bytes(spool) <= POOL


def test_what_does_not_fit_the_empty_pool_is_refused_with_the_limit(spool: Spool) -> None:
    with pytest.raises(RecordTooLargeError, match=f"'a:1' takes .* holds at most {POOL}: put it in parts"):
        reserve(spool, POOL)
    with pytest.raises(RecordTooLargeError, match=f"at most {CONTROL_BYTES}"):
        reserve(spool, CONTROL_BYTES, kind=DROP)
    assert reserve(spool, POOL - 2 * HEADER_BYTES) is not None


def test_a_smaller_record_still_fits_when_a_larger_one_did_not(spool: Spool) -> None:
    for _ in range(7):
        put(spool, HALF)
    assert reserve(spool, SLAB - HEADER_BYTES - 128) is None
    assert reserve(spool, HALF) is not None


def test_a_full_file_system_is_a_full_pool(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    put(spool, POOL - 2 * HEADER_BYTES)  # so that slabs must be made anew
    spool.close_active()
    publish(spool)
    spool.collect()

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        assert reserve(spool, 100) is None
    assert reserve(spool, 100) is not None


def test_drops_have_slabs_of_their_own_and_never_wait(spool: Spool) -> None:
    fill(spool)
    drops = 0
    while reserve(spool, 0, b"a" * 1000, kind=DROP, wait_s=1000) is not None:
        drops += 1
    assert drops == CONTROL_SLABS * ((CONTROL_BYTES - HEADER_BYTES) // 1088)
    assert [batch.control for batch in spool.batches()].count(True) == CONTROL_SLABS
    assert pool_bytes(spool) == POOL


steps = st.lists(
    st.tuples(st.just("put"), st.integers(0, 4 * SLAB))
    | st.sampled_from([("close", 0), ("publish", 0), ("collect", 0)]),
    max_size=30,
)


@given(steps)
def test_whatever_is_put_is_there_once_and_the_pool_stays_within_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    spool = Spool(tmp_path_factory.mktemp("pool"), WRITER, spool_bytes=POOL, slab_bytes=SLAB, sync=False)
    spool.allocate()
    spool.identify(identity(WRITER))
    accepted: list[str] = []
    published: list[str] = []

    def publish_all() -> None:
        for path in files(spool):
            if read_state(path)[1] == SEALED:
                entries = read_slab(memoryview(path.read_bytes()), path).entries
                published.extend(entry.request_id for entry in entries)
                write_state(path, PUBLISHED)

    for i, (step, size) in enumerate(steps):
        if step == "put" and size <= POOL - 2 * HEADER_BYTES:
            reservation = reserve(spool, size, str(i).encode())
            if reservation is not None:
                spool.commit(reservation)
                accepted.append(str(i))
        elif step == "close":
            spool.close_active()
        elif step == "publish":
            publish_all()
        else:
            spool.collect()
        assert pool_bytes(spool) <= POOL
    spool.close_active()
    publish_all()
    spool.collect()
    assert sorted(published) == sorted(accepted)
    assert spool.batches() == []
    assert fill(spool) == 8, "all room is back"
    spool.close(remove=True)


# ---- sealing and order


def test_an_open_reservation_keeps_its_slab_from_being_sealed(spool: Spool) -> None:
    open_one: Reservation = reserve(spool, 100)
    batch = put(spool, 100)
    spool.close_active()
    assert states(spool) == {1: ACTIVE}
    assert spool.pending() == 1
    assert put(spool, 100) is not batch, "a closed slab takes no more"
    spool.commit(open_one)
    assert states(spool) == {1: SEALED, 2: ACTIVE}
    assert batch.records == 2


def test_an_aborted_reservation_lets_its_slab_go_and_leaves_no_record(spool: Spool) -> None:
    open_one: Reservation = reserve(spool, 100, b"lost:1")
    put(spool, 100, b"kept:1")
    spool.close_active()
    spool.abort(open_one)
    path = next(path for path in files(spool) if read_state(path) == (1, SEALED))
    contents = read_slab(memoryview(path.read_bytes()), path)
    assert [entry.request_id for entry in contents.entries] == ["kept:1"]
    assert spool.batches()[0].records == 1


def test_only_slabs_of_that_age_are_closed(spool: Spool) -> None:
    put(spool)
    assert spool.oldest_active_s() is not None
    spool.close_active(min_age_s=1000)
    assert spool.pending() == 0
    spool.close_active()
    assert spool.pending() == 1
    assert spool.oldest_active_s() is None
    spool.close_active()
    assert states(spool) == {1: SEALED}, "an empty pool has nothing to close"


def test_the_owner_hears_of_first_entries_and_of_seals(spool: Spool) -> None:
    heard = []
    spool.on_event = lambda: heard.append(dict(states(spool)))
    put(spool)
    put(spool)
    assert len(heard) == 1
    spool.close_active()
    assert heard[1:] == [{1: SEALED}]


def test_the_order_in_the_slabs_is_the_order_of_the_stamps_over_threads(spool: Spool) -> None:
    gate = threading.Barrier(4)

    def work(name: int) -> None:
        gate.wait()
        for i in range(100):
            put(spool, 4000, f"t{name}:{i}".encode())

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spool.close_active()
    found = []
    for seq, path in sorted((read_state(path)[0], path) for path in files(spool)):
        if seq:
            found += read_slab(memoryview(path.read_bytes()), path).entries
    stamps = [entry.t_submit for entry in found]
    assert len(stamps) == 400
    assert stamps == sorted(set(stamps))
    assert len({entry.request_id for entry in found}) == 400
    for name in range(4):
        mine = [int(entry.request_id.split(":")[1]) for entry in found if entry.request_id.startswith(f"t{name}:")]
        assert mine == list(range(100)), "each thread's puts keep their order"


def test_sync_marks_its_entries_as_checksummed(make: MakeSpool) -> None:
    for sync in (True, False):
        spool = make(f"{sync:016x}", sync=sync)
        reservation = reserve(spool, 100)
        (flags,) = reservation.slab.memory[reservation.start + 30 : reservation.start + 32].cast("H")
        assert flags == CHECKSUMMED * sync
        spool.commit(reservation)


# ---- waiting


class FakeTime:
    """A clock that only waiting moves. `waits` are the time-outs that were really waited for."""

    def __init__(self, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 1000.0, list[float]()
        self.at_wait: Callable[[], object] = lambda: False
        monkeypatch.setattr(spool_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(spool.changed, "wait", self.wait)

    def wait(self, timeout: float) -> bool:
        if timeout > 0:
            self.waits.append(timeout)
        if self.at_wait():
            return True
        self.now += timeout
        return False


def test_a_full_pool_is_waited_for_once_per_outage(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(spool, monkeypatch)
    for outage in (1, 2):
        for _ in range(8):
            put(spool, HALF)
        assert [reserve(spool, HALF, wait_s=0.1) for _ in range(5)] == [None] * 5
        assert fake.waits == [pytest.approx(0.1)] * outage
        put(spool, 100)  # what still fits does not end the outage
        assert reserve(spool, HALF, wait_s=0.1) is None
        assert fake.waits == [pytest.approx(0.1)] * outage
        spool.close_active()
        publish(spool)
        spool.collect()


def test_a_waiting_put_goes_on_when_a_slab_comes_free(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(spool, monkeypatch)
    for _ in range(8):
        put(spool, HALF)

    def free_one() -> bool:
        spool.close_active()
        publish(spool)
        return bool(spool.collect())

    fake.at_wait = free_one
    assert reserve(spool, HALF, wait_s=5) is not None
    assert fake.waits == [5.0]


def test_a_blocked_thread_is_woken_by_collect(spool: Spool) -> None:
    fill(spool)
    publish(spool)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(reserve(spool, HALF, wait_s=60)))
    spool._full_since = None  # as if the outage began with this put
    thread.start()
    spool.collect()
    thread.join(60)
    assert got
    assert got[0] is not None


# ---- directories


def test_closing_leaves_nothing(make: MakeSpool, tmp_path: Path) -> None:
    spool = make()
    put(spool)
    put(spool, 2 * SLAB)
    spool.close(remove=True)
    assert not spools_of(tmp_path).exists()


def test_closing_without_removal_keeps_what_was_committed_and_frees_the_lock(make: MakeSpool) -> None:
    spool = make()
    put(spool, 100, b"kept:1")
    spool.close(remove=False)
    path = next(path for path in files(spool) if read_state(path) == (1, ACTIVE))
    assert [entry.request_id for entry in read_slab(memoryview(path.read_bytes()), path).entries] == ["kept:1"]
    with (spool.directory / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_lock_is_held_as_long_as_the_spool_lives(spool: Spool) -> None:
    with (spool.directory / "lock").open("rb") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_spool_of_another_writer_is_not_touched(make: MakeSpool) -> None:
    other = make("f" * 16)
    put(other, 1000)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in other.directory.iterdir()}
    spool = make()
    put(spool)
    spool.close(remove=True)
    with pytest.raises(SpoolUnavailableError):
        make("f" * 16)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in other.directory.iterdir()} == before


def test_free_slabs_are_free_in_their_files(spool: Spool) -> None:
    put(spool)
    spool.close_active()
    publish(spool)
    spool.collect()
    assert set(states(spool).values()) == {FREE}


@pytest.mark.parametrize("puts_first", [True, False])
def test_a_slab_of_deletes_is_sealed_once_and_before_that_of_the_puts(spool: Spool, puts_first: bool) -> None:
    sealed = []
    for slab in spool._slabs + spool._control:
        slab.seal = lambda slab=slab, seal=slab.seal: (sealed.append(slab.batch.control), seal())  # type: ignore[method-assign]
    for kind in (PUT, DROP) if puts_first else (DROP, PUT):
        reservation = spool.reserve(kind, 0, b"a", b"{}", tokens=1, payload_bytes=0)
        assert reservation is not None
        spool.commit(reservation)
    spool.close_active()
    assert sealed == [True, False]
