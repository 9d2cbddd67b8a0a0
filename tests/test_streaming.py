from __future__ import annotations

import pickle
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import Stored

import rr_dataset as rr
from rr_dataset.trainer.samples import SampleOptions
from rr_dataset.trainer.stream_options import StreamOptions
from rr_dataset.trainer.streaming import NO_NUMBER, RoutingStream

NOW = {"timeout_s": 0}
TIMEOUT_S = 120


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "d")


def fill(stored: Stored, prompts: int, samples: int = 2) -> list[str]:
    ids = [f"math_{prompt}:{sample}:0:0" for prompt in range(prompts) for sample in range(samples)]
    for request_id in ids:
        stored.put(request_id, 3)
    return ids


def stream(stored: Stored, ids: list[str] | None = None, **options: Any) -> RoutingStream:
    return RoutingStream(stored.dataset, StreamOptions(**{**NOW, **options}), ids=ids)


def taken(samples: Any) -> list[str]:
    return [sample["request_id"] for sample in samples]


# each id once


def test_each_id_once_as_it_becomes_visible(stored: Stored) -> None:
    ids = fill(stored, 2)
    made = stream(stored)
    assert taken(made) == ids
    assert taken(made) == []
    late = fill(stored, 4)[4:]
    stored.put(ids[0], 2)  # put again
    assert taken(made) == late


def test_a_sample_is_the_record(stored: Stored) -> None:
    (request_id,) = fill(stored, 1, 1)
    made = RoutingStream(stored.root, StreamOptions(**NOW), SampleOptions(layers=[4]))
    (sample,) = made
    assert np.array_equal(sample["routed_experts"], stored.dataset.get(request_id, [4]).routed_experts)
    assert sample["number"] == NO_NUMBER


def test_earlier_ones_come_before_later_ones(stored: Stored) -> None:
    """By when they were seen; of one look by id."""
    stored.put("z:0")
    made = stream(stored, buffer_bytes=1)
    first = iter(made)
    assert next(first)["request_id"] == "z:0"
    stored.put("y:0")
    stored.put("b:0")
    assert next(first)["request_id"] == "b:0"
    stored.put("a:0")
    assert taken(first) == ["y:0", "a:0"]


def test_one_that_grows_is_given_when_it_is_final(stored: Stored) -> None:
    stored.put("a:0", 2, part=True, status="partial")
    made, early = stream(stored), stream(stored, final_only=False)
    assert taken(made) == []
    assert taken(early) == ["a:0"]
    stored.put("a:0", 2, start=2, part=True)
    (sample,) = made
    assert sample["num_tokens"] == 4
    assert taken(early) == []


def test_only_a_prefix_and_new_enough_weights(stored: Stored) -> None:
    stored.put("a:1:0:0", weights="9")
    stored.put("a:10:0:0", weights="10")
    stored.put("b:1:0:0")
    stored.put("c:1:0:0", weights=((0, 2, "9"), (2, 5, "11")))
    assert taken(stream(stored, prefix="a:1")) == ["a:1:0:0"]
    assert taken(stream(stored, min_weight_version=10)) == ["a:10:0:0", "c:1:0:0"]
    stored.put("d:1:0:0", weights="step-7")
    with pytest.raises(rr.InvalidInputError, match=r"d:1:0:0.*step-7.*whole numbers"):
        taken(stream(stored, min_weight_version=10))


def test_a_dropped_one_is_an_error_once_or_skipped(stored: Stored) -> None:
    stored.put("a:0")
    stored.put("b:0", status="dropped", reason="spool full")
    stored.put("c:0")
    made = stream(stored)
    with pytest.raises(rr.RecordDroppedError, match=r"b:0 \(spool full\)"):
        taken(made)
    assert taken(made) == ["a:0", "c:0"]
    skipping = stream(stored, on_dropped="skip")
    assert taken(skipping) == ["a:0", "c:0"]
    assert skipping.dropped == made.dropped == 1


def test_one_deleted_before_its_turn_is_left_out(stored: Stored) -> None:
    ids = fill(stored, 3)
    made = stream(stored, buffer_bytes=1)
    samples = iter(made)
    assert next(samples)["request_id"] == ids[0]
    rr.delete(str(stored.root), prefixes=["math_1"])
    assert taken(samples) == [ids[1], *ids[4:]]
    assert made.gone == 2


def test_it_waits_for_what_comes(stored: Stored) -> None:
    made = stream(stored, records=4, timeout_s=TIMEOUT_S)
    fill(stored, 1)
    samples = iter(made)
    first = [next(samples), next(samples)]
    late = Thread(target=fill, args=(stored, 2))
    late.start()
    assert taken([*first, *samples]) == [f"math_{i}:{j}:0:0" for i in range(2) for j in range(2)]
    late.join()


def test_records_are_an_error_if_they_do_not_come(stored: Stored) -> None:
    ids = fill(stored, 3)
    made = stream(stored, records=4)
    assert taken(made) == ids[:4]
    samples = iter(made)
    assert [next(samples)["request_id"], next(samples)["request_id"]] == ids[4:]
    with pytest.raises(rr.WaitTimeoutError, match="2 of 4 records for rank 0 of 1"):
        next(samples)


