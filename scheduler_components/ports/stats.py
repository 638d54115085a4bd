"""Sources of statistics."""

from __future__ import annotations

from typing import Protocol

from scheduler_components.values import OutputStats, PublisherStats, QuiesceStats, SchedulerTotals

__all__ = [
    "TotalsSource",
    "NullTotalsSource",
    "PublisherStatsSource",
    "NullPublisherStatsSource",
    "OutputStatsSource",
    "QuiesceStatsSource",
    "NullQuiesceStatsSource",
]


class TotalsSource(Protocol):
    """Running totals: the scheduler itself. Read by ``MetricsEmitter``."""

    def totals(self) -> SchedulerTotals:
        """Return the totals of this moment; none ever falls."""
        ...


class NullTotalsSource:
    """The totals of a scheduler that keeps none."""

    def totals(self) -> SchedulerTotals:
        return SchedulerTotals()


class PublisherStatsSource(Protocol):
    """A publisher that counts what it does: ``SchedulerKvEventsPublisher``. Read by ``MetricsEmitter``."""

    def stats(self) -> PublisherStats:
        """Return the counters of this moment."""
        ...


class NullPublisherStatsSource:
    """The counters of a scheduler without a publisher."""

    def stats(self) -> PublisherStats:
        return PublisherStats()


class OutputStatsSource(Protocol):
    """A streamer of outputs that counts what it does: ``OutputStreamer``. Read by ``PrometheusOutputs``, per scrape."""

    def stats(self) -> OutputStats:
        """Return the counters of this moment."""
        ...


class QuiesceStatsSource(Protocol):
    """A scheduler that can be paused: ``quiesce.QuiesceState``. Read with the totals."""

    def stats(self) -> QuiesceStats | None:
        """Return the state of this moment; None where nobody can order anything."""
        ...


class NullQuiesceStatsSource:
    """The state of a scheduler that nobody pauses."""

    def stats(self) -> QuiesceStats | None:
        return None
