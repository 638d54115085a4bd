"""Metrics of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from observability.prometheus_sink import PrometheusSink
from scheduler_components.metrics.stats import SchedulerStats

if TYPE_CHECKING:
    from .scheduler import Scheduler


class MetricsMixin:
    """Needs ``totals`` and two other mixins: ``get_load`` and ``get_publisher_stats``."""

    def init_metrics(self: Scheduler, metrics_collector: PrometheusSink) -> None:
        self.enable_metrics = self.parallel.reports_metrics
        self.metrics_collector = metrics_collector

    def emit_metrics(self: Scheduler) -> None:
        if not self.enable_metrics:
            return
        self.metrics_collector.record(
            SchedulerStats(
                labels=self.parallel.metric_labels,
                load=self.get_load(),
                totals=self.totals.totals(),
                publisher=self.get_publisher_stats(),
            )
        )
