"""Scheduling policies: which waiting request is next.

A policy orders the waiting requests; it admits none. The batcher walks through ``order(step)``, best first, until the
budget of the step is spent. Rules that hold for every policy of this file:

1. **Equal on every rank.** A decision follows from the calls, from what came with the requests and from the number of
   the step. No policy reads a clock, a rank, or the order of a set. Ties are decided by ``arrival``.
2. **Lazy.** ``order`` costs what is read of it. ``add`` and ``discard`` cost O(log n) for n waiting requests.
3. **Cache hits have a budget.** How many tokens of a waiting request are cached changes with every batch. Policies that
   use it match at most ``matches_per_step`` requests per step, so 10,000 waiting requests cost no more than 128. Up to
   128 waiting requests all lengths are of this step; beyond, the requests take turns, the newest first. SGLang 0.5.23
   orders more than 128 waiting requests by arrival instead.
4. **Bounded, or known to starve.** ``wait_bound`` says how long a request may wait, in steps that admit a request each
   while as many arrive, or by which arrivals it starves. ``tests/scheduling/test_scheduling_policy.py`` checks
   each bound and runs each counterexample.
5. **A key that cannot be ordered is refused.** ``add`` raises a ``ConfigError`` for NaN and for what is not a number.
   The request then does not wait in the policy.

A policy of your own needs the four methods of ``ports.SchedulingPolicy``. ``ordered_requests`` has structures for it,
and ``testing.POLICY_CHECKS`` checks it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from importlib import import_module
from inspect import signature
from itertools import islice
from typing import ClassVar, Generic, TypeVar, cast

from scheduler_components._internal.validators import check_choice, check_integer, check_number
from scheduler_components.errors import ConfigError
from scheduler_components.ports import SchedulableRequest, SchedulingPolicy
from scheduler_components.scheduling.ordered_requests import (
    CachedLengths,
    FirstSteps,
    OrderedRequests,
    RequestGroups,
    WaitLimit,
)
from scheduler_components.values import ScheduledChunk

__all__ = [
    "POLICY_NAMES",
    "DfsWeight",
    "EarliestDeadline",
    "FirstComeFirstServed",
    "HighestResponseRatio",
    "LongestPrefixMatch",
    "LoraGrouping",
    "PriorityPolicy",
    "ShortestRemainingPrefill",
    "VirtualTokenCounter",
    "check_policy_name",
    "ignores_batches",
    "make_policy",
]

R = TypeVar("R", bound=SchedulableRequest)

_MATCHES_PER_STEP = 128  # SGLang's WAITING_QUEUE_PREFIX_MATCH_MAX
_IN_BATCH_TOKENS = 32  # SGLang's IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD
_LONGEST_WAIT_STEPS = 500  # some 10 s of steps of 20 ms
_MAX_BUCKET = 32  # of prefills of 2**31 tokens and more


def _last_match(request: SchedulableRequest) -> int:
    """Return how many tokens of a request were cached at its last match, for schedulers that match by themselves."""
    return request.num_cached_tokens


def _num_uncached(request: SchedulableRequest, num_cached: int) -> int:
    """Return how many tokens a prefill of the request computes: at least the last one, which no cache answers."""
    return max(1, request.num_input_tokens - num_cached)


@dataclass(slots=True, kw_only=True)
class FirstComeFirstServed(Generic[R]):
    """Serve requests in order of arrival. A preempted request is first again.

    ``fcfs`` of SGLang 0.5.23 and vLLM 0.32. The head blocks all others while it does not fit.
    """

    reads_batches: ClassVar[bool] = False
    wait_bound: ClassVar[str] = "bounded: 1 step per request that arrived earlier"

    _waiting: OrderedRequests[R] = field(default_factory=OrderedRequests, init=False, repr=False)

    def add(self, request: R, step: int) -> None:
        self._waiting.put(request)

    def discard(self, request: R) -> None:
        self._waiting.discard(request)

    def order(self, step: int) -> Iterator[R]:
        return iter(self._waiting)

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class PriorityPolicy(Generic[R]):
    """Serve a larger ``hints.priority`` first, equal ones by arrival. Waiting raises a priority.

    A request that has waited ``aging_steps`` longer than another one counts as one level higher. All waiting requests
    age alike, so the order of two requests never changes, and the key is fixed when a request arrives: the step of its
    arrival minus ``priority * aging_steps``.

    The order of vLLM 0.32 (``--scheduling-policy priority``) and SGLang 0.5.23 (``--enable-priority-scheduling``), but
    those do not age. In vLLM a smaller number runs first: an adapter negates it.

    Attributes:
        aging_steps: steps of waiting that are worth one level of priority; None for no aging.

    Raises:
        ConfigError: ``aging_steps`` is below 1; from ``add``: the priority is not a number.
    """

    reads_batches: ClassVar[bool] = False
    wait_bound: ClassVar[str] = (
        "bounded: aging_steps per level that later requests are above it, then 1 step per request before it; "
        "starves with aging_steps=None while requests of a higher priority arrive"
    )

    aging_steps: int | None = 1_000
    _waiting: OrderedRequests[R] = field(default_factory=OrderedRequests, init=False, repr=False)
    _first_steps: FirstSteps = field(default_factory=FirstSteps, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.aging_steps is not None:
            check_integer("aging_steps", self.aging_steps, "is not a number of steps")

    def add(self, request: R, step: int) -> None:
        priority = _ordered_number("priority", request.hints.priority)
        if self.aging_steps is None:
            self._waiting.put(request, -priority)
            return
        self._first_steps.add(request.arrival, step)
        self._waiting.put(request, self._first_steps.step_of(request.arrival) - priority * self.aging_steps)

    def discard(self, request: R) -> None:
        self._waiting.discard(request)

    def order(self, step: int) -> Iterator[R]:
        return iter(self._waiting)

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        pass


@dataclass(slots=True, kw_only=True)
class EarliestDeadline(Generic[R]):
    """Serve the earliest ``hints.deadline_s`` first, requests without a deadline last, equal ones by arrival.

    Earliest deadline first (Liu and Layland, 1973). Deadlines are compared with each other and with no clock, so a
    request whose deadline has passed stays first.

    Raises:
        ConfigError: from ``add``: the deadline is not a number.
    """

    reads_batches: ClassVar[bool] = False
    wait_bound: ClassVar[str] = "starves: a request without a deadline, or a late one, while earlier deadlines arrive"

    _waiting: OrderedRequests[R] = field(default_factory=OrderedRequests, init=False, repr=False)

    def add(self, request: R, step: int) -> None:
        deadline_s = request.hints.deadline_s
        self._waiting.put(request, float("inf") if deadline_s is None else _ordered_number("deadline_s", deadline_s))

    def discard(self, request: R) -> None:
        self._waiting.discard(request)

    def order(self, step: int) -> Iterator[R]:
        return iter(self._waiting)

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        pass


def _ordered_number(field_name: str, value: float) -> float:
    """Return a hint that is a key.

    Raises:
        ConfigError: it is not a number, or NaN.
    """
    if not isinstance(value, int | float) or value != value:
        raise ConfigError(field_name, value, "has no place in an order", "give a number other than NaN")
    return value


def _name(field_name: str, value: str) -> str:
    """Return a hint that names a group.

    Raises:
        ConfigError: it is not a string.
    """
    if not isinstance(value, str):
        raise ConfigError(field_name, value, "is not a name", "give a string")
    return value


@dataclass(slots=True, kw_only=True)
class LongestPrefixMatch(Generic[R]):
    """Serve the request with most cached tokens first (``lpm`` of SGLang 0.5.23; Zheng et al., RadixAttention, 2023).

    As in SGLang, of several requests whose first 32 tokens are equal and not cached, one goes first and the others come
    last, so that they find the prefix in the cache in a later step. At most ``matches_per_step`` are held back.

    Differences to SGLang: more than 128 waiting requests are still ordered by what is known of them, and ties are
    decided by arrival instead of by the previous order.

    Attributes:
        match_length: returns how many tokens of a request are cached (``RequestKvCache.match_length``).
        matches_per_step: the most calls of ``match_length`` per step.

    Raises:
        ConfigError: ``matches_per_step`` is below 1.
    """

    reads_batches: ClassVar[bool] = False
    wait_bound: ClassVar[str] = "starves: a request without a cached prefix, while requests with one arrive"

    match_length: Callable[[R], int] = _last_match
    matches_per_step: int = _MATCHES_PER_STEP
    _waiting: OrderedRequests[R] = field(default_factory=OrderedRequests, init=False, repr=False)
    _lengths: CachedLengths[R] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._lengths = CachedLengths(self.match_length, self.matches_per_step)

    def add(self, request: R, step: int) -> None:
        self._waiting.put(request, -request.num_cached_tokens)
        self._lengths.add(request)

    def discard(self, request: R) -> None:
        self._waiting.discard(request)
        self._lengths.discard(request)

    def order(self, step: int) -> Iterator[R]:
        for request, length in self._lengths.match_next(step):
            self._waiting.put(request, -length)
        waiting = iter(self._waiting)
        first_tokens: dict[tuple[str | None, tuple[int, ...]], None] = {}
        held_back: list[R] = []
        for request in waiting:
            if self._repeats_prefix(request, first_tokens):
                held_back.append(request)
                if len(held_back) == self.matches_per_step:
                    break
            else:
                yield request
        yield from held_back
        yield from waiting

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        pass

    def _repeats_prefix(self, request: R, seen: dict[tuple[str | None, tuple[int, ...]], None]) -> bool:
        """Return True if the request begins with uncached tokens that an earlier one computes; else remember it."""
        if self._lengths.length_of(request) > _IN_BATCH_TOKENS or request.num_input_tokens < _IN_BATCH_TOKENS:
            return False
        first = (request.hints.lora, tuple(request.token_ids[:_IN_BATCH_TOKENS]))
        if first in seen:
            return True
        seen[first] = None
        return False


@dataclass(slots=True, kw_only=True)
class DfsWeight(Generic[R]):
    """Serve requests that share a cached prefix together, the prefix with most waiting requests first.

    ``dfs-weight`` of SGLang 0.5.23: a depth-first walk through the tree of cached prefixes, the heavier child first,
    and a node's own requests after those of its children. The tree is built from the cached tokens of the waiting
    requests, so any prefix cache will do.

    Differences to SGLang: the walk covers the ``matches_per_step`` earliest requests, and the others follow by arrival.
    Children of equal weight are ordered by their earliest arrival instead of by their age in the cache.

    Attributes:
        match_length, matches_per_step: as in `LongestPrefixMatch`.

    Raises:
        ConfigError: ``matches_per_step`` is below 1.
    """

    reads_batches: ClassVar[bool] = False
    wait_bound: ClassVar[str] = "starves: a request without a cached prefix, while requests that share one arrive"

    match_length: Callable[[R], int] = _last_match
    matches_per_step: int = _MATCHES_PER_STEP
    _waiting: OrderedRequests[R] = field(default_factory=OrderedRequests, init=False, repr=False)
    _matched_step: int | None = field(default=None, init=False, repr=False)
    _lengths: dict[int, int] = field(default_factory=dict, init=False, repr=False)  # of requests matched in this step
    _left: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("matches_per_step", self.matches_per_step, "is not a number of requests")

    def add(self, request: R, step: int) -> None:
        self._waiting.put(request)

    def discard(self, request: R) -> None:
        self._waiting.discard(request)
        self._lengths.pop(request.arrival, None)

    def order(self, step: int) -> Iterator[R]:
        if step != self._matched_step:
            self._matched_step, self._lengths, self._left = step, {}, self.matches_per_step
        waiting = iter(self._waiting)
        prefixes = []
        for request in islice(waiting, self.matches_per_step):
            tokens = _packed(request.token_ids[: self._match(request)])
            adapter = (request.hints.lora or "") if tokens else ""  # an empty prefix is the same for all adapters
            prefixes.append((adapter, tokens, request.arrival, request))
        yield from _heaviest_first(_prefix_tree(sorted(prefixes)))
        yield from waiting

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        pass

    def _match(self, request: R) -> int:
        length = self._lengths.get(request.arrival)
        if length is None:
            if not self._left:
                return request.num_cached_tokens
            self._left -= 1
            length = self._lengths[request.arrival] = self.match_length(request)
        return length


@dataclass(slots=True, eq=False)
class _PrefixNode(Generic[R]):
    """A cached prefix that waiting requests share.

    Attributes:
        num_bytes: length of its packed tokens.
        requests: those whose cached prefix it is, in order of arrival.
        children: longer prefixes that begin with it.
        weight: number of requests here and below.
        first_arrival: the earliest of them.
    """

    num_bytes: int
    requests: list[R] = field(default_factory=list)
    children: list[_PrefixNode[R]] = field(default_factory=list)
    weight: int = 0
    first_arrival: float = float("inf")

    def add(self, request: R) -> None:
        self.requests.append(request)
        self.weight += 1
        self.first_arrival = min(self.first_arrival, request.arrival)

    def attach(self, child: _PrefixNode[R]) -> None:
        self.children.append(child)
        self.weight += child.weight
        self.first_arrival = min(self.first_arrival, child.first_arrival)


def _prefix_tree(prefixes: Sequence[tuple[str, bytes, int, R]]) -> _PrefixNode[R]:
    """Return the tree of sorted prefixes ``(adapter, packed tokens, arrival, request)``.

    ``path`` is the branch of the last prefix. What the next prefix does not share of it is complete.
    """
    path: list[_PrefixNode[R]] = [_PrefixNode(0)]
    last_adapter, last_tokens = "", b""
    for adapter, tokens, _, request in prefixes:
        num_shared = _common_bytes(last_tokens, tokens) if adapter == last_adapter else 0
        last_adapter, last_tokens = adapter, tokens
        while path[-1].num_bytes > num_shared:
            child = path.pop()
            if path[-1].num_bytes < num_shared:
                path.append(_PrefixNode(num_shared))
            path[-1].attach(child)
        if path[-1].num_bytes < len(tokens):
            path.append(_PrefixNode(len(tokens)))
        path[-1].add(request)
    while len(path) > 1:
        child = path.pop()
        path[-1].attach(child)
    return path[0]


def _heaviest_first(root: _PrefixNode[R]) -> Iterator[R]:
    """Iterate over the requests of a tree: those below the heavier child first, those of the node itself last."""
    pending = [(root, False)]
    while pending:
        node, is_walked = pending.pop()
        if is_walked:
            yield from node.requests
            continue
        pending.append((node, True))
        lightest_first = sorted(node.children, key=lambda child: (child.weight, -child.first_arrival))
        pending += [(child, False) for child in lightest_first]


_TOKEN_BYTES = 4


def _packed(token_ids: Sequence[int]) -> bytes:
    """Return tokens as bytes, which Python compares faster than lists."""
    return array("I", token_ids).tobytes()


def _common_bytes(one: bytes, other: bytes) -> int:
    """Return how many bytes of packed tokens two prefixes share, in whole tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low - low % _TOKEN_BYTES


