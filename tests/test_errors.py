"""The error tree: as it is drawn, caught by the builtin a caller would expect, whole after a trip through a pipe."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re

import pytest

from rr_dataset import errors
from rr_dataset.errors import (
    DatasetNotFoundError,
    FlushTimeoutError,
    RecordNotFoundError,
    RoutingDatasetError,
    StorageError,
)

CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls)}
ERRORS = sorted((cls for cls in CLASSES.values() if issubclass(cls, RoutingDatasetError)), key=lambda cls: cls.__name__)


def drawn() -> dict[str, tuple[str, ...]]:
    """The classes of the drawing with the names of their bases: the one they hang under, then the one in brackets."""
    tree: dict[str, tuple[str, ...]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(
            r"(?P<indent>[│├└─ ]*)(?P<name>\w+(?:Error|Warning))(?: \((?P<builtin>\w+)\))?(?:  .*)?", line
        )
        if match:
            del path[len(match["indent"]) // 4 :]
            bases = (*path[-1:], *([match["builtin"]] if match["builtin"] else []))
            tree[match["name"]] = bases or ("Exception",)
            path.append(match["name"])
    return tree


def test_the_tree_is_as_it_is_drawn() -> None:
    assert {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in CLASSES.items()} == drawn()


@pytest.mark.parametrize("cls", ERRORS)
def test_errors_keep_their_message_and_pickle(cls: type[RoutingDatasetError]) -> None:
    error = cls("spool_bytes=5: expected more")
    assert str(error) == "spool_bytes=5: expected more"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert cls.__doc__


@pytest.mark.parametrize("cls", ERRORS)
def test_errors_are_caught_by_the_builtin_in_the_drawing(cls: type[RoutingDatasetError]) -> None:
    for name in drawn()[cls.__name__]:
        if hasattr(builtins, name):
            with pytest.raises(getattr(builtins, name)):
                raise cls("x")


def test_what_a_caller_would_write_works() -> None:
    with pytest.raises(FileNotFoundError):
        raise DatasetNotFoundError("no dataset at /x")
    with pytest.raises(KeyError, match=r"^no record 'a:1'$"):
        raise RecordNotFoundError("no record 'a:1'")
    with pytest.raises(TimeoutError) as caught:
        raise FlushTimeoutError("3 records wait") from StorageError("disk full")
    assert isinstance(caught.value.__cause__, OSError)
