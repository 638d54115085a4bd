"""Every policy check passes on a policy that sorts, and fails, with its trace, on a policy that breaks its promise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from typing import ClassVar

import pytest

from scheduler_components import ConfigError
from scheduler_components.scheduling.scheduling_policy import LongestPrefixMatch, PriorityPolicy, VirtualTokenCounter
from scheduler_components.testing import POLICY_CHECKS, ConformanceError, PolicyPromises, PolicyRequest
from scheduler_components.testing import policy_checks as checks
from scheduler_components.values import ScheduledChunk

Chunks = Sequence[ScheduledChunk[PolicyRequest]]


class Sorted:
    """Sorts all waiting requests in each order: correct, and not flat."""

    def __init__(self, match_length: Callable[[PolicyRequest], int]) -> None:
        self.match_length = match_length
        self.waiting: dict[int, PolicyRequest] = {}

    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return ()

    def add(self, request: PolicyRequest, step: int) -> None:
        self.waiting[request.arrival] = request

    def discard(self, request: PolicyRequest) -> None:
        self.waiting.pop(request.arrival, None)

    def order(self, step: int) -> Iterator[PolicyRequest]:
        return iter(sorted(self.waiting.values(), key=lambda each: (*self.key(each, step), each.arrival)))  # type: ignore[arg-type]

    def on_scheduled(self, chunks: Chunks) -> None:
        pass


@pytest.mark.parametrize("check", POLICY_CHECKS)
def test_a_policy_that_sorts_passes(check: Callable[[checks.OpenPolicy, PolicyPromises], None]) -> None:
    check(Sorted, PolicyPromises(max_wait_steps=checks.NUM_AHEAD))


@pytest.mark.parametrize("check", POLICY_CHECKS)
def test_nothing_is_promised_by_default(check: Callable[..., None]) -> None:
    check(Sorted)


class OnePerKey(Sorted):
    def order(self, step: int) -> Iterator[PolicyRequest]:
        by_priority = {each.hints.priority: each for each in self.waiting.values()}
        return iter([by_priority[key] for key in sorted(by_priority)])


class KeepsAborted(Sorted):
    def discard(self, request: PolicyRequest) -> None:
        if request.arrival % 2:
            super().discard(request)


class OncePerArrival(Sorted):
    """Takes a preempted request for one that it has served."""

    def __init__(self, match_length: Callable[[PolicyRequest], int]) -> None:
        super().__init__(match_length)
        self.served: list[int] = []

    def add(self, request: PolicyRequest, step: int) -> None:
        if request.arrival not in self.served:
            super().add(request, step)

    def discard(self, request: PolicyRequest) -> None:
        super().discard(request)
        self.served.append(request.arrival)


class Appends(Sorted):
    """A list, without a look whether a request is in it."""

    def __init__(self, match_length: Callable[[PolicyRequest], int]) -> None:
        super().__init__(match_length)
        self.queue: list[PolicyRequest] = []

    def add(self, request: PolicyRequest, step: int) -> None:
        self.queue.append(request)

    def discard(self, request: PolicyRequest) -> None:
        if request in self.queue:
            self.queue.remove(request)

    def order(self, step: int) -> Iterator[PolicyRequest]:
        return iter(list(self.queue))


class AppendsOnce(Appends):
    """In the order of calls of ``add``."""

    def add(self, request: PolicyRequest, step: int) -> None:
        if request not in self.queue:
            super().add(request, step)


class ReadsTheLiveList(AppendsOnce):
    """Skips a request after each one that is discarded while it reads."""

    def order(self, step: int) -> Iterator[PolicyRequest]:
        self.queue.sort(key=lambda each: each.arrival)
        return iter(self.queue)


class PopsWhatIsRead(AppendsOnce):
    def order(self, step: int) -> Iterator[PolicyRequest]:
        self.queue.sort(key=lambda each: each.arrival)
        while self.queue:
            yield self.queue.pop(0)


class RefusesUnknown(Sorted):
    def discard(self, request: PolicyRequest) -> None:
        del self.waiting[request.arrival]


class NeverEnds(Sorted):
    def order(self, step: int) -> Iterator[PolicyRequest]:
        return cycle(super().order(step))


class ByHash(Sorted):
    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (hash(request.rid),)


class ByAddress(Sorted):
    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (id(request),)


class BySetOfTenants(Sorted):
    def order(self, step: int) -> Iterator[PolicyRequest]:
        tenants = {each.hints.tenant for each in self.waiting.values()}
        for tenant in tenants:
            for each in list(super().order(step)):
                if each.hints.tenant == tenant:
                    yield each


class ByChance(Sorted):
    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (random.random(),)


NUM_OPENED = count()


class ByRank(Sorted):
    """Every second policy that is opened, which is on another rank, decides otherwise."""

    def __init__(self, match_length: Callable[[PolicyRequest], int]) -> None:
        super().__init__(match_length)
        self.sign = 1 if next(NUM_OPENED) % 2 else -1

    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (self.sign * request.hints.priority,)


class AgesByReads(Sorted):
    """Time is the number of orders, so reading changes the next order."""

    num_orders = 0

    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return ((request.arrival + self.num_orders) % 7,)

    def order(self, step: int) -> Iterator[PolicyRequest]:
        self.num_orders += 1
        return super().order(step)


class LastComeFirstServed(Sorted):
    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (-request.arrival,)


class StarvesLong(Sorted):
    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (request.num_input_tokens,)


class StarvesUncached(Sorted):
    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (-request.num_cached_tokens,)


class StarvesAdapters(Sorted):
    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (request.hints.lora != "hot",)


class MatchesAll(Sorted):
    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (-self.match_length(request),)


class MatchesPerOrder(Sorted):
    """Has a budget per order instead of per step."""

    def order(self, step: int) -> Iterator[PolicyRequest]:
        for each in list(super().order(step))[:100]:
            self.match_length(each)
        return super().order(step)


class SortsNan(Sorted):
    """A NaN compares as smaller and as larger, so the order depends on where a sort meets it."""

    def order(self, step: int) -> Iterator[PolicyRequest]:
        return iter(sorted(self.waiting.values(), key=lambda each: -each.hints.priority))


class FailsOnText(Sorted):
    def add(self, request: PolicyRequest, step: int) -> None:
        request.hints.priority + 1
        super().add(request, step)


class KeepsRefused(Sorted):
    def add(self, request: PolicyRequest, step: int) -> None:
        super().add(request, step)
        if not isinstance(request.hints.priority, int):
            raise ConfigError("priority", request.hints.priority, "is not an integer", "give one")


class RefusesAtLength(Sorted):
    def add(self, request: PolicyRequest, step: int) -> None:
        if not isinstance(request.hints.priority, int):
            raise ValueError("this is not\na priority")
        super().add(request, step)


class AddsRunning(Sorted):
    def on_scheduled(self, chunks: Chunks) -> None:
        for chunk in chunks:
            self.waiting[chunk.request.arrival] = chunk.request


class FailsOnRunning(Sorted):
    def on_scheduled(self, chunks: Chunks) -> None:
        for chunk in chunks:
            self.waiting[chunk.request.arrival].num_cached_tokens += chunk.end


class FairByTenant(Sorted):
    """Shares of tenants without the lift of the virtual token counter."""

    decode_weight: ClassVar[int] = 2

    def __init__(self, match_length: Callable[[PolicyRequest], int]) -> None:
        super().__init__(match_length)
        self.counters: dict[str, int] = {}

    def key(self, request: PolicyRequest, step: int) -> tuple[object, ...]:
        return (self.counters.get(request.hints.tenant, 0),)

    def on_scheduled(self, chunks: Chunks) -> None:
        for chunk in chunks:
            tenant, weight = chunk.request.hints.tenant, 1 if chunk.is_prefill else self.decode_weight
            self.counters[tenant] = self.counters.get(tenant, 0) + weight * chunk.num_tokens


class IgnoresDecodes(FairByTenant):
    decode_weight = 0


class KeepsDiscarded(Sorted):
    """A log of all requests, which keeps their tokens in memory."""

    def __init__(self, match_length: Callable[[PolicyRequest], int]) -> None:
        super().__init__(match_length)
        self.log: list[PolicyRequest] = []

    def discard(self, request: PolicyRequest) -> None:
        super().discard(request)
        self.log.append(request)


FAIR = PolicyPromises(shares_by_tenant=True)
BOUNDED = PolicyPromises(max_wait_steps=50)


class DeniesVirtualTokenCounter(VirtualTokenCounter[checks.PolicyRequest]):
    """Says that it reads no batches, and counts them."""

    reads_batches = False


def denies_batches(match_length: object) -> checks.Policy:
    return DeniesVirtualTokenCounter()


VARIANTS: list[tuple[Callable[..., None], checks.OpenPolicy, PolicyPromises, str]] = [
    (checks.check_each_waiting_request_comes_once, OnePerKey, BOUNDED, "waiting requests that are missing"),
    (checks.check_each_waiting_request_comes_once, KeepsAborted, BOUNDED, "requests in the order that do not wait"),
    (checks.check_each_waiting_request_comes_once, NeverEnds, BOUNDED, "requests that come twice"),
    (checks.check_preempted_requests_wait_again, OncePerArrival, BOUNDED, "waiting requests that are missing"),
    (checks.check_preempted_requests_wait_again, Appends, BOUNDED, "requests that come twice"),
    (checks.check_preempted_requests_wait_again, RefusesUnknown, BOUNDED, "KeyError"),
    (checks.check_requests_may_be_discarded_while_they_are_read, ReadsTheLiveList, BOUNDED, "arrivals read"),
    (checks.check_orders_are_repeatable, PopsWhatIsRead, BOUNDED, "arrivals in the order read before|are missing"),
    (checks.check_orders_are_repeatable, ByChance, BOUNDED, "arrivals in the order"),
    (checks.check_orders_are_repeatable, AgesByReads, BOUNDED, "arrivals in the order"),
    (checks.check_ranks_decide_equally, ByHash, BOUNDED, "the order of another rank"),
    (checks.check_ranks_decide_equally, ByAddress, BOUNDED, "the order of another rank"),
    (checks.check_ranks_decide_equally, BySetOfTenants, BOUNDED, "the order of another rank"),
    (checks.check_ranks_decide_equally, ByRank, BOUNDED, "the order of another rank"),
    (checks.check_ranks_decide_equally, AppendsOnce, BOUNDED, "the order of another rank"),
    (checks.check_wait_is_bounded, LastComeFirstServed, BOUNDED, "it still waits"),
    (checks.check_wait_is_bounded, StarvesLong, BOUNDED, "while short requests arrive"),
    (checks.check_wait_is_bounded, StarvesUncached, BOUNDED, "while cached requests arrive"),
    (checks.check_wait_is_bounded, StarvesAdapters, BOUNDED, "requests of one other adapter arrive"),
    (
        checks.check_wait_is_bounded,
        lambda _: PriorityPolicy(aging_steps=None),
        BOUNDED,
        "while requests of a higher priority arrive",
    ),
    (checks.check_matches_have_a_budget, MatchesAll, BOUNDED, "expected: at most 128"),
    (checks.check_matches_have_a_budget, MatchesPerOrder, BOUNDED, "expected: at most 128"),
    (checks.check_cost_is_flat, Sorted, PolicyPromises(is_flat=True), "at most twice the"),
    (checks.check_bad_keys_are_refused, SortsNan, BOUNDED, "priority=nan|TypeError"),
    (checks.check_bad_keys_are_refused, FailsOnText, BOUNDED, "a ValueError, or no error"),
    (checks.check_bad_keys_are_refused, KeepsRefused, BOUNDED, "requests in the order that do not wait"),
    (checks.check_bad_keys_are_refused, RefusesAtLength, BOUNDED, "an error of one line"),
    (checks.check_computed_tokens_are_counted, AddsRunning, BOUNDED, "requests in the order that do not wait"),
    (checks.check_computed_tokens_are_counted, FailsOnRunning, BOUNDED, "KeyError"),
    (checks.check_computed_tokens_are_counted, Sorted, FAIR, "first tenant"),
    (checks.check_computed_tokens_are_counted, IgnoresDecodes, FAIR, "first tenant"),
    (checks.check_computed_tokens_are_counted, FairByTenant, FAIR, "8 to 12 of 20 turns"),
    (checks.check_computed_tokens_are_counted, denies_batches, FAIR, "order without the batches"),
    (checks.check_discarded_requests_are_released, KeepsDiscarded, BOUNDED, "still refers to"),
]


@pytest.mark.broken_variants
@pytest.mark.parametrize(("check", "broken", "promises", "message"), VARIANTS)
def test_a_broken_policy_fails_with_its_trace(
    check: Callable[[checks.OpenPolicy, PolicyPromises], None],
    broken: checks.OpenPolicy,
    promises: PolicyPromises,
    message: str,
) -> None:
    with pytest.raises(ConformanceError) as failed:
        check(broken, promises)
    assert any(each in str(failed.value) for each in message.split("|")), str(failed.value)
    assert "1. opened a policy" in str(failed.value)


def test_every_check_has_a_broken_policy() -> None:
    assert {check for check, *_ in VARIANTS} == set(POLICY_CHECKS)


def test_policies_of_the_kit_keep_promises_that_these_variants_break() -> None:
    for check in POLICY_CHECKS:
        check(lambda _: VirtualTokenCounter(), PolicyPromises(is_flat=True, shares_by_tenant=True))
        check(lambda match_length: LongestPrefixMatch(match_length=match_length), PolicyPromises(is_flat=True))
