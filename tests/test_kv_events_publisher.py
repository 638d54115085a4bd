"""Property: every event is published once, in order and stamped, by the rank that owns the stream; nothing raises."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler_components import (
    AllBlocksCleared,
    BlockRemoved,
    ConfigError,
    KVCacheEvent,
    KVEventBatch,
    ParallelState,
    PublisherClosedError,
    SchedulerKvEventsPublisher,
)
from scheduler_components.kv_events import NullEventPublisher
from scheduler_components.kv_events_publisher import kv_metrics_of_load
from scheduler_components.testing import ListEventSink
from scheduler_components.testing.fakes import FakeLoad, ListSink, ScriptedEventSource
from scheduler_components.values import KvMetrics, LoadSnapshot, PublisherStats

BUSY = FakeLoad(
    LoadSnapshot(
        dp_rank=1,
        num_running_reqs=3,
        num_waiting_reqs=4,
        num_used_tokens=33,
        max_total_num_tokens=170,
        page_size=16,
        max_running_requests=8,
        token_usage=0.2,
        cache_hit_rate=0.5,
    )
)

removed = st.builds(BlockRemoved, st.tuples(st.integers(-(2**63), 2**63 - 1)))


@given(st.lists(st.lists(removed, max_size=4), max_size=10))
@settings(deadline=None)
def test_all_events_are_published_in_order_and_no_batch_is_empty(steps: list[list[KVCacheEvent]]) -> None:
    sink = ListEventSink()
    publisher = SchedulerKvEventsPublisher(
        parallel=ParallelState(dp_rank=2, dp_size=4), source=ScriptedEventSource(*steps), sink=sink, clock=lambda: 77.5
    )
    for _ in steps:
        publisher.publish_kv_events()
    assert sink.batches == [KVEventBatch(77.5, tuple(events), 2) for events in steps if events]


def test_a_published_batch_cannot_change() -> None:
    events, sink = [AllBlocksCleared()], ListEventSink()
    SchedulerKvEventsPublisher(
        parallel=ParallelState(), source=ScriptedEventSource(events), sink=sink
    ).publish_kv_events()
    events.append(AllBlocksCleared())
    assert sink.batches[0].events == (AllBlocksCleared(),)


@pytest.mark.parametrize("error", [PublisherClosedError("closed"), OSError("no route"), TypeError("bad event")])
def test_a_batch_that_the_sink_refuses_is_counted_and_never_raises(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    sink = ListEventSink()
    sink.num_dropped = 2
    publisher = SchedulerKvEventsPublisher(
        parallel=ParallelState(), source=ScriptedEventSource(*[[AllBlocksCleared()]] * 50), sink=sink
    )
    sink.error = error
    for _ in range(49):
        publisher.publish_kv_events()
    assert publisher.failures.total == 49
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    sink.error = None
    publisher.publish_kv_events()
    assert len(sink.batches) == 1
    assert publisher.stats() == PublisherStats(batches_sent=1, events_sent=1, batches_dropped=2 + 49)


def test_a_cache_that_raises_loses_only_its_step() -> None:
    class BrokenCache:
        def take_events(self) -> Sequence[KVCacheEvent]:
            raise RuntimeError("recorder is broken")

    sink = ListEventSink()
    sink.num_dropped = 2
    publisher = SchedulerKvEventsPublisher(parallel=ParallelState(), source=BrokenCache(), sink=sink)
    publisher.publish_kv_events()
    assert publisher.failures.total == 1
    assert publisher.stats() == PublisherStats(batches_dropped=2 + 1)


def test_hooks_and_counters_of_a_broken_sink_do_not_raise() -> None:
    sink = ListEventSink()
    publisher = SchedulerKvEventsPublisher(parallel=ParallelState(), source=ScriptedEventSource(), sink=sink)
    publisher.idle()
    assert sink.num_idled == 1
    sink.error = OSError("gone")
    publisher.idle()
    assert publisher.stats() == PublisherStats()
    assert publisher.failures.total == 2


class SinkWithPendingBatches(ListEventSink):
    sends_after = 1_000_000  # calls of idle()

    def stats(self) -> PublisherStats:
        return PublisherStats(batches_pending=int(self.num_idled < self.sends_after))


def test_flush_says_whether_every_batch_has_its_number() -> None:
    sink = SinkWithPendingBatches()
    source = ScriptedEventSource([AllBlocksCleared()])
    publisher = SchedulerKvEventsPublisher(parallel=ParallelState(), source=source, sink=sink)
    assert not publisher.flush()
    assert (len(sink.batches), sink.num_idled) == (1, 1)
    assert not publisher.flush(0.002)
    sink.sends_after = sink.num_idled + 3
    assert publisher.flush(30.0)
    assert sink.num_idled == sink.sends_after
    sink.error = OSError("gone")
    assert not publisher.flush(30.0)


def test_a_stopping_engine_says_that_no_block_is_left_after_its_last_events() -> None:
    last, sink = BlockRemoved((1,)), ListEventSink()
    publisher = SchedulerKvEventsPublisher(
        parallel=ParallelState(), source=ScriptedEventSource([last]), sink=sink, clock=lambda: 1.0
    )
    publisher.publish_all_cleared()
    assert [batch.events for batch in sink.batches] == [(last,), (AllBlocksCleared(),)]
    silent = ListEventSink()
    other = ParallelState.from_tp_rank(1, tp_size=2, attn_dp_size=1)
    SchedulerKvEventsPublisher(parallel=other, source=ScriptedEventSource([last]), sink=silent).publish_all_cleared()
    assert silent.batches == []


def test_shutdown_sends_the_last_step_and_closes_both_sinks_though_one_fails() -> None:
    sink, metrics_sink = ListEventSink(), ListSink()
    publisher = SchedulerKvEventsPublisher(
        parallel=ParallelState(), source=ScriptedEventSource([AllBlocksCleared()]), sink=sink, metrics_sink=metrics_sink
    )
    publisher.shutdown()
    assert len(sink.batches) == 1
    sink.error = OSError("gone")
    publisher.shutdown()
    assert (sink.num_closed, metrics_sink.num_closed) == (2, 2)


def test_kv_metrics_are_slots_and_blocks() -> None:
    metrics_sink = ListSink()
    publisher = SchedulerKvEventsPublisher(
        parallel=ParallelState(dp_rank=1, dp_size=2),
        source=ScriptedEventSource(),
        sink=ListEventSink(),
        load=BUSY,
        metrics_sink=metrics_sink,
    )
    publisher.emit_kv_metrics()
    assert metrics_sink.sent == [
        KvMetrics(
            request_active_slots=3,
            request_total_slots=8,
            kv_active_blocks=3,
            kv_total_blocks=10,
            num_requests_waiting=4,
            gpu_cache_usage_perc=0.2,
            gpu_prefix_cache_hit_rate=0.5,
            data_parallel_rank=1,
        )
    ]
    assert kv_metrics_of_load(LoadSnapshot(page_size=0)) == KvMetrics()


@given(page_size=st.integers(1, 64), capacity=st.integers(0, 10_000), used=st.integers(0, 10_000))
@example(page_size=16, capacity=16 * 512 + 3, used=16 * 512 + 3)
def test_no_more_blocks_are_in_use_than_there_are(page_size: int, capacity: int, used: int) -> None:
    used = min(used, capacity)
    metrics = kv_metrics_of_load(LoadSnapshot(page_size=page_size, max_total_num_tokens=capacity, num_used_tokens=used))
    assert metrics.kv_active_blocks <= metrics.kv_total_blocks == capacity // page_size
    assert metrics.kv_active_blocks * page_size >= min(used, metrics.kv_total_blocks * page_size)


def test_the_load_is_not_read_for_a_sink_that_wants_no_kv_metrics() -> None:
    class Unasked:
        def get_loads(self) -> LoadSnapshot:
            raise AssertionError("the sink wants no metrics")

    metrics_sink = ListSink()
    metrics_sink.wants_reports = False
    publisher = SchedulerKvEventsPublisher(
        parallel=ParallelState(),
        source=ScriptedEventSource(),
        sink=ListEventSink(),
        load=Unasked(),
        metrics_sink=metrics_sink,
    )
    publisher.emit_kv_metrics()
    assert (metrics_sink.sent, publisher.failures.total) == ([], 0)


def test_kv_metrics_of_a_broken_load_do_not_raise() -> None:
    class BrokenLoad:
        def get_loads(self) -> LoadSnapshot:
            raise ZeroDivisionError

    publisher = SchedulerKvEventsPublisher(
        parallel=ParallelState(),
        source=ScriptedEventSource(),
        sink=ListEventSink(),
        load=BrokenLoad(),
        metrics_sink=ListSink(),
    )
    publisher.emit_kv_metrics()
    assert publisher.failures.total == 1


def test_open_without_config_is_silent_and_opens_nothing() -> None:
    publisher = SchedulerKvEventsPublisher.open(
        None, parallel=ParallelState(), source=ScriptedEventSource([AllBlocksCleared()])
    )
    publisher.publish_kv_events()
    publisher.idle()
    publisher.emit_kv_metrics()
    publisher.shutdown()
    assert isinstance(publisher.sink, NullEventPublisher)
    assert publisher.metrics_sink is None
    assert publisher.failures.total == 0


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize(
    ("config", "metrics_endpoint"),
    [
        ('{"publisher": "zmq", "endpont": "tcp://*:0"}', None),
        ("not json", None),
        (None, "inproc://here"),
        (None, "tcp://*:5557"),
    ],
)
def test_open_refuses_a_bad_setting_on_every_rank_alike(
    tp_rank: int, config: str | None, metrics_endpoint: str | None
) -> None:
    parallel = ParallelState.from_tp_rank(tp_rank, tp_size=2)
    with pytest.raises(ConfigError):
        SchedulerKvEventsPublisher.open(
            config, parallel=parallel, source=ScriptedEventSource(), metrics_endpoint=metrics_endpoint
        )
