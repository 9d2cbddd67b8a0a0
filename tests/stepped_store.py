"""Many processes in one: a store of which every call is a step, at which its process dies or others come between.

The time is told, never taken: each host's clock is off by what the test says, within the skew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from rr_dataset.layout import FORMAT_PATH, STAGING_DIR
from rr_dataset.storage import Buffer, Entry, OpenSource, Storage

CREATE_MS = 50 * 60_000  # what may pass while an object is created: less than MARGIN_S
LISTING_MS = 4 * 60_000  # while something is listed: less than half of grace


class Killed(BaseException):
    """The process is gone: nothing of it runs any more, no clean-up either."""


class Inline(Executor):
    """Threads that are none."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- raised by the future; who was killed goes on falling
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th step. kind: "kill", "between" (others come before it), "torn" (while it lists for the n-th time)."""

    at: int
    kind: str
    others: tuple[Any, ...] = ()
    coins: tuple[bool, ...] = (True,)


@dataclass
class Process:
    """One run of something on a host."""

    host: int
    fault: Fault | None = None
    tell: Any = None  # what its delete marks mean, given their stamps
    left: int = 0
    dead: bool = False
    steps: int = 0
    struck: str = ""  # the call at which the fault came, and its path


@dataclass
class Time:
    """True time, and what each clock says: later by at most `skew_ms`."""

    ms: int
    skew_ms: int
    ahead: dict[int, int] = field(default_factory=dict)  # by host
    limit: int | None = None  # until when true time may go while something must not take longer

    def pass_by(self, ms: int) -> None:
        self.ms = self.ms + ms if self.limit is None else max(self.ms, min(self.ms + ms, self.limit))

    def wait(self, ms: int) -> None:
        """What a delete waits in the midst of others: the limits leave room for it."""
        self.ms += ms

    def on(self, host: int) -> int:
        return self.ms + self.ahead.get(host, 0)

    @contextmanager
    def at_most(self, ms: int) -> Iterator[None]:
        before = self.limit
        self.limit = self.ms + ms if before is None else min(before, self.ms + ms)
        yield
        self.limit = before


STORE = -1  # the host of the store


class SteppedStorage:
    """Another store, step by step. `arrived(path)` is told of each object that is there now by a create."""

    def __init__(
        self, inner: Storage, time: Time, others: Callable[[Any], None], arrived: Callable[[str, bytes], None]
    ) -> None:
        self.inner, self.time, self._others, self._arrived = inner, time, others, arrived
        self.running: list[Process] = []
        self._named_ms: dict[str, int] = {}

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def is_remote(self) -> bool:
        return self.inner.is_remote

    @property
    def requests_at_once(self) -> int:
        return self.inner.requests_at_once

    @property
    def process(self) -> Process:
        return self.running[-1]

    def now_ms(self) -> int:
        """On the clock of the host whose process runs."""
        return self.time.on(self.process.host)

    @contextmanager
    def started(self, process: Process) -> Iterator[Process]:
        """Run it; whether it was killed says `dead`."""
        process.left = process.fault.at if process.fault else 0
        self.running.append(process)
        try:
            with suppress(Killed):
                yield process
        finally:
            self.running.pop()

    def step(self, call: str, path: str = "") -> Fault | None:
        """The fault, if it is one that tears this very listing."""
        process = self.process
        if process.dead:
            raise Killed
        process.steps += 1
        fault = process.fault
        if fault is not None and (fault.kind != "torn" or call == "list"):
            process.left -= 1
        if fault is None or process.left >= 0:
            return None
        tears = fault.kind == "torn"
        process.fault, process.struck = None, f"{'torn' if tears else call} {path}"
        if fault.kind == "kill":
            process.dead = True
            raise Killed
        if tears:
            return fault
        if call == "create":
            with self.time.at_most(CREATE_MS):
                self._run(fault)
        else:
            self._run(fault)
        return None

    def _run(self, fault: Fault) -> None:
        for other in fault.others:
            Context().run(self._others, other)  # another process: what ends this one's requests ends none of its own

    def list(self, path: str) -> list[Entry]:
        fault = self.step("list", path)
        before = {entry.name: entry for entry in self.inner.list(path)}
        if fault is None:
            return [self._timed(path, entry) for entry in before.values()]
        with self.time.at_most(LISTING_MS):
            self._run(fault)
        after = {entry.name: entry for entry in self.inner.list(path)}
        shown, torn = [], sorted(before.keys() ^ after.keys())
        for name, entry in {**before, **after}.items():
            if name not in torn or fault.coins[torn.index(name) % len(fault.coins)]:
                shown.append(self._timed(path, entry))
        return shown

    def _timed(self, path: str, entry: Entry) -> Entry:
        return entry._replace(mtime_s=self._named_ms.setdefault(f"{path}/{entry.name}", self.time.on(STORE)) / 1000)

    def list_dirs(self, path: str) -> list[str]:
        self.step("list_dirs", path)
        return self.inner.list_dirs(path)

    def list_others(self, path: str) -> list[str]:
        return []

    def changed_ns(self, path: str) -> int | None:
        return None

    def open(self, path: str, entry: Entry | None = None) -> OpenSource:
        self.step("open", path)
        return self.inner.open(path, entry)

    def read_bytes(self, path: str) -> bytes:
        if path != FORMAT_PATH:  # it is there, and never changes
            self.step("read_bytes", path)
        return self.inner.read_bytes(path)

    def create(self, path: str, data: Buffer | Sequence[Buffer], *, staging: str) -> bool:
        content = b"".join(map(bytes, [data] if isinstance(data, (bytes, bytearray, memoryview)) else data))
        alive = not self.process.dead
        try:
            self.step("create", path)
        except Killed:
            if alive:
                self.inner.create(f"{STAGING_DIR}/{staging}/half", content[:99], staging=staging)
            raise
        made = self.inner.create(path, content, staging=staging)
        if made:
            self._named_ms[path] = self.time.on(STORE)
        self._arrived(path, content)
        return made

    def sync_dirs(self, paths: Iterable[str]) -> None:
        self.inner.sync_dirs(list(paths))
        self.step("sync_dirs")

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.step("delete", path)
            self.inner.delete([path])

    def remove_empty_dirs(self, path: str) -> None:
        self.step("remove_empty_dirs", path)
        self.inner.remove_empty_dirs(path)
