"""Requests that wait in rooms before they are batched, and requests with time limits, in the reference scheduler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kit.waiting_room import ListedRoom

from scheduler_components import ConfigError, ParallelState
from scheduler_components.agreement import ParallelGroups
from scheduler_components.errors import QueueFullError
from scheduler_components.quiesce import QuiesceState
from scheduler_components.scheduling.composition import Clocks, SchedulerSinks
from scheduler_components.testing import ListOutputSink
from scheduler_components.testing.thread_ranks import run_ranks
from scheduler_components.values import (
    BeginWeightUpdate,
    ContinueGeneration,
    ControlReply,
    ControlRequest,
    EndWeightUpdate,
    FinishReason,
    FlushCache,
    PauseGeneration,
    PauseMode,
    RequestState,
    RequestTimeouts,
)
from scheduler_components.weight_updater import NullWeightStore
from scheduler_engine.device.device import SimulatedDevice
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler


def wants(request: EngineRequest) -> bool:
    return request.rid.startswith("w")


class AnyWeights(NullWeightStore):
    """A store that accepts every update."""

    def begin(self, weight_version: str) -> None:
        pass


class RoomedScheduler:
    """A scheduler with a room in which requests with a w in their id wait."""

    def __init__(
        self,
        parallel: ParallelState | None = None,
        groups: ParallelGroups | None = None,
        *,
        clock: Callable[[], float] | None = None,
        policy: str = "fcfs",
    ) -> None:
        self.now_s = 0.0
        self.room = ListedRoom[EngineRequest](wants=wants)
        self.outputs = ListOutputSink()
        state = QuiesceState()
        self.scheduler = Scheduler.compose(
            SchedulerConfig(page_size=4, kv_tokens=256, schedule_policy=policy),
            parallel or ParallelState.trivial(),
            SimulatedDevice(clock=lambda: 0.0, sleep=lambda _: None),
            sinks=SchedulerSinks(outputs=self.outputs),
            clocks=Clocks(monotonic=clock or (lambda: self.now_s)),
            quiesce=state,
            rooms=[self.room],
            groups=groups,
        )
        self.quiesce = make_quiesce_stepper(
            self.scheduler, state, groups=groups or ParallelGroups(), weights=AnyWeights()
        )

    def submit(self, rid: str, timeouts: RequestTimeouts | None = None, max_new: int = 3) -> EngineRequest:
        limits = SamplingLimits(max_new_tokens=max_new, ignore_eos=True)
        request = EngineRequest(rid, range(10), limits, timeouts=timeouts or RequestTimeouts())
        self.scheduler.submit(request)
        return request

    def drain(self) -> list[str]:
        """Step until nothing may run. Return the ids of the requests that ended."""
        for _ in range(100):
            if not self.scheduler.has_work:
                break
            self.scheduler.step()
        return [delta.rid for delta in self.outputs.deltas if delta.finish_reason is not None]

    def execute(self, request: ControlRequest, *, steps: int = 5) -> ControlReply | None:
        self.quiesce.enqueue(1, request)
        for _ in range(steps):
            reply = self.quiesce.step()
            self.scheduler.step()
            if reply is not None:
                return reply
        return None


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_request_in_a_room_counts_as_waiting_and_holds_up_no_other(policy: str) -> None:
    it = RoomedScheduler(policy=policy)
    held, free = it.submit("w"), it.submit("a")
    assert it.drain() == ["a"]
    assert (held.state, free.state) == (RequestState.WAITING, RequestState.FINISHED)
    load = it.scheduler.load.get_loads()
    assert (load.num_waiting_reqs, load.num_running_reqs, load.num_waiting_uncached_tokens > 0) == (1, 0, True)
    assert not it.scheduler.has_work
    assert 0 < it.scheduler.next_step_in_s < 0.1
    it.room.report_ready(["w"])
    it.scheduler.step()
    assert held.state is RequestState.RUNNING
    assert it.drain() == ["a", "w"]
    assert it.scheduler.next_step_in_s == float("inf")
    assert it.room.ended == ["a", "w"]
    assert it.scheduler.batcher.num_replaced_policies == 0


def test_a_released_request_is_served_in_the_order_of_its_arrival() -> None:
    it = RoomedScheduler()
    first = it.submit("w")
    it.scheduler.step()
    second = it.submit("a")
    it.room.report_ready(["w"])
    it.scheduler.step()
    assert [request.rid for request in it.scheduler.queues.running] == ["w", "a"]
    assert first.arrival < second.arrival


def test_a_room_that_fails_ends_the_request_with_its_reason() -> None:
    it = RoomedScheduler()
    request = it.submit("w")
    it.room.queue.on_failed("w", "no such schema")
    it.scheduler.step()
    [delta] = it.outputs.deltas
    assert (delta.finish_reason, delta.output.problem) == (FinishReason.REFUSED, "grammar: no such schema")
    assert request.state is RequestState.FINISHED
    assert not it.scheduler.queues


def test_a_room_that_expires_ends_the_request_with_its_limit() -> None:
    it = RoomedScheduler()
    it.submit("w")
    it.scheduler.step()
    it.now_s = 100.0
    it.scheduler.step()
    [delta] = it.outputs.deltas
    assert delta.finish_reason == FinishReason.QUEUE_TIMEOUT
    assert delta.output.problem == "grammar: waited longer than 100 s"


def test_an_aborted_request_leaves_its_room() -> None:
    it = RoomedScheduler()
    it.submit("w")
    assert it.scheduler.abort("w")
    assert not it.scheduler.abort("w")
    assert not len(it.scheduler.waiting.rooms)
    assert (it.scheduler.queues.num_held, it.scheduler.queues.num_admissible) == (0, 0)
    it.room.report_ready(["w"])
    assert it.drain() == ["w"]
    it.submit("w")  # the id is free again
    assert len(it.scheduler.waiting.rooms) == 1


def test_a_refused_request_changes_nothing() -> None:
    it = RoomedScheduler()
    it.room.queue.max_waiting = 1
    it.submit("w1")
    digest = it.scheduler.state_digest
    with pytest.raises(QueueFullError, match="try again later"):
        it.submit("w2")

    def refuse(request: EngineRequest) -> bool:
        raise ConfigError("json_schema", request.rid, "is no schema", "give one")

    it.room.wants = refuse
    with pytest.raises(ConfigError, match="is no schema"):
        it.submit("w3")
    assert len(it.scheduler.queues) == 1
    assert it.scheduler.state_digest == digest


def test_a_pause_with_abort_ends_the_requests_in_rooms() -> None:
    it = RoomedScheduler()
    it.submit("w")
    it.submit("a")
    reply = it.execute(PauseGeneration(PauseMode.ABORT))
    assert reply is not None and reply.num_requests == 2
    assert not len(it.scheduler.waiting.rooms) and not it.scheduler.queues
    assert sorted(delta.rid for delta in it.outputs.deltas) == ["a", "w"]


def test_a_paused_replica_lets_requests_out_of_rooms_and_computes_none() -> None:
    it = RoomedScheduler()
    request = it.submit("w")
    running = it.submit("a")
    it.scheduler.step()
    reply = it.execute(PauseGeneration(PauseMode.RETRACT))
    assert reply is not None and reply.num_requests == 1
    it.room.report_ready(["w"])
    it.scheduler.step()
    assert not len(it.scheduler.waiting.rooms)
    assert request.state is running.state is RequestState.WAITING
    assert not it.scheduler.has_work


def test_a_flush_waits_for_requests_in_rooms_as_for_all_that_wait() -> None:
    it = RoomedScheduler()
    it.submit("w")
    assert it.execute(FlushCache(deadline_s=1000.0)) is None
    it.room.report_ready(["w"])
    for _ in range(10):
        reply = it.quiesce.step()
        if reply is not None:
            break
        it.scheduler.step()
    assert reply is not None and not reply.problem


def test_a_request_in_a_room_survives_a_weight_update() -> None:
    it = RoomedScheduler()
    request = it.submit("w")
    assert it.execute(PauseGeneration(PauseMode.RETRACT)) is not None
    for change in (BeginWeightUpdate("v2", 1000.0), EndWeightUpdate(0, 1000.0)):
        reply = it.execute(change)
        assert reply is not None and not reply.problem
    assert len(it.scheduler.waiting.rooms) == 1
    it.execute(ContinueGeneration())
    it.room.report_ready(["w"])
    it.scheduler.step()
    assert it.drain() == ["w"]
    assert request.num_output_tokens == 3


def test_a_retracted_request_does_not_enter_its_room_again() -> None:
    it = RoomedScheduler()
    request = it.submit("w")
    it.room.report_ready(["w"])
    it.scheduler.step()
    assert it.scheduler.retract_all() == 1
    assert it.drain() == ["w"]
    assert (request.num_retractions, it.room.entered) == (1, ["w"])


def test_a_policy_that_fails_while_requests_are_held_is_replaced_without_them() -> None:
    it = RoomedScheduler(policy="priority")
    held = it.submit("w")
    it.submit("a")
    it.scheduler.batcher.policy.discard(next(iter(r for r in it.scheduler.queues if r.rid == "a")))
    it.scheduler.step()
    assert it.scheduler.batcher.num_replaced_policies == 1
    assert it.drain() == ["a"]
    it.room.report_ready(["w"])
    assert held.state is RequestState.WAITING
    it.scheduler.step()
    assert it.drain() == ["a", "w"]


def test_ranks_that_are_ready_at_different_moments_make_the_same_batches() -> None:
    """Rank 1 is ready before rank 0 for one request, and after it for another. Its clock is hours ahead."""

    def serve(groups: ParallelGroups) -> list[tuple[int, str]]:
        parallel = ParallelState.from_tp_rank(groups.rank, tp_size=2)
        it = RoomedScheduler(parallel, groups, clock=lambda: 10_000.0 * groups.rank)
        for rid in ("w1", "w2", "a"):
            it.submit(rid)
        running = []
        for step in range(12):
            if step == 2 + 3 * groups.rank:
                it.room.report_ready(["w1"])
            if step == 4 - 2 * groups.rank:
                it.room.report_ready(["w2"])
            it.scheduler.step()
            running.append((it.scheduler.state_digest, ",".join(each.rid for each in it.scheduler.queues.running)))
        assert not it.scheduler.queues
        return running

    first, second = run_ranks(ParallelState.from_tp_rank(0, tp_size=2), serve)
    assert first == second
    assert [batch for _, batch in first] == ["a", "a", "", "", "w2", "w1,w2", "w1", "", "", "", "", ""]


def test_a_queue_limit_ends_a_request_in_a_room_and_one_that_is_not_admitted() -> None:
    it = RoomedScheduler()
    it.submit("w", RequestTimeouts(queue_s=2.0))
    it.execute(PauseGeneration(PauseMode.RETRACT))
    it.submit("paused", RequestTimeouts(queue_s=3.0))
    it.submit("patient")
    it.scheduler.step()
    assert not it.scheduler.has_work
    assert it.scheduler.next_step_in_s < 0.1  # a room is polled
    it.now_s = 2.0
    it.scheduler.step()
    assert it.scheduler.next_step_in_s == pytest.approx(1.0)  # then only the deadline is due, although nothing may run
    it.now_s = 3.5
    assert it.scheduler.next_step_in_s == 0.0  # overdue, and not negative: to a poll that means for ever
    it.scheduler.step()
    assert [(delta.rid, delta.finish_reason) for delta in it.outputs.deltas] == [
        ("w", FinishReason.QUEUE_TIMEOUT),
        ("paused", FinishReason.QUEUE_TIMEOUT),
    ]
    assert it.outputs.deltas[0].output.problem.startswith("queue_timeout=2: ")
    assert it.scheduler.next_step_in_s == float("inf")
    assert (len(it.scheduler.waiting.rooms), len(it.scheduler.queues)) == (0, 1)


def test_a_total_limit_ends_a_running_request_with_its_tokens_and_frees_its_pages() -> None:
    it = RoomedScheduler()
    request = it.submit("a", RequestTimeouts(queue_s=0.5, total_s=2.0), max_new=50)
    it.scheduler.step()
    it.now_s = 1.0
    it.scheduler.step()
    it.now_s = 2.0
    it.scheduler.step()
    last = it.outputs.deltas[-1]
    assert (last.finish_reason, last.num_output_tokens) == (FinishReason.TIMEOUT, 2)
    assert last.output.problem.startswith("timeout=2: ")
    assert request.state is RequestState.FINISHED
    assert not it.scheduler.cache.used_tokens
    assert len(it.scheduler.waiting.deadlines) == 0
    it.now_s = 100.0
    assert it.drain() == ["a"]


def test_a_request_that_ends_in_time_has_no_limit_any_more() -> None:
    it = RoomedScheduler()
    it.submit("a", RequestTimeouts(queue_s=1.0, total_s=2.0))
    assert it.drain() == ["a"]
    assert len(it.scheduler.waiting.deadlines) == 0
    assert it.scheduler.next_step_in_s == float("inf")


def test_the_limits_of_the_configuration_are_those_of_requests_without_their_own() -> None:
    config = SchedulerConfig(queue_timeout_s=1.5, timeout_s=30.0)
    assert config.timeouts == RequestTimeouts(1.5, 30.0)
    with pytest.raises(ConfigError, match="queue_timeout_s"):
        SchedulerConfig(queue_timeout_s=-1.0)


def test_ranks_whose_clocks_differ_end_a_request_in_the_same_step() -> None:
    """The clock of rank 1 is hours ahead and ten times as fast. Only that of rank 0 counts."""

    def serve(groups: ParallelGroups) -> list[tuple[int, int]]:
        parallel = ParallelState.from_tp_rank(groups.rank, tp_size=2)
        now_s = [10_000.0 * groups.rank]
        it = RoomedScheduler(parallel, groups, clock=lambda: now_s[0])
        it.submit("a", RequestTimeouts(total_s=4.0), max_new=30)
        it.submit("w", RequestTimeouts(queue_s=3.0))
        seen = []
        for _ in range(8):
            it.scheduler.step()
            now_s[0] += 1.0 if not groups.rank else 10.0
            seen.append((it.scheduler.state_digest, len(it.scheduler.queues)))
        return seen

    first, second = run_ranks(ParallelState.from_tp_rank(0, tp_size=2), serve)
    assert first == second
    assert [num_open for _, num_open in first] == [2, 2, 2, 1, 0, 0, 0, 0]
