"""The commands that run the reference engine: ``serve`` and ``demo``."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import attrs
import typer

from scheduler_components.hicache import HiCachePolicy
from scheduler_components.kv_events import EventPublisherFactory, KVEventsConfig
from scheduler_components.load import check_load_endpoint
from scheduler_components.reference.cli.screen import Screen
from scheduler_components.reference.cli.session import SessionConfig, run_session
from scheduler_components.reference.device import WorkloadConfig
from scheduler_components.reference.engine import (
    DEFAULT_HOST,
    MOONCAKE_MASTER,
    MOONCAKE_METADATA,
    EngineConfig,
    HiCacheConfig,
    SchedulerConfig,
    default_kv_events,
)

__all__ = [
    "HiCacheOption",
    "HostTokens",
    "MooncakeMaster",
    "MooncakeMetadata",
    "Prefetch",
    "PrefetchStop",
    "Storage",
    "StorageKind",
    "StoragePath",
    "Write",
    "WriteKind",
    "hicache_config",
    "EngineOptions",
    "with_engine_options",
    "demo",
    "serve",
]

# Command-line options of the hierarchical cache, and what they come to.

_HOST_TO_DEVICE = 4  # tokens on the host for each on the device, unless the operator says


class StorageKind(StrEnum):
    """Tiers behind the host."""

    NONE = "none"
    FILE = "file"
    MOONCAKE = "mooncake"


class WriteKind(StrEnum):
    """When pages go to the host."""

    THROUGH = "write_through"
    BACK = "write_back"


class PrefetchStop(StrEnum):
    """When a prefetch ends before it is complete."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


HiCacheOption = Annotated[bool, typer.Option("--hicache", help="Keep pages that the device evicts, on the host.")]
HostTokens = Annotated[
    int | None,
    typer.Option("--hicache-host-tokens", min=1, help="Size of the host tier. Default: four times --kv-tokens."),
]
Storage = Annotated[StorageKind, typer.Option("--hicache-storage", help="The tier behind the host.")]
StoragePath = Annotated[
    Path | None, typer.Option("--hicache-storage-path", help="Directory of the file storage; outlives the engine.")
]
MooncakeMaster = Annotated[
    str, typer.Option("--hicache-mooncake-master", metavar="HOST:PORT", help="Address of Mooncake's master.")
]
MooncakeMetadata = Annotated[
    str, typer.Option("--hicache-mooncake-metadata", metavar="URL", help="Address of Mooncake's metadata server.")
]
Write = Annotated[WriteKind, typer.Option("--hicache-write", help="When pages are copied to the host.")]
Prefetch = Annotated[PrefetchStop, typer.Option("--hicache-prefetch", help="When a prefetch from storage ends.")]


def hicache_config(
    is_on: bool,
    kv_tokens: int,
    *,
    host_tokens: int | None,
    storage: StorageKind,
    storage_path: Path | None,
    mooncake_master: str,
    mooncake_metadata: str,
    write: WriteKind,
    prefetch: PrefetchStop,
) -> HiCacheConfig | None:
    """Put the options together; None without ``--hicache``.

    Raises:
        ConfigError: naming what cannot work.
    """
    if not is_on:
        return None
    return HiCacheConfig(
        host_tokens=host_tokens if host_tokens is not None else _HOST_TO_DEVICE * kv_tokens,
        storage=storage.value,
        storage_path=str(storage_path.absolute()) if storage_path is not None else "",
        mooncake_master=mooncake_master,
        mooncake_metadata=mooncake_metadata,
        policy=HiCachePolicy(write=write.value, prefetch=prefetch.value),
    )


# The options of an engine, which ``serve`` and ``demo`` share, and what they come to.


