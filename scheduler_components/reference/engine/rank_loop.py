"""The loop of a scheduler process: the leader of a replica decides what goes into a step, its followers do the same.

Lockstep: every decision of a scheduler follows from its sequence of steps and commands. The leader sends each step's
commands, and the digest of its state, to its followers before it takes the step itself; a follower whose state differs
stops the engine, for from there on its KV cache would be another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from scheduler_components import (
    ConfigError,
    LoadPublisher,
    LockstepError,
    OutputStats,
    OutputStatsSource,
    ParallelState,
    SchedulerStats,
)
from scheduler_components.cache import RadixCache
from scheduler_components.hicache import Tier
from scheduler_components.reference.device import Request
from scheduler_components.reference.engine.messages import (
    FRONT,
    AbortRequest,
    CacheDump,
    Command,
    DumpCache,
    Report,
    RequestRefused,
    StatsReport,
    StepInput,
    SubmitRequest,
    decode_command,
    decode_step,
    encode,
    pack_hashes,
    unpack_tokens,
)
from scheduler_components.reference.engine.scheduler import Scheduler

__all__ = [
    "NO_OUTPUT_STATS",
    "Follower",
    "Leader",
    "ReportSocket",
    "StepExecutor",
    "StopSignal",
]

_STATS_EVERY_S = 0.05
_IDLE_MS = 250  # a fraction of the load gauge's heartbeat: a sample is never much older than that
_BACKLOG_MS = 20  # until outputs are offered again that the front did not take
_COMMANDS_A_STEP = 256
_DUMP_PATIENCE_STEPS = 10_000
_SEND_RETRY_MS = 100


class StopSignal:
    """The order to stop: the end of standard input, which comes by itself when the parent process dies.

    Args:
        descriptor: file descriptor to watch beside the sockets.
    """

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def wait(self, socket: zmq.Socket[bytes], event: int, timeout_ms: int | None) -> bool:
        """Wait until ``socket`` is ready for ``event`` or time is up; False when the order to stop came."""
        poller = zmq.Poller()
        poller.register(socket, event)
        poller.register(self._descriptor, zmq.POLLIN)
        return all(ready != self._descriptor for ready, _ in poller.poll(timeout_ms))


class _NoOutputStats:
    """The counters of a rank that has no scheduler yet."""

    def stats(self) -> OutputStats:
        return OutputStats()


NO_OUTPUT_STATS: OutputStatsSource = _NoOutputStats()


@dataclass(slots=True, kw_only=True)
class ReportSocket:
    """The way to the front. As a ``MetricsSink`` it sends at most one report of statistics each 50 ms.

    Attributes:
        replica: whose statistics they are.
        outputs: whose counters go with them. Set it when there is a scheduler, which is made with this sink.
    """

    socket: zmq.Socket[bytes]
    replica: int
    clock: Callable[[], float] = time.monotonic
    outputs: OutputStatsSource = NO_OUTPUT_STATS
    _held: SchedulerStats | None = field(default=None, init=False)
    _sent_s: float = field(default=float("-inf"), init=False)

    def send(self, report: Report) -> None:
        self.socket.send(encode(report))

    def record(self, stats: SchedulerStats) -> None:
        self._held = stats
        if self.clock() - self._sent_s >= _STATS_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Send the latest statistics, if they have not gone out yet: before a wait of unknown length."""
        if self._held is not None:
            self.send(StatsReport(self.replica, self._held, self.outputs.stats()))
            self._held = None
            self._sent_s = self.clock()


