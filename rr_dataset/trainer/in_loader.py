"""What a stream needs of a loader of torch or paddle: which worker it runs in, and the class that the loader takes for a stream."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rr_dataset.trainer.samples import Sample
    from rr_dataset.trainer.streaming import RoutingStream

_FRAMEWORKS = {"torch": "torch.utils.data", "paddle": "paddle.io"}


def worker_share() -> tuple[int, int]:
    """(number of this worker, how many there are) in a worker of a torch or paddle loader, else (0, 1). Imports neither."""
    for name in _FRAMEWORKS.values():
        module = sys.modules.get(name)
        info = None if module is None else module.get_worker_info()
        if info is not None:
            return info.id, info.num_workers
    return 0, 1


def adapted(base: type[Any], stream: RoutingStream) -> Any:
    """An instance of a subclass of `base` that gives what the stream gives; pickles with it."""

    class Adapted(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Sample]:
            return iter(stream)

        def __reduce__(self) -> tuple[Any, ...]:
            return adapted, (base, stream)

        def state_dict(self) -> dict[str, Any]:
            return stream.state_dict()

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            stream.load_state_dict(state)

    return Adapted()
