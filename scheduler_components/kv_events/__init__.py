"""KV-cache events: codec, stream, replay, endpoints, configuration and publishers.

Events, batches, publishers and their registry have the names of ``sglang.srt.disaggregation.kv_events``. Names that
need pyzmq or pydantic are imported on first use, so the events themselves are cheap to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components._internal.lazy import lazy_exports

if TYPE_CHECKING:
    from scheduler_components.events import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        EventBatch,
        KVCacheEvent,
        KVEventBatch,
    )
    from scheduler_components.kv_events.codec import BatchEncoder
    from scheduler_components.kv_events.config import KVEventsConfig
    from scheduler_components.kv_events.decoder import BatchDecoder, DecodedBatch
    from scheduler_components.kv_events.endpoints import Endpoint, PortPlan
    from scheduler_components.kv_events.event_publisher import EventPublisher, NullEventPublisher
    from scheduler_components.kv_events.registry import EventPublisherFactory, open_event_publisher
    from scheduler_components.kv_events.stream import EventStream
    from scheduler_components.kv_events.stream_address import ListeningStream, StreamAddress
    from scheduler_components.kv_events.zmq_auth import CurveClientKeys, CurveServerKeys, write_key_pair
    from scheduler_components.kv_events.zmq_publisher import ZmqEventPublisher

__all__ = [
    "AllBlocksCleared",
    "BatchDecoder",
    "BatchEncoder",
    "BlockRemoved",
    "BlockStored",
    "CurveClientKeys",
    "CurveServerKeys",
    "DecodedBatch",
    "Endpoint",
    "EventBatch",
    "EventPublisher",
    "EventPublisherFactory",
    "EventStream",
    "KVCacheEvent",
    "KVEventBatch",
    "KVEventsConfig",
    "ListeningStream",
    "NullEventPublisher",
    "PortPlan",
    "StreamAddress",
    "ZmqEventPublisher",
    "open_event_publisher",
    "write_key_pair",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "scheduler_components.events": (
            "AllBlocksCleared BlockRemoved BlockStored EventBatch KVCacheEvent KVEventBatch"
        ),
        "scheduler_components.kv_events.codec": "BatchEncoder",
        "scheduler_components.kv_events.config": "KVEventsConfig",
        "scheduler_components.kv_events.decoder": "BatchDecoder DecodedBatch",
        "scheduler_components.kv_events.endpoints": "Endpoint PortPlan",
        "scheduler_components.kv_events.event_publisher": "EventPublisher NullEventPublisher",
        "scheduler_components.kv_events.registry": "EventPublisherFactory open_event_publisher",
        "scheduler_components.kv_events.stream": "EventStream",
        "scheduler_components.kv_events.stream_address": "ListeningStream StreamAddress",
        "scheduler_components.kv_events.zmq_auth": "CurveClientKeys CurveServerKeys write_key_pair",
        "scheduler_components.kv_events.zmq_publisher": "ZmqEventPublisher",
    },
)
