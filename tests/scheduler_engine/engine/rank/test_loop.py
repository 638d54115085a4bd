"""The loop of a rank: leader and followers take the same steps, a divergence is detected, and the signal stops it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
import pytest
import zmq
from kit.waiting_room import ListedRoom

from scheduler_components import EventBatch, GaugePacer, LoadPublisher, ParallelState
from scheduler_components.agreement import ParallelGroups, Proposal
from scheduler_components.errors import LockstepError
from scheduler_components.internal_state import InternalState
from scheduler_components.kv_events import NullEventPublisher
from scheduler_components.profiler_manager import ProfilerManager
from scheduler_components.quiesce import QuiesceState
from scheduler_components.receiving.recv_skipper import RecvSkipper
from scheduler_components.receiving.zmq_input_relay import IdleSleeper, ZmqFollowerRelay, ZmqInputSource, ZmqLeaderRelay
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.scheduling.composition import SchedulerSinks
from scheduler_components.testing.fakes import ListSink
from scheduler_components.values import (
    FinishReason,
    LoadSnapshot,
    OutputDelta,
    PublisherStats,
    RelayedInput,
    RequestHints,
    SchedulerStats,
)
from scheduler_components.waiting.agreed_queue import WaitingRoom
from scheduler_engine.device.device import DeviceOutput, ScheduledBatch
from scheduler_engine.device.sampling import SamplingLimits
from scheduler_engine.engine.config import SchedulerConfig
from scheduler_engine.engine.messages import (
    FRONTEND_DISPATCHER,
    AbortRequest,
    CacheDump,
    DumpCache,
    LoadReport,
    RankCommand,
    RankHeartbeat,
    RankReport,
    RequestRefused,
    SubmitRequest,
    decode_outputs,
    decode_report,
    encode,
    pack_tokens,
    unpack_hashes,
)
from scheduler_engine.engine.rank.frontend_sinks import FrontendLoadSink, ZmqOutputSink, ZmqReportSender
from scheduler_engine.engine.rank.heartbeat import HeartbeatSender, StopPipe
from scheduler_engine.engine.rank.loop import CommandDecoder, Follower, Leader, RankWorker
from scheduler_engine.engine.rank.quiescable_scheduler import make_quiesce_stepper
from scheduler_engine.engine.rank.rpc_handler import RpcHandler
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.sockets

CONFIG = SchedulerConfig(page_size=4, kv_tokens=256)


class StopSignal:
    """A pipe whose end is closed to stop a rank, as when the parent process dies."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()
        self.given = False

    def give(self) -> None:
        if not self.given:
            self.given = True
            os.close(self._writer)

    def close(self) -> None:
        self.give()
        os.close(self.reader)


class Device:
    """A device without delay that stops the rank with its ``last`` batch."""

    def __init__(self, stop_signal: StopSignal, last: int) -> None:
        self.num_batches = 0
        self._stop_signal, self._last = stop_signal, last

    def launch(self, batch: ScheduledBatch) -> None:
        self.batch = batch
        self.num_batches += 1

    def wait(self) -> DeviceOutput:
        if self.num_batches == self._last:
            self._stop_signal.give()
        return DeviceOutput(tuple(chunk.end for chunk in self.batch.chunks))


class ReplicaSockets:
    """Sockets of one replica in one process."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._stop_signals: list[StopSignal] = []

    def pair(self, high_water_mark: int = 0) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A PUSH and the PULL that reads it."""
        push, pull = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        push.sndhwm = pull.rcvhwm = high_water_mark
        name = f"inproc://{len(self._sockets)}"
        self._sockets += (push, pull)
        pull.bind(name)
        push.connect(name)
        return push, pull

    def stop_signal(self) -> StopSignal:
        self._stop_signals.append(StopSignal())
        return self._stop_signals[-1]

    def close(self) -> None:
        self._context.destroy(linger=0)
        for stop_signal in self._stop_signals:
            stop_signal.close()


