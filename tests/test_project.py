from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_shipped() -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "rr_dataset").rglob("__init__.py")}
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    packages = {".".join(folder.parts) for folder in folders} | set(mapped)
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(packages)
    assert all((ROOT / folder / "__init__.py").exists() for folder in mapped.values())


def test_package_data_is_there() -> None:
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = ROOT / mapped.get(package, package.replace(".", "/"))
        for pattern in patterns:
            assert list(folder.glob(pattern)), f"{package}: {pattern}"


def test_every_ignored_rule_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    ignored = re.search(r"^ignore = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert ignored
    assert [line for line in ignored[1].splitlines() if "#" not in line] == []


def test_the_command_leads_to_a_function() -> None:
    module, _, name = PROJECT["project"]["scripts"]["rr-dataset"].partition(":")
    source = (ROOT / f"{module.removeprefix('rr_dataset.').replace('.', '/')}.py").read_text()
    assert f"\ndef {name}(" in source
