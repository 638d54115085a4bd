"""MetricsSink: where the statistics of each step go."""

from __future__ import annotations

from typing import Protocol

from scheduler_components.values import SchedulerStats

__all__ = ["MetricsSink", "NullMetricsSink"]


class MetricsSink(Protocol):
    """Export one rank's statistics. Called by `MetricsEmitter`.

    `PrometheusSink` exports them to Prometheus, `LogSink` to a log, `ShmMetricsSink` to the serving process.
    """

    def record(self, stats: SchedulerStats) -> None:
        """Record the statistics of one step. Called on the scheduler's thread, so it must be cheap."""
        ...


class NullMetricsSink:
    """The metrics sink of a rank that reports no metrics."""

    def record(self, stats: SchedulerStats) -> None:
        pass

    def close(self) -> None:
        pass
