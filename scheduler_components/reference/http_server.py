"""One HTTP server inside somebody else's asyncio loop: it owns its listening socket and leaves signals alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address

import uvicorn
from starlette.types import ASGIApp

from scheduler_components.errors import StartError

__all__ = ["open_http_server"]

_GRACE_S = 2  # streams that are still open when the engine stops are cut after this


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Ctrl-C belongs to the command line."""
        yield


@asynccontextmanager
async def open_http_server(app: ASGIApp, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve ``app`` until the block is left.

    Args:
        app: any ASGI application.
        host: address or name to bind; a wildcard is a person's explicit wish.
        port: 0 lets the system choose.

    Yields:
        A URL at which this machine reaches the server, with the port that was really bound.

    Raises:
        StartError: the address is taken or not this machine's.
    """
    listener = _listen(host, port)
    bound_host, bound_port = listener.getsockname()[:2]
    server = _Server(
        uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S)
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield _url(ip_address(bound_host), bound_port)
    finally:
        server.should_exit = True
        await serving
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise StartError(f"{host}:{port}", str(error), "give another --host or --port") from error


def _url(host: IPv4Address | IPv6Address, port: int) -> str:
    """A wildcard is no address to dial: loopback stands for it."""
    if host.is_unspecified:
        host = IPv4Address("127.0.0.1") if host.version == 4 else IPv6Address("::1")
    return f"http://[{host}]:{port}" if host.version == 6 else f"http://{host}:{port}"
