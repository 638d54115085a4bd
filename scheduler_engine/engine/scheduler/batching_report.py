"""BatchingReport: how batches are composed, as statistics."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.batcher import Batcher
from scheduler_components.values import BatchingStats
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.request_metrics import RequestMetrics

_PREEMPTED_BY = {
    "LatestArrival": "preempted_latest_arrival",
    "LeastRecomputation": "preempted_least_recomputation",
    "LowestPriority": "preempted_lowest_priority",
    "LongestRemaining": "preempted_longest_remaining",
}


@dataclass(slots=True, kw_only=True)
class BatchingReport:
    """The ``StatsSource`` of ``BatchingStats``.

    Attributes:
        batcher: counts refusals and preemptions.
        request_metrics: forecasts and waits.
    """

    batcher: Batcher[EngineRequest]
    request_metrics: RequestMetrics

    def stats(self) -> BatchingStats:
        """Return the current counters."""
        batcher, waits, predictor = self.batcher, self.request_metrics.waits, self.request_metrics.predictor
        counts = {f"refused_{reason}": number for reason, number in batcher.refusals.items()}
        for policy, number in batcher.preemptions.items():
            name = _PREEMPTED_BY.get(policy, "preempted_other")
            counts[name] = counts.get(name, 0) + number
        for name in ("steps", "idle_batches", "eager_steps", "padded_tokens", "prefills_delayed", "prefills_forced"):
            counts[f"dp_{name}"] = getattr(batcher.conditions.dp.stats, name)
        return BatchingStats(
            new_token_ratio=batcher.conditions.new_token_ratio.current,
            first_tokens_predicted=predictor.num_observed,
            first_token_error_p50_s=predictor.error_s(0.5),
            first_token_error_p90_s=predictor.error_s(0.9),
            policies_replaced=batcher.num_replaced_policies,
            admitted_high=waits.num_requests[0],
            admitted_normal=waits.num_requests[1],
            admitted_low=waits.num_requests[2],
            waited_high_s=waits.total_s[0],
            waited_normal_s=waits.total_s[1],
            waited_low_s=waits.total_s[2],
            **counts,
        )
