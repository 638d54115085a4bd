"""RequestBook: what the requests of a scheduler live through, counted and timed. Nothing is decided by it."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.finish import FinishReason
from scheduler_components.metrics.request_latencies import RequestLatencies
from scheduler_components.metrics.request_times import RequestTimeStats
from scheduler_components.metrics.rolling import RateMeter
from scheduler_components.metrics.stats import SchedulerTotals
from scheduler_components.reference.cache_tiers import CacheTiers
from scheduler_components.reference.request import Request
from scheduler_components.reference.totals import RunningTotals

__all__ = ["RequestBook"]


@dataclass(slots=True, kw_only=True)
class RequestBook:
    """Told of every turn in a request's life; a ``ResultObserver`` and a ``TotalsSource``.

    Attributes:
        counters: what only grows.
        rates: throughput and hit rate over the recent window.
        latencies: histograms of times.
        tiers: count their own work.
    """

    counters: RunningTotals
    rates: RateMeter
    latencies: RequestLatencies
    tiers: CacheTiers

    def queued(self, request: Request) -> None:
        """A new request waits."""
        request.times = self.latencies.queued()
        self.counters.num_requests += 1

    def admitted(self, request: Request) -> None:
        """A request runs. After a retraction its prompt does not count again: its own pages would pass for a hit."""
        self.latencies.admitted(_times(request))
        if not request.num_retractions:
            self.counters.prompt_tokens += request.num_prompt_tokens
            self.counters.cached_tokens += request.num_cached_tokens
            self.rates.observe_prefill(request.num_prompt_tokens, request.num_cached_tokens)

    def retracted(self, request: Request) -> None:
        """A request had to give its pages away and waits again."""
        self.latencies.retracted(_times(request))
        self.counters.num_retractions += 1

    def generated(self, request: Request, num_tokens: int) -> None:
        """A step gave a request tokens."""
        self.latencies.took_tokens(_times(request), num_tokens)
        self.counters.generation_tokens += num_tokens
        self.rates.observe_decode(num_tokens)

    def ended(self, request: Request, reason: FinishReason) -> None:
        """A request is over."""
        self.latencies.ended(_times(request))
        if reason is FinishReason.ABORT:
            self.counters.num_aborted_requests += 1

    def totals(self) -> SchedulerTotals:
        """Return the counters and histograms of this moment."""
        return self.counters.totals(self.latencies.totals(), self.tiers.stats())


def _times(request: Request) -> RequestTimeStats:
    assert request.times is not None, f"{request!r} was never queued"
    return request.times
