"""The loop of a scheduler process: the leader of a replica decides what goes into a step, its followers do the same.

Lockstep: every decision of a scheduler follows from its sequence of steps and commands. The leader sends each step's
commands, and the digest of its state, to its followers before it takes the step itself; a follower whose state differs
stops the engine, for from there on its KV cache would be another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from scheduler_components.errors import ConfigError, LockstepError
from scheduler_components.metrics.stats import SchedulerStats
from scheduler_components.parallel_state import ParallelState
from scheduler_components.reference.messages import (
    AbortRequest,
    CacheDump,
    Command,
    DumpCache,
    Report,
    RequestRefused,
    StatsReport,
    StepInput,
    StepOutputs,
    SubmitRequest,
    decode_command,
    decode_step,
    encode,
    pack_hashes,
    unpack_tokens,
)
from scheduler_components.reference.request import Request
from scheduler_components.reference.scheduler import Scheduler

__all__ = ["Follower", "Leader", "ReportSocket", "StepExecutor", "StopSignal"]

_STATS_EVERY_S = 0.05
_HEARTBEAT_MS = 1000
_COMMANDS_A_STEP = 256
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


@dataclass(slots=True, kw_only=True)
class ReportSocket:
    """The way to the front. As a ``MetricsSink`` it sends at most one report of statistics each 50 ms.

    Attributes:
        replica: whose statistics they are.
        submissions_seen: submissions that this rank took in so far.
    """

    socket: zmq.Socket[bytes]
    replica: int
    submissions_seen: int = 0
    clock: Callable[[], float] = time.monotonic
    _held: StatsReport | None = field(default=None, init=False)
    _sent_s: float = field(default=float("-inf"), init=False)

    def send(self, report: Report) -> None:
        self.socket.send(encode(report))

    def record(self, stats: SchedulerStats) -> None:
        self._held = StatsReport(self.replica, self.submissions_seen, stats)
        if self.clock() - self._sent_s >= _STATS_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Send the latest statistics, if they have not gone out yet: before a wait of unknown length."""
        if self._held is not None:
            self.send(self._held)
            self._held = None
            self._sent_s = self.clock()


@dataclass(slots=True, kw_only=True)
class StepExecutor:
    """One rank's part of a step, the same on every rank of a replica; only the leader answers for it."""

    parallel: ParallelState
    scheduler: Scheduler
    reports: ReportSocket

    def execute(self, step: StepInput) -> None:
        """Obey the commands, take the step, report."""
        for command in step.commands:
            self._obey(command)
        result = self.scheduler.step()
        if self.parallel.leads_replica and result.outputs:
            self.reports.send(StepOutputs(result.outputs))
        for command in step.commands:
            if isinstance(command, DumpCache):
                self.reports.send(self._dump(command.dump_id, step.step))

    def _obey(self, command: Command) -> None:
        if isinstance(command, SubmitRequest):
            self._submit(command)
        elif isinstance(command, AbortRequest):
            self.scheduler.abort(command.rid)

    def _submit(self, command: SubmitRequest) -> None:
        self.reports.submissions_seen += 1
        try:
            self.scheduler.submit(Request(command.rid, unpack_tokens(command.input_ids), command.limits))
        except ConfigError as error:  # the request's author is to blame, on every rank alike
            if self.parallel.leads_replica:
                self.reports.send(RequestRefused(command.rid, str(error)))

    def _dump(self, dump_id: int, step: int) -> CacheDump:
        self.scheduler.kv_events.idle()  # what the publisher still holds gets its number now
        return CacheDump(
            dump_id=dump_id,
            tp_rank=self.parallel.tp_rank,
            step=step,
            digest=self.scheduler.state_digest,
            last_sequence=self.scheduler.kv_events.stats().last_sequence,
            block_hashes=pack_hashes(self.scheduler.cache.block_hashes()),
        )


@dataclass(slots=True, kw_only=True)
class Leader:
    """Takes the front's commands, tells the followers, steps while there is work, and sleeps when there is none."""

    executor: StepExecutor
    commands: zmq.Socket[bytes]
    followers: Sequence[zmq.Socket[bytes]]
    stop: StopSignal

    def run(self) -> None:
        """Returns when the order to stop comes."""
        scheduler, reports = self.executor.scheduler, self.executor.reports
        step = 0
        while True:
            if not scheduler.has_work:
                scheduler.metrics.emit()
                reports.flush()
            if not self.stop.wait(self.commands, zmq.POLLIN, 0 if scheduler.has_work else _HEARTBEAT_MS):
                return
            commands = self._take_commands()
            if not commands and not scheduler.has_work:
                continue
            step += 1
            step_input = StepInput(step, scheduler.state_digest, commands)
            if not self._tell_followers(encode(step_input)):
                return
            self.executor.execute(step_input)

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
