"""One line per rank and interval, that a person can read; losses are in capitals."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from kit.scheduler_stats import make_stats

from observability import LogSink
from scheduler_components.values import PublisherStats, SchedulerStats

LOGGER = logging.getLogger("test_log_sink")


def busy_stats(dp_rank: int = 0, publisher: PublisherStats | None = None) -> SchedulerStats:
    return make_stats(
        dp_rank,
        publisher=publisher or PublisherStats(events_sent=7, batches_sent=2),
        num_running_reqs=12,
        num_waiting_reqs=3,
        num_pending_tokens=4500,
        num_used_tokens=8192,
        max_total_num_tokens=65536,
        token_usage=0.125,
        gen_throughput=1234.5,
        cache_hit_rate=0.4,
    )


@pytest.fixture
def line_of(caplog: pytest.LogCaptureFixture) -> Callable[[SchedulerStats], str]:
    """The line that a sink logs of a report."""

    def log(stats: SchedulerStats) -> str:
        with caplog.at_level(logging.INFO, logger=LOGGER.name):
            LogSink(logger=LOGGER).record(stats)
        return caplog.records[-1].message

    return log


def test_the_line_says_what_a_person_asks(line_of: Callable[[SchedulerStats], str]) -> None:
    assert line_of(busy_stats(1)) == (
        "dp1: 12 running, 3 waiting (4,500 tokens), KV 8,192/65,536 tokens (12.5%), hit rate 40.0%, "
        "1,234.5 tokens/s, 7 events in 2 batches"
    )


def test_losses_are_in_capitals(line_of: Callable[[SchedulerStats], str]) -> None:
    line = line_of(busy_stats(publisher=PublisherStats(batches_dropped=3, events_refused=1)))
    assert line.endswith("3 BATCHES DROPPED, 1 EVENTS REFUSED")


def test_each_rank_logs_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    sink = LogSink(logger=LOGGER, interval_s=10.0, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, logger=LOGGER.name):
        for second in range(21):
            now[0] = float(second)
            sink.record(busy_stats(0))
            sink.record(busy_stats(1))
    assert [record.message[:3] for record in caplog.records] == ["dp0", "dp1"] * 3


def test_a_clock_set_back_does_not_silence_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = [5000.0]
    sink = LogSink(logger=LOGGER, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, logger=LOGGER.name):
        sink.record(busy_stats())
        now[0] = 10.0
        sink.record(busy_stats())
        sink.record(busy_stats())
    assert len(caplog.records) == 2
