"""Serve routes on a free port, and fetch a KV pool from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from observability import fetch_kv_pool
from scheduler_components.events import medium_group
from scheduler_components.values import KvPoolSnapshot
from scheduler_engine.frontend.http_server import bind_http, open_http_server

GPU, CPU = medium_group(None), ("CPU", 1)


@asynccontextmanager
async def serving(*routes: Route) -> AsyncIterator[str]:
    with bind_http("127.0.0.1", 0) as listener:
        async with open_http_server(Starlette(routes=list(routes)), listener) as opened:
            yield opened.url


def run(scenario: Callable[[str], Awaitable[Any]], *routes: Route) -> Any:
    async def whole() -> Any:
        async with serving(*routes) as url:
            return await scenario(url)

    return asyncio.run(asyncio.wait_for(whole(), timeout=60))


def fetched(*routes: Route, rank: int = 0) -> KvPoolSnapshot:
    async def fetch(url: str) -> KvPoolSnapshot:
        return await asyncio.to_thread(fetch_kv_pool, url, rank)

    found: KvPoolSnapshot = run(fetch, *routes)
    return found


def page(**fields: object) -> dict[str, object]:
    place = {"medium": "GPU", "group_idx": None, "num_blocks": 1}
    return {
        "reading": "r",
        "rank": 0,
        "sequence": 3,
        "page": 0,
        "num_pages": 1,
        "places": [place],
        "hashes": [1],
    } | fields
