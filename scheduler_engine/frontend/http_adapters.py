"""Routes that load and unload LoRA adapters, with SGLang's and vLLM's paths and fields."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.responses import JSONResponse, Response

from scheduler_engine.engine.config import AdapterSpec
from scheduler_engine.frontend.adapter_directory import AdapterDirectory
from scheduler_engine.frontend.http_access import ApiRoute
from scheduler_engine.frontend.http_body import BodyReceiver, body_route
from scheduler_engine.frontend.weights_root import resolve_below

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class _LoadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: _Name
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    pinned: bool = False


class _UnloadAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: _Name
    lora_int_id: int | None = None  # vLLM's, without effect: the name is enough


def adapter_routes(
    directory: AdapterDirectory, bodies: BodyReceiver, *, has_files: bool, adapters_root: Path | None
) -> list[ApiRoute]:
    """Return the routes.

    Args:
        directory: loads and unloads.
        bodies: receives the bodies.
        has_files: the device reads the files of adapters; a simulated one does not.
        adapters_root: adapters are read from this directory only; None refuses them.
    """

    def answer() -> Response:
        loaded = {name: spec.path for name, spec in directory.adapters.items()}
        return JSONResponse({"success": True, "error_message": None, "loaded_adapters": loaded})

    async def load(given: _LoadAdapter) -> Response:
        """Load an adapter on all ranks, or on none. A relative path starts at the adapters' root."""
        path = given.lora_path
        if has_files:
            path = str(await asyncio.to_thread(resolve_below, adapters_root, path, field="lora_path"))
        await directory.load(AdapterSpec(name=given.lora_name, path=path, pinned=given.pinned))
        return answer()

    async def unload(given: _UnloadAdapter) -> Response:
        """Unload an adapter when no request uses it. New requests for it are refused immediately."""
        await directory.unload(given.lora_name)
        return answer()

    return [  # SGLang's and vLLM's paths
        *(body_route(f"{base}/load_lora_adapter", _LoadAdapter, load, bodies) for base in ("", "/v1")),
        *(body_route(f"{base}/unload_lora_adapter", _UnloadAdapter, unload, bodies) for base in ("", "/v1")),
    ]
