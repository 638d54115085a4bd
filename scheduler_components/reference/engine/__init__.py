"""The reference engine: a front and lockstep scheduler processes, composed of every part of the kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names

if TYPE_CHECKING:
    from scheduler_components.reference.engine.cache_tiers import HostTiers
    from scheduler_components.reference.engine.config import (
        DEFAULT_HOST,
        EngineConfig,
        HiCacheConfig,
        RankConfig,
        SocketPaths,
        default_kv_events,
    )
    from scheduler_components.reference.engine.engine import Engine, open_engine
    from scheduler_components.reference.engine.front import (
        EngineFailedError,
        Front,
        GenerateRequest,
        LoadDispatcher,
        ReplicaLoad,
        RequestFailedError,
        RequestRefusedError,
        TooBusyError,
    )
    from scheduler_components.reference.engine.http import (
        MAX_BODY_BYTES,
        BadBodyError,
        EngineStatus,
        GenerateEndpoint,
        make_app,
        open_http_server,
        parse_body,
    )
    from scheduler_components.reference.engine.policy import NewTokenRatio, SchedulerConfig, check_request_fits
    from scheduler_components.reference.engine.scheduler import Scheduler
    from scheduler_components.reference.engine.zmq_sync import StopRequested, open_zmq_sync_domain

__all__ = [
    "BadBodyError",
    "Engine",
    "EngineConfig",
    "EngineFailedError",
    "EngineStatus",
    "Front",
    "GenerateEndpoint",
    "GenerateRequest",
    "HiCacheConfig",
    "HostTiers",
    "LoadDispatcher",
    "NewTokenRatio",
    "RankConfig",
    "ReplicaLoad",
    "RequestFailedError",
    "RequestRefusedError",
    "Scheduler",
    "SchedulerConfig",
    "SocketPaths",
    "StopRequested",
    "TooBusyError",
    "DEFAULT_HOST",
    "MAX_BODY_BYTES",
    "check_request_fits",
    "default_kv_events",
    "make_app",
    "open_engine",
    "open_http_server",
    "open_zmq_sync_domain",
    "parse_body",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.reference.engine.config": (
            "DEFAULT_HOST EngineConfig HiCacheConfig RankConfig SocketPaths default_kv_events"
        ),
        "scheduler_components.reference.engine.engine": "Engine open_engine",
        "scheduler_components.reference.engine.front": (
            "EngineFailedError Front GenerateRequest LoadDispatcher ReplicaLoad RequestFailedError "
            "RequestRefusedError TooBusyError"
        ),
        "scheduler_components.reference.engine.http": (
            "MAX_BODY_BYTES BadBodyError EngineStatus GenerateEndpoint make_app open_http_server parse_body"
        ),
        "scheduler_components.reference.engine.policy": ("NewTokenRatio SchedulerConfig check_request_fits"),
        "scheduler_components.reference.engine.scheduler": "Scheduler",
        "scheduler_components.reference.engine.cache_tiers": "HostTiers",
        "scheduler_components.reference.engine.zmq_sync": "StopRequested open_zmq_sync_domain",
    },
)
