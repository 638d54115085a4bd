"""Each policy over any history has the order of a naive model, which sorts all waiting requests by a stated key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby, islice
from typing import TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kit.searches import num_examples

from scheduler_components.ports import SchedulingPolicy
from scheduler_components.scheduling.scheduling_policy import (
    DfsWeight,
    EarliestDeadline,
    FirstComeFirstServed,
    HighestResponseRatio,
    LongestPrefixMatch,
    LoraGrouping,
    PriorityPolicy,
    ShortestRemainingPrefill,
    VirtualTokenCounter,
)
from scheduler_components.testing.policy_checks import PolicyRequest
from scheduler_components.values import RequestHints, ScheduledChunk

Policy: TypeAlias = SchedulingPolicy[PolicyRequest]
AGING, LONGEST = 3, 4


@dataclass(kw_only=True)
class Naive:
    """What the keys below may read.

    Attributes:
        waiting: in order of arrival.
        step: of the order.
        first_steps: by arrival.
        lengths: cached tokens of each waiting request, as of its match in this step.
        counters: computed tokens by tenant.
        last_batch: adapters of the last batch.
    """

    waiting: list[PolicyRequest] = field(default_factory=list)
    step: int = 0
    first_steps: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    last_batch: list[str | None] = field(default_factory=list)

    def uncached(self, request: PolicyRequest) -> int:
        return max(1, request.num_input_tokens - self.lengths[request.arrival])

    def waited(self, request: PolicyRequest) -> int:
        return self.step - self.first_steps[request.arrival]


def fcfs(naive: Naive) -> list[PolicyRequest]:
    return naive.waiting


def priority(naive: Naive) -> list[PolicyRequest]:
    return sorted(naive.waiting, key=lambda each: naive.first_steps[each.arrival] - each.hints.priority * AGING)


def strict_priority(naive: Naive) -> list[PolicyRequest]:
    return sorted(naive.waiting, key=lambda each: -each.hints.priority)


def earliest_deadline(naive: Naive) -> list[PolicyRequest]:
    return sorted(naive.waiting, key=lambda each: (each.hints.deadline_s is None, each.hints.deadline_s or 0))


def lpm(naive: Naive) -> list[PolicyRequest]:
    held_back, others, heads = [], [], []
    for each in sorted(naive.waiting, key=lambda each: -naive.lengths[each.arrival]):
        head = (each.hints.lora, tuple(each.token_ids[:32]))
        if naive.lengths[each.arrival] > 32 or each.num_input_tokens < 32:
            others.append(each)
        elif head in heads:
            held_back.append(each)
        else:
            heads.append(head)
            others.append(each)
    return others + held_back


def dfs_weight(naive: Naive) -> list[PolicyRequest]:
    def walk(group: list[PolicyRequest], depth: int) -> list[PolicyRequest]:
        """Requests whose cached prefixes are equal up to a depth: by their next token, then those that end here."""
        deeper = [each for each in group if len(prefix[each.arrival]) > depth]
        by_next = [
            list(child)
            for _, child in groupby(
                sorted(deeper, key=lambda each: prefix[each.arrival][depth]),
                key=lambda each: prefix[each.arrival][depth],
            )
        ]
        by_next.sort(key=lambda child: (-len(child), min(each.arrival for each in child)))
        return [each for child in by_next for each in walk(child, depth + 1)] + [
            each for each in group if len(prefix[each.arrival]) == depth
        ]

    prefix = {  # Each token with its adapter, so that other adapters have other prefixes.
        each.arrival: [(each.hints.lora or "", token) for token in each.token_ids[: naive.lengths[each.arrival]]]
        for each in naive.waiting
    }
    return walk(naive.waiting, 0)


def shortest(naive: Naive) -> list[PolicyRequest]:
    overdue = [each for each in naive.waiting if naive.waited(each) >= LONGEST]
    others = [each for each in naive.waiting if naive.waited(each) < LONGEST]
    return overdue + sorted(others, key=naive.uncached)


def hrrn(naive: Naive) -> list[PolicyRequest]:
    def key(each: PolicyRequest) -> tuple[Fraction, int]:
        rounded = 1 << (naive.uncached(each) - 1).bit_length()
        return (-Fraction(naive.waited(each) + 1, rounded), rounded)

    return sorted(naive.waiting, key=key)


def virtual_tokens(naive: Naive) -> list[PolicyRequest]:
    counters, left, ordered = dict(naive.counters), list(naive.waiting), []
    while left:
        heads = {each.hints.tenant: each for each in reversed(left)}
        tenant = min(heads, key=lambda name: (counters[name], heads[name].arrival))
        ordered.append(heads[tenant])
        left.remove(heads[tenant])
        counters[tenant] += max(1, heads[tenant].num_input_tokens - heads[tenant].num_cached_tokens)
    return ordered


def lora(naive: Naive) -> list[PolicyRequest]:
    overdue = [each for each in naive.waiting if naive.waited(each) >= LONGEST]
    first = {}
    for each in reversed(naive.waiting):
        first[each.hints.lora] = each.arrival
    used = [None, *naive.last_batch]
    others = [each for each in naive.waiting if naive.waited(each) < LONGEST]
    return overdue + sorted(
        others, key=lambda each: (each.hints.lora not in used, first[each.hints.lora], each.arrival)
    )


Order: TypeAlias = Callable[[Naive], Sequence[PolicyRequest]]
CASES: dict[str, tuple[Callable[[Callable[[PolicyRequest], int]], Policy], Order]] = {
    "fcfs": (lambda _: FirstComeFirstServed(), fcfs),
    "priority": (lambda _: PriorityPolicy(aging_steps=AGING), priority),
    "strict priority": (lambda _: PriorityPolicy(aging_steps=None), strict_priority),
    "lpm": (lambda match_length: LongestPrefixMatch(match_length=match_length), lpm),
    "dfs-weight": (lambda match_length: DfsWeight(match_length=match_length), dfs_weight),
    "shortest-prefill-first": (
        lambda match_length: ShortestRemainingPrefill(match_length=match_length, longest_wait_steps=LONGEST),
        shortest,
    ),
    "hrrn": (lambda match_length: HighestResponseRatio(match_length=match_length), hrrn),
    "earliest-deadline": (lambda _: EarliestDeadline(), earliest_deadline),
    "virtual-token-counter": (lambda _: VirtualTokenCounter(decode_weight=2), virtual_tokens),
    "lora-grouping": (lambda _: LoraGrouping(longest_wait_steps=LONGEST), lora),
}

HINTS = st.builds(
    RequestHints,
    priority=st.integers(-2, 2),
    tenant=st.sampled_from("abc"),
    deadline_s=st.none() | st.sampled_from((1.0, 2.5, 9.0)),
    lora=st.none() | st.sampled_from("xyz"),
)
SHORT = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
LONG = st.builds(lambda head, tail: (head,) * 40 + tail, st.integers(0, 1), SHORT)


class PolicyMachine(RuleBasedStateMachine):
    """One policy next to its model. Subclass with ``name``."""

    name = ""

    @initialize()
    def open(self) -> None:
        open_policy, self.order_of_model = CASES[self.name]
        self.policy = open_policy(self.match_length)
        self.naive = Naive()
        self.cached: dict[int, int] = {}
        self.matched_steps: dict[int, int] = {}
        self.running: list[PolicyRequest] = []
        self.num_arrivals = 0
        self.floor = 0
        self.last_tenant = "a"

    def match_length(self, request: PolicyRequest) -> int:
        return min(self.cached[request.arrival], request.num_input_tokens)

    @rule(tokens=SHORT | LONG, hints=HINTS, cached=st.integers(0, 45), is_known=st.booleans())
    def submit(self, tokens: tuple[int, ...], hints: RequestHints, cached: int, is_known: bool) -> None:
        request = PolicyRequest(rid="r", arrival=self.num_arrivals, token_ids=tokens, hints=hints)
        self.cached[request.arrival] = cached
        if is_known:
            request.num_cached_tokens = self.match_length(request)
        self.num_arrivals += 1
        self.wait(request)

    def wait(self, request: PolicyRequest) -> None:
        naive, tenant = self.naive, request.hints.tenant
        if not naive.waiting:
            self.floor = max(self.floor, naive.counters.get(self.last_tenant, 0))
        if tenant not in {each.hints.tenant for each in naive.waiting}:
            naive.counters[tenant] = max(naive.counters.get(tenant, 0), self.floor)
        naive.waiting = sorted([*naive.waiting, request], key=lambda each: each.arrival)
        naive.first_steps.setdefault(request.arrival, naive.step)
        naive.lengths[request.arrival] = request.num_cached_tokens
        self.matched_steps.pop(request.arrival, None)
        self.policy.add(request, naive.step)

    def leave(self, request: PolicyRequest) -> None:
        self.naive.waiting = [each for each in self.naive.waiting if each is not request]
        if not self.naive.waiting:
            self.last_tenant = request.hints.tenant
        self.policy.discard(request)

    @precondition(lambda self: self.naive.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(self.naive.waiting)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 40))
    def preempt(self, data: st.DataObject, num_tokens: int) -> None:
        request = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        request.token_ids = (*request.token_ids, *(1,) * num_tokens)
        request.num_cached_tokens = min(request.num_input_tokens, self.cached[request.arrival])
        self.wait(request)

    @rule(data=st.data(), cached=st.integers(0, 45))
    def change_cache(self, data: st.DataObject, cached: int) -> None:
        if self.naive.waiting:
            self.cached[data.draw(st.sampled_from(self.naive.waiting)).arrival] = cached

    @rule(count=st.integers(0, 4), is_each_admitted=st.booleans())
    def admit(self, count: int, is_each_admitted: bool) -> None:
        expected = self.expected()
        found = []
        for place, request in enumerate(islice(self.policy.order(self.naive.step), count)):
            found.append(request)
            if is_each_admitted or place % 2:
                self.leave(request)
                self.running.append(request)
        assert found == expected[:count]

    @rule(data=st.data(), is_prefill=st.booleans())
    def compute(self, data: st.DataObject, is_prefill: bool) -> None:
        numbers = [data.draw(st.integers(1, 50)) for _ in self.running]
        chunks = []
        for each, number in zip(self.running, numbers, strict=True):
            chunks.append(ScheduledChunk(each, 0, number, is_prefill))
            self.naive.counters[each.hints.tenant] += number if is_prefill else 2 * number
        self.naive.last_batch = [each.hints.lora for each in self.running]
        self.policy.on_scheduled(chunks)

    @rule(num_steps=st.sampled_from((1, 1, 1, 2, 5)))
    def pass_steps(self, num_steps: int) -> None:
        self.naive.step += num_steps

    def expected(self) -> list[PolicyRequest]:
        """Return the model's order. A waiting request is matched in the first order of a step that it is in."""
        naive = self.naive
        for each in naive.waiting:
            if self.matched_steps.get(each.arrival) != naive.step:
                self.matched_steps[each.arrival] = naive.step
                naive.lengths[each.arrival] = self.match_length(each)
        if naive.waiting:
            self.floor = max(self.floor, min(naive.counters[each.hints.tenant] for each in naive.waiting))
        return list(self.order_of_model(naive))

    @invariant()
    def the_order_is_the_models(self) -> None:
        if hasattr(self, "policy") and self.num_arrivals % 2:
            expected = self.expected()
            assert [each.arrival for each in self.policy.order(self.naive.step)] == [each.arrival for each in expected]


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_any_history_has_the_order_of_the_model(name: str) -> None:
    machine = type(f"PolicyMachine_{name}", (PolicyMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=num_examples(1), stateful_step_count=30))
