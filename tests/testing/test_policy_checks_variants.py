"""Broken scheduling policies, as authors write them: the checks of policies find each of them.

Their author did not write the checks. More variants are in ``test_policy_checks.py``.
"""

from __future__ import annotations

import functools
import random
import time
from array import array
from bisect import insort
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar

import pytest

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


class Queue:
    """Waiting requests by arrival: the correct part of the policies that are written from scratch."""

    def __init__(self, match_length: Callable[[Any], int]) -> None:
        self.match_length = match_length
        self.waiting: dict[int, Any] = {}

    def add(self, request: Any, step: int) -> None:
        self.waiting[request.arrival] = request

    def discard(self, request: Any) -> None:
        self.waiting.pop(request.arrival, None)

    def order(self, step: int) -> Iterator[Any]:
        return iter(sorted(self.waiting.values(), key=lambda request: request.arrival))

    def on_scheduled(self, chunks: Any) -> None:
        pass


# Membership.


class ForgetsInTheSameStep(Queue):
    """Marks discarded requests until the next order: one that is preempted before that is lost."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.marked: set[int] = set()

    def discard(self, request: Any) -> None:
        self.marked.add(request.arrival)

    def order(self, step: int) -> Iterator[Any]:
        for arrival in self.marked:
            self.waiting.pop(arrival, None)
        self.marked.clear()
        return super().order(step)


class DropsThe129th(Queue):
    """Reads 128 requests in order, then the others from one too far."""

    def order(self, step: int) -> Iterator[Any]:
        requests = list(super().order(step))
        yield from requests[:128]
        yield from requests[129:]


class SkipsTheUnnamed(Queue):
    """A client without a name has the tenant "", which counts as no tenant here."""

    def order(self, step: int) -> Iterator[Any]:
        requests = list(super().order(step))
        for tenant in sorted({request.hints.tenant for request in requests if request.hints.tenant}):
            yield from (request for request in requests if request.hints.tenant == tenant)


class DropsExpired(Queue):
    """Passes over requests whose deadline has passed, by steps of 20 ms."""

    def order(self, step: int) -> Iterator[Any]:
        return (each for each in super().order(step) if (each.hints.deadline_s or 1e9) > step * 0.02)


class LosesTheHeldBack(LongestPrefixMatch[Any]):
    def order(self, step: int) -> Iterator[Any]:
        seen: dict[Any, None] = {}
        return (request for request in super().order(step) if not self._repeats_prefix(request, seen))


class ReadsOverdueTwice(ShortestRemainingPrefill[Any]):
    def order(self, step: int) -> Iterator[Any]:
        yield from self._wait_limit.overdue(step, self.longest_wait_steps)
        yield from super().order(step)


class StaysInTheOldBucket(Queue):
    """Looks for a request in the bucket of its cached tokens, which change while it waits."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.buckets: defaultdict[int, dict[int, Any]] = defaultdict(dict)

    def add(self, request: Any, step: int) -> None:
        self.buckets[request.num_cached_tokens].setdefault(request.arrival, request)

    def discard(self, request: Any) -> None:
        self.buckets[request.num_cached_tokens].pop(request.arrival, None)

    def order(self, step: int) -> Iterator[Any]:
        for bucket in sorted(self.buckets):
            yield from [self.buckets[bucket][arrival] for arrival in sorted(self.buckets[bucket])]


class CachesTheOrder(Queue):
    """Sorts once per step, and misses what changes after that."""

    step = -1
    sorted: tuple[Any, ...] = ()

    def order(self, step: int) -> Iterator[Any]:
        if step != self.step:
            self.step, self.sorted = step, tuple(super().order(step))
        return iter(self.sorted)


class ReusesTheIterator(Queue):
    """Makes one iterator per step; a second reader continues where the first one stopped."""

    step = -1
    iterator: Iterator[Any] = iter(())

    def order(self, step: int) -> Iterator[Any]:
        if step != self.step:
            self.step, self.iterator = step, super().order(step)
        return self.iterator


