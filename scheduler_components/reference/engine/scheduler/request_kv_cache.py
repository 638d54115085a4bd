"""RequestKvCache: match, grow, cache and free the KV pages of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace
from scheduler_components.ports import AllocationSink, NullAllocationSink
from scheduler_components.reference.engine.scheduler.cache_tiers import PrefixCache
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.values import SchedulerCounters

__all__ = [
    "KV_POOL",
    "pages_for",
    "RequestKvCache",
]

KV_POOL = "full"
"""Name of the KV pool in checks and allocation logs, as in SGLang's reports."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the number of pages that hold ``num_tokens`` positions."""
    return -(-num_tokens // page_size)


@dataclass(slots=True, kw_only=True)
class RequestKvCache:
    """Assigns KV pages to requests and frees them.

    A page of a request is either its own, which means allocated and not yet full, or shared, which means that it is in
    the radix tree and locked through ``request.node``. ``cache_unfinished`` moves full pages into the tree, so that
    other requests can match them and a stored event is recorded, in the step in which their KV becomes usable.

    Attributes:
        cache: the KV pool and its radix tree.
        counters: counts evicted tokens.
        allocation_log: records which request allocates and frees which pages.
        namespace: identifies a prefix together with its tokens; it depends on the weights that compute the KV.
    """

    cache: PrefixCache
    counters: SchedulerCounters
    allocation_log: AllocationSink = field(default_factory=NullAllocationSink)
    namespace: PrefixNamespace = DEFAULT_NAMESPACE

    @property
    def available_pages(self) -> int:
        """Number of pages that can be allocated now: free pages, and cached pages that no request locks."""
        cache = self.cache
        return (cache.free_tokens + cache.evictable_tokens) // cache.page_size

    def match_length(self, request: Request) -> int:
        """Return how many of the request's tokens are cached, without locking them."""
        return self.cache.match_prefix(request.token_ids[:-1], self.namespace).num_tokens

    def match(self, request: Request) -> None:
        """Match and lock the longest cached prefix of a request that is about to run.

        The match leaves out the last token, because the device must compute it to produce the next one.
        """
        match = self.cache.match_prefix(request.token_ids[:-1], self.namespace)
        self.cache.lock(match.node)
        request.is_sampled = self.allocation_log.is_sampled(request.rid)
        if request.is_sampled:
            self.allocation_log.record("locked", KV_POOL, request.rid, "RequestKvCache.match", match.page_array)
        request.node = match.node
        request.pages = list(match.pages)
        request.num_cached_pages = len(match.pages)
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate pages for ``num_tokens`` more positions, evicting if necessary. Return False if the pool is full."""
        page_size = self.cache.page_size
        num_missing = pages_for(request.num_computed_tokens + num_tokens, page_size) - len(request.pages)
        if num_missing <= 0:
            return True
        if num_missing > self.available_pages:
            return False
        self.counters.evicted_tokens_total += max(0, num_missing * page_size - self.cache.free_tokens)
        pages = self.cache.allocate(num_missing)
        request.pages += pages
        if request.is_sampled:
            self.allocation_log.record("allocated", KV_POOL, request.rid, "RequestKvCache.grow", pages)
        return True

    def cache_unfinished(self, request: Request) -> None:
        """Insert the request's full pages into the tree and lock them there.

        If another request has inserted the same prefix already, its pages replace this request's, which are freed.
        """
        page_size = self.cache.page_size
        num_pages = request.num_computed_tokens // page_size
        if num_pages <= request.num_cached_pages:
            return
        own, first = request.pages[:num_pages], request.num_cached_pages
        match = self.cache.insert(request.token_ids[: num_pages * page_size], own, self.namespace)
        self.cache.lock(match.node)
        if request.node is not None:
            self.cache.unlock(request.node)
        if request.is_sampled:
            self.allocation_log.record("cached", KV_POOL, request.rid, "RequestKvCache.cache_unfinished", own[first:])
            self.allocation_log.record(
                "locked", KV_POOL, request.rid, "RequestKvCache.cache_unfinished", match.page_array[first:]
            )
        request.node = match.node
        request.pages[:num_pages] = match.pages
        request.num_cached_pages = num_pages

    def free(self, request: Request) -> None:
        """Release all pages. Full pages stay in the cache for later requests; the unfinished page is freed."""
        self.cache_unfinished(request)
        shared, own = request.pages[: request.num_cached_pages], request.pages[request.num_cached_pages :]
        self.cache.free(own)
        if request.node is not None:
            self.cache.unlock(request.node)
        if request.is_sampled:
            self.allocation_log.record("freed", KV_POOL, request.rid, "RequestKvCache.free", own)
            self.allocation_log.record("unlocked", KV_POOL, request.rid, "RequestKvCache.free", shared)
        request.num_cached_tokens = request.num_cached_pages * self.cache.page_size
        request.node = None
        request.pages = []
        request.num_cached_pages = request.num_computed_tokens = request.prefill_end = 0
