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
    "PoolStats",
    "IntegrityStats",
    "StallReport",
]


class KvPoolSnapshot(msgspec.Struct, frozen=True):
    """What a KV pool held at one moment, and where its stream stood then.

    Attributes:
        blocks: hashes by medium and KV-cache group, as ``HeldBlocksSource.held_blocks`` gives them.
        sequence: number of the last batch of the stream that tells of changes before this moment; all later ones tell
            of changes after it. -1 when no batch had gone out; None when whoever read the pool does not know.
        rank: index of the stream.
    """

    blocks: Mapping[MediumGroup, Collection[int]]
    sequence: int | None = None
    rank: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in all places; one that lies in two counts twice."""
        return sum(map(len, self.blocks.values()))


class PoolCount(msgspec.Struct, frozen=True, gc=False):
    """How the pages of one pool are divided at one moment; names are those of SGLang's leak reports.

    Attributes:
        name: of the pool, for example ``full``, ``swa`` or ``mamba``.
        total: pages of the pool, numbered from ``first_page``.
        available: free.
        evictable: cached, and locked by nobody.
        protected: cached and locked.
        session_held: of sessions that are between two requests, outside the cache.
        uncached: of requests, outside the cache.
        in_transfer: of copies between tiers, outside the cache.
        first_page: 1 where page 0 is a place for padding, as in SGLang.
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

    @property
    def num_missing(self) -> int:
        """Pages that nobody accounts for; negative when some are accounted for twice. 0 in a sound pool."""
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
    """Pages outside the cache, by the kind of who holds them: terms of ``PoolCount``."""

    uncached: int = 0
    session_held: int = 0
    in_transfer: int = 0


class PageHolding(msgspec.Struct, frozen=True):
    """What one holder has of one pool.

    Attributes:
        holder: id of the request, session or copy.
        kind: what the holder is.
        pages: its own, outside the cache.
        shared: cached pages that it uses.
        node: the end of the prefix that it has locked in the pool's tree, as the tree's nodes are; None for none.
    """

    holder: str
    kind: Literal["request", "session", "transfer"] = "request"
    pages: Sequence[int] = ()
    shared: Sequence[int] = ()
    node: object = None


AllocationAction: TypeAlias = Literal["allocated", "freed", "cached", "locked", "unlocked"]
"""What can be done with a page, as ledgers note it."""


class AllocationRecord(msgspec.Struct, frozen=True):
    """One entry of a ledger of owners: who took or gave which pages, when and where.

    Attributes:
        step: of the scheduler.
        phase: what the step was at, for example ``results``.
        component: the code that did it, for example ``RequestKvCache.grow``.
        action: what it did.
        holder: id of the request, session or copy.
        pool: of the pages.
        pages: the pages.
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


class PoolStats(msgspec.Struct, frozen=True, gc=False):
    """How full each pool of a scheduler is now. Names are those of SGLang's metrics; pools that it has not are None.

    Attributes:
        max_pool_usage: used / total of the fullest pool, 0 to 1.
        full_token_usage, kv_available_tokens, kv_evictable_tokens, kv_used_tokens: KV of full attention.
        swa_token_usage, swa_available_tokens, swa_evictable_tokens, swa_used_tokens: KV of sliding windows.
        mamba_usage, mamba_available_slots, mamba_evictable_slots, mamba_used_slots: states.
        session_held_pages: pages, over all pools, that sessions hold between two requests.
    """

    max_pool_usage: float
    full_token_usage: float | None = None
    kv_available_tokens: int | None = None
    kv_evictable_tokens: int | None = None
    kv_used_tokens: int | None = None
    swa_token_usage: float | None = None
    swa_available_tokens: int | None = None
    swa_evictable_tokens: int | None = None
    swa_used_tokens: int | None = None
    mamba_usage: float | None = None
    mamba_available_slots: int | None = None
    mamba_evictable_slots: int | None = None
    mamba_used_slots: int | None = None
    session_held_pages: int = 0


class IntegrityStats(msgspec.Struct, frozen=True, gc=False):
    """What a ``PoolInvariantChecker`` and a watchdog have done and found. All but ``problems_open`` only ever grow.

    Attributes:
        checks: times that the counts of all pools were added up.
        censuses: of them, those with a look at every page, lock and told block.
        checks_failed: a pool or a policy raised instead of answering.
        problems: found so far; one that stands counts once.
        pages_lost: of them, pages that nobody has.
        stalls: times that no progress was made for longer than the watchdog's bound.
        problems_open: that the last census found.
    """

    checks: int = 0
    censuses: int = 0
    checks_failed: int = 0
    problems: int = 0
    pages_lost: int = 0
    stalls: int = 0
    problems_open: int = 0


class StallReport(msgspec.Struct, frozen=True):
    """A scheduler that made no progress; as text, a sentence.

    Attributes:
        rank: in words.
        step, phase: where it stands, or stood.
        request: id of the request at hand; empty where it is a whole batch.
        waited_s: seconds in this phase, so far or in all.
        stacks: of all threads, the scheduler's first.
        is_resolved: it goes on again.
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
        """Where it is, in words."""
        return f"step {self.step}, phase {self.phase}" + (f", request {self.request}" if self.request else "")

    def __str__(self) -> str:
        does = "went on after" if self.is_resolved else "has made no progress for"
        return f"rank {self.rank} {does} {self.waited_s:.1f} s in {self.place}"
