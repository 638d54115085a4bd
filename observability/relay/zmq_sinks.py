"""The sinks of a relay: ZeroMQ publishers, and the streams of a JetStream log next to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from observability.kv_stream import StreamState
from observability.relay.stream import RelaySink
from scheduler_components import kv_events_server_info
from scheduler_components.kv_events import KVEventsConfig, ListeningStream, ZmqEventPublisher

if TYPE_CHECKING:  # a relay without a broker does not need the extra
    from observability.jetstream import JetStreamWriter

__all__ = ["RelaySinks"]


@dataclass(slots=True, kw_only=True)
class RelaySinks:
    """Opens the sinks of each rank's stream.

    Attributes:
        settings: of the publishers, one per rank. In the dialect ``native``, an event is forwarded as received.
        writer: also writes every stream into a log; closed with the sinks.
    """

    settings: KVEventsConfig
    writer: JetStreamWriter | None = None
    _publishers: dict[int, ZmqEventPublisher] = field(default_factory=dict, init=False, repr=False)

    def open(self, rank: int) -> tuple[RelaySink, ...]:
        """Open the sinks of one rank's stream: a publisher at the configured ports + rank. Call it once per rank.

        Raises:
            ConfigError, StartError: a sink cannot be opened; nothing stays open.
        """
        publisher = self._publishers[rank] = ZmqEventPublisher(rank, config=self.settings)
        sinks: tuple[RelaySink, ...] = (publisher,)
        if self.writer is not None:
            sinks += (self.writer.sink(rank, self.settings.dialect),)
        for sink in sinks:
            sink.set_upstream_state(StreamState.CONNECTING.value)  # an empty stream must not count as complete
        return sinks

    def server_info(self, block_size: int | None, num_streams: int) -> dict[str, object]:
        """Return the keys of ``/server_info`` by which readers find the streams, with the ports that were assigned."""
        bound = [
            ListeningStream.parse(rank, publisher.endpoint, replay=publisher.replay_endpoint)
            for rank, publisher in tuple(self._publishers.items())
            if publisher.endpoint.startswith("tcp://")
        ]
        # The descriptor needs a block size. Before the relay has seen one, it is removed again.
        info = kv_events_server_info(self.settings, block_size=block_size or 1, dp_size=num_streams, publishers=bound)
        described = info["kv_events"]
        if not block_size and isinstance(described, dict):
            info = info | {"kv_events": described | {"block_size": None}}
        return info if self.writer is None else info | {"kv_events_jetstream": self.writer.describe()}
