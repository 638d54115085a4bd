"""Values that travel between components, to sinks and over the wire. They have no behaviour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from scheduler_components.events import DEFAULT_WEIGHT_VERSION
    from scheduler_components.values.batches import *
    from scheduler_components.values.control import *
    from scheduler_components.values.decisions import *
    from scheduler_components.values.forward_pass import *
    from scheduler_components.values.grammar import *
    from scheduler_components.values.kv_events import *
    from scheduler_components.values.load import *
    from scheduler_components.values.metric import HistogramSnapshot
    from scheduler_components.values.outputs import *
    from scheduler_components.values.pools import *
    from scheduler_components.values.receive import *
    from scheduler_components.values.request_span import *
    from scheduler_components.values.sessions import *
    from scheduler_components.values.stats import *
    from scheduler_components.values.tiers import *
    from scheduler_components.values.waiting import *

__all__ = [
    "AdapterLoad",
    "AgreedQueueStats",
    "AllocationAction",
    "AllocationRecord",
    "BatchShape",
    "BatchingStats",
    "BeginWeightUpdate",
    "CachedTokens",
    "CheckWeights",
    "ClearStorageIndex",
    "ContinueGeneration",
    "ControlReply",
    "ControlRequest",
    "DEFAULT_WEIGHT_VERSION",
    "DeadlineStats",
    "Decision",
    "DecisionDump",
    "DecisionKind",
    "DecisionStats",
    "DecisionValue",
    "DecodeMoments",
    "DisaggregationLoad",
    "DivergencePolicy",
    "DivergenceReport",
    "EndWeightUpdate",
    "FORWARD_PASS_VERSION",
    "FinishReason",
    "FinishedRequest",
    "FlushCache",
    "ForwardMode",
    "ForwardPassMetrics",
    "ForwardPassStats",
    "GrammarKey",
    "GrammarKind",
    "GrammarStats",
    "HeldCount",
    "HistogramSnapshot",
    "IdleControlRequest",
    "InputKind",
    "InputMessage",
    "IntegrityStats",
    "KvMetrics",
    "KvPoolSnapshot",
    "LatencySnapshot",
    "LoadSections",
    "LoadSnapshot",
    "LoadWeights",
    "LoraLoad",
    "LoraStats",
    "MemoryLoad",
    "MemoryTag",
    "OutputBatch",
    "OutputDelta",
    "OutputStats",
    "PageHolding",
    "PauseGeneration",
    "PauseMode",
    "PoolCount",
    "PoolStats",
    "PublisherStats",
    "QueueLoad",
    "QueuedRequestMetrics",
    "QuiesceStats",
    "ReceiverStats",
    "RefusalReason",
    "RejectionReason",
    "RelayedInput",
    "ReleaseMemory",
    "RequestHints",
    "RequestRejection",
    "RequestSpan",
    "RequestState",
    "RequestTimeouts",
    "ResumeMemory",
    "RollBackWeights",
    "ScheduledBatch",
    "ScheduledChunk",
    "ScheduledRequestMetrics",
    "SchedulerCounters",
    "SchedulerStats",
    "SessionParams",
    "SessionStats",
    "SpanStats",
    "SpeculativeLoad",
    "StallReport",
    "TierStats",
    "TokenOutput",
    "TraceParent",
    "control_request_name",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.events": "DEFAULT_WEIGHT_VERSION",
        "scheduler_components.values.batches": (
            "BatchShape RefusalReason RequestHints RequestState ScheduledBatch ScheduledChunk"
        ),
        "scheduler_components.values.control": (
            "BeginWeightUpdate CheckWeights ClearStorageIndex ContinueGeneration ControlReply ControlRequest "
            "EndWeightUpdate FlushCache IdleControlRequest LoadWeights MemoryTag PauseGeneration PauseMode "
            "ReleaseMemory ResumeMemory RollBackWeights control_request_name"
        ),
        "scheduler_components.values.decisions": (
            "Decision DecisionDump DecisionKind DecisionValue DivergencePolicy DivergenceReport"
        ),
        "scheduler_components.values.forward_pass": (
            "FORWARD_PASS_VERSION ForwardPassMetrics QueuedRequestMetrics ScheduledRequestMetrics"
        ),
        "scheduler_components.values.grammar": "GrammarKey GrammarKind",
        "scheduler_components.values.kv_events": "KvMetrics PublisherStats",
        "scheduler_components.values.load": (
            "AdapterLoad DecodeMoments DisaggregationLoad LoadSections LoadSnapshot LoraLoad MemoryLoad QueueLoad "
            "SpeculativeLoad"
        ),
        "scheduler_components.values.metric": "HistogramSnapshot",
        "scheduler_components.values.outputs": "FinishReason OutputBatch OutputDelta TokenOutput",
        "scheduler_components.values.pools": (
            "AllocationAction AllocationRecord HeldCount KvPoolSnapshot PageHolding PoolCount StallReport"
        ),
        "scheduler_components.values.receive": (
            "ForwardMode InputKind InputMessage RejectionReason RelayedInput RequestRejection"
        ),
        "scheduler_components.values.request_span": "FinishedRequest RequestSpan TraceParent",
        "scheduler_components.values.sessions": "SessionParams",
        "scheduler_components.values.stats": (
            "AgreedQueueStats BatchingStats DeadlineStats DecisionStats ForwardPassStats GrammarStats IntegrityStats "
            "LatencySnapshot LoraStats OutputStats PoolStats QuiesceStats ReceiverStats SchedulerCounters "
            "SchedulerStats SessionStats SpanStats TierStats"
        ),
        "scheduler_components.values.tiers": "CachedTokens",
        "scheduler_components.values.waiting": "RequestTimeouts",
    },
)