@dataclass(slots=True, kw_only=True)
class ShortestRemainingPrefill(Generic[R]):
    """Serve the request with fewest uncached tokens first, after those that have waited ``longest_wait_steps``.

    Shortest job first (Smith, 1956), ``shortest-prefill-first`` of SGLang 0.5.23, which has no longest wait. SGLang
    also holds back requests that repeat an uncached prefix, as `LongestPrefixMatch` does; this policy does not.

    Attributes:
        longest_wait_steps: a request that has waited so long is served before all others, in order of arrival.
        match_length, matches_per_step: as in `LongestPrefixMatch`.

    Raises:
        ConfigError: ``longest_wait_steps`` or ``matches_per_step`` is below 1.
    """

    reads_batches: ClassVar[bool] = False
    wait_bound: ClassVar[str] = "bounded: longest_wait_steps, then 1 step per request that arrived earlier"

    longest_wait_steps: int = _LONGEST_WAIT_STEPS
    match_length: Callable[[R], int] = _last_match
    matches_per_step: int = _MATCHES_PER_STEP
    _waiting: OrderedRequests[R] = field(default_factory=OrderedRequests, init=False, repr=False)
    _wait_limit: WaitLimit[R] = field(default_factory=WaitLimit, init=False, repr=False)
    _lengths: CachedLengths[R] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("longest_wait_steps", self.longest_wait_steps, "is not a number of steps")
        self._lengths = CachedLengths(self.match_length, self.matches_per_step)

    def add(self, request: R, step: int) -> None:
        self._waiting.put(request, _num_uncached(request, request.num_cached_tokens))
        self._lengths.add(request)
        self._wait_limit.add(request, step)

    def discard(self, request: R) -> None:
        self._waiting.discard(request)
        self._lengths.discard(request)
        self._wait_limit.discard(request)

    def order(self, step: int) -> Iterator[R]:
        for request, length in self._lengths.match_next(step):
            self._waiting.put(request, _num_uncached(request, length))
        return _each_once(self._wait_limit.overdue(step, self.longest_wait_steps), self._waiting)

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        pass


