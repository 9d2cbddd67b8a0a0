"""`RoutingReplay`: recorded experts in a training forward, weights from the live router."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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

    spec: of the dataset. agreement: measure it (top_k * top_k comparisons a token and layer, on the device, no waiting).
    """

    def __init__(self, spec: RoutingSpec, *, agreement: bool = True) -> None:
        self.spec = spec
        self._measure = agreement
        self._framework: Framework | None = None
        self._schedule: Schedule[MicroBatch] = Schedule(())
        self._pushed = 0
        self._unchecked = False
        self._replayed_since_check = 0
        self._forget_metrics()

    @contextmanager
    def attach(self, model: Any, gates: Mapping[int, Any] | None = None) -> Iterator[RoutingReplay]:
        """Hook the routers of `model` until the context is left; leaving it without an error also checks that all was consumed.

        model: a paddle or torch module: PaddleFormers' Qwen3-MoE and GLM4-MoE (and gates with a `get_topk_indices` that the
            stock code asks for ids, as DeepSeek's), transformers' Qwen3-MoE (and routers alike), or a pipeline stage of one.
        gates: {layer id: the layer's router (for Qwen3-MoE of PaddleFormers its whole MoE block)}, where the ids cannot be read
            off the model.

        Raises InvalidInputError if no layer can be hooked, if the model routes in a layer that the spec lacks, or if
            something is attached already.
        """
        if self._framework is not None:
            raise InvalidInputError("this replay is attached already: use one RoutingReplay per model")
        framework = _framework_of(model)
        with framework.hook(self, model, gates) as layers:
            if not layers:
                raise InvalidInputError(
                    f"no router was found in {type(model).__name__}: replay knows routers with get_topk_indices() and Qwen3-MoE's. "
                    "Call replay.choose(layer, live_ids) in yours, or name them with gates="
                )
            self.spec.check_layers(layers)
            self._framework, self._schedule = framework, Schedule(layers)
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

        Raises InvalidRoutingError for a wrong shape or dtype, or a real row with an unknown expert or one named twice.
        """
        self._attached()
        batch = micro_batch(self.spec, self._pushed, self._schedule.layers, routing, mask, layers)
        self._pushed += 1
        self._unchecked = True
        self._schedule.queue(batch)
        return batch

    def choose(self, layer: int, live: Any) -> Any:
        """The ids that the layer's router must use: the recorded ones, and `live` for rows without a record.

        For routers of your own: call it once per forward (and once per recomputation) with the ids [rows, top_k] that
        the router chose, compute the weights from the logits of what it returns. Gradients do not pass through ids.
        """
        framework = self._attached()
        batch, again = self._schedule.take(layer, in_backward=framework.in_backward())
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

        transformers: `model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": replay.checkpoint_contexts})`.
        """
        scope: list[Scope[MicroBatch]] = []

        @contextmanager
        def forward() -> Iterator[None]:
            scope.append(self.enter_segment())
            yield

        @contextmanager
        def again() -> Iterator[None]:
            before = self.enter_segment()
            self.restore_segment(scope[0])
            try:
                yield
            finally:
                self.restore_segment(before)

        return forward(), again()

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
        self._schedule.forget()
        replayed, self._replayed_since_check = self._replayed_since_check, 0
        unchecked, self._unchecked = self._unchecked, False
        if waiting:
            raise InvalidInputError(
                f"micro-batches were pushed that no forward took, by layer: {waiting}; they are dropped. Push once per forward; a "
                "layer that is never called is not the one that was hooked"
            )
        if unchecked and not replayed:
            raise InvalidInputError("nothing was replayed: not one row of the micro-batches had a record")

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
