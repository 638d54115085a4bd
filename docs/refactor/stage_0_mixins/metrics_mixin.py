"""Metrics of the scheduler."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

from observability import PrometheusSink
from scheduler_components.values import SchedulerStats

from .ambient import get_clock, get_parallel, get_registry

if TYPE_CHECKING:
    from .scheduler import Scheduler


class MetricsMixin:
    """Uses ``totals`` and two other mixins: ``get_load`` and ``get_publisher_stats``."""

    def init_metrics(self: Scheduler) -> None:
        self.enable_metrics = get_parallel().reports_metrics
        self.metrics_collector = PrometheusSink(get_registry(), clock=get_clock())

    def emit_metrics(self: Scheduler) -> None:
        if not self.enable_metrics:
            return
        self.metrics_collector.record(
            SchedulerStats(
                labels=get_parallel().metric_labels,
                load=self.get_load(),
                counters=copy(self.totals),
                publisher=self.get_publisher_stats(),
            )
        )
