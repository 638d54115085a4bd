"""The counters of outputs for Prometheus: read from streamers when somebody scrapes, so that no step pays for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from observability.catalog import SGLANG_PREFIX
from observability.output_catalog import OUTPUT_METRICS
from observability.prometheus_registry import check_prefix, model_label, new_family, register, unregister
from scheduler_components.output.delta import OutputStats
from scheduler_components.parallel_state import ParallelState
from scheduler_components.request_ports import OutputStatsSource

__all__ = ["OutputCollector", "RankLabels", "RankOutputs", "RankOutputsSource"]

RankLabels: TypeAlias = tuple[tuple[str, str], ...]
"""``ParallelState.metric_labels`` of a rank."""


class RankOutputsSource(Protocol):
    """Whoever knows the counters of one or more ranks; ``RankOutputs`` knows those of a rank in this process."""

    def output_stats(self) -> Mapping[RankLabels, OutputStats]:
        """Each reporting rank's newest counters, by its labels; called on the scraping thread."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class RankOutputs:
    """One rank's own streamer as a source; it is empty on a rank that does not report (``reports_metrics``).

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
        prefix: of every name; the ``PrometheusSink``'s, for one dashboard draws both.
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
