"""From live rows to arrays: which shard fills which part of which record.

All records of a call are planned first, so that a shard is opened once for all it gives, and a compressed buffer is
decoded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rr_dataset.at_once import Budget
from rr_dataset.buffers import overlaps_itself
from rr_dataset.errors import CorruptShardError, InvalidRoutingError
from rr_dataset.live import claim, merge_ranges
from rr_dataset.record import Range, RecordHead, RoutingRecord, RoutingSpec
from rr_dataset.selection import Held, TokenAxis, Tokens, held_ranges, missing_by_layer, stretches, token_ranges
from rr_dataset.shard import Source, TileRead, VectorRead, read_tiles
from rr_dataset.snapshot import Located, Reader, Shard, Snapshot

NO_TOKEN_ID = -1  # stands where no row has the token's id, in a record of which some row has ids
NO_LOGPROB = np.nan

BYTES_PER_THREAD = 4 << 20  # a millisecond of copying, in which another thread can copy too
MAX_GAP_BYTES = 4 << 30  # of tokens that no row has: a row far away from position 0 must not take all memory
BLOCK_BYTES = 32 << 20  # what one record that is kept may keep alive of its neighbours
HUGE_PAGES_BYTES = 4 << 20  # numpy asks the kernel for huge pages from here on

_FILLERS = (("token_ids", np.int32, NO_TOKEN_ID), ("logprobs", np.float32, NO_LOGPROB))
_HAS = {"token_ids": "has_token_ids", "logprobs": "has_logprobs"}
_ALIGN = 64


class Arrays:
    """Arrays for the records of one call. Small ones are cut from common blocks.

    A block is large enough for huge pages. With an allocation per record of 0.4 MB, its hundred page faults cost more than
    reading it.
    """

    def __init__(self, count: int) -> None:
        """count: how many are expected."""
        self._left = count
        self._block = np.empty(0, np.uint8)
        self._at = 0

    def empty(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        """A new C-contiguous array with any content."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        room = -size % _ALIGN + size
        expected, self._left = room * self._left, self._left - 1
        if size >= HUGE_PAGES_BYTES or not size:
            return np.empty(shape, dtype)
        if self._at + room > self._block.size:
            if expected < HUGE_PAGES_BYTES:
                return np.empty(shape, dtype)
            self._block, self._at = np.empty(min(expected, BLOCK_BYTES), np.uint8), 0
        array: npt.NDArray[Any] = np.ndarray(shape, dtype, self._block, self._at)
        self._at += room
        return array


