"""Every policy check passes on a policy that sorts, and fails, with its trace, on a policy that breaks its promise."""

from __future__ import annotations

import random
from functools import cached_property
from itertools import count, cycle

import pytest
from kit.sorted_policy import Sorted
from kit.variants import found, instead_of, variants

from scheduler_components import ConfigError
from scheduler_components.scheduling.scheduling_policy import LongestPrefixMatch, PriorityPolicy, VirtualTokenCounter
from scheduler_components.testing import POLICY_CHECKS, ConformanceError, PolicyPromises
from scheduler_components.testing import policy_checks as checks

COST = checks.check_cost_is_flat
COUNTED = checks.check_computed_tokens_are_counted
DISCARDED = checks.check_requests_may_be_discarded_while_they_are_read
KEYS = checks.check_bad_keys_are_refused
MATCHES = checks.check_matches_have_a_budget
ONCE = checks.check_each_waiting_request_comes_once
PREEMPTED = checks.check_preempted_requests_wait_again
RANKS = checks.check_ranks_decide_equally
RELEASED = checks.check_discarded_requests_are_released
REPEATABLE = checks.check_orders_are_repeatable
WAIT = checks.check_wait_is_bounded
FAIR = PolicyPromises(shares_by_tenant=True)
NUM_OPENED = count()


@pytest.mark.parametrize("check", POLICY_CHECKS)
def test_a_policy_that_sorts_passes(check):
    check(Sorted, PolicyPromises(max_wait_steps=checks.NUM_AHEAD))


@pytest.mark.parametrize("check", POLICY_CHECKS)
def test_nothing_is_promised_by_default(check):
    check(Sorted)