@pytest.fixture
def sockets() -> Iterator[ReplicaSockets]:
    opened = ReplicaSockets()
    yield opened
    opened.close()


class ExecutorRank:
    """One rank's executor and what it reports."""

    def __init__(
        self,
        sockets: ReplicaSockets,
        tp_rank: int,
        last_batch: int,
        *,
        output_room: int = 0,
        rooms: Sequence[WaitingRoom[EngineRequest]] = (),
    ) -> None:
        self.stop_signal = sockets.stop_signal()
        push, self._reports = sockets.pair()
        outputs, self.outputs = sockets.pair(output_room)
        parallel = ParallelState.from_tp_rank(tp_rank, tp_size=2)
        reports = ZmqReportSender(socket=push)
        self.stats: ListSink[SchedulerStats] = ListSink()
        sinks = SchedulerSinks(metrics=self.stats)
        if parallel.leads_replica:
            sinks.outputs = ZmqOutputSink(socket=outputs)
        state = QuiesceState()
        scheduler = Scheduler.compose(
            CONFIG, parallel, Device(self.stop_signal, last_batch), sinks=sinks, quiesce=state, rooms=rooms
        )
        quiesce = make_quiesce_stepper(scheduler, state, groups=ParallelGroups(rank=tp_rank))
        profiles = ProfilerManager()
        internal = InternalState(providers=(scheduler.settings, profiles))
        rpc = RpcHandler(state=internal, profiles=profiles, sessions=scheduler.sessions)
        self.worker = RankWorker(parallel=parallel, scheduler=scheduler, reports=reports, rpc=rpc, quiesce=quiesce)
        alive = RankHeartbeat(str(parallel), parallel.kv_stream_index)
        self.heartbeat = HeartbeatSender(alive=alive, reports=reports, stop=StopPipe(self.stop_signal.reader))
        self.load = ListSink()
        self.load_publisher = LoadPublisher(
            parallel=parallel, load=scheduler.load, sinks=(self.load, FrontendLoadSink(reports=reports))
        )

    def deltas(self) -> list[OutputDelta]:
        """Outputs that have arrived."""
        found: list[OutputDelta] = []
        while self.outputs.poll(0):
            found += decode_outputs(self.outputs.recv()).deltas
        return found

    def wait_for(self, kind: type[RankReport]) -> None:
        """Pass over reports up to the next of this kind."""
        while self._reports.poll(10_000):
            if isinstance(decode_report(self._reports.recv()), kind):
                return
        raise AssertionError(f"no {kind.__name__} came")

    def reports(self, kind: type[RankReport]) -> list[Any]:
        found = []
        while self._reports.poll(0):
            found.append(decode_report(self._reports.recv()))
        return [report for report in found if isinstance(report, kind)]


def submit(rid: str, num_tokens: int = 10, max_new_tokens: int = 3, ticket: int = 1) -> SubmitRequest:
    return SubmitRequest(rid, pack_tokens(range(num_tokens)), SamplingLimits(max_new_tokens=max_new_tokens), 1, ticket)


def lead(
    sockets: ReplicaSockets,
    rank: ExecutorRank,
    commands: list[RankCommand],
    followers: list[zmq.Socket[bytes]],
    *,
    recv_interval: int = 1,
) -> None:
    """Run a leader over ``commands``, all of which it receives before its first step."""
    push, pull = sockets.pair()
    for command in commands:
        push.send(encode(command))
    assert pull.poll(1000)
    receiver = RequestReceiver(
        rank="leader",
        reader=CommandDecoder(),
        source=ZmqInputSource(socket=pull),
        relay=ZmqLeaderRelay(followers=followers, wait_for=rank.heartbeat.wait),
        recv_skipper=RecvSkipper(recv_interval=recv_interval),
    )
    Leader(
        worker=rank.worker,
        receiver=receiver,
        sleeper=IdleSleeper([pull], [rank.stop_signal.reader]),
        heartbeat=rank.heartbeat,
        load_publisher=rank.load_publisher,
    ).run()


