"""The policies of the scheduler, and its work as they read it."""

from __future__ import annotations

import attrs

from scheduler_components.ports import PreemptionPolicy, SchedulingPolicy
from scheduler_components.values import ScheduledChunk
from serving_parts.batching import Work
from serving_parts.request import Request


@attrs.frozen(kw_only=True)
class Policies:
    """Decide which waiting request is next, and which running one is retracted."""

    scheduling: SchedulingPolicy[Request]
    preemption: PreemptionPolicy[Request]


def as_chunk(work: Work) -> ScheduledChunk[Request]:
    """Return the work as a scheduling policy reads it."""
    start = work.request.num_computed_tokens
    return ScheduledChunk(work.request, start, start + work.num_tokens, work.request.num_prefill_tokens_left > 0)
