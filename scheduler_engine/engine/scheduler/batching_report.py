"""BatchingReport: how batches are composed, as statistics."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.batcher import Batcher
from scheduler_components.values import BatchingStats
from scheduler_engine.engine.scheduler.request import Request
from scheduler_engine.engine.scheduler.request_metrics import RequestMetrics

__all__ = ["BatchingReport"]

_PREEMPTION_POLICIES = ("LatestArrival", "LeastRecomputation", "LowestPriority", "LongestRemaining")


@dataclass(slots=True, kw_only=True)
class BatchingReport:
    """The ``StatsSource`` of ``BatchingStats``.

    Attributes:
        batcher: counts refusals and preemptions.
        request_metrics: forecasts and waits.
    """

    batcher: Batcher[Request]
    request_metrics: RequestMetrics

    def stats(self) -> BatchingStats:
        """Return the current counters."""
        batcher, waits = self.batcher, self.request_metrics.waits
        dp, predictor = batcher.conditions.dp.stats, self.request_metrics.forecast.predictor
        refusals, preemptions = batcher.refusals, batcher.preemptions
        by_policy = [preemptions.get(name, 0) for name in _PREEMPTION_POLICIES]
        return BatchingStats(
            new_token_ratio=batcher.conditions.new_token_ratio.current,
            first_tokens_predicted=predictor.num_observed,
            first_token_error_p50_s=predictor.error_s(0.5),
            first_token_error_p90_s=predictor.error_s(0.9),
            dp_steps=dp.steps,
            dp_idle_batches=dp.idle_batches,
            dp_eager_steps=dp.eager_steps,
            dp_padded_tokens=dp.padded_tokens,
            dp_prefills_delayed=dp.prefills_delayed,
            dp_prefills_forced=dp.prefills_forced,
            refused_tokens=refusals.get("tokens", 0),
            refused_slots=refusals.get("slots", 0),
            refused_pages=refusals.get("pages", 0),
            refused_watermark=refusals.get("watermark", 0),
            refused_tenant=refusals.get("tenant", 0),
            refused_not_ready=refusals.get("not_ready", 0),
            preempted_latest_arrival=by_policy[0],
            preempted_least_recomputation=by_policy[1],
            preempted_lowest_priority=by_policy[2],
            preempted_longest_remaining=by_policy[3],
            preempted_other=sum(preemptions.values()) - sum(by_policy),
            policies_replaced=batcher.num_replaced_policies,
            admitted_high=waits.num_requests[0],
            admitted_normal=waits.num_requests[1],
            admitted_low=waits.num_requests[2],
            waited_high_s=waits.total_s[0],
            waited_normal_s=waits.total_s[1],
            waited_low_s=waits.total_s[2],
        )
