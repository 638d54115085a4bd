"""Broken scheduling policies, as authors write them: the checks of policies find each of them.

Their author did not write the checks. More variants are in ``test_policy_checks.py``.
"""

from __future__ import annotations

import functools
import random
import time
from array import array
from bisect import insort
from collections import Counter, OrderedDict, defaultdict
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import ClassVar

import pytest
from kit.sorted_policy import Sorted
from kit.variants import found, instead_of, variants

from scheduler_components.scheduling.ordered_requests import CachedLengths
from scheduler_components.scheduling.scheduling_policy import (
    FirstComeFirstServed,
    LongestPrefixMatch,
    LoraGrouping,
    PriorityPolicy,
    ShortestRemainingPrefill,
    VirtualTokenCounter,
)
from scheduler_components.testing import POLICY_CHECKS, ConformanceError, PolicyPromises
from scheduler_components.testing import policy_checks as checks

pytestmark = pytest.mark.broken_variants

NONE = PolicyPromises()
BOUNDED = PolicyPromises(max_wait_steps=50)
PLACES = PolicyPromises(keeps_places=True)
FLAT = PolicyPromises(is_flat=True)
FAIR = PolicyPromises(shares_by_tenant=True)

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
ORDER = "which order is right is for the policy to say"

SINCE = cached_property(lambda self: {})
"""When each request was added, by this rank's clock."""


def noting_when(self, request, step):
    Sorted.add(self, request, step)
    self.since.setdefault(request.arrival, time.monotonic())


