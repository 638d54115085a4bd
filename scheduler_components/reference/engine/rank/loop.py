"""The loop of a scheduler process: the leader of a replica decides what goes into a step, its followers do the same.

Lockstep: every decision of a scheduler follows from its sequence of steps and commands. Each rank's ``RequestReceiver``
brings
it the commands before a step, with the digest of the leader's state; a follower whose state differs stops the engine:
from there on its KV cache would be another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

import msgspec
import zmq

from scheduler_components import (
    ComponentError,
    ConfigError,
    KvPoolReader,
    LoadPublisher,
    LoadSnapshot,
    ParallelState,
    WorkCounters,
)
from scheduler_components.cache import RadixCache
from scheduler_components.hicache import Tier
from scheduler_components.ports import OutputStatsSource
from scheduler_components.quiesce import QuiesceStepper
from scheduler_components.reference.engine.messages import (
    FRONTEND_DISPATCHER,
    HEARTBEAT_INTERVAL_S,
    AbortRequest,
    CacheDump,
    ControlCompleted,
    DumpCache,
    LoadReport,
    PoolMediumGroup,
    PoolSnapshot,
    RankCommand,
    RankHeartbeat,
    RankReport,
    RankStalled,
    ReadPool,
    RequestRefused,
    RpcReply,
    RpcRequest,
    SubmitControl,
    SubmitRequest,
    encode,
    pack_hashes,
    unpack_tokens,
)
from scheduler_components.reference.engine.rank.rpc_handler import RpcHandler
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.reference.engine.scheduler.scheduler import Scheduler
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.thread_watchdog import LogStallSink
from scheduler_components.values import ForwardMode, InputMessage, RejectionReason, RequestRejection, StallReport
from scheduler_components.zmq_idle_sleeper import IdleSleeper
from scheduler_components.zmq_input_relay import StopRequestedError

__all__ = [
    "Follower",
    "FrontendLoadSink",
    "FrontendStallSink",
    "HeartbeatSender",
    "Leader",
    "NullPeers",
    "Peers",
    "FrontendRefusalSink",
    "ZmqReportSender",
    "RankWorker",
    "StopPipe",
]

_BACKLOG_S = 0.02  # until outputs are offered again that the front did not take
_DUMP_PATIENCE_STEPS = 10_000
_BUSY = frozenset({RejectionReason.TOO_MANY, RejectionReason.HELD_FULL, RejectionReason.DRAINING})


class StopPipe:
    """The order to stop: the end of standard input, which comes by itself when the parent process dies.

    Args:
        descriptor: file descriptor to watch beside the sockets.
    """

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def wait(self, socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        """Wait until ``socket`` is ready for ``event`` or time is up; False when the order to stop came."""
        poller = zmq.Poller()
        poller.register(socket, event)
        poller.register(self.descriptor, zmq.POLLIN)
        return all(ready != self.descriptor for ready, _ in poller.poll(timeout_ms))


@dataclass(slots=True, kw_only=True)
class ZmqReportSender:
    """The way to the front: a connected PUSH socket without a high-water mark, so that sending never waits."""

    socket: zmq.Socket[bytes]

    def send(self, report: RankReport) -> None:
        self.socket.send(encode(report))


@dataclass(slots=True, kw_only=True)
class HeartbeatSender:
    """Tells the front that this rank runs. Who waits for another rank says it too: otherwise all that wait for a silent
    rank were as silent as it, and chance would name one of them.

    Attributes:
        alive: what is said.
        reports: the way to the front.
        stop: the order to stop, which every wait hears.
        clock: monotonic seconds.
    """

    alive: RankHeartbeat
    reports: ZmqReportSender
    stop: StopPipe
    clock: Callable[[], float] = time.monotonic
    _due_s: float = field(default=0.0, init=False)

    def send_if_due(self) -> bool:
        """Say it, unless it was said lately; True when it was said now."""
        now_s = self.clock()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + HEARTBEAT_INTERVAL_S
        self.reports.send(self.alive)
        return True

    @property
    def due_in_s(self) -> float:
        """When it is to be said next."""
        return max(0.0, self._due_s - self.clock())

    def wait(self, socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        """Do what ``StopPipe.wait`` does, until this is to be said next at most: whoever still waits calls again."""
        self.send_if_due()
        due_ms = ceil(self.due_in_s * 1000)
        return self.stop.wait(socket, event, due_ms if timeout_ms is None else min(timeout_ms, due_ms))


@dataclass(slots=True, kw_only=True)
class FrontendLoadSink:
    """A ``LoadSink`` over a ``ZmqReportSender``, for the ``LoadPublisher`` that says when a report is worth sending.

    Attributes:
        reports: the way to the front.
        outputs: whose counters go with each report.
    """

    reports: ZmqReportSender
    outputs: OutputStatsSource

    @property
    def wants_load(self) -> bool:
        return True

    def send(self, load: LoadSnapshot) -> None:
        self.reports.send(LoadReport(load, self.outputs.stats()))

    def close(self) -> None:
        """The socket belongs to the process, which reports after this too."""


@dataclass(slots=True, kw_only=True)
class FrontendRefusalSink:
    """A ``RejectionSink``: the leader answers for what its intake did not let in.

    Attributes:
        reports: the way to the front.
        work: counts each request that was dispatched, taken or refused.
    """

    reports: ZmqReportSender
    work: WorkCounters

    def reject(self, refusal: RequestRejection, incoming: InputMessage[object]) -> None:
        if isinstance(incoming.message, SubmitRequest):
            self.work.on_request_received(FRONTEND_DISPATCHER, incoming.message.ticket)
        if refusal.reason is not RejectionReason.IN_USE:  # the first request of this id goes on
            self.reports.send(RequestRefused(refusal.rid, refusal.text, refusal.reason in _BUSY))


@dataclass(slots=True, kw_only=True)
class FrontendStallSink:
    """A ``StallSink`` that tells the front, and the log with all stacks. Used by the watchdog's thread alone.

    Attributes:
        reports: a way to the front of its own: sockets belong to one thread.
        alive: whose step it is.
    """

    reports: ZmqReportSender
    alive: RankHeartbeat
    _log: LogStallSink = field(default_factory=LogStallSink, init=False)

    def on_stall(self, report: StallReport) -> None:
        self.reports.send(RankStalled(self.alive, report.place))
        self._log.on_stall(report)

    def on_resume(self, report: StallReport) -> None:
        """The rank itself speaks again, which is all that the front has to know."""
        self._log.on_resume(report)


@dataclass(slots=True, kw_only=True)
class RankWorker:
    """One rank's part of a step, the same on every rank of a replica; only the leader speaks for the replica."""

    parallel: ParallelState
    scheduler: Scheduler  # noqa: SCH001 drives the scheduler from above, which does not know it
    reports: ZmqReportSender
    control: RpcHandler
    quiesce: QuiesceStepper
    _dumps_due: dict[int, int] = field(default_factory=dict, init=False)  # dump id to the step of its last chance
    _last_mode: ForwardMode = field(default=ForwardMode.IDLE, init=False)

    @property
    def mode(self) -> ForwardMode:
        """What the last step computed; idle where there is no work."""
        return self._last_mode if self.has_work else ForwardMode.IDLE

    @property
    def has_work(self) -> bool:
        """A step has something to do: work of the scheduler's, or an order that stands."""
        return self.scheduler.has_work or self.quiesce.quiesce.has_pending

    def execute(self, step: int, commands: Sequence[RankCommand]) -> None:
        """Obey the commands, take the step, report."""
        for command in commands:
            self._obey(command)
        answer = self.quiesce.step()
        if answer is not None:
            self.scheduler.metrics.refresh_counters()
        self._last_mode = self.scheduler.step().mode
        if answer is not None and self.parallel.leads_replica:
            self.reports.send(ControlCompleted(self.parallel.kv_stream_index, answer))
        for command in commands:
            if isinstance(command, DumpCache):
                self._dumps_due[command.dump_id] = step + _DUMP_PATIENCE_STEPS
            elif isinstance(command, ReadPool) and self.parallel.leads_replica:
                self.reports.send(self._read_pool(command.read_id))
        self._answer_dumps(step)

    def _answer_dumps(self, step: int) -> None:
        """Dump the cache at a step at which no page is on its way, so that what is told of it is final."""
        for dump_id, last_step in list(self._dumps_due.items()):
            if not self.scheduler.tiers.contents.num_operations or step >= last_step:
                del self._dumps_due[dump_id]
                self.reports.send(self._dump(dump_id, step))

    def _obey(self, command: RankCommand) -> None:
        if isinstance(command, SubmitRequest):
            self._submit(command)
        elif isinstance(command, AbortRequest):
            self.scheduler.abort(command.rid)
        elif isinstance(command, SubmitControl):
            self.quiesce.enqueue(command.order_id, command.order)
        elif isinstance(command, RpcRequest):
            self.reports.send(self._answer(command))

    def _answer(self, question: RpcRequest) -> RpcReply:
        try:
            answer = self.control.answer(question.method, question.body)
        except ComponentError as error:  # the fault of who asks, on every rank alike
            return RpcReply(question.rpc_id, self.parallel.world_rank, str(error))
        return RpcReply(question.rpc_id, self.parallel.world_rank, None, msgspec.json.encode(answer))

    def _submit(self, command: SubmitRequest) -> None:
        self.scheduler.request_metrics.work.on_request_received(FRONTEND_DISPATCHER, command.ticket)
        tokens = unpack_tokens(command.input_ids)
        try:
            request = Request(
                command.rid,
                tokens,
                command.limits,
                sampling=command.sampling,
                stream_interval=command.stream_interval,
            )
            self.scheduler.submit(request)
        except ConfigError as error:  # the fault of the request's author, on every rank alike
            if self.parallel.leads_replica:
                self.reports.send(RequestRefused(command.rid, str(error)))

    def _read_pool(self, read_id: int) -> PoolSnapshot:
        """Read at once, pages on their way or not: the events of every step tell what the pool then holds."""
        reading = KvPoolReader(publisher=self.scheduler.kv_events, blocks=self.scheduler.cache).read()
        places = (PoolMediumGroup(*place, pack_hashes(hashes)) for place, hashes in reading.blocks.items())
        return PoolSnapshot(read_id, reading.rank, reading.sequence, tuple(places))

    def _dump(self, dump_id: int, step: int) -> CacheDump:
        scheduler = self.scheduler
        scheduler.kv_events.idle()  # what the publisher still holds gets its number now
        dump = CacheDump(
            dump_id=dump_id,
            rank=self.parallel.world_rank,
            step=step,
            digest=scheduler.state_digest,
            last_sequence=scheduler.kv_events.stats().last_sequence,
            block_hashes=pack_hashes(scheduler.cache.block_hashes()),
        )
        if isinstance(scheduler.cache, RadixCache):
            return dump
        return msgspec.structs.replace(
            dump,
            host_hashes=pack_hashes(scheduler.cache.block_hashes(Tier.HOST)),
            stored_hashes=pack_hashes(scheduler.cache.block_hashes(Tier.STORAGE)),
            tiers=scheduler.tiers.contents.stats(),
        )


