"""Routing rows by KV-cache slot: a table in shared memory that follows what the engine's allocator does.

Who does what to a table, each of them possibly another process:

1. The engine creates it, the others attach by name. All hold a shared lock on it, so it stays the table of its name while any of
   them lives: one that was killed and starts again attaches to it. The last to `close` removes the file; what killed ones
   left is swept by the next that creates any.
2. The allocator calls `recycle` when blocks get new content. A block's generation is then another one.
3. At the launch of a step the capturer takes `marks` of the step's slots: the generations of their blocks, and the weights.
4. When the step's rows have arrived it calls `scatter`, which writes them with those marks. A row that comes late into
   a block that was recycled meanwhile keeps the old generation, so it never passes for the new owner's.
5. `gather` takes only rows whose mark has the present generation of their block. The rest is `missing`.

A prefix hit does not recycle, so a request finds the rows of the one that filled the block.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset import own_locks
from rr_dataset.capture import table_file as files
from rr_dataset.errors import InvalidInputError, InvalidRoutingError, SpoolUnavailableError
from rr_dataset.record import DTYPES, Range, Span, ranges_of

SHM = Path("/dev/shm")  # noqa: S108 - mode 0600, made under a random name and linked to its own

_MAGIC = b"rr-slots"
_VERSION = 0
# magic, version, item bytes, blocks, slots per block, layers, top_k
_HEADER = struct.Struct("<8sIIQQQQ")
_EPOCH_AT = 64  # uint32: how often the weights were changed
_VERSIONS_AT = mmap.PAGESIZE
_VERSIONS = 256  # that there is room for; rows can name all but the oldest, whose room the next one takes
_VERSION_BYTES = 128  # each with its length in the first byte
_EPOCH = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Blocks = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a table had of a request at one moment. Positions are absolute, ranges half open."""

    start: int
    stop: int
    missing: tuple[Range, ...]
    weights: tuple[Span, ...]  # of the rows whose version is known
    blocks: npt.NDArray[np.int64]
    marks: npt.NDArray[np.uint64]  # 0 where there is no row


@dataclass(frozen=True, slots=True)
class Gathered:
    """Rows of one request. rows: [tokens, layers, top_k], zero where missing."""

    rows: npt.NDArray[Any]
    missing: tuple[Range, ...]
    weights: tuple[Span, ...]  # as they were seen before the copy


@dataclass(frozen=True, slots=True)
class _Shape:
    blocks: int
    block_size: int
    layers: int
    top_k: int
    item_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.layers * self.top_k * self.item_bytes

    def offsets(self) -> tuple[int, int, int, int]:
        """Where generations, marks and rows start, and the length of the file."""
        generations = _VERSIONS_AT + _VERSIONS * _VERSION_BYTES
        marks = _page(generations + 4 * self.blocks)
        rows = _page(marks + 8 * self.blocks * self.block_size)
        return generations, marks, rows, _page(rows + self.blocks * self.block_size * self.row_bytes)


