"""What is stored and what is read: `RoutingSpec`, `Row` (one put), `RecordHead` and `RoutingRecord` (one request).

Arrays are in one of two orders: "LTK" is [layers, tokens, top_k] (the order at rest), "TLK" is [tokens, layers, top_k].
Token positions are absolute, from the first prompt token, and ranges are half open (start, stop).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from rr_dataset.buffers import overlaps_itself
from rr_dataset.errors import InvalidInputError, InvalidRoutingError

Range = tuple[int, int]
Span = tuple[int, int, str]  # start, stop, weight version

LAYOUTS = ("TLK", "LTK")
DTYPES = ("uint8", "uint16", "uint32")
TOPK_ORDERS = ("preserve", "sorted")
STATUSES = ("complete", "partial", "preempted", "aborted", "dropped")  # from best to worst
MAX_POSITION = (1 << 31) - 1  # no request is longer; the long form counts tokens in int32, and readers allocate by it
PRODUCERS = ("rollout", "trainer")

# DeepSeek and GLM; Qwen; Qwen as transformers 5 saves it; ERNIE. First the native name: FastDeploy copies it to the last.
_NUM_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k")

# Models whose every layer routes, and whose config therefore says nothing of it (transformers 5.24, modeling_<type>.py:
# the decoder layer makes its experts without a condition).
EVERY_LAYER_ROUTES = frozenset(
    (
        *("mixtral", "olmoe", "flex_olmo", "gpt_oss", "phimoe", "minimax", "minimax_m2", "solar_open"),
        *("granitemoe", "granitemoeshared", "granitemoe_swa"),
    )
)
BY_HAND = "RoutingSpec(moe_layers=..., num_experts=..., top_k=...)"  # the way out of a config that does not tell


def ranges_of(mask: npt.NDArray[np.bool_], start: int = 0) -> tuple[Range, ...]:
    """Where a mask of the tokens from `start` is true, as (start, stop) positions."""
    if not mask.any():
        return ()
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)) + start
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def shown_layers(layers: Sequence[int]) -> str:
    """`[0, 2, 3, 4]` -> `0, 2-4`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _repr(self: Any) -> str:
    """As that of dataclasses, with layer ids as runs."""
    values = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
    texts = [
        f"{name}={(shown_layers(value) or '()') if name in ('layers', 'moe_layers') else repr(value)}"
        for name, value in values.items()
    ]
    return f"{type(self).__name__}({', '.join(texts)})"


