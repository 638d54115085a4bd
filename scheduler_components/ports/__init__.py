"""Ports: the interfaces that users implement or that several components call.

Any object with the members fits; nothing inherits from a port. Each port has at most five members, and a component asks
for the smallest port that suffices. A component that can do without a port takes None, or `NullX`, the null object of
port `X`. Sources are read late, so a scheduler that rebinds ``self.running`` needs no lambda.

An interface with one consumer is declared in the file of that consumer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from scheduler_components.ports.control import *
    from scheduler_components.ports.decisions import *
    from scheduler_components.ports.grammar import *
    from scheduler_components.ports.kv_events import *
    from scheduler_components.ports.load import *
    from scheduler_components.ports.metrics import *
    from scheduler_components.ports.outputs import *
    from scheduler_components.ports.pages import *
    from scheduler_components.ports.pools import *
    from scheduler_components.ports.scheduling import *
    from scheduler_components.ports.stats import *

__all__ = [
    "AllocationSink",
    "CompiledGrammar",
    "ComputeGate",
    "CopyEvent",
    "DecisionSink",
    "DeviceMemory",
    "GrammarBackend",
    "GrammarMatcher",
    "HeldBlocksSource",
    "HostLayerView",
    "HostPages",
    "IdlePages",
    "KvEventSink",
    "KvEventSource",
    "LayerDoneCounter",
    "LoadSource",
    "MetricsSink",
    "NullAllocationSink",
    "NullComputeGate",
    "NullCopyEvent",
    "NullDecisionLog",
    "NullIdlePages",
    "NullLayerDoneCounter",
    "NullMetricsSink",
    "NullOutputSink",
    "NullPageHolders",
    "NullReportSink",
    "NullSpanSink",
    "OutputSink",
    "PageBytes",
    "PageHolders",
    "PageHook",
    "PageMover",
    "PageStore",
    "PoolSource",
    "BatchedRequest",
    "PreemptibleRequest",
    "PreemptionPolicy",
    "QueueSource",
    "QueuedRequest",
    "RateSource",
    "ReportSink",
    "SchedulableRequest",
    "SchedulingPolicy",
    "SpanSink",
    "StatsSource",
    "ZeroCopyPageStore",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.ports.control": "ComputeGate NullComputeGate",
        "scheduler_components.ports.decisions": "DecisionSink NullDecisionLog",
        "scheduler_components.ports.grammar": "CompiledGrammar GrammarBackend GrammarMatcher",
        "scheduler_components.ports.kv_events": "HeldBlocksSource KvEventSink KvEventSource",
        "scheduler_components.ports.load": "LoadSource PoolSource QueueSource QueuedRequest RateSource",
        "scheduler_components.ports.metrics": (
            "MetricsSink NullMetricsSink NullReportSink NullSpanSink ReportSink SpanSink"
        ),
        "scheduler_components.ports.outputs": "NullOutputSink OutputSink",
        "scheduler_components.ports.pages": (
            "CopyEvent DeviceMemory HostLayerView HostPages LayerDoneCounter NullCopyEvent NullLayerDoneCounter "
            "PageBytes PageHook PageMover PageStore ZeroCopyPageStore"
        ),
        "scheduler_components.ports.pools": (
            "AllocationSink IdlePages NullAllocationSink NullIdlePages NullPageHolders PageHolders"
        ),
        "scheduler_components.ports.scheduling": (
            "BatchedRequest PreemptibleRequest PreemptionPolicy SchedulableRequest SchedulingPolicy"
        ),
        "scheduler_components.ports.stats": "StatsSource",
    },
)
