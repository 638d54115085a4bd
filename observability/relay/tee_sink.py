"""Sinks that publish each stream of a relay twice: over another sink and into a JetStream log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from observability.kv_stream import StreamState
from observability.relay.stream import RelaySink, RelaySinkFactory
from scheduler_components import EventBatch
from scheduler_components.values import PublisherStats

if TYPE_CHECKING:  # a relay without a broker does not need the extra
    from observability.jetstream import JetStreamWriter

__all__ = ["TeeSinkFactory"]


@dataclass(slots=True, kw_only=True)
class _TeeSink:
    """A ``RelaySink`` that publishes to two sinks. Its counters are those of the first; ``JetStreamWriter.stats`` has
    those of the second."""

    first: RelaySink
    second: RelaySink

    def publish(self, events: EventBatch) -> None:
        self.first.publish(events)
        self.second.publish(events)

    def idle(self) -> None:
        self.first.idle()
        self.second.idle()

    def set_upstream_state(self, state: str | None) -> None:
        self.first.set_upstream_state(state)
        self.second.set_upstream_state(state)

    def stats(self) -> PublisherStats:
        return self.first.stats()

    def shutdown(self) -> None:
        self.first.shutdown()
        self.second.shutdown()


@dataclass(slots=True, kw_only=True)
class TeeSinkFactory:
    """A ``RelaySinkFactory`` that also writes every stream of ``others`` into a log.

    Attributes:
        others: factory of the other sinks.
        writer: of the worker's log; closed with the sinks.
    """

    others: RelaySinkFactory
    writer: JetStreamWriter

    @property
    def dialect(self) -> str:
        """The dialect of the other sinks: both streams carry the same bytes."""
        return self.others.dialect

    def open(self, rank: int) -> RelaySink:
        """Open both sinks of one rank's stream."""
        first = self.others.open(rank)
        second = self.writer.sink(rank, self.dialect)
        second.set_upstream_state(StreamState.CONNECTING.value)  # an empty stream must not count as complete
        return _TeeSink(first=first, second=second)

    def server_info(self, block_size: int | None, num_streams: int) -> dict[str, object]:
        """Describe the streams of the other sinks, and their names in JetStream."""
        return self.others.server_info(block_size, num_streams) | {"kv_events_jetstream": self.writer.describe()}
