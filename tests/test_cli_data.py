"""The commands that check, count and carry data: what they print, write and exit with."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged import damage, payload_byte
from stored import Stored

import rr_dataset as rr
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


def test_verify_draws_a_bar_on_a_terminal(stored: Stored) -> None:
    stored.put("a:0:0:0")
    command = [sys.executable, "-c", "from cli.main import main; main()", "verify", str(stored.root)]
    root = Path(__file__).parents[1]
    controller, terminal = pty.openpty()
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, stderr=terminal, check=True)
    os.close(terminal)
    drawn = os.read(controller, 1 << 16).decode()
    os.close(controller)
    assert "verify" in drawn
    assert done.stdout.decode().endswith("sound\n")


# --- import, export, copy


def test_import_tells_what_it_refused(run: Any, tmp_path: Path) -> None:
    rr.create_dataset(tmp_path / "d", rr.RoutingSpec((2, 3, 4), num_experts=100, top_k=2))
    with zipfile.ZipFile(Path(__file__).parent / "data" / "fastdeploy_store.zip") as archive:
        archive.extractall(tmp_path / "store")
    code, out, err = run("import", tmp_path / "d", tmp_path / "store", "--weight-version", "7", "--run", "old")
    assert (code, err) == (0, "")
    assert out == "imported 6 records, 47 tokens; 0 were there, 0 refused\n"
    head = rr.open_dataset(tmp_path / "d").heads(["gap:0:0:0"])[0]
    assert (head.run_id, head.weights[0][2]) == ("old", "7")
    for i in range(30):
        (tmp_path / "store" / f"note-{i:02}").touch()
    code, out, _ = run("import", tmp_path / "d", tmp_path / "store")
    assert code == 3
    assert out.splitlines()[0] == "refused: ./note-00: no .pdtensor file"
    assert out.splitlines()[-2:] == [
        "... 10 more are refused: see --json",
        "imported 0 records, 0 tokens; 6 were there, 30 refused",
    ]
    code, out, _ = run("import", tmp_path / "d", tmp_path / "store", "--json")
    assert (code, len(json.loads(out)["refused"])) == (3, 30)
    assert run("import", tmp_path / "d", tmp_path / "none")[0] == 1


def test_import_takes_no_option_that_it_would_pass_over(run: Any, tmp_path: Path) -> None:
    for option in (["--keys", "uuid"], ["--hidden-layers", "4"], ["--id-field", "rid"]):
        code, _, err = run("import", tmp_path / "d", tmp_path / "store", *option)
        assert code == 2
        assert option[0] in err


def test_export(run: Any, stored: Stored, tmp_path: Path) -> None:
    stored.put("a:0:0:0")
    stored.put("b:0:0:0")
    code, out, _ = run("export", stored.root, tmp_path / "npz", "--format", "npz", "--prefix", "a", "--layers", "3-4")
    assert (code, out.startswith("wrote 1 files, "), out.endswith("npz: 1 records\n")) == (0, True, True)
    with np.load(tmp_path / "npz" / "data_id=a" / "a%3A0%3A0%3A0.npz") as arrays:
        assert arrays["layers"].tolist() == [3, 4]
    code, out, _ = run("export", stored.root, tmp_path / "p", "--long", "--json")
    assert (code, json.loads(out)["files"]) == (0, 2)
    assert [path.name for path in (tmp_path / "p").rglob("*.parquet")] == ["long.parquet", "long.parquet"]
    code, out, err = run("export", stored.root, tmp_path / "p", "--counts")
    assert (code, out, "name a folder that is empty" in err) == (1, "", True)
    assert run("export", stored.root, tmp_path / "c", "--counts")[0] == 0
    assert [path.name for path in (tmp_path / "c").rglob("*.*")] == ["counts.parquet"]
    assert run("export", stored.root, tmp_path / "q", "--counts", "--long")[0] == 2
    assert run("export", stored.root, tmp_path / "q", "--counts", "--format", "npz")[0] == 2


def test_copy(run: Any, stored: Stored, tmp_path: Path) -> None:
    for request_id in ("a:0:0:0", "a:1:0:0", "b\x85:0:0:0"):
        stored.put(request_id)
    code, out, _ = run("copy", stored.root, tmp_path / "copy", "--prefix", "a")
    assert (code, out.startswith("copied 2 records, 2 rows, ")) == (0, True)
    (tmp_path / "ids").write_bytes("b\x85:0:0:0\r\n\na:0:0:0\n".encode())
    code, out, _ = run("copy", stored.root, tmp_path / "copy", "--ids-file", tmp_path / "ids", "--json")
    report = json.loads(out)
    assert (code, report["records"], report["existing"]) == (0, 1, 1)
    assert run("copy", stored.root, stored.root)[0] == 1


# --- stats


def test_stats(run: Any, tmp_path: Path) -> None:
    stored = Stored(tmp_path / "routing", rr.RoutingSpec((1, 2), num_experts=12, top_k=2))
    for request_id, experts in (("a:0:0:0", [[0, 1], [0, 3]]), ("b:0:0:0", [[0, 2], [0, 2]])):
        data = stored.row(request_id, 2)
        assert data.routed_experts is not None
        data.routed_experts[:] = np.array([experts, experts])
        stored.shard(data)
    code, out, err = run("stats", stored.root, "--layers", "2")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split() == [
        "2",
        "4",
        "6.00",
        "0",
        "(4)",
        "8:",
        "4,",
        "5,",
        "6,",
        "7,",
        "8,",
        "9,",
        "10,",
        "11",
    ]
    code, out, _ = run("stats", stored.root, "--prefix", "a", "--json")
    first, second = json.loads(out)
    assert (first["layer"], first["counts"][:4], first["dead"][:2]) == (1, [2, 1, 0, 1], [2, 4])
    assert (second["tokens"], second["max_over_mean"]) == (2, 6.0)


def test_stats_draws_a_picture(run: Any, stored: Stored, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stored.put("a:0:0:0")
    code, out, _ = run("stats", stored.root, "--plot", tmp_path / "load.png")
    assert (code, out.endswith("load.png\n")) == (0, True)
    assert (tmp_path / "load.png").read_bytes()[:4] == b"\x89PNG"


def test_a_missing_plot_package_is_told_first(run: Any, stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run("stats", stored.root, "--plot", "x.png")
    assert (code, out) == (1, "")
    assert "pip install 'rr-dataset[plot]'" in err
