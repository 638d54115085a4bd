"""The prefix cache: pages of a KV pool, shared by the requests whose tokens begin alike."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import msgspec

from scheduler_components.cache.block_hash import DEFAULT_NAMESPACE, PrefixNamespace, block_hash_array, pack_tokens
from scheduler_components.cache.lru_list import LruList
from scheduler_components.cache.page_pool import PagePool
from scheduler_components.cache.radix_tree import PathMatch, RadixNode, RadixTree
from scheduler_components.cache.recorder import EventRecorder, NullEventRecorder, device_medium
from scheduler_components.errors import CacheIntegrityError, ConfigError, OutOfPagesError
from scheduler_components.events import KVCacheEvent, MediumGroup, medium_group
from scheduler_components.validators import check_integer

__all__ = ["LowerTiers", "PrefixMatch", "RadixCache"]


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """The cached part of a prompt.

    Attributes:
        num_tokens: tokens covered, whole pages only.
        page_array: the tree's page indices that hold them, in order, as an ``array("I")``.
        node: where the prefix ends. ``lock`` it before the next call that may evict (``allocate``, ``evict``), or
            the pages may go to somebody else.
    """

    num_tokens: int
    page_array: Sequence[int]
    node: RadixNode

    @property
    def pages(self) -> tuple[int, ...]:
        """``page_array`` as a tuple, made anew each time: 0.1 ms for the ten thousand of a prompt at page size 1."""
        return tuple(self.page_array)


class LowerTiers(Protocol):
    """What lies below the device: it keeps nodes in the tree that the device gives up. The cache tells it of changes.

    Attributes:
        num_pages: pages that the lower tiers hold at most; more than 0 makes the tree hash every page.
    """

    @property
    def num_pages(self) -> int: ...

    def media_of(self, node: RadixNode) -> tuple[str | None, ...]:
        """Return the media that a node is on, as events name them; None is the device."""
        ...

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """A node was cut in two and is now ``lower``."""
        ...

    def join(self, upper: RadixNode, lower: RadixNode) -> bool:
        """``lower`` is to take in the run of ``upper``; do so, or return False where they are not alike."""
        ...

    def on_computed(self, node: RadixNode) -> None:
        """The device has pages of this node now that a request computed."""
        ...

    def on_evicted(self, node: RadixNode) -> bool:
        """The device has given up this node; return whether a lower tier keeps it in the tree."""
        ...


class NullLowerTiers:
    """The device is all there is."""

    num_pages = 0
    media_of = staticmethod(device_medium)

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Nothing to cut."""

    def join(self, upper: RadixNode, lower: RadixNode) -> bool:  # noqa: ARG002 - the port's
        """Nothing to tell them apart."""
        return True

    def on_computed(self, node: RadixNode) -> None:
        """Nothing to do."""

    def on_evicted(self, node: RadixNode) -> bool:  # noqa: ARG002 - the port's
        """What leaves the device leaves the tree."""
        return False


