"""Request ids: what they split into, what prefixes cover, what is refused and how the refusal helps."""

from __future__ import annotations

import pickle
from dataclasses import replace
from enum import Enum
from typing import Any
from urllib.parse import quote
from zlib import crc32

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import ABSENT_LITERAL, any_texts, key_schemes, keys_of

from rr_dataset.errors import InvalidInputError, InvalidRequestIdError
from rr_dataset.keys import MAX_CHOICE, RESERVED_NAMES, KeyScheme, Prefix, RequestKey
from rr_dataset.record import RoutingSpec
from rr_dataset.schema import shard_schema

FD = KeyScheme.fastdeploy()
FD2 = KeyScheme.fastdeploy(partition_by=2)
STEP = KeyScheme.by_step()
UUID = KeyScheme.uuid()
ENGINE_ID = "chatcmpl-math_17_epoch_15:2:2:1-0f8fad5b-d9cb-469f-a165-70867728950e_0"


class TextEnum(str, Enum):
    """Enums whose members are texts print as their name."""

    ID = "math:1"


@given(st.data())
def test_every_legal_id_splits_into_what_it_was_joined_from(data: st.DataObject) -> None:
    scheme = data.draw(key_schemes)
    key = data.draw(keys_of(scheme))
    assert scheme.parse(key.request_id) == key


@given(key_schemes, any_texts)
def test_any_text_is_refused_or_can_be_put_together_again(scheme: KeyScheme, text: str) -> None:
    try:
        key = scheme.parse(text)
    except InvalidRequestIdError:
        return
    assert key.request_id == text
    values = [v for v in key.components[scheme.buckets is not None :] if v is not None]
    sample = "" if key.choice is None else f"#{key.choice}"
    assert scheme.delimiter.join(values) + sample == text
    for name, value in zip(scheme.components, key.components, strict=True):
        assert value != ""
        assert value != ABSENT_LITERAL
        assert value is None or name not in scheme.numbers or str(int(value)) == value
    for _, value in scheme.partition(key.components):
        assert value is None or len(quote(value, safe="")) <= 200


@pytest.mark.parametrize(
    ("scheme", "request_id", "components", "choice"),
    [
        (FD, "math_17_epoch_15:2:2:1", ("math_17_epoch_15", "2", "2", "1"), None),
        (FD, "math", ("math", None, None, None), None),
        (FD, "math:17", ("math", "17", None, None), None),
        (FD, "a:b:0:1:2", ("a:b", "0", "1", "2"), None),
        (FD, "::0:1:2", (":", "0", "1", "2"), None),
        (FD, "math:17#2", ("math", "17", None, None), 2),
        (FD, "math#0", ("math", None, None, None), 0),
        (FD, "a#1:0", ("a#1", "0", None, None), None),
        (FD, "a#b", ("a#b", None, None, None), None),
        (FD, "a#\u0661", ("a#\u0661", None, None, None), None),
        (FD, "chatcmpl", ("chatcmpl", None, None, None), None),
        (FD, f"{ABSENT_LITERAL}_", (f"{ABSENT_LITERAL}_", None, None, None), None),
        (FD, f"a\n{ABSENT_LITERAL}", (f"a\n{ABSENT_LITERAL}", None, None, None), None),
        (STEP, "120:math:17#1", ("120", "math:17"), 1),
        (STEP, "120::", ("120", ":"), None),
        (STEP, "120", ("120", None), None),
        (UUID, "a:b:c", (str(crc32(b"a:b:c") % 256), "a:b:c"), None),
        (UUID, "a:b:c#9", (str(crc32(b"a:b:c") % 256), "a:b:c"), 9),
    ],
)
def test_examples_of_the_grammar(
    scheme: KeyScheme, request_id: str, components: tuple[str | None, ...], choice: int | None
) -> None:
    assert scheme.parse(request_id) == RequestKey(request_id, components, choice)


