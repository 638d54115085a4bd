"""Routes of control requests: pause, continue, flush the cache, update weights, release and resume memory.

Paths and bodies are SGLang's where SGLang has the route. ``/update_weights`` replaces four of SGLang's five routes for
new tensors with one request that carries all of them; tensors of the simulated model are arbitrary bytes.
``/update_weights_from_disk`` is the fifth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from observability import error_response
from scheduler_components import ComponentError, ConfigError
from scheduler_components.reference.device.model_spec import ModelSpec
from scheduler_components.reference.engine.frontend.control_queue import ControlFailedError, ControlQueue
from scheduler_components.reference.engine.frontend.http_body import BodyTooLargeError, read_body
from scheduler_components.values import (
    ContinueGeneration,
    FlushCache,
    MemoryTag,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)

__all__ = ["MAX_CONTROL_BYTES", "control_routes"]

MAX_CONTROL_BYTES = 64 * 2**20
"""Limit of a body. Weights of a simulated model are small, and those of a real model are read from disk."""

_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]


class _Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: PauseMode = PauseMode.ABORT
    timeout: _Seconds = 30.0


class _Continue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    torch_empty_cache: bool = True  # SGLang's option, without effect here


class _Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weight_version: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    parts: Annotated[dict[str, bytes], msgspec.Meta(min_length=1)]
    checksum: Annotated[str, msgspec.Meta(pattern="^[0-7][0-9a-f]{15}$")] | None = None
    timeout: _Seconds = 0.0


class _UpdateFromDisk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    weight_version: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    timeout: _Seconds = 30.0


class _Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tags: tuple[MemoryTag, ...] | None = None
    keep_weights: bool = True
    timeout: _Seconds = 0.0


class _Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tags: tuple[MemoryTag, ...] | None = None


class _Flush(msgspec.Struct, frozen=True):
    timeout: _Seconds = 0.0


Body = TypeVar("Body", bound=msgspec.Struct)
_Endpoint = Callable[[Request], Awaitable[Response]]


def _endpoint(kind: type[Body], execute: Callable[[Body], Awaitable[Response]]) -> _Endpoint:
    """Make an endpoint that decodes a body, executes the request, and responds to errors of both."""
    decode = msgspec.json.Decoder(kind, strict=False).decode

    async def endpoint(request: Request) -> Response:
        try:
            body = decode(await read_body(request, None, max_bytes=MAX_CONTROL_BYTES) or b"{}")
        except BodyTooLargeError as error:
            return error_response(413, str(error))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_response(400, str(error))
        return await _respond(execute(body))

    return endpoint


async def _respond(work: Awaitable[Response]) -> Response:
    try:
        return await work
    except (ControlFailedError, ConfigError) as error:
        return error_response(400, str(error))
    except ComponentError as error:  # the engine has failed, or a rank is silent
        return error_response(503, str(error))


def control_routes(control: ControlQueue, model: ModelSpec | None) -> list[Route]:
    """Return the routes of all control requests; ``model`` is the served one, None for a simulated model."""

    async def pause(body: _Pause) -> Response:
        num_requests = await control.pause(body.mode, body.timeout)
        return JSONResponse({"status": "ok", "message": "Generation paused.", "num_requests": num_requests})

    async def continue_(_: _Continue) -> Response:
        await control.send(ContinueGeneration())
        return JSONResponse({"status": "ok", "message": "Generation continued."})

    async def update(body: _Update) -> Response:
        expected = None if body.checksum is None else int(body.checksum, 16)
        checksum = await control.update_weights(
            body.weight_version, body.parts, checksum=expected, deadline_s=body.timeout
        )
        return JSONResponse({"success": True, "weight_version": control.weight_version, "checksum": f"{checksum:016x}"})

    async def update_from_disk(body: _UpdateFromDisk) -> Response:
        if model is None:
            return error_response(400, "model_path: the simulated model has no files", param="model_path")
        # Imported here, so that an engine without a model starts without torch.
        from scheduler_components.reference.device.torch_weight_source import read_weights

        parts = await asyncio.to_thread(read_weights, body.model_path, model)
        version = body.weight_version or parts.identity
        await control.update_weights(version, parts, deadline_s=body.timeout)
        return JSONResponse({"success": True, "message": "Weights updated.", "weight_version": version})

    async def release(body: _Release) -> Response:
        tags = tuple(MemoryTag) if body.tags is None else body.tags
        await control.send(ReleaseMemory(tags, body.keep_weights, body.timeout))
        return PlainTextResponse("Memory released.\n")

    async def resume(body: _Resume) -> Response:
        await control.send(ResumeMemory(tuple(MemoryTag) if body.tags is None else body.tags))
        return PlainTextResponse("Memory resumed.\n")

    async def flush(request: Request) -> Response:
        async def execute() -> Response:
            await control.send(FlushCache(query.timeout))
            return PlainTextResponse("Cache flushed.\n")

        try:
            query = msgspec.convert(dict(request.query_params), _Flush, strict=False)
        except msgspec.ValidationError as error:
            return error_response(400, str(error), param="timeout")
        return await _respond(execute())

    return [
        Route("/pause_generation", _endpoint(_Pause, pause), methods=["POST"]),
        Route("/continue_generation", _endpoint(_Continue, continue_), methods=["POST"]),
        Route("/flush_cache", flush, methods=["GET", "POST"]),
        Route("/update_weights", _endpoint(_Update, update), methods=["POST"]),
        Route("/update_weights_from_disk", _endpoint(_UpdateFromDisk, update_from_disk), methods=["POST"]),
        Route("/release_memory_occupation", _endpoint(_Release, release), methods=["GET", "POST"]),
        Route("/resume_memory_occupation", _endpoint(_Resume, resume), methods=["GET", "POST"]),
    ]
