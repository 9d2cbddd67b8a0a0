"""The inference side: routing rows that follow the KV cache, and the hooks of engines."""

from rr_dataset.capture.capturer import StepCapturer
from rr_dataset.capture.manager import CaptureStats, Finished, RoutingCapture
from rr_dataset.capture.slots import Gathered, SlotTable
from rr_dataset.capture.watcher import BlockWatcher

__all__ = ["BlockWatcher", "CaptureStats", "Finished", "Gathered", "RoutingCapture", "SlotTable", "StepCapturer"]
