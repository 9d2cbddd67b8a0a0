from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strategies import routing

import rr_dataset as rr
from cli import output
from cli.main import main
from rr_dataset.clock import pack
from rr_dataset.publish import publish_slab
from rr_dataset.record import Row, RowData
from rr_dataset.storage import open_storage
from rr_dataset.tombstones import TombstoneCache

SPEC = rr.RoutingSpec(moe_layers=(1, 2, 3, 5), num_experts=300, top_k=4)
WRITER = "00000000000000ab"
MADE_MS = 1_700_000_000_000
ESCAPE = "\x1b[31mred"


@dataclass
class Ended:
    """A command that ran: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Any:
    def run(*args: object) -> Ended:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        code = ended.value.code
        out, err = capfd.readouterr()
        return Ended(code if isinstance(code, int) else 0, out, err)

    return run


def row(uri: str, request_id: str, t: int, num_tokens: int, **changes: Any) -> Row:
    key = rr.open_dataset(uri).keys.parse(request_id)
    stamp = pack(MADE_MS + t)
    values = {
        "record_id": f"{stamp:016x}-{WRITER}",
        "request_id": request_id,
        "components": key.components,
        "choice": key.choice,
        "t_submit": stamp,
        "token_start": 0,
        "num_tokens": num_tokens,
        "part": False,
        "status": "complete",
        "run_id": "run-7",
        "layers": SPEC.moe_layers,
    }
    return Row(**{**values, **changes})


IDS = [f"{ESCAPE}:0", "math_1:0:0:0", "math_1:1:0:0", "math_10:0:0:0"]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four records of five rows, one of them with everything that a record may say, and a dropped one."""
    uri = str(tmp_path_factory.mktemp("cli") / "routing")
    rr.create_dataset(uri, SPEC)
    full = row(
        uri, "math_1:0:0:0", 1, 40, missing=((3, 5),), weight_version="v1", tags={"mood": "[bold]good"},
        has_token_ids=True, has_logprobs=True,
    )  # fmt: skip
    logprobs = np.linspace(-2, 0, 40, dtype=np.float32)
    logprobs[:8] = np.nan
    experts = routing(SPEC, 4, 40, seed=1)
    experts[:, 3:5] = 0
    rows = [
        RowData(full, experts, np.arange(100, 140, dtype=np.int32), logprobs),
        RowData(row(uri, "math_1:1:0:0", 2, 3), routing(SPEC, 4, 3, seed=2)),
        RowData(row(uri, "math_10:0:0:0", 3, 3, part=True, status="partial"), routing(SPEC, 4, 3, seed=3)),
        RowData(row(uri, f"{ESCAPE}:0", 4, 2), routing(SPEC, 4, 2, seed=4)),
        RowData(row(uri, "gone:0:0:0", 5, 9, layers=(), status="dropped", reason="spool_full")),
    ]
    fmt = rr.open_dataset(uri).format
    with ThreadPoolExecutor(2) as pool:
        publish_slab(
            open_storage(uri), fmt, writer=WRITER, seq=1, rows=rows, cache=TombstoneCache(fmt.keys), pool=pool,
            now_ms=lambda: MADE_MS,
        )  # fmt: skip
    return uri


# --- create and info


def test_create_says_what_it_made(run: Any, tmp_path: Path) -> None:
    made = run("create", tmp_path / "a", "--layers", "3-60", "--experts", 256, "--top-k", 8)
    assert made.code == 0
    assert "layers 3-60; 256 experts, top-8, uint8" in made.out
    spec = rr.open_dataset(tmp_path / "a").spec
    assert spec == rr.RoutingSpec(moe_layers=tuple(range(3, 61)), num_experts=256, top_k=8)


