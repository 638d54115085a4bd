"""Page pools: what a check reads of them, and who notes the owners of pages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from scheduler_components.values import (
    AllocationAction,
    AllocationRecord,
    HeldCount,
    PageHolding,
    PoolCount,
    StallReport,
)

__all__ = [
    "TreeNode",
    "AuditedPool",
    "PageHolders",
    "NullPageHolders",
    "AllocationSink",
    "NullAllocationSink",
    "OwnerTrails",
    "NullOwnerTrails",
    "StallSink",
]


class TreeNode(Protocol):
    """One node of a prefix tree: ``RadixNode``. Read by ``PoolInvariantChecker``.

    A lock is counted on the node where a prefix ends and on all above it. The root has no parent and counts nothing.
    """

    @property
    def parent(self) -> TreeNode | None: ...

    @property
    def lock_count(self) -> int: ...

    @property
    def pages(self) -> Sequence[int]:
        """Pages of this pool that the node holds; none where it is not on the device."""
        ...


class AuditedPool(Protocol):
    """A pool whose pages can be counted and named: ``RadixCachePool``. Read by ``PoolInvariantChecker``.

    Each fact comes from whoever keeps it, never from the difference of others: what is derived is always right.
    """

    @property
    def name(self) -> str:
        """Of the pool, for example ``full``, ``swa`` or ``mamba``; no other pool of the scheduler has it."""
        ...

    def count(self) -> PoolCount:
        """Return how the pages are divided. Called in steps: no walk over pages."""
        ...

    def free_pages(self) -> Sequence[int]:
        """Return the free list as it is, with whatever stands in it twice."""
        ...

    def holdings(self) -> Iterable[PageHolding]:
        """Return what each holder outside of the tree has."""
        ...

    def tree_nodes(self) -> Iterable[TreeNode]:
        """Return every node below the root of the tree that caches pages; none for a pool without one."""
        ...


class PageHolders(Protocol):
    """Whoever holds pages outside of the cache: a scheduler's requests, its sessions, copies between tiers.

    Read by ``RadixCachePool``.
    """

    def count_held(self) -> HeldCount:
        """Return how many pages they hold outside the cache. Called in steps."""
        ...

    def holdings(self) -> Iterable[PageHolding]:
        """Return what each of them has."""
        ...


class NullPageHolders:
    """The holders of a pool of which nobody holds pages."""

    def count_held(self) -> HeldCount:
        return _NOTHING_HELD

    def holdings(self) -> Iterable[PageHolding]:
        return ()


_NOTHING_HELD = HeldCount()


class AllocationSink(Protocol):
    """Is told who takes and gives pages: ``AllocationLog``. Called by whatever hands pages to requests."""

    def is_sampled(self, holder: str) -> bool:
        """Say whether a request's, session's or copy's pages are noted. Ask once per holder."""
        ...

    def record(self, action: AllocationAction, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        """Note what a watched holder does, or is done to it.

        Args:
            action: ``took`` from the free list, ``gave`` back to it, ``cached`` its own pages, ``locked`` or
                ``unlocked`` cached ones.
            pool: of the pages.
            holder: whose they are, or were.
            component: the code that acts, for example ``RequestKvCache.grow``.
            pages: must not be changed afterwards: they are kept, not copied.
        """
        ...


class NullAllocationSink:
    """The log of a scheduler that keeps no ledger of owners."""

    def is_sampled(self, holder: str) -> bool:  # noqa: ARG002 - the port's
        return False

    def record(self, action: AllocationAction, pool: str, holder: str, component: str, pages: Sequence[int]) -> None:
        pass


class OwnerTrails(Protocol):
    """Knows who took and gave a page: ``AllocationLog``. Read by ``PoolInvariantChecker`` when something is wrong."""

    def history(self, pool: str, pages: Collection[int]) -> Sequence[AllocationRecord]:
        """Return what is known of any of these pages, oldest first."""
        ...


class NullOwnerTrails:
    """The trails of a scheduler that keeps no ledger of owners."""

    def history(self, pool: str, pages: Collection[int]) -> Sequence[AllocationRecord]:  # noqa: ARG002 - the port's
        return ()


class StallSink(Protocol):
    """Is told that a scheduler makes no progress: ``LogStallSink``. Called by a watchdog, on its own thread."""

    def on_stall(self, report: StallReport) -> None:
        """A phase has taken too long, and goes on."""
        ...

    def on_resume(self, report: StallReport) -> None:
        """It has ended."""
        ...