class IteratesTheDictionary(Queue):
    """Raises as soon as the batcher discards what it has read."""

    def order(self, step: int) -> Iterator[Any]:
        return iter(self.waiting.values())


class HasNoEmptyOrder(Queue):
    def order(self, step: int) -> Iterator[Any]:
        first = min(self.waiting.values(), key=lambda request: request.arrival)
        yield first
        yield from (request for request in super().order(step) if request is not first)


class CountsSteps(Queue):
    """Keeps a list of arrivals per step, and expects each step to follow the last one."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.steps: list[int] = []

    def order(self, step: int) -> Iterator[Any]:
        if step > len(self.steps):
            raise IndexError(f"step {step} after step {len(self.steps)}")
        if step == len(self.steps):
            self.steps.append(len(self.waiting))
        return super().order(step)


class Recurses(Queue):
    """A generator in a generator per waiting request: too deep for a thousand."""

    def order(self, step: int) -> Iterator[Any]:
        return self._from(0, list(super().order(step)))

    def _from(self, place: int, requests: list[Any]) -> Iterator[Any]:
        if place < len(requests):
            yield requests[place]
            yield from self._from(place + 1, requests)


class KeyedByPrompt(Queue):
    """A dictionary by prompt, to group equal prompts: of two equal ones it keeps one."""

    def add(self, request: Any, step: int) -> None:
        self.waiting[hash(tuple(request.token_ids))] = request

    def discard(self, request: Any) -> None:
        self.waiting.pop(hash(tuple(request.token_ids)), None)


class DiscardsByRid(Queue):
    """Discards by name, and a name may be used again after an abort: the successor is discarded with it."""

    def discard(self, request: Any) -> None:
        self.waiting = {number: each for number, each in self.waiting.items() if each.rid != request.rid}


# Equal on every rank, and repeatable.


class SharesTheQueue(Queue):
    """One dictionary for all instances: a class attribute."""

    waiting: ClassVar[dict[int, Any]] = {}  # type: ignore[misc]

    def __init__(self, match_length: Any) -> None:
        self.match_length = match_length


class SharesCounters(Queue):
    """Each instance adds to the same counters of tenants: a mutable default argument."""

    def __init__(self, match_length: Any, counters: dict[str, int] = {}) -> None:  # noqa: B006 - the defect
        super().__init__(match_length)
        self.counters = counters

    def order(self, step: int) -> Iterator[Any]:
        return iter(sorted(super().order(step), key=lambda each: self.counters.get(each.hints.tenant[1:], 0)))

    def on_scheduled(self, chunks: Any) -> None:
        for chunk in chunks:
            tenant = chunk.request.hints.tenant[1:]
            self.counters[tenant] = self.counters.get(tenant, 0) + chunk.num_tokens


class AgesByClock(Queue):
    """Orders by priority and by the time that a request has waited, in microseconds of its own clock."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.since: dict[int, float] = {}

    def add(self, request: Any, step: int) -> None:
        super().add(request, step)
        self.since.setdefault(request.arrival, time.monotonic())

    def order(self, step: int) -> Iterator[Any]:
        now = time.monotonic()
        return iter(
            sorted(
                super().order(step),
                key=lambda each: -each.hints.priority - (now - self.since[each.arrival]) * 1e4,
            )
        )


class AgesBySeconds(Queue):
    """Serves by whole seconds of waiting on its own clock, which no check waits."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.since: dict[int, float] = {}

    def add(self, request: Any, step: int) -> None:
        super().add(request, step)
        self.since.setdefault(request.arrival, time.monotonic())

    def order(self, step: int) -> Iterator[Any]:
        now = time.monotonic()
        return iter(sorted(super().order(step), key=lambda each: -int(now - self.since[each.arrival])))


class DrawsFromASeed(Queue):
    """A lottery with a seed: each order draws, so a rank that reads once more differs."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.random = random.Random(0)

    def order(self, step: int) -> Iterator[Any]:
        requests = list(super().order(step))
        self.random.shuffle(requests)
        return iter(requests)


