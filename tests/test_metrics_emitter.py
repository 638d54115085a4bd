"""Metrics are what the sources say at the end of a step, from one rank a replica, and they never raise."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from scheduler_components import (
    ConfigError,
    LoadSnapshot,
    MetricsEmitter,
    ParallelState,
    PublisherStats,
    SchedulerStats,
    SchedulerTotals,
)


class Load:
    def __init__(self) -> None:
        self.asked = 0

    def get_loads(self) -> LoadSnapshot:
        self.asked += 1
        return LoadSnapshot(sequence=self.asked)


class Totals:
    def totals(self) -> SchedulerTotals:
        return SchedulerTotals(num_requests_total=4)


class Publisher:
    def stats(self) -> PublisherStats:
        return PublisherStats(batches_sent=9)


class Sink:
    def __init__(self) -> None:
        self.recorded: list[SchedulerStats] = []
        self.error: Exception | None = None

    def record(self, stats: SchedulerStats) -> None:
        if self.error is not None:
            raise self.error
        self.recorded.append(stats)


def test_a_report_carries_load_totals_and_publisher_counters() -> None:
    sink, parallel = Sink(), ParallelState(dp_rank=1, dp_size=2)
    emitter = MetricsEmitter(parallel=parallel, load=Load(), sink=sink, totals=Totals(), publisher=Publisher())
    emitter.emit()
    assert sink.recorded == [
        SchedulerStats(
            labels=parallel.metric_labels,
            load=LoadSnapshot(sequence=1),
            totals=SchedulerTotals(num_requests_total=4),
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

    def totals(self) -> SchedulerTotals:
        return SchedulerTotals(num_requests_total=self.asked + 1)  # asked first


def test_a_busy_step_seldom_asks_for_counters_and_an_idle_one_always_does() -> None:
    sink, load, counters = Sink(), BusyLoad(), Counters()
    emitter = MetricsEmitter(parallel=ParallelState(), load=load, sink=sink, totals=counters, publisher=counters)
    for step in range(72):
        load.num_running = step % 2  # or one waits
        emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.recorded] == [1] * 32 + [2] * 32 + [3] * 8
    sink.recorded.clear()
    emitter.load = Load()
    for _ in range(3):
        emitter.emit()
    emitter.load = load
    for _ in range(33):
        emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.recorded] == [4, 5] + [6] * 32 + [7] * 2
    assert all(stats.totals.num_requests_total == stats.publisher.batches_sent for stats in sink.recorded)


def test_what_has_changed_is_told_at_once() -> None:
    sink, counters = Sink(), Counters()
    emitter = MetricsEmitter(parallel=ParallelState(), load=BusyLoad(), sink=sink, totals=counters, publisher=counters)
    for _ in range(3):
        emitter.emit()
    emitter.refresh_counters()
    emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.recorded] == [1, 1, 1, 2]


def test_counters_of_each_step_are_to_be_had() -> None:
    sink, counters = Sink(), Counters()
    emitter = MetricsEmitter(
        parallel=ParallelState(), load=BusyLoad(), sink=sink, publisher=counters, counters_interval_steps=1
    )
    for _ in range(3):
        emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.recorded] == [1, 2, 3]
    with pytest.raises(ConfigError, match="counters_interval_steps"):
        MetricsEmitter(parallel=ParallelState(), load=BusyLoad(), sink=sink, counters_interval_steps=0)


def test_counters_that_could_not_be_read_are_asked_for_again() -> None:
    sink, load, counters = Sink(), BusyLoad(), Counters()
    emitter = MetricsEmitter(parallel=ParallelState(), load=load, sink=sink, totals=counters, publisher=counters)
    emitter.emit()
    emitter.load, emitter.publisher = Load(), BrokenSource()  # type: ignore[assignment]
    emitter.emit()
    emitter.load, emitter.publisher = load, counters
    emitter.emit()
    assert [stats.publisher.batches_sent for stats in sink.recorded] == [1, 2]


def test_totals_and_publisher_are_optional() -> None:
    sink = Sink()
    MetricsEmitter(parallel=ParallelState(), load=Load(), sink=sink).emit()
    assert (sink.recorded[0].totals, sink.recorded[0].publisher) == (SchedulerTotals(), PublisherStats())


@pytest.mark.parametrize(("attn_dp_size", "attn_cp_size"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_one_rank_of_each_replica_reports(attn_dp_size: int, attn_cp_size: int) -> None:
    sink = Sink()
    for tp_rank in range(8):
        parallel = ParallelState.from_tp_rank(tp_rank, tp_size=8, attn_dp_size=attn_dp_size, attn_cp_size=attn_cp_size)
        load = Load()
        MetricsEmitter(parallel=parallel, load=load, sink=sink).emit()
        assert load.asked == int(parallel.reports_metrics)
    assert [dict(stats.labels)["dp_rank"] for stats in sink.recorded] == [str(rank) for rank in range(attn_dp_size)]


class BrokenSource:
    def get_loads(self) -> LoadSnapshot:
        raise ZeroDivisionError

    totals = stats = get_loads


@pytest.mark.parametrize("broken", ["load", "totals", "publisher", "sink"])
def test_nothing_raises_into_the_step(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    parts: dict[str, Any] = {"load": Load(), "totals": Totals(), "publisher": Publisher(), "sink": sink}
    if broken == "sink":
        sink.error = ConnectionError("gone")
    else:
        parts[broken] = BrokenSource()
    emitter = MetricsEmitter(parallel=ParallelState(), **parts)
    for _ in range(100):
        emitter.emit()
    assert emitter.failures.total == 100
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert sink.recorded == []


def test_a_sink_that_comes_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    emitter = MetricsEmitter(parallel=ParallelState(), load=Load(), sink=sink)
    sink.error = ConnectionError("gone")
    emitter.emit()
    sink.error = None
    emitter.emit()
    assert [stats.load.sequence for stats in sink.recorded] == [2]
    assert "works again" in caplog.text
