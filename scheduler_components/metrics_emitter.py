"""MetricsEmitter: what a step's statistics are, and that they never cost the step more than their time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from scheduler_components.errors import FailureLog
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import (
    NO_PUBLISHER_STATS,
    NO_TOTALS,
    LoadSource,
    MetricsSink,
    PublisherStatsSource,
    TotalsSource,
)
from scheduler_components.values import SchedulerStats

__all__ = ["MetricsEmitter"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class MetricsEmitter:
    """Reads load, totals and publisher counters at the end of a step and hands them to the sink as one value.

    Nothing that a source or the sink raises reaches the scheduler: it is counted in ``failures``, logged once per
    episode, and that step's report is left out. A rank that does not report (``ParallelState.reports_metrics``)
    reads nothing and hands on nothing, so no gauge is multiplied by its TP, CP or PP ranks.

    Attributes:
        parallel: decides whether this rank reports, and gives the labels.
        load: usually a ``LoadInquirer``.
        sink: where reports go; how often one is exported or logged is the sink's business.
        totals: the scheduler's running totals.
        publisher: usually the ``SchedulerKvEventsPublisher``.
        failures: what went wrong so far.
    """

    parallel: ParallelState
    load: LoadSource
    sink: MetricsSink
    totals: TotalsSource = NO_TOTALS
    publisher: PublisherStatsSource = NO_PUBLISHER_STATS
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _labels: tuple[tuple[str, str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._labels = self.parallel.metric_labels

    def emit(self) -> None:
        """Report this step. Call it at the end of every step, and once when the scheduler becomes idle."""
        if not self.parallel.reports_metrics:
            return
        try:
            self.sink.record(
                SchedulerStats(
                    labels=self._labels,
                    load=self.load.get_loads(),
                    totals=self.totals.totals(),
                    publisher=self.publisher.stats(),
                )
            )
        except Exception as error:  # noqa: BLE001 - a broken gauge must not take the engine down
            self.failures.failed("emitting metrics", error)
        else:
            self.failures.succeeded("emitting metrics")
