"""Metrics of schedulers in other processes for Prometheus: read where they wrote them, when somebody scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from observability.catalog import PAGES_UNREAD, RANKS_REFUSED, SGLANG_PREFIX
from observability.prometheus_families import ReportFamilies
from observability.prometheus_registry import register, unregister
from scheduler_components.metrics.stats import SchedulerStats

__all__ = ["PrometheusBoard", "ReportBoard"]


class ReportBoard(Protocol):
    """Where the newest report of each rank can be read; ``ShmMetricsBoard`` is one. Scrapes may ask at once."""

    def read(self) -> Mapping[int, SchedulerStats]:
        """Return rank -> newest report. Never raises."""
        ...

    @property
    def unread(self) -> int:
        """Reads of single ranks so far that found no report where one should be."""
        ...


class PrometheusBoard(Collector):
    """The collector of the process that serves ``/metrics`` for schedulers in processes of their own.

    It exposes what a ``PrometheusSink`` would that was given each rank's last report, under the same names and
    labels. A rank that stopped, or whose page cannot be read, keeps its last values, and ``load_age_seconds`` says
    how old they are; one of which nothing was ever read is not there. Beside these, ``metrics_pages_unread_total``
    counts such reads.

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
        self._families = ReportFamilies(
            (RANKS_REFUSED, PAGES_UNREAD),
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
        # One report a label set, as in a sink: a name and labels that stand there twice would spoil the whole scrape.
        by_labels = {stats.labels: stats for stats in self._board.read().values()}
        # A board has room for every rank that it was made for, so none is ever refused.
        return self._families.collect(by_labels.values(), {RANKS_REFUSED: 0, PAGES_UNREAD: self._board.unread})

    def close(self) -> None:
        """Leave the registry. Safe to call twice."""
        unregister(self._registry, self)

    def __repr__(self) -> str:
        return f"<PrometheusBoard: {self._board!r}>"
