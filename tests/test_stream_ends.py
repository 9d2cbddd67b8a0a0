"""Where the iterations of a stream end: `records` over workers, marks and restarts, groups that lost an id, equal ranks."""

from __future__ import annotations

import pickle
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import Stored

import rr_dataset as rr
from rr_dataset.trainer.stream_options import StreamOptions
from rr_dataset.trainer.streaming import RoutingStream

GROUPS = {"together": "data_id", "group_size": 3}


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "d")


def stream(stored: Stored, ids: list[str] | None = None, **options: Any) -> RoutingStream:
    return RoutingStream(stored.dataset, StreamOptions(**{"timeout_s": 0, **options}), ids=ids)


def taken(samples: Any) -> list[str]:
    return [sample["request_id"] for sample in samples]


def put_all(stored: Stored, *ids: str) -> list[str]:
    for each in ids:
        stored.put(each, 2)
    return list(ids)


# records


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=2 * settings().max_examples)
@given(data=st.data())
def test_records_of_each_epoch_over_workers_marks_and_restarts(data: st.DataObject, many: Stored) -> None:
    """A worker is a copy of the stream, as fork makes it: one for each epoch or one that stays; main hears of it by marks only."""
    records, total = data.draw(st.integers(1, 7)), 60
    workers = data.draw(st.sampled_from(["none", "each epoch", "one that stays"]))
    main = stream(many, records=records)
    staying: RoutingStream | None = None
    used: list[str] = []
    for _ in range(data.draw(st.integers(2, 6))):
        if workers == "none":
            iterates = main
        elif workers == "each epoch" or staying is None:
            iterates = staying = pickle.loads(pickle.dumps(main))
        else:
            iterates = staying
        open_part = len(used) % records
        wanted = records - open_part
        count = data.draw(st.integers(0, wanted)) if data.draw(st.booleans()) else wanted
        if len(used) + wanted > total:
            break
        read = iter(iterates)
        found = taken(islice(read, count)) if count < wanted else taken(read)
        assert len(found) == count
        read.close()
        used += found
        for at in range(0, count, 2):
            main.mark(found[at : at + 2])
        if workers == "one that stays" and count < wanted:
            continue  # what it had read ahead
        if data.draw(st.booleans()):
            state = pickle.loads(pickle.dumps(main.state_dict()))
            main = stream(many, records=records)
            main.load_state_dict(state)
            staying = None
    assert len(set(used)) == len(used)
    assert used == sorted(used)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    made = Stored(tmp_path_factory.mktemp("many") / "d")
    made.shard(*[made.row(f"p:{100 + number}:0:0", 1) for number in range(60)])
    return made


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_epochs_of_torchs_loader_have_their_records(workers: int, persistent: bool, many: Stored) -> None:
    data = pytest.importorskip("torch.utils.data")
    made = stream(many, records=8)
    loader = data.DataLoader(
        made.for_torch(), batch_size=4, num_workers=workers, persistent_workers=persistent, collate_fn=list
    )
    found: list[str] = []
    for epoch in range(5):
        for batch in loader:
            found += taken(batch)
            made.mark(taken(batch))
        assert len(found) == 8 * (epoch + 1)
    again = stream(many, records=8)
    again.load_state_dict(made.state_dict())
    found += taken(again)
    assert found == list(many.dataset.ids("p"))[:48]


def test_a_state_goes_on_under_other_options(stored: Stored) -> None:
    """What was told is told; what another prefix or version had passed over is found."""
    ids = put_all(stored, *[f"a:{i}:0:0" for i in range(4)])
    stored.put("b:0:0:0", 2, weights="3")
    made = stream(stored, prefix="a", records=4)
    assert taken(islice(made, 3)) == ids[:3]
    for records, rest in ((4, ids[3:]), (3, [ids[3], "b:0:0:0"]), (5, [ids[3], "b:0:0:0"])):
        again = stream(stored, records=records)
        again.load_state_dict(made.state_dict())
        left = islice(again, 2)
        assert taken(left) == rest
    newer = stream(stored, min_weight_version=3)
    newer.load_state_dict(made.state_dict())
    assert taken(newer) == ["b:0:0:0"]


# marks


def test_what_is_marked_while_it_is_ready_is_not_given(stored: Stored) -> None:
    ids = put_all(stored, *[f"a:{i}:0:0" for i in range(6)])
    made = stream(stored)
    read = iter(made)
    assert next(read)["request_id"] == ids[0]
    made.mark([ids[1], ids[4]])
    assert taken(read) == [ids[2], ids[3], ids[5]]
    waiting = stream(stored, **GROUPS, prefix="b")
    put_all(stored, "b:0:0:0", "b:1:0:0")
    assert taken(waiting) == []
    waiting.mark(["b:0:0:0", "b:1:0:0"])
    assert waiting.waiting == []


# groups


