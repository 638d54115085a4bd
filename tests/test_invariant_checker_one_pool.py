"""The leaks of SGLang's issues that one KV pool and request slots can have, in the reference scheduler.

``test_invariant_checker_hybrid_pools.py`` has all six, over the pools of a hybrid model. One of them, #36081, needs a
second pool whose pages follow those of the first. The leak of a mamba state there is here the leak of a prefix lock:
both are acquired by the match and lost when the request is forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import attrs
import pytest
from kit.hybrid_scheduler import SMALL, checker_of, serve
from kit.replaced_parts import replace_kv_cache
from kit.variants import found, instead_of, variants

from scheduler_components import ParallelState
from scheduler_components.cache import RadixNode
from scheduler_components.checks.pool_stats_observer import RadixCachePool
from scheduler_components.errors import CacheIntegrityError
from scheduler_components.scheduling.request_kv_cache import KV_POOL, RequestKvCache
from scheduler_components.scheduling.request_queues import RequestQueues
from scheduler_components.values import AllocationRecord, FinishReason, PageHolding, RequestState
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel
from scheduler_engine.engine.config import IntegrityConfig
from scheduler_engine.engine.scheduler.integrity import RequestSlotPool
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler


def _pages_of(node: RadixNode) -> list[int]:
    pages, at = list[int](), node
    while at.parent is not None:
        pages, at = [*at.pages, *pages], at.parent
    return pages


class LeakyKvCache(RequestKvCache):
    @found("locks", "locked", "KeepsLockOfAborted.match_length", "submit")
    class keeps_lock_of_aborted(RequestKvCache):
        """#20010: a prefix is locked when a waiting request is matched; its abort removes the request, not the lock."""

        def match_length(self, request):
            match = self.cache.match_prefix(request.token_ids[:-1], self.namespace)
            self.cache.lock(match.node)
            component = "KeepsLockOfAborted.match_length"
            self.allocation_log.record("locked", KV_POOL, request.rid, component, match.page_array)
            request.node, request.is_sampled = match.node, True
            return match.num_tokens

        def match(self, request):
            if request.node is not None:
                pages = _pages_of(request.node)
                self.allocation_log.record("unlocked", KV_POOL, request.rid, "KeepsLockOfAborted.attach", pages)
                self.cache.unlock(request.node)
            super().match(request)

        def free(self, request):
            if request.pages:
                super().free(request)
            else:
                request.node = None

    @instead_of("free", "lost", "allocated", "RequestKvCache.grow", "batch")
    def loses_page_of_retracted(self, request):
        """#11970: the page that the current step allocated for a retracted request is not freed."""
        num_full = request.num_computed_tokens // self.cache.page_size
        if request.state is RequestState.RUNNING and len(request.pages) > num_full:
            request.pages.pop()
        super().free(request)

    @instead_of("free", "owned-and-free", "freed", "FreesTwice.release", "results")
    def frees_twice(self, request):
        """#6888: more is free and evictable than there is: the last page of a prompt is freed although it is cached."""
        shared = request.pages[: request.num_cached_pages]
        super().free(request)
        if shared and request.state is RequestState.FINISHED:
            self.cache.pool._push(array("I", shared[-1:]))  # the pool's own ``free`` refuses it
            self.allocation_log.record("freed", KV_POOL, request.rid, "FreesTwice.release", shared[-1:])

    @instead_of("free", "locks", "locked", "RequestKvCache.match", "batch")
    def keeps_lock_of_refused(self, request):
        """#16067: a request holds its prefix, is then not admitted, and forgets it."""
        if request.state is RequestState.WAITING and request.node is not None:
            request.node, request.pages = None, []
            request.num_cached_pages = request.num_computed_tokens = 0
        else:
            super().free(request)


LEAKS = variants(LeakyKvCache)


class CountsAnsweringAlone(RequestQueues):
    """#20185: no page is lost, but what requests hold that have no token yet is left out of the count."""

    __slots__ = ()

    def holdings(self) -> Iterator[PageHolding]:
        answering = {each.rid for each in self.running if each.num_output_tokens}
        return (each for each in super().holdings() if each.holder in answering)


