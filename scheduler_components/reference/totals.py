"""What a scheduler has done since it started."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.hicache.tier_stats import TierStats
from scheduler_components.metrics.request_latencies import LatencyTotals
from scheduler_components.metrics.stats import SchedulerTotals

__all__ = ["RunningTotals"]


@dataclass(slots=True, kw_only=True)
class RunningTotals:
    """Counters that only grow: whoever does the thing counts it here.

    Attributes:
        num_requests: accepted by ``submit``.
        num_aborted_requests: of them, ended by ``abort``.
        num_retractions: times a request lost its pages.
        prompt_tokens, cached_tokens: prompts at their first admission, and what of them the cache covered. A
            prefill after a retraction does not count again: its own pages, found again, would pass for a hit.
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

    def totals(self, latencies: LatencyTotals, tiers: TierStats | None) -> SchedulerTotals:
        """Return the counters of this moment, with ``latencies`` and ``tiers`` beside them."""
        return SchedulerTotals(
            num_requests_total=self.num_requests,
            num_aborted_requests_total=self.num_aborted_requests,
            num_retractions_total=self.num_retractions,
            prompt_tokens_total=self.prompt_tokens,
            cached_tokens_total=self.cached_tokens,
            generation_tokens_total=self.generation_tokens,
            evicted_tokens_total=self.evicted_tokens,
            latencies=latencies,
            tiers=tiers,
        )