def _each_once(first: Iterable[R], then: Iterable[R]) -> Iterator[R]:
    """Iterate over the requests of ``first``, then over the others of ``then``."""
    arrivals: set[int] = set()
    for request in first:
        arrivals.add(request.arrival)
        yield request
    for request in then:
        if request.arrival not in arrivals:
            yield request


@dataclass(slots=True, kw_only=True)
class HighestResponseRatio(Generic[R]):
    """Serve the request whose wait is longest in relation to its uncached tokens: ``(steps waited + 1) / tokens``.

    Highest response ratio next (Brinch Hansen, 1971), ``hrrn`` of SGLang 0.5.23. Ratios change in every step. So that
    no step sorts all requests, tokens are rounded up to a power of two: the requests of one such bucket are in order
    of arrival, and a step compares the heads of at most 33 buckets.

    Differences to SGLang: it counts waiting in prefilled tokens, does not round, and orders more than 128 waiting
    requests by arrival.

    Attributes:
        match_length, matches_per_step: as in `LongestPrefixMatch`.

    Raises:
        ConfigError: ``matches_per_step`` is below 1.
    """

    reads_batches: ClassVar[bool] = False
    wait_bound: ClassVar[str] = (
        "bounded: its uncached tokens, rounded up to a power of two, times the steps that the others wait"
    )

    match_length: Callable[[R], int] = _last_match
    matches_per_step: int = _MATCHES_PER_STEP
    _buckets: RequestGroups[int, R] = field(default_factory=RequestGroups, init=False, repr=False)
    _first_steps: FirstSteps = field(default_factory=FirstSteps, init=False, repr=False)
    _lengths: CachedLengths[R] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._lengths = CachedLengths(self.match_length, self.matches_per_step)

    def add(self, request: R, step: int) -> None:
        bucket = _bucket_of(_num_uncached(request, request.num_cached_tokens))
        self._first_steps.add(request.arrival, step)
        self._buckets.add(request, bucket)
        self._lengths.add(request)

    def discard(self, request: R) -> None:
        self._buckets.discard(request)
        self._lengths.discard(request)

    def order(self, step: int) -> Iterator[R]:
        for request, length in self._lengths.match_next(step):
            self._buckets.add(request, _bucket_of(_num_uncached(request, length)))
        heads: list[tuple[int, int, R, Iterator[R]]] = []
        for bucket in self._buckets.by_key():
            self._push_next(heads, bucket.name, iter(bucket.requests), step)
        while heads:
            _, bucket_number, request, following = heappop(heads)
            yield request
            self._push_next(heads, bucket_number, following, step)

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        pass

    def _push_next(
        self, heads: list[tuple[int, int, R, Iterator[R]]], bucket: int, requests: Iterator[R], step: int
    ) -> None:
        """Add the next request of a bucket to the heads. The first item is its ratio, negated and times 2**32."""
        request = next(requests, None)
        if request is not None:
            num_steps = step - self._first_steps.step_of(request.arrival) + 1
            heappush(heads, (-num_steps << (_MAX_BUCKET - bucket), bucket, request, requests))


