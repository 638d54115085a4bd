"""KV-cache events: values, wire, endpoints, configuration and publishers.

The public names are those of ``sglang.srt.disaggregation.kv_events``. What needs pyzmq or pydantic is imported when
it is first asked for, so that the events themselves stay cheap to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from scheduler_components.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVCacheEvent,
    KVEventBatch,
)
from scheduler_components.ports import EventPublisher, NullEventPublisher

if TYPE_CHECKING:
    from scheduler_components.kv_events.config import EventPublisherFactory, KVEventsConfig, open_event_publisher
    from scheduler_components.kv_events.zmq_publisher import ZmqEventPublisher

__all__ = [
    "EventBatch",
    "KVEventBatch",
    "KVCacheEvent",
    "BlockStored",
    "BlockRemoved",
    "AllBlocksCleared",
    "EventPublisher",
    "NullEventPublisher",
    "ZmqEventPublisher",
    "KVEventsConfig",
    "EventPublisherFactory",
    "open_event_publisher",
]

_LAZY = {
    "ZmqEventPublisher": "scheduler_components.kv_events.zmq_publisher",
    "KVEventsConfig": "scheduler_components.kv_events.config",
    "EventPublisherFactory": "scheduler_components.kv_events.config",
    "open_event_publisher": "scheduler_components.kv_events.config",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