class BrokenSorted(Sorted):
    # Membership.

    @found(PREEMPTED)
    class forgets_in_the_same_step(Sorted):
        """Marks discarded requests until the next order: one that is preempted before that is lost."""

        marked = cached_property(lambda self: set())

        def discard(self, request):
            self.marked.add(request.arrival)

        def order(self, step):
            for arrival in self.marked:
                self.waiting.pop(arrival, None)
            self.marked.clear()
            return super().order(step)

    @instead_of("order", ONCE)
    def drops_the_129th(self, step):
        """Reads 128 requests in order, then the others from one too far."""
        requests = list(super().order(step))
        yield from requests[:128]
        yield from requests[129:]

    @instead_of("order", WAIT, BOUNDED)
    def skips_the_unnamed(self, step):
        """A client without a name has the tenant "", which counts as no tenant here."""
        requests = list(super().order(step))
        for tenant in sorted({request.hints.tenant for request in requests if request.hints.tenant}):
            yield from (request for request in requests if request.hints.tenant == tenant)

    @instead_of("order", ONCE)
    def drops_expired(self, step):
        """Passes over requests whose deadline has passed, by steps of 20 ms."""
        return (each for each in super().order(step) if (each.hints.deadline_s or 1e9) > step * 0.02)

    @found(ONCE)
    class loses_the_held_back(LongestPrefixMatch):
        def order(self, step):
            seen = {}
            return (request for request in super().order(step) if not self._repeats_prefix(request, seen))

    @found(ONCE)
    class reads_overdue_twice(ShortestRemainingPrefill):
        def order(self, step):
            yield from self._wait_limit.overdue(step, self.longest_wait_steps)
            yield from super().order(step)

    @found(ONCE)
    class stays_in_the_old_bucket(Sorted):
        """Looks for a request in the bucket of its cached tokens, which change while it waits."""

        buckets = cached_property(lambda self: defaultdict(dict))

        def add(self, request, step):
            self.buckets[request.num_cached_tokens].setdefault(request.arrival, request)

        def discard(self, request):
            self.buckets[request.num_cached_tokens].pop(request.arrival, None)

        def order(self, step):
            for bucket in sorted(self.buckets):
                yield from [self.buckets[bucket][arrival] for arrival in sorted(self.buckets[bucket])]

    @instead_of("order", ONCE, step=-1, sorted=())
    def caches_the_order(self, step):
        """Sorts once per step, and misses what changes after that."""
        if step != self.step:
            self.step, self.sorted = step, tuple(super().order(step))
        return iter(self.sorted)

    @instead_of("order", REPEATABLE, step=-1, iterator=iter(()))
    def reuses_the_iterator(self, step):
        """Makes one iterator per step; a second reader continues where the first one stopped."""
        if step != self.step:
            self.step, self.iterator = step, super().order(step)
        return self.iterator

    # Raises as soon as the batcher discards what it has read.
    iterates_the_dictionary = found(DISCARDED, order=lambda self, step: iter(self.waiting.values()))

    @instead_of("order", ONCE)
    def has_no_empty_order(self, step):
        first = min(self.waiting.values(), key=lambda request: request.arrival)
        yield first
        yield from (request for request in super().order(step) if request is not first)

    @instead_of("order", ONCE, steps=cached_property(lambda self: []))
    def counts_steps(self, step):
        """Keeps a list of arrivals per step, and expects each step to follow the last one."""
        if step > len(self.steps):
            raise IndexError(f"step {step} after step {len(self.steps)}")
        if step == len(self.steps):
            self.steps.append(len(self.waiting))
        return super().order(step)

    @found(ONCE)
    class recurses(Sorted):
        """A generator in a generator per waiting request: too deep for a thousand."""

        def order(self, step):
            return self._from(0, list(super().order(step)))

        def _from(self, place, requests):
            if place < len(requests):
                yield requests[place]
                yield from self._from(place + 1, requests)

    # A dictionary by prompt, to group equal prompts: of two equal ones it keeps one.
    keyed_by_prompt = found(
        ONCE,
        add=lambda self, request, step: self.waiting.update({hash(tuple(request.token_ids)): request}),
        discard=lambda self, request: self.waiting.pop(hash(tuple(request.token_ids)), None),
    )

    @instead_of("discard", "a name is unique among the requests in flight", BOUNDED)
    def discards_by_rid(self, request):
        """Discards by name, and a name may be used again after an abort: the successor is discarded with it."""
        self.waiting = {number: each for number, each in self.waiting.items() if each.rid != request.rid}

    # Equal on every rank, and repeatable.

    @instead_of("__init__", RANKS, waiting={})
    def shares_the_queue(self, match_length):
        """One dictionary for all instances: a class attribute."""
        self.match_length = match_length

    @found(RANKS)
    class shares_counters(Sorted):
        """Each instance adds to the same counters of tenants: a class attribute."""

        counters: ClassVar = Counter()

        def key(self, request, step):
            return (self.counters[request.hints.tenant[1:]],)

        def on_scheduled(self, chunks):
            for chunk in chunks:
                self.counters[chunk.request.hints.tenant[1:]] += chunk.num_tokens

    @instead_of("key", RANKS, since=SINCE, add=noting_when)
    def ages_by_clock(self, request, step):
        """Orders by priority and by the time that a request has waited, in microseconds of its own clock."""
        return (-request.hints.priority - (time.monotonic() - self.since[request.arrival]) * 1e4,)

    @instead_of("key", "no check waits a second", BOUNDED, since=SINCE, add=noting_when)
    def ages_by_seconds(self, request, step):
        """Serves by whole seconds of waiting on its own clock, which no check waits."""
        return (-int(time.monotonic() - self.since[request.arrival]),)

    @instead_of("order", REPEATABLE, random=cached_property(lambda self: random.Random(0)))
    def draws_from_a_seed(self, step):
        """A lottery with a seed: each order draws, so a rank that reads once more differs."""
        requests = list(super().order(step))
        self.random.shuffle(requests)
        return iter(requests)

    @found(REPEATABLE)
    class rotates_what_is_read(Sorted):
        """Takes tenants in turn, and moves a tenant to the back when its request is read, not when it is admitted."""

        tenants = cached_property(lambda self: OrderedDict())

        def add(self, request, step):
            super().add(request, step)
            self.tenants.setdefault(request.hints.tenant)

        def order(self, step):
            left = list(super().order(step))
            while left:
                for tenant in list(self.tenants):
                    request = next((each for each in left if each.hints.tenant == tenant), None)
                    if request is not None:
                        left.remove(request)
                        self.tenants.move_to_end(tenant)
                        yield request

    # Requests of one priority are in the order of adding, which differs between ranks.
    ties_by_insertion = found(
        RANKS, order=lambda self, step: iter(sorted(self.waiting.values(), key=lambda request: -request.hints.priority))
    )

    @instead_of("order", RANKS)
    def loses_precision(self, step):
        """Packs priority and arrival into one float of 32 bits: many arrivals are equal."""
        keys = {
            number: array("f", [1e9 - each.hints.priority * 1e8 + number])[0] for number, each in self.waiting.items()
        }
        return iter([self.waiting[number] for number in sorted(self.waiting, key=keys.__getitem__)])

    @instead_of("order", ONCE)
    def stores_matches(self, step):
        """Writes what it matched into the request, which then differs from that of the scheduler."""
        for request in super().order(step):
            request.num_cached_tokens += 1
            yield request

    @instead_of("order", ONCE)
    def truncates_prompts(self, step):
        """Removes the cached tokens of the prompt to find the remaining ones."""
        for request in super().order(step):
            request.token_ids = request.token_ids[-64:]
            yield request

    @instead_of("on_scheduled", COUNTED)
    def pops_chunks(self, chunks):
        """Removes the decodes from the batch that is to be computed."""
        chunks[:] = [chunk for chunk in chunks if chunk.is_prefill]

    @instead_of("order", ONCE)
    def compares_requests(self, step):
        """A heap of keys and requests: requests are compared when keys are equal."""
        heap = []
        for request in self.waiting.values():
            heappush(heap, (-request.hints.priority, request))
        while heap:
            yield heappop(heap)[1]

    # Sorts by adapter; the base model has none.
    compares_none = found(ONCE, key=lambda self, request, step: (request.hints.lora,))

    # Orders by name: "r10" comes before "r9", and a client chooses its name.
    by_rid = found(WAIT, BOUNDED, key=lambda self, request, step: (request.rid,))

    # Waiting.

    @found(PREEMPTED, PLACES)
    class requeues_at_the_back(FirstComeFirstServed):
        """A preempted request waits behind all others, and is preempted again."""

        def add(self, request, step):
            self._waiting.put(request, step)

    @found(WAIT, BOUNDED)
    class wraps_steps(Sorted):
        """Keeps the step of an arrival in 8 bits."""

        steps = cached_property(lambda self: {})

        def key(self, request, step):
            return (self.steps[request.arrival],)

        def add(self, request, step):
            super().add(request, step)
            self.steps.setdefault(request.arrival, step & 255)

    @found(WAIT, BOUNDED)
    class limits_the_newest(ShortestRemainingPrefill):
        """Asks how long the newest request has waited, instead of the earliest."""

        def order(self, step):
            newest = max((request.arrival for request in self._wait_limit._requests), default=0)
            if step - self._wait_limit._first_steps.step_of(newest) >= self.longest_wait_steps:
                return super().order(step)
            return iter(self._waiting)

    @found(WAIT, BOUNDED)
    class groups_for_ever(LoraGrouping):
        """Stays with the adapters of the last batch."""

        def order(self, step):
            return self._by_adapter()

    # Matches and cost.

    @found(MATCHES)
    class matches_one_too_many(LongestPrefixMatch):
        def __post_init__(self):
            self._lengths = CachedLengths(self.match_length, self.matches_per_step + 1)

    @instead_of("order", MATCHES)
    def matches_what_it_yields(self, step):
        """Matches each request when it is read, again and again."""
        for request in super().order(step):
            if self.match_length(request) >= 0:
                yield request

    @instead_of("discard", MATCHES)
    def matches_in_discard(self, request):
        """Asks the cache at each admission, outside of the budget."""
        for other in list(self.waiting.values())[:64]:
            self.match_length(other)
        super().discard(request)

    @found(ORDER, NONE)
    class matches_once(Sorted):
        """Asks the cache once per request, and knows nothing of an eviction."""

        lengths = cached_property(lambda self: {})

        def add(self, request, step):
            super().add(request, step)
            self.lengths[request.arrival] = self.match_length(request)

        def key(self, request, step):
            return (-self.lengths[request.arrival],)

        def discard(self, request):
            super().discard(request)
            self.lengths.pop(request.arrival, None)

    @found(COST, FLAT)
    class reads_all_for_its_head(LoraGrouping):
        """Asks all waiting requests for their adapter in each step."""

        def order(self, step):
            adapters = {each.hints.lora for each in self._wait_limit._requests}
            return super().order(step) if adapters else iter(())

    @found("costs time, and no read of a request", BOUNDED)
    class inserts_in_a_list(Sorted):
        """An insertion moves the half of all waiting requests."""

        sorted = cached_property(lambda self: [])

        def add(self, request, step):
            self.discard(request)
            insort(self.sorted, (request.arrival, request))

        def discard(self, request):
            self.sorted = [entry for entry in self.sorted if entry[0] != request.arrival]

        def order(self, step):
            return iter([request for _, request in self.sorted])

    # Keys.

    @instead_of("add", KEYS)
    def cuts_priorities(self, request, step):
        """A priority of infinity has no integer."""
        if isinstance(request.hints.priority, float) and request.hints.priority > 1e9:
            int(request.hints.priority)
        super().add(request, step)

    # References.

    # A cache of a function keeps its arguments.
    caches_lengths_by_request = found(
        RELEASED,
        length=cached_property(lambda self: functools.lru_cache(maxsize=None)(self.match_length)),
        key=lambda self, request, step: (-self.length(request),),
    )

    @instead_of("on_scheduled", "one batch, until the next", BOUNDED, last=())
    def keeps_the_last_batch(self, chunks):
        """Keeps the chunks of the last batch, and their requests while the engine is idle."""
        self.last = chunks

    @instead_of("on_scheduled", RELEASED, batches=cached_property(lambda self: []))
    def keeps_all_batches(self, chunks):
        self.batches.append(chunks)

    @found(RELEASED)
    class marks_in_the_heap(Sorted):
        """Removed requests stay in the heap until they reach its top."""

        heap = cached_property(lambda self: [])

        def add(self, request, step):
            super().add(request, step)
            heappush(self.heap, (request.arrival, id(request), request))

        def order(self, step):
            heapify(self.heap)
            while self.heap and self.heap[0][0] not in self.waiting:
                heappop(self.heap)
            return super().order(step)


