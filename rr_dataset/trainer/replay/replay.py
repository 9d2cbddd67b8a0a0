"""`RoutingReplay`: recorded experts in a training forward, weights from the live router."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy.typing as npt

from rr_dataset.errors import InvalidInputError
from rr_dataset.record import RoutingSpec
from rr_dataset.trainer.replay.batch import MicroBatch, micro_batch
from rr_dataset.trainer.replay.schedule import Schedule, Scope


class Framework(Protocol):
    """What replay asks of paddle or torch. Tensors are the framework's."""

    def hook(
        self, replay: RoutingReplay, model: Any, gates: Mapping[int, Any] | None
    ) -> AbstractContextManager[list[int]]:
        """Route every router of `model` through `replay.choose`; gives the layers that were hooked."""

    def in_backward(self) -> bool:
        """Whether the caller is inside of a backward."""

    def with_gradients(self) -> bool:
        """Whether gradients are recorded."""

    def load(self, array: npt.NDArray[Any], live: Any) -> Any:
        """A tensor of the same dtype and shape on the device of `live`."""

    def merge(self, live: Any, ids: Any, forced: Any | None) -> Any:
        """`ids` where forced ([rows], None: everywhere), else `live`; in the dtype of `live`."""

    def count_equal(self, live: Any, ids: Any, counted: Any | None) -> Any:
        """How many ids of the counted rows the live router chose too: a scalar that stays on the device."""


@dataclass(frozen=True)
class ReplayMetrics:
    """What has been replayed. Recomputations are not counted again.

    rows: rows of the router calls, padding excluded, summed over layers. replayed: those that had a record.
    agreement: by layer, the share of the recorded ids that the live router chose too (order ignored).
    """

    rows: int
    replayed: int
    agreement: dict[int, float]

    @property
    def coverage(self) -> float:
        """Share of the rows that were replayed."""
        return self.replayed / self.rows if self.rows else 0.0


