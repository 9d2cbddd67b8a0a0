"""Kills a process at a chosen step. Python imports this by itself when the folder is on PYTHONPATH, as tests put it.

RR_FAULT, JSON, says where: {"role": "engine" or "worker", "step": "package.module:name.of.function", "when": "before" or
"after", "nth": which call that comes to it, "both": whether the other process is killed too, "mark": a file that is made when it fires}.
It fires once for all processes: a worker that is started again lives. "set", by "package.module:NAME": other values for these
in every process, as parts of an upload that are small.

RR_CLOCK_AHEAD_S says by how much this process and its children take it to be later than it is.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from importlib import import_module
from typing import Any


def _others(role: str) -> list[int]:
    if role == "worker":
        return [os.getppid()]
    return [running.worker_pid for running in import_module("rr_dataset.supervisor")._running]


def _arm(role: str, step: str, when: str, nth: int, both: bool, mark: str) -> None:
    module_name, _, name = step.partition(":")
    *path, last = name.split(".")
    owner: Any = import_module(module_name)
    for part in path:
        owner = getattr(owner, part)
    inner, calls = getattr(owner, last), itertools.count(1)

    def fire() -> None:
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        for pid in [*(_others(role) if both else ()), os.getpid()]:
            os.kill(pid, signal.SIGKILL)

    def step_with_fault(*args: Any, **more: Any) -> Any:
        if when == "before" and next(calls) == nth:
            fire()
        result = inner(*args, **more)
        if when == "after" and next(calls) == nth:
            fire()
        return result

    setattr(owner, last, step_with_fault)


def _set_clock(ahead_s: float) -> None:
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + ahead_s
    time.time_ns = lambda: nanoseconds() + int(ahead_s * 1e9)


if "RR_CLOCK_AHEAD_S" in os.environ:
    _set_clock(float(os.environ["RR_CLOCK_AHEAD_S"]))
if "RR_FAULT" in os.environ:
    fault = json.loads(os.environ["RR_FAULT"])
    for place, value in fault.pop("set", {}).items():
        setattr(import_module(place.partition(":")[0]), place.partition(":")[2], value)
    if ("rr_dataset.worker" in sys.orig_argv) == (fault["role"] == "worker"):
        _arm(**fault)
