"""PoolStatsObserver: report the usage of the page pools, and the pools that it and the invariant checker read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, cast

import msgspec

from scheduler_components.cache import BlockTableCache, RadixCache, RadixNode, TableMatch
from scheduler_components.ports import NullPageHolders, PageHolders
from scheduler_components.values import PageHolding, PoolCount, PoolStats

__all__ = ["AuditedNode", "AuditedPool", "BlockTablePool", "PoolStatsObserver", "RadixCachePool", "SlotPool"]


class AuditedNode(Protocol):
    """A node of a tree that caches pages: a `RadixNode`, or its host pages. Equal nodes are one node."""

    @property
    def pages(self) -> Sequence[int]:
        """Pages of this node in the pool."""
        ...

    @property
    def lock_count(self) -> int:
        """Holders whose locked prefix ends in this node or below it."""
        ...

    @property
    def parent(self) -> AuditedNode | None:
        """None for the root and for a node that has left the tree."""
        ...


class AuditedPool(Protocol):
    """A pool whose pages can be counted and listed: `RadixCachePool`, `BlockTablePool`, `SlotPool`.

    Read by `PoolStatsObserver` and `PoolInvariantChecker`. Each fact comes from the object that keeps it, never from
    the difference of other facts, because a derived count always adds up.
    """

    @property
    def name(self) -> str:
        """Name of the pool, for example ``full``, ``swa`` or ``mamba``. Unique within the scheduler."""
        ...

    def count(self) -> PoolCount:
        """Return how the pages are divided. Called in steps, so it does not walk over pages."""
        ...

    def free_pages(self) -> Sequence[int]:
        """Return the free list as it is, duplicates included."""
        ...

    def holdings(self) -> Iterable[PageHolding]:
        """Return the pages of each holder outside the tree."""
        ...

    def tree_nodes(self) -> Iterable[AuditedNode]:
        """Return every node below the root of the tree that caches pages; none if the pool has no tree."""
        ...


@dataclass(slots=True, kw_only=True)
class RadixCachePool:
    """The `AuditedPool` of a `RadixCache`, or of the device tier of a `HiRadixCache`.

    Attributes:
        cache: has the free list, the tree and the eviction order.
        requests: requests that hold pages outside the cache and lock its prefixes.
        transfers: copies between tiers that do the same.
        name: name of the pool.
    """

    cache: RadixCache
    requests: PageHolders
    transfers: PageHolders = field(default_factory=NullPageHolders)
    name: str = "full"

    def count(self) -> PoolCount:
        pool, num_evictable = self.cache.pool, self.cache.lru.num_pages
        requests, transfers = self.requests.count_held(), self.transfers.count_held()
        return PoolCount(
            self.name,
            pool.num_pages,
            pool.num_free,
            num_evictable,
            pool.num_cached - num_evictable,
            requests.session_held + transfers.session_held,
            requests.uncached + transfers.uncached,
            requests.in_transfer + transfers.in_transfer,
            num_locks=self.cache.num_locks,
        )

    def free_pages(self) -> Sequence[int]:
        return self.cache.pool.free_pages()

    def holdings(self) -> Iterable[PageHolding]:
        return chain(self.requests.holdings(), self.transfers.holdings())

    def tree_nodes(self) -> Iterator[RadixNode]:
        return self.cache.tree.walk()


@dataclass(slots=True, frozen=True)
class _PageNode:
    """A page of a block table, as a node: the page before it in the prefix of one holder is its parent."""

    page: int
    lock_count: int = field(default=0, compare=False)
    parent: _PageNode | None = field(default=None, compare=False)

    @property
    def pages(self) -> tuple[int, ...]:
        return (self.page,)


_ROOT = _PageNode(-1)


@dataclass(slots=True, kw_only=True)
class BlockTablePool:
    """The `AuditedPool` of a `BlockTableCache`. Each page of the table is a node of its own, because copies of one
    block have separate references.

    Attributes:
        cache: the pool, the table and the order of eviction.
        requests: requests that hold pages outside the table and lock matches.
        name: name of the pool.
    """

    cache: BlockTableCache
    requests: PageHolders
    name: str = "full"

    def count(self) -> PoolCount:
        pool, num_evictable = self.cache.pool, self.cache.num_evictable
        held = self.requests.count_held()
        return PoolCount(
            self.name,
            self.cache.num_pages,
            pool.num_free,
            num_evictable,
            pool.num_cached - num_evictable,
            held.session_held,
            held.uncached,
            held.in_transfer,
            first_page=self.cache.first_page,
            num_locks=self.cache.num_locks,
        )

    def free_pages(self) -> Sequence[int]:
        return self.cache.pool.free_pages()

    def holdings(self) -> Iterator[PageHolding]:
        for holding in self.requests.holdings():
            match = cast("TableMatch | None", holding.node)
            yield msgspec.structs.replace(holding, node=None if match is None else _chain(match.page_array))

    def tree_nodes(self) -> Iterator[_PageNode]:
        return (_PageNode(page, references, _ROOT) for page, references in self.cache.references())


def _chain(pages: Sequence[int]) -> _PageNode:
    """Return the last page of a prefix, below all pages before it."""
    node = _ROOT
    for page in pages:
        node = _PageNode(page, 0, node)
    return node


@dataclass(slots=True, kw_only=True)
class SlotPool:
    """The `AuditedPool` of units without a tree, such as mamba states and request slots.

    Attributes:
        name: name of the pool.
        total: slots, numbered from 0.
        holders: holders of the slots.
        free: the free list itself, which its owner changes.
    """

    name: str
    total: int
    holders: PageHolders
    free: Sequence[int] = field(default_factory=list)

    def count(self) -> PoolCount:
        held = self.holders.count_held()
        return PoolCount(
            self.name,
            self.total,
            len(self.free),
            session_held=held.session_held,
            uncached=held.uncached,
            in_transfer=held.in_transfer,
        )

    def free_pages(self) -> Sequence[int]:
        return self.free

    def holdings(self) -> Iterable[PageHolding]:
        return self.holders.holdings()

    def tree_nodes(self) -> Iterable[RadixNode]:
        return ()


@dataclass(slots=True, kw_only=True)
class PoolStatsObserver:
    """Reads the counts of the pools and reports them under SGLang's metric names.

    Attributes:
        pools: page pools. ``full``, ``swa`` and ``mamba`` have their own metrics; others only count for the fullest.
        page_size: tokens per page of the KV pools. A page of ``mamba`` is one state.
    """

    pools: Sequence[AuditedPool]
    page_size: int

    def stats(self) -> PoolStats:
        """Return the current usage of each pool."""
        counts = {pool.name: pool.count() for pool in self.pools}
        return PoolStats(
            max((count.usage for count in counts.values()), default=0.0),
            *_split(counts.get("full"), self.page_size),
            *_split(counts.get("swa"), self.page_size),
            *_split(counts.get("mamba"), 1),
            sum(count.session_held for count in counts.values()),
        )

    def get_kv_token_stats(self) -> tuple[int, float]:
        """Return the tokens in use and their share of the pool, of the fuller one of ``full`` and ``swa``."""
        counts = [count for pool in self.pools if (count := pool.count()).name in ("full", "swa")]
        num_used = max((count.num_used for count in counts), default=0)
        return num_used * self.page_size, max((count.usage for count in counts), default=0.0)


def _split(count: PoolCount | None, tokens_per_page: int) -> tuple[float | None, int | None, int | None, int | None]:
    """Return usage, available, evictable and used tokens of a pool; None for a missing pool."""
    if count is None:
        return None, None, None, None
    return (
        count.usage,
        count.available * tokens_per_page,
        count.evictable * tokens_per_page,
        count.num_used * tokens_per_page,
    )