class Draft:
    """One record while its arrays are being filled."""

    def __init__(
        self,
        head: RecordHead,
        rows: Mapping[str, Located],
        spec: RoutingSpec,
        layers: tuple[int, ...],
        tokens: Tokens,
        arrays: Arrays,
        out: npt.NDArray[Any] | None = None,
    ) -> None:
        """rows: those of the head by record id. Raises InvalidRoutingError for `tokens` or an `out` that do not fit."""
        self._head = head
        self._rows = rows
        self._layers = layers
        if isinstance(tokens, Held):
            self._ranges = held_ranges(head)
        else:
            self._ranges = token_ranges(tokens, head.num_tokens, head.request_id)
        self._axis = TokenAxis(self._ranges)
        shape = (len(layers), len(self._axis), spec.top_k)
        self._out = out
        if out is None or not _fits(out, shape, spec.dtype):
            self._experts = self._empty(shape, spec.dtype, arrays)
        else:
            self._experts = out
        self._missing = missing_by_layer(head, layers, self._ranges)
        for layer, gaps in self._missing.items():
            for start, stop in gaps:
                for first, a, b in self._axis.overlaps(start, stop):
                    self._experts[layers.index(layer), first : first + b - a] = 0
        self._vectors: dict[str, npt.NDArray[Any]] = {
            name: np.full(len(self._axis), filler, dtype)
            for name, dtype, filler in _FILLERS
            if any(getattr(row, _HAS[name]) for row in head.rows)
        }

    def _empty(self, shape: tuple[int, ...], dtype: str, arrays: Arrays) -> npt.NDArray[Any]:
        """An array of any content. Raises InvalidRoutingError for one that would hold little but gaps, or for lack of memory."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > MAX_GAP_BYTES:
            held = sum(b - a for start, stop in held_ranges(self._head) for _, a, b in self._axis.overlaps(start, stop))
            gaps = size - size // shape[1] * held
            if gaps > MAX_GAP_BYTES:
                raise self._too_large(size, f"{gaps} of them for tokens that no row has")
        try:
            return arrays.empty(shape, dtype)
        except MemoryError as error:
            raise self._too_large(size, "more than there is memory") from error

    def _too_large(self, size: int, why: str) -> InvalidRoutingError:
        return InvalidRoutingError(
            f"{self._head.request_id!r} has {self._head.num_tokens} tokens; what is asked for takes {size} bytes, {why}: ask for "
            "some with tokens= or layers="
        )

    def reads(self) -> Iterator[tuple[Shard, TileRead | VectorRead]]:
        """What fills the arrays, and from which shard."""
        for located, first, end, at, start, stop in tiles_of(self._head, self._rows, self._layers, self._axis):
            out = self._experts[first:end, at : at + stop - start]
            yield located.shard, TileRead(located.number, self._layers[first:end], start, stop, out)
        for name, vector in self._vectors.items():
            taken: list[Range] = []
            for row in self._head.rows:
                if getattr(row, _HAS[name]):
                    span = ((row.token_start, row.token_stop),)
                    located = self._rows[row.record_id]
                    for first, last in claim(taken, span):
                        for at, start, stop in self._axis.overlaps(first, last):
                            out = vector[at : at + stop - start]
                            yield located.shard, VectorRead(located.number, name, start, stop, out)

    def record(self) -> RoutingRecord:
        """The record, once everything was read."""
        head = self._head
        experts = self._experts
        if self._out is not None and self._out is not experts:
            np.copyto(self._out, experts, casting="safe")
            experts = self._out
        return RoutingRecord(
            request_id=head.request_id,
            components=head.components,
            choice=head.choice,
            status=head.status,
            reason=head.reason,
            num_tokens=head.num_tokens,
            missing=merge_ranges(span for spans in self._missing.values() for span in spans) if self._missing else (),
            weights=head.weights,
            run_id=head.run_id,
            tags=head.tags,
            rows=head.rows,
            tiles=head.tiles,
            layers=self._layers,
            token_ranges=self._ranges,
            routed_experts=experts,
            missing_by_layer=self._missing,
            token_ids=self._vectors.get("token_ids"),
            logprobs=self._vectors.get("logprobs"),
        )


def tiles_of(
    head: RecordHead, rows: Mapping[str, Located], layers: tuple[int, ...], axis: TokenAxis
) -> Iterator[tuple[Located, int, int, int, int, int]]:
    """Which row has what is asked for: the row, (first, end) in `layers`, the place on the axis, (start, stop) positions."""
    for tile in head.tiles:
        located = rows[tile.row.record_id]
        for first, end in stretches(layers, tile.layers):
            for at, start, stop in axis.overlaps(tile.start, tile.stop):
                yield located, first, end, at, start, stop


class Fillable(Protocol):
    """What says which parts of which shards it needs, and where they go."""

    def reads(self) -> Iterator[tuple[Shard, TileRead | VectorRead]]:
        """Reads and their shards."""


def fill(drafts: Iterable[Fillable], snapshot: Snapshot, reader: Reader) -> None:
    """Read the arrays of all drafts, shards side by side.

    From a remote store at most IN_FLIGHT_BYTES are on their way, for all calls of the reader together, besides the arrays; a
    shard of which more is read comes alone.

    Raises ObjectNotFoundError when a shard has vanished, CorruptShardError with the path of a damaged one.
    """
    remote = reader.storage.is_remote
    jobs: dict[str, tuple[Shard, list[TileRead], list[VectorRead]]] = {}
    for draft in drafts:
        for shard, read in draft.reads():
            job = jobs.get(shard.path)
            if job is None:
                job = jobs[shard.path] = (shard, [], [])
            if isinstance(read, TileRead):
                job[1].append(read)
            else:
                job[2].append(read)

    def run(job: tuple[Shard, list[TileRead], list[VectorRead]]) -> None:
        shard, tiles, vectors = job
        with snapshot.open(shard, reader.storage) as source:
            try:
                read_tiles(_Bounded(source, reader.in_flight) if remote else source, shard.index, tiles, vectors)
            except CorruptShardError as error:
                raise CorruptShardError(f"{reader.storage.uri}: {shard.path}: {error}") from error

    size = sum(tile.nbytes for _, tiles, _ in jobs.values() for tile in tiles)
    reader.workers.each(run, list(jobs.values()), None if remote else 1 + size // BYTES_PER_THREAD)


class _Bounded:
    """A source whose reads wait until there is room in a budget."""

    def __init__(self, source: Source, budget: Budget) -> None:
        self._source, self._budget = source, budget
        self.max_gap_bytes = source.max_gap_bytes
        self.size = source.size
        self.tail, self.read = source.tail, source.read

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        with self._budget.hold(sum([buffer.nbytes for _, buffers in runs for buffer in buffers])):
            self._source.read_runs(runs)


def _fits(out: npt.NDArray[Any], shape: Sequence[int], dtype: str) -> bool:
    """Whether `out` can be filled directly; raises InvalidRoutingError if it cannot be filled at all."""
    if not isinstance(out, np.ndarray):
        raise InvalidRoutingError(f"out is a {type(out).__name__}: expected a numpy array of {tuple(shape)} {dtype}")
    if out.shape != tuple(shape) or not np.can_cast(dtype, out.dtype, "safe"):
        raise InvalidRoutingError(f"out is {out.shape} {out.dtype}: expected {tuple(shape)} and {dtype} or wider")
    if not out.flags.writeable:
        raise InvalidRoutingError("out is read-only: pass an array that can be written")
    if overlaps_itself(out):
        raise InvalidRoutingError(f"out has strides {out.strides}: elements that share memory hold one value only")
    return out.dtype == dtype
