"""The hierarchical cache: device, host and storage tiers that stay identical on every rank of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports
from scheduler_components.hicache.policy import HiCachePolicy, LoadBackMode, PrefetchPolicy, WritePolicy

if TYPE_CHECKING:
    from scheduler_components.hicache.cache import HiCacheStepper, HiRadixCache
    from scheduler_components.hicache.file_storage import FilePageStore, open_file_page_store
    from scheduler_components.hicache.memory import HostPool, SimulatedDeviceMemory
    from scheduler_components.hicache.memory_storage import MemoryPageStore
    from scheduler_components.hicache.mooncake_storage import MooncakeAddress, open_mooncake_page_store
    from scheduler_components.hicache.page_keys import KeySpace, Placement
    from scheduler_components.hicache.storage import CheckedPageStore
    from scheduler_components.hicache.storage_backend import ZERO_COPY_LAYOUT
    from scheduler_components.hicache.thread_layer_counter import ThreadLayerDoneCounter
    from scheduler_components.hicache.thread_page_mover import ThreadPageMover
    from scheduler_components.hicache.thread_storage import open_deadline_page_store
    from scheduler_components.hicache.torch_memory import TorchDeviceMemory

__all__ = [
    "CheckedPageStore",
    "FilePageStore",
    "HiCachePolicy",
    "HiCacheStepper",
    "HiRadixCache",
    "HostPool",
    "KeySpace",
    "LoadBackMode",
    "MemoryPageStore",
    "MooncakeAddress",
    "Placement",
    "PrefetchPolicy",
    "SimulatedDeviceMemory",
    "ThreadLayerDoneCounter",
    "ThreadPageMover",
    "TorchDeviceMemory",
    "WritePolicy",
    "ZERO_COPY_LAYOUT",
    "open_deadline_page_store",
    "open_file_page_store",
    "open_mooncake_page_store",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.hicache.cache": "HiCacheStepper HiRadixCache",
        "scheduler_components.hicache.file_storage": "FilePageStore open_file_page_store",
        "scheduler_components.hicache.memory": "HostPool SimulatedDeviceMemory",
        "scheduler_components.hicache.memory_storage": "MemoryPageStore",
        "scheduler_components.hicache.mooncake_storage": "MooncakeAddress open_mooncake_page_store",
        "scheduler_components.hicache.page_keys": "KeySpace Placement",
        "scheduler_components.hicache.storage": "CheckedPageStore",
        "scheduler_components.hicache.storage_backend": "ZERO_COPY_LAYOUT",
        "scheduler_components.hicache.thread_layer_counter": "ThreadLayerDoneCounter",
        "scheduler_components.hicache.thread_page_mover": "ThreadPageMover",
        "scheduler_components.hicache.thread_storage": "open_deadline_page_store",
        "scheduler_components.hicache.torch_memory": "TorchDeviceMemory",
    },
)
