"""`rr-dataset demo --model`, small."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frameworks import QUIET, framework

import rr_dataset as rr
from cli.main import main

framework("paddle")
proof = framework("rr_dataset.demo.model_proof")

pytestmark = QUIET
SMALL = proof.Size(train_steps=12, prompts=2, samples=4, prompt_tokens=32, new_tokens=24, policy_steps=2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "prove", partial(proof.prove, size=SMALL))


def test_the_model_is_replayed_nearer_and_wrong_rows_are_far_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: None
) -> None:
    framework("matplotlib")
    picture = tmp_path / "a.svg"
    with pytest.raises(SystemExit) as ended:
        main(["demo", str(tmp_path / "d"), "--model", "--json", "--picture", str(picture)])
    assert not ended.value.code
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert told["requests"] == 8
    assert told["coverage"] == 1.0
    assert told["replayed"]["mean"] < told["live"]["mean"]
    assert min(told["shifted"]["mean"], told["transposed"]["mean"]) > 10 * told["live"]["mean"]
    for steps in (told["live_steps"], told["replayed_steps"]):
        assert min(steps["router_gradients"]) > 0
    assert picture.read_text().count("<svg") == 1


def test_it_says_what_it_found_and_fails_if_that_is_unsound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = proof.prove(tmp_path / "d")
    unsound = proof.ProofReport(**{**_fields(report), "replayed": report.live})
    for found, code in ((report, 0), (unsound, 3)):
        monkeypatch.setattr(proof, "prove", lambda uri, seed, found=found: found)
        with pytest.raises(SystemExit) as ended:
            main(["demo", str(tmp_path / "d"), "--model"])
        assert (ended.value.code or 0) == code
        out = capsys.readouterr().out
        assert "one token late" in out
        assert ("THIS IS NOT AS IT SHOULD BE" in out) == bool(code)


def test_paddles_gates_are_hooked_by_one_replay_and_given_back_as_they_were() -> None:
    paddle, small_model = framework("paddle"), framework("rr_dataset.demo.model")
    model = small_model.ByteModel(small_model.Shape(layers=2))
    replay, other = (rr.RoutingReplay(model.shape.spec) for _ in range(2))
    tokens = paddle.to_tensor(np.zeros((1, 3), np.int64))
    with small_model.captured(model) as taken:
        with replay.attach(model):
            with pytest.raises(rr.InvalidInputError, match="hooked already"), other.attach(model):
                pass
            replay.push(np.tile(np.arange(4), (3, 2, 1)))
            model(tokens)
        model(tokens)
    assert [len(calls) for calls in taken] == [2, 2], "the hook that was there before is there after"
    with pytest.raises(rr.InvalidInputError, match=r"layer 0: Linear .*own=True"):
        replay.attach(model, {0: paddle.nn.Linear(2, 2)}).__enter__()


def _fields(report: Any) -> dict[str, Any]:
    return {name: getattr(report, name) for name in asdict(report)}