class BrokenPriority(PriorityPolicy):
    @instead_of("add", WAIT, BOUNDED)
    def inverts_aging(self, request, step):
        """Waiting lowers a priority."""
        self._first_steps.add(request.arrival, step)
        self._waiting.put(request, -request.hints.priority * 10 - self._first_steps.step_of(request.arrival))

    @instead_of("add", PREEMPTED, PLACES)
    def restarts_aging(self, request, step):
        """A preempted request begins to wait again."""
        self._waiting.put(request, step - request.hints.priority * 10)

    @instead_of("add", WAIT, BOUNDED)
    def wraps_aging(self, request, step):
        """Keeps the key in 32 bits with a sign, as a tensor would."""
        key = step - max(-9, min(9, request.hints.priority)) * 10
        self._waiting.put(request, (key + 2**31) % 2**32 - 2**31)

    @instead_of("add", ORDER, BOUNDED)
    def inverts_priority(self, request, step):
        """vLLM's order: a smaller number runs first."""
        self._waiting.put(request, request.hints.priority)

    @instead_of("add", KEYS)
    def refuses_after_it_added(self, request, step):
        """Adds with a neutral key, then refuses the true one."""
        self._waiting.put(request, 0)
        super().add(request, step)


class BrokenShares(VirtualTokenCounter):
    # Shares of tenants.

    @instead_of("on_scheduled", COUNTED, FAIR)
    def counts_for_the_first(self, chunks):
        """Charges the whole batch to the tenant of its first chunk."""
        if chunks:
            tenant, num_tokens = chunks[0].request.hints.tenant, sum(chunk.num_tokens for chunk in chunks)
            self._set_counter(tenant, self._counters.get(tenant, 0) + num_tokens)

    @instead_of("on_scheduled", COUNTED, FAIR)
    def counts_whole_requests(self, chunks):
        """Charges the positions from the beginning in each chunk."""
        for chunk in chunks:
            weight = self.prefill_weight if chunk.is_prefill else self.decode_weight
            tenant = chunk.request.hints.tenant
            self._set_counter(tenant, self._counters.get(tenant, self._floor) + weight * chunk.end)

    @instead_of("on_scheduled", COUNTED, FAIR)
    def counts_requests(self, chunks):
        """Charges a request, whatever its length."""
        for chunk in chunks:
            tenant = chunk.request.hints.tenant
            self._set_counter(tenant, self._counters.get(tenant, self._floor) + 1)

    @instead_of("on_scheduled", COUNTED, FAIR)
    def only_the_last_chunk(self, chunks):
        """Computes the charge of each chunk from the counter before the batch, so the last one replaces the others."""
        before = dict(self._counters)
        for chunk in chunks:
            tenant = chunk.request.hints.tenant
            weight = self.prefill_weight if chunk.is_prefill else self.decode_weight
            self._set_counter(tenant, before.get(tenant, self._floor) + weight * chunk.num_tokens)

    @instead_of("add", COUNTED, FAIR)
    def forgets_counters(self, request, step):
        """A tenant begins at the floor whenever it begins to wait: it never pays with one request at a time."""
        if not self._tenants.has_requests(request.hints.tenant):
            self._counters.pop(request.hints.tenant, None)
        super().add(request, step)

    @instead_of("add", COUNTED, FAIR)
    def lifts_to_the_highest(self, request, step):
        """A tenant that begins to wait is behind all others until they have caught up."""
        is_waiting = self._tenants.has_requests(request.hints.tenant)
        super().add(request, step)
        if not is_waiting:
            self._set_counter(request.hints.tenant, max(self._counters.values()))

    # The tenant that has received most is first.
    inverts_shares = found(COUNTED, FAIR, order=lambda self, step: iter(list(super().order(step))[::-1]))

    @instead_of("order", COUNTED, FAIR)
    def resets_counters(self, step):
        """Forgets all shares in each fifth step."""
        if step % 5 == 0:
            for tenant in self._counters:
                self._set_counter(tenant, self._floor)
        return super().order(step)


