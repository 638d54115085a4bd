"""The pool of a radix cache, as checks read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from scheduler_components.cache import RadixCache, RadixNode
from scheduler_components.ports import NullPageHolders, PageHolders
from scheduler_components.values import HeldCount, PageHolding, PoolCount

__all__ = ["RadixCachePool", "SlotPool"]


@dataclass(slots=True, kw_only=True)
class RadixCachePool:
    """The ``AuditedPool`` of a ``RadixCache``, or of the device tier of a ``HiRadixCache``.

    Attributes:
        cache: the free list, the tree and the eviction order.
        requests: hold pages outside the cache, and lock prefixes of it.
        transfers: copies between tiers, which do so too.
        name: of the pool.
    """

    cache: RadixCache
    requests: PageHolders
    transfers: PageHolders = field(default_factory=NullPageHolders)
    name: str = "full"

    def count(self) -> PoolCount:
        pool, num_evictable = self.cache.pool, self.cache.lru.num_pages
        own, moved = self.requests.count_held(), self.transfers.count_held()
        return PoolCount(
            self.name,
            pool.num_pages,
            pool.num_free,
            num_evictable,
            pool.num_cached - num_evictable,
            own.session_held + moved.session_held,
            own.uncached + moved.uncached,
            own.in_transfer + moved.in_transfer,
        )

    def free_pages(self) -> Sequence[int]:
        return self.cache.pool.free_pages()

    def holdings(self) -> Iterable[PageHolding]:
        return chain(self.requests.holdings(), self.transfers.holdings())

    def tree_nodes(self) -> Iterator[RadixNode]:
        return self.cache.tree.walk()


@dataclass(slots=True, kw_only=True)
class SlotPool:
    """The ``AuditedPool`` of things without a tree, given and taken one by one: mamba states, request slots.

    Attributes:
        name: of the pool.
        total: slots, numbered from 0.
        holders: hold them.
        free: the free list itself, which its owner changes.
    """

    name: str
    total: int
    holders: PageHolders
    free: Sequence[int] = field(default_factory=list)

    def count(self) -> PoolCount:
        held: HeldCount = self.holders.count_held()
        return PoolCount(
            self.name,
            self.total,
            len(self.free),
            session_held=held.session_held,
            uncached=held.uncached,
            in_transfer=held.in_transfer,
        )

    def free_pages(self) -> Sequence[int]:
        return tuple(self.free)

    def holdings(self) -> Iterable[PageHolding]:
        return self.holders.holdings()

    def tree_nodes(self) -> Iterable[RadixNode]:
        return ()