def _bucket_of(num_tokens: int) -> int:
    """Return b for a number of tokens of 2**b or less, and more than 2**(b - 1)."""
    return min((num_tokens - 1).bit_length(), _MAX_BUCKET)


@dataclass(slots=True, kw_only=True)
class VirtualTokenCounter(Generic[R]):
    """Serve the tenant (``hints.tenant``) that has received least, and its requests in order of arrival.

    The virtual token counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI 2024). A tenant's counter
    is the sum of its computed tokens, each with its weight. A tenant that begins to wait is lifted to the lowest
    counter of the waiting tenants, or to that of the last one that waited, so that nothing is saved up while idle.

    Differences to the paper: prefills count when they are computed, in chunks, instead of at admission. Within one step
    each request read counts with its uncached tokens, so that tenants take turns. The lowest counter is that of the
    last step, so the order in which requests of one step are added does not matter.

    Attributes:
        prefill_weight, decode_weight: of a computed token; 1 and 2 as in the paper.

    Raises:
        ConfigError: a weight is not a finite number above 0.
    """

    reads_batches: ClassVar[bool] = True
    wait_bound: ClassVar[str] = (
        "bounded for tenants that stay: until each other tenant has received as much as its own; "
        "starves while requests of ever new tenants arrive"
    )

    prefill_weight: float = 1
    decode_weight: float = 2
    _tenants: RequestGroups[str, R] = field(default_factory=RequestGroups, init=False, repr=False)
    _counters: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _floor: float = field(default=0, init=False, repr=False)  # the lowest counter of a waiting tenant; never decreases
    _last_tenant: str = field(default="", init=False, repr=False)  # of the last request that ceased to wait
    _prune_at: int = field(default=1_024, init=False, repr=False)

    def __post_init__(self) -> None:
        check_number("prefill_weight", self.prefill_weight, "is not a weight")
        check_number("decode_weight", self.decode_weight, "is not a weight")

    def add(self, request: R, step: int) -> None:
        tenant = _name("tenant", request.hints.tenant)
        if not len(self._tenants):
            self._floor = max(self._floor, self._counters.get(self._last_tenant, self._floor))
        is_waiting = self._tenants.has_requests(tenant)
        self._tenants.add(request, tenant)
        if not is_waiting:
            self._set_counter(tenant, max(self._counters.get(tenant, self._floor), self._floor))

    def discard(self, request: R) -> None:
        tenant = self._tenants.discard(request)
        if tenant is not None:
            self._last_tenant = tenant.name

    def order(self, step: int) -> Iterator[R]:
        waiting = self._tenants.by_key()
        tenant = next(waiting, None)
        if tenant is not None:
            self._floor = max(self._floor, tenant.key)
        heads: list[tuple[float, int, R, Iterator[R]]] = []  # the next request of each tenant read so far
        while tenant is not None or heads:
            while tenant is not None and (not heads or (tenant.key, tenant.first_arrival) < heads[0][:2]):
                _push_next(heads, tenant.key, iter(tenant.requests))
                tenant = next(waiting, None)
            counter, _, request, requests = heappop(heads)
            yield request
            counter += self.prefill_weight * _num_uncached(request, request.num_cached_tokens)
            _push_next(heads, counter, requests)

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        computed: dict[str, float] = {}
        for chunk in chunks:
            tenant, weight = chunk.request.hints.tenant, self.prefill_weight if chunk.is_prefill else self.decode_weight
            computed[tenant] = computed.get(tenant, 0) + weight * (chunk.end - chunk.start)
        for tenant, tokens in computed.items():
            self._set_counter(tenant, self._counters.get(tenant, self._floor) + tokens)

    def _set_counter(self, tenant: str, counter: float) -> None:
        self._counters[tenant] = counter
        self._tenants.set_key(tenant, counter)
        if len(self._counters) > self._prune_at:  # A tenant at the floor begins there anyway.
            self._counters = {name: value for name, value in self._counters.items() if value > self._floor}
            self._prune_at = 2 * len(self._counters) + 1_024