class KeepsSlot(RequestQueues):
    """A request ends and its slot is still taken. Of no issue: what leaks besides pages."""

    def finish(self, request: EngineRequest, reason: FinishReason) -> None:
        super().finish(request, reason)
        if reason is FinishReason.LENGTH:
            self.running.append(request)


def make_scheduler(
    pages_class: type[RequestKvCache] = RequestKvCache, integrity: IntegrityConfig | None = None
) -> Scheduler:
    """The reference scheduler as it is composed, with other pages."""
    device = SimulatedDevice(model=SimulatedModel(vocab_size=3), clock=lambda: 0.0, sleep=lambda _: None)
    config = SMALL if integrity is None else attrs.evolve(SMALL, integrity=integrity)
    scheduler = Scheduler.compose(config, ParallelState.trivial(), device)
    pages = scheduler.kv_cache
    kv_cache = pages_class(
        cache=pages.cache, tiers=pages.tiers, counters=pages.counters, allocation_log=pages.allocation_log
    )
    replace_kv_cache(scheduler, kv_cache)
    return scheduler


def test_the_workload_covers_all_leaks_and_raises_no_alarm() -> None:
    scheduler = make_scheduler()
    assert serve(scheduler) is None
    totals = scheduler.request_metrics.stats()
    assert totals.num_retractions_total > 5
    assert totals.num_aborted_requests_total > 5
    stats = checker_of(scheduler).stats()
    assert (stats.problems, stats.checks_failed) == (0, 0)
    assert stats.censuses >= scheduler.num_steps


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found_in_its_step_and_its_cause_named(name: str) -> None:
    broken, rule, *cause = LEAKS[name]
    report = serve(make_scheduler(broken))
    assert report is not None, "not found"
    if rule != "locks":  # a lost lock moves no page, so counts add up
        assert report.last_sound_step == report.step - 1, "found in the step that lost it"
    problem = next(each for each in report.violations if each.rule == rule)
    culprit = problem.culprit
    assert isinstance(culprit, AllocationRecord)
    assert (problem.pool, [culprit.action, culprit.component, culprit.phase]) == (KV_POOL, cause)
    assert culprit.holder in str(problem)
    assert set(problem.pages) & set(culprit.pages)


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", LEAKS)
def test_the_default_policy_finds_each_leak_by_the_end_of_the_work(name: str) -> None:
    scheduler = make_scheduler(LEAKS[name][0], IntegrityConfig())
    if name == "frees_twice":  # the cache itself stops when it gets the page a second time, before it is looked at
        with pytest.raises(CacheIntegrityError):
            serve(scheduler)
    else:
        assert serve(scheduler) is not None


def test_a_false_leak_names_a_request_that_has_the_page() -> None:
    scheduler = make_scheduler()
    pool = checker_of(scheduler).pools[0]
    assert isinstance(pool, RadixCachePool)
    scheduler.queues.__class__ = CountsAnsweringAlone
    report = serve(scheduler)
    assert report is not None
    for problem in report.violations:
        if problem.rule != "count":
            assert problem.culprit is not None
            holder = scheduler.queues.find(problem.culprit.holder)
            assert holder is not None and set(problem.pages) & set(holder.pages), "so it is the count that is wrong"


def test_a_slot_that_is_not_freed_is_found_in_its_step() -> None:
    scheduler = make_scheduler()
    queues = KeepsSlot(max_running_requests=SMALL.max_running_requests)
    scheduler.queues = scheduler.batcher.queues = queues
    pages, slots = checker_of(scheduler).pools
    assert isinstance(pages, RadixCachePool) and isinstance(slots, RequestSlotPool)
    pages.requests, slots.queues = queues, queues
    report = serve(scheduler)
    assert report is not None
    assert {(each.rule, each.pool) for each in report.violations} == {("count", "req"), ("lost", "req")}
