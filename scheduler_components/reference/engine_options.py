"""The options of an engine, which ``serve`` and ``demo`` share, and what they come to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

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

__all__ = ["EngineOptions", "with_engine_options"]


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
