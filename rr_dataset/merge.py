"""Rows of several shards of a partition into the bytes of one: the work inside a compaction.

Only a record batch is in memory at a time, three times over: as read, as laid out, and compressed. A batch has at most
`BATCH_BYTES` of payload, or a single row that is larger; the compressed ones of one output stay until it is written.

Nothing damaged is passed on: payload is held against the checksums of its rows as it is read, and the finished bytes are
read back as a reader would, rows, checksums and all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from rr_dataset.at_once import Budget, answers
from rr_dataset.errors import CorruptShardError
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import DatasetFormat
from rr_dataset.live import superseded
from rr_dataset.record import Row, RowData
from rr_dataset.schema import VECTORS, shard_schema
from rr_dataset.shard import Scratch, ShardBuilder, ShardIndex, Source, TileRead, VectorRead, read_index, read_tiles
from rr_dataset.shard.stream import arrow_file
from rr_dataset.snapshot import Located, Shard
from rr_dataset.storage import Storage
from rr_dataset.tombstones import TombstoneSet

BATCH_BYTES = 256 << 20  # the samples of a prompt, side by side
MIXED_BATCH_BYTES = 16 << 20  # where a partition holds many prompts: who reads one of them decodes its batch
BATCH_ROWS = 4096
IN_FLIGHT_BYTES = 64 << 20  # of shards that are read side by side from a remote store, or one that is larger
LONG_ROW_BYTES = 256 << 10  # of one row in one column: the window of zstd's lower levels would miss its neighbour
LONG_ROW_LEVEL = 3

_VECTOR_DTYPES = {"token_ids": np.dtype(np.int32), "logprobs": np.dtype(np.float32)}
_ALIGN = 64
_BUILT_WRONG = "a compacted shard was built wrong and is not published"


class DamagedInputError(CorruptShardError):
    """A shard that cannot be merged; the others can."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(text)
        self.path = path


class Codec(NamedTuple):
    """How the output is compressed. level: of zstd, None is its own default."""

    compression: str
    level: int | None

    def for_rows(self, rows: Iterable[Row], fmt: DatasetFormat) -> Codec:
        """The same, at a level whose window reaches the row before."""
        longest = max(row.num_tokens for row in rows) * fmt.spec.top_k * np.dtype(fmt.spec.dtype).itemsize
        if self.compression != "zstd" or longest <= LONG_ROW_BYTES:
            return self
        return Codec("zstd", max(self.level or 1, LONG_ROW_LEVEL))


class Workspace:
    """Memory that merges reuse, one after the other."""

    def __init__(self) -> None:
        self.build, self._payload = Scratch(), Scratch()

    def arrays(self, rows: Sequence[Row], fmt: DatasetFormat) -> Iterator[RowData]:
        """Each row with arrays for its payload, of any content. They hold until the next call."""
        memory = self._payload.raw(sum(map(_room, rows, [fmt] * len(rows))))
        at = 0
        for row in rows:
            taken: dict[str, Any] = {}
            for name, shape, dtype in _shapes(row, fmt):
                taken[name] = np.ndarray(shape, dtype, memory, at)
                at += _padded(taken[name].nbytes)
            yield RowData(row, **taken)


def keep_rows(located: Iterable[Located], tombstones: TombstoneSet, fmt: DatasetFormat) -> list[Located]:
    """The rows to carry over, in the order of a shard.

    Left out are those under tombstones, those that a newer one of the same run among these replaces, and doubles. A newer
    row elsewhere replaces nothing here: a reader may not have seen its file.
    """
    by_id: dict[str, Located] = {}
    for each in located:
        if not tombstones.covers(each.row):
            by_id.setdefault(each.row.record_id, each)
    dead = superseded([each.row for each in by_id.values()], fmt.spec, fmt.last_turn)
    kept = [each for record_id, each in by_id.items() if record_id not in dead]
    return sorted(kept, key=lambda each: (each.row.request_id, each.row.t_submit, each.row.record_id))


def merge(
    kept: Sequence[Located],
    storage: Storage,
    fmt: DatasetFormat,
    codec: Codec,
    workspace: Workspace,
    *,
    inputs: Sequence[str],
    tombstones_applied: Sequence[str],
) -> memoryview:
    """The verified bytes of a shard with these rows, valid until the workspace is used again.

    kept: as `keep_rows` returns them, at least one. inputs: names of the shards that it replaces.

    Raises ObjectNotFoundError when a shard has vanished, DamagedInputError for one whose bytes are wrong, CorruptShardError
    when the result is.
    """
    extra = _Extra.of(kept, storage, fmt)
    codec = codec.for_rows((each.row for each in kept), fmt)
    builder = ShardBuilder(
        fmt, compression=codec.compression, level=codec.level, scratch=workspace.build, extra=extra.fields
    )
    most = BATCH_BYTES if holds_one_prompt(fmt.keys) else MIXED_BATCH_BYTES
    groups = list(grouped(kept, fmt, most, BATCH_ROWS))
    builder.reserve(sum(row_bytes(each.row, fmt) for each in kept), len(groups))
    digests: dict[str, tuple[int, ...]] = {}
    for group in groups:
        rows = list(workspace.arrays([each.row for each in group], fmt))
        _load(group, rows, storage)
        for data in rows:
            digests[data.row.record_id] = _vector_digests(data)
        builder.add(rows, extra.take(group))
    built = builder.finish(inputs, tombstones_applied)
    _verify(built, [each.row for each in kept], digests, fmt, workspace, (inputs, tombstones_applied))
    extra.verify(built)
    return built


