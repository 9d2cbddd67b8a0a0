"""`--routing-replay-config`: FastDeploy's keys, `"routing_store_type": "dataset"` and `"dataset_uri"`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from rr_dataset.errors import InvalidInputError
from rr_dataset.options import WriterOptions
from rr_dataset.record import RoutingSpec
from rr_dataset.writer import RoutingWriter

DATASET = "dataset"
STORE_TYPES = (DATASET, "local", "rdma", "response")

_USER: dict[str, Any] = {
    "enable_routing_replay": False,
    "routing_store_type": DATASET,
    "local_store_dir": "./routing_replay_output",
    "rdma_store_server": "",
    "only_last_turn": False,
    "use_fused_put": False,
    "debug_mode": False,
    "dataset_uri": "",
}
_FILLED: dict[str, Any] = {
    "routing_dtype": None,
    "num_moe_layers": None,
    "moe_top_k": None,
}  # by the engine, and re-sent
_SHOWN = 500  # characters of what is no JSON
_OF_THE_ENGINE = ("model", "max_model_len", "tensor_parallel_size")  # what asdict(EngineArgs) has and no user's JSON


class RoutingReplayConfig:
    """One attribute for each key. A user's JSON is checked; of what the engine feeds itself, foreign keys are passed over."""

    enable_routing_replay: bool
    routing_store_type: str
    local_store_dir: str
    rdma_store_server: str
    only_last_turn: bool
    use_fused_put: bool
    debug_mode: bool
    dataset_uri: str
    routing_dtype: str | None
    num_moe_layers: int | None
    moe_top_k: int | None

    def __init__(self, args: str | Mapping[str, Any] | None = None) -> None:
        """args: JSON, a mapping, or `asdict(EngineArgs)`. Raises InvalidInputError, which names what would be valid."""
        given = _mapping(args)
        if any(key in given for key in _OF_THE_ENGINE):
            nested = given.get("routing_replay_config")
            own = {key: value for key, value in given.items() if key in _USER or key in _FILLED}
            given = {**_mapping(nested), **own} if isinstance(nested, (str, Mapping)) else own
        for key in given:
            if key not in _USER and key not in _FILLED:
                raise InvalidInputError(
                    f"routing_replay_config has {key!r}{_meant(key, _USER)}; valid are {', '.join(_USER)}"
                )
        for key, default in {**_USER, **_FILLED}.items():
            value = given.get(key, default)
            if default is not None and value is not None and type(value) is not type(default):
                raise InvalidInputError(f"{key}={value!r}: expected a {type(default).__name__}")
            setattr(self, key, default if value is None else value)
        if self.routing_store_type not in STORE_TYPES:
            hint = _meant(self.routing_store_type, STORE_TYPES)
            raise InvalidInputError(
                f"routing_store_type={self.routing_store_type!r}{hint}; valid are {', '.join(STORE_TYPES)}"
            )
        if self.enable_routing_replay and self.routing_store_type == DATASET and not self.dataset_uri:
            raise InvalidInputError('routing_store_type="dataset" needs "dataset_uri": the path or URI of the dataset')

    def to_json_string(self) -> str:
        """All keys as JSON; what it says makes an equal config."""
        return json.dumps(vars(self))

    __str__ = to_json_string

    def __repr__(self) -> str:
        return f"RoutingReplayConfig({self.to_json_string()})"


def open_writer(fd_config: Any, options: WriterOptions | None = None) -> RoutingWriter:
    """A writer into the dataset of a FastDeploy config; the dataset is made if there is none. Nothing in it is cleared.

    fd_config: has `routing_replay_config` (any object with the attributes) and `model_config`. The spec comes from the model's
        config, so dense layers between MoE layers are no fault.

    Raises InvalidInputError for a store that is no dataset, or a dataset that keeps other turns than `only_last_turn` says.
    """
    config = fd_config.routing_replay_config
    kind, uri = config.routing_store_type, getattr(config, "dataset_uri", "")
    if kind != DATASET or not uri:
        raise InvalidInputError(
            f"routing_store_type={kind!r}, dataset_uri={uri!r}: expected {DATASET!r} and the place of a dataset; the other "
            "types are FastDeploy's own"
        )
    keep = "last_turn" if config.only_last_turn else "all"
    writer = RoutingWriter(uri, options, create=RoutingSpec.from_config(fd_config.model_config), keep=keep)
    if writer.dataset.keep != keep:
        writer.close()
        raise InvalidInputError(
            f"only_last_turn={config.only_last_turn}, and {uri} was made with keep={writer.dataset.keep!r}: change one of them"
        )
    return writer


def _mapping(args: Any) -> dict[str, Any]:
    if isinstance(args, str):
        try:
            args = json.loads(args)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"routing_replay_config={args[:_SHOWN]!r} is no JSON: {error}") from None
    if args is not None and not isinstance(args, Mapping):
        raise InvalidInputError(f"routing_replay_config={args!r}: expected a JSON object")
    return dict(args or {})


def _meant(word: str, valid: Any) -> str:
    near = difflib.get_close_matches(str(word), list(valid), 1)
    return f", did you mean {near[0]!r}?" if near else ""
