"""RequestKvCache: fetch, match, grow, cache and free the KV pages of requests, over any prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace
from scheduler_components.ports import AllocationSink, DecisionSink, NullAllocationSink, NullDecisionLog
from scheduler_components.values import CachedTokens, FinishReason, SchedulerCounters

if TYPE_CHECKING:
    from scheduler_components.hicache import HiRadixCache

__all__ = [
    "KV_POOL",
    "CachedPrefix",
    "KvRequest",
    "PrefixCache",
    "RequestKvCache",
    "pages_for",
]

KV_POOL = "full"
"""Name of the KV pool in checks and allocation logs, as in SGLang's reports."""

Node = TypeVar("Node")
Node_co = TypeVar("Node_co", covariant=True)
"""The cache's own handle of the end of a prefix. Requests keep it and read nothing of it."""


def pages_for(num_tokens: int, page_size: int) -> int:
    """Return the number of pages that hold ``num_tokens`` positions."""
    return -(-num_tokens // page_size)


class CachedPrefix(Protocol[Node_co]):
    """The cached part of a prompt: ``PrefixMatch`` of ``RadixCache``."""

    @property
    def num_tokens(self) -> int:
        """Covered tokens, in whole pages."""
        ...

    @property
    def page_array(self) -> Sequence[int]:
        """One page index for each whole page, in order."""
        ...

    @property
    def node(self) -> Node_co:
        """The end of the prefix, to be locked before the next call that may evict."""
        ...


class PrefixCache(Protocol[Node]):
    """A pool of KV pages with cached prefixes: ``RadixCache``, ``HiRadixCache`` or a table of hashed blocks.

    It has ten members because a request needs all of a prefix and all of a pool, and because one object decides which
    cached pages make room for new ones.
    """

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Tokens of all pages that requests can get. A page that the engine reserves (a null block) is left out."""
        ...

    @property
    def free_tokens(self) -> int:
        """Tokens that can be allocated without eviction."""
        ...

    @property
    def evictable_tokens(self) -> int:
        """Cached tokens that no request has locked."""
        ...

    def match_prefix(self, token_ids: Sequence[int], namespace: PrefixNamespace | None = None) -> CachedPrefix[Node]:
        """Find the longest cached prefix, in whole pages."""
        ...

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], namespace: PrefixNamespace | None = None
    ) -> CachedPrefix[Node]:
        """Cache a computed prefix and take over its pages; return the pages that the request uses from here on.

        A cache that stores a prefix once returns its own pages and frees duplicates. A cache that keeps duplicates,
        because the pages of a running request may not change, returns ``pages``.
        """
        ...

    def lock(self, node: Node) -> None:
        """Protect the prefix that ends in ``node`` from eviction, once more."""
        ...

    def unlock(self, node: Node) -> None:
        """Release one ``lock``."""
        ...

    def allocate(self, num_pages: int) -> Sequence[int]:
        """Allocate pages to a request. Evict cached ones if necessary."""
        ...

    def free(self, pages: Sequence[int]) -> None:
        """Free pages that ``allocate`` returned and ``insert`` did not take over."""
        ...


class KvRequest(Protocol[Node]):
    """What is stored of a request, as ``RequestKvCache`` reads and writes it. ``Request`` describes the members."""

    pages: list[int]
    num_cached_pages: int
    node: Node | None
    num_computed_tokens: int
    num_cached_tokens: int
    prefill_end: int
    is_sampled: bool

    @property
    def rid(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_retractions(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


def _same_weights(request: object, base: PrefixNamespace) -> PrefixNamespace:  # of a request without an adapter
    return base


def _ignore(request: object, cached: CachedTokens) -> None:
    pass


@dataclass(slots=True, kw_only=True)
class RequestKvCache(Generic[Node]):  # noqa: SCH003 - the cache, its tiers, and what is noted about requests
    """Assigns KV pages to requests and frees them.

    A page of a request is either its own, which means allocated and not yet full, or shared, which means that it is in
    the cache and locked through ``request.node``. ``cache_unfinished`` moves full pages into the cache, so that other
    requests can match them and a stored event is recorded, in the step in which their KV becomes usable.

    Pages of waiting requests are fetched from the tiers below the device, and the pages of preempted ones are copied
    there, so that they need not be computed again.

    Attributes:
        cache: the KV pool and its cached prefixes.
        tiers: the tiers below the device: ``cache`` itself if it is a ``HiRadixCache``. None for a cache without.
        counters: counts evicted tokens.
        allocation_log: records which request allocates and frees which pages.
        decisions: where it notes how much of a request was cached.
        namespace: identifies a prefix together with its tokens; it depends on the weights that compute the KV.
        namespaces: returns the namespace of a request from ``namespace``: it adds the adapter and the session, such as
            ``Request.namespace_in``. By default all requests compute with the same weights.
        on_cached_prompt: gets a request and on which tiers its cached tokens were found, at its admission without an
            earlier preemption, such as ``Request.record_cached_prompt``.
    """

    cache: PrefixCache[Node]
    tiers: HiRadixCache | None = None
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    allocation_log: AllocationSink = field(default_factory=NullAllocationSink)
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    namespace: PrefixNamespace = DEFAULT_NAMESPACE
    namespaces: Callable[[Any, PrefixNamespace], PrefixNamespace] = _same_weights  # noqa: SCH004 a request of your class
    on_cached_prompt: Callable[[Any, CachedTokens], None] = _ignore  # noqa: SCH004 a request of your class

    def namespace_of(self, request: KvRequest[Node]) -> PrefixNamespace:
        """Return what identifies a prefix of this request together with its tokens."""
        return self.namespaces(request, self.namespace)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.cache.page_size

    @property
    def available_pages(self) -> int:
        """Number of pages that can be allocated now: free pages, and cached pages that no request locks."""
        cache = self.cache
        return (cache.free_tokens + cache.evictable_tokens) // cache.page_size

    @property
    def token_usage(self) -> float:
        """Share of the pool that requests hold, 0 to 1."""
        cache = self.cache
        return (cache.capacity_tokens - cache.free_tokens - cache.evictable_tokens) / cache.capacity_tokens

    @property
    def num_look_ahead(self) -> int:
        """Waiting requests behind the next one whose pages are fetched already; 0 without tiers."""
        return 0 if self.tiers is None else self.tiers.prefetch_queue.num_look_ahead

    @property
    def num_pending_pages(self) -> int:
        """Device pages that copies between tiers hold, and that can be allocated after them."""
        return 0 if self.tiers is None else self.tiers.num_pages_in_transfer

    def start(self, request: KvRequest[Node]) -> None:
        """Begin to fetch the prefix of a new request, and count the tokens that are cached already."""
        if self.tiers is not None:
            self.tiers.prefetch_queue.start(request.rid, request.token_ids[:-1], self.namespace_of(request))
        request.num_cached_tokens = self.match_length(request)

    def cancel(self, rid: str) -> None:
        """Stop to fetch the prefix of a waiting request."""
        if self.tiers is not None:
            self.tiers.prefetch_queue.cancel(rid)

    def restart(self, requests: Iterable[KvRequest[Node]], namespace: PrefixNamespace) -> None:
        """Start waiting requests again in ``namespace``, because the cache was cleared."""
        self.namespace = namespace
        for request in requests:
            self.cancel(request.rid)
            self.start(request)

    def is_ready(self, request: KvRequest[Node], *, is_next: bool) -> bool:
        """Return True if a waiting request has no prefetch to wait for. Start one if necessary."""
        if self.tiers is None:
            return True
        namespace = self.namespace_of(request)
        return self.tiers.prefetch_queue.is_done(request.rid, request.token_ids[:-1], namespace, is_next=is_next)

    def on_admitted(self, request: KvRequest[Node]) -> None:
        """Record where the cached prefix of a request was found, unless it comes back after a preemption."""
        if request.num_retractions:
            self.cancel(request.rid)
            return
        cached = CachedTokens(device=request.num_cached_tokens)
        if self.tiers is not None:
            cached = self.tiers.prefetch_queue.record_admission(
                request.rid, prompt_tokens=request.num_prompt_tokens, cached_tokens=request.num_cached_tokens
            )
        self.on_cached_prompt(request, cached)

    def on_preempted(self, request: KvRequest[Node]) -> None:
        """Copy the full pages of a preempted request to the host, so that they need not be computed again."""
        if self.tiers is not None:
            self.tiers.write_to_host(request.token_ids, self.namespace_of(request))

    def prefetched_spans(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the id of each waiting request and which of its tokens a prefetch has found."""
        return iter(()) if self.tiers is None else self.tiers.prefetch_queue.prefetched_spans()

    def match_length(self, request: KvRequest[Node]) -> int:
        """Return how many of the request's tokens are cached, without locking them."""
        return self.cache.match_prefix(request.token_ids[:-1], self.namespace_of(request)).num_tokens

    def match(self, request: KvRequest[Node]) -> None:
        """Match and lock the longest cached prefix of a request that is about to run.

        The match leaves out the last token, because the device must compute it to produce the next one.
        """
        match = self.cache.match_prefix(request.token_ids[:-1], self.namespace_of(request))
        self.cache.lock(match.node)
        request.is_sampled = self.allocation_log.is_sampled(request.rid)
        if request.is_sampled:
            self.allocation_log.record("locked", KV_POOL, request.rid, "RequestKvCache.match", match.page_array)
        request.node = match.node
        request.pages = list(match.page_array)
        request.num_cached_pages = len(request.pages)
        request.num_computed_tokens = request.num_cached_tokens = match.num_tokens
        self.decisions.note("match", request.rid, match.num_tokens)

    def grow(self, request: KvRequest[Node], num_tokens: int) -> bool:
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

    def cache_unfinished(self, request: KvRequest[Node]) -> None:
        """Insert the request's full pages into the cache and lock them there.

        If another request has inserted the same prefix already, a cache without duplicates replaces this request's
        pages, which are freed.
        """
        page_size = self.cache.page_size
        num_pages = request.num_computed_tokens // page_size
        if num_pages <= request.num_cached_pages:
            return
        own, first = request.pages[:num_pages], request.num_cached_pages
        match = self.cache.insert(request.token_ids[: num_pages * page_size], own, self.namespace_of(request))
        self.cache.lock(match.node)
        if request.node is not None:
            self.cache.unlock(request.node)
        if request.is_sampled:
            self.allocation_log.record("cached", KV_POOL, request.rid, "RequestKvCache.cache_unfinished", own[first:])
            self.allocation_log.record(
                "locked", KV_POOL, request.rid, "RequestKvCache.cache_unfinished", match.page_array[first:]
            )
        request.node = match.node
        request.pages[:num_pages] = match.page_array
        request.num_cached_pages = num_pages

    def free(self, request: KvRequest[Node]) -> None:
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
