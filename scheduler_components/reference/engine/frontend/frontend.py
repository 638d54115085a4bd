"""The front: takes requests, gives each to a replica by load, and hands its tokens back as they come.

One asyncio loop owns everything here. Requests of the HTTP routes and of a replayed trace go the same way. A replica's
load is what it last reported (running and waiting tokens) plus what was sent to it and no report counts yet, which its
``DispatchLedger`` knows.
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

from scheduler_components import (
    ComponentError,
    ConfigError,
    FinishReason,
    OutputBatch,
    OutputDelta,
    OutputStats,
)
from scheduler_components.control_requests import ControlReply, ControlRequest
from scheduler_components.reference.device.sampling import SamplingLimits, SamplingParams
from scheduler_components.reference.engine.frontend.dispatcher import LoadDispatcher, Placement
from scheduler_components.reference.engine.frontend.errors import (
    EngineFailedError,
    RequestFailedError,
    RequestRefusedError,
    TooBusyError,
)
from scheduler_components.reference.engine.frontend.heartbeat_monitor import HeartbeatMonitor
from scheduler_components.reference.engine.messages import (
    AbortRequest,
    BlockInput,
    CacheDump,
    ControlCompleted,
    DrainInput,
    DumpCache,
    LoadReport,
    PoolSnapshot,
    RankCommand,
    RankHeartbeat,
    RankReady,
    RankReport,
    RankStalled,
    ReadPool,
    RequestRefused,
    RpcReply,
    RpcRequest,
    SubmitControl,
    SubmitRequest,
    UnblockInput,
    encode,
)

__all__ = [
    "Frontend",
    "GenerateReqInput",
    "RequestStream",
]


class GenerateReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants.

    Attributes:
        rid: unique among open requests; None lets the front choose.
        input_ids: prompt tokens, packed (``messages.pack_tokens``).
        limits: when to stop.
        sampling: how tokens are chosen; without a seed the front draws one.
        stream_interval: tokens between two pieces of news; 0 for all at the end.
        conversation: requests with the same value share a prefix; the dispatcher may keep them together.
        replica: where it must be served; None leaves that to the dispatcher.
    """

    rid: str | None = None
    input_ids: bytes
    limits: SamplingLimits
    sampling: SamplingParams = SamplingParams()
    stream_interval: int = 1
    conversation: str | None = None
    replica: int | None = None

    @property
    def num_input_tokens(self) -> int:
        return len(self.input_ids) // 4


@dataclass(slots=True)
class CommandReplies:
    """What ranks have answered.

    Attributes:
        dumps: rank to its newest cache dump.
        pools: replica to the newest reading of its pool.
        control: rank to its newest answer to a ``RpcRequest``.
        orders: how an order ended on a replica, by the order's id and the replica; taken out by who gave it.
    """

    dumps: dict[int, CacheDump] = field(default_factory=dict)
    pools: dict[int, PoolSnapshot] = field(default_factory=dict)
    control: dict[int, RpcReply] = field(default_factory=dict)
    orders: dict[tuple[int, int], ControlReply] = field(default_factory=dict)


@dataclass(slots=True)
class RankReplies:
    """What the front has heard from the ranks.

    Attributes:
        ready: rank to what the rank said when it was.
        outputs: replica to the newest counters of its outputs.
        answers: to questions and orders.
        changed: set at every report; whoever waits for something clears it first.
        failure: why the engine cannot go on; None while it can.
        failed: set together with ``failure``.
    """

    ready: dict[int, RankReady] = field(default_factory=dict)
    outputs: dict[int, OutputStats] = field(default_factory=dict)
    answers: CommandReplies = field(default_factory=CommandReplies)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: EngineFailedError | None = None
    failed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that can only become true by a report."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()