def _push_next(heads: list[tuple[float, int, R, Iterator[R]]], counter: float, requests: Iterator[R]) -> None:
    """Add the next request of a tenant to the heads, if it has one."""
    request = next(requests, None)
    if request is not None:
        heappush(heads, (counter, request.arrival, request, requests))


@dataclass(slots=True, kw_only=True)
class LoraGrouping(Generic[R]):
    """Serve requests of one LoRA adapter (``hints.lora``) together, adapters that the last batch used first.

    A batch then needs few adapters, and few are loaded and evicted between batches. Requests of the base model need no
    adapter and count as used. Other adapters follow in the order of their earliest request. SGLang 0.5.23
    (``--max-loras-per-batch``) and vLLM 0.32 (``--max-loras``) keep the order and skip what needs one adapter too many.

    Attributes:
        longest_wait_steps: a request that has waited so long is served before all others, in order of arrival.

    Raises:
        ConfigError: ``longest_wait_steps`` is below 1.
    """

    reads_batches: ClassVar[bool] = True
    wait_bound: ClassVar[str] = "bounded: longest_wait_steps, then 1 step per request that arrived earlier"

    longest_wait_steps: int = _LONGEST_WAIT_STEPS
    _adapters: RequestGroups[str | None, R] = field(default_factory=RequestGroups, init=False, repr=False)
    _wait_limit: WaitLimit[R] = field(default_factory=WaitLimit, init=False, repr=False)
    _loaded: dict[str | None, None] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("longest_wait_steps", self.longest_wait_steps, "is not a number of steps")

    def add(self, request: R, step: int) -> None:
        self._adapters.add(request, None if request.hints.lora is None else _name("lora", request.hints.lora))
        self._wait_limit.add(request, step)

    def discard(self, request: R) -> None:
        self._adapters.discard(request)
        self._wait_limit.discard(request)

    def order(self, step: int) -> Iterator[R]:
        return _each_once(self._wait_limit.overdue(step, self.longest_wait_steps), self._by_adapter())

    def on_scheduled(self, chunks: Sequence[ScheduledChunk[R]]) -> None:
        self._loaded = dict.fromkeys(chunk.request.hints.lora for chunk in chunks)

    def _by_adapter(self) -> Iterator[R]:
        others = self._adapters.by_key()
        loaded = {None: None} | self._loaded
        groups = [group for group in map(self._adapters.get, loaded) if group is not None]
        for group in sorted(groups, key=lambda group: group.first_arrival):
            yield from group.requests
        for group in others:
            if group.name not in loaded:
                yield from group.requests


