"""What a delete may name: as the product takes it, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.routing_oracle import NAMES, TURN, Matches, Parts, split


@dataclass(frozen=True)
class Target:
    """`covers` is told by hand."""

    kind: str
    text: Any
    matches: Callable[[bool, Parts, str | None], bool]  # with keep="last_turn" or not
    path: tuple[str, ...] | None = None  # it is all that is under these components

    def covers(self, *, last_turn: bool) -> Matches:
        return partial(self.matches, last_turn)

    def arguments(self) -> dict[str, Any]:
        """Of `delete`."""
        if self.kind == "all":
            return {"everything": True}
        return {"prefixes": [self.text]} if self.kind == "prefix" else {self.kind: self.text}


def same(last_turn: bool, level: int, want: str, have: str | None) -> bool:
    if level == TURN and last_turn:
        return have is not None and int(have) <= int(want)
    return have == want


def prefix(text: Any) -> Target:
    if isinstance(text, str):
        pinned, choice = split(text)
    else:
        pinned = tuple(text.get(name) for name in NAMES)
        choice = text.get("choice")

    def matches(last_turn: bool, parts: Parts, sample: str | None) -> bool:
        named = [(i, want) for i, want in enumerate(pinned) if want is not None]
        return choice in (None, sample) and all(same(last_turn, i, want, parts[i]) for i, want in named)

    values = tuple(value for value in pinned if value is not None)
    return Target("prefix", text, matches, values if choice is None and pinned[: len(values)] == values else None)


def ids(*texts: str) -> Target:
    def matches(last_turn: bool, parts: Parts, sample: str | None) -> bool:
        for text in texts:
            pinned, choice = split(text)
            turn = pinned[TURN]
            if choice == sample and all(
                (want == have) if i != TURN or turn is None else same(last_turn, i, turn, have)
                for i, (want, have) in enumerate(zip(pinned, parts, strict=True))
            ):
                return True
        return False

    return Target("ids", texts, matches)


TARGETS = (
    Target("all", "", lambda last_turn, parts, sample: True, ()),
    *map(prefix, ("p", "q", "r", "p:0", "p:1", "q:0", "p:0:1", "p:0:2", "p:0:2:0", "p:0:2:0#1", "q:0:1:0")),
    *map(prefix, ({"turn_id": "1"}, {"data_id": "p", "choice": "1"}, {"gen_id": "0", "segment_id": "0"})),
    ids("p:0:1:0"), ids("p:0:2:0", "q:0:1:0"), ids("q", "p:0"), ids("p:0:2:0#1"), ids("r:0:0:0"),
    Target("glob", "p:*", lambda last, parts, sample: parts[0] == "p" and parts[1] is not None),
    Target("glob", "?:1", lambda last, parts, sample: parts[1] == "1"),
    Target("glob", "*:*:1", lambda last, parts, sample: same(last, TURN, "1", parts[TURN])),
    Target("glob", "p:0:*:0", lambda last, parts, sample: parts[:2] == ("p", "0") and parts[3] == "0"),
    Target("glob", "*:0#1", lambda last, parts, sample: parts[1] == "0" and sample == "1"),
)  # fmt: skip
PREFIXES = tuple(target for target in TARGETS if target.kind in ("prefix", "all"))
