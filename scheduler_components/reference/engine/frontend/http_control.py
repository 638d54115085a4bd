"""Orders over HTTP: pause, continue, flush, new weights, memory. Paths and bodies are SGLang's where it has them.

``/update_weights`` is a whole session in one request, in the place of four of SGLang's five ways to bring tensors:
parts of the simulated model are any bytes. ``/update_weights_from_disk`` is the fifth.
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
from scheduler_components.control_requests import (
    ContinueGeneration,
    FlushCache,
    MemoryTag,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from scheduler_components.reference.device.model_spec import ModelSpec
from scheduler_components.reference.engine.frontend.control_queue import ControlFailedError, ControlQueue

__all__ = ["MAX_CONTROL_BYTES", "control_routes"]

MAX_CONTROL_BYTES = 64 * 2**20
"""Weights of a simulated model are small; those of a real one come from its files, save some tensors."""

_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]


class _Pause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: PauseMode = PauseMode.ABORT
    timeout: _Seconds = 30.0


class _Continue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    torch_empty_cache: bool = True  # SGLang's; a simulated device has none


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


def _taking(kind: type[Body], carry_out: Callable[[Body], Awaitable[Response]]) -> _Endpoint:
    """Make the endpoint that reads a body, and answers what is wrong with it or with the order."""
    decode = msgspec.json.Decoder(kind, strict=False).decode

    async def endpoint(request: Request) -> Response:
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > MAX_CONTROL_BYTES:
                return error_response(413, f"body: is longer than {MAX_CONTROL_BYTES} bytes")
        try:
            body = decode(bytes(content) or b"{}")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_response(400, str(error))
        return await _answered(carry_out(body))

    return endpoint


async def _answered(work: Awaitable[Response]) -> Response:
    try:
        return await work
    except (ControlFailedError, ConfigError) as error:
        return error_response(400, str(error))
    except ComponentError as error:  # the engine failed, or a rank is silent
        return error_response(503, str(error))


def control_routes(control: ControlQueue, model: ModelSpec | None) -> list[Route]:
    """Return the routes of all control requests; ``model`` is the served one, None for a simulated model."""

    async def pause(body: _Pause) -> Response:
        num_requests = await control.pause(body.mode, body.timeout)
        return JSONResponse({"status": "ok", "message": "Generation paused.", "num_requests": num_requests})

    async def go_on(_: _Continue) -> Response:
        await control.send(ContinueGeneration())
        return JSONResponse({"status": "ok", "message": "Generation continued."})

    async def update(body: _Update) -> Response:
        wanted = None if body.checksum is None else int(body.checksum, 16)
        checksum = await control.update_weights(
            body.weight_version, body.parts, checksum=wanted, deadline_s=body.timeout
        )
        told = {"success": True, "weight_version": control.weight_version, "checksum": f"{checksum:016x}"}
        return JSONResponse(told)

    async def update_from_disk(body: _UpdateFromDisk) -> Response:
        if model is None:
            return error_response(400, "model_path: the simulated model has no files", param="model_path")
        # Imported here: an engine without a model starts without torch.
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
        async def carry_out() -> Response:
            await control.send(FlushCache(asked.timeout))
            return PlainTextResponse("Cache flushed.\n")

        try:
            asked = msgspec.convert(dict(request.query_params), _Flush, strict=False)
        except msgspec.ValidationError as error:
            return error_response(400, str(error), param="timeout")
        return await _answered(carry_out())

    return [
        Route("/pause_generation", _taking(_Pause, pause), methods=["POST"]),
        Route("/continue_generation", _taking(_Continue, go_on), methods=["POST"]),
        Route("/flush_cache", flush, methods=["GET", "POST"]),
        Route("/update_weights", _taking(_Update, update), methods=["POST"]),
        Route("/update_weights_from_disk", _taking(_UpdateFromDisk, update_from_disk), methods=["POST"]),
        Route("/release_memory_occupation", _taking(_Release, release), methods=["GET", "POST"]),
        Route("/resume_memory_occupation", _taking(_Resume, resume), methods=["GET", "POST"]),
    ]
