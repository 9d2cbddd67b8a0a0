"""A stored object for who reads it in small pieces, as pyarrow does, where a request costs more than bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rr_dataset.shard import Source


class FarSource:
    """A source of which the end comes in one request, and with each small read what follows it; see `Source`.

    In memory are the end, and `source.max_gap_bytes` at most of the rest. Thread-safe if the source is.
    """

    def __init__(self, source: Source, end: int) -> None:
        """end: bytes that are read, and kept, once one of them is asked for; more than there are: all."""
        self._source = source
        self._end_at = max(source.size - end, 0)
        self._end: bytes | None = None
        self._ahead = (0, b"")  # where it begins, and what was read last
        self.size, self.max_gap_bytes = source.size, source.max_gap_bytes

    def fetch_end(self) -> bytes:
        """The end, read if it is not there yet."""
        if self._end is None:
            self._end = self._source.read(self._end_at, self.size - self._end_at)
        return self._end

    def tail(self, length: int) -> bytes:
        """The last `length` bytes; all of them, if there are fewer."""
        length = min(length, self.size)
        return self.read(self.size - length, length)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes. Raises what the source raises."""
        if length and self._end_at <= offset and offset + length <= self.size:
            return self.fetch_end()[offset - self._end_at :][:length]
        if not 0 < length < self.max_gap_bytes or offset + length > self._end_at:
            return self._source.read(offset, length)
        at, held = self._ahead
        if not at <= offset <= offset + length <= at + len(held):
            at, held = offset, self._source.read(offset, min(self.max_gap_bytes, self._end_at - offset))
            self._ahead = at, held
        return held[offset - at :][:length]

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill buffers, from memory where the end has all of a run. Raises what the source raises."""
        others = []
        for start, buffers in runs:
            stop = start + sum([buffer.nbytes for buffer in buffers])
            if not self._end_at <= start < stop <= self.size:
                others.append((start, buffers))
                continue
            end, at = memoryview(self.fetch_end()), start - self._end_at
            for buffer in buffers:
                buffer[:] = end[at : at + buffer.nbytes]
                at += buffer.nbytes
        if others:
            self._source.read_runs(others)