@pytest.mark.parametrize("on_broken", ["leave_out", "give"])
def test_a_group_with_a_dropped_id_is_left_out_or_given_as_it_is(on_broken: str, stored: Stored) -> None:
    put_all(stored, "a:0:0:0", "a:1:0:0", "b:0:0:0", "b:1:0:0", "b:2:0:0")
    stored.put("a:2:0:0", 2, status="dropped", reason="full")
    made = stream(stored, **GROUPS, on_broken=on_broken, on_dropped="skip")
    whole = ["b:0:0:0", "b:1:0:0", "b:2:0:0"]
    assert taken(made) == [*(["a:0:0:0", "a:1:0:0"] if on_broken == "give" else []), *whole]
    assert made.left_out["a:2:0:0"] == "dropped: full"
    assert made.dropped == 1
    if on_broken == "leave_out":
        assert made.left_out["a:0:0:0"] == "in a group with a:2:0:0, which is dropped: full"
    again = stream(stored, **GROUPS, on_broken=on_broken, on_dropped="skip")
    again.load_state_dict(made.state_dict())
    assert again.left_out == made.left_out
    assert taken(again) == []


@pytest.mark.parametrize("on_broken", ["leave_out", "give"])
def test_a_group_that_lost_an_id_while_it_waited_takes_no_other(on_broken: str, stored: Stored) -> None:
    put_all(stored, "a:0:0:0", "a:1:0:0")
    made = stream(stored, **GROUPS, on_broken=on_broken)
    assert taken(made) == []
    assert made.waiting == [["a:0:0:0", "a:1:0:0"]]
    rr.delete(str(stored.root), ids=["a:0:0:0"])
    put_all(stored, "a:2:0:0", "a:3:0:0")
    assert taken(made) == (["a:1:0:0", "a:2:0:0"] if on_broken == "give" else [])
    assert made.left_out["a:0:0:0"] == "deleted"
    assert made.gone == 1
    assert made.waiting == [["a:3:0:0"]]


