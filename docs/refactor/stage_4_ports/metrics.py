"""Metrics of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.metrics.stats import SchedulerStats
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import LoadSource, MetricsSink, PublisherStatsSource, TotalsSource


@dataclass(slots=True, kw_only=True)
class Metrics:
    """Hands a step's statistics to the collector."""

    parallel: ParallelState
    sink: MetricsSink
    load: LoadSource
    totals: TotalsSource
    publisher: PublisherStatsSource

    def emit_metrics(self) -> None:
        if not self.parallel.reports_metrics:
            return
        self.sink.record(
            SchedulerStats(
                labels=self.parallel.metric_labels,
                load=self.load.get_loads(),
                totals=self.totals.totals(),
                publisher=self.publisher.stats(),
            )
        )
