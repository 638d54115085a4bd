"""Compose a scheduler: one builder per path, with every collaborator given at construction.

    RequestKvCache(cache=..., tiers=...)        the pages of requests
    compose_batcher(kv_cache, limits, ...)      queues, policies and batcher: what is computed next
    WaitingPath(batcher=..., rooms=...)         what requests wait for besides pages, and how long
    compose_checks(pool, cache, ...)            what verifies the pools between steps
    compose_reports(load, ...)                  what publishes events, load and statistics

An engine, a simulation in virtual time, a session of the checks and vLLM's ``ComponentScheduler`` differ in clocks,
devices, request classes, and in the paths that they have. The builders and the parts are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from scheduler_components.batch_result_processor import NullResultObserver
from scheduler_components.batcher import BatchConditions, Batcher, BatchObserver, KvAllocator
from scheduler_components.checks.allocation_log import AllocationLog
from scheduler_components.checks.pool_stats_observer import AuditedPool, PoolStatsObserver
from scheduler_components.invariant_checker import CheckPolicy, PoolInvariantChecker, PublishedBlocks
from scheduler_components.kv_events import NullEventPublisher
from scheduler_components.kv_events_publisher import SchedulerKvEventsPublisher
from scheduler_components.load_inquirer import LoadInquirer
from scheduler_components.metrics_emitter import MetricsEmitter
from scheduler_components.ports import (
    AllocationSink,
    BatchedRequest,
    DecisionSink,
    KvEventSink,
    KvEventSource,
    MetricsSink,
    NullAllocationSink,
    NullDecisionLog,
    NullMetricsSink,
    NullOutputSink,
    NullReportSink,
    NullSpanSink,
    OutputSink,
    ReportSink,
    SpanSink,
    StatsSource,
)
from scheduler_components.scheduling.admission_budget import BatchLimits
from scheduler_components.scheduling.preemption_policy import make_preemption_policy
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.scheduling.scheduling_policy import make_policy
from scheduler_components.values import FinishReason, ForwardPassMetrics, KvMetrics
from scheduler_components.waiting.agreed_queue import DepartureReason, WaitingRooms
from scheduler_components.waiting.held_request import HeldRequest
from scheduler_components.waiting.request_deadlines import RequestDeadlines, TimedRequest
from scheduler_components.watchdog import StepProgress

if TYPE_CHECKING:
    from scheduler_components.cache import BlockTableCache, RadixCache
    from scheduler_components.hicache import HiRadixCache

__all__ = [
    "Clocks",
    "PoolChecks",
    "SchedulerSinks",
    "WaitingPath",
    "compose_batcher",
    "compose_checks",
    "compose_reports",
    "note_step",
]

R = TypeVar("R", bound=BatchedRequest)

_FINISH_REASONS: dict[DepartureReason, FinishReason] = {
    "failed": FinishReason.REFUSED,
    "error": FinishReason.ERROR,
    "expired": FinishReason.QUEUE_TIMEOUT,
}


@dataclass(slots=True, kw_only=True, frozen=True)
class Clocks:
    """Sources of time.

    Attributes:
        wall: seconds since the epoch, for time stamps.
        monotonic: seconds since any origin, for rates and latencies.
    """

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


@dataclass(slots=True, kw_only=True)
class SchedulerSinks:
    """The sinks of a scheduler. Its ``close`` closes all but ``metrics``.

    Attributes:
        events: KV events; made by ``open_event_publisher``.
        outputs: tokens of requests.
        metrics: statistics of each step; its owner closes it.
        kv_metrics: ``KvMetrics``: request slots and KV blocks.
        forward_passes: what each batch was.
        spans: the spans of ended requests.
        worker_id, model_name: names of the engine and of its model for the readers of these two.
    """

    events: KvEventSink = field(default_factory=NullEventPublisher)
    outputs: OutputSink = field(default_factory=NullOutputSink)
    metrics: MetricsSink = field(default_factory=NullMetricsSink)
    kv_metrics: ReportSink[KvMetrics] | None = None
    forward_passes: ReportSink[ForwardPassMetrics] = field(default_factory=NullReportSink)
    spans: SpanSink = field(default_factory=NullSpanSink)
    worker_id: str = ""
    model_name: str = ""


def compose_batcher(
    kv_cache: KvAllocator[R],
    limits: BatchLimits,
    *,
    schedule_policy: str = "fcfs",
    preemption_policy: str = "latest-arrival",
    conditions: BatchConditions | None = None,
    observer: BatchObserver[R] | None = None,
    decisions: DecisionSink | None = None,
) -> Batcher[R]:
    """Compose the path of requests: empty queues, the policies of these names, and the batcher over both.

    Args:
        kv_cache: the path of pages.
        limits: sizes of a batch; its ``max_running_requests`` is the number of slots.
        schedule_policy, preemption_policy: names that ``make_policy`` and ``make_preemption_policy`` take.
        conditions, observer, decisions: as in ``Batcher``.

    Raises:
        ConfigError: there is no policy of this name.
    """
    return Batcher[R](
        limits=limits,
        queues=RequestQueues[R](max_running_requests=limits.max_running_requests),
        kv_cache=kv_cache,
        policy=make_policy(schedule_policy, match_length=kv_cache.match_length),
        preemption=make_preemption_policy(preemption_policy),
        conditions=conditions or BatchConditions(),
        observer=observer or NullResultObserver(),
        decisions=decisions or NullDecisionLog(),
    )


class PreparedRequest(BatchedRequest, HeldRequest, TimedRequest, Protocol):
    """A request that waits in rooms and is batched then: the kit's ``Request``, with the grammar of an engine's."""


H = TypeVar("H", bound=PreparedRequest)


@dataclass(slots=True, kw_only=True)
class WaitingPath(Generic[H]):
    """What requests wait for besides pages, and how long. It is the ``RequestFinisher`` of a scheduler with rooms.

    Attributes:
        batcher: has the queues.
        rooms: what prepares grammars and adapters.
        deadlines: ends requests that wait or take too long.
    """

    batcher: Batcher[H]
    rooms: WaitingRooms[H] = field(default_factory=WaitingRooms)
    deadlines: RequestDeadlines[H] = field(default_factory=RequestDeadlines)

    def add(self, request: H, *, must_wait: bool) -> None:
        """Queue a request that has entered the rooms. ``must_wait`` is what ``rooms.enter`` returned."""
        if must_wait:
            self.batcher.hold(request)
        else:
            self.batcher.add(request)
        self.deadlines.add(request)

    def pop_ended(self, now_s: float) -> Iterator[tuple[H, FinishReason, str]]:
        """Queue the requests that have left all rooms. Yield those that failed or took too long, for the caller to end.

        Args:
            now_s: the agreed time of this step.
        """
        for departure in self.rooms.pop_departures():
            if departure.reason == "ready":
                self.batcher.release(departure.item)
            else:
                yield departure.item, _FINISH_REASONS[departure.reason], departure.problem
        yield from self.deadlines.pop_expired(now_s)

    def finish(self, request: H, reason: FinishReason) -> None:
        """Remove a waiting or running request, free its slot, and set its ``finish_reason``."""
        self.batcher.finish(request, reason)
        self.rooms.end(request)
        self.deadlines.discard(request)


@dataclass(slots=True, kw_only=True)
class PoolChecks:
    """The checks of one scheduler.

    Attributes:
        checker: checks the pools every few steps.
        allocation_log: records which request allocates and frees which pages.
        events: source of the publisher: the cache, or a wrapper that also follows the events.
        pools: measures how full the pools are.
        progress: the current step and its phase, which the watchdog reads.
    """

    checker: PoolInvariantChecker
    allocation_log: AllocationSink
    events: KvEventSource
    pools: PoolStatsObserver
    progress: StepProgress


def compose_checks(
    pool: AuditedPool,
    cache: RadixCache | HiRadixCache | BlockTableCache,
    policy: CheckPolicy,
    *,
    more_pools: Sequence[AuditedPool] = (),
    progress: StepProgress | None = None,
    log: AllocationLog | None = None,
    follows_events: bool = False,
) -> PoolChecks:
    """Compose what verifies the pools of a scheduler between steps.

    Args:
        pool: the KV pages.
        cache: has them, and records the events.
        policy: how often to check, and how to report.
        more_pools: request slots, and the pools of lower tiers.
        progress: the step and its phase.
        log: the allocation log of ``RequestKvCache``.
        follows_events: compare the blocks that the events add up to with those in the cache.
    """
    progress = progress or StepProgress()
    published = PublishedBlocks(source=cache) if follows_events else None
    checker = PoolInvariantChecker(
        pools=(pool, *more_pools),
        policy=policy,
        progress=progress,
        log=log,
        published=published,
        cached=cache if follows_events else None,
    )
    pools = PoolStatsObserver(pools=(pool,), page_size=cache.page_size)
    return PoolChecks(
        checker=checker,
        allocation_log=NullAllocationSink() if log is None else log,
        events=published or cache,
        pools=pools,
        progress=progress,
    )


def compose_reports(
    load: LoadInquirer,
    events: KvEventSource,
    sinks: SchedulerSinks,
    sources: Mapping[str, StatsSource[object]] | None = None,
) -> tuple[SchedulerKvEventsPublisher, MetricsEmitter]:
    """Compose what reports events and statistics. It reads the other parts and decides nothing.

    Args:
        load: how busy the scheduler is; it has the rank and the clock of the others, too.
        events: the cache, or ``PoolChecks.events``.
        sinks: where reports go.
        sources: statistics besides those of the publisher.
    """
    parallel = load.parallel
    kv_events = SchedulerKvEventsPublisher(
        parallel=parallel,
        source=events,
        sink=sinks.events,
        load=load,
        metrics_sink=sinks.kv_metrics,
        clock=load.clock,
    )
    all_sources: dict[str, StatsSource[object]] = {"publisher": kv_events, **(sources or {})}
    return kv_events, MetricsEmitter(parallel=parallel, load=load, sink=sinks.metrics, sources=all_sources)


def note_step(
    decisions: DecisionSink,
    num_updated: int,
    computed: Sequence[BatchedRequest],
    cache: RadixCache | HiRadixCache,
    transfers: tuple[int, int] = (0, 0),
    shapes: Sequence[int] = (),
) -> None:
    """Note what the components of a scheduler cannot: which tokens a step returned, and the pages that it left.

    Args:
        decisions: the log that the components note in, too.
        num_updated: requests that got tokens or ended.
        computed: requests of the batch, with the tokens of this step.
        cache: after the step.
        transfers: number of transfers under way, and a digest of which page is on which tier.
        shapes: tokens of the batch of each replica under DP attention.
    """
    decisions.note("result", num_updated, *[request.token_ids[-1] for request in computed])
    if shapes:
        decisions.note("replicas", *shapes)
    decisions.note("state", cache.used_tokens, cache.free_tokens, cache.evictable_tokens, *transfers)
