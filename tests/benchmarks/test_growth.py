"""Costs do not grow with the size of the state. Only a large ratio between the best of several runs fails.

The tests measure the processor time of this thread, which other load of the machine does not change.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.bench_cache import GrowthProbe
from benchmarks.bench_load import WaitingRequest, inquirer_over
from benchmarks.bench_step import running_scheduler
from benchmarks.measure import measure_interleaved
from observability import PrometheusSink, render_metrics
from observability.kv_stream import BlockView
from scheduler_components import BlockRemoved, BlockStored, KVEventBatch, ParallelState
from scheduler_components.cache import RadixCache
from scheduler_components.kv_events import BatchEncoder, EventStream
from scheduler_components.kv_events.snapshot import StreamSnapshot
from scheduler_components.load import TokenCountedQueue
from scheduler_components.values import LoadSnapshot, SchedulerStats
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.timing

GROSS = 4.0
"""Caches of the processor and a neighbour's noise stay below this; one more factor of n does not."""

TURNS = 7


def growth(small: Callable[[], object], large: Callable[[], object], number: int) -> float:
    """How many times as long ``large`` takes as ``small``, each at its best."""
    found = measure_interleaved(
        {"small": small, "large": large}, turns=TURNS, number=number, clock_ns=time.thread_time_ns
    )
    return min(found["large"]) / min(found["small"])


@pytest.fixture(scope="module")
def cache_costs() -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    small, large = (GrowthProbe(size).costs_us(TURNS, prompts=10, clock=time.thread_time) for size in (1_000, 100_000))
    return small, large


@pytest.mark.parametrize("operation", ["match", "insert", "evict"])
def test_a_page_costs_the_same_in_a_hundred_times_larger_tree(
    operation: str, cache_costs: tuple[dict[str, list[float]], dict[str, list[float]]]
) -> None:
    small, large = (min(costs[operation]) for costs in cache_costs)
    assert large / small < GROSS


def test_a_load_inquiry_costs_the_same_at_any_queue_length() -> None:
    empty = inquirer_over(TokenCountedQueue())
    full = inquirer_over(TokenCountedQueue(WaitingRequest() for _ in range(10_000)))
    assert growth(empty.get_loads, full.get_loads, 2_000) < GROSS


def test_a_load_inquiry_costs_the_same_with_more_running_requests() -> None:
    with running_scheduler(4) as few, running_scheduler(256) as many:
        assert growth(few.load.get_loads, many.load.get_loads, 2_000) < GROSS


def test_a_request_costs_the_latencies_no_more_in_a_large_step() -> None:
    with running_scheduler(4) as few, running_scheduler(256) as many:

        def booking(scheduler: Scheduler) -> Callable[[], None]:
            requests = list(scheduler.queues.running)
            return lambda: scheduler.request_metrics.on_tokens(requests, [1] * len(requests))

        assert growth(booking(few), booking(many), 300) < 64 * GROSS


def test_an_eviction_costs_the_same_with_more_leaves() -> None:
    def evicting(num_leaves: int) -> Callable[[], None]:
        cache = RadixCache(page_size=1, capacity_tokens=num_leaves + 1)
        for token in range(1, num_leaves + 1):
            cache.insert([0, token], [*cache.match_prefix([0]).pages, *cache.allocate(1 + (token == 1))])

        def go() -> None:
            cache.insert([0, num_leaves + 1], [*cache.match_prefix([0]).pages, *cache.allocate(1)])
            cache.evict(1)

        return go

    assert growth(evicting(100), evicting(20_000), 300) < GROSS


def test_entering_and_leaving_a_queue_costs_the_same_at_any_length() -> None:
    def through(queue: TokenCountedQueue[WaitingRequest]) -> Callable[[], None]:
        def go() -> None:
            queue.append(WaitingRequest())
            queue.popleft()

        return go

    long = TokenCountedQueue(WaitingRequest() for _ in range(10_000))
    assert growth(through(TokenCountedQueue()), through(long), 2_000) < GROSS


def test_a_prefix_query_costs_the_same_in_a_hundred_times_larger_view() -> None:
    prompt = tuple(range(128))

    def query(num_others: int) -> Callable[[], object]:
        view = BlockView()
        others = tuple(range(1_000, 1_000 + num_others))
        for hashes in (prompt, others):
            view.apply(0, (BlockStored(hashes, None, hashes, 1, None),))
        return lambda: view.match_lengths(prompt)

    assert growth(query(1_000), query(100_000), 300) < GROSS


