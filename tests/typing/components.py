"""The top-level names as a type checker sees them; ``make types`` reads this file, and it runs too."""

from __future__ import annotations

from array import array
from typing import assert_type

import scheduler_components
from scheduler_components import (
    KVCacheEvent,
    LoadInquirer,
    LoadPublisher,
    MetricsEmitter,
    ParallelState,
    RadixCache,
    SchedulerKvEventsPublisher,
    TokenCountedQueue,
    open_load_publisher,
)
from scheduler_components.cache import PrefixMatch
from scheduler_components.kv_events import NullEventPublisher
from scheduler_components.values import KvMetrics, LoadSnapshot, MemoryLoad, PublisherStats, SchedulerStats


class Request:
    """The least that a request must be."""

    num_input_tokens = 5
    num_cached_tokens = 0


class Queues:
    """The least that a scheduler must show of its queues."""

    max_running_requests = 4
    num_chunked_tokens_left = 0

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting: TokenCountedQueue[Request] = TokenCountedQueue()


class ListSink:
    def __init__(self) -> None:
        self.reports: list[SchedulerStats] = []

    def record(self, stats: SchedulerStats) -> None:
        self.reports.append(stats)


def check_the_version_is_text() -> None:
    assert_type(scheduler_components.__version__, str)


def check_parallel_state() -> None:
    parallel = ParallelState.from_tp_rank(3, tp_size=4, attn_dp_size=2)
    assert_type(parallel, ParallelState)
    assert_type(parallel.owns_kv_stream, bool)
    assert_type(parallel.kv_stream_index, int)
    assert_type(parallel.dp_rank, int | None)
    assert_type(parallel.metric_labels, tuple[tuple[str, str], ...])
    assert_type(ParallelState.trivial(gpu_id=1), ParallelState)


def check_a_queue_keeps_the_type_of_its_requests() -> None:
    queue: TokenCountedQueue[Request] = TokenCountedQueue()
    queue.append(Request())
    assert_type(queue.pending_tokens, int)
    assert_type(queue[0], Request)
    assert_type(queue.popleft(), Request)


def check_the_cache() -> None:
    cache = RadixCache(page_size=2, capacity_tokens=16, record=True)
    pages = cache.allocate(2)
    assert_type(pages, list[int])
    match = cache.insert([1, 2, 3, 4], pages)
    assert_type(match, PrefixMatch)
    assert_type(match.num_tokens, int)
    assert isinstance(match.page_array, array)
    assert_type(match.pages, tuple[int, ...])
    assert_type(cache.take_events(), tuple[KVCacheEvent, ...])


def check_load_and_metrics() -> None:
    parallel, sink = ParallelState.trivial(), ListSink()
    load = LoadInquirer(parallel=parallel, queues=Queues(), pool=RadixCache(page_size=2, capacity_tokens=16))
    snapshot = load.get_loads()
    assert_type(snapshot, LoadSnapshot)
    assert_type(snapshot.token_usage, float)
    assert_type(snapshot.memory, MemoryLoad | None)
    MetricsEmitter(parallel=parallel, load=load, sink=sink).emit()
    assert_type(sink.reports[0].publisher, PublisherStats)
    gauge = open_load_publisher(None, parallel=parallel, load=load)
    assert_type(gauge, LoadPublisher)
    gauge.close()


def check_the_events_publisher() -> None:
    parallel = ParallelState.trivial()
    cache = RadixCache(page_size=2, capacity_tokens=16, record=True)
    made = SchedulerKvEventsPublisher(parallel=parallel, source=cache, sink=NullEventPublisher())
    opened = SchedulerKvEventsPublisher.open(None, parallel=parallel, source=cache)
    for publisher in (made, opened):
        publisher.publish_kv_events()
        assert_type(publisher.stats(), PublisherStats)
        publisher.shutdown()


def check_values_on_the_wire_are_keyword_structs() -> None:
    assert_type(KvMetrics(kv_total_blocks=8).gpu_cache_usage_perc, float)
