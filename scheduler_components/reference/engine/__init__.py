"""The reference engine: a front and lockstep scheduler processes, composed of every part of the kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports

if TYPE_CHECKING:
    from scheduler_components.reference.engine.batcher import (
        POOL,
        Batcher,
        RequestPages,
        check_request_fits,
        check_tokens_known,
        expected_pages,
        pages_for,
        pages_to_come,
        prefill_chunk,
        retraction_victim,
    )
    from scheduler_components.reference.engine.cache_tiers import CacheTiers, DeviceTier
    from scheduler_components.reference.engine.config import (
        DEFAULT_HOST,
        MOONCAKE_MASTER,
        MOONCAKE_METADATA,
        DpAttentionConfig,
        EngineConfig,
        EnginePaths,
        HiCacheConfig,
        IntegrityConfig,
        RankConfig,
        SchedulerConfig,
        StorageChecksum,
        StorageKind,
        check_ports_free,
        default_kv_events,
    )
    from scheduler_components.reference.engine.control import BatcherState, Control, ProfiledDevice
    from scheduler_components.reference.engine.dp_attn_sim import (
        Arrival,
        DpSimConfig,
        DpSimReport,
        make_arrivals,
        simulate_dp_attn,
    )
    from scheduler_components.reference.engine.engine import ControlRefusedError, Engine, open_engine
    from scheduler_components.reference.engine.front import (
        EngineFailedError,
        Front,
        GenerateRequest,
        LoadDispatcher,
        OpenRequest,
        ReplicaLoad,
        RequestFailedError,
        RequestRefusedError,
        TooBusyError,
    )
    from scheduler_components.reference.engine.generation import (
        DEFAULT_NEW_TOKENS,
        TextFront,
        TextNews,
        Wanted,
        codec_of,
    )
    from scheduler_components.reference.engine.host_tiers import (
        HostTiers,
        RankKv,
        SimulatedKv,
        TierLayerDoneCounter,
        open_host_tiers,
        simulated_kv,
        torch_kv,
    )
    from scheduler_components.reference.engine.http import (
        EngineStatus,
        bind_http,
        make_app,
        open_http_server,
        text_routes,
    )
    from scheduler_components.reference.engine.http_exchange import MAX_BODY_BYTES, BadBodyError, BodyReader
    from scheduler_components.reference.engine.http_generate import GenerateBody, GenerateEndpoint, read_generate_body
    from scheduler_components.reference.engine.http_openai import RANK_HEADER, ChatEndpoint, CompletionEndpoint
    from scheduler_components.reference.engine.messages import (
        ALIVE_EVERY_S,
        FRONT,
        AbortRequest,
        BlockInput,
        CacheDump,
        Command,
        CommandReader,
        DrainInput,
        DumpCache,
        GiveOrder,
        LoadReport,
        OrderAnswered,
        OutputSocket,
        PoolPlace,
        PoolRead,
        RankAlive,
        RankReady,
        RankStalled,
        ReadPool,
        Report,
        RequestRefused,
        SubmitRequest,
        UnblockInput,
        decode_command,
        decode_outputs,
        decode_report,
        encode,
        encode_outputs,
        pack_hashes,
        pack_tokens,
        unpack_hash_array,
        unpack_hashes,
        unpack_tokens,
    )
    from scheduler_components.reference.engine.orders import OrderDesk, OrderRefusedError
    from scheduler_components.reference.engine.pool_guard import GuardedTotals, PoolGuard, RequestHolders, RequestSlots
    from scheduler_components.reference.engine.pulse import RankPulse, RankSilentError
    from scheduler_components.reference.engine.quiesce import QuiescableScheduler, quiesce_of
    from scheduler_components.reference.engine.rank_device import RankDevice, open_rank_device
    from scheduler_components.reference.engine.rank_loop import (
        Follower,
        FrontLoadSink,
        FrontStallSink,
        Heartbeat,
        Leader,
        RefusalReports,
        ReportSocket,
        StepExecutor,
        StopSignal,
    )
    from scheduler_components.reference.engine.request import Request, RequestQueues, RequestState, SamplingLimits
    from scheduler_components.reference.engine.scheduler import Clocks, Scheduler, SchedulerSinks, StepResult
    from scheduler_components.reference.engine.zmq_sync import ZmqSyncHub, open_zmq_groups, open_zmq_sync_hub

__all__ = [
    "Arrival",
    "DpSimConfig",
    "DpSimReport",
    "make_arrivals",
    "simulate_dp_attn",
    "BatcherState",
    "Control",
    "ControlRefusedError",
    "ProfiledDevice",
    "AbortRequest",
    "BadBodyError",
    "Batcher",
    "BlockInput",
    "CacheDump",
    "CacheTiers",
    "Clocks",
    "Command",
    "CommandReader",
    "DeviceTier",
    "DpAttentionConfig",
    "DrainInput",
    "DumpCache",
    "Engine",
    "EngineConfig",
    "EngineFailedError",
    "EnginePaths",
    "EngineStatus",
    "Follower",
    "Front",
    "FrontLoadSink",
    "FrontStallSink",
    "Heartbeat",
    "BodyReader",
    "ChatEndpoint",
    "CompletionEndpoint",
    "GenerateBody",
    "GenerateEndpoint",
    "GenerateRequest",
    "GiveOrder",
    "HiCacheConfig",
    "IntegrityConfig",
    "POOL",
    "GuardedTotals",
    "PoolGuard",
    "RequestHolders",
    "RequestSlots",
    "HostTiers",
    "Leader",
    "LoadDispatcher",
    "LoadReport",
    "OpenRequest",
    "OrderAnswered",
    "OrderDesk",
    "OrderRefusedError",
    "OutputSocket",
    "PoolPlace",
    "PoolRead",
    "RankAlive",
    "RankStalled",
    "RankConfig",
    "RankDevice",
    "RankPulse",
    "RankReady",
    "ReadPool",
    "RankSilentError",
    "RefusalReports",
    "ReplicaLoad",
    "Report",
    "ReportSocket",
    "Request",
    "RequestFailedError",
    "RequestPages",
    "RequestQueues",
    "RequestRefused",
    "RequestRefusedError",
    "RequestState",
    "SamplingLimits",
    "Scheduler",
    "QuiescableScheduler",
    "SchedulerConfig",
    "SchedulerSinks",
    "SimulatedKv",
    "TierLayerDoneCounter",
    "RankKv",
    "open_host_tiers",
    "simulated_kv",
    "torch_kv",
    "StepExecutor",
    "StepResult",
    "StopSignal",
    "StorageChecksum",
    "StorageKind",
    "SubmitRequest",
    "TextFront",
    "TextNews",
    "TooBusyError",
    "UnblockInput",
    "Wanted",
    "ALIVE_EVERY_S",
    "DEFAULT_HOST",
    "DEFAULT_NEW_TOKENS",
    "FRONT",
    "MAX_BODY_BYTES",
    "MOONCAKE_MASTER",
    "MOONCAKE_METADATA",
    "RANK_HEADER",
    "bind_http",
    "check_ports_free",
    "check_request_fits",
    "check_tokens_known",
    "codec_of",
    "decode_command",
    "decode_outputs",
    "decode_report",
    "default_kv_events",
    "encode",
    "encode_outputs",
    "expected_pages",
    "make_app",
    "open_engine",
    "open_http_server",
    "open_rank_device",
    "open_zmq_groups",
    "open_zmq_sync_hub",
    "ZmqSyncHub",
    "pack_hashes",
    "pack_tokens",
    "pages_for",
    "pages_to_come",
    "prefill_chunk",
    "quiesce_of",
    "read_generate_body",
    "retraction_victim",
    "text_routes",
    "unpack_hash_array",
    "unpack_hashes",
    "unpack_tokens",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.reference.engine.batcher": (
            "POOL Batcher RequestPages check_request_fits check_tokens_known expected_pages pages_for pages_to_come "
            "prefill_chunk retraction_victim"
        ),
        "scheduler_components.reference.engine.cache_tiers": "CacheTiers DeviceTier",
        "scheduler_components.reference.engine.config": (
            "DEFAULT_HOST MOONCAKE_MASTER MOONCAKE_METADATA DpAttentionConfig EngineConfig EnginePaths HiCacheConfig "
            "IntegrityConfig RankConfig SchedulerConfig StorageChecksum StorageKind check_ports_free "
            "default_kv_events"
        ),
        "scheduler_components.reference.engine.control": "BatcherState Control ProfiledDevice",
        "scheduler_components.reference.engine.dp_attn_sim": (
            "Arrival DpSimConfig DpSimReport make_arrivals simulate_dp_attn"
        ),
        "scheduler_components.reference.engine.engine": "ControlRefusedError Engine open_engine",
        "scheduler_components.reference.engine.front": (
            "EngineFailedError Front GenerateRequest LoadDispatcher OpenRequest ReplicaLoad RequestFailedError "
            "RequestRefusedError TooBusyError"
        ),
        "scheduler_components.reference.engine.host_tiers": (
            "HostTiers RankKv SimulatedKv TierLayerDoneCounter open_host_tiers simulated_kv torch_kv"
        ),
        "scheduler_components.reference.engine.generation": "DEFAULT_NEW_TOKENS TextFront TextNews Wanted codec_of",
        "scheduler_components.reference.engine.http": "EngineStatus bind_http make_app open_http_server text_routes",
        "scheduler_components.reference.engine.http_exchange": "MAX_BODY_BYTES BadBodyError BodyReader",
        "scheduler_components.reference.engine.http_generate": "GenerateBody GenerateEndpoint read_generate_body",
        "scheduler_components.reference.engine.http_openai": "RANK_HEADER ChatEndpoint CompletionEndpoint",
        "scheduler_components.reference.engine.messages": (
            "ALIVE_EVERY_S FRONT AbortRequest BlockInput CacheDump Command CommandReader DrainInput DumpCache "
            "GiveOrder LoadReport OrderAnswered OutputSocket PoolPlace PoolRead RankAlive RankReady RankStalled "
            "ReadPool Report RequestRefused SubmitRequest UnblockInput decode_command decode_outputs decode_report "
            "encode encode_outputs pack_hashes pack_tokens unpack_hash_array unpack_hashes unpack_tokens"
        ),
        "scheduler_components.reference.engine.pool_guard": "GuardedTotals PoolGuard RequestHolders RequestSlots",
        "scheduler_components.reference.engine.orders": "OrderDesk OrderRefusedError",
        "scheduler_components.reference.engine.pulse": "RankPulse RankSilentError",
        "scheduler_components.reference.engine.quiesce": "QuiescableScheduler quiesce_of",
        "scheduler_components.reference.engine.rank_device": "RankDevice open_rank_device",
        "scheduler_components.reference.engine.rank_loop": (
            "Follower FrontLoadSink FrontStallSink Heartbeat Leader RefusalReports ReportSocket StepExecutor StopSignal"
        ),
        "scheduler_components.reference.engine.request": "Request RequestQueues RequestState SamplingLimits",
        "scheduler_components.reference.engine.scheduler": "Clocks Scheduler SchedulerSinks StepResult",
        "scheduler_components.reference.engine.zmq_sync": "ZmqSyncHub open_zmq_groups open_zmq_sync_hub",
    },
)
