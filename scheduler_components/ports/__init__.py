"""Ports: the interfaces that users implement or that several components call.

Any object with the members fits; nothing inherits from a port. Each port has at most five members, and a component asks
for the smallest port that suffices. `NullX` is the null object of port `X`, for a component that can do without it:
no caller writes `if enabled`. Sources are read late, so a scheduler that rebinds ``self.running`` needs no lambda.

An interface with one consumer is declared in the file of that consumer.
"""

from __future__ import annotations

from scheduler_components._internal.old_names import old_names
from scheduler_components.ports.control import ComputeGate, NullComputeGate
from scheduler_components.ports.decisions import DecisionSink, NullDecisionLog
from scheduler_components.ports.grammar import CompiledGrammar, GrammarBackend, GrammarMatcher
from scheduler_components.ports.kv_events import (
    HeldBlocksSource,
    KvEventSink,
    KvEventSource,
    KvMetricsSink,
    NullHeldBlocksSource,
    NullKvMetricsSink,
)
from scheduler_components.ports.load import (
    LoadSectionsSource,
    LoadSink,
    LoadSource,
    NullLoadSectionsSource,
    NullLoadSource,
    NullRateSource,
    PoolSource,
    QueuedRequest,
    QueueSource,
    RateSource,
)
from scheduler_components.ports.metrics import (
    ForwardPassSink,
    MetricsSink,
    NullForwardPassSink,
    NullMetricsSink,
    NullSpanSink,
    SpanSink,
)
from scheduler_components.ports.outputs import NullOutputSink, OutputSink
from scheduler_components.ports.pages import (
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
    ZeroCopyPageStore,
)
from scheduler_components.ports.pools import (
    AllocationSink,
    IdlePages,
    NullAllocationSink,
    NullIdlePages,
    NullPageHolders,
    PageHolders,
)
from scheduler_components.ports.scheduling import (
    PreemptibleRequest,
    PreemptionPolicy,
    SchedulableRequest,
    SchedulingPolicy,
)
from scheduler_components.ports.stats import StatsSource

__all__ = [
    "AllocationSink",
    "CompiledGrammar",
    "ComputeGate",
    "CopyEvent",
    "DecisionSink",
    "DeviceMemory",
    "ForwardPassSink",
    "GrammarBackend",
    "GrammarMatcher",
    "HeldBlocksSource",
    "HostLayerView",
    "HostPages",
    "IdlePages",
    "KvEventSink",
    "KvEventSource",
    "KvMetricsSink",
    "LayerDoneCounter",
    "LoadSectionsSource",
    "LoadSink",
    "LoadSource",
    "MetricsSink",
    "NullAllocationSink",
    "NullComputeGate",
    "NullCopyEvent",
    "NullDecisionLog",
    "NullForwardPassSink",
    "NullHeldBlocksSource",
    "NullIdlePages",
    "NullKvMetricsSink",
    "NullLayerDoneCounter",
    "NullLoadSectionsSource",
    "NullLoadSource",
    "NullMetricsSink",
    "NullPageHolders",
    "NullPageHook",
    "NullRateSource",
    "NullOutputSink",
    "NullSpanSink",
    "OutputSink",
    "PageBytes",
    "PageHolders",
    "PageHook",
    "PageMover",
    "PageStore",
    "PoolSource",
    "PreemptibleRequest",
    "PreemptionPolicy",
    "QueueSource",
    "QueuedRequest",
    "RateSource",
    "SchedulableRequest",
    "SchedulingPolicy",
    "SpanSink",
    "StatsSource",
    "ZeroCopyPageStore",
]

__getattr__ = old_names(__name__)
