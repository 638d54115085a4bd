"""Page pools: the holders of pages outside the cache, and where allocations are recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from scheduler_components.values import AllocationAction, HeldCount, PageHolding

__all__ = ["AllocationSink", "IdlePages", "NullAllocationSink", "NullIdlePages", "NullPageHolders", "PageHolders"]


class PageHolders(Protocol):
    """Holders of pages outside the cache: a scheduler's requests, its sessions, copies between tiers.

    Read by `RadixCachePool` and `SlotPool`.
    """

    def count_held(self) -> HeldCount:
        """Return how many pages they hold outside the cache. Called in steps."""
        ...

    def holdings(self) -> Iterable[PageHolding]:
        """Return the pages of each holder."""
        ...


_NOTHING_HELD = HeldCount()


class NullPageHolders:
    """The holders of a pool without holders."""

    def count_held(self) -> HeldCount:
        return _NOTHING_HELD

    def holdings(self) -> Iterable[PageHolding]:
        return ()


class IdlePages(Protocol):
    """Cached pages that are locked for later requests, such as those of sessions. The batcher releases them."""

    def release_next(self, num_missing: int = 1) -> bool:
        """Unlock the pages of the least recently used holder.

        Return False, without a change, if there are none, or fewer than ``num_missing`` in total.
        """
        ...


class NullIdlePages:
    """The idle pages of a scheduler that keeps none."""

    def release_next(self, num_missing: int = 1) -> bool:
        return False


class AllocationSink(Protocol):
    """Record which holder allocates and frees pages: `AllocationLog`. Called by the code that gives requests pages."""

    def is_sampled(self, holder: str) -> bool:
        """Return whether the pages of this request, session or copy are recorded. Ask once per holder."""
        ...

    def record(self, action: AllocationAction, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """Record one action of a sampled holder.

        Args:
            action: ``allocated`` from the free list, ``freed`` to it, ``cached`` its own pages, ``locked`` or
                ``unlocked`` cached ones.
            pool: name of the pool.
            holder: id of the request, session or copy.
            component: the code that acts, for example ``RequestKvCache.grow``.
            pages: kept by reference. Do not change the sequence afterwards.
        """
        ...


class NullAllocationSink:
    """The sink of a scheduler that keeps no allocation log."""

    def is_sampled(self, holder: str) -> bool:
        return False

    def record(self, action: AllocationAction, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        pass
