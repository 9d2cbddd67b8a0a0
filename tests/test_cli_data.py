"""The commands that check, count and carry data: what they print, write and exit with."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from damaged import damage, payload_byte
from stored import Stored

from cli.main import main


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "routing")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        code = ended.value.code
        return code if isinstance(code, int) else 0, *capfd.readouterr()

    return run


# --- verify


def test_verify_of_a_sound_dataset(run: Any, stored: Stored) -> None:
    stored.put("a:0:0:0")
    stored.put("b:0:0:0", missing=((1, 2),))
    code, out, err = run("verify", stored.root)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("note: incomplete: data_id=b: b:0:0:0 (")
    assert out.splitlines()[1].endswith(": sound")


def test_verify_names_what_is_wrong(run: Any, stored: Stored) -> None:
    path = stored.shard(stored.row("\x1b[31mred:0:0:0"))
    damage(path, payload_byte)
    code, out, _ = run("verify", stored.root)
    assert code == 3
    assert out.startswith(f"error: checksum: {path.relative_to(stored.root)}: \\x1b[31mred:0:0:0 (")
    assert out.splitlines()[-1].endswith(": 1 problems")


def test_verify_repairs_and_says_where_files_went(run: Any, stored: Stored) -> None:
    stored.put("b:0:0:0")
    damage(stored.shard(stored.row("a:0:0:0")), payload_byte)
    assert run("verify", stored.root, "--prefix", "b", "--repair")[0] == 0
    code, out, _ = run("verify", stored.root, "--repair", "--json")
    report = json.loads(out)
    assert (code, report["sound"], report["rows"]) == (3, False, 2)
    (problem,) = report["problems"]
    assert (problem["level"], problem["kind"], problem["request_id"]) == ("error", "checksum", "a:0:0:0")
    assert (stored.root / problem["moved_to"]).exists()
    assert run("verify", stored.root)[0] == 0


def test_verify_draws_a_bar_on_a_terminal_only(stored: Stored) -> None:
    stored.put("a:0:0:0")
    command = [sys.executable, "-c", "from cli.main import main; main()", "verify", str(stored.root)]
    root = Path(__file__).parents[1]
    assert subprocess.run(command, cwd=root, capture_output=True, check=True).stderr == b""
    controller, terminal = pty.openpty()
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=terminal, check=True)
    os.close(terminal)
    drawn = os.read(controller, 1 << 16).decode()
    os.close(controller)
    assert "verify" in drawn
    assert done.stdout.decode().endswith("sound\n")
