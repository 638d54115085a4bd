"""Addresses of one stream: as its publisher bound them (``ListeningStream``) and as a reader connects to them."""

from __future__ import annotations

import attrs

from scheduler_components._internal.validators import check_integer
from scheduler_components.errors import ConfigError
from scheduler_components.kv_events.endpoints import Endpoint, named_endpoints

__all__ = ["ListeningStream", "StreamAddress"]


@attrs.frozen(kw_only=True)
class ListeningStream:
    """The addresses of one stream's open sockets, with the ports that the system chose.

    A process that opens publishers creates one per stream and passes it to the server of ``/server_info``.

    Attributes:
        rank: number of the stream (``ParallelState.kv_stream_index``).
        events: address of its PUB socket.
        replay: address of its replay ROUTER; None without replay.
        load: address of its load gauge; None without a gauge.

    Raises:
        ConfigError: an address is not tcp, so a reader on another machine could not connect, or has port 0.
    """

    rank: int
    events: Endpoint
    replay: Endpoint | None = None
    load: Endpoint | None = None

    def __attrs_post_init__(self) -> None:
        check_integer("rank", self.rank, "is not a rank", at_least=0)
        for field, endpoint in named_endpoints(self.events, self.replay, self.load):
            if not endpoint.port:
                raise ConfigError(field, str(endpoint), "is not tcp with a port", "give what the open socket says")

    @classmethod
    def parse(cls, rank: int, events: str, *, replay: str | None = None, load: str | None = None) -> ListeningStream:
        """Parse the addresses of an open publisher and of its load sink.

        Raises:
            ConfigError: a text is not an address, or not tcp.
        """
        return cls(
            rank=rank,
            events=Endpoint.parse(events),
            replay=None if replay is None else Endpoint.parse(replay, field="replay_endpoint"),
            load=None if load is None else Endpoint.parse(load, field="load_endpoint"),
        )

    def with_host(self, host: str) -> ListeningStream:
        """Replace wildcards by a node's own address, for readers that reached another node.

        Raises:
            ConfigError: ``host`` is invalid.
        """
        events, replay, load = (
            each.with_host(host) if each is not None and each.is_wildcard else each
            for each in (self.events, self.replay, self.load)
        )
        assert events is not None
        return attrs.evolve(self, events=events, replay=replay, load=load)


@attrs.frozen(kw_only=True)
class StreamAddress:
    """The addresses of one stream's live batches, replay and load gauge, as a reader connects to them.

    Attributes:
        rank: the stream's number in views and tables; to follow several workers, give each stream its own.
        block_size: tokens per block as the worker advertises it; None if it does not.

    Raises:
        ConfigError: a reader cannot connect to an endpoint: a wildcard, port 0, or inproc.
    """

    rank: int
    events: Endpoint
    replay: Endpoint | None = None
    load: Endpoint | None = None
    topic: str = ""
    block_size: int | None = None

    def __attrs_post_init__(self) -> None:
        for field, endpoint in named_endpoints(self.events, self.replay, self.load):
            if endpoint.transport == "inproc" or endpoint.is_wildcard or endpoint.port == 0:
                raise ConfigError(
                    field,
                    str(endpoint),
                    "cannot be dialled",
                    "give the host and port on which the publisher listens",
                )
