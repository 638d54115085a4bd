"""The checks of batchers find broken batchers, budgets, KV caches and preemption policies, and the first difference.

The variants repeat defects of real engines. The author of most of them did not write the checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from itertools import count

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from kit.variants import found, instead_of, variants
from msgspec.structs import replace

from scheduler_components.batcher import BatchConditions, Batcher
from scheduler_components.scheduling.admission_budget import AdmissionBudget
from scheduler_components.scheduling.new_token_ratio_tracker import NewTokenRatioTracker
from scheduler_components.scheduling.preemption_policy import LongestRemaining
from scheduler_components.scheduling.request_kv_cache import RequestKvCache, pages_for
from scheduler_components.scheduling.scheduling_policy import PriorityPolicy
from scheduler_components.testing import BATCHER_CHECKS, BatcherComparisonMachine, ConformanceError
from scheduler_components.testing import batcher_checks as checks
from scheduler_components.testing.batcher_session import BatcherUnderCheck, OpenBatcher
from scheduler_components.values import FinishReason, RequestState

DECODES = checks.check_arrivals_do_not_hold_up_decodes
FOREVER = checks.check_no_requests_preempt_each_other_forever
IDLE = checks.check_an_empty_batcher_is_idle
LIMITS = checks.check_no_limit_is_exceeded
PAGES = checks.check_no_page_is_lost
RANKS = checks.check_ranks_decide_equally
TOKENS = checks.check_preempted_requests_lose_no_token
CALLS = count()


def opening(batcher=Batcher, *, kv_cache_type=None, budget_type=None, **parts: Callable[[], object]) -> OpenBatcher:
    """Return how to open a batcher with these parts."""

    class WithBudget(batcher):
        def _make_budget(self, chunks):
            made = super()._make_budget(chunks)
            return budget_type(**{each.name: getattr(made, each.name) for each in fields(AdmissionBudget)})

    def open_batcher(limits, queues, kv_cache) -> BatcherUnderCheck:
        made = {name: make() for name, make in parts.items()}
        conditions = BatchConditions(new_token_ratio=NewTokenRatioTracker(initial=0.2, minimum=0.0))
        cache = kv_cache_type(cache=kv_cache.cache) if kv_cache_type else kv_cache
        kind = WithBudget if budget_type else batcher
        return kind(limits=limits, queues=queues, kv_cache=cache, conditions=conditions, **made)

    return open_batcher


class BrokenBatcher(Batcher):
    @instead_of("_try_admit", LIMITS)
    def decodes_several_positions(self, request, budget, chunks):
        """Takes the output of a preempted request for one decode: many positions that no budget counts."""
        refusal = super()._try_admit(request, budget, chunks)
        if refusal is None and request.num_retractions and (request.num_computed_tokens < request.num_prompt_tokens):
            request.prefill_end = request.num_prompt_tokens
        return refusal

    preempts_the_earliest = found(
        "the others end first, and then it runs alone", _select_victim=lambda self: self.queues.running[0]
    )

    @instead_of("_fill", LIMITS)
    def admits_while_preempting(self, chunks):
        """Admits the requests that it has just preempted, before their pages are free of others."""
        num_retracted = self._continue_running(chunks, self.queues.running)
        return 0, num_retracted + self._admit_waiting(chunks)

    @instead_of("_fill", IDLE)
    def preempts_needlessly(self, chunks):
        """Preempts all in each tenth step, although pages are free: vLLM's reset of a prefix cache, without an end."""
        if self.num_steps % 2:
            self.retract_all()
        return super()._fill(chunks)

    @instead_of("_continue_running", "no check asks that a batch is as large as it could be")
    def forgets_the_last(self, chunks, requests):
        """Never continues the latest running request."""
        return super()._continue_running(chunks, requests[:-1] if len(requests) > 1 else requests)

    @instead_of("_continue_running", IDLE)
    def schedules_twice(self, chunks, requests):
        found = super()._continue_running(chunks, requests)
        chunks.extend(chunk for chunk in chunks[:1] if not chunk.is_prefill)
        return found

    idles_with_waiting = found(IDLE, has_work=property(lambda self: bool(self.queues.running)))
    wakes_for_nothing = found(IDLE, has_work=property(lambda self: True))

    @instead_of("_try_admit", LIMITS)
    def keeps_the_match_of_refused(self, request, budget, chunks):
        """A refused request keeps its locked prefix."""
        refusal = super()._try_admit(request, budget, chunks)
        if refusal == "pages":
            self.kv_cache.cache.lock(self.kv_cache.cache.match_prefix(request.token_ids[:-1]).node)
        return refusal

    @instead_of("_try_admit", LIMITS)
    def caches_before_it_computes(self, request, budget, chunks):
        """Requests of the same batch match pages whose KV is not computed yet."""
        refusal = super()._try_admit(request, budget, chunks)
        if refusal is None:
            before, request.num_computed_tokens = request.num_computed_tokens, chunks[-1].end
            self.kv_cache.cache_unfinished(request)
            request.num_computed_tokens = before
        return refusal

    @instead_of("_retract", LIMITS)
    def drops_the_last_token(self, request):
        """A preemption loses the token whose KV was not computed yet."""
        if request.num_output_tokens:
            request.token_ids.pop()
        super()._retract(request)

    @instead_of("_retract", LIMITS)
    def keeps_state_running(self, request):
        super()._retract(request)
        request.state = RequestState.RUNNING

    @instead_of("finish", PAGES)
    def leaves_the_queue_late(self, request, reason):
        """The finished request stays in the running queue."""
        was_running = request in self.queues.running
        super().finish(request, reason)
        if was_running and reason is FinishReason.ABORT:
            self.queues.running.append(request)

    @instead_of("_next_chunk_tokens", LIMITS)
    def ignores_chunks(self, request, num_tokens_left, budget_tokens):
        """The first chunk of an admission takes all that is left of the step."""
        return min(num_tokens_left, budget_tokens)

    @instead_of("_fill", RANKS)
    def computes_by_clock(self, chunks):
        """A substitute for a batcher that reads a clock: it depends on how many batches this process has made."""
        if next(CALLS) % 7 == 3:
            return self._continue_running(chunks, self.queues.running[:1]), 0
        return super()._fill(chunks)

    iterates_a_set = found(
        RANKS, _continue_running=lambda self, chunks, requests: super()._continue_running(chunks, list(set(requests)))
    )

    @instead_of("next_batch", IDLE)
    def counts_context_twice(self):
        batch = super().next_batch()
        return replace(batch, num_context_tokens=2 * batch.num_context_tokens)

    # Reports 0 admissions and preemptions, from which metrics and the first-token predictor are made.
    counts_no_admission = found(
        IDLE, next_batch=lambda self: replace(super().next_batch(), num_admitted=0, num_retracted=0)
    )

    @instead_of("_retract", "a count for reports; no decision depends on it")
    def forgets_retractions(self, request):
        """Does not count how often a request was preempted."""
        super()._retract(request)
        request.num_retractions = 0

    @instead_of("_retract", "a count for reports; SCHEDULER_CHECKS compares it")
    def recounts_nothing(self, request):
        """The waiting queue reports cached tokens of a match that is gone."""
        super()._retract(request)
        request.num_cached_tokens += 1

    @instead_of("_fill", DECODES)
    def prefills_for_ever(self, chunks):
        """In the mode ``prefill_first`` arrivals hold up decodes without a limit."""
        self._num_prefill_steps = 0
        return super()._fill(chunks)

    @instead_of("_continue_running", DECODES)
    def stalls_decodes(self, chunks, requests):
        """In the mode ``mixed`` prefills stall the decodes of other requests."""
        prefills = [each for each in requests if each.num_prefill_tokens_left]
        return super()._continue_running(chunks, prefills or requests)

    # Prefill tokens of running requests are not counted against those of admissions.
    spends_twice = found(LIMITS, "at most 7 tokens", _make_budget=lambda self, chunks: super()._make_budget([]))

    @instead_of("_make_budget", LIMITS, "at most 1 requests")
    def ignores_slots(self, chunks):
        budget = super()._make_budget(chunks)
        budget.slots += 1
        return budget

    @instead_of("_make_budget", LIMITS, "running requests of tenant")
    def forgets_tenants(self, chunks):
        budget = super()._make_budget(chunks)
        budget.tenant_cap = None
        return budget

    @instead_of("_make_budget", LIMITS, "12 pages stay free")
    def ignores_the_watermark(self, chunks):
        budget = super()._make_budget(chunks)
        budget.watermark_pages = 0
        return budget

    @instead_of("_admit_waiting", FOREVER, "requests without an end")
    def starves_the_preempted(self, chunks):
        return 0 if any(each.num_retractions for each in self.queues.waiting) else super()._admit_waiting(chunks)

    @instead_of("_retract", TOKENS, "tokens of each request")
    def loses_the_preempted(self, request):
        """A preempted request generates its output again."""
        super()._retract(request)
        del request.token_ids[request.num_prompt_tokens :]

    @instead_of("_retract", PAGES, "violations of the pool")
    def leaks_the_preempted(self, request):
        del request.pages[request.num_computed_tokens // self.kv_cache.page_size :]
        super()._retract(request)

    @instead_of("_select_victim", RANKS, "on the first rank")
    def preempts_by_chance(self):
        """The victim is the first of a set."""
        return next(iter(set(self.queues.running[1:] or self.queues.running)))

    @instead_of("_fill", LIMITS, "prefills or decodes")
    def mixes_modes(self, chunks):
        num_retracted, has_room = self._continue_running(chunks, self.queues.running)
        return num_retracted, self._admit_waiting(chunks) if has_room else 0


class BrokenBudget(AdmissionBudget):
    @instead_of("spend", LIMITS)
    def spends_no_slot(self, demand, *, reserved_pages=0):
        super().spend(demand, reserved_pages=reserved_pages)
        self.slots += 1

    @instead_of("spend", LIMITS)
    def spends_no_tokens(self, demand, *, reserved_pages=0):
        super().spend(demand, reserved_pages=reserved_pages)
        self.tokens += demand.num_tokens

    @instead_of("spend", LIMITS)
    def counts_tenants_once(self, demand, *, reserved_pages=0):
        """Admissions of this step do not count for the cap of their tenant."""
        super().spend(demand, reserved_pages=reserved_pages)
        if demand.tenant in self.running_by_tenant:
            self.running_by_tenant[demand.tenant] -= 1

    @instead_of("refusal_of", LIMITS)
    def never_refuses_pages(self, demand):
        refusal = super().refusal_of(demand)
        return None if refusal in ("pages", "watermark") else refusal

    @instead_of("refusal_of", LIMITS)
    def refuses_the_last_page(self, demand):
        """A request that needs the whole pool waits for ever."""
        if demand.num_pages is not None and self.available_pages - demand.num_pages <= 9:
            return "pages"
        return super().refusal_of(demand)

    @instead_of("refusal_of", "one page; tests/scheduling/test_admission_budget.py")
    def allows_the_watermark(self, demand):
        """Off by one: the watermark keeps one page less."""
        self.watermark_pages -= self.watermark_pages > 0
        refusal = super().refusal_of(demand)
        self.watermark_pages += self.watermark_pages > 0
        return refusal


class BrokenKvCache(RequestKvCache):
    @found(LIMITS)
    class matches_without_lock(RequestKvCache):
        """Another request's allocation evicts the prefix of a running one."""

        def match(self, request):
            super().match(request)
            self.cache.unlock(request.node)

        def cache_unfinished(self, request):
            if request.node is not None:
                self.cache.lock(request.node)
            super().cache_unfinished(request)

    # Rounds down where a position begins a page.
    grows_too_little = found(
        LIMITS, grow=lambda self, request, num_tokens: super().grow(request, max(0, num_tokens - 1))
    )

    @instead_of("grow", "no workload has some pages left, but too few")
    def grows_half(self, request, num_tokens):
        """Returns False after it has allocated a part."""
        if super().grow(request, num_tokens):
            return True
        if self.available_pages:
            self.cache.allocate(1)
        return False

    @instead_of("grow", IDLE, last=[])
    def shares_pages(self, request, num_tokens):
        """A page of another request, as after a free list with a page in it twice."""
        had = len(request.pages)
        if not super().grow(request, num_tokens):
            return False
        if len(request.pages) > had:
            if self.last and self.last[0] not in request.pages:
                request.pages[-1] = self.last[0]
            self.last[:] = request.pages[-1:]
        return True

    @instead_of("free", LIMITS)
    def frees_without_unlock(self, request):
        self.cache_unfinished(request)
        request.node = None
        super().free(request)

    @instead_of("match", LIMITS)
    def keeps_computed_after_free(self, request):
        """A preempted request believes that its KV is still there."""
        super().match(request)
        page_size = self.cache.page_size
        if request.num_retractions and len(request.token_ids) > request.num_computed_tokens + page_size:
            if not super().grow(request, page_size):
                return
            request.num_computed_tokens += page_size

    @instead_of("match", LIMITS)
    def matches_other_tokens(self, request):
        """Takes the pages of a prefix with one other token: a hash without its last token."""
        super().match(request)
        missing = pages_for(len(request.token_ids) - 1, self.cache.page_size) - len(request.pages)
        if missing > 0 and request.arrival % 3 == 2 and super().grow(request, self.cache.page_size):
            request.num_computed_tokens += self.cache.page_size


class BrokenPreemption:
    # Two long requests take turns: each preempts the other before it has got further.
    takes_the_first = found(
        "the batcher keeps the earliest arrival from it", select_victim=lambda self, candidates: candidates[0]
    )
    by_hash = found(RANKS, select_victim=lambda self, candidates: min(candidates, key=hash))
    by_chance = found(RANKS, select_victim=lambda self, candidates: random.choice(candidates))

    @instead_of("select_victim", "the batcher replaces a policy that fails")
    def raises(self, candidates):
        raise RuntimeError("no victim")


PARTS = {
    "batcher": BrokenBatcher,
    "kv_cache_type": BrokenKvCache,
    "budget_type": BrokenBudget,
    "preemption": BrokenPreemption,
}
VARIANTS = {
    name: (opening(**{part: broken}), *expected)
    for part, table in PARTS.items()
    for name, (broken, *expected) in variants(table).items()
}
SURVIVORS = [name for name, (_, expected, *_) in VARIANTS.items() if isinstance(expected, str)]
"""Variants that pass, with the reason in place of a check. Some are no errors."""


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in SURVIVORS])
def test_a_broken_part_is_found(name):
    open_batcher, check, *words = VARIANTS[name]
    with pytest.raises(ConformanceError, match=words[0] if words else None):
        check(open_batcher)


@pytest.mark.broken_variants
@pytest.mark.soak_only
@pytest.mark.parametrize("name", SURVIVORS)
@pytest.mark.parametrize("check", BATCHER_CHECKS)
def test_what_the_checks_do_not_find_is_listed(check, name):
    check(VARIANTS[name][0])


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
