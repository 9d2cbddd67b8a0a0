from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import Stored

import rr_dataset as rr
from rr_dataset.layout import row_ref
from rr_dataset.trainer.idlist import IdList
from rr_dataset.trainer.prefetch import Prefetch
from rr_dataset.trainer.samples import RoutingSamples, SampleOptions, sample_bytes, whole_batches

IDS = [f"math_{prompt}:{sample}:0:0" for prompt in range(3) for sample in range(2)]
TIMEOUT_S = 120  # of loaders: a worker that hangs fails the test
FRAMEWORKS = ("torch", "paddle")


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    stored = Stored(tmp_path / "d")
    for request_id in IDS:
        stored.put(request_id, 6)
    return stored


@pytest.fixture
def samples(stored: Stored) -> RoutingSamples:
    return RoutingSamples(stored.root, IDS)


def framework(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paddle's, of compilers it does not find
        return pytest.importorskip(name)


def loader(name: str, samples: Any, batch: int | None = 4, **how: Any) -> Any:
    """A DataLoader of that framework that never waits for ever."""
    framework(name)
    if how.get("num_workers"):
        how["timeout"] = TIMEOUT_S
    if name == "torch":
        import torch.utils.data

        return torch.utils.data.DataLoader(samples, batch, **how)
    import paddle.io

    how.setdefault("batch_size", batch) if "batch_sampler" not in how else None
    return paddle.io.DataLoader(samples, places=paddle.CPUPlace(), **how)


def check(stored: Stored, batches: list[Any], ids: list[str] = IDS, size: int = 4) -> None:
    """The batches hold the records of the ids, in that order."""
    assert [each for batch in batches for each in batch["request_id"]] == ids
    assert [len(batch["request_id"]) for batch in batches] == [
        len(ids[at : at + size]) for at in range(0, len(ids), size)
    ]
    experts = np.concatenate([np.asarray(batch["routed_experts"]) for batch in batches])
    numbers = np.concatenate([np.asarray(batch["number"]) for batch in batches])
    for i, request_id in enumerate(ids):
        assert np.array_equal(experts[i], stored.dataset.get(request_id).routed_experts)
    assert numbers.dtype == np.int64
    assert IdList(IDS).rows(numbers) == [IDS.index(each) for each in ids]


# samples


def test_a_sample_is_the_record(stored: Stored, samples: RoutingSamples) -> None:
    sample = samples[1]
    record = stored.dataset.get(IDS[1])
    assert np.array_equal(sample["routed_experts"], record.routed_experts)
    assert (sample["request_id"], sample["num_tokens"]) == (IDS[1], 6)
    assert sample["present"].tolist() == [True] * 6
    assert len(samples) == len(IDS)
    assert [each["request_id"] for each in samples] == IDS
    assert samples[-1]["request_id"] == IDS[-1]
    assert [each["request_id"] for each in samples[[2, 0, 2]]] == [IDS[2], IDS[0], IDS[2]]
    with pytest.raises(IndexError):
        samples[len(IDS)]


def test_layers_and_tokens_in_every_form(stored: Stored) -> None:
    want = stored.dataset.get(IDS[0]).routed_experts
    options = SampleOptions(layers=[4, 9], tokens=slice(1, 3), layout="TLK", dtype="int32", present="layers")
    sample = RoutingSamples(stored.dataset, IDS, options)[0]
    assert sample["routed_experts"].dtype == np.int32
    assert np.array_equal(sample["routed_experts"], want[[1, 3], 1:3].transpose(1, 0, 2))
    assert sample["present"].shape == (2, 2)
    assert "present" not in RoutingSamples(stored.dataset, IDS, SampleOptions(present="none"))[0]


def test_tokens_by_the_length_of_each_record(stored: Stored) -> None:
    stored.put("long:0", 9)
    last_two = SampleOptions(tokens=_last_two, lengths="S")
    for how in ({"ids": [*IDS, "long:0"]}, {"refs": [_ref(stored, each) for each in (*IDS, "long:0")]}):
        *_, short, long = RoutingSamples(stored.root, options=last_two, **how)[[0, 1, 5, 6]]
        assert np.array_equal(short["routed_experts"], stored.dataset.get(IDS[5]).routed_experts[:, 4:6])
        assert np.array_equal(long["routed_experts"], stored.dataset.get("long:0").routed_experts[:, 7:9])


def _last_two(num_tokens: int) -> slice:
    return slice(num_tokens - 2, num_tokens)


def test_a_function_of_tokens_needs_the_trainers_lengths(stored: Stored) -> None:
    for wrong in ({"tokens": _last_two}, {"lengths": "S"}, {"tokens": _last_two, "lengths": "S-2"}):
        with pytest.raises(rr.InvalidInputError, match="lengths"):
            SampleOptions(**wrong)
    for lengths, error, says in (
        ({IDS[1]: 7}, rr.InvalidInputError, f"no number of tokens for '{IDS[0]}'"),
        ({IDS[0]: 5}, rr.AlignmentError, "has 6 rows and lengths= says 5 tokens"),
    ):
        with pytest.raises(error, match=says):
            RoutingSamples(stored.root, IDS, SampleOptions(tokens=_last_two, lengths=lengths))[0]
    beyond = SampleOptions(tokens=lambda count: [(0, count + 1)], lengths="S")
    with pytest.raises(rr.InvalidRoutingError, match="tokens 0 to 7 are not in"):
        RoutingSamples(stored.root, IDS, beyond)[0]
    turned = SampleOptions(tokens=lambda count: [(5, count), (0, 2)], lengths="S-1")
    with pytest.raises(rr.InvalidRoutingError, match="must come last"):
        RoutingSamples(stored.root, IDS, turned)[0]


def test_rows_that_the_record_lacks_are_there_and_not_present(stored: Stored) -> None:
    """Whoever says the number of tokens, by its end the sample is as long as the trainer's."""
    want = stored.dataset.get(IDS[0])
    for lengths in ("S-1", dict.fromkeys(IDS, 7), lambda request_id: 7 if request_id in IDS else 0):
        options = SampleOptions(layers=[4], tokens=_last_two, lengths=lengths, vectors=True)
        sample = RoutingSamples(stored.root, IDS, options)[0]
        assert sample["routed_experts"].shape == (1, 2, 2)
        assert np.array_equal(sample["routed_experts"][0, :1], want.layer(4)[5:])
        assert sample["present"].tolist() == [True, False]
        assert (sample["token_ids"].shape, sample["logprobs"].shape) == ((2,), (2,))
    by_layer = SampleOptions(tokens=_last_two, lengths="S-1", present="layers", layout="TLK", dtype="int32")
    sample = RoutingSamples(stored.root, refs=[_ref(stored, IDS[0])], options=by_layer)[0]
    assert sample["routed_experts"].shape == (2, 4, 2)
    assert sample["present"].tolist() == [[True, False]] * 4


def _ref(stored: Stored, request_id: str) -> str:
    (head,) = stored.dataset.heads([request_id])
    return row_ref(head.record_id, request_id)


def test_refs_name_the_very_puts(stored: Stored) -> None:
    before = _ref(stored, IDS[0]), stored.dataset.get(IDS[0]).routed_experts
    stored.put(IDS[0], 4)
    assert np.array_equal(RoutingSamples(stored.root, refs=[before[0]])[0]["routed_experts"], before[1])


def test_what_is_missing_is_told(stored: Stored) -> None:
    stored.put("gap:0", 4, missing=((1, 2),))
    stored.put("gap:1", 4, layers=(3, 4))
    options = SampleOptions(vectors=True)
    gap, half = RoutingSamples(stored.root, ["gap:0", "gap:1"], options)[[0, 1]]
    assert gap["present"].tolist() == [True, False, True, True]
    assert half["present"].tolist() == [False] * 4
    assert RoutingSamples(stored.root, ["gap:1"], SampleOptions(layers=[3]))[0]["present"].all()
    assert gap["token_ids"].tolist() == [-1] * 4
    assert np.isnan(gap["logprobs"]).all()


def test_wrong_arguments(stored: Stored) -> None:
    with pytest.raises(rr.InvalidInputError, match="either ids or refs"):
        RoutingSamples(stored.root)
    with pytest.raises(rr.InvalidInputError, match="expected several request ids"):
        RoutingSamples(stored.root, IDS[0])
    for wrong in ({"layout": "KTL"}, {"present": "yes"}, {"dtype": "float32"}):
        with pytest.raises(rr.InvalidInputError, match=next(iter(wrong))):
            SampleOptions(**wrong)
    with pytest.raises(rr.InvalidInputError, match="int8.*does not hold expert 199"):
        RoutingSamples(stored.root, IDS, SampleOptions(dtype="int8"))[0]
    with pytest.raises(rr.InvalidInputError, match="prefetch_bytes=-1"):
        RoutingSamples(stored.root, IDS).read_ahead([], -1)
    with pytest.raises(rr.DatasetNotFoundError):
        RoutingSamples(stored.root / "none", IDS)


def test_an_error_names_the_id(stored: Stored) -> None:
    samples = RoutingSamples(stored.root, [*IDS, "absent:0", "lost:0"])
    with pytest.raises(rr.RecordNotFoundError, match="absent:0"):
        samples[[0, 6]]
    stored.put("lost:0", status="dropped", reason="spool full")
    with pytest.raises(rr.RecordDroppedError, match=r"lost:0.*spool full"):
        samples[7]
    stored.put("short:0", 2)
    samples = RoutingSamples(stored.root, [*IDS, "short:0"], SampleOptions(tokens=slice(0, 5)))
    with pytest.raises(rr.InvalidRoutingError, match="^'short:0': tokens 0 to 5"):
        samples[[0, 6, 1]]


def test_a_forked_worker_reads_no_index_that_its_parent_knows(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = RoutingSamples(stored.root, IDS)
    samples.dataset.heads(IDS)
    monkeypatch.setattr("rr_dataset.snapshot.read_index", None)
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    worker = context.Process(target=lambda: found.put(samples[1]["routed_experts"]))
    worker.start()
    worker.join(TIMEOUT_S)
    assert worker.exitcode == 0
    assert np.array_equal(found.get(), samples.dataset.get(IDS[1]).routed_experts)


# ids as a list


@given(st.lists(st.text(min_size=1)))
def test_a_list_of_ids_is_that_list(ids: list[str]) -> None:
    made = IdList(ids)
    assert list(made) == list(pickle.loads(pickle.dumps(made))) == made[:] == ids
    assert made.rows(made.numbers()) == list(range(len(ids)))
    assert made == IdList(ids)
    assert (made == IdList(ids[::-1])) == (ids == ids[::-1])


def test_numbers_of_another_list_are_refused() -> None:
    ids, other = IdList(["a", "b", "c"]), IdList(["a", "c", "b"])
    assert other.rows([ids.number(0)]) == [0]
    with pytest.raises(rr.InvalidInputError, match=r"row 1 of .*3 ids.* is 'c'.*same manifest"):
        other.rows(ids.numbers())
    with pytest.raises(rr.InvalidInputError, match="has no such row"):
        IdList(["a"]).rows([ids.number(2)])
    with pytest.raises(rr.InvalidInputError, match="not negative"):
        ids.rows([-1])
    for narrow in (np.int32, np.float64):
        with pytest.raises(rr.InvalidInputError, match=f"dtype {np.dtype(narrow)}"):
            ids.rows(np.zeros(2, narrow))
    with pytest.raises(rr.InvalidInputError, match="17: expected a request id"):
        IdList([17])


# reading ahead


def test_read_ahead_gives_every_batch_in_order(samples: RoutingSamples) -> None:
    batches = [[3, 1], [0], [2, 4, 5]]
    for limit in (0, 100, 1 << 20):
        found = [[each["request_id"] for each in batch] for batch in samples.read_ahead(batches, limit)]
        assert found == [[IDS[i] for i in batch] for batch in batches]


def test_what_waits_is_bounded_in_bytes() -> None:
    """Whatever the reader makes is at most the limit, one that crosses it, and one that is handed out."""
    made: list[int] = []
    handed = 0
    for number in Prefetch(lambda number: made.append(number) or number, range(200), lambda _: 10, 45):
        handed += 1
        assert number == handed - 1
        assert len(made) - handed <= 5 + 1  # 5 x 10 reach 45; one is being made
    assert handed == 200


def test_a_break_ends_the_thread_and_an_error_comes_in_its_place(samples: RoutingSamples) -> None:
    ahead = samples.read_ahead([[0], [1], [2], [3]], 0)
    next(ahead)
    assert any(thread.name == "rr_dataset-prefetch" for thread in threading.enumerate())
    ahead.close()
    assert not any(thread.name == "rr_dataset-prefetch" for thread in threading.enumerate())
    failing = samples.read_ahead([[0], [99], [1]])
    assert next(failing)[0]["request_id"] == IDS[0]
    with pytest.raises(IndexError):
        next(failing)


def test_bytes_of_samples_are_those_of_their_arrays(samples: RoutingSamples) -> None:
    assert sample_bytes(samples[[0, 1]]) == 2 * (4 * 6 * 2 + 6)


# loaders


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_takes_it_as_it_is(name: str, workers: int, stored: Stored, samples: RoutingSamples) -> None:
    check(stored, list(loader(name, samples, num_workers=workers)))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_persistent_workers_more_than_records(name: str, stored: Stored) -> None:
    ids = IDS[:2]
    made = loader(name, RoutingSamples(stored.root, ids), 1, num_workers=4, persistent_workers=True)
    for _ in range(2):
        check(stored, list(made), ids, size=1)


def test_spawned_workers(stored: Stored, samples: RoutingSamples) -> None:
    check(stored, list(loader("torch", samples, num_workers=1, multiprocessing_context="spawn")))


@pytest.mark.parametrize("name", FRAMEWORKS)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_empty_rank(name: str, workers: int, stored: Stored) -> None:
    assert list(loader(name, RoutingSamples(stored.root, []), num_workers=workers)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_torchs_worker_reaches_the_caller(workers: int, stored: Stored) -> None:
    samples = RoutingSamples(stored.root, ["absent:0", *IDS])
    with pytest.raises(rr.RecordNotFoundError, match="absent:0"):
        list(loader("torch", samples, num_workers=workers))


def test_an_error_in_paddles_worker_ends_the_epoch_and_is_printed(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """paddle 3.3 raises it in a thread of its own, and the caller gets an error without its text."""
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    samples = RoutingSamples(stored.root, ["absent:0", *IDS])
    with pytest.raises(SystemError, match="reader raises an exception"):
        list(loader("paddle", samples, num_workers=1))
    assert "absent:0" in str(printed[0].exc_value)


class Counting(RoutingSamples):
    """Counts how the dataset is asked."""

    reads = 0

    def __getitems__(self, indices: Any) -> Any:
        Counting.reads += 1
        return super().__getitems__(indices)


def test_torch_reads_a_batch_at_once(stored: Stored) -> None:
    Counting.reads = 0
    check(stored, list(loader("torch", Counting(stored.root, IDS))))
    assert Counting.reads == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_paddle_reads_a_batch_at_once(workers: int, stored: Stored) -> None:
    paddle = framework("paddle")
    from paddle.io.dataloader.collate import default_collate_fn

    Counting.reads = 0
    samples = Counting(stored.root, IDS)
    batches = whole_batches(paddle.io.BatchSampler(samples, batch_size=4), default_collate_fn)
    assert len(batches["batch_sampler"]) == 2
    check(stored, list(loader("paddle", samples, num_workers=workers, **batches)))
    assert Counting.reads == (0 if workers else 2)  # the workers count in themselves


def segments() -> set[str]:
    return {each.name for each in Path("/dev/shm").iterdir() if "rr" in each.name}


class Killing(RoutingSamples):
    """The worker that reads the last record dies."""

    def __getitems__(self, indices: Any) -> Any:
        if len(self) - 1 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitems__(indices)


def test_a_killed_worker_is_the_loaders_error(stored: Stored) -> None:
    before = segments()
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader("torch", Killing(stored.root, IDS), num_workers=1))
    assert segments() == before


def test_no_framework_is_imported(stored: Stored) -> None:
    code = f"""
import sys
from rr_dataset.trainer import feeder, samples, streaming
print(len(samples.RoutingSamples({str(stored.root)!r}, {IDS!r})[[0, 1]]), {{"torch", "paddle"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.stdout.split() == ["2", "set()"], done.stderr


@pytest.fixture(autouse=True)
def _no_warning_of_workers() -> Iterator[None]:
    """Python 3.12 warns of every fork of a process with threads, and the frameworks start some."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)  # more than there are cores
        yield


@pytest.mark.parametrize("every_time", [False, True])
def test_a_record_that_grows_between_two_reads_is_cut_by_its_own_length(every_time: bool, stored: Stored) -> None:
    """The shares of one read are never laid over the record of another."""
    lengths = iter(range(8, 1000, 2))
    grown: list[int] = []

    def half(count: int) -> slice:
        if every_time or not grown:
            grown.append(next(lengths))
            stored.put(IDS[0], grown[-1])
        return slice(0, count // 2)

    samples = RoutingSamples(stored.dataset, IDS, SampleOptions(tokens=half, lengths="S"))
    if every_time:
        with pytest.raises(rr.ReadConflictError, match="put again, of another length"):
            samples[0]
    else:
        sample = samples[0]
        assert (sample["num_tokens"], sample["routed_experts"].shape[1]) == (8, 4)
