"""The whole demo: a dataset, an engine process that writes into it and a trainer process that reads from it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from rr_dataset.dataset import create_dataset, open_dataset
from rr_dataset.demo.engine import EngineReport
from rr_dataset.demo.rollouts import SPEC
from rr_dataset.demo.trainer import ReadReport, TrainerReport
from rr_dataset.errors import RoutingDatasetError
from rr_dataset.keys import KeyScheme

_EPOCH = re.compile("code_[0-9]+_epoch_([0-9]+):")


class Replay:
    """200 real rollouts as one epoch of traffic, under way. Both processes have ended when the context is left.

    uri: a dataset that is created, or one of an earlier demo, which gets another epoch.
    rate: requests that finish per second, at random intervals; 0 puts them without a pause.
    seed: of the order in which they finish.

    Raises SpecMismatchError if another dataset is there, InvalidInputError if something else is.
    """

    def __init__(self, uri: str, rate: float = 100.0, seed: int = 0) -> None:
        create_dataset(uri, SPEC, keys=KeyScheme.fastdeploy(), exist_ok=True)
        earlier = [int(match[1]) for match in map(_EPOCH.match, open_dataset(uri).ids()) if match]
        epoch = str(1 + max(earlier, default=-1))
        with ExitStack() as undo:
            self._trainer = undo.enter_context(_running("trainer", uri, epoch))
            self._engine = undo.enter_context(_running("engine", uri, epoch, str(rate), str(seed)))
            self._processes = undo.pop_all()

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.close()

    def engine(self) -> EngineReport:
        """Wait for the engine process; RoutingDatasetError if it failed, its own message is on stderr then."""
        return EngineReport(**_report("engine", self._engine))

    def trainer(self) -> TrainerReport:
        """Wait for the trainer process; RoutingDatasetError if it failed, its own message is on stderr then."""
        values = _report("trainer", self._trainer)
        values |= {name: ReadReport(**values[name]) for name in ("batch", "everything")}
        return TrainerReport(**values)


@contextmanager
def _running(side: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has ended when the context is left. In a session of its own: a Ctrl-C is for the caller alone."""
    command = [sys.executable, "-m", f"rr_dataset.demo.{side}", *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _report(side: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        raise RoutingDatasetError(f"the {side} process ended with exit code {process.returncode}")
    values: dict[str, Any] = json.loads(out)
    return values
