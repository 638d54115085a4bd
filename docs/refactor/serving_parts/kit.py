"""What the stages use of the kit beside what its doors export."""

from __future__ import annotations

from observability.prometheus_sink import PrometheusSink
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.metrics.rolling import RateMeter
from scheduler_components.metrics.stats import PublisherStats, SchedulerStats
from scheduler_components.ports import (
    KvEventSink,
    KvEventSource,
    LoadSource,
    MetricsSink,
    PoolSource,
    PublisherStatsSource,
    QueueSource,
    RateSource,
    TotalsSource,
)

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
