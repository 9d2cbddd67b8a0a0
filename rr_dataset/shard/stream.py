"""A stored object as a file, for pyarrow."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from rr_dataset.errors import CorruptShardError, StorageError
from rr_dataset.shard.index import Source

# What pyarrow, and what decodes its texts, raise of damaged bytes; a MemoryError comes of a length that lies.
_OF_DAMAGE = (
    *(pa.ArrowException, OSError, LookupError, ValueError, TypeError),
    *(OverflowError, MemoryError, NotImplementedError, RecursionError),
)
_LIE_BYTES = 1 << 36  # no buffer of a shard is nearly as large


class SourceFile(io.RawIOBase):
    """Reads a source that its owner closes. `error` is what a read raised: pyarrow would make an OSError of it."""

    def __init__(self, source: Source, size: int) -> None:
        self._source = source
        self._size = size
        self._at = 0
        self.error: BaseException | None = None

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position of the next read."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes, fewer only at the end."""
        left = max(self._size - self._at, 0)
        try:
            data = self._source.read(self._at, left if size < 0 else min(size, left))
        except BaseException as error:
            self.error = error
            raise
        self._at += len(data)
        return data


@contextmanager
def arrow_file(
    source: Source, size: int, options: pa.ipc.IpcReadOptions, where: str = ""
) -> Iterator[pa.ipc.RecordBatchFileReader]:
    """A reader of pyarrow over the source. Whatever is raised of the bytes meanwhile becomes a CorruptShardError.

    What the source raises goes up as it is. where: what the text begins with. The block should do nothing else that may raise.
    """
    file = SourceFile(source, size)
    try:
        yield pa.ipc.open_file(pa.PythonFile(file, mode="r"), options=options)
    except _OF_DAMAGE as error:
        if file.error is not None:
            raise file.error from None
        if isinstance(error, (CorruptShardError, StorageError)) or _is_lack_of_memory(error):
            raise
        raise CorruptShardError(f"{where}pyarrow cannot read it: {error!r:.300}") from error


def _is_lack_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed that a sound shard may need, and not one of a length that lies."""
    size = re.search(r"size (\d+)", str(error))
    return isinstance(error, MemoryError) and (size is None or int(size[1]) < _LIE_BYTES)
