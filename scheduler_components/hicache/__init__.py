"""The hierarchical cache: device, host and storage tiers that stay identical on every rank of a replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names
from scheduler_components.errors import (
    PageLoadError,
    SettingsDivergenceError,
    StorageError,
    StorageStallError,
    SyncClosedError,
    SyncDivergenceError,
    SyncTimeoutError,
    TierDivergenceError,
)
from scheduler_components.events import Tier
from scheduler_components.hicache.agreement import (
    AgreedValues,
    InProcessSync,
    Proposal,
    RankSets,
    Slots,
    SyncDomain,
    domain_of,
    elementwise_min,
    groups_in_order,
    world_rank_sets,
)
from scheduler_components.hicache.cache import HiRadixCache, TierStepper
from scheduler_components.hicache.controller import HiCachePolicy, LoadWay, PrefetchStop, WritePolicy
from scheduler_components.hicache.memory_storage import MemoryPageStore
from scheduler_components.hicache.storage import CheckedPageStore, KeySpace, Placement, StorageStats
from scheduler_components.page_shape import STORED_LAYOUT, HostLayout, PageShape
from scheduler_components.ports import (
    COPIED,
    NO_LAYER_FENCE,
    NO_PAGE_HOOK,
    CopyEnd,
    DeviceMemory,
    HostPages,
    HostPlane,
    InPlacePageStore,
    LayerFence,
    PageBytes,
    PageHook,
    PageMover,
    PageStore,
    SyncGroup,
)
from scheduler_components.values import SyncCall

if TYPE_CHECKING:
    from scheduler_components.hicache.file_storage import FilePageStore, open_file_page_store
    from scheduler_components.hicache.memory import HostPool, SimulatedDeviceMemory
    from scheduler_components.hicache.mooncake_storage import (
        MooncakeAddress,
        MooncakePageStore,
        open_mooncake_page_store,
    )
    from scheduler_components.hicache.stored_pages import IN_PLACE_LAYOUT
    from scheduler_components.hicache.thread_layers import LayerArrivals
    from scheduler_components.hicache.thread_page_mover import ThreadPageMover
    from scheduler_components.hicache.thread_storage import open_deadline_page_store
    from scheduler_components.hicache.torch_memory import TorchDeviceMemory
    from scheduler_components.hicache.torch_sync import open_torch_sync_domains

__all__ = [
    "AgreedValues",
    "COPIED",
    "CheckedPageStore",
    "CopyEnd",
    "DeviceMemory",
    "FilePageStore",
    "HiCachePolicy",
    "HiRadixCache",
    "HostLayout",
    "HostPages",
    "HostPlane",
    "HostPool",
    "IN_PLACE_LAYOUT",
    "InPlacePageStore",
    "InProcessSync",
    "KeySpace",
    "LayerArrivals",
    "LayerFence",
    "LoadWay",
    "MemoryPageStore",
    "MooncakeAddress",
    "MooncakePageStore",
    "PageBytes",
    "PageHook",
    "PageLoadError",
    "PageMover",
    "PageShape",
    "PageStore",
    "Placement",
    "PrefetchStop",
    "Proposal",
    "RankSets",
    "Slots",
    "SimulatedDeviceMemory",
    "SettingsDivergenceError",
    "StorageError",
    "StorageStallError",
    "StorageStats",
    "SyncCall",
    "SyncClosedError",
    "SyncDivergenceError",
    "SyncDomain",
    "SyncGroup",
    "SyncTimeoutError",
    "ThreadPageMover",
    "Tier",
    "TierDivergenceError",
    "TierStepper",
    "TorchDeviceMemory",
    "WritePolicy",
    "domain_of",
    "elementwise_min",
    "groups_in_order",
    "open_deadline_page_store",
    "open_file_page_store",
    "open_mooncake_page_store",
    "open_torch_sync_domains",
    "world_rank_sets",
    "NO_LAYER_FENCE",
    "NO_PAGE_HOOK",
    "STORED_LAYOUT",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.hicache.file_storage": "FilePageStore open_file_page_store",
        "scheduler_components.hicache.memory": "HostPool SimulatedDeviceMemory",
        "scheduler_components.hicache.mooncake_storage": ("MooncakeAddress MooncakePageStore open_mooncake_page_store"),
        "scheduler_components.hicache.stored_pages": "IN_PLACE_LAYOUT",
        "scheduler_components.hicache.thread_layers": "LayerArrivals",
        "scheduler_components.hicache.thread_page_mover": "ThreadPageMover",
        "scheduler_components.hicache.thread_storage": "open_deadline_page_store",
        "scheduler_components.hicache.torch_memory": "TorchDeviceMemory",
        "scheduler_components.hicache.torch_sync": "open_torch_sync_domains",
    },
)