def test_create_again_is_the_same_dataset_and_another_spec_is_refused(run: Any, tmp_path: Path) -> None:
    create = ("create", tmp_path / "a", "--layers", "0,2", "--experts", 8, "--json")
    first = run(*create, "--top-k", 2).json
    assert run(*create, "--top-k", 2).json == first
    assert run(*create[:-1], "--top-k", 2).out.startswith("exists already, with these settings\ndataset ")
    refused = run(*create, "--top-k", 4)
    assert (refused.code, refused.out) == (1, "")
    assert "top_k" in refused.err
    assert run(*create, "--top-k", 2, "--no-exist-ok").code == 1


def test_create_from_a_models_config(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"num_hidden_layers": 4, "num_experts": 64, "num_experts_per_tok": 8, "decoder_sparse_step": 2})
    )
    assert run("create", tmp_path / "a", "--config", config, "--json").json["format"]["spec"]["moe_layers"] == [1, 3]
    assert run("create", tmp_path / "b", "--config", config, "--top-k", 4).code == 2
    config.write_text("{")
    assert run("create", tmp_path / "b", "--config", config).code == 2
    config.write_text("{}")
    refused = run("create", tmp_path / "b", "--config", config)
    assert refused.code == 1
    assert f"error: --config {config}: cannot tell" in refused.err
    assert refused.err.endswith("Give it by hand: --layers, --experts and --top-k\n")
    config.write_text("[]")
    assert "expected a mapping" in run("create", tmp_path / "b", "--config", config).err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "scheme"),
    [
        ((), rr.KeyScheme.fastdeploy()),
        (("--partition-by", 2), rr.KeyScheme.fastdeploy(partition_by=2)),
        (("--keys", "uuid"), rr.KeyScheme.uuid()),
        (("--keys", "uuid", "--buckets", 16), rr.KeyScheme.uuid(buckets=16)),
        (("--keys", "by-step"), rr.KeyScheme.by_step()),
    ],
)
def test_create_with_a_key_scheme(run: Any, tmp_path: Path, options: tuple[Any, ...], scheme: rr.KeyScheme) -> None:
    assert run("create", tmp_path / "a", "--layers", "0", "--experts", 8, "--top-k", 2, *options).code == 0
    assert rr.open_dataset(tmp_path / "a").keys == scheme


def test_create_with_limits(run: Any, tmp_path: Path) -> None:
    create = ("create", tmp_path / "a", "--layers", "0", "--experts", 8, "--top-k", 2)
    made = run(*create, "--ttl", "7d", "--max-bytes", "1.5TB", "--max-clock-skew", 1)
    assert (made.code, "1.5TB" in made.err) == (2, True)
    made = run(*create, "--ttl", "36h", "--max-bytes", "64MiB", "--max-clock-skew", "0.5", "--keep", "last_turn")
    assert re.search("keeps +the last turn only; up to 36h; up to 67.1 MB\n", made.out)
    assert re.search("clocks +within 0.5 s\n", made.out)
    fmt = rr.open_dataset(tmp_path / "a").format
    assert (fmt.ttl_s, fmt.max_bytes, fmt.max_clock_skew_s) == (36 * 3600, 64 << 20, 0.5)
    refused = run(*create, "--ttl", "36h")
    assert (refused.code, "max_bytes" in refused.err, "max_clock_skew_s" in refused.err) == (1, True, True)
    assert "error: --ttl 0.0: expected more than 0" in run("create", tmp_path / "b", *create[2:], "--ttl", 0).err


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--layers", "0-3", "--experts", 8),
        ("--layers", "3-0", "--experts", 8, "--top-k", 2),
        ("--layers", "a", "--experts", 8, "--top-k", 2),
        ("--layers", "0", "--experts", "many", "--top-k", 2),
        ("--layers", "0", "--experts", 8, "--top-k", 2, "--keys", "mine"),
        ("--layers", "0", "--experts", 8, "--top-k", 2, "--keys", "uuid", "--partition-by", 2),
        ("--layers", "0", "--experts", 8, "--top-k", 2, "--buckets", 2),
        ("--layers", "0", "--experts", 8, "--top-k", 2, "--ttl", "soon"),
        ("--layers", "0", "--experts", 8, "--top-k", 2, "--max-bytes", "0"),
        ("--layers", "0", "--experts", 8, "--top-k", 2, "--max-clock-skew", "-1"),
    ],
)
def test_wrong_usage_of_create(run: Any, tmp_path: Path, options: tuple[Any, ...]) -> None:
    ended = run("create", tmp_path / "a", *options)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err
    assert not (tmp_path / "a").exists()


