"""The engine over HTTP: ``POST /generate``, what it says of itself, and the server.

Token ids in, tokens out, whole or as server-sent events. Body and answer have the shape of SGLang's native API for
token ids. What this engine does not do is refused by name and not ignored. A streamed event carries the tokens that are
new since the one before.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Any, cast

import h11
import msgspec
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from observability import error_response, kv_pool_route, status_routes
from scheduler_components import (
    ComponentError,
    ConfigError,
    FinishReason,
    LoadSnapshot,
    OutputDelta,
    QuiesceStats,
    StartError,
    __version__,
    kv_events_server_info,
)
from scheduler_components.kv_events import BoundStream, Endpoint
from scheduler_components.reference.engine.engine import ControlRefusedError, Engine
from scheduler_components.reference.engine.front import (
    Front,
    GenerateRequest,
    OpenRequest,
    RequestFailedError,
    RequestRefusedError,
)
from scheduler_components.reference.engine.http_orders import order_routes
from scheduler_components.reference.engine.messages import pack_tokens
from scheduler_components.reference.engine.request import SamplingLimits

__all__ = [
    "MAX_BODY_BYTES",
    "BadBodyError",
    "BodyTooLongError",
    "GenerateEndpoint",
    "parse_body",
    "EngineStatus",
    "bind_http",
    "make_app",
    "open_http_server",
]

MAX_BODY_BYTES = 16 * 2**20
"""Room for a prompt of a million tokens; of a longer body no more than this is read."""

BODY_DEADLINE_S = 30.0
"""The longest body at half a megabyte a second; who sends half a body and waits holds nothing for longer."""

HEAD_DEADLINE_S = 30.0
"""As long again for a request's first lines, which are short."""

KEEP_ALIVE_S = 75
"""How long an idle connection is kept: longer than clients keep theirs (httpx 5 s, aiohttp 15 s, balancers 60 s). Where
the server hangs up first, now and then a request is on its way already, and its client reads nothing."""

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class _SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 128
    stop_token_ids: Annotated[tuple[_TokenId, ...], msgspec.Meta(max_length=64)] = ()
    ignore_eos: bool = False
    stream_interval: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 1


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_ids: Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
    sampling_params: _SamplingParams = _SamplingParams()
    rid: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    conversation: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    stream: bool = False


_decode_body = msgspec.json.Decoder(_Body).decode
_encode = msgspec.json.Encoder().encode


class BadBodyError(ComponentError):
    """The client's request is malformed; ``field`` is the path of what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class BodyTooLateError(ComponentError):
    """The body was not whole in time."""


class BodyTooLongError(ComponentError):
    """The body is longer than ``MAX_BODY_BYTES``."""


def parse_body(text: bytes) -> tuple[GenerateRequest, bool]:
    """Read a request and whether to stream it.

    Raises:
        BadBodyError: naming the field that is wrong.
    """
    try:
        body = _decode_body(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem, _, path = str(error).partition(" - at `$")
        raise BadBodyError(path.strip(".`") or "body", problem) from None
    params = body.sampling_params
    limits = SamplingLimits(params.max_new_tokens, params.stop_token_ids, params.ignore_eos)
    request = GenerateRequest(
        rid=body.rid,
        input_ids=pack_tokens(body.input_ids),
        limits=limits,
        stream_interval=params.stream_interval if body.stream else 0,
        conversation=body.conversation,
    )
    return request, body.stream


@dataclass(slots=True, kw_only=True, frozen=True)
class GenerateEndpoint:
    """The ASGI application behind the route; a client that goes away aborts its request.

    Attributes:
        front: takes the requests.
        body_deadline_s: a body that is not whole by then gets 408, and its connection ends.
    """

    front: Front
    body_deadline_s: float = BODY_DEADLINE_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST."""
        try:
            request, stream = parse_body(await _read_body(Request(scope, receive), self.body_deadline_s))
            opened = self.front.open_request(request)
        except ClientDisconnect:
            return
        except ComponentError as error:
            await _error_response(error)(scope, receive, send)
            return
        async with opened as news:
            answer = _stream_answer if stream else _whole_answer
            with suppress(ClientDisconnect):  # leaving the block aborts the request
                await _unless_disconnected(receive, answer(news, scope, receive, send))


