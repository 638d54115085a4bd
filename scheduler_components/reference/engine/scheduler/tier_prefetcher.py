"""TierPrefetcher: fetch the prefixes of waiting requests from the tiers below the device."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_components.cache import PrefixNamespace, RadixNode
from scheduler_components.reference.engine.scheduler.cache_tiers import CacheTiers
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.request_kv_cache import RequestKvCache
from scheduler_components.request_queues import RequestQueues

__all__ = ["TierPrefetcher"]


@dataclass(slots=True, kw_only=True)
class TierPrefetcher:
    """The ``Prefetcher`` of a batcher over the prefetch queue of the tiers.

    Attributes:
        tiers: the prefix cache and its tiers.
        kv_cache: its namespace is part of each prefix.
        queues: the waiting requests, whose uncached tokens are recounted.
    """

    tiers: CacheTiers
    kv_cache: RequestKvCache[RadixNode]
    queues: RequestQueues[Request]

    @property
    def num_look_ahead(self) -> int:
        """Waiting requests behind the next one whose pages are fetched already; 0 without tiers."""
        return self.tiers.prefetch_queue.num_look_ahead

    @property
    def num_pending_pages(self) -> int:
        """Device pages that copies between tiers hold, and that can be allocated after them."""
        return self.tiers.num_pages_in_transfer

    def start(self, request: Request) -> None:
        """Start to prefetch the prefix of a new request."""
        self.tiers.prefetch_queue.start(request.rid, request.token_ids[:-1], self.kv_cache.namespace_of(request))

    def is_ready(self, request: Request, *, is_next: bool) -> bool:
        """Return True if a waiting request has no prefetch to wait for. Start one if necessary."""
        prefetch_queue, namespace = self.tiers.prefetch_queue, self.kv_cache.namespace_of(request)
        return prefetch_queue.is_done(request.rid, request.token_ids[:-1], namespace, is_next=is_next)

    def on_admitted(self, request: Request) -> None:
        """Record where the cached prefix of a request was found, at its first admission."""
        if request.num_retractions:
            self.tiers.prefetch_queue.cancel(request.rid)
            return
        request.cached_prompt = self.tiers.prefetch_queue.record_admission(
            request.rid, prompt_tokens=request.num_prompt_tokens, cached_tokens=request.num_cached_tokens
        )
        request.num_cached_prompt_tokens = request.num_cached_tokens

    def on_preempted(self, request: Request) -> None:
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
