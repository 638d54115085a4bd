"""RadixCache: the prefix cache. Requests whose tokens begin alike share pages of the KV pool."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from scheduler_components._internal.validators import check_integer
from scheduler_components.cache.block_hash import (
    DEFAULT_NAMESPACE,
    PrefixNamespace,
    block_hash_array,
    pack_tokens,
    weight_namespace,
)
from scheduler_components.cache.lru_list import LruList
from scheduler_components.cache.page_pool import PagePool
from scheduler_components.cache.radix_tree import PathMatch, RadixNode, RadixTree
from scheduler_components.cache.recorder import EventRecorder, device_medium
from scheduler_components.errors import CacheIntegrityError, ConfigError, OutOfPagesError
from scheduler_components.events import KVCacheEvent, MediumGroup, medium_group

if TYPE_CHECKING:
    from scheduler_components.ports import DecisionSink

__all__ = ["LowerTiers", "PrefixMatch", "RadixCache"]


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """The cached part of a prompt.

    Attributes:
        num_tokens: covered tokens, in whole pages.
        page_array: the tree's page indices for them, in order, as an ``array("I")``.
        node: the end of the prefix. ``lock`` it before the next call that may evict (``allocate``, ``evict``);
            otherwise the cache may give the pages to another request.
    """

    num_tokens: int
    page_array: Sequence[int]
    node: RadixNode

    @property
    def pages(self) -> tuple[int, ...]:
        """``page_array`` as a new tuple. It takes 0.1 ms for the ten thousand pages of a prompt at page size 1."""
        return tuple(self.page_array)


class LowerTiers(Protocol):
    """The tiers below the device, which keep nodes in the tree after the device evicts them. The cache notifies them.

    Attributes:
        num_pages: maximum pages in the lower tiers; if it is above 0, the tree hashes every page.
    """

    @property
    def num_pages(self) -> int: ...

    def media_of(self, node: RadixNode) -> tuple[str | None, ...]:
        """Return the media that hold a node, as events name them; None is the device."""
        ...

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Handle the split of a node, which is now ``lower``."""
        ...

    def join(self, upper: RadixNode, lower: RadixNode) -> bool:
        """Merge the records of ``upper`` into those of ``lower``, or return False if the two differ."""
        ...

    def on_computed(self, node: RadixNode) -> None:
        """Handle that the device has pages of this node that a request computed."""
        ...

    def on_evicted(self, node: RadixNode) -> bool:
        """Handle that the device has evicted this node. Return True if a lower tier keeps it in the tree."""
        ...


