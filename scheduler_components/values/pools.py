"""Page pools: how their pages are divided, which holders own them, and what the checks found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from scheduler_components.events import MediumGroup

__all__ = [
    "KvPoolSnapshot",
    "PoolCount",
    "HeldCount",
    "PageHolding",
    "AllocationAction",
    "AllocationRecord",
    "StallReport",
]


class KvPoolSnapshot(msgspec.Struct, frozen=True):
    """The content of a KV pool, and the position of its stream at that moment.

    Attributes:
        blocks: hashes by medium and KV-cache group, as `HeldBlocksSource.held_blocks` returns them.
        sequence: sequence number of the last batch with changes before this moment; later batches have later changes.
            -1 if no batch was sent; None if it is unknown.
        rank: index of the stream.
    """

    blocks: Mapping[MediumGroup, Collection[int]]
    sequence: int | None = None
    rank: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks in all places. A block in two places counts twice."""
        return sum(map(len, self.blocks.values()))


class PoolCount(msgspec.Struct, frozen=True, gc=False):
    """How the pages of one pool are divided. Names are those of SGLang's leak reports.

    Attributes:
        name: name of the pool, for example ``full``, ``swa`` or ``mamba``.
        total: pages of the pool, numbered from `first_page`.
        available: free pages.
        evictable: cached and not locked.
        protected: cached and locked.
        session_held: held outside the cache by sessions between two requests.
        uncached: held outside the cache by requests.
        in_transfer: held outside the cache by copies between tiers.
        first_page: 1 if page 0 is reserved for padding, as in SGLang.
        num_locks: locks of prefixes, one per holder of a prefix; None for a pool that does not count them.
    """

    name: str
    total: int
    available: int
    evictable: int = 0
    protected: int = 0
    session_held: int = 0
    uncached: int = 0
    in_transfer: int = 0
    first_page: int = 0
    num_locks: int | None = None

    @property
    def num_missing(self) -> int:
        """Pages in no term; negative if some pages are in two terms. 0 in a sound pool."""
        held = self.protected + self.session_held + self.uncached + self.in_transfer
        return self.total - self.available - self.evictable - held

    @property
    def num_used(self) -> int:
        """Pages that are neither free nor evictable."""
        return self.total - self.available - self.evictable

    @property
    def usage(self) -> float:
        """Used / total, 0 to 1; 0 for a pool without pages."""
        return self.num_used / self.total if self.total else 0.0

    def __str__(self) -> str:
        return (
            f"[{self.name}] total={self.total}, available={self.available}, evictable={self.evictable}, "
            f"protected={self.protected}, session_held={self.session_held}, uncached={self.uncached}, "
            f"in_transfer={self.in_transfer}"
        )


class HeldCount(msgspec.Struct, frozen=True, gc=False):
    """Pages outside the cache, by kind of holder: terms of `PoolCount`."""

    uncached: int = 0
    session_held: int = 0
    in_transfer: int = 0


class PageHolding(msgspec.Struct, frozen=True):
    """The pages of one holder in one pool.

    Attributes:
        holder: id of the request, session or copy.
        kind: kind of the holder.
        pages: its own pages, outside the cache.
        shared: cached pages that it uses.
        node: tree node where its locked prefix ends; None without one.
    """

    holder: str
    kind: Literal["request", "session", "transfer"] = "request"
    pages: Sequence[int] = ()
    shared: Sequence[int] = ()
    node: object = None


AllocationAction: TypeAlias = Literal["allocated", "freed", "cached", "locked", "unlocked"]
"""What an allocation log records."""


class AllocationRecord(msgspec.Struct, frozen=True):
    """One entry of the allocation log.

    Attributes:
        step: step of the scheduler.
        phase: phase of the step, for example ``results``.
        component: the code that acted, for example ``RequestKvCache.grow``.
        action: what it did with the pages.
        holder: id of the request, session or copy.
        pool: name of the pool.
        pages: the affected pages.
    """

    step: int
    phase: str
    component: str
    action: AllocationAction
    holder: str
    pool: str
    pages: Sequence[int]

    def __str__(self) -> str:
        return f"{self.action} by {self.holder} in step {self.step} ({self.component}, {self.phase})"


class StallReport(msgspec.Struct, frozen=True):
    """A stall of a scheduler. `str` gives a sentence.

    Attributes:
        rank: description of the rank.
        step, phase: where it makes, or made, no progress.
        request: id of the request that it processes; empty for a whole batch.
        waited_s: seconds in this phase: so far, or in total after the stall.
        stacks: stacks of all threads, the scheduler's first.
        is_resolved: whether the stall has ended.
    """

    rank: str
    step: int
    phase: str
    request: str
    waited_s: float
    stacks: str = ""
    is_resolved: bool = False

    @property
    def place(self) -> str:
        """Step, phase and request, in words."""
        return f"step {self.step}, phase {self.phase}" + (f", request {self.request}" if self.request else "")

    def __str__(self) -> str:
        does = "continued after" if self.is_resolved else "has made no progress for"
        return f"rank {self.rank} {does} {self.waited_s:.1f} s in {self.place}"
