"""KV events of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components.kv_events import KVEventBatch
from scheduler_components.values import PublisherStats
from serving_parts.surroundings import PublisherFactory

from .ambient import get_clock, get_parallel, get_settings

if TYPE_CHECKING:
    from .scheduler import Scheduler


class KvEventsMixin:
    """Uses ``cache``."""

    def init_kv_events(self: Scheduler) -> None:
        self.enable_kv_events = get_settings().kv_events is not None and get_parallel().owns_kv_stream
        if self.enable_kv_events:
            self.event_publisher = PublisherFactory.create(get_settings().kv_events, get_parallel().kv_stream_index)

    def publish_kv_events(self: Scheduler) -> None:
        if not self.enable_kv_events:
            return
        events = self.cache.take_events()
        if events:
            self.event_publisher.publish(KVEventBatch(get_clock()(), events, get_parallel().kv_stream_index))

    def get_publisher_stats(self: Scheduler) -> PublisherStats:
        return self.event_publisher.stats() if self.enable_kv_events else PublisherStats()

    def close_kv_events(self: Scheduler) -> None:
        if self.enable_kv_events:
            self.publish_kv_events()
            self.event_publisher.shutdown()