_NO_PAGES = array("I")


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class RadixCache:
    """A radix cache over a pool of KV pages: a ``KvEventSource``, ``PoolSource`` and ``HeldBlocksSource``.

    A page is free, held by a request (``allocate``), or cached by the tree (``insert``). The cache evicts the tree's
    pages least recently used first, except those that a request has locked. Only the order of calls decides, never a
    clock: ranks that make equal calls hold equal pages and record equal events. Not thread-safe.

    Args:
        record: keep events for ``take_events``. Without it the cache hashes nothing; give
            ``ParallelState.owns_kv_stream``.

    Attributes:
        page_size: tokens per page.
        capacity_tokens: size of the KV pool, rounded down to whole pages.
        lower: the tiers below the device, of a hierarchical cache.
        decisions: where it notes what it evicts, if anywhere.
        namespace: of calls that give none.
        num_locks: calls of `lock` without their `unlock`.
        tree, pool, lru, recorder: the parts, for a cache that is built on this one. Schedulers do not use them.

    Raises:
        ConfigError: the page size is below 1, or the capacity below one page.
    """

    page_size: int
    capacity_tokens: int
    record: InitVar[bool] = False
    lower: LowerTiers | None = None
    decisions: DecisionSink | None = None
    namespace: PrefixNamespace = field(default=DEFAULT_NAMESPACE, init=False)
    num_locks: int = field(default=0, init=False)
    tree: RadixTree = field(init=False)
    pool: PagePool = field(init=False)
    lru: LruList = field(init=False)
    recorder: EventRecorder | None = field(default=None, init=False)

    def __post_init__(self, record: bool) -> None:
        check_integer("page_size", self.page_size)
        num_pages = self.capacity_tokens // self.page_size
        if num_pages < 1:
            hint = f"give at least page_size={self.page_size}"
            raise ConfigError("capacity_tokens", self.capacity_tokens, "does not hold one page", hint)
        self.capacity_tokens = num_pages * self.page_size
        lower = self.lower
        num_lower_pages = 0 if lower is None else lower.num_pages
        self.tree = RadixTree(self.page_size, hashed=record or num_lower_pages > 0)
        self.pool = PagePool(num_pages)
        self.lru = LruList()
        if record:
            # Beyond two turnovers of all pools, the present content is shorter than the backlog.
            max_pending_blocks = 2 * (num_pages + num_lower_pages)
            media_of = device_medium if lower is None else lower.media_of
            self.recorder = EventRecorder(self.tree, max_pending_blocks, media_of)

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated without eviction."""
        return self.pool.num_free * self.page_size

    @property
    def evictable_tokens(self) -> int:
        """Cached tokens that no request has locked."""
        return self.lru.num_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens that running requests hold, allocated or locked: neither free nor evictable."""
        return self.capacity_tokens - (self.pool.num_free + self.lru.num_pages) * self.page_size

    @property
    def num_event_collapses(self) -> int:
        """How often the present content replaced the event backlog, because the events were not taken for too long."""
        return self.recorder.num_collapses if self.recorder is not None else 0

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> PrefixMatch:
        """Find the longest cached prefix, in whole pages, and mark it as the most recently used.

        Any sequence of integers is valid as ``token_ids``; an ``array("I")`` is the fastest.

        Raises:
            ConfigError: a token id does not fit u32, or the namespace cannot be encoded.
        """
        packed = pack_tokens(token_ids)
        path = self.split_path(self.tree.find(packed, (namespace or self.namespace).seed()))
        self.lru.touch(reversed(path))
        return self.match_from_path(path)

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> PrefixMatch:
        """Cache a computed prefix and take over its pages.

        Args:
            token_ids: the tokens; a partial last page is omitted and stays the caller's.
            pages: one page index for each whole page of ``token_ids``: first those that ``match_prefix`` returned for
                the cached part, then those that ``allocate`` returned.
            namespace: the other properties that the pages depend on.

        Returns:
            The tree's own pages for the prefix. If another request has already cached a page, the result names that
            page and the caller's page is freed: use the returned pages from here on.

        Raises:
            ConfigError: ``pages`` is not one per whole page, a token id does not fit u32, or the namespace cannot be
                encoded.
            CacheIntegrityError: no request holds a page that the tree would take over or free. After any error nothing
                has changed.
        """
        return self.match_from_path(self.insert_path(token_ids, pages, namespace or self.namespace))

    def lock(self, node: RadixNode) -> None:
        """Protect the whole prefix that ends in ``node`` from eviction, once more. Locking the empty prefix is valid.

        Raises:
            CacheIntegrityError: the node is no longer in the tree, or no longer on the device; nothing has changed.
        """
        path = self.tree.path_to_root(node)
        if path and not node.pages:
            raise CacheIntegrityError(f"{node} is not on the device: evicted before it was locked?")
        self.lru.lock(path)
        self.num_locks += 1

    def unlock(self, node: RadixNode) -> None:
        """Release one ``lock`` of ``node``.

        Raises:
            CacheIntegrityError: the node is not locked; nothing has changed.
        """
        path = self.tree.path_to_root(node)
        if path and not node.lock_count:
            raise CacheIntegrityError(f"{node} is not locked: unlocked twice?")
        self.lru.unlock(path)
        self.num_locks -= 1
        if len(node.children) == 1:  # the holder may have locked a longer prefix, so none ends here
            [child] = node.children.values()
            self.mark_joinable(child)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages to a request. Evict the least recently used ones if necessary.

        Raises:
            ConfigError: ``num_pages`` is negative.
            OutOfPagesError: fewer pages are free and evictable; nothing was evicted.
        """
        return self.allocate_array(num_pages).tolist()

    def allocate_array(self, num_pages: int) -> array[int]:
        """Allocate like ``allocate``, but return an ``array("I")``, like ``PrefixMatch.page_array``.

        At page size 1, building the list of a prompt's pages takes longer than all other work of the cache for that
        prompt.
        """
        lacking = num_pages - self.pool.num_free
        if lacking > self.lru.num_pages:
            raise OutOfPagesError(num_pages, self.pool.num_free + self.lru.num_pages)
        self.evict(lacking)
        return self.pool.allocate(num_pages)

    def free(self, pages: Sequence[int]) -> None:
        """Free pages that ``allocate`` returned and ``insert`` did not take over.

        Raises:
            CacheIntegrityError: a page is already free, is cached, or is named twice; nothing has changed.
        """
        self.pool.free(pages)

    def evict(self, num_pages: int) -> int:
        """Free the least recently used unlocked pages, the deepest of a prefix first.

        Returns:
            Freed pages: exactly ``num_pages``, or all evictable pages if they are fewer.
        """
        self._join_runs()
        goal = min(num_pages, self.lru.num_pages)
        freed = 0
        while freed < goal:
            leaf = self.lru.pop_oldest()
            if leaf.num_pages > goal - freed:
                self.lru.put_oldest(self.split(leaf, leaf.num_pages - (goal - freed)))
            freed += leaf.num_pages
            self._evict_node(leaf)
        return freed

    def clear(self, weight_version: str | None = None) -> None:
        """Remove every prefix. Requests keep the pages that they hold.

        Args:
            weight_version: version of the weights that compute all later pages: their namespace becomes that of calls
                that give none. None keeps the present one.

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
        if self.recorder is not None:
            self.recorder.record_cleared()
        if self.decisions is not None:
            self.decisions.note("clear", self.pool.num_free, weight_version or "")
        if weight_version is not None:
            self.namespace = weight_namespace(weight_version)

    def take_events(self) -> tuple[KVCacheEvent, ...]:
        """Return the events since the last call, in order, and forget them; always empty without ``record``.

        Call it every step. ``EventRecorder`` bounds the events that wait.
        """
        return self.recorder.take_events() if self.recorder is not None else ()

    def block_hashes(self) -> Iterator[int]:
        """Iterate over the hashes of all cached pages, parents before children. Use it in checks, not in steps."""
        return self.tree.block_hashes()

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Return the hashes of all cached pages, as ``HeldBlocksSource`` declares. All are on the device.

        Takes 2 ms for 36,000 pages in 6,000 nodes.
        """
        if not self.tree.hashed:
            return {medium_group(None): array("q", self.block_hashes())}
        return {medium_group(None): block_hash_array(b"".join(node.digests for node in self.tree.walk()))}

    def record_decisions(self, log: DecisionSink) -> None:
        """Note from now on what is evicted and cleared, as ``HiRadixCache.record_decisions`` does."""
        self.decisions = log

    def check_integrity(self) -> None:
        """Check tree, pool and eviction order against each other. Walks everything: for tests and diagnosis.

        Raises:
            CacheIntegrityError: with the counts that differ.
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
        """Return the path of a match, with its last node cut at the end of the match. Touch the path next."""
        path = descent.path
        if path and descent.cut < path[-1].num_pages:
            path[-1] = self.split(path[-1], descent.cut)
        return path

    def split(self, node: RadixNode, cut: int) -> RadixNode:
        """Cut a node after ``cut`` pages. Return the upper part."""
        upper = self.tree.split(node, cut)
        self.lru.split(upper, node)
        if self.lower is not None:
            self.lower.split(upper, node)
        return upper

    def mark_joinable(self, node: RadixNode) -> None:
        """Check at the next join whether a node fits its parent, because its holders or its transfers have changed.

        Only a locked node qualifies: an unlocked one may have been used at another time than its parent.
        """
        if node.lock_count:
            self.tree.joinable[node] = None

    def attach(self, node: RadixNode, pages: Sequence[int]) -> None:
        """Give a node that is not on the device the pages of a request or a transfer. Touch its path next."""
        self.pool.move_to_cache(pages)
        self._put(node, array("I", pages))

    def detach(self, node: RadixNode) -> None:
        """Remove a node from the device because its pages have the wrong content, and free the pages.

        Raises:
            CacheIntegrityError: a request has locked the node, or a descendant is on the device; nothing has changed.
        """
        if node.lock_count or any(child.pages for child in node.children.values()):
            raise CacheIntegrityError(f"{node} is in use, but its pages do not hold what they should")
        self.lru.discard(node)
        self._evict_node(node)

    def _evict_node(self, node: RadixNode) -> None:
        """Remove a node from the device. A lower tier keeps it, or it leaves the tree."""
        if self.decisions is not None:
            self.decisions.note("evict", node.pages[0], node.num_pages)
        self.pool.free_cached(node.pages)
        if self.recorder is not None:
            self.recorder.record_removed(node)
        if self.lower is None or not self.lower.on_evicted(node):
            self.tree.remove(node)

    def _put(self, node: RadixNode, pages: array[int]) -> None:
        """Set a node's pages, which the pool counts as cached."""
        node.pages = pages
        if self.recorder is not None:
            self.recorder.record_stored(node)

    def insert_path(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace
    ) -> list[RadixNode]:
        """Insert like ``insert``. Return the nodes of the prefix from the root on, all of them on the device."""
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
        self.pool.move_to_cache(fresh)  # may raise; the rest cannot fail

        path, known = self.split_path(descent), descent.num_pages
        self.pool.free(duplicates)
        if len(cached) < known:
            self._fill_path(path, given, len(cached))
        if known < len(given):
            page_bytes = self.tree.page_bytes
            tail = packed[known * page_bytes : len(given) * page_bytes]
            leaf = self.tree.append(path[-1] if path else self.tree.root, tail, given[known:], namespace)
            if self.recorder is not None:
                self.recorder.record_stored(leaf)
            if self.lower is not None:
                self.lower.on_computed(leaf)
            path.append(leaf)
        self.lru.touch(reversed(path))
        return path

    def match_from_path(self, path: list[RadixNode]) -> PrefixMatch:
        pages = _pages_of(path)
        return PrefixMatch(len(pages) * self.page_size, pages, path[-1] if path else self.tree.root)

    def _join_runs(self) -> None:
        joinable, self.tree.joinable = self.tree.joinable, {}
        for node in joinable:
            upper = node.parent
            if upper is None or not self.tree.can_join(node) or not self.lru.were_used_together(upper, node):
                continue
            if self.lower is None or self.lower.join(upper, node):
                self.lru.joined(upper)
                self.tree.join(node)

    def _fill_path(self, path: list[RadixNode], pages: array[int], first_page: int) -> None:
        """Give pages, from ``first_page`` on, to those nodes of a path that only lower tiers hold."""
        end = 0
        for node in path:
            end += node.num_pages
            if end > first_page:
                self._put(node, pages[end - node.num_pages : end])
                if self.lower is not None:
                    self.lower.on_computed(node)


def _pages_of(path: list[RadixNode]) -> array[int]:
    pages = array("I")
    for node in path:
        pages += node.pages
    return pages