class RotatesWhatIsRead(Queue):
    """Takes tenants in turn, and moves a tenant to the back when its request is read, not when it is admitted."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.tenants: OrderedDict[str, None] = OrderedDict()

    def add(self, request: Any, step: int) -> None:
        super().add(request, step)
        self.tenants.setdefault(request.hints.tenant)

    def order(self, step: int) -> Iterator[Any]:
        left = list(super().order(step))
        while left:
            for tenant in list(self.tenants):
                request = next((each for each in left if each.hints.tenant == tenant), None)
                if request is not None:
                    left.remove(request)
                    self.tenants.move_to_end(tenant)
                    yield request


class TiesByInsertion(Queue):
    """Requests of one priority are in the order of adding, which differs between ranks."""

    def order(self, step: int) -> Iterator[Any]:
        return iter(sorted(self.waiting.values(), key=lambda request: -request.hints.priority))


class LosesPrecision(Queue):
    """Packs priority and arrival into one float of 32 bits: many arrivals are equal."""

    def order(self, step: int) -> Iterator[Any]:
        keys = {
            number: array("f", [1e9 - each.hints.priority * 1e8 + number])[0] for number, each in self.waiting.items()
        }
        return iter([self.waiting[number] for number in sorted(self.waiting, key=keys.__getitem__)])


class StoresMatches(Queue):
    """Writes what it matched into the request, which then differs from that of the scheduler."""

    def order(self, step: int) -> Iterator[Any]:
        for request in super().order(step):
            request.num_cached_tokens += 1
            yield request


class TruncatesPrompts(Queue):
    """Removes the cached tokens of the prompt to find the remaining ones."""

    def order(self, step: int) -> Iterator[Any]:
        for request in super().order(step):
            request.token_ids = request.token_ids[-64:]
            yield request


class PopsChunks(Queue):
    """Removes the decodes from the batch that is to be computed."""

    def on_scheduled(self, chunks: Any) -> None:
        chunks[:] = [chunk for chunk in chunks if chunk.is_prefill]


class ComparesRequests(Queue):
    """A heap of keys and requests: requests are compared when keys are equal."""

    def order(self, step: int) -> Iterator[Any]:
        heap: list[Any] = []
        for request in self.waiting.values():
            heappush(heap, (-request.hints.priority, request))
        while heap:
            yield heappop(heap)[1]


class ComparesNone(Queue):
    """Sorts by adapter; the base model has none."""

    def order(self, step: int) -> Iterator[Any]:
        return iter(sorted(super().order(step), key=lambda request: request.hints.lora))


class ByRid(Queue):
    """Orders by name: "r10" comes before "r9", and a client chooses its name."""

    def order(self, step: int) -> Iterator[Any]:
        return iter(sorted(self.waiting.values(), key=lambda request: request.rid))


# Waiting.


class RequeuesAtTheBack(FirstComeFirstServed[Any]):
    """A preempted request waits behind all others, and is preempted again."""

    def add(self, request: Any, step: int) -> None:
        self._waiting.put(request, step)


class InvertsAging(PriorityPolicy[Any]):
    """Waiting lowers a priority."""

    def add(self, request: Any, step: int) -> None:
        self._first_steps.add(request.arrival, step)
        self._waiting.put(request, -request.hints.priority * 10 - self._first_steps.step_of(request.arrival))


class RestartsAging(PriorityPolicy[Any]):
    """A preempted request begins to wait again."""

    def add(self, request: Any, step: int) -> None:
        self._waiting.put(request, step - request.hints.priority * 10)


class WrapsSteps(Queue):
    """Keeps the step of an arrival in 8 bits."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.steps: dict[int, int] = {}

    def add(self, request: Any, step: int) -> None:
        super().add(request, step)
        self.steps.setdefault(request.arrival, step & 255)

    def order(self, step: int) -> Iterator[Any]:
        return iter(sorted(super().order(step), key=lambda each: self.steps[each.arrival]))


