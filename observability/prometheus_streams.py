"""Export the metrics of KV-event streams to Prometheus. They are read at a scrape.

- ``StreamCollector``: the streams of one subscriber.
- ``RelayCollector``: the streams that a relay follows and those that it publishes.
- ``LogCollector``: the streams that are written to a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from observability.catalog import (
    LOG_METRICS,
    LOG_PREFIX,
    RELAY_METRICS,
    RELAY_PREFIX,
    STREAM_METRICS,
    STREAM_PREFIX,
    STREAM_STATE_METRIC,
    Metric,
    read_number,
)
from observability.kv_stream import LogStats, RelayedStreamStats, StreamState, StreamStats
from observability.prometheus_schedulers import CatalogCollector, new_family
from scheduler_components._internal.extras import naming_extras
from scheduler_components.ports import StatsSource

with naming_extras:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as MetricFamily

__all__ = ["LogCollector", "RelayCollector", "StreamCollector"]

_OF_STREAMS = (STREAM_STATE_METRIC, *STREAM_METRICS)
_Labels: TypeAlias = dict[str, str]


def _empty_families(metrics: Iterable[Metric]) -> Iterator[MetricFamily]:
    return (new_family(metric, metric.name) for metric in metrics)


def _families(metrics: Iterable[Metric], streams: Iterable[tuple[_Labels, object]]) -> Iterator[MetricFamily]:
    known = list(streams)
    for metric in metrics:
        family = new_family(metric, metric.name)
        for labels, stats in known:
            value = read_number(metric, stats)
            if value is not None:
                family.add_sample(metric.name, labels, float(value))
        yield family


def _stream_families(streams: Iterable[tuple[_Labels, StreamStats]]) -> Iterator[MetricFamily]:
    """Build the families of followed streams, one sample per stream; the state has one flag per value."""
    known = list(streams)
    states = new_family(STREAM_STATE_METRIC, STREAM_STATE_METRIC.name)
    for labels, stats in known:
        for state in StreamState:
            states.add_sample(STREAM_STATE_METRIC.name, {**labels, "state": state.value}, float(stats.state is state))
    yield states
    yield from _families(STREAM_METRICS, known)


class StreamCollector(CatalogCollector):
    """Exports every stream of ``source``, by rank.

    Args:
        registry: exports the metrics.
        source: a ``Subscriber`` or an ``AsyncSubscriber``; read on the scraping thread.

    Raises:
        ConfigError: the registry already has these metrics.
    """

    def __init__(self, registry: CollectorRegistry, source: StatsSource[Mapping[int, StreamStats]]) -> None:
        self._source = source
        super().__init__(registry, STREAM_PREFIX)

    def describe(self) -> Iterator[MetricFamily]:
        return _empty_families(_OF_STREAMS)

    def collect(self) -> Iterator[MetricFamily]:
        return _stream_families(({"rank": str(rank)}, stats) for rank, stats in self._source.stats().items())


class RelayCollector(CatalogCollector):
    """Exports a relay's streams: ``kv_stream_*`` by source and rank, ``kv_relay_*`` by rank.

    Args:
        registry: exports the metrics.
        followed: returns the name of the source and the statistics of each followed stream: ``ZmqRelay.followed``.
        relayed: returns the rank and the statistics of each published stream: ``ZmqRelay.relayed``.

    Raises:
        ConfigError: the registry already has these metrics.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        followed: Callable[[], Iterable[tuple[str, StreamStats]]],
        relayed: Callable[[], Iterable[tuple[int, RelayedStreamStats]]],
    ) -> None:
        self._followed, self._relayed = followed, relayed
        super().__init__(registry, RELAY_PREFIX)

    def describe(self) -> Iterator[MetricFamily]:
        return _empty_families((*_OF_STREAMS, *RELAY_METRICS))

    def collect(self) -> Iterator[MetricFamily]:
        followed = self._followed()
        yield from _stream_families(({"source": name, "rank": str(stats.rank)}, stats) for name, stats in followed)
        yield from _families(RELAY_METRICS, [({"rank": str(rank)}, stats) for rank, stats in self._relayed()])


class LogCollector(CatalogCollector):
    """Exports the streams that ``source`` writes to a broker, by rank.

    Args:
        registry: exports the metrics.
        source: a ``JetStreamWriter``; read on the scraping thread.

    Raises:
        ConfigError: the registry already has these metrics.
    """

    def __init__(self, registry: CollectorRegistry, source: StatsSource[Mapping[int, LogStats]]) -> None:
        self._source = source
        super().__init__(registry, LOG_PREFIX)

    def describe(self) -> Iterator[MetricFamily]:
        return _empty_families(LOG_METRICS)

    def collect(self) -> Iterator[MetricFamily]:
        return _families(LOG_METRICS, [({"rank": str(rank)}, stats) for rank, stats in self._source.stats().items()])
