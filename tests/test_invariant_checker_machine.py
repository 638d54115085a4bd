"""A correct scheduler raises no violation for any sequence of calls.

Four pools, with and without a host tier whose copies are late or fail. Each page, lock and published block is checked
after every step, and the policy is to raise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kit.hybrid_scheduler import SMALL, checker_of, hybrid_scheduler

from scheduler_components.agreement import ParallelGroups
from scheduler_components.hicache import HiCachePolicy, HiCacheStepper, HiRadixCache
from scheduler_components.invariant_checker import CheckPolicy, find_pool_violations
from scheduler_components.values.page_operations import (
    CopyToDevice,
    CopyToHost,
    Instruction,
    IoEvent,
    LoadBackDone,
    WriteDone,
)
from scheduler_engine.device.hicache_sim import SimulatedHostPages
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import IntegrityConfig
from scheduler_engine.engine.rank.hicache_tiers import HiCacheTiers
from scheduler_engine.engine.scheduler.request import EngineRequest

RAISE = CheckPolicy(action="raise", count_every_steps=1, full_check_every_steps=1, is_full_check_in_steps=True)


class FlakyMover:
    """A ``PageMover`` whose copies take some steps, and fail now and then."""

    has_storage = False
    load_back_budget_pages = 6

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.due: list[tuple[int, IoEvent]] = []
        self.num_polls = 0

    def submit(self, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            is_ok, at = self.rng.random() < 0.9, self.num_polls + self.rng.randrange(4)
            if isinstance(each, CopyToHost):
                self.due.append((at, WriteDone(each.op, is_ok)))
            elif isinstance(each, CopyToDevice):
                self.due.append((at, LoadBackDone(each.op, is_ok)))

    def poll(self) -> list[IoEvent]:
        self.num_polls += 1
        ready = [event for at, event in self.due if at < self.num_polls]
        self.due = [(at, event) for at, event in self.due if at >= self.num_polls]
        return ready

    def wait(self, timeout_s: float) -> None:
        """Time passes in steps."""

    def close(self) -> None:
        pass


def late_tiers(page_size: int, num_pages: int, seed: int) -> HiCacheTiers:
    """Tiers over a ``FlakyMover``."""
    rng = random.Random(seed)
    host = SimulatedHostPages(num_pages, rng=rng, failure=0.05)
    write = rng.choice(["write_through", "write_through_selective", "write_back"])
    cache = HiRadixCache(
        page_size=page_size,
        capacity_tokens=num_pages * page_size,
        host=host,
        num_host_pages=num_pages,
        policy=HiCachePolicy(write=write, load_threshold_pages=1),
        record=True,
    )
    mover = FlakyMover(rng)
    stepper = HiCacheStepper(cache=cache, groups=ParallelGroups(), mover=mover, clock=lambda: 0.0)
    return HiCacheTiers(stepper=stepper, mover=mover, host=host)  # type: ignore[arg-type]


class SoundSchedulerMachine(RuleBasedStateMachine):
    num_steps: ClassVar[int] = 0
    num_retractions: ClassVar[int] = 0

    @initialize(
        page_size=st.integers(1, 4),
        num_pages=st.sampled_from([12, 8, 16, 24]),
        slots=st.sampled_from([4, 6, 2]),
        prefill=st.sampled_from([20, 40, 7]),
        chunk=st.sampled_from([8, 3, 50]),
        seed=st.none() | st.integers(0, 1000),
    )
    def start(self, page_size: int, num_pages: int, slots: int, prefill: int, chunk: int, seed: int | None) -> None:
        config = attrs.evolve(
            SMALL,
            page_size=page_size,
            kv_tokens=page_size * num_pages,
            max_running_requests=slots,
            max_prefill_tokens=prefill,
            chunk_tokens=chunk,
            integrity=IntegrityConfig(checks=RAISE, owners_one_in=2, follows_events=True),
        )
        tiers = None if seed is None else late_tiers(page_size, num_pages, seed)
        self.room = config.kv_tokens
        self.scheduler, self.pages = hybrid_scheduler(config=config, tiers=tiers)
        self.num_requests = 0

    @rule(prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4),
          max_new=st.integers(1, 12))  # fmt: skip
    def submit(self, prompts: list[list[int]], max_new: int) -> None:
        new = min(max_new, self.room)
        for prompt in prompts:
            limits = SamplingLimits(max_new_tokens=new, ignore_eos=True)
            self.scheduler.submit(EngineRequest(f"r{self.num_requests}", prompt[: self.room - new + 1], limits))
            self.num_requests += 1

    @rule(place=st.integers(0, 7))
    def abort(self, place: int) -> None:
        in_flight = [request.rid for request in self.scheduler.queues]
        if in_flight:
            self.scheduler.abort(in_flight[place % len(in_flight)])

    @rule(num_steps=st.integers(1, 8))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            type(self).num_retractions += self.scheduler.step().num_retracted
        type(self).num_steps += num_steps

    @rule()
    def flush(self) -> None:
        if not self.scheduler.has_work:
            self.scheduler.clear_cache()

    @rule()
    def retract_all(self) -> None:
        type(self).num_retractions += self.scheduler.retract_all()

    @invariant()
    def every_page_is_in_one_place_between_steps_too(self) -> None:
        for pool in checker_of(self.scheduler).pools:
            assert find_pool_violations(pool) == []

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        type(self).num_steps += sum(1 for _ in self.scheduler.drain())
        checker = checker_of(self.scheduler)
        stats = checker.stats()
        assert (stats.problems, stats.problems_open, stats.checks_failed) == (0, 0, 0), checker.last_report
        assert stats.censuses >= self.scheduler.num_steps
        counts = {pool.name: pool.count() for pool in checker.pools}
        full, slots, window, states = (counts[name] for name in ("full", "req", "swa", "mamba"))
        assert (full.uncached, full.protected, full.in_transfer) == (0, 0, 0)
        assert (slots.available, window.available, states.available) == (slots.total, window.total, states.total)


def test_copies_between_tiers_are_counted_as_such() -> None:
    """Three prompts in turn over a device that holds one or two: each comes back from the host."""
    config = attrs.evolve(
        SMALL, kv_tokens=24, new_token_ratio=0.0, integrity=IntegrityConfig(checks=RAISE, follows_events=True)
    )
    scheduler, _ = hybrid_scheduler(config=config, tiers=late_tiers(2, 12, seed=5))
    pool, num_in_transfer, num_locked_by_copies = checker_of(scheduler).pools[0], 0, 0
    for number in range(30):
        prompt = [number % 3] * 12
        scheduler.submit(EngineRequest(f"r{number}", prompt, SamplingLimits(max_new_tokens=2, ignore_eos=True)))
        for _ in scheduler.drain():
            copies = [each for each in pool.holdings() if each.kind == "transfer"]
            num_in_transfer += pool.count().in_transfer
            num_locked_by_copies += sum(each.node is not None for each in copies)
    assert num_in_transfer > 0
    assert num_locked_by_copies > 0


TestSoundScheduler = SoundSchedulerMachine.TestCase
TestSoundScheduler.settings = settings(
    max_examples=max(10, settings().max_examples // 4), stateful_step_count=30, deadline=None
)
TestSoundScheduler = pytest.mark.soak(pytest.mark.timeout(600)(TestSoundScheduler))