def test_info(run: Any, uri: str) -> None:
    shown = run("info", uri)
    assert shown.code == 0
    assert re.search(r"routing +layers 1-3, 5; 300 experts, top-4, uint16", shown.out)
    assert re.search(r"ids +data_id:gen_id:turn_id:segment_id\n", shown.out)
    assert re.search(r"rows +5 puts and drops\n", shown.out)
    told = run("info", uri, "--json").json
    assert (told["partitions"], told["shards"], told["rows"]) == (4, 4, 5)
    assert told["bytes"] == sum(path.stat().st_size for path in Path(uri).glob("*/*.arrow"))
    assert told["format"]["uuid"] == rr.open_dataset(uri).format.uuid


def test_info_names_the_id_of_a_hashed_dataset(run: Any, tmp_path: Path) -> None:
    rr.create_dataset(tmp_path / "a", SPEC, rr.KeyScheme.uuid(buckets=4))
    assert re.search(r"ids +id\ndirectories +0 by bucket\n", run("info", tmp_path / "a").out)


def test_errors_name_the_options_of_the_program(run: Any, tmp_path: Path) -> None:
    refused = run("create", tmp_path / "a", "--layers", "0", "--experts", 8, "--top-k", 9)
    assert refused.err == "error: --top-k 9: expected 1 to --experts 8\n"
    lacking = run("create", tmp_path / "a", "--layers", "0", "--experts", 8)
    assert "Invalid value for --top-k: needed" in lacking.err
    absent = run("info", tmp_path / "a")
    assert absent.err.endswith("check the address, or create one with `rr-dataset create`\n")
    (tmp_path / "notes").touch()
    for command in (("demo", tmp_path), ("create", tmp_path, "--layers", "0", "--experts", 8, "--top-k", 2)):
        assert "and not empty, it holds 'notes': name a folder" in run(*command).err
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_help_shows_names_and_no_types(run: Any) -> None:
    shown = run("ls", "--help").out
    assert "Usage: rr-dataset ls [OPTIONS] URI \n" in re.sub(" +", " ", shown)
    assert not re.search(r"<\w+>|[{}]", shown)
    assert not re.search(r"<\w+>", run("--help").out)


# --- ls


def test_ls_lists_ids(run: Any, uri: str) -> None:
    assert sorted(run("ls", uri, "--json").json) == sorted([*IDS, "gone:0:0:0"])
    assert run("ls", uri, "--prefix", "math_1").out == "math_1:0:0:0\nmath_1:1:0:0\n"
    assert run("ls", uri, "--prefix", "math_1:1", "--json").json == ["math_1:1:0:0"]
    assert run("ls", uri, "--prefix", "none").out == ""


def test_ls_tells_of_drops(run: Any, uri: str) -> None:
    for how in ((), ("--json",)):
        listed = run("ls", uri, *how)
        assert listed.err == "note: 1 of these 5 ids were dropped by their writer: `ls --long --json` says why\n"
    assert "gone:0:0:0" in run("ls", uri).out.splitlines(), "in a pipe an id is an id"
    assert run("ls", uri, "--prefix", "math_1").err == ""
    shown = on_a_terminal(80, "ls", uri).splitlines()
    assert "gone:0:0:0  dropped" in shown
    assert "math_1:0:0:0" in shown


