"""Components of an LLM-inference scheduler: small parts that a scheduler's author composes.

This module exports the most common components, the events and the main errors. Each file of this package is one
component; import the others from their file. `ports` has the interfaces that users implement, `values` the values that
travel between components. `kv_events`, `cache`, `hicache`, `load`, `metrics` and `testing` are packages of their own.
Names are imported on first use, so pyzmq, pydantic, numpy and torch are needed only by what uses them, and the command
line shows its version without them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports
from scheduler_components._internal.old_names import OldNameFinder
from scheduler_components._version import __version__

if TYPE_CHECKING:
    from scheduler_components.batch_result_processor import BatchResultProcessor, RequestResult
    from scheduler_components.cache import RadixCache
    from scheduler_components.errors import (
        CacheIntegrityError,
        ComponentError,
        ConfigError,
        DecodeError,
        ForkedPublisherError,
        OutOfPagesError,
        PublisherClosedError,
        StartError,
    )
    from scheduler_components.events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        EventBatch,
        KVCacheEvent,
        KVEventBatch,
    )
    from scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
    from scheduler_components.kv_pool_reader import KvPoolReader
    from scheduler_components.load import TokenCountedQueue
    from scheduler_components.load.work_counters import WorkCounters
    from scheduler_components.load_inquirer import LoadInquirer
    from scheduler_components.load_publisher import GaugePacer, LoadPublisher, open_load_publisher
    from scheduler_components.metrics_emitter import LiveStats, MetricsEmitter
    from scheduler_components.output_streamer import OutputStreamer
    from scheduler_components.parallel_state import ParallelState
    from scheduler_components.server_info import kv_events_server_info

__all__ = [  # sorted by meaning
    # Components.
    "BatchResultProcessor",
    "GaugePacer",
    "KvPoolReader",
    "LoadInquirer",
    "LoadPublisher",
    "LiveStats",
    "MetricsEmitter",
    "OutputStreamer",
    "ParallelState",
    "RadixCache",
    "SchedulerKvEventsPublisher",
    "TokenCountedQueue",
    "RequestResult",
    "WorkCounters",
    "kv_events_server_info",
    "open_load_publisher",
    # Events.
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "KVCacheEvent",
    "KVEventBatch",
    # Errors.
    "ComponentError",
    "ConfigError",
    "StartError",
    "DecodeError",
    "CacheIntegrityError",
    "OutOfPagesError",
    "ForkedPublisherError",
    "PublisherClosedError",
    "__version__",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.batch_result_processor": "BatchResultProcessor RequestResult",
        "scheduler_components.errors": (
            "CacheIntegrityError ComponentError ConfigError DecodeError ForkedPublisherError OutOfPagesError "
            "PublisherClosedError StartError"
        ),
        "scheduler_components.events": "AllBlocksCleared BlockRemoved BlockStored EventBatch KVCacheEvent KVEventBatch",
        "scheduler_components.kv_events_publisher": "SchedulerKvEventsPublisher",
        "scheduler_components.kv_pool_reader": "KvPoolReader",
        "scheduler_components.load": "TokenCountedQueue",
        "scheduler_components.load.work_counters": "WorkCounters",
        "scheduler_components.load_inquirer": "LoadInquirer",
        "scheduler_components.load_publisher": "GaugePacer LoadPublisher open_load_publisher",
        "scheduler_components.metrics_emitter": "LiveStats MetricsEmitter",
        "scheduler_components.output_streamer": "OutputStreamer",
        "scheduler_components.parallel_state": "ParallelState",
        "scheduler_components.cache": "RadixCache",
        "scheduler_components.server_info": "kv_events_server_info",
    },
)

if not any(isinstance(finder, OldNameFinder) for finder in sys.meta_path):
    sys.meta_path.append(OldNameFinder())