@pytest.mark.parametrize(
    ("scheme", "request_id", "says"),
    [
        (FD, "", "data_id=''"),
        (FD, ":1", "data_id=''"),
        (FD, "a::1", "gen_id=''"),
        (FD, "a:", "gen_id=''"),
        (FD, "#1", "data_id=''"),
        (FD, "a:b", "a data_id that contains ':' needs all components after it"),
        (FD, "a:01", "no leading zero"),
        (FD, "a:-1", "no sign"),
        (FD, "a:1\n", "canonical decimal"),
        (FD, "a:\u0661", "canonical decimal"),
        (FD, "a: 1", "canonical decimal"),
        (FD, "a:1:2:3.0", "segment_id='3.0'"),
        (FD, "a#", "a trailing #n"),
        (FD, "a#02", "a trailing #n"),
        (FD, "a#1#2", "a trailing #n"),
        (FD, "a##2", "a trailing #n"),
        (FD, f"a#{MAX_CHOICE + 1}", str(MAX_CHOICE)),
        (FD, ABSENT_LITERAL, ABSENT_LITERAL),
        (FD, f"{ABSENT_LITERAL}:1#2", ABSENT_LITERAL),
        (UUID, ABSENT_LITERAL, ABSENT_LITERAL),
        (UUID, "", "ids are id"),
        (STEP, "a:1", "step='a'"),
        (STEP, "1:", "rest=''"),
        (FD, "a\ud800", "lone surrogate"),
        (FD, "x" * 201, "201 percent-encoded bytes"),
        (FD, "/" * 67, "201 percent-encoded bytes"),
        (FD, "日" * 23, "207 percent-encoded bytes"),
        (FD2, "a:" + "1" * 201, "gen_id takes 201"),
        (UUID, "x" * 1025, "1025 UTF-8 bytes"),
        (UUID, "é" * 513, "1026 UTF-8 bytes"),
    ],
)
def test_a_refusal_names_the_fault(scheme: KeyScheme, request_id: str, says: str) -> None:
    with pytest.raises(InvalidRequestIdError) as caught:
        scheme.parse(request_id)
    assert says in str(caught.value)
    assert repr(request_id)[:100] in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("value", [None, 5, b"math:1", ["math"], 1.5])
def test_an_id_that_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequestIdError, match=f"not {type(value).__name__}"):
        FD.parse(value)


@pytest.mark.parametrize("scheme", [FD, FD2, STEP, UUID])
def test_an_engine_id_is_refused_with_the_rollout_id_in_it(scheme: KeyScheme) -> None:
    with pytest.raises(InvalidRequestIdError, match="pass 'math_17_epoch_15:2:2:1'"):
        scheme.parse(ENGINE_ID)
    with pytest.raises(InvalidRequestIdError, match="pass 'math_17_epoch_15:2:2:1'"):
        scheme.parse_prefix(ENGINE_ID)
    with pytest.raises(InvalidRequestIdError, match="pass the id that the trainer knows"):
        scheme.parse("chatcmpl-77")


@pytest.mark.parametrize("text", ["x" * 200, "/" * 66 + "aa", "日" * 22 + "aa"])
def test_path_values_of_200_encoded_bytes_fit(text: str) -> None:
    assert len(quote(text, safe="")) == 200
    assert FD.parse(f"{text}:1:2:3").components[0] == text


def test_only_path_values_are_bounded_by_the_directory_name() -> None:
    text = "x" * 1020
    assert STEP.parse(f"120:{text}").components == ("120", text)
    assert UUID.parse("日" * 341 + "x").components[1] == "日" * 341 + "x"
    assert FD.parse("a:" + "1" * 1000).components[1] == "1" * 1000


@pytest.mark.parametrize("value", [np.str_("math:1"), TextEnum.ID])
def test_subclasses_of_str_become_plain(value: str) -> None:
    key = FD.parse(value)
    assert key == RequestKey("math:1", ("math", "1", None, None), None)
    assert [type(text) for text in (key.request_id, *key.components[:2])] == [str, str, str]
    assert FD.parse_prefix({"data_id": value}).components[0] == "math:1"


@given(st.data())
def test_samples_share_their_path_and_differ_in_the_key(data: st.DataObject) -> None:
    scheme = data.draw(key_schemes)
    key = data.draw(keys_of(scheme).filter(lambda key: key.choice is None))
    first, second = (scheme.parse(f"{key.request_id}#{n}") for n in (0, 1))
    assert first.components == second.components == key.components
    assert len({first, second, key}) == 3
    whole = scheme.parse_prefix(key.request_id)
    only = scheme.parse_prefix(f"{key.request_id}#1")
    assert [whole.matches(k.components, k.choice) for k in (key, first, second)] == [True, True, True]
    assert [only.matches(k.components, k.choice) for k in (key, first, second)] == [False, False, True]


