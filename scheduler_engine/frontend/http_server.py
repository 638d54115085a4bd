"""Bind an address and serve an ASGI application on it with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, cast

import attrs
import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from observability import error_response
from scheduler_components import StartError
from scheduler_components._internal.failure_log import FailureLog
from scheduler_engine.frontend.errors import TooBusyError

logger = logging.getLogger(__name__)

HEADER_TIMEOUT_S = 30.0
"""Longest time until the request headers are complete; the same as for a body."""

KEEP_ALIVE_S = 75
"""Seconds to keep an idle connection open: longer than clients do (httpx 5 s, aiohttp 15 s, load balancers 60 s).
If the server closed it first, a client might be sending a request at that moment, which would get no response."""

LINGER_S = 5.0
"""Longest time for a client that still sends its body to read the response. The server closes the connection then,
also if the client keeps sending."""

STALL_TIMEOUT_S = 60.0
"""Longest time in which a client takes no byte of a response that waits for it."""

_BACKLOG = 128  # also the connections that asyncio accepts in a row, before the limit can refuse one
_GRACE_S = 2  # for open streams, when the engine stops
_SPARE_DESCRIPTORS = 64  # for files, pipes and sockets that the process opens later
_MIN_CONNECTIONS, _MAX_CONNECTIONS = 8, 16_384
_ROOM_AGAIN = 0.9  # an episode of refusals ends below this share of the limit
_ACCEPTING = "accepting HTTP connections"
_OUT_OF_DESCRIPTORS = "socket.accept() out of system resource"  # asyncio's message
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s"
)


class _Server(uvicorn.Server):
    """A uvicorn server within the engine's asyncio loop, which installs no signal handlers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: the command line handles Ctrl-C."""
        yield

    def stop_accepting(self) -> None:
        """Close the listening sockets. Open connections stay open."""
        for server in self.servers:
            server.close()


def connection_limit(soft_limit: int, num_open: int) -> int:
    """Return how many connections leave descriptors for the rest of the process.

    Args:
        soft_limit: the process's limit of open descriptors (``RLIMIT_NOFILE``).
        num_open: descriptors that are open now.
    """
    return max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, soft_limit - num_open - _BACKLOG - _SPARE_DESCRIPTORS))


def _default_connection_limit() -> int:
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return connection_limit(soft_limit, len(list(Path("/dev/fd").iterdir())))


@dataclass(slots=True, kw_only=True)
class _ConnectionLimits:
    """The limits of a server's connections, and the log of refusals: one line when they begin and one when they end.

    Attributes:
        max_connections: further connections get 503.
        header_timeout_s, linger_s, stall_timeout_s: see ``open_http_server``.
    """

    max_connections: int
    header_timeout_s: float
    linger_s: float
    stall_timeout_s: float
    failures: FailureLog = field(default_factory=lambda: FailureLog(logger))

    def refuse(self, transport: asyncio.Transport) -> None:
        """Respond 503 to a connection and close it, before it sends its request."""
        message = f"{self.max_connections} connections are open, which is the limit; try again later"
        self.failures.failed(_ACCEPTING, TooBusyError(message))
        body = bytes(error_response(503, message).body)
        transport.write(_BUSY % (len(body), body))
        transport.close()

    def on_close(self, num_open: int) -> None:
        if num_open < self.max_connections * _ROOM_AGAIN:
            self.failures.succeeded(_ACCEPTING)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that asyncio reports: log a lack of descriptors once per episode."""
        if context.get("message") == _OUT_OF_DESCRIPTORS:
            self.failures.failed(_ACCEPTING, context["exception"])
        else:
            loop.default_exception_handler(context)


class _FirstWarnings(logging.Filter):
    """Lets each warning of uvicorn pass once: any client can cause one per request, such as for invalid HTTP."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. Errors always pass."""
        if record.levelno != logging.WARNING:
            return True
        is_first = record.msg not in self._passed
        self._passed.add(record.msg)
        return is_first


