"""An engine for the tests of HTTP status routes, and a client of its app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from observability import status_routes
from scheduler_components.values import LoadSnapshot

NOW = 1_700_000_000.0


class StatusEngine:
    def __init__(self, *loads: LoadSnapshot) -> None:
        self.loads = loads
        self.problem: str | None = None

    def health_problem(self) -> str | None:
        return self.problem

    def server_info(self) -> Mapping[str, Any]:
        return {"version": "1", "kv_events": None}

    def model_info(self) -> Mapping[str, Any]:
        return {"model_path": "simulated", "served_model_name": "tiny"}

    def load_snapshots(self) -> Sequence[LoadSnapshot]:
        return self.loads


def make_load(dp_rank: int, **fields: Any) -> LoadSnapshot:
    return LoadSnapshot(sequence=5, timestamp=NOW - 1.5, dp_rank=dp_rank, **fields)


def ask(
    path: str,
    engine: StatusEngine | None = None,
    method: str = "GET",
    registry: CollectorRegistry | None = None,
    readiness: Callable[[], str | None] | None = None,
    **headers: str,
) -> httpx.Response:
    routes = status_routes(
        engine or StatusEngine(), registry=registry or CollectorRegistry(), clock=lambda: NOW, readiness=readiness
    )

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(Starlette(routes=routes), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(request())
