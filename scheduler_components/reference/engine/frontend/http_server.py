"""Bind an address and serve an ASGI application on it with uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from scheduler_components import (
    StartError,
)

__all__ = [
    "bind_http",
    "open_http_server",
]

HEADER_TIMEOUT_S = 30.0
"""Longest time until the request headers are complete; the same as for a body."""

KEEP_ALIVE_S = 75
"""Seconds to keep an idle connection open: longer than clients do (httpx 5 s, aiohttp 15 s, load balancers 60 s).
If the server closed it first, a client might be sending a request at that moment, which would get no response."""


_LINGER_S = 5  # for a client that still sends its body to read the response
_BACKLOG = 512
_GRACE_S = 2  # for open streams, when the engine stops


class _Server(uvicorn.Server):
    """A uvicorn server within the engine's asyncio loop, which installs no signal handlers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: the command line handles Ctrl-C."""
        yield


class _PunctualProtocol(H11Protocol):
    """Closes a connection that has not sent its request headers in time; uvicorn has no such timeout."""

    def __init__(self, *, header_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._header_timeout_s = header_timeout_s
        self._close_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn's own narrowing
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._close_timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:  # the body was not read, so no second request can follow
            self.timeout_keep_alive = _LINGER_S
        super().on_response_complete()

    def _start_timer(self) -> None:
        self._close_timer = self.loop.call_later(self._header_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None


@contextmanager
def bind_http(host: str, port: int) -> Iterator[socket.socket]:
    """Bind the server's address until the block is left, without listening on it. Connections are refused until then.

    Args:
        host: address or name; the default is never a wildcard.
        port: TCP port; 0 lets the system choose.

    Raises:
        StartError: the address is in use, or does not belong to this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise _address_error(host, port, error) from error
    with bound:
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the previous server may have just ended
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind(address[:2])
        except OSError as error:
            raise _address_error(host, port, error) from error
        yield bound


def _address_error(host: str, port: int, error: Exception) -> StartError:
    return StartError(f"{host}:{port}", str(error), "give another --host or --port")


@asynccontextmanager
async def open_http_server(
    app: ASGIApp, listener: socket.socket, *, header_timeout_s: float = HEADER_TIMEOUT_S
) -> AsyncIterator[str]:
    """Serve ``app`` until the block is left.

    Args:
        app: any ASGI application.
        listener: socket from ``bind_http``.
        header_timeout_s: the server closes a connection that has not sent its request headers by then.

    Yields:
        A URL at which this machine reaches the server, with the bound port.

    Raises:
        StartError: another process listens at the address.
    """
    bound_host, bound_port = listener.getsockname()[:2]
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _address_error(bound_host, bound_port, error) from error
    config = uvicorn.Config(
        app,
        http=cast("type[H11Protocol]", partial(_PunctualProtocol, header_timeout_s=header_timeout_s)),
        lifespan="off",
        log_config=None,  # uvicorn's records go where all others do
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield _url(ip_address(bound_host), bound_port)
    finally:
        server.should_exit = True
        await serving


def _url(host: IPv4Address | IPv6Address, port: int) -> str:
    """Return the URL of an address, with loopback instead of a wildcard, to which no client can connect."""
    if host.is_unspecified:
        host = IPv4Address("127.0.0.1") if host.version == 4 else IPv6Address("::1")
    return f"http://[{host}]:{port}" if host.version == 6 else f"http://{host}:{port}"
