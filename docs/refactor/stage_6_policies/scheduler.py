"""A scheduler composed of the kit's components and one of its own. Policies decide which request is next."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from observability import PrometheusSink
from scheduler_components import (
    LiveStats,
    LoadInquirer,
    MetricsEmitter,
    ParallelState,
    RadixCache,
    SchedulerKvEventsPublisher,
    TokenCountedQueue,
)
from scheduler_components.kv_events import open_event_publisher
from scheduler_components.metrics import RateMeter
from scheduler_components.ports import KvEventSink, MetricsSink
from scheduler_components.scheduling.preemption_policy import LatestArrival
from scheduler_components.scheduling.scheduling_policy import FirstComeFirstServed
from scheduler_components.values import LoadSnapshot, SchedulerCounters
from serving_parts.batching import (
    Batch,
    Counters,
    Settings,
    Work,
    admit,
    advance,
    check_fits,
    next_tokens,
    release,
    retract,
)
from serving_parts.request import Output, Request
from serving_parts.surroundings import PublisherFactory, Surroundings

from .policies import Policies, as_chunk
from .results import OutputSink, Results


class Scheduler:
    """Serves requests in steps."""

    def __init__(
        self,
        *,
        settings: Settings,
        parallel: ParallelState,
        clock: Callable[[], float],
        event_sink: KvEventSink,
        metrics_sink: MetricsSink,
        outputs: OutputSink,
        policies: Policies,
    ) -> None:
        self.settings = settings
        self.policies = policies
        self.num_steps = 0
        self.max_running_requests = settings.max_running_requests
        self.waiting: TokenCountedQueue[Request] = TokenCountedQueue()
        self.running: list[Request] = []
        self.totals = SchedulerCounters()
        self.rates = RateMeter(clock=clock)
        self.cache = RadixCache(
            page_size=settings.page_size,
            capacity_tokens=settings.kv_tokens,
            record=parallel.owns_kv_stream,
        )
        self.kv_events = SchedulerKvEventsPublisher(
            parallel=parallel,
            clock=clock,
            source=self.cache,
            sink=event_sink,
        )
        self.load = LoadInquirer(
            parallel=parallel,
            clock=clock,
            queues=self,
            pool=self.cache,
            rates=self.rates,
        )
        self.metrics = MetricsEmitter(
            parallel=parallel,
            sink=metrics_sink,
            load=self.load,
            sources={"counters": LiveStats(self.totals), "publisher": self.kv_events},
            counters_interval_steps=1,  # as in the scheduler's own metrics
        )
        self.results = Results(
            cache=self.cache,
            totals=self.totals,
            rates=self.rates,
            eos_token_id=settings.eos_token_id,
            outputs=outputs,
        )

    @property
    def num_chunked_tokens_left(self) -> int:
        return sum(request.num_prefill_tokens_left for request in self.running)

    def submit(self, request: Request) -> None:
        check_fits(request, self.settings)
        request.num_cached_tokens = self.cache.match_prefix(request.token_ids[:-1]).num_tokens
        request.arrival = self.totals.num_requests_total
        self.waiting.append(request)
        self.policies.scheduling.add(request, self.num_steps)
        self.totals.num_requests_total += 1

    def abort(self, rid: str) -> bool:
        request = next((each for each in [*self.running, *self.waiting] if each.rid == rid), None)
        if request is None:
            return False
        if request in self.waiting:
            self.waiting.remove(request)
            self.policies.scheduling.discard(request)
        self.running = [each for each in self.running if each is not request]
        release(self.cache, request)
        self.totals.num_aborted_requests_total += 1
        self.results.outputs.send(Output(rid, (), "abort"))
        return True

    def next_batch(self) -> Batch:
        """Advance all running requests, retract some if pages run out, then admit waiting ones by policy."""
        counters = Counters(self.totals, self.rates)
        works: list[Work] = []
        staying = list(self.running)
        while len(works) < len(staying):
            work = advance(self.cache, staying[len(works)], self.settings)
            if work is not None:
                works.append(work)
                continue
            victim = self.policies.preemption.select_victim(staying[1:] or staying)
            staying.remove(victim)
            works = [work for work in works if work.request is not victim]
            retract(self.cache, victim, counters)
            self.waiting.appendleft(victim)
            self.policies.scheduling.add(victim, self.num_steps)
        if len(staying) >= len(self.running):  # no admission in a step that retracts
            for request in self.policies.scheduling.order(self.num_steps):
                if len(works) == self.settings.max_running_requests:
                    break
                work = admit(self.cache, request, self.settings, counters)
                if work is None:
                    break
                self.waiting.remove(request)
                self.policies.scheduling.discard(request)
                works.append(work)
        return Batch(tuple(works), sorted((work.request for work in works), key=attrgetter("arrival")))

    def step(self) -> None:
        self.num_steps += 1
        batch = self.next_batch()
        if batch.works:
            self.policies.scheduling.on_scheduled([as_chunk(work) for work in batch.works])
        self.running = self.results.process_batch_result(batch, next_tokens(batch, self.settings))
        self.kv_events.publish_kv_events()
        self.metrics.emit()

    def get_load(self) -> LoadSnapshot:
        return self.load.get_loads()

    def close(self) -> None:
        self.kv_events.shutdown()


def open_scheduler(around: Surroundings) -> Scheduler:
    """Open the publisher, then make the scheduler."""
    settings, parallel = around.settings, around.parallel
    return Scheduler(
        settings=settings,
        parallel=parallel,
        clock=around.clock,
        event_sink=open_event_publisher(settings.kv_events, parallel=parallel, factory=PublisherFactory),
        metrics_sink=PrometheusSink(around.registry, clock=around.clock),
        outputs=around.outbox,
        policies=Policies(scheduling=FirstComeFirstServed(), preemption=LatestArrival()),
    )
