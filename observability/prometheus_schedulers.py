"""The catalogue's metrics of schedulers for Prometheus: samples are built when somebody scrapes.

- ``PrometheusSink``: reports of schedulers in this process, given to it step by step.
- ``MetricsBoardCollector``: reports of schedulers in processes of their own, read from a board.
- ``OutputCollector``: the counters of outputs, read from their streamers.

The first two build the same families (``SchedulerFamilies``). The functions above them are what every collector needs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from observability.catalog import (
    INFO_METRICS,
    LOAD_AGE_METRIC,
    OUTPUT_METRICS,
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
)
from observability.prometheus_page import PageLabels
from scheduler_components import ConfigError, HistogramSnapshot, OutputStats, ParallelState, SchedulerStats
from scheduler_components.ports import OutputStatsSource

__all__ = [
    "OutputCollector",
    "MetricsBoardCollector",
    "PrometheusSink",
    "RankLabels",
    "RankOutputs",
    "RankOutputsSource",
    "ReportBoard",
    "new_family",
    "register",
    "unregister",
]

_PREFIX = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?")


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no metric's name can begin with. The empty prefix is allowed.

    Raises:
        ConfigError: no metric's name can begin with it.
    """
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError("prefix", prefix, "cannot begin a metric's name", 'write letters, digits, "_" and ":"')


def model_label(model_name: str) -> dict[str, str]:
    """Return the label of every metric of an engine; none without a name."""
    return {"model_name": model_name} if model_name else {}


def new_family(metric: Metric, name: str) -> MetricFamily:
    """Return the family of ``metric`` under ``name``, without samples."""
    if metric.kind == "histogram":
        return HistogramMetricFamily(name, metric.help)
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    return make(name, metric.help)


def register(registry: CollectorRegistry, collector: Collector, prefix: str) -> None:
    """Let ``registry`` ask ``collector``, whose names begin with ``prefix``, at a scrape.

    Raises:
        ConfigError: the registry already has metrics of these names.
    """
    try:
        registry.register(collector)
    except ValueError as error:
        hint = "give each collector its own prefix or registry"
        raise ConfigError("prefix", prefix, "is taken in this registry", hint) from error


def unregister(registry: CollectorRegistry, collector: Collector) -> None:
    """Take ``collector`` out of ``registry``. Safe to call twice."""
    try:
        registry.unregister(collector)
    except KeyError:
        return


# --- reports of steps ---


