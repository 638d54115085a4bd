"""A user's own classes fit the ports, and what the kit ships fits them too: each assignment is the assertion.

Strict mode warns of an ignore without use: a class that must not fit and does would be found so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from observability import LogSink, PrometheusSink
from scheduler_components import (
    EventBatch,
    KVCacheEvent,
    LoadInquirer,
    OutputStreamer,
    ParallelState,
    RadixCache,
    WorkCounters,
    ports,
)
from scheduler_components.batch_result_processor import RequestFinisher
from scheduler_components.hicache import KeySpace, MemoryPageStore, Placement
from scheduler_components.kv_events import NullEventPublisher
from scheduler_components.metrics import RateMeter
from scheduler_components.output_streamer import StreamedRequest
from scheduler_components.ports import OutputSink, StatsSource
from scheduler_components.request_receiver import InputRelay, InputSource
from scheduler_components.values import (
    FinishReason,
    LoadSnapshot,
    OutputBatch,
    OutputStats,
    PublisherStats,
    SchedulerStats,
    TokenOutput,
)

if TYPE_CHECKING:
    from scheduler_components.kv_events import ZmqEventPublisher
    from scheduler_components.metrics import ZmqReportSink
    from scheduler_components.metrics.shm_metrics_board import ShmMetricsSink
    from scheduler_components.ports import NullMetricsSink
    from scheduler_components.receiving.sync_input_relay import SyncGroupRelay
    from scheduler_components.receiving.zmq_input_relay import ZmqFollowerRelay, ZmqInputSource, ZmqLeaderRelay
    from scheduler_components.values import SchedulerStats

    def an_event_sink(events: ZmqEventPublisher) -> ports.KvEventSink:
        return events

    def a_stats_source(events: ZmqEventPublisher) -> StatsSource[PublisherStats]:
        return events

    def a_report_sink(load: ZmqReportSink[LoadSnapshot]) -> ports.ReportSink[LoadSnapshot]:
        return load

    def a_metrics_sink(metrics: ShmMetricsSink | NullMetricsSink) -> ports.MetricsSink:
        return metrics

    def an_input_source(source: ZmqInputSource) -> InputSource:
        return source

    def an_input_relay(relay: ZmqLeaderRelay | ZmqFollowerRelay | SyncGroupRelay) -> InputRelay:
        return relay


class Pool:
    """A scheduler's own pool: plain attributes fit where the port has properties."""

    page_size = 16
    capacity_tokens = 1024

    @property
    def used_tokens(self) -> int:
        return 512


class Waiting:
    num_input_tokens = 7
    num_cached_tokens = 2


class Queues:
    """A scheduler whose queues are plain lists."""

    max_running_requests = 8
    num_chunked_tokens_left = 0

    def __init__(self) -> None:
        self.running: set[Waiting] = set()
        self.waiting: list[Waiting] = [Waiting()]


class Cache:
    def take_events(self) -> list[KVCacheEvent]:
        return []


class EventSink:
    def publish(self, events: EventBatch) -> None: ...

    def idle(self) -> None: ...

    def stats(self) -> PublisherStats:
        return PublisherStats()

    def shutdown(self) -> None: ...


class PoolWithTextSize:
    page_size = "16"
    capacity_tokens = 1024
    used_tokens = 0


class Running:
    """A request of a user's, as the output stream sees it."""

    rid = "a"
    finish_reason: str | None = None
    stream_interval = 1
    num_output_tokens = 2

    def output_since(self, start: int) -> TokenOutput:
        return TokenOutput(token_ids=(7, 8)[start:])


class Outbox:
    def __init__(self) -> None:
        self.batches: list[OutputBatch] = []

    def is_ready(self) -> bool:
        return True

    def send(self, batch: OutputBatch) -> bool:
        self.batches.append(batch)
        return True

    def close(self) -> None: ...


class Register:
    def finish(self, request: Running, reason: FinishReason) -> None: ...


def check_a_users_classes_fit() -> None:
    pool: ports.PoolSource = Pool()
    queues: ports.QueueSource = Queues()
    source: ports.KvEventSource = Cache()
    sink: ports.KvEventSink = EventSink()
    request: StreamedRequest = Running()
    outbox: OutputSink = Outbox()
    register: RequestFinisher[Running] = Register()
    assert (sink.stats(), list(source.take_events()), request.finish_reason) == (PublisherStats(), [], None)
    snapshot = LoadInquirer(parallel=ParallelState.trivial(), queues=queues, pool=pool).get_loads()
    assert (snapshot.num_waiting_reqs, snapshot.num_waiting_uncached_tokens, snapshot.token_usage) == (1, 5, 0.5)
    assert outbox.is_ready()
    assert register


def check_an_output_streamer_takes_a_users_request_and_sink() -> None:
    outbox = Outbox()
    streamer = OutputStreamer(sink=outbox)
    counters: StatsSource[OutputStats] = streamer
    streamer.stream([Running()])
    assert outbox.batches[0].deltas[0].output.token_ids == (7, 8)
    assert counters.stats().tokens_sent == 2


def check_what_does_not_fit_is_refused_by_the_checker() -> None:
    pool: ports.PoolSource = PoolWithTextSize()  # type: ignore[assignment]
    sink: ports.MetricsSink = EventSink()  # type: ignore[assignment]
    assert [type(part).__name__ for part in (pool, sink)] == ["PoolWithTextSize", "EventSink"]


def check_the_kits_own_parts_fit() -> None:
    cache = RadixCache(page_size=16, capacity_tokens=1024, record=True)
    pool: ports.PoolSource = cache
    source: ports.KvEventSource = cache
    sink: ports.KvEventSink = NullEventPublisher()
    counters: StatsSource[PublisherStats] = NullEventPublisher()
    rates: ports.RateSource = RateMeter()
    work = WorkCounters()
    load: ports.LoadSource = LoadInquirer(parallel=ParallelState.trivial(), queues=Queues(), pool=pool, work=work)
    metrics: tuple[ports.MetricsSink, ...] = (PrometheusSink(CollectorRegistry()), LogSink())
    store: ports.PageStore = MemoryPageStore(1024)
    for each in metrics:
        each.record(SchedulerStats(labels=(), load=load.get_loads()))
    assert isinstance(load.get_loads(), LoadSnapshot)
    assert (sink.stats(), list(source.take_events()), rates.gen_throughput) == (counters.stats(), [], 0.0)
    assert store.batch_exists(["a"]) == 0


def check_a_store_of_a_users_fits_without_a_base() -> None:
    class Store:
        def batch_exists(self, keys: Sequence[str]) -> int:
            return 0

        def batch_get(self, keys: Sequence[str]) -> list[bytes | None]:
            return [None for _ in keys]

        def batch_set(self, keys: Sequence[str], pages: Sequence[ports.PageBytes]) -> list[bool]:
            return [False for _ in keys]

        def delete(self, keys: Sequence[str]) -> int:
            return 0

        def close(self) -> None: ...

    store: ports.PageStore = Store()
    keys = KeySpace(
        model="m", dtype="bf16", page_size=16, layout="page_first", placement=Placement(),
        parallel=ParallelState.trivial(),
    )  # fmt: skip
    assert store.batch_get([keys.key(bytes(32))]) == [None]
