"""Export the statistics of schedulers to Prometheus. Samples are built at a scrape.

- ``PrometheusSink``: for schedulers in this process, which report step by step.
- ``MetricsBoardCollector``: for schedulers in other processes, which write their reports to a board.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from observability.catalog import (
    INFO_METRICS,
    LOAD_AGE_METRIC,
    PAGE_READS_FAILED,
    REPORTS_REFUSED,
    SCHEDULER_HISTOGRAMS,
    SCHEDULER_METRICS,
    SGLANG_PREFIX,
    STATE_METRICS,
    VLLM_PREFIX,
    InfoMetric,
    Metric,
    StateMetric,
    read_histogram,
    read_number,
)
from scheduler_components import ConfigError
from scheduler_components._internal.extras import naming_extras
from scheduler_components.values import HistogramSnapshot, SchedulerStats

with naming_extras:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric as MetricFamily
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from scheduler_components.metrics.shm_board import ShmBoard

__all__ = ["CatalogCollector", "MetricsBoardCollector", "PrometheusSink", "new_family"]

_PREFIX = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?")
_Labels: TypeAlias = dict[str, str]
_Reports: TypeAlias = list[tuple[_Labels, SchedulerStats]]


def new_family(metric: Metric, name: str) -> MetricFamily:
    """Return the family of ``metric`` under ``name``, without samples."""
    if metric.kind == "histogram":
        return HistogramMetricFamily(name, metric.help)
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return make(name, metric.help)


class CatalogCollector(Collector):
    """A collector that registers itself. A registry calls ``collect`` on the scraping thread.

    A subclass calls ``__init__`` last, because the registry calls ``describe`` from it.

    Args:
        registry: exports the metrics.
        prefix: beginning of the metric names, for the error.

    Raises:
        ConfigError: the registry already has metrics of these names.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._registry = registry
        try:
            registry.register(self)
        except ValueError as error:
            hint = "give each collector its own prefix or registry"
            raise ConfigError("prefix", prefix, "is taken in this registry", hint) from error

    @abstractmethod
    def describe(self) -> Iterator[MetricFamily]:
        """Yield the families without samples, so that the registry can refuse a second collector of these names."""

    @abstractmethod
    def collect(self) -> Iterator[MetricFamily]:
        """Yield the families with their samples."""

    def close(self) -> None:
        """Unregister the collector. Safe to call twice."""
        try:
            self._registry.unregister(self)
        except KeyError:
            return


class _SchedulerCollector(CatalogCollector):
    """Builds the families of all scheduler metrics from the newest report of each rank: one sample per rank."""

    _own_counters: ClassVar[tuple[Metric, ...]]  # counted by the collector itself, over all ranks

    def __init__(
        self, registry: CollectorRegistry, prefix: str, model_name: str, vllm_names: bool, clock: Callable[[], float]
    ) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError("prefix", prefix, "cannot begin a metric name", 'use letters, digits, "_" and ":"')
        self._metrics = (*SCHEDULER_METRICS, *SCHEDULER_HISTOGRAMS, LOAD_AGE_METRIC, *self._own_counters)
        self._names = {metric.name: _names(metric, prefix, vllm_names) for metric in self._metrics}
        self._info_prefixes = (prefix, VLLM_PREFIX) if vllm_names and prefix != VLLM_PREFIX else (prefix,)
        self._model_label = {"model_name": model_name} if model_name else {}
        self._clock = clock
        super().__init__(registry, prefix)

    @abstractmethod
    def _newest(self) -> Iterable[SchedulerStats]:
        """Return the newest report of each rank."""

    @abstractmethod
    def _counts(self) -> Mapping[Metric, int]:
        """Return the values of ``_own_counters``."""

    def describe(self) -> Iterator[MetricFamily]:
        for metric in self._metrics:
            for name in self._names[metric.name]:
                yield new_family(metric, name)
        for info in (*INFO_METRICS, *STATE_METRICS):
            for prefix in self._info_prefixes:
                yield GaugeMetricFamily(prefix + info.name, info.help)

    def collect(self) -> Iterator[MetricFamily]:
        reports = [({**self._model_label, **dict(stats.labels)}, stats) for stats in self._newest()]
        now = self._clock()
        for metric in SCHEDULER_METRICS:
            yield from self._families(metric, [(labels, read_number(metric, stats)) for labels, stats in reports])
        for metric in SCHEDULER_HISTOGRAMS:
            yield from self._histogram_families(metric, reports)
        ages = [(labels, max(0.0, now - stats.load.timestamp)) for labels, stats in reports]
        yield from self._families(LOAD_AGE_METRIC, ages)
        for info in INFO_METRICS:
            yield from self._info_families(info, reports)
        for state in STATE_METRICS:
            yield from self._state_families(state, reports)
        for metric, count in self._counts().items():
            yield from self._families(metric, [(self._model_label, count)])

    def _families(self, metric: Metric, samples: Iterable[tuple[_Labels, float | None]]) -> Iterator[MetricFamily]:
        found = [(labels, value) for labels, value in samples if value is not None]
        for name in self._names[metric.name] if found else ():
            family = new_family(metric, name)
            family.samples = [Sample(name, labels, value) for labels, value in found]
            yield family

    def _info_families(self, info: InfoMetric, reports: _Reports) -> Iterator[MetricFamily]:
        read = [(labels, info.read(stats)) for labels, stats in reports]
        for prefix in self._info_prefixes:
            family = GaugeMetricFamily(prefix + info.name, info.help)
            for labels, found in read:
                if found is not None:
                    family.add_sample(family.name, labels | found[0], found[1])
            if family.samples:
                yield family

    def _state_families(self, state: StateMetric, reports: _Reports) -> Iterator[MetricFamily]:
        read = [(labels, state.read(stats)) for labels, stats in reports]
        for prefix in self._info_prefixes:
            family = GaugeMetricFamily(prefix + state.name, state.help)
            for labels, values in read:
                for value, flag in (values or {}).items():
                    family.add_sample(family.name, labels | {state.label: value}, flag)
            if family.samples:
                yield family

    def _histogram_families(self, metric: Metric, reports: _Reports) -> Iterator[MetricFamily]:
        read = [(labels, read_histogram(metric, stats)) for labels, stats in reports]
        found = [(labels, histogram) for labels, histogram in read if histogram is not None]
        for name in self._names[metric.name] if found else ():
            family = new_family(metric, name)
            for labels, histogram in found:
                _add_histogram(family, labels, histogram)
            yield family


