"""Request ids and their components.

A `KeyScheme` belongs to a dataset. It splits a request id into named components, whose first ones name the partition
directory, and matches prefixes by component: `a:1` covers `a:1` and `a:1:7`, never `a:10`.

    KeyScheme.fastdeploy()   math_17_epoch_15:2:2:1   data_id=math_17_epoch_15  gen_id=2  turn_id=2  segment_id=1
                             a:b:0:0:0                data_id=a:b  gen_id=0  turn_id=0  segment_id=0
                             math:17#2                data_id=math  gen_id=17, the rest absent; third sample
    KeyScheme.uuid()         3f0c-77                  bucket=crc32("3f0c-77") mod buckets  id=3f0c-77
    KeyScheme.by_step()      120:math:17              step=120  rest=math:17

A trailing `#n` names one of several samples of a request. It is part of the key and of no component.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Mapping
from dataclasses import dataclass, fields
from fnmatch import translate
from functools import cached_property
from numbers import Integral
from typing import Any, NoReturn
from urllib.parse import quote
from zlib import crc32

from rr_dataset.errors import InvalidInputError, InvalidRequestIdError

MAX_ID_BYTES = 1024  # UTF-8 bytes of a request id
MAX_VALUE_BYTES = 200  # percent-encoded bytes of a path value: with `name=` it stays under the 255 of file systems
MAX_NAME_CHARS = 50
MAX_CHOICE = (1 << 31) - 1  # the column is int32
MAX_BUCKETS = 1 << 16
ABSENT = "__HIVE_DEFAULT_PARTITION__"  # the path value of an absent component
RESERVED_NAMES = frozenset({  # the other columns of a row; `layer_...` is refused too
    "record_id", "request_id", "choice", "t_submit", "token_start", "num_tokens", "part", "status", "reason", "missing",
    "weight_version", "weight_spans", "run_id", "producer", "tags", "token_ids", "logprobs", "checksum",
})  # fmt: skip

_ALWAYS_FITS = MAX_VALUE_BYTES // 3  # a byte takes at most three when percent-encoded
_NUMBER = re.compile("0|[1-9][0-9]*")
_TEXT = re.compile(f"(?!{ABSENT}\\Z).+", re.DOTALL)
_NAME = re.compile(f"[A-Za-z][A-Za-z0-9_]{{0,{MAX_NAME_CHARS - 1}}}")
_DELIMITER = re.compile(r"(?![A-Za-z0-9#])[ -~]")
_CHOICE_END = re.compile(r"#[0-9]*\Z")
_WILD = re.compile(r"[*?[]")
_WILD_CHOICE = re.compile(r".*#[0-9!\-\]]*[*?[][0-9*?\[\]!\-]*", re.DOTALL)
_ENGINE_ID = re.compile(
    r"chatcmpl-(?P<rollout>.+)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(_[0-9]+)?"
)


@dataclass(frozen=True)
class RequestKey:
    """A request id and what it says. `components` is parallel to those of the scheme; None is an absent one."""

    request_id: str
    components: tuple[str | None, ...]
    choice: int | None  # the n of a trailing `#n`


@dataclass(frozen=True)
class Prefix:
    """Pinned components. `components` is parallel to those of the scheme; None matches anything, also an absent one."""

    components: tuple[str | None, ...]
    choice: int | None = None

    def matches(self, components: tuple[str | None, ...], choice: int | None) -> bool:
        """Whether a row with these components and this sample is covered."""
        if self.choice is not None and self.choice != choice:
            return False
        return all(want is None or want == have for want, have in zip(self.components, components, strict=True))

    @property
    def pinned(self) -> tuple[str | None, ...]:
        """The components with one value."""
        return self.components

    def allows(self, level: int, value: str | None) -> bool:
        """Whether a row may match whose component number `level` has this value."""
        return self.components[level] in (None, value)


@dataclass(frozen=True)
class Glob:
    """Shell patterns by component. `components` is parallel to those of the scheme; None matches anything.

    `*` is any text, `?` one character, `[seq]` one of these, `[!seq]` none of these; a pattern matches no absent component.
    """

    components: tuple[str | None, ...]
    choice: int | None = None

    def matches(self, components: tuple[str | None, ...], choice: int | None) -> bool:
        """Whether a row with these components and this sample is covered."""
        if self.choice is not None and self.choice != choice:
            return False
        return all(self.allows(level, value) for level, value in enumerate(components))

    @cached_property
    def pinned(self) -> tuple[str | None, ...]:
        """The components with one value: patterns without a wildcard."""
        return tuple(None if text is None or _WILD.search(text) else text for text in self.components)

    def allows(self, level: int, value: str | None) -> bool:
        """Whether a row may match whose component number `level` has this value."""
        pattern = self._compiled[level]
        return pattern is None or (value is not None and pattern.match(value) is not None)

    @cached_property
    def _compiled(self) -> tuple[re.Pattern[str] | None, ...]:
        return tuple(None if text is None else re.compile(translate(text)) for text in self.components)


@dataclass(frozen=True)
class KeyScheme:
    """How the request ids of a dataset split. Make one with `fastdeploy`, `uuid` or `by_step`, or spell it out.

    components: column names, those of the path first. Letters, digits and `_`, starting with a letter.
    numbers: the components that are canonical decimals (0, 7, 12; no sign, no leading zero).
    delimiter: one character between components; empty where ids are not split (with `buckets`).
    partition_by: how many leading components make the path, 1 or 2.
    turn: the number that counts turns, not in the path; None if there is none.
    rest: the component that may contain the delimiter: the first when split from the right, the last from the left.
    buckets: not None: components are (bucket, id), and bucket is the CRC-32 of the id modulo `buckets`.
    split: "right" or "left".
    """

    components: tuple[str, ...]
    numbers: tuple[str, ...]
    delimiter: str
    partition_by: int
    turn: str | None
    rest: str
    buckets: int | None
    split: str

    def __post_init__(self) -> None:
        for field_name in ("components", "numbers"):
            names = getattr(self, field_name)
            texts = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
            _require(texts, field_name, names, "a tuple of names")
        for name in self.components:
            free = _NAME.fullmatch(name) and name.lower() not in RESERVED_NAMES and not name.startswith("layer_")
            _require(
                bool(free), "component", name, "letters, digits and _, from a letter on, and no other column's name"
            )
        unique = len({name.lower() for name in self.components}) == len(self.components)
        _require(bool(self.components) and unique, "components", self.components, "different names, at least one")
        _require(set(self.numbers) <= set(self.components), "numbers", self.numbers, f"names among {self.components}")
        depth = min(2, len(self.components))
        whole = type(self.partition_by) is int and 1 <= self.partition_by <= depth
        _require(whole, "partition_by", self.partition_by, f"1 to {depth}")
        _require(self.split in ("right", "left"), "split", self.split, "right or left")
        rest = self.components[0 if self.split == "right" else -1]
        _require(self.rest == rest, "rest", self.rest, f"{rest!r} when split from the {self.split}")
        later_numbers = set(self.components[self.partition_by :]) & set(self.numbers)
        _require(self.turn is None or self.turn in later_numbers, "turn", self.turn, "a number outside the path")
        if self.buckets is None:
            one = _DELIMITER.fullmatch(self.delimiter) is not None
            _require(one, "delimiter", self.delimiter, "one ASCII character, no letter, digit or #")
        else:
            whole = type(self.buckets) is int and 1 <= self.buckets <= MAX_BUCKETS
            _require(whole, "buckets", self.buckets, f"1 to {MAX_BUCKETS}")
            plain = len(self.components) == 2 and self.numbers == self.components[:1] and self.partition_by == 1
            _require(plain and self.split == "left", "components", self.components, "a bucket number and an id")
            _require(self.delimiter == "", "delimiter", self.delimiter, "none with buckets")

    @classmethod
    def fastdeploy(cls, partition_by: int = 1) -> KeyScheme:
        """`data_id:gen_id:turn_id:segment_id`, split from the right; trailing components may be absent."""
        names = ("data_id", "gen_id", "turn_id", "segment_id")
        return cls(names, names[1:], ":", partition_by, "turn_id", "data_id", None, "right")

    @classmethod
    def uuid(cls, buckets: int = 256) -> KeyScheme:
        """Opaque ids, spread over `buckets` directories."""
        return cls(("bucket", "id"), ("bucket",), "", 1, None, "id", buckets, "left")

    @classmethod
    def by_step(cls) -> KeyScheme:
        """`<step>:<rest>`, split at the first colon: one directory for each training step."""
        return cls(("step", "rest"), ("step",), ":", 1, None, "rest", None, "left")

    def parse(self, request_id: str) -> RequestKey:
        """The components of a request id.

        Raises InvalidRequestIdError for what is no text of 1 to 1024 UTF-8 bytes, for an engine id (`chatcmpl-...`), an
        empty component, a number that is no canonical decimal, or a path value over 200 percent-encoded bytes.
        """
        plain = type(request_id) is str and len(request_id) <= _ALWAYS_FITS and request_id.isascii()
        if not plain:
            request_id = _checked_text(request_id)
        if request_id.startswith("chatcmpl-"):
            _refuse_engine_id(request_id)
        base, choice = _split_choice(request_id) if "#" in request_id else (request_id, None)
        components = self._split(base)
        for value, pattern in zip(components, self._patterns, strict=False):
            if pattern.fullmatch(value) is None:
                self._refuse(request_id, components)
        if not plain:
            for name, value in zip(self.components[: self.partition_by], components, strict=False):
                _check_path_value(request_id, name, value)
        return RequestKey(request_id, (*components, *self._padding[len(components) :]), choice)

    def parse_prefix(self, prefix: str | Mapping[str, str | int]) -> Prefix:
        """A prefix by component: a text that splits like an id, or `{"data_id": "math:17", "choice": 2}`.

        Without `#n` or "choice" it covers every sample. With buckets a text is a whole id.
        Raises InvalidRequestIdError for what no id can start with, and for an empty prefix.
        """
        if isinstance(prefix, str):
            key = self.parse(prefix)
            return Prefix(key.components, key.choice)
        values = {name: self._prefix_value(name, value) for name, value in _checked_items(prefix)}
        choice = values.pop("choice", None)
        if self.buckets is not None and self.rest in values:
            bucket = self._split(values[self.rest])[0]
            if values.setdefault(self.components[0], bucket) != bucket:
                raise InvalidRequestIdError(f"prefix {_shown(prefix)}: this id is in bucket {bucket}")
        return Prefix(tuple(values.get(name) for name in self.components), None if choice is None else int(choice))

    def plain_prefix(self, prefix: str | Mapping[str, str | int]) -> str | Mapping[str, str]:
        """What `parse_prefix` takes, in texts alone, as JSON holds it. Raises InvalidRequestIdError as that does."""
        self.parse_prefix(prefix)
        return prefix if isinstance(prefix, str) else {name: str(value) for name, value in prefix.items()}

    def parse_glob(self, text: object) -> Glob:
        """A pattern by component, `math_*:2`: it splits like an id (also between brackets) and may end early, like a prefix.

        `a:*` covers `a:1` and `a:1:7` and leaves `a`. A trailing `#n` names one sample; without it, every sample is covered.
        With buckets the pattern is for the whole id. Raises InvalidRequestIdError for what matches no id.
        """
        text = _checked_text(text)
        if text.startswith("chatcmpl-"):
            _refuse_engine_id(text)
        if _WILD_CHOICE.fullmatch(text):
            raise InvalidRequestIdError(f"glob {_shown(text)}: leave the end from # on out to cover every sample")
        base, choice = _split_choice(text) if "#" in text else (text, None)
        parts: list[str | None] = [None, base] if self.buckets is not None else [*self._split(base)]
        for name, part, pattern in zip(self.components, parts, self._patterns, strict=False):
            if part is not None and (not part or (_WILD.search(part) is None and pattern.fullmatch(part) is None)):
                raise InvalidRequestIdError(f"glob {_shown(text)}: {name}={_shown(part)}, {self._expected(name)}")
        return Glob((*parts, *self._padding[len(parts) :]), choice)

    def partition(self, components: tuple[str | None, ...]) -> tuple[tuple[str, str | None], ...]:
        """(name, value) of each path level; the value of an absent component is None."""
        return tuple(zip(self.components[: self.partition_by], components, strict=False))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form in `format.json`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KeyScheme:
        """The scheme of `to_dict`."""
        return cls(**{**data, "components": tuple(data["components"]), "numbers": tuple(data["numbers"])})

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(_NUMBER if name in self.numbers else _TEXT for name in self.components)

    @cached_property
    def _padding(self) -> tuple[None, ...]:
        return (None,) * len(self.components)

    def _split(self, base: str) -> list[str]:
        if self.buckets is not None:
            return [str(crc32(base.encode()) % self.buckets), base]
        if self.split == "right":
            return base.rsplit(self.delimiter, len(self.components) - 1)
        return base.split(self.delimiter, len(self.components) - 1)

    def _prefix_value(self, name: str, value: object) -> str:
        shown = f"prefix {name}={_shown(value)}"
        if name != "choice" and name not in self.components:
            raise InvalidRequestIdError(f"{shown}: expected one of {', '.join(self.components)}, choice")
        if isinstance(value, bool) or not isinstance(value, (str, Integral)):
            raise InvalidRequestIdError(f"{shown}: expected a text or an integer")
        text = _checked_text(value if isinstance(value, str) else str(value))
        if name == "choice":
            if _NUMBER.fullmatch(text) is None or int(text) > MAX_CHOICE:
                raise InvalidRequestIdError(f"{shown}: expected a sample number, 0 to {MAX_CHOICE}")
            return text
        at = self.components.index(name)
        if self._patterns[at].fullmatch(text) is None:
            raise InvalidRequestIdError(f"{shown}: {self._expected(name)}")
        if name != self.rest and self.delimiter and self.delimiter in text:
            raise InvalidRequestIdError(f"{shown}: only {self.rest} may contain {self.delimiter!r}")
        if at < self.partition_by:
            _check_path_value(text, name, text)
        return text

    def _expected(self, name: str) -> str:
        if name in self.numbers:
            return "expected a canonical decimal (0, 7, 12; no sign, no leading zero)"
        return f"expected a text that is not empty and not {ABSENT}"

    def _refuse(self, request_id: str, components: list[str]) -> NoReturn:
        name, value = next(
            (name, value)
            for name, value, pattern in zip(self.components, components, self._patterns, strict=False)
            if pattern.fullmatch(value) is None
        )
        form = self.delimiter.join(self.components) if self.buckets is None else self.rest
        hint = ""
        if self.split == "right" and name != self.rest:
            hint = f"; a {self.rest} that contains {self.delimiter!r} needs all components after it"
        raise InvalidRequestIdError(
            f"request id {_shown(request_id)}: {name}={_shown(value)}, {self._expected(name)}; ids are {form}{hint}"
        )


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidInputError(f"key scheme {name}={value!r}: expected {expected}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:120]}... ({len(text)} characters)"


def _checked_items(prefix: object) -> ItemsView[str, object]:
    if not isinstance(prefix, Mapping) or not prefix:
        raise InvalidRequestIdError(f"prefix {_shown(prefix)}: expected a text, or a mapping that pins a component")
    return prefix.items()


def _checked_text(text: object) -> str:
    """A `str` that fits the limits, never of a subclass (numpy's text scalars, text enums)."""
    if not isinstance(text, str):
        raise InvalidRequestIdError(f"request id {_shown(text)}: expected a text, not {type(text).__name__}")
    text = str.__str__(text)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestIdError(f"request id {_shown(text)}: has a lone surrogate; pass well-formed text") from None
    if size > MAX_ID_BYTES:
        raise InvalidRequestIdError(f"request id {_shown(text)}: {size} UTF-8 bytes, at most {MAX_ID_BYTES}")
    return text


def _check_path_value(shown: str, name: str, value: str) -> None:
    size = len(quote(value, safe=""))
    if size > MAX_VALUE_BYTES:
        raise InvalidRequestIdError(
            f"request id {_shown(shown)}: {name} takes {size} percent-encoded bytes, at most {MAX_VALUE_BYTES} fit"
            " a directory name; use a shorter one, or KeyScheme.uuid() for opaque ids"
        )


def _split_choice(request_id: str) -> tuple[str, int | None]:
    base, _, digits = request_id.rpartition("#")
    if digits and not (digits.isascii() and digits.isdigit()):
        return request_id, None
    if _NUMBER.fullmatch(digits) is None or int(digits) > MAX_CHOICE or _CHOICE_END.search(base):
        raise InvalidRequestIdError(
            f"request id {_shown(request_id)}: a trailing #n names one sample, n a canonical decimal up to {MAX_CHOICE}"
        )
    return base, int(digits)


def _refuse_engine_id(request_id: str) -> NoReturn:
    match = _ENGINE_ID.fullmatch(request_id)
    way_out = f"pass {match['rollout']!r}" if match else "pass the id that the trainer knows the request by"
    raise InvalidRequestIdError(
        f"request id {_shown(request_id)} is an engine's own id, which no trainer can ask for: {way_out} (the rollout id)"
    )
