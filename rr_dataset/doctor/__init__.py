"""`doctor`: does this host, this spool folder, this dataset folder give what rr_dataset builds on?

`probe` and `remote` measure, `judge` is pure and says what to make of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rr_dataset import spool_place as places
from rr_dataset.description import read_format
from rr_dataset.doctor import judge, probe, remote
from rr_dataset.doctor.judge import Finding, Verdict
from rr_dataset.errors import StorageError
from rr_dataset.layout import STAGING_DIR, DatasetFormat
from rr_dataset.options import WriterOptions
from rr_dataset.storage import open_storage

__all__ = ["Finding", "doctor"]


def doctor(
    uri: str | os.PathLike[str],
    spool_dir: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[Finding, ...]:
    """Check this host for a dataset at `uri`, there or still to be made. Takes a few seconds, at a slow store half a minute.

    spool_dir: as in `WriterOptions`; None: where a writer of default options puts its spool by itself.
    storage_options: for the client of the store.

    Writes at most 65 MB, and at most an eighth of the free space, into folders of its own, or 73 MB into a remote store, removes
    them, and changes nothing else. Without a dataset the nearest folder above it is checked. A check that breaks is a finding of level
    "fail", and the others still run.

    Raises InvalidInputError for a `uri` or `storage_options` that no store takes.
    """
    clocks = probe.Clocks.now()
    storage = open_storage(uri, storage_options)
    wanted = None if spool_dir is None else os.fspath(spool_dir)
    base = _try(lambda: places.choose_base(wanted, WriterOptions.spool_bytes))
    found = _try(lambda: read_format(storage))
    skew_s = found.max_clock_skew_s if isinstance(found, DatasetFormat) else None
    findings = [
        _finding("versions", probe.versions),
        _finding("descriptors", probe.descriptors),
        _finding("shared memory", lambda: probe.shared_memory(wanted)),
        _finding("spools", lambda: judge.spools(probe.held_spools({places.SHM, _second_base(wanted)}))),
        _finding("spool place", lambda: probe.spool_place(base)),
        *([_finding("spool locks", partial(probe.spool_locks, base))] if isinstance(base, Path) else []),
    ]
    if storage.is_remote:
        return (*findings, *remote.findings(storage, found, clocks, skew_s, _finding))
    folder = nearest_folder(Path(storage.uri))
    return (*findings, *_of_folder(folder, found, clocks, skew_s))


def _of_folder(
    folder: Path, found: DatasetFormat | Exception, clocks: probe.Clocks, skew_s: float | None
) -> list[Finding]:
    findings = [
        _finding("dataset", lambda: judge.dataset(found, folder)),
        _finding("file system", lambda: judge.file_system(folder, probe.mount_of(folder), skew_s)),
        _finding("space", lambda: judge.space(folder, os.statvfs(folder))),
    ]
    try:
        with tempfile.TemporaryDirectory(prefix=probe.SCRATCH, dir=folder) as name:
            scratch = Path(name)
            findings += [
                _finding("publish", lambda: probe.publishing(scratch)),
                _finding("sync rate", lambda: probe.sync_rate(scratch)),
                _finding("list and read", lambda: probe.list_and_read(scratch)),
                _finding("clock", lambda: probe.clock(scratch, clocks, skew_s)),
            ]
        findings.append(Finding("writing", *judge.ok(f"{folder} takes files; all that were made are removed")))
    except OSError as error:
        findings.append(Finding("writing", *judge.unwritable(folder, error, exists=isinstance(found, DatasetFormat))))
    return findings


def nearest_folder(root: Path) -> Path:
    """Where a writer of the dataset at `root` stages its files, or else the nearest folder above that."""
    below = root / STAGING_DIR
    with suppress(OSError):  # a folder that may not be entered
        return next(folder for folder in (below, *below.parents) if folder.is_dir())
    return root


def _second_base(wanted: str | None) -> Path:
    return Path(wanted or tempfile.gettempdir())


def _try(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - the finding that needs it says so
        return error


def _finding(check: str, run: Callable[[], Verdict]) -> Finding:
    try:
        return Finding(check, *run())
    except StorageError as error:
        return Finding(check, *judge.fail(*remote.split(error)))
    except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
        return Finding(check, *judge.broken(error))
