"""The metrics of followed streams for Prometheus: read from the subscriber when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from observability.catalog import STREAM_CATALOG, STREAM_PREFIX, STREAM_STATE
from observability.kv_stream import StreamState, StreamStats
from observability.prometheus_schedulers import new_family, register, unregister

__all__ = ["StreamCollector", "StreamStatsSource"]


class StreamStatsSource(Protocol):
    """Follows streams: a ``Subscriber``, an ``AsyncSubscriber``."""

    def stats(self) -> Mapping[int, StreamStats]:
        """Each stream's state and counters, by rank; called on the scraping thread."""
        ...


class StreamCollector(Collector):
    """Exposes every stream of ``source`` in ``registry``, which asks at each scrape.

    Raises:
        ConfigError: the registry has these metrics already.
    """

    def __init__(self, registry: CollectorRegistry, source: StreamStatsSource) -> None:
        self._registry = registry
        self._source = source
        register(registry, self, STREAM_PREFIX)

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metrics without samples, so that the registry can refuse a second collector."""
        for metric in (STREAM_STATE, *STREAM_CATALOG):
            yield new_family(metric, metric.name)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all streams."""
        streams = [({"rank": str(rank)}, stats) for rank, stats in self._source.stats().items()]
        states, *others = self.describe()
        for labels, stats in streams:
            for state in StreamState:
                states.add_sample(STREAM_STATE.name, {**labels, "state": state.value}, float(stats.state is state))
        yield states
        for metric, family in zip(STREAM_CATALOG, others, strict=True):
            for labels, stats in streams:
                value: float | None = getattr(stats, metric.path)
                if value is not None:
                    family.add_sample(metric.name, labels, float(value))
            yield family

    def close(self) -> None:
        """Leave the registry. Safe to call twice."""
        unregister(self._registry, self)
