from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rr_dataset import RoutingDatasetError, RoutingSpec, SpecMismatchError, create_dataset, open_dataset
from rr_dataset.demo import trainer
from rr_dataset.demo.replay import Replay
from rr_dataset.demo.rollouts import DATA, SPEC, as_they_finish, load_rollouts

ROOT = Path(__file__).parents[1]


def test_the_slice_is_what_its_readme_says() -> None:
    rollouts = load_rollouts()
    lengths = [rollout.token_ids.size for rollout in rollouts]
    assert (len(rollouts), sum(lengths), min(lengths), max(lengths)) == (200, 98089, 231, 780)
    assert len({rollout.prompt for rollout in rollouts}) == 22
    assert sum(rollout.turn == 2 for rollout in rollouts) == 24
    assert DATA.stat().st_size <= 2_000_000
    text = DATA.with_name("README.md").read_text()
    with np.load(DATA) as arrays:
        for name in arrays:
            shape = ", ".join(map(str, arrays[name].shape))
            assert f"| `{name}` | {arrays[name].dtype} [{shape}] |" in text


def test_rollouts_fit_the_spec() -> None:
    for rollout in load_rollouts():
        tokens = rollout.token_ids.size
        assert rollout.routed_experts.shape == (SPEC.num_layers, tokens, SPEC.top_k)
        assert rollout.routed_experts.max() < SPEC.num_experts
        assert np.isnan(rollout.logprobs[: rollout.prompt_length]).all()
        assert (rollout.logprobs[rollout.prompt_length :] <= 0).all()
        assert trainer.TOKENS[1] <= tokens


def test_a_turn_continues_the_turn_before_it() -> None:
    turns = {(r.prompt, r.sample, r.turn): r for r in load_rollouts()}
    later = [(key, r) for key, r in turns.items() if r.turn]
    assert len(later) == 48
    for (prompt, sample, turn), rollout in later:
        before = turns[prompt, sample, turn - 1]
        assert np.array_equal(rollout.token_ids[: before.token_ids.size], before.token_ids)


def test_prompts_interleave_and_turns_keep_their_order() -> None:
    rollouts = load_rollouts()
    finished = list(as_they_finish(rollouts, seed=0))
    assert sorted(map(id, finished)) == sorted(map(id, rollouts))
    turns = defaultdict(list)
    for rollout in finished:
        turns[rollout.prompt, rollout.sample].append(rollout.turn)
    assert all(order == sorted(order) for order in turns.values())
    switches = sum(a.prompt != b.prompt for a, b in pairwise(finished))
    assert switches > len(finished) / 3


def test_the_seed_decides_the_order() -> None:
    rollouts = load_rollouts()
    orders = [[r.request_id(0) for r in as_they_finish(rollouts, seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_the_engine_side_is_light() -> None:
    code = "import sys, rr_dataset.demo.engine; print(*sorted({'pyarrow', 'fsspec'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_replay_twice_is_two_epochs(tmp_path: Path) -> None:
    uri = str(tmp_path / "routing")
    for epoch in range(2):
        with Replay(uri, rate=0) as replay:
            engine, reader = replay.engine(), replay.trainer()
        assert (engine.records, engine.durable, engine.dropped) == (200, 200, {})
        assert (engine.tokens, engine.payload_bytes) == (98089, 98089 * SPEC.bytes_per_token)
        assert engine.put_median_us <= engine.put_p99_us
        assert 0 <= reader.visible_median_ms <= reader.visible_p99_ms
        assert (reader.batch.records, reader.batch.layers, reader.batch.tokens) == (32, 2, 32 * 128)
        assert reader.batch.payload_bytes == 32 * 2 * 128 * SPEC.top_k
        assert (reader.everything.records, reader.everything.payload_bytes) == (200, engine.payload_bytes)
        assert reader.batch.different == reader.everything.different == 0
        assert reader.pid != engine.pid
        assert reader.example_id == f"code_0_epoch_{epoch}:0:0:0"
    dataset = open_dataset(uri)
    assert len(list(dataset.ids())) == 400
    assert dataset.get("code_3_epoch_1:5:0:0").weights[0][2] == "epoch-1"


def test_a_difference_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "routing")
    with Replay(uri, rate=0) as replay:
        replay.engine()
        replay.trainer()
    rollouts = load_rollouts()
    rollouts[0].routed_experts[2, 100, 3] ^= 1  # in the batch that is read
    rollouts[1].token_ids[0] += 1  # outside of it
    monkeypatch.setattr(trainer, "load_rollouts", lambda: rollouts)
    report = trainer.run_trainer(uri, 0)
    assert (report.batch.different, report.everything.different) == (1, 2)


def test_records_that_never_arrive_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "routing")
    create_dataset(uri, SPEC)
    monkeypatch.setattr(trainer, "TIMEOUT_S", 0.0)
    with pytest.raises(RoutingDatasetError, match="200 records did not arrive"):
        trainer.run_trainer(uri, 0)


def test_another_dataset_is_left_alone(tmp_path: Path) -> None:
    uri = str(tmp_path / "routing")
    create_dataset(uri, RoutingSpec(moe_layers=(0,), num_experts=4, top_k=1))
    with pytest.raises(SpecMismatchError, match="num_experts"):
        Replay(uri)


def test_a_failed_process_is_an_error_and_none_is_left(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Replay(str(tmp_path / "routing"), rate=1e-3) as replay:  # a pause of minutes before the first put
        replay._engine.kill()
        with pytest.raises(RoutingDatasetError, match="engine process ended with exit code -9"):
            replay.engine()
    assert replay._trainer.poll() == -9