def follow(rank: ExecutorRank, steps: zmq.Socket[bytes], *, recv_interval: int = 1) -> None:
    """Run a follower of the leader at the other end of ``steps``."""
    receiver = RequestReceiver(
        rank=str(rank.worker.parallel),
        reader=CommandDecoder(),
        relay=ZmqFollowerRelay(steps=steps, wait_for=rank.heartbeat.wait),
        recv_skipper=RecvSkipper(recv_interval=recv_interval),
    )
    Follower(worker=rank.worker, receiver=receiver, heartbeat=rank.heartbeat).run()


@pytest.mark.parametrize("recv_interval", [1, 2])
def test_leader_and_follower_take_the_same_steps_and_only_the_leader_reports(
    sockets: ReplicaSockets, recv_interval: int
) -> None:
    leader, follower = ExecutorRank(sockets, 0, last_batch=3), ExecutorRank(sockets, 1, last_batch=3)
    steps_out, steps_in = sockets.pair()
    lead(sockets, leader, [submit("a"), submit("b")], [steps_out], recv_interval=recv_interval)
    follow(follower, steps_in, recv_interval=recv_interval)
    assert leader.worker.scheduler.state_digest == follower.worker.scheduler.state_digest
    outputs = leader.deltas()
    assert [delta.rid for delta in outputs if delta.finish_reason == FinishReason.LENGTH] == ["a", "b"]
    for rid in ("a", "b"):
        assert [token for delta in outputs if delta.rid == rid for token in delta.output.token_ids] == [10, 11, 12]
    assert follower.deltas() == []
    assert follower.reports(LoadReport) == []


def test_a_follower_with_another_state_stops_before_it_steps(sockets: ReplicaSockets) -> None:
    rank = ExecutorRank(sockets, 1, last_batch=1)
    steps_out, steps_in = sockets.pair()
    steps_out.send(msgspec.msgpack.encode(RelayedInput(1, 0xBAD, 0)))
    with pytest.raises(LockstepError, match=r"step 1: dp0/pp0/tp1.*00000bad"):
        follow(rank, steps_in)
    assert rank.worker.scheduler.num_steps == 0


def test_a_request_that_cannot_fit_is_refused_by_the_leader_alone(sockets: ReplicaSockets) -> None:
    for tp_rank, num_refusals in ((0, 1), (1, 0)):
        rank = ExecutorRank(sockets, tp_rank, last_batch=1)
        rank.worker.execute(1, (submit("long", num_tokens=300), submit("fits")))
        refusals = rank.reports(RequestRefused)
        assert len(refusals) == num_refusals
        assert all("the pool has 256" in refusal.reason for refusal in refusals)
        assert len(rank.worker.scheduler.queues) == 1


def test_each_rank_counts_what_it_refuses_by_the_reason(sockets: ReplicaSockets) -> None:
    for tp_rank in (0, 1):
        rank = ExecutorRank(sockets, tp_rank, last_batch=1)
        twice = (submit("a"), submit("a"))
        adapted = msgspec.structs.replace(submit("b"), hints=RequestHints(lora="nothing"))
        rank.worker.execute(1, (submit("long", num_tokens=300), *twice, adapted))
        counters = rank.worker.scheduler.request_metrics.stats()
        assert (counters.refused_too_long_total, counters.refused_invalid_total) == (1, 2)
        assert counters.num_requests_total == 1


def test_a_default_length_is_lowered_to_what_the_pool_has(sockets: ReplicaSockets) -> None:
    rank = ExecutorRank(sockets, 0, last_batch=1)
    asked = submit("a", num_tokens=250, max_new_tokens=100)
    rank.worker.execute(
        1, (msgspec.structs.replace(asked, limits=SamplingLimits(max_new_tokens=100, is_default=True)),)
    )
    request = rank.worker.scheduler.queues.find("a")
    assert request is not None
    assert request.limits.max_new_tokens == 7