class _QuietTransport:
    """Drops what is written after the connection has closed. asyncio would log a line for each such event of a stream.

    Args:
        transport: gets all other calls.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _PunctualProtocol(H11Protocol):
    """A connection with limits that uvicorn does not have.

    It closes a connection that has not sent its request headers in time, still sends a body after the response, or
    does not read its response. It refuses connections beyond a limit.
    """

    def __init__(self, *, limits: _ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._limits = limits
        self._close_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_lingering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self.connections) >= self._limits.max_connections:
            self.transport = transport
            self._limits.refuse(transport)
            return
        super().connection_made(cast("asyncio.Transport", _QuietTransport(transport)))
        self._start_timer(self._limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_lingering:
            return  # no data extends the time
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._close_timer is None:
            self._start_timer(self._limits.header_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_for_progress(sys.maxsize)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)
        self._limits.on_close(len(self.connections))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The body was not read, so no second request can follow.
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._stop_timer()
            self._is_lingering = True
            self._start_timer(self._limits.linger_s)

    def _check_for_progress(self, num_unsent: int) -> None:
        """Close the connection if the client has taken nothing since ``num_unsent`` bytes waited for it."""
        num_left = self.transport.get_write_buffer_size()
        if num_left >= num_unsent:
            self.transport.abort()
        else:
            self._stall_timer = self.loop.call_later(self._limits.stall_timeout_s, self._check_for_progress, num_left)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _start_timer(self, timeout_s: float) -> None:
        self._close_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None


@attrs.frozen
class HttpServer:
    """A running server.

    Attributes:
        url: a URL at which this machine reaches it, with the bound port.
        stop_accepting: refuses new connections; those that are open stay open.
    """

    url: str
    stop_accepting: Callable[[], None]


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
    app: ASGIApp,
    listener: socket.socket,
    *,
    header_timeout_s: float = HEADER_TIMEOUT_S,
    linger_s: float = LINGER_S,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    max_connections: int | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve ``app`` until the block is left.

    Args:
        app: any ASGI application.
        listener: socket from ``bind_http``.
        header_timeout_s: the server closes a connection that has not sent its request headers by then.
        linger_s: longest time, after a response, for a client that still sends its body.
        stall_timeout_s: the server closes a connection whose client takes no byte for so long while more of a
            response waits than asyncio buffers (64 KiB).
        max_connections: further connections get 503; None leaves descriptors for the rest of the process.

    Raises:
        StartError: another process listens at the address.
    """
    bound_host, bound_port = listener.getsockname()[:2]
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        raise _address_error(bound_host, bound_port, error) from error
    limits = _ConnectionLimits(
        max_connections=_default_connection_limit() if max_connections is None else max_connections,
        header_timeout_s=header_timeout_s,
        linger_s=linger_s,
        stall_timeout_s=stall_timeout_s,
    )
    config = uvicorn.Config(
        app,
        http=cast("type[H11Protocol]", partial(_PunctualProtocol, limits=limits)),
        lifespan="off",
        log_config=None,  # uvicorn's records go where all others do
        access_log=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    warnings, first_warnings = logging.getLogger("uvicorn.error"), _FirstWarnings()
    warnings.addFilter(first_warnings)
    server, loop = _Server(config), asyncio.get_running_loop()
    previous = loop.get_exception_handler()
    loop.set_exception_handler(limits.on_loop_error)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0)  # the server awaits nothing else before it listens
        yield HttpServer(_url(ip_address(bound_host), bound_port), server.stop_accepting)
    finally:
        server.should_exit = True
        await serving
        loop.set_exception_handler(previous)
        warnings.removeFilter(first_warnings)


def _url(host: IPv4Address | IPv6Address, port: int) -> str:
    """Return the URL of an address, with loopback instead of a wildcard, to which no client can connect."""
    if host.is_unspecified:
        host = IPv4Address("127.0.0.1") if host.version == 4 else IPv6Address("::1")
    return f"http://[{host}]:{port}" if host.version == 6 else f"http://{host}:{port}"