POLICY_NAMES = (
    "fcfs",
    "priority",
    "lpm",
    "dfs-weight",
    "shortest-prefill-first",
    "hrrn",
    "earliest-deadline",
    "virtual-token-counter",
    "lora-grouping",
)
"""The names that `make_policy` takes: SGLang's (``--schedule-policy``) or vLLM's (``priority``) where there is one."""


def check_policy_name(name: str) -> str:
    """Return a name that `make_policy` takes: one of ``POLICY_NAMES``, or ``module:name`` of a policy of your own.

    Raises:
        ConfigError: the name is unknown, nothing is there to import, or it cannot make a policy.
    """
    if ":" in name:
        _import_policy(name)
    else:
        choices = (*POLICY_NAMES, "module:name of your own")
        check_choice("schedule_policy", name, choices, "is not a scheduling policy")
    return name


def ignores_batches(policy: SchedulingPolicy[R]) -> bool:
    """Return True if a policy says by ``reads_batches = False`` in its class that its ``on_scheduled`` does nothing.

    A subclass with an ``on_scheduled`` of its own reads batches, unless it says so again.
    """
    for each in type(policy).__mro__:
        if "reads_batches" in vars(each):
            return not vars(each)["reads_batches"]
        if "on_scheduled" in vars(each):
            return False
    return False