def test_an_abort_is_streamed_and_one_of_an_unknown_request_is_ignored(sockets: ReplicaSockets) -> None:
    rank = ExecutorRank(sockets, 0, last_batch=9)
    rank.worker.execute(1, (submit("a"),))
    rank.deltas()
    rank.worker.execute(2, (AbortRequest("a"), AbortRequest("never seen")))
    assert [(delta.rid, delta.finish_reason) for delta in rank.deltas()] == [("a", FinishReason.ABORT)]


@pytest.mark.parametrize("tp_rank", [0, 1])
def test_every_rank_dumps_the_cache_as_it_is_after_the_step(sockets: ReplicaSockets, tp_rank: int) -> None:
    rank = ExecutorRank(sockets, tp_rank, last_batch=9)
    rank.worker.execute(1, (submit("a"), DumpCache(5)))
    (dump,) = rank.reports(CacheDump)
    assert (dump.dump_id, dump.rank, dump.step) == (5, tp_rank, 1)
    assert unpack_hashes(dump.block_hashes) == set(rank.worker.scheduler.cache.block_hashes())
    assert len(unpack_hashes(dump.block_hashes)) == 2
    assert dump.digest == rank.worker.scheduler.state_digest


class PublisherWithThread(NullEventPublisher):
    """A publisher whose thread uses the sockets: only a flush that waits finds the pending batches numbered."""

    num_published = num_numbered = num_idle_calls = 0

    def publish(self, events: EventBatch) -> None:
        self.num_published += 1

    def idle(self) -> None:
        self.num_idle_calls += 1
        if self.num_idle_calls % 3 == 0:  # by now the thread has sent them
            self.num_numbered = self.num_published

    def stats(self) -> PublisherStats:
        return PublisherStats(
            batches_pending=self.num_published - self.num_numbered, last_sequence=self.num_numbered - 1
        )


def test_a_dump_names_the_number_of_a_batch_that_another_thread_sends(sockets: ReplicaSockets) -> None:
    rank = ExecutorRank(sockets, 0, last_batch=9)
    rank.worker.scheduler.kv_events.sink = publisher = PublisherWithThread()
    rank.worker.execute(1, (submit("a"), DumpCache(5)))
    (dump,) = rank.reports(CacheDump)
    assert dump.last_sequence == publisher.num_published - 1 >= 0


def test_an_idle_leader_has_reported_that_it_is_idle(sockets: ReplicaSockets) -> None:
    rank = ExecutorRank(sockets, 0, last_batch=3)
    lead(sockets, rank, [submit("a", ticket=7)], [])
    newest = [rank.reports(LoadReport)[-1].load, rank.load.sent[-1]]
    assert [load.num_running_reqs for load in newest] == [0, 0]
    assert [load.dispatched_watermarks for load in newest] == [((FRONTEND_DISPATCHER, 7),)] * 2


class SlowRoom(ListedRoom[EngineRequest]):
    """Its thread has prepared everything at the third agreement after a request has entered."""

    num_agreements = 0

    def fill(self, proposal: Proposal) -> None:
        self.num_agreements += len(self.queue) > 0
        if self.num_agreements == 3:
            self.report_ready(self.entered)
        super().fill(proposal)


def test_an_idle_leader_takes_steps_while_a_request_waits_in_a_room(sockets: ReplicaSockets) -> None:
    rank = ExecutorRank(sockets, 0, last_batch=3, rooms=[SlowRoom()])
    lead(sockets, rank, [submit("a")], [])
    assert [delta.output.token_ids for delta in rank.deltas()] == [(10,), (11,), (12,)]
    assert rank.worker.scheduler.num_steps < 20  # one per 20 ms, without spinning


