"""What every scheduler must do: run each of ``SCHEDULER_CHECKS`` on a scheduler of your own.

A check takes a function that opens a scheduler over the sinks that it is given, serves it a workload of prompts that
share prefixes and together overfill the pool, and compares what it tells with what was asked for. Give it a pool of
``interfaces.MIN_POOL_TOKENS``, chunks of some 16 tokens where it prefills in chunks, and a model that takes no time and
answers ``interfaces.next_token``: ``PagedModel``, or any other that does.

A request is told of by its id. The end is told once, after all tokens, and nothing after it. No check asks a scheduler
to retract: one that reserves the pages of a whole request passes too.

``POOL_STREAM_CHECKS`` take a scheduler that can also read its pool (``HeldBlocksSource``): they name the batch that
forgot.
``POOL_INVARIANT_CHECKS`` take one whose pools can be counted (``AuditedPool``): they name the pages and who holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_components import FinishReason, KvEventSink, LoadSnapshot, OutputDelta, OutputSink
from scheduler_components.invariant_rules import find_pool_violations
from scheduler_components.ports import AuditedPool, NullOwnerTrails
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.fakes import ListEventSink, ListOutputSink
from scheduler_components.testing.interfaces import (
    AuditedScheduler,
    CheckTrace,
    PooledScheduler,
    ServingScheduler,
    Workload,
    next_token,
)
from scheduler_components.testing.pool_verifier import PoolVerifier
from scheduler_components.values import KvPoolSnapshot

__all__ = [
    "POOL_INVARIANT_CHECKS",
    "POOL_STREAM_CHECKS",
    "SCHEDULER_CHECKS",
    "WORKLOAD",
    "OpenAuditedScheduler",
    "OpenPooledScheduler",
    "OpenScheduler",
]

OpenScheduler = Callable[[KvEventSink, OutputSink], ServingScheduler]
OpenPooledScheduler = Callable[[KvEventSink, OutputSink], PooledScheduler]
OpenAuditedScheduler = Callable[[KvEventSink, OutputSink], AuditedScheduler]

_SYSTEM = tuple(range(1, 33))
WORKLOAD: Workload = (
    (_SYSTEM, 4),
    (_SYSTEM + tuple(range(100, 120)), 6),
    (_SYSTEM + tuple(range(100, 150)), 3),
    (tuple(range(500, 560)), 110),
    (_SYSTEM + tuple(range(600, 630)), 120),
    (tuple(range(200, 203)), 1),
    (tuple(range(700, 761)), 130),
    (_SYSTEM + tuple(range(300, 340)), 5),
    (_SYSTEM + tuple(range(800, 840)), 100),
    (tuple(range(400, 470)), 2),
    (_SYSTEM, 4),
)
"""Prompts of 3 to 82 tokens, most over one system prompt; two are equal, one fills no page of common sizes. Any two of
the four long answers overfill ``MIN_POOL_TOKENS``, and each fits alone."""

_ABORT_DELAYS = (0, 1, 4, 40)  # steps from a request to its abort: it waits, is in prefill, in decode, or has ended
_MAX_ABORT_STEPS = 2  # an abort ends a request in the next step, or in the one after it where steps overlap
_MAX_SLOTS = 64  # beyond that the pool is full before the slots are


def check_every_request_is_answered(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Every request gets all its tokens, each once and in order, and one end; nothing comes after the end."""
    session = _Session.open("Every request ends once, with all its tokens, in order", open_scheduler, is_strict=True)
    for _ in session.serve(workload):
        pass
    session.expect_all_ended()


