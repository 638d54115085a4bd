"""The sources of a relay as an operator gives them: the URL of a worker, or the endpoints of one stream."""

from __future__ import annotations

import attrs

from observability.kv_stream import discover, parse_worker_url, static_address
from scheduler_components import ConfigError
from scheduler_components.kv_events import StreamAddress

__all__ = ["RelaySource"]

_SHAPES = "give http://host:port, or tcp://host:port,tcp://host:replay_port, with 1= before it for rank 1"
_LAST_RANK = 1_023


@attrs.frozen(kw_only=True)
class RelaySource:
    """One source of a worker's events.

    Attributes:
        text: the operator's text.
        url: of the worker; empty for endpoints.
        address: of the stream; None for a URL.
        topic: replaces the topic that the worker advertises; None keeps it.
        api_key: for a worker whose HTTP server requires a key.
    """

    text: str
    url: str = ""
    address: StreamAddress | None = None
    topic: str | None = None
    api_key: str | None = attrs.field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str, *, topic: str | None = None, api_key: str | None = None) -> RelaySource:
        """Parse ``http://host:port``, or ``[RANK=]EVENTS[,REPLAY]`` with two endpoints.

        Raises:
            ConfigError: the text is neither, or names an endpoint that cannot be dialed.
        """
        head, _, _ = text.partition("://")
        if head in ("http", "https"):
            parse_worker_url(text)
            return cls(text=text, url=text, topic=topic, api_key=api_key)
        number, equals, endpoints = text.partition("=")
        rank = 0
        if equals and number.isascii() and number.isdecimal():
            rank = int(number)
        else:
            endpoints = text
        if rank > _LAST_RANK:
            raise ConfigError("source", text, f"names rank {rank}", f"give a rank of at most {_LAST_RANK}")
        if not endpoints.startswith(("tcp://", "ipc://")):
            raise ConfigError("source", text, "is neither a URL nor an endpoint", _SHAPES)
        events, _, replay = endpoints.partition(",")
        return cls(text=text, address=static_address(events, replay=replay or None, topic=topic or "", rank=rank))

    def find(self, *, timeout_s: float) -> tuple[StreamAddress, ...]:
        """Return the addresses of the source's streams. A source with a URL asks the worker for them.

        Raises:
            UnreachableError, StartError, NoStreamsError, DecodeError: as ``discover``.
        """
        if self.address is not None:
            return (self.address,)
        found = discover(self.url, timeout_s=timeout_s, api_key=self.api_key)
        return found if self.topic is None else tuple(attrs.evolve(each, topic=self.topic) for each in found)
