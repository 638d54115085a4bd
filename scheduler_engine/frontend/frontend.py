"""Frontend: send each request to a replica and stream its tokens back.

One asyncio loop owns everything in this module. The HTTP routes and the replay of a recorded trace use the same
``open_request``. ``LoadDispatcher`` chooses the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from secrets import randbits
from types import TracebackType

import msgspec
import zmq

from scheduler_components import ComponentError, ConfigError
from scheduler_components.values import (
    ControlReply,
    FinishReason,
    OutputBatch,
    OutputDelta,
    RequestHints,
    RequestTimeouts,
    SessionParams,
    TraceParent,
)
from scheduler_engine.device.sampling import SamplingLimits, SamplingParams
from scheduler_engine.engine.messages import (
    AbortRequest,
    CacheDump,
    ControlCompleted,
    LoadReport,
    PoolSnapshot,
    RankCommand,
    RankHeartbeat,
    RankReady,
    RankReport,
    RankStalled,
    RequestRefused,
    RpcReply,
    SubmitRequest,
    encode,
)
from scheduler_engine.frontend.dispatcher import DispatchChoice, LoadDispatcher
from scheduler_engine.frontend.errors import (
    EngineFailedError,
    RequestFailedError,
    RequestRefusedError,
    RequestTimeoutError,
    TooBusyError,
)
from scheduler_engine.frontend.heartbeat_monitor import HeartbeatMonitor

REPLY_TIMEOUT_S = 30.0
"""Longest wait for the ranks' replies to a command, beyond a deadline that the command itself carries."""


class GenerateReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a client, before it is dispatched.

    Attributes:
        rid: request id, unique among open requests; None lets the frontend choose one.
        input_ids: prompt tokens, packed by ``messages.pack_tokens``.
        limits: when to stop.
        sampling: how tokens are chosen; the frontend draws a missing seed.
        hints: priority, tenant, deadline and adapter, for the scheduling policy.
        timeouts: how long the request may wait and take.
        stream_interval: tokens between two deltas; 0 for one delta at the end.
        conversation: requests with the same value share a prefix; the dispatcher may send them to one replica.
        replica: the replica that must serve the request; None lets the dispatcher choose.
        trace: the trace of the client, or None.
        session: the session and the turn that it continues; None for a request without one.
    """

    rid: str | None = None
    input_ids: bytes
    limits: SamplingLimits
    sampling: SamplingParams = SamplingParams()
    hints: RequestHints = RequestHints()
    timeouts: RequestTimeouts = RequestTimeouts()
    stream_interval: int = 1
    conversation: str | None = None
    replica: int | None = None
    trace: TraceParent | None = None
    session: SessionParams | None = None

    @property
    def num_input_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.input_ids) // 4


@dataclass(slots=True)
class CommandReplies:
    """The newest replies of the ranks to commands.

    Attributes:
        dumps: rank to its newest cache dump.
        pools: replica to the newest snapshot of its pool.
        rpcs: rank to its newest reply to an ``RpcRequest``.
        controls: (request id, replica) to the reply to a control request; ``ControlQueue`` removes what it has read.
        awaited: ids of the control requests whose replies are kept. The others were given up.
    """

    dumps: dict[int, CacheDump] = field(default_factory=dict)
    pools: dict[int, PoolSnapshot] = field(default_factory=dict)
    rpcs: dict[int, RpcReply] = field(default_factory=dict)
    controls: dict[tuple[int, int], ControlReply] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)


@dataclass(slots=True)
class RankReplies:
    """All reports of the ranks that the frontend keeps.

    Attributes:
        ready: rank to the endpoints that it reported at its start.
        commands: replies to commands.
        changed: set at every report; ``wait_until`` clears it.
        failure: why the engine has failed; None while it runs.
        failed: set together with ``failure``.
    """

    ready: dict[int, RankReady] = field(default_factory=dict)
    commands: CommandReplies = field(default_factory=CommandReplies)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: EngineFailedError | None = None
    failed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` is true. It is evaluated after each report."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()


@dataclass(slots=True, kw_only=True)
class Frontend:
    """Dispatches requests and streams their tokens.

    Attributes:
        leaders: one PUSH socket per replica.
        dispatcher: chooses the replica.
        max_open_requests: limit beyond which ``open_request`` raises ``TooBusyError``; it bounds the engine's memory.
        replies: reports of the ranks.
        heartbeats: finds silent ranks; a replica with a silent rank gets no requests.
        is_draining: the engine is stopping, and ``open_request`` raises ``TooBusyError``.
    """

    leaders: Sequence[zmq.Socket[bytes]]
    dispatcher: LoadDispatcher
    max_open_requests: int = 4096
    replies: RankReplies = field(default_factory=RankReplies)
    heartbeats: HeartbeatMonitor = field(default_factory=HeartbeatMonitor)
    is_draining: bool = False
    _open: dict[str, RequestStream] = field(default_factory=dict, repr=False)
    _numbers: count[int] = field(default_factory=count, repr=False)

    @property
    def num_open_requests(self) -> int:
        """Number of requests whose end no rank has reported, including requests that their clients have closed."""
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """True if no request is open, and the newest load report of every replica counts all requests and has none."""
        return not self.num_open_requests and all(
            load.is_load_current and not load.snapshot.num_running_reqs and not load.snapshot.num_waiting_reqs
            for load in self.dispatcher.replicas
        )

    def open_request(self, request: GenerateReqInput) -> RequestStream:
        """Dispatch a request and return the stream of its tokens.

        Use it as ``async with frontend.open_request(...) as stream``. Leaving the block early aborts the request.

        Raises:
            EngineFailedError, RankSilentError, TooBusyError: nothing was dispatched.
            ConfigError: the rid is in use, or the request is pinned to a replica that does not exist.
        """
        if self.replies.failure is not None:
            raise self.replies.failure
        if self.is_draining:
            raise TooBusyError("the engine is stopping and takes no further requests")
        if self.num_open_requests >= self.max_open_requests:
            raise TooBusyError(f"{self.num_open_requests} requests are open, which is the limit; try again later")
        rid = request.rid if request.rid is not None else self._new_rid()
        if rid in self._open:
            raise ConfigError("rid", rid, "is the id of an open request", "give another, or none")
        replica, ticket = self._place(request)
        stream = self._open[rid] = RequestStream(rid=rid, replica=replica, frontend=self)
        sampling = _with_seed(request.sampling)
        command = SubmitRequest(
            rid,
            request.input_ids,
            request.limits,
            request.stream_interval,
            ticket,
            sampling,
            request.trace,
            request.hints,
            request.timeouts,
            request.session,
        )
        self.send(replica, command)
        return stream

    def _place(self, request: GenerateReqInput) -> DispatchChoice:
        silent = self.heartbeats.silent_replicas()
        pinned = request.replica
        if pinned in silent:
            raise silent[pinned]
        if pinned is not None:
            return self.dispatcher.dispatch_to(request.num_input_tokens, pinned)
        if len(silent) == len(self.leaders):
            raise silent[min(silent)]
        return self.dispatcher.dispatch(request.num_input_tokens, request.conversation, avoid=silent)

    def close_request(self, request: RequestStream) -> None:
        """Abort a request unless it has ended. Its id stays in use until its replica reports the end."""
        if self._open.get(request.rid) is request:
            self.send(request.replica, AbortRequest(request.rid))

    def process_outputs(self, batch: OutputBatch) -> None:
        """Pass the deltas of a replica to their streams."""
        for delta in batch.deltas:
            self._deliver(delta.rid, _check_delta(delta), ended=delta.finish_reason is not None)
        self.replies.changed.set()

    def receive(self, report: RankReport) -> None:
        """Process any report other than outputs."""
        commands = self.replies.commands
        if isinstance(report, LoadReport):
            self.dispatcher.replicas[report.load.dp_rank].on_load_report(report.load)
        elif isinstance(report, RequestRefused):
            error = TooBusyError if report.is_busy else RequestRefusedError
            self._deliver(report.rid, error(report.reason), ended=True)
        elif isinstance(report, CacheDump):
            commands.dumps[report.rank] = report
        elif isinstance(report, PoolSnapshot):
            commands.pools[report.replica] = report
        elif isinstance(report, RpcReply):
            commands.rpcs[report.rank] = report
        elif isinstance(report, ControlCompleted):
            if report.reply.request_id in commands.awaited:
                commands.controls[report.reply.request_id, report.replica] = report.reply
        elif isinstance(report, RankReady):
            self.replies.ready[report.rank] = report
        elif isinstance(report, RankHeartbeat):
            self.heartbeats.on_heartbeat(report)
        elif isinstance(report, RankStalled):
            self.heartbeats.on_stall(report)
        self.replies.changed.set()

    def tick(self) -> None:
        """Count one ``HEARTBEAT_INTERVAL_S`` and fail the open requests of replicas that have become silent."""
        for replica, error in self.heartbeats.tick().items():
            for stream in self._open.values():
                if stream.replica == replica:
                    stream.put(error)
            self.replies.changed.set()

    def send(self, replica: int, command: RankCommand) -> None:
        """Send a command to one replica. A reply arrives in ``replies.commands``."""
        # Never blocks: the socket has no high-water mark, and the number of open requests is bounded.
        self.leaders[replica].send(encode(command), zmq.DONTWAIT)

    def broadcast(self, command: RankCommand) -> None:
        """Send a command to every replica. Replies arrive in ``replies.commands``."""
        for replica in range(len(self.leaders)):
            self.send(replica, command)

    def fail(self, error: EngineFailedError) -> None:
        """Mark the engine as failed and fail every open request. Only the first failure counts: others follow it."""
        if self.replies.failure is not None:
            return
        self.replies.failure = error
        for stream in self._open.values():
            stream.put(error)
        self.replies.failed.set()
        self.replies.changed.set()

    def _deliver(self, rid: str, item: OutputDelta | ComponentError, *, ended: bool) -> None:
        self._open[rid].put(item)
        if ended:
            del self._open[rid]

    def _new_rid(self) -> str:
        return next(rid for number in self._numbers if (rid := f"request-{number}") not in self._open)


@dataclass(slots=True, kw_only=True)
class RequestStream:
    """One dispatched request: an async iterator of its deltas, and an async context manager that aborts it on exit.

    Made by ``Frontend.open_request``.
    """

    rid: str
    replica: int
    frontend: Frontend = field(repr=False)
    finished: bool = False
    _queue: asyncio.Queue[OutputDelta | ComponentError] = field(default_factory=asyncio.Queue, repr=False)

    def put(self, item: OutputDelta | ComponentError) -> None:
        """Append a delta, or the error that ends the stream."""
        self._queue.put_nowait(item)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.frontend.close_request(self)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        """Return the next delta. The iteration ends after the delta with a finish reason.

        Raises:
            RequestRefusedError: the scheduler cannot serve the request.
            TooBusyError: the replica accepts no requests now, or has not admitted this one in time.
            RequestTimeoutError: the request has reached its time limit without a token.
            RequestFailedError: the replica could not compute the request, or tokens were dropped.
            EngineFailedError: the engine has failed.
            RankSilentError: a rank of the replica is stopped or hangs.
        """
        if self.finished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, ComponentError):
            self.finished = True
            raise item
        self.finished = item.finish_reason is not None
        return item


def _check_delta(delta: OutputDelta) -> OutputDelta | ComponentError:
    """Return the delta, or an error if the request failed before its first token or tokens are missing."""
    if delta.finish_reason == FinishReason.ERROR:
        why = delta.output.problem or "the engine's log says why"
        return RequestFailedError(f"request {delta.rid!r} could not be computed ({why})")
    if delta.finish_reason == FinishReason.REFUSED:
        return RequestRefusedError(delta.output.problem)
    if delta.finish_reason == FinishReason.QUEUE_TIMEOUT:
        return TooBusyError(delta.output.problem)
    if delta.finish_reason == FinishReason.TIMEOUT and not delta.num_output_tokens:
        return RequestTimeoutError(delta.output.problem)
    num_lost = delta.num_output_tokens - delta.start - len(delta.output.token_ids)
    if num_lost:
        return RequestFailedError(f"{num_lost} tokens of request {delta.rid!r} were dropped: too many were waiting")
    return delta


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """Draw a missing seed here, so that all ranks of the replica sample with the same one."""
    if sampling.is_greedy or sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=randbits(63))
