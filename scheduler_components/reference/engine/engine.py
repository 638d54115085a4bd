"""The engine: a private directory, the scheduler processes, and the front, from start to close.

The engine starts the scheduler processes, watches them, and stops them: none outlives the process that started it. A
rank reads its configuration from standard input, which then stays open: its end is the order to stop, and comes by
itself when the parent dies, however it dies. Ranks are in sessions of their own, so a Ctrl-C reaches the parent alone.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from observability import RankLabels
from scheduler_components import (
    ComponentError,
    ConfigError,
    KvMetrics,
    KvPoolSnapshot,
    OutputStats,
    SchedulerStats,
    StartError,
)
from scheduler_components.control_requests import ClearStorageIndex
from scheduler_components.metrics import (
    ShmBoard,
    ZmqKvMetricsReceiver,
    open_shm_metrics_board,
    open_zmq_kv_metrics_receiver,
)
from scheduler_components.reference.engine.config import EngineConfig, EnginePaths, HiCacheConfig, RankConfig
from scheduler_components.reference.engine.frontend.control_queue import ControlFailedError, ControlQueue
from scheduler_components.reference.engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_components.reference.engine.frontend.errors import EngineFailedError
from scheduler_components.reference.engine.frontend.frontend import Frontend
from scheduler_components.reference.engine.frontend.heartbeat_monitor import HEARTBEAT_TIMEOUT_S, HeartbeatMonitor
from scheduler_components.reference.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    MAX_QUEUED_BATCHES,
    CacheDump,
    RpcMethod,
    RpcRequest,
    decode_outputs,
    decode_report,
    unpack_hash_array,
)
from scheduler_components.reference.engine.rank_processes import RankExit, RankProcess, open_ranks

__all__ = [
    "RpcError",
    "Engine",
    "open_engine",
]

_START_DEADLINE_S = 60.0  # eight interpreters that start at once on two busy cores
_LOAD_DEADLINE_S = 900.0  # a large model from a slow disk
_ANSWER_DEADLINE_S = 30.0
_KV_METRICS_EVERY_S = 0.25
_TRANSFERS_END_S = 10.0  # pages that are on their way when a store is to be cleared

T = TypeVar("T")


class RpcError(ComponentError):
    """The ranks refuse what was asked; the text is for who asked."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """A running engine. Made by ``open_engine``.

    Attributes:
        config: what it was made of.
        front: takes requests.
        ranks: the scheduler processes.
        stats: each replica's newest statistics; read when somebody asks for them.
        kv_metrics: newest ``KvMetrics`` of each data-parallel rank.
        orders: pauses, flushes, new weights: what all replicas are told to do.
    """

    config: EngineConfig
    front: Frontend
    ranks: list[RankProcess]
    stats: ShmBoard[SchedulerStats]
    kv_metrics: dict[int, KvMetrics] = field(default_factory=dict)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    control: ControlQueue = field(init=False)
    _ids: count[int] = field(default_factory=lambda: count(1), init=False)

    def __post_init__(self) -> None:
        self.control = ControlQueue(front=self.front)

    def output_stats(self) -> Mapping[RankLabels, OutputStats]:
        """Counters of outputs by the labels of the rank that sent them, for whoever exports them."""
        config = self.config
        return {
            config.parallel(config.leader_rank(replica)).metric_labels: counters
            for replica, counters in self.front.board.outputs.items()
        }

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
        """Wait until no request is in flight and every replica has said so.

        Raises:
            EngineFailedError: requests were still open after 30 seconds.
        """
        await self._expect(lambda: self.front.is_idle, "the engine did not become idle; is somebody else using it?")

    async def dump_caches(self) -> dict[int, CacheDump]:
        """Every rank's blocks by rank; all ranks of a replica answer at the same step.

        Raises:
            EngineFailedError: a rank did not answer in time.
        """
        dump_id, dumps = next(self._ids), self.front.board.answers.dumps
        self.front.request_cache_dumps(dump_id)

        def all_answered() -> bool:
            return sum(dump.dump_id == dump_id for dump in dumps.values()) == self.config.world_size

        await self._expect(all_answered, "not all ranks dumped their caches")
        return dict(dumps)

    async def clear_storage(self) -> int | None:
        """Remove every page of the store, and let all ranks count nothing as stored any more.

        First the ranks forget, then the pages go. A request that comes between the two may lose a page that it has
        just stored: it is a miss later, as after any other process that clears the store.

        Returns:
            How many pages were removed. None, and all of them are kept, while requests or pages are on their way.

        Raises:
            ConfigError: there is no store that an engine can clear.
            EngineFailedError: a rank did not answer in time.
            StartError, StorageError: the directory cannot be changed.
        """
        hicache = self.config.hicache
        if hicache is None or hicache.storage != "file":
            kind = "none" if hicache is None else hicache.storage
            hint = "use its own tools" if kind == "mooncake" else "start the engine with one"
            raise ConfigError("storage", kind, "is not a store that the engine can clear", hint)
        if not self.front.is_idle:
            return None
        try:
            await self.control.send(ClearStorageIndex(_TRANSFERS_END_S))
        except ControlFailedError:
            return None
        return await asyncio.to_thread(_clear_file_store, hicache)

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: one pool and one stream each."""
        return self.config.dp_size

    async def read_pool(self, rank: int) -> KvPoolSnapshot:
        """What the pool of a data-parallel rank holds, read between two of its steps.

        Raises:
            EngineFailedError: the rank did not answer in time.
        """
        read_id, pools = next(self._ids), self.front.board.answers.pools
        self.front.request_pool_snapshot(rank, read_id)
        await self._expect(
            lambda: rank in pools and pools[rank].read_id >= read_id, f"rank {rank} did not read its pool"
        )
        read = pools[rank]
        blocks = {(each.medium, each.group_idx): unpack_hash_array(each.hashes) for each in read.places}
        return KvPoolSnapshot(blocks, read.sequence, rank)

    async def ask(self, verb: RpcMethod, body: bytes = b"") -> dict[int, Any]:
        """What every rank says to a question of ``RpcHandler``, by rank. The questions of an engine come one by one.

        Raises:
            ConfigError: the engine keeps no profiles.
            RpcError: the ranks refuse, all for one reason; nothing is changed.
            EngineFailedError: a rank did not answer in time.
        """
        if verb == "start_profile" and not self.config.profile_directory:
            raise ConfigError("profile_directory", "", "is not set", "start the engine with --profile-directory")
        async with self._asking:
            rpc_id, answers = next(self._ids), self.front.board.answers.control
            self.front.broadcast_rpc(RpcRequest(rpc_id, verb, body))
            await self._expect(
                lambda: sum(each.rpc_id == rpc_id for each in answers.values()) == self.config.world_size,
                f"not all ranks answered {verb}",
            )
            for answer in answers.values():
                if answer.problem is not None:
                    raise RpcError(answer.problem)
            return {rank: msgspec.json.decode(answers[rank].body) for rank in sorted(answers)}

    async def _expect(self, condition: Callable[[], bool], complaint: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_DEADLINE_S):
                await self.front.board.wait_until(condition)
        except TimeoutError:
            raise EngineFailedError(f"{complaint} ({_ANSWER_DEADLINE_S} s)") from None