class WrapsAging(PriorityPolicy[Any]):
    """Keeps the key in 32 bits with a sign, as a tensor would."""

    def add(self, request: Any, step: int) -> None:
        key = step - max(-9, min(9, request.hints.priority)) * 10
        self._waiting.put(request, (key + 2**31) % 2**32 - 2**31)


class InvertsPriority(PriorityPolicy[Any]):
    """vLLM's order: a smaller number runs first."""

    def add(self, request: Any, step: int) -> None:
        self._waiting.put(request, request.hints.priority)


class LimitsTheNewest(ShortestRemainingPrefill[Any]):
    """Asks how long the newest request has waited, instead of the earliest."""

    def order(self, step: int) -> Iterator[Any]:
        newest = max((request.arrival for request in self._wait_limit._requests), default=0)
        if step - self._wait_limit._first_steps.step_of(newest) >= self.longest_wait_steps:
            return super().order(step)
        return iter(self._waiting)


class GroupsForEver(LoraGrouping[Any]):
    """Stays with the adapters of the last batch."""

    def order(self, step: int) -> Iterator[Any]:
        return self._by_adapter()


# Matches and cost.


class MatchesOneTooMany(LongestPrefixMatch[Any]):
    def __post_init__(self) -> None:
        self._lengths = CachedLengths(self.match_length, self.matches_per_step + 1)


class MatchesWhatItYields(Queue):
    """Matches each request when it is read, again and again."""

    def order(self, step: int) -> Iterator[Any]:
        for request in super().order(step):
            if self.match_length(request) >= 0:
                yield request


class MatchesInDiscard(Queue):
    """Asks the cache at each admission, outside of the budget."""

    def discard(self, request: Any) -> None:
        for other in list(self.waiting.values())[:64]:
            self.match_length(other)
        super().discard(request)


class MatchesOnce(Queue):
    """Asks the cache once per request, and knows nothing of an eviction."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.lengths: dict[int, int] = {}

    def add(self, request: Any, step: int) -> None:
        super().add(request, step)
        self.lengths[request.arrival] = self.match_length(request)

    def discard(self, request: Any) -> None:
        super().discard(request)
        self.lengths.pop(request.arrival, None)

    def order(self, step: int) -> Iterator[Any]:
        return iter(sorted(super().order(step), key=lambda request: -self.lengths[request.arrival]))


class ReadsAllForItsHead(LoraGrouping[Any]):
    """Asks all waiting requests for their adapter in each step."""

    def order(self, step: int) -> Iterator[Any]:
        adapters = {each.hints.lora for each in self._wait_limit._requests}
        return super().order(step) if adapters else iter(())


class InsertsInAList(Queue):
    """An insertion moves the half of all waiting requests."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.sorted: list[tuple[int, Any]] = []

    def add(self, request: Any, step: int) -> None:
        self.discard(request)
        insort(self.sorted, (request.arrival, request))

    def discard(self, request: Any) -> None:
        self.sorted = [entry for entry in self.sorted if entry[0] != request.arrival]

    def order(self, step: int) -> Iterator[Any]:
        return iter([request for _, request in self.sorted])


# Keys.


class CutsPriorities(Queue):
    """A priority of infinity has no integer."""

    def add(self, request: Any, step: int) -> None:
        if isinstance(request.hints.priority, float) and request.hints.priority > 1e9:
            int(request.hints.priority)
        super().add(request, step)


class RefusesAfterItAdded(PriorityPolicy[Any]):
    """Adds with a neutral key, then refuses the true one."""

    def add(self, request: Any, step: int) -> None:
        self._waiting.put(request, 0)
        super().add(request, step)


# Shares of tenants.