class RoutingReplay:
    """Force recorded experts in a training forward; see the package's text for the hazards.

        replay = RoutingReplay(spec)
        with replay.attach(model):
            for batch in micro_batches:
                replay.push(batch.routed_experts, batch.mask, batch.layers)
                loss = model(batch.token_ids); loss.backward()
            replay.check_consumed()
            log(replay.metrics())

    A block of your own asks for its ids; everything else stays as it is, and outside of `attach` it routes as ever:

        class Moe(torch.nn.Module):
            def __init__(self, layer, hidden, experts, top_k, replay):
                super().__init__()
                self.layer, self.top_k, self.replay = layer, top_k, replay
                self.gate = torch.nn.Linear(hidden, experts, bias=False)
                self.experts = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden) for _ in range(experts))

            def forward(self, x):  # [rows, hidden]
                scores = self.gate(x).softmax(-1)
                ids = self.replay.choose(self.layer, scores.topk(self.top_k).indices)
                weights = scores.gather(-1, ids)  # of the live scores, so that the gate learns
                out = torch.zeros_like(x)
                for e, expert in enumerate(self.experts):
                    row, k = (ids == e).nonzero(as_tuple=True)
                    out = out.index_add(0, row, weights[row, k, None] * expert(x[row]))
                return out

        with replay.attach(model, own=True): ...  # push, forward and backward as above

    spec: of the dataset. agreement: measure it (top_k * top_k comparisons a token and layer, on the device, no waiting).
    """

    def __init__(self, spec: RoutingSpec, *, agreement: bool = True) -> None:
        self.spec = spec
        self._measure = agreement
        self._framework: Framework | None = None
        self._schedule: Schedule[MicroBatch] = Schedule(())
        self._pushed = 0
        self._paused = False
        self._unchecked = 0
        self._replayed_since_check = 0
        self._forget_metrics()

    @contextmanager
    def attach(
        self,
        model: Any,
        gates: Mapping[int, Any] | None = None,
        *,
        own: bool | Sequence[int] = False,
        ahead: bool = False,
    ) -> Iterator[RoutingReplay]:
        """Hook the routers of `model` until the context is left; leaving it without an error also checks that all was consumed.

        model: a paddle or torch module: PaddleFormers' Qwen3-MoE and GLM4-MoE (and gates with a `get_topk_indices` that the
            stock code asks for ids, as DeepSeek's), transformers' Qwen3-MoE (and routers alike), or a pipeline stage of one.
        gates: {layer id: the layer's router (for Qwen3-MoE of PaddleFormers its whole MoE block)}, where the ids cannot be read
            off the model.
        own: nothing is hooked, the model's blocks call `choose` themselves: True for all layers of the spec, or the layer ids
            of this pipeline stage.
        ahead: several micro-batches are pushed before their forwards, in the order of the forwards, as for a pipeline. Without
            it each is pushed when the forward before has ended, and a forward that ended early is seen at the next push; with
            it, when a layer is called while another of its chunk (layers that follow each other in the spec) waits for an
            older one. A forward that ended before its first router is then seen at the end only: abandon() its micro-batch.

        Warns with RoutingDatasetWarning of routers behind the last layer of the spec: they stay live.

        Raises InvalidInputError if no layer can be hooked, if the model routes in a layer that the spec lacks, if two layers
            have one router, or if the model or this replay is attached already.
        """
        if self._framework is not None:
            raise InvalidInputError("this replay is attached already: use one RoutingReplay per model")
        if own is not False and gates is not None:
            raise InvalidInputError(
                "gates= are hooked, own= says that routers call choose() themselves: give one of them"
            )
        framework = _framework_of(model)
        with framework.hook(self, model, gates if own is False else {}) as hooked:
            layers = hooked if own is False else self.spec.check_layers(None if own is True else own)
            if not layers:
                raise InvalidInputError(
                    f"no router was found in {type(model).__name__}: replay knows routers with get_topk_indices() and Qwen3-MoE's. "
                    "Name them with gates=, or have yours call replay.choose(layer, live_ids) and say own=True"
                )
            chunks = _chunks(self.spec, self.spec.check_layers(layers))
            self._framework, self._schedule = framework, Schedule(chunks, ahead=ahead)
            self._unchecked = 0
            try:
                yield self
                self.check_consumed()
            finally:
                self._framework, self._schedule = None, Schedule(())

    def push(
        self,
        routing: Mapping[int, object] | object,
        mask: Mapping[int, object] | object | None = None,
        layers: Sequence[int] | None = None,
    ) -> MicroBatch:
        """Queue the routing of the next micro-batch, before its forward.

        routing: {layer id: integers [rows, top_k]} or one array [batch, tokens, layers, top_k] or [rows, layers, top_k], in
            host memory. Rows are the model's flattened tokens, [batch * tokens] row-major, of what this rank's router sees.
            Layers that this model lacks (another pipeline stage's) are ignored.
        mask: what each row is: uint8 of `RowKind` (the mask or masks of `collate`), or bool, true where recorded. One a row, one
            a row and layer, or {layer id: one a row}. None: all are real. Rows that are missing, and rows with a negative id,
            are left to the live router. Padding counts nowhere; it takes the ids that stand there, if they are distinct
            experts ("spread"), else those of the live router.
        layers: which layers the array has; those of the spec by default.

        Raises InvalidRoutingError for a wrong shape or dtype, or a real row with an unknown expert or one named twice;
            InvalidInputError if the micro-batch before still waits for its forward (see `abandon`, and `attach` for ahead).
        """
        self._attached()
        batch = micro_batch(self.spec, self._pushed, self._schedule.layers, routing, mask, layers)
        self._schedule.queue(batch)
        self._pushed += 1
        self._unchecked += 1
        return batch

    def abandon(self, batch: MicroBatch | None = None) -> None:
        """No forward will take this micro-batch any more, or, with None, any that waits: after a forward that failed or that you
        skip. Layers that took it already have used it. Idempotent.
        """
        self._attached()
        before = self._schedule.waiting()
        self._schedule.abandon(batch)
        if self._schedule.waiting() != before:
            self._unchecked -= 1 if batch is not None else max(before.values())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards in this context route live and take no micro-batch: evaluation, generation, a reference model's own routing.

        Needed inside of `attach` only. Neither eval mode nor no_grad says this: log-probabilities of the old policy are computed
        with both, and replayed.
        """
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def choose(self, layer: int, live: Any) -> Any:
        """The ids that the layer's router must use: the recorded ones, and `live` for rows without a record.

        For routers of your own (see `attach` for own): call it once per forward (and once per recomputation) with the ids
        [rows, top_k] that the router chose, compute the weights from the logits of what it returns. Gradients do not pass through
        ids. Outside of `attach`, and in `paused`, it returns `live`.

        Raises InvalidInputError for what are no ids, for rows of another count than those pushed, and where no micro-batch waits.
        """
        if self._framework is None or self._paused:
            return live
        framework = self._framework
        shape, dtype = getattr(live, "shape", None), str(getattr(live, "dtype", None))
        if shape is None or "int" not in dtype:
            raise InvalidInputError(
                f"layer {layer}: expected the ids that the live router chose, integers [rows, top_k], not {type(live).__name__} of {dtype}"
            )
        batch, again = self._schedule.take(
            layer, in_backward=framework.in_backward(), gradients=framework.with_gradients()
        )
        rows = batch.layers[layer]
        if list(live.shape) != list(rows.ids.shape):
            raise InvalidInputError(
                f"layer {layer} routes {list(live.shape)} [rows, top_k], micro-batch {batch.number} has {list(rows.ids.shape)}: rows "
                "are batch * tokens with padding, and with sequence or context parallelism this rank's part of them"
            )
        if rows.device is None:
            arrays = (rows.ids, rows.forced, rows.counted)
            rows.device = [None if array is None else framework.load(array, live) for array in arrays]
        ids, forced, counted = rows.device
        if not again:
            self._rows += rows.real
            self._replayed += rows.replayed
            self._replayed_since_check += rows.replayed
            self._compared[layer] = self._compared.get(layer, 0) + rows.replayed * self.spec.top_k
            if self._measure:
                self._equal[layer] = self._equal.get(layer, 0) + framework.count_equal(live, ids, counted)
        return framework.merge(live, ids, forced)

    @contextmanager
    def recompute(self, batch: MicroBatch) -> Iterator[None]:
        """Say that every forward in this context is a recomputation of `batch`: wrap its backward where nothing else tells."""
        self._schedule.recomputing, before = batch, self._schedule.recomputing
        try:
            yield
        finally:
            self._schedule.recomputing = before

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of torch.utils.checkpoint (use_reentrant=False): each segment remembers its micro-batches.

        `attach` gives it to every torch.utils.checkpoint by itself, beside a context_fn of yours; this is for checkpointing that
        takes a context_fn and is not torch's own.
        """
        return nullcontext(), _Again(self, self.enter_segment())

    def enter_segment(self) -> Scope[MicroBatch]:
        """For frameworks that keep a state per recomputed segment: taken when its forward starts, for `restore_segment`."""
        return self._schedule.enter()

    def restore_segment(self, scope: Scope[MicroBatch]) -> None:
        """The segment of this state is computed again from now on; or, with the state taken before that, no longer.

        Raises InvalidInputError once the model is no longer attached: its routers would choose other experts than in the forward.
        """
        if scope:
            self._attached()
        self._schedule.restore(scope)

    def check_consumed(self) -> None:
        """At the end of a step: raises InvalidInputError if a layer left a micro-batch unused, or if nothing was replayed."""
        waiting = self._schedule.waiting()
        self._schedule.abandon(None)
        replayed, self._replayed_since_check = self._replayed_since_check, 0
        unchecked, self._unchecked = self._unchecked, 0
        if waiting:
            raise InvalidInputError(
                f"micro-batches were pushed that no forward took, by layer: {waiting}; they are dropped. Push once per forward; a "
                "layer that is never called is not the one that was hooked"
            )
        if unchecked and not replayed:
            raise InvalidInputError(
                "nothing was replayed: not one row of the micro-batches had a record. (In a uint8 mask 2 is a real row, 1 a missing one; "
                "a mask of zeros and ones must be bool)"
            )

    def metrics(self, *, reset: bool = False) -> ReplayMetrics:
        """Of all forwards since the last reset. Waits for the device."""
        agreement = {
            layer: float(equal) / self._compared[layer]
            for layer, equal in sorted(self._equal.items())
            if self._compared[layer]
        }
        metrics = ReplayMetrics(rows=self._rows, replayed=self._replayed, agreement=agreement)
        if reset:
            self._forget_metrics()
        return metrics

    def _forget_metrics(self) -> None:
        self._rows = self._replayed = 0
        self._compared: dict[int, int] = {}
        self._equal: dict[int, Any] = {}

    def _attached(self) -> Framework:
        if self._framework is None:
            raise InvalidInputError(
                "not attached to a model: push, forward and backward belong inside of `with replay.attach(model):`"
            )
        return self._framework