SETTINGS = {
    PriorityPolicy: {"aging_steps": 10},
    ShortestRemainingPrefill: {"longest_wait_steps": 20},
    LoraGrouping: {"longest_wait_steps": 20},
}


def opening(policy):
    """Return how to open a policy: those of the kit with their settings, and with the cache if they read it."""
    if issubclass(policy, Sorted):
        return policy
    settings = next((SETTINGS[each] for each in policy.__mro__ if each in SETTINGS), {})
    reads_cache = issubclass(policy, LongestPrefixMatch | ShortestRemainingPrefill)
    return lambda match_length: policy(**settings, **({"match_length": match_length} if reads_cache else {}))


VARIANTS = {
    name: (opening(policy), expected, *promises)
    for name, (policy, expected, *promises) in variants(BrokenSorted, BrokenPriority, BrokenShares).items()
}
SURVIVORS = [name for name, (_, expected, *_) in VARIANTS.items() if isinstance(expected, str)]
"""Variants that pass, with the reason in place of a check. Some are no errors."""


@pytest.mark.parametrize("check", POLICY_CHECKS)
def test_the_queue_of_these_variants_passes(check):
    check(Sorted, PolicyPromises(max_wait_steps=checks.NUM_AHEAD, keeps_places=True))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in SURVIVORS])
def test_a_broken_policy_is_found(name):
    open_policy, check, *promises = VARIANTS[name]
    with pytest.raises(ConformanceError):
        check(open_policy, *promises)


@pytest.mark.parametrize("name", SURVIVORS)
def test_survivors_are_known(name):
    open_policy, _, *promises = VARIANTS[name]
    for check in POLICY_CHECKS:
        check(open_policy, *promises)