def test_finding_the_best_rank_costs_the_same_over_a_thousand_ranks() -> None:
    prompt = tuple(range(128))

    def query(num_ranks: int) -> Callable[[], object]:
        view = BlockView()
        for rank in range(num_ranks):
            view.apply(rank, (BlockStored(prompt, None, prompt, 1, None),))
        return lambda: view.best_ranks(prompt)

    assert growth(query(1), query(1_000), 300) < GROSS


def test_a_clear_costs_the_same_with_more_blocks() -> None:
    def clearing_ns(num_blocks: int) -> int:
        view = BlockView()
        view.apply(0, (BlockStored(tuple(range(num_blocks)), None, (), 1, None),))
        begun = time.thread_time_ns()
        view.clear(0)
        return time.thread_time_ns() - begun

    small, large = ([clearing_ns(num_blocks) for _ in range(TURNS)] for num_blocks in (10_000, 500_000))
    assert min(large) / min(small) < GROSS


def test_a_rank_costs_a_scrape_no_more_among_many() -> None:
    def scraping(num_ranks: int) -> Callable[[], object]:
        registry = CollectorRegistry()
        sink = PrometheusSink(registry)
        for rank in range(num_ranks):
            labels = ParallelState(dp_rank=rank, dp_size=num_ranks).metric_labels
            sink.record(SchedulerStats(labels, LoadSnapshot()))
        return lambda: render_metrics(registry)

    assert growth(scraping(2), scraping(200), 1) < 100 * GROSS


def test_a_batch_costs_the_stream_the_same_after_many_batches() -> None:
    def appending(num_before: int) -> Callable[[], None]:
        encoder = BatchEncoder()
        stream = EventStream(epoch=bytes(16), max_steps=100, max_bytes=1 << 30)
        payloads = [
            encoder.encode(KVEventBatch(1.0, (BlockStored((number,), None, (7,), 1, None),)), 0)
            for number in range(num_before)
        ]

        def append_one(payload: bytes) -> None:
            stream.append(payload)
            stream.fold_oldest()

        for payload in payloads:
            append_one(payload)
        return lambda: append_one(payloads[-1])

    assert growth(appending(500), appending(30_000), 500) < GROSS


def base_of(num_blocks: int, *, stays: int = 1) -> StreamSnapshot:
    """A base of so many blocks, of which all but every ``stays``-th are removed again."""
    encoder, base = BatchEncoder(), StreamSnapshot()
    for first in range(0, num_blocks, 50):
        hashes = range(first, first + 50)
        base.fold(
            *encoder.encode_with_changes(
                KVEventBatch(1.0, tuple(BlockStored((each,), None, (7,), 1, None) for each in hashes)), 0
            )
        )
    for first in range(0, num_blocks, 50):
        gone = tuple(each for each in range(first, first + 50) if each % stays)
        base.fold(*encoder.encode_with_changes(KVEventBatch(1.0, (BlockRemoved(gone),)), 0))
    return base


def test_folding_costs_the_same_in_a_hundred_times_larger_snapshot() -> None:
    def folding(num_blocks: int) -> Callable[[], None]:
        base, hashes = base_of(num_blocks), tuple(range(-64, 0))
        stored = tuple(BlockStored((each,), None, (7,), 1, None) for each in hashes)
        encoded = BatchEncoder().encode_with_changes(KVEventBatch(1.0, (*stored, BlockRemoved(hashes))), 0)
        return lambda: base.fold(*encoded)

    assert growth(folding(1_000), folding(100_000), 200) < GROSS


def test_a_block_of_the_snapshot_takes_the_same_memory_in_a_larger_one() -> None:
    small, large, thinned = base_of(2_000), base_of(40_000), base_of(40_000, stays=10)
    assert large.num_bytes / len(large) < 1.1 * small.num_bytes / len(small)
    assert thinned.num_bytes / len(thinned) < GROSS * small.num_bytes / len(small)


def test_writing_the_snapshot_costs_the_same_per_block() -> None:
    small, large = base_of(1_000), base_of(30_000)
    assert growth(lambda: list(small.segments()), lambda: list(large.segments()), 1) < 30 * GROSS


def test_an_event_costs_the_encoder_the_same_in_a_long_batch() -> None:
    encoder = BatchEncoder()

    def encoding(num_events: int) -> Callable[[], object]:
        batch = KVEventBatch(1.0, tuple(BlockStored((number,), None, (7,), 1, None) for number in range(num_events)))
        return lambda: encoder.encode(batch, 0)

    assert growth(encoding(32), encoding(3_200), 20) < 100 * GROSS