def test_ls_long_on_a_terminal_keeps_ids_whole_and_one_line_a_record(uri: str) -> None:
    wide = on_a_terminal(100, "ls", uri, "--long").splitlines()
    assert wide[0].split() == ["id", "status", "tokens", "missing", "weights", "submitted", "run"]
    assert len(wide) == 6
    assert any(re.match(r"math_1:0:0:0 +complete +40 +3:5 +v1 +20[-0-9]+ [0-9:]{8} +run-7$", line) for line in wide)
    narrow = on_a_terminal(45, "ls", uri, "--long").splitlines()
    assert narrow[0].split() == ["id", "status", "tokens", "missing"]
    assert max(map(len, narrow[:-1])) <= 45
    assert narrow[-1].startswith("not shown for want of room: run, weights, submitted;")
    (line,) = on_a_terminal(10, "ls", uri, "--long", "--prefix", "math_1:0").splitlines()[1:-1]
    assert line == "math_1:0:0:0  complete"
    assert "missing" not in on_a_terminal(80, "ls", uri, "--long", "--prefix", "math_10").splitlines()[0]


def test_ls_long_tells_facts(run: Any, uri: str) -> None:
    shown = run("ls", uri, "-l")
    assert shown.code == 0
    lines = {line.split()[0]: line for line in shown.out.splitlines()}
    assert re.match(r"math_1:0:0:0 +complete +40 +3:5 +v1 +20[0-9-]+ [0-9:.+]+ +run-7 *$", lines["math_1:0:0:0"])
    assert " partial " in lines["math_10:0:0:0"]
    assert " dropped " in lines["gone:0:0:0"]
    heads = {head["request_id"]: head for head in run("ls", uri, "-l", "--json").json}
    assert heads["gone:0:0:0"]["reason"] == "spool_full"
    full = heads["math_1:0:0:0"]
    assert (full["num_tokens"], full["missing"], full["weights"]) == (40, [[3, 5]], [[0, 3, "v1"], [5, 40, "v1"]])
    assert (full["submitted_ms"], full["tags"]) == (MADE_MS + 1, {"mood": "[bold]good"})


def test_ls_long_steps_over_a_record_that_is_gone_since(run: Any, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rr.RoutingDataset, "ids", lambda self, prefix: iter(["math_1:9:0:0", "math_1:0:0:0"]))
    assert [head["request_id"] for head in run("ls", uri, "-l", "--json").json] == ["math_1:0:0:0"]


def test_an_id_does_not_steer_the_terminal(run: Any, uri: str) -> None:
    for args in (("ls", uri), ("ls", uri, "-l"), ("get", uri, f"{ESCAPE}:0"), ("get", uri, f"{ESCAPE}:9")):
        ended = run(*args)
        assert "\x1b" not in ended.out + ended.err
        assert r"\x1b[31mred:" in ended.out + ended.err


# --- get


def test_get_shows_a_readable_table(run: Any, uri: str) -> None:
    shown = run("get", uri, "math_1:0:0:0")
    record = rr.open_dataset(uri).get("math_1:0:0:0")
    assert shown.code == 0
    facts = dict(re.findall(r"^([a-z]+) {2,}(.*?) *$", shown.out, re.MULTILINE))
    assert facts["status"] == "complete"
    assert (facts["tokens"], facts["missing"], facts["weights"]) == ("40", "3:5", "v1 (0:3), v1 (5:40)")
    assert facts["tags"] == "mood=[bold]good"
    assert facts["read"] == "layers 1-3, 5; tokens 0:40; uint16, 1.3 kB"
    lines = shown.out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("token  id"))
    assert lines[header].split() == ["token", "id", "logprob", "layer", "1", "layer", "2", "layer", "3", "layer", "5"]
    for token in (0, 9, 15):
        cells = re.split(r" {2,}", lines[header + 1 + token].strip(), maxsplit=2)
        assert cells[:2] == [str(token), str(100 + token)]
        ids = [int(n) for n in lines[header + 1 + token].split()[3 if token >= 8 else 2 :]]
        assert ids == record.routed_experts[:, token].ravel().tolist()
    assert lines[header + 4].split()[2:] == ["missing"] * 4
    assert lines[-1].startswith("shown: 16 of 40 tokens, 4 of 4 layers; choose with --tokens")


