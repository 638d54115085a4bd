"""The metrics of followed streams for Prometheus, and of relayed ones: read when somebody scrapes.

- ``StreamCollector``: the streams of one subscriber.
- ``RelayCollector``: a relay's streams, those that it follows and those that it publishes.
- ``LogCollector``: the streams that are written to a broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from observability.catalog import (
    LOG_METRICS,
    LOG_PREFIX,
    RELAY_METRICS,
    RELAY_PREFIX,
    STREAM_METRICS,
    STREAM_PREFIX,
    STREAM_STATE_METRIC,
    Metric,
)
from observability.jetstream import LogStats
from observability.kv_stream import StreamState, StreamStats
from observability.prometheus_schedulers import new_family, register, unregister

__all__ = [
    "LogCollector",
    "LogStatsSource",
    "RelayCollector",
    "RelayStatsSource",
    "StreamCollector",
    "StreamStatsSource",
]

_OF_STREAMS = (STREAM_STATE_METRIC, *STREAM_METRICS)
_Labels = dict[str, str]


def _families(metrics: Iterable[Metric]) -> list[MetricFamily]:
    return [new_family(metric, metric.name) for metric in metrics]


def _stream_families(streams: Iterable[tuple[_Labels, StreamStats]]) -> Iterator[MetricFamily]:
    """Build the families of followed streams, one sample per stream; the state is a set of flags."""
    known = list(streams)
    states, *others = _families(_OF_STREAMS)
    for labels, stats in known:
        for state in StreamState:
            states.add_sample(STREAM_STATE_METRIC.name, {**labels, "state": state.value}, float(stats.state is state))
    yield states
    for metric, family in zip(STREAM_METRICS, others, strict=True):
        _add_samples(family, metric, known)
        yield family


def _add_samples(family: MetricFamily, metric: Metric, labelled: Iterable[tuple[_Labels, object]]) -> None:
    for labels, stats in labelled:
        value = metric.read(stats)
        if value is not None:
            family.add_sample(metric.name, labels, float(value))


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
        yield from _families(_OF_STREAMS)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all streams."""
        yield from _stream_families(({"rank": str(rank)}, stats) for rank, stats in self._source.stats().items())

    def close(self) -> None:
        """Leave the registry. Safe to call twice."""
        unregister(self._registry, self)


class RelayStatsSource(Protocol):
    """Relays streams: a ``ZmqRelay``. Called on the scraping thread."""

    def followed(self) -> Iterable[tuple[str, StreamStats]]:
        """Each stream that is followed, with the name of its source."""
        ...

    def relayed(self) -> Iterable[tuple[int, object]]:
        """Each stream that is published: its rank, and a value with the fields that the catalogue reads."""
        ...


class RelayCollector(Collector):
    """Exposes a relay's streams in ``registry``: ``kv_stream_*`` by source and rank, ``kv_relay_*`` by rank.

    Raises:
        ConfigError: the registry has these metrics already.
    """

    def __init__(self, registry: CollectorRegistry, source: RelayStatsSource) -> None:
        self._source = source
        register(registry, self, RELAY_PREFIX)

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metrics without samples, so that the registry can refuse a second collector."""
        yield from _families((*_OF_STREAMS, *RELAY_METRICS))

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all streams."""
        followed = self._source.followed()
        yield from _stream_families(({"source": name, "rank": str(stats.rank)}, stats) for name, stats in followed)
        relayed = [({"rank": str(rank)}, stats) for rank, stats in self._source.relayed()]
        for metric, family in zip(RELAY_METRICS, _families(RELAY_METRICS), strict=True):
            _add_samples(family, metric, relayed)
            yield family


class LogStatsSource(Protocol):
    """Writes streams to a broker: a ``JetStreamWriter``."""

    def stats(self) -> Mapping[int, LogStats]:
        """Each stream's counters, by rank; called on the scraping thread."""
        ...


class LogCollector(Collector):
    """Exposes the written streams of ``source`` in ``registry``, by rank.

    Raises:
        ConfigError: the registry has these metrics already.
    """

    def __init__(self, registry: CollectorRegistry, source: LogStatsSource) -> None:
        self._source = source
        register(registry, self, LOG_PREFIX)

    def describe(self) -> Iterator[MetricFamily]:
        """Yield the metrics without samples, so that the registry can refuse a second collector."""
        yield from _families(LOG_METRICS)

    def collect(self) -> Iterator[MetricFamily]:
        """Yield the metrics of all streams."""
        written = [({"rank": str(rank)}, stats) for rank, stats in self._source.stats().items()]
        for metric, family in zip(LOG_METRICS, _families(LOG_METRICS), strict=True):
            _add_samples(family, metric, written)
            yield family
