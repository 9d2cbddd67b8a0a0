"""Slabs: what was committed comes back, and nothing else does, whatever the bytes are."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from rr_dataset.errors import CorruptSpoolError
from rr_dataset.slab import (
    ACTIVE,
    ASIDE,
    CHECKSUMMED,
    DROP,
    FREE,
    HEADER_BYTES,
    IDENTITY_BYTES,
    PUBLISHED,
    PUT,
    SEALED,
    SLAB_VERSION,
    TOKENS_FIRST,
    Entry,
    Slab,
    SlabContents,
    array_offsets,
    entry_bytes,
    is_control,
    read_identity,
    read_slab,
    read_state,
    write_state,
)
from tests.strategies import texts

CAPACITY = 1 << 16
IDENTITY = {"dataset": "d" * 36, "uri": "u", "writer": "0" * 16, "run_id": "r", "producer": "rollout"}
GUARD_BYTES, ENTRY_BYTES = 24, 48  # of schemas/SPOOL.md, not of the source
SEQ_AT, STATE_AT, END_AT = 24, 32, 40


@dataclass(frozen=True)
class Put:
    """One entry as a test asks for it."""

    request_id: str = "math:1"
    size: int = 100
    kind: int = PUT
    flags: int = 0
    tokens: int = 7
    fate: str = "commit"  # or "sync" or "abort"

    @property
    def meta(self) -> dict[str, Any]:
        return {"status": "complete", "id": self.request_id}

    def payload(self, stamp: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(stamp).integers(0, 256, self.size).astype(np.uint8)


puts = st.builds(
    Put,
    request_id=texts | st.text("ab:1", max_size=200),
    size=st.integers(0, 3000),
    kind=st.sampled_from([PUT, DROP]),
    flags=st.sampled_from([0, TOKENS_FIRST]),
    tokens=st.integers(0, (1 << 63) - 1),
    fate=st.sampled_from(["commit", "commit", "sync", "abort"]),
)


class Filled:
    """A slab file and what it was filled with; stamps count on over all fillings."""

    def __init__(self, path: Path) -> None:
        self.path, self.stamp, self.seq = path, 0, 0
        self.slab = Slab(path, CAPACITY)
        self.slab.identify(json.dumps(IDENTITY).encode())
        self.committed: dict[int, Put] = {}

    def fill(self, *some: Put, seal: bool = True) -> None:
        self.seq += 1
        self.committed = {}
        self.slab.activate(self.seq, control=False)
        for put in some:
            self.append(put)
        if seal:
            self.slab.seal()

    def append(self, put: Put) -> int:
        """Reserve, fill and commit one entry; where it starts."""
        start, meta = self.slab.cursor, json.dumps(put.meta).encode()
        assert start + entry_bytes(put.request_id.encode(), meta, put.size) <= CAPACITY
        self.stamp += 1
        flags = put.flags | CHECKSUMMED * (put.fate == "sync")
        reserved = self.slab.reserve(put.kind, flags, self.stamp, put.request_id.encode(), meta, put.tokens, put.size)
        assert reserved.payload.ctypes.data % 64 == 0
        reserved.payload[:] = put.payload(self.stamp)
        if put.fate != "abort":
            self.slab.write_commit(reserved, sync=put.fate == "sync")
            self.committed[self.stamp] = put
        return start

    def read(self) -> SlabContents:
        return read(self.path)

    def is_committed(self, entry: Entry, *, payload: bool = True) -> bool:
        put = self.committed.get(entry.t_submit)
        return (
            put is not None
            and (entry.kind, entry.request_id, entry.num_tokens) == (put.kind, put.request_id, put.tokens)
            and entry.meta == put.meta
            and entry.tokens_first == bool(put.flags & TOKENS_FIRST)
            and (not payload or bytes(entry.payload[: put.size]) == bytes(put.payload(entry.t_submit)))
        )


def read(path: Path) -> SlabContents:
    return read_slab(memoryview(path.read_bytes()), path)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    made = Filled(tmp_path / "000001.slab")
    yield made
    made.slab.close(unlink=True)


@pytest.fixture(scope="module")
def reused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """One file for many examples: every filling lies over what earlier ones left."""
    made = Filled(tmp_path_factory.mktemp("slab") / "000001.slab")
    yield made
    made.slab.close(unlink=True)


@given(st.lists(puts, max_size=12), st.booleans())
def test_what_was_committed_comes_back_over_the_remains_of_earlier_fillings(
    reused: Filled, some: list[Put], seal: bool
) -> None:
    reused.fill(*some, seal=seal)
    contents = reused.read()
    assert (contents.seq, contents.state) == (reused.seq, SEALED if seal else ACTIVE)
    assert contents.identity == IDENTITY
    assert [entry.t_submit for entry in contents.entries] == list(reused.committed)
    assert all(reused.is_committed(entry) for entry in contents.entries)
    assert contents.torn == len(some) - len(reused.committed)


@given(st.binary(min_size=1, max_size=64), st.integers(0, CAPACITY - 1), st.booleans())
@example(b"\xff" * 8, HEADER_BYTES, True)
def test_bytes_changed_anywhere_never_crash_nor_make_up_a_record(
    reused: Filled, junk: bytes, at: int, near: bool
) -> None:
    some = [Put(f"math:{i}", 40 * i, fate="sync" if i % 2 else "commit") for i in range(8)]
    reused.fill(*some)
    content = bytearray(reused.path.read_bytes())
    at = HEADER_BYTES + at % (reused.slab.cursor - HEADER_BYTES) if near else at
    content[at : at + len(junk)] = junk
    content = content[:CAPACITY]
    hurt = reused.path.with_name("hurt.slab")
    hurt.write_bytes(content)
    try:
        contents = read(hurt)
    except CorruptSpoolError as error:
        assert at < HEADER_BYTES, "damage behind the header loses entries, never the slab"
        assert str(hurt) in str(error)
        return
    if contents.seq != reused.seq:
        assert contents.entries == []
    for entry in contents.entries:
        sync = some[int(entry.request_id.split(":")[1])].fate == "sync"
        assert reused.is_committed(entry, payload=sync), "only a payload without a checksum may differ"
    if at >= HEADER_BYTES and len(contents.entries) < len(some):
        assert contents.torn > 0


@given(st.integers(0, CAPACITY))
@example(0)
@example(HEADER_BYTES)
@example(HEADER_BYTES + 30)
def test_a_cut_file_is_refused(reused: Filled, length: int) -> None:
    reused.fill(Put(), Put())
    cut = reused.path.with_name("cut.slab")
    cut.write_bytes(reused.path.read_bytes()[:length])
    if length == CAPACITY:
        assert len(read(cut).entries) == 2
        return
    if length == 0:
        assert read_state(cut) == (0, FREE)
    with pytest.raises(CorruptSpoolError, match=r"cut|not a slab|the file has"):
        read(cut)


def test_an_entry_between_reservation_and_commit_is_stepped_over_and_counted(filled: Filled) -> None:
    filled.fill(Put("math:1"), Put("math:2", fate="abort"), Put("math:3"), seal=False)
    contents = filled.read()
    assert [entry.request_id for entry in contents.entries] == ["math:1", "math:3"]
    assert contents.torn == 1


def test_reading_ends_where_the_engine_was_killed_inside_a_header(filled: Filled) -> None:
    filled.fill(Put("math:1"), seal=False)
    torn_at = filled.append(Put("math:2"))
    filled.slab.memory[torn_at + GUARD_BYTES + 20 : torn_at + GUARD_BYTES + ENTRY_BYTES] = bytes(ENTRY_BYTES - 20)
    contents = filled.read()
    assert [entry.request_id for entry in contents.entries] == ["math:1"]
    filled.slab.seal()
    assert filled.read().torn == 1, "a sealed slab knows where its entries end"


@pytest.mark.parametrize("field", ["entry bytes", "header bytes", "id bytes", "meta bytes"])
@pytest.mark.parametrize("value", [0, 1, 47, 64, CAPACITY, (1 << 31) - 1, (1 << 32) - 1])
def test_hostile_lengths_with_a_right_checksum_end_the_reading(filled: Filled, field: str, value: int) -> None:
    filled.fill(Put("math:1"))
    at = HEADER_BYTES + GUARD_BYTES
    form, offset = {
        "entry bytes": ("<Q", 16),
        "header bytes": ("<I", 24),
        "id bytes": ("<I", 28),
        "meta bytes": ("<I", 32),
    }[field]
    struct.pack_into(form, filled.slab.memory, at + offset, value)
    (head,) = struct.unpack_from("<I", filled.slab.memory, at + 24)
    end = min(HEADER_BYTES + head, CAPACITY)
    checksum = xxhash.xxh3_64_intdigest(bytes(filled.slab.memory[at:end]), seed=filled.seq)
    struct.pack_into("<QQQ", filled.slab.memory, HEADER_BYTES, checksum, 0, checksum)
    assert filled.read().entries == []


def test_entries_of_an_earlier_filling_are_not_of_this_one(filled: Filled) -> None:
    filled.fill(*[Put(f"math:{i}") for i in range(5)])
    filled.fill(Put("late:1"), seal=False)
    assert [entry.request_id for entry in filled.read().entries] == ["late:1"]
    filled.fill(seal=False)
    assert filled.read().entries == []


@pytest.mark.parametrize("content", [b"", bytes(10), bytes(HEADER_BYTES), bytes(CAPACITY)])
def test_a_blank_file_is_a_free_slab_without_contents(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "000001.slab"
    path.write_bytes(content)
    assert read_state(path) == (0, FREE)
    with pytest.raises(CorruptSpoolError):
        read(path)


@pytest.mark.parametrize("content", [b"x", b"rr-slab\0", b"rr-slub\0" + bytes(CAPACITY), b"\1" * CAPACITY])
def test_a_foreign_file_is_named_in_the_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "000001.slab"
    path.write_bytes(content)
    with pytest.raises(CorruptSpoolError, match="000001.slab: not a slab"):
        read_state(path)
    with pytest.raises(CorruptSpoolError):
        read(path)


@pytest.mark.parametrize("kind", ["link", "loop", "folder", "pipe", "socket"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(filled: Filled, kind: str) -> None:
    filled.fill(Put())
    path = filled.path.with_name("odd.slab")
    if kind == "link":
        path.symlink_to(filled.path)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.path.relpath(path))
    for access in (read_state, read_identity, is_control, lambda path: write_state(path, PUBLISHED)):
        with pytest.raises(CorruptSpoolError, match="odd.slab: no slab, it is a link, a folder or a pipe"):
            access(path)
    assert filled.slab.state == SEALED


@pytest.mark.parametrize(
    "identity",
    [
        [1],
        "x",
        5,
        None,
        {},
        {**IDENTITY, "uri": None},
        {**IDENTITY, "dataset": [1]},
        {**IDENTITY, "run_id": ""},
        {**IDENTITY, "run_id": "\ud800"},
        {**IDENTITY, "writer": "../../../tmp"},
        {**IDENTITY, "producer": "evil"},
    ],
)
def test_an_identity_that_no_writer_has_is_refused(filled: Filled, identity: Any) -> None:
    filled.slab.identify(json.dumps(identity).encode())
    filled.fill(Put())
    for access in (read, read_identity):
        with pytest.raises(CorruptSpoolError, match="000001.slab: the identity in the header"):
            access(filled.path)


@pytest.mark.parametrize("meta", [b"[1]", b"{{{", b"[" * 20_000, b'{"a":"\xff"}', b""])
def test_a_meta_that_is_no_object_is_refused_by_name(filled: Filled, meta: bytes) -> None:
    filled.fill(Put(), seal=False)
    filled.slab.write_commit(filled.slab.reserve(PUT, 0, 9, b"math:2", meta, 1, 8), sync=False)
    with pytest.raises(CorruptSpoolError, match="entry 1 at byte [0-9]+, 'math:2': its meta is no JSON"):
        filled.read()


def test_an_id_that_is_no_text_is_refused(filled: Filled) -> None:
    filled.fill(seal=False)
    filled.slab.write_commit(filled.slab.reserve(PUT, 0, 9, b"\xff", b"{}", 1, 8), sync=False)
    with pytest.raises(CorruptSpoolError, match="entry 0 at byte 4096 has a request id that is no UTF-8"):
        filled.read()


def test_another_version_is_refused_with_the_way_out(filled: Filled) -> None:
    struct.pack_into("<I", filled.slab.memory, 8, SLAB_VERSION + 1)
    with pytest.raises(CorruptSpoolError, match="recover it with the rr_dataset that wrote it"):
        read_state(filled.path)


def test_a_damaged_header_is_refused(filled: Filled) -> None:
    filled.fill(Put())
    for at, value in ((12, 64), (16, CAPACITY * 2), (STATE_AT, ASIDE + 1), (64, 1 << 40), (80, 0)):
        content = bytearray(filled.path.read_bytes())
        struct.pack_into("<Q", content, at, value)
        hurt = filled.path.with_name("hurt.slab")
        hurt.write_bytes(content)
        with pytest.raises(CorruptSpoolError, match=r"hurt\.slab: the (header says|identity)"):
            read(hurt)


def test_states_are_written_and_read_without_a_map(filled: Filled) -> None:
    filled.fill(Put(), seal=False)
    assert read_state(filled.path) == (1, ACTIVE)
    for state in (SEALED, PUBLISHED, ASIDE, FREE):
        write_state(filled.path, state)
        assert (filled.slab.state, read_state(filled.path)) == (state, (1, state))
    assert struct.unpack_from("<Q", filled.path.read_bytes(), SEQ_AT) == (1,)


def test_sync_finds_a_payload_that_changed_after_its_commit(filled: Filled) -> None:
    filled.fill(Put("math:1", fate="sync"), Put("math:2", fate="sync"), Put("math:3", fate="sync"))
    entries = filled.read().entries
    assert len(entries) == 3
    (size,) = struct.unpack_from("<Q", filled.slab.memory, HEADER_BYTES + GUARD_BYTES + 16)
    filled.slab.memory[HEADER_BYTES + 2 * size - 64] ^= 1  # in the second payload
    contents = filled.read()
    assert [entry.request_id for entry in contents.entries] == ["math:1", "math:3"]
    assert contents.torn == 1


def test_the_end_of_a_sealed_slab_is_where_its_entries_end(filled: Filled) -> None:
    filled.fill(Put(), Put())
    assert struct.unpack_from("<Q", filled.path.read_bytes(), END_AT) == (filled.slab.cursor,)


def test_an_entry_may_end_with_the_file(filled: Filled) -> None:
    filled.fill(seal=False)
    meta = json.dumps(Put().meta).encode()
    filled.append(Put(size=CAPACITY - HEADER_BYTES - entry_bytes(b"math:1", meta, 0)))
    assert filled.slab.cursor == CAPACITY
    filled.slab.seal()
    assert len(filled.read().entries) == 1
    assert filled.read().torn == 0


def test_the_longest_identity_fits_in_front_of_the_entries(filled: Filled) -> None:
    longest = {**IDENTITY, "uri": "x" * (IDENTITY_BYTES - len(json.dumps({**IDENTITY, "uri": ""})))}
    filled.slab.identify(json.dumps(longest).encode())
    filled.fill(Put())
    assert read_identity(filled.slab.path) == longest
    assert len(filled.read().entries) == 1


def test_no_room_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"\[Errno 2[278]\]"):  # EINVAL, EFBIG or ENOSPC: no disk has an exbibyte
        Slab(tmp_path / "000001.slab", 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_slab_is_closed_though_somebody_still_looks_at_a_payload(tmp_path: Path) -> None:
    made = Filled(tmp_path / "000001.slab")
    made.fill(Put(), seal=False)
    view = made.slab.reserve(PUT, 0, 9, b"a", b"{}", 1, 8).payload
    made.slab.close(unlink=True)
    view[:] = 3
    assert list(tmp_path.iterdir()) == []


@given(st.integers(0, 1000), st.integers(0, 1000), st.booleans(), st.booleans())
def test_arrays_behind_the_routing_are_aligned_and_disjoint(
    routing: int, tokens: int, token_ids: bool, logprobs: bool
) -> None:
    ids_at, logprobs_at, end = array_offsets(routing, tokens, token_ids=token_ids, logprobs=logprobs)
    assert routing <= ids_at < routing + 8
    assert ids_at % 8 == 0
    assert logprobs_at - ids_at == (4 * tokens if token_ids else 0)
    assert end - logprobs_at == (4 * tokens if logprobs else 0)