def test_prefixes_match_by_component() -> None:
    prefix = FD.parse_prefix("a:1")
    covered = ["a:1", "a:1:0", "a:1:0:7", "a:1#3"]
    spared = ["a", "a:10", "a:11:0", "b:1", "a:a:1:0:0", "a:0:1"]
    assert [prefix.matches(FD.parse(i).components, FD.parse(i).choice) for i in covered] == [True] * 4
    assert [prefix.matches(FD.parse(i).components, FD.parse(i).choice) for i in spared] == [False] * 6


@given(st.data())
def test_a_prefix_covers_what_starts_with_its_components(data: st.DataObject) -> None:
    scheme = data.draw(key_schemes)
    one, other = data.draw(keys_of(scheme)), data.draw(keys_of(scheme))
    prefix = scheme.parse_prefix(one.request_id)
    pinned = [value for value in one.components if value is not None]
    samples = one.choice is None or one.choice == other.choice
    assert prefix.matches(one.components, one.choice)
    assert prefix.matches(other.components, other.choice) == (samples and [*other.components[: len(pinned)]] == pinned)


@given(st.data())
def test_a_mapping_pins_exactly_what_it_names(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from([FD, FD2, STEP]))
    key = data.draw(keys_of(scheme))
    values = {n: v for n, v in zip(scheme.components, key.components, strict=True) if v is not None}
    pins: dict[str, str | int] = {name: values[name] for name in data.draw(st.sets(st.sampled_from(sorted(values))))}
    assume(pins)
    if key.choice is not None:
        pins["choice"] = key.choice
    prefix = scheme.parse_prefix(pins)
    assert prefix == Prefix(tuple(pins.get(name) for name in scheme.components), key.choice)
    assert prefix.matches(key.components, key.choice)


def test_a_mapping_reaches_ids_that_a_text_cannot() -> None:
    assert FD.parse_prefix("math:17") == Prefix(("math", "17", None, None))
    assert FD.parse_prefix({"data_id": "math:17"}) == Prefix(("math:17", None, None, None))
    assert FD.parse_prefix({"data_id": "a#1", "choice": 2}) == Prefix(("a#1", None, None, None), 2)
    assert FD.parse_prefix({"turn_id": 3}) == Prefix((None, None, "3", None))
    assert FD.parse_prefix({"data_id": 17, "gen_id": np.int64(2)}) == Prefix(("17", "2", None, None))


def test_a_plain_prefix_is_checked_and_of_texts() -> None:
    assert FD.plain_prefix("math:17") == "math:17"
    plain = FD.plain_prefix({"data_id": "math:17", "choice": 2})
    assert plain == {"data_id": "math:17", "choice": "2"}
    assert FD.parse_prefix(plain) == FD.parse_prefix({"data_id": "math:17", "choice": 2})
    for wrong in ("", {}, {"nothing": 1}):
        with pytest.raises(InvalidRequestIdError):
            FD.plain_prefix(wrong)


def test_a_prefix_of_a_bucketed_scheme_knows_its_bucket() -> None:
    bucket = str(crc32(b"ab") % 256)
    assert UUID.parse_prefix("ab#1") == Prefix((bucket, "ab"), 1)
    assert UUID.parse_prefix({"id": "ab"}) == Prefix((bucket, "ab"))
    assert UUID.parse_prefix({"id": "ab", "bucket": bucket}) == Prefix((bucket, "ab"))
    assert UUID.parse_prefix({"bucket": 7}) == Prefix(("7", None))
    with pytest.raises(InvalidRequestIdError, match=f"in bucket {bucket}"):
        UUID.parse_prefix({"id": "ab", "bucket": (int(bucket) + 1) % 256})


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("", "data_id=''"),
        ("math:", "gen_id=''"),
        ({}, "a mapping that pins a component"),
        (None, "a mapping that pins a component"),
        (["math"], "a mapping that pins a component"),
        ({"data": "x"}, "expected one of data_id, gen_id, turn_id, segment_id, choice"),
        ({"data_id": ""}, "not empty"),
        ({"data_id": None}, "a text or an integer"),
        ({"gen_id": True}, "a text or an integer"),
        ({"gen_id": 1.0}, "a text or an integer"),
        ({"gen_id": "01"}, "canonical decimal"),
        ({"gen_id": -1}, "canonical decimal"),
        ({"gen_id": "1:2"}, "canonical decimal"),
        ({"data_id": ABSENT_LITERAL}, ABSENT_LITERAL),
        ({"data_id": "x" * 201}, "201 percent-encoded bytes"),
        ({"data_id": "\udcff"}, "lone surrogate"),
        ({"choice": "01"}, "a sample number"),
        ({"choice": MAX_CHOICE + 1}, "a sample number"),
    ],
)
def test_a_prefix_that_no_id_can_start_with_is_refused(prefix: Any, says: str) -> None:
    with pytest.raises(InvalidRequestIdError) as caught:
        FD.parse_prefix(prefix)
    assert says in str(caught.value)


