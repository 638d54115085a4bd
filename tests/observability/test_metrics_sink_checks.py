"""Every metrics-sink check passes on the Prometheus sink, and fails with its trace on one that breaks its promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from prometheus_client import CollectorRegistry

from observability import PrometheusSink
from observability.catalog import SCHEDULER_METRICS, read_number
from observability.metrics_sink_checks import METRICS_SINK_CHECKS, OpenMetricsSink
from scheduler_components.testing import ConformanceError
from scheduler_components.values import SchedulerStats


class Scrape:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def __call__(self, metric: str, labels: Mapping[str, str]) -> float | None:
        return self.registry.get_sample_value(f"sglang:{metric}", dict(labels))


def open_prometheus() -> tuple[PrometheusSink, Scrape]:
    registry = CollectorRegistry()
    return PrometheusSink(registry), Scrape(registry)


@pytest.mark.parametrize("check", METRICS_SINK_CHECKS)
def test_the_prometheus_sink_passes(check: Callable[[OpenMetricsSink], None]) -> None:
    check(open_prometheus)


class DictSink:
    """Sound: one value per name and label set."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}

    def record(self, stats: SchedulerStats) -> None:
        for metric in SCHEDULER_METRICS:
            if metric.path and (value := read_number(metric, stats)) is not None:
                self.put(metric.name, str(dict(stats.labels)), value)

    def put(self, name: str, labels: str, value: float) -> None:
        self.values[name, labels] = value

    def __call__(self, metric: str, labels: Mapping[str, str]) -> float | None:
        return self.values.get((metric, str(dict(labels))))


class LeavesOneOut(DictSink):
    def put(self, name: str, labels: str, value: float) -> None:
        if name != "token_usage":
            super().put(name, labels, value)


class Sums(DictSink):
    def put(self, name: str, labels: str, value: float) -> None:
        super().put(name, labels, value + self.values.get((name, labels), 0))


class OneRank(DictSink):
    def put(self, name: str, labels: str, value: float) -> None:
        super().put(name, "", value)

    def __call__(self, metric: str, labels: Mapping[str, str]) -> float | None:
        return self.values.get((metric, ""))


class OnlyGrows(DictSink):
    def put(self, name: str, labels: str, value: float) -> None:
        if name.endswith("_total") and value < self.values.get((name, labels), 0):
            raise ValueError("counters only grow")
        super().put(name, labels, value)


class Finite(DictSink):
    def put(self, name: str, labels: str, value: float) -> None:
        super().put(name, labels, int(value * 1000) / 1000)


def opening(kind: type[DictSink]) -> OpenMetricsSink:
    def open_sink() -> tuple[DictSink, DictSink]:
        sink = kind()
        return sink, sink

    return open_sink


BROKEN = {
    "check_every_metric_is_exported": (LeavesOneOut, "token_usage of {"),
    "check_newest_report_wins": (Sums, "num_running_reqs of {"),
    "check_ranks_are_separate": (OneRank, "num_running_reqs of {"),
    "check_restarted_rank_is_accepted": (OnlyGrows, "ValueError: counters only grow"),
    "check_record_never_raises": (Finite, "cannot convert float NaN to integer"),
}


@pytest.mark.broken_variants
@pytest.mark.parametrize("check", METRICS_SINK_CHECKS)
def test_a_broken_sink_fails_with_its_trace(check: Callable[[OpenMetricsSink], None]) -> None:
    broken, said = BROKEN[check.__name__]
    check(opening(DictSink))
    with pytest.raises(ConformanceError) as failed:
        check(opening(broken))
    assert said in str(failed.value)
