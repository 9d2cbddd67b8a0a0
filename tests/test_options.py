"""Options: what may be set, what is refused at once, and where the environment counts."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from rr_dataset.errors import InvalidInputError
from rr_dataset.options import COMPRESSIONS, MIB, ON_FULL, WriterOptions

SECONDS = ("max_age_s", "idle_seal_s", "block_timeout_s", "drain_timeout_s", "start_timeout_s")


def test_the_defaults_are_those_that_are_documented() -> None:
    options = WriterOptions(run_id="run")
    assert {f.name: getattr(options, f.name) for f in fields(options)} == {
        "spool_bytes": 512 * MIB,
        "slab_bytes": 64 * MIB,
        "spool_dir": None,
        "max_age_s": 1.0,
        "idle_seal_s": 0.05,
        "on_full": "block",
        "block_timeout_s": 0.1,
        "spool_sync": False,
        "compression": "none",
        "run_id": "run",
        "worker_nice": 5,
        "drain_timeout_s": 20.0,
        "start_timeout_s": 30.0,
        "storage_options": None,
    }


def test_every_choice_and_every_limit_can_be_set() -> None:
    for on_full in ON_FULL:
        assert WriterOptions(on_full=on_full).on_full == on_full
    for compression in COMPRESSIONS:
        assert WriterOptions(compression=compression).compression == compression
    for nice in (0, 19):
        assert WriterOptions(worker_nice=nice).worker_nice == nice
    assert WriterOptions(run_id="é" * 128).run_id == "é" * 128
    smallest = WriterOptions(spool_bytes=2 * MIB, slab_bytes=MIB, **dict.fromkeys(SECONDS, 0))
    assert (smallest.spool_bytes, smallest.slab_bytes, smallest.max_age_s) == (2 * MIB, MIB, 0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"spool_bytes": MIB - 1}, "at least 1 MiB"),
        ({"spool_bytes": 512e6}, "a whole number"),
        ({"spool_bytes": "512"}, "a whole number"),
        ({"spool_bytes": None}, "a whole number"),
        ({"slab_bytes": 0}, "at least 1 MiB"),
        ({"slab_bytes": True}, "a whole number"),
        ({"spool_bytes": 127 * MIB}, "at least two slabs"),
        ({"spool_dir": ""}, "a directory"),
        *[({name: -0.1}, "zero or more seconds") for name in SECONDS],
        *[({name: float("nan")}, "zero or more seconds") for name in SECONDS],
        ({"max_age_s": float("inf")}, "zero or more seconds"),
        ({"max_age_s": "1"}, "zero or more seconds"),
        ({"max_age_s": None}, "zero or more seconds"),
        ({"max_age_s": True}, "zero or more seconds"),
        ({"on_full": "wait"}, "one of block, drop, raise"),
        ({"spool_sync": "no"}, "True or False"),
        ({"compression": "gzip"}, "one of none, lz4, zstd"),
        ({"compression": None}, "one of none, lz4, zstd"),
        ({"worker_nice": -1}, "0 to 19"),
        ({"worker_nice": 20}, "0 to 19"),
        ({"worker_nice": 5.5}, "0 to 19"),
        ({"run_id": ""}, "a well-formed text"),
        ({"run_id": 5}, "a well-formed text"),
        ({"run_id": "\udcff"}, "a well-formed text"),
        ({"storage_options": [("key", "x")]}, "a mapping"),
    ],
)
def test_a_refusal_names_the_option_the_value_and_what_is_expected(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        WriterOptions(**change)
    ((name, value),) = change.items()
    assert str(caught.value).startswith(f"{name}=")
    assert expected in str(caught.value)
    assert name == "storage_options" or repr(value) in str(caught.value)


def test_a_run_that_is_too_long_is_named_by_its_beginning() -> None:
    with pytest.raises(InvalidInputError) as caught:
        WriterOptions(run_id="é" * 2500)
    assert str(caught.value) == f"run_id='{'é' * 32}...': expected at most 256 bytes of UTF-8, not 5000"
    with pytest.raises(InvalidInputError, match="not 258"):
        WriterOptions(run_id="é" * 129)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="spool_size"):
        WriterOptions(spool_size=MIB)  # the mistake under test


def test_a_path_is_as_good_as_its_text(tmp_path: Path) -> None:
    assert WriterOptions(spool_dir=tmp_path).spool_dir == str(tmp_path)  # a kindness at run time


def test_the_run_comes_from_the_environment_when_a_writer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RR_RUN_ID", "job-7")
    assert WriterOptions().run_id == "job-7"
    assert WriterOptions(run_id="mine").run_id == "mine"
    monkeypatch.setenv("RR_RUN_ID", "job-8")
    assert WriterOptions().run_id == "job-8"


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_run_in_the_environment_each_writer_has_its_own(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("RR_RUN_ID", raising=False)
    if value is not None:
        monkeypatch.setenv("RR_RUN_ID", value)
    runs = {WriterOptions().run_id for _ in range(3)}
    assert len(runs) == 3
    assert {str(UUID(run)) for run in runs} == runs


def test_secrets_of_the_store_are_not_printed() -> None:
    assert "hunter2" not in repr(WriterOptions(storage_options={"secret": "hunter2"}))
    with pytest.raises(InvalidInputError) as caught:
        WriterOptions(storage_options="hunter2")  # the mistake under test
    assert "hunter2" not in str(caught.value)


def test_options_are_frozen_and_pickle() -> None:
    options = WriterOptions(storage_options={"a": 1})
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(FrozenInstanceError):
        options.on_full = "drop"  # the mistake under test
