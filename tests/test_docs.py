"""What the README says is so: its programs run, its commands work; the list of commands is that of the program.

python tests/test_docs.py     writes cli/COMMANDS.md
"""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from cli.main import app, main  # noqa: E402  # found by pytest's pythonpath, or by the line above

README = ROOT / "README.md"
COMMANDS = ROOT / "cli" / "COMMANDS.md"
# What writes into a home directory; what has tests of its own and depends on the host, or on a demo.
NOT_RUN = ("--install-completion", "demo-dataset", "rr-dataset demo", "rr-dataset doctor")


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """The arguments of each `rr-dataset` line."""
    lines = re.findall(r"^    rr-dataset (.*)$", README.read_text(), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def _argument(parameter: Any) -> str:
    return parameter.metavar if parameter.required else f"[{parameter.metavar}]"


def listing() -> str:
    """Each command with its arguments and options: the text of COMMANDS.md."""

    def parameters(command: Any) -> Iterator[tuple[str, str]]:
        for p in command.params:
            if p.name == "help":
                continue
            text = p.help or ""
            if isinstance(p.show_default, str):
                text += f" [{p.show_default}]"
            elif p.default is not None and not isinstance(p.default, bool) and p.show_default and not p.required:
                text += f" [{getattr(p.default, 'value', p.default)}]"
            if p.param_type_name == "argument":
                yield _argument(p), text
            else:
                yield " / ".join(["/".join(p.opts), *p.secondary_opts]) + (f" {p.metavar}" if p.metavar else ""), text

    out = []
    for name, command in typer.main.get_command(app).commands.items():
        arguments = " ".join(_argument(p) for p in command.params if p.param_type_name == "argument")
        out.append(f"rr-dataset {name} {arguments} [OPTIONS]")
        out.append(f"    {command.help.splitlines()[0]}")
        out += [f"    {names:<35} {text}" for names, text in parameters(command)]
        out.append("")
    return "# The commands\n\n```text\n" + "\n".join(out).rstrip() + "\n```\n"


def test_the_list_of_commands_is_that_of_the_program() -> None:
    assert COMMANDS.read_text() == listing(), "run: python tests/test_docs.py"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the examples leave behind, run in order in a folder of their own, which is where one is."""
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        for block in blocks("python"):
            exec(compile(block, "<README>", "exec"), names)
        yield names


def test_the_examples_run_in_order(names: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert names["record"].status == "complete"
    assert names["batch"][0].routed_experts.shape == (15, 256, 8)
    by_loop = Counter((layer, int(expert)) for layer in (3, 4) for expert in names["record"].layer(layer).ravel())
    assert {(layer, expert): chosen for layer, expert, chosen in names["load"]} == by_loop
    dead = {layer: 256 - len(np.unique(names["record"].layer(layer))) for layer in range(3, 61)}
    assert {layer: count for layer, version, _, count in names["balance"] if version == "step-120"} == dead
    assert names["sizes"] == [("math_17_epoch_0", "complete", 1, 512)]
    assert names["tokens"] == 512
    assert (len(names["news"]), names["later"], names["known"][1]) == (1, [], None)
    assert names["very_put"].routed_experts.shape == (58, 512, 8)
    assert names["view"].layers == tuple(range(16, 31))
    assert names["kinds"] == [3, 1, 254]
    assert "math_17_epoch_0:2:0:0" in names["seen"]
    captured = names["capture"].stats()
    assert (captured.records, captured.rows, captured.faults) == (1, 20, {})
    ran = 0
    for arguments in commands():
        if any(word in shlex.join(["rr-dataset", *arguments]) for word in NOT_RUN):
            continue
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capfd.readouterr()
        assert (ended.value.code, err) == (0, ""), arguments
        assert out
        ran += 1
    assert ran >= 4
    assert Path("record.npz").exists()


def test_comments_in_the_examples_say_what_comes_out(names: dict[str, Any]) -> None:
    checked = 0
    for line in "".join(blocks("python")[:-1]).splitlines():  # the last one is of other libraries
        said = re.fullmatch(
            r"(?P<code>\S.*?)  # (?P<value>[(\"].*?|(?P<dtype>\w+) (?P<shape>\[[0-9, ]+\]))(?:;.*|: .*)?", line
        )
        if said is None:
            continue
        value = eval(said["code"], names)
        if said["shape"]:
            assert (value.dtype.name, list(value.shape)) == (said["dtype"], eval(said["shape"])), line
        else:
            assert value == eval(said["value"]), line
        checked += 1
    assert checked == 8


@pytest.mark.parametrize("text", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere(text: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", text.read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_make_targets_exist() -> None:
    made = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert (
        set(
            re.findall(
                r"\bmake ([a-z]+)\b(?! it)", " ".join(re.findall(r"`[^`]+`|^    .*$", README.read_text(), re.MULTILINE))
            )
        )
        <= made
    )


def test_modules_named_in_readme_exist() -> None:
    for name in re.findall(r"`(\w+(?:\.py|/))`", README.read_text()):
        assert (ROOT / "rr_dataset" / name).exists(), name


if __name__ == "__main__":
    COMMANDS.write_text(listing())
