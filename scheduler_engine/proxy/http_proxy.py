"""The ASGI application of a proxy: it forwards each generating request to the replica that the fleet's router chooses.

A request goes to another replica only while its client has received nothing: if the engine cannot be reached, is lost,
ends the connection or answers 503. An answer with server-sent events is passed on event by event as it arrives. Any
other answer is read whole first, so it arrives whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import TypeVar
from uuid import uuid4

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from observability import error_response
from scheduler_components import ComponentError
from scheduler_engine.frontend.http_body import (
    BodyReceiver,
    component_error_response,
    run_until_disconnected,
)
from scheduler_engine.frontend.http_openai import RANK_HEADER
from scheduler_engine.proxy.answer_memory import AnswerMemoryError, HeldAnswer
from scheduler_engine.proxy.http_fleet import Fleet, ProxiedEngine, RequestRoute
from scheduler_engine.proxy.http_replica import EngineDownError, ReplicaError
from scheduler_engine.proxy.routing_fields import RoutingFields, read_routing_fields, read_session_id

GENERATING_PATHS = ("/v1/completions", "/v1/chat/completions", "/generate")

OPEN_SESSION = "/open_session"
CLOSE_SESSION = "/close_session"

FORWARDED_PATHS = (*GENERATING_PATHS, OPEN_SESSION, CLOSE_SESSION)
"""Routes of engines that clients may use through the proxy, besides their models."""

REPLICA_HEADER = "x-replica"
"""In a response: which replica answered, as the number of its engine in the command line from 0."""

_REQUEST_ID = "x-request-id"
_MAX_ID_CHARACTERS = 128

_REQUEST_HEADERS = ("content-type", "accept", "traceparent", "tracestate", "user-agent")
"""Headers of clients that engines get. Keys of clients are for the proxy alone."""

_RESPONSE_HEADERS = ("content-type", "cache-control", "retry-after", RANK_HEADER)
"""Headers of engines that clients get."""

_MAX_ANSWER_BYTES = 64 * 2**20
"""Limit of an answer that is read whole: 128 outputs of a hundred thousand tokens."""

_MAX_EVENT_BYTES = 4 * 2**20
"""Limit of one server-sent event, which is held until it is complete."""

_WRITE_BYTES = 256 * 2**10
"""A long answer is written in parts, each when the client has taken most of the last one."""

_CLIENT_ERRORS = range(400, 500)
_RETRY_AFTER = {"retry-after": "1"}

T = TypeVar("T")


@dataclass(slots=True)
class ProxyCounters:
    """Counters of a proxy.

    Attributes:
        open: requests that are open now.
        requests: requests that were accepted.
        refused: requests beyond the limit, or while the proxy stops.
        retried: attempts after the first one of a request.
        unplaced: requests that no replica could take.
        cut: answers that ended early because the engine failed, or because other answers filled the memory.
        answers_refused: answers that were not passed on whole, because other answers filled the memory.
    """

    open: int = 0
    requests: int = 0
    refused: int = 0
    retried: int = 0
    unplaced: int = 0
    cut: int = 0
    answers_refused: int = 0


@dataclass(slots=True)
class _Exchange:  # noqa: SCH003 - all that an attempt needs, and how far it is
    """One request of a client, and how far its answer is.

    Attributes:
        path: of the route.
        headers: for the engine.
        body: of the request, for each attempt.
        fields: what chooses the replica.
        send: sends to the client.
        held: the memory of its answer.
        has_opened: whether an engine has opened the session that it asks for.
        status: that the client has received; None before it.
    """

    path: str
    headers: Mapping[str, str]
    body: bytes | bytearray
    fields: RoutingFields
    send: Send
    held: HeldAnswer
    has_opened: bool = False
    status: int | None = None

    @property
    def has_begun(self) -> bool:
        return self.status is not None

    @property
    def request_id(self) -> str:
        return self.headers[_REQUEST_ID]

    @property
    def is_of_a_session(self) -> bool:
        """Whether it changes a session, so that an engine which may have received it is the only one that may."""
        return self.path == OPEN_SESSION or self.fields.open_session is not None

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, chunk: bytes, *, is_last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": chunk, "more_body": not is_last})

    async def respond(self, response: Response) -> None:
        response.headers[_REQUEST_ID] = self.request_id
        await self.begin(response.status_code, dict(response.headers))
        body = bytes(response.body)
        for first in range(0, len(body), _WRITE_BYTES):
            await self.write(body[first : first + _WRITE_BYTES])
        await self.write(b"", is_last=True)


@dataclass(slots=True, kw_only=True)
class ProxyEndpoint:
    """The ASGI application of the generating routes.

    Attributes:
        fleet: the engines.
        bodies: receives the bodies.
        counters: for metrics and status.
        is_draining: refuse new requests.
    """

    fleet: Fleet
    bodies: BodyReceiver = field(default_factory=BodyReceiver)
    counters: ProxyCounters = field(default_factory=ProxyCounters)
    is_draining: bool = False
    _idle: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one POST."""
        if scope["path"] not in FORWARDED_PATHS:  # a route also matches its path with a line break at the end
            await error_response(404, "Not Found")(scope, receive, send)
            return
        problem = self._refusal()
        if problem is not None:
            self.counters.refused += 1
            await error_response(503, problem)(scope, receive, send)
            return
        self.counters.open += 1
        self.counters.requests += 1
        try:
            with suppress(ClientDisconnect):
                await self._serve(Request(scope, receive), send)
        finally:
            self.counters.open -= 1
            if not self.counters.open:
                self._idle.set()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the open ones. Return how many are still open after ``timeout_s``."""
        self.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.counters.open:
                    self._idle.clear()
                    await self._idle.wait()
        return self.counters.open

    def _refusal(self) -> str | None:
        if self.is_draining:
            return "the proxy is stopping"
        if self.counters.open >= self.fleet.config.max_requests:
            return f"{self.counters.open} requests are open, which is the limit; try again later"
        return None

    async def _serve(self, request: Request, send: Send) -> None:
        try:
            async with self.bodies.receive(request) as body:
                path = request.scope["path"]
                fields = _fields_of(path, body)
                headers = _request_headers(request)
                with self.fleet.answers.open() as held:
                    exchange = _Exchange(path=path, headers=headers, body=body, fields=fields, send=send, held=held)
                    await run_until_disconnected(request.receive, self._answer(exchange))
        except ComponentError as error:
            await component_error_response(error)(request.scope, request.receive, send)

    async def _answer(self, exchange: _Exchange) -> None:
        """Let replicas serve the request, one after another, until one has answered."""
        prompt = await self.fleet.prompt_of(exchange.fields)
        failed: list[ProxiedEngine] = []
        refusal: Response | None = None
        while len(failed) < self.fleet.config.max_attempts:
            placement = await self.fleet.place(prompt, exchange.fields, exclude=failed)
            if placement is None:
                break
            self.counters.retried += bool(failed)
            refusal = await self._try(exchange, placement)
            if exchange.has_begun:
                return
            failed.append(placement.engine)
        if refusal is None:
            self.counters.unplaced += 1
            refusal = error_response(503, "no replica takes requests now; try again later")
            refusal.headers.update(_RETRY_AFTER)
        await exchange.respond(refusal)

    async def _try(self, exchange: _Exchange, placement: RequestRoute) -> Response | None:
        """Let one replica answer. If it does not, the exchange has not begun, and another one may.

        Returns:
            its own refusal, if it has said that it takes no requests now.
        """
        name, engine = exchange.fields.new_session, placement.engine
        is_reserved = name is not None and self.fleet.add_session(name, engine)  # before another request opens it
        try:
            refusal = await self._attempt(exchange, placement)
        except EngineDownError as error:
            self.fleet.fail(placement, error)
            if exchange.is_of_a_session and not error.is_refused:
                await exchange.respond(error_response(502, "the engine failed in a request of its session"))
            return None
        except TimeoutError:  # another engine would do the same work again
            self.fleet.finish(placement)
            await exchange.respond(error_response(504, "the engine did not answer in time"))
            return None
        except AnswerMemoryError as error:
            self.fleet.finish(placement)
            self.counters.answers_refused += 1
            full = error_response(503, str(error))
            full.headers.update(_RETRY_AFTER)
            await exchange.respond(full)
            return None
        except ReplicaError:
            self.fleet.finish(placement)
            await exchange.respond(error_response(502, "the engine's answer cannot be passed on"))
            return None
        except BaseException:  # the client has gone
            self.fleet.finish(placement)
            raise
        finally:
            if name is not None and is_reserved and not exchange.has_opened:
                self.fleet.remove_session(name)
        if refusal is None and exchange.status not in _CLIENT_ERRORS:
            self.fleet.finish(placement)
        else:  # the engine has not computed the prompt
            self.fleet.cancel(placement)
        return refusal

    async def _attempt(self, exchange: _Exchange, placement: RequestRoute) -> Response | None:
        """Let one replica serve the request. Return its refusal, if it takes no requests now.

        Raises:
            AnswerMemoryError: other answers fill the memory, and the client has received nothing.
            EngineDownError: the engine failed, and the client has received nothing.
            ReplicaError: its answer is too long, and the client has received nothing.
            TimeoutError: it was silent for too long, and the client has received nothing.
        """
        engine, lost = placement.engine, placement.engine.lost
        headers = dict(exchange.headers)
        if engine.is_data_parallel and exchange.fields.open_session is None:  # the id of a session determines its rank
            headers[RANK_HEADER] = str(placement.replica.rank)
        async with AsyncExitStack() as stack:
            answer = await _unless_lost(
                lost,
                stack.enter_async_context(
                    engine.client.forward("POST", exchange.path, body=exchange.body, headers=headers)
                ),
            )
            sent = _response_headers(answer, exchange.request_id, engine.number)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                await self._pass_events(exchange, engine, lost, answer, sent)
                return None
            body = await _unless_lost(lost, engine.client.read(answer, exchange.held, max_bytes=_MAX_ANSWER_BYTES))
        if answer.status_code == httpx.codes.OK:
            self._note_session(exchange, engine, body)
        response = Response(body, answer.status_code, sent)
        if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and exchange.path != OPEN_SESSION:
            return response
        await exchange.respond(response)
        return None

    def _note_session(self, exchange: _Exchange, engine: ProxiedEngine, body: bytes) -> None:
        if exchange.path == OPEN_SESSION:
            exchange.has_opened = True
            self.fleet.add_session(engine.client.session_id(body), engine)
        elif exchange.path == CLOSE_SESSION and exchange.fields.open_session is not None:
            self.fleet.remove_session(exchange.fields.open_session)

    async def _pass_events(
        self,
        exchange: _Exchange,
        engine: ProxiedEngine,
        lost: asyncio.Event,
        answer: httpx.Response,
        headers: Mapping[str, str],
    ) -> None:
        """Pass on whole events as they arrive. An engine that fails later ends the stream with an error event."""
        try:
            async with aclosing(engine.client.events(answer, exchange.held, max_bytes=_MAX_EVENT_BYTES)) as events:
                event = await _unless_lost(lost, anext(events, b""))
                await exchange.begin(answer.status_code, headers)
                while event:
                    await exchange.write(event)
                    event = await _unless_lost(lost, anext(events, b""))
        except (AnswerMemoryError, EngineDownError, TimeoutError) as error:
            if not exchange.has_begun:
                raise
            self.counters.cut += 1
            if isinstance(error, AnswerMemoryError):
                self.counters.answers_refused += 1
            else:
                engine.check_now.set()
            await exchange.write(b"data: " + bytes(_cut_response(error).body) + b"\n\ndata: [DONE]\n\n")
        await exchange.write(b"", is_last=True)


async def _unless_lost(lost: asyncio.Event, work: Awaitable[T]) -> T:
    """Await ``work``. Raise EngineDownError as soon as the engine goes down, although its connection may stay open."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(lost.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise EngineDownError("the engine was lost while a request waited for its answer")
    finally:
        task.cancel()
        waiting.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)


