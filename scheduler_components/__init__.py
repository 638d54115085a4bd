"""Small parts that LLM-inference schedulers are composed of.

What a scheduler's author imports is here: the components, the ports that they ask for, the values that travel, and
the errors. ``scheduler_components.ports`` is the page to read first. Packages hold the rest: ``kv_events`` (codec,
stream, configuration, publishers), ``cache``, ``hicache``, ``load``, ``metrics``, ``testing``. What needs pyzmq,
pydantic, numpy or torch is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components._version import __version__
from scheduler_components.batch_result_processor import BatchResultProcessor, RequestResult
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
from scheduler_components.ports import (
    HeldBlocksSource,
    KvEventSink,
    KvEventSource,
    KvMetricsSink,
    LoadSectionsSource,
    LoadSink,
    LoadSource,
    MetricsSink,
    NullKvMetricsSink,
    NullMetricsSink,
    OutputSink,
    PoolSource,
    QueueSource,
    RateSource,
    StatsSource,
)
from scheduler_components.values import (
    BatchingStats,
    CachedTokens,
    DecodeMoments,
    DisaggregationLoad,
    FinishReason,
    HistogramSnapshot,
    IntegrityStats,
    KvMetrics,
    KvPoolSnapshot,
    LatencySnapshot,
    LoadSections,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    OutputBatch,
    OutputDelta,
    OutputStats,
    PoolStats,
    PublisherStats,
    QueueLoad,
    QuiesceStats,
    SchedulerCounters,
    SchedulerStats,
    SpeculativeLoad,
    TierStats,
    TokenOutput,
)

if TYPE_CHECKING:
    from scheduler_components.cache import RadixCache
    from scheduler_components.server_info import kv_events_server_info

__all__ = [  # sorted by meaning
    # Components, and what they are made with.
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
    # Ports: sources, then sinks. The ports of requests are in scheduler_components.ports alone.
    "KvEventSource",
    "HeldBlocksSource",
    "LoadSectionsSource",
    "LoadSource",
    "PoolSource",
    "QueueSource",
    "RateSource",
    "StatsSource",
    "KvEventSink",
    "KvMetricsSink",
    "LoadSink",
    "MetricsSink",
    "OutputSink",
    "NullKvMetricsSink",
    "NullMetricsSink",
    # Values: events, load, statistics, outputs.
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "KVCacheEvent",
    "KVEventBatch",
    "LoadSnapshot",
    "LoadSections",
    "BatchingStats",
    "DecodeMoments",
    "DisaggregationLoad",
    "LoraLoad",
    "MemoryLoad",
    "QueueLoad",
    "SpeculativeLoad",
    "HistogramSnapshot",
    "KvPoolSnapshot",
    "PoolStats",
    "IntegrityStats",
    "KvMetrics",
    "LatencySnapshot",
    "PublisherStats",
    "SchedulerStats",
    "SchedulerCounters",
    "CachedTokens",
    "TierStats",
    "QuiesceStats",
    "FinishReason",
    "OutputBatch",
    "OutputDelta",
    "OutputStats",
    "TokenOutput",
    # Errors that a scheduler's author meets. HiCache's are in scheduler_components.hicache.
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
    {"scheduler_components.cache": "RadixCache", "scheduler_components.server_info": "kv_events_server_info"},
)
