"""HTTP request bodies and responses of all routes: size limits, JSON, server-sent events, errors, disconnects."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from observability import error_response
from scheduler_components import ComponentError, ConfigError
from scheduler_engine.frontend.access import RouteAccess
from scheduler_engine.frontend.control_queue import ControlFailedError
from scheduler_engine.frontend.errors import (
    RequestFailedError,
    RequestRefusedError,
    RequestTimeoutError,
    TooBusyError,
)
from scheduler_engine.frontend.http_access import ApiRoute

logger = logging.getLogger(__name__)

JSON, TEXT = "application/json", "text/plain"
"""Media types of responses."""

MAX_CONTROL_BYTES = 64 * 2**10
"""Limit of a body without prompts and tensors."""

MAX_BODY_BYTES = 16 * 2**20
"""Limit of a body, enough for a prompt of a million tokens. The server stops reading a longer body."""

BODY_TIMEOUT_S = 30.0
"""Longest time to receive a body: the largest one at half a megabyte per second. Bounds clients that stop halfway."""

MAX_PENDING_BYTES = 96 * 2**20
"""Limit of all bodies in memory: one of the largest, and some long prompts."""

_FREE_BYTES = 64 * 2**10

_MAX_NAMED_FIELDS = 64  # clients choose the names, so the log and its memory are bounded
_MAX_SHOWN_CHARACTERS = 64

_encode = msgspec.json.Encoder().encode

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)


class BadBodyError(ComponentError):
    """The body is malformed. ``field`` is the path of the wrong value."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class BodyTimeoutError(ComponentError):
    """The body was not complete in time."""


class BodyTooLargeError(ComponentError):
    """The body is longer than the limit."""


