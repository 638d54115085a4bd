"""Into JetStream as well: sinks that publish each stream both where other sinks do and into a log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from observability.kv_stream import StreamState
from observability.relay.stream import RelaySink, RelaySinkFactory
from scheduler_components import EventBatch, PublisherStats

if TYPE_CHECKING:  # a relay that writes into no broker does without the extra
    from observability.jetstream import JetStreamWriter

__all__ = ["TeeSinkFactory"]


@dataclass(slots=True, kw_only=True)
class _TeeSink:
    """A ``RelaySink`` that publishes twice; its counters are those of the first."""

    first: RelaySink
    second: RelaySink

    def publish(self, events: EventBatch) -> None:
        """Publish the batch to both."""
        self.first.publish(events)
        self.second.publish(events)

    def idle(self) -> None:
        """Let both send what is pending."""
        self.first.idle()
        self.second.idle()

    def set_upstream_state(self, state: str | None) -> None:
        """Tell the readers of both."""
        self.first.set_upstream_state(state)
        self.second.set_upstream_state(state)

    def stats(self) -> PublisherStats:
        """Counters of the first; ``JetStreamWriter.stats`` has the second's."""
        return self.first.stats()

    def shutdown(self) -> None:
        """Close both."""
        self.first.shutdown()
        self.second.shutdown()


@dataclass(slots=True, kw_only=True)
class TeeSinkFactory:
    """``RelaySinkFactory`` that write every stream of ``others`` into a log, too.

    Attributes:
        others: where the streams go besides.
        writer: of the worker's log; closed with the sinks.
    """

    others: RelaySinkFactory
    writer: JetStreamWriter

    @property
    def dialect(self) -> str:
        """That of the others: both streams carry the same bytes."""
        return self.others.dialect

    def open(self, rank: int) -> RelaySink:
        """Open the sinks of one rank's stream."""
        first = self.others.open(rank)
        second = self.writer.sink(rank, self.dialect)
        second.set_upstream_state(StreamState.CONNECTING.value)  # nobody shall take an empty stream for whole
        return _TeeSink(first=first, second=second)

    def server_info(self, block_size: int | None, num_streams: int) -> dict[str, object]:
        """Describe the others' streams, and where they stand in JetStream."""
        return self.others.server_info(block_size, num_streams) | {"kv_events_jetstream": self.writer.describe()}
