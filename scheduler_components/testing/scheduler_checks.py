"""Checks of every scheduler. Run each of ``SCHEDULER_CHECKS`` on a scheduler of your own.

A check takes a function that opens a scheduler over two sinks. It serves a workload of prompts that share prefixes and
together overfill the pool, and compares the outputs and events with the expected ones. Give the scheduler a pool of
``interfaces.MIN_POOL_TOKENS``, chunks of about 16 tokens if it prefills in chunks, and a model that takes no time and
answers ``next_token``: ``PagedModel``, or any other that does.

Outputs name a request by its id. The end of a request is sent once, after all its tokens, and no output follows it. No
check requires a scheduler to retract: one that reserves the pages of a whole request passes too.

``POOL_STREAM_CHECKS`` take a scheduler that can also read its pool (``HeldBlocksSource``). They name the batch that
differs. ``POOL_INVARIANT_CHECKS`` take a scheduler with auditable pools (``AuditedPool``). They name the pages and
their owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import msgspec

from scheduler_components.checks.pool_stats_observer import AuditedPool
from scheduler_components.events import BlockStored
from scheduler_components.invariant_checker import find_pool_violations
from scheduler_components.ports import KvEventSink, OutputSink
from scheduler_components.testing.event_ledger import EventLedger
from scheduler_components.testing.interfaces import (
    MIN_POOL_TOKENS,
    AuditedScheduler,
    PooledScheduler,
    ServingScheduler,
    Workload,
)
from scheduler_components.testing.pool_verifier import PoolVerifier
from scheduler_components.testing.scheduler_session import SchedulerSession, SubmittedRequest, max_steps, unfinished
from scheduler_components.values import KvPoolSnapshot, LoadSnapshot

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
_OTHER = tuple(range(900, 932))
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
    (_SYSTEM + _OTHER + (1,), 1),
    (_OTHER + _SYSTEM + (1,), 1),
    ((_SYSTEM[0] + 2**16, *_SYSTEM[1:], 1), 1),
    ((_SYSTEM[1], _SYSTEM[0], *_SYSTEM[2:], 1), 1),
    ((*_SYSTEM[:-1], 33, 1), 1),
    (_SYSTEM, 4),
)
"""Prompts of 3 to 82 tokens, most with one system prompt. Two are equal, and one fills no page of a common size. Any
two of the four long answers overfill ``MIN_POOL_TOKENS``, and each of them fits alone.

Two prompts have the same pages of 32 tokens or less in another order: a block hash without its parent confuses them.
Three differ from the system prompt in the upper half of the first token, in the order of two tokens, and in the last
token of a page: a hash that does not cover all of a page's tokens confuses them.
"""

_REFILL: Workload = tuple(
    (tuple(range(first, first + size)), 1) for first, size in ((1000, 224), (2000, 32), (1000, 224))
)
"""The first two fill the pool. To compute the last page of the third again, a cache may evict that page itself."""

_ABORT_DELAYS = (
    0,
    1,
    4,
    40,
)  # Steps from arrival to abort: it waits, is in prefill, is in decode, or has ended.
_ROUNDING = 0.01  # SGLang reports token_usage with two digits.
_MAX_SLOTS = 64  # With more slots the pool fills up before the slots do.


def check_every_request_is_answered(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Every request receives all its tokens once and in order, then one end, and nothing after it.

    Then a client continues a conversation, so that the next prompt contains generated tokens.
    """
    session = SchedulerSession.open(
        "Every request ends once, with all its tokens in order", open_scheduler, is_strict=True
    )
    for _ in session.serve(workload):
        pass
    for next_turn in (_whole_pages_turn, _last_turn):
        for _ in session.serve(next_turn(session)):
            pass
    session.expect_all_finished()


def _whole_pages_turn(session: SchedulerSession[ServingScheduler]) -> Workload:
    """Continue the shortest request with an answer that ends with a page, of any size that divides 32."""
    requests = session.requests.values()
    shortest = min(requests, key=lambda each: len(each.prompt) + len(each.token_ids), default=None)
    if shortest is None:
        return ()
    num_tokens = len(shortest.prompt) + len(shortest.token_ids) + 1
    return _next_turn(shortest, 32 - num_tokens % 32)


