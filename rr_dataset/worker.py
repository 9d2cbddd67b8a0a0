"""The worker process: `python -m rr_dataset.worker <channel fd> <engine pid>`, started by the supervisor.

It opens the dataset, says hello with the dataset's format, then publishes each sealed slab of its spool, oldest first,
and marks it published; in between, slab by slab, what earlier writers of the dataset left in dead spools. A slab that
fails stays sealed and is tried again with growing pauses, of which no two are alike, while the others go on. When the
engine is gone it publishes what is committed, removes the spool and ends, also while a store hangs; SIGINT is the engine's
business. SIGTERM ends it too, but not before it
has looked whether the engine ends with it.
"""

from __future__ import annotations

import logging
import math
import os
import random
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rr_dataset.dataset import create_dataset
from rr_dataset.description import read_format
from rr_dataset.errors import CorruptSpoolError, DatasetNotFoundError, RoutingDatasetError, SpecMismatchError
from rr_dataset.layout import STAGING_DIR, DatasetFormat
from rr_dataset.publisher import UNPUBLISHED, Publisher, slabs_in
from rr_dataset.record import RoutingSpec
from rr_dataset.recovery import LEFT, LIVING, SpoolReport, adopt
from rr_dataset.slab import ASIDE, SEALED, read_state
from rr_dataset.spool_place import remove_directory
from rr_dataset.storage import Storage, open_storage
from rr_dataset.supervisor import LOG_BYTES, Channel

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0  # between attempts at a slab that fails, give or take a half
OVERTIME_S = 10.0  # after the time to drain is over, for the request that is under way
LINGER_S = 1.0  # whoever ends a whole tree of processes ends the engine a moment before or after the worker
PARENT_POLL_S = 1.0  # where no pidfd tells that the engine is dead

_log = logging.getLogger("rr_dataset.worker")


@dataclass
class _Retry:
    """A slab that failed."""

    pause_s: float
    at_s: float  # monotonic time of the next attempt: the writers of a fleet do not all come back in one moment


class Worker:
    """The loop: wait for news, publish, report."""

    def __init__(self, channel: Channel, engine_pid: int, start: Mapping[str, Any], publisher: Publisher) -> None:
        self._channel, self._publisher = channel, publisher
        self._spool = Path(start["spool"])
        self._drain_timeout_s: float = start["drain_timeout_s"]
        self._end_s = math.inf  # monotonic time at which it ends though the engine is not known to be dead
        self._retries: dict[Path, _Retry] = {}
        self._adoption: Iterator[SpoolReport | None] | None = adopt(self._spool.parent, publisher)
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._parent = os.getppid()
        self._pidfd: int | None = None
        self._engine_dead = False
        try:
            self._pidfd = os.pidfd_open(engine_pid)  # a forked child of the engine may keep the channel open
            self._selector.register(self._pidfd, selectors.EVENT_READ)
        except ProcessLookupError:
            self._engine_dead = True
        except (OSError, AttributeError):  # Linux before 5.3, gVisor, a seccomp filter, a Python built without it
            _log.info("no pidfd: looking every %s s whether the engine is still the parent", PARENT_POLL_S)
        if not self._engine_dead:
            threading.Thread(target=self._outlive, name="outlive", daemon=True).start()

    def run(self) -> None:
        """Until the engine is dead or has closed the writer, or SIGTERM."""
        while not self._engine_dead and time.monotonic() < self._end_s:
            pause_s = self._publish((SEALED,))
            if self._adoption is not None:
                self._adopt()
                pause_s = 0
            self._wait(pause_s)
        deadline = time.monotonic() + self._drain_timeout_s
        self._limit_the_end()
        states = UNPUBLISHED if self._engine_dead else (SEALED,)
        while (pause_s := self._publish(states, deadline)) is not None and time.monotonic() < deadline:
            time.sleep(pause_s)
        while self._adoption is not None and time.monotonic() < deadline:
            self._adopt()
        if self._engine_dead and not slabs_in(self._spool, (*UNPUBLISHED, ASIDE)):
            remove_directory(self._spool)

    def _publish(self, states: Sequence[int], deadline_s: float = math.inf) -> float | None:
        """Publish what is there and due; seconds until the next attempt at a slab that failed, None if none did.

        deadline_s: monotonic time from which on it ends with the first that fails.
        """
        failing: dict[Path, _Retry] = {}
        for slab in slabs_in(self._spool, states):
            if failing and time.monotonic() >= deadline_s:
                break
            retry = self._retries.get(slab)
            if retry is not None and time.monotonic() < retry.at_s:
                failing[slab] = retry
                continue
            try:
                self._publisher.publish(slab)
            except Exception as error:  # noqa: BLE001 - whatever it is, the records wait in their slab
                failing[slab] = self._failed(slab, retry, error)
            else:
                self._channel.send("published")
        self._retries = failing
        return min((max(retry.at_s - time.monotonic(), 0) for retry in failing.values()), default=None)

    def _failed(self, slab: Path, retry: _Retry | None, error: Exception) -> _Retry:
        if retry is None:  # once: the log lies in the spool
            _bound_log()
            _log.warning("cannot publish %s", slab, exc_info=error)
        pause_s = FIRST_PAUSE_S if retry is None else min(2 * retry.pause_s, LAST_PAUSE_S)
        seq = None
        with suppress(OSError, CorruptSpoolError):
            seq, _ = read_state(slab)
        wait_s = pause_s * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        self._channel.send("trouble", seq=seq, wait_s=wait_s, **_describe(error))
        return _Retry(pause_s, time.monotonic() + wait_s)

    def _adopt(self) -> None:
        """One more slab of a dead spool, after all that the own engine has sealed."""
        report = None
        try:
            report = None if self._adoption is None else next(self._adoption)
        except StopIteration:
            self._adoption = None
        if report is None or report.outcome == LIVING:
            return
        _log.info("recovered %d records of %s, %d torn entries dropped", report.records, report.path, report.torn)
        left = report.outcome == LEFT
        if left:
            _log.warning("dead spool %s is left as it is: %s", report.path, report.reason)
        ours = report.dataset == self._publisher.dataset.uuid
        self._channel.send("recovered", records=report.records, left=report.path if left and ours else None)

    def _wait(self, timeout_s: float | None) -> None:
        """For news, at most so long."""
        waits = [self._end_s - time.monotonic()]
        if timeout_s is not None:
            waits.append(timeout_s)
        if self._pidfd is None:
            waits.append(PARENT_POLL_S if self._end_s == math.inf else PARENT_POLL_S / 20)
        wait_s = max(min(waits), 0)
        ready = {key.fileobj for key, _ in self._selector.select(None if wait_s == math.inf else wait_s)}
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        if self._channel in ready:
            messages = self._channel.receive()
            if messages is None:  # the engine is dying, if it did not say that it ends
                self._selector.unregister(self._channel)
                self._end_soon(LINGER_S)
            elif any(message["kind"] == "end" for message in messages):
                self._end_soon(0)
        self._engine_dead = self._pidfd in ready if self._pidfd is not None else os.getppid() != self._parent

    def _outlive(self) -> None:
        """In a thread of its own, since a store that hangs may hold the other one for minutes: wait for the engine's death."""
        if self._pidfd is not None:
            select.select([self._pidfd], [], [])
        else:
            while os.getppid() == self._parent:
                time.sleep(PARENT_POLL_S)
        self._limit_the_end()

    def _limit_the_end(self) -> None:
        """Have the process killed when the time to drain is over, and some; its slabs keep what is not published."""
        if not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, self._drain_timeout_s + OVERTIME_S)

    def _on_sigterm(self, *_: object) -> None:
        self._limit_the_end()
        self._adoption = None
        self._end_soon(LINGER_S)

    def _end_soon(self, wait_s: float) -> None:
        self._end_s = min(self._end_s, time.monotonic() + wait_s)


