"""Metrics of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from observability.prometheus_sink import PrometheusSink
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.metrics.stats import PublisherStats, SchedulerStats, SchedulerTotals
from scheduler_components.parallel_state import ParallelState


@dataclass(slots=True, kw_only=True)
class Metrics:
    """Hands a step's statistics to the collector."""

    enable: bool
    parallel: ParallelState
    metrics_collector: PrometheusSink
    get_load: Callable[[], LoadSnapshot]
    get_totals: Callable[[], SchedulerTotals]
    get_publisher_stats: Callable[[], PublisherStats]


class MetricsMixin:
    """Needs nothing of its host any more."""

    @staticmethod
    def emit_metrics(self: Metrics) -> None:
        if not self.enable:
            return
        self.metrics_collector.record(
            SchedulerStats(
                labels=self.parallel.metric_labels,
                load=self.get_load(),
                totals=self.get_totals(),
                publisher=self.get_publisher_stats(),
            )
        )