def test_the_second_level_is_checked_in_a_mapping_too() -> None:
    with pytest.raises(InvalidRequestIdError, match="gen_id takes 201"):
        FD2.parse_prefix({"gen_id": "1" * 201})
    assert FD.parse_prefix({"gen_id": "1" * 201}).components[1] == "1" * 201


def test_only_the_rest_may_hold_the_delimiter() -> None:
    tagged = replace(FD, numbers=("turn_id",))
    with pytest.raises(InvalidRequestIdError, match="only data_id may contain ':'"):
        tagged.parse_prefix({"gen_id": "a:b"})
    assert tagged.parse("x:a:1").components == ("x", "a", "1", None)


def test_partitions_take_the_leading_components() -> None:
    assert FD.partition(FD.parse("a:1").components) == (("data_id", "a"),)
    assert FD2.partition(FD2.parse("a:1").components) == (("data_id", "a"), ("gen_id", "1"))
    assert FD2.partition(FD2.parse("a").components) == (("data_id", "a"), ("gen_id", None))
    assert STEP.partition(STEP.parse("5:x").components) == (("step", "5"),)
    assert UUID.partition(UUID.parse("ab").components) == (("bucket", str(crc32(b"ab") % 256)),)


def test_buckets_stay_in_range_and_do_not_depend_on_the_process() -> None:
    scheme = KeyScheme.uuid(buckets=7)
    assert {scheme.parse(f"id-{i}").components[0] for i in range(300)} == {str(n) for n in range(7)}
    assert scheme.parse("123456789").components[0] == str(0xCBF43926 % 7)  # the published check value of CRC-32


@given(key_schemes)
def test_schemes_survive_their_json_form_and_pickling(scheme: KeyScheme) -> None:
    used = pickle.loads(pickle.dumps(scheme))
    used.parse("5")
    assert used == scheme
    assert hash(used) == hash(scheme)
    assert pickle.loads(pickle.dumps(used)) == scheme
    assert KeyScheme.from_dict(scheme.to_dict()) == scheme
    assert set(scheme.to_dict()) >= {
        "components",
        "numbers",
        "delimiter",
        "partition_by",
        "turn",
        "rest",
        "buckets",
        "split",
    }


def components_of(scheme: KeyScheme, request_id: str) -> tuple[Any, ...]:
    key = scheme.parse(request_id)
    return key.components, key.choice


@pytest.mark.parametrize(
    ("scheme", "glob", "covered", "left"),
    [
        (FD, "math_*:2", ["math_1:2", "math_:2:0:1#4"], ["math_1:20", "math_1", "Math_1:2"]),
        (FD, "a:*", ["a:1", "a:10:2"], ["a", "ab:1"]),
        (FD, "*:x:1:*:*", ["a:x:1:0:0", "b:c:x:1:2:3"], ["a:y:1:0:0"]),
        (FD, "a[*]", ["a*", "a*:1"], ["ab", "a"]),
        (FD, "[!b-d]?", ["ab", "zz:1"], ["bb", "a", "abc"]),
        (FD, "a*\n", ["ab\n", "a\n\n:1"], ["a", "ab"]),
        (FD, "*#2", ["a#2", "a:1#2"], ["a", "a#3", "a#20"]),
        (FD, "a#b*", ["a#bc", "a#b:1"], ["a#c"]),
        (FD, "a[b", ["a[b"], ["ab"]),
        (KeyScheme.uuid(4), "req-*#1", ["req-1#1", "req-a:b#1"], ["req-1", "xreq-1#1"]),
        (STEP, "1?:*x", ["10:x", "19:a:x"], ["1:x", "100:x", "10:y"]),
    ],
)
def test_globs_match_by_component(scheme: KeyScheme, glob: str, covered: list[str], left: list[str]) -> None:
    parsed = scheme.parse_glob(glob)
    assert [i for i in covered + left if parsed.matches(*components_of(scheme, i))] == covered
    for request_id in covered:
        components, _ = components_of(scheme, request_id)
        assert all(parsed.allows(level, value) for level, value in enumerate(components))
        assert all(pin in (None, value) for pin, value in zip(parsed.pinned, components, strict=True))