@dataclass(slots=True, kw_only=True)
class BodyReceiver:
    """Receives the bodies of all routes of a server, each by a deadline, and bounds the memory of all together.

    Attributes:
        timeout_s: longest time until a body is complete.
        max_pending_bytes: limit for all bodies in memory. The first ``_FREE_BYTES`` of each do not count, so that small
            requests pass while large ones fill the memory.
    """

    timeout_s: float = BODY_TIMEOUT_S
    max_pending_bytes: int = MAX_PENDING_BYTES
    _pending_bytes: int = field(default=0, init=False)

    @asynccontextmanager
    async def receive(self, request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> AsyncIterator[bytearray]:
        """Receive a body and count its memory until the block is left.

        Args:
            request: the request.
            max_bytes: limit of the body's length.

        Raises:
            BodyTooLargeError: it is longer, or its Content-Length is.
            BodyTimeoutError: it was not complete in time.
            TooBusyError: the bodies of other requests fill the memory.
            ClientDisconnect: the client closed the connection.
        """
        body, counted = bytearray(), 0
        try:
            try:
                async with asyncio.timeout(self.timeout_s):
                    if _announced_bytes(request) > max_bytes:
                        raise _too_large(max_bytes)
                    async for chunk in request.stream():
                        body += chunk
                        if len(body) > max_bytes:
                            raise _too_large(max_bytes)
                        self._pending_bytes -= counted
                        counted = max(0, len(body) - _FREE_BYTES)
                        self._pending_bytes += counted
                        if self._pending_bytes > self.max_pending_bytes:
                            raise TooBusyError("body: the bodies of other requests fill the memory; try again later")
            except TimeoutError:
                message = f"body: is incomplete after {self.timeout_s:g} s ({len(body)} bytes)"
                raise BodyTimeoutError(message) from None
            yield body
        finally:
            self._pending_bytes -= counted


def _announced_bytes(request: Request) -> int:
    """Return the Content-Length; 0 for a chunked body. The server has checked that it is a number."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdecimal() else 0


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"body: is longer than {max_bytes} bytes; send a shorter one")


def respond_with_errors(respond: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint: an error of the kit becomes its response, and a disconnect ends the request silently."""

    @functools.wraps(respond)
    async def endpoint(request: Request) -> Response:
        try:
            return await respond(request)
        except ClientDisconnect:
            return Response(status_code=400)  # not sent: the client has gone
        except ComponentError as error:
            return component_error_response(error)

    return endpoint


def body_route(
    path: str,
    kind: type[StructT],
    execute: Callable[[StructT], Awaitable[Response]],
    bodies: BodyReceiver,
    *,
    methods: Sequence[str] = ("POST",),
    access: RouteAccess = RouteAccess.ADMIN,
    answer: str = JSON,
    max_bytes: int = MAX_CONTROL_BYTES,
    is_lenient: bool = False,
) -> ApiRoute:
    """Return a route that decodes a body to ``kind``, executes it, and responds to errors of both.

    Args:
        path, methods, access: as in ``ApiRoute``.
        kind: struct of the body.
        execute: responds. Its docstring describes the route.
        bodies: receives the body.
        answer: media type of the response.
        max_bytes: limit of the body's length.
        is_lenient: an empty body is ``{}``, and a number may be a string.
    """
    decode = msgspec.json.Decoder(kind, strict=not is_lenient).decode

    @functools.wraps(execute)
    async def endpoint(request: Request) -> Response:
        async with bodies.receive(request, max_bytes=max_bytes) as body:
            return await execute(decode_body(body or (b"{}" if is_lenient else b""), decode))

    return ApiRoute(path, respond_with_errors(endpoint), methods=methods, access=access, body=kind, answers=[answer])


def decode_body(body: bytes | bytearray, decode: Callable[[bytes | bytearray], T]) -> T:
    """Decode a JSON body. Raises BadBodyError, which names the wrong field."""
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem, _, path = str(error).partition(" - at `$")
        raise BadBodyError(path.strip(".`") or "body", problem) from None


@dataclass(slots=True)
class BodyReader(Generic[StructT]):
    """Decodes the bodies of one route. It ignores unknown fields and logs each of their names once.

    Attributes:
        kind: struct that a body decodes to.
        route: name of the route, for the log.
    """

    kind: type[StructT]
    route: str
    _named: set[str] = field(default_factory=set, repr=False)

    def read(self, text: bytes | bytearray) -> StructT:
        """Decode a body. Raises BadBodyError, which names the wrong field."""
        return decode_body(text, self._decode)

    def _decode(self, text: bytes | bytearray) -> StructT:
        body = msgspec.json.decode(text, type=self.kind)
        self._log_unknown(text, self.kind, "")
        return body

    def _log_unknown(self, text: bytes | bytearray, kind: type[msgspec.Struct], path: str) -> None:
        """Log unknown fields of an object and of the objects in it. Values are not decoded a second time."""
        given = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        known = {each.encode_name: each.type for each in msgspec.structs.fields(kind)}
        for name, value in given.items():
            if bytes(memoryview(value)[:4]) == b"null":  # clients send null for their own default
                continue
            if name not in known:
                self._log_field((path + name)[:_MAX_SHOWN_CHARACTERS])
            elif bytes(memoryview(value)[:1]) == b"{":
                for inner in _structs_in(known[name]):
                    self._log_unknown(bytes(value), inner, f"{path}{name}.")

    def _log_field(self, name: str) -> None:
        if name in self._named or len(self._named) > _MAX_NAMED_FIELDS:
            return
        self._named.add(name)
        if len(self._named) > _MAX_NAMED_FIELDS:
            logger.warning("%s: further unknown fields are not logged", self.route)
        else:
            logger.warning("%s: the field %r is unknown and has no effect", self.route, name)


def _structs_in(hint: Any) -> list[type[msgspec.Struct]]:
    """Return the structs that a field's type allows: the type itself, or the members of a union."""
    return [each for each in get_args(hint) or (hint,) if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def json_response(answer: Any) -> Response:
    """Make a response of any value that msgspec can encode as JSON."""
    return Response(_encode(answer), media_type="application/json")


def component_error_response(error: ComponentError) -> Response:
    """Make the response to an error, in the shape that OpenAI's clients read."""
    if isinstance(error, BadBodyError | ConfigError):
        return error_response(400, str(error), param=error.field)
    if isinstance(error, RequestRefusedError | ControlFailedError):
        return error_response(400, str(error))
    if isinstance(error, RequestFailedError):
        return error_response(500, str(error))
    if isinstance(error, RequestTimeoutError):
        return error_response(504, str(error))
    if isinstance(error, BodyTooLargeError):
        return error_response(413, str(error))
    if isinstance(error, BodyTimeoutError):
        return error_response(408, str(error))  # the server then closes the connection, as after any unread body
    return error_response(503, str(error))  # TooBusyError, RankSilentError, EngineFailedError


async def stream_response(answers: AsyncIterator[Any]) -> Response:
    """Respond with one event per answer, then ``[DONE]``. A failure before the first answer becomes a status code."""
    try:
        first = await anext(answers)
    except ComponentError as error:
        return component_error_response(error)
    headers = {"cache-control": "no-cache"}
    return StreamingResponse(_events(first, answers), media_type="text/event-stream", headers=headers)


async def _events(first: Any, answers: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """Yield the events of a stream whose first answer is ``first``. A later failure becomes an event."""
    yield _event(_encode(first))
    try:
        async for answer in answers:
            yield _event(_encode(answer))
    except ComponentError as error:
        yield _event(bytes(component_error_response(error).body))
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    """Format a server-sent event. JSON from msgspec has no line breaks."""
    return b"data: " + data + b"\n\n"


async def run_until_disconnected(receive: Receive, work: Awaitable[None]) -> None:
    """Await ``work``, and cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
