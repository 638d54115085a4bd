"""From reports to what Prometheus reads: the catalogue's metrics as families of samples, one sample a rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import Metric as MetricFamily

from observability.catalog import CATALOG, HISTOGRAMS, LOAD_AGE, SGLANG_PREFIX, VLLM_PREFIX, Metric
from observability.prometheus_registry import check_prefix, model_label, new_family
from scheduler_components.metrics.histogram import HistogramSnapshot
from scheduler_components.metrics.stats import SchedulerStats

__all__ = ["ReportFamilies"]

_Report = tuple[dict[str, str], SchedulerStats]
"""A report with its labels, ``model_name`` among them."""


class ReportFamilies:
    """Builds the families of all metrics of the catalogue from the newest report of each rank.

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
        every = (*CATALOG, *HISTOGRAMS, LOAD_AGE, *own_counters)
        self._names = {metric: _names(metric, prefix, vllm_names) for metric in every}
        self._model_label = model_label(model_name)
        self._clock = clock

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metrics without samples, so that a registry can refuse a second collector of the same names."""
        for metric, names in self._names.items():
            for name in names:
                yield new_family(metric, name)

    def collect(self, newest: Iterable[SchedulerStats], counts: Mapping[Metric, int]) -> Iterator[MetricFamily]:
        """Yield the metrics of all ranks, and ``counts``: what each of ``own_counters`` stands at."""
        reports: list[_Report] = [({**self._model_label, **dict(stats.labels)}, stats) for stats in newest]
        now = self._clock()
        for metric in CATALOG:
            samples = [(labels, metric.read(stats)) for labels, stats in reports]
            yield from self._families(metric, samples)
        for metric in HISTOGRAMS:
            yield from self._histogram_families(metric, reports)
        yield from self._families(
            LOAD_AGE, [(labels, max(0.0, now - stats.load.timestamp)) for labels, stats in reports]
        )
        for metric, count in counts.items():
            yield from self._families(metric, [(self._model_label, count)])

    def _families(self, metric: Metric, samples: list[tuple[dict[str, str], float | None]]) -> Iterator[MetricFamily]:
        for name in self._names[metric]:
            family = new_family(metric, name)
            for labels, value in samples:
                if value is not None:
                    family.add_sample(name, labels, value)
            if family.samples:
                yield family

    def _histogram_families(self, metric: Metric, reports: list[_Report]) -> Iterator[MetricFamily]:
        read = [(labels, metric.read_histogram(stats)) for labels, stats in reports]
        for name in self._names[metric]:
            family = new_family(metric, name)
            for labels, histogram in read:
                if histogram is not None:
                    _add_histogram(family, labels, histogram)
            if family.samples:
                yield family


def _names(metric: Metric, prefix: str, vllm_names: bool) -> tuple[str, ...]:
    names = [prefix + metric.name]
    if vllm_names:
        names.extend(VLLM_PREFIX + name for name in metric.vllm_names)
    return tuple(dict.fromkeys(names))  # with the prefix "vllm:" some would stand there twice


def _add_histogram(family: MetricFamily, labels: dict[str, str], histogram: HistogramSnapshot) -> None:
    """Add one rank's buckets, each counting what those below it count too, then count and sum."""
    below = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        below += count
        le = "+Inf" if bound == math.inf else repr(float(bound))
        family.add_sample(f"{family.name}_bucket", {**labels, "le": le}, below)
    family.add_sample(f"{family.name}_count", labels, below)
    family.add_sample(f"{family.name}_sum", labels, histogram.total)
