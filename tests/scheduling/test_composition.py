"""A scheduler of a few lines over the builders serves its requests, reports them, and is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from kit.waiting_room import ListedRoom

from scheduler_components import ConfigError, LiveStats, LoadInquirer, ParallelState, RadixCache
from scheduler_components.agreement.decision_log import DecisionLog
from scheduler_components.batcher import Batcher
from scheduler_components.cache import RadixNode
from scheduler_components.checks.pool_stats_observer import RadixCachePool
from scheduler_components.events import BlockStored
from scheduler_components.invariant_checker import CheckPolicy
from scheduler_components.scheduling.admission_budget import BatchLimits
from scheduler_components.scheduling.composition import (
    SchedulerSinks,
    WaitingPath,
    compose_batcher,
    compose_checks,
    compose_reports,
    note_step,
)
from scheduler_components.scheduling.request import OutputLength, Request
from scheduler_components.scheduling.request_kv_cache import RequestKvCache
from scheduler_components.testing import ListEventSink
from scheduler_components.testing.fakes import ListSink
from scheduler_components.values import FinishReason, RequestTimeouts, SchedulerCounters, SchedulerStats
from scheduler_components.waiting.agreed_queue import WaitingRooms
from scheduler_components.waiting.held_request import RequestGrammar
from scheduler_components.waiting.request_deadlines import RequestDeadlines

LIMITS = BatchLimits(max_running_requests=2, max_prefill_tokens=16, chunk_tokens=8)


class HeldByRoom(Request[RadixNode]):
    """A request that rooms can prepare."""

    grammar: RequestGrammar | None = None
    grammar_key = None


def a_request(rid: str, prompt: int = 9, new: int = 3, queue_s: float | None = None) -> HeldByRoom:
    prompt_ids = range(100 * int(rid[1:]), 100 * int(rid[1:]) + prompt)
    return HeldByRoom(rid, list(prompt_ids), OutputLength(new), timeouts=RequestTimeouts(queue_s=queue_s))


@dataclass
class TinyScheduler:
    """Serves requests with a model whose next token is the position."""

    leaks: bool = False
    events: ListEventSink = field(default_factory=ListEventSink)
    metrics_sink: ListSink[SchedulerStats] = field(default_factory=ListSink)
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)

    def __post_init__(self) -> None:
        self.cache = RadixCache(page_size=4, capacity_tokens=64, record=True)
        self.kv_cache = RequestKvCache[RadixNode](cache=self.cache, counters=self.counters)
        self.batcher: Batcher[HeldByRoom] = compose_batcher(self.kv_cache, LIMITS)
        pool = RadixCachePool(cache=self.cache, requests=self.batcher.queues)
        policy = CheckPolicy(count_every_steps=1, full_check_every_steps=1)
        self.checks = compose_checks(pool, self.cache, policy, follows_events=True)
        load = LoadInquirer(parallel=ParallelState.trivial(), queues=self.batcher.queues, pool=self.cache)
        sinks = SchedulerSinks(events=self.events, metrics=self.metrics_sink)
        self.kv_events, self.metrics = compose_reports(
            load, self.checks.events, sinks, {"counters": LiveStats(self.counters), "integrity": self.checks.checker}
        )

    def submit(self, request: HeldByRoom) -> None:
        self.kv_cache.start(request)
        self.batcher.add(request)

    def step(self) -> None:
        batch = self.batcher.next_batch()
        for chunk in batch.chunks:
            request = chunk.request
            request.num_computed_tokens = chunk.end
            if chunk.end == len(request.token_ids):
                request.token_ids.append(chunk.end)
            if not request.num_output_tokens_left:
                self.batcher.finish(request, FinishReason.LENGTH)
                if self.leaks:
                    request.pages.pop()
                self.kv_cache.free(request)
        self.batcher.on_results(batch)
        self.kv_events.publish_kv_events()
        self.metrics.emit()
        self.checks.checker.after_step(is_idle=not self.batcher.has_work)

    def serve(self, num_requests: int) -> list[HeldByRoom]:
        requests = [a_request(f"r{number}") for number in range(num_requests)]
        for request in requests:
            self.submit(request)
        while self.batcher.has_work:
            self.step()
        return requests


def test_every_request_is_served_reported_and_checked() -> None:
    scheduler = TinyScheduler()
    requests = scheduler.serve(5)
    assert [each.finish_reason for each in requests] == [FinishReason.LENGTH] * 5
    assert [each.num_output_tokens for each in requests] == [3] * 5
    stored = {
        block
        for batch in scheduler.events.batches
        for event in batch.events
        if isinstance(event, BlockStored)
        for block in event.block_hashes
    }
    assert stored == set(scheduler.cache.block_hashes())
    last = scheduler.metrics_sink.sent[-1]
    assert (last.load.num_running_reqs, last.load.num_waiting_reqs, last.load.num_used_tokens) == (0, 0, 0)
    assert last.publisher is not None and last.publisher.batches_sent == len(scheduler.events.batches) > 0
    integrity = scheduler.checks.checker.stats()
    assert integrity.checks > 0 and not integrity.problems


def test_a_page_that_is_lost_is_found() -> None:
    scheduler = TinyScheduler(leaks=True)
    scheduler.serve(1)
    assert scheduler.checks.checker.stats().problems > 0


def test_unknown_policies_are_refused() -> None:
    kv_cache = RequestKvCache[RadixNode](cache=RadixCache(page_size=4, capacity_tokens=64))
    composes: list[Callable[[], Batcher[HeldByRoom]]] = [
        lambda: compose_batcher(kv_cache, LIMITS, schedule_policy="best"),
        lambda: compose_batcher(kv_cache, LIMITS, preemption_policy="worst"),
    ]
    for compose in composes:
        with pytest.raises(ConfigError, match=r"best|worst"):
            compose()


def test_a_request_waits_in_its_room_and_ends_with_the_reason_of_the_room_or_of_its_limit() -> None:
    scheduler, room = TinyScheduler(), ListedRoom[HeldByRoom]()
    waiting = WaitingPath(
        batcher=scheduler.batcher, rooms=WaitingRooms(rooms=[room]), deadlines=RequestDeadlines[HeldByRoom]()
    )
    served, failed, late = a_request("r0"), a_request("r1"), a_request("r2", queue_s=5.0)
    for request in (served, failed):
        waiting.add(request, must_wait=waiting.rooms.enter(request))
    waiting.add(late, must_wait=False)
    assert list(waiting.pop_ended(0.0)) == []
    assert scheduler.batcher.queues.num_held == 2
    room.queue.depart("r0", "ready")
    room.queue.depart("r1", "failed", "no such grammar")
    [(request, reason, problem)] = waiting.pop_ended(1.0)
    assert (request, reason) == (failed, FinishReason.REFUSED) and "no such grammar" in problem
    assert scheduler.batcher.queues.num_admissible == 2
    [(request, reason, _)] = waiting.pop_ended(6.0)
    assert (request, reason) == (late, FinishReason.QUEUE_TIMEOUT)
    for request in (served, failed, late):
        waiting.finish(request, FinishReason.ABORT)
    assert not len(waiting.rooms) and not len(waiting.deadlines) and not len(scheduler.batcher.queues)


def test_the_note_of_a_step_shows_its_tokens_and_the_pages_that_it_left() -> None:
    def digest(tokens: list[int], num_operations: int = 0, shapes: tuple[int, ...] = ()) -> int:
        log = DecisionLog()
        requests = [HeldByRoom(f"r{token}", [token], OutputLength(1)) for token in tokens]

        cache = RadixCache(page_size=4, capacity_tokens=64)
        note_step(log, len(tokens), requests, cache, (num_operations, 7), shapes)
        return log.tip

    assert digest([1, 2]) == digest([1, 2])
    assert len({digest([1, 2]), digest([1, 3]), digest([1, 2], 1), digest([1, 2], 0, (5,))}) == 4