@dataclass(frozen=True)
class RoutingSpec:
    """What every record of a dataset looks like.

    moe_layers: 0-based ids of the layers that route, in the order of the model. Dense layers are left out.
    num_experts: logical experts per layer (before load balancing; shared experts not counted).
    top_k: experts per token.
    dtype: "uint8", "uint16" or "uint32", stored little-endian; the narrowest that holds num_experts - 1 unless given.
    topk_order: "preserve" keeps the order the router gave. "sorted" stores each token's ids as an ascending set, a
        quarter to a third smaller at rest; kernels that add expert outputs in column order then add in another order.
    """

    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    dtype: str = ""
    topk_order: str = "preserve"

    __repr__ = _repr

    def __post_init__(self) -> None:
        try:
            given = tuple(self.moe_layers)
        except TypeError:
            raise InvalidInputError(
                f"moe_layers={self.moe_layers!r}: expected several layer ids, such as range(3, 61)"
            ) from None
        layers = tuple(_integer("moe_layers", layer) for layer in given)
        num_experts = _integer("num_experts", self.num_experts)
        top_k = _integer("top_k", self.top_k)
        if not layers or layers[0] < 0 or any(a >= b for a, b in pairwise(layers)):
            raise InvalidInputError(f"moe_layers={list(layers)}: expected rising 0-based layer ids, at least one")
        if not 1 <= num_experts <= 1 << 16:
            raise InvalidInputError(f"num_experts={num_experts}: expected 1 to 65536")
        if not 1 <= top_k <= num_experts:
            raise InvalidInputError(f"top_k={top_k}: expected 1 to num_experts={num_experts}")
        if self.topk_order not in TOPK_ORDERS:
            raise InvalidInputError(f"topk_order={self.topk_order!r}: expected one of {', '.join(TOPK_ORDERS)}")
        narrowest = np.min_scalar_type(num_experts - 1)
        wide_enough = [name for name in DTYPES if np.dtype(name).itemsize >= narrowest.itemsize]
        dtype = str(self.dtype) or narrowest.name
        if dtype not in wide_enough:
            raise InvalidInputError(f"dtype={self.dtype!r}: expected one of {', '.join(wide_enough)}")
        object.__setattr__(self, "moe_layers", layers)
        object.__setattr__(self, "num_experts", num_experts)
        object.__setattr__(self, "top_k", top_k)
        object.__setattr__(self, "dtype", dtype)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return len(self.moe_layers)

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of one token over all layers."""
        return self.num_layers * self.top_k * np.dtype(self.dtype).itemsize

    def check_layers(self, layers: Sequence[int] | None, *, at_least: int = 1) -> tuple[int, ...]:
        """`layers` as a rising tuple of ids of this spec; None means all.

        at_least: 0 for reads, which a rank of a pipeline that holds no MoE layer takes part in.

        Raises InvalidRoutingError for what is no list of ids, an id that is no MoE layer, a repeated one or too few.
        """
        if layers is None:
            return self.moe_layers
        try:
            chosen = tuple(map(operator.index, layers))
        except TypeError:
            raise InvalidRoutingError(f"layers={layers!r}: expected a list of layer ids, such as [3, 4]") from None
        unknown = sorted(set(chosen) - set(self.moe_layers))
        if unknown:
            raise InvalidRoutingError(
                f"layers [{shown_layers(unknown)}] are not MoE layers of this dataset, which has {shown_layers(self.moe_layers)}"
            )
        if len(chosen) < at_least or any(a >= b for a, b in pairwise(chosen)):
            raise InvalidRoutingError(f"layers={list(chosen)}: expected rising layer ids, at least {at_least}")
        return chosen

    def position_ids(self, positions: npt.ArrayLike, layers: Sequence[int] | None = None) -> npt.NDArray[Any]:
        """`(position + layer + k) % num_experts` as [tokens, layers, top_k] of the stored dtype, layers by their ids.

        A capture with `debug=True` writes these, and `verify(positions=True)` looks for them.
        """
        ids = np.asarray(positions, np.int64)[:, None, None] + np.asarray(self.check_layers(layers))[:, None]
        expected: npt.NDArray[Any] = ((ids + np.arange(self.top_k)) % self.num_experts).astype(self.dtype)
        return expected

    def to_dict(self) -> dict[str, Any]:
        """The JSON form in `format.json`."""
        return {
            "moe_layers": list(self.moe_layers),
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "dtype": self.dtype,
            "topk_order": self.topk_order,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RoutingSpec:
        """The spec of `to_dict`."""
        return cls(**{**data, "moe_layers": tuple(data["moe_layers"])})

    @classmethod
    def from_config(cls, config: object) -> RoutingSpec:
        """The spec of a model, from its configuration.

        config: a mapping (what `json.load` makes of `config.json`) or an object with attributes (transformers,
            PaddleFormers, FastDeploy). Where it nests a `text_config`, that one counts. Where a field holds one value per
            modality, the first (text) counts.

        Which layers route, by the first of these that the config has (facts of transformers 5.24 where not said otherwise):

        - `mlp_layer_types`: the layers named "sparse" (modeling_ernie4_5_vl_moe.py, modeling_deepseek_v32.py).
        - `first_k_dense_replace`, `moe_layer_freq`: layers i >= first_k_dense_replace (modeling_deepseek_v3.py,
          modeling_glm4_moe.py) with i % moe_layer_freq == 0 (DeepSeek's own modeling code, vLLM's deepseek_v2.py), or, for a
          list, moe_layer_freq[i] true (Megatron-LM's moe_layer_freq).
        - `decoder_sparse_step`, `mlp_only_layers`: layers with (i + 1) % decoder_sparse_step == 0 that are not in
          mlp_only_layers (modeling_qwen3_moe.py).
        - `moe_layer_start_index`, `moe_layer_end_index`, `moe_layer_interval`: layers from start to end inclusive, -1 or none
          meaning the last, with (i + 1) % moe_layer_interval == 0 (modeling_ernie4_5_moe.py, PaddleFormers' ernie4_5).
          FastDeploy sets a start of 0 in every config, so this comes after those above.
        - `model_type`: every layer, of mixtral, olmoe, flex_olmo, gpt_oss, phimoe, minimax, minimax_m2, solar_open,
          granitemoe, granitemoeshared and granitemoe_swa.

        It needs `num_hidden_layers`, the number of experts (`n_routed_experts`, `num_experts`, `num_local_experts` or
        `moe_num_experts`) and of experts per token (`num_experts_per_tok` or `moe_k`).

        Layers of multi-token prediction lie beyond `num_hidden_layers` and are not counted.

        Raises InvalidInputError if the config does not tell, with the fields that were looked for, or is none.
        """
        if config is None or isinstance(config, (str, bytes, int, float, os.PathLike, Sequence)):
            raise InvalidInputError(
                f"config={config!r}: expected a mapping, as json.load makes of a config.json, or a config object with attributes"
            )
        text = _field(config, "text_config")
        model = config if text is None else text
        num_layers = _config_integer(model, ("num_hidden_layers",), minimum=1)
        return cls(
            moe_layers=_moe_layers(model, num_layers),
            num_experts=_config_integer(model, _NUM_EXPERTS),
            top_k=_config_integer(model, _TOP_K),
        )


def _integer(name: str, value: object) -> int:
    """`value` as an int, also of numpy. Raises InvalidInputError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidInputError(f"{name}={value!r}: expected an integer")
    return operator.index(value)


def _field(config: object, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _unknown_config(config: object, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"cannot tell the routing of this config (model_type={_field(config, 'model_type')!r}): {why}. Looked for "
        f"num_hidden_layers; {' or '.join(_NUM_EXPERTS)}; {' or '.join(_TOP_K)}; and, for the layers that route, "
        "mlp_layer_types, first_k_dense_replace or moe_layer_freq (DeepSeek-V3, GLM-4-MoE), decoder_sparse_step (Qwen3-MoE), "
        f"moe_layer_start_index (ERNIE-4.5-MoE) or a model_type whose every layer routes. Give it by hand: {BY_HAND}"
    )


def _config_integer(config: object, names: Sequence[str], *, default: int | None = None, minimum: int = 0) -> int:
    """The first of the fields that is set; of a list its first value."""
    for name in names:
        value = _field(config, name)
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None
        if value is None:
            continue
        number = _integer(name, value)
        if number < minimum:
            raise _unknown_config(config, f"{name}={number}, expected at least {minimum}")
        return number
    if default is None:
        raise _unknown_config(config, f"it has no {' or '.join(names)}")
    return default


def _moe_layers(config: object, num_layers: int) -> tuple[int, ...]:
    """The layers that route; see `RoutingSpec.from_config`."""
    layers = range(num_layers)
    types, frequency = _field(config, "mlp_layer_types"), _field(config, "moe_layer_freq")
    if types is not None:
        listed = isinstance(types, (list, tuple)) and len(types) == num_layers
        if not listed or any(kind not in ("dense", "sparse") for kind in types):
            raise _unknown_config(
                config, f"mlp_layer_types={types!r}, expected dense or sparse for {num_layers} layers"
            )
        chosen = [i for i in layers if types[i] == "sparse"]
    elif isinstance(frequency, (list, tuple)):
        if len(frequency) != num_layers:
            raise _unknown_config(
                config, f"moe_layer_freq={frequency!r}, expected a flag for each of {num_layers} layers"
            )
        first = _config_integer(config, ("first_k_dense_replace",), default=0)
        chosen = [i for i in layers if i >= first and frequency[i]]
    elif _field(config, "first_k_dense_replace") is not None:
        first = _config_integer(config, ("first_k_dense_replace",))
        step = _config_integer(config, ("moe_layer_freq",), default=1, minimum=1)
        chosen = [i for i in layers if i >= first and i % step == 0]
    elif _field(config, "decoder_sparse_step") is not None:
        step = _config_integer(config, ("decoder_sparse_step",), minimum=1)
        dense = _field(config, "mlp_only_layers") or ()
        if not isinstance(dense, (list, tuple)):
            raise _unknown_config(config, f"mlp_only_layers={dense!r}, expected a list of layer ids")
        chosen = [i for i in layers if (i + 1) % step == 0 and i not in dense]
    elif _field(config, "moe_layer_start_index") is not None:
        start = _config_integer(config, ("moe_layer_start_index",))
        end = _config_integer(config, ("moe_layer_end_index",), default=-1, minimum=-1)
        step = _config_integer(config, ("moe_layer_interval",), default=1, minimum=1)
        chosen = [i for i in layers if (i + 1) % step == 0 and start <= i and (end == -1 or i <= end)]
    elif _field(config, "model_type") in EVERY_LAYER_ROUTES:
        chosen = list(layers)
    else:
        raise _unknown_config(config, "nothing in it says which layers route")
    if not chosen:
        raise _unknown_config(config, f"none of its {num_layers} layers routes")
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class Row:
    """One put as the store tells it, without its payload."""

    record_id: str  # clock stamp in hex + "-" + writer id
    request_id: str
    components: tuple[str | None, ...]  # of the key scheme's columns
    choice: int | None
    t_submit: int
    token_start: int
    num_tokens: int
    part: bool
    status: str
    run_id: str
    layers: tuple[int, ...] = ()  # present ones; none in a drop row
    reason: str | None = None
    missing: tuple[Range, ...] = ()
    weight_version: str | None = None
    weight_spans: tuple[Span, ...] = ()
    producer: str = "rollout"
    tags: Mapping[str, str] = field(default_factory=dict)
    has_token_ids: bool = False
    has_logprobs: bool = False
    checksum: int = 0  # XXH3-64 over the layer columns in schema order

    __repr__ = _repr

    @property
    def token_stop(self) -> int:
        """One past the last token covered."""
        return self.token_start + self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)  # arrays have no single answer to ==
class RowData:
    """A row with its payload.

    routed_experts: [len(row.layers), row.num_tokens, top_k] of the spec's dtype, any strides; None in a drop row.
    token_ids: int32 [row.num_tokens] or None. logprobs: float32 [row.num_tokens] or None.
    """

    row: Row
    routed_experts: npt.NDArray[Any] | None = None
    token_ids: npt.NDArray[np.int32] | None = None
    logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Tile:
    """The tokens (start, stop) of `layers` are those of `row`."""

    row: Row
    layers: tuple[int, ...]
    start: int
    stop: int

    __repr__ = _repr


@dataclass(frozen=True)
class RecordHead:
    """One request as assembled from its live rows, without the payload."""

    request_id: str
    components: tuple[str | None, ...]
    choice: int | None
    status: str  # the worst over the layers; see live.py
    reason: str | None
    num_tokens: int  # from position 0 to the end of the furthest row
    missing: tuple[Range, ...]  # positions that some layer lacks
    weights: tuple[Span, ...]
    run_id: str  # of the newest row
    tags: Mapping[str, str]  # of all live rows, the newest wins
    rows: tuple[Row, ...] = field(repr=False)  # live ones, oldest first
    tiles: tuple[Tile, ...] = field(repr=False)  # disjoint, together all that is there

    @property
    def record_id(self) -> str:
        """The newest live row's."""
        return self.rows[-1].record_id

    @property
    def final(self) -> bool:
        """Whether no more parts are expected."""
        return self.status != "partial"


@dataclass(frozen=True, eq=False)
class RoutingRecord(RecordHead):
    """A head with the layers and tokens that were asked for; `missing` then speaks of those only.

    Two records are equal only if they are one object: compare the arrays.
    """

    layers: tuple[int, ...] = ()
    token_ranges: tuple[Range, ...] = ()  # absolute, in the order of the token axis
    routed_experts: npt.NDArray[Any] = field(default_factory=lambda: np.empty((0, 0, 0), np.uint8), repr=False)
    missing_by_layer: Mapping[int, tuple[Range, ...]] = field(default_factory=dict, repr=False)
    token_ids: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    logprobs: npt.NDArray[np.float32] | None = field(default=None, repr=False)

    __eq__ = object.__eq__
    __hash__ = object.__hash__
    __repr__ = _repr

    def layer(self, layer: int) -> npt.NDArray[Any]:
        """[tokens, top_k] of one layer id, a view.

        Raises InvalidRoutingError for a layer that was not read.
        """
        if layer not in self.layers:
            raise InvalidRoutingError(f"layer {layer} was not read; this record holds {shown_layers(self.layers)}")
        view: npt.NDArray[Any] = self.routed_experts[self.layers.index(layer)]
        return view

    def to_numpy(self, layout: str = "LTK", out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """The ids in the layout asked for: a view, or copied into `out` (any strides, a dtype that holds the ids).

        layout: "LTK" [layers, tokens, top_k], the default and the order at rest, or "TLK" [tokens, layers, top_k], the default
            of `RoutingWriter.put`. Where tokens and layers are as many, shapes do not tell the two apart.

        Bytes of missing tokens are zero and mean nothing: see `present`.

        Raises InvalidRoutingError for an unknown layout, or an `out` that is no array, of another shape, too narrow a dtype or
        with elements that share memory.
        """
        if layout not in LAYOUTS:
            raise InvalidRoutingError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
        view = self.routed_experts if layout == "LTK" else self.routed_experts.transpose(1, 0, 2)
        if out is None:
            return view
        if not isinstance(out, np.ndarray):
            raise InvalidRoutingError(f"out is a {type(out).__name__}: expected a numpy array of {view.shape}")
        if out.shape != view.shape:
            raise InvalidRoutingError(f"out has shape {out.shape}, the record in {layout} has {view.shape}")
        if not np.can_cast(view.dtype, out.dtype, "safe"):
            raise InvalidRoutingError(f"out has dtype {out.dtype}, which does not hold every {view.dtype}")
        if overlaps_itself(out):
            raise InvalidRoutingError(f"out has strides {out.strides}: elements that share memory hold one value only")
        np.copyto(out, view)
        return out

    def present(self) -> npt.NDArray[np.bool_]:
        """bool [layers, tokens]: True where the ids are real, False where they are missing."""
        mask = np.ones((len(self.layers), sum(b - a for a, b in self.token_ranges)), np.bool_)
        for i, layer in enumerate(self.layers):
            for start, stop in self.missing_by_layer.get(layer, ()):
                at = 0
                for a, b in self.token_ranges:
                    mask[i, at + max(start - a, 0) : at + max(min(stop, b) - a, 0)] = False
                    at += b - a
        return mask
