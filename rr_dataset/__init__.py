"""rr_dataset: the expert routing of Mixture-of-Experts rollouts, stored once, read exactly.

An engine opens a `RoutingWriter` and puts records; a trainer opens the dataset with `open_dataset` and gets them.
Importing this package loads numpy and nothing heavier: the reading side is imported when one of its names is first used,
and an engine process never uses one.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rr_dataset.errors import (
    AlignmentError,
    CorruptShardError,
    CorruptSpoolError,
    DatasetNotFoundError,
    FlushTimeoutError,
    FormatError,
    InvalidInputError,
    InvalidRequestIdError,
    InvalidRoutingError,
    NewerFormatError,
    NotFoundError,
    ObjectNotFoundError,
    PutManyError,
    ReadConflictError,
    RecordDroppedError,
    RecordNotFoundError,
    RecordTooLargeError,
    RoutingDatasetError,
    RoutingDatasetWarning,
    SpecMismatchError,
    SpoolFullError,
    SpoolUnavailableError,
    StorageError,
    WaitTimeoutError,
    WorkerError,
    WriterClosedError,
    WriterError,
    WriterForkedError,
)
from rr_dataset.keys import KeyScheme
from rr_dataset.options import WriterOptions
from rr_dataset.record import RecordHead, RoutingRecord, RoutingSpec

if TYPE_CHECKING:
    from rr_dataset.compact import compact, plan_compaction
    from rr_dataset.compactor import CompactReport
    from rr_dataset.dataset import DatasetInfo, RoutingDataset, create_dataset, open_dataset
    from rr_dataset.delete import DeleteReport, delete, delete_prefix
    from rr_dataset.doctor import Finding, doctor
    from rr_dataset.follow import PollCursor
    from rr_dataset.garbage import GarbageReport, collect_garbage
    from rr_dataset.interchange.bundle import CopyReport, copy
    from rr_dataset.interchange.export import ExportReport, export
    from rr_dataset.interchange.fastdeploy import import_fastdeploy
    from rr_dataset.interchange.imported import ImportReport, Refused
    from rr_dataset.interchange.responses import import_responses
    from rr_dataset.maintain import MaintainReport, maintain
    from rr_dataset.packed import Packed, Spans
    from rr_dataset.padding import RowKind
    from rr_dataset.receipt import FlushReport, Receipt
    from rr_dataset.recovery import SpoolReport, recover
    from rr_dataset.selection import Share
    from rr_dataset.stacked import Stacked
    from rr_dataset.stats import LayerLoad, expert_counts, layer_loads, to_long
    from rr_dataset.trainer.align import Alignment, align
    from rr_dataset.trainer.batches import RoutingBatches
    from rr_dataset.trainer.collate import Batch, collate, to_paddle, to_torch
    from rr_dataset.trainer.convert import to_megatron, to_slime, to_verl
    from rr_dataset.trainer.feeder import RankFeeder
    from rr_dataset.trainer.idlist import IdList
    from rr_dataset.trainer.ranks import RankView, pipeline_chunks
    from rr_dataset.trainer.replay import MicroBatch, ReplayMetrics, RoutingReplay
    from rr_dataset.trainer.samples import RoutingSamples, Sample, SampleOptions, whole_batches
    from rr_dataset.trainer.stream_options import StreamOptions
    from rr_dataset.trainer.streaming import RoutingStream
    from rr_dataset.trainer.trajectory import Trajectory, trajectory
    from rr_dataset.verify import Problem, VerifyReport, verify
    from rr_dataset.writer import RoutingWriter

_LAZY = {
    "CompactReport": "rr_dataset.compactor",
    "compact": "rr_dataset.compact",
    "plan_compaction": "rr_dataset.compact",
    "GarbageReport": "rr_dataset.garbage",
    "collect_garbage": "rr_dataset.garbage",
    "MaintainReport": "rr_dataset.maintain",
    "maintain": "rr_dataset.maintain",
    "DatasetInfo": "rr_dataset.dataset",
    "PollCursor": "rr_dataset.follow",
    "RoutingDataset": "rr_dataset.dataset",
    "create_dataset": "rr_dataset.dataset",
    "DeleteReport": "rr_dataset.delete",
    "delete": "rr_dataset.delete",
    "delete_prefix": "rr_dataset.delete",
    "Finding": "rr_dataset.doctor",
    "doctor": "rr_dataset.doctor",
    "open_dataset": "rr_dataset.dataset",
    "CopyReport": "rr_dataset.interchange.bundle",
    "copy": "rr_dataset.interchange.bundle",
    "ExportReport": "rr_dataset.interchange.export",
    "export": "rr_dataset.interchange.export",
    "ImportReport": "rr_dataset.interchange.imported",
    "Refused": "rr_dataset.interchange.imported",
    "import_fastdeploy": "rr_dataset.interchange.fastdeploy",
    "import_responses": "rr_dataset.interchange.responses",
    "LayerLoad": "rr_dataset.stats",
    "expert_counts": "rr_dataset.stats",
    "layer_loads": "rr_dataset.stats",
    "to_long": "rr_dataset.stats",
    "Stacked": "rr_dataset.stacked",
    "RoutingBatches": "rr_dataset.trainer.batches",
    "RankFeeder": "rr_dataset.trainer.feeder",
    "IdList": "rr_dataset.trainer.idlist",
    "RoutingSamples": "rr_dataset.trainer.samples",
    "Sample": "rr_dataset.trainer.samples",
    "SampleOptions": "rr_dataset.trainer.samples",
    "whole_batches": "rr_dataset.trainer.samples",
    "RoutingStream": "rr_dataset.trainer.streaming",
    "StreamOptions": "rr_dataset.trainer.stream_options",
    "Problem": "rr_dataset.verify",
    "VerifyReport": "rr_dataset.verify",
    "verify": "rr_dataset.verify",
    "SpoolReport": "rr_dataset.recovery",
    "recover": "rr_dataset.recovery",
    "FlushReport": "rr_dataset.receipt",
    "Receipt": "rr_dataset.receipt",
    "RoutingWriter": "rr_dataset.writer",
    "Packed": "rr_dataset.packed",
    "Spans": "rr_dataset.packed",
    "RowKind": "rr_dataset.padding",
    "Share": "rr_dataset.selection",
    "Alignment": "rr_dataset.trainer.align",
    "align": "rr_dataset.trainer.align",
    "Batch": "rr_dataset.trainer.collate",
    "collate": "rr_dataset.trainer.collate",
    "to_paddle": "rr_dataset.trainer.collate",
    "to_torch": "rr_dataset.trainer.collate",
    "RankView": "rr_dataset.trainer.ranks",
    "pipeline_chunks": "rr_dataset.trainer.ranks",
    "MicroBatch": "rr_dataset.trainer.replay",
    "ReplayMetrics": "rr_dataset.trainer.replay",
    "RoutingReplay": "rr_dataset.trainer.replay",
    "to_megatron": "rr_dataset.trainer.convert",
    "to_slime": "rr_dataset.trainer.convert",
    "to_verl": "rr_dataset.trainer.convert",
    "Trajectory": "rr_dataset.trainer.trajectory",
    "trajectory": "rr_dataset.trainer.trajectory",
}

__all__ = [
    "Alignment",
    "AlignmentError",
    "Batch",
    "CompactReport",
    "CopyReport",
    "CorruptShardError",
    "CorruptSpoolError",
    "DatasetInfo",
    "DatasetNotFoundError",
    "DeleteReport",
    "ExportReport",
    "Finding",
    "FlushReport",
    "FlushTimeoutError",
    "FormatError",
    "GarbageReport",
    "IdList",
    "ImportReport",
    "InvalidInputError",
    "InvalidRequestIdError",
    "InvalidRoutingError",
    "KeyScheme",
    "LayerLoad",
    "MaintainReport",
    "MicroBatch",
    "NewerFormatError",
    "NotFoundError",
    "ObjectNotFoundError",
    "Packed",
    "PollCursor",
    "Problem",
    "PutManyError",
    "RankFeeder",
    "RankView",
    "ReadConflictError",
    "Receipt",
    "RecordDroppedError",
    "RecordHead",
    "RecordNotFoundError",
    "RecordTooLargeError",
    "Refused",
    "ReplayMetrics",
    "RoutingBatches",
    "RoutingDataset",
    "RoutingDatasetError",
    "RoutingDatasetWarning",
    "RoutingRecord",
    "RoutingReplay",
    "RoutingSamples",
    "RoutingSpec",
    "RoutingStream",
    "RoutingWriter",
    "RowKind",
    "Sample",
    "SampleOptions",
    "Share",
    "Spans",
    "SpecMismatchError",
    "SpoolFullError",
    "SpoolReport",
    "SpoolUnavailableError",
    "Stacked",
    "StorageError",
    "StreamOptions",
    "Trajectory",
    "VerifyReport",
    "WaitTimeoutError",
    "WorkerError",
    "WriterClosedError",
    "WriterError",
    "WriterForkedError",
    "WriterOptions",
    "align",
    "collate",
    "collect_garbage",
    "compact",
    "copy",
    "create_dataset",
    "delete",
    "delete_prefix",
    "doctor",
    "expert_counts",
    "export",
    "import_fastdeploy",
    "import_responses",
    "layer_loads",
    "maintain",
    "open_dataset",
    "pipeline_chunks",
    "plan_compaction",
    "recover",
    "to_long",
    "to_megatron",
    "to_paddle",
    "to_slime",
    "to_torch",
    "to_verl",
    "trajectory",
    "verify",
    "whole_batches",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Facade(ModuleType):
    """The package: a function keeps its name also when the module of the same name has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Facade
