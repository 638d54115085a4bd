"""RequestKvCache: match, grow, cache and free the KV pages of requests, over any prefix cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from scheduler_components.cache import DEFAULT_NAMESPACE, PrefixNamespace
from scheduler_components.ports import AllocationSink, DecisionSink, NullAllocationSink, NullDecisionLog
from scheduler_components.scheduling.request_queues import RequestQueues, TrackedRequest
from scheduler_components.values import HeldCount, PageHolding, SchedulerCounters

__all__ = [
    "KV_POOL",
    "CachedPrefix",
    "KvRequest",
    "PrefixCache",
    "NullRequestNamespaces",
    "RequestKvCache",
    "RequestNamespaces",
    "RequestPageHolders",
    "pages_for",
]

KV_POOL = "full"
"""Name of the KV pool in checks and allocation logs, as in SGLang's reports."""

Node = TypeVar("Node")
Request_contra = TypeVar("Request_contra", contravariant=True)
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
    """A request, as ``RequestKvCache`` reads and writes it: the scheduler's own class.

    Attributes:
        pages: KV pages of positions 0 to ``num_computed_tokens`` and of the positions that this step computes. The
            first ``num_cached_pages`` belong to the cache and are locked through ``node``.
        num_cached_pages, node: None for a request without a lock.
        num_computed_tokens: positions whose KV is in ``pages``.
        num_cached_tokens: number of tokens that the cache covered at the last match.
        prefill_end: computing positions below it is prefill; 0 for a request without pages.
        is_sampled: the allocation log records its pages; no decision depends on it.
    """

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
    def token_ids(self) -> Sequence[int]:
        """The prompt, then the generated tokens; u32."""
        ...


class RequestNamespaces(Protocol[Request_contra]):
    """Says what the KV of a request depends on besides its tokens and the weights: an adapter, a session, a salt."""

    def namespace_of(self, request: Request_contra, base: PrefixNamespace) -> PrefixNamespace:
        """Return the namespace of a request. ``base`` depends on the weights; keep its parts."""
        ...


class NullRequestNamespaces:
    """The namespaces of a scheduler whose requests all compute with the same weights."""

    def namespace_of(self, request: object, base: PrefixNamespace) -> PrefixNamespace:
        return base


@dataclass(slots=True, kw_only=True)
class RequestKvCache(Generic[Node]):
    """Assigns KV pages to requests and frees them.

    A page of a request is either its own, which means allocated and not yet full, or shared, which means that it is in
    the cache and locked through ``request.node``. ``cache_unfinished`` moves full pages into the cache, so that other
    requests can match them and a stored event is recorded, in the step in which their KV becomes usable.

    Attributes:
        cache: the KV pool and its cached prefixes.
        counters: counts evicted tokens.
        allocation_log: records which request allocates and frees which pages.
        decisions: where it notes how much of a request was cached.
        namespace: identifies a prefix together with its tokens; it depends on the weights that compute the KV.
        namespaces: adds what differs between requests, such as their adapters.
    """

    cache: PrefixCache[Node]
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    allocation_log: AllocationSink = field(default_factory=NullAllocationSink)
    decisions: DecisionSink = field(default_factory=NullDecisionLog)
    namespace: PrefixNamespace = DEFAULT_NAMESPACE
    namespaces: RequestNamespaces[KvRequest[Node]] = field(default_factory=NullRequestNamespaces)

    def namespace_of(self, request: KvRequest[Node]) -> PrefixNamespace:
        """Return what identifies a prefix of this request together with its tokens."""
        return self.namespaces.namespace_of(request, self.namespace)

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


class HoldingRequest(TrackedRequest, Protocol):
    """A request, as ``RequestPageHolders`` reads it: the scheduler's own class.

    Attributes:
        pages, num_cached_pages: as in ``KvRequest``.
    """

    pages: list[int]
    num_cached_pages: int

    @property
    def node(self) -> object:
        """The end of the locked prefix; None without a lock."""
        ...


H = TypeVar("H", bound=HoldingRequest)


@dataclass(slots=True, kw_only=True)
class RequestPageHolders(Generic[H]):
    """The ``PageHolders`` of a scheduler: its requests. Waiting requests are included; they should hold no page.

    Attributes:
        queues: the waiting and running requests.
    """

    queues: RequestQueues[H]

    def count_held(self) -> HeldCount:
        return HeldCount(sum([len(request.pages) - request.num_cached_pages for request in self.queues.running]))

    def holdings(self) -> Iterator[PageHolding]:
        for request in self.queues:
            if request.pages or request.node is not None:
                end = request.num_cached_pages
                yield PageHolding(request.rid, "request", request.pages[end:], request.pages[:end], request.node)
