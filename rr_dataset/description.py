"""`_rr/format.json` in a store: what every process of a dataset shares, written once."""

from __future__ import annotations

import re
from contextlib import suppress

from rr_dataset.errors import (
    DatasetNotFoundError,
    FormatError,
    InvalidInputError,
    ObjectNotFoundError,
    SpecMismatchError,
)
from rr_dataset.layout import FORMAT_PATH, STAGING_DIR, DatasetFormat, parse_partition
from rr_dataset.storage import Storage

# What a folder may hold and still count as empty: leftovers of a creator that died, spools of writers that were given
# this folder, and what file systems put there themselves.
_NOT_CONTENT = re.compile(r"_rr|rr_dataset-[0-9]+|lost\+found|\.nfs.*|\.snapshot")
WAYS_OUT = (  # of there being no dataset; the command line has ways of its own
    "create one with create_dataset() or `rr-dataset create`, or let open_dataset(..., wait_s=60) wait for the writer that "
    "creates it"
)
_NAMED = 3  # names that an error spells out


def read_format(storage: Storage) -> DatasetFormat:
    """What a dataset says of itself. Raises DatasetNotFoundError, FormatError or NewerFormatError."""
    try:
        return DatasetFormat.from_json(storage.read_bytes(FORMAT_PATH))
    except ObjectNotFoundError as error:
        said = f" ({error.strerror})" if storage.is_remote else ""  # which endpoint, for one
        raise DatasetNotFoundError(
            f"{storage.uri} is no dataset, it has no {FORMAT_PATH}{said}: check the address, {WAYS_OUT}"
        ) from error
    except FormatError as error:
        raise type(error)(f"{storage.uri}: {error}") from error


def ensure_format(storage: Storage, wanted: DatasetFormat, *, exist_ok: bool = True) -> DatasetFormat:
    """Write `wanted` unless there is a format, durably, and return what is there: of two creators one wins.

    Raises SpecMismatchError when what is there has any other setting, InvalidInputError when it was there and not
    `exist_ok`, or when there is no dataset and the folder holds something else.
    """
    try:
        found = _read_or_refuse(storage)
    except DatasetNotFoundError:
        staging = f"create-{wanted.uuid}"
        storage.create(FORMAT_PATH, wanted.to_json(), staging=staging)
        storage.remove_empty_dirs(f"{STAGING_DIR}/{staging}")
        found = read_format(storage)
    if found.uuid != wanted.uuid and not exist_ok:
        raise InvalidInputError(f"{storage.uri} is a dataset already: open it, or create another one elsewhere")
    mismatch = found.mismatch(wanted)
    if mismatch:
        raise SpecMismatchError(f"{storage.uri} exists with other settings ({mismatch}): use them, or another place")
    storage.sync_dirs([FORMAT_PATH.rpartition("/")[0]])  # also for a creator that died before it did
    return found


def _read_or_refuse(storage: Storage) -> DatasetFormat:
    """As `read_format`; InvalidInputError where there is no dataset and no room to make one."""
    with suppress(DatasetNotFoundError):
        return read_format(storage)
    names = [entry.name for entry in storage.list("")] + list(storage.list_dirs(""))
    others = sorted(name for name in names if not _NOT_CONTENT.fullmatch(name))
    try:
        return read_format(storage)  # another creator's, whose writers may have published what was just listed
    except DatasetNotFoundError:
        if not others:
            raise
    shown = ", ".join(map(repr, others[:_NAMED])) + (
        f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    )
    lost = any(parse_partition(name) for name in others)
    hint = f"; if it was a dataset, put its {FORMAT_PATH} back" if lost else ""
    raise InvalidInputError(
        f"{storage.uri} is no dataset and not empty, it holds {shown}: name a folder that is empty or not there yet, such as "
        f"{storage.uri}/routing{hint}"
    )
