"""Files by os calls: ranged reads, whole writes, publishing without replacing, and errors that say what to do.

Transfers are cut into calls that the kernel takes, and go on where one was short.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from types import TracebackType

from rr_dataset.errors import CorruptShardError, ObjectNotFoundError, StorageError
from rr_dataset.storage.base import Buffer

_BUFFERS_A_CALL = 1024  # IOV_MAX of Linux: preadv and writev refuse more
_MAX_GAP_BYTES = 4096  # reading a page over costs less than another call
_NO_HARD_LINKS = frozenset((errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
_GONE = frozenset((errno.ENOENT, errno.ESTALE))  # ESTALE: another NFS client deleted it
_WAYS_OUT = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the host has no file descriptor left",
    errno.ENOSPC: "free space there, or delete prefixes",
    errno.EDQUOT: "raise the quota, or delete prefixes",
    errno.EACCES: "check the owner and mode of its directory",
    errno.EROFS: "remount it for writing",
    errno.ELOOP: "it is a link: replace it by the file itself",
    errno.ESPIPE: "it is no regular file: remove it",
    errno.EXDEV: "the whole dataset must lie on one file system",
}


class LocalSource:
    """An open file, never a link or a pipe. Reads go to the descriptor, from any thread; the file stays readable after it is unlinked."""

    max_gap_bytes = _MAX_GAP_BYTES

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        with StorageErrors(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                self.size = os.lseek(self._fd, 0, os.SEEK_END)
            except OSError:  # a pipe
                self.close()
                raise

    def tail(self, length: int) -> bytes:
        """The last `length` bytes; all of them, if there are fewer."""
        length = min(length, self.size)
        return self.read(self.size - length, length)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes. Raises CorruptShardError where the file ends before."""
        with StorageErrors(self._path):
            data = os.pread(self._fd, length, offset)
        if len(data) == length:
            return data
        whole = bytearray(length)
        self.read_runs([(offset, [memoryview(whole)])])
        return bytes(whole)

    def read_runs(self, runs: Sequence[tuple[int, Sequence[memoryview]]]) -> None:
        """Fill buffers (writable, contiguous) from the file: of each run one after the other, from its offset on.

        Raises CorruptShardError where the file ends before.
        """
        with StorageErrors(self._path):
            for start, buffers in runs:
                at = start
                for first in range(0, len(buffers), _BUFFERS_A_CALL):
                    at += self._fill(at, buffers[first : first + _BUFFERS_A_CALL])

    def _fill(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Bytes read: of all these buffers, at most _BUFFERS_A_CALL."""
        wanted = left = sum([buffer.nbytes for buffer in buffers])
        while (got := os.preadv(self._fd, buffers, offset)) < left:
            if not got:
                raise CorruptShardError(
                    f"{self._path!r} ends at byte {offset}, {left} bytes short of what was asked for"
                )
            buffers = _after(buffers, got)
            offset += got
            left -= got
        return wanted

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> LocalSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StorageErrors:
    """Raises what the operating system raises as StorageError, with the path, a way out and the cause."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError) or isinstance(error, StorageError):
            return
        code = error.errno or errno.EIO
        text = error.strerror or str(error)
        if code in _WAYS_OUT:
            text += f"; {_WAYS_OUT[code]}"
        raise (ObjectNotFoundError if code in _GONE else StorageError)(
            code, text, error.filename2 or error.filename or self._path
        ) from error


def write_all(fd: int, data: Sequence[Buffer]) -> None:
    """Append the buffers, one after the other, all of their bytes."""
    for first in range(0, len(data), _BUFFERS_A_CALL):
        buffers = [memoryview(buffer).cast("B") for buffer in data[first : first + _BUFFERS_A_CALL]]
        left = sum([buffer.nbytes for buffer in buffers])
        while (put := os.writev(fd, buffers)) < left:
            buffers = _after(buffers, put)
            left -= put


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers behind their first `done` bytes."""
    for at, buffer in enumerate(buffers):
        if done < buffer.nbytes:
            return [buffer.cast("B")[done:], *buffers[at + 1 :]]
        done -= buffer.nbytes
    return []


def publish(stage: str, target: str) -> None:
    """Give the staged file its name. Raises FileExistsError if that is taken, FileNotFoundError without its directory."""
    try:
        os.link(stage, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        _rename_no_replace(stage, target)


def _rename_no_replace(stage: str, target: str) -> None:
    at_cwd, no_replace = -100, 1
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28
    code = errno.ENOSYS
    if rename is not None:
        if rename(at_cwd, os.fsencode(stage), at_cwd, os.fsencode(target), no_replace) == 0:
            return
        code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        text = "The file system has neither hard links nor renameat2(RENAME_NOREPLACE); put the dataset on another one"
        raise OSError(errno.EOPNOTSUPP, text, target)
    raise OSError(code, os.strerror(code), target)


def sync_dir(path: str) -> None:
    """fsync of a directory; one that is gone needs none, and one that its file system cannot sync has none."""
    with StorageErrors(path):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)
