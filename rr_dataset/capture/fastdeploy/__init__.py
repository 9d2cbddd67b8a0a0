"""FastDeploy's routing replay on a dataset: the class and method names of both generations of its tree.

Integration is a changed import. `worker` has those of the tree whose manager lives in the worker, `processes` those of the tree
that is split into worker, engine and cache manager; `store` the store contract that both use.
"""

from rr_dataset.capture.fastdeploy.config import RoutingReplayConfig, open_writer
from rr_dataset.capture.fastdeploy.ids import record_id_of, split_request_id
from rr_dataset.capture.fastdeploy.processes import (
    RoutedExpertsCapturer,
    RoutingCacheManager,
    save_routing_to_buffer_v2,
)
from rr_dataset.capture.fastdeploy.shared import (
    RoutingHostBuffer,
    RoutingHostBufferView,
    RoutingSwapBuffer,
    RoutingSwapBufferView,
)
from rr_dataset.capture.fastdeploy.store import RoutingStoreDataset, StoreWrapper, get_routing_store
from rr_dataset.capture.fastdeploy.worker import (
    RoutingReplayManager,
    initialize_routing_replay_manager,
    save_routing_to_buffer,
)

__all__ = [
    "RoutedExpertsCapturer",
    "RoutingCacheManager",
    "RoutingHostBuffer",
    "RoutingHostBufferView",
    "RoutingReplayConfig",
    "RoutingReplayManager",
    "RoutingStoreDataset",
    "RoutingSwapBuffer",
    "RoutingSwapBufferView",
    "StoreWrapper",
    "get_routing_store",
    "initialize_routing_replay_manager",
    "open_writer",
    "record_id_of",
    "save_routing_to_buffer",
    "save_routing_to_buffer_v2",
    "split_request_id",
]
