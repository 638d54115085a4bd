"""What all collectors have in common: names that Prometheus takes, families, and the registry that asks them."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from observability.metric import Metric
from scheduler_components.errors import ConfigError

__all__ = ["check_prefix", "model_label", "new_family", "register", "unregister"]

_PREFIX = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?")


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no metric's name can begin with; the empty one is none.

    Raises:
        ConfigError: it is one.
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
        mend = "give each collector a prefix or a registry of its own"
        raise ConfigError("prefix", prefix, "is taken in this registry", mend) from error


def unregister(registry: CollectorRegistry, collector: Collector) -> None:
    """Take ``collector`` out of ``registry``. Safe to call twice."""
    try:
        registry.unregister(collector)
    except KeyError:
        return
