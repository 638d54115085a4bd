"""Checks for a metrics sink. Run each of ``METRICS_SINK_CHECKS`` on your sink.

A check takes a function that opens an empty sink and a reader of the exported metrics by catalogue name. It raises
``ConformanceError`` with the calls, the expected value and the actual value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from observability.catalog import SCHEDULER_METRICS, read_number
from scheduler_components import ParallelState
from scheduler_components.ports import MetricsSink
from scheduler_components.testing import CheckTrace
from scheduler_components.values import LoadSnapshot, OutputStats, PublisherStats, SchedulerCounters, SchedulerStats

__all__ = [
    "METRICS_SINK_CHECKS",
    "MetricReader",
    "OpenMetricsSink",
    "make_scheduler_stats",
]

S = TypeVar("S", bound=msgspec.Struct)


MetricReader = Callable[[str, Mapping[str, str]], float | None]
"""Returns what a sink exposes as the newest value of a metric of the catalogue; None without a value.

The arguments are the metric's name without prefix, and its labels. A reader usually scrapes.
"""

OpenMetricsSink = Callable[[], tuple[MetricsSink, MetricReader]]


def make_scheduler_stats(rank: int = 0, *, scale: int = 1) -> SchedulerStats:
    """Return a report of rank ``rank`` of eight, in which adjacent numbers differ."""
    parallel = ParallelState.from_tp_rank(rank, tp_size=8, attn_dp_size=8)
    load = LoadSnapshot(
        sequence=scale, timestamp=1_700_000_000.0 + scale, dp_rank=rank, num_running_reqs=3 * scale,
        num_waiting_reqs=5 * scale, num_pending_tokens=700 * scale, num_waiting_uncached_tokens=600 * scale,
        num_used_tokens=1100 * scale, num_total_tokens=1800 * scale, max_total_num_tokens=13_000 * scale, page_size=16,
        max_running_requests=170 * scale, token_usage=0.1875, gen_throughput=19.5 * scale, cache_hit_rate=0.4375,
        utilization=0.28125,
    )  # fmt: skip
    return SchedulerStats(
        labels=parallel.metric_labels,
        load=load,
        counters=_numbered(SchedulerCounters, 20 * scale),
        publisher=_numbered(PublisherStats, 100 * scale),
        outputs=_numbered(OutputStats, 200 * scale),
    )


def _numbered(kind: type[S], base: int) -> S:
    """Return a struct with the counters ``base``, ``base + 1`` and so on."""
    counters = [each.name for each in msgspec.structs.fields(kind) if type(each.default) is int]
    return kind(**{name: base + at for at, name in enumerate(counters)})


def check_every_metric_is_exported(open_sink: OpenMetricsSink) -> None:
    """Check that each metric of a report is exported under its name and the labels of the rank."""
    trace, sink, reader = _begin("Every metric of the catalogue is exposed", open_sink)
    _record(trace, sink, stats := make_scheduler_stats())
    _expect(trace, reader, stats)


def check_newest_report_wins(open_sink: OpenMetricsSink) -> None:
    """Check that the sink exports the last report of a rank, not the first one and not a sum."""
    trace, sink, reader = _begin("A rank's newest report replaces the one before", open_sink)
    for scale in (1, 2, 3):
        _record(trace, sink, stats := make_scheduler_stats(scale=scale))
    _expect(trace, reader, stats)


def check_ranks_are_separate(open_sink: OpenMetricsSink) -> None:
    """Check that the ranks in one sink do not overwrite each other."""
    trace, sink, reader = _begin("Every rank's values stay its own", open_sink)
    reports = [make_scheduler_stats(rank, scale=rank + 1) for rank in range(8)]
    for stats in reports:
        _record(trace, sink, stats)
    for stats in reports:
        _expect(trace, reader, stats)


def check_restarted_rank_is_accepted(open_sink: OpenMetricsSink) -> None:
    """Check that counters may begin at 0 again. A negative increment of a Prometheus counter raises."""
    trace, sink, reader = _begin("Totals that fall do not raise", open_sink)
    _record(trace, sink, make_scheduler_stats(scale=5))
    _record(trace, sink, stats := make_scheduler_stats(scale=1))
    found = reader("num_running_reqs", dict(stats.labels))
    trace.expect(stats.load.num_running_reqs, found, "num_running_reqs of the restarted rank")


def check_record_never_raises(open_sink: OpenMetricsSink) -> None:
    """Check that empty, huge and impossible numbers never raise into the scheduler's step."""
    trace, sink, _ = _begin("No report raises", open_sink)
    stats = make_scheduler_stats()
    impossible = msgspec.structs.replace(
        stats.load, num_running_reqs=-1, token_usage=float("nan"), gen_throughput=float("inf"), num_used_tokens=1 << 80
    )
    _record(trace, sink, SchedulerStats(labels=stats.labels, load=LoadSnapshot()))
    _record(trace, sink, msgspec.structs.replace(stats, load=impossible))
    _record(trace, sink, SchedulerStats(labels=(), load=LoadSnapshot()))


def _begin(title: str, open_sink: OpenMetricsSink) -> tuple[CheckTrace, MetricsSink, MetricReader]:
    trace = CheckTrace(title)
    return trace, *trace.call("opened a sink", open_sink)


def _record(trace: CheckTrace, sink: MetricsSink, stats: SchedulerStats) -> None:
    answer: object = trace.call(f"recorded {stats!r:.120}", lambda: sink.record(stats))
    trace.expect(None, answer, "record() returns nothing")


def _expect(trace: CheckTrace, reader: MetricReader, stats: SchedulerStats) -> None:
    labels = dict(stats.labels)
    for metric in SCHEDULER_METRICS:
        wanted = read_number(metric, stats) if metric.path else None
        if wanted is not None:
            trace.expect(float(wanted), reader(metric.name, labels), f"{metric.name} of {labels}")


METRICS_SINK_CHECKS: tuple[Callable[[OpenMetricsSink], None], ...] = (
    check_every_metric_is_exported,
    check_newest_report_wins,
    check_ranks_are_separate,
    check_restarted_rank_is_accepted,
    check_record_never_raises,
)
"""All checks; each opens its own sink."""
