"""The engine over HTTP: all its routes, what it says of itself, and the server."""

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
"""As long for a request's first lines as for its body, though they are short."""

KEEP_ALIVE_S = 75
"""How long an idle connection is kept: longer than clients keep theirs (httpx 5 s, aiohttp 15 s, balancers 60 s). Where
the server hangs up first, now and then a request is on its way already, and its client reads nothing."""


_LINGER_S = 5  # for a client that still sends to read why it need not
_BACKLOG = 512
_GRACE_S = 2  # streams that are still open when the engine stops are cut after this


class _Server(uvicorn.Server):
    """A server inside somebody else's asyncio loop: it owns its listening socket and leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ctrl-C belongs to the command line."""
        yield


class _PunctualProtocol(H11Protocol):
    """Hangs up on who does not send a request's head in time: uvicorn itself waits for ever for the rest of one."""

    def __init__(self, *, header_timeout_s: float, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._head_deadline_s = header_timeout_s
        self._hang_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn's own narrowing
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._hang_up is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:  # answered before all was read: no second request can come
            self.timeout_keep_alive = _LINGER_S
        super().on_response_complete()

    def _expect_head(self) -> None:
        self._hang_up = self.loop.call_later(self._head_deadline_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._hang_up is not None:
            self._hang_up.cancel()
            self._hang_up = None


@contextmanager
def bind_http(host: str, port: int) -> Iterator[socket.socket]:
    """Take the server's address until the block is left, without listening: who connects is refused until it serves.

    Args:
        host: address or name; a wildcard is bound only if a person asks for it.
        port: 0 lets the system choose.

    Raises:
        StartError: the address is taken or not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise _address_error(host, port, error) from error
    with bound:
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server that ended a moment ago
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
        listener: of ``bind_http``.
        header_timeout_s: who has not sent a request's head by then is hung up on, also who has sent nothing.

    Yields:
        A URL at which this machine reaches the server, with the port that was really bound.

    Raises:
        StartError: somebody else began to listen at the address.
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
        log_level="warning",
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
    """A wildcard is not an address to dial: loopback stands for it."""
    if host.is_unspecified:
        host = IPv4Address("127.0.0.1") if host.version == 4 else IPv6Address("::1")
    return f"http://[{host}]:{port}" if host.version == 6 else f"http://{host}:{port}"
