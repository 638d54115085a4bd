"""Metrics: the sink that takes the statistics of a step."""

from __future__ import annotations

from typing import Protocol

from scheduler_components.values import SchedulerStats

__all__ = [
    "MetricsSink",
    "NullMetricsSink",
]


class MetricsSink(Protocol):
    """Where a step's statistics go. Called by ``MetricsEmitter``.

    To Prometheus: ``PrometheusSink``; to a log: ``LogSink``; to the serving process: ``ShmMetricsSink``.
    """

    def record(self, stats: SchedulerStats) -> None:
        """Take one step's statistics. Must be cheap: it is called on the scheduler's thread."""
        ...


class NullMetricsSink:
    """The metrics sink of a rank that reports no metrics."""

    def record(self, stats: SchedulerStats) -> None:
        """Forget them."""

    def close(self) -> None:
        """Nothing is held."""
