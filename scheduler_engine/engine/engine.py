"""Engine: the scheduler processes and the frontend of one engine, from start to close.

``open_engine`` creates a private directory for sockets and statistics, starts the rank processes, opens the frontend
and waits until every rank is ready. Four background tasks receive reports, outputs and slot metrics, and count the
frontend's ticks. If one of them or a rank ends, the engine has failed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from scheduler_components import ConfigError, StartError
from scheduler_components.metrics import open_shm_metrics_board
from scheduler_components.metrics.shm_board import ShmBoard
from scheduler_components.values import ClearStorageIndex, KvPoolSnapshot, SchedulerStats
from scheduler_engine.engine.config import EngineConfig, EnginePaths, HiCacheConfig, RankConfig
from scheduler_engine.engine.messages import (
    HEARTBEAT_INTERVAL_S,
    MAX_QUEUED_BATCHES,
    CacheDump,
    DumpCache,
    ReadPool,
    RpcMethod,
    RpcRequest,
    decode_outputs,
    decode_report,
    unpack_hash_array,
)
from scheduler_engine.engine.rank_processes import RankExit, RankProcess, open_ranks
from scheduler_engine.engine.zmq_sockets import bind_pull, connect_push
from scheduler_engine.frontend.adapter_directory import AdapterDirectory
from scheduler_engine.frontend.control_queue import ControlFailedError, ControlQueue
from scheduler_engine.frontend.dispatcher import LoadDispatcher, ReplicaLoad
from scheduler_engine.frontend.errors import EngineFailedError, RequestRefusedError
from scheduler_engine.frontend.frontend import REPLY_TIMEOUT_S, Frontend
from scheduler_engine.frontend.heartbeat_monitor import HEARTBEAT_TIMEOUT_S, HeartbeatMonitor

_START_TIMEOUT_S = 60.0  # eight interpreters that start together on two busy cores
_MODEL_LOAD_TIMEOUT_S = 900.0  # a large model from a slow disk
_TRANSFER_TIMEOUT_S = 10.0  # for transfers that are in flight when a store is to be cleared

T = TypeVar("T")


class RpcError(RequestRefusedError):
    """The ranks refused an RPC. The text says why."""


@dataclass(slots=True, kw_only=True)
class Engine:
    """A running engine. Made by ``open_engine``.

    Attributes:
        config: configuration of the engine.
        frontend: dispatches requests.
        ranks: the scheduler processes.
        stats: the board of the ranks' newest statistics, in shared memory.
        control: executes control requests: pause, flush, weight update, release of memory.
        adapters: loads and unloads adapters.
    """

    config: EngineConfig
    frontend: Frontend
    ranks: list[RankProcess]
    stats: ShmBoard[SchedulerStats]
    control: ControlQueue = field(init=False)
    adapters: AdapterDirectory = field(init=False)
    _rpc_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _ids: count[int] = field(default_factory=lambda: count(1), init=False)

    def __post_init__(self) -> None:
        self.control = ControlQueue(frontend=self.frontend)
        self.adapters = AdapterDirectory(
            control=self.control, config=self.config.scheduler.lora, model_name=self.config.model_name
        )

    async def run(self, work: Awaitable[T]) -> T:
        """Await ``work``, and cancel it if the engine fails.

        Raises:
            EngineFailedError: a rank ended.
        """
        replies = self.frontend.replies
        task = asyncio.ensure_future(work)
        failed = asyncio.ensure_future(replies.failed.wait())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if replies.failure is not None:
                raise replies.failure
            return task.result()
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    async def wait_until_idle(self) -> None:
        """Wait until no request is in flight and every replica has reported that it is idle.

        Raises:
            EngineFailedError: requests were still open after ``REPLY_TIMEOUT_S``.
        """
        await self._wait_until(
            lambda: self.frontend.is_idle, "the engine did not become idle; does another client use it?"
        )

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait until the open ones have ended. Return how many are still open at the deadline.

        Raises:
            EngineFailedError: a rank ended.
        """
        self.frontend.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.run(self.frontend.replies.wait_until(lambda: not self.frontend.num_open_requests))
        return self.frontend.num_open_requests

    async def dump_caches(self) -> dict[int, CacheDump]:
        """Return the cached blocks of every rank, by rank. All ranks of a replica dump after the same step.

        Raises:
            EngineFailedError: a rank did not reply in time.
        """
        dump_id, dumps = next(self._ids), self.frontend.replies.commands.dumps
        self.frontend.broadcast(DumpCache(dump_id))
        await self._wait_until(
            lambda: sum(dump.dump_id == dump_id for dump in dumps.values()) == self.config.world_size,
            "not all ranks dumped their caches",
        )
        return dict(dumps)

    async def clear_storage(self) -> int | None:
        """Remove every page of the file store, and clear the index of stored pages on all ranks.

        The indexes are cleared first, then the pages. A request between the two may store a page that is removed
        immediately. A later lookup of that page misses, as after any other process that clears the store.

        Returns:
            The number of removed pages, or None if nothing was removed because requests or transfers are in flight.

        Raises:
            ConfigError: the engine has no store that it can clear.
            EngineFailedError: a rank did not reply in time.
            StartError, StorageError: the directory cannot be changed.
        """
        hicache = self.config.hicache
        if hicache is None or hicache.storage != "file":
            kind = "none" if hicache is None else hicache.storage
            hint = "use its own tools" if kind == "mooncake" else "start the engine with one"
            raise ConfigError("storage", kind, "is not a store that the engine can clear", hint)
        if not self.frontend.is_idle:
            return None
        try:
            await self.control.send(ClearStorageIndex(_TRANSFER_TIMEOUT_S))
        except ControlFailedError:
            return None
        return await asyncio.to_thread(_clear_file_store, hicache)

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks. Each has one KV pool and one event stream."""
        return self.config.dp_size

    async def read_pool(self, rank: int) -> KvPoolSnapshot:
        """Return the content of the pool of a data-parallel rank, read between two steps.

        Raises:
            EngineFailedError: the rank did not reply in time.
        """
        read_id, pools = next(self._ids), self.frontend.replies.commands.pools
        self.frontend.send(rank, ReadPool(read_id))
        await self._wait_until(
            lambda: rank in pools and pools[rank].read_id >= read_id, f"rank {rank} did not read its pool"
        )
        pool = pools[rank]
        blocks = {(place.medium, place.group_idx): unpack_hash_array(place.hashes) for place in pool.places}
        return KvPoolSnapshot(blocks, pool.sequence, rank)

    async def ask(self, method: RpcMethod, body: bytes = b"", *, replica: int | None = None) -> dict[int, Any]:
        """Call an RPC method of ``RpcHandler`` and return the results, by rank. Calls run one at a time.

        Args:
            method: the method.
            body: its arguments as JSON.
            replica: call it on the ranks of this replica; None for all ranks.

        Raises:
            ConfigError: the engine records no profiles.
            RpcError: the ranks refused, all for the same reason, and changed nothing.
            EngineFailedError: a rank did not reply in time.
        """
        if method == "start_profile" and not self.config.profile_directory:
            raise ConfigError("profile_directory", "", "is not set", "start the engine with --profile-directory")
        async with self._rpc_lock:
            rpc_id, replies = next(self._ids), self.frontend.replies.commands.rpcs
            replicas = range(self.config.dp_size) if replica is None else (replica,)
            for each in replicas:
                self.frontend.send(each, RpcRequest(rpc_id, method, body))
            num_ranks = len(replicas) * (1 + len(self.config.follower_ranks(0)))
            await self._wait_until(
                lambda: sum(reply.rpc_id == rpc_id for reply in replies.values()) == num_ranks,
                f"not all ranks replied to {method}",
            )
            answers = {rank: reply for rank, reply in sorted(replies.items()) if reply.rpc_id == rpc_id}
            for reply in answers.values():
                if reply.problem is not None:
                    raise RpcError(reply.problem)
            return {rank: msgspec.json.decode(reply.body) for rank, reply in answers.items()}

    async def _wait_until(self, condition: Callable[[], bool], problem: str) -> None:
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await self.frontend.replies.wait_until(condition)
        except TimeoutError:
            raise EngineFailedError(f"{problem} within {REPLY_TIMEOUT_S} s") from None


def _clear_file_store(hicache: HiCacheConfig) -> int:
    # Imported here, because only an engine with a file store needs numpy.
    from scheduler_components.hicache import open_file_page_store

    store = open_file_page_store(hicache.storage_path, capacity_bytes=hicache.storage_bytes)
    try:
        return store.clear()
    finally:
        store.close()


@asynccontextmanager
async def open_engine(
    config: EngineConfig, *, tokenizer: str = "", affinity_tokens: int = 0, show: Callable[[str], None]
) -> AsyncIterator[Engine]:
    """Start an engine and wait until all ranks are ready. Leaving the block removes its processes, sockets and files.

    Args:
        config: configuration of the engine.
        tokenizer: the model's, from ``TextTokenizer.to_json``, by which the ranks compile grammars.
        affinity_tokens: see ``LoadDispatcher``.
        show: receives each line that a rank writes to standard error.

    Raises:
        StartError: the ranks were not ready in time.
        EngineFailedError: a rank ended; the text has its last line.
    """
    async with AsyncExitStack() as opened:
        directory = tempfile.mkdtemp(prefix="scheduler-components-")
        opened.callback(shutil.rmtree, directory)
        paths = EnginePaths(directory)
        paths.tokenizer.write_text(tokenizer, encoding="utf-8")
        incoming, outgoing = zmq.asyncio.Context(), zmq.Context[zmq.Socket[bytes]]()
        opened.callback(incoming.destroy, linger=0)
        opened.callback(outgoing.destroy, linger=0)
        # No high-water mark, because a rank must never block on a report. Open requests bound the number of reports.
        reports = bind_pull(incoming, paths.reports, high_water_mark=0)
        outputs = bind_pull(incoming, paths.outputs, high_water_mark=MAX_QUEUED_BATCHES)
        frontend = Frontend(
            # The frontend must never block on a rank. Open requests bound the queue.
            leaders=[connect_push(outgoing, paths.commands(replica)) for replica in range(config.dp_size)],
            dispatcher=LoadDispatcher(
                replicas=[ReplicaLoad() for _ in range(config.dp_size)], affinity_tokens=affinity_tokens
            ),
            heartbeats=HeartbeatMonitor(
                timeout_s=HEARTBEAT_TIMEOUT_S / config.relative_speed,  # a slow device takes long steps
                num_lockstep_replicas=config.dp_size if config.dp_attention is not None else 0,
            ),
        )
        rank_configs = [RankConfig(config, rank, paths) for rank in range(config.world_size)]
        ranks, first_exit = await opened.enter_async_context(open_ranks(rank_configs, show=show))
        stats = open_shm_metrics_board(Path(directory), config.dp_size)
        engine = Engine(config=config, frontend=frontend, ranks=ranks, stats=stats)
        first_exit.add_done_callback(lambda exit_: _on_rank_exit(frontend, exit_))
        for task in (
            _receive_reports(reports, frontend),
            _receive_outputs(outputs, frontend),
            _tick(frontend),
        ):
            await opened.enter_async_context(_background(task, frontend))
        await _wait_for_ranks(engine)
        yield engine


async def _wait_for_ranks(engine: Engine) -> None:
    replies, world_size = engine.frontend.replies, engine.config.world_size
    timeout_s = _START_TIMEOUT_S if engine.config.model is None else _MODEL_LOAD_TIMEOUT_S
    try:
        async with asyncio.timeout(timeout_s):
            await engine.run(replies.wait_until(lambda: len(replies.ready) == world_size))
    except TimeoutError:
        missing = sorted(set(range(world_size)) - set(replies.ready))
        raise StartError(f"ranks {missing}", f"not ready after {timeout_s} s", "start fewer ranks") from None


def _on_rank_exit(frontend: Frontend, exited: asyncio.Future[RankExit]) -> None:
    if not exited.cancelled():
        frontend.fail(EngineFailedError(str(exited.result())))


@asynccontextmanager
async def _background(work: Coroutine[None, None, None], frontend: Frontend) -> AsyncIterator[None]:
    """Run ``work`` as a task until the block is left. If the task ends earlier, the engine has failed."""

    def on_end(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled():
            frontend.fail(EngineFailedError(f"a task of the frontend ended: {ended.exception()!r}"))

    task = asyncio.create_task(work)
    task.add_done_callback(on_end)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _receive_reports(reports: zmq.asyncio.Socket, frontend: Frontend) -> None:
    """Pass every report to the frontend. A frame that cannot be decoded ends the task and with it the engine."""
    while True:
        frontend.receive(decode_report(await reports.recv()))


async def _receive_outputs(outputs: zmq.asyncio.Socket, frontend: Frontend) -> None:
    while True:
        frontend.process_outputs(decode_outputs(await outputs.recv()))


async def _tick(frontend: Frontend) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        frontend.tick()
