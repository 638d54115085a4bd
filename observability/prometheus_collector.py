"""The base of the collectors that export metrics of the catalogue to Prometheus."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from observability.catalog import Metric
from scheduler_components import ConfigError
from scheduler_components._internal.extras import naming_extras

with naming_extras:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric as MetricFamily
    from prometheus_client.registry import Collector

__all__ = ["CatalogCollector", "new_family"]


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