class Peers(Protocol):
    """The other replicas of an engine with DP attention: all take every step together."""

    @property
    def is_peer_waiting(self) -> bool:
        """One of them has begun a step that this replica has not begun."""
        ...


class NullPeers:
    """A replica that steps by itself."""

    @property
    def is_peer_waiting(self) -> bool:
        return False


@dataclass(slots=True, kw_only=True)
class Leader:
    """Steps while there is work, here or in a replica that waits for this one; sleeps when there is none and no command
    comes.

    Attributes:
        executor: takes the steps.
        intake: takes the front's commands, and tells the followers.
        sleeper: watches the front's socket, those of the peers, and the order to stop.
        heartbeat: hears the order to stop, and is said while the leader sleeps.
        load_publishers: of the load gauge that the operator asked for, and of the front's.
        peers: wake this replica for a step with nothing to compute.
    """

    executor: RankWorker
    intake: RequestReceiver[RankCommand]
    sleeper: IdleSleeper
    heartbeat: HeartbeatSender
    load_publishers: Sequence[LoadPublisher]
    peers: Peers = field(default_factory=NullPeers)

    def run(self) -> None:
        """Returns when the order to stop comes."""
        scheduler = self.executor.scheduler
        step = 0
        while True:
            was_due = self.heartbeat.send_if_due()
            is_idle = not self.executor.has_work
            if is_idle:
                self._tell_what_is_left()
            # A busy leader hears the order to stop as often as it says that it runs: to look costs a step 2 us.
            if (is_idle or was_due) and self._is_told_to_stop(is_idle):
                return
            if is_idle and not self.intake.poll() and not self.peers.is_peer_waiting:
                continue
            step += 1
            try:
                commands = self.intake.receive(step, scheduler.state_digest, self.executor.mode)
            except StopRequestedError:
                return
            self.executor.execute(step, commands)
            for publisher in self.load_publishers:
                publisher.publish_load()

    def _tell_what_is_left(self) -> None:
        """Before a wait: what was held back, by a throttle or because the front was behind, goes out.

        Statistics are written before the front is told of the load: a front that hears that this replica is idle
        finds the statistics of its last step on the board.
        """
        scheduler = self.executor.scheduler
        scheduler.output.flush()
        scheduler.kv_events.flush()
        scheduler.metrics.emit()
        for publisher in self.load_publishers:
            publisher.flush()

    def _is_told_to_stop(self, is_idle: bool) -> bool:
        """Look for the order to stop; when idle, sleep until it or a command comes, or there is something to say."""
        patience_s = self.heartbeat.due_in_s if is_idle and not self.peers.is_peer_waiting else 0.0
        if self.executor.scheduler.output.has_backlog:
            patience_s = min(_BACKLOG_S, patience_s)
        return self.heartbeat.stop.descriptor in self.sleeper.sleep(patience_s)


@dataclass(slots=True, kw_only=True)
class Follower:
    """Takes the steps that its leader takes, and checks that its state is the leader's."""

    executor: RankWorker
    intake: RequestReceiver[RankCommand]
    heartbeat: HeartbeatSender

    def run(self) -> None:
        """Returns when the order to stop comes.

        Raises:
            LockstepError: this rank's state is not its leader's.
        """
        step = 0
        while True:
            self.heartbeat.send_if_due()
            step += 1
            try:
                commands = self.intake.receive(step, self.executor.scheduler.state_digest, self.executor.mode)
            except StopRequestedError:
                return
            self.executor.execute(step, commands)
