"""One slab: a file of entries in shared memory, as schemas/SPOOL.md describes it byte by byte.

A slab is filled many times. Each filling has a sequence number that its writer never uses again; it seeds the checksum
of every entry header, so what an earlier filling left behind is never taken for an entry of this one.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rr_dataset.errors import CorruptSpoolError
from rr_dataset.record import PRODUCERS

SLAB_VERSION = 0
HEADER_BYTES = 4096
FREE, ACTIVE, SEALED, PUBLISHED, ASIDE = range(5)
PUT, DROP, DELETE = 1, 2, 3
TOKENS_FIRST = 1  # flag: the routing is [tokens, layers, top_k], else [layers, tokens, top_k]
CHECKSUMMED = 2  # flag: the guard holds the payload's checksum

_SLAB_MAGIC = b"rr-slab\0"
_ENTRY_MAGIC = 0x45525252  # "RRRE"
_ALIGN = 64
# magic, version, header bytes, capacity, sequence, state, end of the entries once sealed
_SLAB = struct.Struct("<8sIIQQQQ")
_SEQ_WORD, _STATE_WORD, _END_WORD = 3, 4, 5
# length and XXH3-64 of the JSON that follows
_IDENTITY = struct.Struct("<QQ")
_IDENTITY_AT = 64
IDENTITY_BYTES = HEADER_BYTES - _IDENTITY_AT - _IDENTITY.size  # at most
# commit word, XXH3-64 of the payload (0 unless CHECKSUMMED), XXH3-64 of the rest of the entry's header
_GUARD = struct.Struct("<QQQ")
# magic, kind, flags, stamp, entry bytes, header bytes, id bytes, meta bytes, zero, tokens
_ENTRY = struct.Struct("<IHHQQIIIIQ")
_FIXED = _GUARD.size + _ENTRY.size
_TEXTS = ("dataset", "uri", "writer", "run_id", "producer")  # what an identity must hold
_WRITER = re.compile(r"[0-9a-f]{16}")
_NOT_A_FILE = "no slab, it is a link, a folder or a pipe; no writer made it, move it away"
_NO_FILE = frozenset((errno.ELOOP, errno.EISDIR, errno.ENXIO))  # a link, a directory, a pipe or socket


def _align(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def entry_bytes(request_id: bytes, meta: bytes, payload_bytes: int) -> int:
    """What an entry takes of a slab."""
    return _align(_FIXED + len(request_id) + len(meta)) + _align(payload_bytes)


def array_offsets(routing_bytes: int, tokens: int, *, token_ids: bool, logprobs: bool) -> tuple[int, int, int]:
    """Where token_ids (int32) and logprobs (float32) start behind the routing in a payload, and its length."""
    ids_at = -(-routing_bytes // 8) * 8
    logprobs_at = ids_at + 4 * tokens * token_ids
    return ids_at, logprobs_at, logprobs_at + 4 * tokens * logprobs


@dataclass(eq=False)
class Batch:
    """What one filling holds and what became of it: the unit that becomes durable together."""

    seq: int
    control: bool = False  # holds drops and deletes, no records
    opened_s: float = 0.0  # monotonic time of the first entry
    records: int = 0
    bytes: int = 0
    done: bool = False
    failure: str | None = None  # why a batch that is done is not durable
    waiters: list[Callable[[], None]] = field(default_factory=list)


@dataclass(slots=True)
class Reservation:
    """Room for one entry: fill `payload` (uint8, 64-byte aligned), then commit or abort it."""

    slab: Slab
    start: int
    stop: int
    payload: npt.NDArray[np.uint8]
    t_submit: int
    checksum: int
    open: bool = True  # neither committed nor aborted


class Slab:
    """A slab file mapped by the engine. Not thread-safe: the spool's lock guards it, save the payloads."""

    def __init__(self, path: Path, capacity: int) -> None:
        """Create the file. Raises OSError when there is no room for all of it."""
        self.path, self.capacity = path, capacity
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, capacity)  # before mapping: a touched page of a full tmpfs is a bus error
            self._map = mmap.mmap(fd, capacity, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        self.memory = memoryview(self._map)
        self._words = self.memory[:HEADER_BYTES].cast("Q")
        self.batch = Batch(0)
        self.cursor = HEADER_BYTES
        self.open = 0  # reservations neither committed nor aborted
        self.closing = False  # to be sealed when the last of them ends

    def identify(self, identity: bytes) -> None:
        """Write the header of a free slab; the identity has at most IDENTITY_BYTES."""
        _SLAB.pack_into(self.memory, 0, _SLAB_MAGIC, SLAB_VERSION, HEADER_BYTES, self.capacity, 0, FREE, 0)
        _IDENTITY.pack_into(self.memory, _IDENTITY_AT, len(identity), xxhash.xxh3_64_intdigest(identity))
        start = _IDENTITY_AT + _IDENTITY.size
        self.memory[start : start + len(identity)] = identity

    @property
    def state(self) -> int:
        """FREE, ACTIVE, SEALED, PUBLISHED or ASIDE; one aligned 8-byte access."""
        return self._words[_STATE_WORD]

    @state.setter
    def state(self, value: int) -> None:
        self._words[_STATE_WORD] = value

    def activate(self, seq: int, *, control: bool) -> None:
        """Begin a new filling."""
        self._words[_SEQ_WORD] = seq
        self.batch, self.cursor, self.open, self.closing = Batch(seq, control), HEADER_BYTES, 0, False
        self.state = ACTIVE

    def reserve(
        self, kind: int, flags: int, stamp: int, request_id: bytes, meta: bytes, tokens: int, payload_bytes: int
    ) -> Reservation:
        """Append an entry's header; the caller has seen that `entry_bytes` fit behind `cursor`."""
        start, head = self.cursor, _FIXED + len(request_id) + len(meta)
        stop = start + _align(head) + _align(payload_bytes)
        fixed = _ENTRY.pack(_ENTRY_MAGIC, kind, flags, stamp, stop - start, head, len(request_id), len(meta), 0, tokens)
        header = fixed + request_id + meta
        checksum = xxhash.xxh3_64_intdigest(header, seed=self.batch.seq)
        self.memory[start : start + head] = _GUARD.pack(0, 0, checksum) + header
        self.cursor = stop
        self.open += 1
        payload = np.frombuffer(self.memory, np.uint8, payload_bytes, start + _align(head))
        return Reservation(self, start, stop, payload, stamp, checksum)

    def write_commit(self, reservation: Reservation, *, sync: bool) -> None:
        """Write the entry's commit word; with `sync` also its payload's checksum, and all of it through to the medium."""
        guard = self.memory[reservation.start : reservation.start + _GUARD.size].cast("Q")
        if sync:
            payload = self.memory[reservation.stop - _align(len(reservation.payload)) : reservation.stop]
            guard[1] = xxhash.xxh3_64_intdigest(payload)
        guard[0] = reservation.checksum
        if sync:
            start = reservation.start - reservation.start % mmap.PAGESIZE
            self._map.flush(start, reservation.stop - start)

    def seal(self) -> None:
        """End the filling."""
        self._words[_END_WORD] = self.cursor
        self.state = SEALED

    def close(self, *, unlink: bool) -> None:
        """Give the file up."""
        self._words.release()
        with suppress(BufferError):  # a thread still holds a view: the map goes with it
            self.memory.release()
            self._map.close()
        if unlink:
            self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry as read back. The payload is a read-only view of the slab."""

    kind: int
    t_submit: int
    request_id: str
    meta: Mapping[str, Any]
    num_tokens: int
    tokens_first: bool
    payload: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SlabContents:
    """A slab as read back."""

    seq: int
    state: int
    identity: Mapping[str, Any]
    entries: Sequence[Entry]  # committed ones, in clock order
    torn: int  # entries that were begun and not committed, or are damaged


def read_slab(memory: memoryview, path: Path) -> SlabContents:
    """All that is committed in a mapped slab, every length checked against it.

    Reading ends at the first entry header that is not of this filling: the end, or where the engine was killed while
    it wrote one. What the metas say is for the reader to check. Raises CorruptSpoolError when the file is no slab, is cut, or
    is of another version, and for an identity that lacks something, an id that is no UTF-8 and a meta that is no JSON object.
    """
    seq, state = read_state(path)
    if len(memory) < HEADER_BYTES:
        raise CorruptSpoolError(f"{path}: cut to {len(memory)} bytes")
    _, _, header_bytes, capacity, _, _, end = _SLAB.unpack_from(memory)
    if header_bytes != HEADER_BYTES or capacity != len(memory) or state > ASIDE:
        raise CorruptSpoolError(
            f"{path}: the header says {capacity} bytes in state {state}, the file has {len(memory)}"
        )
    identity = _identity_in(memory, path)

    entries: list[Entry] = []
    torn, at = 0, HEADER_BYTES
    while at + _FIXED <= len(memory):
        commit, payload_sum, checksum = _GUARD.unpack_from(memory, at)
        magic, kind, flags, stamp, size, head, id_bytes, meta_bytes, _, tokens = _ENTRY.unpack_from(
            memory, at + _GUARD.size
        )
        if (
            magic != _ENTRY_MAGIC
            or head != _FIXED + id_bytes + meta_bytes
            or not _align(head) <= size <= len(memory) - at
        ):
            break
        if xxhash.xxh3_64_intdigest(memory[at + _GUARD.size : at + head], seed=seq) != checksum:
            break
        payload = memory[at + _align(head) : at + size].toreadonly()
        if commit != checksum or (flags & CHECKSUMMED and not _sound(payload, payload_sum)):
            torn += 1
        else:
            text = bytes(memory[at + _FIXED : at + head])
            request_id, meta = _texts_in(text, id_bytes, f"{path}: entry {len(entries)} at byte {at}")
            entries.append(
                Entry(
                    kind=kind,
                    t_submit=stamp,
                    request_id=request_id,
                    meta=meta,
                    num_tokens=tokens,
                    tokens_first=bool(flags & TOKENS_FIRST),
                    payload=np.frombuffer(payload, np.uint8),
                )
            )
        at += size
    damaged = state != ACTIVE and at < end
    return SlabContents(seq, state, identity, entries, torn + damaged)


def _identity_in(memory: memoryview, path: Path) -> Mapping[str, Any]:
    length, checksum = _IDENTITY.unpack_from(memory, _IDENTITY_AT)
    start = _IDENTITY_AT + _IDENTITY.size
    identity = bytes(memory[start : min(start + length, HEADER_BYTES)])
    if xxhash.xxh3_64_intdigest(identity) != checksum:
        raise CorruptSpoolError(f"{path}: the identity in the header is damaged")
    found = _json_object(identity, f"{path}: the identity in the header")
    for name in _TEXTS:
        if not _is_text(found.get(name)):
            raise CorruptSpoolError(f"{path}: the identity in the header has no text {name}; no writer made this")
    if not _WRITER.fullmatch(found["writer"]) or found["producer"] not in PRODUCERS:
        raise CorruptSpoolError(
            f"{path}: the identity in the header names writer {found['writer']!r}, producer {found['producer']!r}; "
            "no writer made this"
        )
    return found


def _texts_in(text: bytes, id_bytes: int, what: str) -> tuple[str, Mapping[str, Any]]:
    """Request id and meta of an entry."""
    try:
        request_id = text[:id_bytes].decode()
    except UnicodeDecodeError as error:
        raise CorruptSpoolError(f"{what} has a request id that is no UTF-8") from error
    return request_id, _json_object(text[id_bytes:], f"{what}, {request_id!r}: its meta")


def _json_object(text: bytes, what: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptSpoolError(f"{what} is no JSON") from error
    if not isinstance(found, dict):
        raise CorruptSpoolError(f"{what} is no JSON object")
    return found


def _is_text(value: object) -> bool:
    """Not empty, and without lone surrogates."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


def read_identity(path: Path) -> Mapping[str, Any] | None:
    """What a slab file says of its writer and dataset, without mapping it; None of one that was never used.

    Raises CorruptSpoolError when the file is no slab of this version, or is damaged where this stands.
    """
    if read_state(path) == (0, FREE):
        return None
    head = _read(path, 0, HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise CorruptSpoolError(f"{path}: cut to {len(head)} bytes")
    return _identity_in(memoryview(head), path)


def _sound(payload: memoryview, checksum: int) -> bool:
    return xxhash.xxh3_64_intdigest(payload) == checksum


def open_file(path: Path, access: int = os.O_RDONLY) -> int:
    """A descriptor of a slab file, at once: nothing else of that name is followed or waited for.

    Raises CorruptSpoolError for what is no regular file.
    """
    try:
        fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise CorruptSpoolError(f"{path}: {_NOT_A_FILE}") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptSpoolError(f"{path}: {_NOT_A_FILE}")
    return fd


def _read(path: Path, offset: int, length: int) -> bytes:
    """At most so many bytes of a slab file."""
    fd = open_file(path)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


def read_state(path: Path) -> tuple[int, int]:
    """Sequence number and state of a slab file, without mapping it; one that was never used is free.

    Raises CorruptSpoolError when the file is no slab of this version.
    """
    head = _read(path, 0, _SLAB.size)
    if not any(head):
        return 0, FREE
    if len(head) < _SLAB.size or not head.startswith(_SLAB_MAGIC):
        raise CorruptSpoolError(f"{path}: not a slab")
    _, version, _, _, seq, state, _ = _SLAB.unpack(head)
    if version != SLAB_VERSION:
        raise CorruptSpoolError(f"{path}: slab version {version}; recover it with the rr_dataset that wrote it")
    return seq, state


def is_control(path: Path) -> bool:
    """Whether a slab file that has been filled holds drops and deletes: whether its first entry is one."""
    head = _read(path, HEADER_BYTES + _GUARD.size, _ENTRY.size)
    return len(head) == _ENTRY.size and _ENTRY.unpack(head)[1] != PUT


def write_state(path: Path, state: int) -> None:
    """Set the state of a slab file: one aligned 8-byte write, seen by whoever has it mapped."""
    fd = open_file(path, os.O_WRONLY)
    try:
        os.pwrite(fd, struct.pack("<Q", state), 8 * _STATE_WORD)
    finally:
        os.close(fd)
