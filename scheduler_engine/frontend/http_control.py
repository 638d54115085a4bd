"""Routes of control requests: pause, continue, flush the cache, update weights, release and resume memory.

Paths and bodies are SGLang's where SGLang has the route. ``/update_weights`` replaces four of SGLang's five routes for
new tensors with one request that carries all of them; tensors of the simulated model are arbitrary bytes.
``/update_weights_from_disk`` is the fifth.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from observability import error_response
from scheduler_components.values import (
    ContinueGeneration,
    FlushCache,
    MemoryTag,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from scheduler_engine.device.model_spec import ModelSpec
from scheduler_engine.frontend.access import RouteAccess
from scheduler_engine.frontend.control_queue import ControlQueue
from scheduler_engine.frontend.http_access import ApiRoute
from scheduler_engine.frontend.http_body import TEXT, BodyReceiver, body_route, respond_with_errors
from scheduler_engine.frontend.weights_root import resolve_below

MAX_WEIGHT_BYTES = 64 * 2**20
"""Limit of a body with tensors. Those of a simulated model are small, and those of a real model are read from disk."""

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


@dataclass(slots=True, kw_only=True)
class _ControlRoutes:
    """The endpoints of control requests. The docstring of each describes its route.

    Attributes:
        control: executes them.
        model: the served model; None for a simulated one.
        weights_root: new weights are read from this directory only; None refuses them.
    """

    control: ControlQueue
    model: ModelSpec | None
    weights_root: Path | None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # the weights of a large model are in memory once

    async def pause(self, body: _Pause) -> Response:
        """Stop generation: abort all requests, move them back to the queue, or keep them in place."""
        num_requests = await self.control.pause(body.mode, body.timeout)
        return JSONResponse({"status": "ok", "message": "Generation paused.", "num_requests": num_requests})

    async def resume_generation(self, _: _Continue) -> Response:
        """Continue generation after a pause."""
        await self.control.send(ContinueGeneration())
        return JSONResponse({"status": "ok", "message": "Generation continued."})

    async def update(self, body: _Update) -> Response:
        """Load the tensors of the body on all ranks, or on none."""
        expected = None if body.checksum is None else int(body.checksum, 16)
        checksum = await self.control.update_weights(
            body.weight_version, body.parts, checksum=expected, deadline_s=body.timeout
        )
        version = self.control.weight_version
        return JSONResponse({"success": True, "weight_version": version, "checksum": f"{checksum:016x}"})

    async def update_from_disk(self, body: _UpdateFromDisk) -> Response:
        """Load a model below the weights root on all ranks, or on none. A relative path starts at the root."""
        if self.model is None:
            return error_response(400, "model_path: the simulated model has no files", param="model_path")
        path = await asyncio.to_thread(resolve_below, self.weights_root, body.model_path)
        # Imported here, so that an engine without a model starts without torch.
        from scheduler_engine.device.torch_weight_source import read_weights

        async with self._reading:
            parts = await asyncio.to_thread(read_weights, path, self.model)
            version = body.weight_version or parts.identity
            await self.control.update_weights(version, parts, deadline_s=body.timeout)
        return JSONResponse({"success": True, "message": "Weights updated.", "weight_version": version})

    async def release(self, body: _Release) -> Response:
        """Release memory of the ranks. An engine without memory is asleep."""
        tags = tuple(MemoryTag) if body.tags is None else body.tags
        await self.control.send(ReleaseMemory(tags, body.keep_weights, body.timeout))
        return PlainTextResponse("Memory released.\n")

    async def resume(self, body: _Resume) -> Response:
        """Take released memory back."""
        await self.control.send(ResumeMemory(tuple(MemoryTag) if body.tags is None else body.tags))
        return PlainTextResponse("Memory resumed.\n")

    async def flush(self, request: Request) -> Response:
        """Remove every cached prefix. An engine with requests refuses, or waits for its end up to ``timeout``."""
        try:
            query = msgspec.convert(dict(request.query_params), _Flush, strict=False)
        except msgspec.ValidationError as error:
            return error_response(400, str(error), param="timeout")
        await self.control.send(FlushCache(query.timeout))
        return PlainTextResponse("Cache flushed.\n")


def control_routes(
    control: ControlQueue, model: ModelSpec | None, bodies: BodyReceiver, *, weights_root: Path | None = None
) -> list[ApiRoute]:
    """Return the routes of all control requests.

    Args:
        control: executes them.
        model: the served model; None for a simulated one.
        bodies: receives the bodies.
        weights_root: new weights are read from this directory only; None refuses them.
    """
    on = _ControlRoutes(control=control, model=model, weights_root=weights_root)
    route = partial(body_route, bodies=bodies, is_lenient=True)
    by_any = ("GET", "POST")
    flush = ApiRoute(
        "/flush_cache",
        respond_with_errors(on.flush),
        methods=by_any,
        access=RouteAccess.ADMIN,
        query=_Flush,
        answers=[TEXT],
    )
    return [
        route("/pause_generation", _Pause, on.pause),
        route("/continue_generation", _Continue, on.resume_generation),
        flush,
        route("/update_weights", _Update, on.update, max_bytes=MAX_WEIGHT_BYTES),
        route("/update_weights_from_disk", _UpdateFromDisk, on.update_from_disk),
        route("/release_memory_occupation", _Release, on.release, methods=by_any, answer=TEXT),
        route("/resume_memory_occupation", _Resume, on.resume, methods=by_any, answer=TEXT),
    ]
