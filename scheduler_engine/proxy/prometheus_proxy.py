"""Export the counters of a proxy and of the replicas behind it to Prometheus. They are read at a scrape."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as MetricFamily

from observability.catalog import PROXY_METRICS, PROXY_PREFIX, REPLICA_METRICS
from observability.prometheus_schedulers import CatalogCollector, new_family
from scheduler_engine.proxy.http_fleet import EngineState
from scheduler_engine.proxy.http_proxy import ProxyEndpoint


class ProxyCollector(CatalogCollector):
    """Exports ``kv_proxy_*``, and ``kv_proxy_replica_*`` with the number of the engine and the rank.

    Args:
        registry: exports the metrics.
        endpoint: of the proxy; read on the scraping thread.

    Raises:
        ConfigError: the registry already has these metrics.
    """

    def __init__(self, registry: CollectorRegistry, endpoint: ProxyEndpoint) -> None:
        self._endpoint = endpoint
        super().__init__(registry, PROXY_PREFIX)

    def describe(self) -> Iterator[MetricFamily]:
        return (new_family(metric, metric.name) for metric in (*PROXY_METRICS, *REPLICA_METRICS))

    def collect(self) -> Iterator[MetricFamily]:
        counters, fleet = self._endpoint.counters, self._endpoint.fleet
        own = {**msgspec.to_builtins(counters), "unknown_prompts": fleet.num_unknown_prompts}
        for metric in PROXY_METRICS:
            family = new_family(metric, metric.name)
            family.add_sample(metric.name, {}, float(own[metric.path]))
            yield family
        replicas = [
            (
                {"engine": str(engine.number), "rank": str(rank)},
                {**msgspec.to_builtins(replica.stats), "is_up": engine.state is EngineState.UP},
            )
            for engine in fleet.engines
            for rank, replica in engine.replicas.items()
        ]
        for metric in REPLICA_METRICS:
            family = new_family(metric, metric.name)
            for labels, values in replicas:
                family.add_sample(metric.name, labels, float(values[metric.path]))
            yield family
