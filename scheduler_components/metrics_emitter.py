"""MetricsEmitter: report the statistics of each step to one sink."""

from __future__ import annotations

import logging
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from scheduler_components._internal.failure_log import FailureLog
from scheduler_components._internal.old_names import old_names
from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError
from scheduler_components.parallel_state import ParallelState
from scheduler_components.values import LoadSnapshot, SchedulerStats

if TYPE_CHECKING:
    from scheduler_components.ports import LoadSource, MetricsSink, StatsSource

__all__ = ["LiveStats", "MetricsEmitter"]

logger = logging.getLogger(__name__)

Stats = TypeVar("Stats")


@dataclass(slots=True, frozen=True)
class LiveStats(Generic[Stats]):
    """The ``StatsSource`` of a struct whose fields a scheduler increments: each call returns a copy."""

    counters: Stats

    def stats(self) -> Stats:
        return copy(self.counters)


_PARTS = SchedulerStats.__struct_fields__[2:]  # all but labels and load
_NO_PARTS = msgspec.structs.astuple(SchedulerStats((), LoadSnapshot()))[2:]
_PLACES = {name: place for place, name in enumerate(_PARTS)}
_EMITTING = "emitting metrics"


@dataclass(slots=True, kw_only=True)
class MetricsEmitter:
    """Combine load and statistics at the end of a step into one ``SchedulerStats`` and pass it to the sink.

    An exception of a source or of the sink never reaches the scheduler. ``failures`` counts it and logs each episode
    once, and the report of that step is left out. A rank that does not report (``ParallelState.reports_metrics``)
    reads nothing, so the TP, CP and PP ranks of a replica do not multiply its gauges.

    The load is read in each step. The other parts come from about ten objects and cost more than the rest of the
    report. They are read every ``counters_interval_steps``, and in each step after which no request runs or waits, so
    the statistics of an idle engine are exact.

    Attributes:
        parallel: decides whether this rank reports, and provides the labels.
        load: usually a ``LoadInquirer``.
        sink: receives the reports and decides how often to export or log one.
        sources: where the parts come from, by the name of their field of ``SchedulerStats``, for example
            ``{"publisher": kv_events, "counters": LiveStats(counters)}``.
        counters_interval_steps: the default of 32 steps is about one second; a Prometheus server scrapes every few
            seconds. 1 reads all parts in each step.
        failures: counts failed reports.

    Raises:
        ConfigError: ``counters_interval_steps`` is below 1, or a source has the name of no part.
    """

    parallel: ParallelState
    load: LoadSource
    sink: MetricsSink
    sources: dict[str, StatsSource[object]] = field(default_factory=dict)
    counters_interval_steps: int = 32
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))
    _labels: tuple[tuple[str, str], ...] = field(init=False, repr=False)
    _reports: bool = field(init=False, repr=False)
    _parts: tuple[Any, ...] = field(default=(), init=False, repr=False)
    _num_steps_left: int = field(default=0, init=False, repr=False)  # before the parts are read again

    def __post_init__(self) -> None:
        check_integer("counters_interval_steps", self.counters_interval_steps)
        for name in self.sources:
            if name not in _PARTS:
                raise ConfigError("sources", name, "is no part of SchedulerStats", f"use one of {', '.join(_PARTS)}")
        self._labels = self.parallel.metric_labels
        self._reports = self.parallel.reports_metrics

    def refresh_counters(self) -> None:
        """Read all parts for the next report, because a counter has changed that must be visible immediately."""
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
                self._parts = self._read_parts()
                self._num_steps_left = self.counters_interval_steps - 1
            self.sink.record(SchedulerStats(self._labels, load, *self._parts))
        except Exception as error:  # noqa: BLE001 - counted; a guard takes a tenth of the row "emit(), 64 running"
            self.failures.failed(_EMITTING, error)
        else:
            self.failures.succeeded(_EMITTING)

    def _read_parts(self) -> tuple[Any, ...]:
        parts = list(_NO_PARTS)
        for name, source in self.sources.items():
            parts[_PLACES[name]] = source.stats()
        return tuple(parts)


__getattr__ = old_names(__name__)
