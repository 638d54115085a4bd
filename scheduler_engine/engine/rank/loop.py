"""The step loop of a rank process: ``Leader`` and ``Follower``.

All ranks of a replica run in lockstep. The sequence of steps and commands determines every decision of a scheduler, so
all ranks must take the same steps with the same commands. The leader receives commands from the frontend. Before each
step its ``RequestReceiver`` relays them to the followers. In each step the ranks compare what they have decided, and
stop at a difference, because their KV caches would differ from then on (``DecisionLog``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler_components import (
    ComponentError,
    ConfigError,
    KvPoolReader,
    LoadPublisher,
    ParallelState,
)
from scheduler_components.cache import RadixCache
from scheduler_components.errors import QueueFullError
from scheduler_components.events import Tier
from scheduler_components.quiesce import QuiesceStepper
from scheduler_components.receiving.zmq_input_relay import IdleSleeper, StopRequestedError
from scheduler_components.request_receiver import RequestReceiver
from scheduler_components.values import (
    ControlReply,
    ForwardMode,
    InputKind,
    InputMessage,
)
from scheduler_components.watchdog import CONTROL_PHASE, IDLE_PHASE
from scheduler_engine.engine.messages import (
    FRONTEND_DISPATCHER,
    AbortRequest,
    BlockInput,
    CacheDump,
    ControlCompleted,
    DrainInput,
    DumpCache,
    LoadAdapter,
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
    UnloadAdapter,
    decode_command,
    pack_hashes,
    unpack_tokens,
)
from scheduler_engine.engine.rank.frontend_sinks import ZmqReportSender
from scheduler_engine.engine.rank.heartbeat import HeartbeatSender
from scheduler_engine.engine.rank.rpc_handler import RpcHandler
from scheduler_engine.engine.scheduler.request import EngineRequest
from scheduler_engine.engine.scheduler.request_limits import fitting_limits
from scheduler_engine.engine.scheduler.scheduler import Scheduler

_FLUSH_DEADLINE_S = 1.0  # the publisher's thread uses the sockets for some milliseconds
_BACKLOG_S = 0.02  # wait before sending outputs again that the frontend's queue had no room for
_MAX_DUMP_DELAY_STEPS = 10_000


@dataclass(slots=True, kw_only=True)
class RankWorker:
    """Executes commands and takes steps on one rank. Only the leader reports for the replica.

    Attributes:
        parallel: the rank.
        scheduler: the scheduler of the rank.
        reports: the socket to the frontend.
        rpc: executes RPC methods.
        quiesce: executes control requests.
    """

    parallel: ParallelState
    scheduler: Scheduler  # noqa: SCH001 drives the scheduler from above, which does not know it
    reports: ZmqReportSender
    rpc: RpcHandler
    quiesce: QuiesceStepper
    _dumps_due: dict[int, int] = field(default_factory=dict, init=False)  # dump id to the latest step to reply
    _last_mode: ForwardMode = field(default=ForwardMode.IDLE, init=False)

    @property
    def mode(self) -> ForwardMode:
        """The mode of the last step; idle if there is no work."""
        return self._last_mode if self.has_work else ForwardMode.IDLE

    @property
    def has_work(self) -> bool:
        """True if a step has something to do: for the scheduler, or for a pending control request."""
        return self.scheduler.has_work or self.quiesce.quiesce.has_pending

    def execute(self, step: int, commands: Sequence[RankCommand]) -> None:
        """Execute the commands, take the step, and reply."""
        for command in commands:
            self._execute_before_step(command)
        reply = self.quiesce.step()
        if reply is not None:
            self.scheduler.metrics.refresh_counters()
        self._last_mode = self.scheduler.step().mode
        if reply is not None:
            self._reply_to_control(reply)
        for loaded in self.scheduler.lora.pop_replies():
            self._reply_to_control(loaded)
        for command in commands:
            if isinstance(command, DumpCache):
                self._dumps_due[command.dump_id] = step + _MAX_DUMP_DELAY_STEPS
            elif isinstance(command, ReadPool) and self.parallel.leads_replica:
                self.reports.send(self._read_pool(command.read_id))
        self._send_dumps(step)

    def _reply_to_control(self, reply: ControlReply) -> None:
        if self.parallel.leads_replica:
            self.reports.send(ControlCompleted(self.parallel.kv_stream_index, reply))

    def _change_adapters(self, command: LoadAdapter | UnloadAdapter) -> None:
        """Register or unregister an adapter. The reply to a load comes when all ranks have loaded it."""
        lora, problem = self.scheduler.lora, ""
        try:
            if isinstance(command, LoadAdapter):
                lora.register(command.name, command.path, is_pinned=command.pinned, request_id=command.request_id)
                return
            lora.unregister(command.name)
        except ConfigError as error:  # which every rank refuses alike
            problem = str(error)
        self._reply_to_control(ControlReply(command.request_id, problem))

    def _send_dumps(self, step: int) -> None:
        """Send requested dumps after a step without transfers in flight, so that the tiers do not change any more."""
        for dump_id, last_step in list(self._dumps_due.items()):
            if not self.scheduler.tiers.num_operations or step >= last_step:
                del self._dumps_due[dump_id]
                self.reports.send(self._dump(dump_id, step))

    def _execute_before_step(self, command: RankCommand) -> None:
        if isinstance(command, SubmitRequest):
            self._submit(command)
        elif isinstance(command, AbortRequest):
            self.scheduler.abort(command.rid)
        elif isinstance(command, LoadAdapter | UnloadAdapter):
            self._change_adapters(command)
        elif isinstance(command, SubmitControl):
            self.quiesce.enqueue(command.request_id, command.request)
        elif isinstance(command, RpcRequest):
            progress = self.scheduler.integrity.progress
            progress.enter_phase(CONTROL_PHASE, command.method)
            self.reports.send(self._reply(command))
            progress.enter_phase(IDLE_PHASE)

    def _reply(self, request: RpcRequest) -> RpcReply:
        try:
            result = self.rpc.answer(request.method, request.body)
        except ComponentError as error:  # an invalid request, which fails on every rank alike
            return RpcReply(request.rpc_id, self.parallel.world_rank, str(error))
        return RpcReply(request.rpc_id, self.parallel.world_rank, None, msgspec.json.encode(result))

    def _submit(self, command: SubmitRequest) -> None:
        self.scheduler.request_metrics.work.on_request_received(FRONTEND_DISPATCHER, command.ticket)
        tokens: Sequence[int] = unpack_tokens(command.input_ids)
        session = command.session
        try:
            if session is not None:
                tokens = self.scheduler.sessions.extend(session, tokens)
            request = EngineRequest(
                command.rid,
                tokens,
                fitting_limits(self.scheduler.settings.config, len(tokens), command.limits),
                sampling=command.sampling,
                hints=command.hints,
                timeouts=command.timeouts,
                stream_interval=command.stream_interval,
            )
            request.trace = command.trace
            self.scheduler.submit(request, session)
        except (ConfigError, QueueFullError) as error:  # which every rank refuses alike
            if isinstance(error, ConfigError):
                self.scheduler.request_metrics.on_refused(error)
            if self.parallel.leads_replica:
                self.reports.send(RequestRefused(command.rid, str(error), isinstance(error, QueueFullError)))

    def _read_pool(self, read_id: int) -> PoolSnapshot:
        """Read the pool even while transfers are in flight: the events of each step describe the pool after it."""
        pool = KvPoolReader(publisher=self.scheduler.kv_events, blocks=self.scheduler.cache).read()
        places = (PoolMediumGroup(*place, pack_hashes(hashes)) for place, hashes in pool.blocks.items())
        return PoolSnapshot(read_id, pool.rank, pool.sequence, tuple(places))

    def _dump(self, dump_id: int, step: int) -> CacheDump:
        scheduler = self.scheduler
        scheduler.kv_events.flush(_FLUSH_DEADLINE_S)  # every batch has its number before ``last_sequence`` is read
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


@dataclass(slots=True, kw_only=True)
class Leader:
    """The loop of a replica's leader.

    It steps while its replica has work, or while another replica waits for it under DP attention. Otherwise it sleeps
    until a command arrives or a step is due for the requests that wait in rooms.

    Attributes:
        worker: takes the steps.
        receiver: receives the frontend's commands and relays them to the followers.
        sleeper: waits for the frontend's socket, the sockets of the peers, and the signal to stop.
        heartbeat: sends heartbeats, also while the leader sleeps; knows the signal to stop.
        load_publisher: sends the load to the frontend, and to the load endpoint of the configuration.
        is_peer_waiting: whether another replica needs a step of this one without a batch, under DP attention.
    """

    worker: RankWorker
    receiver: RequestReceiver[RankCommand]
    sleeper: IdleSleeper
    heartbeat: HeartbeatSender
    load_publisher: LoadPublisher
    is_peer_waiting: Callable[[], bool] = lambda: False

    def run(self) -> None:
        """Step until the rank must stop."""
        scheduler = self.worker.scheduler
        step = 0
        while True:
            was_due = self.heartbeat.send_if_due()
            is_idle = not self.worker.has_work
            if is_idle:
                self._flush()
            # A busy leader polls for the signal to stop only when it sends a heartbeat: a poll takes 2 us.
            if (is_idle or was_due) and self._must_stop(is_idle):
                return
            if is_idle and not (self.receiver.poll() or self.is_peer_waiting() or self._is_step_due()):
                continue
            step += 1
            try:
                commands = self.receiver.receive(step, scheduler.agreed_digest, self.worker.mode)
            except StopRequestedError:
                return
            self.worker.execute(step, commands)
            self.load_publisher.publish_load()

    def _flush(self) -> None:
        """Send everything that is still held back, before the leader sleeps.

        The load is sent last. When the frontend learns that this replica is idle, the statistics of the last step are
        already on the board.
        """
        scheduler = self.worker.scheduler
        scheduler.output.flush()
        scheduler.kv_events.flush()
        scheduler.forward_passes.publish_idle()
        scheduler.metrics.emit()
        self.load_publisher.flush()

    def _is_step_due(self) -> bool:
        """Return True if a step without a batch is due. While requests wait in rooms that is after each sleep."""
        scheduler = self.worker.scheduler
        return scheduler.polls_rooms or scheduler.next_step_in_s <= 0

    def _must_stop(self, is_idle: bool) -> bool:
        """Poll the signal to stop. An idle leader sleeps here until the signal, a command or the next heartbeat."""
        timeout_s = self.heartbeat.due_in_s if is_idle and not self.is_peer_waiting() else 0.0
        timeout_s = min(timeout_s, self.worker.scheduler.next_step_in_s)
        if self.worker.scheduler.output.has_backlog:
            timeout_s = min(_BACKLOG_S, timeout_s)
        return self.heartbeat.stop.descriptor in self.sleeper.sleep(timeout_s)


@dataclass(slots=True, kw_only=True)
class Follower:
    """The loop of a follower, which takes the steps of its leader and compares its state with the leader's."""

    worker: RankWorker
    receiver: RequestReceiver[RankCommand]
    heartbeat: HeartbeatSender

    def run(self) -> None:
        """Step until the rank must stop.

        Raises:
            LockstepError: the input of this rank differs from its leader's, or the ranks have decided differently.
        """
        step = 0
        while True:
            self.heartbeat.send_if_due()
            step += 1
            try:
                commands = self.receiver.receive(step, self.worker.scheduler.agreed_digest, self.worker.mode)
            except StopRequestedError:
                return
            self.worker.execute(step, commands)


_KINDS: dict[type, InputKind] = {
    SubmitRequest: InputKind.REQUEST,
    AbortRequest: InputKind.ABORT,
    BlockInput: InputKind.BLOCK,
    UnblockInput: InputKind.UNBLOCK,
    DrainInput: InputKind.DRAIN,
}


class CommandDecoder:
    """The ``MessageDecoder`` of the engine's commands."""

    __slots__ = ()

    def read(self, frame: bytes) -> InputMessage[RankCommand]:
        command = decode_command(frame)
        rid = command.rid if isinstance(command, SubmitRequest | AbortRequest) else ""
        return InputMessage(_KINDS.get(type(command), InputKind.COMMAND), command, rid)