def check_all_work_ends(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Every request is served in a bounded number of steps; then nothing runs, waits or is held."""
    session = _Session.open("Every workload comes to an end, and nothing is left", open_scheduler)
    for _ in session.serve(workload):
        pass
    session.expect_nothing_held()


def check_aborted_requests_end(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """An abort ends its request soon, wherever it stands, and touches no other; then nothing is held."""
    for delay in _ABORT_DELAYS:
        title = f"Every second request is aborted, {delay} steps after it came; it ends, and the others are served"
        session = _Session.open(title, open_scheduler, is_strict=True)
        session.abort("never-came")
        for _ in session.serve(workload, abort_delay=delay):
            session.expect_aborts_told()
        session.abort(session.submit(*workload[0]).rid)  # alone: nothing else keeps the scheduler at work
        for _ in session.serve(()):
            session.expect_aborts_told()
        session.expect_all_ended()
        session.expect_nothing_held()


def check_no_request_starves(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """A request ends in a bounded number of steps, however many short ones with a cached prefix keep coming."""
    session = _Session.open("Nobody starves while others keep coming", open_scheduler)
    for _ in session.serve(((_SYSTEM, 1),)):
        pass  # the prefix of the newcomers is cached now
    num_newcomers = 2 * max(1, min(session.scheduler.get_loads().max_running_requests, _MAX_SLOTS))
    patient = [session.submit(prompt, new_tokens) for prompt, new_tokens in workload]
    newcomers: list[_Asked] = []
    most_steps = _most_steps(workload)
    for _ in range(most_steps):
        while len(newcomers) < num_newcomers:
            newcomers.append(session.submit((*_SYSTEM, 10_000 + len(session.requests)), 2))
        session.step()
        patient, newcomers = _unended(patient), _unended(newcomers)
        if not patient:
            return
    rids = [request.rid for request in patient]
    session.trace.expect([], rids, f"requests that still wait after {most_steps} steps of newcomers")


def check_events_match_the_cache(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """After every step, whoever applied the events holds exactly the cache's blocks, and no rule was broken."""
    session = _Session.open("The events of every step leave a reader with the cache's blocks", open_scheduler)
    trace, batches = session.trace, session.events.batches
    ledger, num_applied = EventLedger(), 0
    for _ in session.serve(workload):
        events = [event for batch in batches[num_applied:] for event in batch.events]
        num_applied = len(batches)
        trace.expect([], ledger.apply_all(events), "broken rules of the wire")
        blocks = sorted(set(session.scheduler.block_hashes()))
        trace.expect(blocks, sorted(ledger.hashes()), "the cache's blocks, in a reader's view")
    trace.require(num_applied > 0 or workload is not WORKLOAD, "events of a workload that fills pages", "none")
    empty = [number for number, batch in enumerate(batches) if not batch.events]
    trace.expect([], empty, "batches without events")


def check_stream_matches_the_pool(open_scheduler: OpenPooledScheduler, workload: Workload = WORKLOAD) -> None:
    """After every step the pool holds on each tier exactly what the events say; if not, the batch is named."""
    opened: list[PooledScheduler] = []

    def open_and_keep(events: KvEventSink, outputs: OutputSink) -> PooledScheduler:
        opened.append(open_scheduler(events, outputs))
        return opened[0]

    session = _Session.open("The events of every step tell what the pool holds, on each tier", open_and_keep)
    trace, batches = session.trace, session.events.batches
    judge, num_applied = PoolVerifier(), 0
    for _ in session.serve(workload):
        for number, batch in enumerate(batches[num_applied:], start=num_applied):
            judge.apply(number, batch.events)
        num_applied = len(batches)
        reading = KvPoolSnapshot(opened[0].held_blocks(), sequence=num_applied - 1)
        trace.require(bool(reading.blocks), "at least one place named by held_blocks()", "none")
        trace.expect([], [str(each) for each in judge.compare(reading)], "differences between pool and stream")


def check_pool_accounting(open_scheduler: OpenAuditedScheduler, workload: Workload = WORKLOAD) -> None:
    """After every step, also with aborts, each page of each pool is in one place, and locks are those of holders."""
    for delay in (None, *_ABORT_DELAYS):
        session, pools = _audited("After every step each page of each pool is in one place", open_scheduler)
        for _ in session.serve(workload, abort_delay=delay):
            problems = [str(each) for pool in pools for each in find_pool_violations(pool, NullOwnerTrails())]
            session.trace.expect([], problems, "broken rules of the pools")


def check_pools_are_released(open_scheduler: OpenAuditedScheduler, workload: Workload = WORKLOAD) -> None:
    """When all work has ended, also by aborts, every page is free or cached and nothing is locked."""
    for delay in (None, *_ABORT_DELAYS):
        session, pools = _audited("When all work has ended, nobody holds a page", open_scheduler)
        for _ in session.serve(workload, abort_delay=delay):
            pass
        for count in (pool.count() for pool in pools):
            left = (count.available + count.evictable, count.protected, count.uncached)
            session.trace.expect((count.total, 0, 0), left, f"(free or evictable, protected, uncached) of {count.name}")


def _audited(title: str, open_scheduler: OpenAuditedScheduler) -> tuple[_Session, Sequence[AuditedPool]]:
    """Open a scheduler; returns the session and the scheduler's pools."""
    opened: list[AuditedScheduler] = []

    def open_and_keep(events: KvEventSink, outputs: OutputSink) -> AuditedScheduler:
        opened.append(open_scheduler(events, outputs))
        return opened[0]

    session = _Session.open(title, open_and_keep)
    pools = opened[0].pools
    session.trace.require(bool(pools), "at least one pool", "none")
    return session, pools


def check_load_is_consistent(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Load counts are numbered and within bounds; every request in flight, and all of its tokens, show in them."""
    session = _Session.open("Load reports are sound after every step", open_scheduler)
    trace, scheduler = session.trace, session.scheduler
    load = scheduler.get_loads()
    for prompt, new_tokens in workload:
        before, _ = load, session.submit(prompt, new_tokens)
        load = scheduler.get_loads()
        counted = (load.num_waiting_reqs - before.num_waiting_reqs, load.num_pending_tokens - before.num_pending_tokens)
        trace.expect((1, len(prompt)), counted, "the requests and tokens by which a submission adds to what waits")
        if scheduler.has_work:
            session.step()
        load = _checked_load(session, load.sequence)
    for _ in session.serve(()):
        load = _checked_load(session, load.sequence)


def _checked_load(session: _Session, sequence: int) -> LoadSnapshot:
    trace, load = session.trace, session.scheduler.get_loads()
    trace.require(load.sequence > sequence, f"a sequence above {sequence}", load.sequence)
    counts = (load.num_running_reqs, load.num_waiting_reqs, load.num_pending_tokens, load.num_used_tokens)
    trace.require(min(counts) >= 0, "no negative count", load)
    trace.require(load.num_used_tokens <= load.max_total_num_tokens, "used tokens within capacity", load)
    trace.require(load.num_running_reqs <= load.max_running_requests, "no more running than there are slots", load)
    trace.require(0.0 <= load.token_usage <= 1.0, "token_usage from 0 to 1", load)
    trace.require(load.num_waiting_uncached_tokens <= load.num_pending_tokens, "uncached within pending", load)
    trace.expect(load.num_used_tokens + load.num_pending_tokens, load.num_total_tokens, "used and pending tokens")
    num_requests = load.num_running_reqs + load.num_waiting_reqs
    trace.expect(session.scheduler.has_work, num_requests > 0, "whether requests run or wait")
    in_flight = _unended(session.requests.values())
    trace.expect(len(in_flight), num_requests, "requests that run or wait")
    num_untold = sum(not request.token_ids for request in in_flight)
    trace.require(
        load.num_pending_tokens >= num_untold,
        f"pending tokens of the {num_untold} requests whose prompt is not computed, in chunks or not",
        load.num_pending_tokens,
    )
    # What a request has of tokens is pending, or its KV is held: all but the last token, which has none yet.
    most = max((len(request.prompt) + len(request.token_ids) - 1 for request in in_flight), default=0)
    trace.require(
        load.num_total_tokens >= most, f"at least {most} tokens pending or held for one request", load.num_total_tokens
    )
    return load


def check_equal_work_gives_equal_events(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Ranks of a replica take the same requests and must publish the same events: neither clock nor chance decides."""
    session = _Session.open("Two schedulers with the same work publish the same events", open_scheduler)
    other = _Session.open(session.trace.title, open_scheduler)
    for _ in session.serve(workload):
        pass
    for _ in other.serve(workload):
        pass
    session.trace.expect(session.events.events, other.events.events, "the other's events")
    session.trace.expect(session.outputs.deltas, other.outputs.deltas, "the other's outputs")


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A request, and what was told of it.

    Attributes:
        aborted_at: number of steps before its abort.
        token_ids: what was generated.
    """

    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    aborted_at: int | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def expected(self, num_tokens: int) -> tuple[int, ...]:
        """The tokens that must come next, at most ``num_tokens``."""
        tokens = [*self.prompt, *self.token_ids]
        num_told = len(tokens)
        for _ in range(min(num_tokens, self.max_new_tokens - len(self.token_ids))):
            tokens.append(next_token(tokens))
        return tuple(tokens[num_told:])


class _Receiver(ListOutputSink):
    """Keeps everything, and gives what is new once."""

    def __init__(self) -> None:
        super().__init__()
        self._num_taken = 0

    def take_news(self) -> list[OutputDelta]:
        """What came since the last call."""
        batches = self.batches[self._num_taken :]
        self._num_taken += len(batches)
        return [delta for batch in batches for delta in batch.deltas]


@dataclass(slots=True, kw_only=True)
class _Session:
    """One scheduler, who asks it, and what they are told.

    Attributes:
        is_strict: every piece of news is judged.
        requests: by id, in order of arrival.
    """

    trace: CheckTrace
    scheduler: ServingScheduler  # noqa: SCH001 the part under check, driven from outside
    events: ListEventSink
    outputs: _Receiver
    is_strict: bool
    requests: dict[str, _Asked] = field(default_factory=dict)
    num_steps: int = 0

    @classmethod
    def open(
        cls,
        title: str,
        open_scheduler: OpenScheduler,  # noqa: SCH001 the part under check, driven from outside
        *,
        is_strict: bool = False,
    ) -> _Session:
        trace, events, outputs = CheckTrace(title), ListEventSink(), _Receiver()
        scheduler = trace.call("opened a scheduler", lambda: open_scheduler(events, outputs))
        return cls(trace=trace, scheduler=scheduler, events=events, outputs=outputs, is_strict=is_strict)

    def serve(self, workload: Workload, *, abort_delay: int | None = None) -> Iterator[None]:
        """Submit a request before each of the first steps, then step to the end; yields after every step.

        With ``abort_delay`` every second request is aborted that many steps after it came.
        """
        asked = [(request.prompt, request.max_new_tokens) for request in self.requests.values()]
        most_steps = _most_steps([*asked, *workload])
        num_calls = len(workload) + (abort_delay or 0)
        for number in range(most_steps):
            if number < len(workload):
                self.submit(*workload[number])
            if abort_delay is not None and (number - abort_delay) % 2 == 0 and abort_delay <= number < num_calls:
                self.abort(f"r{number - abort_delay + 1}")
            if self.scheduler.has_work:
                self.step()
            elif number >= num_calls:
                return
            yield
        self.trace.require(
            not self.scheduler.has_work, f"no work left after {most_steps} steps", f"there is: {self.unended_rids}"
        )

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> _Asked:
        request = _Asked(rid=f"r{len(self.requests) + 1}", prompt=tuple(prompt), max_new_tokens=max_new_tokens)
        self.requests[request.rid] = request
        self.trace.call(
            f"submitted {len(prompt)} tokens, {max_new_tokens} to generate, as {request.rid}",
            lambda: self.scheduler.submit(request.rid, request.prompt, max_new_tokens),
        )
        return request

    def abort(self, rid: str) -> None:
        request = self.requests.get(rid)
        if request is not None and request.finish_reason is None:
            request.aborted_at = self.num_steps
        self.trace.call(f"aborted {rid}", lambda: self.scheduler.abort(rid))

    def step(self) -> None:
        self.trace.call(f"step {self.num_steps}", self.scheduler.step)
        self.num_steps += 1
        self.take_news()

    def take_news(self) -> None:
        """Hear what was told since the last time."""
        for delta in self.outputs.take_news():
            self._hear(delta)

    def _hear(self, delta: OutputDelta) -> None:
        request = self.requests.get(delta.rid)
        if self.is_strict:
            self._judge(request, delta)
        if request is not None:
            request.token_ids += delta.output.token_ids
            request.finish_reason = request.finish_reason or delta.finish_reason

    def _judge(self, request: _Asked | None, delta: OutputDelta) -> None:
        """Compare one request's news with what must come next."""
        trace, tokens, rid = self.trace, delta.output.token_ids, delta.rid
        trace.note(f"{rid} is told {len(tokens)} tokens from {delta.start} on, end: {delta.finish_reason}")
        if request is None:
            raise trace.failure("news of a request that was submitted", rid)
        trace.expect(None, request.finish_reason, f"nothing after the end of {rid}, which had")
        num_told = len(request.token_ids)
        trace.expect(num_told, delta.start, f"the place of the first new token of {rid}")
        trace.expect(request.expected(len(tokens)), tokens, f"the tokens of {rid} from {num_told} on")
        num_told += len(tokens)
        trace.expect(num_told, delta.num_output_tokens, f"how many tokens {rid} has")
        is_complete = num_told == request.max_new_tokens
        if is_complete and delta.finish_reason is not None:
            trace.expect(str(FinishReason.LENGTH), str(delta.finish_reason), f"the end of {rid}, which has all tokens")
        elif delta.finish_reason is not None:
            goal = None if request.aborted_at is None else str(FinishReason.ABORT)
            missing = f"{num_told} of {request.max_new_tokens} tokens"
            trace.expect(goal, str(delta.finish_reason), f"the end of {rid} after {missing}")

    def expect_aborts_told(self) -> None:
        """Fail when an abort is older than it may be and its request has not ended."""
        for request in self.requests.values():
            if request.finish_reason is None and request.aborted_at is not None:
                age = self.num_steps - request.aborted_at
                self.trace.require(
                    age < _MAX_ABORT_STEPS, f"an end of {request.rid} {_MAX_ABORT_STEPS} steps after its abort", "none"
                )

    def expect_all_ended(self) -> None:
        """Fail when somebody still waits for an end."""
        self.trace.expect([], self.unended_rids, "requests that were never told their end")

    def expect_nothing_held(self) -> None:
        """Fail when requests or tokens are counted after all work has ended."""
        load = self.scheduler.get_loads()
        left = (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens, load.num_pending_tokens)
        self.trace.expect((0, 0, 0, 0), left, "(running, waiting) requests, (used, pending) tokens")

    @property
    def unended_rids(self) -> list[str]:
        return [request.rid for request in _unended(self.requests.values())]


def _unended(requests: Iterable[_Asked]) -> list[_Asked]:
    return [request for request in requests if request.finish_reason is None]


def _most_steps(workload: Sequence[tuple[tuple[int, ...], int]]) -> int:
    """Steps in which any scheduler is done: one token per step, and everything four times, for retractions."""
    return 10 + 4 * sum(len(prompt) + new_tokens for prompt, new_tokens in workload)


SCHEDULER_CHECKS: tuple[Callable[[OpenScheduler, Workload], None], ...] = (
    check_every_request_is_answered,
    check_all_work_ends,
    check_aborted_requests_end,
    check_no_request_starves,
    check_events_match_the_cache,
    check_load_is_consistent,
    check_equal_work_gives_equal_events,
)
"""All of them; ``strategies.workloads`` makes workloads to run them on, besides the fixed one."""

POOL_STREAM_CHECKS: tuple[Callable[[OpenPooledScheduler, Workload], None], ...] = (check_stream_matches_the_pool,)
"""For a scheduler that is a ``HeldBlocksSource`` too, whatever tiers it has."""

POOL_INVARIANT_CHECKS: tuple[Callable[[OpenAuditedScheduler, Workload], None], ...] = (
    check_pool_accounting,
    check_pools_are_released,
)
"""For a scheduler whose pools are ``AuditedPool``; the rules are those of ``integrity.census``."""
