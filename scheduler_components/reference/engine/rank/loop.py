"""The loop of a scheduler process: the leader of a replica decides what goes into a step, its followers do the same.

Lockstep: every decision of a scheduler follows from its sequence of steps and commands. Each rank's ``RequestReceiver``
brings
it the commands before a step, with the digest of the leader's state; a follower whose state differs stops the engine:
from there on its KV cache would be another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from scheduler_components import (
    ComponentError,
    ConfigError,
    KvPoolReader,
    LoadPublisher,
    ParallelState,
)
from scheduler_components.cache import RadixCache
from scheduler_components.events import Tier
from scheduler_components.quiesce import QuiesceStepper
from scheduler_components.reference.engine.messages import (
    FRONTEND_DISPATCHER,
    AbortRequest,
    BlockInput,
    CacheDump,
    ControlCompleted,
    DrainInput,
    DumpCache,
    PoolMediumGroup,
    PoolSnapshot,
    RankCommand,
    ReadPool,
    RequestRefused,
    RpcReply,
    RpcRequest,
    SubmitControl,
    SubmitRequest,
    UnblockInput,
    decode_command,
    pack_hashes,
    unpack_tokens,
)
from scheduler_components.reference.engine.rank.frontend_sinks import ZmqReportSender
from scheduler_components.reference.engine.rank.heartbeat import HeartbeatSender
from scheduler_components.reference.engine.rank.rpc_handler import RpcHandler
from scheduler_components.reference.engine.scheduler.request import Request
from scheduler_components.reference.engine.scheduler.scheduler import Scheduler
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.values import (
    ForwardMode,
    InputKind,
    InputMessage,
)
from scheduler_components.zmq_idle_sleeper import IdleSleeper
from scheduler_components.zmq_input_relay import StopRequestedError

__all__ = [
    "Follower",
    "Leader",
    "NullPeers",
    "Peers",
    "RankWorker",
    "CommandDecoder",
]

_BACKLOG_S = 0.02  # until outputs are offered again that the front did not take
_DUMP_PATIENCE_STEPS = 10_000


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
            if not self.scheduler.tiers.num_operations or step >= last_step:
                del self._dumps_due[dump_id]
                self.reports.send(self._dump(dump_id, step))

    def _obey(self, command: RankCommand) -> None:
        if isinstance(command, SubmitRequest):
            self._submit(command)
        elif isinstance(command, AbortRequest):
            self.scheduler.abort(command.rid)
        elif isinstance(command, SubmitControl):
            self.quiesce.enqueue(command.request_id, command.request)
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
            tiers=scheduler.tiers.stats(),
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
        load_publisher: sends the load to the frontend, and to the load endpoint of the configuration.
        peers: wake this replica for a step with nothing to compute.
    """

    executor: RankWorker
    intake: RequestReceiver[RankCommand]
    sleeper: IdleSleeper
    heartbeat: HeartbeatSender
    load_publisher: LoadPublisher
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
            self.load_publisher.publish_load()

    def _tell_what_is_left(self) -> None:
        """Before a wait: what was held back, by a throttle or because the front was behind, goes out.

        Statistics are written before the front is told of the load: a front that hears that this replica is idle
        finds the statistics of its last step on the board.
        """
        scheduler = self.executor.scheduler
        scheduler.output.flush()
        scheduler.kv_events.flush()
        scheduler.metrics.emit()
        self.load_publisher.flush()

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


_KINDS: dict[type, InputKind] = {
    SubmitRequest: InputKind.REQUEST,
    AbortRequest: InputKind.ABORT,
    BlockInput: InputKind.BLOCK,
    UnblockInput: InputKind.UNBLOCK,
    DrainInput: InputKind.DRAIN,
}


class CommandDecoder:
    """The ``MessageDecoder`` of this engine."""

    __slots__ = ()

    def read(self, frame: bytes) -> InputMessage[RankCommand]:
        command = decode_command(frame)
        rid = command.rid if isinstance(command, SubmitRequest | AbortRequest) else ""
        return InputMessage(_KINDS.get(type(command), InputKind.COMMAND), command, rid)