def _last_turn(session: SchedulerSession[ServingScheduler]) -> Workload:
    """Continue the last request: its prompt contains the generated tokens, which the cache may hold."""
    return tuple(turn for request in list(session.requests.values())[-1:] for turn in _next_turn(request))


def _next_turn(request: SubmittedRequest, num_new_tokens: int = 1) -> Workload:
    """Return a request that begins with the tokens of an earlier one; none if it does not fit into the pool."""
    prompt = (*request.prompt, *request.token_ids, 1)
    return ((prompt, num_new_tokens),) if len(prompt) + num_new_tokens <= MIN_POOL_TOKENS else ()


def check_all_work_ends(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """A bounded number of steps serves every request. Then no request runs or waits, and no token is held."""
    session = SchedulerSession.open("Every workload ends, and the scheduler holds nothing", open_scheduler)
    for _ in session.serve(workload):
        pass
    session.expect_nothing_held()


def check_aborted_requests_end(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """An abort ends its request soon in any phase and changes no other request. In the end nothing is held.

    Then the clients of the aborted requests ask again, with the tokens that they have.
    """
    for delay in _ABORT_DELAYS:
        title = f"Every second request ends when it is aborted {delay} steps after its arrival; the others are served"
        session = SchedulerSession.open(title, open_scheduler, is_strict=True)
        session.abort("never-came")
        for _ in session.serve(workload, abort_delay=delay):
            session.expect_aborts_finished()
        alone = session.submit(*workload[0])  # No other request gives the scheduler work.
        session.abort(alone.rid)
        session.abort(alone.rid)  # The end of the first abort is not sent yet.
        for _ in session.serve(()):
            session.expect_aborts_finished()
        session.expect_all_finished()
        aborted = [each for each in session.requests.values() if each.aborted_at is not None]
        for _ in session.serve(tuple(turn for request in aborted for turn in _next_turn(request))):
            pass
        session.expect_all_finished()
        session.expect_nothing_held()
    _check_aborts_free_slots(open_scheduler)


def _check_aborts_free_slots(open_scheduler: OpenScheduler) -> None:
    """Abort one running request per slot, one after the other; then serve the prefix that they shared.

    Each abort comes after the first token, which is the last one of a page of 32 tokens or less.
    """
    title = "A request that is aborted while it runs frees its slot, and caches only what was computed"
    session = SchedulerSession.open(title, open_scheduler, is_strict=True)
    for _ in range(max(1, min(session.scheduler.get_loads().max_running_requests, _MAX_SLOTS))):
        request = session.submit(_SYSTEM[:-1], 8)
        for _ in range(max_steps(((request.prompt, request.max_new_tokens),))):
            if not request.token_ids:
                session.step()
        session.abort(request.rid)
        for _ in session.serve(()):
            session.expect_aborts_finished()
    for _ in session.serve(_next_turn(request)):
        pass
    session.expect_all_finished()


def check_no_request_starves(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """A request ends in a bounded number of steps, although short requests with a cached prefix keep arriving."""
    session = SchedulerSession.open("No request starves while others keep arriving", open_scheduler)
    for _ in session.serve(((_SYSTEM, 1),)):
        pass  # Now the prefix of the newcomers is cached.
    num_newcomers = 2 * max(1, min(session.scheduler.get_loads().max_running_requests, _MAX_SLOTS))
    patient = [session.submit(prompt, new_tokens) for prompt, new_tokens in workload]
    newcomers: list[SubmittedRequest] = []
    limit = max_steps(workload)
    for _ in range(limit):
        while len(newcomers) < num_newcomers:
            newcomers.append(session.submit((*_SYSTEM, 10_000 + len(session.requests)), 2))
        session.step()
        patient, newcomers = unfinished(patient), unfinished(newcomers)
        if not patient:
            return
    rids = [request.rid for request in patient]
    session.trace.expect([], rids, f"requests that still wait after {limit} steps with newcomers")


def check_events_match_the_cache(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """After every step a reader of the events holds exactly the cache's blocks, and the events break no rule.

    The tokens of each block and its parents are the beginning of a request.
    """
    session = SchedulerSession.open("After every step a reader of the events holds the cache's blocks", open_scheduler)
    trace, batches = session.trace, session.events.batches
    ledger, num_applied = EventLedger(), 0
    for _ in chain(session.serve(workload), *(session.serve((each,)) for each in _REFILL)):
        events = [event for batch in batches[num_applied:] for event in batch.events]
        num_applied = len(batches)
        trace.expect([], ledger.apply_all(events), "broken rules of the wire")
        blocks = sorted(set(session.scheduler.block_hashes()))
        trace.expect(blocks, sorted(ledger.hashes()), "the cache's blocks, in a reader's view")
    trace.require(num_applied > 0 or workload is not WORKLOAD, "events of a workload that fills pages", "none")
    empty = [number for number, batch in enumerate(batches) if not batch.events]
    trace.expect([], empty, "batches without events")
    served = [(*request.prompt, *request.token_ids) for request in session.requests.values()]
    stored = {each for event in session.events.events if isinstance(event, BlockStored) for each in event.block_hashes}
    prefixes = sorted({ledger.prefix(block_hash) for block_hash in stored})
    foreign = [each for each in prefixes if all(tokens[: len(each)] != each for tokens in served)]
    trace.expect([], foreign, "prefixes in events with which no request begins")


def check_stream_matches_the_pool(open_scheduler: OpenPooledScheduler, workload: Workload = WORKLOAD) -> None:
    """After every step the pool holds on each tier exactly the blocks of the events; a failure names the batch."""
    session = SchedulerSession.open("After every step the events match the pool on each tier", open_scheduler)
    trace, batches = session.trace, session.events.batches
    verifier, num_applied = PoolVerifier(), 0
    for _ in session.serve(workload):
        for number, batch in enumerate(batches[num_applied:], start=num_applied):
            verifier.apply(number, batch.events)
        num_applied = len(batches)
        reading = KvPoolSnapshot(session.scheduler.held_blocks(), sequence=num_applied - 1)
        trace.require(bool(reading.blocks), "at least one place named by held_blocks()", "none")
        trace.expect([], [str(each) for each in verifier.compare(reading)], "differences between pool and stream")


def check_pool_accounting(open_scheduler: OpenAuditedScheduler, workload: Workload = WORKLOAD) -> None:
    """After every step, also with aborts, each page is in one place and each lock belongs to an owner."""
    for delay in (None, *_ABORT_DELAYS):
        session, pools = _open_audited("After every step each page of each pool is in one place", open_scheduler)
        for _ in session.serve(workload, abort_delay=delay):
            violations = [str(each) for pool in pools for each in find_pool_violations(pool)]
            session.trace.expect([], violations, "broken rules of the pools")


def check_pools_are_released(open_scheduler: OpenAuditedScheduler, workload: Workload = WORKLOAD) -> None:
    """After all work has ended, also by aborts, every page is free or cached and nothing is locked."""
    for delay in (None, *_ABORT_DELAYS):
        session, pools = _open_audited("After all work has ended, no request holds a page", open_scheduler)
        for _ in session.serve(workload, abort_delay=delay):
            pass
        for count in (pool.count() for pool in pools):
            left = (count.available + count.evictable, count.protected, count.uncached)
            session.trace.expect((count.total, 0, 0), left, f"(free or evictable, protected, uncached) of {count.name}")


def _open_audited(
    title: str, open_scheduler: OpenAuditedScheduler
) -> tuple[SchedulerSession[AuditedScheduler], Sequence[AuditedPool]]:
    session = SchedulerSession.open(title, open_scheduler)
    pools = session.scheduler.pools
    session.trace.require(bool(pools), "at least one pool", "none")
    return session, pools


def check_load_is_consistent(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Load reports have growing numbers and valid counts, and cover every request in flight with all its tokens."""
    session = SchedulerSession.open("Load reports are consistent after every step", open_scheduler)
    trace, scheduler = session.trace, session.scheduler
    load = scheduler.get_loads()
    for prompt, new_tokens in workload:
        before, _ = load, session.submit(prompt, new_tokens)
        load = scheduler.get_loads()
        counted = (load.num_waiting_reqs - before.num_waiting_reqs, load.num_pending_tokens - before.num_pending_tokens)
        trace.expect((1, len(prompt)), counted, "(requests, tokens) that a submission adds to the waiting ones")
        if scheduler.has_work:
            session.step()
        load = _check_load(session, load.sequence)
    for _ in session.serve(()):
        load = _check_load(session, load.sequence)


def _check_load(session: SchedulerSession[ServingScheduler], sequence: int) -> LoadSnapshot:
    trace, load = session.trace, session.scheduler.get_loads()
    trace.require(load.sequence > sequence, f"a sequence above {sequence}", load.sequence)
    counts = (load.num_running_reqs, load.num_waiting_reqs, load.num_pending_tokens, load.num_used_tokens)
    trace.require(min(counts) >= 0, "no negative count", load)
    trace.require(load.num_used_tokens <= load.max_total_num_tokens, "used tokens within capacity", load)
    trace.require(load.num_running_reqs <= load.max_running_requests, "no more running than there are slots", load)
    usage = load.num_used_tokens / max(1, load.max_total_num_tokens)
    trace.require(abs(load.token_usage - usage) <= _ROUNDING, f"a token_usage of {usage:.2f}", load)
    trace.require(load.num_waiting_uncached_tokens <= load.num_pending_tokens, "uncached within pending", load)
    trace.expect(load.num_used_tokens + load.num_pending_tokens, load.num_total_tokens, "used and pending tokens")
    num_requests = load.num_running_reqs + load.num_waiting_reqs
    trace.expect(session.scheduler.has_work, num_requests > 0, "whether requests run or wait (has_work)")
    in_flight = unfinished(session.requests.values())
    trace.expect(len(in_flight), num_requests, "requests that run or wait")
    num_without_tokens = sum(not request.token_ids for request in in_flight)
    trace.require(
        load.num_pending_tokens >= num_without_tokens,
        f"a pending token for each of the {num_without_tokens} requests that have no output token yet",
        load.num_pending_tokens,
    )
    lengths = sorted(len(request.prompt) + len(request.token_ids) for request in in_flight)
    fewest = sum(lengths[: load.num_waiting_reqs])  # A retracted request waits with its output.
    trace.require(
        load.num_pending_tokens >= fewest, f"at least {fewest} pending tokens of the waiting", load.num_pending_tokens
    )
    # Each token of a request is pending or has its KV held, except the last token, whose KV is not computed yet.
    most = max((len(request.prompt) + len(request.token_ids) - 1 for request in in_flight), default=0)
    trace.require(
        load.num_total_tokens >= most, f"at least {most} tokens pending or held for one request", load.num_total_tokens
    )
    return load


def check_equal_work_gives_equal_events(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Two schedulers with the same requests publish the same events: no decision depends on a clock or on chance.

    The ids of the second scheduler's requests have another hash and the same order, because Python's hashes of strings
    differ between processes.
    """
    session = SchedulerSession.open("Two schedulers with the same work publish the same events", open_scheduler)
    other = SchedulerSession.open(session.trace.title, open_scheduler, rid_prefix="q")  # Another hash, the same order.
    for _ in session.serve(workload):
        pass
    for _ in other.serve(workload):
        pass
    session.trace.expect(session.events.events, other.events.events, "events of the other scheduler")
    renamed = [msgspec.structs.replace(delta, rid=f"r{delta.rid[1:]}") for delta in other.outputs.deltas]
    session.trace.expect(session.outputs.deltas, renamed, "outputs of the other scheduler")


SCHEDULER_CHECKS: tuple[Callable[[OpenScheduler, Workload], None], ...] = (
    check_every_request_is_answered,
    check_all_work_ends,
    check_aborted_requests_end,
    check_no_request_starves,
    check_events_match_the_cache,
    check_load_is_consistent,
    check_equal_work_gives_equal_events,
)
"""All checks of a scheduler. ``strategies.workloads`` generates other workloads than the fixed one."""

POOL_STREAM_CHECKS: tuple[Callable[[OpenPooledScheduler, Workload], None], ...] = (check_stream_matches_the_pool,)
"""For a scheduler that is also a ``HeldBlocksSource``, with any tiers."""

POOL_INVARIANT_CHECKS: tuple[Callable[[OpenAuditedScheduler, Workload], None], ...] = (
    check_pool_accounting,
    check_pools_are_released,
)
"""For a scheduler with auditable pools; ``invariant_rules`` has the rules."""
