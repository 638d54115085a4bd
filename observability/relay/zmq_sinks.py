"""ZeroMQ publishers as the sinks of a relay."""

from __future__ import annotations

from observability.kv_stream import StreamState
from observability.relay.stream import RelaySink
from scheduler_components import kv_events_server_info
from scheduler_components.kv_events import KVEventsConfig, ListeningStream, ZmqEventPublisher

__all__ = ["ZmqSinkFactory"]


class ZmqSinkFactory:
    """Opens one publisher per rank, all of one configuration; see ``RelaySinkFactory``."""

    def __init__(self, settings: KVEventsConfig) -> None:
        self._settings = settings
        self._publishers: dict[int, ZmqEventPublisher] = {}

    @property
    def dialect(self) -> str:
        """The dialect of the publishers."""
        return self._settings.dialect

    def open(self, rank: int) -> RelaySink:
        """Open the publisher of one rank at the configured ports + rank."""
        publisher = self._publishers[rank] = ZmqEventPublisher(rank, config=self._settings)
        publisher.set_upstream_state(StreamState.CONNECTING.value)  # an empty stream must not count as complete
        return publisher

    def server_info(self, block_size: int | None, num_streams: int) -> dict[str, object]:
        """Describe the streams, with the ports that the operating system assigned."""
        bound = [
            ListeningStream.parse(rank, publisher.endpoint, replay=publisher.replay_endpoint)
            for rank, publisher in tuple(self._publishers.items())
            if publisher.endpoint.startswith("tcp://")
        ]
        # The descriptor needs a block size. Before the relay has seen one, it is removed again.
        info = kv_events_server_info(self._settings, block_size=block_size or 1, dp_size=num_streams, publishers=bound)
        described = info["kv_events"]
        if block_size or not isinstance(described, dict):
            return info
        return info | {"kv_events": described | {"block_size": None}}
