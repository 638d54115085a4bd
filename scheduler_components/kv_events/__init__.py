"""KV-cache events: codec, stream, replay, endpoints, configuration and publishers.

The public names of ``sglang.srt.disaggregation.kv_events`` are all here. What needs pyzmq or pydantic is imported when
it is first asked for, so that the events themselves stay cheap to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_exports
from scheduler_components.errors import PublisherNameTakenError
from scheduler_components.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
    MediumGroup,
    Tier,
    medium_group,
    medium_tier,
)
from scheduler_components.kv_events.codec import (
    DIALECTS,
    MAX_PAYLOAD_BYTES,
    BatchDecoder,
    BatchEncoder,
    DecodedBatch,
    decode_event,
    first_token_mismatch,
    slice_event,
)
from scheduler_components.kv_events.endpoints import MAX_PORT, Endpoint, ListeningStream, PortPlan, StreamAddress
from scheduler_components.kv_events.replay import (
    END_SEQ,
    REPLAY_FRAMINGS,
    ReplayMeta,
    ReplayMetaKind,
    ReplayRequest,
    ReplaySessions,
    ReplayVerb,
    encode_plain_request,
)
from scheduler_components.kv_events.snapshot import merge_batches
from scheduler_components.kv_events.stream import (
    EPOCH_BYTES,
    STREAM_DIGEST_BYTES,
    EventStream,
    digest_after,
    initial_digest,
)
from scheduler_components.ports import EventPublisher, NullEventPublisher

if TYPE_CHECKING:
    from scheduler_components.kv_events.config import SEND_MODES, SEQ_BASES, KVEventsConfig, parse_json_object
    from scheduler_components.kv_events.registry import EventPublisherFactory, open_event_publisher
    from scheduler_components.kv_events.zmq_auth import (
        CurveClientKeys,
        CurveServerKeys,
        apply_curve_client_keys,
        read_key_pair,
        read_public_key,
        write_key_pair,
    )
    from scheduler_components.kv_events.zmq_publisher import ZmqEventPublisher
    from scheduler_components.kv_events.zmq_sockets import lock_ipc_path

__all__ = [
    "AllBlocksCleared",
    "BatchDecoder",
    "BatchEncoder",
    "BlockRemoved",
    "BlockStored",
    "ListeningStream",
    "CurveClientKeys",
    "DecodedBatch",
    "Endpoint",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "EventStream",
    "KVCacheEvent",
    "KVEventBatch",
    "KVEventsConfig",
    "ReplayMetaKind",
    "ReplayMeta",
    "NullEventPublisher",
    "MediumGroup",
    "PortPlan",
    "PublisherNameTakenError",
    "StreamAddress",
    "ReplaySessions",
    "ReplayRequest",
    "CurveServerKeys",
    "Tier",
    "ReplayVerb",
    "ZmqEventPublisher",
    "STREAM_DIGEST_BYTES",
    "DIALECTS",
    "END_SEQ",
    "EPOCH_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MAX_PORT",
    "MEDIUM_GPU",
    "REPLAY_FRAMINGS",
    "SEND_MODES",
    "SEQ_BASES",
    "apply_curve_client_keys",
    "digest_after",
    "initial_digest",
    "merge_batches",
    "first_token_mismatch",
    "lock_ipc_path",
    "open_event_publisher",
    "slice_event",
    "medium_group",
    "encode_plain_request",
    "decode_event",
    "parse_json_object",
    "read_key_pair",
    "read_public_key",
    "medium_tier",
    "write_key_pair",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.kv_events.config": "SEND_MODES SEQ_BASES KVEventsConfig parse_json_object",
        "scheduler_components.kv_events.registry": "EventPublisherFactory open_event_publisher",
        "scheduler_components.kv_events.zmq_auth": (
            "CurveClientKeys CurveServerKeys apply_curve_client_keys read_key_pair read_public_key write_key_pair"
        ),
        "scheduler_components.kv_events.zmq_publisher": "ZmqEventPublisher",
        "scheduler_components.kv_events.zmq_sockets": "lock_ipc_path",
    },
)
