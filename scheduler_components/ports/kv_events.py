"""KV events: the cache that records them, the pool they describe, and the sinks that publish them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from scheduler_components.events import EventBatch, KVCacheEvent, MediumGroup
from scheduler_components.values import PublisherStats

__all__ = [
    "HeldBlocksSource",
    "KvEventSink",
    "KvEventSource",
]


class KvEventSource(Protocol):
    """A cache that records changes of its blocks: `RadixCache`. Read by `SchedulerKvEventsPublisher`."""

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the events since the last call, in order, and forget them."""
        ...


class HeldBlocksSource(Protocol):
    """The blocks that a KV pool really holds: `RadixCache`, `HiRadixCache`, an adapter over an engine's block table.

    It reads the pool itself and never the published events, so a comparison of the two finds events that a stream
    missed. It may walk the whole pool: checks and `/kv_pool` read it, a step does not.
    """

    def held_blocks(self) -> Mapping[MediumGroup, Collection[int]]:
        """Return the hash of each block that a request could use now, signed 64-bit, by medium and KV-cache group.

        The source knows nothing of a place that it does not name; a place without hashes is empty.
        `events.medium_group` computes the place of an event.
        """
        ...


class KvEventSink(Protocol):
    """Where event batches go: `ZmqEventPublisher`. Called by `SchedulerKvEventsPublisher`."""

    def publish(self, events: EventBatch) -> None:
        """Accept one batch, in order. Never block on the network."""
        ...

    def idle(self) -> None:
        """Encode and send the pending batches. The scheduler calls it where it waits for its device."""
        ...

    def stats(self) -> PublisherStats:
        """Return the counters since the sink was opened; all zero for a sink that keeps none."""
        ...

    def shutdown(self) -> None:
        """Send the pending batches within a deadline and release sockets and threads. Safe to call twice."""
        ...
