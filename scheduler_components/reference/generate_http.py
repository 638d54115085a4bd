"""``POST /generate``: token ids in, tokens out, whole or as server-sent events.

Body and answer have the shape of SGLang's native API for token ids. What this engine does not do is refused by name
and not ignored. A streamed event carries the tokens that are new since the one before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from observability.http_app import error_response
from scheduler_components.errors import ComponentError, ConfigError
from scheduler_components.finish import FinishReason
from scheduler_components.output.delta import OutputDelta
from scheduler_components.reference.front import (
    Front,
    GenerateRequest,
    OpenRequest,
    RequestFailedError,
    RequestRefusedError,
)
from scheduler_components.reference.messages import pack_tokens
from scheduler_components.reference.request import SamplingLimits

__all__ = ["MAX_BODY_BYTES", "BadBodyError", "BodyTooLongError", "GenerateEndpoint", "parse_body"]

MAX_BODY_BYTES = 16 * 2**20
"""Room for a prompt of a million tokens; of a longer body no more than this is read."""

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
    """A request that is not one: the client is to blame. ``field`` is the path of what is wrong with it."""

    def __init__(self, field: str, problem: str) -> None:
        self.field = field
        self.problem = problem
        super().__init__(f"{field}: {problem}")


class BodyTooLongError(ComponentError):
    """The body passes ``MAX_BODY_BYTES``."""


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
    """The ASGI application behind the route; a client that goes away aborts its request."""

    front: Front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST."""
        try:
            request, stream = parse_body(await _read_body(Request(scope, receive)))
            opened = self.front.open_request(request)
        except ClientDisconnect:
            return
        except ComponentError as error:
            await _error_response(error)(scope, receive, send)
            return
        async with opened as news:
            answer = _stream_answer if stream else _whole_answer
            await _unless_disconnected(receive, answer(news, scope, receive, send))


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLongError(f"body: is longer than {MAX_BODY_BYTES} bytes; send a shorter prompt")
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
    """Send one event an output, then ``[DONE]``. What fails before the first token is answered with a status."""
    try:
        first = await anext(news)
    except ComponentError as error:
        await _error_response(error)(scope, receive, send)
        return
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _send_event(send, _encode(_answer(first, first.output.token_ids)))
    try:
        async for delta in news:
            await _send_event(send, _encode(_answer(delta, delta.output.token_ids)))
    except ComponentError as error:
        await _send_event(send, bytes(_error_response(error).body))
    await _send_event(send, b"[DONE]")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


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
    return error_response(503, str(error))  # TooBusyError, EngineFailedError
