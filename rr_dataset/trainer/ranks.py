"""What one rank of a distributed trainer needs: which layers, which tokens of each sample, which samples. Pure.

    view = RankView.from_megatron(spec, config)                    # or from_fleet, or the values by hand
    packed = dataset.get_packed(ids, view.layers, view.shares(lengths))

Layer ids are 0-based everywhere; only arguments called `layer_numbers` are 1-based, as Megatron's attribute is.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rr_dataset.errors import InvalidInputError
from rr_dataset.options import check_whole
from rr_dataset.record import Range, RoutingSpec
from rr_dataset.selection import Share

CP_ORDERS = ("zigzag", "contiguous")

Chunks = tuple[tuple[int, ...], ...]


def pipeline_chunks(
    num_layers: int,
    pp_rank: int = 0,
    pp_size: int = 1,
    vpp_size: int = 1,
    *,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> Chunks:
    """0-based ids of the layers of a pipeline rank, for each of its virtual stages, dense layers included.

    Virtual stage v of rank p is number v * pp_size + p of pp_size * vpp_size stages, which follow one another in the model
    (interleaved, as Megatron-LM and Paddle's PipelineParallelWithInterleave have it).

    first_stage_layers, last_stage_layers: layers of the first and last rank, all their virtual stages together; None: as many
        as the others. embedding_counts, loss_counts: the embedding or the loss takes the place of a layer (Megatron-LM's
        account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split).

    Raises InvalidInputError for ranks out of range, or layers that do not divide evenly: then give the layers themselves.
    """
    _check_rank("pp", pp_rank, pp_size)
    check_whole("vpp_size", vpp_size, 1)
    check_whole("num_layers", num_layers, 0)
    uneven = first_stage_layers is not None or last_stage_layers is not None
    if uneven and (embedding_counts or loss_counts):
        raise InvalidInputError("give either the layers of the first and last stage, or what else counts as a layer")
    fixed: dict[int, int] = {}
    if first_stage_layers is not None:
        fixed[0] = first_stage_layers
    if last_stage_layers is not None:
        fixed[pp_size - 1] = last_stage_layers
    left = num_layers + embedding_counts + loss_counts - sum(fixed.values())
    share, rest = divmod(left, pp_size - len(fixed)) if len(fixed) < pp_size else (0, left)
    sizes = [fixed.get(rank, share) for rank in range(pp_size)]
    if rest or any(size < 0 or size % vpp_size for size in sizes):
        raise InvalidInputError(
            f"{num_layers} layers do not divide over {pp_size} stages of {vpp_size} virtual ones (first {first_stage_layers}, "
            f"last {last_stage_layers}): give the layers of this rank themselves"
        )
    chunks = []
    at = -int(embedding_counts)
    for number in range(pp_size * vpp_size):
        size = sizes[number % pp_size] // vpp_size
        if number % pp_size == pp_rank:
            chunks.append(tuple(range(max(at, 0), min(at + size, num_layers))))
        at += size
    return tuple(chunks)


@dataclass(frozen=True)
class RankView:
    """One rank: its layers (pipeline), its tokens of each sample (context, tensor), its samples (data). Pickles.

    chunks: 0-based ids of the layers that this rank holds, for each virtual pipeline stage; dense ones do not matter. None: all
        layers. See `pipeline_chunks`.
    sequence_parallel: each tensor rank computes its own part of the tokens; False: each computes all.
    cp_order: "zigzag": of 2 * cp_size pieces, rank r has pieces r and 2 * cp_size - 1 - r (Megatron-LM, TransformerEngine,
        PaddleFormers' context parallel). "contiguous": one piece each (PaddleFormers' sep).
    pad_multiple: the trainer pads each sample to a multiple of this before it is split; the split itself needs a multiple of
        `unit`, so the least common multiple of both counts.

    Raises InvalidInputError for a rank out of range.
    """

    spec: RoutingSpec
    chunks: Chunks | None = None
    tp_rank: int = 0
    tp_size: int = 1
    sequence_parallel: bool = False
    cp_rank: int = 0
    cp_size: int = 1
    cp_order: str = "zigzag"
    dp_rank: int = 0
    dp_size: int = 1
    pad_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "dp"):
            _check_rank(name, getattr(self, f"{name}_rank"), getattr(self, f"{name}_size"))
        if self.cp_order not in CP_ORDERS:
            raise InvalidInputError(f"cp_order={self.cp_order!r}: expected one of {', '.join(CP_ORDERS)}")
        check_whole("pad_multiple", self.pad_multiple, 1)

    @property
    def layers(self) -> tuple[int, ...]:
        """Rising ids of the MoE layers of this rank, for `get`, `get_many` and `get_packed`. Empty for a rank that has none."""
        if self.chunks is None:
            return self.spec.moe_layers
        held = {layer for chunk in self.chunks for layer in chunk}
        return tuple(layer for layer in self.spec.moe_layers if layer in held)

    @property
    def layers_of_chunks(self) -> Chunks:
        """The same by virtual pipeline stage, in the order in which their forwards meet them."""
        chunks = (self.spec.moe_layers,) if self.chunks is None else self.chunks
        return tuple(tuple(layer for layer in chunk if layer in self.spec.moe_layers) for chunk in chunks)

    @property
    def unit(self) -> int:
        """What the padded length of a sample must be a multiple of, so that it divides over the ranks."""
        pieces = self.cp_size * (2 if self.cp_size > 1 and self.cp_order == "zigzag" else 1)
        return math.lcm(pieces, self.cp_size * self.tp_size) if self.sequence_parallel else pieces

    def samples(self, count: int) -> range:
        """Which of `count` samples are this data rank's: every dp_size-th, as distributed samplers deal them."""
        return range(self.dp_rank, count, self.dp_size)

    def padded(self, num_tokens: int) -> int:
        """The rows of a sample before it is split, over all ranks."""
        multiple = math.lcm(self.pad_multiple, self.unit)
        return -(-num_tokens // multiple) * multiple

    def tokens(self, num_tokens: int, recorded: int | None = None) -> list[Range]:
        """Absolute (start, stop) of this rank's tokens of one sample, in the order of its rows, as `tokens=` of a read.

        num_tokens: the trainer's number for the whole sample, from which padding and split follow. recorded: how many of them
            the record has, where it has fewer; the rank's last rows are then not there.
        """
        ranges = self.share(num_tokens).ranges
        last = num_tokens if recorded is None else recorded
        return [(start, min(stop, last)) for start, stop in ranges if start < last]

    def share(self, num_tokens: int, length: int | None = None) -> Share:
        """This rank's rows of one sample of `num_tokens` tokens, split by context and then by tensor rank; padding comes last.

        num_tokens: the trainer's number for the whole sample, not the record's. length: to how many rows the trainer pads it,
            such as the longest of a batch; None: `padded(num_tokens)`.

        So Megatron-LM splits batches that are not packed; their rows are flattened with the sample running fastest.
        Raises InvalidInputError for a `length` that is too short or does not divide.
        """
        return self._cut([num_tokens], length, per_sample=True)[0]

    def shares(self, lengths: Sequence[int], length: int | None = None) -> list[Share]:
        """This rank's rows of samples that are flattened one after the other: by context rank within each sample, then by tensor
        rank over all of them. Some samples may have no row here.

        So Megatron-LM splits packed sequences, and PaddleFormers its [batch * sequence, hidden]. As `share` otherwise.
        """
        return self._cut(lengths, length, per_sample=False)

    def _cut(self, lengths: Sequence[int], length: int | None, *, per_sample: bool) -> list[Share]:
        parts = self.tp_size if self.sequence_parallel else 1
        part = self.tp_rank if self.sequence_parallel else 0
        rows = [self._rows(num_tokens, length) for num_tokens in lengths]
        held = [self._of_context(count) for count in rows]
        total = sum(rows) // self.cp_size
        if not per_sample and total % parts:
            raise InvalidInputError(f"{total} rows of a context rank do not divide over {parts} tensor ranks: pad them")
        shares = []
        at = 0
        for num_tokens, count, ranges in zip(lengths, rows, held, strict=True):
            size = count // self.cp_size
            if per_sample:
                first, last = part * size // parts, (part + 1) * size // parts
            else:
                first, last = part * total // parts - at, (part + 1) * total // parts - at
                at += size
            shares.append(_share(ranges, max(first, 0), min(last, size), num_tokens))
        return shares

    def _rows(self, num_tokens: int, length: int | None) -> int:
        check_whole("num_tokens", num_tokens, 0)
        rows = self.padded(num_tokens) if length is None else check_whole("length", length, 0)
        if rows < num_tokens or rows % self.unit:
            raise InvalidInputError(
                f"length={rows}: a sample of {num_tokens} tokens needs at least as many rows, a multiple of {self.unit}"
            )
        return rows

    def _of_context(self, rows: int) -> list[Range]:
        if self.cp_size == 1:
            return [(0, rows)]
        if self.cp_order == "contiguous":
            size = rows // self.cp_size
            return [(self.cp_rank * size, (self.cp_rank + 1) * size)]
        size = rows // (2 * self.cp_size)
        return [(piece * size, (piece + 1) * size) for piece in (self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank)]

    @classmethod
    def from_megatron(
        cls,
        spec: RoutingSpec,
        config: Any,
        state: Any = None,
        *,
        layer_numbers: Iterable[int] | None = None,
        cp_order: str = "zigzag",
        pad_multiple: int = 1,
    ) -> RankView:
        """The rank of this process in Megatron-LM (facts of core 0.15; `state` may be anything with the same functions).

        config: the model's TransformerConfig: its num_layers, sequence_parallel, virtual_pipeline_model_parallel_size, and what
            it says of an uneven pipeline.
        state: None: megatron.core.parallel_state.
        layer_numbers: the 1-based `layer_number` of each layer of this rank, as
            `[layer.layer_number for chunk in model for layer in chunk.decoder.layers]`; needed with a
            pipeline_model_parallel_layout. None: computed as Megatron-LM does.

        Raises InvalidInputError for a layout without layer_numbers.
        """
        state = importlib.import_module("megatron.core.parallel_state") if state is None else state
        pp_rank, pp_size = _of_state(state, "pipeline_model_parallel")
        chunks: Chunks
        if layer_numbers is not None:
            numbers = tuple(layer_numbers)
            if min(numbers, default=1) < 1:
                raise InvalidInputError(f"layer_numbers={list(numbers)}: Megatron counts layers from 1")
            chunks = (tuple(number - 1 for number in numbers),)
        elif getattr(config, "pipeline_model_parallel_layout", None):
            raise InvalidInputError(
                "pipeline_model_parallel_layout is set: pass layer_numbers=, those of this rank's layers"
            )
        else:
            chunks = pipeline_chunks(
                config.num_layers,
                pp_rank,
                pp_size,
                getattr(config, "virtual_pipeline_model_parallel_size", None) or 1,
                first_stage_layers=getattr(config, "num_layers_in_first_pipeline_stage", None),
                last_stage_layers=getattr(config, "num_layers_in_last_pipeline_stage", None),
                embedding_counts=bool(getattr(config, "account_for_embedding_in_pipeline_split", False)),
                loss_counts=bool(getattr(config, "account_for_loss_in_pipeline_split", False)),
            )
        tp_rank, tp_size = _of_state(state, "tensor_model_parallel")
        cp_rank, cp_size = _of_state(state, "context_parallel")
        dp_rank, dp_size = _of_state(state, "data_parallel")
        return cls(
            spec,
            chunks,
            tp_rank=tp_rank,
            tp_size=tp_size,
            sequence_parallel=bool(config.sequence_parallel),
            cp_rank=cp_rank,
            cp_size=cp_size,
            cp_order=cp_order,
            dp_rank=dp_rank,
            dp_size=dp_size,
            pad_multiple=pad_multiple,
        )

    @classmethod
    def from_fleet(
        cls,
        spec: RoutingSpec,
        num_layers: int,
        group: Any = None,
        *,
        sequence_parallel: bool,
        vpp_size: int = 1,
        chunks: Chunks | None = None,
        cp_order: str | None = None,
        pad_multiple: int = 1,
    ) -> RankView:
        """The rank of this process in Paddle's fleet (facts of 3.3; `group` may be anything with the same methods).

        num_layers: decoder layers of the model, which the pipeline divides evenly (`seg_method="layer:..."`).
        group: None: `fleet.get_hybrid_communicate_group()`.
        chunks: the layers of this rank's virtual stages, where the pipeline divides them otherwise.
        cp_order: needed where the sequence is split: PaddleFormers does it with context_parallel_size in "zigzag", with
            sep_parallel_degree "contiguous", and both use fleet's sep group.

        Data and sharding ranks together deal the samples, the sharding rank running fastest, as in PaddleFormers.
        Raises InvalidInputError where the order of a split sequence is not given.
        """
        if group is None:
            group = importlib.import_module("paddle.distributed.fleet").get_hybrid_communicate_group()
        if chunks is None:
            chunks = pipeline_chunks(num_layers, group.get_stage_id(), group.get_pipe_parallel_world_size(), vpp_size)
        tp_rank, tp_size = _of_group(group, "model")
        cp_rank, cp_size = _of_group(group, "context")
        if cp_size == 1:
            cp_rank, cp_size = _of_group(group, "sep")
        if cp_size > 1 and cp_order is None:
            raise InvalidInputError(
                f"the sequence is split over {cp_size} ranks: say cp_order=, one of {', '.join(CP_ORDERS)}"
            )
        dp_rank, dp_size = _of_group(group, "data")
        sharding_rank, sharding_size = _of_group(group, "sharding")
        return cls(
            spec,
            chunks,
            tp_rank=tp_rank,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            cp_rank=cp_rank,
            cp_size=cp_size,
            cp_order=cp_order or CP_ORDERS[0],
            dp_rank=dp_rank * sharding_size + sharding_rank,
            dp_size=dp_size * sharding_size,
            pad_multiple=pad_multiple,
        )


def _share(ranges: Sequence[Range], first: int, last: int, num_tokens: int) -> Share:
    """Rows `first` to `last` of the ranges one after the other; positions from `num_tokens` on are padding."""
    found: list[Range] = []
    at = 0
    for start, stop in ranges:
        a = start + max(first - at, 0)
        b = min(start + last - at, stop, num_tokens)
        if a < b:
            if found and found[-1][1] == a:
                found[-1] = (found[-1][0], b)
            else:
                found.append((a, b))
        at += stop - start
    tokens = sum(stop - start for start, stop in found)
    return Share(tuple(found), max(last - first, 0) - tokens)


def _of_state(state: Any, name: str) -> tuple[int, int]:
    return getattr(state, f"get_{name}_rank")(), getattr(state, f"get_{name}_world_size")()


def _of_group(group: Any, name: str) -> tuple[int, int]:
    """(0, 1) where this version of fleet has no such axis, or only one rank along it."""
    size: Callable[[], int] | None = getattr(group, f"get_{name}_parallel_world_size", None)
    if size is None or size() <= 1:
        return 0, 1
    return getattr(group, f"get_{name}_parallel_rank")(), size()


def _check_rank(name: str, rank: int, size: int) -> None:
    if check_whole(f"{name}_rank", rank, 0) >= check_whole(f"{name}_size", size, 1):
        raise InvalidInputError(f"{name}_rank={rank}, {name}_size={size}: expected a rank from 0 to size - 1")
