"""The usage of several pools under SGLang's names, and its place in a scheduler's report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import pytest
from kit.hybrid_scheduler import SMALL, checker_of, hybrid_scheduler, request

from scheduler_components.cache import BlockTableCache
from scheduler_components.checks.pool_stats_observer import BlockTablePool, PoolStatsObserver
from scheduler_components.invariant_checker import find_pool_violations
from scheduler_components.testing.fakes import ListSink
from scheduler_components.values import HeldCount, PageHolding, PoolCount, PoolStats, SchedulerStats
from scheduler_components.watchdog import IDLE_PHASE


@attrs.frozen
class CountedPool:
    """An ``AuditedPool`` that can be counted and has nothing else."""

    counted: PoolCount

    @property
    def name(self) -> str:
        return self.counted.name

    def count(self) -> PoolCount:
        return self.counted

    def free_pages(self) -> Sequence[int]:
        return ()

    def holdings(self) -> Iterable[PageHolding]:
        return ()

    def tree_nodes(self) -> Iterable[object]:
        return ()


FULL = CountedPool(PoolCount("full", 100, 20, evictable=30, protected=10, uncached=40))
WINDOW = CountedPool(PoolCount("swa", 10, 1, uncached=7, session_held=2))
STATES = CountedPool(PoolCount("mamba", 8, 6, session_held=2))


def test_usage_is_in_tokens_and_in_mamba_states() -> None:
    stats = PoolStatsObserver(pools=(FULL, WINDOW, STATES), page_size=4).stats()
    assert stats == PoolStats(
        max_pool_usage=0.9,
        full_token_usage=0.5, kv_available_tokens=80, kv_evictable_tokens=120, kv_used_tokens=200,
        swa_token_usage=0.9, swa_available_tokens=4, swa_evictable_tokens=0, swa_used_tokens=36,
        mamba_usage=0.25, mamba_available_slots=6, mamba_evictable_slots=0, mamba_used_slots=2,
        session_held_pages=4,
    )  # fmt: skip


def test_missing_pools_are_not_reported() -> None:
    stats = PoolStatsObserver(pools=(FULL,), page_size=1).stats()
    assert (stats.max_pool_usage, stats.full_token_usage, stats.swa_used_tokens, stats.mamba_usage) == (
        0.5,
        0.5,
        None,
        None,
    )
    assert PoolStatsObserver(pools=(), page_size=1).stats() == PoolStats(0.0)


def test_the_fuller_kv_pool_is_reported() -> None:
    assert PoolStatsObserver(pools=(FULL, WINDOW, STATES), page_size=4).get_kv_token_stats() == (200, 0.9)
    assert PoolStatsObserver(pools=(), page_size=4).get_kv_token_stats() == (0, 0.0)


def test_a_pool_without_pages_is_not_full() -> None:
    assert PoolCount("swa", 0, 0).usage == 0.0


def test_a_report_has_the_usage_of_pools_and_the_findings_of_checks() -> None:
    scheduler, _ = hybrid_scheduler(config=SMALL)
    scheduler.metrics.sink = sink = ListSink[SchedulerStats]()
    scheduler.submit(request(1, 9, 3))
    scheduler.step()
    scheduler.metrics.emit()
    pools = sink.sent[-1].pools
    assert pools is not None
    assert pools.kv_used_tokens == 8, "the first chunk"
    assert pools.full_token_usage == 8 / 64
    for _ in scheduler.drain():
        pass
    scheduler.metrics.emit()
    assert sink.sent[-1].integrity == checker_of(scheduler).stats()
    assert sink.sent[-1].integrity.checks >= scheduler.num_steps


def test_the_watchdog_sees_an_idle_scheduler_between_steps() -> None:
    scheduler, _ = hybrid_scheduler()
    progress = scheduler.integrity.progress
    for act in (lambda: scheduler.submit(request(1, 9, 3)), scheduler.step, lambda: scheduler.abort("r1")):
        num_phase_changes = progress.num_phase_changes
        act()
        assert progress.phase == IDLE_PHASE
        assert progress.num_phase_changes > num_phase_changes
    assert progress.step == scheduler.num_steps == 1


@attrs.define
class Holders:
    """``PageHolders`` with a list of holdings."""

    held: list[PageHolding]

    def count_held(self) -> HeldCount:
        return HeldCount(sum(len(each.pages) for each in self.held))

    def holdings(self) -> Iterable[PageHolding]:
        return self.held


@pytest.mark.parametrize(
    ("mistake", "rules"),
    [
        ("none", set()),
        ("a lock without a holder", {"locks"}),
        ("an unlocked prefix", {"locks"}),
        ("a page without a holder", {"count", "lost"}),
        ("a page of two", {"count", "owned-twice"}),
        ("an evicted prefix", {"locks", "not-cached"}),
    ],
)
def test_mistakes_with_a_block_table_are_violations(mistake: str, rules: set[str]) -> None:
    """Two requests share a page; each copy of the next block is a page of its own."""
    cache = BlockTableCache(page_size=2, capacity_tokens=16, reserves_page_0=True)
    holders = Holders([])
    for name in ("first", "second"):
        shared = cache.match_prefix([1, 2])
        own = cache.allocate(3 - len(shared.pages))
        match = cache.insert([1, 2, 3, 4], [*shared.pages, *own[:-1]])
        cache.lock(match)
        holders.held.append(PageHolding(name, "request", own[-1:], match.pages, match))
    match, last = holders.held[1].node, holders.held[1]
    if mistake == "a lock without a holder":
        cache.lock(match)
    elif mistake == "an unlocked prefix":
        cache.unlock(match)
    elif mistake == "a page without a holder":
        cache.allocate(1)
    elif mistake == "a page of two":
        holders.held.append(PageHolding("third", "request", last.pages))
    elif mistake == "an evicted prefix":
        cache.unlock(match)
        cache.evict(1)
    pool = BlockTablePool(cache=cache, requests=holders)
    assert {violation.rule for violation in find_pool_violations(pool)} == rules
    assert (pool.count().first_page, pool.count().total) == (1, 8)
