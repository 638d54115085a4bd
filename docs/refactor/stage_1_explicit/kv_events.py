"""KV events of the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_components.kv_events.events import KVEventBatch
from scheduler_components.kv_events.publisher import EventPublisher
from scheduler_components.metrics.stats import PublisherStats

if TYPE_CHECKING:
    from .scheduler import Scheduler


class KvEventsMixin:
    """Needs ``cache``."""

    def init_kv_events(self: Scheduler, event_publisher: EventPublisher) -> None:
        self.enable_kv_events = self.settings.kv_events is not None and self.parallel.owns_kv_stream
        self.event_publisher = event_publisher

    def publish_kv_events(self: Scheduler) -> None:
        if not self.enable_kv_events:
            return
        events = self.cache.take_events()
        if events:
            self.event_publisher.publish(KVEventBatch(self.clock(), events, self.parallel.kv_stream_index))

    def get_publisher_stats(self: Scheduler) -> PublisherStats:
        return self.event_publisher.stats() if self.enable_kv_events else PublisherStats()

    def close_kv_events(self: Scheduler) -> None:
        if self.enable_kv_events:
            self.publish_kv_events()
            self.event_publisher.shutdown()