def row_bytes(row: Row, fmt: DatasetFormat) -> int:
    """Bytes of a row's payload."""
    return sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in _shapes(row, fmt))


def grouped(
    rows: Iterable[Located], fmt: DatasetFormat, max_bytes: int, max_rows: int = sys.maxsize
) -> Iterator[list[Located]]:
    """Neighbours with together at most so many rows and bytes of payload, or one row that is larger."""
    group: list[Located] = []
    size = 0
    for each in rows:
        more = row_bytes(each.row, fmt)
        if group and (size + more > max_bytes or len(group) == max_rows):
            yield group
            group, size = [], 0
        group.append(each)
        size += more
    if group:
        yield group


def holds_one_prompt(keys: KeyScheme) -> bool:
    """Whether all rows of a partition belong to one prompt: then who reads one usually reads all."""
    return keys.split == "right"


def _shapes(row: Row, fmt: DatasetFormat) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    if row.layers:
        yield "routed_experts", (len(row.layers), row.num_tokens, fmt.spec.top_k), np.dtype(fmt.spec.dtype)
    for name, dtype in _VECTOR_DTYPES.items():
        if getattr(row, f"has_{name}"):
            yield name, (row.num_tokens,), dtype


def _padded(size: int) -> int:
    return size + -size % _ALIGN


def _room(row: Row, fmt: DatasetFormat) -> int:
    return sum(_padded(math.prod(shape) * dtype.itemsize) for _, shape, dtype in _shapes(row, fmt))


def _load(group: Sequence[Located], rows: Sequence[RowData], storage: Storage) -> None:
    """Fill the arrays from the shards, and hold them against the checksums."""
    by_shard: dict[str, list[tuple[Located, RowData]]] = {}
    for each, data in zip(group, rows, strict=True):
        by_shard.setdefault(each.shard.path, []).append((each, data))
    budget = Budget(IN_FLIGHT_BYTES)

    def load(pairs: Sequence[tuple[Located, RowData]]) -> None:
        shard = pairs[0][0].shard
        with budget.hold(shard.entry.size), storage.open(shard.path, shard.entry) as source:
            try:
                _read(source, shard.index, [(each.number, data) for each, data in pairs])
            except CorruptShardError as error:
                raise DamagedInputError(shard.path, f"{storage.uri}: {shard.path}: {error}") from error

    answers(storage, load, list(by_shard.values()))


def _read(source: Source, index: ShardIndex, rows: Sequence[tuple[int, RowData]]) -> None:
    """Read rows by number into their arrays. Raises CorruptShardError for a wrong checksum too."""
    tiles, vectors = [], []
    for number, data in rows:
        row = data.row
        if data.routed_experts is not None:
            tiles.append(TileRead(number, row.layers, row.token_start, row.token_stop, data.routed_experts))
        for name in VECTORS:
            vector = getattr(data, name)
            if vector is not None:
                vectors.append(VectorRead(number, name, row.token_start, row.token_stop, vector))
    read_tiles(source, index, tiles, vectors)
    for _, data in rows:
        found = xxhash.xxh3_64_intdigest(b"" if data.routed_experts is None else data.routed_experts.data)
        if found != data.row.checksum:
            raise CorruptShardError(
                f"row {data.row.record_id} of {data.row.request_id!r} has the checksum {found:016x}, not {data.row.checksum:016x}"
            )


def _vector_digests(data: RowData) -> tuple[int, ...]:
    return tuple(
        xxhash.xxh3_64_intdigest(vector.data) for vector in (data.token_ids, data.logprobs) if vector is not None
    )


class _Memory:
    """Built bytes as a stored object."""

    max_gap_bytes = 0

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.size = len(data)

    def tail(self, length: int) -> bytes:
        return bytes(self._data[-min(length, self.size) :])

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._data[offset : offset + length])

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        for start, buffers in runs:
            at = start
            for buffer in buffers:
                buffer[:] = self._data[at : at + buffer.nbytes]
                at += buffer.nbytes