def test_the_bytes_read_together_are_bounded(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = fill(stored, 4)  # of 3 tokens x 4 layers x 2
    asked: list[int] = []
    get_many = rr.RoutingDataset.get_many

    def counting(self: Any, keys: list[str], *how: Any) -> Any:
        asked.append(len(keys))
        return get_many(self, keys, *how)

    monkeypatch.setattr(rr.RoutingDataset, "get_many", counting)
    assert taken(stream(stored, buffer_bytes=3 * 24 + 1)) == ids
    assert asked == [3, 3, 2]


# ranks and groups


def test_ranks_share_all_ids_between_them(stored: Stored) -> None:
    ids = fill(stored, 8, 3)
    parts = [taken(stream(stored, rank=rank, num_ranks=3)) for rank in range(3)]
    assert sorted(chain(*parts)) == ids
    assert all(parts)
    together = [taken(stream(stored, rank=rank, num_ranks=3, together="data_id")) for rank in range(3)]
    assert sorted(chain(*together)) == ids
    prompts = [{each.split(":")[0] for each in part} for part in together]
    assert sum(map(len, prompts)) == 8


def test_a_group_comes_when_it_is_complete_and_in_one_piece(stored: Stored) -> None:
    made = stream(stored, together="data_id", group_size=2)
    stored.put("a:0:0:0")
    stored.put("b:1:0:0")
    stored.put("b:0:0:0")
    assert taken(made) == ["b:0:0:0", "b:1:0:0"]
    stored.put("c:0:0:0")
    stored.put("a:1:0:0")
    assert taken(made) == ["a:0:0:0", "a:1:0:0"]
    limited = stream(stored, together="data_id", group_size=2, records=6)
    with pytest.raises(rr.WaitTimeoutError, match=r"4 of 6 records.*1 of 2 of c:0:0:0"):
        taken(limited)


@pytest.mark.parametrize("equal", [False, True])
def test_a_list_is_dealt_out_in_turns(equal: bool, stored: Stored) -> None:
    ids = fill(stored, 5)
    stored.put("other:0")
    options = {"num_ranks": 2, "together": "data_id", "equal": equal}
    parts = [taken(stream(stored, ids, rank=rank, **options)) for rank in range(2)]
    assert parts[1] == [*ids[2:4], *ids[6:8]]
    assert parts[0] == [*ids[:2], *ids[4:6], *([] if equal else ids[8:])]


def test_a_list_gives_row_numbers_and_says_what_did_not_come(stored: Stored) -> None:
    ids = fill(stored, 2)
    made = stream(stored, [*ids, "absent:0"])
    samples = iter(made)
    found = [next(samples) for _ in ids]
    assert made.ids is not None
    assert made.ids.rows([each["number"] for each in found]) == [ids.index(each["request_id"]) for each in found]
    with pytest.raises(rr.WaitTimeoutError, match="1 of 5 ids are not ready after 0 s without a new one: absent:0"):
        next(samples)
    stored.put("absent:0")
    assert taken(made) == ["absent:0"]


def test_wrong_options(stored: Stored) -> None:
    for wrong in (
        {"rank": 1},
        {"rank": -1},
        {"group_size": 2},
        {"records": 0},
        {"buffer_bytes": 0},
        {"on_dropped": "maybe"},
        {"timeout_s": -1},
    ):
        with pytest.raises(rr.InvalidInputError, match=next(iter(wrong))):
            StreamOptions(**wrong)
    with pytest.raises(rr.InvalidInputError, match="together='prompt': expected one of data_id"):
        stream(stored, together="prompt")
    with pytest.raises(rr.InvalidInputError, match="prefix='a'.* one of the two"):
        stream(stored, ["a:0"], prefix="a")


# restarts


def test_a_state_goes_on_between_any_two_samples(stored: Stored) -> None:
    ids = fill(stored, 3)
    for count in range(len(ids) + 1):
        made = stream(stored)
        first = taken(islice(iter(made), count))
        state = pickle.loads(pickle.dumps(made.state_dict()))
        again = stream(stored)
        again.load_state_dict(state)
        assert first + taken(again) == ids
        assert taken(pickle.loads(pickle.dumps(again))) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_no_loss_and_no_repeat_whatever_happens_between(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Two ranks take some, are restarted, and records come, go and are compacted meanwhile."""
    stored = Stored(tmp_path_factory.mktemp("d"), grace_s=600)
    listed = data.draw(st.booleans())
    everything = [f"p{prompt}:{sample}:0:0" for prompt in range(4) for sample in range(3)]
    put: list[str] = []
    deleted: set[str] = set()
    given: Counter[str] = Counter()
    how = {"num_ranks": 2, "together": data.draw(st.sampled_from([None, "data_id"])), "on_dropped": "skip"}
    made = [stream(stored, everything if listed else None, rank=rank, **how) for rank in range(2)]
    steps = ("put", "put", "take", "take", "restart", "delete", "compact")
    for step in [*data.draw(st.lists(st.sampled_from(steps), max_size=25)), "take all"]:
        left = [each for each in everything if each not in put]
        if step == "put" and left:
            put.append(data.draw(st.sampled_from(left)))
            stored.put(put[-1], 2)
        elif step == "restart":
            for rank in range(2):
                state = made[rank].state_dict()
                made[rank] = stream(stored, everything if listed else None, rank=rank, **how)
                made[rank].load_state_dict(state)
        elif step == "delete":
            prompt = data.draw(st.integers(0, 3))
            stored.tombstone("prefix", f"p{prompt}")
            deleted.update(each for each in put if each.startswith(f"p{prompt}:"))
        elif step == "compact":
            rr.compact(str(stored.root))
        elif step.startswith("take"):
            for each in made:
                try:
                    for sample in islice(iter(each), 2 if step == "take" else None):
                        given[sample["request_id"]] += 1
                except rr.WaitTimeoutError:
                    assert listed  # those that were never put
    assert set(given.values()) <= {1}
    assert set(put) - deleted <= set(given) <= set(put)


def test_a_group_that_is_not_complete_outlives_a_restart(stored: Stored) -> None:
    options = {"together": "data_id", "group_size": 2}
    made = stream(stored, **options)
    stored.put("a:0:0:0")
    assert taken(made) == []
    again = stream(stored, **options)
    again.load_state_dict(made.state_dict())
    stored.put("a:1:0:0")
    assert taken(again) == ["a:0:0:0", "a:1:0:0"]


def test_what_was_looked_at_is_not_looked_at_again(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(stored, 3)
    told: list[int] = []
    poll = rr.RoutingDataset.poll

    def counting(self: Any, cursor: Any) -> Any:
        heads, after = poll(self, cursor)
        told.append(len(heads))
        return heads, after

    monkeypatch.setattr(rr.RoutingDataset, "poll", counting)
    made = stream(stored)
    taken(made)
    again = stream(stored)
    again.load_state_dict(made.state_dict())
    stored.put("late:0")
    assert taken(again) == ["late:0"]
    assert sum(told) == 6 + 1


def test_a_state_in_the_middle_of_records_gives_the_rest(stored: Stored) -> None:
    ids = fill(stored, 4)
    made = stream(stored, records=4)
    assert taken(islice(iter(made), 3)) == ids[:3]
    again = stream(stored, records=4)
    again.load_state_dict(made.state_dict())
    assert taken(again) == ids[3:4]
    assert taken(again) == ids[4:]


def test_a_state_of_another_stream_is_refused(stored: Stored, tmp_path: Path) -> None:
    state = stream(stored).state_dict()
    for other in (
        stream(stored, num_ranks=2),
        stream(stored, ["a:0"]),
        stream(stored, together="data_id"),
        stream(Stored(tmp_path / "other")),
    ):
        with pytest.raises(rr.InvalidInputError, match="this stream is"):
            other.load_state_dict(state)


def test_the_state_is_small(stored: Stored) -> None:
    ids = [f"p:{i}:0:0" for i in range(200)]
    stored.shard(*[stored.row(each, 1) for each in ids])
    made = stream(stored)
    assert len(taken(made)) == 200
    assert len(pickle.dumps(made.state_dict())) < 200 * 16 + 1000


# loaders


def loader(name: str, made: RoutingStream, workers: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paddle's, of compilers it does not find
        pytest.importorskip(name)
    how = {"batch_size": 3, "num_workers": workers, "timeout": TIMEOUT_S if workers else 0}
    if name == "torch":
        import torch.utils.data

        return torch.utils.data.DataLoader(made.for_torch(), **how)
    import paddle.io

    return paddle.io.DataLoader(made.for_paddle(), places=paddle.CPUPlace(), **how)


@pytest.mark.parametrize("name", ["torch", "paddle"])
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_loader_share_the_ids(name: str, workers: int, stored: Stored) -> None:
    ids = fill(stored, 5)
    made = stream(stored)
    found = [each for batch in loader(name, made, workers) for each in batch["request_id"]]
    assert sorted(found) == ids


def test_batches_that_were_used_are_marked(stored: Stored) -> None:
    """A worker reads ahead, and what it read and nobody used comes again."""
    ids = fill(stored, 5)
    made = stream(stored)
    used = next(iter(loader("torch", made, 2)))["request_id"]
    made.mark(used)
    again = stream(stored)
    again.load_state_dict(made.state_dict())
    rest = [each for batch in loader("torch", again, 1) for each in batch["request_id"]]
    assert sorted([*used, *rest]) == ids
    again.mark(rest)
    assert taken(again) == []


def test_records_need_a_single_worker(stored: Stored) -> None:
    fill(stored, 3)
    assert sum(len(batch["request_id"]) for batch in loader("torch", stream(stored, records=4), 1)) == 4
    with pytest.raises(rr.InvalidInputError, match="records=4 with 2 workers"):
        list(loader("torch", stream(stored, records=4), 2))


@pytest.fixture(autouse=True)
def _no_warning_of_workers() -> Iterator[None]:
    """Python 3.12 warns of every fork of a process with threads, and the frameworks start some."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield
