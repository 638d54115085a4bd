"""The emitter reports the statistics of a step from one rank per replica and never raises."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from scheduler_components import ConfigError, LiveStats, MetricsEmitter, ParallelState
from scheduler_components.ports import StatsSource
from scheduler_components.testing.fakes import ListSink
from scheduler_components.values import LoadSnapshot, PublisherStats, SchedulerCounters, SchedulerStats


class Load:
    def __init__(self) -> None:
        self.asked = 0

    def get_loads(self) -> LoadSnapshot:
        self.asked += 1
        return LoadSnapshot(sequence=self.asked)


class Requests:
    def stats(self) -> SchedulerCounters:
        return SchedulerCounters(num_requests_total=4)


class Publisher:
    def stats(self) -> PublisherStats:
        return PublisherStats(batches_sent=9)


def test_a_report_combines_load_and_the_parts_of_all_sources() -> None:
    sink, parallel = ListSink[SchedulerStats](), ParallelState(dp_rank=1, dp_size=2)
    sources: dict[str, StatsSource[object]] = {"counters": Requests(), "publisher": Publisher()}
    emitter = MetricsEmitter(parallel=parallel, load=Load(), sink=sink, sources=sources)
    emitter.emit()
    assert sink.sent == [
        SchedulerStats(
            labels=parallel.metric_labels,
            load=LoadSnapshot(sequence=1),
            counters=SchedulerCounters(num_requests_total=4),
            publisher=PublisherStats(batches_sent=9),
        )
    ]


class BusyLoad(Load):
    num_running = 1

    def get_loads(self) -> LoadSnapshot:
        return LoadSnapshot(num_running_reqs=self.num_running, num_waiting_reqs=1 - self.num_running)


class Counters:
    asked = 0

    def stats(self) -> PublisherStats:
        self.asked += 1
        return PublisherStats(batches_sent=self.asked)


class LaterCounters:
    def __init__(self, first: Counters) -> None:
        self.first = first

    def stats(self) -> SchedulerCounters:
        return SchedulerCounters(num_requests_total=self.first.asked)


def sources(counters: Counters) -> dict[str, StatsSource[object]]:
    return {"publisher": counters, "counters": LaterCounters(counters)}


def test_counters_are_read_every_32_busy_steps_and_in_every_idle_step() -> None:
    sink, load, counters = ListSink[SchedulerStats](), BusyLoad(), Counters()
    emitter = MetricsEmitter(parallel=ParallelState(), load=load, sink=sink, sources=sources(counters))
    for step in range(72):
        load.num_running = step % 2  # or one waits
        emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.sent] == [1] * 32 + [2] * 32 + [3] * 8
    sink.sent.clear()
    emitter.load = Load()
    for _ in range(3):
        emitter.emit()
    emitter.load = load
    for _ in range(33):
        emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.sent] == [4, 5] + [6] * 32 + [7] * 2
    assert all(stats.counters.num_requests_total == stats.publisher.batches_sent for stats in sink.sent)


def test_refresh_counters_reads_them_for_the_next_report() -> None:
    sink, counters = ListSink[SchedulerStats](), Counters()
    emitter = MetricsEmitter(parallel=ParallelState(), load=BusyLoad(), sink=sink, sources=sources(counters))
    for _ in range(3):
        emitter.emit()
    emitter.refresh_counters()
    emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.sent] == [1, 1, 1, 2]


def test_an_interval_of_one_reads_the_counters_in_each_step() -> None:
    sink, counters = ListSink[SchedulerStats](), Counters()
    emitter = MetricsEmitter(
        parallel=ParallelState(), load=BusyLoad(), sink=sink, sources={"publisher": counters}, counters_interval_steps=1
    )
    for _ in range(3):
        emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.sent] == [1, 2, 3]
    with pytest.raises(ConfigError, match="counters_interval_steps"):
        MetricsEmitter(parallel=ParallelState(), load=BusyLoad(), sink=sink, counters_interval_steps=0)


def test_counters_that_could_not_be_read_are_read_in_the_next_step() -> None:
    sink, load, counters = ListSink[SchedulerStats](), BusyLoad(), Counters()
    emitter = MetricsEmitter(parallel=ParallelState(), load=load, sink=sink, sources=sources(counters))
    emitter.emit()
    emitter.load, emitter.sources = Load(), {"publisher": BrokenSource()}  # type: ignore[typeddict-item]
    emitter.emit()
    emitter.load, emitter.sources = load, sources(counters)
    emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.sent] == [1, 2]


def test_sources_are_optional() -> None:
    sink, parallel = ListSink[SchedulerStats](), ParallelState()
    MetricsEmitter(parallel=parallel, load=Load(), sink=sink).emit()
    assert sink.sent == [SchedulerStats(parallel.metric_labels, LoadSnapshot(sequence=1))]


def test_a_source_of_an_unknown_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="sources='totals': is no part of SchedulerStats; use one of counters, "):
        MetricsEmitter(
            parallel=ParallelState(), load=Load(), sink=ListSink[SchedulerStats](), sources={"totals": Requests()}
        )  # type: ignore[typeddict-unknown-key]


def test_a_part_is_a_copy_of_the_live_counters() -> None:
    sink, counters = ListSink[SchedulerStats](), SchedulerCounters()
    emitter = MetricsEmitter(
        parallel=ParallelState(), load=Load(), sink=sink, sources={"counters": LiveStats(counters)}
    )
    for _ in range(2):
        counters.num_requests_total += 1
        emitter.emit()
    assert [stats.counters.num_requests_total for stats in sink.sent] == [1, 2]


@pytest.mark.parametrize(("attn_dp_size", "attn_cp_size"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_one_rank_of_each_replica_reports(attn_dp_size: int, attn_cp_size: int) -> None:
    sink = ListSink[SchedulerStats]()
    for tp_rank in range(8):
        parallel = ParallelState.from_tp_rank(tp_rank, tp_size=8, attn_dp_size=attn_dp_size, attn_cp_size=attn_cp_size)
        load = Load()
        MetricsEmitter(parallel=parallel, load=load, sink=sink).emit()
        assert load.asked == int(parallel.reports_metrics)
    assert [dict(stats.labels)["dp_rank"] for stats in sink.sent] == [str(rank) for rank in range(attn_dp_size)]


class BrokenSource:
    def get_loads(self) -> LoadSnapshot:
        raise ZeroDivisionError

    stats = get_loads


@pytest.mark.parametrize("broken", ["load", "counters", "publisher", "sink"])
def test_nothing_raises_into_the_step(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink[SchedulerStats]()
    sources: dict[str, Any] = {"counters": Requests(), "publisher": Publisher()}
    parts: dict[str, Any] = {"load": Load(), "sources": sources, "sink": sink}
    if broken == "sink":
        sink.error = ConnectionError("gone")
    elif broken == "load":
        parts["load"] = BrokenSource()
    else:
        sources[broken] = BrokenSource()
    emitter = MetricsEmitter(parallel=ParallelState(), **parts)
    for _ in range(100):
        emitter.emit()
    assert emitter.failures.total == 100
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert sink.sent == []


def test_a_sink_that_comes_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    sink = ListSink[SchedulerStats]()
    emitter = MetricsEmitter(parallel=ParallelState(), load=Load(), sink=sink)
    sink.error = ConnectionError("gone")
    emitter.emit()
    sink.error = None
    emitter.emit()
    assert [stats.load.sequence for stats in sink.sent] == [2]
    assert "works again" in caplog.text
