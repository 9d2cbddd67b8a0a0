"""Arrays filled from many rows in many shards, against a token-by-token oracle."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import SPEC, Stored, expected

import rr_dataset as rr
from rr_dataset.errors import InvalidRoutingError
from rr_dataset.payload import HUGE_PAGES_BYTES, Arrays

FAR = (1 << 31) - 8


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path / "ds")


@given(st.data())
def test_any_parts_in_any_shards_read_as_the_oracle_says(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stored = Stored(Path(folder))
        rows = []
        for _ in range(data.draw(st.integers(1, 5), label="puts")):
            start = data.draw(st.integers(0, 8))
            tokens = data.draw(st.integers(0, 8))
            hole = data.draw(st.none() | st.integers(start, start + tokens - 1) if tokens else st.none())
            how: dict[str, Any] = {"start": start, "missing": () if hole is None else ((hole, hole + 1),)}
            if data.draw(st.booleans()):
                how["layers"] = tuple(sorted(data.draw(st.sets(st.sampled_from(SPEC.moe_layers), min_size=1))))
            how["part"] = data.draw(st.booleans())
            rows.append(stored.row("r", tokens, vectors=data.draw(st.booleans()), **how))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)))) | {len(rows)})
        for first, last in zip([0, *cuts], cuts, strict=False):
            stored.shard(*rows[first:last], compression=data.draw(st.sampled_from(["none", "zstd", "lz4"])))
        length = stored.dataset.heads(["r"])[0].num_tokens
        ends = st.integers(0, length)
        pairs = data.draw(st.none() | st.lists(st.tuples(ends, ends).map(lambda p: (min(p), max(p))), max_size=4))
        layers = data.draw(st.none() | st.sets(st.sampled_from(SPEC.moe_layers), min_size=1).map(sorted))

        got = stored.dataset.get("r", layers=layers, tokens=pairs)

        positions = [p for first, last in ([(0, length)] if pairs is None else pairs) for p in range(first, last)]
        experts, present = expected(rows, SPEC, layers or SPEC.moe_layers, positions)
        np.testing.assert_array_equal(got.routed_experts, experts)
        np.testing.assert_array_equal(got.present(), present)
        missing = {positions[j] for j in np.flatnonzero(~present.all(axis=0))}
        assert {p for first, last in got.missing for p in range(first, last)} == missing


def test_vectors_come_from_the_first_row_that_has_the_token(stored: Stored) -> None:
    first = stored.put("r", 4, part=True, vectors=True)
    stored.put("r", 4, start=2, part=True)
    last = stored.put("r", 5, start=3, part=True, vectors=True)
    got = stored.dataset.get("r", tokens=[(1, 8)])
    assert first.token_ids is not None
    assert last.token_ids is not None
    assert last.logprobs is not None
    np.testing.assert_array_equal(got.token_ids, [*first.token_ids[1:], *last.token_ids[1:]])
    np.testing.assert_array_equal(got.logprobs[3:], last.logprobs[1:])


def test_vectors_that_no_row_has_are_told(stored: Stored) -> None:
    stored.put("r", 3, part=True)
    stored.put("r", 2, start=3, part=True, vectors=True)
    got = stored.dataset.get("r", tokens=slice(1, 4))
    assert got.token_ids is not None
    assert got.logprobs is not None
    assert list(got.token_ids[:2]) == [-1, -1]
    assert got.token_ids[2] >= 0
    assert list(np.isnan(got.logprobs)) == [True, True, False]
    stored.put("plain", 3)
    assert stored.dataset.get("plain").token_ids is None


@pytest.mark.parametrize("kind", ["ltk", "tlk", "padded", "wide", "reversed"])
def test_out_is_filled_whatever_its_strides(stored: Stored, kind: str) -> None:
    data = stored.put("r", 6, missing=((2, 3),))
    out = {
        "ltk": np.full((4, 6, 2), 77, np.uint8),
        "tlk": np.full((6, 4, 2), 77, np.uint8).transpose(1, 0, 2),
        "padded": np.full((4, 9, 3), 77, np.uint8)[:, 1:7, :2],
        "wide": np.full((4, 6, 2), 77, np.int32),
        "reversed": np.full((4, 6, 2), 77, np.uint8)[::-1, ::-1, ::-1],
    }[kind]
    got = stored.dataset.get("r", out=out)
    assert got.routed_experts is out
    np.testing.assert_array_equal(out, data.routed_experts)
    assert (out[:, 2] == 0).all()


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (np.zeros((4, 5, 2), np.uint8), r"\(4, 5, 2\) uint8: expected \(4, 6, 2\)"),
        (np.zeros((4, 6, 2), np.int8), "uint8 or wider"),
        ([[0]], "is a list"),
        (np.frombuffer(bytes(48), np.uint8).reshape(4, 6, 2), "read-only"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(stored: Stored, out: Any, says: str) -> None:
    stored.put("r", 6)
    with pytest.raises(rr.InvalidRoutingError, match=says):
        stored.dataset.get("r", out=out)


def test_payload_damage_names_the_shard(stored: Stored) -> None:
    data = stored.row("r", 5000)
    assert data.routed_experts is not None
    data.routed_experts[:] = 7
    path = stored.shard(data, compression="zstd")
    stored.dataset.heads(["r"])  # the index is known from here on
    content = bytearray(path.read_bytes())
    at = content.index(b"\x28\xb5\x2f\xfd")  # a zstd frame
    content[at : at + 4] = bytes(4)
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(rr.CorruptShardError, match=path.name):
        stored.dataset.get("r")


def test_small_arrays_share_blocks_and_do_not_overlap() -> None:
    arrays = Arrays(count=200)
    made = [arrays.empty((3, size, 7), "uint16") for size in range(900, 1100)]
    for number, array in enumerate(made):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(made))
    assert all(array.flags.c_contiguous and array.flags.aligned for array in made)
    assert len({id(array.base) for array in made}) < 5


def test_a_large_or_a_lone_array_stands_alone() -> None:
    assert Arrays(count=9).empty((1, HUGE_PAGES_BYTES, 1), "uint8").base is None
    assert Arrays(count=1).empty((2, 3, 4), "uint8").base is None
    assert Arrays(count=9).empty((2, 0, 4), "uint8").shape == (2, 0, 4)


def test_a_row_far_away_takes_no_memory_for_what_lies_before_it(stored: Stored) -> None:
    data = stored.put("far", 5, start=FAR, part=True)
    with pytest.raises(InvalidRoutingError, match=r"'far' has 2147483645 tokens; .* 17179869160 bytes, .* tokens="):
        stored.dataset.get("far")
    got = stored.dataset.get("far", tokens=slice(FAR - 1, None))
    np.testing.assert_array_equal(got.routed_experts[:, 1:], data.routed_experts)
    assert got.missing == ((FAR - 1, FAR),)


def test_lack_of_memory_says_how_much_and_the_way_out(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(self: Arrays, shape: tuple[int, ...], dtype: str) -> None:
        raise MemoryError

    stored.put("r", 5)
    monkeypatch.setattr(Arrays, "empty", empty)
    with pytest.raises(InvalidRoutingError, match=r"takes 40 bytes, more than there is memory: .* tokens="):
        stored.dataset.get("r")