@dataclass(slots=True, kw_only=True)
class StepExecutor:
    """One rank's part of a step, the same on every rank of a replica; only the leader answers for it."""

    parallel: ParallelState
    scheduler: Scheduler  # noqa: SCH001 drives the scheduler from above, which does not know it
    reports: ReportSocket
    _dumps_due: dict[int, int] = field(default_factory=dict, init=False)  # dump id to the step of its last chance

    def execute(self, step: StepInput) -> None:
        """Obey the commands, take the step, report."""
        for command in step.commands:
            self._obey(command)
        self.scheduler.step()
        for command in step.commands:
            if isinstance(command, DumpCache):
                self._dumps_due[command.dump_id] = step.step + _DUMP_PATIENCE_STEPS
        self._answer_dumps(step.step)

    def _answer_dumps(self, step: int) -> None:
        """Dump the cache at a step at which no page is on its way, so that what is told of it is the last word."""
        for dump_id, last_step in list(self._dumps_due.items()):
            if not self.scheduler.tiers.num_operations or step >= last_step:
                del self._dumps_due[dump_id]
                self.reports.send(self._dump(dump_id, step))

    def _obey(self, command: Command) -> None:
        if isinstance(command, SubmitRequest):
            self._submit(command)
        elif isinstance(command, AbortRequest):
            self.scheduler.abort(command.rid)

    def _submit(self, command: SubmitRequest) -> None:
        self.scheduler.work.took_in(FRONT, command.ticket)
        tokens = unpack_tokens(command.input_ids)
        try:
            self.scheduler.submit(Request(command.rid, tokens, command.limits, stream_interval=command.stream_interval))
        except ConfigError as error:  # the request's author is to blame, on every rank alike
            if self.parallel.leads_replica:
                self.reports.send(RequestRefused(command.rid, str(error)))

    def _dump(self, dump_id: int, step: int) -> CacheDump:
        scheduler = self.scheduler
        scheduler.kv_events.idle()  # what the publisher still holds gets its number now
        dump = CacheDump(
            dump_id=dump_id,
            tp_rank=self.parallel.tp_rank,
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
    """Takes the front's commands, tells the followers, steps while there is work, and sleeps when there is none."""

    executor: StepExecutor
    commands: zmq.Socket[bytes]
    followers: Sequence[zmq.Socket[bytes]]
    stop: StopSignal
    load_publisher: LoadPublisher

    def run(self) -> None:
        """Returns when the order to stop comes."""
        scheduler = self.executor.scheduler
        step = 0
        while True:
            if not scheduler.has_work:
                self._tell_what_is_left()
            if not self.stop.wait(self.commands, zmq.POLLIN, self._patience_ms()):
                return
            commands = self._take_commands()
            if not commands and not scheduler.has_work:
                continue
            step += 1
            step_input = StepInput(step, scheduler.state_digest, commands)
            if not self._tell_followers(encode(step_input)):
                return
            self.executor.execute(step_input)
            self.load_publisher.publish_load()

    def _tell_what_is_left(self) -> None:
        """Before a wait: what was held back, by a throttle or because the front was behind, goes out."""
        scheduler = self.executor.scheduler
        self.load_publisher.flush()
        scheduler.output.flush()
        if not scheduler.output.has_backlog:  # a front that is behind has no use for more statistics either
            scheduler.metrics.emit()
            self.executor.reports.flush()

    def _patience_ms(self) -> int:
        """How long to wait for a command."""
        scheduler = self.executor.scheduler
        if scheduler.has_work:
            return 0
        return _BACKLOG_MS if scheduler.output.has_backlog else _IDLE_MS

    def _take_commands(self) -> tuple[Command, ...]:
        commands: list[Command] = []
        while len(commands) < _COMMANDS_A_STEP:
            try:
                commands.append(decode_command(self.commands.recv(zmq.DONTWAIT)))
            except zmq.Again:
                break
        return tuple(commands)

    def _tell_followers(self, frame: bytes) -> bool:
        """Send a step's input to each follower, waiting for one that is far behind; False on the order to stop."""
        for follower in self.followers:
            while True:
                try:
                    follower.send(frame, zmq.DONTWAIT)
                    break
                except zmq.Again:
                    if not self.stop.wait(follower, zmq.POLLOUT, _SEND_RETRY_MS):
                        return False
        return True


@dataclass(slots=True, kw_only=True)
class Follower:
    """Takes the steps that its leader takes, and checks that it stands where the leader stands."""

    executor: StepExecutor
    steps: zmq.Socket[bytes]
    stop: StopSignal

    def run(self) -> None:
        """Returns when the order to stop comes.

        Raises:
            LockstepError: this rank's state is not its leader's.
        """
        while self.stop.wait(self.steps, zmq.POLLIN, None):
            step = decode_step(self.steps.recv())
            digest = self.executor.scheduler.state_digest
            if digest != step.leader_digest:
                rank = str(self.executor.parallel)
                raise LockstepError(step.step, rank, f"{step.leader_digest:08x}", f"{digest:08x}")
            self.executor.execute(step)
