"""KV events of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_components.kv_events.events import KVEventBatch
from scheduler_components.kv_events.publisher import EventPublisher
from scheduler_components.metrics.stats import PublisherStats
from scheduler_components.parallel_state import ParallelState


@dataclass(slots=True, kw_only=True)
class KvEvents:
    """Hands what the cache records to the publisher."""

    enable: bool
    parallel: ParallelState
    clock: Callable[[], float]
    take_events: Callable
    event_publisher: EventPublisher

    def publish_kv_events(self) -> None:
        if not self.enable:
            return
        events = self.take_events()
        if events:
            self.event_publisher.publish(KVEventBatch(self.clock(), events, self.parallel.kv_stream_index))

    def stats(self) -> PublisherStats:
        return self.event_publisher.stats() if self.enable else PublisherStats()

    def shutdown(self) -> None:
        if self.enable:
            self.publish_kv_events()
            self.event_publisher.shutdown()
