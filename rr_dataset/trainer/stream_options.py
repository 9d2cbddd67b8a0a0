"""What a `RoutingStream` gives, to whom, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rr_dataset.errors import InvalidInputError
from rr_dataset.options import check_seconds, check_whole

_LOOKS = ("prefix", "final_only", "min_weight_version", "group_size")


@dataclass(frozen=True)
class StreamOptions:
    """Which records a stream gives, to whom, and when it ends. The same on every rank, but for `rank`.

    prefix: only ids that it covers by component, as in `RoutingDataset.ids`.
    final_only: wait until a record is final; False: give it as it is when it is first seen, once.
    min_weight_version: only records whose newest weight version, a whole number, is at least this.
    on_dropped: "raise" RecordDroppedError once an id is seen that the writer gave up (iterate again to go on behind it), or
        "skip" it.
    rank, num_ranks: the data-parallel rank, and how many there are.
    together: a component of the key scheme: ids alike up to and including it (the samples of a prompt) go to one rank.
    group_size: give so many ids that belong together one after the other, once all of them are ready. The first so many that are
        seen are a group, the next ones another. One that was dropped, or deleted while the others waited, keeps its place.
    on_broken: the rest of a group that lost one so: "leave_out", never given, or "give" as it is.
    equal: with a list of ids, every rank gives as many or raises: the last ones (or groups) that would not go round are left
        out, groups have to be alike in size, and an id that was dropped or deleted is an error.
    records: an iteration gives this rank so many, waiting for them, and the next one goes on behind them; one that was broken off
        is brought to its end first. In a loader with one worker only, or none: more do not know of each other, and raise.
    timeout_s: seconds to wait while nothing new becomes ready. 0: give what is there.
    buffer_bytes: of records that are read together; a larger one, or a larger group, is read alone.
    """

    prefix: str | Mapping[str, str | int] | None = None
    final_only: bool = True
    min_weight_version: int | None = None
    on_dropped: Literal["raise", "skip"] = "raise"
    rank: int = 0
    num_ranks: int = 1
    together: str | None = None
    group_size: int | None = None
    on_broken: Literal["leave_out", "give"] = "leave_out"
    equal: bool = False
    records: int | None = None
    timeout_s: float = 60.0
    buffer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        check_seconds("timeout_s", self.timeout_s)
        if self.on_dropped not in ("raise", "skip"):
            raise InvalidInputError(f"on_dropped={self.on_dropped!r}: expected raise or skip")
        if self.on_broken not in ("leave_out", "give"):
            raise InvalidInputError(f"on_broken={self.on_broken!r}: expected leave_out or give")
        if self.equal and self.on_dropped == "skip":
            raise InvalidInputError("on_dropped='skip' with equal: a rank that skips one gives one fewer; take 'raise'")
        if check_whole("rank", self.rank, 0) >= check_whole("num_ranks", self.num_ranks, 1):
            raise InvalidInputError(
                f"rank={self.rank!r} of num_ranks={self.num_ranks!r}: expected 0 <= rank < num_ranks"
            )
        for name in ("group_size", "records", "buffer_bytes"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 1)
        if self.min_weight_version is not None:
            check_whole("min_weight_version", self.min_weight_version, 0)
        if self.group_size is not None and self.together is None:
            raise InvalidInputError(
                "group_size without together: name the component that makes a group, such as 'data_id'"
            )
        if self.group_size is not None and (self.records or 0) % self.group_size:
            raise InvalidInputError(
                f"records={self.records} of group_size={self.group_size}: expected a multiple of it"
            )

    def looks(self) -> dict[str, Any]:
        """The options that decide what a look takes from the dataset, as plain values."""
        looks = {name: getattr(self, name) for name in _LOOKS}
        return {**looks, "prefix": dict(self.prefix) if isinstance(self.prefix, Mapping) else self.prefix}