class SchedulerFamilies:
    """Builds the families of all metrics of a step from the newest report of each rank: one sample per rank.

    Args:
        own_counters: metrics that the collector itself counts, of all ranks together.
        prefix: of every name.
        model_name: value of the ``model_name`` label; without one there is no such label.
        vllm_names: also build vLLM's names, under ``vllm:``, of the facts that it has a name for.
        clock: wall-clock seconds since the epoch, for the age of reports.

    Raises:
        ConfigError: the prefix cannot begin a metric's name.
    """

    def __init__(
        self,
        own_counters: tuple[Metric, ...],
        *,
        prefix: str = SGLANG_PREFIX,
        model_name: str = "",
        vllm_names: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_prefix(prefix)
        every = (*SCHEDULER_METRICS, *SCHEDULER_HISTOGRAMS, LOAD_AGE_METRIC, *own_counters)
        self._names = {metric.name: _names(metric, prefix, vllm_names) for metric in every}
        self._every = every
        self._info_prefixes = (prefix, VLLM_PREFIX) if vllm_names and prefix != VLLM_PREFIX else (prefix,)
        self._model_label = PageLabels(model_label(model_name))
        self._labels: dict[RankLabels, _LabelSets] = {}
        self._clock = clock

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metrics without samples, so that a registry can refuse a second collector of the same names."""
        for metric in self._every:
            for name in self._names[metric.name]:
                yield new_family(metric, name)
        for info in (*INFO_METRICS, *STATE_METRICS):
            for prefix in self._info_prefixes:
                yield GaugeMetricFamily(prefix + info.name, info.help)

    def collect(self, newest: Iterable[SchedulerStats], counts: Mapping[Metric, int]) -> Iterator[MetricFamily]:
        """Yield the metrics of all ranks, and ``counts``: the value of each of ``own_counters``."""
        reports = self._labelled(newest)
        now = self._clock()
        for metric in SCHEDULER_METRICS:
            samples = [(labels.plain, metric.read(stats)) for labels, stats in reports]
            yield from self._families(metric, samples)
        for metric in SCHEDULER_HISTOGRAMS:
            yield from self._histogram_families(metric, reports)
        yield from self._families(
            LOAD_AGE_METRIC, [(labels.plain, max(0.0, now - stats.load.timestamp)) for labels, stats in reports]
        )
        for info in INFO_METRICS:
            yield from self._info_families(info, reports)
        for state in STATE_METRICS:
            yield from self._state_families(state, reports)
        for metric, count in counts.items():
            yield from self._families(metric, [(self._model_label, count)])

    def _labelled(self, newest: Iterable[SchedulerStats]) -> list[_Report]:
        """Each report with its labels, which are kept for the next scrape; those of ranks that are gone are not."""
        known = self._labels
        reports = [
            (known.get(stats.labels) or _LabelSets({**self._model_label, **dict(stats.labels)}), stats)
            for stats in newest
        ]
        self._labels = {stats.labels: labels for labels, stats in reports}
        return reports

    def _families(self, metric: Metric, samples: list[tuple[PageLabels, float | None]]) -> Iterator[MetricFamily]:
        told = [(labels, value) for labels, value in samples if value is not None]
        if not told:
            return
        for name in self._names[metric.name]:
            family = new_family(metric, name)
            family.samples = [Sample(name, labels, value) for labels, value in told]
            yield family

    def _info_families(self, info: InfoMetric, reports: list[_Report]) -> Iterator[MetricFamily]:
        read = [(labels.plain, info.read(stats)) for labels, stats in reports]
        for prefix in self._info_prefixes:
            family = GaugeMetricFamily(prefix + info.name, info.help)
            for labels, told in read:
                if told is not None:
                    family.add_sample(family.name, labels | told[0], told[1])
            if family.samples:
                yield family

    def _state_families(self, state: StateMetric, reports: list[_Report]) -> Iterator[MetricFamily]:
        read = [(labels.plain, state.read(stats)) for labels, stats in reports]
        for prefix in self._info_prefixes:
            family = GaugeMetricFamily(prefix + state.name, state.help)
            for labels, values in read:
                for value, flag in (values or {}).items():
                    family.add_sample(family.name, labels | {state.label: value}, flag)
            if family.samples:
                yield family

    def _histogram_families(self, metric: Metric, reports: list[_Report]) -> Iterator[MetricFamily]:
        read = [(labels, metric.read_histogram(stats)) for labels, stats in reports]
        told = [(labels, histogram) for labels, histogram in read if histogram is not None]
        if not told:
            return
        for name in self._names[metric.name]:
            family = new_family(metric, name)
            for labels, histogram in told:
                _add_histogram(family, labels, histogram)
            yield family


def _names(metric: Metric, prefix: str, vllm_names: bool) -> tuple[str, ...]:
    names = [prefix + metric.name]
    if vllm_names:
        names.extend(VLLM_PREFIX + name for name in metric.vllm_names)
    return tuple(dict.fromkeys(names))  # with the prefix "vllm:" some would come twice


class _LabelSets:
    """One rank's labels: plain, and with the bound of each bucket."""

    __slots__ = ("_of_buckets", "plain")

    def __init__(self, labels: dict[str, str]) -> None:
        self.plain = PageLabels(labels)
        self._of_buckets: dict[tuple[float, ...], list[PageLabels]] = {}

    def of_buckets(self, bounds: tuple[float, ...]) -> list[PageLabels]:
        """The labels of each bucket of a histogram, the last one's too."""
        found = self._of_buckets.get(bounds)
        if found is None:
            bound_texts = (*(repr(float(bound)) for bound in bounds), "+Inf")
            found = self._of_buckets[bounds] = [PageLabels({**self.plain, "le": le}) for le in bound_texts]
        return found


_Report = tuple[_LabelSets, SchedulerStats]
"""A report with its labels, ``model_name`` among them."""


def _add_histogram(family: MetricFamily, labels: _LabelSets, histogram: HistogramSnapshot) -> None:
    """Add one rank's buckets, each with the counts of those below it, then count and sum."""
    name, below = family.name, list(accumulate(histogram.counts))
    bucket, buckets = f"{name}_bucket", labels.of_buckets(histogram.bounds)
    family.samples += [Sample(bucket, each, count) for each, count in zip(buckets, below, strict=True)]
    family.add_sample(f"{name}_count", labels.plain, below[-1])
    family.add_sample(f"{name}_sum", labels.plain, histogram.total)


class PrometheusSink(Collector):
    """A ``MetricsSink`` on an injected registry, and the collector that the registry asks at a scrape.

    On the scheduler's thread, ``record`` keeps the newest report of each rank and does nothing else. A scrape on
    another thread sees each rank's report whole. A rank that stops reporting keeps its last values, and
    ``load_age_seconds`` says how old they are. For schedulers in processes of their own, use ``MetricsBoardCollector``.

    Args:
        registry: who exposes the metrics; never the global one by default.
        prefix: of every name, SGLang's by default.
        model_name: value of the ``model_name`` label; without one there is no such label.
        max_ranks: how many label sets are kept; reports of further ones are counted, not stored.
        vllm_names: also expose vLLM's names, under ``vllm:``, of the facts that it has a name for.
        clock: wall-clock seconds since the epoch, for the age of reports.

    Raises:
        ConfigError: the prefix cannot begin a metric's name, or the registry already has these metrics.
    """

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
        self._registry = registry
        self._families = SchedulerFamilies(
            (REPORTS_REFUSED,), prefix=prefix, model_name=model_name, vllm_names=vllm_names, clock=clock
        )
        self._max_ranks = max_ranks
        self._latest: dict[tuple[tuple[str, str], ...], SchedulerStats] = {}
        self._refused = 0
        register(registry, self, prefix)

    def record(self, stats: SchedulerStats) -> None:
        """Keep the newest report of a rank; its labels say which rank it is."""
        latest = self._latest
        if len(latest) >= self._max_ranks and stats.labels not in latest:
            self._refused += 1
            return
        latest[stats.labels] = stats

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metrics without samples, so that the registry can refuse a second sink of the same names."""
        return self._families.describe()

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all ranks, read from the newest report of each."""
        # A list of the values is taken at once, so a rank that reports for the first time does not break the loop.
        return self._families.collect(list(self._latest.values()), {REPORTS_REFUSED: self._refused})

    def close(self) -> None:
        """Leave the registry. Safe to call twice."""
        unregister(self._registry, self)

    def __repr__(self) -> str:
        return f"<PrometheusSink: {len(self._latest)} ranks, {self._refused} reports refused>"


class ReportBoard(Protocol):
    """Where the newest report of each rank can be read: ``open_shm_metrics_board``. Scrapes may ask at once."""

    def read(self) -> Mapping[int, SchedulerStats]:
        """Return rank -> newest report. Never raises."""
        ...

    @property
    def failed_reads(self) -> int:
        """Reads of single ranks so far that found no report where one should be."""
        ...


class MetricsBoardCollector(Collector):
    """The collector of the process that serves ``/metrics`` for schedulers in processes of their own.

    It exposes what a ``PrometheusSink`` with each rank's last report would expose, under the same names and labels. A
    rank that stopped, or whose page cannot be read, keeps its last values, and ``load_age_seconds`` says how old they
    are. A rank of which nothing was ever read is not exposed. ``metrics_pages_unread_total`` counts reads that failed.

    Args:
        registry: who exposes the metrics; never the global one by default.
        board: read at each scrape.
        prefix, model_name, vllm_names, clock: as for ``PrometheusSink``.

    Raises:
        ConfigError: the prefix cannot begin a metric's name, or the registry already has these metrics.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        board: ReportBoard,
        prefix: str = SGLANG_PREFIX,
        model_name: str = "",
        vllm_names: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._board = board
        self._families = SchedulerFamilies(
            (REPORTS_REFUSED, PAGE_READS_FAILED),
            prefix=prefix,
            model_name=model_name,
            vllm_names=vllm_names,
            clock=clock,
        )
        register(registry, self, prefix)

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metrics without samples, so that the registry can refuse a second sink of the same names."""
        return self._families.describe()

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all ranks, read from the board now."""
        # One report per label set, as in a sink: Prometheus refuses a scrape in which name and labels come twice.
        by_labels = {stats.labels: stats for stats in self._board.read().values()}
        # A board has room for every rank that it was made for, so none is ever refused.
        return self._families.collect(
            by_labels.values(), {REPORTS_REFUSED: 0, PAGE_READS_FAILED: self._board.failed_reads}
        )

    def close(self) -> None:
        """Leave the registry. Safe to call twice."""
        unregister(self._registry, self)

    def __repr__(self) -> str:
        return f"<MetricsBoardCollector: {self._board!r}>"


# --- outputs: read from streamers, so that no step pays for them ---

RankLabels: TypeAlias = tuple[tuple[str, str], ...]
"""``ParallelState.metric_labels`` of a rank."""


class RankOutputsSource(Protocol):
    """Has the counters of one or more ranks; ``RankOutputs`` has those of a rank in this process."""

    def output_stats(self) -> Mapping[RankLabels, OutputStats]:
        """Each reporting rank's newest counters, by its labels; called on the scraping thread."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class RankOutputs:
    """One rank's own streamer as a source; empty on a rank that does not report (``reports_metrics``).

    Attributes:
        parallel: decides whether this rank reports, and gives the labels.
        outputs: usually the ``OutputStreamer``, whose ``stats`` may be read from another thread.
    """

    parallel: ParallelState
    outputs: OutputStatsSource

    def output_stats(self) -> Mapping[RankLabels, OutputStats]:
        """Return this rank's counters of this moment."""
        if not self.parallel.reports_metrics:
            return {}
        return {self.parallel.metric_labels: self.outputs.stats()}


class OutputCollector(Collector):
    """Exposes the outputs of every rank of ``source`` in ``registry``, which asks at each scrape.

    Args:
        registry: who exposes the metrics; usually the ``PrometheusSink``'s.
        source: whose outputs they are.
        prefix: of every name; use the ``PrometheusSink``'s, for one dashboard draws both.
        model_name: value of the ``model_name`` label; without one there is no such label.

    Raises:
        ConfigError: the prefix cannot begin a metric's name, or the registry has these metrics already.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        source: RankOutputsSource,
        *,
        prefix: str = SGLANG_PREFIX,
        model_name: str = "",
    ) -> None:
        check_prefix(prefix)
        self._registry = registry
        self._source = source
        self._prefix = prefix
        self._model_label = model_label(model_name)
        register(registry, self, prefix)

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metrics without samples, so that the registry can refuse a second collector."""
        for metric in OUTPUT_METRICS:
            yield new_family(metric, self._prefix + metric.name)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all ranks."""
        # A list is taken at once, so a rank that reports for the first time does not break the loop.
        ranks = [
            ({**self._model_label, **dict(labels)}, stats)
            for labels, stats in list(self._source.output_stats().items())
        ]
        for metric, family in zip(OUTPUT_METRICS, self.describe(), strict=True):
            for labels, stats in ranks:
                family.add_sample(self._prefix + metric.name, labels, float(getattr(stats, metric.path)))
            yield family

    def close(self) -> None:
        """Leave the registry. Safe to call twice."""
        unregister(self._registry, self)
