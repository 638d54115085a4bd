"""One row of the metric catalogue, and where its value stands in a step's statistics."""

from __future__ import annotations

from typing import Literal

import attrs

from scheduler_components.metrics.histogram import HistogramSnapshot
from scheduler_components.metrics.stats import SchedulerStats

__all__ = ["Metric", "counter", "gauge", "histogram"]


@attrs.frozen(kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: without prefix; a counter's ends in ``_total``.
        kind: a gauge moves both ways; a counter only grows, except that a restarted rank begins at 0 again; a
            histogram is counters of values in buckets.
        unit: of the value, in words.
        help: one sentence for a person.
        path: where ``SchedulerStats`` holds the value, for example ``load.num_running_reqs``; empty for the few
            that a sink knows by itself.
        vllm_names: vLLM's names of the same fact, without prefix.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    help: str
    path: str
    vllm_names: tuple[str, ...] = ()

    def read(self, stats: SchedulerStats) -> float | None:
        """Return the value in ``stats``; None where the engine has no such part (no LoRA, no disaggregation)."""
        value = self._find(stats)
        assert value is None or isinstance(value, int | float), f"{self.path} is {value!r}"
        return value

    def read_histogram(self, stats: SchedulerStats) -> HistogramSnapshot | None:
        """Return the histogram in ``stats``, for the metrics that are one; None where the engine keeps none."""
        value = self._find(stats)
        assert value is None or isinstance(value, HistogramSnapshot), f"{self.path} is {value!r}"
        return value

    def _find(self, stats: SchedulerStats) -> object:
        value: object = stats
        for attribute in self.path.split("."):
            value = getattr(value, attribute)
            if value is None:
                return None
        return value


def gauge(name: str, unit: str, path: str, help: str, *vllm_names: str) -> Metric:
    """Make the row of a gauge."""
    return Metric(name=name, kind="gauge", unit=unit, help=help, path=path, vllm_names=vllm_names)


def counter(name: str, unit: str, path: str, help: str, *vllm_names: str) -> Metric:
    """Make the row of a counter."""
    return Metric(name=name, kind="counter", unit=unit, help=help, path=path, vllm_names=vllm_names)


def histogram(name: str, path: str, help: str, *vllm_names: str) -> Metric:
    """Make the row of a histogram of times."""
    return Metric(name=name, kind="histogram", unit="seconds", help=help, path=path, vllm_names=vllm_names)
