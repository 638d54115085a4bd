"""What decides over a batch beside queues and pages, and what is known of how batches were made."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components import BatchingStats
from scheduler_components.dp_attn import DpBatchSync
from scheduler_components.dynamic_chunk_sizer import DynamicChunkSizer, FirstTokenPredictor
from scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.ports import ComputeGate, NullComputeGate
from scheduler_components.reference.device.device import ScheduledBatch
from scheduler_components.reference.engine.scheduler.request import Request

__all__ = ["AdmissionBudget"]


@dataclass(slots=True, kw_only=True)
class AdmissionBudget:
    """Who else has a say in a batch.

    Attributes:
        gate: orders: whether requests may be admitted, and go on.
        dp: the other replicas of an engine with DP attention; by default this one is alone.
        new_token_ratio: share of possible output that an admission reserves now.
        chunk_sizer: how long the next chunk of a prompt may be.
        forecast: when first tokens will come; decides nothing.
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
        """Requests may be admitted now."""
        return self.gate.can_admit and self.dp.last.may_prefill

    def observe_prefill(self, batch: ScheduledBatch[Request], busy_s: float) -> None:
        """A batch with prefills took so long."""
        pairs = sum(work.end**2 - work.start**2 for work in batch.works if work.is_prefill)
        self.chunk_sizer.fit.observe(batch.num_prefill_tokens, pairs, busy_s)

    def on_first_tokens(self, batch: ScheduledBatch[Request]) -> None:
        """Requests have got the tokens of a batch: some of them their first."""
        for work in batch.works:
            if work.is_prefill and work.request.num_output_tokens == 1:
                self.forecast.on_first_token(work.request.rid)

    def ended(self, request: Request) -> None:
        """A request is over; one that got its only token with its end has got its first."""
        if request.num_output_tokens:
            self.forecast.on_first_token(request.rid)
        else:
            self.forecast.discard(request.rid)

    def stats(self) -> BatchingStats:
        """Return the counts of this moment."""
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
