"""AdmissionBudget: what limits a batch besides queues and pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.dp_attn import DpBatchSync
from scheduler_components.dynamic_chunk_sizer import DynamicChunkSizer, FirstTokenPredictor
from scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.ports import ComputeGate, NullComputeGate
from scheduler_components.reference.device.device import ScheduledBatch
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.values import BatchingStats

__all__ = ["AdmissionBudget"]


@dataclass(slots=True, kw_only=True)
class AdmissionBudget:
    """The limits of a batch that do not depend on queues and pages.

    Attributes:
        gate: says whether control requests allow to admit and to compute requests.
        dp: exchange with the other replicas under DP attention; by default there are none.
        new_token_ratio: share of a request's possible output that an admission reserves now.
        chunk_sizer: limits the length of the next chunk of a prompt.
        forecast: predicts times to first token; no decision depends on it.
    """

    gate: ComputeGate = field(default_factory=NullComputeGate)
    dp: DpBatchSync = field(default_factory=DpBatchSync)
    new_token_ratio: NewTokenRatioTracker = field(default_factory=NewTokenRatioTracker)
    chunk_sizer: DynamicChunkSizer = field(default_factory=DynamicChunkSizer)
    forecast: FirstTokenPredictor = field(init=False)

    def __post_init__(self) -> None:
        self.forecast = FirstTokenPredictor(fit=self.chunk_sizer.fit)

    @property
    def can_admit(self) -> bool:
        """True if requests may be admitted now."""
        return self.gate.can_admit and self.dp.last.may_prefill

    def observe_prefill(self, batch: ScheduledBatch[Request], busy_s: float) -> None:
        """Record how long a batch with prefills took, for the length of later chunks."""
        pairs = sum(chunk.end**2 - chunk.start**2 for chunk in batch.chunks if chunk.is_prefill)
        self.chunk_sizer.fit.observe(batch.num_prefill_tokens, pairs, busy_s)

    def on_first_tokens(self, batch: ScheduledBatch[Request]) -> None:
        """Record the requests of a batch that have received their first token."""
        for chunk in batch.chunks:
            if chunk.is_prefill and chunk.request.num_output_tokens == 1:
                self.forecast.on_first_token(chunk.request.rid)

    def on_finished(self, request: Request) -> None:
        """Record the end of a request, which may have come with its first token."""
        if request.num_output_tokens:
            self.forecast.on_first_token(request.rid)
        else:
            self.forecast.discard(request.rid)

    def stats(self) -> BatchingStats:
        """Return the current counters."""
        dp, forecast = self.dp.stats, self.forecast
        return BatchingStats(
            self.new_token_ratio.current,
            forecast.num_observed,
            forecast.error_s(0.5),
            forecast.error_s(0.9),
            dp.steps,
            dp.idle_batches,
            dp.eager_steps,
            dp.padded_tokens,
            dp.prefills_delayed,
            dp.prefills_forced,
        )
