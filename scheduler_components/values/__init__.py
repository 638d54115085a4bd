"""Values that travel between components, to sinks and over the wire. They have no behaviour."""

from __future__ import annotations

from scheduler_components.values.load import (
    DecodeMoments,
    DisaggregationLoad,
    LoadSections,
    LoadSnapshot,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SpeculativeLoad,
)
from scheduler_components.values.outputs import FinishReason, OutputBatch, OutputDelta, OutputStats, TokenOutput
from scheduler_components.values.pools import (
    AllocationAction,
    AllocationRecord,
    HeldCount,
    IntegrityStats,
    KvPoolSnapshot,
    PageHolding,
    PoolCount,
    PoolStats,
    StallReport,
)
from scheduler_components.values.receive import (
    ForwardMode,
    InputKind,
    InputMessage,
    ReceiverStats,
    RejectionReason,
    RelayedInput,
    RequestRejection,
)
from scheduler_components.values.stats import (
    BatchingStats,
    HistogramSnapshot,
    KvMetrics,
    LatencySnapshot,
    PublisherStats,
    QuiesceStats,
    SchedulerCounters,
    SchedulerStats,
)
from scheduler_components.values.sync import MAX_OPERATION_BYTES, SYNC_CALL_INTS, SyncCall, describe_calls
from scheduler_components.values.tiers import CachedTokens, TierStats

__all__ = [
    "QueueLoad",
    "DisaggregationLoad",
    "LoraLoad",
    "SpeculativeLoad",
    "MemoryLoad",
    "DecodeMoments",
    "LoadSections",
    "LoadSnapshot",
    "CachedTokens",
    "TierStats",
    "KvPoolSnapshot",
    "PoolCount",
    "HeldCount",
    "PageHolding",
    "AllocationAction",
    "AllocationRecord",
    "PoolStats",
    "IntegrityStats",
    "StallReport",
    "HistogramSnapshot",
    "LatencySnapshot",
    "KvMetrics",
    "PublisherStats",
    "QuiesceStats",
    "BatchingStats",
    "SchedulerCounters",
    "SchedulerStats",
    "FinishReason",
    "TokenOutput",
    "OutputDelta",
    "OutputBatch",
    "OutputStats",
    "MAX_OPERATION_BYTES",
    "SYNC_CALL_INTS",
    "SyncCall",
    "describe_calls",
    "ReceiverStats",
    "ForwardMode",
    "InputKind",
    "InputMessage",
    "RejectionReason",
    "RequestRejection",
    "RelayedInput",
]
