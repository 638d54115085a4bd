"""StateDigest: the results and the state of each step, noted in the decision log of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.ports import NullDecisionLog
from scheduler_components.values import ScheduledBatch
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.request import Request

__all__ = ["StateDigest"]


@dataclass(slots=True, kw_only=True)
class StateDigest:
    """Notes what the components of a scheduler cannot: which tokens a step returned, and the pages that it left.

    Attributes:
        decisions: the log that the components of the scheduler note in, too.
        num_steps: number of noted steps.
    """

    decisions: DecisionLog | NullDecisionLog = field(default_factory=DecisionLog)
    num_steps: int = 0

    @property
    def value(self) -> int:
        """32 bits over all decisions, results and states. Ranks that made the same calls have equal digests."""
        return self.decisions.tip % 2**32

    def add_step(self, batch: ScheduledBatch[Request], num_updated_requests: int, tiers: CacheTiers) -> None:
        """Note a step: the last token of each request of the batch, and the state of the cache."""
        self.num_steps += 1
        if not self.decisions.wants_decisions:
            return
        tokens = [chunk.request.token_ids[-1] for chunk in batch.chunks]
        self.decisions.note("result", num_updated_requests, *tokens)
        if batch.replicas:
            self.decisions.note("replicas", *(shape.num_tokens for shape in batch.replicas))
        cache = tiers.cache
        self.decisions.note(
            "state",
            cache.used_tokens,
            cache.free_tokens,
            cache.evictable_tokens,
            tiers.num_operations,
            tiers.state_digest,
        )
