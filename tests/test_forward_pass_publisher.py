"""One message per forward pass, from one rank of each replica, with the counts that SGLang would send."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_components import ConfigError, ParallelState
from scheduler_components.forward_pass_publisher import ForwardPassPublisher, count_queued, count_scheduled
from scheduler_components.testing import VirtualClock
from scheduler_components.testing.fakes import ListSink
from scheduler_components.values import (
    ForwardPassMetrics,
    ForwardPassStats,
    QueuedRequestMetrics,
    ScheduledRequestMetrics,
)

Sink: TypeAlias = ListSink[ForwardPassMetrics]


@dataclass
class Scheduled:
    num_prompt_tokens: int


@dataclass
class Part:
    start: int
    end: int
    is_prefill: bool = True
    num_prompt_tokens: int = 0

    @property
    def request(self) -> Scheduled:
        return Scheduled(self.num_prompt_tokens or self.end)


@dataclass
class Waiting:
    num_input_tokens: int
    num_output_tokens: int = 0


@dataclass
class Queue:
    waiting: Sequence[Waiting] = ()


class BrokenQueue:
    @property
    def waiting(self) -> Iterator[Waiting]:
        raise RuntimeError("no queue")


@dataclass
class Rank:
    parallel: ParallelState = field(default_factory=ParallelState)
    queue: Queue = field(default_factory=Queue)
    sink: Sink = field(default_factory=Sink)
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(0.0))
    publisher: ForwardPassPublisher = field(init=False)

    def __post_init__(self) -> None:
        self.publisher = ForwardPassPublisher(
            parallel=self.parallel, queues=self.queue, sink=self.sink, worker_id="w7", clock=self.clock
        )


def test_a_pass_with_prefills_and_decodes() -> None:
    rank = Rank()
    rank.queue.waiting = [Waiting(30), Waiting(50), Waiting(11, num_output_tokens=1)]
    parts = [Part(0, 64, num_prompt_tokens=100), Part(32, 40), Part(9, 10, is_prefill=False), Part(19, 20, False)]
    rank.publisher.publish_forward_pass(parts, 0.25)
    scheduled = ScheduledRequestMetrics(2, 64 + 8, 900.0, 32, 2, 30, 25.0)
    queued = QueuedRequestMetrics(2, 80, 100.0, 1, 11, 0.0)
    assert rank.sink.sent == [ForwardPassMetrics(1, "w7", 0, 0, 0.25, scheduled, queued)]


lengths = st.lists(st.integers(1, 10**9), max_size=8)


@given(prefills=lengths, decodes=lengths)
def test_variances_are_those_of_the_lengths(prefills: list[int], decodes: list[int]) -> None:
    parts = [Part(0, 1, num_prompt_tokens=length) for length in prefills]
    counted = count_scheduled([*parts, *(Part(end - 1, end, is_prefill=False) for end in decodes)])
    queue = [*(Waiting(length) for length in prefills), *(Waiting(length, 1) for length in decodes)]
    queued = count_queued(queue)
    assert (queued.sum_prefill_tokens, queued.sum_decode_kv_tokens) == (sum(prefills), sum(decodes))
    assert counted.sum_decode_kv_tokens == sum(decodes)
    for variances, given_lengths in (
        ((counted.var_prefill_length, queued.var_prefill_length), prefills),
        ((counted.var_decode_kv_tokens, queued.var_decode_kv_tokens), decodes),
    ):
        wanted = float(statistics.pvariance(given_lengths)) if given_lengths else 0.0
        assert variances == (pytest.approx(wanted), pytest.approx(wanted))
        assert min(variances) >= 0.0


def test_messages_are_numbered_and_a_lost_one_leaves_a_gap() -> None:
    rank = Rank()
    rank.publisher.publish_forward_pass([], 0.1)
    rank.sink.error = OSError("gone")
    rank.publisher.publish_forward_pass([], 0.1)
    rank.sink.error = None
    rank.publisher.publish_forward_pass([], 0.1)
    assert [metrics.counter_id for metrics in rank.sink.sent] == [0, 2]
    assert rank.publisher.stats() == ForwardPassStats(sent=2, heartbeats=0, failed=1)


def test_with_idle_a_pass_is_sent_during_the_next_one_with_the_queue_of_that_moment() -> None:
    rank = Rank()
    rank.publisher.idle()
    for number in range(3):
        rank.queue.waiting = [Waiting(10)] * (3 - number)
        rank.publisher.publish_forward_pass([Part(0, number + 1)], 0.1)
        assert len(rank.sink.sent) == number
        rank.queue.waiting = rank.queue.waiting[1:]
        rank.publisher.idle()
        rank.publisher.idle()
    sent = [(each.scheduled_requests.sum_prefill_tokens, each.queued_requests) for each in rank.sink.sent]
    queues = [QueuedRequestMetrics(2, 20), QueuedRequestMetrics(1, 10), QueuedRequestMetrics()]
    assert sent == list(zip([1, 2, 3], queues, strict=True))


@pytest.mark.parametrize("then", ["publish_idle", "close"])
def test_a_kept_pass_is_sent_before_the_engine_sleeps_or_ends(then: str) -> None:
    rank = Rank()
    rank.publisher.idle()
    rank.publisher.publish_forward_pass([], 0.25)
    getattr(rank.publisher, then)()
    assert [metrics.wall_time for metrics in rank.sink.sent] == [0.25]


def test_a_scheduler_that_stops_calling_idle_loses_nothing_and_keeps_the_order() -> None:
    rank = Rank()
    rank.publisher.idle()
    for number in range(1, 4):
        rank.publisher.publish_forward_pass([Part(0, number)], 0.1)
    assert [metrics.scheduled_requests.sum_prefill_tokens for metrics in rank.sink.sent] == [1, 2, 3]
    assert [metrics.counter_id for metrics in rank.sink.sent] == [0, 1, 2]


def test_an_idle_engine_sends_a_heartbeat_of_zeros_each_second() -> None:
    rank = Rank()
    for rank.clock.now_s in (0.0, 0.5, 0.99, 1.0, 1.5, 2.0, 2.2):
        rank.publisher.publish_idle()
    assert rank.sink.sent == [ForwardPassMetrics(worker_id="w7", counter_id=number) for number in (0, 1)]
    assert rank.publisher.stats() == ForwardPassStats(sent=2, heartbeats=2)


def test_a_pass_delays_the_next_heartbeat() -> None:
    rank = Rank()
    rank.clock.now_s = 0.75
    rank.publisher.publish_forward_pass([], 0.1)
    rank.clock.now_s = 1.5
    rank.publisher.publish_idle()
    assert len(rank.sink.sent) == 1
    rank.clock.now_s = 1.75
    rank.publisher.publish_idle()
    assert [metrics.wall_time for metrics in rank.sink.sent] == [0.1, 0.0]


def test_a_clock_that_is_set_back_does_not_silence_an_idle_engine() -> None:
    rank = Rank()
    rank.clock.now_s = -3600.0
    rank.publisher.publish_idle()
    rank.publisher.publish_idle()
    assert len(rank.sink.sent) == 1


def test_the_heartbeat_of_a_paused_engine_counts_what_waits() -> None:
    rank = Rank()
    rank.queue.waiting, rank.clock.now_s = [Waiting(30)], 1.0
    rank.publisher.publish_idle()
    assert rank.sink.sent[0].queued_requests == QueuedRequestMetrics(1, 30)
    assert rank.sink.sent[0].scheduled_requests == ScheduledRequestMetrics()


@pytest.mark.parametrize("wall_time_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pass_without_a_duration_is_a_failure_because_readers_would_take_it_for_a_heartbeat(
    wall_time_s: float,
) -> None:
    rank = Rank()
    rank.publisher.publish_forward_pass([], wall_time_s)
    assert (rank.sink.sent, rank.publisher.stats().failed) == ([], 1)


def test_nothing_raises_into_the_step(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    rank.publisher.queues = BrokenQueue()
    rank.clock.now_s = 5.0
    rank.publisher.publish_forward_pass([], 0.1)
    rank.clock.now_s = 9.0
    rank.publisher.publish_idle()
    rank.sink.error = OSError("stuck")
    rank.publisher.close()
    assert rank.publisher.stats() == ForwardPassStats(failed=2)
    assert len(caplog.records) == 2  # of sending and of closing


@pytest.mark.parametrize("closed", [True, False])
def test_without_a_receiver_nothing_is_counted(closed: bool) -> None:
    rank = Rank()
    if closed:
        rank.publisher.close()
        rank.publisher.close()
        assert rank.sink.num_closed == 1
    else:
        rank.sink.wants_reports = False
    rank.publisher.queues = BrokenQueue()
    rank.clock.now_s = 5.0
    rank.publisher.publish_forward_pass([], 0.1)
    rank.publisher.idle()
    rank.publisher.publish_idle()
    assert rank.publisher.stats() == ForwardPassStats()


def test_other_ranks_send_nothing_and_the_reporting_one_names_its_replica() -> None:
    speaking = []
    for tp_rank in range(8):
        rank = Rank(ParallelState.from_tp_rank(tp_rank, tp_size=8, attn_dp_size=2, attn_cp_size=2))
        rank.publisher.publish_forward_pass([], 0.1)
        rank.clock.now_s = 9.0
        rank.publisher.publish_idle()
        speaking += [(tp_rank, metrics.dp_rank) for metrics in rank.sink.sent]
    assert speaking == [(0, 0), (0, 0), (4, 1), (4, 1)]


def test_a_heartbeat_needs_an_interval() -> None:
    with pytest.raises(ConfigError, match="heartbeat_s"):
        ForwardPassPublisher(parallel=ParallelState(), queues=Queue(), heartbeat_s=0.0)