_NO_PAGES = array("I")


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class RadixCache:
    """A radix cache over a pool of KV pages; a ``KvEventSource``, ``PoolSource`` and ``HeldBlocksSource``.

    A page is free, held by a request (``allocate``), or cached by the tree (``insert``); the tree's pages are evicted
    least recently used first, except those that a request has locked. Everything is decided by the order of calls,
    never by a clock: ranks that make the same calls hold the same pages and record the same events. Not thread-safe.

    Args:
        record: keep events for ``take_events``. False costs no hashing; give ``ParallelState.owns_kv_stream``.

    Attributes:
        page_size: tokens per page.
        capacity_tokens: size of the KV pool; rounded down to whole pages.
        lower: the tiers below the device; a hierarchical cache gives its own.
        tree, pool, lru, recorder: the parts, for a cache that is built on this one. Requests do without them.

    Raises:
        ConfigError: the page size is below 1, or the capacity below one page.
    """

    page_size: int
    capacity_tokens: int
    record: InitVar[bool] = False
    lower: LowerTiers = field(default_factory=NullLowerTiers)
    tree: RadixTree = field(init=False)
    pool: PagePool = field(init=False)
    lru: LruList = field(init=False)
    recorder: EventRecorder | NullEventRecorder = field(init=False)

    def __post_init__(self, record: bool) -> None:
        check_integer("page_size", self.page_size)
        num_pages = self.capacity_tokens // self.page_size
        if num_pages < 1:
            hint = f"give at least page_size={self.page_size}"
            raise ConfigError("capacity_tokens", self.capacity_tokens, "does not hold one page", hint)
        self.capacity_tokens = num_pages * self.page_size
        self.tree = RadixTree(self.page_size, hashed=record or self.lower.num_pages > 0)
        self.pool = PagePool(num_pages)
        self.lru = LruList()
        # Two whole turnovers of all pools: beyond that, telling the present content is shorter than the backlog.
        max_pending_blocks = 2 * (num_pages + self.lower.num_pages)
        self.recorder = (
            EventRecorder(self.tree, max_pending_blocks, self.lower.media_of) if record else NullEventRecorder()
        )

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated without evicting."""
        return self.pool.num_free * self.page_size

    @property
    def evictable_tokens(self) -> int:
        """Cached tokens that nobody has locked."""
        return self.lru.num_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold, allocated or locked: neither free nor evictable."""
        return self.capacity_tokens - (self.pool.num_free + self.lru.num_pages) * self.page_size

    @property
    def num_event_collapses(self) -> int:
        """How often nobody took the events for so long that the backlog was replaced by the present content."""
        return self.recorder.num_collapses

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
        """Find the longest cached prefix, in whole pages, and mark it as the most recently used.

        An ``array("I")`` as ``token_ids`` is the quickest; any sequence of integers does.

        Raises:
            ConfigError: a token id does not fit u32, or the namespace cannot be encoded.
        """
        packed = pack_tokens(token_ids)
        path = self.split_path(self.tree.find(packed, (namespace or DEFAULT_NAMESPACE).seed()))
        self.lru.touch(reversed(path))
        return self.match_from_path(path)

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
            ConfigError: ``pages`` is not one per whole page, a token id does not fit u32, or the namespace cannot be
                encoded.
            CacheIntegrityError: a page that the tree would take over or free is not held by a request.
                After any error nothing has changed.
        """
        return self.match_from_path(self.insert_path(token_ids, pages, namespace or DEFAULT_NAMESPACE))

    def lock(self, node: RadixNode) -> None:
        """Keep the whole prefix that ends in ``node`` from eviction, once more. Locking no prefix (no match) is fine.

        Raises:
            CacheIntegrityError: the node is no longer in the tree, or no longer on the device; nothing has changed.
        """
        path = self.tree.path_to_root(node)
        if path and not node.pages:
            raise CacheIntegrityError(f"{node} is not on the device: evicted before it was locked?")
        self.lru.lock(path)

    def unlock(self, node: RadixNode) -> None:
        """Give back one ``lock`` of ``node``.

        Raises:
            CacheIntegrityError: the node is not locked; nothing has changed.
        """
        path = self.tree.path_to_root(node)
        if path and not node.lock_count:
            raise CacheIntegrityError(f"{node} is not locked: unlocked twice?")
        self.lru.unlock(path)
        if len(node.children) == 1:  # perhaps the holder has locked a longer prefix, and nobody ends here any more
            [child] = node.children.values()
            self.mark_joinable(child)

    def allocate(self, num_pages: int) -> list[int]:
        """Hand out pages to a request, evicting the least recently used ones as needed.

        Raises:
            ConfigError: ``num_pages`` is negative.
            OutOfPagesError: free and evictable pages together are fewer; nothing was evicted.
        """
        return self.allocate_array(num_pages).tolist()

    def allocate_array(self, num_pages: int) -> array[int]:
        """Do what ``allocate`` does; the pages come as an ``array("I")``, like ``PrefixMatch.page_array``.

        At page size 1 a list of a prompt's pages takes longer to make than all that the cache does for the prompt.
        """
        lacking = num_pages - self.pool.num_free
        if lacking > self.lru.num_pages:
            raise OutOfPagesError(num_pages, self.pool.num_free + self.lru.num_pages)
        self.evict(lacking)
        return self.pool.allocate(num_pages)

    def free(self, pages: Sequence[int]) -> None:
        """Take back pages that ``allocate`` gave and ``insert`` did not take over.

        Raises:
            CacheIntegrityError: a page is free already, is cached, or is named twice; nothing has changed.
        """
        self.pool.free(pages)

    def evict(self, num_pages: int) -> int:
        """Free the least recently used unlocked pages, a prefix's deepest first.

        Returns:
            Pages freed: exactly ``num_pages``, or all that are evictable when those are fewer.
        """
        self._join_runs()
        goal = min(num_pages, self.lru.num_pages)
        freed = 0
        while freed < goal:
            leaf = self.lru.pop_oldest()
            if leaf.num_pages > goal - freed:
                self.lru.put_oldest(self.split(leaf, leaf.num_pages - (goal - freed)))
            freed += leaf.num_pages
            self._give_up(leaf)
        return freed

    def clear(self) -> None:
        """Forget every prefix. Pages that requests hold stay theirs.

        Raises:
            CacheIntegrityError: a request still locks a prefix; nothing has changed.
        """
        locked = self.pool.num_cached - self.lru.num_pages
        if locked:
            raise CacheIntegrityError(f"{locked} of {self.pool.num_cached} cached pages are locked: unlock, then clear")
        for node in self.tree.walk():
            self.pool.free_cached(node.pages)
        self.tree.clear()
        self.lru.clear()
        self.recorder.record_cleared()

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call, in order, and forget them; always empty without ``record``.

        Call it every step. What is kept for a caller who does not is bounded: see ``EventRecorder``.
        """
        return self.recorder.take_events()

    def block_hashes(self) -> Iterator[int]:
        """The hash of every cached page, parents before children. Walks the tree: for checks, not for steps."""
        return self.tree.block_hashes()

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Every cached page, as ``HeldBlocksSource`` asks: all on the device. 2 ms for 36,000 pages in 6,000 nodes."""
        if not self.tree.hashed:
            return {medium_group(None): array("q", self.block_hashes())}
        return {medium_group(None): block_hash_array(b"".join(node.digests for node in self.tree.walk()))}

    def check_integrity(self) -> None:
        """Check tree, pool and eviction order against each other. Walks everything: for tests and doctors.

        Raises:
            CacheIntegrityError: with the arithmetic that failed.
        """
        self.tree.check()
        on_device = [node for node in self.tree.walk() if node.pages]
        self.pool.check([page for node in on_device for page in node.pages])
        self.lru.check(on_device)

    def __repr__(self) -> str:
        locked = self.pool.num_cached - self.lru.num_pages
        return (
            f"<RadixCache page_size={self.page_size}, {self.pool.num_pages} pages: {self.pool.num_free} free, "
            f"{self.lru.num_pages} evictable, {locked} locked, {self.pool.num_held} held by requests>"
        )

    # --- for a cache that is built on this one ---

    def split_path(self, descent: PathMatch) -> list[RadixNode]:
        """Return the path of a descent, its last node cut to end where the match does; touch the path next."""
        path = descent.path
        if path and descent.cut < path[-1].num_pages:
            path[-1] = self.split(path[-1], descent.cut)
        return path

    def split(self, node: RadixNode, cut: int) -> RadixNode:
        """Cut a node after ``cut`` pages; returns the upper part."""
        upper = self.tree.split(node, cut)
        self.lru.split(upper, node)
        self.lower.split(upper, node)
        return upper

    def mark_joinable(self, node: RadixNode) -> None:
        """The holders of a node, or what is under way for it, have changed: look whether it fits its parent now.

        Only while it is locked: what nobody holds may have been used at another time than its parent.
        """
        if node.lock_count:
            self.tree.joinable[node] = None

    def attach(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Give pages that a request or a transfer holds to a node that is not on the device; touch its path next."""
        self.pool.move_to_cache(pages)
        self._put(node, array("I", pages))

    def detach(self, node: RadixNode) -> None:
        """Take a node off the device whose pages do not hold what they should; free them.

        Raises:
            CacheIntegrityError: a request has locked it, or what is below it is on the device; nothing has changed.
        """
        if node.lock_count or any(child.pages for child in node.children.values()):
            raise CacheIntegrityError(f"{node} is in use, but its pages do not hold what they should")
        self.lru.discard(node)
        self._give_up(node)

    def _give_up(self, node: RadixNode) -> None:
        """The device has a node no longer, which is out of its order: a lower tier keeps it, or nobody does."""
        self.pool.free_cached(node.pages)
        self.recorder.record_removed(node)
        if not self.lower.on_evicted(node):
            self.tree.remove(node)

    def _put(self, node: RadixNode, pages: array[int]) -> None:
        """Give a node pages that the pool counts as cached."""
        node.pages = pages
        self.recorder.record_stored(node)

    def insert_path(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace
    ) -> list[RadixNode]:
        """Do what ``insert`` does; returns the nodes of the prefix, from the root on, all on the device."""
        packed = pack_tokens(token_ids)
        if len(pages) != len(token_ids) // self.page_size:
            hint = f"give {len(token_ids) // self.page_size} for {len(token_ids)} tokens"
            raise ConfigError("pages", len(pages), f"is not one page per {self.page_size} tokens", hint)
        descent = self.tree.find(packed, namespace.seed())
        cached = _pages_of(descent.path)[: descent.num_pages]
        given = self.pool.as_array(pages)
        fresh, duplicates = given[len(cached) :], given[: len(cached)]
        if duplicates == cached:
            duplicates = _NO_PAGES
        else:
            duplicates = array("I", [page for page, own in zip(duplicates, cached, strict=True) if page != own])
            self.pool.check_held(duplicates + fresh)
        self.pool.move_to_cache(fresh)  # or raises; from here on nothing can fail

        path, known = self.split_path(descent), descent.num_pages
        self.pool.free(duplicates)
        if len(cached) < known:
            self._take_over(path, given, len(cached))
        if known < len(given):
            page_bytes = self.tree.page_bytes
            tail = packed[known * page_bytes : len(given) * page_bytes]
            leaf = self.tree.append(path[-1] if path else self.tree.root, tail, given[known:], namespace)
            self.recorder.record_stored(leaf)
            self.lower.on_computed(leaf)
            path.append(leaf)
        self.lru.touch(reversed(path))
        return path

    def match_from_path(self, path: list[RadixNode]) -> PrefixMatch:
        """Return a path on the device as a match."""
        pages = _pages_of(path)
        return PrefixMatch(len(pages) * self.page_size, pages, path[-1] if path else self.tree.root)

    def _join_runs(self) -> None:
        joinable, self.tree.joinable = self.tree.joinable, {}
        for node in joinable:
            upper = node.parent
            if upper is None or not self.tree.can_join(node) or not self.lru.were_used_together(upper, node):
                continue
            if self.lower.join(upper, node):
                self.lru.joined(upper)
                self.tree.join(node)

    def _take_over(self, path: list[RadixNode], pages: array[int], first_page: int) -> None:
        """Give pages, from ``first_page`` on, to the nodes of a path that are on lower tiers alone."""
        end = 0
        for node in path:
            end += node.num_pages
            if end > first_page:
                self._put(node, pages[end - node.num_pages : end])
                self.lower.on_computed(node)


def _pages_of(path: list[RadixNode]) -> array[int]:
    pages = array("I")
    for node in path:
        pages += node.pages
    return pages