def test_a_request_beyond_what_a_room_holds_is_refused_as_busy(sockets: ReplicaSockets) -> None:
    for tp_rank in (0, 1):
        rank = ExecutorRank(sockets, tp_rank, last_batch=9, rooms=[ListedRoom[EngineRequest](max_waiting=1)])
        rank.worker.execute(1, (submit("a"), submit("b")))
        refusals = [(each.rid, each.is_busy) for each in rank.reports(RequestRefused)]
        assert refusals == [("b", True)][tp_rank:]


def test_the_statistics_of_an_idle_leader_have_the_newest_counters_of_outputs(sockets: ReplicaSockets) -> None:
    rank = ExecutorRank(sockets, 0, last_batch=3)
    lead(sockets, rank, [submit("a")], [])
    assert rank.stats.sent[-1].outputs == rank.worker.scheduler.output.stats()
    assert rank.stats.sent[-1].outputs.tokens_sent == 3


def test_an_idle_leader_sends_outputs_again_that_were_not_accepted(sockets: ReplicaSockets) -> None:
    rank = ExecutorRank(sockets, 0, last_batch=1000, output_room=1)
    leading = threading.Thread(target=lead, args=(sockets, rank, [submit("a", max_new_tokens=50)], []))
    leading.start()
    tokens: list[int] = []
    ended = False
    while not ended and rank.outputs.poll(10_000):
        for delta in decode_outputs(rank.outputs.recv()).deltas:
            assert delta.start == len(tokens)
            tokens += delta.output.token_ids
            ended = delta.finish_reason is not None
    rank.stop_signal.give()
    leading.join()
    assert tokens == list(range(10, 60))


def test_a_leader_that_waits_for_a_follower_sends_heartbeats_and_stops_on_the_signal(sockets: ReplicaSockets) -> None:
    """The follower is silent; were its leader silent too, the wrong one might be named."""
    rank = ExecutorRank(sockets, 0, last_batch=1000)
    rank.heartbeat.clock = map(float, count()).__next__  # so that it speaks whenever it may
    steps_out, _ = sockets.pair(high_water_mark=1)  # two fit in the pipe, and no reader takes them
    leading = threading.Thread(target=lead, args=(sockets, rank, [submit("a", max_new_tokens=50)], [steps_out]))
    leading.start()
    try:
        for _ in range(6):  # three before steps; the last one cannot be relayed
            rank.wait_for(RankHeartbeat)
    finally:
        rank.stop_signal.give()
        leading.join()
    assert rank.worker.scheduler.num_steps == 2


def test_a_long_wait_returns_for_each_heartbeat(sockets: ReplicaSockets) -> None:
    """As in an agreement, which waits for a silent rank for a minute."""
    rank = ExecutorRank(sockets, 1, last_batch=1)
    rank.heartbeat.clock = map(float, count()).__next__
    _, silent = sockets.pair()
    assert all(rank.heartbeat.wait(silent, zmq.POLLIN, timeout_ms) for timeout_ms in (600_000, None))
    assert len(rank.reports(RankHeartbeat)) == 2
    rank.stop_signal.give()
    assert not rank.heartbeat.wait(silent, zmq.POLLIN, 600_000)


def test_statistics_are_written_before_the_replica_reports_idle(sockets: ReplicaSockets) -> None:
    """A client that waits until the engine is idle then reads the final statistics."""
    rank = ExecutorRank(sockets, 0, last_batch=3)
    loads: list[tuple[int, int]] = []

    class Frontend(ListSink):
        def send(self, load: LoadSnapshot) -> None:
            loads.append((load.num_running_reqs, rank.stats.sent[-1].load.num_running_reqs))

    rank.load_publisher.sinks = (Frontend(),)
    rank.load_publisher.pacer = GaugePacer(min_interval_s=0.0)
    lead(sockets, rank, [submit("a")], [])
    assert (1, 1) in loads
    assert loads[-1] == (0, 0)
    assert all(written == running for running, written in loads)
    assert rank.stats.sent[-1].counters.generation_tokens_total == 3
