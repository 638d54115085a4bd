"""Sinks that keep everything, and fail when they are told to."""

from __future__ import annotations

from scheduler_components.kv_events.events import EventBatch, KVCacheEvent
from scheduler_components.load.snapshot import LoadSnapshot
from scheduler_components.metrics.stats import KvMetrics, PublisherStats, SchedulerStats
from scheduler_components.output.delta import OutputBatch, OutputDelta

__all__ = ["ListEventSink", "ListKvMetricsSink", "ListLoadSink", "ListMetricsSink", "ListOutputSink"]


class _Failing:
    """Raises ``error`` from every call while it is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.num_closed = 0

    def _act(self) -> None:
        if self.error is not None:
            raise self.error


class ListEventSink(_Failing):
    """A ``KvEventSink``; ``stats`` says that ``num_dropped`` batches were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[EventBatch] = []
        self.num_idled = 0
        self.num_dropped = 0

    @property
    def events(self) -> list[KVCacheEvent]:
        """All events in order."""
        return [event for batch in self.batches for event in batch.events]

    def publish(self, events: EventBatch) -> None:
        self._act()
        self.batches.append(events)

    def idle(self) -> None:
        self._act()
        self.num_idled += 1

    def stats(self) -> PublisherStats:
        self._act()
        return PublisherStats(
            batches_sent=len(self.batches), events_sent=len(self.events), batches_dropped=self.num_dropped
        )

    def shutdown(self) -> None:
        self.num_closed += 1
        self._act()


class ListMetricsSink(_Failing):
    """A ``MetricsSink``."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: list[SchedulerStats] = []

    def record(self, stats: SchedulerStats) -> None:
        self._act()
        self.stats.append(stats)


class ListKvMetricsSink(_Failing):
    """A ``KvMetricsSink``."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[KvMetrics] = []

    def send(self, metrics: KvMetrics) -> None:
        self._act()
        self.sent.append(metrics)

    def close(self) -> None:
        self.num_closed += 1
        self._act()


class ListLoadSink(_Failing):
    """A ``LoadSink``."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[LoadSnapshot] = []

    def send(self, load: LoadSnapshot) -> None:
        self._act()
        self.sent.append(load)

    def close(self) -> None:
        self.num_closed += 1
        self._act()


class ListOutputSink(_Failing):
    """An ``OutputSink``; takes nothing while ``is_full``."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[OutputBatch] = []
        self.is_full = False

    @property
    def deltas(self) -> list[OutputDelta]:
        """The news of all requests in order."""
        return [delta for batch in self.batches for delta in batch.deltas]

    def is_ready(self) -> bool:
        self._act()
        return not self.is_full

    def send(self, batch: OutputBatch) -> bool:
        self._act()
        self.batches.append(batch)
        return True

    def close(self) -> None:
        self.num_closed += 1
        self._act()
