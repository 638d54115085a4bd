"""KV pages between the cache and the requests: who holds which page, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.reference.cache_tiers import PrefixCache
from scheduler_components.reference.policy import pages_for
from scheduler_components.reference.request import Request
from scheduler_components.reference.totals import RunningTotals

__all__ = ["RequestPages"]


@dataclass(slots=True, kw_only=True)
class RequestPages:
    """Gives pages to requests and takes them back.

    A page that a request holds is either its own (allocated, being filled) or shared (it stands in the cache's tree,
    locked through ``request.node``). ``share`` turns own pages into shared ones once they are full, so that others
    find them, and events say "stored", from the step in which their KV is usable.

    Attributes:
        cache: the KV pool and its radix tree.
        totals: evictions are counted here.
    """

    cache: PrefixCache
    totals: RunningTotals

    @property
    def available_pages(self) -> int:
        """Pages that can be had now: free ones, and cached ones that nobody holds."""
        cache = self.cache
        return (cache.free_tokens + cache.evictable_tokens) // cache.page_size

    def look_up(self, request: Request) -> int:
        """Return how many of the request's tokens the cache covers, without holding them."""
        return self.cache.match_prefix(request.token_ids[:-1]).num_tokens

    def attach(self, request: Request) -> None:
        """Hold the longest cached prefix of a request that is about to run.

        The last token is left out: it must go through the device to give the next one.
        """
        match = self.cache.match_prefix(request.token_ids[:-1])
        self.cache.lock(match.node)
        request.node = match.node
        request.pages = list(match.pages)
        request.num_shared_pages = len(match.pages)
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more positions, evicting what nobody holds; False if the pool is too full."""
        page_size = self.cache.page_size
        num_missing = pages_for(request.num_computed_tokens + num_tokens, page_size) - len(request.pages)
        if num_missing <= 0:
            return True
        if num_missing > self.available_pages:
            return False
        self.totals.evicted_tokens += max(0, num_missing * page_size - self.cache.free_tokens)
        request.pages += self.cache.allocate(num_missing)
        return True

    def share(self, request: Request) -> None:
        """Put the request's full pages into the tree and hold them there.

        Where another request was quicker with the same prefix, its pages take the place of ours, which are freed.
        """
        page_size = self.cache.page_size
        num_pages = request.num_computed_tokens // page_size
        if num_pages <= request.num_shared_pages:
            return
        match = self.cache.insert(request.token_ids[: num_pages * page_size], request.pages[:num_pages])
        self.cache.lock(match.node)
        if request.node is not None:
            self.cache.unlock(request.node)
        request.node = match.node
        request.pages[:num_pages] = match.pages
        request.num_shared_pages = num_pages

    def release(self, request: Request) -> None:
        """Let go of all pages: full ones stay in the cache for whoever comes next, the unfinished one is freed."""
        self.share(request)
        self.cache.free(request.pages[request.num_shared_pages :])
        if request.node is not None:
            self.cache.unlock(request.node)
        request.num_cached_tokens = request.num_shared_pages * self.cache.page_size
        request.node = None
        request.pages = []
        request.num_shared_pages = request.num_computed_tokens = request.prefill_end = 0
