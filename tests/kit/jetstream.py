"""Settings of JetStream for the servers of a test."""

from __future__ import annotations

from typing import Any, Protocol

from observability.jetstream import JetStreamConfig


class HasUrl(Protocol):
    """A server of a test."""

    @property
    def url(self) -> str: ...


def config_of(*servers: HasUrl, **settings: Any) -> JetStreamConfig:
    """Return the configuration of writers and readers at these servers."""
    return JetStreamConfig(servers=tuple(server.url for server in servers), **settings)
