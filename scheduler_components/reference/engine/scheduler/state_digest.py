"""StateDigest: a checksum of a scheduler's decisions, by which the ranks of a replica detect a divergence."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from zlib import crc32

from scheduler_components.reference.engine.scheduler.cache_tiers import CacheTiers
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.values import ScheduledBatch

__all__ = ["StateDigest"]


@dataclass(slots=True, kw_only=True)
class StateDigest:
    """A 32-bit CRC of all decisions and results. Ranks that made the same calls have equal digests.

    Attributes:
        value: the digest.
        num_steps: number of steps in it.
    """

    value: int = 0
    num_steps: int = 0

    def add(self, *numbers: int) -> None:
        """Add signed 64-bit numbers."""
        self.value = crc32(array("q", numbers).tobytes(), self.value)

    def add_step(self, batch: ScheduledBatch[Request], num_updated_requests: int, tiers: CacheTiers) -> None:
        """Add a step: the chunk, last token and last page of each request of the batch, and the state of the cache."""
        self.num_steps += 1
        numbers = [self.num_steps, batch.num_admitted, batch.num_retracted]
        for chunk in batch.chunks:
            request = chunk.request
            numbers += (request.arrival, chunk.start, chunk.end, request.token_ids[-1])
            numbers.append(request.pages[-1] if request.pages else -1)
        numbers += (shape.num_tokens for shape in batch.replicas)
        cache = tiers.cache
        numbers += (num_updated_requests, cache.used_tokens, cache.free_tokens, cache.evictable_tokens)
        self.add(*numbers, tiers.state_digest - 2**63)
