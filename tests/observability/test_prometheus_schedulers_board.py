"""What a scrape reads over shared memory is what a sink in the scheduler's own process would have shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.searches import num_examples
from prometheus_client import CollectorRegistry, generate_latest

from observability import MetricsBoardCollector, PrometheusSink
from observability.metrics_sink_checks import METRICS_SINK_CHECKS, OpenMetricsSink
from scheduler_components import ConfigError, ParallelState
from scheduler_components.metrics import RequestLatencyRecorder, open_shm_metrics_board, open_shm_metrics_sink
from scheduler_components.ports import MetricsSink
from scheduler_components.values import (
    AdapterLoad,
    LatencySnapshot,
    LoadSnapshot,
    PublisherStats,
    SchedulerCounters,
    SchedulerStats,
)

NUM_RANKS = 8
LABELS = [ParallelState.from_tp_rank(r, tp_size=8, attn_dp_size=8).metric_labels for r in range(NUM_RANKS)]

S = TypeVar("S", bound=msgspec.Struct)
VALUES = {
    int: st.integers(-(2**63), 2**64 - 1) | st.integers(0, 9),
    float: st.floats(),
    int | None: st.none() | st.integers(-(2**63), 2**64 - 1),
    float | None: st.none() | st.floats(),
    str: st.text(max_size=5),
    tuple[tuple[str, int], ...]: st.just((("front", 3),)),
    tuple[str, ...]: st.lists(st.text(max_size=5), max_size=2).map(tuple),
    tuple[AdapterLoad, ...]: st.just((AdapterLoad("a", 1, 2, True),)),
}


def structs(kind: type[S], **given: st.SearchStrategy[object]) -> st.SearchStrategy[S]:
    """Any values that the fields' types allow, in 64 bits; parts that an engine may lack are sometimes missing."""
    fields = {name: _value(hint) for name, hint in get_type_hints(kind).items() if name not in given}
    return st.builds(kind, **fields, **given)


def _value(hint: Any) -> st.SearchStrategy[object]:
    return VALUES[hint] if hint in VALUES else st.none() | structs(get_args(hint)[0])


@st.composite
def latencies(draw: st.DrawFn) -> LatencySnapshot:
    kept = RequestLatencyRecorder()
    observed = st.tuples(st.sampled_from(LatencySnapshot.__struct_fields__), st.floats(0, 5000), st.integers(1, 2**40))
    for name, value, times in draw(st.lists(observed, max_size=5)):
        getattr(kept.histograms, name).observe(value, times)
    return kept.stats()


reports = structs(
    SchedulerStats,
    labels=st.sampled_from(LABELS),
    load=structs(LoadSnapshot),
    counters=structs(SchedulerCounters),
    publisher=structs(PublisherStats),
    latencies=st.none() | latencies(),
)


class RankSinks:
    """A sink a rank, as in processes of their own; each report goes to its rank's."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._by_labels: dict[object, MetricsSink] = {}
        for rank, labels in enumerate(LABELS):
            sink = open_shm_metrics_sink(directory, ParallelState.from_tp_rank(rank, tp_size=8, attn_dp_size=8))
            stack.callback(sink.close)
            self._by_labels[labels] = sink

    def record(self, stats: SchedulerStats) -> None:
        self._by_labels.get(stats.labels, self._by_labels[LABELS[0]]).record(stats)


@contextmanager
def across_processes(
    registry: CollectorRegistry, clock: Callable[[], float], **settings: object
) -> Iterator[RankSinks]:
    with TemporaryDirectory() as directory, ExitStack() as stack:
        board = open_shm_metrics_board(Path(directory), NUM_RANKS)
        MetricsBoardCollector(registry, board=board, clock=clock, **settings)
        yield RankSinks(Path(directory), stack)


@pytest.mark.soak
@settings(
    deadline=None,
    max_examples=num_examples(1),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(reports, max_size=5), st.booleans(), st.sampled_from(["", "tiny"]))
def test_a_scrape_is_that_of_a_sink_in_process(
    recorded: list[SchedulerStats], vllm_names: bool, model_name: str
) -> None:
    there, here = CollectorRegistry(), CollectorRegistry()
    sink = PrometheusSink(here, model_name=model_name, vllm_names=vllm_names, clock=lambda: 100.0)
    with across_processes(there, lambda: 100.0, model_name=model_name, vllm_names=vllm_names) as sinks:
        for stats in recorded:
            sink.record(stats)
            sinks.record(stats)
        found = lines(there)
        extra = [line for line in found if "sglang:metrics_pages_unread_total" in line]
        assert [line for line in found if line not in extra] == lines(here)
        assert len(extra) == 3  # its help, its type and one sample


def lines(registry: CollectorRegistry) -> list[str]:
    """Sorted, since a sink shows ranks in the order in which they came."""
    return sorted(generate_latest(registry).decode().splitlines())


@pytest.mark.parametrize(("prefix", "model_name"), [("sglang:", ""), ("mine_", "tiny")])
def test_pages_that_could_not_be_read_are_counted_extra_the_ranks(tmp_path: Path, prefix: str, model_name: str) -> None:
    registry = CollectorRegistry()
    board = open_shm_metrics_board(tmp_path, 2)
    MetricsBoardCollector(registry, board=board, prefix=prefix, model_name=model_name)

    def failed_reads() -> float | None:
        labels = {"model_name": model_name} if model_name else {}
        return registry.get_sample_value(f"{prefix}metrics_pages_unread_total", labels)

    assert failed_reads() == 0  # no rank has come
    (tmp_path / "rank0.metrics").write_bytes(b"something else")
    assert failed_reads() == 1
    assert failed_reads() == 2
    sink = open_shm_metrics_sink(tmp_path, ParallelState(dp_rank=1, dp_size=2))
    assert failed_reads() == 4  # one page refused, one without a report yet
    sink.record(SchedulerStats(ParallelState(dp_rank=1, dp_size=2).metric_labels, LoadSnapshot()))
    assert failed_reads() == 5
    sink.close()


class Scrape:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def __call__(self, metric: str, labels: Mapping[str, str]) -> float | None:
        return self.registry.get_sample_value(f"sglang:{metric}", dict(labels))


@pytest.mark.parametrize("check", METRICS_SINK_CHECKS)
def test_the_checks_of_every_sink_pass(check: Callable[[OpenMetricsSink], None]) -> None:
    registry = CollectorRegistry()
    with across_processes(registry, lambda: 0.0) as sinks:
        check(lambda: (sinks, Scrape(registry)))


class Board:
    failed_reads = 0

    def __init__(self, *reports: SchedulerStats) -> None:
        self.reports = reports

    def read(self) -> dict[int, SchedulerStats]:
        return dict(enumerate(self.reports))


def test_two_pages_of_one_rank_do_not_spoil_the_scrape() -> None:
    registry, labels = CollectorRegistry(), ParallelState().metric_labels
    twice = [SchedulerStats(labels, LoadSnapshot(num_running_reqs=number)) for number in (1, 2)]
    MetricsBoardCollector(registry, board=Board(*twice))
    assert generate_latest(registry).decode().count("sglang:num_running_reqs{") == 1


def test_names_are_registered_once_and_let_go_of() -> None:
    registry = CollectorRegistry()
    collector = MetricsBoardCollector(registry, board=Board())
    with pytest.raises(ConfigError, match="prefix"):
        PrometheusSink(registry)
    with pytest.raises(ConfigError, match="prefix"):
        MetricsBoardCollector(CollectorRegistry(), board=Board(), prefix="9lives")
    collector.close()
    collector.close()
    assert generate_latest(registry) == b""
    PrometheusSink(registry)