@attrs.frozen(kw_only=True)
class EngineOptions:
    """One field an option; the help says what each is. The defaults are of an engine that serves."""

    host: Annotated[str, typer.Option(help="Address of the HTTP server.")] = DEFAULT_HOST
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the HTTP server; 0 lets the system choose.")] = (
        30_000
    )
    dp_size: Annotated[
        int, typer.Option(help="Data-parallel replicas: independent KV caches, one event stream each.")
    ] = 2
    attn_cp_size: Annotated[int, typer.Option(help="Ranks a replica along attention context parallelism.")] = 2
    attn_tp_size: Annotated[int, typer.Option(help="Ranks a replica along attention tensor parallelism.")] = 2
    page_size: Annotated[int, typer.Option(help="Tokens a KV page, and a block of the events.")] = 16
    kv_tokens: Annotated[int, typer.Option(help="Capacity of each replica's KV pool, in tokens.")] = 262_144
    max_running_requests: Annotated[int, typer.Option(help="Request slots of each replica.")] = 64
    chunk_tokens: Annotated[int, typer.Option(help="The most that one request prefills in a step, in tokens.")] = 2048
    kv_events_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="Event publisher's configuration. Default: loopback, free ports, with replay."
        ),
    ] = None
    affinity_tokens: Annotated[
        int,
        typer.Option(
            help="A conversation stays on its replica up to this many tokens of extra load; 0: by load alone."
        ),
    ] = 8192
    speed: Annotated[float, typer.Option(help="Divides the workload's or trace's time and the simulated device's.")] = (
        1.0
    )
    seed: Annotated[int, typer.Option(help="Of the generated workload and of the tokens that come out.")] = 0
    hicache: HiCacheOption = False
    hicache_host_tokens: HostTokens = None
    hicache_storage: Storage = StorageKind.NONE
    hicache_path: StoragePath = None
    hicache_mooncake_master: MooncakeMaster = MOONCAKE_MASTER
    hicache_mooncake_metadata: MooncakeMetadata = MOONCAKE_METADATA
    hicache_write: Write = WriteKind.THROUGH
    hicache_prefetch: Prefetch = PrefetchStop.BEST_EFFORT

    def engine_config(self) -> EngineConfig:
        """Put the options together.

        Raises:
            ConfigError: naming what cannot work.
        """
        engine = EngineConfig(
            dp_size=self.dp_size,
            attn_cp_size=self.attn_cp_size,
            attn_tp_size=self.attn_tp_size,
            scheduler=SchedulerConfig(
                page_size=self.page_size,
                kv_tokens=self.kv_tokens,
                max_running_requests=self.max_running_requests,
                chunk_tokens=self.chunk_tokens,
                max_prefill_tokens=max(self.chunk_tokens, SchedulerConfig().max_prefill_tokens),
            ),
            speed=self.speed,
            seed=self.seed,
            hicache=hicache_config(
                self.hicache,
                self.kv_tokens,
                host_tokens=self.hicache_host_tokens,
                storage=self.hicache_storage,
                storage_path=self.hicache_path,
                mooncake_master=self.hicache_mooncake_master,
                mooncake_metadata=self.hicache_mooncake_metadata,
                write=self.hicache_write,
                prefetch=self.hicache_prefetch,
            ),
        )
        return _with_kv_events(engine, self.kv_events_config)


def with_engine_options(defaults: EngineOptions) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Let a command take every engine option before its own options, and receive them as one ``EngineOptions``.

    typer makes the options from the parameters that a command says it has, so it is told of one a field.

    Args:
        defaults: what each option is when it is not given.
    """
    names = [field.name for field in attrs.fields(EngineOptions)]
    annotations = get_type_hints(EngineOptions, include_extras=True)

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        def parameter(name: str, default: object, annotation: object) -> inspect.Parameter:
            return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

        @wraps(command)
        def run(**given: Any) -> int:
            options = EngineOptions(**{name: given.pop(name) for name in names})
            return command(options, **given)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        shared = [parameter(name, getattr(defaults, name), annotations[name]) for name in names]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer asks for it
            [*shared, *(parameter(each.name, each.default, each.annotation) for each in own)]
        )
        return run

    return decorate


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


_DEFAULT_WORKLOAD = WorkloadConfig()


@with_engine_options(EngineOptions())
def serve(
    options: EngineOptions,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace (Mooncake's JSON lines), judge, stop.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Replay only the first requests of the trace.")] = None,
    keep_serving: Annotated[bool, typer.Option("--keep-serving", help="Go on serving after the trace.")] = False,
    duration: Annotated[float | None, typer.Option(min=0, help="Stop serving after so many seconds.")] = None,
) -> int:
    """Run the engine and serve HTTP until Ctrl-C, or replay a trace against it."""
    return _run(
        SessionConfig(
            engine=options.engine_config(),
            host=options.host,
            port=options.port,
            affinity_tokens=options.affinity_tokens,
            trace=trace,
            limit=limit,
            keep_serving=keep_serving,
            duration_s=duration,
        )
    )


# So small a pool that the generated chats push each other's pages out.
@with_engine_options(EngineOptions(port=0, kv_tokens=6144, max_running_requests=32, chunk_tokens=512))
def demo(
    options: EngineOptions,
    requests: Annotated[
        int, typer.Option(help="Requests of the generated multi-turn chats.")
    ] = _DEFAULT_WORKLOAD.num_requests,
    chats_per_s: Annotated[float, typer.Option(help="Chats that begin a second.")] = _DEFAULT_WORKLOAD.chats_per_s,
) -> int:
    """Run the engine under a generated workload with an observer on its event streams, and judge what it saw."""
    return _run(
        SessionConfig(
            engine=options.engine_config(),
            host=options.host,
            port=options.port,
            affinity_tokens=options.affinity_tokens,
            workload=WorkloadConfig(num_requests=requests, seed=options.seed, chats_per_s=chats_per_s),
        )
    )


def _run(config: SessionConfig) -> int:
    return 0 if asyncio.run(_until_terminated(config)) else 1


async def _until_terminated(config: SessionConfig) -> bool:
    """Ctrl-C cancels this task by itself (``asyncio.run``); SIGTERM shall do the same."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_session(config, Screen.standard())