def _page(n: int) -> int:
    return -(-n // mmap.PAGESIZE) * mmap.PAGESIZE


class SlotTable:
    """A host table of routing rows [num_blocks * block_size, layers, top_k], shared between processes of one user.

    Slot `block * block_size + i` belongs to the i-th token of a block. One process recycles a block at a time; each slot is
    scattered by one process at a time. Beside those any number may gather.
    """

    def __init__(self, path: Path, fd: int, shape: _Shape, *, prefault: bool) -> None:
        """Map an open file; use `create` or `attach`."""
        self.path, self._fd, self._pid = path, fd, os.getpid()  # a forked child has no lock
        self.num_blocks, self.block_size = shape.blocks, shape.block_size
        self.num_slots = shape.blocks * shape.block_size
        self.dtype = np.dtype(f"u{shape.item_bytes}")
        generations, marks, rows, size = shape.offsets()
        populate = getattr(mmap, "MAP_POPULATE", 0) if prefault else 0
        mapped = os.open(
            f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC
        )  # a mapping keeps its own copy, which must not have the lock
        try:
            self._map = mmap.mmap(mapped, size, mmap.MAP_SHARED | populate)
        finally:
            os.close(mapped)
        memory = memoryview(self._map)
        self._head = np.frombuffer(memory, np.uint8, generations)
        self._epoch = np.frombuffer(memory, np.uint32, 1, _EPOCH_AT)
        self._generations = np.frombuffer(memory, np.uint32, self.num_blocks, generations)
        self._marks = np.frombuffer(memory, np.uint64, self.num_slots, marks)
        raw = np.frombuffer(memory, np.uint8, self.num_slots * shape.row_bytes, rows)
        self.rows = raw.view(self.dtype).reshape(self.num_slots, shape.layers, shape.top_k)
        # One item a row or block: numpy then moves each with one copy.
        self._items = raw.view(np.dtype((np.void, shape.row_bytes)))
        self._block_items = raw.view(np.dtype((np.void, shape.row_bytes * self.block_size)))
        self._block_marks = self._marks.reshape(self.num_blocks, self.block_size)

    @classmethod
    def create(
        cls,
        name: str,
        num_blocks: int,
        block_size: int,
        layers: int,
        top_k: int,
        dtype: str = "uint8",
        *,
        directory: str | os.PathLike[str] = SHM,
        prefault: bool = True,
    ) -> SlotTable:
        """Make the table of this name, without a row. Give each engine and DP rank of a host a name of its own, the same at every start.

        prefault: touch all of it now, so that no step pays for it.

        Raises InvalidInputError, also when a live process has a table of that name, and SpoolUnavailableError without room or folder.
        """
        whole = {"num_blocks": num_blocks, "block_size": block_size, "layers": layers, "top_k": top_k}
        for what, value in whole.items():
            if type(value) is not int or value < 1:
                raise InvalidInputError(f"{what}={value!r}: expected a whole number over 0")
        if dtype not in DTYPES:
            raise InvalidInputError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
        path = files.path_of(name, directory)
        files.sweep(path)
        shape = _Shape(num_blocks, block_size, layers, top_k, np.dtype(dtype).itemsize)
        size = shape.offsets()[-1]
        new = path.with_name(f"{path.name}.{secrets.token_hex(8)}{files.NEW}")
        fd = -1
        try:
            fd = files.make(new)
            os.posix_fallocate(fd, 0, size)  # before mapping: a touched page of a full tmpfs is a bus error
            table = cls(path, fd, shape, prefault=prefault)
            table._generations[:] = 1  # never 0, which the marks of slots without a row have
            header = _HEADER.pack(_MAGIC, _VERSION, shape.item_bytes, num_blocks, block_size, layers, top_k)
            table._head[: len(header)] = np.frombuffer(header, np.uint8)
            os.link(new, path)
            files.share(fd)
        except FileExistsError:
            own_locks.close(fd)
            raise InvalidInputError(
                f"{path} is the table of a running process: give each engine and rank its own, or attach to it"
            ) from None
        except (OSError, OverflowError) as error:  # it overflows where no machine has so much
            if fd >= 0:
                own_locks.close(fd)
            raise SpoolUnavailableError(
                f"{path}: no {size} bytes for the routing of {num_blocks} blocks of {block_size}: "
                f"{getattr(error, 'strerror', error)}; give directory= with more room"
            ) from error
        finally:
            with suppress(OSError):
                new.unlink()
        return table

    @classmethod
    def attach(
        cls, name: str, *, directory: str | os.PathLike[str] = SHM, wait_s: float = 0, prefault: bool = True
    ) -> SlotTable:
        """The table that another process has created; waits up to `wait_s` for it. Raises InvalidInputError without one."""
        path = files.path_of(name, directory)
        deadline = time.monotonic() + wait_s
        fd = files.open_shared(path, deadline)
        try:
            return cls(path, fd, _shape_of(path, fd), prefault=prefault)
        except BaseException:
            own_locks.close(fd)
            raise

    # ---- the allocator

    def recycle(self, blocks: Blocks) -> None:
        """These blocks get new content: no row that they have, or that is on its way, counts any more. Each may stand there twice."""
        chosen = self._checked(blocks)
        generations = self._generations[chosen] + np.uint32(1)
        generations[generations == 0] = 1
        self._generations[chosen] = generations

    def reset(self) -> None:
        """As `recycle` of all blocks."""
        self._generations += np.uint32(1)
        self._generations[self._generations == 0] = 1

    def move(self, blocks: Blocks, target: SlotTable, target_blocks: Blocks) -> None:
        """Copy blocks to those of another table (or this one), which are recycled first: a swap out or in.

        What is valid here is valid there, row by row. Rows of a step in flight are not: flush first. Weight versions come along
        into a table in which nobody has set any, and back; of others, those that both tables call alike.
        """
        if (target.block_size, target.rows.shape[1:]) != (self.block_size, self.rows.shape[1:]):
            raise InvalidInputError(f"{target.path} has another shape than {self.path}")
        if target.dtype != self.dtype:
            raise InvalidInputError(f"{target.path} has rows of {target.dtype}, {self.path} of {self.dtype}")
        chosen, places = self._checked(blocks), target._checked(target_blocks)
        if len(chosen) != len(places):
            raise InvalidInputError(f"{len(chosen)} blocks cannot move to {len(places)}")
        marks = self._valid(chosen)
        content = self._block_items[chosen]
        target.recycle(places)
        target._block_items[places] = content
        generations = target._generations[places].astype(np.uint64) << _SHIFT
        epochs = marks & _EPOCH
        if self.epoch and target.epoch:
            foreign = [each for each in np.unique(epochs) if self._version(int(each)) != target._version(int(each))]
            epochs[np.isin(epochs, foreign)] = 0
        target._block_marks[places] = np.where(marks != 0, generations[:, None] | epochs, np.uint64(0))

    def set_weight_version(self, version: str | int) -> None:
        """What made the rows of steps that are launched from now on. Raises InvalidInputError for more than 127 bytes of UTF-8."""
        text = str(version).encode()
        if not 0 < len(text) < _VERSION_BYTES:
            raise InvalidInputError(f"weight_version={version!r}: expected 1 to {_VERSION_BYTES - 1} bytes of UTF-8")
        epoch = int(self._epoch[0]) + 1
        at = _VERSIONS_AT + epoch % _VERSIONS * _VERSION_BYTES
        self._head[at : at + 1 + len(text)] = np.frombuffer(bytes([len(text)]) + text, np.uint8)
        self._epoch[0] = epoch

    # ---- the capturer

    def marks(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """What rows of these slots are marked with when their step is launched now. Raises InvalidRoutingError for a slot that is none."""
        return self.marks_of(self._generations, slots, self.epoch)

    def snapshot(self) -> npt.NDArray[np.uint32]:
        """The generations now, for `marks_of` when the slots are known later."""
        return np.array(self._generations)

    def marks_of(
        self, generations: npt.NDArray[np.uint32], slots: npt.NDArray[np.int64], epoch: int
    ) -> npt.NDArray[np.uint64]:
        """As `marks`, with the generations and the epoch of an earlier moment."""
        if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self.num_slots:
            raise InvalidRoutingError(f"slots {slots.min()} to {slots.max()}: expected 0 to {self.num_slots - 1}")
        marks = generations[slots // self.block_size].astype(np.uint64)
        marks <<= _SHIFT
        marks |= np.uint64(epoch)
        return marks

    @property
    def epoch(self) -> int:
        """How often the weights were changed; 0 while nobody has said."""
        return int(self._epoch[0])

    def scatter(self, slots: npt.NDArray[np.int64], rows: npt.NDArray[Any], marks: npt.NDArray[np.uint64]) -> int:
        """Write rows [tokens, layers, top_k] of the table's dtype (C order) with the marks of their launch; how many came too late."""
        if len(rows) != len(slots):
            raise InvalidRoutingError(f"{len(rows)} rows for {len(slots)} slots")
        current = self._generations[slots // self.block_size] == marks >> _SHIFT
        late = len(slots) - int(np.count_nonzero(current))
        if late:  # what the new owner has there stays
            slots, rows, marks = slots[current], rows[current], marks[current]
        if len(slots):
            self._items[slots] = self._as_items(rows)
            self._marks[slots] = marks
        return late

    def erase(self, slots: npt.NDArray[np.int64], marks: npt.NDArray[np.uint64]) -> None:
        """As `scatter` of tokens that were fed, and whose rows nobody knows: what a slot had, a rejected draft's, is not theirs."""
        current = self._generations[slots // self.block_size] == marks >> _SHIFT
        self._marks[slots[current]] = 0

    # ---- the collector

    def look(self, blocks: Blocks, start: int, stop: int) -> Seen:
        """What the table has of positions `start` to `stop` of a request; the rows stay where they are.

        blocks: its block table from position 0; what lies beyond it, or in a block of -1, is missing.

        Raises InvalidRoutingError for a block that is none.
        """
        chosen = self._table_of(blocks, start, stop)
        marks = self._window(chosen, start, stop)
        return Seen(start, stop, ranges_of(marks == 0, start), self._spans(marks, start), chosen, marks)

    def fill(self, seen: Seen, out: npt.NDArray[Any]) -> tuple[Range, ...]:
        """Copy the rows that were seen into `out`, zero for missing ones; what is missing, with blocks that were recycled since.

        out: [stop - start, layers, top_k] of the table's dtype in C order. Raises InvalidRoutingError for another.
        """
        shape = (seen.stop - seen.start, *self.rows.shape[1:])
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise InvalidRoutingError(f"out is {out.dtype} {out.shape}: expected {self.dtype} {shape} in C order")
        if len(out):  # row by row: as fast as whole blocks, and never in step with the pages of the source
            slots = seen.blocks[:, None] * self.block_size + np.arange(self.block_size)
            skip = seen.start % self.block_size
            np.take(self._items, slots.reshape(-1)[skip : skip + len(out)], out=self._as_items(out), mode="clip")
        now = self._window(seen.blocks, seen.start, seen.stop)
        missing = (
            seen.missing if np.array_equal(now, seen.marks) else ranges_of((now == 0) | (now != seen.marks), seen.start)
        )
        for start, stop in missing:
            out[start - seen.start : stop - seen.start] = 0
        return missing

    def gather(self, blocks: Blocks, start: int, stop: int, out: npt.NDArray[Any] | None = None) -> Gathered:
        """`look` and `fill` in one, into `out` or a new array."""
        seen = self.look(blocks, start, stop)
        rows = np.empty((stop - start, *self.rows.shape[1:]), self.dtype) if out is None else out
        missing = self.fill(seen, rows)
        return Gathered(rows, missing, seen.weights)

    def _table_of(self, blocks: Blocks, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The blocks of these positions, -1 where there is none."""
        if not 0 <= start <= stop:
            raise InvalidRoutingError(f"tokens {start} to {stop}: expected rising positions")
        first, last = start // self.block_size, -(-stop // self.block_size)
        chosen = np.full(max(last - first, 0), -1, np.int64)
        given = whole_numbers("blocks", blocks)[first:last]
        chosen[: len(given)] = given
        if chosen.size and int(chosen.max()) >= self.num_blocks:
            raise InvalidRoutingError(f"block {chosen.max()}: expected less than {self.num_blocks}")
        return chosen

    def _as_items(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.void]:
        return rows.reshape(len(rows), -1).view(self._items.dtype)[:, 0]

    def _valid(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """[blocks, block_size] marks of present generation, 0 elsewhere."""
        marks = np.take(self._block_marks, blocks, axis=0, mode="clip")
        generations = np.take(self._generations, blocks, mode="clip")
        marks *= (marks >> _SHIFT) == generations[:, None]
        marks[blocks < 0] = 0
        return marks

    def _window(self, blocks: npt.NDArray[np.int64], start: int, stop: int) -> npt.NDArray[np.uint64]:
        """The marks of these positions, 0 where there is no row; `blocks` begin with that of `start`."""
        skip = start % self.block_size
        return self._valid(blocks).reshape(-1)[skip : skip + stop - start]

    def _spans(self, marks: npt.NDArray[np.uint64], start: int) -> tuple[Span, ...]:
        epochs = marks & _EPOCH
        if not epochs.any():
            return ()
        edges = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(epochs)]
        spans: list[Span] = []
        for begin, end in pairwise(edges):
            version = self._version(int(epochs[begin]))
            if version and spans and spans[-1][1:] == (start + begin, version):
                spans[-1] = (spans[-1][0], start + end, version)
            elif version:
                spans.append((start + begin, start + end, version))
        return tuple(spans)

    def _version(self, epoch: int) -> str:
        if not 0 < epoch > int(self._epoch[0]) + 1 - _VERSIONS:
            return ""
        at = _VERSIONS_AT + epoch % _VERSIONS * _VERSION_BYTES
        return self._head[at + 1 : at + 1 + int(self._head[at])].tobytes().decode()

    def _checked(self, blocks: Blocks) -> npt.NDArray[np.int64]:
        chosen = whole_numbers("blocks", blocks)
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.num_blocks:
            raise InvalidRoutingError(f"blocks {chosen.min()} to {chosen.max()}: expected 0 to {self.num_blocks - 1}")
        return chosen

    # ---- the end

    def close(self) -> None:
        """Give the table up; the last that has it removes the file. Closing twice is no error."""
        if self._fd >= 0 and self._pid == os.getpid():
            files.give_up(self._fd, self.path)
        self._fd = -1

    def __enter__(self) -> SlotTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def whole_numbers(name: str, values: Any) -> npt.NDArray[np.int64]:
    """Block or slot numbers as an array of one axis. Raises InvalidRoutingError for others, such as the table of a whole batch."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of several lengths
        raise InvalidRoutingError(f"{name}: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRoutingError(
            f"{name} of shape {array.shape} and dtype {array.dtype}: expected one row of whole numbers"
        )
    return array.astype(np.int64, copy=False)


def _shape_of(path: Path, fd: int) -> _Shape:
    """What the header of a table says. Raises InvalidInputError when the file is none."""
    status = os.fstat(fd)
    head = os.pread(fd, _HEADER.size, 0) if stat.S_ISREG(status.st_mode) else b""
    magic, version, item_bytes, blocks, block_size, layers, top_k = _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
    shape = _Shape(blocks, block_size, layers, top_k, item_bytes)
    sound = min(blocks, block_size, layers, top_k) > 0 and item_bytes in [np.dtype(dtype).itemsize for dtype in DTYPES]
    if magic != _MAGIC or version != _VERSION or not sound or shape.offsets()[-1] != status.st_size:
        raise InvalidInputError(f"{path} is no table of version {_VERSION}: remove it, or use one rr_dataset")
    return shape