class BrokenSorted(Sorted):
    @instead_of("order", ONCE, "waiting requests that are missing")
    def one_per_key(self, step):
        by_priority = {each.hints.priority: each for each in self.waiting.values()}
        return iter([by_priority[key] for key in sorted(by_priority)])

    @instead_of("discard", ONCE, "requests in the order that do not wait")
    def keeps_aborted(self, request):
        if request.arrival % 2:
            super().discard(request)

    @found(PREEMPTED, "waiting requests that are missing")
    class once_per_arrival(Sorted):
        """Takes a preempted request for one that it has served."""

        served = cached_property(lambda self: [])

        def add(self, request, step):
            if request.arrival not in self.served:
                super().add(request, step)

        def discard(self, request):
            super().discard(request)
            self.served.append(request.arrival)

    @found(PREEMPTED, "requests that come twice")
    class appends(Sorted):
        """A list, without a look whether a request is in it."""

        queue = cached_property(lambda self: [])

        def add(self, request, step):
            self.queue.append(request)

        def discard(self, request):
            if request in self.queue:
                self.queue.remove(request)

        def order(self, step):
            return iter(list(self.queue))

    @found(RANKS, "the order of another rank")
    class appends_once(appends.variant):
        """In the order of calls of ``add``."""

        def add(self, request, step):
            if request not in self.queue:
                super().add(request, step)

    @found(DISCARDED, "arrivals read")
    class reads_the_live_list(appends_once.variant):
        """Skips a request after each one that is discarded while it reads."""

        def order(self, step):
            self.queue.sort(key=lambda each: each.arrival)
            return iter(self.queue)

    @found(REPEATABLE, "arrivals in the order read before|are missing")
    class pops_what_is_read(appends_once.variant):
        def order(self, step):
            self.queue.sort(key=lambda each: each.arrival)
            while self.queue:
                yield self.queue.pop(0)

    @instead_of("discard", PREEMPTED, "KeyError")
    def refuses_unknown(self, request):
        del self.waiting[request.arrival]

    never_ends = found(ONCE, "requests that come twice", order=lambda self, step: cycle(super().order(step)))
    by_hash = found(RANKS, "the order of another rank", key=lambda self, request, step: (hash(request.rid),))
    by_address = found(RANKS, "the order of another rank", key=lambda self, request, step: (id(request) // 16 % 7,))

    @instead_of("order", RANKS, "the order of another rank")
    def by_set_of_tenants(self, step):
        tenants = {each.hints.tenant for each in self.waiting.values()}
        for tenant in tenants:
            for each in list(super().order(step)):
                if each.hints.tenant == tenant:
                    yield each

    by_chance = found(REPEATABLE, "arrivals in the order", key=lambda self, request, step: (random.random(),))

    @found(RANKS, "the order of another rank")
    class by_rank(Sorted):
        """Every second policy that is opened, which is on another rank, decides otherwise."""

        sign = cached_property(lambda self: 1 if next(NUM_OPENED) % 2 else -1)

        def key(self, request, step):
            return (self.sign * request.hints.priority,)

    @found(REPEATABLE, "arrivals in the order")
    class ages_by_reads(Sorted):
        """Time is the number of orders, so reading changes the next order."""

        num_orders = 0

        def key(self, request, step):
            return ((request.arrival + self.num_orders) % 7,)

        def order(self, step):
            self.num_orders += 1
            return super().order(step)

    last_come_first_served = found(WAIT, "it still waits", key=lambda self, request, step: (-request.arrival,))
    starves_long = found(
        WAIT, "while short requests arrive", key=lambda self, request, step: (request.num_input_tokens,)
    )
    starves_uncached = found(
        WAIT, "while cached requests arrive", key=lambda self, request, step: (-request.num_cached_tokens,)
    )
    starves_adapters = found(
        WAIT, "requests of one other adapter arrive", key=lambda self, request, step: (request.hints.lora != "hot",)
    )
    matches_all = found(
        MATCHES, "expected: at most 128", key=lambda self, request, step: (-self.match_length(request),)
    )

    @instead_of("order", MATCHES, "expected: at most 128")
    def matches_per_order(self, step):
        """Has a budget per order instead of per step."""
        for each in list(super().order(step))[:100]:
            self.match_length(each)
        return super().order(step)

    @instead_of("order", KEYS, "priority=nan|TypeError")
    def sorts_nan(self, step):
        """A NaN compares as smaller and as larger, so the order depends on where a sort meets it."""
        return iter(sorted(self.waiting.values(), key=lambda each: -each.hints.priority))

    @instead_of("add", KEYS, "a ValueError, or no error")
    def fails_on_text(self, request, step):
        request.hints.priority + 1
        super().add(request, step)

    @instead_of("add", KEYS, "requests in the order that do not wait")
    def keeps_refused(self, request, step):
        super().add(request, step)
        if not isinstance(request.hints.priority, int):
            raise ConfigError("priority", request.hints.priority, "is not an integer", "give one")

    @instead_of("add", KEYS, "an error of one line")
    def refuses_at_length(self, request, step):
        if not isinstance(request.hints.priority, int):
            raise ValueError("this is not\na priority")
        super().add(request, step)

    @instead_of("on_scheduled", COUNTED, "requests in the order that do not wait")
    def adds_running(self, chunks):
        for chunk in chunks:
            self.waiting[chunk.request.arrival] = chunk.request

    @instead_of("on_scheduled", COUNTED, "KeyError")
    def fails_on_running(self, chunks):
        for chunk in chunks:
            self.waiting[chunk.request.arrival].num_cached_tokens += chunk.end

    @found(COUNTED, "8 to 12 of 20 turns", FAIR)
    class fair_by_tenant(Sorted):
        """Shares of tenants without the lift of the virtual token counter."""

        counters = cached_property(lambda self: {})

        decode_weight = 2

        def key(self, request, step):
            return (self.counters.get(request.hints.tenant, 0),)

        def on_scheduled(self, chunks):
            for chunk in chunks:
                tenant, weight = chunk.request.hints.tenant, 1 if chunk.is_prefill else self.decode_weight
                self.counters[tenant] = self.counters.get(tenant, 0) + weight * chunk.num_tokens

    @found(COUNTED, "first tenant", FAIR)
    class ignores_decodes(fair_by_tenant.variant):
        decode_weight = 0

    @instead_of("discard", RELEASED, "still refers to", log=cached_property(lambda self: []))
    def keeps_discarded(self, request):
        """A log of all requests, which keeps their tokens in memory."""
        super().discard(request)
        self.log.append(request)


class DeniesBatches(VirtualTokenCounter):
    """Says that it reads no batches, and counts them."""

    reads_batches = False


VARIANTS = {
    **variants(BrokenSorted),
    "ages_nothing": (lambda _: PriorityPolicy(aging_steps=None), WAIT, "while requests of a higher priority arrive"),
    "is_not_flat": (Sorted, COST, "at most twice the", PolicyPromises(is_flat=True)),
    "shares_nothing": (Sorted, COUNTED, "first tenant", FAIR),
    "denies_batches": (lambda _: DeniesBatches(), COUNTED, "order without the batches", FAIR),
}


@pytest.mark.broken_variants
@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_policy_fails_with_its_trace(name):
    broken, check, message, *promises = VARIANTS[name]
    with pytest.raises(ConformanceError) as failed:
        check(broken, *(promises or [PolicyPromises(max_wait_steps=50)]))
    assert any(each in str(failed.value) for each in message.split("|")), str(failed.value)
    assert "1. opened a policy" in str(failed.value)


def test_every_check_has_a_broken_policy():
    assert {check for _, check, *_ in VARIANTS.values()} == set(POLICY_CHECKS)


def test_policies_of_the_kit_keep_promises_that_these_variants_break():
    for check in POLICY_CHECKS:
        check(lambda _: VirtualTokenCounter(), PolicyPromises(is_flat=True, shares_by_tenant=True))
        check(lambda match_length: LongestPrefixMatch(match_length=match_length), PolicyPromises(is_flat=True))
