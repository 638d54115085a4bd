"""HTTP request bodies and responses of all routes: size limits, JSON, server-sent events, errors, disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from observability import error_response
from scheduler_components import ComponentError, ConfigError
from scheduler_components.reference.engine.frontend.errors import RequestFailedError, RequestRefusedError

__all__ = [
    "BODY_TIMEOUT_S",
    "MAX_BODY_BYTES",
    "BadBodyError",
    "BodyReader",
    "BodyTimeoutError",
    "BodyTooLargeError",
    "component_error_response",
    "json_response",
    "read_body",
    "stream_response",
    "run_until_disconnected",
]

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
"""Limit of a body, enough for a prompt of a million tokens. The server stops reading a longer body."""

BODY_TIMEOUT_S = 30.0
"""Longest time to receive a body: the largest one at half a megabyte per second. Bounds clients that stop halfway."""

_MAX_NAMED_FIELDS = 64  # clients choose the names, so the log and its memory are bounded
_MAX_SHOWN_CHARACTERS = 64

_encode = msgspec.json.Encoder().encode


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


async def read_body(
    request: Request, timeout_s: float | None = BODY_TIMEOUT_S, *, max_bytes: int = MAX_BODY_BYTES
) -> bytes:
    """Read a body to its end.

    Args:
        request: the request.
        timeout_s: longest time until the body is complete; None for no limit.
        max_bytes: limit of its length.

    Raises:
        BodyTooLargeError, BodyTimeoutError: reading stopped at the limit.
        ClientDisconnect: the client closed the connection.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise BodyTooLargeError(f"body: is longer than {max_bytes} bytes; send a shorter one")
    except TimeoutError:
        raise BodyTimeoutError(f"body: is incomplete after {timeout_s:g} s ({len(body)} bytes)") from None
    return bytes(body)


T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class BodyReader(Generic[T]):
    """Decodes the bodies of one route. It ignores unknown fields and logs each of their names once.

    Attributes:
        kind: struct that a body decodes to.
        route: name of the route, for the log.
    """

    kind: type[T]
    route: str
    _named: set[str] = field(default_factory=set, repr=False)

    def read(self, text: bytes) -> T:
        """Decode a body. Raises BadBodyError, which names the wrong field."""
        try:
            body = msgspec.json.decode(text, type=self.kind)
            self._log_unknown(text, self.kind, "")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem, _, path = str(error).partition(" - at `$")
            raise BadBodyError(path.strip(".`") or "body", problem) from None
        return body

    def _log_unknown(self, text: bytes, kind: type[msgspec.Struct], path: str) -> None:
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
    if isinstance(error, RequestRefusedError):
        return error_response(400, str(error))
    if isinstance(error, RequestFailedError):
        return error_response(500, str(error))
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