def _clear_file_store(hicache: HiCacheConfig) -> int:
    from scheduler_components.hicache import open_file_page_store  # needs what an engine without tiers need not have

    store = open_file_page_store(hicache.storage_path, capacity_bytes=hicache.storage_bytes)
    try:
        return store.clear()
    finally:
        store.close()


@asynccontextmanager
async def open_engine(
    config: EngineConfig, *, affinity_tokens: int = 0, show: Callable[[str], None]
) -> AsyncIterator[Engine]:
    """Start an engine and wait until all ranks are ready; on leaving, its processes, sockets and files are gone.

    Args:
        config: what to start.
        affinity_tokens: see ``LoadDispatcher``.
        show: takes lines that ranks write to standard error.

    Raises:
        StartError: the ranks were not ready in time.
        EngineFailedError: a rank ended, and what it said.
    """
    async with AsyncExitStack() as opened:
        directory = tempfile.mkdtemp(prefix="scheduler-components-")
        opened.callback(shutil.rmtree, directory)
        paths = EnginePaths(directory)
        incoming, outgoing = zmq.asyncio.Context(), zmq.Context[zmq.Socket[bytes]]()
        opened.callback(incoming.destroy, linger=0)
        opened.callback(outgoing.destroy, linger=0)
        # Reports are bounded by open requests: ranks must never wait for the front with them.
        reports = _bind_pull(incoming, paths.reports, high_water_mark=0)
        outputs = _bind_pull(incoming, paths.outputs, high_water_mark=MAX_QUEUED_BATCHES)
        receiver = open_zmq_kv_metrics_receiver(paths.kv_metrics)
        opened.callback(receiver.close)
        front = Frontend(
            leaders=[_connect_leader(outgoing, paths, replica) for replica in range(config.dp_size)],
            dispatcher=LoadDispatcher(
                replicas=[ReplicaLoad() for _ in range(config.dp_size)], affinity_tokens=affinity_tokens
            ),
            heartbeats=HeartbeatMonitor(
                timeout_s=HEARTBEAT_TIMEOUT_S / config.relative_speed,  # a slow device's steps are long
                num_lockstep_replicas=config.dp_size if config.dp_attention is not None else 0,
            ),
        )
        rank_configs = [RankConfig(config, rank, paths) for rank in range(config.world_size)]
        ranks, first_exit = await opened.enter_async_context(open_ranks(rank_configs, show=show))
        stats = open_shm_metrics_board(Path(directory), config.dp_size)
        engine = Engine(config=config, front=front, ranks=ranks, stats=stats)
        first_exit.add_done_callback(lambda exited: _note_failure(front, exited))
        await opened.enter_async_context(_running(_listen(reports, front), front))
        await opened.enter_async_context(_running(_receive_outputs(outputs, front), front))
        await opened.enter_async_context(_running(_count_silence(front), front))
        await opened.enter_async_context(_running(_collect_kv_metrics(receiver, engine.kv_metrics), front))
        await _wait_for_ranks(engine)
        yield engine


