"""KV events: the cache that records them, and the sinks that take them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from scheduler_components.events import EventBatch, KVCacheEvent, MediumGroup
from scheduler_components.values import KvMetrics, PublisherStats

__all__ = [
    "KvEventSource",
    "HeldBlocksSource",
    "NullHeldBlocksSource",
    "KvEventSink",
    "KvMetricsSink",
    "NullKvMetricsSink",
]


class KvEventSource(Protocol):
    """A cache that records what happens to its blocks: ``RadixCache``. Read by ``SchedulerKvEventsPublisher``."""

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the events since the last call, in order, and forget them."""
        ...


class HeldBlocksSource(Protocol):
    """Says what the KV pool really holds: ``RadixCache``, ``HiRadixCache``, an adapter over any engine's block table.

    It reads the pool itself, never what was told of it: whoever compares the two finds what a stream forgot. It may
    walk everything, so it is asked by checks and by ``/kv_pool``, never in a step.
    """

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Return the hash of each block that a request could use now, signed 64-bit, by medium and KV-cache group.

        A place that is not named is one that this oracle knows nothing of; one with no hashes is known to be empty.
        ``events.medium_group`` makes a place of what an event says.
        """
        ...


class NullHeldBlocksSource:
    """The oracle of an engine whose pool nobody can read: it names no place, so nothing is compared."""

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        return {}


class KvEventSink(Protocol):
    """Where batches of events go: ``ZmqEventPublisher``. Called by ``SchedulerKvEventsPublisher``."""

    def publish(self, events: EventBatch) -> None:
        """Accept one batch, in order; never blocks on the network."""
        ...

    def idle(self) -> None:
        """Encode and send what is pending; called where the scheduler waits for its device."""
        ...

    def stats(self) -> PublisherStats:
        """Counters since the sink was opened; all zero for a sink that keeps none."""
        ...

    def shutdown(self) -> None:
        """Send what is pending within a deadline and let go of sockets and threads; safe to call twice."""
        ...


class KvMetricsSink(Protocol):
    """Where KvMetrics go, usually the serving process: ``ZmqKvMetricsSink``.

    Called by ``SchedulerKvEventsPublisher``.
    """

    @property
    def wants_metrics(self) -> bool:
        """False where nobody receives: nothing is counted and sent then."""
        ...

    def send(self, metrics: KvMetrics) -> None:
        """Hand on one report; drops it, counted, when nobody takes it. Never blocks.

        Raises:
            ForkedPublisherError: this is a child of the process that opened the sink.
        """
        ...

    def close(self) -> None:
        """Let go of sockets; safe to call twice."""
        ...


class NullKvMetricsSink:
    """The KvMetrics sink of a scheduler without a serving process."""

    wants_metrics = False

    def send(self, metrics: KvMetrics) -> None:
        pass

    def close(self) -> None:
        pass
