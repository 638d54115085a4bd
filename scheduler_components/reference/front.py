"""The front: takes requests, gives each to a replica by load, and hands its tokens back as they come.

One asyncio loop owns everything here. Requests of the HTTP routes and of a replayed trace go the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import TracebackType

import msgspec
import zmq

from scheduler_components.errors import ComponentError, ConfigError
from scheduler_components.metrics.stats import SchedulerStats
from scheduler_components.ports import MetricsSink
from scheduler_components.reference.batch import RequestOutput
from scheduler_components.reference.dispatch import LoadDispatcher
from scheduler_components.reference.messages import (
    AbortRequest,
    CacheDump,
    Command,
    DumpCache,
    RankReady,
    Report,
    RequestRefused,
    StatsReport,
    StepOutputs,
    SubmitRequest,
    encode,
)
from scheduler_components.reference.request import SamplingLimits

__all__ = ["EngineFailedError", "Front", "GenerateRequest", "OpenRequest", "RequestRefusedError", "TooBusyError"]


class EngineFailedError(ComponentError):
    """The engine cannot go on; the text says which rank failed and how."""


class RequestRefusedError(ComponentError):
    """The scheduler can never serve this request; the text is for its author."""


class TooBusyError(ComponentError):
    """More requests are open than the front takes at once."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants.

    Attributes:
        rid: unique among open requests; None lets the front choose.
        input_ids: prompt tokens, packed (``messages.pack_tokens``).
        limits: when to stop.
        conversation: requests with the same value share a prefix; the dispatcher may keep them together.
    """

    rid: str | None = None
    input_ids: bytes
    limits: SamplingLimits
    conversation: str | None = None

    @property
    def num_input_tokens(self) -> int:
        return len(self.input_ids) // 4


@dataclass(slots=True)
class RankBoard:
    """What the front has heard from the ranks.

    Attributes:
        ready: tp_rank to the address of its event stream; None for a rank without one.
        stats: replica to its newest statistics.
        dumps: tp_rank to its newest cache dump.
        changed: set at every report; whoever waits for something clears it first.
        failed: set when the engine cannot go on.
    """

    ready: dict[int, str | None] = field(default_factory=dict)
    stats: dict[int, SchedulerStats] = field(default_factory=dict)
    dumps: dict[int, CacheDump] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that can only become true by a report."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()


@dataclass(slots=True, kw_only=True)
class Front:
    """Requests in, tokens out.

    Attributes:
        leaders: one PUSH socket a replica.
        dispatcher: chooses the replica.
        metrics: takes every report of statistics.
        max_open_requests: beyond it, ``TooBusyError``: open requests are what the engine's memory grows with.
        board: what was heard from the ranks.
        failure: why the engine stopped; None while it works.
    """

    leaders: Sequence[zmq.Socket[bytes]]
    dispatcher: LoadDispatcher
    metrics: MetricsSink
    max_open_requests: int = 4096
    board: RankBoard = field(default_factory=RankBoard)
    failure: EngineFailedError | None = None
    _open: dict[str, OpenRequest] = field(default_factory=dict, repr=False)
    _numbers: count[int] = field(default_factory=count, repr=False)

    @property
    def num_open_requests(self) -> int:
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """No request is open, and every replica has said, after the last of them, that it holds none."""
        return not self._open and all(
            load.is_covered and not load.snapshot.num_running_reqs and not load.snapshot.num_waiting_reqs
            for load in self.dispatcher.replicas
        )

    def open_request(self, request: GenerateRequest) -> OpenRequest:
        """Dispatch a request. Use as ``async with front.open_request(...) as news``: leaving it early aborts it.

        Raises:
            EngineFailedError, TooBusyError: nothing was dispatched.
            ConfigError: the rid is in use.
        """
        if self.failure is not None:
            raise self.failure
        if len(self._open) >= self.max_open_requests:
            raise TooBusyError(f"{len(self._open)} requests are open, which is the limit; try again later")
        rid = request.rid if request.rid is not None else f"request-{next(self._numbers)}"
        if rid in self._open:
            raise ConfigError("rid", rid, "is the id of an open request", "give another, or none")
        replica = self.dispatcher.choose(request.num_input_tokens, request.conversation)
        opened = self._open[rid] = OpenRequest(rid=rid, replica=replica, front=self)
        self._send(replica, SubmitRequest(rid, request.input_ids, request.limits))
        return opened

    def close_request(self, request: OpenRequest) -> None:
        """Forget a request; abort it when it has not finished."""
        if self._open.pop(request.rid, None) is not None and not request.finished:
            self._send(request.replica, AbortRequest(request.rid))

    def receive(self, report: Report) -> None:
        """Take in what a rank says."""
        if isinstance(report, StepOutputs):
            for output in report.outputs:
                self._pass_on(output.rid, output)
        elif isinstance(report, StatsReport):
            self.dispatcher.replicas[report.replica].reported(report.stats.load, report.submissions_seen)
            self.board.stats[report.replica] = report.stats
            self.metrics.record(report.stats)
        elif isinstance(report, RequestRefused):
            self._pass_on(report.rid, RequestRefusedError(report.reason))
        elif isinstance(report, CacheDump):
            self.board.dumps[report.tp_rank] = report
        elif isinstance(report, RankReady):
            self.board.ready[report.tp_rank] = report.stream_endpoint
        self.board.changed.set()

    def ask_for_dumps(self, dump_id: int) -> None:
        """Let every rank dump its cache; ``board.dumps`` fills as they answer with this number."""
        for replica in range(len(self.leaders)):
            self._send(replica, DumpCache(dump_id))

    def fail(self, error: EngineFailedError) -> None:
        """The engine cannot go on: everybody who waits is told."""
        self.failure = error
        for request in self._open.values():
            request.put(error)
        self.board.failed.set()

    def _pass_on(self, rid: str, news: RequestOutput | RequestRefusedError) -> None:
        opened = self._open.get(rid)
        if opened is not None:  # None: its client has left, and its abort is on the way
            opened.put(news)

    def _send(self, replica: int, command: Command) -> None:
        self.leaders[replica].send(encode(command), zmq.DONTWAIT)  # no high-water mark: open requests are bounded


@dataclass(slots=True, kw_only=True)
class OpenRequest:
    """One dispatched request: an async context that ends it, and an async iterator of its news."""

    rid: str
    replica: int
    front: Front = field(repr=False)
    finished: bool = False
    _news: asyncio.Queue[RequestOutput | ComponentError] = field(default_factory=asyncio.Queue, repr=False)

    def put(self, news: RequestOutput | ComponentError) -> None:
        self._news.put_nowait(news)

    async def __aenter__(self) -> OpenRequest:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.front.close_request(self)

    def __aiter__(self) -> OpenRequest:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output; ends after the one with a finish reason.

        Raises:
            RequestRefusedError: the scheduler cannot serve the request.
            EngineFailedError: the engine stopped.
        """
        if self.finished:
            raise StopAsyncIteration
        news = await self._news.get()
        if isinstance(news, ComponentError):
            self.finished = True
            raise news
        self.finished = news.finish_reason is not None
        return news