class CountsForTheFirst(VirtualTokenCounter[Any]):
    """Charges the whole batch to the tenant of its first chunk."""

    def on_scheduled(self, chunks: Any) -> None:
        if chunks:
            tenant, num_tokens = chunks[0].request.hints.tenant, sum(chunk.num_tokens for chunk in chunks)
            self._set_counter(tenant, self._counters.get(tenant, 0) + num_tokens)


class CountsWholeRequests(VirtualTokenCounter[Any]):
    """Charges the positions from the beginning in each chunk."""

    def on_scheduled(self, chunks: Any) -> None:
        for chunk in chunks:
            weight = self.prefill_weight if chunk.is_prefill else self.decode_weight
            tenant = chunk.request.hints.tenant
            self._set_counter(tenant, self._counters.get(tenant, self._floor) + weight * chunk.end)


class CountsRequests(VirtualTokenCounter[Any]):
    """Charges a request, whatever its length."""

    def on_scheduled(self, chunks: Any) -> None:
        for chunk in chunks:
            tenant = chunk.request.hints.tenant
            self._set_counter(tenant, self._counters.get(tenant, self._floor) + 1)


class OnlyTheLastChunk(VirtualTokenCounter[Any]):
    """Computes the charge of each chunk from the counter before the batch, so the last one replaces the others."""

    def on_scheduled(self, chunks: Any) -> None:
        before = dict(self._counters)
        for chunk in chunks:
            tenant = chunk.request.hints.tenant
            weight = self.prefill_weight if chunk.is_prefill else self.decode_weight
            self._set_counter(tenant, before.get(tenant, self._floor) + weight * chunk.num_tokens)


class ForgetsCounters(VirtualTokenCounter[Any]):
    """A tenant begins at the floor whenever it begins to wait: it never pays with one request at a time."""

    def add(self, request: Any, step: int) -> None:
        if not self._tenants.has_requests(request.hints.tenant):
            self._counters.pop(request.hints.tenant, None)
        super().add(request, step)


class LiftsToTheHighest(VirtualTokenCounter[Any]):
    """A tenant that begins to wait is behind all others until they have caught up."""

    def add(self, request: Any, step: int) -> None:
        is_waiting = self._tenants.has_requests(request.hints.tenant)
        super().add(request, step)
        if not is_waiting:
            self._set_counter(request.hints.tenant, max(self._counters.values()))


class InvertsShares(VirtualTokenCounter[Any]):
    """The tenant that has received most is first."""

    def order(self, step: int) -> Iterator[Any]:
        return iter(list(super().order(step))[::-1])


class ResetsCounters(VirtualTokenCounter[Any]):
    """Forgets all shares in each fifth step."""

    def order(self, step: int) -> Iterator[Any]:
        if step % 5 == 0:
            for tenant in self._counters:
                self._set_counter(tenant, self._floor)
        return super().order(step)


# References.


