"""The hierarchical cache: device, host and storage tiers that stay identical on every rank of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.agreement import (
    AgreedValues,
    InProcessGroups,
    ParallelGroups,
    Proposal,
    RankGroups,
    Slots,
    agreeing_ranks,
    elementwise_min,
    ordered_groups,
    world_rank_groups,
)
from scheduler_components.errors import (
    LoadBackError,
    SettingsDivergenceError,
    StorageError,
    StorageStallError,
    SyncClosedError,
    SyncDivergenceError,
    SyncTimeoutError,
    TierDivergenceError,
)
from scheduler_components.events import Tier
from scheduler_components.hicache.policy import HiCachePolicy, LoadBackMode, PrefetchPolicy, WritePolicy
from scheduler_components.page_shape import STORED_LAYOUT, HostLayout, PageShape
from scheduler_components.ports import (
    CopyEvent,
    DeviceMemory,
    HostLayerView,
    HostPages,
    LayerDoneCounter,
    NullCopyEvent,
    NullLayerDoneCounter,
    NullPageHook,
    PageBytes,
    PageHook,
    PageMover,
    PageStore,
    SyncGroup,
    ZeroCopyPageStore,
)
from scheduler_components.values import SyncCall

if TYPE_CHECKING:
    from scheduler_components.hicache.cache import HiCacheStepper, HiRadixCache
    from scheduler_components.hicache.file_storage import FilePageStore, open_file_page_store
    from scheduler_components.hicache.memory import HostPool, SimulatedDeviceMemory
    from scheduler_components.hicache.memory_storage import MemoryPageStore
    from scheduler_components.hicache.mooncake_storage import (
        MooncakeAddress,
        MooncakePageStore,
        open_mooncake_page_store,
    )
    from scheduler_components.hicache.storage import CheckedPageStore, KeySpace, Placement, StorageStats
    from scheduler_components.hicache.storage_backend import ZERO_COPY_LAYOUT
    from scheduler_components.hicache.thread_layer_counter import ThreadLayerDoneCounter
    from scheduler_components.hicache.thread_page_mover import ThreadPageMover
    from scheduler_components.hicache.thread_storage import open_deadline_page_store
    from scheduler_components.hicache.torch_memory import TorchDeviceMemory
    from scheduler_components.torch_sync import open_torch_groups

__all__ = [
    "AgreedValues",
    "NullCopyEvent",
    "CheckedPageStore",
    "CopyEvent",
    "DeviceMemory",
    "FilePageStore",
    "HiCachePolicy",
    "HiRadixCache",
    "HostLayout",
    "HostPages",
    "HostLayerView",
    "HostPool",
    "ZERO_COPY_LAYOUT",
    "ZeroCopyPageStore",
    "InProcessGroups",
    "KeySpace",
    "ThreadLayerDoneCounter",
    "LayerDoneCounter",
    "LoadBackMode",
    "MemoryPageStore",
    "MooncakeAddress",
    "MooncakePageStore",
    "PageBytes",
    "PageHook",
    "LoadBackError",
    "PageMover",
    "PageShape",
    "PageStore",
    "Placement",
    "PrefetchPolicy",
    "Proposal",
    "RankGroups",
    "Slots",
    "SimulatedDeviceMemory",
    "SettingsDivergenceError",
    "StorageError",
    "StorageStallError",
    "StorageStats",
    "SyncCall",
    "SyncClosedError",
    "SyncDivergenceError",
    "ParallelGroups",
    "SyncGroup",
    "SyncTimeoutError",
    "ThreadPageMover",
    "Tier",
    "TierDivergenceError",
    "HiCacheStepper",
    "TorchDeviceMemory",
    "WritePolicy",
    "agreeing_ranks",
    "elementwise_min",
    "ordered_groups",
    "open_deadline_page_store",
    "open_file_page_store",
    "open_mooncake_page_store",
    "open_torch_groups",
    "world_rank_groups",
    "NullLayerDoneCounter",
    "NullPageHook",
    "STORED_LAYOUT",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.hicache.cache": "HiCacheStepper HiRadixCache",
        "scheduler_components.hicache.file_storage": "FilePageStore open_file_page_store",
        "scheduler_components.hicache.memory": "HostPool SimulatedDeviceMemory",
        "scheduler_components.hicache.memory_storage": "MemoryPageStore",
        "scheduler_components.hicache.mooncake_storage": ("MooncakeAddress MooncakePageStore open_mooncake_page_store"),
        "scheduler_components.hicache.storage": "CheckedPageStore KeySpace Placement StorageStats",
        "scheduler_components.hicache.storage_backend": "ZERO_COPY_LAYOUT",
        "scheduler_components.hicache.thread_layer_counter": "ThreadLayerDoneCounter",
        "scheduler_components.hicache.thread_page_mover": "ThreadPageMover",
        "scheduler_components.hicache.thread_storage": "open_deadline_page_store",
        "scheduler_components.hicache.torch_memory": "TorchDeviceMemory",
        "scheduler_components.torch_sync": "open_torch_groups",
    },
)
