"""Names on disk, both ways: what is ours reads back as it was, nothing else is taken for ours; and `format.json`."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ABSENT_LITERAL, any_texts, key_schemes, keys_of, path_values, specs

from rr_dataset.errors import FormatError, InvalidInputError, NewerFormatError
from rr_dataset.keys import KeyScheme
from rr_dataset.layout import (
    FORMAT_PATH,
    FORMAT_VERSION,
    STAGING_DIR,
    TOMBSTONE_DIR,
    DatasetFormat,
    ShardName,
    parse_partition,
    parse_ref,
    parse_shard_name,
    parse_tombstone_name,
    partition_path,
    quote_value,
    row_ref,
    tombstone_name,
    unquote_value,
)
from rr_dataset.record import RoutingSpec

WRITER = "0123456789abcdef"
UNIQUE = "00112233445566778899aabbccddeeff"
RAW = f"00-0000018bcfe56800-0000018bcfe56801-3-{WRITER}-12.arrow"
COMPACTED = f"07-0000018bcfe56800-0000018bcfe56801-3-{UNIQUE}.arrow"

stamps = st.integers(0, (1 << 64) - 1)
counts = st.integers(1, 10**19 - 1)
hex_digits = st.integers(0, (1 << 64) - 1).map(lambda n: f"{n:016x}")


@st.composite
def shard_names(draw: st.DrawFn) -> ShardName:
    tmin, tmax = sorted((draw(stamps), draw(stamps)))
    if draw(st.booleans()):
        return ShardName(0, tmin, tmax, draw(counts), writer=draw(hex_digits), seq=draw(counts) - 1)
    return ShardName(draw(st.integers(1, 99)), tmin, tmax, draw(counts), unique=draw(hex_digits) + draw(hex_digits))


@st.composite
def formats(draw: st.DrawFn) -> DatasetFormat:
    keys = draw(key_schemes)
    seconds = st.floats(0.001, 1e9) | st.integers(1, 10**9)
    return DatasetFormat(
        uuid=str(draw(st.uuids())),
        spec=draw(specs()),
        keys=keys,
        keep=draw(st.sampled_from(["all", "last_turn"] if keys.turn else ["all"])),
        max_clock_skew_s=draw(st.just(0) | seconds),
        tombstone_ttl_s=draw(st.floats(3601, 1e9)),
        grace_s=draw(seconds),
        ttl_s=draw(st.none() | seconds),
        max_bytes=draw(st.none() | st.integers(1, 1 << 60)),
    )


FORMAT = DatasetFormat(str(UUID(int=1)), RoutingSpec((3, 4), 64, 8), KeyScheme.fastdeploy())


@given(st.data())
def test_the_partition_of_any_legal_id_reads_back_and_is_safe_on_disk(data: st.DataObject) -> None:
    scheme = data.draw(key_schemes)
    pairs = scheme.partition(data.draw(keys_of(scheme)).components)
    path = partition_path(pairs)
    assert parse_partition(path) == pairs
    assert path.isascii()
    segments = path.split("/")
    assert len(segments) == scheme.partition_by
    for segment, name in zip(segments, scheme.components, strict=False):
        assert segment.startswith(f"{name}=")
        assert segment[0].isalpha()  # foreign readers skip what starts with _ or .
        assert len(segment) < 256
        assert not set(segment) & set('/\\:*?"<>|\0\n ')


@given(path_values)
def test_values_are_percent_encoded_and_read_back(value: str) -> None:
    text = quote_value(value)
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~%")
    assert unquote_value(text) == value


@given(any_texts)
def test_a_quoted_value_has_one_spelling(text: str) -> None:
    value = unquote_value(text) if text.isprintable() else None
    assert value is None or quote_value(value) == text


def test_examples_of_partitions() -> None:
    assert partition_path((("data_id", "a:b"),)) == "data_id=a%3Ab"
    assert partition_path((("data_id", ".."),)) == "data_id=.."
    assert partition_path((("data_id", "日/x"),)) == "data_id=%E6%97%A5%2Fx"
    two = (("data_id", "math_17"), ("gen_id", None))
    assert partition_path(two) == f"data_id=math_17/gen_id={ABSENT_LITERAL}"
    assert parse_partition(f"data_id=math_17/gen_id={ABSENT_LITERAL}") == two


@pytest.mark.parametrize(
    "pairs",
    [
        (),
        (("data_id", ""),),
        (("data_id", ABSENT_LITERAL),),
        (("data_id", "x" * 201),),
        (("data_id", "/" * 67),),
        (("data_id", "\ud800"),),
        (("", "x"),),
        (("_data", "x"),),
        (("..", "x"),),
        (("a/b", "x"),),
        (("a=b", "x"),),
    ],
)
def test_pairs_that_make_no_path_are_refused(pairs: tuple[tuple[str, str | None], ...]) -> None:
    with pytest.raises(InvalidInputError):
        partition_path(pairs)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "_rr",
        "_rr/tombstones",
        "data_id",
        "data_id=",
        "=x",
        "data_id=a:b",
        "data_id=a%3ab",
        "data_id=%41",
        "data_id=%",
        "data_id=%zz",
        "data_id=%FF",
        "data_id=%ED%A0%80",
        "data_id=a b",
        "data_id=é",
        "data_id=x\n",
        "data_id=x/",
        "/data_id=x",
        "data_id=x//gen_id=1",
        "_data=x",
        ".data=x",
        "data_id=" + "x" * 201,
        "data_id=x.tmp/..",
        "data_id=a=b",
    ],
)
def test_foreign_directories_are_not_ours(path: str) -> None:
    assert parse_partition(path) is None


@given(any_texts | any_texts.map("data_id={}".format))
def test_any_directory_is_foreign_or_has_one_spelling(path: str) -> None:
    pairs = parse_partition(path)
    assert pairs is None or partition_path(pairs) == path


@given(shard_names())
def test_shard_names_read_back(name: ShardName) -> None:
    assert parse_shard_name(name.text) == name
    assert len(name.text) < 256
    assert name.text[0].isdigit()


@given(st.lists(shard_names(), max_size=20))
def test_shard_names_sort_by_level_and_time_as_texts_too(names: list[ShardName]) -> None:
    def key(name: ShardName) -> tuple[int, int, int]:
        return name.level, name.tmin, name.tmax

    assert [key(name) for name in sorted(names)] == sorted(map(key, names))
    assert [key(name) for name in sorted(names, key=lambda name: name.text)] == sorted(map(key, names))


def test_examples_of_shard_names() -> None:
    stamps_of = (0x18BCFE56800, 0x18BCFE56801)
    assert parse_shard_name(RAW) == ShardName(0, *stamps_of, 3, writer=WRITER, seq=12)
    assert parse_shard_name(COMPACTED) == ShardName(7, *stamps_of, 3, unique=UNIQUE)
    assert COMPACTED.replace("07-", "10-") > COMPACTED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x.arrow",
        RAW.removesuffix(".arrow"),
        RAW + ".tmp",
        RAW + "\n",
        "." + RAW,
        RAW.replace(".arrow", ".parquet"),
        RAW.replace("00-", "01-", 1),
        COMPACTED.replace("07-", "00-"),
        RAW.replace("00-", "0-", 1),
        RAW.replace("00-", "000-", 1),
        RAW.replace("-3-", "-0-"),
        RAW.replace("-3-", "-03-"),
        RAW.replace("-3-", "-+3-"),
        RAW.replace("-3-", "-\u0663-"),
        RAW.replace("-12.", "-012."),
        RAW.replace("-12.", "-."),
        RAW.replace("-12.", f"-1{'0' * 19}."),
        RAW.replace("abcdef", "ABCDEF"),
        RAW.replace("cfe56800", "CFE56800"),
        RAW.replace("6801", "67ff"),
        COMPACTED.replace("ddee", ""),
        f"_rr/{RAW}",
    ],
)
def test_foreign_files_are_no_shards(text: str) -> None:
    assert parse_shard_name(text) is None


@given(st.text() | st.text("0123456789abcdef-.row", max_size=90) | st.sampled_from([RAW, COMPACTED]), st.data())
def test_any_file_is_foreign_or_has_one_spelling(text: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(text)))
    damaged = text[:at] + data.draw(st.sampled_from(["", "0", "f", "-", "a"])) + text[at + 1 :]
    name = parse_shard_name(damaged)
    assert name is None or name.text == damaged


@pytest.mark.parametrize(
    "change",
    [
        {"level": 1},
        {"level": -1},
        {"level": 100},
        {"tmin": -1},
        {"tmin": 0x18BCFE56802},
        {"tmax": 1 << 64},
        {"rows": 0},
        {"rows": 10**19},
        {"writer": None},
        {"writer": WRITER.upper()},
        {"writer": "../../etc/passwd"},
        {"seq": None},
        {"seq": -1},
        {"unique": UNIQUE},
        {"level": 1, "unique": UNIQUE},
        {"level": 1, "writer": None, "seq": None, "unique": UNIQUE[:-1]},
    ],
)
def test_a_shard_that_has_no_name_is_refused(change: dict[str, Any]) -> None:
    name = parse_shard_name(RAW)
    assert name is not None
    with pytest.raises(InvalidInputError, match="is no shard name"):
        replace(name, **change)


@given(st.integers(0, (1 << 48) - 1), st.uuids(), st.integers(0, (1 << 48) - 1))
def test_tombstone_names_read_back_and_sort_by_time(made_ms: int, unique: UUID, other_ms: int) -> None:
    name = tombstone_name(made_ms, unique.hex)
    assert parse_tombstone_name(name) == (made_ms, unique.hex)
    other = tombstone_name(other_ms, uuid4().hex)
    assert made_ms == other_ms or (name < other) == (made_ms < other_ms)


@pytest.mark.parametrize(
    ("made_ms", "unique"), [(-1, UNIQUE), (1 << 48, UNIQUE), (0, ""), (0, str(UUID(UNIQUE))), (0, "../" + UNIQUE)]
)
def test_a_tombstone_that_has_no_name_is_refused(made_ms: int, unique: str) -> None:
    with pytest.raises(InvalidInputError, match="is no tombstone name"):
        tombstone_name(made_ms, unique)


@pytest.mark.parametrize(
    "text", ["", "x.json", f"0123456789ab-{UNIQUE}", f"0123456789AB-{UNIQUE}.json", f"0123456789ab-{UNIQUE}.json.tmp"]
)
def test_foreign_files_are_no_tombstones(text: str) -> None:
    assert parse_tombstone_name(text) is None


@given(hex_digits, hex_digits, any_texts)
def test_refs_read_back(stamp: str, writer: str, request_id: str) -> None:
    ref = row_ref(f"{stamp}-{writer}", request_id)
    assert parse_ref(ref) == ((f"{stamp}-{writer}", request_id) if request_id else None)
    assert parse_ref(ref[1:]) is None


def test_our_own_files_stay_out_of_the_way_of_foreign_readers() -> None:
    for path in (FORMAT_PATH, TOMBSTONE_DIR, STAGING_DIR):
        assert path.startswith("_rr/")
        assert Path(path).suffix in ("", ".json")
        assert parse_partition(path) is None


@given(formats())
def test_a_format_reads_back_from_its_json(stored: DatasetFormat) -> None:
    data = stored.to_json()
    assert DatasetFormat.from_json(data) == stored
    assert data.isascii()
    assert DatasetFormat.from_json(data).to_json() == data
    assert pickle.loads(pickle.dumps(stored)) == stored
    assert stored.mismatch(replace(stored, uuid=uuid4().hex)) == ""


def test_whole_seconds_are_written_as_floats() -> None:
    assert replace(FORMAT, grace_s=60).to_json() == replace(FORMAT, grace_s=60.0).to_json()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": "zarr", "format_version": 0}',
        b'{"format": "rr_dataset"}',
    ],
)
def test_what_is_no_format_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError, match=FORMAT_PATH) as caught:
        DatasetFormat.from_json(data)
    assert not isinstance(caught.value, NewerFormatError)


@pytest.mark.parametrize("name", sorted({*json.loads(FORMAT.to_json())}))
def test_a_format_must_say_everything(name: str) -> None:
    values = json.loads(FORMAT.to_json())
    del values[name]
    with pytest.raises(FormatError):
        DatasetFormat.from_json(json.dumps(values).encode())


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.data(), JUNK)
def test_a_damaged_format_is_a_format_error_or_reads_as_it_says(data: st.DataObject, junk: Any) -> None:
    values = json.loads(FORMAT.to_json())
    group = data.draw(st.sampled_from([values, values["spec"], values["keys"]]))
    group[data.draw(st.sampled_from(sorted(group)))] = junk
    text = json.dumps(values).encode()
    try:
        stored = DatasetFormat.from_json(text)
    except FormatError:
        return
    assert json.loads(stored.to_json()) == json.loads(text)


@pytest.mark.parametrize(("group", "name", "value"), [("spec", "moe_layers", [float("inf")]), ("", "grace_s", 10**400)])
def test_numbers_that_no_float_or_integer_holds_are_a_format_error(group: str, name: str, value: Any) -> None:
    values = json.loads(FORMAT.to_json())
    (values[group] if group else values)[name] = value
    with pytest.raises(FormatError, match="does not describe a dataset"):
        DatasetFormat.from_json(json.dumps(values).encode())


def test_a_newer_format_asks_for_an_upgrade_whatever_else_it_holds() -> None:
    newer = {"format": "rr_dataset", "format_version": FORMAT_VERSION + 1, "shape": "unknown"}
    with pytest.raises(NewerFormatError, match="upgrade"):
        DatasetFormat.from_json(json.dumps(newer).encode())


@pytest.mark.parametrize("version", [-1, "0", 0.0, None, True])
def test_a_format_version_is_a_whole_number(version: Any) -> None:
    with pytest.raises(FormatError, match="format_version"):
        DatasetFormat.from_json(json.dumps({"format": "rr_dataset", "format_version": version}).encode())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"uuid": ""}, "a UUID"),
        ({"uuid": "../x"}, "a UUID"),
        ({"uuid": 5}, "a UUID"),
        ({"keep": "last"}, "one of all, last_turn"),
        ({"keep": "last_turn", "keys": KeyScheme.uuid()}, "no turn"),
        ({"max_clock_skew_s": -1}, "zero or more seconds"),
        ({"max_clock_skew_s": float("nan")}, "zero or more seconds"),
        ({"max_clock_skew_s": None}, "zero or more seconds"),
        ({"grace_s": float("inf")}, "zero or more seconds"),
        ({"grace_s": 0}, "more than 0"),
        ({"grace_s": True}, "zero or more seconds"),
        ({"tombstone_ttl_s": 3600}, "more than 3600"),
        ({"ttl_s": 0}, "more than 0, or None"),
        ({"ttl_s": "60"}, "zero or more seconds"),
        ({"max_bytes": 0}, "a whole number over 0"),
        ({"max_bytes": 1.5}, "a whole number over 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        replace(FORMAT, **change)
    assert says in str(caught.value)
    assert repr(next(iter(change.values()))) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spec": RoutingSpec((3, 4), 128, 8)}, "spec.num_experts is 64, not 128"),
        ({"keys": KeyScheme.fastdeploy(partition_by=2)}, "keys.partition_by is 1, not 2"),
        ({"keep": "last_turn"}, "keep is 'all', not 'last_turn'"),
        ({"ttl_s": 5}, "ttl_s is None, not 5.0"),
        ({"grace_s": 5, "max_bytes": 9}, "grace_s is 600.0, not 5.0; max_bytes is None, not 9"),
    ],
)
def test_a_mismatch_names_what_differs(change: dict[str, Any], says: str) -> None:
    assert FORMAT.mismatch(replace(FORMAT, **change, uuid=UNIQUE)) == says


def test_a_format_that_is_nested_without_end_is_a_format_error() -> None:
    with pytest.raises(FormatError, match=r"_rr/format\.json is no JSON"):
        DatasetFormat.from_json(b"[" * 100_000)


def test_what_is_no_format_is_shown_by_its_beginning() -> None:
    with pytest.raises(FormatError, match="it begins with b'<html><body>Please log in"):
        DatasetFormat.from_json(b"<html><body>Please log in</body></html>" + b" " * 10_000)
