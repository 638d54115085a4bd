"""A thread with an event loop and one connection to NATS, which reconnects after every loss."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from observability.jetstream.config import JetStreamConfig
from scheduler_components._internal.extras import naming_extras

with naming_extras:
    import nats.errors
    from nats.aio.client import Client

__all__ = ["NATS_ERRORS", "NatsThread", "NatsHandler"]

_log = logging.getLogger("observability.jetstream")

NATS_ERRORS = (nats.errors.Error, OSError, asyncio.TimeoutError, ValueError)
"""Raised by the client for a broker that is unreachable, refuses, or sends an invalid answer."""

_RECONNECT_WAIT_S = 0.25
_CONNECT_TIMEOUT_S = 2
_PING_INTERVAL_S = 5
_CLOSING_S = 2.0
_CANCEL_AGAIN_S = 3.0
"""Longer than closing takes, because a second cancellation would interrupt it."""

_MAX_PINGS_OUT = 2
"""A stopped or unreachable server is detected after two of these pings, a closed one immediately."""


class NatsHandler(Protocol):
    """Uses a connection, on the connection's thread."""

    async def run(self, client: Client) -> None:
        """Use the connection until cancelled. Called once, after the first connect."""
        ...

    def on_disconnected(self) -> None:
        """The connection is lost, and the client reconnects."""
        ...

    def on_reconnected(self) -> None:
        """The connection is up, for the first time or again."""
        ...


class NatsThread:
    """Owns the thread, the loop and the connection. It calls ``handler`` on that thread only.

    Attributes:
        num_disconnects: times that the connection was lost, or could not be made at first.
        is_connected: the connection is up.
    """

    def __init__(self, config: JetStreamConfig, handler: NatsHandler, *, name: str) -> None:
        self.num_disconnects = 0
        self.is_connected = False
        self._config = config
        self._handler = handler
        self._name = name
        self._last_error = ""
        self._is_loss_logged = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    @property
    def redacted_servers(self) -> tuple[str, ...]:
        """The server URLs without user and password."""
        parts = (urlsplit(url) for url in self._config.servers)
        return tuple(f"{part.scheme}://{part.hostname}:{part.port or 4222}" for part in parts)

    def start(self) -> None:
        """Start to connect. Return without waiting for the connection."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(self._loop,), name=self._name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule ``function`` on the thread. Do nothing before ``start`` and after ``stop``."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed
            return

    def stop(self) -> None:
        """Close the connection and end the thread. Safe to call twice."""
        self.call(self._cancel)
        if self._thread is not None:
            self._thread.join()

    def _cancel(self) -> None:
        """Cancel the main task repeatedly, because the client may swallow a cancellation while it waits for a reply."""
        if self._main is not None and self._loop is not None and not self._main.done():
            self._main.cancel()
            self._loop.call_later(_CANCEL_AGAIN_S, self._cancel)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            self._main = loop.create_task(self._connect_and_run())
            loop.run_until_complete(asyncio.wait([self._main]))
            if not self._main.cancelled() and self._main.exception() is not None:
                _log.error("%s ended: %s", self._name, self._main.exception(), exc_info=self._main.exception())
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _connect_and_run(self) -> None:
        client = Client()
        try:
            await client.connect(
                servers=list(self._config.servers),
                name=self._name,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_connected,
                max_reconnect_attempts=-1,
                reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]
                connect_timeout=_CONNECT_TIMEOUT_S,
                ping_interval=_PING_INTERVAL_S,
                max_outstanding_pings=_MAX_PINGS_OUT,
                user_credentials=self._config.credentials_file,
            )
            await self._on_connected()
            await self._handler.run(client)
        finally:
            self.is_connected = False
            await _close(client)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        if not self.is_connected:
            self._log_loss()

    async def _on_disconnected(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self._log_loss()
            self._handler.on_disconnected()

    def _log_loss(self) -> None:
        """Log one line per loss."""
        if not self._is_loss_logged:
            self._is_loss_logged = True
            self.num_disconnects += 1
            reason = self._last_error or "the connection was closed"
            servers = ", ".join(self.redacted_servers)
            _log.warning("%s: %s is unreachable (%s); reconnecting", self._name, servers, reason)

    async def _on_connected(self) -> None:
        self.is_connected = True
        if self._is_loss_logged:
            self._is_loss_logged = False
            _log.warning("%s: %s is reachable again", self._name, ", ".join(self.redacted_servers))
        self._handler.on_reconnected()


async def _close(client: Client) -> None:
    """Close the connection in any state."""
    closing: Awaitable[None] = client.close()
    try:
        await asyncio.wait_for(closing, _CLOSING_S)
    except NATS_ERRORS as error:
        _log.debug("cannot close the connection: %s", error)
