"""TierPrefetcher: fetch the prefixes of waiting requests from the tiers below the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from scheduler_components.cache import PrefixNamespace, RadixNode
from scheduler_components.hicache.prefetch_queue import NullPrefetchQueue, PrefetchQueue
from scheduler_components.scheduling.request_kv_cache import KvRequest, RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues, TrackedRequest
from scheduler_components.values import CachedTokens

__all__ = ["PrefetchTiers", "PrefetchedRequest", "TierPrefetcher"]


class PrefetchTiers(Protocol):
    """Tiers below the device: a ``HiRadixCache``, or what has one."""

    @property
    def prefetch_queue(self) -> PrefetchQueue | NullPrefetchQueue:
        """Fetches the pages of waiting requests."""
        ...

    @property
    def num_pages_in_transfer(self) -> int:
        """Device pages that copies hold."""
        ...

    def write_to_host(self, token_ids: Sequence[int], namespace: PrefixNamespace) -> None:
        """Begin to copy the cached pages of a prefix to the host."""
        ...


class PrefetchedRequest(TrackedRequest, KvRequest[RadixNode], Protocol):
    """A request, as ``TierPrefetcher`` reads and writes it: the scheduler's own class."""

    num_cached_tokens: int

    @property
    def rid(self) -> str: ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        ...

    @property
    def num_retractions(self) -> int:
        """How often it lost its pages to other requests."""
        ...

    def record_cached_prompt(self, cached: CachedTokens) -> None:
        """Keep on which tiers its cached tokens were found, at its admission without an earlier preemption."""
        ...


R = TypeVar("R", bound=PrefetchedRequest)


@dataclass(slots=True, kw_only=True)
class TierPrefetcher(Generic[R]):
    """The ``Prefetcher`` of a batcher over the prefetch queue of the tiers.

    Attributes:
        tiers: the tiers below the device.
        kv_cache: its namespace is part of each prefix.
        queues: the waiting requests, whose uncached tokens are recounted.
    """

    tiers: PrefetchTiers
    kv_cache: RequestKvCache[RadixNode]
    queues: RequestQueues[R]

    @property
    def num_look_ahead(self) -> int:
        """Waiting requests behind the next one whose pages are fetched already; 0 without tiers."""
        return self.tiers.prefetch_queue.num_look_ahead

    @property
    def num_pending_pages(self) -> int:
        """Device pages that copies between tiers hold, and that can be allocated after them."""
        return self.tiers.num_pages_in_transfer

    def start(self, request: R) -> None:
        """Start to prefetch the prefix of a new request."""
        self.tiers.prefetch_queue.start(request.rid, request.token_ids[:-1], self.kv_cache.namespace_of(request))

    def is_ready(self, request: R, *, is_next: bool) -> bool:
        """Return True if a waiting request has no prefetch to wait for. Start one if necessary."""
        prefetch_queue, namespace = self.tiers.prefetch_queue, self.kv_cache.namespace_of(request)
        return prefetch_queue.is_done(request.rid, request.token_ids[:-1], namespace, is_next=is_next)

    def on_admitted(self, request: R) -> None:
        """Record where the cached prefix of a request was found, unless it comes back after a preemption."""
        if request.num_retractions:
            self.tiers.prefetch_queue.cancel(request.rid)
            return
        cached = self.tiers.prefetch_queue.record_admission(
            request.rid, prompt_tokens=request.num_prompt_tokens, cached_tokens=request.num_cached_tokens
        )
        request.record_cached_prompt(cached)

    def on_preempted(self, request: R) -> None:
        """Copy the full pages of a preempted request to the host, so that they need not be computed again."""
        self.tiers.write_to_host(request.token_ids, self.kv_cache.namespace_of(request))

    def update_prefetched_spans(self) -> None:
        """Recount waiting requests whose tokens a prefetch has found, so that load reports do not count these."""
        for rid, span in self.tiers.prefetch_queue.prefetched_spans():
            request = self.queues.find(rid)
            if request is not None and request in self.queues.waiting:
                self.queues.waiting.recount(request, span)

    def restart(self, namespace: PrefixNamespace) -> None:
        """Restart the prefetches of waiting requests in ``namespace``, because the cache was cleared."""
        self.kv_cache.namespace = namespace
        for request in self.queues.waiting:
            self.tiers.prefetch_queue.cancel(request.rid)
            request.num_cached_tokens = 0
            self.queues.waiting.recount(request)
            self.start(request)