def _bound_log() -> None:
    if os.fstat(sys.stderr.fileno()).st_size > LOG_BYTES:
        os.ftruncate(sys.stderr.fileno(), 0)  # it is open for appending


def _describe(error: BaseException) -> dict[str, Any]:
    parts = [error.errno, error.strerror, error.filename] if isinstance(error, OSError) and error.errno else None
    return {"error": type(error).__name__, "text": str(error), "os_error": parts}


def _open(start: Mapping[str, Any]) -> Publisher:
    options = start["storage_options"]
    storage = open_storage(start["uri"], options)
    if start["format"] is not None:  # a restart: an outage must not keep it from starting
        return Publisher(storage, DatasetFormat.from_json(start["format"].encode()), start["compression"])
    spec = None if start["create"] is None else RoutingSpec.from_dict(start["create"])
    try:
        dataset = read_format(storage)
    except DatasetNotFoundError:
        if spec is None:
            raise
        create_dataset(start["uri"], spec, keep=start["keep"], storage_options=options)
        dataset = read_format(storage)
    if spec is not None and spec != dataset.spec:
        raise SpecMismatchError(
            f"{start['uri']} exists with {dataset.spec}, not with create={spec}: leave create out, or use another place"
        )
    if storage.is_remote:
        _try_to_write(storage, start["writer"])
    return Publisher(storage, dataset, start["compression"])


def _try_to_write(storage: Storage, writer: str) -> None:
    """Two requests, so that a key which may only read fails now, and not with the first slab."""
    name = f"{STAGING_DIR}/may-write/{writer}"
    storage.create(name, b"", staging=writer)
    storage.delete([name])


def main(channel_fd: int, engine_pid: int) -> None:
    """Run the worker of the engine behind the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    channel = Channel(socket.socket(fileno=channel_fd))
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.select()
    messages = channel.receive()
    if not messages:
        return
    start = messages[0]
    os.nice(start["nice"])
    if "://" in start["uri"]:  # whoever answers may take its time
        channel.send("opening")
    try:
        publisher = _open(start)
    except RoutingDatasetError as error:
        _log.error("cannot open the dataset: %s", error)
        channel.send("trouble", **_describe(error))
        sys.exit(1)
    channel.send("hello", format=publisher.dataset.to_json().decode())
    Worker(channel, engine_pid, start, publisher).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
