"""TierStepper: a hierarchical cache's part of a scheduler's step: one agreement, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_components.hicache.hi_radix_cache import HiRadixCache
from scheduler_components.hicache.sync import SyncDomain
from scheduler_components.tier_ports import PageMover

__all__ = ["TierStepper"]


@dataclass(slots=True, kw_only=True)
class TierStepper:
    """Lets a cache, this rank's I/O and the other ranks meet once a step. All on the scheduler's thread.

    Attributes:
        cache: decides.
        domain: agrees; used by nobody else.
        mover: moves pages.
        clock: monotonic seconds of this rank; only ever compared with itself.
        num_steps: steps so far.
    """

    cache: HiRadixCache
    domain: SyncDomain
    mover: PageMover
    clock: Callable[[], float] = time.monotonic
    num_steps: int = field(default=0, init=False)

    def step(self) -> None:
        """Bring this rank's facts, agree, carry out. Every rank calls it in each of its steps, without a condition.

        Raises:
            SyncTimeoutError, SyncDivergenceError: the ranks did not come together.
            TierDivergenceError: they hold different pages.
            CacheIntegrityError: the kit is to blame.
        """
        self.num_steps += 1
        cache, mover, now_s = self.cache, self.mover, self.clock()
        for event in mover.poll():
            cache.handle(event)
        ballot = cache.ballot(
            self.num_steps, has_storage=mover.has_storage, load_room_pages=mover.load_room_pages, now_s=now_s
        )
        cache.settle(self.num_steps, self.domain.agree(ballot), now_s=now_s)
        mover.submit(cache.take_instructions())

    def close(self) -> None:
        """End this rank's I/O, then its part in agreements. Safe to call twice."""
        self.mover.close()
        self.domain.close()
