"""MetricsEmitter: what a step's statistics are, and that they never cost the step more than their time."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from scheduler_components.failure_log import FailureLog
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import (
    LoadSource,
    MetricsSink,
    NullPublisherStatsSource,
    NullTotalsSource,
    PublisherStatsSource,
    TotalsSource,
)
from scheduler_components.validators import check_integer
from scheduler_components.values import PublisherStats, SchedulerStats, SchedulerTotals

__all__ = ["MetricsEmitter"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class MetricsEmitter:
    """Reads load, totals and publisher counters at the end of a step and hands them to the sink as one value.

    Nothing that a source or the sink raises reaches the scheduler: it is counted in ``failures``, logged once per
    episode, and that step's report is left out. A rank that does not report (``ParallelState.reports_metrics``)
    reads nothing and hands on nothing, so no gauge is multiplied by its TP, CP or PP ranks.

    The load is that of the step. Totals and the publisher's counters, which only grow, are read every few steps, and in
    each step after which nothing runs or waits: what an engine says while it is idle is exact. They come from a dozen
    objects, and cost more than all the rest of a report.

    Attributes:
        parallel: decides whether this rank reports, and gives the labels.
        load: usually a ``LoadInquirer``.
        sink: where reports go; how often one is exported or logged is the sink's business.
        totals: the scheduler's running totals.
        publisher: usually the ``SchedulerKvEventsPublisher``.
        counters_interval_steps: 32 are about a second of any engine's time, and a Prometheus server asks every few
            seconds. 1 reads them in each step.
        failures: what went wrong so far.

    Raises:
        ConfigError: ``counters_interval_steps`` is below 1.
    """

    parallel: ParallelState
    load: LoadSource
    sink: MetricsSink
    totals: TotalsSource = field(default_factory=NullTotalsSource)
    publisher: PublisherStatsSource = field(default_factory=NullPublisherStatsSource)
    counters_interval_steps: int = 32
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _labels: tuple[tuple[str, str], ...] = field(init=False, repr=False)
    _reports: bool = field(init=False, repr=False)
    _counters: tuple[SchedulerTotals, PublisherStats] = field(init=False, repr=False)
    _num_steps_left: int = field(default=0, init=False, repr=False)  # for which these counters do

    def __post_init__(self) -> None:
        check_integer("counters_interval_steps", self.counters_interval_steps)
        self._labels = self.parallel.metric_labels
        self._reports = self.parallel.reports_metrics

    def refresh_counters(self) -> None:
        """Read totals and counters anew for the next report: something has changed that must be told at once."""
        self._num_steps_left = 0

    def emit(self) -> None:
        """Report this step. Call it at the end of every step, and once when the scheduler becomes idle."""
        if not self._reports:
            return
        try:
            load = self.load.get_loads()
            if self._num_steps_left and (load.num_running_reqs or load.num_waiting_reqs):
                self._num_steps_left -= 1
            else:
                self._num_steps_left = 0
                self._counters = self.totals.totals(), self.publisher.stats()
                self._num_steps_left = self.counters_interval_steps - 1
            self.sink.record(SchedulerStats(self._labels, load, *self._counters))
        except Exception as error:  # noqa: BLE001 - a broken gauge must not take the engine down
            self.failures.failed("emitting metrics", error)
        else:
            self.failures.succeeded("emitting metrics")
