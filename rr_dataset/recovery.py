"""Dead spools: what their writers committed is published, by the next writer of the dataset or by `recover`.

A spool is dead when its lock is free. Only spools of the same user are touched, and nothing is given up that is not
durable: what cannot be published, and what no writer made, stays where it is and is named.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rr_dataset.clock import wall_ms
from rr_dataset.description import read_format
from rr_dataset.errors import CorruptSpoolError, InvalidInputError, NotFoundError, RoutingDatasetError
from rr_dataset.layout import FORMAT_PATH
from rr_dataset.publish import last_publish_ms
from rr_dataset.publisher import UNPUBLISHED, Published, Publisher, open_slab, slabs_in
from rr_dataset.slab import ASIDE, DELETE, read_identity, read_state
from rr_dataset.spool_place import remove_directory, sort_out
from rr_dataset.storage import open_storage

RECOVERED, LEFT, LIVING = "recovered", "left", "living"
ABANDONED_S = 60.0  # a directory without a slab for so long is not being made any more
NAMED_FILES = 5  # of what no writer made

_WRITER = re.compile(r"\.?[0-9a-f]{16}")
_USER = re.compile(r"rr_dataset-([0-9]+)")

PublisherOf = Callable[[Mapping[str, Any]], Publisher]  # by a spool's identity; raises when it is not to be published


@dataclass(frozen=True)
class SpoolReport:
    """What became of one spool, or of all spools of another user."""

    path: str
    outcome: str  # recovered: all of it is durable; left: something of it stays; living: its own processes mind it
    dataset: str | None  # uuid; None when it holds nothing, or cannot be read
    uri: str | None  # of its dataset
    records: int  # made durable, or to be made durable by a dry run
    bytes: int  # of their shards, or payloads in a dry run
    torn: int  # entries that no put had finished, dropped
    reason: str  # why something is left, and the way out


def recover(
    spool_dir: str | os.PathLike[str],
    *,
    force: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    uri: str | None = None,
    dry_run: bool = False,
) -> list[SpoolReport]:
    """Publish what dead spools hold, and remove those of which nothing is left. Idempotent; safe beside living writers.

    spool_dir: where writers put their spools (such as /dev/shm), a user's folder in it, or one spool.
    force: publish also slabs that were set aside by age; that may revive ids deleted meanwhile.
    storage_options: for the store of the dataset. uri: where the dataset is now, instead of the address in the spool;
        spools of other datasets are then left.
    dry_run: change nothing and say what would be.

    Living spools, those of other users, what cannot be published and files that no writer made are left and named.
    Raises NotFoundError when there is no such folder, InvalidInputError when it cannot be read, or is a dataset and
    no place of spools.
    """
    opened: dict[str, Publisher] = {}

    def publisher_of(identity: Mapping[str, Any]) -> Publisher:
        address = uri or identity["uri"]
        if address not in opened:
            storage = open_storage(address, storage_options or {})
            opened[address] = Publisher(storage, read_format(storage), "none")
        return opened[address]

    try:
        place = Path(spool_dir).absolute()
    except TypeError:
        raise InvalidInputError(f"spool_dir={spool_dir!r}: expected a folder") from None
    try:
        found = list(_recover(place, publisher_of, force=force, dry_run=dry_run))
    finally:
        for publisher in opened.values():
            publisher.close()
    return [report for report in found if report is not None]


def adopt(folder: Path, publisher: Publisher) -> Iterator[SpoolReport | None]:
    """Recover the dead spools of a user's folder that belong to the publisher's dataset; None after each slab."""
    yield from _recover_folder(folder, lambda _: publisher, force=False, dry_run=False)


def _recover(place: Path, publisher_of: PublisherOf, *, force: bool, dry_run: bool) -> Iterator[SpoolReport | None]:
    if not place.is_dir():
        raise NotFoundError(f"{place} is no folder: give the spool_dir of the writers, or the path of one spool")
    named = _WRITER.fullmatch(place.name) or _USER.fullmatch(place.name)
    try:
        paths = [place] if named else _folders_in(place, _USER)
    except OSError as error:
        raise InvalidInputError(f"{place}: {error.strerror}; give a spool_dir that you can read") from error
    if not paths and (place / FORMAT_PATH).is_file():
        raise InvalidInputError(
            f"{place} is a dataset, and SPOOL_DIR is where its writers keep records that are not yet in it: give their "
            "spool_dir=, which is /dev/shm unless they were told otherwise"
        )
    for path in paths:
        try:
            owner = path.lstat().st_uid
        except FileNotFoundError:  # its user's last writer has just closed
            continue
        if path.is_symlink():
            yield _report(path, LEFT, None, reason="is a symbolic link: recover what it leads to")
        elif owner != os.getuid():
            yield _report(path, LEFT, None, reason=f"belongs to user {owner}, who must recover it")
        elif _WRITER.fullmatch(path.name):
            yield from recover_spool(path, publisher_of, force=force, dry_run=dry_run)
        else:
            yield from _recover_folder(path, publisher_of, force=force, dry_run=dry_run)


def _recover_folder(
    folder: Path, publisher_of: PublisherOf, *, force: bool, dry_run: bool
) -> Iterator[SpoolReport | None]:
    try:
        spools = _folders_in(folder, _WRITER)
    except OSError as error:
        yield _report(folder, LEFT, None, reason=_text(error))
        return
    for directory in spools:
        yield from recover_spool(directory, publisher_of, force=force, dry_run=dry_run)


def _folders_in(folder: Path, names: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if names.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return []


def recover_spool(
    directory: Path, publisher_of: PublisherOf, *, force: bool, dry_run: bool
) -> Iterator[SpoolReport | None]:
    """Publish one spool if it is dead; None after each slab, its report last, unless it is gone or being made."""
    try:
        if directory.is_symlink():
            yield _report(directory, LEFT, None, reason="is a symbolic link, which no writer makes: delete it")
            return
        if directory.name.startswith(".") and _is_young(directory):
            return
        with _lock_of(directory) as dead:
            if dead is False:
                yield _report(
                    directory, LIVING, None, reason="its engine or its worker lives, or somebody recovers it just now"
                )
            else:
                yield from _empty(directory, dead is None, publisher_of, force=force, dry_run=dry_run)
    except Exception as error:  # noqa: BLE001 - rubbish of whatever kind keeps nobody from recovering the rest
        if _is_gone(directory):  # its own worker, or another who recovers, was faster
            return
        identity = None
        with suppress(Exception):
            identity = _identity(directory, sort_out(directory)[0])
        yield _report(directory, LEFT, identity, reason=_text(error))


def _empty(
    directory: Path, unlocked: bool, publisher_of: PublisherOf, *, force: bool, dry_run: bool
) -> Iterator[SpoolReport | None]:
    """`recover_spool` for one that nobody else has; its own slabs are looked at, all of them, before any is changed."""
    ours, foreign = sort_out(directory)
    identity = _identity(directory, ours)
    reasons = [_not_ours(foreign)] if foreign else []
    if not any(name.endswith(".slab") for name in ours):
        if unlocked and _is_young(directory):
            return
        if not dry_run:
            remove_directory(directory)
        if reasons:
            yield _report(directory, LEFT, None, reason=reasons[0])
        return
    if unlocked:
        raise CorruptSpoolError("it has slabs but no lock, so nobody can tell whether its writer lives")
    slabs = [slab for slab in slabs_in(directory, (*UNPUBLISHED, ASIDE)) if slab.name in ours]
    done, failures = [], list[str]()
    if slabs and identity is not None:
        publisher = publisher_of(identity)
        if identity["dataset"] != publisher.dataset.uuid:
            raise CorruptSpoolError(
                f"it belongs to another dataset, {identity['dataset']} at {identity['uri']}; the one given or now there "
                f"is {publisher.dataset.uuid}. If the first has moved, `rr-dataset recover {directory} --uri` its new "
                "place publishes it; if it is gone for good, delete this folder"
            )
        for slab in slabs:
            try:
                done.append(_publish(slab, publisher, force=force, dry_run=dry_run))
            except Exception as error:  # noqa: BLE001 - the other slabs may do better
                if not _is_gone(slab):
                    failures.append(_text(error))
            yield None
    aside = sum(each.set_aside for each in done)
    if aside:
        failures.append(
            f"{aside} slabs are older than the dataset's tombstones live, so deletes of their ids may be forgotten; "
            "`rr-dataset recover --force` publishes them and may revive deleted ids"
        )
    if not failures and not dry_run:
        remove_directory(directory)
    reasons = failures + reasons
    yield _report(directory, LEFT if reasons else RECOVERED, identity, done, "; ".join(reasons))


def _report(
    path: Path, outcome: str, identity: Mapping[str, Any] | None, done: Sequence[Published] = (), reason: str = ""
) -> SpoolReport:
    return SpoolReport(
        path=str(path),
        outcome=outcome,
        dataset=None if identity is None else identity["dataset"],
        uri=None if identity is None else identity["uri"],
        records=sum(each.records for each in done),
        bytes=sum(each.bytes for each in done),
        torn=sum(each.torn for each in done),
        reason=reason,
    )


def _publish(slab: Path, publisher: Publisher, *, force: bool, dry_run: bool) -> Published:
    if not force and read_state(slab)[1] == ASIDE:
        return Published(0, 0, 0, set_aside=True)
    if not dry_run:
        return publisher.publish(slab, force=force)
    with open_slab(slab) as contents:
        entries = [entry for entry in contents.entries if entry.kind != DELETE]
        oldest = min((entry.t_submit for entry in entries), default=None)
        if not force and oldest is not None and wall_ms() > last_publish_ms(publisher.dataset, oldest):
            return Published(0, 0, contents.torn, set_aside=True)
        return Published(len(entries), sum(entry.payload.nbytes for entry in entries), contents.torn, set_aside=False)


def _identity(directory: Path, names: Sequence[str]) -> Mapping[str, Any] | None:
    """What the slabs say of their writer; None if none was ever used. Raises CorruptSpoolError if a file is no slab."""
    identity = None
    for path in (directory / name for name in names if name.endswith(".slab")):
        _, state = read_state(path)
        if state > ASIDE:
            raise CorruptSpoolError(f"{path}: the header is damaged, it says state {state}")
        identity = read_identity(path) or identity
    return identity


def _not_ours(foreign: Sequence[str]) -> str:
    more = f" and {len(foreign) - NAMED_FILES} more" if len(foreign) > NAMED_FILES else ""
    named = ", ".join(foreign[:NAMED_FILES])
    return f"no writer made what else lies in it, {named}{more}: move that away and recover again to remove the rest"


def _is_young(directory: Path) -> bool:
    return time.time() - directory.stat().st_mtime < ABANDONED_S


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, RoutingDatasetError) else f"{type(error).__name__}: {error}"


@contextmanager
def _lock_of(directory: Path) -> Iterator[bool | None]:
    """True: its processes are dead, and it is locked meanwhile. False: they live. None: it has no lock."""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)
