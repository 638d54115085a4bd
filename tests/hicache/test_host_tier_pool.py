"""The host tier is a pool of its own: each of its pages is free, cached or held by one operation."""

from __future__ import annotations

import random
from collections.abc import Iterator

from kit.hybrid_scheduler import SMALL

from scheduler_components import ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.checks.allocation_log import AllocationLog
from scheduler_components.hicache import (
    HiCachePolicy,
    HiCacheStepper,
    HiRadixCache,
    HostPool,
    KeySpace,
    MemoryPageStore,
    Placement,
)
from scheduler_components.hicache.host_tier_pool import HostTierPool
from scheduler_components.invariant_checker import find_pool_violations
from scheduler_components.values.page_shape import PageShape
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.hicache_sim import FaultRates, SimulatedHostPages, SimulatedMover
from scheduler_engine.engine.rank.hicache_tiers import HiCacheTiers
from scheduler_engine.engine.scheduler.scheduler import Scheduler

PAGES = 24


def simulated_mover(rng: random.Random, rates: FaultRates) -> SimulatedMover:
    keys = KeySpace(
        model="m", dtype="d", page_size=2, layout="page_first", placement=Placement(), parallel=ParallelState.trivial()
    )
    return SimulatedMover(rng=rng, rates=rates, store=MemoryPageStore(1 << 20), keys=keys)


class TierBench:
    """A cache of 8 device pages over 24 host pages and a store, without a scheduler."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.host = SimulatedHostPages(PAGES, rng=rng, failure=0.0)
        self.mover = simulated_mover(rng, FaultRates(failure=0.1))
        self.cache = HiRadixCache(
            page_size=2,
            capacity_tokens=16,
            host=self.host,
            num_host_pages=PAGES,
            policy=HiCachePolicy(load_threshold_pages=1, prefetch_threshold_pages=1),
            page_hook=self.mover,
        )
        self.log = AllocationLog()
        self.cache.record_allocations(self.log)
        self.stepper = HiCacheStepper(
            cache=self.cache, groups=ParallelGroups(), mover=self.mover, clock=lambda: float(self.stepper.num_steps)
        )
        self.pool: HostTierPool = self.cache.host_pool(self.host)

    def run(self, num_prompts: int, *, base: int = 0) -> Iterator[int]:
        """Cache prompts one after the other; yield after each step."""
        for number in range(base, base + num_prompts):
            tokens = [number % 12] * 8 + [number]
            rid = f"r{number}"
            self.cache.prefetch_queue.start(rid, tokens[:8])
            for step in range(25):
                self.cache.prefetch_queue.is_done(rid, tokens[:8], is_next=step > 20)
                self.stepper.step()
                yield number
            self.cache.prefetch_queue.cancel(rid)
            match = self.cache.match_prefix(tokens[:8])
            pages = [*match.pages, *self.cache.allocate(4 - len(match.pages))]
            self.cache.insert(tokens[:8], pages)
        for _ in range(80):
            self.stepper.step()
            yield -1


def test_every_host_page_is_in_one_place_while_copies_fail_and_prefetches_end_early() -> None:
    seen = {"protected": 0, "in_transfer": 0}
    actions = set[str]()
    for seed in range(3):
        bench = TierBench(seed)
        for _ in bench.run(30):
            assert find_pool_violations(bench.pool) == []
            count = bench.pool.count()
            seen = {name: most + getattr(count, name) for name, most in seen.items()}
        actions |= {f"{each.holder.split()[0]} {each.action}" for each in bench.log.history("host", range(PAGES))}
    assert all(seen.values()), seen
    assert actions >= {"write allocated", "write cached", "prefetch allocated", "prefetch cached"}, actions


def test_a_lost_host_page_names_the_operation_that_kept_it() -> None:
    bench = TierBench()
    steps = bench.run(15)
    while not (held := list(bench.cache._controller.host_pages_held())):
        next(steps)
    name, pages = held[0]
    queue = bench.cache._controller._writes._operations
    queue[0] = (queue[0][0], pages[1:])  # the operation forgets its first page
    [lost] = [each for each in find_pool_violations(bench.pool, bench.log) if each.rule == "lost"]
    assert lost.pool == "host"
    assert lost.pages == (pages[0],)
    assert lost.culprit is not None and lost.culprit.holder == name


def test_a_lost_lock_on_the_host_is_found() -> None:
    bench = TierBench()
    for _ in bench.run(8):
        pass
    node = next(iter(bench.cache._tiers.membership.host_pages))
    before = bench.pool.count().num_locks
    bench.cache._tiers.host.lock(bench.cache._tiers.tree.path_to_root(node))
    assert bench.pool.count().num_locks == (before or 0) + 1
    assert {each.rule for each in find_pool_violations(bench.pool)} == {"locks"}


def test_a_scheduler_with_tiers_checks_the_host() -> None:
    host = HostPool(PageShape(num_layers=1, layer_page_bytes=8), PAGES)
    mover = simulated_mover(random.Random(0), FaultRates())
    cache = HiRadixCache(
        page_size=SMALL.page_size, capacity_tokens=SMALL.kv_tokens, host=host, num_host_pages=PAGES, record=True
    )
    stepper = HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=mover)
    tiers = HiCacheTiers(stepper=stepper, mover=mover, host=host)  # type: ignore[arg-type]
    device = SimulatedDevice(speed=1e9)
    scheduler = Scheduler.compose(SMALL, ParallelState.trivial(), device, tiers=tiers)
    assert [pool.name for pool in scheduler.integrity.checker.pools] == ["full", "req", "host"]
    host.reserve(2)
    [violation, *_] = [each for each in scheduler.integrity.checker.check_fully().violations if each.rule == "lost"]
    assert violation.pool == "host"
