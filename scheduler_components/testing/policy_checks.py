"""Checks of every scheduling policy. Run each of ``POLICY_CHECKS`` on a policy of your own.

A check takes a function that opens a policy, and ``PolicyPromises``: what the policy promises beyond its port. The
opening function gets a ``match_length``, which returns how many tokens of a request are cached and counts its calls;
a policy that reads no cache ignores it.

Requests of the checks are ``PolicyRequest``. Their order of attributes is chosen so that each policy of the kit orders
them differently: priorities, tenants, deadlines, adapters, lengths and cached prefixes.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from random import Random
from typing import TypeAlias

import msgspec

from scheduler_components.ports import SchedulingPolicy
from scheduler_components.scheduling.scheduling_policy import ignores_batches
from scheduler_components.testing.check_trace import CheckTrace, checks_in
from scheduler_components.values import RequestHints, ScheduledChunk

__all__ = ["NUM_AHEAD", "POLICY_CHECKS", "OpenPolicy", "PolicyPromises", "PolicyRequest"]

NUM_AHEAD = 8
"""Requests that wait already when the request arrives whose wait ``PolicyPromises.max_wait_steps`` bounds."""


@dataclass(eq=False, kw_only=True)
class PolicyRequest:
    """A waiting request with the members of ``ports.SchedulableRequest``."""

    rid: str
    arrival: int
    token_ids: Sequence[int] = (1,)
    num_cached_tokens: int = 0
    num_output_tokens_left: int = 16
    hints: RequestHints = field(default_factory=RequestHints)

    @property
    def num_input_tokens(self) -> int:
        """Tokens to prefill if none is cached."""
        return len(self.token_ids)


Policy: TypeAlias = SchedulingPolicy[PolicyRequest]
OpenPolicy: TypeAlias = Callable[[Callable[[PolicyRequest], int]], Policy]
"""Opens a policy. The argument returns how many tokens of a request are cached."""


class PolicyPromises(msgspec.Struct, frozen=True):
    """What a policy promises beyond its port. Without a promise the policy is not checked for it.

    Attributes:
        max_wait_steps: the most steps until a request is served that finds ``NUM_AHEAD`` others waiting, if each step
            serves one request and another one arrives. The request is the worst by every attribute, and those that
            arrive are the best by one of them. None if it may wait for ever.
        matches_per_step: the most calls of ``match_length`` per step.
        is_flat: reading the first requests of 1,000 waiting ones reads no more of the requests than with 128.
        shares_by_tenant: of two tenants that wait, the one that has received less is first, and a tenant that was idle
            has saved up nothing.
        keeps_places: a preempted request is back in its place among requests that are equal to it in all but arrival,
            as if it had waited all the time.
    """

    max_wait_steps: int | None = None
    matches_per_step: int = 128
    is_flat: bool = False
    shares_by_tenant: bool = False
    keeps_places: bool = False


_NO_PROMISES = PolicyPromises()


def check_each_waiting_request_comes_once(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """Over a history of arrivals, admissions, aborts and preemptions, an order has each waiting request once.

    So it has of 1,100 waiting requests: more than Python's limit of nested calls.
    """
    use = _Use("An order has each waiting request once, and no other", open_policy)
    for _ in _history(use, num_steps=60):
        use.check_order()
    use = _Use("An order has each of 1,100 waiting requests once", open_policy)
    for request in _requests(1_100):
        use.add(request)
    use.check_order()


def check_requests_may_be_discarded_while_they_are_read(
    open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES
) -> None:
    """Discarding the request just read changes nothing for the others: each still comes once."""
    for every in (1, 2, 5):
        use = _Use(f"Every request that is read is discarded if its place is a multiple of {every}", open_policy)
        for request in _requests(30):
            use.add(request)
        use.step = 3
        expected, found = sorted(use.waiting), list[int]()
        for place, request in enumerate(use.iterate(31)):
            found.append(request.arrival)
            if place % every == 0:
                use.discard(request)
        use.trace.expect(expected, sorted(found), "arrivals read")
        use.check_order()


def check_preempted_requests_wait_again(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """A request that is added again with its arrival comes once, also if it is added or discarded twice.

    Nothing need be read between its discard and its next add. It is back in its place if the policy promises so.
    """
    use = _Use("A preempted request waits again, once", open_policy)
    requests = _requests(12)
    for request in requests:
        use.add(request)
    for _ in range(3):
        use.step += 1
        for request in (*requests[3:6], requests[4]):
            use.discard(request)
        use.check_order()
        for request in requests[5:2:-1]:
            request.token_ids = (*request.token_ids, 7)
            use.add(request)
        use.check_order()
    use.add(requests[0])
    use.check_order()
    use.discard(requests[0])
    use.check_order()
    use.discard(PolicyRequest(rid="unknown", arrival=999))
    use.check_order()
    use.discard(requests[7])
    use.add(requests[7])
    use.check_order()
    if promises.keeps_places:
        _check_places(open_policy)


def _check_places(open_policy: OpenPolicy) -> None:
    title = "A preempted request is in its place among equal ones"
    use, undisturbed = _Use(title, open_policy), _Use(title, open_policy)
    for arrival in range(6):
        for each in (use, undisturbed):
            each.step = 10 * arrival
            each.add(PolicyRequest(rid=f"equal-{arrival}", arrival=arrival))
        use.check_order()
    preempted = use.waiting[2]
    for step in (60, 70):
        use.step = undisturbed.step = step
        use.discard(preempted)
        use.check_order()
        use.add(preempted)
        use.trace.expect(undisturbed.check_order(), use.check_order(), "arrivals in the order without a preemption")


def check_orders_are_repeatable(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """Reading an order, whole or in part, changes no order of this step or of a later one."""
    title = "An order that was read before, or in part, is the same"
    use, other = _Use(title, open_policy), _Use(title, open_policy)
    for _ in zip(_history(use, num_steps=30), _history(other, num_steps=30), strict=True):
        first = use.check_order()
        for count in (0, 1, 3):
            use.trace.call(f"read {count} of order()", lambda count=count: use.read(count))  # type: ignore[misc]
            use.trace.expect(first, use.check_order(), "arrivals in the order read before")
        use.trace.expect(other.check_order(), first, "arrivals in the order of a policy that was read once")


def check_ranks_decide_equally(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """Policies with the same calls have the same order: no hash, no object's address and no order of adding matters.

    The names of the other policies' requests have other hashes and the same order. What arrives in one step is added
    in another order.
    """
    title = "The ranks of a replica have the same order"
    uses = [_Use(title, open_policy, rid_prefix=prefix, adds_backwards=prefix == "q") for prefix in "rqstuvw"]
    histories = [_history(use, num_steps=25) for use in uses]
    for _ in zip(*histories, strict=True):
        first, *others = [use.check_order() for use in uses]
        for use, other in zip(uses[1:], others, strict=True):
            how = "where requests of a step are added in reverse" if use.adds_backwards else "with other names"
            uses[0].trace.expect(other, first, f"arrivals in the order of another rank, {how}")


def check_wait_is_bounded(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """A request is served within the promised steps, whatever arrives later, also where numbers of 32 bits end."""
    if promises.max_wait_steps is None:
        return
    for (name, better), first_step in product(_BETTER.items(), (0, 2**31 - NUM_AHEAD, 2**32 - NUM_AHEAD)):
        use = _Use(f"A request is served within {promises.max_wait_steps} steps while {name} arrive", open_policy)
        use.step = first_step
        for number in range(NUM_AHEAD):
            use.add(_newcomer(number, better))
        patient = PolicyRequest(
            rid="patient",
            arrival=NUM_AHEAD,
            token_ids=tuple(range(1_000, 1_016)),
            hints=RequestHints(priority=0, tenant="patient", lora="patient"),
        )
        use.add(patient)
        for step in range(promises.max_wait_steps + 1):
            use.step = first_step + step
            use.add(_newcomer(NUM_AHEAD + 1 + step, better))
            served = use.read(1)
            use.trace.require(len(served) == 1, "a request to serve", "none")
            if served[0] is patient:
                break
            use.discard(served[0])
            use.compute([(served[0], len(served[0].token_ids))])
        else:
            use.trace.require(False, f"the patient request within {promises.max_wait_steps} steps", "it still waits")


def check_matches_have_a_budget(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """However many requests wait and however often the order is read, a step matches no more than promised."""
    use = _Use(f"A step matches at most {promises.matches_per_step} requests", open_policy)
    requests = _requests(promises.matches_per_step + 150)
    for request in requests:
        use.add(request)
    use.trace.require(use.num_matches <= len(requests), "at most one match per request that is added", use.num_matches)
    for step in range(1, 4):
        use.step, use.num_matches = step, 0
        for count in (len(requests), 2, len(requests)):
            for request in use.read(count)[:2]:
                use.discard(request)
        use.trace.require(
            use.num_matches <= promises.matches_per_step, f"at most {promises.matches_per_step}", use.num_matches
        )


def check_cost_is_flat(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """The first requests of 1,000 waiting ones cost no more reads of requests than those of 128."""
    if not promises.is_flat:
        return
    reads = []
    for num_waiting in (128, 1_000):
        use = _Use("The first requests of many waiting ones cost what those of a few cost", open_policy)
        for request in _requests(num_waiting):
            use.policy.add(_ReadCounter.of(request), use.step)
        for step in range(1, 4):
            _ReadCounter.num_reads = 0
            for request in list(islice(use.policy.order(step), 4)):
                use.policy.discard(request)
        reads.append(_ReadCounter.num_reads)
        use.trace.note(f"read 4 of {num_waiting} waiting requests: {reads[-1]} reads of attributes")
    use.trace.require(reads[1] <= 2 * reads[0] + 200, f"at most twice the {reads[0]} reads of 128, and 200", reads[1])


def check_bad_keys_are_refused(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """A hint that has no place in an order is refused with a ``ValueError`` of one line, or it is not a key.

    The other requests lose nothing. A request whose hint is accepted comes once, wherever it was added.
    """
    for name, value in _BAD_HINTS:
        title = f"A request with {name}={value!r} is refused, or ordered like any other"
        orders = []
        for is_first in (True, False):
            use = _Use(title, open_policy)
            good = _requests(9)
            bad = PolicyRequest(rid="bad", arrival=9, hints=_bad_hints(name, value))
            for request in (bad, *reversed(good)) if is_first else (*good, bad):
                if request is bad:
                    use.add_or_refuse(bad)
                else:
                    use.add(request)
            orders.append(use.check_order())
        use.trace.expect(orders[0], orders[1], "arrivals as if all were added in reverse")
        use.discard(bad)
        use.check_order()


def check_computed_tokens_are_counted(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """What a batch computes changes no membership; with fair shares, the tenant that received less is first.

    It changes nothing if the policy says ``reads_batches = False``.
    """
    use = _Use("Computed tokens change no membership", open_policy)
    requests = _requests(20)
    use.compute([])
    use.compute([(requests[0], 5)])
    for request in requests[10:]:
        use.add(request)
    use.check_order()
    use.compute([(request, 9) for request in requests[:10]], is_prefill=False)
    use.compute([(requests[12], 1)])
    use.check_order()
    if ignores_batches(use.policy):
        _check_batches_are_ignored(open_policy)
    if promises.shares_by_tenant:
        _check_shares(open_policy)


def _check_batches_are_ignored(open_policy: OpenPolicy) -> None:
    """A policy with ``reads_batches = False`` orders by the same rule, whatever batches compute."""
    title = "A policy that reads no batches has the same order after them"
    uses = [_Use(title, open_policy) for _ in range(2)]
    for use in uses:
        for request in _requests(20):
            use.add(request)
    requests = _requests(20)
    for step in range(3):
        uses[1].compute([(request, 100 * (step + 1)) for request in requests[step::4]], is_prefill=step % 2 == 0)
        expected, found = ([request.arrival for request in use.read(20)] for use in uses)
        uses[1].trace.expect(expected, found, "order without the batches")


def _check_shares(open_policy: OpenPolicy) -> None:
    use = _Use("The tenant that received less is first", open_policy)
    one, other = (PolicyRequest(rid=name, arrival=at, hints=RequestHints(tenant=name)) for at, name in enumerate("ab"))
    running = [
        PolicyRequest(rid=f"run-{name}", arrival=2 + at, hints=RequestHints(tenant=name))
        for at, name in enumerate("ab")
    ]
    use.add(one)
    use.add(other)
    for number, (index, num_tokens, is_prefill, first) in enumerate(
        ((0, 100, True, other), (1, 500, True, one), (0, 600, False, other))
    ):
        use.step = number
        use.compute([(running[index], num_tokens)], is_prefill=is_prefill)
        use.trace.expect(first.rid, use.read(1)[0].rid, "first tenant")
    for batch, first_tenant in _SHARED_BATCHES:
        use = _Use("The tenant that received less in one batch is first", open_policy)
        for arrival, tenant in enumerate("ab"):
            use.add(PolicyRequest(rid=tenant, arrival=arrival, hints=RequestHints(tenant=tenant)))
        chunks = [
            ScheduledChunk(
                PolicyRequest(rid=f"run-{arrival}", arrival=arrival, hints=RequestHints(tenant=tenant)),
                start,
                end,
                True,
            )
            for arrival, (tenant, start, end) in enumerate(batch, 2)
        ]
        use.compute_chunks(chunks)
        use.trace.expect(first_tenant, use.read(1)[0].rid, f"first tenant after {batch}")
    use = _Use("A tenant that was idle has saved up nothing", open_policy)
    busy = RequestHints(tenant="busy")
    for number in range(40):
        use.add(PolicyRequest(rid=f"busy-{number}", arrival=number, token_ids=(1,) * 100, hints=busy))
    heavy = PolicyRequest(rid="heavy", arrival=1_000, hints=RequestHints(tenant="heavy"))
    use.add(heavy)
    use.compute([(heavy, 10_000)])  # what another tenant has received is no measure of a new one
    served = [use.serve_first().hints.tenant for _ in range(20)]
    for number in range(40, 60):
        hints = RequestHints(tenant="late")
        use.add(PolicyRequest(rid=f"late-{number}", arrival=number, token_ids=(1,) * 100, hints=hints))
    served = [use.serve_first().hints.tenant for _ in range(20)]
    use.trace.require(8 <= served.count("late") <= 12, "each of two tenants with 8 to 12 of 20 turns", served)
    use = _Use("A tenant that waits with one request at a time pays for each", open_policy)
    for number in range(40):
        use.add(PolicyRequest(rid=f"busy-{number}", arrival=number, token_ids=(1,) * 100, hints=busy))
    served = []
    for number in range(40, 60):
        if "visitor" not in {request.hints.tenant for request in use.waiting.values()}:
            hints = RequestHints(tenant="visitor")
            use.add(PolicyRequest(rid=f"visitor-{number}", arrival=number, token_ids=(1,) * 100, hints=hints))
        served.append(use.serve_first().hints.tenant)
    use.trace.require(8 <= served.count("visitor") <= 12, "each of two tenants with 8 to 12 of 20 turns", served)


_SHARED_BATCHES: tuple[tuple[tuple[tuple[str, int, int], ...], str], ...] = (
    ((("a", 0, 10), ("b", 0, 500)), "a"),
    ((("a", 0, 300), ("a", 0, 300), ("b", 0, 400)), "b"),
    ((("a", 900, 910), ("b", 0, 100)), "a"),
    ((("a", 0, 500), ("b", 0, 10), ("b", 0, 10)), "b"),
)
"""Batches of prefills, each by tenant, start and end, and the tenant that received less."""


def check_discarded_requests_are_released(open_policy: OpenPolicy, promises: PolicyPromises = _NO_PROMISES) -> None:
    """A policy keeps no request that waits no longer: its tokens would stay in memory."""
    use = _Use("A discarded request is released", open_policy)
    requests = _requests(200)
    for request in requests:
        use.add(request)
    use.check_order()
    left = {id(request): weakref.ref(request) for request in requests[10:]}
    for request in requests[10:]:
        use.discard(request)
    use.step += 1
    use.compute([(request, 1) for request in requests[10:]])
    use.check_order()
    use.step += 1
    use.compute([(requests[0], 1)])
    use.check_order()
    del request, requests[10:]
    gc.collect()
    num_kept = sum(each() is not None for each in left.values())
    use.trace.expect(0, num_kept, "discarded requests that the policy still refers to, of 190")


class _Use:
    """One policy in use, with what must be true of it.

    Args:
        title: the promise that is checked.
        open_policy: opens the policy.
        rid_prefix: of the names of all requests, tenants and adapters of a history.
        adds_backwards: add the requests of one step in descending order of arrival.
    """

    def __init__(
        self, title: str, open_policy: OpenPolicy, *, rid_prefix: str = "r", adds_backwards: bool = False
    ) -> None:
        self.trace = CheckTrace(title)
        self.rid_prefix = rid_prefix
        self.adds_backwards = adds_backwards
        self.waiting: dict[int, PolicyRequest] = {}
        self.added: dict[int, tuple[object, ...]] = {}  # what the waiting requests were when they were added
        self.step = 0
        self.num_matches = 0
        self.policy: Policy = self.trace.call("opened a policy", lambda: open_policy(self._match_length))

    def _match_length(self, request: PolicyRequest) -> int:
        self.num_matches += 1
        return request.num_cached_tokens

    def add(self, request: PolicyRequest) -> None:
        self.trace.call(f"add({request.rid}, {self.step})", lambda: self.policy.add(request, self.step))
        self.waiting[request.arrival] = request
        self.added[request.arrival] = _content(request)

    def rematch(self, request: PolicyRequest, num_tokens: int) -> None:
        """Change how many tokens of a waiting request are cached, as a scheduler that matches by itself does."""
        request.num_cached_tokens = min(num_tokens, request.num_input_tokens - 1)
        self.trace.note(f"{request.num_cached_tokens} tokens of {request.rid} are cached now")
        self.added[request.arrival] = _content(request)

    def add_or_refuse(self, request: PolicyRequest) -> None:
        """Add a request that the policy may refuse."""
        self.trace.note(f"add({request.rid}, {self.step}) with {request.hints}")
        try:
            self.policy.add(request, self.step)
        except ValueError as error:
            self.trace.require(bool(str(error)) and "\n" not in str(error), "an error of one line", str(error))
        except Exception as error:
            raise self.trace.failure("a ValueError, or no error", f"{type(error).__name__}: {error}") from error
        else:
            self.waiting[request.arrival] = request
            self.added[request.arrival] = _content(request)

    def discard(self, request: PolicyRequest) -> None:
        self.trace.call(f"discard({request.rid})", lambda: self.policy.discard(request))
        self.waiting.pop(request.arrival, None)

    def compute(self, work: Iterable[tuple[PolicyRequest, int]], *, is_prefill: bool = True) -> None:
        """Report a batch that computes a number of tokens per request."""
        chunks = [ScheduledChunk(request, 0, num_tokens, is_prefill) for request, num_tokens in work]
        self.compute_chunks(chunks)

    def compute_chunks(self, chunks: list[ScheduledChunk[PolicyRequest]]) -> None:
        """Report a batch."""
        given = list(chunks)
        self.trace.call(f"on_scheduled({len(chunks)} chunks)", lambda: self.policy.on_scheduled(chunks))
        self.trace.require(chunks == given, "the chunks of the batch as they were", f"{len(chunks)} other ones")

    def read(self, count: int) -> list[PolicyRequest]:
        """Return the first requests of the order, at most ``count``."""
        return self.trace.call(f"order({self.step})", lambda: list(islice(self.policy.order(self.step), count)))

    def iterate(self, count: int) -> Iterator[PolicyRequest]:
        """Iterate over the first requests of the order, at most ``count``."""
        order = self.trace.call(f"order({self.step})", lambda: iter(self.policy.order(self.step)))
        for _ in range(count):
            try:
                request = next(order, None)
            except Exception as error:
                raise self.trace.failure("the next request", f"{type(error).__name__}: {error}") from error
            if request is None:
                return
            yield request

    def serve_first(self) -> PolicyRequest:
        """Admit the first request and compute all its tokens; this takes one step."""
        self.step += 1
        first = self.read(1)[0]
        self.discard(first)
        self.compute([(first, first.num_input_tokens)])
        return first

    def check_order(self) -> list[int]:
        """Read the whole order, check that it has each waiting request once, and return the arrivals in order."""
        found = self.read(len(self.waiting) + 1)
        times = Counter(id(request) for request in found)
        strange = [each.rid for each in found if self.waiting.get(each.arrival) is not each]
        self.trace.expect([], strange, "requests in the order that do not wait")
        twice = [request.rid for request in self.waiting.values() if times[id(request)] > 1]
        self.trace.expect([], twice, "requests that come twice")
        missing = [request.rid for request in self.waiting.values() if not times[id(request)]]
        self.trace.expect([], missing, "waiting requests that are missing")
        changed = [each.rid for number, each in self.waiting.items() if _content(each) != self.added[number]]
        self.trace.expect([], changed, "waiting requests that the policy has changed")
        return [request.arrival for request in found]


def _content(request: PolicyRequest) -> tuple[object, ...]:
    """Return what a policy may read and may not write."""
    return (
        request.rid,
        request.arrival,
        request.token_ids,
        request.num_cached_tokens,
        request.num_output_tokens_left,
        request.hints,
    )


class _ReadCounter(PolicyRequest):
    """A request that counts how often its attributes are read, as the cost of an order."""

    num_reads = 0

    @classmethod
    def of(cls, request: PolicyRequest) -> _ReadCounter:
        return cls(
            rid=request.rid,
            arrival=request.arrival,
            token_ids=request.token_ids,
            num_cached_tokens=request.num_cached_tokens,
            hints=request.hints,
        )

    def __getattribute__(self, name: str) -> object:
        _ReadCounter.num_reads += 1
        return super().__getattribute__(name)


def _history(use: _Use, num_steps: int) -> Iterable[int]:
    """Step through arrivals, admissions, aborts, preemptions and idle time. Yield after each change of a step."""
    random = Random(25)
    requests = iter(_requests(4 * num_steps, use.rid_prefix))
    running: list[PolicyRequest] = []
    for _ in range(num_steps):
        use.step += random.choice((1, 1, 1, 7, 100))
        arriving = list(islice(requests, random.randint(0, 4)))
        if running and random.random() < 0.3:
            preempted = running.pop(random.randrange(len(running)))
            preempted.token_ids = (*preempted.token_ids, 5)
            arriving.insert(0, preempted)
        for request in reversed(arriving) if use.adds_backwards else arriving:
            use.add(request)
        if use.waiting:
            use.rematch(use.waiting[random.choice(sorted(use.waiting))], random.randint(0, 200))
        yield use.step
        if use.waiting and random.random() < 0.2:
            use.discard(use.waiting[random.choice(sorted(use.waiting))])
        for request in use.read(random.randint(0, 3)):
            use.discard(request)
            running.append(request)
        use.compute([(request, random.randint(1, 30)) for request in running], is_prefill=random.random() < 0.5)
        del running[: random.randint(0, 2)]
        yield use.step


def _requests(count: int, prefix: str = "r") -> list[PolicyRequest]:
    """Make requests that differ in everything that a policy may read. ``prefix`` begins all names."""
    random = Random(7)
    families = [tuple(random.choices(range(50), k=200)) for _ in range(5)]
    made = []
    for arrival in range(count):
        family, size = random.randrange(5), random.randint(1, 200)
        hints = RequestHints(
            priority=random.randint(-2, 2),
            tenant=f"{prefix}-tenant-{random.randint(1, 4)}",
            deadline_s=random.choice((None, 10.0, 20.5, float(random.randint(0, 99)))),
            lora=random.choice((None, f"{prefix}-x", f"{prefix}-y", f"{prefix}-z")),
        )
        request = PolicyRequest(
            rid=f"{prefix}{arrival}",
            arrival=arrival,
            token_ids=(*families[family][:size], 99),
            num_cached_tokens=random.choice((0, size // 2, size)),
            num_output_tokens_left=random.randint(1, 99),
            hints=hints,
        )
        made.append(request)
    return made


_LONG = tuple(range(64))
_BETTER: dict[str, tuple[tuple[int, ...], int, RequestHints]] = {
    "equal requests": (tuple(range(1_000, 1_016)), 0, RequestHints(tenant="patient", lora="patient")),
    "requests of a higher priority": (_LONG, 0, RequestHints(priority=1)),
    "requests with an earlier deadline": (_LONG, 0, RequestHints(deadline_s=1.0)),
    "short requests": ((1,), 0, RequestHints()),
    "cached requests": (_LONG, 63, RequestHints()),
    "requests of one other tenant": (_LONG, 0, RequestHints(tenant="busy")),
    "requests of one other adapter": (_LONG, 0, RequestHints(lora="hot")),
    "requests of the base model": (_LONG, 63, RequestHints(lora=None, priority=1, deadline_s=1.0)),
}
"""What arrives while a request waits: tokens, how many of them are cached, and hints."""


def _newcomer(number: int, better: tuple[tuple[int, ...], int, RequestHints]) -> PolicyRequest:
    """Make the request that arrives in one step; its number is its arrival."""
    token_ids, num_cached, hints = better
    return PolicyRequest(
        rid=f"new-{number}", arrival=number, token_ids=token_ids, num_cached_tokens=num_cached, hints=hints
    )


_BAD_HINTS: tuple[tuple[str, object], ...] = (
    ("priority", float("nan")),
    ("priority", "high"),
    ("priority", None),
    ("priority", float("inf")),
    ("priority", 10**30),
    ("deadline_s", float("nan")),
    ("deadline_s", "soon"),
    ("deadline_s", [1.0]),
    ("tenant", ["a"]),
    ("tenant", None),
    ("lora", 7),
    ("lora", ["a"]),
)


def _bad_hints(name: str, value: object) -> RequestHints:
    """Return hints that no client can send through a checked boundary."""
    return RequestHints(**{name: value})  # type: ignore[arg-type]


POLICY_CHECKS: tuple[Callable[[OpenPolicy, PolicyPromises], None], ...] = checks_in(globals())
"""All checks of a scheduling policy."""
