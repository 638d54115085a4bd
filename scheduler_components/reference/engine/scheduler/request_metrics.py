"""What the requests of a scheduler go through, counted and timed. Nothing is decided by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from scheduler_components import FinishReason, LatencySnapshot, SchedulerTotals, TierStats, WorkCounters
from scheduler_components.metrics import RateMeter, RequestLatencyRecorder, RequestTimeStats
from scheduler_components.ports import NullQuiesceStatsSource, QuiesceStatsSource
from scheduler_components.reference.device.device import ScheduledBatch
from scheduler_components.reference.engine.scheduler.admission_budget import AdmissionBudget
from scheduler_components.reference.engine.scheduler.cache_tiers import CacheTiers
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.values import ReceiverStats

__all__ = [
    "SchedulerCounters",
    "RequestMetrics",
]


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Counters that only grow: whoever does the thing counts it here.

    Attributes:
        num_requests: accepted by ``submit``.
        num_aborted_requests: of them, ended by ``abort``.
        num_retractions: times a request lost its pages.
        prompt_tokens, cached_tokens: prompts at their first admission, and what of them the cache covered. A
            prefill after a retraction does not count again: its own pages, found again, would look like a hit.
        generation_tokens: tokens given to requests.
        evicted_tokens: cached tokens that made room.
    """

    num_requests: int = 0
    num_aborted_requests: int = 0
    num_retractions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    evicted_tokens: int = 0

    def totals(
        self,
        latencies: LatencySnapshot,
        tiers: TierStats | None,
        preemptions_per_s: float = 0.0,
        intake: ReceiverStats | None = None,
    ) -> SchedulerTotals:
        """Return the counters of this moment, with the others beside them."""
        return SchedulerTotals(
            num_requests_total=self.num_requests,
            num_aborted_requests_total=self.num_aborted_requests,
            num_retractions_total=self.num_retractions,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            generation_tokens_total=self.generation_tokens,
            evicted_tokens_total=self.evicted_tokens,
            preemptions_per_s=preemptions_per_s,
            latencies=latencies,
            tiers=tiers,
            intake=intake,
        )


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Told of every change in a request's life; a ``ResultObserver`` and a ``TotalsSource``.

    Attributes:
        tiers: count their own work.
        clock: monotonic seconds, for rates and the times of requests.
        counters: what only grows.
        work: what load reports say of work done, and of requests taken in from dispatchers.
        rates: throughput and hit rate over the recent window.
        latencies: histograms of times.
        intake: what the rank's intake counts.
        quiesce: what was ordered.
        terms: what is known of how batches are made.
    """

    tiers: CacheTiers
    clock: Callable[[], float] = time.monotonic
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    work: WorkCounters = field(default_factory=WorkCounters)
    quiesce: QuiesceStatsSource = field(default_factory=NullQuiesceStatsSource)
    budget: AdmissionBudget = field(default_factory=AdmissionBudget)
    rates: RateMeter = field(init=False)
    latencies: RequestLatencyRecorder = field(init=False)
    intake: ReceiverStats = field(default_factory=ReceiverStats)

    def __post_init__(self) -> None:
        self.rates = RateMeter(clock=self.clock)
        self.latencies = RequestLatencyRecorder(clock=self.clock)

    def on_queued(self, request: Request) -> None:
        """A new request waits."""
        request.times = self.latencies.on_queued()
        self.counters.num_requests += 1

    def on_admitted(self, request: Request) -> None:
        """A request runs. After a retraction its prompt does not count again: its own pages would look like a hit."""
        self.latencies.on_admitted(_times(request))
        if not request.num_retractions:
            self.counters.prompt_tokens += request.num_prompt_tokens
            self.counters.cached_tokens += request.num_cached_tokens
            self.rates.observe_prefill(request.num_prompt_tokens, request.num_cached_tokens)

    def on_retracted(self, request: Request) -> None:
        """A request lost its pages to others and waits again."""
        self.latencies.on_retracted(_times(request))
        self.counters.num_retractions += 1
        self.rates.observe_preemption()

    def on_batch_computed(self, batch: ScheduledBatch[Request], *, begun_s: float) -> None:
        """The device has computed a batch that began at ``begun_s``."""
        busy_s = self.clock() - begun_s
        if batch.num_prefill_tokens:
            self.work.record_prefill(batch.num_prefill_tokens, busy_s)
            self.budget.observe_prefill(batch, busy_s)
        else:
            self.work.record_decode(batch.num_decode_tokens, busy_s, batch.num_decode_tokens)

    def on_tokens(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> None:
        """A step gave each of these requests tokens."""
        times = [request.times for request in requests]  # all were queued: to look at each again costs a third of this
        self.latencies.on_batch_tokens(cast("list[RequestTimeStats]", times), num_tokens)
        num_all_tokens = sum(num_tokens)
        self.counters.generation_tokens += num_all_tokens
        self.rates.observe_decode(num_all_tokens)

    def on_finished(self, request: Request, reason: FinishReason) -> None:
        """A request is over."""
        self.latencies.on_finished(_times(request))
        self.budget.ended(request)
        if reason is FinishReason.ABORT:
            self.counters.num_aborted_requests += 1

    def totals(self) -> SchedulerTotals:
        """Return the counters and histograms of this moment."""
        totals = self.counters.totals(
            self.latencies.snapshot(), self.tiers.stats(), self.rates.preemptions_per_s, self.intake.copy()
        )
        return msgspec.structs.replace(totals, quiesce=self.quiesce.stats(), batching=self.budget.stats())


def _times(request: Request) -> RequestTimeStats:
    assert request.times is not None, f"{request!r} was never queued"
    return request.times
