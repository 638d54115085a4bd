"""What the stages use of the kit beside what its doors export."""

from __future__ import annotations

from observability import PrometheusSink
from scheduler_components import (
    KvEventSink,
    KvEventSource,
    LoadSnapshot,
    LoadSource,
    MetricsSink,
    PoolSource,
    PublisherStats,
    PublisherStatsSource,
    QueueSource,
    RateSource,
    SchedulerStats,
    TotalsSource,
)
from scheduler_components.metrics import RateMeter

__all__ = [
    "KvEventSink",
    "KvEventSource",
    "LoadSnapshot",
    "LoadSource",
    "MetricsSink",
    "PoolSource",
    "PrometheusSink",
    "PublisherStats",
    "PublisherStatsSource",
    "QueueSource",
    "RateMeter",
    "RateSource",
    "SchedulerStats",
    "TotalsSource",
]
