"""The pools of a scheduler that are checked: pages of its tiers, held by requests and sessions, and request slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from scheduler_components import ParallelState, RadixCache
from scheduler_components.cache import RadixNode
from scheduler_components.checks.allocation_log import AllocationLog
from scheduler_components.checks.pool_stats_observer import RadixCachePool
from scheduler_components.ports import PageHolders
from scheduler_components.scheduling.composition import PoolChecks, compose_checks
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import HeldCount, PageHolding, PoolCount, RequestState
from scheduler_components.watchdog import StepProgress
from scheduler_engine.engine.config import IntegrityConfig
from scheduler_engine.engine.scheduler.cache_tiers import CacheTiers
from scheduler_engine.engine.scheduler.request import EngineRequest

REQUEST_SLOT_POOL = "req"


@dataclass(slots=True, kw_only=True)
class RequestSlotPool:
    """The ``AuditedPool`` of request slots. Slots have no numbers here: a slot is an index of ``queues.running``."""

    queues: RequestQueues[EngineRequest]
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


def compose_integrity(
    config: IntegrityConfig,
    parallel: ParallelState,
    tiers: CacheTiers,
    queues: RequestQueues[EngineRequest],
    sessions: PageHolders,
    progress: StepProgress,
    log: AllocationLog | None,
) -> PoolChecks:
    """Compose the checks of a scheduler's tiers, queues and sessions. A rank without a stream compares no events."""
    cache, holders = tiers.cache, RequestsAndSessions(requests=queues, sessions=sessions)
    if isinstance(cache, RadixCache):
        pool = RadixCachePool(cache=cache, requests=holders)
    else:
        pool = RadixCachePool(cache=cache.device, requests=holders, transfers=cache.transfers)
        if log is not None:
            cache.record_allocations(log)
    return compose_checks(
        pool,
        cache,
        config.checks,
        more_pools=(RequestSlotPool(queues=queues), *tiers.lower_pools),
        progress=progress,
        log=log,
        follows_events=config.follows_events and parallel.owns_kv_stream,
    )
