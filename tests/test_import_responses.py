"""Responses of other engines, lines of JSON, into a dataset: in one pass, once, and line by line refused with a reason."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire
from wire import SPEC, Run, small_run

import rr_dataset as rr
from cli.main import main


@pytest.fixture
def run() -> Run:
    return small_run()


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    rr.create_dataset(tmp_path / "routing", SPEC)
    return tmp_path / "routing"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def written(*lines: Any) -> Path:
        texts = [
            line if isinstance(line, str) else json.dumps(line, default=lambda value: value.tolist()) for line in lines
        ]
        path = tmp_path / "responses.jsonl"
        path.write_text("\n".join(texts) + "\n")
        return path

    return written


def with_id(response: Any, request_id: str, field: str = "request_id") -> Any:
    return {**response, field: request_id}


def rows_of(dataset: Any, request_id: str) -> Any:
    return dataset.get(request_id).to_numpy("TLK")


def test_each_contract(uri: Path, written: Callable[..., Path], run: Run) -> None:
    made = {
        "sglang": (wire.sglang(run), 6),
        "vllm": (wire.vllm(run), 6),
        "vllm-0.21": (wire.vllm_split(run), 6),
        "fastdeploy": (wire.fastdeploy(run, "uint8"), 7),
        "fastdeploy-store": ({"routed_experts": run.moe.transpose(1, 0, 2)}, 7),
        "slime": (wire.slime(run), 6),
        "miles": (wire.slime(run), 6),
        "prime-rl": (wire.prime_rl(run), 7),
        "nemo-rl": (wire.nemo_rl(run), 7),
        "megatron": ({"routed_experts": wire.megatron(run)}, 7),
    }
    for contract, (response, tokens) in made.items():
        report = rr.import_responses(uri, written(with_id(response, f"{contract}:0:0:0")), contract, run_id="r")
        assert (report.imported, report.tokens, report.existing, report.refused) == (1, tokens, 0, ()), contract
    dataset = rr.open_dataset(uri)
    for contract, (_, tokens) in made.items():
        record = dataset.get(f"{contract}:0:0:0")
        real = tokens - len(record.missing)
        np.testing.assert_array_equal(record.to_numpy("TLK")[:real], run.moe[:real], contract)
        assert (record.status, record.run_id) == ("complete", "r")
    record = dataset.get("vllm:0:0:0")
    assert record.token_ids is not None
    assert record.token_ids.tolist() == (run.prompt + run.output)[:6]
    assert record.logprobs is not None
    np.testing.assert_array_equal(record.logprobs[3:], np.array(run.logprobs[:3], np.float32))
    assert rr.verify(uri).sound


def test_a_second_run_imports_nothing(uri: Path, written: Callable[..., Path], run: Run) -> None:
    first = with_id(wire.sglang(run), "a:0:0:0")
    continued = with_id(wire.sglang(run, 2), "b:0:0:0")
    file = written(with_id(wire.sglang(run), "b:0:0:0"), first, first, continued)
    report = rr.import_responses(uri, file, "sglang")
    assert (report.imported, report.existing) == (2, 2)
    report = rr.import_responses(uri, file, "sglang")
    assert (report.imported, report.existing) == (0, 4)
    assert rr.open_dataset(uri).info().rows == 2


def test_parts_come_together(uri: Path, written: Callable[..., Path], run: Run) -> None:
    shorter = Run(run.spec, 5, run.prompt, run.output[:1], run.logprobs[:1], run.routing[:4])
    file = written(with_id(wire.sglang(shorter), "a:0:0:0"), with_id(wire.sglang(run, 3), "a:0:0:0"))
    assert rr.import_responses(uri, file, "sglang").imported == 2
    record = rr.open_dataset(uri).get("a:0:0:0")
    assert (record.num_tokens, record.missing, record.status) == (6, (), "complete")
    np.testing.assert_array_equal(record.to_numpy("TLK"), run.moe[:6])
    assert rr.import_responses(uri, file, "sglang").imported == 0


def test_samples_of_one_response(uri: Path, written: Callable[..., Path], run: Run) -> None:
    two = wire.vllm(run)
    two["choices"].append({**two["choices"][0], "index": 1})
    two["choices"].append({**two["choices"][0], "index": 2, "routed_experts": "AAAA"})
    two["choices"].append({"index": 3, "finish_reason": "abort"})
    report = rr.import_responses(uri, written(with_id(two, "a:0:0:0")), "vllm")
    assert report.imported == 2
    assert [each.path for each in report.refused] == ["responses.jsonl:1"] * 2
    assert report.refused[0].reason.startswith("a:0:0:0#2: vllm: ")
    assert "a:0:0:0#3: vllm: the response has no routing: aborted" in report.refused[1].reason
    assert set(rr.open_dataset(uri).ids()) == {"a:0:0:0#0", "a:0:0:0#1"}


def test_lines_that_are_refused(
    uri: Path, written: Callable[..., Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rr_dataset.interchange.responses.MAX_LINE_BYTES", 4000)
    good = wire.sglang(run)
    wrong = Run(run.spec, 5, run.prompt, run.output, run.logprobs, np.where(run.routing == 0, 0, run.routing + 200))
    file = written(
        with_id(good, "a:0:0:0"),
        "",
        "{",
        "[" * 3000,
        json.dumps(with_id(good, "b:0:0:0")) + " " * 5000,
        good["text"],
        {**good, "meta_info": {**good["meta_info"], "id": None}},
        with_id(good, "chatcmpl-1"),
        with_id(good, "c:0:0:0:\ud800"),
        with_id(wire.sglang(wrong), "d:0:0:0"),
        with_id({**good, "input_ids": [1 << 40, 2, 3]}, "e:0:0:0"),
        with_id({}, "f:0:0:0"),
        with_id(good, "g:0:0:0"),
    )
    told: list[tuple[int, int]] = []
    report = rr.import_responses(uri, file, "sglang", progress=lambda done, total: told.append((done, total)))
    reasons = {int(each.path.rpartition(":")[2]): each.reason for each in report.refused}
    assert report.imported == 2
    assert list(reasons) == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    for line, expected in {
        3: "no JSON", 4: "no JSON", 5: "longer than 4000 bytes", 6: "no JSON", 7: "the line has no id", 8: "engine's own id",
        9: "c:0:0:0", 10: "of 128 experts", 11: "what fits int32", 12: "has no routing",
    }.items():  # fmt: skip
        assert expected in reasons[line], reasons[line]
    assert told == sorted(told)
    assert told[-1] == (file.stat().st_size, file.stat().st_size)
    assert set(rr.open_dataset(uri).ids()) == {"a:0:0:0", "g:0:0:0"}


def changed(response: Any, **changes: Any) -> Any:
    return {**response, "meta_info": {**response["meta_info"], **changes}}


def hostile(run: Run) -> list[tuple[str, Any, str]]:
    """Contract, line, and what its refusal says; "" where it is imported."""
    good, one = wire.sglang(run), run.moe[None, :1]
    batch = {"routed_experts": run.moe[None], "attention_mask": [[1] * 7]}
    slime = wire.slime(run)
    triples = [[10**400, 21, None], *([-0.5, i, None] for i in (22, 23, 24))]
    lines = [
        ("sglang", changed(good, finish_reason=["x"]), ""),
        ("sglang", changed(good, finish_reason={"type": {}}), ""),
        ("sglang", {"choices": 5}, "choices: expected a list"),
        ("sglang", {"choices": []}, "at least one"),
        ("sglang", changed(good, output_token_logprobs=triples), "log-probabilities"),
        ("sglang", changed(good, output_token_logprobs=[[1e39, i, None] for i in run.output]), ""),
        ("sglang", changed(good, weight_version="\ud800"), "well-formed"),
        ("sglang", changed(good, weight_version="x" * 2_000_000), "2000"),
        ("sglang", changed(good, weight_version=[1, 2]), "weight_version: expected a text or a number"),
        ("slime", {**slime, "weight_versions": 5}, "weight_versions: expected a list"),
        ("slime", {**slime, "weight_versions": ["a", "\ud800"]}, "well-formed"),
        ("verl", {**batch, "finish_reason": ["stop"]}, ""),
        ("verl", {**batch, "rollout_log_probs": {"a": 1}}, "rollout_log_probs"),
        ("verl", {**batch, "routed_experts": [*run.moe[None], *run.moe[None]], "attention_mask": [[1] * 7] * 2,
                  "rollout_log_probs": [[0.1]]}, "rollout_log_probs"),
        ("prime-rl", {"choices": 5}, "choices: expected a list"),
        ("vllm", {"choices": "abc"}, "choices: expected a list"),
        ("vllm", {**wire.vllm(run), "choices": [wire.vllm(run)["choices"][0]] * 2}, "came 0 twice"),
    ]  # fmt: skip
    for shape in ("(9999999999, 9999999999, 0)", f"({'0, ' * 100})", f"({'1, ' * 100})"):
        npy = base64.b64decode(wire.npy(one.astype("int32")))
        header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        text = npy[:8] + len(header).to_bytes(2, "little") + header + (b"1234" if "1, 1" in shape else b"")
        response = wire.vllm(run)
        response["choices"][0]["routed_experts"] = base64.b64encode(text).decode()
        lines.append(("vllm", response, "shape: expected one that an array may have"))
    return lines


def test_no_line_keeps_another_from_being_imported(uri: Path, written: Callable[..., Path], run: Run) -> None:
    goods = {
        "sglang": wire.sglang(run),
        "slime": wire.slime(run),
        "vllm": wire.vllm(run),
        "prime-rl": wire.prime_rl(run),
    }
    goods["verl"] = wire.verl([run], 0, 0)
    for i, (contract, line, says) in enumerate(hostile(run)):
        ids = [f"{contract}:{i}:0:{place}" for place in range(3)]
        lines = [with_id(each, name) for each, name in zip((goods[contract], line, goods[contract]), ids, strict=True)]
        report = rr.import_responses(uri, written(*lines), contract)
        stored = set(rr.open_dataset(uri).ids(f"{contract}:{i}"))
        assert {ids[0], ids[2]} <= stored, (contract, says)
        if says:
            (refused,) = report.refused
            assert says in refused.reason
            assert "no JSON" not in refused.reason
            assert ids[1] not in stored
        else:
            assert (report.refused, stored) == ((), set(ids))


def test_a_refusal_is_short_and_can_be_printed(uri: Path, written: Callable[..., Path], run: Run) -> None:
    lines = [with_id(wire.sglang(run), name) for name in ("x" * 1_000_000, "\ud800", "a:0:0:0")]
    report = rr.import_responses(uri, written(*lines), "sglang")
    assert report.imported == 1
    for refused in report.refused:
        assert len(refused.reason.encode()) <= 1000
    assert len(report.refused) == 2


def test_slabs_bound_memory(uri: Path, written: Callable[..., Path], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rr_dataset.interchange.imported.SLAB_BYTES", 80)
    file = written(*(with_id(wire.sglang(run), f"a:{i}:0:0") for i in range(6)))  # 36 bytes each
    assert rr.import_responses(uri, file, "sglang").imported == 6
    assert rr.open_dataset(uri).info().shards == 3


def test_wrong_arguments(uri: Path, tmp_path: Path) -> None:
    with pytest.raises(rr.InvalidInputError, match="sglan"):
        rr.import_responses(uri, tmp_path, "sglan")
    with pytest.raises(rr.InvalidInputError, match="is no file"):
        rr.import_responses(uri, tmp_path, "sglang")


# --- the command


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Any:
    def command(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(arg) for arg in args])
        code = ended.value.code
        return code if isinstance(code, int) else 0, *capfd.readouterr()

    return command


def test_the_command(command: Any, uri: Path, written: Callable[..., Path], run: Run) -> None:
    file = written(with_id(wire.sglang(run), "a:0:0:0", "rollout"), with_id(wire.sglang(run), "b:0:0:0", "rollout"))
    options = ("--contract", "sglang", "--id-field", "rollout", "--weight-version", "9", "--run", "old")
    assert command("import", uri, file, *options) == (0, "imported 2 records, 12 tokens; 0 were there, 0 refused\n", "")
    assert command("import", uri, file, *options)[:2] == (0, "imported 0 records, 0 tokens; 2 were there, 0 refused\n")
    head = rr.open_dataset(uri).heads(["a:0:0:0"])[0]
    assert (head.run_id, head.weights[0][2]) == ("old", "9")
    file = written("{", with_id(wire.sglang(run), "c:0:0:0"))
    code, out, _ = command("import", uri, file, "--contract", "sglang")
    assert code == 3
    assert out.splitlines()[0].startswith("refused: responses.jsonl:1: no JSON: ")
    assert command("import", uri, file, "--contract", "nonsense")[0] == 1
    assert command("import", uri, file, "--id-field", "x")[0] == 2


def test_the_command_creates(command: Any, tmp_path: Path, written: Callable[..., Path], run: Run) -> None:
    config = {"model_type": "x", "num_hidden_layers": 5, "num_experts": 128, "num_experts_per_tok": 2}
    config["mlp_layer_types"] = ["dense", "sparse", "sparse", "dense", "sparse"]  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = written(with_id(wire.vllm(run), "0b8f6a52"))
    arguments = (tmp_path / "new", file, "--contract", "vllm", "--config", tmp_path / "config.json", "--keys", "uuid")
    assert command("import", *arguments)[0] == 0
    dataset = rr.open_dataset(tmp_path / "new")
    assert (dataset.format.spec, set(dataset.ids())) == (SPEC, {"0b8f6a52"})
    assert command("import", *arguments)[1].startswith("imported 0 records")
