"""KV events of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_components.kv_events.events import KVEventBatch
from scheduler_components.metrics.stats import PublisherStats
from scheduler_components.parallel_state import ParallelState
from scheduler_components.ports import KvEventSink, KvEventSource


@dataclass(slots=True, kw_only=True)
class KvEvents:
    """Hands what the cache records to the publisher."""

    parallel: ParallelState
    clock: Callable[[], float]
    source: KvEventSource
    sink: KvEventSink

    def publish_kv_events(self) -> None:
        events = self.source.take_events()
        if events:
            self.sink.publish(KVEventBatch(self.clock(), tuple(events), self.parallel.kv_stream_index))

    def stats(self) -> PublisherStats:
        return self.sink.stats()

    def shutdown(self) -> None:
        self.publish_kv_events()
        self.sink.shutdown()
