"""A lost lock is found while requests run, and immediately when none runs."""

from __future__ import annotations

import attrs
from kit.hybrid_scheduler import SMALL, checker_of
from kit.leaky_pages import LeakyPages

from scheduler_components import ParallelState
from scheduler_components.cache import RadixCache
from scheduler_components.checks.pool_stats_observer import RadixCachePool
from scheduler_components.invariant_checker import CheckPolicy, PoolInvariantChecker
from scheduler_components.ports import NullPageHolders
from scheduler_components.values import PoolCount
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import IntegrityConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler


def test_a_lost_lock_is_found_while_requests_run() -> None:
    checks = CheckPolicy(action="count", count_every_steps=4, locks_every_steps=24)
    config = attrs.evolve(SMALL, kv_tokens=400, integrity=IntegrityConfig(checks=checks, owners_one_in=1))
    device = SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None)
    scheduler = Scheduler.compose(config, ParallelState.trivial(), device)
    pages = LeakyPages.put_into(scheduler, "lock", "short")
    for rid, max_new_tokens in (("short", 2), ("long", 300)):
        limits = SamplingLimits(max_new_tokens=max_new_tokens, ignore_eos=True)
        scheduler.submit(EngineRequest(rid, [1, 2, 3, 4, 5, 6], limits))
    checker, lost_at = checker_of(scheduler), 0
    for result in scheduler.drain():
        lost_at = lost_at or (result.step if pages.lost else 0)
        if checker.last_report is not None:
            break
    assert scheduler.queues.running, "the long request still runs"
    assert checker.last_report is not None
    assert checker.last_report.step - lost_at <= 24 + 4
    [violation] = checker.last_report.violations
    assert violation.rule == "locks"
    assert violation.culprit is not None and violation.culprit.holder == "short"
    num_full_checks = checker.stats().censuses
    for _ in range(100):
        scheduler.step()
    assert checker.stats().censuses == num_full_checks, "a known loss requires no other full check"


def test_locks_that_are_released_require_no_full_check() -> None:
    checks = CheckPolicy(action="count", count_every_steps=1, locks_every_steps=1, full_check_every_steps=10**6)
    config = attrs.evolve(SMALL, integrity=IntegrityConfig(checks=checks))
    device = SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None)
    scheduler = Scheduler.compose(config, ParallelState.trivial(), device)
    checker = checker_of(scheduler)
    checker.after_step(is_idle=True)
    num_before = checker.stats().censuses
    for number in range(8):
        limits = SamplingLimits(max_new_tokens=4, ignore_eos=True)
        scheduler.submit(EngineRequest(f"r{number}", [1, 2, 3, 4, 5, number], limits))
        scheduler.step()
    for _ in scheduler.drain():
        pass
    assert checker.pools[0].count().num_locks == 0
    assert checker.stats().censuses == num_before


@attrs.define
class UncountedLocks:
    """The pool of an engine whose cache does not count its locks."""

    pool: RadixCachePool
    name: str = "full"

    def count(self) -> PoolCount:
        count = self.pool.count()
        return PoolCount(count.name, count.total, count.available, count.evictable, count.protected)

    def __getattr__(self, name: str) -> object:
        return getattr(self.pool, name)


def test_pages_that_stay_protected_while_nothing_runs_are_checked_immediately() -> None:
    cache = RadixCache(page_size=2, capacity_tokens=32)
    pool = UncountedLocks(RadixCachePool(cache=cache, requests=NullPageHolders()))
    policy = CheckPolicy(action="count", full_check_every_steps=10**6, locks_every_steps=10**6)
    checker = PoolInvariantChecker(pools=(pool,), policy=policy)  # type: ignore[arg-type]
    checker.after_step(is_idle=True)
    num_before = checker.stats().censuses
    cache.lock(cache.insert(range(6), cache.allocate(3)).node)
    checker.after_step(is_idle=True)
    assert checker.stats().censuses == num_before + 1
    assert checker.last_report is not None
    [violation] = checker.last_report.violations
    assert (violation.rule, violation.pages) == ("locks", (0, 1, 2))
    checker.after_step(is_idle=True)
    assert checker.stats().censuses == num_before + 1, "the same pages are not checked again"