@dataclass(slots=True, kw_only=True)
class Frontend:
    """Requests in, tokens out.

    Attributes:
        leaders: one PUSH socket per replica.
        dispatcher: chooses the replica.
        max_open_requests: beyond it, ``TooBusyError``: open requests are what the engine's memory grows with.
        board: what was heard from the ranks.
        pulse: when they were heard last; a replica with a silent rank gets no requests.
    """

    leaders: Sequence[zmq.Socket[bytes]]
    dispatcher: LoadDispatcher
    max_open_requests: int = 4096
    board: RankReplies = field(default_factory=RankReplies)
    heartbeats: HeartbeatMonitor = field(default_factory=HeartbeatMonitor)
    _open: dict[str, RequestStream] = field(default_factory=dict, repr=False)
    _numbers: count[int] = field(default_factory=count, repr=False)

    @property
    def num_open_requests(self) -> int:
        """Requests of which no end has been heard, those that their clients have left included."""
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """No request is open, and every replica has said, after the last of them, that it holds none."""
        return not self._open and all(
            load.is_load_current and not load.snapshot.num_running_reqs and not load.snapshot.num_waiting_reqs
            for load in self.dispatcher.replicas
        )

    def open_request(self, request: GenerateReqInput) -> RequestStream:
        """Dispatch a request. Use as ``async with front.open_request(...) as news``: leaving it early aborts it.

        Raises:
            EngineFailedError, RankSilentError, TooBusyError: nothing was dispatched.
            ConfigError: the rid is in use, or the request is pinned to a replica that does not exist.
        """
        if self.board.failure is not None:
            raise self.board.failure
        if len(self._open) >= self.max_open_requests:
            raise TooBusyError(f"{len(self._open)} requests are open, which is the limit; try again later")
        rid = request.rid if request.rid is not None else self._new_rid()
        if rid in self._open:
            raise ConfigError("rid", rid, "is the id of an open request", "give another, or none")
        replica, ticket = self._place(request)
        opened = self._open[rid] = RequestStream(rid=rid, replica=replica, front=self)
        sampling = _with_seed(request.sampling)
        command = SubmitRequest(rid, request.input_ids, request.limits, request.stream_interval, ticket, sampling)
        self._send(replica, command)
        return opened

    def _place(self, request: GenerateReqInput) -> Placement:
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
        """Abort a request unless its end has been heard. Until then its id stays in use, for late news."""
        if self._open.get(request.rid) is request:
            self._send(request.replica, AbortRequest(request.rid))

    def process_outputs(self, batch: OutputBatch) -> None:
        """Pass the news of a replica's requests on to those who wait for them."""
        for delta in batch.deltas:
            self._pass_on(delta.rid, _news_in(delta), ended=delta.finish_reason is not None)
        self.board.changed.set()

    def receive(self, report: RankReport) -> None:
        """Take in what else a rank says."""
        if isinstance(report, LoadReport):
            self.dispatcher.replicas[report.load.dp_rank].on_load_report(report.load)
            self.board.outputs[report.load.dp_rank] = report.outputs
        elif isinstance(report, RequestRefused):
            kind = TooBusyError if report.is_busy else RequestRefusedError
            self._pass_on(report.rid, kind(report.reason), ended=True)
        elif isinstance(report, CacheDump):
            self.board.answers.dumps[report.rank] = report
        elif isinstance(report, PoolSnapshot):
            self.board.answers.pools[report.replica] = report
        elif isinstance(report, RpcReply):
            self.board.answers.control[report.rank] = report
        elif isinstance(report, ControlCompleted):
            self.board.answers.orders[report.answer.order_id, report.replica] = report.answer
        elif isinstance(report, RankReady):
            self.board.ready[report.rank] = report
        elif isinstance(report, RankHeartbeat):
            self.heartbeats.on_heartbeat(report)
        elif isinstance(report, RankStalled):
            self.heartbeats.on_stall(report)
        self.board.changed.set()

    def tick(self) -> None:
        """``HEARTBEAT_INTERVAL_S`` went by: whoever waits for a replica that has become silent by it is told."""
        for replica, error in self.heartbeats.tick().items():
            for request in self._open.values():
                if request.replica == replica:
                    request.put(error)
            self.board.changed.set()

    def request_cache_dumps(self, dump_id: int) -> None:
        """Let every rank dump its cache; ``board.answers`` fills as they answer with this number."""
        for replica in range(len(self.leaders)):
            self._send(replica, DumpCache(dump_id))

    def broadcast_control(self, order_id: int, order: ControlRequest) -> None:
        """Let every replica carry an order out; ``board.answers`` fills as they answer."""
        for replica in range(len(self.leaders)):
            self._send(replica, SubmitControl(order_id, order))

    def block_input(self, replica: int) -> None:
        """Let a replica hold requests back, from the next one on; commands and aborts reach it."""
        self._send(replica, BlockInput())

    def drain_input(self, replica: int) -> None:
        """Let a replica refuse requests and serve those that it has."""
        self._send(replica, DrainInput())

    def unblock_input(self, replica: int) -> None:
        """End what ``block_input`` or ``drain_input`` began; requests that wait go first."""
        self._send(replica, UnblockInput())

    def request_pool_snapshot(self, replica: int, read_id: int) -> None:
        """Let a replica read its pool after its next step; ``board.answers`` has it with this number."""
        self._send(replica, ReadPool(read_id))

    def broadcast_rpc(self, question: RpcRequest) -> None:
        """Let every rank answer; ``board.answers`` fills with this question's number."""
        for replica in range(len(self.leaders)):
            self._send(replica, question)

    def fail(self, error: EngineFailedError) -> None:
        """The engine cannot go on: everybody who waits is told. Later failures follow from the first, which counts."""
        if self.board.failure is not None:
            return
        self.board.failure = error
        for request in self._open.values():
            request.put(error)
        self.board.failed.set()
        self.board.changed.set()

    def _pass_on(self, rid: str, news: OutputDelta | ComponentError, *, ended: bool) -> None:
        self._open[rid].put(news)
        if ended:
            del self._open[rid]

    def _new_rid(self) -> str:
        return next(rid for number in self._numbers if (rid := f"request-{number}") not in self._open)

    def _send(self, replica: int, command: RankCommand) -> None:
        self.leaders[replica].send(encode(command), zmq.DONTWAIT)  # no high-water mark: open requests are bounded


