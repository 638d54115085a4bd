"""Metrics for Prometheus: one dict store a step, samples built when somebody scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as MetricFamily
from prometheus_client.registry import Collector

from observability.catalog import RANKS_REFUSED, SGLANG_PREFIX
from observability.prometheus_families import ReportFamilies
from observability.prometheus_registry import register, unregister
from scheduler_components.metrics.stats import SchedulerStats

__all__ = ["PrometheusSink"]


class PrometheusSink(Collector):
    """A ``MetricsSink`` on an injected registry, and the collector that the registry asks at a scrape.

    ``record`` keeps the newest report of each rank, and that is all it does on the scheduler's thread; a scrape on
    another thread sees each rank's report whole. A rank that stops reporting keeps its last values, and
    ``load_age_seconds`` says how old they are. For schedulers in processes of their own there is
    ``PrometheusBoard``.

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
        self._families = ReportFamilies(
            (RANKS_REFUSED,), prefix=prefix, model_name=model_name, vllm_names=vllm_names, clock=clock
        )
        self._max_ranks = max_ranks
        self._latest: dict[tuple[tuple[str, str], ...], SchedulerStats] = {}
        self._refused = 0
        register(registry, self, prefix)

    def record(self, stats: SchedulerStats) -> None:
        """Keep the newest report of a rank, told apart by its labels."""
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
        return self._families.collect(list(self._latest.values()), {RANKS_REFUSED: self._refused})

    def close(self) -> None:
        """Leave the registry. Safe to call twice."""
        unregister(self._registry, self)

    def __repr__(self) -> str:
        return f"<PrometheusSink: {len(self._latest)} ranks, {self._refused} reports refused>"