async def _wait_for_ranks(engine: Engine) -> None:
    ready = engine.front.board.ready
    deadline_s = _START_DEADLINE_S if engine.config.model is None else _LOAD_DEADLINE_S
    try:
        async with asyncio.timeout(deadline_s):
            await engine.run(engine.front.board.wait_until(lambda: len(ready) == engine.config.world_size))
    except TimeoutError:
        missing = sorted(set(range(engine.config.world_size)) - set(ready))
        raise StartError(f"ranks {missing}", f"not ready after {deadline_s} s", "start fewer ranks") from None


def _note_failure(front: Frontend, exited: asyncio.Future[RankExit]) -> None:
    if not exited.cancelled():
        front.fail(EngineFailedError(str(exited.result())))


@asynccontextmanager
async def _running(work: Coroutine[None, None, None], front: Frontend) -> AsyncIterator[None]:
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


async def _listen(reports: zmq.asyncio.Socket, front: Frontend) -> None:
    """Hand every report to the front. One that cannot be read ends the engine: a rank is of another version."""
    while True:
        front.receive(decode_report(await reports.recv()))


async def _receive_outputs(outputs: zmq.asyncio.Socket, front: Frontend) -> None:
    """Hand every batch of outputs to the front, as with reports."""
    while True:
        front.process_outputs(decode_outputs(await outputs.recv()))


async def _count_silence(front: Frontend) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        front.tick()


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
        hint = "set TMPDIR to a short path that can be written to"
        raise StartError(address, str(error), hint) from error
    return socket


def _connect_leader(context: zmq.Context[zmq.Socket[bytes]], paths: EnginePaths, replica: int) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = 0  # bounded by open requests: the front must never wait for a rank
    socket.connect(paths.commands(replica))
    return socket