class _Again:
    """A segment is computed again; entered once a backward."""

    def __init__(self, replay: RoutingReplay, scope: Scope[MicroBatch]) -> None:
        self._replay, self._scope = replay, scope
        self._before: list[Scope[MicroBatch]] = []

    def __enter__(self) -> None:
        before = self._replay.enter_segment()
        self._replay.restore_segment(self._scope)
        self._before.append(before)

    def __exit__(self, *_: object) -> None:
        self._replay.restore_segment(self._before.pop())


def _chunks(spec: RoutingSpec, layers: Sequence[int]) -> list[list[int]]:
    """Runs of layers that follow each other in the model's MoE layers."""
    chunks: list[list[int]] = []
    for at in map(spec.moe_layers.index, layers):
        layer = spec.moe_layers[at]
        if chunks and at and chunks[-1][-1] == spec.moe_layers[at - 1]:
            chunks[-1].append(layer)
        else:
            chunks.append([layer])
    return chunks


def _framework_of(model: Any) -> Framework:
    """By the module that the model's class comes from, so that neither framework is imported for the other."""
    for name, base in (("torch", "nn.Module"), ("paddle", "nn.Layer")):
        module = sys.modules.get(name)
        if module is not None and isinstance(model, _attribute(module, base)):
            found: Framework = import_module(f"rr_dataset.trainer.replay.with_{name}").FRAMEWORK
            return found
    raise InvalidInputError(f"{type(model).__name__} is no torch.nn.Module and no paddle.nn.Layer")


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