def _names(metric: Metric, prefix: str, vllm_names: bool) -> tuple[str, ...]:
    names = [prefix + metric.name]
    if vllm_names:
        names.extend(VLLM_PREFIX + name for name in metric.vllm_names)
    return tuple(dict.fromkeys(names))  # the prefix "vllm:" would yield some names twice


def _add_histogram(family: MetricFamily, labels: _Labels, histogram: HistogramSnapshot) -> None:
    """Add the samples of one rank: cumulative buckets, then count and sum."""
    name = family.name
    cumulative = list(accumulate(histogram.counts))
    bounds = (*(repr(float(bound)) for bound in histogram.bounds), "+Inf")
    for bound, count in zip(bounds, cumulative, strict=True):
        family.add_sample(f"{name}_bucket", labels | {"le": bound}, count)
    family.add_sample(f"{name}_count", labels, cumulative[-1])
    family.add_sample(f"{name}_sum", labels, histogram.total)


class PrometheusSink(_SchedulerCollector):
    """A ``MetricsSink`` that exports the reports of schedulers in this process through a given registry.

    On the scheduler's thread, ``record`` only keeps the newest report of each rank. A scrape on another thread sees
    each report complete. A rank that stops reporting keeps its last values, and ``load_age_seconds`` shows their age.
    For schedulers in other processes, use ``MetricsBoardCollector``.

    Args:
        registry: exports the metrics; the global registry is not used by default.
        prefix: beginning of every name, SGLang's by default.
        model_name: value of the ``model_name`` label; no label if empty.
        max_ranks: number of label sets to keep; reports of further ones are counted and dropped.
        vllm_names: also export vLLM's name, with the prefix ``vllm:``, of each metric that has one.
        clock: wall-clock seconds since the epoch, for the age of reports.

    Raises:
        ConfigError: the prefix cannot begin a metric name, or the registry already has these metrics.
    """

    _own_counters = (REPORTS_REFUSED,)

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        prefix: str = SGLANG_PREFIX,
        model_name: str = "",
        max_ranks: int = 1024,
        vllm_names: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_ranks = max_ranks
        self._latest: dict[tuple[tuple[str, str], ...], SchedulerStats] = {}
        self._refused = 0
        super().__init__(registry, prefix, model_name, vllm_names, clock)

    def record(self, stats: SchedulerStats) -> None:
        """Keep the newest report of a rank, which its labels identify."""
        latest = self._latest
        if len(latest) >= self._max_ranks and stats.labels not in latest:
            self._refused += 1
            return
        latest[stats.labels] = stats

    def _newest(self) -> Iterable[SchedulerStats]:
        return list(self._latest.values())  # atomic, so a rank that reports for the first time does not break the loop

    def _counts(self) -> Mapping[Metric, int]:
        return {REPORTS_REFUSED: self._refused}

    def __repr__(self) -> str:
        return f"<PrometheusSink: {len(self._latest)} ranks, {self._refused} reports refused>"


class MetricsBoardCollector(_SchedulerCollector):
    """Exports the reports of schedulers in other processes, from the process that serves ``/metrics``.

    Names, labels and values are those of a ``PrometheusSink`` with the last report of each rank. A rank that stopped,
    or whose page cannot be read, keeps its last values, and ``load_age_seconds`` shows their age. A rank without any
    report is not exported. ``metrics_pages_unread_total`` counts reads that failed.

    Args:
        registry: exports the metrics; the global registry is not used by default.
        board: read at each scrape; ``open_shm_metrics_board`` returns one.
        prefix, model_name, vllm_names, clock: as for ``PrometheusSink``.

    Raises:
        ConfigError: the prefix cannot begin a metric name, or the registry already has these metrics.
    """

    _own_counters = (REPORTS_REFUSED, PAGE_READS_FAILED)

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        board: ShmBoard[SchedulerStats],
        prefix: str = SGLANG_PREFIX,
        model_name: str = "",
        vllm_names: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._board = board
        super().__init__(registry, prefix, model_name, vllm_names, clock)

    def _newest(self) -> Iterable[SchedulerStats]:
        # One report per label set, as in a sink: Prometheus refuses a scrape with a duplicate of name and labels.
        return {stats.labels: stats for stats in self._board.read().values()}.values()

    def _counts(self) -> Mapping[Metric, int]:
        return {REPORTS_REFUSED: 0, PAGE_READS_FAILED: self._board.failed_reads}  # a board has a page for each rank

    def __repr__(self) -> str:
        return f"<MetricsBoardCollector: {self._board!r}>"