@dataclass(slots=True, kw_only=True)
class RequestStream:
    """One dispatched request: an async context that ends it, and an async iterator of its news."""

    rid: str
    replica: int
    front: Frontend = field(repr=False)
    finished: bool = False
    _news: asyncio.Queue[OutputDelta | ComponentError] = field(default_factory=asyncio.Queue, repr=False)

    def put(self, news: OutputDelta | ComponentError) -> None:
        self._news.put_nowait(news)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.front.close_request(self)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        """The next output; ends after the one with a finish reason.

        Raises:
            RequestRefusedError: the scheduler cannot serve the request.
            TooBusyError: its replica takes no requests in now.
            RequestFailedError: it could not compute it, or tokens were lost.
            EngineFailedError: the engine stopped.
            RankSilentError: a rank of its replica did, or hangs.
        """
        if self.finished:
            raise StopAsyncIteration
        news = await self._news.get()
        if isinstance(news, ComponentError):
            self.finished = True
            raise news
        self.finished = news.finish_reason is not None
        return news


def _news_in(delta: OutputDelta) -> OutputDelta | RequestFailedError:
    if delta.finish_reason == FinishReason.ERROR:
        return RequestFailedError(f"request {delta.rid!r} could not be computed; the engine's log says why")
    num_lost = delta.num_output_tokens - delta.start - len(delta.output.token_ids)
    if num_lost:
        return RequestFailedError(f"{num_lost} tokens of request {delta.rid!r} were dropped: too many were waiting")
    return delta


def _with_seed(sampling: SamplingParams) -> SamplingParams:
    """Draw a seed where there is none: here, so that all ranks of a replica have the same."""
    if sampling.is_greedy or sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=randbits(63))
