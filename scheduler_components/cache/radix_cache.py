"""The reference prefix cache: pages of a KV pool, shared by the requests whose tokens begin alike."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler_components.cache.block_hash import PLAIN_NAMESPACE, PrefixNamespace, pack_tokens
from scheduler_components.cache.page_pool import PagePool
from scheduler_components.cache.radix_tree import Descent, EvictionOrder, RadixNode, RadixTree
from scheduler_components.cache.recorder import EventRecorder, NullEventRecorder
from scheduler_components.errors import CacheIntegrityError, ConfigError, OutOfPagesError
from scheduler_components.events import KVCacheEvent

__all__ = ["PrefixMatch", "PrefixNamespace", "RadixCache"]


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """The cached part of a prompt.

    Attributes:
        num_tokens: tokens covered, whole pages only.
        pages: the tree's page indices that hold them, in order.
        node: where the prefix ends. ``lock`` it before the next call that may evict (``allocate``, ``evict``), or
            the pages may go to somebody else.
    """

    num_tokens: int
    pages: tuple[int, ...]
    node: RadixNode


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class RadixCache:
    """A radix cache over a pool of KV pages; a ``KvEventSource`` and a ``PoolSource``.

    A page is free, held by a request (``allocate``), or cached by the tree (``insert``); the tree's pages are evicted
    least recently used first, except those that a request has locked. Everything is decided by the order of calls,
    never by a clock: ranks that make the same calls hold the same pages and record the same events. Not thread-safe.

    Args:
        page_size: tokens a page.
        capacity_tokens: size of the KV pool; rounded down to whole pages.
        record: keep events for ``take_events``. False costs no hashing; give ``ParallelState.owns_kv_stream``.

    Raises:
        ConfigError: the page size is below 1, or the capacity below one page.
    """

    page_size: int
    capacity_tokens: int
    record: bool = False
    _tree: RadixTree = field(init=False)
    _pool: PagePool = field(init=False)
    _order: EvictionOrder = field(init=False)
    _recorder: EventRecorder | NullEventRecorder = field(init=False)

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError("page_size", self.page_size, "is not a size", "give an integer of at least 1")
        num_pages = self.capacity_tokens // self.page_size
        if num_pages < 1:
            hint = f"give at least page_size={self.page_size}"
            raise ConfigError("capacity_tokens", self.capacity_tokens, "does not hold one page", hint)
        self.capacity_tokens = num_pages * self.page_size
        self._tree = RadixTree(self.page_size, hashed=self.record)
        self._pool = PagePool(num_pages)
        self._order = EvictionOrder()
        # Two whole turnovers of the pool: beyond that, telling the present content is shorter than the backlog.
        self._recorder = EventRecorder(self._tree, 2 * num_pages) if self.record else NullEventRecorder()

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated without evicting."""
        return self._pool.num_free * self.page_size

    @property
    def evictable_tokens(self) -> int:
        """Cached tokens that no request has locked."""
        return self._order.num_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold, allocated or locked: neither free nor evictable."""
        return self.capacity_tokens - self.free_tokens - self.evictable_tokens

    @property
    def num_event_collapses(self) -> int:
        """How often nobody took the events for so long that the backlog was replaced by the present content."""
        return self._recorder.num_collapses

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
        """Find the longest cached prefix, in whole pages, and mark it as the most recently used.

        An ``array("I")`` as ``token_ids`` is the quickest; any sequence of integers does.

        Raises:
            ConfigError: a token id does not fit u32, or the namespace cannot be encoded.
        """
        packed = pack_tokens(token_ids)
        path = self._split_at(self._tree.find(packed, (namespace or PLAIN_NAMESPACE).seed()))
        self._order.touch(reversed(path))
        return self._match(path)

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> PrefixMatch:
        """Cache a computed prefix and take over its pages.

        Args:
            token_ids: the tokens; a partial last page is left out and stays the caller's.
            pages: one page index for each whole page of ``token_ids``: what ``match_prefix`` gave for the part that
                was cached, then pages that ``allocate`` gave.
            namespace: what else the pages depend on.

        Returns:
            The tree's own pages for the prefix. Where another request cached the same page first, that one is named
            and the caller's is freed: use the returned pages from here on.

        Raises:
            ConfigError: ``pages`` is not one a whole page, a token id does not fit u32, or the namespace cannot be
                encoded.
            CacheIntegrityError: a page that the tree would take over or free is not held by a request.
                After any error nothing has changed.
        """
        namespace = namespace or PLAIN_NAMESPACE
        packed = pack_tokens(token_ids)
        if len(pages) != len(token_ids) // self.page_size:
            hint = f"give {len(token_ids) // self.page_size} for {len(token_ids)} tokens"
            raise ConfigError("pages", len(pages), f"is not one page for each {self.page_size} tokens", hint)
        descent = self._tree.find(packed, namespace.seed())
        known = descent.num_pages
        cached = _pages_of(descent.path)[:known]
        duplicates = [page for page, own in zip(pages, cached, strict=False) if page != own]
        fresh = list(pages[known:])
        self._pool.expect_held(duplicates + fresh)

        path = self._split_at(descent)
        self._pool.free(duplicates)
        if fresh:
            self._pool.to_cache(fresh)
            page_bytes = self._tree.page_bytes
            tail = packed[known * page_bytes : len(pages) * page_bytes]
            leaf = self._tree.append(path[-1] if path else self._tree.root, tail, array("I", fresh), namespace)
            self._order.add(leaf)
            self._recorder.stored(leaf)
            path.append(leaf)
        self._order.touch(reversed(path))
        return self._match(path)

    def lock(self, node: RadixNode) -> None:
        """Keep the whole prefix that ends in ``node`` from eviction, once more. Locking no prefix (no match) is fine.

        Raises:
            CacheIntegrityError: the node is no longer in the tree; nothing has changed.
        """
        self._order.lock(self._tree.path_of(node))

    def unlock(self, node: RadixNode) -> None:
        """Give back one ``lock`` of ``node``.

        Raises:
            CacheIntegrityError: the node is not locked; nothing has changed.
        """
        path = self._tree.path_of(node)
        if path and not node.lock_count:
            raise CacheIntegrityError(f"{node} is not locked: unlocked twice?")
        self._order.unlock(path)

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out pages to a request, evicting the least recently used ones as needed.

        Raises:
            ConfigError: ``num_pages`` is negative.
            OutOfPagesError: free and evictable pages together are fewer; nothing was evicted.
        """
        lacking = num_pages - self._pool.num_free
        if lacking > self._order.num_pages:
            raise OutOfPagesError(num_pages, self._pool.num_free + self._order.num_pages)
        self.evict(lacking)
        return self._pool.allocate(num_pages)

    def free(self, pages: Sequence[int]) -> None:
        """Take back pages that ``allocate`` gave and ``insert`` did not take over.

        Raises:
            CacheIntegrityError: a page is free already, is cached, or is named twice; nothing has changed.
        """
        self._pool.free(pages)

    def evict(self, num_pages: int) -> int:
        """Free the least recently used unlocked pages, a prefix's deepest first.

        Returns:
            Pages freed: exactly ``num_pages``, or all that are evictable when those are fewer.
        """
        goal = min(num_pages, self._order.num_pages)
        freed = 0
        while freed < goal:
            leaf = self._order.pop_oldest()
            if leaf.num_pages > goal - freed:
                self._order.put_oldest(self._tree.split(leaf, leaf.num_pages - (goal - freed)))
            self._tree.remove(leaf)
            self._pool.from_cache(leaf.pages)
            self._recorder.removed(leaf)
            freed += leaf.num_pages
        return freed

    def clear(self) -> None:
        """Forget every prefix. Pages that requests hold stay theirs.

        Raises:
            CacheIntegrityError: a request still locks a prefix; nothing has changed.
        """
        locked = self._pool.num_cached - self._order.num_pages
        if locked:
            raise CacheIntegrityError(
                f"{locked} of {self._pool.num_cached} cached pages are locked: unlock, then clear"
            )
        for node in self._tree.walk():
            self._pool.from_cache(node.pages)
        self._tree.clear()
        self._order.clear()
        self._recorder.cleared()

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call, in order, and forget them; always empty without ``record``.

        Call it every step. What is kept for a caller who does not is bounded: see ``EventRecorder``.
        """
        return self._recorder.take()

    def block_hashes(self) -> Iterator[int]:
        """The hash of every cached page, parents before children. Walks the tree: for checks, not for steps."""
        return self._tree.block_hashes()

    def check_integrity(self) -> None:
        """Check tree, pool and eviction order against each other. Walks everything: for tests and doctors.

        Raises:
            CacheIntegrityError: with the arithmetic that failed.
        """
        self._tree.check()
        cached = [page for node in self._tree.walk() for page in node.pages]
        self._pool.check(cached)
        self._order.check(self._tree.walk())

    def __repr__(self) -> str:
        locked = self._pool.num_cached - self._order.num_pages
        return (
            f"<RadixCache page_size={self.page_size}, {self._pool.num_pages} pages: {self._pool.num_free} free, "
            f"{self._order.num_pages} evictable, {locked} locked, {self._pool.num_held} held by requests>"
        )

    def _split_at(self, descent: Descent) -> list[RadixNode]:
        """Return the path of a descent, its last node ending where the match does."""
        path = descent.path
        if path and descent.cut < path[-1].num_pages:
            path[-1] = self._tree.split(path[-1], descent.cut)
        return path

    def _match(self, path: list[RadixNode]) -> PrefixMatch:
        pages = _pages_of(path)
        return PrefixMatch(len(pages) * self.page_size, tuple(pages), path[-1] if path else self._tree.root)


def _pages_of(path: list[RadixNode]) -> list[int]:
    pages: list[int] = []
    for node in path:
        pages.extend(node.pages)
    return pages
