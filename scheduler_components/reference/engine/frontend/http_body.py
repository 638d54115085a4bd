"""One exchange over HTTP, whatever is asked: a bounded body, errors as answers, events, and a client that goes away."""

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
"""Room for a prompt of a million tokens; of a longer body no more than this is read."""

BODY_TIMEOUT_S = 30.0
"""The longest body at half a megabyte a second; who sends half a body and waits holds nothing for longer."""

_MAX_NAMED_FIELDS = 64  # names come from the network, so the log and the memory of them are bounded
_MAX_SHOWN_CHARACTERS = 64

_encode = msgspec.json.Encoder().encode


class BadBodyError(ComponentError):
    """The client's request is malformed; ``field`` is the path of what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class BodyTimeoutError(ComponentError):
    """The body was not whole in time."""


class BodyTooLargeError(ComponentError):
    """The body is longer than ``MAX_BODY_BYTES``."""


async def read_body(request: Request, deadline_s: float = BODY_TIMEOUT_S) -> bytes:
    """Read a body to its end.

    Raises:
        BodyTooLargeError, BodyTimeoutError: it is not read any further.
        ClientDisconnect: the client went away.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise BodyTooLargeError(f"body: is longer than {MAX_BODY_BYTES} bytes; send a shorter prompt")
    except TimeoutError:
        raise BodyTimeoutError(f"body: {len(body)} bytes came in {deadline_s:g} s, and not its end") from None
    return bytes(body)


T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class BodyReader(Generic[T]):
    """Reads the bodies of one route; a field that the route does not know is named once in the log, and left out.

    Attributes:
        kind: what a body is.
        route: for the log.
    """

    kind: type[T]
    route: str
    _named: set[str] = field(default_factory=set, repr=False)

    def read(self, text: bytes) -> T:
        """Raises BadBodyError, naming the field that is wrong."""
        try:
            body = msgspec.json.decode(text, type=self.kind)
            self._name_unknown(text, self.kind, "")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem, _, path = str(error).partition(" - at `$")
            raise BadBodyError(path.strip(".`") or "body", problem) from None
        return body

    def _name_unknown(self, text: bytes, kind: type[msgspec.Struct], path: str) -> None:
        """Also within objects that have fields of their own; values are not read a second time."""
        given = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        known = {each.encode_name: each.type for each in msgspec.structs.fields(kind)}
        for name, value in given.items():
            if bytes(memoryview(value)[:4]) == b"null":  # a client's word for its own default
                continue
            if name not in known:
                self._name((path + name)[:_MAX_SHOWN_CHARACTERS])
            elif bytes(memoryview(value)[:1]) == b"{":
                for inner in _structs_in(known[name]):
                    self._name_unknown(bytes(value), inner, f"{path}{name}.")

    def _name(self, name: str) -> None:
        if name in self._named or len(self._named) > _MAX_NAMED_FIELDS:
            return
        self._named.add(name)
        if len(self._named) > _MAX_NAMED_FIELDS:
            logger.warning("%s: further unknown fields are not named", self.route)
        else:
            logger.warning("%s: the field %r is unknown and has no effect", self.route, name)


def _structs_in(hint: Any) -> list[type[msgspec.Struct]]:
    """The structs that a field's type allows: itself, or those of a union."""
    return [each for each in get_args(hint) or (hint,) if isinstance(each, type) and issubclass(each, msgspec.Struct)]


def json_response(answer: Any) -> Response:
    """Answer with any value that msgspec can write as JSON."""
    return Response(_encode(answer), media_type="application/json")


def component_error_response(error: ComponentError) -> Response:
    """Answer with what went wrong, in the shape that OpenAI's clients read."""
    if isinstance(error, BadBodyError | ConfigError):
        return error_response(400, str(error), param=error.field)
    if isinstance(error, RequestRefusedError):
        return error_response(400, str(error))
    if isinstance(error, RequestFailedError):
        return error_response(500, str(error))
    if isinstance(error, BodyTooLargeError):
        return error_response(413, str(error))
    if isinstance(error, BodyTimeoutError):
        return error_response(408, str(error))  # and the server hangs up, as after any body that was not read whole
    return error_response(503, str(error))  # TooBusyError, RankSilentError, EngineFailedError


async def stream_response(answers: AsyncIterator[Any]) -> Response:
    """Answer with one event per answer, then ``[DONE]``. What fails before the first is answered with a status."""
    try:
        first = await anext(answers)
    except ComponentError as error:
        return component_error_response(error)
    headers = {"cache-control": "no-cache"}
    return StreamingResponse(_events(first, answers), media_type="text/event-stream", headers=headers)


async def _events(first: Any, answers: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """The lines of a stream that has begun with ``first``; what fails from here on is an event too."""
    yield _event(_encode(first))
    try:
        async for answer in answers:
            yield _event(_encode(answer))
    except ComponentError as error:
        yield _event(bytes(component_error_response(error).body))
    yield _event(b"[DONE]")


def _event(data: bytes) -> bytes:
    """One server-sent event; the JSON in it has no line breaks."""
    return b"data: " + data + b"\n\n"


async def run_until_disconnected(receive: Receive, work: Awaitable[None]) -> None:
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
