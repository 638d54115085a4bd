"""KV-cache events: codec, stream, replay, endpoints, configuration and publishers.

The public names of ``sglang.srt.disaggregation.kv_events`` are all here. What needs pyzmq or pydantic is imported when
it is first asked for, so that the events themselves stay cheap to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._lazy import lazy_names
from scheduler_components.errors import PublisherNameTakenError
from scheduler_components.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
    Place,
    Tier,
    place_of,
    tier_of,
)
from scheduler_components.kv_events.base import collapse
from scheduler_components.kv_events.codec import (
    DIALECTS,
    MAX_PAYLOAD_BYTES,
    BatchDecoder,
    BatchEncoder,
    DecodedBatch,
    first_unfilled,
    part_of,
    read_event,
)
from scheduler_components.kv_events.endpoints import MAX_PORT, BoundStream, Endpoint, PortPlan, StreamAddress
from scheduler_components.kv_events.replay import (
    END_SEQ,
    REPLAY_FRAMINGS,
    Kind,
    Meta,
    ReplayCursors,
    Request,
    Verb,
    plain_request,
)
from scheduler_components.kv_events.stream import (
    CHAIN_BYTES,
    EPOCH_BYTES,
    EventStream,
    chain_after,
    chain_at_start,
)
from scheduler_components.ports import EventPublisher, NullEventPublisher

if TYPE_CHECKING:
    from scheduler_components.kv_events.config import SEND_MODES, SEQ_BASES, KVEventsConfig, read_json_object
    from scheduler_components.kv_events.registry import EventPublisherFactory, open_event_publisher
    from scheduler_components.kv_events.zmq_auth import (
        ClientKeys,
        StreamAccess,
        apply_client_keys,
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
    "BoundStream",
    "ClientKeys",
    "DecodedBatch",
    "Endpoint",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "EventStream",
    "KVCacheEvent",
    "KVEventBatch",
    "KVEventsConfig",
    "Kind",
    "Meta",
    "NullEventPublisher",
    "Place",
    "PortPlan",
    "PublisherNameTakenError",
    "StreamAddress",
    "ReplayCursors",
    "Request",
    "StreamAccess",
    "Tier",
    "Verb",
    "ZmqEventPublisher",
    "CHAIN_BYTES",
    "DIALECTS",
    "END_SEQ",
    "EPOCH_BYTES",
    "MAX_PAYLOAD_BYTES",
    "MAX_PORT",
    "MEDIUM_GPU",
    "REPLAY_FRAMINGS",
    "SEND_MODES",
    "SEQ_BASES",
    "apply_client_keys",
    "chain_after",
    "chain_at_start",
    "collapse",
    "first_unfilled",
    "lock_ipc_path",
    "open_event_publisher",
    "part_of",
    "place_of",
    "plain_request",
    "read_event",
    "read_json_object",
    "read_key_pair",
    "read_public_key",
    "tier_of",
    "write_key_pair",
]

__getattr__ = lazy_names(
    __name__,
    {
        "scheduler_components.kv_events.config": "SEND_MODES SEQ_BASES KVEventsConfig read_json_object",
        "scheduler_components.kv_events.registry": "EventPublisherFactory open_event_publisher",
        "scheduler_components.kv_events.zmq_auth": (
            "ClientKeys StreamAccess apply_client_keys read_key_pair read_public_key write_key_pair"
        ),
        "scheduler_components.kv_events.zmq_publisher": "ZmqEventPublisher",
        "scheduler_components.kv_events.zmq_sockets": "lock_ipc_path",
    },
)