def test_get_shows_as_many_layers_as_fit(run: Any, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "table_width", lambda: 60)
    shown = run("get", uri, "math_1:1:0:0")
    assert max(map(len, shown.out.splitlines()[-5:-1])) <= 60
    assert "3 of 3 tokens, 3 of 4 layers" in shown.out
    monkeypatch.setattr(output, "table_width", lambda: 1)
    assert "3 of 3 tokens, 1 of 4 layers" in run("get", uri, "math_1:1:0:0").out


def test_get_of_layers_and_tokens(run: Any, uri: str) -> None:
    whole = run("get", uri, "math_1:0:0:0", "--json").json
    some = run("get", uri, "math_1:0:0:0", "--layers", "2,5", "--tokens", "2:9", "--json").json
    assert (some["layers"], some["token_ranges"]) == ([2, 5], [[2, 9]])
    assert some["routed_experts"] == [whole["routed_experts"][i][2:9] for i in (1, 3)]
    assert some["missing_by_layer"] == {"2": [[3, 5]], "5": [[3, 5]]}
    assert some["token_ids"] == list(range(102, 109))
    assert some["logprobs"][:6] == [None] * 6
    assert some["logprobs"][6] == whole["logprobs"][8] == pytest.approx(-2 + 2 * 8 / 39)
    assert run("get", uri, "math_1:0:0:0", "--tokens", "38:", "--json").json["token_ranges"] == [[38, 40]]
    shown = run("get", uri, "math_1:0:0:0", "--layers", "2", "--tokens", "0:2").out
    assert "shown:" not in shown


def test_get_without_tokens(run: Any, uri: str) -> None:
    shown = run("get", uri, "math_1:1:0:0", "--tokens", "1:1")
    assert (shown.code, shown.err) == (0, "")


def test_get_writes_npz(run: Any, uri: str, tmp_path: Path) -> None:
    file = tmp_path / "record.of.mine"
    wrote = run("get", uri, "math_1:0:0:0", "--layers", "1-3", "--npz", file)
    assert wrote.out == f"wrote {file}: routed_experts uint16 [3, 40, 4]\n"
    record = rr.open_dataset(uri).get("math_1:0:0:0", layers=[1, 2, 3])
    with np.load(file) as arrays:
        assert set(arrays) == {
            "request_id", "status", "layers", "token_ranges", "routed_experts", "present", "token_ids", "logprobs"
        }  # fmt: skip
        assert arrays["routed_experts"].dtype == np.uint16
        assert np.array_equal(arrays["routed_experts"], record.routed_experts)
        assert np.array_equal(arrays["present"], record.present())
        assert not arrays["present"][:, 3:5].any()
        assert np.array_equal(arrays["token_ids"], record.token_ids)
        assert np.array_equal(arrays["logprobs"], record.logprobs, equal_nan=True)
        assert (arrays["request_id"].item(), arrays["layers"].tolist()) == ("math_1:0:0:0", [1, 2, 3])
    assert run("get", uri, "math_1:1:0:0", "--npz", file, "--json").json["num_tokens"] == 3
    with np.load(file) as arrays:
        assert "token_ids" not in arrays


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("math_1:7:0:0",), "math_1:7:0:0"),
        (("gone:0:0:0",), "spool_full"),
        (("math_1:x",), "math_1:x"),
        (("chatcmpl-math_1:0:0:0-00000000-0000-0000-0000-000000000000",), "rollout id"),
        (("math_1:0:0:0", "--layers", "4"), "layers [4]"),
        (("math_1:0:0:0", "--layers", "2,1"), "rising"),
        (("math_1:0:0:0", "--tokens", "0:41"), "40 tokens"),
        (("math_1:0:0:0", "--npz", "/no/such/folder/x.npz"), "/no/such/folder/x.npz"),
    ],
)
def test_expected_errors_are_one_line_and_exit_1(run: Any, uri: str, args: tuple[str, ...], said: str) -> None:
    ended = run("get", uri, *args)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: ")
    assert said in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("command", [("info",), ("ls",), ("ls", "-l"), ("get", "math_1:0:0:0")])
