"""The one daemon thread in the engine: it starts the worker, restarts it, takes its acknowledgements, seals by age.

The worker is a plain subprocess in a session of its own (engines run in daemonic processes, where multiprocessing
children are forbidden). Messages are only wake-ups and news; what is sealed and published stands in the slabs.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rr_dataset import errors
from rr_dataset.options import WriterOptions
from rr_dataset.slab import Batch
from rr_dataset.spool import Spool
from rr_dataset.spool_place import LOG_NAME

MAX_RESTARTS = 10  # in a row
HEALTHY_S = 60.0  # a worker that lived so long, or published something, begins a new row
FIRST_DELAY_S, LAST_DELAY_S = 0.1, 5.0
PROBE_S = 5.0  # how soon another slab is spent on a storage that fails
LOG_BYTES = 1 << 20  # it lies in the spool, so it begins anew when it is larger


class Channel:
    """JSON messages between engine and worker over one end of a SOCK_SEQPACKET pair."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(0)
        self._socket = sock

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send without waiting. A peer that is gone, or has many messages unread, misses it."""
        if self.fileno() < 0:  # closed, since the peer is gone
            return
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._socket.send(json.dumps({"kind": kind, **fields}).encode(), socket.MSG_NOSIGNAL)

    def receive(self) -> list[dict[str, Any]] | None:
        """All messages that have come; None once the peer is gone."""
        messages: list[dict[str, Any]] = []
        with suppress(BlockingIOError):
            while True:
                try:
                    data = self._socket.recv(1 << 20)
                except ConnectionResetError:
                    data = b""
                if not data:
                    return messages or None
                messages.append(json.loads(data))
        return messages

    def end(self) -> None:
        """Let the peer see the end, also while a forked child holds a copy of this end."""
        with suppress(OSError):  # closed, or the peer is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


@dataclass(frozen=True)
class _Trouble:
    """A slab that cannot be published at present."""

    error: errors.RoutingDatasetError  # of the last attempt
    since_s: float  # monotonic time of the first one
    retry_at_s: float  # of the next one


class Supervisor:
    """Starts and watches the worker of one spool."""

    def __init__(self, spool: Spool, options: WriterOptions, start: Mapping[str, Any]) -> None:
        """Launch the worker. `start` are the fields of its first message. Raises WorkerError if it cannot be launched."""
        if not sys.executable:
            raise errors.WorkerError("sys.executable is empty: an embedded Python must set it to a python to start")
        self.restarts = 0
        self.retries = 0  # attempts at slabs that failed, each of which is made again
        self.recovered = 0  # records of dead spools that the worker made durable
        self.left: list[str] = []  # dead spools of this dataset that it could not take over whole, and why
        self.gone: errors.WriterError | None = None  # no worker any more, and none will come
        self.on_done: Callable[[Sequence[Batch]], None] = lambda _: None
        self._spool, self._options, self._start = spool, options, {**start, "format": None}
        self._pid = os.getpid()
        self._failures = 0
        self._launched_s = 0.0
        self._trouble: errors.RoutingDatasetError | None = None  # of the worker itself, until its next publication
        self._troubles: dict[int, _Trouble] = {}  # of slabs that failed, by sequence number
        self._probing = False  # whether nothing was published since one failed first
        self._retry_at: float | None = None
        self._seal_wanted = self._stopping = self._closed = False
        self._thread: threading.Thread | None = None
        with ExitStack() as undo:
            try:
                self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                undo.callback(os.close, self._wake_r)
                undo.callback(os.close, self._wake_w)
                self._selector = undo.enter_context(selectors.DefaultSelector())
                self._selector.register(self._wake_r, selectors.EVENT_READ)
            except OSError as error:
                raise errors.WorkerError(f"the worker cannot be started: {error}") from error
            self._launch()
            self._descriptors = undo.pop_all()
        _running.add(self)

    @property
    def last_error(self) -> errors.RoutingDatasetError | None:
        """What keeps something from being durable: no worker, or the last failure of a slab that still waits."""
        troubles = list(self._troubles.values())
        return self.gone or (troubles[-1].error if troubles else self._trouble)

    def failing(self) -> tuple[int, float, float | None]:
        """How many slabs fail at present, for how many seconds the first of them has, and in how many one is tried again."""
        troubles, now_s = list(self._troubles.values()), time.monotonic()
        if not troubles:
            return 0, 0.0, None
        since_s, next_s = min(each.since_s for each in troubles), min(each.retry_at_s for each in troubles)
        return len(troubles), now_s - since_s, max(next_s - now_s, 0.0)

    @property
    def worker_pid(self) -> int:
        """The process id of the present worker, or of the last one."""
        return self._process.pid

    def greet(self) -> Mapping[str, Any]:
        """Wait for the worker's hello and begin to supervise; the hello's fields.

        Raises within `start_timeout_s` what the worker raised when it opened the dataset, StorageError if the store has not
        answered it, WorkerError if it died or has not come so far.
        """
        opening = False
        deadline = time.monotonic() + self._options.start_timeout_s
        while True:
            self._selector.select(max(deadline - time.monotonic(), 0))
            messages = self._channel.receive()
            for at, message in enumerate(messages or ()):
                if message["kind"] == "hello":
                    self._start["format"] = message["format"]
                    self._take((messages or ())[at + 1 :])
                    self._thread = threading.Thread(target=self._run, name="rr_dataset-supervisor", daemon=True)
                    self._thread.start()
                    return message
                if message["kind"] == "trouble":
                    raise _revive(message)
                opening |= message["kind"] == "opening"
            if messages is None:
                raise errors.WorkerError(f"the worker ended before it said hello: {self._last_words()}")
            if time.monotonic() >= deadline:
                if opening:
                    raise errors.StorageError(
                        errno.ETIMEDOUT,
                        f"The store did not answer within start_timeout_s={self._options.start_timeout_s}: check the address, "
                        "the endpoint and the network",
                        self._start["uri"],
                    )
                raise errors.WorkerError(
                    f"the worker did not open {self._start['uri']} within start_timeout_s="
                    f"{self._options.start_timeout_s}: {self._last_words()}"
                )

    def check_process(self) -> None:
        """Raise WriterForkedError in a forked child of the process that opened the writer."""
        if os.getpid() != self._pid:
            raise errors.WriterForkedError("this writer belongs to the parent process; open one after the fork")

    def wake(self) -> None:
        """Have the thread look at the spool. Any thread, also with the spool's lock held or after `stop`."""
        with self._spool.changed, suppress(BlockingIOError):
            if not self._closed:
                os.write(self._wake_w, b"\0")

    def seal_soon(self) -> None:
        """Have what is in the spool sealed as soon as the worker can take it."""
        self._seal_wanted = True
        self.wake()

    def wait(self, batches: Sequence[Batch], timeout_s: float) -> None:
        """Wait until the batches are done.

        Raises FlushTimeoutError with the last storage failure as its cause, or WorkerError when no worker is left.
        """
        self.seal_soon()
        with self._spool.changed:
            self._spool.changed.wait_for(
                lambda: self.gone is not None or all(batch.done for batch in batches), timeout_s
            )
            waiting = [batch for batch in batches if not batch.done]
        if waiting and self.gone is not None:
            raise self.gone
        if waiting:
            records = sum(batch.records for batch in waiting)
            why = self.because() or " (the store has neither taken them nor failed so far)"
            text = f"{records} records are not durable after {timeout_s} s{why}"
            own = [self._troubles[batch.seq].error for batch in waiting if batch.seq in self._troubles]
            raise errors.FlushTimeoutError(text) from (own[0] if own else self.last_error)

    def call_when_done(self, batch: Batch, call: Callable[[], None]) -> None:
        """Call once, from any thread, when `wait` for the batch would return at once."""
        with self._spool.changed:
            waits = not batch.done and self.gone is None
            if waits:
                batch.waiters.append(call)
        if waits:
            self.seal_soon()
        else:
            call()

    def call_no_more(self, batch: Batch, call: Callable[[], None]) -> None:
        """Forget a call that `call_when_done` was given, if it is not yet made."""
        with self._spool.changed, suppress(ValueError):
            batch.waiters.remove(call)

    def because(self) -> str:
        """The present trouble in parentheses, or nothing."""
        error = self.last_error
        return f" ({error})" if error else ""

    def stop(self, timeout_s: float) -> None:
        """End thread and worker; what is not yet published stays in the spool."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._channel.send("end")
        self._channel.end()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.gone is None:
            self._give_up(errors.WriterClosedError("the writer was closed before this was durable"))
        _running.discard(self)
        with self._spool.changed:
            self._close_descriptors()

    def forget(self) -> None:
        """In a forked child: give up the parent's channel, which would outlive the parent here."""
        self._spool.changed = threading.Condition()  # a thread that is not in this process may hold the old one
        self.gone = errors.WriterForkedError("this writer belongs to the parent process; open one after the fork")
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._closed = True
        self._channel.close()
        self._descriptors.close()

    # ---- the worker process

    def _launch(self) -> None:
        path = [entry or str(Path.cwd()) for entry in sys.path]
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}
        with ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(ours.close)
                with theirs, (self._spool.directory / LOG_NAME).open("ab") as log:
                    if log.tell() > LOG_BYTES:
                        log.truncate(0)
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "rr_dataset.worker", str(theirs.fileno()), str(os.getpid())],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        pass_fds=(theirs.fileno(), self._spool.lock_fd),
                        start_new_session=True,
                    )
                self._channel = Channel(ours)
                self._selector.register(self._channel, selectors.EVENT_READ)
                undo.pop_all()
            except OSError as error:  # no memory, process or descriptor is left: later there may be
                raise errors.WorkerError(f"the worker cannot be started: {error}") from error
        self._launched_s = time.monotonic()
        self._channel.send("start", lock_fd=self._spool.lock_fd, spool=str(self._spool.directory), **self._start)

    def _last_words(self) -> str:
        """How the worker ended and what its log says last."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1 if self._process.poll() is None else 0)
        code = self._process.returncode
        state = "still running" if code is None else f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        log = ""
        with suppress(OSError):
            log = (self._spool.directory / LOG_NAME).read_text(errors="replace")[-2000:].strip()
        return f"{state}; its log: {log or '(empty)'}"

    def _worker_ended(self) -> None:
        self._selector.unregister(self._channel)
        self._channel.close()
        self._retry(errors.WorkerError(f"the worker ended: {self._last_words()}"))

    def _retry(self, error: errors.WorkerError) -> None:
        if time.monotonic() - self._launched_s > HEALTHY_S:
            self._failures = 0
        self._failures += 1
        if self._failures > MAX_RESTARTS:
            self._give_up(error)
            return
        self._trouble = error
        delay = min(FIRST_DELAY_S * 2 ** (self._failures - 1), LAST_DELAY_S)
        self._retry_at = time.monotonic() + delay

    def _give_up(self, error: errors.WriterError) -> None:
        with self._spool.changed:
            self.gone = error
            self._spool.changed.notify_all()
        self._call_waiters(self._spool.batches())

    def _call_waiters(self, batches: Sequence[Batch]) -> None:
        with self._spool.changed:
            calls = [call for batch in batches for call in batch.waiters]
            for batch in batches:
                batch.waiters = []
        for call in calls:
            call()

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping and self.gone is None:
                self._step()
        except Exception as error:  # noqa: BLE001 - the engine lives on: flush, close and wait report it
            gone = errors.WorkerError(f"the supervisor failed: {error!r}")
            gone.__cause__ = error
            self._give_up(gone)

    def _step(self) -> None:
        ready = {key.fileobj for key, _ in self._selector.select(self._timeout_s())}
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        if self._channel in ready:
            self._listen()
        if self._retry_at is not None and time.monotonic() >= self._retry_at:
            self._retry_at = None
            self.restarts += 1
            try:
                self._launch()
            except errors.WorkerError as error:
                self._retry(error)
        if self._due_s() == 0:
            self._seal_wanted = False
            self._spool.close_active()
        if self._spool.pending():
            self._channel.send("wake")

    def _listen(self) -> None:
        messages = self._channel.receive()
        self._take(messages or ())
        with self._spool.changed:  # who waits for a batch finds it counted
            finished = self._spool.collect()
            if finished:
                self._failures, self._trouble, self._probing = 0, None, False
                for batch in finished:
                    self._troubles.pop(batch.seq, None)
                self.on_done(finished)
        self._call_waiters(finished)
        if messages is None:
            self._worker_ended()

    def _take(self, messages: Sequence[Mapping[str, Any]]) -> None:
        for message in messages:
            if message["kind"] == "trouble":
                self._note(_revive(message), message.get("seq"), message.get("wait_s", 0.0))
            elif message["kind"] == "recovered":
                self.recovered += message["records"]
                if message["left"] not in (None, *self.left):  # each worker names it again
                    self.left.append(message["left"])

    def _note(self, error: errors.RoutingDatasetError, seq: int | None, wait_s: float) -> None:
        if seq is None:
            self._trouble = error
            return
        now_s = time.monotonic()
        before = self._troubles.pop(seq, None)  # the latest comes last
        self._probing |= before is None
        self._troubles[seq] = _Trouble(error, now_s if before is None else before.since_s, now_s + wait_s)
        self.retries += 1

    def _timeout_s(self) -> float | None:
        waits = [
            wait
            for wait in (self._due_s(), self._retry_at and max(self._retry_at - time.monotonic(), 0))
            if wait is not None
        ]
        return min(waits, default=None)

    def _due_s(self) -> float | None:
        """Seconds until the active slabs are to be closed; None while the worker could not take them anyway.

        A slab may fail for reasons of its own, so another one is spent now and then to see whether the storage does, while
        half of the pool is left: the rest fills up whole.
        """
        opened, pending = self._spool.oldest_active_s(), self._spool.pending()
        slabs = self._options.spool_bytes // self._options.slab_bytes
        spent = self._probing and len(self._troubles) > 1 and 2 * pending > slabs
        if opened is None or pending - len(self._troubles) > 1 or spent:
            return None
        if self._seal_wanted:
            return 0
        age = self._options.max_age_s if pending else self._options.idle_seal_s
        return max(opened + (max(age, PROBE_S) if self._probing else age) - time.monotonic(), 0)


_running: set[Supervisor] = set()


def _forget_all() -> None:
    for supervisor in _running:
        supervisor.forget()
    _running.clear()


os.register_at_fork(after_in_child=_forget_all)


def _revive(message: Mapping[str, Any]) -> errors.RoutingDatasetError:
    """The worker's error, of its own class where it is one of ours."""
    kind = getattr(errors, message["error"], None)
    if isinstance(kind, type) and issubclass(kind, errors.RoutingDatasetError):
        return kind(*(message.get("os_error") or [message["text"]]))
    return errors.WorkerError(f"{message['error']}: {message['text']}")
