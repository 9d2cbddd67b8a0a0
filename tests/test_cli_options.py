"""The texts of options into values, and values into texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from cli import output
from cli.options import parse_duration, parse_layers, parse_tokens, read_ids
from rr_dataset.record import shown_layers


@pytest.mark.parametrize(("text", "layers"), [("3", [3]), ("0,2-4", [0, 2, 3, 4]), ("1-1, 7", [1, 7])])
def test_parse_layers(text: str, layers: list[int]) -> None:
    assert parse_layers(text) == layers
    assert parse_layers(shown_layers(layers)) == layers


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("0:8", slice(0, 8)),
        (":8", slice(None, 8)),
        ("8:", slice(8, None)),
        (":", slice(None)),
        ("-8:", slice(-8, None)),
        ("2:-8", slice(2, -8)),
        ("-8:-2", slice(-8, -2)),
        ("4:4", slice(4, 4)),
    ],
)
def test_parse_tokens(text: str, tokens: slice) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (2.5e15, "2500.0 TB")]
)
def test_shown_bytes(size: float, text: str) -> None:
    assert output.shown_bytes(size) == text


@pytest.mark.parametrize("text", ["0s", "0.5s", "90s", "30m", "36h", "7d"])
def test_durations_read_back(text: str) -> None:
    assert output.shown_duration(parse_duration(text)) == text


def test_ids_of_a_file_are_split_at_newlines_alone(tmp_path: Path) -> None:
    path = tmp_path / "ids"
    path.write_bytes("a:1\r\n\n\r\na\x0bb\x85\u2028:2\na\rb:3\r\r\n ü:4".encode())
    assert read_ids(path) == ["a:1", "a\x0bb\x85\u2028:2", "a\rb:3\r", " ü:4"]
    path.write_bytes(b"a:1\n\xff\n")
    with pytest.raises(typer.BadParameter, match="no UTF-8"):
        read_ids(path)