def test_no_dataset_is_an_error(run: Any, tmp_path: Path, command: tuple[str, ...]) -> None:
    ended = run(command[0], tmp_path, *command[1:], "--json")
    assert (ended.code, ended.out) == (1, "")
    assert f"error: {tmp_path} is no dataset" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "args",
    [
        ("get",),
        ("get", "URI", "ID", "--tokens", "5"),
        ("get", "URI", "ID", "--tokens", "8:4"),
        ("get", "URI", "ID", "--tokens", "-2:-8"),
        ("get", "URI", "ID", "--tokens", "-:4"),
        ("get", "URI", "ID", "--layers", "1-"),
        ("nonsense",),
        ("ls", "-x"),
    ],
)
def test_wrong_usage_exits_2(run: Any, uri: str, args: tuple[str, ...]) -> None:
    ended = run(*(uri if arg == "URI" else arg for arg in args))
    assert (ended.code, ended.out) == (2, "")


def test_a_damaged_shard_is_a_warning_on_stderr(run: Any, uri: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(uri, copy)
    (shard,) = (copy / "data_id=math_10").glob("*.arrow")
    shard.write_bytes(shard.read_bytes()[:100])
    ended = run("ls", copy)
    assert ended.code == 0
    assert ended.out.splitlines()[-2:] == ["math_1:0:0:0", "math_1:1:0:0"]
    assert re.fullmatch(rf"warning: .*{shard.name}.*\nnote: 1 of these 4 ids were dropped .*\n", ended.err)


# --- the program


def test_help_names_every_command_and_completion(run: Any) -> None:
    shown = run("--help")
    assert shown.code == 0
    for word in ("create", "info", "ls", "get", "demo", "--install-completion"):
        assert word in shown.out


def script() -> str:
    return str(Path(sys.executable).with_name("rr-dataset"))


def test_the_installed_program(uri: str) -> None:
    done = subprocess.run([script(), "get", uri, "math_1:1:0:0", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["request_id"] == "math_1:1:0:0"
    failed = subprocess.run([script(), "info", "/no/such"], capture_output=True, text=True)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "Traceback" not in failed.stderr
    version = subprocess.run([script(), "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"rr-dataset \d+\.\d+\.\d+\n", version.stdout)


def on_a_terminal(columns: int, *args: object) -> str:
    """What a command prints on a terminal of that width, without its colours."""
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    subprocess.run([script(), *map(str, args)], stdout=terminal, stderr=subprocess.DEVNULL, env=environment, check=True)
    os.close(terminal)
    shown = b""
    with suppress(OSError):  # how a terminal without a writer ends
        while piece := os.read(master, 1 << 16):
            shown += piece
    os.close(master)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode().replace("\r", ""))


def test_on_a_terminal_it_has_colour_and_fits(uri: str) -> None:
    master, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60"}
    for name in ("NO_COLOR", "CI", "FORCE_COLOR"):
        environment.pop(name, None)
    subprocess.run([script(), "get", uri, "math_1:1:0:0"], stdout=terminal, env=environment, check=True)
    failed = subprocess.run([script(), "info", "/no/such"], stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(master, 1 << 16):
            shown += piece
    except OSError:  # how a terminal without a writer ends
        pass
    os.close(master)
    text = shown.decode().replace("\r", "")
    assert failed.returncode == 1
    assert "\x1b[1mstatus" in text
    assert "\x1b[31merror: /no/such is no dataset" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert re.search(r"^shown: 3 of 3 tokens, 3 of 4 layers; .* --json$", plain, re.MULTILINE), "never cut in two"
    assert max(len(line) for line in plain.splitlines() if line.startswith(("token", "0 ", "1 ", "2 "))) <= 60
