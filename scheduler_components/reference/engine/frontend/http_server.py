"""The engine over HTTP: all its routes, what it says of itself, and the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, cast

import h11
import msgspec
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from observability import error_response, kv_pool_route, status_routes
from scheduler_components import (
    ComponentError,
    ConfigError,
    LoadSnapshot,
    QuiesceStats,
    StartError,
    __version__,
    kv_events_server_info,
)
from scheduler_components.kv_events import Endpoint, ListeningStream
from scheduler_components.reference.engine.engine import Engine, RpcError
from scheduler_components.reference.engine.frontend.http_body import BadBodyError, component_error_response, read_body
from scheduler_components.reference.engine.frontend.http_control import control_routes
from scheduler_components.reference.engine.frontend.http_generate import GenerateEndpoint
from scheduler_components.reference.engine.frontend.http_openai import ChatEndpoint, CompletionEndpoint
from scheduler_components.reference.engine.frontend.text_frontend import TextFrontend, open_text_codec
from scheduler_components.reference.text.text_tokenizer import TextTokenizer

__all__ = [
    "EngineStatus",
    "bind_http",
    "make_app",
    "open_http_server",
    "text_routes",
]

HEADER_TIMEOUT_S = 30.0
"""As long for a request's first lines as for its body, though they are short."""

KEEP_ALIVE_S = 75
"""How long an idle connection is kept: longer than clients keep theirs (httpx 5 s, aiohttp 15 s, balancers 60 s). Where
the server hangs up first, now and then a request is on its way already, and its client reads nothing."""


def _dialable(text: str | None) -> Endpoint | None:
    """The address of an open socket; None where it has no port."""
    endpoint = None if text is None else Endpoint.parse(text)
    return endpoint if endpoint is not None and endpoint.port else None


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineStatus:
    """A ``StatusSource`` of the engine."""

    engine: Engine

    def health_problem(self) -> str | None:
        front = self.engine.front
        problems = (
            [front.board.failure] if front.board.failure is not None else front.heartbeats.silent_replicas().values()
        )
        return "; ".join(map(str, problems)) or None

    def server_info(self) -> Mapping[str, Any]:
        """Configuration, the descriptor of the event streams, and each DP rank's newest slots and blocks."""
        config = self.engine.config
        facts = {
            "version": __version__,
            "weight_version": self.engine.control.weight_version,
            "is_paused": any(told.is_paused for told in self._quiesce()),
            "is_sleeping": not all(told.is_awake for told in self._quiesce()),
            "model_path": config.model_name,
            "served_model_name": config.model_name,
            "dp_size": config.dp_size,
            "tp_size": config.tp_size,
            "pp_size": config.pp_size,
            "attn_cp_size": config.attn_cp_size,
            "attn_tp_size": config.attn_tp_size,
            "enable_dp_attention": config.dp_size > 1,
            "page_size": config.scheduler.page_size,
            "max_total_num_tokens": config.scheduler.kv_tokens,
            "max_running_requests": config.scheduler.max_running_requests,
            "chunked_prefill_size": config.scheduler.chunk_tokens,
            "kv_metrics": [msgspec.to_builtins(report) for _, report in sorted(self.engine.kv_metrics.items())],
        }
        page_size = config.scheduler.page_size
        return facts | kv_events_server_info(
            config.kv_events, block_size=page_size, dp_size=config.dp_size, publishers=self._bound_streams()
        )

    def _quiesce(self) -> list[QuiesceStats]:
        """What each replica was last ordered to be, as far as it has said."""
        found = [stats.totals.quiesce for stats in self.engine.stats.read().values()]
        return [each for each in found if each is not None]

    def _bound_streams(self) -> Iterator[ListeningStream]:
        """Where the ranks' streams listen, as far as a reader on another machine could dial them."""
        for rank, said in self.engine.front.board.ready.items():
            events = _dialable(said.stream_endpoint)
            if events is not None:
                stream = self.engine.config.parallel(rank).kv_stream_index
                replay, load = _dialable(said.replay_endpoint), _dialable(said.load_endpoint)
                yield ListeningStream(rank=stream, events=events, replay=replay, load=load)

    def model_info(self) -> Mapping[str, Any]:
        name = self.engine.config.model_name
        return {
            "model_path": name,
            "served_model_name": name,
            "is_generation": True,
            "skip_tokenizer_init": False,
            "weight_version": self.engine.control.weight_version,
        }

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        return [stats.load for _, stats in sorted(self.engine.stats.read().items())]


