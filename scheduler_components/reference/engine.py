"""The engine: a private directory of sockets, the scheduler processes, and the front, from birth to close."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import zmq
import zmq.asyncio

from scheduler_components.errors import StartError
from scheduler_components.metrics.stats import KvMetrics
from scheduler_components.metrics.zmq_kv_metrics_sink import ZmqKvMetricsReceiver, open_zmq_kv_metrics_receiver
from scheduler_components.ports import MetricsSink
from scheduler_components.reference.dispatch import LoadDispatcher, ReplicaLoad
from scheduler_components.reference.engine_config import EngineConfig, RankConfig, SocketPaths
from scheduler_components.reference.front import EngineFailedError, Front
from scheduler_components.reference.launcher import RankExit, RankProcess, open_ranks
from scheduler_components.reference.messages import CacheDump, decode_report
from scheduler_components.reference.outputs import MAX_QUEUED_BATCHES, decode_outputs

__all__ = ["Engine", "open_engine"]

_START_DEADLINE_S = 60.0  # eight interpreters that start at once on two busy cores
_ANSWER_DEADLINE_S = 30.0
_KV_METRICS_EVERY_S = 0.25

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Engine:
    """A running engine. Made by ``open_engine``.

    Attributes:
        config: what it was made of.
        front: takes requests.
        ranks: the scheduler processes.
        kv_metrics: newest ``KvMetrics`` of each data-parallel rank.
    """

    config: EngineConfig
    front: Front
    ranks: list[RankProcess]
    kv_metrics: dict[int, KvMetrics] = field(default_factory=dict)
    _num_dumps: int = 0

    async def run(self, work: Awaitable[T]) -> T:
        """Await ``work`` for as long as the engine lives.

        Raises:
            EngineFailedError: a rank ended; ``work`` is cancelled.
        """
        task = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(self.front.board.failed.wait())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.front.board.failure is not None:
                raise self.front.board.failure
            return task.result()
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    async def wait_until_idle(self) -> None:
        """Wait until no request is anywhere and every replica has said so.

        Raises:
            EngineFailedError: requests were still open after 30 seconds.
        """
        await self._expect(lambda: self.front.is_idle, "the engine did not become idle; is somebody else using it?")

    async def dump_caches(self) -> dict[int, CacheDump]:
        """Every rank's blocks by tp_rank; all ranks of a replica answer at the same step.

        Raises:
            EngineFailedError: a rank did not answer in time.
        """
        self._num_dumps += 1
        dump_id, dumps = self._num_dumps, self.front.board.dumps
        self.front.ask_for_dumps(dump_id)

        def all_answered() -> bool:
            return sum(dump.dump_id == dump_id for dump in dumps.values()) == self.config.world_size

        await self._expect(all_answered, "not all ranks dumped their caches")
        return dict(dumps)

    async def _expect(self, condition: Callable[[], bool], complaint: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_DEADLINE_S):
                await self.front.board.wait_until(condition)
        except TimeoutError:
            raise EngineFailedError(f"{complaint} ({_ANSWER_DEADLINE_S} s)") from None


@asynccontextmanager
async def open_engine(
    config: EngineConfig, *, metrics: MetricsSink, affinity_tokens: int = 0, show: Callable[[str], None]
) -> AsyncIterator[Engine]:
    """Start an engine and wait until all ranks are ready; on leaving, its processes, sockets and files are gone.

    Args:
        config: what to start.
        metrics: takes each replica's statistics.
        affinity_tokens: see ``LoadDispatcher``.
        show: takes lines that ranks write to standard error.

    Raises:
        StartError: the ranks were not ready in time.
        EngineFailedError: a rank ended, and what it said.
    """
    async with AsyncExitStack() as opened:
        directory = tempfile.mkdtemp(prefix="scheduler-components-")
        opened.callback(shutil.rmtree, directory)
        sockets = SocketPaths(directory)
        incoming, outgoing = zmq.asyncio.Context(), zmq.Context[zmq.Socket[bytes]]()
        opened.callback(incoming.destroy, linger=0)
        opened.callback(outgoing.destroy, linger=0)
        # Reports are bounded by open requests: ranks must never wait for the front with them.
        reports = _bind_pull(incoming, sockets.reports, high_water_mark=0)
        outputs = _bind_pull(incoming, sockets.outputs, high_water_mark=MAX_QUEUED_BATCHES)
        receiver = open_zmq_kv_metrics_receiver(sockets.kv_metrics)
        opened.callback(receiver.close)
        front = Front(
            leaders=[_connect_leader(outgoing, sockets, replica) for replica in range(config.dp_size)],
            dispatcher=LoadDispatcher(
                replicas=[ReplicaLoad() for _ in range(config.dp_size)], affinity_tokens=affinity_tokens
            ),
            metrics=metrics,
        )
        rank_configs = [RankConfig(config, tp_rank, sockets) for tp_rank in range(config.world_size)]
        ranks, first_exit = await opened.enter_async_context(open_ranks(rank_configs, show=show))
        engine = Engine(config=config, front=front, ranks=ranks)
        first_exit.add_done_callback(lambda exited: _note_failure(front, exited))
        await opened.enter_async_context(_running(_listen(reports, front), front))
        await opened.enter_async_context(_running(_take_outputs(outputs, front), front))
        await opened.enter_async_context(_running(_collect_kv_metrics(receiver, engine.kv_metrics), front))
        await _wait_for_ranks(engine)
        yield engine


async def _wait_for_ranks(engine: Engine) -> None:
    ready = engine.front.board.ready
    try:
        async with asyncio.timeout(_START_DEADLINE_S):
            await engine.run(engine.front.board.wait_until(lambda: len(ready) == engine.config.world_size))
    except TimeoutError:
        missing = sorted(set(range(engine.config.world_size)) - set(ready))
        raise StartError(f"ranks {missing}", f"not ready after {_START_DEADLINE_S} s", "start fewer ranks") from None


def _note_failure(front: Front, exited: asyncio.Future[RankExit]) -> None:
    if not exited.cancelled():
        front.fail(EngineFailedError(str(exited.result())))


@asynccontextmanager
async def _running(work: Coroutine[None, None, None], front: Front) -> AsyncIterator[None]:
    """Run ``work`` in the background until the block is left; should it end before, the engine has failed."""

    def note_end(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled():
            front.fail(EngineFailedError(f"the front's own work ended: {ended.exception()!r}"))

    task = asyncio.create_task(work)
    task.add_done_callback(note_end)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _listen(reports: zmq.asyncio.Socket, front: Front) -> None:
    """Hand every report to the front. One that cannot be read ends it: a rank is of another version."""
    while True:
        front.receive(decode_report(await reports.recv()))


async def _take_outputs(outputs: zmq.asyncio.Socket, front: Front) -> None:
    """Hand every batch of outputs to the front, as with reports."""
    while True:
        front.take_outputs(decode_outputs(await outputs.recv()))


async def _collect_kv_metrics(receiver: ZmqKvMetricsReceiver, newest: dict[int, KvMetrics]) -> None:
    """Keep the newest ``KvMetrics`` of each rank; the ranks' queues are short, so they are emptied often."""
    while True:
        newest.update((report.data_parallel_rank, report) for report in receiver.receive())
        await asyncio.sleep(_KV_METRICS_EVERY_S)


def _bind_pull(context: zmq.asyncio.Context, address: str, *, high_water_mark: int) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.PULL)
    socket.rcvhwm = high_water_mark
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        mend = "set TMPDIR to a short path that can be written to"
        raise StartError(address, str(error), mend) from error
    return socket


def _connect_leader(context: zmq.Context[zmq.Socket[bytes]], sockets: SocketPaths, replica: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = 0  # bounded by open requests: the front must never wait for a rank
    socket.connect(sockets.commands(replica))
    return socket
