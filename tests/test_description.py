"""`_rr/format.json` is written once, whole and durably."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from stored import SPEC

import rr_dataset as rr
from rr_dataset.description import ensure_format, read_format
from rr_dataset.layout import FORMAT_PATH, DatasetFormat
from rr_dataset.storage import Storage, open_storage

UUIDS = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002")
FIRST, SECOND = (DatasetFormat(uuid, SPEC, rr.KeyScheme.fastdeploy()) for uuid in UUIDS)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path)


def test_the_first_one_stays(storage: Storage) -> None:
    assert ensure_format(storage, FIRST) == FIRST
    assert ensure_format(storage, SECOND) == FIRST
    assert read_format(storage) == FIRST


def test_a_rival_that_comes_between_is_compared(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    create = type(storage).create

    def rival(self: Storage, path: str, data: Any, *, staging: str) -> bool:
        create(self, path, DatasetFormat(UUIDS[1], SPEC, rr.KeyScheme.by_step()).to_json(), staging="rival")
        return create(self, path, data, staging=staging)

    monkeypatch.setattr(type(storage), "create", rival)
    with pytest.raises(rr.SpecMismatchError, match="keys.components"):
        ensure_format(storage, FIRST)


@pytest.mark.parametrize("existed", [False, True])
def test_the_name_is_durable_for_everyone_who_goes_on(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    if existed:
        ensure_format(storage, SECOND)
    synced: list[tuple[list[str], bool]] = []
    exists = (Path(storage.uri) / FORMAT_PATH).exists
    monkeypatch.setattr(type(storage), "sync_dirs", lambda self, paths: synced.append((list(paths), exists())))
    ensure_format(storage, FIRST)
    assert synced == [(["_rr"], True)]


def test_not_exist_ok(storage: Storage) -> None:
    assert ensure_format(storage, FIRST, exist_ok=False) == FIRST
    with pytest.raises(rr.InvalidInputError, match="is a dataset already"):
        ensure_format(storage, SECOND, exist_ok=False)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["notes.txt"], "it holds 'notes.txt': name a folder"),
        (["src/", ".git/"], "it holds '.git', 'src': name"),
        (["a", "b", "c", "d/", "e"], "it holds 'a', 'b', 'c' and 2 more: name"),
        (["data_id=math/"], "routing; if it was a dataset, put its _rr/format.json back"),
        (["_rr/", "_rr.txt"], "it holds '_rr.txt': name"),
    ],
)
def test_a_folder_with_something_else_is_refused(storage: Storage, tmp_path: Path, names: list[str], says: str) -> None:
    for name in names:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(rr.InvalidInputError, match=re.escape(says)):
        ensure_format(storage, FIRST)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(name.rstrip("/") for name in names)


def test_leftovers_and_what_file_systems_make_count_as_empty(storage: Storage, tmp_path: Path) -> None:
    for name in (f"_rr/tmp/create-{UUIDS[1]}", "lost+found", ".snapshot", "rr_dataset-0/00000000000000ab"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / ".nfs000000000000abcd").touch()
    (tmp_path / f"_rr/tmp/create-{UUIDS[1]}" / "0123456789abcdef").write_bytes(b"half a for")
    assert ensure_format(storage, FIRST) == FIRST


def test_a_rival_that_has_also_published_is_no_stranger(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = type(storage).list_dirs

    def rival(self: Storage, path: str) -> Any:
        monkeypatch.setattr(type(storage), "list_dirs", listed)
        ensure_format(self, SECOND)
        self.create("data_id=a/1.arrow", b"x", staging="rival")
        return listed(self, path)

    monkeypatch.setattr(type(storage), "list_dirs", rival)
    assert ensure_format(storage, FIRST) == SECOND


def test_reading_none_says_the_way_out(storage: Storage) -> None:
    with pytest.raises(rr.DatasetNotFoundError, match=r"rr-dataset create") as caught:
        read_format(storage)
    assert isinstance(caught.value, FileNotFoundError)


def test_reading_rubbish_names_the_place(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "_rr").mkdir()
    (tmp_path / FORMAT_PATH).write_bytes(b"{}")
    with pytest.raises(rr.FormatError, match=str(tmp_path)):
        read_format(storage)