def text_routes(text: TextFrontend, model: str) -> list[Route]:
    """Return the routes that generate: SGLang's and OpenAI's; ``model`` is what answers call it."""
    return [
        Route("/generate", GenerateEndpoint(text=text), methods=["POST"]),
        Route("/v1/completions", CompletionEndpoint(text=text, model=model), methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(text=text, model=model), methods=["POST"]),
    ]


def make_app(
    engine: Engine, registry: CollectorRegistry, *, kv_pool: bool = False, codec: TextTokenizer | None = None
) -> Starlette:
    """Every route of the engine.

    ``/generate``, ``/v1/completions``, ``/v1/chat/completions``, ``/clear_hicache_storage_backend``, those of orders,
    ``/get_internal_state``, ``/set_internal_state``, ``/start_profile``, ``/stop_profile``, the status routes, and
    ``/kv_pool`` where it is asked for. ``codec`` is of the model;
    None loads it.
    """

    async def clear_storage(_: Request) -> Response:
        try:
            num_pages = await engine.clear_storage()
        except ConfigError as error:
            return component_error_response(error)
        except ComponentError as error:
            return error_response(500, str(error))
        if num_pages is None:
            return error_response(400, "the store is kept, for requests or pages are on their way: ask again")
        return PlainTextResponse(f"Storage cleared: {num_pages} pages.\n")

    text = TextFrontend(front=engine.front, codec=open_text_codec(engine.config) if codec is None else codec)
    generate = text_routes(text, engine.config.model_name)
    clear = Route("/clear_hicache_storage_backend", clear_storage, methods=["POST"])  # SGLang's name
    status = status_routes(EngineStatus(engine=engine), registry=registry)
    routes = [*generate, clear, *control_routes(engine), *_rpc_routes(engine), *status]
    return Starlette(routes=[*routes, kv_pool_route(engine)] if kv_pool else routes)


class _StateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server_args: msgspec.Raw


def _rpc_routes(engine: Engine) -> list[Route]:
    """What a person reads, sets and records in a running engine; paths and bodies are SGLang's (0.5.x)."""

    async def get_state(_: Request) -> Response:
        """One state per replica, as its leader tells it."""
        states = await engine.ask("get_internal_state")
        leaders = map(engine.config.leader_rank, range(engine.config.dp_size))
        return JSONResponse({"internal_states": [states[leader] for leader in leaders]})

    async def set_state(request: Request) -> Response:
        body = await read_body(request)
        try:
            changes = msgspec.json.decode(body, type=_StateBody).server_args
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadBodyError("body", str(error)) from None
        answers = await engine.ask("set_internal_state", bytes(changes))
        return JSONResponse({"updated": True, "server_args": answers[0]})

    async def start_profile(request: Request) -> Response:
        await engine.ask("start_profile", await read_body(request))
        return PlainTextResponse("Start profiling.\n")

    async def stop_profile(_: Request) -> Response:
        answers = await engine.ask("stop_profile")
        return JSONResponse({"traces": [trace for traces in answers.values() for trace in traces]})

    def answered(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except RpcError as error:
                return error_response(400, str(error))
            except ComponentError as error:
                return component_error_response(error)

        return answer

    return [
        Route("/get_internal_state", answered(get_state), methods=["GET"]),
        Route("/set_internal_state", answered(set_state), methods=["POST", "PUT"]),
        Route("/start_profile", answered(start_profile), methods=["POST"]),
        Route("/stop_profile", answered(stop_profile), methods=["POST"]),
    ]


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
