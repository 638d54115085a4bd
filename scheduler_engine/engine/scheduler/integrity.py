"""SchedulerIntegrity: the pool checks of a scheduler, its allocation log, and the progress of its step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_components import ParallelState, RadixCache
from scheduler_components.cache import RadixNode
from scheduler_components.checks.allocation_log import AllocationLog
from scheduler_components.checks.pool_stats_observer import AuditedPool, PoolStatsObserver, RadixCachePool
from scheduler_components.invariant_checker import PoolInvariantChecker, PublishedBlocks
from scheduler_components.ports import AllocationSink, KvEventSource, NullAllocationSink, PageHolders
from scheduler_components.scheduling.request_kv_cache import RequestPageHolders
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import HeldCount, PageHolding, PoolCount, RequestState
from scheduler_components.watchdog import StepProgress
from scheduler_engine.engine.config import IntegrityConfig
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.request import Request

__all__ = ["SchedulerIntegrity", "RequestSlotPool"]

REQUEST_SLOT_POOL = "req"


@dataclass(slots=True, kw_only=True)
class RequestSlotPool:
    """The ``AuditedPool`` of request slots. Slots have no numbers here: a slot is an index of ``queues.running``."""

    queues: RequestQueues[Request]
    name: str = REQUEST_SLOT_POOL

    def count(self) -> PoolCount:
        size, running = self._size, self.queues.running
        held = [request.state for request in running].count(RequestState.RUNNING)
        return PoolCount(self.name, size, size - len(running), uncached=held)

    def free_pages(self) -> Sequence[int]:
        return range(len(self.queues.running), self._size)

    def holdings(self) -> Iterator[PageHolding]:
        for slot, request in enumerate(self.queues.running):
            if request.state is RequestState.RUNNING:
                yield PageHolding(request.rid, "request", (slot,))

    def tree_nodes(self) -> Iterable[RadixNode]:
        return ()

    @property
    def _size(self) -> int:
        """Slots; while more requests run than a lowered limit allows, the slots that they have."""
        return max(self.queues.max_running_requests, len(self.queues.running))


@dataclass(slots=True, kw_only=True)
class RequestsAndSessions:
    """The ``PageHolders`` of a scheduler. Its sessions lock pages of the cache and own none."""

    requests: PageHolders
    sessions: PageHolders

    def count_held(self) -> HeldCount:
        return self.requests.count_held()

    def holdings(self) -> Iterator[PageHolding]:
        yield from self.requests.holdings()
        yield from self.sessions.holdings()


@dataclass(slots=True, kw_only=True)
class SchedulerIntegrity:
    """The checks of one scheduler. Made by ``SchedulerIntegrity.compose``.

    Attributes:
        checker: checks the pools every few steps.
        allocation_log: records which request allocates and frees which pages.
        events: source of the publisher: the cache, or a wrapper that also follows the events.
        pools: measures how full the pools are.
        progress: the current step and its phase, which the watchdog reads.
    """

    checker: PoolInvariantChecker
    allocation_log: AllocationSink
    events: KvEventSource
    pools: PoolStatsObserver
    progress: StepProgress = field(default_factory=StepProgress)

    @classmethod
    def compose(
        cls,
        config: IntegrityConfig,
        parallel: ParallelState,
        tiers: CacheTiers,
        queues: RequestQueues[Request],
        sessions: PageHolders,
    ) -> SchedulerIntegrity:
        """Wire the checks of a scheduler's tiers, queues and sessions. A rank without a stream compares no events."""
        cache = tiers.cache
        progress = StepProgress()
        requests = RequestsAndSessions(requests=RequestPageHolders(queues=queues), sessions=sessions)
        if isinstance(cache, RadixCache):
            pool = RadixCachePool(cache=cache, requests=requests)
        else:
            pool = RadixCachePool(cache=cache.device, requests=requests, transfers=cache.transfers)
        audited: tuple[AuditedPool, ...] = (pool, RequestSlotPool(queues=queues), *tiers.lower_pools)
        checker = PoolInvariantChecker(pools=audited, policy=config.checks, progress=progress)
        pools = PoolStatsObserver(pools=(pool,), page_size=cache.page_size)
        integrity = cls(
            checker=checker, allocation_log=NullAllocationSink(), events=cache, pools=pools, progress=progress
        )
        if config.owners_one_in:
            log = AllocationLog(progress=progress, one_in=config.owners_one_in)
            integrity.allocation_log = checker.log = log
            if not isinstance(cache, RadixCache):
                cache.record_allocations(log)
        if config.follows_events and parallel.owns_kv_stream:
            integrity.events = checker.published = PublishedBlocks(source=cache)
            checker.cached = cache
        return integrity
