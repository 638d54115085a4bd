"""Reports name a request that did not return what it took, or none: never one that returned everything."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.hybrid_scheduler import SMALL, checker_of, ledger_of
from kit.leaky_pages import LeakyPages, Loss

from scheduler_components import ParallelState
from scheduler_components.checks.allocation_log import AllocationLog, pair_records
from scheduler_components.invariant_checker import PoolReport, find_pool_violations
from scheduler_components.values import AllocationAction
from scheduler_engine.device.device import SimulatedDevice, SimulatedModel
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import IntegrityConfig
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

NUM_REQUESTS = 24


def leaky_scheduler(loss: Loss, guilty: Sequence[str]) -> tuple[Scheduler, LeakyPages]:
    config = attrs.evolve(SMALL, integrity=IntegrityConfig(checks=attrs.evolve(SMALL.integrity.checks, action="count")))
    config = attrs.evolve(config, integrity=attrs.evolve(config.integrity, owners_one_in=1))
    device = SimulatedDevice(model=SimulatedModel(vocab_size=3), clock=lambda: 0.0, sleep=lambda _: None)
    scheduler = Scheduler.compose(config, ParallelState.trivial(), device)
    return scheduler, LeakyPages.put_into(scheduler, loss, *guilty)


def first_report(scheduler: Scheduler, seed: int) -> PoolReport | None:
    """Serve requests with shared prefixes, aborts and retractions, up to the first report."""
    rng = random.Random(seed)
    for number in range(NUM_REQUESTS):
        prompt = [(number % 3 + place) % 3 for place in range(rng.randint(3, 19))]
        limits = SamplingLimits(max_new_tokens=rng.randint(1, 20), ignore_eos=True)
        scheduler.submit(EngineRequest(f"r{number}", prompt, limits))
        if rng.random() < 0.1:
            scheduler.abort(f"r{rng.randrange(number + 1)}")
        scheduler.step()
        if checker_of(scheduler).last_report is not None:
            break
    else:
        for _ in scheduler.drain():
            if checker_of(scheduler).last_report is not None:
                break
    return checker_of(scheduler).last_report


@settings(deadline=None, max_examples=settings().max_examples // 3)
@given(
    loss=st.sampled_from(["page", "lock"]),
    guilty=st.sets(st.integers(0, NUM_REQUESTS - 1).map("r{}".format), min_size=1, max_size=2).map(sorted),
    sampled=st.sets(st.integers(0, NUM_REQUESTS - 1).map("r{}".format)),
    samples_all=st.booleans(),
    max_entries=st.sampled_from([5, 40, 1 << 16]),
    seed=st.integers(0, 1000),
)
def test_a_request_that_returned_everything_is_never_named(
    loss: Loss, guilty: list[str], sampled: set[str], samples_all: bool, max_entries: int, seed: int
) -> None:
    scheduler, pages = leaky_scheduler(loss, guilty)

    class SomeRequests(AllocationLog):
        def is_sampled(self, holder: str) -> bool:
            return samples_all or holder in sampled

    log = SomeRequests(max_entries=max_entries)
    scheduler.integrity.checker.log = pages.allocation_log = log
    report = first_report(scheduler, seed)
    for violation in report.violations if report else ():
        assert violation.culprit is None or violation.culprit.holder in pages.lost
        is_watched = samples_all or all(rid in sampled for rid in pages.lost)
        if violation.rule in ("lost", "locks") and is_watched and log.is_complete:
            assert violation.culprit is not None, "every request is recorded, so the culprit is known"


@pytest.mark.parametrize("loss", ["page", "lock"])
def test_the_culprit_is_named_behind_a_long_history(loss: Loss) -> None:
    """Many requests took and returned the page properly after the one that lost it; only 12 entries are shown."""
    log = AllocationLog()
    take: AllocationAction = "allocated" if loss == "page" else "locked"
    give: AllocationAction = "freed" if loss == "page" else "unlocked"
    log.record(take, "full", "guilty", "grow", [5])
    for number in range(30):
        log.record(take, "full", f"r{number}", "grow", [5])
        log.record(give, "full", f"r{number}", "free", [5])
    records = log.history("full", [5])
    paired = pair_records(records, [5], take, (give,), is_complete=True)
    assert paired.holders == {"guilty"}
    assert [record.holder for record in paired.unreturned({})] == ["guilty"]
    assert paired.strays == []


def test_a_lost_page_without_an_unpaired_entry_has_an_unknown_culprit() -> None:
    scheduler, pages = leaky_scheduler("page", ["r3"])
    scheduler.submit(EngineRequest("r0", [0, 1], SamplingLimits(max_new_tokens=2, ignore_eos=True)))
    for _ in scheduler.drain():
        pass
    pool = checker_of(scheduler).pools[0]
    pages.cache.allocate(pages.cache.pool.num_free)  # code that records nothing loses every free page
    [lost] = [each for each in find_pool_violations(pool, ledger_of(scheduler)) if each.rule == "lost"]
    assert lost.history, "r0 took and returned one of the pages"
    assert lost.culprit is None
    assert str(lost).endswith("; the culprit is unknown")


def test_a_page_that_is_returned_twice_names_the_second_return() -> None:
    log = AllocationLog()
    log.record("allocated", "full", "a", "grow", [1])
    log.record("freed", "full", "a", "free", [1])
    log.record("freed", "full", "a", "free again", [1])
    paired = pair_records(log.history("full", [1]), [1], "allocated", ("freed",), is_complete=True)
    assert [record.component for record in paired.strays] == ["free again"]
    log.max_entries = 2
    log.record("freed", "full", "b", "free", [9])
    assert not log.is_complete
    paired = pair_records(log.history("full", [1]), [1], "allocated", ("freed",), is_complete=log.is_complete)
    assert paired.strays == [], "the entry before may have been dropped"