class CachesLengthsByRequest(Queue):
    """A cache of a function keeps its arguments."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.length = functools.lru_cache(maxsize=None)(match_length)

    def order(self, step: int) -> Iterator[Any]:
        return iter(sorted(super().order(step), key=lambda request: (-self.length(request), request.arrival)))


class KeepsTheLastBatch(Queue):
    """Keeps the chunks of the last batch, and their requests while the engine is idle."""

    last: Any = ()

    def on_scheduled(self, chunks: Any) -> None:
        self.last = chunks


class KeepsAllBatches(Queue):
    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.batches: list[Any] = []

    def on_scheduled(self, chunks: Any) -> None:
        self.batches.append(chunks)


class MarksInTheHeap(Queue):
    """Removed requests stay in the heap until they reach its top."""

    def __init__(self, match_length: Any) -> None:
        super().__init__(match_length)
        self.heap: list[Any] = []

    def add(self, request: Any, step: int) -> None:
        super().add(request, step)
        heappush(self.heap, (request.arrival, id(request), request))

    def order(self, step: int) -> Iterator[Any]:
        heapify(self.heap)
        while self.heap and self.heap[0][0] not in self.waiting:
            heappop(self.heap)
        return super().order(step)


NONE = PolicyPromises()
BOUNDED = PolicyPromises(max_wait_steps=50)
PLACES = PolicyPromises(keeps_places=True)
FLAT = PolicyPromises(is_flat=True)
FAIR = PolicyPromises(shares_by_tenant=True)


def aged(policy: type[PriorityPolicy[Any]]) -> checks.OpenPolicy:
    return lambda _: policy(aging_steps=10)


def alone(policy: Callable[[], Any]) -> checks.OpenPolicy:
    """Return how to open a policy that reads no cache."""
    return lambda _: policy()


FOUND: dict[str, tuple[checks.OpenPolicy, PolicyPromises, Callable[..., None]]] = {
    "drops the 129th": (DropsThe129th, NONE, checks.check_each_waiting_request_comes_once),
    "drops expired": (DropsExpired, NONE, checks.check_each_waiting_request_comes_once),
    "loses the held back": (
        lambda match_length: LosesTheHeldBack(match_length=match_length),
        NONE,
        checks.check_each_waiting_request_comes_once,
    ),
    "reads overdue twice": (
        lambda match_length: ReadsOverdueTwice(match_length=match_length, longest_wait_steps=20),
        NONE,
        checks.check_each_waiting_request_comes_once,
    ),
    "stays in the old bucket": (StaysInTheOldBucket, NONE, checks.check_each_waiting_request_comes_once),
    "caches the order": (CachesTheOrder, NONE, checks.check_each_waiting_request_comes_once),
    "has no empty order": (HasNoEmptyOrder, NONE, checks.check_each_waiting_request_comes_once),
    "counts steps": (CountsSteps, NONE, checks.check_each_waiting_request_comes_once),
    "recurses": (Recurses, NONE, checks.check_each_waiting_request_comes_once),
    "keyed by prompt": (KeyedByPrompt, NONE, checks.check_each_waiting_request_comes_once),
    "stores matches": (StoresMatches, NONE, checks.check_each_waiting_request_comes_once),
    "truncates prompts": (TruncatesPrompts, NONE, checks.check_each_waiting_request_comes_once),
    "compares requests": (ComparesRequests, NONE, checks.check_each_waiting_request_comes_once),
    "compares None": (ComparesNone, NONE, checks.check_each_waiting_request_comes_once),
    "iterates the dictionary": (
        IteratesTheDictionary,
        NONE,
        checks.check_requests_may_be_discarded_while_they_are_read,
    ),
    "forgets in the same step": (ForgetsInTheSameStep, NONE, checks.check_preempted_requests_wait_again),
    "requeues at the back": (alone(RequeuesAtTheBack), PLACES, checks.check_preempted_requests_wait_again),
    "restarts aging": (aged(RestartsAging), PLACES, checks.check_preempted_requests_wait_again),
    "reuses the iterator": (ReusesTheIterator, NONE, checks.check_orders_are_repeatable),
    "draws from a seed": (DrawsFromASeed, NONE, checks.check_orders_are_repeatable),
    "rotates what is read": (RotatesWhatIsRead, NONE, checks.check_orders_are_repeatable),
    "shares the queue": (SharesTheQueue, NONE, checks.check_ranks_decide_equally),
    "shares counters": (SharesCounters, NONE, checks.check_ranks_decide_equally),
    "ages by clock": (AgesByClock, NONE, checks.check_ranks_decide_equally),
    "ties by insertion": (TiesByInsertion, NONE, checks.check_ranks_decide_equally),
    "loses precision": (LosesPrecision, NONE, checks.check_ranks_decide_equally),
    "skips the unnamed": (SkipsTheUnnamed, BOUNDED, checks.check_wait_is_bounded),
    "by rid": (ByRid, BOUNDED, checks.check_wait_is_bounded),
    "inverts aging": (aged(InvertsAging), BOUNDED, checks.check_wait_is_bounded),
    "wraps steps": (WrapsSteps, BOUNDED, checks.check_wait_is_bounded),
    "wraps aging": (aged(WrapsAging), BOUNDED, checks.check_wait_is_bounded),
    "limits the newest": (
        lambda match_length: LimitsTheNewest(match_length=match_length, longest_wait_steps=20),
        BOUNDED,
        checks.check_wait_is_bounded,
    ),
    "groups for ever": (lambda _: GroupsForEver(longest_wait_steps=20), BOUNDED, checks.check_wait_is_bounded),
    "matches one too many": (
        lambda match_length: MatchesOneTooMany(match_length=match_length),
        NONE,
        checks.check_matches_have_a_budget,
    ),
    "matches what it yields": (MatchesWhatItYields, NONE, checks.check_matches_have_a_budget),
    "matches in discard": (MatchesInDiscard, NONE, checks.check_matches_have_a_budget),
    "reads all for its head": (alone(ReadsAllForItsHead), FLAT, checks.check_cost_is_flat),
    "cuts priorities": (CutsPriorities, NONE, checks.check_bad_keys_are_refused),
    "refuses after it added": (aged(RefusesAfterItAdded), NONE, checks.check_bad_keys_are_refused),
    "pops chunks": (PopsChunks, NONE, checks.check_computed_tokens_are_counted),
    "counts for the first": (alone(CountsForTheFirst), FAIR, checks.check_computed_tokens_are_counted),
    "counts whole requests": (alone(CountsWholeRequests), FAIR, checks.check_computed_tokens_are_counted),
    "counts requests": (alone(CountsRequests), FAIR, checks.check_computed_tokens_are_counted),
    "only the last chunk": (alone(OnlyTheLastChunk), FAIR, checks.check_computed_tokens_are_counted),
    "forgets counters": (alone(ForgetsCounters), FAIR, checks.check_computed_tokens_are_counted),
    "lifts to the highest": (alone(LiftsToTheHighest), FAIR, checks.check_computed_tokens_are_counted),
    "inverts shares": (alone(InvertsShares), FAIR, checks.check_computed_tokens_are_counted),
    "resets counters": (alone(ResetsCounters), FAIR, checks.check_computed_tokens_are_counted),
    "caches lengths by request": (CachesLengthsByRequest, NONE, checks.check_discarded_requests_are_released),
    "keeps all batches": (KeepsAllBatches, NONE, checks.check_discarded_requests_are_released),
    "marks in the heap": (MarksInTheHeap, NONE, checks.check_discarded_requests_are_released),
}


SURVIVORS: dict[str, tuple[checks.OpenPolicy, PolicyPromises, str]] = {
    "ages by seconds": (AgesBySeconds, BOUNDED, "no check waits a second"),
    "inverts priority": (aged(InvertsPriority), BOUNDED, "which order is right is for the policy to say"),
    "matches once": (MatchesOnce, NONE, "which order is right is for the policy to say"),
    "discards by rid": (DiscardsByRid, BOUNDED, "a name is unique among the requests in flight"),
    "inserts in a list": (InsertsInAList, BOUNDED, "costs time, and no read of a request"),
    "keeps the last batch": (KeepsTheLastBatch, BOUNDED, "one batch, until the next"),
}
"""Variants that pass, and why. Some are no errors."""


@pytest.mark.parametrize("check", POLICY_CHECKS)
def test_the_queue_of_these_variants_passes(check: Callable[..., None]) -> None:
    check(Queue, PolicyPromises(max_wait_steps=checks.NUM_AHEAD, keeps_places=True))


@pytest.mark.parametrize("name", FOUND)
def test_a_broken_policy_is_found(name: str) -> None:
    open_policy, promises, check = FOUND[name]
    with pytest.raises(ConformanceError):
        check(open_policy, promises)


@pytest.mark.parametrize("name", SURVIVORS)
def test_survivors_are_known(name: str) -> None:
    open_policy, promises, _ = SURVIVORS[name]
    for check in POLICY_CHECKS:
        check(open_policy, promises)
