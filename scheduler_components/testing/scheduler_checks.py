"""What every scheduler must do: run each of ``SCHEDULER_CHECKS`` on a scheduler of your own.

A check takes a function that opens a scheduler which publishes to the sink that it is given, serves it a small
workload of prompts that share prefixes, and reads what it says of itself. Give it a pool of at least
``parts.MIN_POOL_TOKENS`` and a device that takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scheduler_components import KvEventSink
from scheduler_components.testing.fakes import ListEventSink
from scheduler_components.testing.ledger import EventLedger
from scheduler_components.testing.parts import ServingScheduler, Trace, Workload

__all__ = ["SCHEDULER_CHECKS", "WORKLOAD", "OpenScheduler"]

OpenScheduler = Callable[[KvEventSink], ServingScheduler]

_SYSTEM = tuple(range(1, 33))
WORKLOAD: Workload = (
    (_SYSTEM, 4),
    (_SYSTEM + tuple(range(100, 120)), 6),
    (_SYSTEM + tuple(range(100, 150)), 3),
    (tuple(range(200, 203)), 1),
    (_SYSTEM + tuple(range(300, 340)), 5),
    (tuple(range(400, 470)), 2),
    (_SYSTEM, 4),
)
"""Prompts of 3 to 82 tokens over one system prompt; two are equal, one fills no page of common sizes."""


def check_all_work_ends(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Every request is served in a bounded number of steps; then nothing runs, waits or is held."""
    trace, scheduler, _ = _begin("Every workload comes to an end, and nothing is left", open_scheduler)
    for _ in _serve(trace, scheduler, workload):
        pass
    load = trace.call("get_loads()", scheduler.get_loads)
    left = (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens, load.num_pending_tokens)
    trace.expect((0, 0, 0, 0), left, "(running, waiting) requests, (used, pending) tokens")


def check_events_are_the_cache(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """After every step, whoever applied the events holds exactly the cache's blocks, and no rule was broken."""
    trace, scheduler, sink = _begin("The events of every step leave a reader with the cache's blocks", open_scheduler)
    ledger, applied = EventLedger(), 0
    for _ in _serve(trace, scheduler, workload):
        events = sink.events[applied:]
        applied += len(events)
        trace.expect([], ledger.apply_all(events), "broken rules of the wire")
        blocks = sorted(set(scheduler.block_hashes()))
        trace.expect(blocks, sorted(ledger.hashes()), "the cache's blocks, in a reader's view")
    trace.require(applied > 0 or workload is not WORKLOAD, "events of a workload that fills pages", "none")
    empty = [number for number, batch in enumerate(sink.batches) if not batch.events]
    trace.expect([], empty, "batches without events")


def check_load_is_sound(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Load counts are never negative, never above capacity, and numbered; work shows in them."""
    trace, scheduler, _ = _begin("Load reports are sound after every step", open_scheduler)
    sequence = scheduler.get_loads().sequence
    for _ in _serve(trace, scheduler, workload):
        load = scheduler.get_loads()
        trace.require(load.sequence > sequence, f"a sequence above {sequence}", load.sequence)
        sequence = load.sequence
        counts = (load.num_running_reqs, load.num_waiting_reqs, load.num_pending_tokens, load.num_used_tokens)
        trace.require(min(counts) >= 0, "no negative count", load)
        trace.require(load.num_used_tokens <= load.max_total_num_tokens, "used tokens within capacity", load)
        trace.require(0.0 <= load.token_usage <= 1.0, "token_usage from 0 to 1", load)
        trace.require(load.num_waiting_uncached_tokens <= load.num_pending_tokens, "uncached within pending", load)
        busy = load.num_running_reqs + load.num_waiting_reqs > 0
        trace.expect(scheduler.has_work, busy, "whether requests run or wait")


def check_equal_work_gives_equal_events(open_scheduler: OpenScheduler, workload: Workload = WORKLOAD) -> None:
    """Ranks of a replica take the same requests and must publish the same events: neither clock nor chance decides."""
    trace, scheduler, sink = _begin("Two schedulers with the same work publish the same events", open_scheduler)
    other_sink = ListEventSink()
    other = open_scheduler(other_sink)
    for _ in _serve(trace, scheduler, workload):
        pass
    for _ in _serve(Trace(trace.title), other, workload):
        pass
    trace.expect(sink.events, other_sink.events, "the other's events")


def _begin(title: str, open_scheduler: OpenScheduler) -> tuple[Trace, ServingScheduler, ListEventSink]:
    trace, sink = Trace(title), ListEventSink()
    return trace, trace.call("opened a scheduler", lambda: open_scheduler(sink)), sink


def _serve(trace: Trace, scheduler: ServingScheduler, workload: Workload) -> Iterator[None]:
    """Submit a request before each of the first steps, then step to the end; yields after every step."""
    most_steps = 10 + sum(len(prompt) + new_tokens for prompt, new_tokens in workload)
    waiting = list(workload)
    for number in range(most_steps):
        if waiting:
            prompt, new_tokens = waiting.pop(0)
            trace.call(
                f"submitted {len(prompt)} tokens, {new_tokens} to generate",
                lambda prompt=prompt, new_tokens=new_tokens: scheduler.submit(prompt, new_tokens),  # type: ignore[misc]
            )
        elif not scheduler.has_work:
            return
        trace.call(f"step {number}", scheduler.step)
        yield
    trace.require(not scheduler.has_work, f"no work left after {most_steps} steps", "there is")


SCHEDULER_CHECKS: tuple[Callable[[OpenScheduler, Workload], None], ...] = (
    check_all_work_ends,
    check_events_are_the_cache,
    check_load_is_sound,
    check_equal_work_gives_equal_events,
)
"""All of them; ``strategies.workloads`` makes workloads to run them on, besides the fixed one."""