async def _read_body(request: Request, deadline_s: float) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise BodyTooLongError(f"body: is longer than {MAX_BODY_BYTES} bytes; send a shorter prompt")
    except TimeoutError:
        raise BodyTooLateError(f"body: {len(body)} bytes came in {deadline_s:g} s, and not its end") from None
    return bytes(body)


async def _unless_disconnected(receive: Receive, work: Awaitable[None]) -> None:
    """Do ``work``; give up when the client is gone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole_answer(news: OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
    output_ids: list[int] = []
    try:
        async for delta in news:
            output_ids += delta.output.token_ids
            last = delta
    except ComponentError as error:
        response = _error_response(error)
    else:
        response = Response(_encode(_answer(last, output_ids)), media_type="application/json")
    await response(scope, receive, send)


async def _stream_answer(news: OpenRequest, scope: Scope, receive: Receive, send: Send) -> None:
    """Send one event per output, then ``[DONE]``. What fails before the first token is answered with a status."""
    try:
        first = await anext(news)
    except ComponentError as error:
        response = _error_response(error)
    else:
        headers = {"cache-control": "no-cache"}
        response = StreamingResponse(_events(first, news), media_type="text/event-stream", headers=headers)
    await response(scope, receive, send)


async def _events(first: OutputDelta, news: OpenRequest) -> AsyncIterator[bytes]:
    """The lines of a stream that has begun with ``first``; what fails from here on is an event too."""
    yield _event(_encode(_answer(first, first.output.token_ids)))
    try:
        async for delta in news:
            yield _event(_encode(_answer(delta, delta.output.token_ids)))
    except ComponentError as error:
        yield _event(bytes(_error_response(error).body))
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    """One server-sent event; the JSON in it has no line breaks."""
    return b"data: " + data + b"\n\n"


def _answer(delta: OutputDelta, output_ids: list[int] | tuple[int, ...]) -> dict[str, Any]:
    return {
        "output_ids": output_ids,
        "meta_info": {
            "id": delta.rid,
            "finish_reason": _finish_reason(delta),
            "prompt_tokens": delta.output.num_prompt_tokens,
            "completion_tokens": delta.num_output_tokens,
            "cached_tokens": delta.output.num_cached_tokens,
        },
    }


def _finish_reason(delta: OutputDelta) -> dict[str, Any] | None:
    if delta.finish_reason is None:
        return None
    if delta.finish_reason == FinishReason.LENGTH:
        return {"type": "length", "length": delta.num_output_tokens}
    if delta.finish_reason == FinishReason.STOP:
        return {"type": "stop", "matched": delta.output.token_ids[-1]}
    return {"type": "abort"}


def _error_response(error: ComponentError) -> Response:
    if isinstance(error, BadBodyError | ConfigError):
        return error_response(400, str(error), param=error.field)
    if isinstance(error, RequestRefusedError):
        return error_response(400, str(error))
    if isinstance(error, RequestFailedError):
        return error_response(500, str(error))
    if isinstance(error, BodyTooLongError):
        return error_response(413, str(error))
    if isinstance(error, BodyTooLateError):
        return error_response(408, str(error))  # and the server hangs up, as after any body that was not read whole
    return error_response(503, str(error))  # TooBusyError, RankSilentError, EngineFailedError


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
        problems = [front.board.failure] if front.board.failure is not None else front.pulse.silent().values()
        return "; ".join(map(str, problems)) or None

    def server_info(self) -> Mapping[str, Any]:
        """Configuration, the descriptor of the event streams, and each DP rank's newest slots and blocks."""
        config = self.engine.config
        facts = {
            "version": __version__,
            "weight_version": self.engine.orders.weight_version,
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

    def _bound_streams(self) -> Iterator[BoundStream]:
        """Where the ranks' streams listen, as far as a reader on another machine could dial them."""
        for rank, said in self.engine.front.board.ready.items():
            events = _dialable(said.stream_endpoint)
            if events is not None:
                stream = self.engine.config.parallel(rank).kv_stream_index
                replay, load = _dialable(said.replay_endpoint), _dialable(said.load_endpoint)
                yield BoundStream(rank=stream, events=events, replay=replay, load=load)

    def model_info(self) -> Mapping[str, Any]:
        name = self.engine.config.model_name
        return {
            "model_path": name,
            "served_model_name": name,
            "is_generation": True,
            "skip_tokenizer_init": True,
            "weight_version": self.engine.orders.weight_version,
        }

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        return [stats.load for _, stats in sorted(self.engine.stats.read().items())]


def make_app(engine: Engine, registry: CollectorRegistry, *, kv_pool: bool = False) -> Starlette:
    """Every route of the engine.

    ``/generate``, ``/clear_hicache_storage_backend``, those of orders, ``/get_internal_state``,
    ``/set_internal_state``, ``/start_profile``, ``/stop_profile``, the status routes, and ``/kv_pool`` where it is
    asked for.
    """

    async def clear_storage(_: Request) -> Response:
        try:
            num_pages = await engine.clear_storage()
        except ConfigError as error:
            return _error_response(error)
        except ComponentError as error:
            return error_response(500, str(error))
        if num_pages is None:
            return error_response(400, "the store is kept, for requests or pages are on their way: ask again")
        return PlainTextResponse(f"Storage cleared: {num_pages} pages.\n")

    generate = Route("/generate", GenerateEndpoint(front=engine.front), methods=["POST"])
    clear = Route("/clear_hicache_storage_backend", clear_storage, methods=["POST"])  # SGLang's name
    status = status_routes(EngineStatus(engine=engine), registry=registry)
    routes = [generate, clear, *order_routes(engine), *_control_routes(engine), *status]
    return Starlette(routes=[*routes, kv_pool_route(engine)] if kv_pool else routes)


class _StateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server_args: msgspec.Raw


def _control_routes(engine: Engine) -> list[Route]:
    """What a person reads, sets and records in a running engine; paths and bodies are SGLang's (0.5.x)."""

    async def get_state(_: Request) -> Response:
        """One state per replica, as its leader tells it."""
        states = await engine.ask("get_internal_state")
        leaders = map(engine.config.leader_of, range(engine.config.dp_size))
        return JSONResponse({"internal_states": [states[leader] for leader in leaders]})

    async def set_state(request: Request) -> Response:
        body = await _read_body(request, BODY_DEADLINE_S)
        try:
            changes = msgspec.json.decode(body, type=_StateBody).server_args
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadBodyError("body", str(error)) from None
        answers = await engine.ask("set_internal_state", bytes(changes))
        return JSONResponse({"updated": True, "server_args": answers[0]})

    async def start_profile(request: Request) -> Response:
        await engine.ask("start_profile", await _read_body(request, BODY_DEADLINE_S))
        return PlainTextResponse("Start profiling.\n")

    async def stop_profile(_: Request) -> Response:
        answers = await engine.ask("stop_profile")
        return JSONResponse({"traces": [trace for traces in answers.values() for trace in traces]})

    def answered(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await endpoint(request)
            except ControlRefusedError as error:
                return error_response(400, str(error))
            except ComponentError as error:
                return _error_response(error)

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

    def __init__(self, *, head_deadline_s: float, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._head_deadline_s = head_deadline_s
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
    app: ASGIApp, listener: socket.socket, *, head_deadline_s: float = HEAD_DEADLINE_S
) -> AsyncIterator[str]:
    """Serve ``app`` until the block is left.

    Args:
        app: any ASGI application.
        listener: of ``bind_http``.
        head_deadline_s: who has not sent a request's head by then is hung up on, also who has sent nothing.

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
        http=cast("type[H11Protocol]", partial(_PunctualProtocol, head_deadline_s=head_deadline_s)),
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
