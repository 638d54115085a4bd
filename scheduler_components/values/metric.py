"""The description of one metric, which annotates the field with its value."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["HistogramSnapshot", "Metric", "counter", "gauge", "histogram"]


class HistogramSnapshot(msgspec.Struct, frozen=True, gc=False):
    """A snapshot of a histogram.

    Attributes:
        bounds: upper bounds of the buckets, ascending. A value equal to a bound is in its bucket, as in Prometheus.
        counts: number of values per bucket, with one more bucket above the last bound. Not cumulative.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """Number of observed values."""
        return sum(self.counts)


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric.

    Attributes:
        name: without prefix; a counter's ends in ``_total``.
        kind: a gauge rises and falls; a counter only grows, except that a restarted rank begins at 0; a histogram
            counts values in buckets.
        unit: unit of the value, in words.
        help: one sentence for users.
        vllm_names: vLLM's names of the same metric, without prefix.
        path: path of the value in the statistics, for example ``load.num_running_reqs``; empty if the collector itself
            computes it.
        is_per_rank: whether the metric has a rank's labels; else the scraped process counts it over all ranks.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    help: str
    vllm_names: tuple[str, ...] = ()
    path: str = ""
    is_per_rank: bool = True


def gauge(name: str, unit: str, help: str, *vllm_names: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, help=help, vllm_names=vllm_names)


def counter(name: str, unit: str, help: str, *vllm_names: str) -> Metric:
    return Metric(name=name, kind="counter", unit=unit, help=help, vllm_names=vllm_names)


def histogram(name: str, help: str, *vllm_names: str) -> Metric:
    return Metric(name=name, kind="histogram", unit="seconds", help=help, vllm_names=vllm_names)