def test_a_group_that_lost_an_id_is_told_though_nothing_comes(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    put_all(stored, "a:0:0:0", "a:1:0:0")
    made = stream(stored, **GROUPS, records=3)
    rest = iter(made)
    rr.delete(str(stored.root), ids=["b:0:0:0"])
    with pytest.raises(rr.WaitTimeoutError, match="0 of 3 records.*2 of 3 of a:0:0:0"):
        next(rest)
    rr.delete(str(stored.root), ids=["a:0:0:0"])
    with pytest.raises(rr.WaitTimeoutError, match="0 of 3 records.*1 of 3 of a:0:0:0"):
        next(iter(made))
    assert made.left_out == {"a:0:0:0": "deleted"}
    assert "leaves out a:0:0:0 (deleted)" in caplog.text


def test_a_complete_group_that_loses_an_id_before_its_turn_is_never_cut(stored: Stored) -> None:
    """Also where the buffer is smaller than a group."""
    ids = put_all(stored, *[f"{prompt}:{i}:0:0" for prompt in "abc" for i in range(3)])
    made = stream(stored, **GROUPS, buffer_bytes=1)
    read = iter(made)
    assert taken(islice(read, 1)) == ids[:1]
    rr.delete(str(stored.root), ids=["b:1:0:0"])
    assert taken(read) == [*ids[1:3], *ids[6:]]
    assert sorted(made.left_out) == ids[3:6]


def test_more_ids_than_a_group_has_are_another_group(stored: Stored) -> None:
    ids = put_all(stored, *[f"a:{i}:0:0" for i in range(5)])
    made = stream(stored, **GROUPS)
    assert taken(made) == ids[:3]
    assert made.waiting == [ids[3:]]
    put_all(stored, "a:5:0:0")
    assert taken(made) == [*ids[3:], "a:5:0:0"]


def test_a_list_whose_groups_do_not_fit_is_refused(stored: Stored) -> None:
    ids = ["a:0:0:0", "a:1:0:0", "a:2:0:0", "b:0:0:0"]
    with pytest.raises(rr.InvalidInputError, match="group_size=3: the list has 1 ids that belong with 'b:0:0:0'"):
        stream(stored, ids, **GROUPS)
    with pytest.raises(rr.InvalidInputError, match="records=4 of group_size=3: expected a multiple"):
        stream(stored, **GROUPS, records=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 2)
@given(data=st.data())
def test_groups_are_whole_whatever_happens_to_their_ids(data: st.DataObject, tmp_path_factory: Any) -> None:
    stored = Stored(tmp_path_factory.mktemp("d"), grace_s=600)
    options = {**GROUPS, "on_dropped": "skip", "buffer_bytes": data.draw(st.sampled_from([1, 1 << 20]))}
    made = stream(stored, **options)
    names = [f"{prompt}:{i}:0:0" for prompt in "ab" for i in range(7)]
    put: set[str] = set()
    lost: set[str] = set()
    found: list[str] = []
    for step in data.draw(st.lists(st.sampled_from(["put", "put", "drop", "delete", "take", "restart"]), max_size=25)):
        left = [each for each in names if each not in put | lost]
        if step in ("put", "drop") and left:
            chosen = data.draw(st.sampled_from(left))
            stored.put(chosen, 2, **({"status": "dropped", "reason": "full"} if step == "drop" else {}))
            (lost if step == "drop" else put).add(chosen)
        elif step == "delete" and put - set(found):
            chosen = data.draw(st.sampled_from(sorted(put - set(found))))
            rr.delete(str(stored.root), ids=[chosen])
            lost.add(chosen)
        elif step == "take":
            found += taken(made)
        elif step == "restart":
            state = pickle.loads(pickle.dumps(made.state_dict()))
            made = stream(stored, **options)
            made.load_state_dict(state)
    found += taken(made)
    groups = [found[at : at + 3] for at in range(0, len(found), 3)]
    assert len(set(found)) == len(found)
    assert not set(found) & lost
    assert all(len(group) == 3 and len({each[0] for each in group}) == 1 for group in groups)
    told = set(found) | set(made.left_out) | {each for group in made.waiting for each in group}
    assert put - lost <= told
    assert all(sum(each[0] == prompt for each in found) <= 6 for prompt in "ab")


# lists


def test_a_list_with_an_id_that_was_deleted_before_its_turn_ends(stored: Stored) -> None:
    ids = put_all(stored, *[f"{name}:0:0:0" for name in "abcd"])
    made = stream(stored, ids, buffer_bytes=1)
    read = iter(made)
    assert next(read)["request_id"] == ids[0]
    stored.tombstone("prefix", "c")
    assert taken(read) == [ids[1], ids[3]]
    assert (made.gone, made.left_out) == (1, {ids[2]: "deleted"})
    again = stream(stored, ids)
    again.load_state_dict(made.state_dict())
    assert taken(again) == []
    waiting = stream(stored, [*ids, "z:0:0:0"])
    waiting.load_state_dict({**made.state_dict(), "share": waiting.state_dict()["share"]})
    stored.put(ids[2], 2)  # before the list is through
    stored.put("z:0:0:0", 2)
    assert taken(waiting) == [ids[2], "z:0:0:0"]
    assert waiting.left_out == {}


def test_equal_ranks_give_as_many_or_raise(stored: Stored) -> None:
    uneven = ["a:0:0:0", "a:1:0:0", "b:0:0:0", "c:0:0:0"]
    with pytest.raises(rr.InvalidInputError, match="2 ids that belong with 'a:0:0:0' and 1 with 'b:0:0:0'"):
        stream(stored, uneven, equal=True, together="data_id", num_ranks=2)
    with pytest.raises(rr.InvalidInputError, match="on_dropped='skip' with equal"):
        stream(stored, uneven, equal=True, on_dropped="skip")
    with pytest.raises(rr.InvalidInputError, match="equal without a list"):
        stream(stored, equal=True)
    ids = put_all(stored, *[f"{name}:0:0:0" for name in "efghi"])
    ranks = [stream(stored, ids, equal=True, rank=rank, num_ranks=2, buffer_bytes=1) for rank in range(2)]
    reads = [iter(each) for each in ranks]
    assert [next(each)["request_id"] for each in reads] == ids[:2]
    rr.delete(str(stored.root), ids=[ids[3]])
    assert taken(reads[0]) == [ids[2]]
    with pytest.raises(rr.RecordNotFoundError, match=r"h:0:0:0 \(deleted\): this rank gives fewer than the others"):
        next(reads[1])


# the dataset itself


@pytest.mark.parametrize("listed", [False, True])
def test_a_dataset_that_was_removed_is_an_error(listed: bool, stored: Stored) -> None:
    ids = put_all(stored, *[f"{name}:0:0:0" for name in "abcd"])
    made = stream(stored, ids if listed else None, buffer_bytes=1)
    read = iter(made)
    assert next(read)["request_id"] == ids[0]
    shutil.rmtree(stored.root)
    with pytest.raises(rr.DatasetNotFoundError):
        taken(read)
    with pytest.raises(rr.DatasetNotFoundError):
        taken(stream(stored))
    rr.create_dataset(stored.root, stored.spec)
    with pytest.raises(rr.DatasetNotFoundError, match="another dataset"):
        taken(made)


def test_a_stream_has_no_length_and_says_what_a_loader_takes(stored: Stored) -> None:
    made = stream(stored)
    with pytest.raises(TypeError, match=r"stream.for_torch\(\)"):
        len(made)
    assert made
    assert list(made) == []
    data = pytest.importorskip("torch.utils.data")
    with pytest.raises(TypeError, match=r"stream.for_torch\(\)"):
        list(data.DataLoader(made))