def _verify(
    built: memoryview,
    rows: Sequence[Row],
    digests: dict[str, tuple[int, ...]],
    fmt: DatasetFormat,
    workspace: Workspace,
    named: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Read the bytes back. named: inputs, and tombstones applied.

    Raises CorruptShardError: then nothing of them may become visible.
    """
    source = _Memory(built)
    try:
        index = read_index(source)
        problem = "" if _says(index, rows, fmt, named) else "its index does not say what was put in"
        for _, numbers in groupby(range(0 if problem else len(rows)), index.batch_of):
            chosen = list(numbers)
            arrays = list(workspace.arrays([rows[number] for number in chosen], fmt))
            _read(source, index, list(zip(chosen, arrays, strict=True)))
            if any(_vector_digests(data) != digests[data.row.record_id] for data in arrays):
                problem = "its token ids or logprobs are not those of its inputs"
    except CorruptShardError as error:
        raise CorruptShardError(f"{_BUILT_WRONG}: {error}") from error
    if problem:
        raise CorruptShardError(f"{_BUILT_WRONG}: {problem}")


def _says(
    index: ShardIndex, rows: Sequence[Row], fmt: DatasetFormat, named: tuple[Sequence[str], Sequence[str]]
) -> bool:
    same = index.rows == tuple(rows) and index.spec == fmt.spec and index.components == fmt.keys.components
    return same and (index.inputs, index.tombstones_applied) == tuple(map(tuple, named))


@dataclass
class _Extra:
    """Columns that this version does not know: carried over as they are, null where an input lacks them."""

    fields: tuple[pa.Field, ...]
    _shards: dict[str, Shard]  # by path
    _storage: Storage
    _taken: list[pa.RecordBatch]

    @classmethod
    def of(cls, kept: Sequence[Located], storage: Storage, fmt: DatasetFormat) -> _Extra:
        """Those of the shards of these rows. Raises CorruptShardError where two have one column in different types."""
        known = frozenset(shard_schema(fmt.spec, fmt.keys).names)
        shards = {each.shard.path: each.shard for each in kept}
        fields: dict[str, pa.Field] = {}
        for path, shard in shards.items():
            if shard.index.num_columns == len(known):
                continue
            with _arrow(storage, path, shard) as reader:
                schema = reader.schema
            for field in schema:
                if field.name not in known:
                    first = fields.setdefault(field.name, field.with_nullable(nullable=True))
                    if first.type != field.type:
                        text = f"column {field.name} is {field.type}, in another shard {first.type}"
                        raise DamagedInputError(path, f"{storage.uri}: {path}: {text}")
        return cls(tuple(fields.values()), shards, storage, [])

    def take(self, group: Sequence[Located]) -> pa.RecordBatch | None:
        """These columns of the rows of one batch; None if there are none."""
        if not self.fields:
            return None
        schema = pa.schema(self.fields)
        pieces: list[pa.RecordBatch] = []
        order: list[int] = []
        numbered = sorted(enumerate(group), key=lambda item: (item[1].shard.path, item[1].number))
        for path, members in groupby(numbered, key=lambda item: item[1].shard.path):
            shard = self._shards[path]
            with _arrow(self._storage, path, shard) as reader:
                for number, those in groupby(members, key=lambda item: shard.index.batch_of(item[1].number)):
                    chosen = list(those)
                    first = shard.index.batch_rows(number).start
                    rows = pa.array([each.number - first for _, each in chosen], pa.int64())
                    pieces.append(_select(reader.get_batch(number), schema).take(rows))
                    order += [place for place, _ in chosen]
        table = pa.Table.from_batches(pieces).take(pa.array(np.argsort(order)))
        batch = table.combine_chunks().to_batches()[0]
        self._taken.append(batch)
        return batch

    def verify(self, built: memoryview) -> None:
        """Raises CorruptShardError unless the built file has the very values."""
        if not self.fields:
            return
        reader = pa.ipc.open_file(pa.py_buffer(built))
        found = [_select(reader.get_batch(i), pa.schema(self.fields)) for i in range(reader.num_record_batches)]
        if not all(map(pa.RecordBatch.equals, found, self._taken)):
            raise CorruptShardError(f"{_BUILT_WRONG}: columns that this version does not know differ")


@contextmanager
def _arrow(storage: Storage, path: str, shard: Shard) -> Iterator[Any]:
    """pyarrow's reader of a shard. Raises DamagedInputError for what it cannot read."""
    try:
        with (
            storage.open(path, shard.entry) as source,
            arrow_file(source, shard.entry.size, pa.ipc.IpcReadOptions(use_threads=False)) as reader,
        ):
            yield reader
    except DamagedInputError:
        raise
    except CorruptShardError as error:
        raise DamagedInputError(path, f"{storage.uri}: {path}: {error}") from error


def _select(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    names = batch.schema.names
    columns = [
        batch.column(field.name) if field.name in names else pa.nulls(batch.num_rows, field.type) for field in schema
    ]
    return pa.record_batch(columns, schema=schema)
