"""A scheduler made of mixins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from observability.prometheus_sink import PrometheusSink
from scheduler_components.cache.radix_cache import RadixCache
from scheduler_components.kv_events.publisher import EventPublisher
from scheduler_components.kv_events.registry import open_event_publisher
from scheduler_components.metrics.rolling import RateMeter
from scheduler_components.parallel_state import ParallelState
from serving_parts.batching import Counters, Settings, check_fits, next_batch, next_tokens, release
from serving_parts.request import Output, Request, Totals
from serving_parts.surroundings import PublisherFactory, Surroundings

from .kv_events import KvEventsMixin
from .load import LoadMixin
from .metrics import MetricsMixin
from .results import OutputMixin


class Scheduler(KvEventsMixin, LoadMixin, MetricsMixin, OutputMixin):
    """Serves requests in steps."""

    def __init__(
        self,
        *,
        settings: Settings,
        parallel: ParallelState,
        clock: Callable[[], float],
        event_publisher: EventPublisher,
        metrics_collector: PrometheusSink,
        send_output: Callable,
    ) -> None:
        self.settings = settings
        self.parallel = parallel
        self.clock = clock
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.totals = Totals()
        self.rates = RateMeter(clock=self.clock)
        self.cache = RadixCache(
            page_size=self.settings.page_size,
            capacity_tokens=self.settings.kv_tokens,
            record=self.parallel.owns_kv_stream,
        )
        self.init_kv_events(event_publisher)
        self.init_load()
        self.init_metrics(metrics_collector)
        self.init_output(send_output)

    @property
    def num_chunked_tokens_left(self) -> int:
        return sum(request.num_prefill_tokens_left for request in self.running)

    def submit(self, request: Request) -> None:
        check_fits(request, self.settings)
        request.num_cached_tokens = self.cache.match_prefix(request.token_ids[:-1]).num_tokens
        self.waiting.append(request)
        self.totals.num_requests += 1

    def abort(self, rid: str) -> bool:
        request = next((each for each in [*self.running, *self.waiting] if each.rid == rid), None)
        if request is None:
            return False
        if request in self.waiting:
            self.waiting.remove(request)
        self.running = [each for each in self.running if each is not request]
        release(self.cache, request)
        self.totals.num_aborted += 1
        self.send_output(Output(rid, (), "abort"))
        return True

    def step(self) -> None:
        counters = Counters(self.totals, self.rates)
        batch = next_batch(self.cache, self.waiting, self.running, self.settings, counters)
        self.running = batch.running
        self.process_batch_result(batch, next_tokens(batch, self.settings))
        self.publish_kv_events()
        self.emit_metrics()

    def close(self) -> None:
        self.close_kv_events()


def open_scheduler(around: Surroundings) -> Scheduler:
    """Open what has to be opened, then make the scheduler."""
    settings, parallel = around.settings, around.parallel
    return Scheduler(
        settings=settings,
        parallel=parallel,
        clock=around.clock,
        event_publisher=open_event_publisher(settings.kv_events, parallel=parallel, factory=PublisherFactory),
        metrics_collector=PrometheusSink(around.registry, clock=around.clock),
        send_output=around.outbox.send,
    )
