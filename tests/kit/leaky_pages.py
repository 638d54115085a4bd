"""A ``RequestKvCache`` that loses a page or a lock of chosen requests, as a forgotten line of code does."""

from __future__ import annotations

from typing import Literal, TypeAlias

from kit.replaced_parts import replace_kv_cache
from scheduler_components.cache import RadixNode
from scheduler_components.scheduling.request_kv_cache import KV_POOL, KvRequest, RequestKvCache
from scheduler_engine.engine.scheduler.scheduler import Scheduler

Loss: TypeAlias = Literal["page", "lock"]


class LeakyPages(RequestKvCache[RadixNode]):
    """Frees the requests of ``guilty`` without one page, or without their lock. The log records what really happens."""

    loss: Loss
    guilty: frozenset[str]
    lost: list[str]

    @classmethod
    def put_into(cls, scheduler: Scheduler, loss: Loss, *guilty: str) -> LeakyPages:
        """Replace the pages of a scheduler."""
        sound = scheduler.kv_cache
        leaky = cls(cache=sound.cache, tiers=sound.tiers, counters=sound.counters, allocation_log=sound.allocation_log)
        leaky.loss, leaky.guilty, leaky.lost = loss, frozenset(guilty), []
        replace_kv_cache(scheduler, leaky)
        return leaky

    def free(self, request: KvRequest[RadixNode]) -> None:
        self.cache_unfinished(request)
        own = request.pages[request.num_cached_pages :]
        if request.rid not in self.guilty or not (own if self.loss == "page" else request.num_cached_pages):
            super().free(request)
            return
        self.lost.append(request.rid)
        shared, kept = request.pages[: request.num_cached_pages], own[: len(own) - (self.loss == "page")]
        self.cache.free(kept)
        self._record(request, "freed", kept)
        if self.loss == "page":
            assert request.node is not None
            self.cache.unlock(request.node)
            self._record(request, "unlocked", shared)
        request.num_cached_tokens = request.num_cached_pages * self.cache.page_size
        request.node, request.pages = None, []
        request.num_cached_pages = request.num_computed_tokens = request.prefill_end = 0

    def _record(self, request: KvRequest[RadixNode], action: Literal["freed", "unlocked"], pages: list[int]) -> None:
        if request.is_sampled:
            self.allocation_log.record(action, KV_POOL, request.rid, "LeakyPages.free", pages)
