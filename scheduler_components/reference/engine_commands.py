"""The commands that run the reference engine: ``serve`` and ``demo``."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import attrs
import typer

from scheduler_components.kv_events.config import KVEventsConfig
from scheduler_components.kv_events.registry import EventPublisherFactory
from scheduler_components.load.zmq_load_sink import check_load_endpoint
from scheduler_components.reference.engine_config import DEFAULT_HOST, EngineConfig, default_kv_events
from scheduler_components.reference.hicache_options import (
    MOONCAKE_MASTER,
    MOONCAKE_METADATA,
    HiCacheOption,
    HostTokens,
    MooncakeMaster,
    MooncakeMetadata,
    Prefetch,
    PrefetchStop,
    Storage,
    StorageKind,
    StoragePath,
    Write,
    WriteKind,
    hicache_config,
)
from scheduler_components.reference.policy import SchedulerConfig
from scheduler_components.reference.screen import Screen
from scheduler_components.reference.session import run_session
from scheduler_components.reference.session_config import SessionConfig
from scheduler_components.reference.workload import WorkloadConfig

__all__ = ["demo", "serve"]

_DEFAULT_WORKLOAD = WorkloadConfig()

_DpSize = Annotated[int, typer.Option(help="Data-parallel replicas: independent KV caches, one event stream each.")]
_AttnCpSize = Annotated[int, typer.Option(help="Ranks a replica along attention context parallelism.")]
_AttnTpSize = Annotated[int, typer.Option(help="Ranks a replica along attention tensor parallelism.")]
_PageSize = Annotated[int, typer.Option(help="Tokens a KV page, and a block of the events.")]
_KvTokens = Annotated[int, typer.Option(help="Capacity of each replica's KV pool, in tokens.")]
_MaxRunning = Annotated[int, typer.Option(help="Request slots of each replica.")]
_ChunkTokens = Annotated[int, typer.Option(help="The most that one request prefills in a step, in tokens.")]
_Seed = Annotated[int, typer.Option(help="Of the generated workload and of the tokens that come out.")]
_Speed = Annotated[float, typer.Option(help="Divides the workload's or trace's time and the simulated device's.")]
_Affinity = Annotated[
    int,
    typer.Option(help="A conversation stays on its replica up to this many tokens of extra load; 0: by load alone."),
]
_KvEvents = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="Event publisher's configuration. Default: loopback, free ports, with replay."),
]
_Host = Annotated[str, typer.Option(help="Address of the HTTP server.")]
_Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP server; 0 lets the system choose.")]


def serve(
    host: _Host = DEFAULT_HOST,
    port: _Port = 30_000,
    dp_size: _DpSize = 2,
    attn_cp_size: _AttnCpSize = 2,
    attn_tp_size: _AttnTpSize = 2,
    page_size: _PageSize = 16,
    kv_tokens: _KvTokens = 262_144,
    max_running_requests: _MaxRunning = 64,
    chunk_tokens: _ChunkTokens = 2048,
    kv_events_config: _KvEvents = None,
    affinity_tokens: _Affinity = 8192,
    speed: _Speed = 1.0,
    seed: _Seed = 0,
    hicache: HiCacheOption = False,
    hicache_host_tokens: HostTokens = None,
    hicache_storage: Storage = StorageKind.NONE,
    hicache_path: StoragePath = None,
    hicache_mooncake_master: MooncakeMaster = MOONCAKE_MASTER,
    hicache_mooncake_metadata: MooncakeMetadata = MOONCAKE_METADATA,
    hicache_write: Write = WriteKind.THROUGH,
    hicache_prefetch: Prefetch = PrefetchStop.BEST_EFFORT,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace (Mooncake's JSON lines), judge, stop.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests of the trace.")] = None,
    keep_serving: Annotated[bool, typer.Option("--keep-serving", help="Go on serving after the trace.")] = False,
    duration: Annotated[float | None, typer.Option(min=0, help="Stop serving after so many seconds.")] = None,
) -> int:
    """Run the engine and serve HTTP until Ctrl-C, or replay a trace against it."""
    engine = EngineConfig(
        dp_size=dp_size,
        attn_cp_size=attn_cp_size,
        attn_tp_size=attn_tp_size,
        scheduler=_sizes(page_size, kv_tokens, max_running_requests, chunk_tokens),
        speed=speed,
        seed=seed,
        hicache=hicache_config(
            hicache,
            kv_tokens,
            host_tokens=hicache_host_tokens,
            storage=hicache_storage,
            storage_path=hicache_path,
            mooncake_master=hicache_mooncake_master,
            mooncake_metadata=hicache_mooncake_metadata,
            write=hicache_write,
            prefetch=hicache_prefetch,
        ),
    )
    return _run(
        SessionConfig(
            engine=_with_kv_events(engine, kv_events_config),
            host=host,
            port=port,
            affinity_tokens=affinity_tokens,
            trace=trace,
            limit=limit,
            keep_serving=keep_serving,
            duration_s=duration,
        )
    )


def demo(
    host: _Host = DEFAULT_HOST,
    port: _Port = 0,
    dp_size: _DpSize = 2,
    attn_cp_size: _AttnCpSize = 2,
    attn_tp_size: _AttnTpSize = 2,
    page_size: _PageSize = 16,
    kv_tokens: _KvTokens = 6144,
    max_running_requests: _MaxRunning = 32,
    chunk_tokens: _ChunkTokens = 512,
    kv_events_config: _KvEvents = None,
    affinity_tokens: _Affinity = 8192,
    speed: _Speed = 1.0,
    seed: _Seed = 0,
    hicache: HiCacheOption = False,
    hicache_host_tokens: HostTokens = None,
    hicache_storage: Storage = StorageKind.NONE,
    hicache_path: StoragePath = None,
    hicache_mooncake_master: MooncakeMaster = MOONCAKE_MASTER,
    hicache_mooncake_metadata: MooncakeMetadata = MOONCAKE_METADATA,
    hicache_write: Write = WriteKind.THROUGH,
    hicache_prefetch: Prefetch = PrefetchStop.BEST_EFFORT,
    requests: Annotated[
        int, typer.Option(help="Requests of the generated multi-turn chats.")
    ] = _DEFAULT_WORKLOAD.num_requests,
    chats_per_s: Annotated[float, typer.Option(help="Chats that begin a second.")] = _DEFAULT_WORKLOAD.chats_per_s,
) -> int:
    """Run the engine under a generated workload with an observer on its event streams, and judge what it saw."""
    engine = EngineConfig(
        dp_size=dp_size,
        attn_cp_size=attn_cp_size,
        attn_tp_size=attn_tp_size,
        scheduler=_sizes(page_size, kv_tokens, max_running_requests, chunk_tokens),
        speed=speed,
        seed=seed,
        hicache=hicache_config(
            hicache,
            kv_tokens,
            host_tokens=hicache_host_tokens,
            storage=hicache_storage,
            storage_path=hicache_path,
            mooncake_master=hicache_mooncake_master,
            mooncake_metadata=hicache_mooncake_metadata,
            write=hicache_write,
            prefetch=hicache_prefetch,
        ),
    )
    return _run(
        SessionConfig(
            engine=_with_kv_events(engine, kv_events_config),
            host=host,
            port=port,
            affinity_tokens=affinity_tokens,
            workload=WorkloadConfig(num_requests=requests, seed=seed, chats_per_s=chats_per_s),
        )
    )


def _sizes(page_size: int, kv_tokens: int, max_running_requests: int, chunk_tokens: int) -> SchedulerConfig:
    return SchedulerConfig(
        page_size=page_size,
        kv_tokens=kv_tokens,
        max_running_requests=max_running_requests,
        chunk_tokens=chunk_tokens,
        max_prefill_tokens=max(chunk_tokens, SchedulerConfig().max_prefill_tokens),
    )


def _with_kv_events(engine: EngineConfig, text: str | None) -> EngineConfig:
    """Add the event stream's configuration, checked here so that a mistake costs no process."""
    if text is None:
        return attrs.evolve(engine, kv_events=default_kv_events(engine))
    settings = KVEventsConfig.from_cli(text)
    plan = settings.port_plan(engine.dp_size)
    if plan.load is not None:
        check_load_endpoint(plan.load)
    EventPublisherFactory.find(settings.publisher)
    return attrs.evolve(engine, kv_events=text)


def _run(config: SessionConfig) -> int:
    return 0 if asyncio.run(_until_terminated(config)) else 1


async def _until_terminated(config: SessionConfig) -> bool:
    """Ctrl-C cancels this task by itself (``asyncio.run``); SIGTERM shall do the same."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_session(config, Screen.standard())
