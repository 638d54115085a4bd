"""Each rule is broken once and found, the allocation log names the cause, and each policy does its action."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import attrs
import pytest
from kit.hybrid_scheduler import SMALL, checker_of, hybrid_scheduler, kv_pool_of, request

from scheduler_components.cache import RadixCache
from scheduler_components.checks.allocation_log import AllocationLog
from scheduler_components.checks.pool_stats_observer import RadixCachePool
from scheduler_components.errors import PoolInvariantError
from scheduler_components.events import medium_group
from scheduler_components.invariant_checker import (
    CheckPolicy,
    PoolInvariantChecker,
    PoolViolation,
    PublishedBlocks,
    find_pool_violations,
)
from scheduler_components.values import HeldCount, PageHolding, PoolCount
from scheduler_components.watchdog import StepProgress
from scheduler_engine.engine.config import IntegrityConfig
from scheduler_engine.engine.scheduler.scheduler import Scheduler

STRICT = CheckPolicy(count_every_steps=1, full_check_every_steps=1, is_full_check_in_steps=True)
POOL_SIZE = 16


class Holders:
    """The ``PageHolders`` that a test fills."""

    def __init__(self) -> None:
        self.held: list[PageHolding] = []

    def count_held(self) -> HeldCount:
        pages = {kind: sum(len(each.pages) for each in self.held if each.kind == kind) for kind in KINDS}
        return HeldCount(pages["request"], pages["session"], pages["transfer"])

    def holdings(self) -> Iterable[PageHolding]:
        return self.held


KINDS = ("request", "session", "transfer")


class PoolBench:
    """A cache of 16 pages: r1 holds a locked prefix of three pages and two of its own, a session one, a copy one."""

    def __init__(self) -> None:
        self.progress = StepProgress(step=5, phase="batch")
        self.ledger = AllocationLog(progress=self.progress)
        self.cache = RadixCache(page_size=2, capacity_tokens=2 * POOL_SIZE, record=True)
        self.holders = Holders()
        self.pool = RadixCachePool(cache=self.cache, requests=self.holders)
        prefix = self.cache.allocate(3)
        self.ledger.record("allocated", "full", "r1", "grow", prefix)
        match = self.cache.insert(range(6), prefix)
        self.cache.lock(match.node)
        self.ledger.record("locked", "full", "r1", "share", prefix)
        own, session, copied = self.cache.allocate(2), self.cache.allocate(1), self.cache.allocate(1)
        self.ledger.record("allocated", "full", "r1", "grow", own)
        self.holders.held = [
            PageHolding("r1", "request", own, match.pages, match.node),
            PageHolding("s1", "session", session),
            PageHolding("load 1", "transfer", copied),
        ]
        self.node, self.shared, self.own = match.node, list(match.pages), own

    def problems(self) -> dict[str, PoolViolation]:
        found = find_pool_violations(self.pool, self.ledger)
        return {problem.rule: problem for problem in found if problem.rule != "count"}


def test_a_sound_pool_has_no_violation() -> None:
    bench = PoolBench()
    assert find_pool_violations(bench.pool, None) == []
    assert bench.pool.count() == PoolCount("full", 16, 9, 0, 3, 1, 2, 1, num_locks=1)
    assert bench.pool.count().num_missing == 0
    assert bench.pool.count().num_used == 7


def let_go_of_own(bench: PoolBench) -> None:
    bench.holders.held[0] = PageHolding("r1", "request", (), bench.shared, bench.node)


def free_what_is_held(bench: PoolBench) -> None:
    bench.progress.step = 6
    bench.ledger.record("freed", "full", "r1", "release", bench.own)
    bench.cache.free(bench.own)


def put_in_the_free_list_again(bench: PoolBench) -> None:
    bench.cache.pool._push(bench.cache.pool.free_pages()[-1:])


def hold_a_page_of_another(bench: PoolBench) -> None:
    bench.holders.held.append(PageHolding("r2", "request", bench.own[:1]))
    bench.ledger.record("allocated", "full", "r2", "steal", bench.own[:1])


def hold_a_page_twice(bench: PoolBench) -> None:
    bench.holders.held[0] = PageHolding("r1", "request", [*bench.own, bench.own[0]], bench.shared, bench.node)


def hold_what_is_no_page(bench: PoolBench) -> None:
    bench.holders.held[0] = PageHolding("r1", "request", [*bench.own, 99], bench.shared, bench.node)


def use_what_is_not_cached(bench: PoolBench) -> None:
    bench.holders.held[0] = PageHolding("r1", "request", bench.own, [*bench.shared, 15], bench.node)


def lock_once_more(bench: PoolBench) -> None:
    bench.cache.lock(bench.node)
    bench.ledger.record("locked", "full", "r7", "attach", bench.shared)
    for action in ("locked", "unlocked"):  # one that gave its lock back, later, is not to blame
        bench.ledger.record(action, "full", "r8", "attach", bench.shared)


def forget_the_lock(bench: PoolBench) -> None:
    bench.holders.held[0] = PageHolding("r1", "request", bench.own, bench.shared, None)


def lock_what_is_gone(bench: PoolBench) -> None:
    bench.cache.unlock(bench.node)
    bench.cache.clear()


@pytest.mark.parametrize(
    ("break_it", "rule", "text", "culprit"),
    [
        (let_go_of_own, "lost", "2 pages are neither free nor owned", "allocated by r1 in step 5 (grow, batch)"),
        (free_what_is_held, "owned-and-free", "2 pages are free and owned", "freed by r1 in step 6 (release, batch)"),
        (put_in_the_free_list_again, "free-twice", "1 pages are in the free list more than once", None),
        (hold_a_page_of_another, "owned-twice", "held by r1, r2", "allocated by r2 in step 5 (steal, batch)"),
        (hold_a_page_twice, "owned-twice", "r1 lists 1 pages twice", "allocated by r1 in step 5 (grow, batch)"),
        (hold_what_is_no_page, "no-such-page", "1 pages do not belong to this pool: 99", None),
        (use_what_is_not_cached, "not-cached", "1 pages that r1 uses are not in the cache", None),
        (lock_once_more, "locks", "a node has 2 locks and 1 holders", "locked by r7 in step 5 (attach, batch)"),
        (forget_the_lock, "locks", "a node has 1 locks and 0 holders", "locked by r1 in step 5 (share, batch)"),
        (lock_what_is_gone, "locks", "the prefix that r1 has locked is not in the tree", None),
    ],
)
def test_a_broken_rule_is_found_and_named(
    break_it: Callable[[PoolBench], None], rule: str, text: str, culprit: str | None
) -> None:
    bench = PoolBench()
    break_it(bench)
    problem = bench.problems()[rule]
    assert text in str(problem)
    if culprit is not None:
        assert str(problem.culprit) == culprit
        assert culprit in str(problem)


@pytest.mark.parametrize("term", ["available", "evictable", "protected", "session_held", "uncached", "in_transfer"])
def test_a_count_that_differs_from_the_lists_is_found(term: str) -> None:
    @attrs.define
    class Miscounted:
        pool: RadixCachePool
        name: str = "full"

        def count(self) -> PoolCount:
            true = self.pool.count()
            return PoolCount("full", true.total, *(getattr(true, each) + (each == term) for each in TERMS))

        def free_pages(self) -> Sequence[int]:
            return self.pool.free_pages()

        def holdings(self) -> Iterable[PageHolding]:
            return self.pool.holdings()

        def tree_nodes(self) -> Iterable[object]:
            return self.pool.tree_nodes()

    found = [str(each) for each in find_pool_violations(Miscounted(PoolBench().pool), None)]
    assert f"[full] count: {term} differs from the lists by +1 pages" in found
    assert any("-1 pages are missing" in each for each in found)


TERMS = ("available", "evictable", "protected", "session_held", "uncached", "in_transfer")


def test_published_blocks_are_compared_with_the_cache() -> None:
    cache = RadixCache(page_size=2, capacity_tokens=32, record=True)
    view = PublishedBlocks(source=cache)
    checker = PoolInvariantChecker(pools=(), policy=STRICT, published=view, cached=cache)
    cache.insert(range(6), cache.allocate(3))
    [problem] = checker.check_fully().violations
    assert (problem.rule, problem.pool, len(problem.pages)) == ("event-missing", "GPU", 3)
    assert len(view.take_events()) == 1
    assert checker.check_fully().violations == ()
    cache.evict(1)
    [problem] = checker.check_fully().violations
    assert problem.rule == "event-extra"
    view.take_events()
    assert set(view.held_blocks()[medium_group(None)]) == set(cache.block_hashes())
    cache.clear()
    view.take_events()
    assert checker.check_fully().violations == ()


def leaking(action: str) -> Scheduler:
    """A scheduler that has lost a page, and has just looked."""
    integrity = IntegrityConfig(checks=attrs.evolve(STRICT, action=action), owners_one_in=1)
    scheduler, _ = hybrid_scheduler(config=attrs.evolve(SMALL, integrity=integrity))
    scheduler.submit(request(1, 9, 5))
    scheduler.step()
    kv_pool_of(scheduler).allocate(1)
    return scheduler


def test_nothing_is_raised_unless_the_policy_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for action, num_lines in (("count", 0), ("log", 1), ("dump", 2)):
        caplog.clear()
        scheduler = leaking(action)
        with caplog.at_level(logging.ERROR):
            for _ in scheduler.drain():
                pass
        assert len(caplog.records) == num_lines, "a leak that remains is reported once"
        stats = checker_of(scheduler).stats()
        assert (stats.pages_lost, stats.problems_open >= 1, stats.checks_failed) == (1, True, 0)
    assert "request r1: " in caplog.text, "the last one is the dump"


def test_the_raise_policy_raises_once() -> None:
    scheduler = leaking("raise")
    with pytest.raises(PoolInvariantError, match="1 pages are neither free nor owned") as raised:
        scheduler.step()
    assert raised.value.step == 2
    for _ in scheduler.drain():
        pass


def test_a_pool_that_raises_is_counted_and_fails_no_step() -> None:
    class Broken(Holders):
        def count_held(self) -> HeldCount:
            raise RuntimeError("no count")

    bench = PoolBench()
    bench.pool.requests = Broken()
    checker = PoolInvariantChecker(pools=(bench.pool,), policy=STRICT)
    checker.after_step(is_idle=True)
    assert checker.stats().checks_failed == 1
    assert checker.stats().problems == 0


def test_a_leak_triggers_a_full_check_once_and_again_when_it_grows() -> None:
    bench = PoolBench()
    policy = CheckPolicy(action="count", count_every_steps=1, full_check_every_steps=1000)
    checker = PoolInvariantChecker(pools=(bench.pool,), policy=policy)
    checker.after_step(is_idle=False)
    assert checker.stats().censuses == 0, "nothing is suspicious, and the scheduler is busy"
    let_go_of_own(bench)
    for _ in range(5):
        checker.after_step(is_idle=False)
    assert (checker.stats().censuses, checker.stats().pages_lost) == (1, 2)
    bench.holders.held.pop()
    for _ in range(5):
        checker.after_step(is_idle=False)
    assert (checker.stats().censuses, checker.stats().pages_lost) == (2, 3)


def test_counts_are_checked_every_few_steps_and_when_idle() -> None:
    checker = PoolInvariantChecker(pools=(PoolBench().pool,), policy=CheckPolicy(count_every_steps=4))
    for _ in range(9):
        checker.after_step(is_idle=False)
    assert checker.stats().checks == 3
    checker.after_step(is_idle=True)
    assert checker.stats().checks == 4
