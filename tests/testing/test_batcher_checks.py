"""The checks find broken batchers, and name the first difference of two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from scheduler_components.batcher import BatchConditions, Batcher
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.scheduling.preemption_policy import LongestRemaining
from scheduler_components.scheduling.scheduling_policy import PriorityPolicy
from scheduler_components.testing import BatcherComparisonMachine, ConformanceError
from scheduler_components.testing import batcher_checks as checks
from scheduler_components.testing.batcher_session import BatcherUnderCheck, OpenBatcher


def opening(batcher: type[Batcher] = Batcher, **parts: Callable[[], object]) -> OpenBatcher:
    def open_batcher(limits, queues, kv_cache) -> BatcherUnderCheck:
        made = {name: make() for name, make in parts.items()}
        conditions = BatchConditions(new_token_ratio=NewTokenRatioTracker(initial=0.2, minimum=0.0))
        return batcher(limits=limits, queues=queues, kv_cache=kv_cache, conditions=conditions, **made)

    return open_batcher


class SpendsTwice(Batcher):
    """Prefill tokens of running requests are not counted against those of admissions."""

    def _make_budget(self, chunks):
        return super()._make_budget([])


class IgnoresSlots(Batcher):
    def _make_budget(self, chunks):
        budget = super()._make_budget(chunks)
        budget.slots += 1
        return budget


class StarvesThePreempted(Batcher):
    def _admit_waiting(self, chunks):
        return 0 if any(each.num_retractions for each in self.queues.waiting) else super()._admit_waiting(chunks)


class LosesThePreempted(Batcher):
    """A preempted request generates its output again."""

    def _retract(self, request):
        super()._retract(request)
        del request.token_ids[request.num_prompt_tokens :]


class LeaksThePreempted(Batcher):
    def _retract(self, request):
        del request.pages[request.num_computed_tokens // self.kv_cache.page_size :]
        super()._retract(request)


class PreemptsByChance(Batcher):
    """The victim is the first of a set."""

    def _select_victim(self):
        return next(iter(set(self.queues.running[1:] or self.queues.running)))


class MixesModes(Batcher):
    def _fill(self, chunks):
        num_retracted, has_room = self._continue_running(chunks, self.queues.running)
        return num_retracted, self._admit_waiting(chunks) if has_room else 0


class ForgetsTenants(Batcher):
    def _make_budget(self, chunks):
        budget = super()._make_budget(chunks)
        budget.tenant_cap = None
        return budget


class IgnoresTheWatermark(Batcher):
    def _make_budget(self, chunks):
        budget = super()._make_budget(chunks)
        budget.watermark_pages = 0
        return budget


BROKEN = [
    (SpendsTwice, checks.check_no_limit_is_exceeded, "at most 7 tokens"),
    (IgnoresSlots, checks.check_no_limit_is_exceeded, "at most 1 requests"),
    (StarvesThePreempted, checks.check_no_requests_preempt_each_other_forever, "requests without an end"),
    (LosesThePreempted, checks.check_preempted_requests_lose_no_token, "tokens of each request"),
    (LeaksThePreempted, checks.check_no_page_is_lost, "violations of the pool"),
    (PreemptsByChance, checks.check_ranks_decide_equally, "on the first rank"),
    (MixesModes, checks.check_no_limit_is_exceeded, "prefills or decodes"),
    (ForgetsTenants, checks.check_no_limit_is_exceeded, "running requests of tenant"),
    (IgnoresTheWatermark, checks.check_no_limit_is_exceeded, "12 pages stay free"),
]


@pytest.mark.broken_variants
@pytest.mark.parametrize(("broken", "check", "words"), BROKEN)
def test_a_broken_batcher_is_found_by_its_check(
    broken: type[Batcher], check: Callable[[OpenBatcher], None], words: str
) -> None:
    with pytest.raises(ConformanceError, match=words):
        check(opening(broken))


def test_equal_batchers_do_not_differ() -> None:
    assert checks.first_difference(opening(), opening()) is None


def test_the_first_difference_names_the_step_and_both_batches() -> None:
    workload = checks.random_workload(12)
    found = checks.first_difference(opening(), opening(preemption=LongestRemaining), workload, num_pages=22)
    assert found is not None
    first, one, other = found.splitlines()
    assert first.startswith("step ") and one.startswith("  first:  (") and other.startswith("  second: (")


@pytest.mark.parametrize("seed", [1, 2, 25])
def test_the_workloads_preempt_and_refuse(seed: int) -> None:
    """The checks find no error in preemptions unless the workload causes them."""
    opened = []

    def open_batcher(limits, queues, kv_cache) -> BatcherUnderCheck:
        opened.append(opening()(limits, queues, kv_cache))
        return opened[-1]

    session = checks._session("test", open_batcher, checks.SMALL_LIMITS)
    session.serve(checks.random_workload(seed))
    assert opened[0].preemptions
    assert opened[0].refusals.keys() & {"pages", "slots"}


def machine_of(first: OpenBatcher, second: OpenBatcher) -> type[BatcherComparisonMachine]:
    class Machine(BatcherComparisonMachine):
        open_first, open_second = staticmethod(first), staticmethod(second)

    return Machine


def test_the_machine_finds_no_difference_between_equal_batchers() -> None:
    run_state_machine_as_test(machine_of(opening(), opening()), settings=settings(max_examples=8, deadline=None))


def test_the_machine_prints_the_first_difference() -> None:
    machine = machine_of(opening(), opening(policy=PriorityPolicy))
    with pytest.raises(AssertionError, match=r"step \d+:\n  first: .*\n  second: "):
        run_state_machine_as_test(machine, settings=settings(max_examples=200, deadline=None, phases=[Phase.generate]))