def _import_policy(path: str) -> Callable[..., SchedulingPolicy[R]]:
    module_name, _, attribute = path.partition(":")
    found, hint = None, "give module:name of a class or function, with the module on PYTHONPATH"
    try:
        module = import_module(module_name)
    except Exception as error:  # noqa: BLE001 - the module of a user may raise anything
        problem = f"cannot be imported ({error})"
    else:
        found = getattr(module, attribute, None)
        problem = f"has no {attribute!r} in module {module_name!r}" if found is None else _problem_of_maker(found)
    if problem:
        raise ConfigError("schedule_policy", path, problem, hint)
    return cast("Callable[..., SchedulingPolicy[R]]", found)


def _problem_of_maker(found: object) -> str:
    """Return why this cannot make a policy, or an empty string. Nothing is called."""
    if not callable(found):
        return "is not a class or function that makes a policy"
    missing = [method for method in ("add", "discard", "order", "on_scheduled") if not hasattr(found, method)]
    if isinstance(found, type) and missing:
        return f"is a class without {', '.join(missing)}"
    try:
        signature(found).bind(_last_match)
    except TypeError as error:
        return f"cannot be called with match_length alone ({error})"
    except ValueError:  # a builtin without a signature
        pass
    return ""


def make_policy(name: str, *, match_length: Callable[[R], int] = _last_match) -> SchedulingPolicy[R]:
    """Return a new policy with its default settings.

    Args:
        name: one of ``POLICY_NAMES``, or ``module:name`` of a class or function of your own, which is called with
            ``match_length``.
        match_length: returns how many tokens of a request are cached (``RequestKvCache.match_length``). By default the
            number that the request has, for schedulers that match waiting requests by themselves.

    Raises:
        ConfigError: the name is unknown; the error lists the known ones.
    """
    if ":" in check_policy_name(name):
        return _import_policy(name)(match_length)
    policies: dict[str, Callable[[], SchedulingPolicy[R]]] = {
        "fcfs": FirstComeFirstServed,
        "priority": PriorityPolicy,
        "lpm": lambda: LongestPrefixMatch(match_length=match_length),
        "dfs-weight": lambda: DfsWeight(match_length=match_length),
        "shortest-prefill-first": lambda: ShortestRemainingPrefill(match_length=match_length),
        "hrrn": lambda: HighestResponseRatio(match_length=match_length),
        "earliest-deadline": EarliestDeadline,
        "virtual-token-counter": VirtualTokenCounter,
        "lora-grouping": LoraGrouping,
    }
    return policies[name]()
