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


class KvEventsMixin:
    """Needs nothing of its host any more."""

    @staticmethod
    def publish_kv_events(self: KvEvents) -> None:
        if not self.enable:
            return
        events = self.take_events()
        if events:
            self.event_publisher.publish(KVEventBatch(self.clock(), events, self.parallel.kv_stream_index))

    @staticmethod
    def stats(self: KvEvents) -> PublisherStats:
        return self.event_publisher.stats() if self.enable else PublisherStats()

    @staticmethod
    def shutdown(self: KvEvents) -> None:
        if self.enable:
            KvEventsMixin.publish_kv_events(self)
            self.event_publisher.shutdown()