def test_what_a_glob_pins_and_what_a_prefix_pins() -> None:
    assert FD.parse_glob("a:1*:[12]").pinned == ("a", None, None, None)
    assert FD.parse_glob("a?:1").pinned == (None, "1", None, None)
    prefix = FD.parse_prefix("a:1")
    assert prefix.pinned == ("a", "1", None, None)
    assert [prefix.allows(1, value) for value in ("1", "2", None)] == [True, False, False]
    assert prefix.allows(2, None)


@pytest.mark.parametrize(
    ("glob", "says"),
    [
        ("", "data_id"), ("a:", "gen_id"), ("a::1", "gen_id"), ("a:01", "canonical decimal"), ("*:x", "gen_id='x'"),
        ("a#*", "every sample"), ("a#1?", "every sample"), ("a#[12]", "every sample"), ("a#01", "canonical decimal"),
        ("chatcmpl-*", "rollout id"), (7, "expected a text"), ("\ud800*", "surrogate"), ("x" * 1025, "at most 1024"),
    ],
)  # fmt: skip
def test_globs_that_match_no_id_are_refused(glob: Any, says: str) -> None:
    with pytest.raises(InvalidRequestIdError) as caught:
        FD.parse_glob(glob)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"components": ("_id", "gen_id", "turn_id")}, "'_id'"),
        ({"components": ("../x", "gen_id", "turn_id")}, "'../x'"),
        ({"components": ("x" * 51, "gen_id", "turn_id")}, "from a letter on"),
        ({"components": ("layer_003", "gen_id", "turn_id")}, "no other column's name"),
        ({"components": ("a", "A", "gen_id", "turn_id")}, "different names"),
        ({"components": ()}, "at least one"),
        ({"components": ["a"]}, "a tuple of names"),
        ({"components": "abc"}, "a tuple of names"),
        ({"numbers": ("turn",)}, "numbers=('turn',)"),
        ({"partition_by": 0}, "expected 1 to 2"),
        ({"partition_by": 3}, "expected 1 to 2"),
        ({"partition_by": True}, "expected 1 to 2"),
        ({"split": "middle"}, "right or left"),
        ({"split": "left"}, "'segment_id' when split from the left"),
        ({"rest": "gen_id"}, "'data_id' when split from the right"),
        ({"turn": "data_id"}, "a number outside the path"),
        ({"turn": "gen_id", "partition_by": 2}, "a number outside the path"),
        ({"delimiter": ""}, "one ASCII character"),
        ({"delimiter": "::"}, "one ASCII character"),
        ({"delimiter": "#"}, "one ASCII character"),
        ({"delimiter": "x"}, "one ASCII character"),
        ({"delimiter": "\n"}, "one ASCII character"),
        ({"buckets": 4}, "a bucket number and an id"),
    ],
)
def test_a_scheme_that_cannot_work_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        replace(FD, **change)
    assert says in str(caught.value)


@pytest.mark.parametrize("buckets", [0, -1, (1 << 16) + 1, 2.5, True])
def test_a_number_of_buckets_that_cannot_work_is_refused(buckets: Any) -> None:
    with pytest.raises(InvalidInputError, match="buckets="):
        KeyScheme.uuid(buckets)


@pytest.mark.parametrize("name", [*sorted(RESERVED_NAMES), "Status"])
def test_a_component_cannot_take_the_name_of_another_column(name: str) -> None:
    with pytest.raises(InvalidInputError, match=name):
        replace(STEP, components=("step", name), rest=name)


def test_the_names_of_all_other_columns_are_reserved() -> None:
    columns = set(shard_schema(RoutingSpec((3,), 8, 2), STEP).names)
    assert columns == RESERVED_NAMES | {"step", "rest", "layer_003"}
