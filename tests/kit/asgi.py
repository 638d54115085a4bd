"""One request to an ASGI application, without a server."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx


def ask(app: Any, path: str, *, method: str = "POST", **request: Any) -> httpx.Response:
    """Return the response to one request. ``request`` is httpx's: ``json``, ``content``, ``headers``."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, **request)

    return asyncio.run(asyncio.wait_for(send(), timeout=30))
