"""The fakes do what the ports say when a component is composed of them."""

from __future__ import annotations

from scheduler_components import (
    AllBlocksCleared,
    KVEventBatch,
    LoadInquirer,
    MetricsEmitter,
    ParallelState,
    SchedulerKvEventsPublisher,
)
from scheduler_components.ports import ReportSink
from scheduler_components.testing import FakePool, FakeQueues, ListEventSink, VirtualClock
from scheduler_components.testing.fakes import FakeLoad, FakeRequest, ListSink, ScriptedEventSource
from scheduler_components.values import KvMetrics, LoadSnapshot, SchedulerStats

TRIVIAL = ParallelState.trivial()


def test_components_composed_of_fakes_work_and_fail_as_told() -> None:
    clock, sink = VirtualClock(5.0), ListEventSink()
    metrics: ListSink[SchedulerStats] = ListSink()
    kv_metrics: ListSink[KvMetrics] = ListSink()
    queues = FakeQueues(running=[1], waiting=[FakeRequest(10, 4)])
    load = LoadInquirer(parallel=TRIVIAL, queues=queues, pool=FakePool(), clock=clock)
    publisher = SchedulerKvEventsPublisher(
        parallel=TRIVIAL, source=ScriptedEventSource([AllBlocksCleared()]), sink=sink, load=load,
        metrics_sink=kv_metrics,
        clock=clock,
    )  # fmt: skip
    for _ in range(2):
        publisher.publish_kv_events()
    publisher.idle()
    publisher.emit_kv_metrics()
    MetricsEmitter(parallel=TRIVIAL, load=load, sink=metrics, sources={"publisher": publisher}).emit()
    assert sink.batches == [KVEventBatch(5.0, (AllBlocksCleared(),), 0)]
    assert (sink.num_idled, len(kv_metrics.sent), metrics.sent[0].load.num_waiting_uncached_tokens) == (1, 1, 6)
    sink.error = metrics.error = RuntimeError("on purpose")
    publisher.idle()
    MetricsEmitter(parallel=TRIVIAL, load=FakeLoad(), sink=metrics).emit()
    publisher.shutdown()
    assert (sum(publisher.failures.counts.values()), sink.num_closed, kv_metrics.num_closed) == (2, 1, 1)


def test_a_load_sink_keeps_reports() -> None:
    fake: ListSink[LoadSnapshot] = ListSink()
    sink: ReportSink[LoadSnapshot] = fake
    sink.send(FakeLoad().get_loads())
    sink.close()
    assert (len(fake.sent), fake.num_closed) == (1, 1)