def _cut_response(error: Exception) -> Response:
    """Return what a client receives at the end of a stream that ended early."""
    if isinstance(error, AnswerMemoryError):
        return error_response(503, str(error))
    reason = "the engine was silent for too long" if isinstance(error, TimeoutError) else "the engine failed"
    return error_response(502, reason)


def _fields_of(path: str, body: bytes | bytearray) -> RoutingFields:
    if path in GENERATING_PATHS:
        return read_routing_fields(body)
    named = read_session_id(body)
    return RoutingFields(new_session=named) if path == OPEN_SESSION else RoutingFields(open_session=named)


def _request_headers(request: Request) -> dict[str, str]:
    """Return the headers for the engine, with the client's request id or a new one."""
    given = request.headers.get(_REQUEST_ID, "")
    is_valid = 0 < len(given) <= _MAX_ID_CHARACTERS and given.isascii() and given.isprintable()
    headers = _ascii_headers(request.headers, _REQUEST_HEADERS)
    return {"content-type": "application/json", **headers, _REQUEST_ID: given if is_valid else uuid4().hex}


def _ascii_headers(given: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return these headers, without those whose values HTTP clients and servers read in different ways."""
    return {name: given[name] for name in names if given.get(name, "\xff").isascii()}


def _response_headers(answer: httpx.Response, request_id: str, number: int) -> dict[str, str]:
    """Return the headers for the client."""
    headers = _ascii_headers(answer.headers, _RESPONSE_HEADERS)
    return {**headers, _REQUEST_ID: request_id, REPLICA_HEADER: str(number)}
